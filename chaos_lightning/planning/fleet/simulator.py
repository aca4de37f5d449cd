"""Simulates a job on a fleet under one policy; counts the samples that it trains, and its seconds by what they are
spent on.

Theory of operation. A `FleetRun` replays a `Trace` on the simulator's kernel. Between two changes the job is in one
phase, to which all time is charged: it trains, at a throughput that follows from its formation; it pauses, for a
transition, for work of the open step that is done again, or for a checkpoint that is read; or it waits, because no plan
fits. At each change the policy decides. A plan that moves layers or seats newcomers is in force once its pause is over:
until then the old owners hold what they held, so a second loss within a recovery is decided from the old formation with
both losses, and the pause begins anew.

Where some layer has lost its last owner the job restarts from its newest checkpoint. What was trained since is void:
its time is charged as lost, its samples do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos_lightning.planning.fleet.kernel import Kernel
from chaos_lightning.planning.fleet.seats import EqualSeats, MixedFleet, MixedSeats, Now
from chaos_lightning.planning.fleet.traces import FleetChange, Trace
from chaos_lightning.planning.pipelines.choice import (
    RESTART,
    THRESHOLD,
    Decision,
    Outlook,
    PlanCandidate,
    restart_worth,
)
from chaos_lightning.planning.pipelines.formation import EqualFleet
from chaos_lightning.planning.pipelines.history import LossHistory
from chaos_lightning.planning.pipelines.policies import decide
from chaos_lightning.planning.quantities import HOUR_S

CAUSES = ("train", "redo", "move", "reload", "void", "wait")
"""Causes to which time is charged: training that counts, open steps done again, transitions, checkpoints read, training
since a checkpoint that was lost, waiting for devices.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """State of a simulated run that lasts from one moment to the next sample."""

    hours: float
    devices: int
    """Number of devices that are there."""
    active: int
    """Number of devices that have a place in the plan."""
    throughput: float
    """Samples/s; 0 in a pause."""
    plan: str
    """Plan in force, in words; in a pause, the kind of the change; "none" while no plan fits."""
    why: str
    """Reason of the decision."""


@dataclass
class Outcome:
    """Result of a simulated run."""

    policy: str
    seed: int
    hours: float
    samples: float = 0.0
    """Number of samples that count at the end."""
    steps: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Seconds by cause; they add up to the length of the run."""
    losses: int = 0
    lost_devices: int = 0
    fatal: int = 0
    """Losses that took the last owner of some layer."""
    decisions: dict[str, int] = field(default_factory=dict)
    """Number of decisions by the kind of the chosen candidate."""
    failed: dict[str, str] = field(default_factory=dict)
    """Error of each policy that raised one: the first one's text, by policy."""
    history: list[Sample] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Average samples per second over the whole run."""
        return self.samples / (self.hours * HOUR_S)

    def to_dict(self, *, history: bool = True) -> dict[str, Any]:
        """Returns the result of the simulation as JSON values."""
        found = asdict(self) | {"throughput": self.throughput}
        if not history:
            del found["history"]
        return found


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules by which a policy compares its candidates."""

    with_risk: bool = True
    threshold: float = THRESHOLD
    """Fraction by which another plan has to be better if no device is lost."""


class FleetRun:
    """Run of a job on a simulated fleet under one policy.

    Args:
        fleet: Plans of the job; several runs may share them.
        trace: Devices that come and go, and when.
        policy: Name of the policy.
        seed: Seed that the outcome names.
        rules: Rules by which candidates are weighed.
        record: Whether the history of throughput and plans is recorded.
        told: Function that is called with the hour of each decision, and the decision.
    """

    def __init__(
        self,
        fleet: EqualFleet | MixedFleet,
        trace: Trace,
        policy: str,
        *,
        seed: int = 0,
        rules: Rules | None = None,
        record: bool = False,
        told: Callable[[float, Decision], None] | None = None,
    ) -> None:
        self.fleet, self.trace, self.policy = fleet, trace, policy
        self.rules, self.record, self.told = rules or Rules(), record, told
        self.kernel = Kernel(seed)
        self.out = Outcome(policy, seed, trace.end_s / HOUR_S)
        self.learnt = LossHistory()
        self.there = set(trace.first)
        self.slow: dict[int, float] = {}
        self.seats = EqualSeats(fleet) if isinstance(fleet, EqualFleet) else MixedSeats(fleet)
        self.pauses: list[tuple[str, float]] = []
        """Pauses in order: the cause, and the time (s) at which the pause ends."""
        self.waits = True
        self.throughput = self.step_s = 0.0
        self._epoch = 0
        self._later = False
        """Whether something has changed during a pause, so that the end of the pause asks for a decision."""
        self._since = 0.0
        self._open = [0.0, 0.0]
        """Seconds and samples since the newest checkpoint."""
        self._due_s = fleet.pauses.checkpoint_s
        """Time (s) at which the next checkpoint is due."""

    def run(self) -> Outcome:
        self._decide(lost=False)
        for change in self.trace.changes:
            self.kernel.at(change.at_s, self._change(change))
        self.kernel.run(self.trace.end_s, lambda: False)
        self.kernel.now = self.trace.end_s
        self._advance()
        self._commit(*self._open)
        return self.out

    # ------------------------------------------------------------------------------------------------ time

    def _advance(self) -> None:
        """Accounts for the virtual time since the last call: as training, or under the cause of the pause."""
        at, now = self._since, self.kernel.now
        self.learnt.watched(len(self.there), now - at)
        for cause, until in self.pauses:
            if at < until:
                self.out.seconds[cause] += min(now, until) - at
                at = min(now, until)
        self.pauses = [p for p in self.pauses if p[1] > now]
        if now > at and self.waits:
            self.out.seconds["wait"] += now - at
        elif now > at:
            self._train(at, now)
        self._since = now

    def _train(self, at: float, now: float) -> None:
        every = self.fleet.pauses.checkpoint_s
        if now >= self._due_s:
            # A checkpoint that was due in a pause is written at the pause's end.
            written = max(at, now // every * every)
            self._commit(self._open[0] + written - at, self._open[1] + (written - at) * self.throughput)
            self._open, at = [0.0, 0.0], written
            self._due_s = (now // every + 1) * every
        self._open[0] += now - at
        self._open[1] += (now - at) * self.throughput

    def _commit(self, seconds: float, samples: float) -> None:
        self.out.seconds["train"] += seconds
        self.out.samples += samples
        self.out.steps += samples / self.fleet.samples

    # ------------------------------------------------------------------------------------------------ changes

    def _change(self, change: FleetChange) -> Callable[[], None]:
        def act() -> None:
            self._advance()
            match change.kind:
                case "remove":
                    self._remove(change.devices)
                case "add":
                    self.there.update(change.devices)
                    self.seats.come(change.devices, self.there)
                    self.learnt.came(len(change.devices))
                case "slow":
                    self.slow |= dict.fromkeys(change.devices, change.speed)
                case "well":
                    for d in change.devices:
                        self.slow.pop(d, None)
            if change.kind == "remove" or not self.pauses:
                self._decide(lost=change.kind == "remove")
            else:
                self._later = True  # a recovery is not begun anew because devices came

        return act

    def _remove(self, devices: tuple[int, ...]) -> None:
        self.out.losses += 1
        self.out.lost_devices += len(devices)
        self.learnt.lost(len(devices))
        self.there.difference_update(devices)
        for d in devices:
            self.slow.pop(d, None)
        self.out.fatal += self.seats.lose(devices, self.there)

    def _decide(self, *, lost: bool) -> None:
        self._later = False
        rate, p = self.learnt.rate * len(self.there), self.fleet.pauses
        outlook = Outlook(
            rate=rate,
            returns=self.learnt.return_rate(len(self.there)),
            restart_worth=restart_worth(rate, p.checkpoint_s / 2 + p.move_s + p.reload_s),
            with_risk=self.rules.with_risk,
            threshold=0.0 if lost else self.rules.threshold,
        )
        if not self.there:
            self._wait("nobody is there")
            return
        now = Now(frozenset(self.there), dict(self.slow), lost, self.learnt.size_shares, self._open[1], self.step_s)
        decision = decide(self.policy, self.seats.options(now), outlook)
        if self.told:
            self.told(self.kernel.now / HOUR_S, decision)
        for who, what in decision.failed:
            self.out.failed.setdefault(who, what)
        if decision.chosen is None:
            self._wait(decision.reason)
        else:
            self._follow(decision.chosen, decision.reason)

    def _wait(self, why: str) -> None:
        self._epoch += 1
        self.pauses, self.waits, self.throughput = [], True, 0.0
        self._note("none", why)

    def _follow(self, chosen: PlanCandidate, why: str) -> None:
        self._epoch += 1
        out, now = self.out, self.kernel.now
        out.decisions[chosen.kind] = out.decisions.get(chosen.kind, 0) + 1
        cause = "move"
        if chosen.kind == RESTART:
            cause = "reload"
            out.seconds["void"] += self._open[0]
            self._open = [0.0, 0.0]
        redone = now + chosen.redo_s
        moved = redone + chosen.transition_s
        self.waits = False
        self.pauses = [("redo", redone), (cause, moved)]
        if moved > now:
            epoch = self._epoch
            self.throughput = 0.0
            self._note(chosen.kind, why)
            self.kernel.at(moved, lambda: self._begin(chosen, why) if epoch == self._epoch else None)
        else:
            self._begin(chosen, why)

    def _begin(self, chosen: PlanCandidate, why: str) -> None:
        """Switches to the chosen plan at the end of a pause."""
        self._advance()
        self.seats.follow(chosen, self.there, self.slow)
        self.throughput, self.step_s = chosen.throughput, chosen.step_s
        self._note(chosen.about, why)
        if self._later:
            self._decide(lost=False)

    def _note(self, plan: str, why: str) -> None:
        if self.record:
            active = self.seats.active
            self.out.history.append(
                Sample(self.kernel.now / HOUR_S, len(self.there), active, self.throughput, plan, why)
            )
