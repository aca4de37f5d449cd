"""Runs targets with one of two drivers: hypothesis, which shrinks findings, or atheris, which is guided by code
coverage.

Theory of operation. Both change valid inputs by the target's own `mutate`. hypothesis supplies the random choices, so
that a failing input is made small by choosing less. atheris (libFuzzer) keeps every input that reached a new branch,
and changes those further; what C does to a process (a crash, an endless loop) it reports too, so it runs in one of its
own. A finding is written to a file, which `--replay` reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos_lightning.errors import ConfigurationError
from lab.fuzz.control import CONTROL
from lab.fuzz.links import LINKS
from lab.fuzz.messages import MESSAGES
from lab.fuzz.outer import OUTER
from lab.fuzz.pipelines import PIPELINES
from lab.fuzz.readers import READERS
from lab.fuzz.target import Target, guarded
from lab.fuzz.transfers import TRANSFERS

TARGETS = {target.name: target for target in (*MESSAGES, *READERS, *LINKS, *TRANSFERS, *CONTROL, *OUTER, *PIPELINES)}
_BATCH = 200
MEMORY_MIB = 1024
"""MiB that a process may take beyond what it has when it begins; the largest message of this product has 64 MiB."""


@dataclass
class Outcome:
    """Outcome of one target under one driver."""

    target: str
    driver: str
    runs: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    def line(self) -> str:
        rate = self.runs / self.seconds if self.seconds else 0.0
        found = f"{len(self.findings)} findings" if self.findings else "nothing found"
        return f"{self.target:10} {self.driver:10} {self.runs:8} inputs {rate:8.0f} per s  {found}"


def saved(folder: Path, target: Target, data: bytes) -> Path:
    """Writes an input to a file of its own; returns the path."""
    place = folder / target.name
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"finding-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    return path


def replay(path: Path, target: Target) -> None:
    """Runs the target on a saved input; raises what it finds."""
    warm(target)
    guarded(target, path.read_bytes())


def warm(target: Target) -> None:
    """Runs a target on its seeds once, so that imports and caches do not count as an input's memory."""
    for seed in target.seeds():
        target.run(seed)


def told(error: BaseException) -> str:
    """Returns an error and the places that raised it, in one line."""
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
    return f"{type(error).__name__}: {str(error)[:300]} ({' > '.join(places)})"


# ------------------------------------------------------------------ hypothesis


def with_hypothesis(target: Target, seconds: float, folder: Path, *, examples: int = 0) -> Outcome:
    """Runs a target under hypothesis for a time or a number of examples; shrinks the first finding and ends."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    warm(target)
    seeds = target.seeds()
    outcome = Outcome(target.name, "hypothesis")
    began = time.monotonic()
    last = b""

    @settings(
        max_examples=examples or _BATCH,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        derandomize=bool(examples),
        print_blob=False,
    )
    @given(st.sampled_from(range(len(seeds))), st.integers(0, 4), st.randoms(use_true_random=False))
    def once(seed: int, changes: int, rng: Random) -> None:
        nonlocal last
        last = seeds[seed]
        for _ in range(changes):
            last = target.mutate(last, rng)
        outcome.runs += 1
        guarded(target, last)

    try:
        while True:
            once()
            if examples or time.monotonic() - began >= seconds:
                break
    except Exception as error:
        outcome.findings.append(f"{saved(folder, target, last)}: {told(error)}")
    outcome.seconds = time.monotonic() - began
    return outcome


# ------------------------------------------------------------------ atheris


def atheris_missing() -> str:
    """Returns why atheris cannot be used; "" if it can."""
    if importlib.util.find_spec("atheris") is None:
        return "atheris is not installed (extra: fuzz; there are wheels for Python 3.11 to 3.13 on Linux)"
    return ""


def with_atheris(target: Target, seconds: float, folder: Path, *, memory_mib: int = MEMORY_MIB) -> Outcome:
    """Runs a target under atheris for a time, in a child process; ends at the first finding.

    Raises:
        ConfigurationError: atheris is not installed.
    """
    missing = atheris_missing()
    if missing:
        raise ConfigurationError(missing)
    place = folder / target.name
    corpus = place / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / f"seed-{hashlib.sha256(seed).hexdigest()[:16]}").write_bytes(seed)
    before = set(place.glob("finding-*"))
    command = [
        *(sys.executable, "-m", "lab.fuzz.child", target.name, str(corpus)),
        *(f"-max_total_time={max(1, round(seconds))}", "-timeout=30", f"-rss_limit_mb={memory_mib + 1024}"),
        *(f"-artifact_prefix={place}/finding-", "-print_final_stats=1", "-max_len=65536"),
    ]
    began = time.monotonic()
    environment = os.environ | {"CHAOS_FUZZ_MEMORY_MIB": str(memory_mib)}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    outcome = Outcome(target.name, "atheris", seconds=time.monotonic() - began)
    for line in done.stderr.splitlines():
        if "number_of_executed_units" in line:
            with contextlib.suppress(ValueError):
                outcome.runs = int(line.rpartition(":")[2])
    words = next((line.strip() for line in reversed(done.stdout.splitlines()) if "Error" in line), "")
    new = sorted(set(place.glob("finding-*")) - before)
    outcome.findings += [f"{path}: {words}" for path in new]
    if done.returncode and not new:
        outcome.findings.append(f"atheris ended with {done.returncode}: {done.stderr[-500:]}")
    return outcome
