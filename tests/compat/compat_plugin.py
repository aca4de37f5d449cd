"""Pytest plugin that makes a `Trainer()` without a strategy train with `chaos`, as the only member of a job.

Used by `compat_run.py` on Lightning's own tests, which are not ours and know nothing of it. Each such Trainer gets a
strategy of its own on a free port of this machine; the schedulers that its fits start keep their chains in a folder of
the run, and end with the test. What became of each test is written as one JSON line to the file that `--compat-out`
names: whether it built a Trainer with `chaos`, how it ended, and by which exceptions.

With `--compat-plain` Trainers are left as they are: what fails then is no difference of ours.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

import chaos_lightning.member.engine as engine_module
from chaos_lightning.errors import ChaosError
from chaos_lightning.machine.listener import free_port
from chaos_lightning.service.hosting import HostedProcess
from chaos_lightning.strategies import ChaosStrategy

NOTED_LINES = 6
NOTED_CHARACTERS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("compat")
    group.addoption("--compat-out", help="file for one JSON line for each test")
    group.addoption("--compat-only", help="file of node ids, one a line: run only these")
    group.addoption("--compat-plain", action="store_true", help="leave Trainers as they are")


def pytest_configure(config: pytest.Config) -> None:
    # Named, so that a plugin manager refuses to have it twice.
    config.pluginmanager.register(Compat(config), "compat-of-chaos")


class Compat:
    """State of the plugin in one run of pytest.

    Args:
        config: Configuration of the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._plain = bool(config.getoption("--compat-plain"))
        out = config.getoption("--compat-out")
        self._out = Path(out) if out else None
        only = config.getoption("--compat-only")
        self._only = set(Path(only).read_text().splitlines()) if only else None
        self._built = 0
        self._hosted: list[HostedProcess] = []
        self._outcome: dict[str, Any] = {}

    # ------------------------------------------------------------------ which tests

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._only is not None:
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._only])
            items[:] = [item for item in items if item.nodeid in self._only]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Writes down that a test begins, so that the last line shows which test a dying process was running."""
        self._built = 0
        self._outcome = {"test": nodeid, "outcome": "passed"}
        self._write({"test": nodeid, "outcome": "started"})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write({**self._outcome, "built": self._built})

    def pytest_sessionfinish(self) -> None:
        """Ends processes that a timed-out test may have left, since Python would wait for them at exit."""
        for child in multiprocessing.active_children():
            child.terminate()

    def _write(self, line: dict[str, Any]) -> None:
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    # ------------------------------------------------------------------ the strategy

    @pytest.fixture(autouse=True)
    def chaos_by_default(self, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
        """Gives Trainers the strategy `chaos` during a test, and then ends the schedulers that it has started."""
        if self._plain:
            yield
            return
        folder = tmp_path_factory.mktemp("chaos")
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "__init__", self._with_strategy(Trainer.__init__))
            patch.setattr(engine_module, "host_for_engine", self._hosting(engine_module.host_for_engine, folder))
            yield
        while self._hosted:
            self._hosted.pop().stop()

    def _with_strategy(self, init: Any) -> Any:
        @functools.wraps(init)
        def __init__(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            ours = kwargs.get("strategy", "auto") == "auto" and "PL_TRAINER_STRATEGY" not in os.environ
            if ours:
                kwargs["strategy"] = ChaosStrategy(
                    endpoint=f"127.0.0.1:{free_port()}",
                    job="compat",
                    options={"join_timeout_s": 30.0, "step_timeout_s": 30.0},
                )
            init(trainer, *args, **kwargs)
            self._built += ours

        return __init__

    def _hosting(self, host: Any, folder: Path) -> Any:
        @functools.wraps(host)
        def host_for_engine(*args: Any, **kwargs: Any) -> HostedProcess | None:
            before = os.environ.get("XDG_STATE_HOME")
            os.environ["XDG_STATE_HOME"] = str(folder)
            try:
                hosted = host(*args, **kwargs)
            finally:
                # A test may compare the environment before and after.
                if before is None:
                    del os.environ["XDG_STATE_HOME"]
                else:
                    os.environ["XDG_STATE_HOME"] = before
            if hosted is not None:
                self._hosted.append(hosted)
            return hosted

        return host_for_engine

    # ------------------------------------------------------------------ what became of it

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._outcome["seconds"] = round(self._outcome.get("seconds", 0.0) + call.duration, 2)
        if report.outcome == "skipped" and self._outcome["outcome"] == "passed":
            self._outcome["outcome"] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        elif report.outcome == "failed" and self._outcome["outcome"] != "failed":
            chain = list(causes(call.excinfo.value)) if call.excinfo is not None else []
            self._outcome |= {
                "outcome": "failed",
                "phase": report.when,
                "errors": [f"{type(e).__module__}.{type(e).__name__}: {shortened(str(e))}" for e in chain],
                "ours": [type(e).__name__ for e in chain if isinstance(e, ChaosError)],
                "report": report.longreprtext[-6000:],
            }
        return report


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and, one after the other, those that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def shortened(text: str) -> str:
    """Returns the first lines of a message."""
    return "\n".join(text.splitlines()[:NOTED_LINES])[:NOTED_CHARACTERS]
