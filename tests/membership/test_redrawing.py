"""Tests reduction plans of many members: a quick one at once, a better one later, and never one for a former view."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import DrawPlan, Note, PlanDrawn
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.redrawing import REPLAN_PAUSE_S, Redrawing
from chaos_lightning.membership.topology import USUAL, Net, Pair, Topology, links_of, pair
from chaos_lightning.membership.views import Change, changed_view, plan_within, replanned
from chaos_lightning.planning import overlay
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import misfit
from chaos_lightning.protocol.types import SMALL_JOB, LinkReport, Member, PlanSpec, Settings, View, ViewId

MANY = SMALL_JOB + 4
AUTO = PlanSpec("auto", chunk_nbytes=4096)
WIDEST = PlanSpec("widest", chunk_nbytes=4096)


def members(count: int = MANY) -> tuple[Member, ...]:
    return tuple(Member(f"n{i}~{i}", f"n{i}", f"h{i}", "127.0.0.1", 1) for i in range(count))


def ring(ids: tuple[str, ...]) -> frozenset[Pair]:
    """Returns pairs that link each member to the two before it and the two after it."""
    return frozenset(pair(ids[i], ids[(i + step) % len(ids)]) for i in range(len(ids)) for step in (1, 2))


def view_of(here: tuple[Member, ...], number: int = 1, plan: PlanSpec | None = None) -> View:
    net = Net(ring(tuple(m.id for m in here)))
    ids = [m.id for m in here]
    return View(ViewId(1, number), ViewId(), here, plan=plan or plan_within(AUTO, here, net)[0], links=net.specs(ids))


def without(view: View, place: int, number: int) -> View:
    """Returns the next view, from which the member of rank `place` is missing."""
    rest = (*view.members[:place], *view.members[place + 1 :])
    net = Net(ring(tuple(m.id for m in rest)))
    change = Change(members=rest, joiners=(), reason="one is gone")
    return changed_view(view, ViewId(1, number), change, AUTO, net)


class Machine:
    """`Redrawing` with a clock, measurements, and recorded effects."""

    def __init__(self, spec: PlanSpec = AUTO) -> None:
        self.desk = Desk(Settings(plan=spec))
        self.desk.clock = 100.0
        self.topology = Topology()
        graph = cast(Graph, SimpleNamespace(of_view=links_of))
        self.redrawing = Redrawing(self.desk, graph, self.topology)

    def turn(self, view: View, after_s: float = 0.0) -> tuple[Change | None, DrawPlan | None]:
        """Returns what one turn of `Redrawing` results in: the change of view (or None), and the request for a plan (or
        None).
        """
        self.desk.clock = self.desk.now + after_s
        self.desk.out = []
        found = self.redrawing.turn(view)
        asked = [effect for effect in self.desk.out if isinstance(effect, DrawPlan)]
        assert len(asked) <= 1
        return found and found[0], asked[0] if asked else None

    def asked(self, view: View, after_s: float = 0.0) -> DrawPlan:
        change, wish = self.turn(view, after_s)
        assert change is None
        assert wish is not None
        return wish

    def measure(self, view: View) -> None:
        one, other = next(iter(links_of(view)))
        self.topology.report(one, LinkReport(other, 0.01, 1e6, "measured"))


def other_plan(view: View) -> PlanSpec:
    """Returns a reduction plan that no planner would make: all members in one line."""
    ids = view.ids()
    tree = view.plan.trees[0]
    return PlanSpec("trees", trees=(type(tree)(0, 0, ids, ("", *ids[:-1]), 1.0),))


def test_many_members_get_a_plan_at_once_and_keep_it_while_it_fits() -> None:
    view = view_of(members())
    assert view.plan == PlanSpec("trees", 4096, quick(members(), dict.fromkeys(view_links(view), USUAL))[0].trees)
    same = changed_view(
        replace_plan(view, other_plan(view)), ViewId(1, 2),
        Change(members=view.members, joiners=(), reason="a link was made anew"), AUTO, Net(links_of(view)),
    )  # fmt: skip
    assert same.plan == other_plan(view), "drawn for the same members and links"
    assert same.reason == "a link was made anew"
    fewer = without(same, 3, 3)
    assert fewer.plan != same.plan
    assert "trees that spread the work" in fewer.reason


def view_links(view: View) -> list[tuple[str, str]]:
    return [(link.a, link.b) for link in view.links]


def replace_plan(view: View, plan: PlanSpec) -> View:
    return View(view.id, view.predecessor, view.members, plan=plan, links=view.links)


def test_few_members_are_planned_for_here_and_now() -> None:
    machine, view = Machine(), view_of(members(SMALL_JOB))
    assert machine.turn(view) == (None, None), "nothing was measured since"
    machine.measure(view)
    change, wish = machine.turn(view)
    assert wish is None
    assert change is not None
    assert change.plan is not None
    assert change.plan.chunk_nbytes == 4096
    machine.measure(view)
    assert machine.turn(view, REPLAN_PAUSE_S / 2) == (None, None), "not that often"


def test_each_view_of_many_members_is_planned_for_once_and_the_answer_rides_on_a_header() -> None:
    machine, view = Machine(), view_of(members())
    wish = machine.asked(view)
    assert (wish.present, wish.members, set(wish.links)) == (view.plan, view.members, set(view_links(view)))
    assert machine.turn(view, 60.0) == (None, None)
    machine.redrawing.on_drawn(PlanDrawn(wish.token, other_plan(view), "a line"))
    change, _ = machine.turn(view, 1.0)
    assert change is not None
    assert (change.members, change.joiners, change.plan) == (view.members, (), other_plan(view))
    assert any(isinstance(e, Note) and "the plan changes: a line" in str(e.fields) for e in machine.desk.out)
    changed = replace_plan(view_of(view.members, 2), other_plan(view))
    assert machine.turn(changed, 60.0) == (None, None), "it was planned for"


def without_a_link(view: View, number: int) -> View:
    """Returns the next view, in which two neighbours have lost their link."""
    cut = links_of(view) - {pair(view.ids()[4], view.ids()[5])}
    change = Change(members=view.members, joiners=(), reason="a link goes")
    return changed_view(view, ViewId(1, number), change, AUTO, Net(cut))


@pytest.mark.parametrize("spec", [AUTO, WIDEST])
@pytest.mark.parametrize("others", [lambda view: without(view, 3, 2), lambda view: without_a_link(view, 2)])
@pytest.mark.parametrize("answered", [False, True])
def test_a_plan_for_other_members_or_links_is_dropped_and_the_view_that_rules_is_asked_for(
    spec: PlanSpec, others: Callable[[View], View], answered: bool
) -> None:
    machine, view = Machine(spec), view_of(members())
    wish = machine.asked(view)
    answer = PlanDrawn(wish.token, other_plan(view), "a line")
    if answered:
        machine.redrawing.on_drawn(answer)
    changed = others(view)
    assert machine.turn(changed) == (None, None), "not that soon after the last request"
    machine.redrawing.on_drawn(answer)
    later = machine.asked(changed, REPLAN_PAUSE_S)
    assert later.token > wish.token
    assert (later.members, set(later.links)) == (changed.members, set(view_links(changed)))
    machine.redrawing.on_drawn(answer)  # too late altogether
    assert machine.turn(changed) == (None, None)
    better = PlanSpec("trees", 4096, changed.plan.trees[::-1])
    machine.redrawing.on_drawn(PlanDrawn(later.token, better, "in another order"))
    change, _ = machine.turn(changed)
    assert change is not None
    assert change.plan == better
    machine.measure(changed)
    ruling = View(ViewId(1, 3), changed.id, changed.members, plan=better, links=changed.links)
    assert not machine.asked(ruling, 60.0).hasty, "a plan of the planner's own is replaced where that pays"


def test_a_view_of_few_members_gives_up_what_was_asked_for_many() -> None:
    machine, view = Machine(), view_of(members(SMALL_JOB + 1))
    wish = machine.asked(view)
    fewer = without(view, 3, 2)
    assert machine.turn(fewer, 60.0) == (None, None)
    machine.redrawing.on_drawn(PlanDrawn(wish.token, other_plan(view), "a line"))
    assert machine.turn(fewer) == (None, None)


def test_an_answer_costs_a_turn_nothing_whatever_was_measured_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner's answer is used without a new evaluation, which takes a second; new measurements count in the next
    request.
    """
    monkeypatch.setattr(overlay, "plan", None)
    monkeypatch.setattr(overlay, "replan", None)
    machine, view = Machine(), view_of(members())
    wish = machine.asked(view)
    machine.measure(view)
    machine.redrawing.on_drawn(PlanDrawn(wish.token, other_plan(view), "a line"))
    change, _ = machine.turn(view, 1.0)
    assert change is not None
    assert change.plan == other_plan(view)
    changed = View(ViewId(1, 2), view.id, view.members, plan=change.plan, links=view.links)
    assert machine.asked(changed, 4.0).links != wish.links


def test_measurements_ask_again_once_the_last_answer_is_there_and_the_planner_has_rested() -> None:
    machine, view = Machine(), view_of(members())
    wish = machine.asked(view)
    machine.measure(view)
    assert machine.turn(view, 30.0) == (None, None), "one at a time"
    machine.redrawing.on_drawn(PlanDrawn(wish.token, None, "kept"))
    assert machine.turn(view, 30.0) == (None, None), "planners take a fifth of a core at most"
    assert machine.asked(view, 91.0).links != wish.links


@pytest.mark.parametrize("spec", [PlanSpec(), PlanSpec("chain")])
def test_a_configured_plan_that_fits_is_never_replaced(spec: PlanSpec) -> None:
    machine = Machine(spec)
    view = View(ViewId(1, 1), ViewId(), members(), plan=spec)
    machine.measure(view)
    assert machine.turn(view, 60.0) == (None, None)


def test_a_planner_by_name_replaces_what_was_drawn_in_a_hurry_whatever_that_takes() -> None:
    machine, view = Machine(PlanSpec("chain")), view_of(members())
    wish = machine.asked(view)
    assert wish.hasty
    wish = DrawPlan(1, PlanSpec("widest"), view.plan, wish.members, wish.links, hasty=True)
    plan, _ = replanned(wish)
    assert plan is not None
    assert len(plan.trees) == 1
    assert misfit(plan, view.ids(), wish.links) == ""
    again = DrawPlan(2, PlanSpec("widest"), plan, wish.members, wish.links, hasty=True)
    assert replanned(again)[0] is None
    kept = DrawPlan(3, PlanSpec("widest"), view.plan, wish.members, wish.links)
    assert replanned(kept)[0] is None, "eight trees are faster"
