"""A job of real processes for tests: starts members by name, holds them at gates, and audits their logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import engine_members
import forked_support
from forked_support import SCHEDULER

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import SchedulerUnreachableError
from chaos_lightning.events.registry import problems
from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.edge.relay import LinkRelay, Way
from chaos_lightning.testing.harness import Harness

PRELOAD = ("torch", "chaos_lightning.trainer", "chaos_lightning.control.agent", "lightning.pytorch")


class Job:
    """Job whose members are started by name; the first one runs the scheduler."""

    def __init__(self, harness: Harness, folder: Path, relay: LinkRelay | None = None) -> None:
        self.harness = harness
        self.folder = folder
        self._relay = relay
        self._paths: dict[str, Way] = {}
        self.endpoint = f"127.0.0.1:{free_port()}"

    def start(
        self,
        name: str,
        *,
        member: str = "",
        rules: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **spec: Any,
    ) -> None:
        """Starts the process `name` of a member called `member` (by default `name` too); `rules` are the scheduler's
        settings, if this member starts it.
        """
        env = {**(env or {}), **({"CHAOS_SETTINGS": json.dumps(rules)} if rules else {})}
        endpoint = self.endpoint
        if name in self._paths:
            endpoint = self._paths[name].endpoint
            spec["settings"] = {**spec.get("settings", {}), "host_scheduler": False}
        report, enough = str(self.folder / f"{name}.pt"), str(self.folder / "enough")
        full = {"name": member or name, "endpoint": endpoint, "report": report, "enough": enough, **spec}
        self.harness.start_function(name, engine_members.train, full, env=env, preload=PRELOAD)

    @property
    def relay(self) -> LinkRelay:
        """Relay through which the links of the job pass."""
        assert self._relay is not None, "take the fixture routed_job"
        return self._relay

    def serve(self, **rules: Any) -> None:
        """Starts the scheduler as a process of its own, so that the first member does not start one."""
        chain = self.folder / "chain.sqlite"
        self.scheduler("scheduler", "--settings", json.dumps(rules), "--store", str(chain))
        self.harness.wait_until(self.served, "the scheduler's answer")

    def scheduler(self, name: str, *options: str, at: str = "", env: dict[str, str] | None = None) -> None:
        """Starts a scheduler process that listens at `at`, or else at the job's endpoint."""
        given = ["--listen", at or self.endpoint, "--log-dir", str(self.harness.logs), *options]
        self.harness.start_function(name, forked_support.run, SCHEDULER, given, env=env, preload=PRELOAD)

    def served(self) -> bool:
        try:
            return bool(fetch_status(self.endpoint))
        except SchedulerUnreachableError:
            return False

    def own_stream(self, *names: str) -> None:
        """Gives these members, before they start, control streams that can be cut. Such a member must not start a
        scheduler itself: it counts as on another machine.
        """
        for name in names:
            self._paths[name] = Way(self.endpoint)

    def cut_stream(self, *names: str) -> None:
        """Cuts the control streams of these members until `mend_stream`, but none of their links."""
        for name in names:
            self.harness.events.emit("fault_injected", kind="cut_stream", node=name)
            self._paths[name].cut()

    def mend_stream(self, *names: str) -> None:
        for name in names:
            self._paths[name].restore()

    def connected(self, name: str) -> bool:
        """Returns whether this member has a control stream to the scheduler."""
        machine = fetch_status(self.endpoint)["machine"]
        mine = [p for p in (*machine["members"], *machine["others"]) if p["id"].startswith(f"{name}~")]
        return any(p["connected"] for p in mine)

    def close(self) -> None:
        for path in self._paths.values():
            path.close()

    def gate(self, name: str) -> str:
        path = self.folder / f"{name}.gate"
        os.mkfifo(path)
        return str(path)

    def open(self, gate: str) -> None:
        """Blocks until the member is at its gate, then lets it through."""
        with open(gate, "w"):
            pass

    def admitted(self, name: str) -> None:
        """Waits until a view that has this member as a joiner is decided, and the other members have learned of it."""
        self.harness.wait_admitted(name, "default")

    def silence_s(self, name: str) -> float:
        """Returns for how many seconds the scheduler has not heard from this member."""
        peers = fetch_status(self.endpoint)["machine"]["members"]
        return max([p["silent_s"] for p in peers if p["id"].startswith(f"{name}~")], default=0.0)

    def foundings(self) -> list[str]:
        """Returns the reasons of the views that founded the job from a member's own state, without the reasons of their
        plans.
        """
        views = [r for r in self.harness.records if r.name == "view" and r.node == "default"]
        return [
            str(r.get("reason")).partition("; plan: ")[0] for r in views if str(r.get("reason")).startswith("founded")
        ]

    def finish(self, *names: str) -> list[dict[str, Any]]:
        """Waits for these members to end with exit code 0, and checks that the audit finds no violation; returns their
        reports.

        Those that train until it is enough are told so, once all of these are in.
        """
        for name in names:
            self.harness.wait_until(lambda name=name: self._was_in(name), f"{name} to be in, or at its end")
        (self.folder / "enough").touch()
        for name in names:
            assert self.harness.wait_exit(name) == 0
        for finding in self.harness.audit():
            assert finding.verdict != "violated", self.harness.dump() + f"\n{finding}"
        assert [text for r in self.harness.records for text in problems(r.name, r.fields)] == []
        return [self.report(name) for name in names]

    def unharmed(self, *names: str) -> None:
        """Checks that these members end with equal state, and that none was ever removed from the job or taken for
        dead.
        """
        reports = self.finish(*names)
        assert len({(r["hash"], r["step"]) for r in reports}) == 1, reports
        assert not [r for r in self.harness.records if r.name in ("fenced", "rejoin", "death")]

    def _was_in(self, name: str) -> bool:
        came = any(r.name == "joined" and r.node == name for r in self.harness.records)
        return came or not self.harness.children[name].running

    def report(self, name: str) -> dict[str, Any]:
        """Returns the report that an ended member has written."""
        return engine_members.read(self.folder / f"{name}.pt")

    def leave(self, *names: str) -> None:
        """Makes these members leave one after the other; the job ends with the last one."""
        for name in names:
            self.harness.terminate(name)
        for report in self.finish(*names):
            assert report["step"] > 0, report


def says(job: Job, place: str, **words: str) -> dict[str, Any]:
    """Waits until the status of the scheduler at an address contains all these words at once, each under its key (""
    means empty).

    A scheduler that has just begun to stand by has not read yet who leads: what a test compares must be waited for
    together, and not one fact after the other.
    """

    def told() -> dict[str, Any] | None:
        with contextlib.suppress(SchedulerUnreachableError):
            facts = fetch_status(place, follow=False)
            if all(text in str(facts.get(key)) if text else not facts.get(key) for key, text in words.items()):
                return facts
        return None

    return job.harness.wait_until(told, f"a status of {place} with {words}")


def who_leads(job: Job) -> dict[str, Any]:
    """Returns the status of the leading scheduler; waits until there is one."""

    def told() -> dict[str, Any] | None:
        with contextlib.suppress(SchedulerUnreachableError):
            facts = fetch_status(job.endpoint, timeout_s=10.0)
            return facts if facts["role"] == "leader" else None
        return None

    return job.harness.wait_until(told, f"a scheduler that leads at {job.endpoint}")


def end_schedulers(harness: Harness) -> None:
    """Ends the schedulers that a test's members started, which outlive their members on purpose but must not outlive
    the test.
    """
    for log in harness.logs.glob("scheduler-*.jsonl"):
        with log.open() as lines:
            pid = json.loads(next(lines))["pid"]
        mine = [name for name, child in harness.children.items() if child.pid == pid]
        if mine and not harness.children[mine[0]].running:
            continue  # how it ended is the harness's to judge
        # The signal may meet one that is ending by itself and handles it no more.
        harness.declare(*mine)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
