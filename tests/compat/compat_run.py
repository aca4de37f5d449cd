"""Runs Lightning's own tests with `chaos` and reports the outcome of each: `make compat LIGHTNING=FOLDER`.

Theory of operation. FOLDER is a checkout of Lightning, or the folder of its tests (the one with `tests_pytorch/`). The
tests are dealt out to several processes, each in a copy of the folder, since some tests look for files that others
leave behind. `compat_plugin.py` gives `Trainer()` without a strategy a `ChaosStrategy`. A process that dies is started
anew behind the test that it died of. What failed runs again with Trainers as they are: what then fails as well is no
difference of ours. The others are *refused by name*, if the product's own refusal was raised, or must be explained in
`reasons.toml`, which people write and review: a test that is neither makes the run fail. So does an explanation
whose error no longer fits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCUMENT = ROOT / "docs" / "compat.md"
BEGIN, END = "<!-- {}: begin, written by {} -->", "<!-- {}: end -->"
TESTS_MARK, COMMAND = "tests", "make compat"
SELECTED = "not spawn and not fork"
TIMEOUT_S = 45
SHARD_TIMEOUT_S = 7200.0
REFUSAL = "UnsupportedError"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Explanation of why some tests fail with `chaos`: an entry of `reasons.toml`.

    Attributes:
        kind: "inapplicable": the test is about something that a job of chaos does not have; "different": it shows a
            difference, which is meant.
        tests: Ends of node ids, without parameters, or with.
        error: Regular expression that what was raised, or the report, must contain.
        why: Explanation in words, for the document.
    """

    kind: str
    tests: tuple[str, ...]
    error: str
    why: str

    def fits(self, line: dict[str, Any]) -> bool:
        node = line["test"]
        named = any(node.endswith(test) or node.partition("[")[0].endswith(test) for test in self.tests)
        return named and re.search(self.error, "\n".join(line["errors"]) + line["report"]) is not None


def read_reasons(path: Path) -> list[Reason]:
    """Reads all entries of `reasons.toml`; raises AssertionError with an invalid one."""
    entries = tomllib.loads(path.read_text()).get("reason", [])
    reasons = [Reason(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    for reason in reasons:
        assert reason.kind in ("inapplicable", "different"), reason
        assert reason.why, reason
    return reasons


# --------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Runs:
    """Runs pytest on copies of Lightning's tests.

    Args:
        tests: The folder that holds `tests_pytorch/`.
        scratch: Copies and results go here.
        arguments: Further ones for pytest.
    """

    tests: Path
    scratch: Path
    arguments: tuple[str, ...] = ()

    def copy(self, name: str) -> Path:
        """Copies the folder of tests at the first call with this name; returns the copy."""
        place = self.scratch / name
        if not place.exists():
            ignored = shutil.ignore_patterns("__pycache__", ".git", "*.ckpt")
            shutil.copytree(self.tests, place, ignore=ignored)
            settings = self.tests.parent / "pyproject.toml"
            if not (place / "pyproject.toml").exists() and settings.exists():
                shutil.copy(settings, place)
            subprocess.run(["chmod", "-R", "u+w", str(place)], check=True)
        return place

    def pytest(self, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "compat_plugin", "-p", "no:cacheprovider", "-q"),
            *("-k", SELECTED, f"--timeout={TIMEOUT_S}", "--continue-on-collection-errors", "--tb=short"),
            *(f"--basetemp={place}.tmp", *arguments, *self.arguments),
        ]
        paths = [str(place), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        return subprocess.run(
            [*command, "tests_pytorch"], cwd=place, env=environment, capture_output=True, text=True,
            timeout=SHARD_TIMEOUT_S, check=False,
        )  # fmt: skip

    def collect(self) -> tuple[list[str], list[str]]:
        """Returns the ids of all tests, and the modules that pytest could not collect."""
        done = self.pytest(self.copy("0"), "--collect-only")
        lines = done.stdout.splitlines()
        ids = [line for line in lines if "::" in line and not line.startswith((" ", "ERROR", "E "))]
        broken = [line.removeprefix("ERROR ").split(" - ")[0] for line in lines if line.startswith("ERROR tests")]
        if not ids:
            raise SystemExit(f"no tests were found in {self.tests}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return ids, broken

    def shard(self, number: int, ids: Sequence[str], *, plain: bool) -> list[dict[str, Any]]:
        """Runs the given tests in one process, with a new process after each test that kills it; returns their
        outcomes.
        """
        place = self.copy(str(number))
        results: dict[str, dict[str, Any]] = {}
        left = list(ids)
        while left:
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                only, out = Path(folder, "only"), Path(folder, "out")
                only.write_text("\n".join(left))
                out.touch()
                done = self.pytest(
                    place, f"--compat-only={only}", f"--compat-out={out}", *(["--compat-plain"] if plain else [])
                )
                lines = [json.loads(line) for line in out.read_text().splitlines()]
            for line in lines:
                results[line["test"]] = line
            if not lines:
                raise SystemExit(f"pytest ran none of {len(left)} tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            if lines[-1]["outcome"] == "started":
                last = lines[-1]["test"]
                words = f"the process ended with {done.returncode}: {done.stderr[-500:]}"
                results[last] = {**failed(last), "errors": [words], "report": done.stdout[-2000:]}
            left = [node for node in left if node not in results]
        return list(results.values())

    def all(self, ids: Sequence[str], jobs: int, *, plain: bool = False) -> dict[str, dict[str, Any]]:
        """Runs all given tests in `jobs` processes; returns the outcome of each by its id."""
        with ThreadPoolExecutor(jobs) as pool:
            shards = pool.map(lambda n: self.shard(n, ids[n::jobs], plain=plain), range(min(jobs, len(ids))))
            return {line["test"]: line for shard in shards for line in shard}


def failed(node: str) -> dict[str, Any]:
    """Returns the outcome recorded for a test that killed its process."""
    return {"test": node, "outcome": "failed", "built": 1, "phase": "call", "ours": [], "errors": [], "report": ""}


# --------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on those tests that build a Trainer with chaos.

    Attributes:
        passed: Number of tests that passed.
        skipped: Number of tests that skipped themselves, without a device or a package that they need, or that are
            expected to fail.
        refused: Outcomes of tests of refused features, by the refusal's words.
        plain: Outcomes of tests that fail with Lightning's own strategy as well.
        explained: Outcomes of failed tests with a known reason, by reason.
        unexplained: Outcomes of all other failed tests.
    """

    passed: int
    skipped: int
    refused: dict[str, list[dict[str, Any]]]
    plain: list[dict[str, Any]]
    explained: dict[Reason, list[dict[str, Any]]]
    unexplained: list[dict[str, Any]]

    @property
    def built(self) -> int:
        found = [self.plain, self.unexplained, *self.refused.values(), *self.explained.values()]
        return self.passed + self.skipped + sum(len(lines) for lines in found)


def refusal_of(line: dict[str, Any]) -> str:
    """Returns the text of chaos-lightning's refusal of a feature that a test used; "" if there was none."""
    if REFUSAL not in line["ours"]:
        return ""
    words = next(e.split(": ", 1)[1] for e in line["errors"] if f".{REFUSAL}: " in e)
    first = [text for text in words.splitlines() if text.startswith("- ")] or words.splitlines()[:1]
    return " ".join(text.removeprefix("- ") for text in first)


def judge(chaos: Iterable[dict[str, Any]], plain: dict[str, dict[str, Any]], reasons: Sequence[Reason]) -> Verdicts:
    """Sorts the outcomes by verdict: passed, skipped, refused, failing without chaos too, explained, unexplained."""
    verdicts = Verdicts(
        passed=sum(line["outcome"] == "passed" for line in chaos),
        skipped=sum(line["outcome"] in ("skipped", "xfailed") for line in chaos),
        refused=defaultdict(list), plain=[], explained=defaultdict(list), unexplained=[],
    )  # fmt: skip
    for line in chaos:
        if line["outcome"] != "failed":
            continue
        if words := refusal_of(line):
            verdicts.refused[words].append(line)
        elif plain.get(line["test"], {}).get("outcome") == "failed":
            verdicts.plain.append(line)
        elif reason := next((r for r in reasons if r.fits(line)), None):
            verdicts.explained[reason].append(line)
        else:
            verdicts.unexplained.append(line)
    return verdicts


# --------------------------------------------------------------------------------------------------------- telling


def names(lines: Iterable[dict[str, Any]]) -> str:
    """Returns names of tests as text, each parametrized test once with its number of cases."""
    counts = Counter(line["test"].partition("[")[0].removeprefix("tests_pytorch/") for line in lines)
    return "<br>".join(f"`{name}`" + (f" ({count})" if count > 1 else "") for name, count in sorted(counts.items()))


def one_line(text: str, longest: int = 400) -> str:
    """Returns a text as one line for a table's cell, shortened if it is long."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= longest else text[: longest - 3] + "..."


def described(verdicts: Verdicts, broken: Sequence[str], total: int) -> str:
    """Returns the document's section about Lightning's tests, as Markdown."""
    v = verdicts
    count = {kind: sum(len(lines) for r, lines in v.explained.items() if r.kind == kind)
             for kind in ("inapplicable", "different")}  # fmt: skip
    refused = sum(len(lines) for lines in v.refused.values())
    out = [
        f"Lightning {version('lightning')}, torch {version('torch').partition('+')[0]}; "
        f"{total} tests were selected (`-k \"{SELECTED}\"`), {v.built} of them build a Trainer with `chaos`.",
        "",
        "| became | tests |", "|---|---|",
        f"| passed | {v.passed} |",
        f"| skipped by the test itself (a device or a package that is not here) | {v.skipped} |",
        f"| refused by name | {refused} |",
        f"| fails with Lightning's own strategy as well, here | {len(v.plain)} |",
        f"| does not apply | {count['inapplicable']} |",
        f"| differs, and is meant to | {count['different']} |",
        f"| differs, unexplained | {len(v.unexplained)} |",
        "",
    ]  # fmt: skip
    out += table("Refused by name", "what the user is told", sorted(v.refused.items(), key=lambda i: -len(i[1])))
    for kind, title in (("inapplicable", "Does not apply"), ("different", "Differs, and is meant to")):
        chosen = [(r.why, lines) for r, lines in v.explained.items() if r.kind == kind]
        out += table(title, "why", sorted(chosen, key=lambda i: -len(i[1])))
    by_error: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in v.unexplained:
        by_error[line["errors"][0] if line["errors"] else "?"].append(line)
    out += table("Differs, unexplained", "error", sorted(by_error.items(), key=lambda i: -len(i[1])))
    of_plain: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in v.plain:
        of_plain[line["errors"][0] if line["errors"] else "?"].append(line)
    out += table("Fails with Lightning's own strategy as well", "error", sorted(of_plain.items()))
    if broken:
        out += ["Not collected, since they import what is not there: " + ", ".join(f"`{b}`" for b in broken) + ".", ""]
    return "\n".join(out)


def table(title: str, head: str, rows: Iterable[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """Returns a heading and a table as Markdown lines; no lines if there are no rows."""
    rows = list(rows)
    if not rows:
        return []
    return [
        f"### {title}", "", f"| {head} | tests |", "|---|---|",
        *(f"| {one_line(words)} | {names(lines)} |" for words, lines in rows), "",
    ]  # fmt: skip


def put(text: str, mark: str, command: str, document: Path = DOCUMENT) -> None:
    """Replaces the document's text between the two marks of a section."""
    begin, end = BEGIN.format(mark, command), END.format(mark)
    before, found, rest = document.read_text().partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{document} has no part from {begin!r} to {end!r}")
    document.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="a checkout of Lightning, or the folder with tests_pytorch/")
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the tests")
    parser.add_argument("--reasons", type=Path, default=HERE / "reasons.toml")
    parser.add_argument("--results", type=Path, help="write what became of each test, one JSON line each")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="the page whose part is written")
    parser.add_argument("--filter", default="", help="regular expression: only tests whose id it is found in")
    given = parser.parse_args()
    tests = next((f for f in (given.folder, given.folder / "tests") if (f / "tests_pytorch").is_dir()), None)
    if tests is None:
        raise SystemExit(f"{given.folder}: expected tests_pytorch/ or tests/tests_pytorch/ in it")
    reasons = read_reasons(given.reasons)
    with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
        runs = Runs(tests.resolve(), Path(scratch))
        ids, broken = runs.collect()
        ids = [node for node in ids if re.search(given.filter, node)]
        print(f"{len(ids)} tests, {given.jobs} processes", flush=True)
        chaos = [line for line in runs.all(ids, given.jobs).values() if line["built"]]
        again = [line["test"] for line in chaos if line["outcome"] == "failed" and not refusal_of(line)]
        plain = runs.all(again, given.jobs, plain=True)
    verdicts = judge(chaos, plain, reasons)
    if given.results:
        given.results.write_text("".join(json.dumps(line) + "\n" for line in chaos))
    text = described(verdicts, broken, len(ids))
    print(text)
    if not given.filter:
        put(text, TESTS_MARK, COMMAND, given.document)
    return 1 if verdicts.unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
