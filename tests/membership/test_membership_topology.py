"""Tests the graph of links: which groups are connected, which group may go on, and when a link may be used."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_script import SchedulerScript

from chaos_lightning.membership.effects import DrawPlan
from chaos_lightning.membership.peers import Peer, Standing
from chaos_lightning.membership.topology import (
    FIRST_STAND_S,
    FORGIVEN_S,
    LONGEST_STAND_S,
    PROBE_PATIENCE_S,
    USUAL,
    Fact,
    Net,
    Topology,
    components,
    connected,
    every_pair,
    links_of,
    neighbours,
    pair,
    ranked,
    specs,
)
from chaos_lightning.membership.views import Change, changed_view, plan_within, replanned
from chaos_lightning.planning.trees import edges
from chaos_lightning.protocol.types import LinkReport, LinkSpec, Member, PlanSpec, View, ViewId

NAMES = ("a~1", "b~2", "c~3", "d~4", "e~5")


def member(member_id: str) -> Member:
    return Member(member_id, member_id.partition("~")[0], f"host-{member_id}", "127.0.0.1", 1)


def peer(member_id: str, *near: str) -> Peer:
    return Peer(member(member_id), Standing.MEMBER, neighbours=near)


def view_of(*ids: str, links: str = "", plan: str = "rotating") -> View:
    return View(
        id=ViewId(1, 1),
        predecessor=ViewId(),
        members=tuple(map(member, ids)),
        plan=PlanSpec(plan),
        links=tuple(LinkSpec(*link.split("-")) for link in links.split()),
    )


def wish(kind: str, net: Net) -> DrawPlan:
    members = tuple(map(member, NAMES[:3]))
    return DrawPlan(1, PlanSpec(kind, chunk_nbytes=4096), PlanSpec(), members, net.known(NAMES[:3]))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[str, ...], frozenset[frozenset[str]]]:
    ids = NAMES[: draw(st.integers(1, 5))]
    possible = [pair(a, b) for a, b in combinations(ids, 2)]
    return ids, frozenset(draw(st.lists(st.sampled_from(possible))) if possible else ())


# ------------------------------------------------------------------ the graph


@given(graphs())
def test_parts_are_what_paths_connect(graph: tuple[tuple[str, ...], frozenset[frozenset[str]]]) -> None:
    ids, pairs = graph
    found = components(ids, pairs)
    assert sorted(m for part in found for m in part) == sorted(ids)
    assert all(any(set(link) <= set(part) for part in found) for link in pairs)
    for part in found:  # no smaller part is closed
        for size in range(1, len(part)):
            for some in combinations(part, size):
                assert any(len(link & set(some)) == 1 for link in pairs if link <= set(part))


@given(graphs())
def test_one_part_goes_on_and_never_two(graph: tuple[tuple[str, ...], frozenset[frozenset[str]]]) -> None:
    """The largest of several separated groups of members goes on; of equal ones the one with the oldest member, so that
    there are no ties.
    """
    ids, pairs = graph
    best, *others = ranked(components(ids, pairs), ids)
    for other in others:
        assert (len(best), -ids.index(best[0])) > (len(other), -ids.index(other[0]))
    assert ranked(reversed(components(ids, pairs)), ids)[0] == best


@given(graphs())
def test_view_says_its_links_unless_every_pair_has_one(
    graph: tuple[tuple[str, ...], frozenset[frozenset[str]]],
) -> None:
    ids, pairs = graph
    written = specs(ids, pairs)
    complete = len(pairs) == len(ids) * (len(ids) - 1) // 2
    assert (written == ()) is (complete or not pairs)
    if written or complete:
        view = View(ViewId(1, 1), ViewId(), tuple(map(member, ids)), links=written)
        assert links_of(view) == pairs
        assert all(ids.index(link.a) < ids.index(link.b) for link in written)
        for me in ids:
            assert {pair(me, m) for m in neighbours(view, me)} == {link for link in pairs if me in link}


# ------------------------------------------------------------------ one link


def test_link_that_failed_stands_longer_each_time_before_it_is_used() -> None:
    fact = Fact(reports={"a": LinkReport("b", 0.001, 1e9, "probe")})
    assert fact.stand_s == 0
    waits = []
    for _ in range(12):
        fact.failures += 1
        waits.append(fact.stand_s)
    assert waits[:3] == [FIRST_STAND_S, 2 * FIRST_STAND_S, 4 * FIRST_STAND_S]
    assert waits[-1] == LONGEST_STAND_S


def test_link_that_stood_for_long_has_never_failed() -> None:
    fact = Fact(failures=5)
    for end in "ab":
        fact.say(0.0, end, "")
    fact.say(FORGIVEN_S - 1, "a", "closed")
    assert fact.failures == 5
    fact.say(FORGIVEN_S, "a", "")
    fact.say(3 * FORGIVEN_S, "b", "closed")
    assert fact.failures == 0


def test_new_link_is_used_once_both_ends_say_so_and_it_was_measured_or_time_is_up() -> None:
    fact = Fact()
    fact.say(1.0, "a", "")
    assert not fact.seasoned(9.0)
    fact.say(2.0, "b", "")
    assert not fact.seasoned(2.0 + PROBE_PATIENCE_S / 2)
    assert fact.seasoned(2.0 + PROBE_PATIENCE_S)
    fact.reports["b"] = LinkReport("a", 0.001, 1e9, "probe")
    assert fact.seasoned(2.0)


def test_link_made_anew_is_to_be_measured_anew() -> None:
    topology = Topology()
    for end, other in (("a~1", "b~2"), ("b~2", "a~1")):
        topology.fact("a~1", "b~2").say(0.0, end, "")
        topology.report(end, LinkReport(other, 0.001, 0.0, "probe"))
    fact = topology.fact("a~1", "b~2")
    assert "carries nothing (probe)" in fact.idle
    for end in ("a~1", "b~2"):
        fact.say(1.0, end, "closed (reset)")
        fact.say(2.0, end, "")
    assert fact.idle == ""
    assert fact.stands


def test_why_a_link_is_down_is_told_by_the_end_that_knows() -> None:
    fact = Fact()
    fact.say(0.0, "a", "bye")
    fact.say(0.0, "b", "silent (nothing was heard for 3.1 s)")
    assert fact.down == "b: silent (nothing was heard for 3.1 s)"


# ------------------------------------------------------------------ wishes


@pytest.mark.parametrize(
    ("mine", "theirs", "wanted"),
    [
        ((), (), True),
        (("b",), (), True),
        ((), ("a",), True),
        (("c",), (), False),
        ((), ("c",), False),
        (("c",), ("a",), True),
        (("b~2",), ("c",), True),
    ],
)
def test_named_neighbours_are_wanted_and_else_everybody(
    mine: tuple[str, ...], theirs: tuple[str, ...], wanted: bool
) -> None:
    assert Topology().wants(peer("a~1", *mine), peer("b~2", *theirs)) is wanted


def test_ranks_of_one_node_always_want_each_other_and_are_named_by_their_node() -> None:
    topology = Topology()
    assert topology.wants(peer("edge-0~1", "hub"), peer("edge-1~2", "hub"))
    assert topology.wants(peer("edge-0~1", "hub"), peer("hub-0~3", "far"))
    assert not topology.wants(peer("edge-0~1", "hub"), peer("far-0~4", "hub"))


def test_removed_link_stays_removed_for_the_next_incarnation() -> None:
    topology = Topology()
    topology.removed[pair("a", "b")] = "removed"
    topology.forget("b~2")
    assert not topology.wants(peer("a~1", "b"), peer("b~7", "a"))


def test_a_link_that_an_operator_adds_has_never_failed() -> None:
    """A link that an operator adds loses its record of failures; otherwise the next views would leave it out."""
    script = SchedulerScript()
    written = Path(__file__).parent / "scenarios" / "scheduler_link_removed_and_added.txt"
    for line in (line[2:].split() for line in written.read_text().splitlines() if line.startswith("> ")):
        if line == ["operator", "link", "add", "b", "a"]:
            break
        script.line(line)
    assert script.machine is not None
    fact = script.machine.topology.fact("a~1", "b~2")
    fact.failures = 4
    script.line(["operator", "link", "remove", "a", "c"])
    assert fact.failures == 4
    script.line(["operator", "link", "add", "b", "a"])
    assert fact.failures == 0


# ------------------------------------------------------------------ plans over links


def test_measurements_go_into_the_plan_in_both_directions() -> None:
    topology = Topology()
    topology.report("a~1", LinkReport("b~2", 0.010, 1e8, "probe"))
    topology.report("b~2", LinkReport("a~1", 0.012, 3e8, "probe"))
    topology.report("c~3", LinkReport("b~2", 0.002, 5e8, "probe"))
    known = topology.measured(NAMES[:3], every_pair(NAMES[:3]))
    assert known == {
        ("a~1", "b~2"): (0.012, 1e8, 3e8),
        ("a~1", "c~3"): USUAL,
        ("b~2", "c~3"): (0.002, 5e8, 5e8),
    }


@given(graphs(), st.sampled_from(["rotating", "chain", "tree", "auto", "widest"]))
def test_plan_of_a_view_needs_no_link_that_is_not_there(
    graph: tuple[tuple[str, ...], frozenset[frozenset[str]]], kind: str
) -> None:
    ids, pairs = graph
    if not connected(ids, pairs):
        return
    plan, reason = plan_within(PlanSpec(kind, chunk_nbytes=4096), [member(m) for m in ids], Net(pairs))
    assert all(pair(*edge) in pairs for edge in edges(plan, ids))
    assert reason
    assert plan.chunk_nbytes == 4096


def test_configured_plan_returns_when_its_links_do() -> None:
    view = view_of(*NAMES[:3])
    line = Net(frozenset({pair("a~1", "b~2"), pair("b~2", "c~3")}))
    change = Change(members=view.members, joiners=(), reason="a link is gone")
    without = changed_view(view, ViewId(1, 2), change, PlanSpec(), line)
    assert without.plan.kind == "trees"
    assert without.links == (LinkSpec("a~1", "b~2"), LinkSpec("b~2", "c~3"))
    assert "rotating" in without.reason
    back = changed_view(without, ViewId(1, 3), change, PlanSpec(), Net(every_pair(NAMES[:3])))
    assert back.plan == PlanSpec()
    assert back.links == ()
    assert back.reason == "a link is gone; plan: rotating as configured"


def test_planner_of_the_users_that_fails_does_not_stop_the_job() -> None:
    members = [member(m) for m in NAMES[:3]]
    plan, reason = plan_within(PlanSpec("math:nothing"), members, Net(every_pair(NAMES[:3])))
    assert plan.kind == "rotating"
    assert "planner 'math:nothing' failed" in reason
    assert replanned(wish("math:nothing", Net(every_pair(NAMES[:3]))))[0] is None


def test_plan_changes_with_measurements_only_where_a_planner_draws_it() -> None:
    ids = NAMES[:3]
    slow = {("a~1", "b~2"): (0.001, 1e6, 1e6)}
    net = Net(every_pair(ids), slow)
    assert replanned(wish("rotating", net))[0] is None
    plan, reason = replanned(wish("auto", net))
    assert plan is not None
    assert plan.chunk_nbytes == 4096
    assert ("a~1", "b~2") not in edges(plan, ids)
    assert reason
