"""Tests all-reduce planners: chosen by name, by prediction and as plugins; and when a plan is replaced."""

from importlib.metadata import EntryPoint, EntryPoints
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay_networks import Rank, inputs, network_of
from test_trees import check_tree

from chaos_lightning.errors import PlanError
from chaos_lightning.planning import overlay, trees
from chaos_lightning.planning.network import Network
from chaos_lightning.planning.trees import PLANNERS_GROUP, edges, expand, misfit
from chaos_lightning.protocol.types import PlanSpec

MIB = 1 << 20
ALWAYS = ("auto", "widest", "packed", "fapt", "local", "spread")


def even(count, rate=1e9, latency=1e-4):
    names = [f"n{i}" for i in range(count)]
    return [Rank(n) for n in names], dict.fromkeys(combinations(names, 2), (latency, rate, rate))


@settings(deadline=None, max_examples=60)
@given(inputs(most=7, access=True, hosts=True), st.sampled_from(sorted(overlay.PLANNERS)), st.integers(0, 1 << 26))
def test_every_plan_spans_covers_and_uses_links_that_exist(given_, policy, nbytes):
    members, links, access = given_
    try:
        spec, reason, seconds = overlay.plan(members, links, policy=policy, nbytes=nbytes, access=access)
    except PlanError:
        assert policy not in ALWAYS
        return
    ids = [m.id for m in members]
    there = {frozenset(pair) for pair in links}
    assert {frozenset(pair) for pair in edges(spec, ids)} <= there
    chunks = expand(spec, ids, nbytes, ())
    assert sum(c.nbytes for c in chunks) == nbytes
    for chunk in {id(c.shape): c for c in chunks}.values():
        check_tree(chunk, ids)
    assert reason
    assert 0 <= seconds < float("inf")


@settings(deadline=None, max_examples=60)
@given(inputs(least=2, most=7, access=True), st.sampled_from([1 << 16, 1 << 22, 1 << 26]))
def test_packed_is_never_predicted_slower_than_widest_nor_faster_than_the_bound(given_, nbytes):
    members, links, access = given_
    widest = overlay.plan(members, links, policy="widest", nbytes=nbytes, access=access)
    packed = overlay.plan(members, links, policy="packed", nbytes=nbytes, access=access)
    auto = overlay.plan(members, links, policy="auto", nbytes=nbytes, access=access)
    limits = overlay.bound(members, links, nbytes, access)
    assert packed.seconds <= widest.seconds * (1 + 1e-5)
    assert auto.seconds <= packed.seconds * 1.04 or auto.spec.kind == "rotating"
    assert limits.several_trees_s <= limits.one_tree_s * (1 + 1e-5)
    assert limits.one_tree_s <= widest.seconds * (1 + 1e-5)
    assert limits.several_trees_s <= packed.seconds * (1 + 1e-5)


def test_even_and_complete_is_rotating():
    members, links = even(5)
    spec, reason, seconds = overlay.plan(members, links)
    assert spec == PlanSpec()
    assert "all links are alike" in reason
    assert seconds == pytest.approx(2 / 5 * overlay.TYPICAL_NBYTES * 8 / 1e9, rel=0.1)
    slow = {
        pair: (latency, rate * (0.05 if pair == ("n0", "n1") else 1), rate)
        for pair, (latency, rate, _) in links.items()
    }
    spec, reason, seconds = overlay.plan(members, slow)
    assert spec.kind == "trees"
    assert ("n0", "n1") not in edges(spec, [m.id for m in members]) or len(spec.trees) > 1
    assert "rotating 2." in reason or "rotating" in reason
    assert seconds < 0.5


def test_a_lone_member_and_a_pair():
    assert overlay.plan([Rank("a")], {}) == (PlanSpec(), overlay.plan([Rank("a")], {}).reason, 0.0)
    spec, _, seconds = overlay.plan([Rank("a"), Rank("b")], {("b", "a"): (0.01, 1e8, 5e7)}, nbytes=MIB)
    assert spec == PlanSpec()
    assert seconds > 8 * MIB / 5e7


def test_the_widest_tree_avoids_the_slow_link_and_is_low():
    network = network_of({"ab": 100, "bc": 100, "ac": 10, "cd": 100, "bd": 100})
    spec, _ = overlay.planner("widest")(network, MIB)
    tree = dict(zip(spec.trees[0].members, spec.trees[0].parents, strict=True))
    assert tree["a"] == "b"
    assert tree["b"] == ""  # everybody is one hop from b
    assert set(tree.values()) == {"", "b"}


def test_packed_uses_what_one_tree_leaves_over():
    links = {"ab": 100, "bc": 100, "ac": 100}
    network = network_of(links)
    one = network.seconds(overlay.planner("widest")(network, 64 * MIB)[0], 64 * MIB)
    spec, reason = overlay.planner("packed")(network, 64 * MIB)
    assert len(spec.trees) == 3
    assert "at most 150 Mbps" in reason
    assert network.seconds(spec, 64 * MIB) == pytest.approx(one / 1.5, rel=0.05)


def test_a_small_buffer_goes_by_few_hops():
    """For 4 KiB only latency counts, so the plan avoids a fast path of five hops that it takes for a large buffer."""
    members = [Rank(n) for n in "abcdef"]
    links = dict.fromkeys(zip("abcde", "bcdef", strict=True), (0.001, 1000000000.0, 1000000000.0))
    links |= {("a", y): (0.001, 2e8, 2e8) for y in "cdef"}
    small = overlay.plan(members, links, nbytes=4096)
    large = overlay.plan(members, links, nbytes=256 * MIB)
    assert small.seconds < 0.006
    assert small.spec != large.spec


def test_star_and_chain_need_their_links():
    line = network_of({"ab": 10, "bc": 10, "cd": 10})
    spec, _ = overlay.planner("chain")(line, MIB)
    assert edges(spec, line.ids) == {("a", "b"), ("b", "c"), ("c", "d")}
    with pytest.raises(PlanError, match="a member with links to all others"):
        overlay.planner("star")(line, MIB)
    with pytest.raises(PlanError, match="3 are missing"):
        overlay.planner("rotating")(line, MIB)
    star = network_of({"ab": 10, "bc": 10, "bd": 10})
    assert overlay.planner("star")(star, MIB)[0].trees[0].parents == ("b", "", "b", "b")
    with pytest.raises(PlanError, match="no way through all members"):
        overlay.planner("chain")(star, MIB)


def test_a_chain_takes_the_widest_way():
    links = {"".join(pair): 10 for pair in combinations("abcde", 2)} | {"ac": 100, "ce": 100, "be": 100, "bd": 100}
    spec, reason = overlay.planner("chain")(network_of(links), MIB)
    assert edges(spec, "abcde") == {("a", "c"), ("c", "e"), ("b", "e"), ("b", "d")}
    assert "100 Mbps" in reason


def test_ranks_of_a_machine_hang_below_one_of_them():
    names = [f"{host}{i}" for host in "xyz" for i in range(3)]
    members = [Rank(n, n[0]) for n in names]
    links = {(a, b): (1e-5, 4e10, 4e10) if a[0] == b[0] else (5e-4, 1e9, 1e9) for a, b in combinations(names, 2)}
    spec, reason, seconds = overlay.plan(members, links)
    local = overlay.plan(members, links, policy="local")
    assert "local" in reason
    assert spec == local.spec
    for tree in spec.trees:
        crossing = [(m, p) for m, p in zip(tree.members, tree.parents, strict=True) if p and m[0] != p[0]]
        assert len(crossing) == 2
        assert {m for pair in crossing for m in pair} <= {"x0", "y0", "z0"}
    assert seconds < overlay.plan(members, links, policy="rotating").seconds


def test_one_machine_with_uneven_links_is_planned_by_its_links():
    """Members on one machine with unequal links, as in emulated networks, are planned for by these links."""
    members = [Rank(n, "here") for n in "abcd"]
    links = {
        ("a", "b"): (0.0, 1e8, 1e8),
        ("b", "c"): (0.0, 1e8, 1e8),
        ("c", "d"): (0.0, 1e8, 1e8),
        ("a", "d"): (0.0, 1e6, 1e6),
    }
    spec, _, seconds = overlay.plan(members, links, nbytes=16 * MIB)
    assert spec.trees[0].weight == 1.0
    assert seconds < 1.1 * 8 * 16 * MIB / 1e8


def test_fastest_ways_to_several_roots():
    members, links = even(4)
    spec, reason, seconds = overlay.plan(members, links, policy="fapt", nbytes=64 * MIB)
    assert len(spec.trees) == 4
    assert "n0, n1, n2, n3" in reason
    assert seconds < 0.6 * 8 * 64 * MIB / 1e9


# --- plugins -----------------------------------------------------------------------------------------------------


def by_name_backwards(network, nbytes):
    """Planner as a user may write it: a chain in reverse order."""
    parents = tuple(i - 1 for i in range(len(network)))
    return network.spec([(parents, 1.0)]), "the user's own"


def over_missing_links(network, nbytes):
    return PlanSpec(), "every pair, though there is no link"


def test_a_planner_of_the_users_own():
    members = [Rank(n) for n in "abc"]
    links = {("a", "b"): (0.0, 1e8, 1e8), ("b", "c"): (0.0, 1e8, 1e8)}
    spec, reason, _ = overlay.plan(members, links, policy="test_overlay_planners:by_name_backwards")
    assert reason == "the user's own"
    assert spec.trees[0].parents == ("", "a", "b")
    assert overlay.plan(members, links, policy=by_name_backwards).spec == spec
    with pytest.raises(PlanError, match=r"over_missing_links' drew a plan that does not fit: .* not there: a-c"):
        overlay.plan(members, links, policy="test_overlay_planners:over_missing_links")


def test_an_installed_planner(monkeypatch):
    entry = EntryPoint("mine", "test_overlay_planners:by_name_backwards", PLANNERS_GROUP)
    broken = EntryPoint("broken", "no_such_module:f", PLANNERS_GROUP)
    monkeypatch.setattr(overlay, "entry_points", lambda group: [entry, broken])
    monkeypatch.setattr(trees, "entry_points", lambda group: EntryPoints([entry, broken]))
    trees.check_plan(PlanSpec("mine"))  # a configuration may name it
    with pytest.raises(PlanError, match="'other' is unknown; expected one of rotating"):
        trees.check_plan(PlanSpec("other"))
    assert overlay.planner("mine").__name__ == "by_name_backwards"
    with pytest.raises(PlanError, match=r"'broken' \(no_such_module:f\) cannot be loaded"):
        overlay.planner("broken")
    with pytest.raises(
        PlanError, match=r"'other' is unknown; expected one of auto, .*, broken, mine, or MODULE:FUNCTION"
    ):
        overlay.planner("other")


@pytest.mark.parametrize("name", ["no_such_module:f", "test_overlay_planners:nothing", ":", "math:pi"])
def test_a_planner_that_is_none(name):
    with pytest.raises(PlanError, match=r"cannot be loaded|is a float"):
        overlay.planner(name)


# --- changing plans ----------------------------------------------------------------------------------------------


def ring(rates):
    names = "abcdef"[: len(rates)]
    pairs = [(names[i], names[(i + 1) % len(names)]) for i in range(len(names))]
    links = {pair: (1e-4, rate * 1e6, rate * 1e6) for pair, rate in zip(pairs, rates, strict=True)}
    return [Rank(n) for n in names], links


def test_a_plan_is_kept_while_links_only_wobble():
    members, links = ring([500, 510, 490, 505, 495, 500])
    old = overlay.plan(members, links)
    wobbled = {pair: (lat, f * 0.95, b * 1.05) for pair, (lat, f, b) in links.items()}
    spec, reason = overlay.replan(old.spec, members, wobbled)
    assert spec is None
    assert reason.startswith("kept: ")


def test_a_plan_changes_when_a_link_collapses():
    members, links = ring([500, 500, 500, 500, 500, 500])
    old = overlay.plan(members, links)
    slow = links | {("b", "c"): (1e-4, 5e7, 5e7)}
    spec, reason = overlay.replan(old.spec, members, slow)
    assert spec is not None
    network = Network(members, slow)
    assert network.seconds(spec, overlay.TYPICAL_NBYTES) < 0.5 * network.seconds(old.spec, overlay.TYPICAL_NBYTES)
    assert "with the present trees" in reason
    assert overlay.replan(spec, members, slow)[0] is None  # and stays


def test_a_change_that_saves_less_than_it_costs_is_not_made():
    members, links = ring([500] * 6)
    old = overlay.plan(members, links)
    slow = links | {("b", "c"): (1e-4, 5e7, 5e7)}
    spec, reason = overlay.replan(old.spec, members, slow, cost_s=1000.0)
    assert spec is None
    assert "a change costs 1000 s" in reason


def test_a_plan_over_a_link_that_is_gone_is_always_replaced():
    members, links = ring([500] * 4)
    old = overlay.plan(members, links, policy="widest")
    used = next(iter(edges(old.spec, [m.id for m in members])))
    left = {pair: value for pair, value in links.items() if frozenset(pair) != frozenset(used)}
    spec, reason = overlay.replan(old.spec, members, left, cost_s=1e9, gain=0.99)
    assert spec is not None
    assert misfit(spec, [m.id for m in members], left) == ""
    assert reason.startswith("the plan no longer fits: plan 'trees' needs links that are not there")
    line = {pair: value for pair, value in links.items() if "d" not in pair}
    spec, reason = overlay.replan(old.spec, members[:3], line, cost_s=1e9)
    assert spec is not None
    assert "names 'd', which is no member" in reason


def test_a_graph_in_two_parts_is_named():
    members = [Rank(n) for n in "abcd"]
    links = {("a", "c"): (0.0, 1e8, 1e8), ("d", "b"): (0.0, 1e8, 1e8)}
    for call in (lambda: overlay.plan(members, links), lambda: overlay.replan(PlanSpec(), members, links)):
        with pytest.raises(PlanError, match=r"the parts are: a, c \| b, d\."):
            call()
