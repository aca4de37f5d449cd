"""Makes the pipelines of the scheduler's views, and finds who else must come into a view so that some pipelines are
possible (P1, P9, P10).

Theory of operation. Members ask for pipelines in their hellos (planning/pipelines/request.py); all of them ask alike,
as they must agree in everything that says what the job is (peers.py). A `ViewPipeliner` turns the pipelines of the view
before and the members of the next one into the next one's, in no more time than a decision has. The scheduler asks it
for each view that it makes. It knows nothing of reports: a member that is to own a part that it lacks pulls it (P8), so
any text that it gives may rule.

After a death too few members may be left for any plan. Then leavers that no header has let go stay on as members, and
newcomers that are ready, or that a view was to let in which no header has carried, come in with the Decide, as joiners
on its base: the job waits for them all the same, and no boundary can come before. Where even that is not enough, the
survivors hold and are told what a plan lacks, or the job ends, if that is what members asked for. After the closing
header nothing runs, and all go.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.parts import Division, division
from chaos_lightning.membership.peers import listed
from chaos_lightning.membership.rates import LOOK_PAUSE_S, MeasuredLink, change
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.speeds import NOTICED, Speeds, changes
from chaos_lightning.membership.topology import Pair, Topology, connected
from chaos_lightning.planning.pipelines.job import JobError, LinkRate, Overheads
from chaos_lightning.planning.pipelines.request import PipelineRequest, read_request
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.spans import subtract
from chaos_lightning.protocol.types import NO_VIEW, Hello, Kind, Member, Span, View

LEAVES_TOGETHER_S = 1.0
"""Seconds that a leave that moves parts waits for the leaves of others, which may make another move of it (P13)."""
LEAST_S = 1e-6
"""Cost (s): lower ones count as none."""
_ANSWERS = 8
"""Number of answers that are kept: a decision that waits asks again and again."""


Held = tuple[tuple[str, tuple[Span, ...]], ...] | None
"""Parts that each member holds; None: nobody has told."""


def _of(text: str, members: Sequence[Member]) -> Division:
    """Returns the division of the training state among these members, given their pipelines as text."""
    return Division(tuple(m.id for m in members), ViewPipelines.from_json(text))


def _alike(a: Overheads, b: Overheads | None) -> bool:
    """Returns whether costs beyond layers changed so little that plans made by the old costs stay valid."""
    pairs = zip(astuple(a), astuple(b), strict=True) if b is not None else ((1.0, 0.0),)
    return all(abs(x - y) <= NOTICED * max(x, y, LEAST_S) for x, y in pairs)


def _plan_facts(pipelines: ViewPipelines) -> dict[str, object]:
    """Returns the facts about a plan that the event log records."""
    plan = pipelines.plan
    return {
        "shape": plan.shape,
        "layers": {m: [(s.first, s.end) for s in stages] for m, stages in plan.stages.items()},
        "routes": [[s.device for s in p.stages] for p in plan.pipelines],
        "detours": len(plan.detours),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """Pipelines chosen for a view, or the reason why there are none.

    Attributes:
        text: Pipelines as text, as the view carries them; "" if no plan fits its members.
        reason: Reason of the choice in words.
        facts: Facts about the choice and what moves, for the event log.
        ends: Whether the job is to end, and begin again from a checkpoint.
    """

    text: str
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = False


class ViewPipeliner(ABC):
    """Interface of an object that makes the pipelines of views."""

    speeds: Mapping[str, float] = MappingProxyType({})
    """Speeds of members beside their devices, by id, 1 if absent (speeds.py); this changes as they tell."""
    link: LinkRate | None = None
    """Link between members on different machines as they measure it (rates.py); None: as their profile says."""
    overheads: Overheads | None = None
    """Costs of units and steps beyond their layers, as the job measures them; None: as their profile says."""

    @abstractmethod
    def reroute(
        self,
        before: str,
        members: Sequence[Member],
        *,
        leaving: Sequence[Member],
        held: Mapping[str, tuple[Span, ...]] | None,
        links: Collection[Pair],
    ) -> PipelineChoice:
        """Returns the pipelines of a view whose members have changed.

        Args:
            before: Pipelines of the view before, as text; "" if the job is founded.
            members: Members of the new view, in rank order.
            leaving: Members that the new view lets go, and that serve what they hold until others have it.
            held: Parts that each member holds, as normal spans of part numbers (parts.py); None: what they own in the
                view before, or at GENESIS whatever they come to own.
            links: Pairs of members that have a link.
        """

    def wish(self, members: Sequence[Member]) -> str | None:
        """Returns the request for the best plan of these members, which a separate process answers (searching.py)."""
        return None

    def better(self, before: str, members: Sequence[Member], plan: str, links: Collection[Pair]) -> PipelineChoice:
        """Returns pipelines of the same members by the plan that was found, or the present ones if the plan is not
        worth the change.

        Args:
            before: Pipelines of the view that rules, as text.
            members: The members of that view.
            plan: Plan that was found, as JSON.
            links: Pairs of members that have a link.
        """
        return PipelineChoice(text=before, reason="nobody has asked for another plan")

    def measured(self, view: View, step_s: float, between_s: Mapping[str, float]) -> Overheads | None:
        """Returns the measured costs of this view's steps beyond the layers' own times; None if unknown.

        Args:
            view: The view.
            step_s: Time that a step takes, s.
            between_s: Seconds from a member's last unit of a step to its first unit of the next, by member; only those
                that are known.
        """
        return None

    def followed(self, before: View | None, after: View, now: float) -> None:
        """Notes that a view is decided, or is the last one when a scheduler starts.

        Args:
            before: The view that it follows; None if there is none, or it was not looked at.
            after: The view.
            now: The time (s).
        """
        return


PipelinerFactory = Callable[[Mapping[str, PipelineRequest]], ViewPipeliner]
"""Function that makes a ViewPipeliner; given what members ask of pipelines, by id, which changes as members come and
go.
"""


def unreadable(text: str) -> str:
    """Returns in words why this text is no valid request for pipelines; "" if it is one."""
    try:
        read_request(text)
    except JobError as error:
        return str(error)
    return ""


def misfit(latest: View | None, hello: Hello) -> str:
    """Returns in words why a member's request for pipelines does not fit the last view, in which the member would go
    on; "" if it does.
    """
    if latest is None or hello.view == NO_VIEW:
        return ""
    ruling = division(latest).pipelines if latest.pipelines else None
    has = "none"
    if ruling is not None:
        has = f"{ruling.plan.layer_count} layers in {ruling.plan.micro_batches} micro-batches"
    asks = str(read_request(hello.pipelines)) if hello.pipelines else "none"
    return "" if has == asks else f"pipelines of {hello.name} are {asks}, those of view {latest.id} are {has}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """Members of a view after a failure, with the pipelines that fit them.

    Attributes:
        pipelines: Pipelines as text.
        members: Members in rank order; none if the job parts.
        joiners: Ids of the members that must get the state.
        leaving: Members that are let go and serve their parts until others have them.
        reason: Reason of the pipelines in words, if they are others than before.
        ends: Reason why there is no such view, and the job ends; "" if there is one.
    """

    pipelines: str = ""
    members: tuple[Member, ...] = ()
    joiners: tuple[str, ...] = ()
    leaving: tuple[Member, ...] = ()
    reason: str = ""
    ends: str = ""


class Pipelining:
    """Pipelines of the views that one scheduler makes.

    Args:
        desk: State that all components share.
        book: Chain of decided views.
        roster: Records of all processes.
        graph: Links that a view may use.
        topology: Links as members have reported them.
        pipeliner_for: Makes the maker of pipelines, once a member asks for some.
    """

    def __init__(
        self,
        desk: Desk,
        book: Book,
        roster: Roster,
        graph: Graph,
        topology: Topology,
        pipeliner_for: PipelinerFactory,
    ) -> None:
        self._desk = desk
        self._book = book
        self._roster = roster
        self._graph = graph
        self._pipeliner_for = pipeliner_for
        self._made: ViewPipeliner | None = None
        self._known: dict[tuple[object, ...], PipelineChoice] = {}
        """The last answers."""
        self._lack = ""
        """Reason why no pipelines fit, as it was told last."""
        self._speeds = Speeds(roster.peers, roster.requests)
        self._link = MeasuredLink(topology)
        self._links_at = float("-inf")
        """Time (s) at which links are looked at again."""
        self._foreseen: Mapping[str, float] = {}
        """Factors of members' speeds by which the last view's pipelines were made, as far as they are known."""
        self._foreseen_link: LinkRate | None = None
        """Link by which these pipelines were made; None: not known."""
        self._step_s: object = None
        """Estimate of a step of the last view (s), if it is known."""

    @property
    def _pipeliner(self) -> ViewPipeliner:
        if self._made is None:
            self._made = self._pipeliner_for(self._roster.requests)
            self._made.speeds = self._speeds.planned
        return self._made

    @property
    def wanted(self) -> bool:
        """Whether views have pipelines: as in the last view, or as the founders of the job ask."""
        latest, founders = self._book.latest, self._roster.reference
        if latest is None or self._desk.phase is SchedulerPhase.FOUNDING:
            return founders is not None and bool(founders.pipelines)
        return bool(latest.pipelines)

    @property
    def _request(self) -> PipelineRequest | None:
        """Request for pipelines of the oldest member that has sent one."""
        latest, requests = self._book.latest, self._roster.requests
        known = (*latest.members, *latest.leaving) if latest is not None else ()
        return next((requests[m.id] for m in known if m.id in requests), None)

    @property
    def ends_without_parts(self) -> bool:
        """Whether the job ends when parts of the training state are lost; otherwise all members wait."""
        asked = self._request
        return asked is not None and asked.ends_without_parts

    def names(self, parts: Sequence[Span]) -> str:
        """Returns these parts of the state in words for people, layers by the model's own names."""
        asked, latest = self._request, self._book.latest
        assert latest is not None
        return division(latest).words(parts, asked.layer_names if asked is not None else ())

    # ------------------------------------------------------------------ questions

    def of(
        self,
        members: Sequence[Member],
        pairs: frozenset[Pair],
        leaving: Sequence[Member] = (),
        *,
        anew: bool = False,
    ) -> tuple[str | None, str]:
        """Returns the pipelines of a view, or None if no plan is possible, and the reason in words. See
        `ViewPipeliner`.

        Args:
            members: Members of the view, in rank order.
            pairs: Pairs of members that have a link.
            leaving: Members that the view lets go.
            anew: Whether the job is founded.
        """
        if not self.wanted:
            return "", ""
        before = self._book.latest.pipelines if self._book.latest is not None and not anew else ""
        choice = self._chosen(before, members, pairs, leaving, None)
        unchanged = bool(choice.text) and choice.text == before
        return (choice.text or None), ("" if unchanged else choice.reason)

    def _chosen(
        self, before: str, members: Sequence[Member], pairs: frozenset[Pair], leaving: Sequence[Member], held: Held
    ) -> PipelineChoice:
        if not members:
            return PipelineChoice(text="", reason="nobody is left who runs anything")
        self._look_at_speeds()
        self._look_at_links()
        speed = self._speeds.planned.get
        told = tuple((m.id in self._roster.requests, speed(m.id)) for m in (*members, *leaving))
        key = (before, tuple(members), tuple(leaving), held, pairs, told, self._pipeliner.link)
        if key not in self._known:
            self._look_at_steps()
            holds = None if held is None else dict(held)
            try:
                choice = self._pipeliner.reroute(before, members, leaving=leaving, held=holds, links=pairs)
            except Exception as error:  # a planner that fails ends no job: the members stay as they are, or wait
                choice = PipelineChoice(text="", reason=f"the planner failed: {type(error).__name__}: {error}")
            self._remember(key, self._linked(choice, members, pairs))
        return self._known[key]

    @staticmethod
    def _linked(choice: PipelineChoice, members: Sequence[Member], pairs: frozenset[Pair]) -> PipelineChoice:
        """Returns this choice of pipelines, or one without pipelines if links leave owners of the same part
        unconnected.
        """
        apart = _of(choice.text, members).apart((a, b) for a, b in pairs) if choice.text else ""
        return PipelineChoice(text="", reason=apart) if apart else choice

    def _remember(self, key: tuple[object, ...], choice: PipelineChoice) -> None:
        self._known = {**dict(list(self._known.items())[1 - _ANSWERS :]), key: choice}

    def moves(self, before: View, text: str, members: Sequence[Member]) -> bool:
        """Returns whether some member gets a part of the state under the new pipelines that it does not own in the
        present view.
        """
        old = division(before)
        new = _of(text, members)
        return any(subtract(new.owned(m.id), old.owned(m.id)) for m in members)

    # ------------------------------------------------------------------ a better plan

    def speeds(self, latest: View) -> Mapping[str, float]:
        """Returns speed factors, by id, of the members of this view that are slower or faster than the others."""
        self._look_at_speeds()
        return self._speeds.own(latest.ids())

    def _look_at_speeds(self) -> None:
        if (oldest := self._request) is not None:
            self._speeds.look(oldest)

    @property
    def link(self) -> LinkRate | None:
        """Rate and latency between members on different machines by which plans are made; None: as the members' profile
        says.
        """
        self._look_at_links()
        return self._pipeliner.link

    def _look_at_links(self) -> None:
        """Updates the link rates used for plans, every now and then, from what the last view's members have
        measured.
        """
        if self._desk.now < self._links_at:
            return
        self._links_at = self._desk.now + LOOK_PAUSE_S
        latest, oldest = self._book.latest, self._request
        self._link.look(latest.members if latest is not None else [p.member for p in self._roster.peers.values()])
        named = oldest is not None and oldest.job.between_hosts != LinkRate()
        self._pipeliner.link = None if named else self._link.usual

    def _overheads(self) -> Overheads | None:
        """Returns the measured costs of the last view's steps beyond the layers' own times; None if no member has
        reported step times.
        """
        latest, peers = self._book.latest, self._roster.peers
        if latest is None or not latest.pipelines:
            return None
        tempos = {m.id: peers[m.id].tempo for m in latest.members if m.id in peers}
        told = {m: t for m, t in tempos.items() if t.step_s and t.view == latest.id}
        if not told:
            return None
        step_s = statistics.median(t.step_s for t in told.values())
        return self._pipeliner.measured(latest, step_s, {m: t.between_s for m, t in told.items() if t.between_s})

    def _look_at_steps(self) -> None:
        """Uses the measured costs of steps beyond the layers' own times in estimates of plans, if they have changed."""
        if (found := self._overheads()) is not None and not _alike(found, self._pipeliner.overheads):
            self._pipeliner.overheads = found

    def wish(self, latest: View) -> str | None:
        """Returns the request for a better plan of this view's members; None if there is nothing to ask."""
        self._look_at_steps()
        return self._pipeliner.wish(latest.members)

    def better(self, latest: View, plan: str) -> tuple[str, str] | None:
        """Returns better pipelines for this view's members, by a plan that was found, and the reason; None if the
        pipelines stay.
        """
        pairs, speeds = self._graph.of_view(latest), self.speeds(latest)
        self._look_at_steps()
        choice = self._pipeliner.better(latest.pipelines, latest.members, plan, pairs)
        choice = self._linked(choice, latest.members, pairs)
        off = [*changes(self._foreseen, speeds), change(self._foreseen_link, self.link)]
        if why := listed((words for words in off if words), "; "):
            choice = replace(choice, reason=f"{why}; {choice.reason}")
        if choice.text in ("", latest.pipelines):
            self._step_s = choice.facts.get("step_s") or self._step_s
            self._note(latest, choice)
            return None
        self._remember((latest.pipelines, latest.members, plan), choice)
        return choice.text, choice.reason

    # ------------------------------------------------------------------ what is told

    def followed(self, before: View | None, after: View) -> None:
        """Notes that a view is decided, or is the last one when this scheduler starts."""
        if not after.pipelines:
            return
        self._pipeliner.followed(before, after, self._desk.now)
        choices = (c for c in reversed(self._known.values()) if c.text == after.pipelines)
        if before is None or before.pipelines != after.pipelines:
            choice = next(choices, None)
            self._foreseen = self.speeds(after) if before is not None else {}
            self._foreseen_link = None if choice is None else self._pipeliner.link or LinkRate()
            self._step_s = choice.facts.get("step_s") if choice is not None else None
            if choice is not None:
                self._note(after, choice)
        self._lack = ""

    def lack(self, why: str) -> None:
        """Logs, once for each reason, that no pipelines are possible, so that members wait."""
        choice = next((c for c in reversed(self._known.values()) if not c.text and c.reason == why), None)
        if choice is not None and why != self._lack:
            self._lack = why
            self._note(None, choice)

    def _note(self, view: View | None, choice: PipelineChoice) -> None:
        number = str(view.id) if view is not None else ""
        found = division(view).pipelines if view is not None else None
        plan = {} if found is None else _plan_facts(found)
        self._desk.note("pipelines", **{"view": number, **plan, **choice.facts, "reason": choice.reason})

    def facts(self) -> dict[str, object]:
        """Returns facts about the last view's pipelines: their shape, as in "3 x 2", the estimated step time (s), and
        measured costs beyond layers.
        """
        latest = self._book.latest
        pipelines = division(latest).pipelines if latest is not None and latest.pipelines else None
        if pipelines is None:
            return {}
        known = {"estimated_step_s": self._step_s} if self._step_s is not None else {}
        measured = {"overheads": asdict(found)} if (found := self._overheads()) is not None else {}
        return {"pipelines": pipelines.plan.shape, **known, **measured}

    # ------------------------------------------------------------------ after a failure

    def lineup(self, latest: View, ruling: Ruling) -> Lineup | str:
        """Returns which members go on after a failure, and by which pipelines; or in words why no plan is possible."""
        known = {m.id: m for m in (*latest.members, *latest.leaving)}
        members = [known[m] for m in ruling.members]
        leaving = tuple(known[m] for m in ruling.leaving)
        if not self.wanted:
            return Lineup(members=tuple(members), joiners=ruling.joiners)
        if self._parts(latest, members, leaving):
            return Lineup(pipelines=latest.pipelines, leaving=(*members, *leaving))
        bound = [known[m] for m in ruling.bound]
        coming = [p.member for p in self._graph.reachable(ruling.members, ruling.waiting)] if members else []
        lacks = ""
        for stay, join in (([], []), (bound, []), ([], coming), (bound, coming)):
            chosen = [*members, *stay, *join]
            pairs = self._graph.pairs([m.id for m in chosen])
            if not connected([m.id for m in chosen], pairs):
                continue
            going = tuple(m for m in leaving if m not in stay)
            choice = self._chosen(latest.pipelines, chosen, pairs, going, ruling.held)
            if choice.ends:
                return Lineup(ends=choice.reason)
            if choice.text:
                words = [f"{listed(m.id for m in stay)} stay"] if stay else []
                words += [f"{listed(m.id for m in join)} join at once"] if join else []
                words += [f"pipelines: {choice.reason}"] if choice.text != latest.pipelines else []
                return Lineup(
                    pipelines=choice.text,
                    members=tuple(chosen),
                    joiners=(*ruling.joiners, *(m.id for m in join)),
                    leaving=going,
                    reason="; ".join(words),
                )
            lacks = lacks or choice.reason
        base = ruling.base
        if members and base is not None and base.kind is Kind.CLOSING and not base.error:
            return Lineup(pipelines=latest.pipelines, leaving=tuple(members), reason="the job is finished")
        return lacks or "nobody is left who runs anything"

    def _parts(self, latest: View, members: Sequence[Member], leaving: Sequence[Member]) -> bool:
        """Returns whether all members leave the job together: a view has let all go, or all that are left want to go
        (P13).
        """
        here = [self._roster.peers[m.id] for m in (*members, *leaving)]
        return bool(here) and (not latest.members or (all(p.leaving for p in here) and not self._graph.ready()))
