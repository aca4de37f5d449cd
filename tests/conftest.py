"""Settings for all tests: no time limit for hypothesis, one thread for torch, garbage collected per file, and event
logs shown for failed tests.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from chaos_lightning.testing.harness import Harness

DUMPED_EVENTS = 120
SLOW_FOLDERS = ("examples", "callbacks", "strategies", "engine", "rendezvous", "benchmarks", "simulate", "testing")
"""Their files take longest."""

# Threads of torch wait for each other with a busy processor, which others need: beside other work, small networks take
# up to a hundred times as long. Torch is imported later, and children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test writes into the state folder of who runs it, nor into the event log of another test.
if "XDG_STATE_HOME" not in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="chaos-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
os.environ.setdefault("CHAOS_LOG_DIR", "none")

# nohup and `&` in a script start their programs with signals ignored, and what is ignored stays so in the product.
for ignored, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)

# A generated example that takes long on a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files that take long first, so that none of them is left over for one process at the end."""
    place = {folder: number for number, folder in enumerate(SLOW_FOLDERS)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(place)))


def pytest_collection_finish() -> None:
    """Excludes the many objects that exist before tests from garbage collection, which saves time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_this_files_own() -> Iterator[None]:
    """Collects garbage after each test file, so that warnings about unclosed objects appear in the file that made
    them.
    """
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the latest events of a failed test's processes to its report."""
    report = yield
    if report.failed:
        given: dict[str, Any] = getattr(item, "funcargs", {})
        holders = {id(h): h for v in given.values() if isinstance(h := getattr(v, "harness", v), Harness)}
        report.sections += [("event log", _dumped(harness)) for harness in holders.values()]
    return report


def _dumped(harness: Harness) -> str:
    """Returns the harness's event dump; if that fails, the error's text, since an exception here would end pytest."""
    try:
        return harness.dump(DUMPED_EVENTS)
    except Exception as error:
        return f"no dump: {error!r}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Prints, at the very end, how many tests were skipped because something is not installed."""
    yield
    # (file, line, "Skipped: reason")
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr]
    for reason, count in Counter(r.removeprefix("Skipped: ") for r in reasons if "not installed" in r).items():
        terminalreporter.write_line(f"{count} tests were skipped: {reason}", yellow=True)
