"""Planted bugs in schedulers that misjudge deaths, go on after they were deposed, or lose their store (7, 9, 12 to 12b,
14a).

Two guards mask each other: a store that refuses whoever leads no more, and members that tell a scheduler that there is
a later term. So stores that refuse nothing come with a control of their own.
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.control.job_chain import ChainEntry, Tip, told
from chaos_lightning.membership.detector import Detector, Suspicion
from chaos_lightning.membership.effects import Chain, Persist
from chaos_lightning.membership.identity import Identity
from chaos_lightning.membership.judging import Deaths
from chaos_lightning.membership.past import Past
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.rebuilding import Rebuild
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.scene import Scene
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.silences import Silences
from chaos_lightning.membership.terms import Terms
from chaos_lightning.protocol.packing import PackedChange
from chaos_lightning.protocol.types import NO_VIEW, Entered, Heartbeat, Hello, Member, Settings, Span, Verdict, View
from chaos_lightning.service.store import Appended
from lab.simulate.bugs.frame import Bug, HastyBook, hooks_of, with_parts
from lab.simulate.plans.members import (
    blip_plan,
    busy_plan,
    edited_plan,
    last_holder_plan,
    plans_of,
    sleepy_scheduler_plan,
)
from lab.simulate.plans.schedulers import (
    exchanged_plan,
    forked_plan,
    leftover_plan,
    lingering_plan,
    lost_plan,
    overlapping_plan,
    promised_plan,
    restored_plan,
    strange_plan,
)
from lab.simulate.store import Store


class RashDetector(Detector):
    """Planted bug: a missed heartbeat counts as a death."""

    def _confirmed(self, now: float, peer: Peer, suspicion: Suspicion, scene: Scene) -> str:
        return suspicion.why


class HastySilences(Silences):
    """Planted bug: no silence is tolerated once a neighbour confirms it."""

    def patience_s(self, now: float, member: Member) -> float:
        return 0.0


class HastyJudge(SchedulerMachine):
    """Planted bug: the scheduler takes a silent member for dead as soon as a neighbour confirms the silence."""

    def __init__(self, settings: Settings, chain: Chain) -> None:
        super().__init__(settings, chain)
        self.detector.silences.__class__ = HastySilences


class ImpatientDetector(Detector):
    """Planted bug: the last member that holds the state is taken for dead as quickly as any other."""

    def _is_last_holder(self, member: str, scene: Scene, answered: tuple[Span, ...]) -> bool:
        return False


class StubbornDeaths(Deaths):
    """Planted bug: unproven deaths are never taken back, even if the state is lost with them."""

    def take_back(self, lost: tuple[Span, ...] | None = None) -> bool:
        return False


class CredulousDetector(Detector):
    """Planted bug: closed connections count at once as proof of a last holder's death."""

    def _proof(self, now: float, peer: Peer, suspicion: Suspicion, scene: Scene) -> str:
        return super()._proof(now, peer, suspicion, scene) or scene.fact(peer)


class DeafDetector(RashDetector, ImpatientDetector):
    """Planted bug: a missed heartbeat counts as a death, even that of the last member that holds the state."""


class DeafDeaths(StubbornDeaths):
    """Planted bug: deaths are never taken back, not even when the member that was taken for dead speaks again."""

    def revive(self, peer: Peer) -> None:
        self._detector.heard(peer.id)


RashScheduler = with_parts(detector=RashDetector)
StubbornScheduler = with_parts(deaths=StubbornDeaths)
ImpatientScheduler = with_parts(detector=ImpatientDetector, deaths=StubbornDeaths)
CredulousScheduler = with_parts(detector=CredulousDetector)
DeafScheduler = with_parts(detector=DeafDetector, deaths=DeafDeaths)


class UnforgivingScheduler(DeafScheduler):  # type: ignore[valid-type, misc]
    """Planted bug: a scheduler that was frozen counts that time as silence of all members."""

    def _forgive(self, now: float) -> None:
        before = self.desk.clock
        super()._forgive(now)
        gap = now - before if before is not None else 0.0
        if gap > 3 * self.desk.pacing.interval_s:
            for peer in self.roster.peers.values():
                peer.heard -= gap


class FaithfulTerms(Terms):
    """Planted bug: processes of another program are refused even if no member of the old program lives."""

    def authorities(self) -> list[Peer]:
        return [p for p in self._roster.peers.values() if not p.differs]


class FaithfulRoster(Roster):
    """Planted bug: the terms of a job are remembered even when all its members are dead."""

    def forget_terms(self) -> None:
        pass


FaithfulScheduler = with_parts(terms=FaithfulTerms, roster=FaithfulRoster)


class LaxStore(Store):
    """Planted bug: the store accepts every write, without a check of term, lease or predecessor."""

    def judge(self, term: int, persist: Persist, seen: Tip | None) -> Appended:
        return Appended(True)

    def guards(self, candidate: int) -> bool:
        return True


class OpenStore(Store):
    """Planted bug: the store accepts writes of a scheduler that has seen newer entries than the store has."""

    def judge(self, term: int, persist: Persist, seen: Tip | None) -> Appended:
        return super().judge(term, persist, None)


class BlindStore(Store):
    """Planted bug: records describe changes of the wrong view, the one before the last, and readers do not check
    that.
    """

    def _told(self, entry: ChainEntry) -> ChainEntry:
        if entry.view is None or len(self.views) < 2:
            return super()._told(entry)
        last, older = self.views[-1], self.views[-2]
        return told(replace(self.tip, view=replace(older, id=last.id)), entry)

    @staticmethod
    def _applied(before: View, change: PackedChange, digest: str) -> View:
        return Store._applied(before, change, change.before)


class ForgetfulStore(Store):
    """Planted bug: a store's summary record leaves out all views before the last two."""

    def _summary(self) -> ChainEntry:
        entry = super()._summary()
        assert entry.summed is not None
        return replace(entry, summed=replace(entry.summed, past=Past()))


class DeafIdentity(Identity):
    """Planted bug: the scheduler ignores that members know of views which its store lacks."""

    def _lacking(self, message: Hello | Entered | Heartbeat) -> str:
        return ""


class RuthlessIdentity(DeafIdentity):
    """Planted bug: as `DeafIdentity` and, besides, members of a view that the store lacks count as excluded."""

    def _is_foreign(self, hello: Hello) -> bool:
        return False


class ReissuingScheduler(SchedulerMachine):
    """Planted bug: a new scheduler numbers views from the last view on, although higher numbers were reserved or
    promised.
    """

    def __init__(self, settings: Settings, chain: Chain) -> None:
        last = chain.views[-1].id if chain.views else NO_VIEW
        super().__init__(settings, replace(chain, highest=last))


class ShortsightedScheduler(SchedulerMachine):
    """Planted bug: a new scheduler overlooks the last view, and so takes members that it excluded for members."""

    def __init__(self, settings: Settings, chain: Chain) -> None:
        super().__init__(settings, replace(chain, views=chain.views[:-1] or chain.views))


class IndifferentIdentity(Identity):
    """Planted bug: view numbers of another chain count as numbers of the scheduler's own."""

    def _is_another(self, chain: str) -> bool:
        return False

    def _lacking(self, message: Hello | Entered | Heartbeat) -> str:
        return ""


class HurriedIdentity(Identity):
    """Planted bug: a new scheduler decides at once, without waiting to hear members that may know more."""

    @property
    def hearing(self) -> bool:
        return False


class HastyRebuild(Rebuild):
    """Planted bug: a lost chain is rebuilt from the first reports, without waiting for more than half of the
    members.
    """

    def enough(self, here: int, view: View) -> bool:
        return here > 0

    def turn_rebuilding(self) -> bool:
        self._first_at = -1e9 if self._first_at is not None else None
        return super().turn_rebuilding()


class GullibleDetector(Detector):
    """Planted bug: a newcomer that never had a link to a suspect may confirm that the suspect's link is gone."""

    def verdict(self, by: str, verdict: Verdict, *, stranger: bool = False) -> None:
        super().verdict(by, verdict)


HeedlessScheduler = with_parts(identity=DeafIdentity)
HurriedScheduler = with_parts(identity=HurriedIdentity)


SCHEDULER_BUGS: dict[str, Bug] = {
    "12-rash": Bug(
        rule="12", what="a missed heartbeat is a death", hooks=hooks_of(scheduler=RashScheduler), plan=plans_of("lag")
    ),
    "12-hasty": Bug(
        rule="12",
        what="the silence of a process that is busy on another machine is a death",
        hooks=hooks_of(scheduler=HastyJudge),
        plan=busy_plan,
    ),
    "12-unforgiving": Bug(
        rule="12",
        what="the scheduler judges by its own sleep",
        hooks=hooks_of(scheduler=UnforgivingScheduler),
        plan=sleepy_scheduler_plan,
        control=hooks_of(scheduler=DeafScheduler),
    ),
    "12a-impatient": Bug(
        rule="12a",
        what="the last one that holds the state is not waited for",
        hooks=hooks_of(scheduler=ImpatientScheduler),
        plan=last_holder_plan,
    ),
    "12a-stubborn": Bug(
        rule="12a",
        what="a death without proof counts although the last other holder died",
        hooks=hooks_of(scheduler=StubbornScheduler),
        plan=last_holder_plan,
    ),
    "12a-credulous": Bug(
        rule="12a",
        what="broken connections prove that the last holder is dead",
        hooks=hooks_of(scheduler=CredulousScheduler),
        plan=blip_plan,
    ),
    "12b-faithful": Bug(
        rule="12b",
        what="what the job is, its dead members say",
        hooks=hooks_of(scheduler=FaithfulScheduler),
        plan=edited_plan,
    ),
    "7-announced": Bug(
        rule="7",
        what="views are announced before a failing store has them",
        hooks=hooks_of(scheduler=with_parts(book=HastyBook)),
        plan=forked_plan,
    ),
    "7-lax": Bug(
        rule="7",
        what="the store takes what a deposed scheduler writes",
        hooks=hooks_of(store=LaxStore, scheduler=HeedlessScheduler),
        plan=overlapping_plan,
        control=hooks_of(scheduler=HeedlessScheduler),
    ),
    "7-reissued": Bug(
        rule="7",
        what="a new scheduler forgets the numbers that members have promised",
        hooks=hooks_of(scheduler=ReissuingScheduler),
        plan=promised_plan,
    ),
    "7-unfenced": Bug(
        rule="7",
        what="a deposed scheduler goes on to put out members that it never heard of",
        hooks=hooks_of(scheduler=with_parts(identity=RuthlessIdentity)),
        plan=lingering_plan,
    ),
    "9-excluded": Bug(
        rule="9",
        what="a new scheduler decides from the reports of the excluded",
        hooks=hooks_of(store=LaxStore, scheduler=ShortsightedScheduler),
        plan=forked_plan,
        control=hooks_of(store=LaxStore),
    ),
    "7-misapplied": Bug(
        rule="7",
        what="a record of changes is applied to another view than it changes",
        hooks=hooks_of(store=BlindStore),
        plan=plans_of("kill", "two-joins", "sched-crash"),
    ),
    "7-forgotten": Bug(
        rule="7",
        what="a chain that was cut says less than the whole one",
        hooks=hooks_of(store=ForgetfulStore),
        plan=plans_of("kill", "two-joins", "sched-crash"),
    ),
    "14a-minority": Bug(
        rule="14a",
        what="a lost chain is rebuilt from a minority's reports",
        hooks=hooks_of(scheduler=with_parts(identity=HurriedIdentity, rebuild=HastyRebuild)),
        plan=lost_plan,
        control=hooks_of(scheduler=HurriedScheduler),
    ),
    "7-foreign": Bug(
        rule="7",
        what="the members of one chain are judged by another one",
        hooks=hooks_of(scheduler=with_parts(identity=IndifferentIdentity)),
        plan=leftover_plan,
    ),
    "14a-stale": Bug(
        rule="14a",
        what="a scheduler on an older copy of its store rules by it",
        hooks=hooks_of(scheduler=HeedlessScheduler),
        plan=restored_plan,
    ),
    "14a-open": Bug(
        rule="14a",
        what="a scheduler writes into an older copy that took the place of its store",
        hooks=hooks_of(store=OpenStore),
        plan=exchanged_plan,
    ),
    "14a-hurried": Bug(
        rule="14a",
        what="a scheduler that has just started does not wait for members that know more",
        hooks=hooks_of(scheduler=HurriedScheduler),
        plan=restored_plan,
    ),
    "12-gullible": Bug(
        rule="12",
        what="a newcomer without a link confirms a death",
        hooks=hooks_of(scheduler=with_parts(detector=GullibleDetector)),
        plan=strange_plan,
    ),
}
"""Planted bugs about schedulers, by name."""
