"""Test harness that starts real processes, strikes them, waits for their events, and fails if an undeclared one dies.

Theory of operation. Processes are black boxes that write event logs; the harness knows nothing else of them.
`wait_for` follows the logs until an event answers its predicate or the deadline passes. In between it sleeps on the
children's sentinels with a short timeout, so that a death wakes it at once and an event within some 10 ms. At every
turn it looks for the dead: a process that ended with anything but exit code 0, without the test (or its fault plan)
having said so, ends the wait with an `UndeclaredDeath` that shows its last output and the last events of all. Each
fault is written to the harness's own event log before it is done, so the audit can tell a planned death from a bug.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from chaos_lightning.errors import DeadlineError
from chaos_lightning.events.events import EventLog, Record, Tail
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe.fields import integer
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.testing.edge.relay import LinkRelay
from chaos_lightning.testing.faults import LINK_ACTIONS, Action, Fault, FaultPlan, Schedule
from chaos_lightning.testing.processes import PRELOAD, Child, importable, start_command, start_function

__all__ = ["Child", "Harness", "UndeclaredDeath"]

T = TypeVar("T")

_TURN_S = 0.01
"""Longest sleep between two looks at the logs, s."""


class UndeclaredDeath(AssertionError):
    """A process died although no test had declared that it may."""


class Harness:
    """The processes of a test and their event logs, in one directory.

    Use it as a context manager: at the end everything that still runs is killed, and a death that was neither declared
    nor noticed so far fails the test.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        plan: FaultPlan | None = None,
        deadline_s: float = 60.0,
        start: Callable[[Harness, str], Child] | None = None,
        relay: LinkRelay | None = None,
    ):
        """Makes the directories for output and event logs.

        Args:
            directory: Folder of the test; output goes to `out/`, event logs to `events/` in it; children get
                CHAOS_LOG_DIR.
            env: Further environment of the children.
            plan: Fault plan, which `drive` carries out; its `expected_deaths` are declared.
            deadline_s: Default deadline of every wait, s.
            start: Starts the process of a node that joins by the plan.
            relay: Relay through which the children's links pass, so that they can be hurt; the caller closes it.
        """
        self.directory = Path(directory)
        self.logs = self.directory / "events"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.plan = plan or FaultPlan()
        self.deadline_s = deadline_s
        self.children: dict[str, Child] = {}
        self.events = EventLog.in_directory(self.logs, "harness", role="harness")
        self._start = start
        self._env = dict(env or {})
        self._declared = set(self.plan.expected_deaths)
        self._tail = Tail(self.logs)
        self._seen: list[Record] = []
        self._past: list[Child] = []
        self._relay = relay
        self._due: list[tuple[float, Callable[[], None]]] = []

    # ------------------------------------------------------------------------------------------------ starting

    def environment(self) -> dict[str, str]:
        """Returns the environment of children: this process's own, unbuffered output, the log directory, and the test's
        additions.
        """
        base = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": importable()}
        routed = self._relay.environment() if self._relay is not None else {}
        return {**base, "CHAOS_LOG_DIR": str(self.logs), **routed, **self._env}

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Starts a program under this name, after all killed processes have ended."""
        self._bury()
        return self._keep(start_command(name, command, self._output(name), env={**self.environment(), **(env or {})}))

    def start_function(
        self,
        name: str,
        target: Callable[..., object],
        *args: Any,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = PRELOAD,
    ) -> Child:
        """Runs a module-level function in a child that has torch and Lightning already imported; first waits for killed
        processes.
        """
        self._bury()
        return self._keep(
            start_function(
                name, target, args, self._output(name), env={**self.environment(), **(env or {})}, preload=preload
            )
        )

    def _output(self, name: str) -> Path:
        """Returns a new output file for a process of this name; an earlier process of that name must have ended."""
        old = self.children.get(name)
        if old is not None:
            if old.killed:
                self.wait_exit(name)
            if old.running:
                raise ValueError(f"a process named {name!r} runs already (pid {old.pid}); end it first")
            self._check([old])
            self._past.append(self.children.pop(name))
        return self.directory / "out" / f"{name}.{sum(c.name == name for c in self._past)}.log"

    def _keep(self, child: Child) -> Child:
        self.children[child.name] = child
        return child

    # ------------------------------------------------------------------------------------------------ hurting

    def kill(self, name: str, *, group: bool = False) -> None:
        """Sends SIGKILL to a process, and declares its death."""
        child = self._child(name)
        self.declare(name)
        self.events.emit("fault_injected", kind=Action.SIGKILL.value, node=name, pid=child.pid)
        child.killed = child.send(signal.SIGKILL, group=group)

    def stop(self, name: str, seconds: float = 0.0) -> None:
        """Freezes a process with SIGSTOP until `cont`, or until the first wait after `seconds` (0: only until
        `cont`).
        """
        child = self._child(name)
        self.events.emit("fault_injected", kind=Action.SIGSTOP.value, node=name, seconds=seconds, pid=child.pid)
        child.frozen = child.send(signal.SIGSTOP)
        if seconds > 0:
            self._later(seconds, lambda: self._thaw(child))

    def cont(self, name: str) -> None:
        """Continues a frozen process with SIGCONT."""
        child = self._child(name)
        self.events.emit("fault_injected", kind="sigcont", node=name, pid=child.pid)
        child.frozen = False
        child.send(signal.SIGCONT)

    def cut(self, one: str, other: str, seconds: float = 0.0) -> None:
        """Cuts the link between two nodes until `restore`, or until the first wait after `seconds`: connections are
        reset.
        """
        self._hurt_link(Action.CUT, one, other, seconds)

    def stall(self, one: str, other: str, seconds: float = 0.0) -> None:
        """Stalls the link between two nodes until `restore`, or until the first wait after `seconds`: no error, no
        bytes.
        """
        self._hurt_link(Action.STALL, one, other, seconds)

    def restore(self, one: str, other: str) -> None:
        """Restores the link between two nodes."""
        relay = self._need_relay(f"restore {one} {other}")
        self.events.emit("fault_injected", kind="restore", node=one, peer=other)
        relay.restore(one, other)

    def _hurt_link(self, action: Action, one: str, other: str, seconds: float) -> None:
        relay = self._need_relay(f"{action} {one} {other}")
        self.events.emit("fault_injected", kind=action.value, node=one, peer=other, seconds=seconds)
        (relay.cut if action is Action.CUT else relay.stall)(one, other)
        if seconds > 0:
            self._later(seconds, lambda: self.restore(one, other))

    def _need_relay(self, what: str) -> LinkRelay:
        if self._relay is None:
            raise ValueError(
                f"this harness cannot hurt links ({what}): give it a chaos_lightning.testing.edge.relay.LinkRelay"
            )
        return self._relay

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, work))

    def _thaw(self, child: Child) -> None:
        if self.children.get(child.name) is child and child.running:
            self.cont(child.name)

    def terminate(self, name: str, *, number: int = signal.SIGTERM, group: bool = False) -> None:
        """Asks a process to end, with SIGTERM (or SIGINT); it should end with exit code 0."""
        child = self._child(name)
        self.events.emit("fault_injected", kind=signal.Signals(number).name.lower(), node=name, pid=child.pid)
        child.send(number, group=group)

    def declare(self, *names: str) -> None:
        """Declares that from now on these processes may die without failing the test."""
        self._declared |= set(names)
        for name in names:
            if name in self.children:
                self.children[name].expected = True

    def _child(self, name: str) -> Child:
        if name not in self.children:
            raise KeyError(f"no process is named {name!r}; there are {sorted(self.children)}")
        return self.children[name]

    # ------------------------------------------------------------------------------------------------ waiting

    def wait_for(
        self,
        name: str,
        predicate: Callable[[Record], bool] | None = None,
        deadline_s: float | None = None,
        *,
        node: str = "",
        after: Record | None = None,
    ) -> Record:
        """Waits for the first event with this name, past ones included, that satisfies the predicate; returns it.

        Args:
            name: Event name.
            predicate: Condition on the event; None: any event.
            deadline_s: Seconds after which the wait is given up.
            node: Only events of this node.
            after: Only events that were read after this one.

        Raises:
            DeadlineError: The event did not come in time; the message shows all processes and the last events.
            UndeclaredDeath: A process died during the wait, and no test had declared that it may.
        """
        place = 0 if after is None else self._seen.index(after) + 1

        def found() -> Record | None:
            nonlocal place
            while place < len(self._seen):
                record = self._seen[place]
                place += 1
                if (
                    record.name == name
                    and (not node or record.node == node)
                    and (predicate is None or predicate(record))
                ):
                    return record
            return None

        return self.wait_until(found, f"event {name!r}" + (f" of {node}" if node else ""), deadline_s)

    def wait_admitted(self, name: str, scheduler: str) -> Record:
        """Waits until the scheduler has decided a view with this node as a joiner, and the member that leads the view
        knows it.

        Args:
            name: Name of the newcomer.
            scheduler: Name under which the scheduler logs, which is the job's.

        Returns:
            Event of the scheduler about that view.
        """

        def joins(record: Record) -> bool:
            return any(joiner.startswith(f"{name}~") for joiner in record.get("joiners") or ())

        view = self.wait_for("view", joins, node=scheduler)
        first = str(view["members"][0]).rpartition("~")[0]

        def knows() -> bool:
            told = ("next_view", "view")
            return any(r.name in told and r.node == first and r.get("id") == view["id"] for r in self.records)

        self.wait_until(knows, f"the view of {name} at {first}")
        return view

    def wait_until(self, ready: Callable[[], T | None], what: str, deadline_s: float | None = None) -> T:
        """Calls `ready` whenever events come in, until it returns anything but None or False; returns its result."""
        limit = self.deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit
        while True:
            self._turn()
            result = ready()
            if result is not None and result is not False:
                return result
            self._check(self.children.values())
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{what} did not come within {limit:g} s\n{self._stacks()}{self.dump()}")
            self._sleep(min(left, _TURN_S))

    def wait_exit(self, name: str, deadline_s: float | None = None) -> int:
        """Waits for the end of a process; returns its exit code (negative for a signal)."""
        child = self._child(name)

        def ended() -> tuple[int] | None:
            code = child.poll()
            return None if code is None else (code,)

        return self.wait_until(ended, f"the end of {name}", deadline_s)[0]

    def wait_all(self, deadline_s: float | None = None) -> None:
        """Waits until every process has ended, those without a declared death with exit code 0."""
        self.wait_until(
            lambda: not any(c.running for c in self.children.values()), "the end of all processes", deadline_s
        )
        self._check(self.children.values())

    def wait_step(self, step: int, deadline_s: float | None = None, *, node: str = "") -> Record:
        """Waits for the first commit that brings the job (or node `node`) to `step` optimizer steps; returns the
        event.
        """
        return self.wait_for("committed", lambda r: integer(r.get("step")) >= step, deadline_s, node=node)

    def _bury(self) -> None:
        """Waits until killed processes have ended and released their ports, which the next process may want."""
        dying = [child for child in self.children.values() if child.killed]
        self.wait_until(lambda: all(child.poll() is not None for child in dying), "the end of those that were killed")

    def _turn(self) -> None:
        """Reads new events, and ends freezes, cuts and stalls whose time is over."""
        now = time.monotonic()
        for entry in [x for x in self._due if x[0] <= now]:
            self._due.remove(entry)
            entry[1]()
        self._seen += self._tail.poll()

    def _sleep(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a process ends."""
        waiter = select.poll()
        for child in self.children.values():
            if child.running:
                waiter.register(child.sentinel, select.POLLIN)
        waiter.poll(max(1, int(seconds * 1000)))

    def _check(self, children: Iterable[Child]) -> None:
        for child in children:
            code = child.poll()
            if code in (None, 0) or child.expected or self._may_die(child.name):
                continue
            raise UndeclaredDeath(
                f"{child.words()}, and nobody had declared that it may\n--- its last output ({child.log})\n"
                f"{child.tail()}\n{self.dump()}"
            )

    def _may_die(self, name: str) -> bool:
        if name in self._declared:
            return True
        # A plan may name its victim by rank: then the event that the victim wrote before it struck is the declaration.
        ranked = any(victim.startswith("rank ") for victim in self._declared)
        return ranked and any(
            r.name == "fault_injected" and r.node == name and r.get("kind") == Action.SIGKILL for r in self._seen
        )

    # ------------------------------------------------------------------------------------------------ driving

    def drive(
        self, until: Callable[[], bool], deadline_s: float | None = None, plan: FaultPlan | None = None
    ) -> Schedule:
        """Injects the plan's faults from outside the victims, as they come due, until `until()` is true; returns the
        schedule, which knows the faults left.

        Steps and events from before the call count as triggers. Faults within a phase belong to the victims themselves
        (`FaultInjectorCallback`). Links are cut and stalled by the relay; without one, a plan that does so is refused.
        """
        schedule = Schedule((plan or self.plan).outside())
        for fault in schedule.plan:
            if fault.action in LINK_ACTIONS:
                self._need_relay(str(fault))
        begin, place, step = time.monotonic(), 0, 0

        def turn() -> bool:
            nonlocal place, step
            for record in self._seen[place:]:
                schedule.saw(record.name, record.node)
                if record.name == "committed":
                    step = max(step, integer(record.get("step")))
            place = len(self._seen)
            for fault in schedule.due(step=step, elapsed_s=time.monotonic() - begin):
                self._carry_out(fault)
            return until()

        self.wait_until(turn, "the end of the fault plan", deadline_s)
        return schedule

    def _carry_out(self, fault: Fault) -> None:
        name = fault.node or self._by_rank(fault.rank or 0)
        if fault.action is Action.JOIN:
            if self._start is None:
                raise ValueError(f"{fault}: give the harness a `start` function for joiners")
            self._start(self, name)
        elif fault.action in LINK_ACTIONS:
            self._hurt_link(fault.action, name, fault.peer, fault.seconds)
        elif fault.action is Action.SIGKILL:
            self.kill(name)
        elif fault.action is Action.SIGSTOP:
            self.stop(name, fault.seconds)
        else:
            self.terminate(name, number=signal.SIGINT if fault.action is Action.LEAVE else signal.SIGTERM)

    def _by_rank(self, rank: int) -> str:
        """Returns the name of the node with this rank in the latest view."""
        views = [v for v in self.timeline().views.values() if v.members]
        members = max(views, key=lambda v: v.number).members if views else ()
        if rank >= len(members):
            raise ValueError(f"no member has rank {rank}; the latest view holds {list(members)}")
        return members[rank].rpartition("~")[0]

    # ------------------------------------------------------------------------------------------------ afterwards

    @property
    def records(self) -> list[Record]:
        """All events read so far."""
        self._turn()
        return list(self._seen)

    def timeline(self) -> Timeline:
        """Returns a timeline of all events read so far."""
        return Timeline.of(self.records)

    def audit(self, **options: Any) -> list[auditing.Finding]:
        """Returns the audit's verdicts on the event logs; raises AssertionError if one is a violation."""
        expected = {x for x in self._declared if not x.startswith("rank ")}
        findings = auditing.audit(self.logs, expected_deaths=expected, **options)
        if auditing.violations(findings):
            raise AssertionError(auditing.verdict(findings))
        return findings

    def dump(self, events: int = 30) -> str:
        """Returns a text for a failed test: all processes, the last output of those that ended with an error, the last
        events.
        """
        self._turn()
        states = "\n".join(f"  {c.words()}" for c in self.children.values()) or "  none"
        last = "\n".join(f"  {str(r)[:240]}" for r in self._seen[-events:]) or "  none"
        # A declared death may be another one than was meant: an error, no signal. `_check` shows those not declared.
        failed = [c for c in self.children.values() if (c.poll() or 0) > 0 and self._may_die(c.name)]
        said = "".join(f"--- last output of {c.name} ({c.log})\n{c.tail()}\n" for c in failed)
        return f"--- processes\n{states}\n{said}--- last events ({self.logs})\n{last}"

    def _stacks(self) -> str:
        """Returns the stacks of all processes that still run, for the message of a wait that timed out."""
        told = ((child.name, child.stacks()) for child in self.children.values())
        return "".join(f"--- stacks of {name}\n{stacks}\n" for name, stacks in told if stacks)

    def close(self) -> None:
        """Kills all processes that still run, with their descendants, and closes the event log."""
        for child in [*self._past, *self.children.values()]:
            child.end_group()
        deadline = time.monotonic() + 10.0
        for child in self.children.values():
            while child.running and time.monotonic() < deadline:
                self._sleep(0.1)
        for child in [*self._past, *self.children.values()]:
            if not child.running:
                child.release()
        self.events.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(Exception):
                self.close()
            return
        try:
            self._check([*self._past, *self.children.values()])
        finally:
            self.close()
