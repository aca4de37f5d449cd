"""Runs one simulated job from plan to outcome: scheduler, nodes, network, faults, oracle.

Theory of operation. A `Plan` says who takes part and what goes wrong when; everything else is chance from the plan's
seed. The run ends when every process has finished, left or died and the scheduler has released all, or when virtual
time is up: then the job is stuck, which is a violation too, since plans leave enough members alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from chaos_lightning.membership.effects import Chain, Drain, MemberEffect, Note, Persist
from chaos_lightning.membership.leader_search import Conversation
from chaos_lightning.membership.pipelining import PipelinerFactory
from chaos_lightning.membership.recovery import needs_bytes
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.planning.fleet.kernel import Kernel
from chaos_lightning.protocol.types import NO_VIEW, Hello, Kind, Report, Settings, View, ViewId, Welcome
from lab.simulate.edges import LINK_FAULTS, Edges
from lab.simulate.fabric import Endpoint, Fabric
from lab.simulate.host import Candidacy, SchedulerHost
from lab.simulate.node import Node, Trap
from lab.simulate.oracle import Oracle, Violation, check_chain
from lab.simulate.outer_leader import ScriptedLeader
from lab.simulate.pipelines import RoundRobin
from lab.simulate.plan import Fault, Outcome, Plan
from lab.simulate.progress import Patience, Progress
from lab.simulate.schedulers import SCHEDULER_FAULTS, Schedulers
from lab.simulate.store import Store
from lab.simulate.training import Program

NOTICED_S = 0.05
"""Seconds within which the scheduler has heard that a newcomer is ready."""


class Hooks:
    """Classes that make up a simulated job, without bugs; planted bugs replace some of them."""

    node_class: type[Node] = Node
    scheduler_class: type[SchedulerMachine] = SchedulerMachine
    host_class: type[SchedulerHost] = SchedulerHost
    store_class: type[Store] = Store
    oracle_class: type[Oracle] = Oracle

    def pipeliner_for(self, program: Program, seed: int) -> PipelinerFactory:
        """Returns a maker of pipelines for this job."""
        return lambda requests: RoundRobin(program, seed)


@dataclass(slots=True)
class _Counters:
    number: int = 0
    uid: int = 0


class World:
    """One simulated job with all its parts."""

    def __init__(self, plan: Plan, hooks: Hooks | None = None, *, validate: bool = True) -> None:
        self.plan = plan
        self.hooks = hooks or Hooks()
        self.validate = validate
        self.kernel = Kernel(plan.seed)
        self.settings = plan.settings
        self.program = plan.program
        self.fabric = Fabric(self.kernel)
        for one, other, extra in plan.slow_links:
            self.fabric.slow_links[frozenset((one, other))] = extra
        for one, other in plan.unlinked:
            self.fabric.block(one, other, float("inf"))
        self.rates = {frozenset((one, other)): rate_bps for one, other, rate_bps in plan.rates}
        self.store = self.hooks.store_class()
        self.oracle = self.hooks.oracle_class(plan.program, lambda: self.store.views, self.store.ever)
        self.progress = Progress(self)
        self.store.on_write, self.oracle.on_slot = self.progress.wrote, self.progress.committed
        self._counters = _Counters()
        self._reported: tuple[ViewId, dict[str, Report]] = (NO_VIEW, {})
        """Latest number that members have promised, and each one's first report on it."""
        self.cut_streams = 0
        """Number of control streams that broke."""
        self.log: list[str] = []
        self.on_effect: Callable[[Endpoint, MemberEffect], None] = lambda node, effect: None
        self.on_note: Callable[[Note], None] = lambda note: None
        self.on_fault: Callable[[str], None] = lambda words: None
        self.nodes: dict[str, Node] = {}
        self.outer = ScriptedLeader(self.kernel, plan.outer) if plan.outer is not None else None
        """Leader of the cluster whose ranks the members are."""
        self._todo = len(plan.faults)
        self.schedulers = Schedulers(self)
        for number, (spec, start) in enumerate(zip(plan.nodes, plan.starts, strict=True), 1):
            node = self.nodes[spec.name] = self.hooks.node_class(self, spec, number)
            self.kernel.at(start, node.connect)
        self.edges = Edges(self)
        self._patience = Patience(self)
        for fault in plan.faults:
            self._schedule(fault)

    @property
    def scheduler(self) -> SchedulerHost:
        """Scheduler that was elected last."""
        return self.schedulers.leader

    def open_host(self, place: str, candidacy: Candidacy) -> SchedulerHost:
        """Starts a scheduler's process on this machine.

        Raises:
            StoreError: The store does not answer.
        """
        host = self.hooks.host_class(
            self.kernel, self.store, self.settings, self._scheduler_class(), self.plan.store_s,
            SchedulerMachine.validate_state if self.validate else None, lambda member: self.gone(place, member),
            candidacy,
        )  # fmt: skip
        host.on_note = lambda note: self.heed(host, note)
        host.on_answer = lambda token, granted: self.edges.answered(token, granted)
        return host

    def _scheduler_class(self) -> Callable[[Settings, Chain], SchedulerMachine]:
        """Returns a maker of the scheduler's state machine, with pipelines if the job has any."""
        if not self.program.layers:
            return self.hooks.scheduler_class
        made = self.hooks.pipeliner_for(self.program, self.plan.seed)
        return partial(self.hooks.scheduler_class, pipeliner_for=made)

    def founding_of(self, view: View) -> str:
        """Returns the number of the last founding view up to and including this view."""
        return str(max(v.id for v in self.store.views if v.id <= view.id and v.reason.startswith("founded")))

    def heed(self, host: SchedulerHost, note: Note) -> None:
        """Handles a line that a scheduler writes to the event log: checks what it reports, and passes it on."""
        if note.name == "view":
            self.edges.check(host.machine.book.views)
        if note.name == "prepare" and self.plan.unfailing:
            raise Violation(f"nothing has failed, yet a recovery begins: {dict(note.fields).get('reason')} (links)")
        if note.name == "decide":
            self._check_redo(dict(note.fields))
        self.on_note(note)

    def reported(self, member: str, report: Report) -> None:
        """Notes a member's answer to a Prepare, for later checks of the recovery.

        The member's pending header is here even if its report only names that by hash.
        """
        if report.number > self._reported[0]:
            self._reported = (report.number, {})
        if report.number == self._reported[0]:
            self._reported[1].setdefault(member, report)

    def _check_redo(self, decided: Mapping[str, Any]) -> None:
        """Checks that a recovery does not redo a slot whose header and bytes the members that go on still have (9)."""
        number, reports = self._reported
        if decided["hand_on"] or decided["id"] != str(number):
            return
        there = [r for m, r in reports.items() if m in decided["members"] and r.loaded and r.head == decided["base"]]
        for header in [r.pending for r in there if r.pending is not None]:
            holders = [r for r in there if r.entered == header.view]
            held = {start for r in holders for start, stop in r.held if start < stop}
            if not needs_bytes(header) or len(held) == self.program.ranges:
                raise Violation(f"view {number} has slot {header.seq} reduced again, which its members hold (9)")

    def gone(self, place: str, member: str) -> bool:
        """Returns whether this member's process ran on a scheduler's machine and is gone from its process table."""
        node = self.fabric.nodes.get(member)
        return node is not None and node.spec.host == place and not node.alive

    def expect(self, more: int) -> None:
        """Registers events that must happen before the run may end."""
        self._todo += more

    def copies(self, message: object) -> int:
        """Returns how many copies of a control message arrive; a Hello or Welcome is never duplicated."""
        if not self.plan.doubled or isinstance(message, Hello | Welcome):
            return 1
        return 1 + (self.kernel.random.random() < self.plan.doubled)

    def next_number(self) -> int:
        self._counters.number += 1
        return self._counters.number

    def next_uid(self) -> int:
        self._counters.uid += 1
        return self._counters.uid

    def ask(self, place: str) -> SchedulerHost | Conversation:
        """Returns the scheduler that believes to lead at this address; if there is none, the answer that a member gets
        there.
        """
        return self.schedulers.ask(place)

    def struck(self, troubles: int = 1, causes: int = 1) -> None:
        """Counts faults and other events that may cause views (`Progress.struck`)."""
        self.progress.struck(troubles, causes)

    def look(self) -> None:
        """Notes which members may be put out for lack of links (`Edges.look`)."""
        self.edges.look()

    def founds(self, founder: Endpoint) -> None:
        """Checks and notes that this process founds the job, or founds it again.

        Raises:
            Violation: The process was ready in time to get the state before the last member left, and nothing else went
                wrong.
        """
        past = [n for n in self.nodes.values() if n.lineage and n is not founder]
        alone = all(fault.action == "leave" for fault in self.plan.faults)
        asked_at = max((n.asked_at for n in past), default=0.0)
        if alone and founder.newcomer_since >= 0 and asked_at > founder.newcomer_since + NOTICED_S:
            raise Violation(
                f"{founder.machine.member_id} founds the job again: the training state went with the last member, who "
                f"was asked to leave {asked_at - founder.newcomer_since:.2f} s after this newcomer was ready for it"
            )
        self.oracle.founded(founder.lineage, founder.state, self._holders(founder))

    def _holders(self, founder: Endpoint) -> list[str]:
        """Returns the members whose state is forgotten by the new founding although it still exists (contract 5,
        protocol.md 12a).

        Those that have not been in trouble lately, and all that live, stopped ones included, in the view before it. Who
        was asked to go holds nothing, nor does who was silent for longer than anybody is waited for.
        """
        views = self.store.views
        before = [old for old, new in pairwise(views) if str(new.id) == founder.lineage]

        def forgotten(node: Node) -> bool:
            if not any(view.find(node.machine.member_id) for view in before) or node.leaving or node.drained:
                return False
            return node.silent_s() <= self.settings.last_holder_timeout_s

        return [
            n.machine.member_id
            for n in self.nodes.values()
            if n is not founder and n.alive and n.training
            if (not n.frozen and self.kernel.now - n.troubled_at > 10.0) or forgotten(n)
        ]

    # ------------------------------------------------------------------ faults

    def _schedule(self, fault: Fault) -> None:
        if fault.action == "sched-crash-write":
            self.scheduler.slow_write = lambda entry: self._crash_in_write(fault, entry)
            return
        if fault.trap is None or fault.action in SCHEDULER_FAULTS:
            self.kernel.at(fault.at, lambda: self._strike(fault))
            return
        self._todo -= 1
        kind, seq, skip = fault.trap
        node = self.nodes[fault.node]
        node.traps.append(Trap(kind, seq, skip, lambda: self._hit(fault, node)))

    def _strike(self, fault: Fault) -> None:
        self._todo -= 1
        if fault.action in SCHEDULER_FAULTS:
            self.schedulers.strike(fault)
        elif fault.action in LINK_FAULTS:
            self.say(f"{fault.action} {fault.node} {fault.other}")
            self.edges.strike(fault)
        else:
            node = self._root() if fault.node == "root" else self.nodes.get(fault.node)
            if node is not None and node.alive:
                self._hit(fault, node)

    def _crash_in_write(self, fault: Fault, entry: Persist) -> float:
        """Kills the scheduler while it writes the view that excludes `fault.node`; then wakes that node, and freezes
        the view's members.
        """
        excluded = self.nodes[fault.node]
        if entry.view is None or entry.view.find(excluded.machine.member_id) is not None or not self.store.views:
            return 0.0
        self.scheduler.slow_write = lambda entry: 0.0

        def strike() -> None:
            self._todo -= 1
            self.say(f"the scheduler dies in its write of {entry.number}")
            self._strike(Fault(action="sched-crash", lasts=0.02))
            self._todo += 1
            self.kernel.after(0.05, excluded.thaw)
            for node in self.nodes.values():
                if node is not excluded and node.alive:
                    node.freeze()
                    self.kernel.after(fault.lasts, node.thaw)

        self.kernel.after(0.2, strike)
        return 1.0

    def say(self, words: str) -> None:
        """Logs a fault or its end."""
        self.log.append(f"{self.kernel.now:.4f} {words}")
        self._patience.disturbed()
        self.progress.struck()
        self.on_fault(words)

    def _root(self) -> Node | None:
        for node in self.nodes.values():
            if node.alive and not node.frozen and node.machine.is_root:
                return node
        return None

    def _hit(self, fault: Fault, node: Node) -> None:
        self.say(f"{fault.action} {node.name} ({node.machine.member_id})")
        match fault.action:
            case "kill":
                node.kill()
            case "kill-spared":
                if self.schedulers.can_spare(node):
                    node.kill()
            case "kill-too":
                node.kill()
                other = self.nodes[fault.other]
                self.kernel.after(self.kernel.between(0.0, 0.004), other.kill)
            case "freeze":
                node.freeze()
                self.kernel.after(fault.lasts, node.thaw)
            case "busy":
                node.occupy(fault.lasts)
            case "leave":
                node.deliver(lambda: node.leave("Ctrl+C"))
            case "stream":
                node.break_stream()
            case "stale":
                node.stale = True
            case "drain":
                node.drained = True
                self.scheduler.deliver(lambda: self._drain(node.name))
            case "lag":
                self._lag(node, fault.lasts)
            case "link":
                self._cut(node, fault.other)
            case _:
                raise ValueError(f"unknown fault {fault.action!r}")

    def _drain(self, name: str) -> None:
        self.scheduler.feed(Drain(name))

    def _lag(self, node: Node, lasts: float) -> None:
        """Slows a node's control stream down for a while; the process and its links are not affected."""
        extra = self.kernel.between(0.3, 1.2)
        node.control_lag = extra
        if node.stream is not None:
            node.stream.up.lag = extra

        def over() -> None:
            node.control_lag = 0.0
            if node.stream is not None:
                node.stream.up.lag = 0.0

        self.kernel.after(lasts, over)

    def _cut(self, node: Node, other: str) -> None:
        peer = self.nodes.get(other)
        if peer is not None:
            self.fabric.snap(node.machine.member_id, peer.machine.member_id)

    # ------------------------------------------------------------------ the run

    def _over(self) -> bool:
        if self._todo > 0 or not self.scheduler.alive:
            return False
        return not any(n.alive for n in self.nodes.values())

    def _came_too_late(self) -> bool:
        """Returns whether the members finished while no scheduler could record it, and too few newcomers wait to found
        another job.
        """
        alive = [n for n in self.nodes.values() if n.alive]
        finished = any(n.header.kind is Kind.CLOSING and n.outcome.startswith("left") for n in self.nodes.values())
        return finished and len(alive) < self.settings.min_nodes and not any(n.training for n in alive)

    def run(self) -> Outcome:
        """Runs the plan to its end and returns the outcome."""
        violation = ""
        try:
            ended = self.kernel.run(self.plan.limit_s, self._over) or self._came_too_late()
            if not ended and not self.progress.explained(self.edges.may_link) and not self.oracle.lost():
                violation = f"stuck after {self.kernel.now:.1f} s: {self.describe()}"
            elif ended:
                self._final()
        except Violation as found:
            violation = f"at {self.kernel.now:.4f} s: {found}"
        except AssertionError as found:
            violation = f"at {self.kernel.now:.4f} s: assertion: {found!r}"
        oracle = self.oracle
        errors = sum(1 for n in self.nodes.values() if n.outcome.startswith("disagreement"))
        return Outcome(
            self.plan.seed,
            violation,
            self.kernel.now,
            self.kernel.events,
            oracle.commits,
            oracle.hand_ons,
            oracle.joins,
            oracle.ejections,
            len(self.store.views),
            errors,
            oracle.replays,
            oracle.moved,
            self.schedulers.crashes,
            self.store.term,
            self.store.errors,
            self.cut_streams,
            self.outer.adopted if self.outer is not None else 0,
            self.outer.replayed if self.outer is not None else 0,
        )

    def _final(self) -> None:
        check_chain(self.store.views)
        done = [n for n in self.nodes.values() if n.header.kind is Kind.CLOSING and n.outcome.startswith("left")]
        released = [n for n in done if n.machine.closing_is_stable]
        for node in released:
            self.oracle.finished(node.lineage, node.header)
        if len({n.header.hash for n in released}) > 1:
            raise Violation(f"the job finished with {len({n.header.hash for n in released})} different last headers")
        outcomes = {n.name: n.outcome for n in self.nodes.values()}
        errors = [o for o in outcomes.values() if o.startswith("disagreement")]
        if errors and not any(f.action == "stale" for f in self.plan.faults):
            raise Violation(f"members disagree without a reason: {errors[0]}")
        if not done and not errors and not self._all_went():
            raise Violation(f"nobody finished the job: {outcomes}")

    def _all_went(self) -> bool:
        """Returns whether all members were killed, asked to leave, or put out as they differed, so that none could
        finish the job.
        """
        return all(
            n.outcome == "killed" or n.leaving or (n.spec.parts_at and n.outcome.startswith("refused"))
            for n in self.nodes.values()
        ) or any(f.action == "drain" for f in self.plan.faults)

    def describe(self) -> str:
        """Returns a text on the state of all processes, for a report."""
        lines = [f"scheduler {self.scheduler.machine.phase} {self.scheduler.machine.snapshot()}"]
        for node in self.nodes.values():
            machine = node.machine
            lines.append(
                f"{node.name}={machine.member_id} {machine.phase} alive={node.alive} frozen={node.frozen} "
                f"view={machine.view.id if machine.view else None} promised={machine.promised} seq={machine.seq} "
                f"pending={machine.pending is not None} own={machine.contribution is not None} "
                f"outcome={node.outcome!r} stream={node.stream is not None}"
            )
        return "\n  ".join([*lines, *self.log])


def simulate(plan: Plan, hooks: Callable[[], Hooks] = Hooks, *, validate: bool = True) -> Outcome:
    """Runs one plan in a world of its own, and returns the outcome."""
    return World(plan, hooks(), validate=validate).run()
