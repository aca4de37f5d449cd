"""Chooses the pipelines of each view: when a job is founded, after each change of members, and when a better plan is
found.

Theory of operation. A `Pipeliner` knows the job's profile: what layers cost, what devices and links can do, how many
micro-batches a step has. It answers in the scheduler's turn, within milliseconds. After a loss it takes the ways to go
on that a policy proposes (`policies`) of those that there are (`options`): micro-batches of the lost go to the owners
of the same layers, idle members take vacant places, or layers move to a plan that is found at once. `choice` takes the
one that trains most samples until the next loss. There is no way back to a checkpoint inside a running job, so an
answer may be that no pipelines are possible: because a layer has no holder left, or no plan fits into memory.

The best plan takes seconds to find. It is asked for by a `PlanWish`, found in another process (`search_plan`), and
taken by `better` if the members are still the same and the gain outweighs the transition.

An answer is a text (`ViewPipelines`) with the instruction lists of pipelines that share micro-batches. It is made once,
here: members with different measurements would make lists that wait for each other. Answers depend on the arguments
and the profile, and on the losses that the pipeliner was told of; not on earlier answers, so that another scheduler
goes on where this one stopped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines import policies
from chaos_lightning.planning.pipelines.choice import FILL, KEEP, MOVE, Decision, Outlook, PlanCandidate, choose
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.files import job_of, to_dict
from chaos_lightning.planning.pipelines.formation import Pauses
from chaos_lightning.planning.pipelines.history import LossHistory
from chaos_lightning.planning.pipelines.job import Device, JobError, NamedLink, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.linked import Links, seated_by_links
from chaos_lightning.planning.pipelines.lists import plan_lists
from chaos_lightning.planning.pipelines.moves import Held, Moves
from chaos_lightning.planning.pipelines.options import PlanOptions
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.planner import NoPlanError, PlannedPipelines, Planner
from chaos_lightning.planning.pipelines.request import PIPELINE_POLICIES
from chaos_lightning.planning.pipelines.shortage import least_devices
from chaos_lightning.planning.pipelines.units import ViewPipelines

PAUSES = Pauses(reroute_s=0.15, fill_s=0.6, move_s=0.6)
"""Costs of changes to a running job, in seconds, if bytes do not take longer."""
LITTLE = 1e-6
"""Fraction of a micro-batch's time by which a unit's cost is raised to see how many units lie on the critical path."""
_NAMES = {KEEP: "reroute", FILL: "fill", MOVE: "move"}


@dataclass(frozen=True, kw_only=True)
class PipelineAnswer:
    """Pipelines of the next view, or the reason why there are none."""

    text: str | None
    """Text for the view (`ViewPipelines.to_json`); None: there are no pipelines for these members."""
    reason: str
    """Reason in a sentence, for the log."""
    candidates: tuple[PlanCandidate, ...] = ()
    """Candidates among which the chosen one was."""
    chosen: PlanCandidate | None = None
    horizon_s: float = math.inf
    """Seconds until the next loss or return of a member, on average."""
    moves: Moves | None = None
    """Bytes of layers that go from member to member."""
    lost_layers: tuple[str, ...] = ()
    """Names of layers that no member holds any more."""
    least_members: int | None = None
    """Smallest number of members like the roomiest one with which a plan fits, if none fits now; None: no number."""
    restarts: bool = False
    """Whether the policy has the job end, so that it begins again from a checkpoint."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Fraction of a step in which each member computes, 0 to 1; the rest is bubbles and waiting."""

    def facts(self) -> dict[str, Any]:
        """Returns the answer as the fields of an event: numbers, texts, and lists of them."""
        return {
            "reason": self.reason,
            "candidates": [
                {
                    "name": f"{c.policy}: {_NAMES[c.kind]}",
                    "step_s": c.step_s,
                    "transition_s": c.transition_s,
                    "samples": c.value * self.horizon_s if math.isfinite(self.horizon_s) else None,
                    "lacks": c.lacks,
                }
                for c in self.candidates
            ],
            "chosen": None if self.chosen is None else self.candidates.index(self.chosen),
            "step_s": None if self.chosen is None else self.chosen.step_s,
            "busy": dict(self.busy),
            "moved_nbytes": self.moves.nbytes if self.moves else 0,
            "lost_layers": list(self.lost_layers),
            "least_members": self.least_members,
        }


@dataclass(frozen=True)
class PlanWish:
    """Request to search for the best plan for some members, carried out by another process."""

    job: TrainingJob
    """Job on these members."""
    copies: int
    """Number of owners that each layer is to have, as far as memory allows."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the request as JSON values that `from_dict` reads back."""
        return {"job": to_dict(self.job), "copies": self.copies}

    @staticmethod
    def from_dict(about: Mapping[str, Any]) -> PlanWish:
        """Returns the request from the values that `to_dict` made.

        Raises:
            JobError: The value is no wish.
        """
        copies = about.get("copies")
        if type(copies) is not int or copies < 1:
            raise JobError(f"a wish for a plan: copies is {copies!r}; expected a whole number of at least 1")
        return PlanWish(job_of(about.get("job"), "a wish for a plan"), copies)


def search_plan(wish: PlanWish) -> PipelinePlan | None:
    """Returns the best plan, or None if none fits; takes seconds, so it runs in a process of its own."""
    try:
        return _safe(wish.copies, lambda copies: Planner(wish.job, copies=copies).exact()).plan
    except NoPlanError:
        return None


def _safe(copies: int, planned: Callable[[int], PlannedPipelines]) -> PlannedPipelines:
    """Returns a plan with `copies` owners of each layer, or with as many as fit into memory.

    Raises:
        NoPlanError: No plan fits.
    """
    for least in range(copies, 1, -1):
        try:
            return planned(least)
        except NoPlanError:
            continue
    return planned(1)


class Pipeliner:
    """Chooser of each view's pipelines, which knows the job's measured profile.

    Args:
        profile: Job with layers, links and micro-batches; members bring their own devices.
        policy: One of `PIPELINE_POLICIES`.
        copies: Owners that each layer is to have, as far as memory allows, so that a loss does not take it along.
        shared: Layers that use a parameter together, by its name.

    Attributes:
        history: Losses of this job. The owner of the pipeliner has a clock, and notes losses and time there.
        overheads: Overheads as this job has measured them (`measured`); None: as the profile has them.

    Raises:
        PlanError: There is no such policy.
    """

    def __init__(
        self,
        profile: TrainingJob,
        policy: str = "adaptive",
        *,
        copies: int = 2,
        shared: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        if policy not in PIPELINE_POLICIES:
            raise PlanError(
                f"policy {policy!r} is not for running jobs; expected one of {', '.join(PIPELINE_POLICIES)}"
            )
        self.profile, self.policy, self.copies = profile, policy, copies
        self.shared = dict(shared or {})
        self.history = LossHistory()
        self.overheads: Overheads | None = None
        self._alone: tuple[tuple[str, tuple[Device, ...]], StepEstimate, float, float] | None = None
        self._planners: dict[int, Planner] = {}
        self._last: tuple[str, PipelinePlan] | None = None
        if policy in ("adaptive", "restart"):
            policies.installed()  # looks for entry points on the disk, once

    def _job(self, members: Iterable[Device]) -> TrainingJob:
        """Returns the measured profile as a job on these members, with the links named in it translated to members."""
        devices = sorted(members, key=lambda d: d.name)
        ends: dict[str, set[str]] = {}
        for d in devices if self.profile.links else ():
            ends.setdefault(d.name.partition("~")[0], set()).add(d.name)
            ends.setdefault(d.name, set()).add(d.name)
            ends.setdefault(d.host, set()).add(d.host)
        links: dict[frozenset[str], NamedLink] = {}
        for x in self.profile.links:
            for a in sorted(ends.get(x.a, ())):
                for b in sorted(ends.get(x.b, ())):
                    if a != b or x.a == x.b:
                        links.setdefault(frozenset((a, b)), replace(x, a=a, b=b))
        overheads = self.overheads or self.profile.overheads
        return replace(self.profile, devices=tuple(devices), links=tuple(links.values()), overheads=overheads)

    def _planner(self, job: TrainingJob, copies: int) -> Planner:
        last = self._planners.get(copies)
        found = self._planners[copies] = last.on(job) if last else Planner(job, copies=copies)
        return found

    def _planned(self, job: TrainingJob) -> PlannedPipelines:
        return _safe(self.copies, lambda copies: self._planner(job, copies).at_once())

    # ------------------------------------------------------------------------------------------------ answers

    def first(self, members: Collection[Device], links: Links | None = None) -> PipelineAnswer:
        """Returns the pipelines for the members that found a job.

        Args:
            members: Members that found the job.
            links: Pairs of them that have a link; None: all.
        """
        job = self._job(members)
        try:
            planned = self._planned(job)
        except NoPlanError as error:
            return self._none(job, str(error))
        plan = planned.plan
        if links is not None:
            plan = seated_by_links(plan, {d.name: d.kind for d in job.devices}, links, self.shared)
        options = self._options(job, plan, links=links)
        found = options.keep()
        assert found is not None, "a new plan has an owner of each layer"
        if not found.fits:
            return self._none(job, found.lacks)
        chosen = replace(found, policy="first", kind=MOVE, value=self._outlook(options).value(found))
        return self._answer(options, Decision((chosen,), chosen, f"first plan: {planned.why}"))

    def after(
        self,
        text: str,
        members: Collection[Device],
        leaving: Collection[Device] = (),
        held: Held | None = None,
        links: Links | None = None,
    ) -> PipelineAnswer:
        """Returns the pipelines of the next view after members have changed.

        Members of the view before that are in neither list are lost. Members that are new own nothing yet.

        Args:
            text: The pipelines of the view before.
            members: Members of the next view.
            leaving: Members that are let go: they run nothing, and hold what they own until others have it.
            held: Numbers of the layers that each member holds, where that is known; None: those that `text` says it
                owns.
            links: Pairs of members that have a link; None: all.

        Raises:
            PlanError: The text is none of this job's.
        """
        before, job = self.read(text), self._job(members)
        there = set(job.by_name)
        serving = tuple(d for d in leaving if d.name not in there)
        lost = set(before.devices) - there - {d.name for d in serving}
        options = self._options(job, before, serving, held, links)
        if options.lost_layers:
            names = [self.profile.layers[x].name for x in options.lost_layers]
            return self._none(job, f"nobody who is left holds {_few('layer', names)}", tuple(names))
        restarts = self.policy == "restart"
        if restarts and not lost.isdisjoint(before.stages):
            reason = f"policy restart: {_few('member', sorted(lost))} lost, so begin from a checkpoint"
            return PipelineAnswer(text=None, reason=reason, restarts=True)
        decision = policies.decide("adaptive" if restarts else self.policy, options, self._outlook(options))
        if decision.chosen is None:
            return self._none(job, decision.reason, decision=decision)
        return self._answer(options, decision)

    def better(
        self, text: str, members: Collection[Device], plan: PipelinePlan | None, links: Links | None = None
    ) -> PipelineAnswer:
        """Returns the pipelines for the present members, changed to the plan that a search found if the change pays.

        Args:
            text: The pipelines of the view that rules.
            members: The members of that view.
            plan: Plan that `search_plan` found for members, maybe for others than these.
            links: Pairs of members that have a link; None: all.

        Returns:
            An answer whose text is the one given if the plan does not pay, is stale or is no plan.

        Raises:
            PlanError: The text is none of this job's.
        """
        before, job = self.read(text), self._job(members)
        if plan is None:
            return PipelineAnswer(text=text, reason="the plan stays: no other plan fits")
        same_job = (plan.layer_count, plan.micro_batches) == (before.layer_count, before.micro_batches)
        if not same_job or not tuple(job.by_name) == plan.devices == before.devices:
            return PipelineAnswer(text=text, reason="the plan stays: the other one is of other members")
        searched = PlannedPipelines(plan, StepEstimate(0.0, 0.0, 0.0, 0.0, 0.0, {}), False, 0.0, "")
        options = replace(self._options(job, before, links=links), live=lambda: searched)
        ways = [replace(c, policy="searched") for c in (options.keep(), options.move()) if c is not None]
        decision = choose(ways, self._outlook(options))
        stays = decision.chosen is None or decision.chosen.kind == KEEP
        return self._answer(options, decision, text if stays else None)

    def wish(self, members: Collection[Device]) -> PlanWish | None:
        """Returns the request for a search in another process; None if the policy never moves layers to a better plan.

        Args:
            members: Members of the view that rules.
        """
        return PlanWish(self._job(members), self.copies) if self.policy in ("adaptive", "dynamic") else None

    def measured(
        self, text: str, members: Collection[Device], step_s: float, between_s: Mapping[str, float]
    ) -> Overheads:
        """Returns the overheads of a pass and of the end of a step, inferred from measured times of steps.

        The end is that of the member with first layers that waits least from one step to the next. What else a step
        takes is shared out by the units on its critical path.

        Args:
            text: The pipelines of the view by which it ran.
            members: The members of that view.
            step_s: Time that a step takes, s.
            between_s: Seconds from each member's last unit of a step to the first of the next, as far as members tell
                it.

        Raises:
            PlanError: The text is none of this job's.
        """
        plan, bare = self.read(text), Overheads(hop_s=self.profile.overheads.hop_s)
        cost, alone_s, units = self._layers_alone(text, replace(self._job(members), overheads=bare))
        beyond_s = max(0.0, step_s - alone_s)
        firsts = [name for name in (p.stages[0].device for p in plan.pipelines) if between_s.get(name)]
        ends_s = (between_s[name] - (cost.step_s - cost.ends_s[name]) for name in firsts)
        commit_s = max(0.0, min((beyond_s, *ends_s)))
        return replace(bare, unit_s=(beyond_s - commit_s) / units, commit_s=commit_s)

    def _layers_alone(self, text: str, job: TrainingJob) -> tuple[StepEstimate, float, float]:
        """Returns a step's estimate with hardly any overhead per pass, the step's seconds with layers alone, and the
        number of passes on its critical path.
        """
        key = text, job.devices
        if self._alone is None or self._alone[0] != key:
            plan, little_s = self.read(text), LITTLE * (job.costs.forward[-1] + job.costs.backward[-1])
            # Both cost something: units that cost nothing end at the same moment more often, and pipelines that share
            # micro-batches would then run them in another order than a job does.
            cost, raised = (
                estimate(replace(job, overheads=replace(job.overheads, unit_s=n * little_s)), plan, quick=True)
                for n in (1, 2)
            )
            units = (raised.step_s - cost.step_s) / little_s
            if units < 1:  # the order changed between the two: take the units of the busiest member
                passes = Counter(s.device for j in range(plan.micro_batches) for s in plan.route(j))
                units = 2 * max(passes.values())
            self._alone = key, cost, cost.step_s - units * little_s, units
        return self._alone[1:]

    # ------------------------------------------------------------------------------------------------ parts

    def read(self, text: str) -> PipelinePlan:
        """Returns the plan of a view from its text.

        Raises:
            PlanError: The text is none of this job's.
        """
        if self._last is None or self._last[0] != text:
            plan = ViewPipelines.from_json(text).plan
            if (plan.layer_count, plan.micro_batches) != (self.profile.costs.count, self.profile.micro_batches):
                raise PlanError(
                    f"the view's pipelines have {plan.layer_count} layers and {plan.micro_batches} micro-batches; "
                    f"expected the profile's {self.profile.costs.count} and {self.profile.micro_batches}"
                )
            self._last = text, plan
        return self._last[1]

    def _options(
        self,
        job: TrainingJob,
        before: PipelinePlan,
        serving: tuple[Device, ...] = (),
        held: Held | None = None,
        links: Links | None = None,
    ) -> PlanOptions:
        there, known = job.by_name, set(before.devices)
        newcomers = there.keys() - known
        if held is not None or serving:
            own = {name: [x for s in stages for x in s.layers] for name, stages in before.stages.items()}
            names = [*there, *(d.name for d in serving)]
            held = {name: (held or {}).get(name, own.get(name, ())) for name in names}
        return PlanOptions(
            planner=self._planner(job, self.copies),
            before=replace(before, idle=tuple(sorted({*before.idle, *newcomers}))),
            lost=tuple(sorted(known - there.keys())),
            pauses=PAUSES,
            size_shares=self.history.size_shares,
            first=True,
            held=held,
            serving=serving,
            running_s=0.0,  # half a step is lost with each way alike
            live=lambda: self._planned(job),
            links=links,
            shared=self.shared,
        )

    def _outlook(self, options: PlanOptions) -> Outlook:
        count = len(options.left.devices)
        return options.outlook(count * self.history.rate, self.history.return_rate(count))

    def _answer(self, options: PlanOptions, decision: Decision, text: str | None = None) -> PipelineAnswer:
        """Returns the answer for a decision, with the instruction lists of pipelines that share micro-batches."""
        chosen, outlook = decision.chosen, self._outlook(options)
        if text is None and chosen is not None:
            plan: PipelinePlan = chosen.plan
            run = options.cost(plan).run
            view = ViewPipelines.of(plan, plan_lists(plan, *run) if run else None, self.shared)
            text = view.to_json()
            self._last = text, plan
        changes = outlook.rate + outlook.returns
        return PipelineAnswer(
            text=text,
            reason=decision.reason,
            candidates=decision.candidates,
            chosen=chosen,
            horizon_s=1 / changes if changes else math.inf,
            moves=options.moves(chosen.plan) if chosen is not None else None,
            busy=_busy(options.left, chosen.plan, chosen.step_s) if chosen is not None else {},
        )

    def _none(
        self, job: TrainingJob, reason: str, lost_layers: tuple[str, ...] = (), decision: Decision | None = None
    ) -> PipelineAnswer:
        """Returns the answer that no pipelines are possible, with the number of members that would suffice."""
        roomy = max(job.devices, key=lambda d: (d.memory_nbytes, d.name))
        return PipelineAnswer(
            text=None,
            reason=reason,
            candidates=decision.candidates if decision else (),
            lost_layers=lost_layers,
            least_members=None if lost_layers else least_devices(job, roomy),
        )


def _busy(job: TrainingJob, plan: PipelinePlan, step_s: float) -> dict[str, float]:
    """Returns the fraction of a step during which each device computes."""
    costs, taken_s = job.costs, dict.fromkeys(plan.stages, 0.0)
    for j in range(plan.micro_batches):
        for s in plan.route(j):
            passes_s = costs.forward[s.end] - costs.forward[s.first] + costs.backward[s.end] - costs.backward[s.first]
            taken_s[s.device] += passes_s / job.by_name[s.device].speed
    return {name: round(seconds / step_s, 3) for name, seconds in taken_s.items()}


def _few(word: str, names: Sequence[str]) -> str:
    """Returns the first few names as text, with the number of the rest."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{word}{'s' if len(names) > 1 else ''} {', '.join(names[:8])}{more}"
