"""Defines a job of real member processes for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chaos_lightning.machine.addresses import split_endpoint


class Job:
    """Member processes of one job, with a scheduler of its own.

    Args:
        harness: Harness that starts and watches the members.
        out: Folder in which members write their reports.
        options: Options of the scheduler.
    """

    def __init__(self, harness: Any, out: Path, options: Any, scheduler: Any) -> None:
        self.harness = harness
        self.port = split_endpoint(options.listen)[1]
        self.out = out
        self.options = options
        self.scheduler = scheduler

    def start(self, name: str, **spec: Any) -> None:
        """Starts a member; see `strategy_members.member`."""
        from strategy_members import member

        self.harness.start_function(name, member, {"name": name, "port": self.port, "out": str(self.out), **spec})

    def gate(self, name: str) -> str:
        """Makes a new gate (a FIFO) at which a member waits until `open`; returns its path."""
        path = self.out / f"gate-{name}"
        os.mkfifo(path)
        return str(path)

    def open(self, name: str) -> None:
        """Lets the member that waits at this gate continue."""
        with open(self.out / f"gate-{name}", "w"):
            pass

    def wait_admitted(self, name: str) -> None:
        """Waits until a view with this newcomer is decided and announced; the next safe point then lets it in."""
        self.harness.wait_admitted(name, self.options.settings.job)

    def fresh(self, **settings: Any) -> None:
        """Replaces the scheduler by one with other settings. No member may have spoken to it yet."""
        self.scheduler.stop()
        self.again(**settings)

    def again(self, **settings: Any) -> None:
        """Starts a new job at the same endpoint, with a new chain."""
        from dataclasses import replace

        from forked_support import scheduler

        self.harness.wait_until(self._scheduler_gone, "the end of the finished job's scheduler")
        rules = replace(self.options.settings, **{"finished_s": 0.0, **settings})  # else it tells newcomers of the end
        self.scheduler = scheduler(replace(self.options, settings=rules))

    def _scheduler_gone(self) -> bool:
        return self.scheduler is None or not self.scheduler.alive()

    def report(self, name: str) -> dict[str, Any]:
        import torch

        return torch.load(self.out / f"{name}.pt", weights_only=False)

    def finish(self, *names: str, audit: bool = True) -> list[dict[str, Any]]:
        """Waits until these members have ended, and audits the job's logs; returns their reports."""
        for name in names:
            assert self.harness.wait_exit(name) == 0
        if audit:
            self.harness.audit()
        return [self.report(name) for name in names]
