"""Planted bugs in joining by replay (protocol.md 8, 15, 17, 18, 19).

Theory of operation. A newcomer's state is compared with the members' when it is let in (19). That makes good whatever
went wrong before, at the price of a pause; so what breaks 15 and 17 only shows with this proof off: `UnprovenNode`
takes the replayed state as it is. Nothing else is to go wrong in those runs (`calm_plan`), for a learner may apply
a slot that is never committed by the survivors of its sender, which the proof makes good, too. A log that is let go
too early harms nobody's state: it shows as ranges that all members wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chaos_lightning.membership.admission import Admission
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.learners import Learners
from chaos_lightning.membership.member import MemberPhase
from chaos_lightning.membership.peers import Peer, Standing
from chaos_lightning.protocol.types import FromMember, Header
from lab.simulate.bugs.frame import Bug, TrustingNode, hooks_of, with_parts
from lab.simulate.dataplane import SumEntry
from lab.simulate.node import Node
from lab.simulate.observing import Keeper, Observation
from lab.simulate.plan import Plan
from lab.simulate.plans.learners import (
    all_leave_plan,
    calm_plan,
    founding_plan,
    promise_plan,
    silent_plan,
)
from lab.simulate.training import State

# ------------------------------------------------------------------ 15: one header's state


class LateKeeper(Keeper):
    """Planted bug: a member copies the state for learners one step too late, but serves it as that of the header
    before.
    """

    _waits: Header | None = None

    def committed(self, before: Header, header: Header) -> None:
        late, self._waits = self._waits, None
        super().committed(before, header)
        if late is not None and header.learners:
            super().begin_copy(late)

    def begin_copy(self, header: Header) -> None:
        self._waits = header


class MixingKeeper(Keeper):
    """Planted bug: the optimizer does not wait for a learner's copy of the state, which so mixes ranges of two
    steps.
    """

    def settle(self) -> None:
        return


class ForwardKeeper(Keeper):
    """Planted bug: buffers that a forward pass changes are copied for learners too late, after the pass has changed
    them.
    """

    def state_at(self, header: Header) -> tuple[int, ...] | None:
        state = super().state_at(header)
        return None if state is None else (*state[:-1], self.node.live[-1])


class EagerNode(Node):
    """Planted bug: a founder gives other founders its own state while it is still loading the job's."""

    def serve_state(self, header: Header) -> State | None:
        if self.machine.phase is MemberPhase.LOADING and header.hash == self.machine.header.hash:
            self.published = self.published or (header.hash, self.state)
        return super().serve_state(header)


# ------------------------------------------------------------------ 17: every entry once, in order


class SkippingKeeper(Keeper):
    """Planted bug: a member gives a learner the log's newest entry instead of the one that follows the learner's
    header.
    """

    def after(self, at: Header) -> SumEntry | None:
        super().after(at)
        newest = self.entries.get(self.newest)
        return newest if newest is not None and newest.header.seq > at.seq else None


class RepeatingObservation(Observation):
    """Planted bug: a learner applies some log entries twice, as if their answer had come twice."""

    def apply(self, entry: SumEntry) -> None:
        super().apply(entry)
        if entry.header.seq % 3 == 0:
            super().apply(entry)


# ------------------------------------------------------------------ 18: the log is kept until the newcomer stands


class HastyLearners(Learners):
    """Planted bug: learners that have caught up, but are not in yet, are no longer given the log."""

    def _listed(self) -> tuple[str, ...]:
        return tuple(m for m in super()._listed() if not self._roster.peers[m].caught_up)


class PatientLearners(Learners):
    """Planted bug: learners are waited for without limit."""

    def _overdue(self, peer: Peer) -> str:
        return ""


class LeisurelyLearners(Learners):
    """Planted bug: learners go on replaying though too few members stay to train or to hold the state."""

    def _too_few(self) -> str:
        return ""


# ------------------------------------------------------------------ 19: proof


class UnprovenNode(TrustingNode):
    """Planted bug: a newcomer's replayed state counts as the job's without any comparison of hashes."""

    def kept_ranges(self, header: Header) -> dict[int, int]:
        observation = self.observation
        if observation is None or not observation.catching_up.done or observation.state is None:
            return {}
        return dict(enumerate(observation.state)) if observation.log.at.seq == header.seq else {}


# ------------------------------------------------------------------ 8: a learner's word is no promise


class CountingAdmission(Admission):
    """Planted bug: any message of a learner counts as a member's report for a recovery."""

    def on_message(self, conn: int, message: FromMember) -> None:
        super().on_message(conn, message)
        peer = self.roster.peers.get(self.roster.conns.get(conn, ""))
        if self.desk.phase is not SchedulerPhase.PREPARING or peer is None or peer.standing is not Standing.OBSERVING:
            return
        given = next((p.report for p in self.roster.living() if p.report is not None), None)
        missing = next((p for p in self.roster.living() if p.report is None), None)
        if given is not None and missing is not None:
            missing.report = given


def _impure_plan(seed: int) -> Plan:
    """Returns a plan whose steps are not pure functions although the user said so: replay fails, but no state may
    differ.
    """
    plan = calm_plan(seed)
    return replace(plan, replaying=replace(plan.replaying, calm=False, impure=0.3))


def _unproven(what: str, rule: str, plan: Callable[[int], Plan] = calm_plan, **parts: type) -> Bug:
    return Bug(
        rule=rule,
        what=what,
        hooks=hooks_of(node=UnprovenNode, **parts),  # type: ignore[arg-type]
        plan=plan,
        control=hooks_of(node=UnprovenNode),
    )


LEARNER_BUGS: dict[str, Bug] = {
    "8-learners": Bug(
        rule="8",
        what="a learner's word is taken for a member's promise",
        hooks=hooks_of(scheduler=with_parts(admission=CountingAdmission)),
        plan=promise_plan,
    ),
    "15-late": _unproven("the state is copied one step late", "15", keeper=LateKeeper),
    "15-mixed": _unproven("the optimizer writes into what is being copied", "15", keeper=MixingKeeper),
    "15-forward": _unproven("a forward pass writes into what is being copied", "15", keeper=ForwardKeeper),
    "15-eager": Bug(
        rule="15",
        what="founders give others a state before they have loaded it",
        hooks=hooks_of(node=EagerNode),
        plan=founding_plan,
    ),
    "17-skips": _unproven("entries of the log are left out", "17", keeper=SkippingKeeper),
    "17-twice": _unproven("entries of the log are applied twice", "17", observation=RepeatingObservation),
    "18-hasty": Bug(
        rule="18",
        what="the log is let go as soon as a learner has caught up",
        hooks=hooks_of(scheduler=with_parts(learners=HastyLearners)),
        plan=calm_plan,
    ),
    "18-patient": Bug(
        rule="18",
        what="learners that say nothing are waited for, and others behind them",
        hooks=hooks_of(scheduler=with_parts(learners=PatientLearners)),
        plan=silent_plan,
    ),
    "17-leisurely": Bug(
        rule="17",
        what="learners take their time though the last member leaves",
        hooks=hooks_of(scheduler=with_parts(learners=LeisurelyLearners)),
        plan=all_leave_plan,
    ),
    "19-unproven": Bug(
        rule="19",
        what="a replayed state is taken without comparing hashes",
        hooks=hooks_of(node=UnprovenNode),
        plan=_impure_plan,
        control=hooks_of(node=TrustingNode),
    ),
}
"""Planted bugs of replay joins, by name."""
