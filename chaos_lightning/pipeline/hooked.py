"""Adds a `ModelProfiler` to an unchanged script, for `chaos-lightning profile -- python train.py`.

Theory of operation. The command makes a folder with a `sitecustomize` module, which every Python process that the
script starts imports first, as the folder is in PYTHONPATH. It calls `hook` here, which waits until torch's optimizers
are imported, without importing torch itself, and then hears of optimizer steps. The first process that steps claims the
measurement by a file in the folder; of several ranks only rank 0 does. It writes the profile there, or the error, and
ends its script.

A script that uses this package trains alone meanwhile, whatever it says of jobs (`alone`): strategies of Lightning do
so without a job, a plain loop in a job of its own, with a scheduler of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from chaos_lightning.machine.imports import call_after_import

HOOK = "from chaos_lightning.pipeline.hooked import hook\n\nhook(__file__)\n"
SETTINGS, CLAIMED, PROFILE, REFUSED, PROGRESS = "settings.json", "claimed", "profile.json", "refused.txt", "steps.txt"
"""Names of the files in the folder that the command makes for the script."""


def prepare(folder: Path, settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Writes the files that hook into the script's processes; returns the environment variables to start the script
    with.

    Args:
        folder: Empty folder, which has to stay until the script has ended.
        settings: Arguments of `ModelProfiler`.
        environ: The environment so far.
    """
    (folder / "sitecustomize.py").write_text(HOOK)
    (folder / SETTINGS).write_text(json.dumps(settings))
    path = [str(folder), *filter(None, [environ.get("PYTHONPATH", "")])]
    return {**_own_job(folder, environ), "PYTHONPATH": os.pathsep.join(path)}


def _own_job(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with those of any job replaced by a job of one process alone."""
    from chaos_lightning.control.options import HOSTED
    from chaos_lightning.declared import declared
    from chaos_lightning.settings import PROFILED, EngineConfig

    named = {made.variable for made in (*declared(EngineConfig).values(), *HOSTED.values())}
    named |= {"CHAOS_TOKEN", "CHAOS_NODE", "CHAOS_SETTINGS", "CHAOS_AGENT"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"ENDPOINT": f"127.0.0.1:{port}", "JOB": "profile", "LOG_DIR": "none", "ON_LAST_EXIT": "none"}
    own |= {"STORE": str(folder / "chain.sqlite"), "IDLE_TIMEOUT_S": "5"}
    others = {name: value for name, value in environ.items() if name not in named}
    return others | {f"CHAOS_{name}": value for name, value in own.items()} | {PROFILED: "1"}


def alone(who: str, but: str = "") -> bool:
    """Returns whether `chaos-lightning profile` runs this script, which then trains alone; prints a note if so.

    Args:
        who: The part of this package that would take part in a job.
        but: Reason why it cannot train alone; "": it can.

    Raises:
        UnsupportedError: This part of the package cannot train alone.
    """
    from chaos_lightning.errors import UnsupportedError
    from chaos_lightning.settings import PROFILED

    if PROFILED not in os.environ:
        return False
    if but:
        raise UnsupportedError(f"{who} under `chaos-lightning profile` is not supported: {but}")
    say(f"{who} trains alone here, whatever min_nodes is, and neither joins nor founds a job of others")
    return True


def hook(place: str) -> None:
    """Installs the profiler's hook in a script's process, in place of `sitecustomize`; runs the user's own
    `sitecustomize`, too.
    """
    folder = Path(place).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    other = PathFinder.find_spec("sitecustomize")
    if other is not None and other.loader is not None:
        other.loader.exec_module(importlib.util.module_from_spec(other))
    if all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK")):
        call_after_import(("torch.optim.optimizer",), lambda module: _listen(folder, module))


def _listen(folder: Path, module: ModuleType) -> None:
    profiler: list[Any] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not profiler:
            profiler.append(_made(folder))
        if profiler[0] is not None:
            profiler[0].stepped(optimizer)
            with suppress(OSError):  # the command has gone
                (folder / PROGRESS).write_text(str(profiler[0].done_steps))

    stepped.only_looks = True  # type: ignore[attr-defined]
    module.register_optimizer_step_post_hook(stepped)


def _made(folder: Path) -> Any:
    """Returns the profiler for this process; None if another process of the script has one already."""
    from chaos_lightning.pipeline.profile import ModelProfiler, Outcome

    try:
        os.close(os.open(folder / CLAIMED, os.O_CREAT | os.O_EXCL))
    except OSError:
        return None

    def report(outcome: Outcome) -> None:
        failed = isinstance(outcome, Exception)
        text = str(outcome) if isinstance(outcome, Exception) else outcome.to_json()
        (folder / (REFUSED if failed else PROFILE)).write_text(text)
        raise SystemExit(1 if failed else 0)

    return ModelProfiler(report=report, say=say, **json.loads((folder / SETTINGS).read_text()))


def say(line: str) -> None:
    """Prints a progress line of the measurement to stderr."""
    print(f"chaos-lightning profile: {line}", file=sys.stderr, flush=True)
