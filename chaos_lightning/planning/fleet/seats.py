"""Assigns the devices of a simulated fleet to places in a plan: by counters if all devices are alike, else by plans
that name devices.

Theory of operation. A `FleetRun` numbers its devices, and asks its seats what a loss takes along and which ways to go
on there are. `EqualSeats` keep a formation, whose places any device takes. `MixedSeats` keep the plan in force, which
names the devices of a fleet of several kinds, and ask `PlanOptions`, as a running job does: each way is planned and
priced at the devices' own memory, speed and links. Plans are searched as by `plan --first`, once for each set of
devices.

A device that is back before the plan has changed holds nothing any more: its places are rerouted first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from chaos_lightning.planning.pipelines.choice import MOVE, RESTART, PlanCandidate
from chaos_lightning.planning.pipelines.formation import EqualFleet, EqualOptions, Formation, Pauses
from chaos_lightning.planning.pipelines.job import JobError, TrainingJob
from chaos_lightning.planning.pipelines.options import PlanOptions
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.planner import NoPlanError, PlannedPipelines, Planner
from chaos_lightning.planning.pipelines.policies import POLICIES, Options
from chaos_lightning.planning.pipelines.rerouting import FatalLossError, reroute, without

MOST_MIXED = 64
"""Most devices of a fleet of several kinds; planning for more takes longer than anybody waits, once for each loss."""
FOR_EQUAL = ("oobleck", "algorithm1", "restart", "redundant")
"""Policies whose plans are for devices of one kind."""


@dataclass(frozen=True)
class Now:
    """State of a simulated fleet at the moment of a decision."""

    there: frozenset[int]
    slow: Mapping[int, float]
    """Fraction of its own speed at which each slow device runs, by device."""
    lost: bool
    """Whether a loss is the cause of the decision."""
    size_shares: Mapping[int, float]
    void_samples: float
    running_s: float
    """Seconds of a step of the plan that was in force."""


class EqualSeats:
    """Places in the plan of a fleet whose devices are all alike."""

    def __init__(self, fleet: EqualFleet) -> None:
        self.fleet = fleet
        self.formation: Formation | None = None
        self.places: dict[int, int] = {}
        """Place of each device."""

    @property
    def active(self) -> int:
        """Number of devices that have a place in the plan."""
        return len(self.places)

    def lose(self, devices: Iterable[int], there: Collection[int]) -> bool:
        """Leaves the places of lost devices vacant; returns whether some layer loses its last owner."""
        places = [self.places.pop(d) for d in devices if d in self.places]
        if self.formation is None or not places:
            return False
        before = min(self.fleet.live(self.formation))
        self.formation = self.formation.without(places)
        return bool(before) and not min(self.fleet.live(self.formation))

    def come(self, devices: Iterable[int], there: Collection[int]) -> None:
        """Does nothing: new devices get places with the next decision."""

    def options(self, now: Now) -> Options:
        slow = {self.places[d]: v for d, v in now.slow.items() if d in self.places}
        slow_idle = len(now.slow) - len(slow)
        return EqualOptions(
            fleet=self.fleet,
            before=self.formation,
            devices=len(now.there),
            idle=len(now.there) - len(self.places) - slow_idle,
            slow=slow,
            slow_idle=slow_idle,
            lost=now.lost,
            running_s=now.running_s,
            size_shares=now.size_shares,
            void_samples=now.void_samples,
        )

    def follow(self, chosen: PlanCandidate, there: Collection[int], slow: Mapping[int, float]) -> None:
        """Gives devices the places of the chosen plan: all places anew after a move or restart, else only those that
        change hands.
        """
        after: Formation = chosen.plan
        if after is self.formation and self.places:
            return
        if chosen.kind in (MOVE, RESTART) or self.formation is None:
            self.places, empty = {}, list(range(after.places))
        else:
            empty = sorted(self.formation.vacant - after.vacant)
            left = {d: self.places.pop(d) for d in slow if d in self.places}
            empty += [place for place in left.values() if place not in after.vacant]
        # A device that has become slow meanwhile takes a place only where no other is left.
        free = sorted(set(there) - self.places.keys(), key=lambda d: (d in slow, d))
        self.places |= zip(free, empty, strict=False)
        self.formation = after


class MixedFleet:
    """Plans for a job on devices of several kinds; the search for each set of devices runs once.

    Args:
        job: The job and its whole fleet; no other device comes.
        pauses: Seconds that changes of the plan cost; a move takes at least as long as its bytes need.

    Raises:
        JobError: There are too many devices.
    """

    def __init__(self, job: TrainingJob, pauses: Pauses) -> None:
        if len(job.devices) > MOST_MIXED:
            raise JobError(
                f"the fleet has {len(job.devices)} devices of several kinds or links; expected at most {MOST_MIXED}, "
                "or devices and links that are all alike"
            )
        self.job, self.pauses, self.planner = job, pauses, Planner(job)
        self.samples = job.micro_batches * job.samples
        self.names = [d.name for d in job.devices]
        self._found: dict[frozenset[str], PlannedPipelines | None] = {}

    def planned(self, names: Iterable[str]) -> PlannedPipelines | None:
        """Returns the plan for these devices; None if no plan fits."""
        key = frozenset(names)
        if key not in self._found:
            try:
                self._found[key] = self.planner.first(key)
            except NoPlanError:
                self._found[key] = None
        return self._found[key]

    def named(self, devices: Iterable[int]) -> set[str]:
        return {self.names[d] for d in devices}

    def ways(self, plan: PipelinePlan, now: Now) -> PlanOptions:
        """Returns the options to go on from a plan; devices without layers count as idle."""
        there = self.named(now.there)
        speeds = {self.names[d]: self.job.devices[d].speed * share for d, share in now.slow.items()}
        found = PlanOptions(
            planner=self.planner,
            before=with_all(plan, self.names),
            lost=tuple(n for n in self.names if n not in there),
            slow=speeds,
            pauses=self.pauses,
            size_shares=now.size_shares,
            first=True,
        )
        planned = self.planned(found.healthy)
        if planned is not None:
            found.planned = planned
        return found


def with_all(plan: PipelinePlan, names: Iterable[str]) -> PipelinePlan:
    """Returns the plan with all devices that own no layers listed as idle."""
    return replace(plan, idle=tuple(sorted(set(names) - set(plan.stages))))


@dataclass(frozen=True)
class MixedOptions:
    """Options of a fleet of several kinds of devices at the moment of a decision."""

    fleet: MixedFleet
    now: Now
    ways: PlanOptions | None
    """Ways to go on from the plan in force; None: there is no such plan, or some layer of it has no owner left."""
    begun: bool

    def _told(self, found: PlanCandidate | None) -> PlanCandidate | None:
        """Returns the candidate, without redone work unless devices were lost."""
        return found if found is None or self.now.lost else replace(found, redo_s=0.0)

    def _anew(self, kind: str, transition_s: float, void_samples: float = 0.0) -> PlanCandidate | None:
        healthy = self.fleet.named(self.now.there - self.now.slow.keys()) or self.fleet.named(self.now.there)
        planned = self.fleet.planned(healthy)
        found = self.fleet.ways(planned.plan, self.now).keep() if planned else None
        if found is None:
            return None
        return replace(found, kind=kind, transition_s=transition_s, redo_s=0.0, void_samples=void_samples)

    @property
    def whole(self) -> bool:
        return self.ways is not None and self.ways.whole

    def keep(self) -> PlanCandidate | None:
        return self._told(self.ways.keep()) if self.ways else None

    def fill(self) -> PlanCandidate | None:
        return self._told(self.ways.fill()) if self.ways else None

    def avoid(self) -> PlanCandidate | None:
        return self._told(self.ways.avoid()) if self.ways else None

    def move(self, kind: str = "best") -> PlanCandidate | None:
        if self.ways:
            return self._told(self.ways.move(kind))
        return None if self.begun or kind != "best" else self._anew(MOVE, 0.0)

    def shadow(self) -> None:
        """Returns None, since fleets of several kinds of devices have no redundant stages."""

    def restart(self, kind: str = "best") -> PlanCandidate | None:
        if not self.begun:
            return self.move(kind)
        p = self.fleet.pauses
        return self._anew(RESTART, p.move_s + p.reload_s, self.now.void_samples) if kind == "best" else None


class MixedSeats:
    """Assignment of devices to places in a fleet of several kinds: keeps the current plan, which names the devices."""

    def __init__(self, fleet: MixedFleet) -> None:
        self.fleet = fleet
        self.plan: PipelinePlan | None = None
        self.begun = False
        self.active = 0

    def _gone(self, there: Collection[int]) -> set[str]:
        return set(self.fleet.names) - self.fleet.named(there)

    def lose(self, devices: Iterable[int], there: Collection[int]) -> bool:
        """Takes lost devices out of the plan; returns whether some layer loses its last owner, which ends the plan."""
        if self.plan is None:
            return False
        gone = self._gone(there)
        self.active = len(self.plan.stages.keys() - gone)
        try:
            without(self.plan, gone)
        except FatalLossError:
            self.plan, self.active = None, 0
        return self.plan is None

    def come(self, devices: Iterable[int], there: Collection[int]) -> None:
        """Reroutes micro-batches around devices that have come back empty but still have a place in the plan."""
        back = self.fleet.named(devices)
        if self.plan is not None and back & self.plan.stages.keys():
            found = reroute(self.fleet.job, self.plan, self._gone(there) | back, search=False)
            self.plan = with_all(found, self.fleet.names)

    def options(self, now: Now) -> Options:
        ways = None if self.plan is None else self.fleet.ways(self.plan, now)
        return MixedOptions(self.fleet, now, ways, self.begun)

    def follow(self, chosen: PlanCandidate, there: Collection[int], slow: Mapping[int, float]) -> None:
        """Makes the chosen plan the current one."""
        self.plan, self.begun = with_all(chosen.plan, self.fleet.names), True
        self.active = len(self.plan.stages)


def check_policies(names: Iterable[str]) -> None:
    """Refuses policies that cannot plan for devices of several kinds.

    Raises:
        JobError: One of them is named.
    """
    for name in names:
        if name in FOR_EQUAL:
            others = ", ".join(p for p in POLICIES if p not in FOR_EQUAL)
            raise JobError(f"--policy {name} plans for devices that are alike, and these are not; expected {others}")
