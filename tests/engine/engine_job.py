"""A job of real processes: members by name, gates, and the audit of what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import engine_members

from chaos_lightning.runtime.channel import fetch_status
from chaos_lightning.testing.harness import Harness
from chaos_lightning.testing.relay import LinkRelay

PRELOAD = ("torch", "chaos_lightning.trainer", "chaos_lightning.runtime.agent", "lightning.pytorch")


class Job:
    """Members by name; the first one hosts the scheduler."""

    def __init__(self, harness: Harness, folder: Path, relay: LinkRelay | None = None) -> None:
        self.harness = harness
        self.folder = folder
        self._relay = relay
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"

    def start(
        self,
        name: str,
        *,
        member: str = "",
        rules: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **spec: Any,
    ) -> None:
        """Starts a member, which calls itself `member` (as its process, if not given); `rules` are for the scheduler,
        if this one hosts it."""
        env = {**(env or {}), **({"CHAOS_SETTINGS": json.dumps(rules)} if rules else {})}
        full = {"name": member or name, "endpoint": self.endpoint, "report": str(self.folder / f"{name}.pt"), **spec}
        self.harness.start_function(name, engine_members.train, full, env=env, preload=PRELOAD)

    @property
    def relay(self) -> LinkRelay:
        """Through which its links pass."""
        assert self._relay is not None, "take the fixture routed_job"
        return self._relay

    def gate(self, name: str) -> str:
        path = self.folder / f"{name}.gate"
        os.mkfifo(path)
        return str(path)

    def open(self, gate: str) -> None:
        """Blocks until the member is at its gate, then lets it through."""
        with open(gate, "w"):
            pass

    def admitted(self, name: str) -> None:
        """Until a view that has this member as a joiner is decided."""
        self.harness.wait_for(
            "view", lambda r: any(j.startswith(f"{name}~") for j in r.get("joiners") or ()), node="default"
        )

    def silence_s(self, name: str) -> float:
        """How long the scheduler has not heard a word of this member."""
        peers = fetch_status(self.endpoint)["machine"]["members"]
        return max([p["silent_s"] for p in peers if p["id"].startswith(f"{name}~")], default=0.0)

    def foundings(self) -> list[str]:
        """Reasons of the views that began the job from somebody's own state, without those of their plans."""
        views = [r for r in self.harness.records if r.name == "view" and r.node == "default"]
        return [
            str(r.get("reason")).partition("; plan: ")[0] for r in views if str(r.get("reason")).startswith("founded")
        ]

    def finish(self, *names: str) -> list[dict[str, Any]]:
        """The reports of these members, which all end by themselves with exit code 0; the audit must find nothing."""
        for name in names:
            assert self.harness.wait_exit(name) == 0
        for finding in self.harness.audit():
            assert finding.verdict != "violated", self.harness.dump() + f"\n{finding}"
        return [self.report(name) for name in names]

    def report(self, name: str) -> dict[str, Any]:
        """How a member that has ended says that it ended."""
        return engine_members.read(self.folder / f"{name}.pt")

    def leave(self, *names: str) -> None:
        """They leave one after the other; whoever is last takes the state along."""
        for name in names:
            self.harness.terminate(name)
        for report in self.finish(*names):
            assert report["step"] > 0, report


def end_schedulers(logs: Path) -> None:
    """A hosted scheduler outlives its members on purpose; a test's must not outlive the test."""
    for log in logs.glob("scheduler-*.jsonl"):
        with log.open() as lines:
            pid = json.loads(next(lines))["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
