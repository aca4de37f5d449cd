"""Tests the pairs of members that are to have links: updated step by step, they equal those computed from scratch."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.membership.effects import LinkWish
from chaos_lightning.membership.partners import Partners, pair
from chaos_lightning.membership.peers import Peer, Standing
from chaos_lightning.membership.topology import connected
from chaos_lightning.planning.graph import parting_nodes
from chaos_lightning.protocol.types import SMALL_JOB, Member

DEGREE = 8


def peer(number: int, *neighbours: str, address: str = "", node: str = "") -> Peer:
    name = f"n{number}"
    address = address or f"10.0.{number // 250}.{number % 250}"
    found = Peer(Member(f"{name}~{number}", name, name, address, 1, node=node), Standing.LINKING)
    found.neighbours = neighbours
    return found


def of_many(count: int, degree: int = DEGREE) -> Partners:
    partners = Partners(degree)
    for number in range(count):
        partners.add(peer(number))
    return partners


def pairs(partners: Partners) -> frozenset[frozenset[str]]:
    return frozenset(pair(a, b) for a in partners for b in partners.of(a))


@pytest.mark.parametrize(("degree", "count"), [(DEGREE, SMALL_JOB), (0, 40)])
def test_all_have_links_in_a_small_job_and_where_that_is_asked_for(degree: int, count: int) -> None:
    partners = of_many(count, degree)
    assert len(pairs(partners)) == count * (count - 1) // 2
    assert not partners.sparse


def test_in_a_large_job_a_newcomer_is_given_as_many_as_the_setting_says() -> None:
    partners = of_many(SMALL_JOB)
    for number in range(SMALL_JOB, 300):
        newcomer = peer(number)
        partners.add(newcomer)
        assert len(partners.of(newcomer.id)) == DEGREE
    most = max(len(partners.of(m)) for m in partners)
    assert most <= 5 * DEGREE
    partners.validate()


def test_partners_are_of_other_nodes_and_some_near_by_address() -> None:
    partners = Partners(DEGREE)
    for number in range(64):
        partners.add(peer(number, address=f"10.0.{number // 8}.1", node=f"m{number // 8}"))
    newcomer = peer(64, address="10.0.7.2", node="m7")
    partners.add(newcomer)
    nodes = [int(m[1:].partition("~")[0]) // 8 for m in partners.of(newcomer.id)]
    assert 7 not in nodes
    assert nodes.count(6) >= 1
    assert len(set(nodes)) > 2


def test_where_a_node_has_nearly_all_workers_these_are_partners_too() -> None:
    partners = Partners(DEGREE)
    for number in range(30):
        partners.add(peer(number, node="big" if number else "other"))
    assert all(len(partners.of(m)) >= DEGREE for m in partners)


def test_who_loses_partners_is_given_others() -> None:
    partners = of_many(100)
    rng, left = Random(1), [f"n{i}~{i}" for i in range(100)]
    rng.shuffle(left)
    while len(left) > 20:
        partners.drop(left.pop())
        assert all(len(partners.of(m)) >= DEGREE for m in left)
        partners.validate()
    assert connected(left, pairs(partners))


def test_partners_that_are_not_reached_are_replaced_once() -> None:
    partners = of_many(60)
    lost = list(partners.of("n50~50"))[:3]
    assert partners.replace("n50~50", lost)
    assert not set(lost) & set(partners.of("n50~50"))
    assert len(partners.of("n50~50")) >= DEGREE
    assert not partners.replace("n50~50", list(partners.of("n50~50")))
    partners.validate()


def test_a_given_link_that_stays_down_is_replaced_and_not_given_again() -> None:
    partners = of_many(60)
    one = "n50~50"
    lost = frozenset(pair(one, other) for other in partners.of(one))
    partners.lose(lost)
    assert not lost & pairs(partners)
    assert len(partners.of(one)) >= DEGREE
    assert min(len(partners.of(m)) for m in partners) >= DEGREE
    partners.validate()
    version = partners.version
    partners.lose(lost)
    assert partners.version == version
    partners.lose(frozenset())
    for other in range(50):
        partners.drop(f"n{other}~{other}")
        assert not lost & pairs(partners) or not partners.sparse


def test_a_link_that_stays_down_is_no_path() -> None:
    """A requested link stays down: it is still wanted, but other pairs are added so that no node's loss separates the
    rest.
    """
    peers = [peer(number) for number in range(39)]
    ids = [p.id for p in peers]
    partners = Partners(DEGREE)
    partners.seed(peers, [pair(a, b) for part in (ids[:20], ids[19:]) for a, b in combinations(part, 2)])
    partners.wished(LinkWish("n0", "n38", True, "an operator asks"))
    partners.secure()
    lost = pair("n0~0", "n38~38")
    before = pairs(partners)
    partners.lose(frozenset([lost]))
    partners.secure()
    assert lost in pairs(partners)
    assert before < pairs(partners)
    assert parting_nodes({m: m for m in ids}, [(a, b) for a, b in map(sorted, pairs(partners) - {lost})]) == []
    partners.validate()


def test_nobody_is_replaced_where_all_have_links() -> None:
    partners = of_many(5)
    assert not partners.replace("n0~0", ["n1~1"])
    assert "n1~1" in partners.of("n0~0")


def test_parts_of_a_graph_are_given_bridges() -> None:
    partners = of_many(60)
    ids = list(partners)
    one, other = ids[:40], ids[40:]
    for a in one:
        for b in list(partners.of(a)):
            if b in other:
                partners.wished(LinkWish(a.partition("~")[0], b.partition("~")[0], False, "an operator asks"))
    assert not connected(ids, pairs(partners))
    assert partners.bridge([one, other])
    assert connected(ids, pairs(partners))
    partners.validate()


def test_no_node_is_left_without_which_others_have_no_path() -> None:
    peers = [peer(number) for number in range(39)]
    ids = [p.id for p in peers]
    partners = Partners(DEGREE)
    partners.seed(peers, [pair(a, b) for part in (ids[:20], ids[19:]) for a, b in combinations(part, 2)])
    places = {m: m for m in ids}
    assert parting_nodes(places, [(a, b) for a in ids for b in partners.of(a)]) == ["n19~19"]
    partners.secure()
    assert parting_nodes(places, [(a, b) for a in ids for b in partners.of(a)]) == []
    partners.validate()


def test_a_removed_link_is_given_to_nobody() -> None:
    partners = of_many(60)
    for other in range(59):
        if other % 3:
            partners.wished(LinkWish("n60", f"n{other}", False, "an operator asks"))
    partners.add(peer(60))
    assert {int(m[1:].partition("~")[0]) % 3 for m in partners.of("n60~60")} <= {0, 2}
    assert all(int(m[1:].partition("~")[0]) % 3 == 0 or m == "n59~59" for m in partners.of("n60~60"))


def test_a_scheduler_that_takes_over_wants_links_that_the_last_view_did_without() -> None:
    partners = Partners(DEGREE)
    partners.seed([peer(number) for number in range(3)], [pair("n0~0", "n2~2"), pair("n1~1", "n2~2")])
    assert "n1~1" in partners.of("n0~0")
    partners.validate()


@pytest.mark.parametrize("degree", [1, DEGREE])
def test_what_is_left_of_a_large_job_has_all_links(degree: int) -> None:
    partners = of_many(40, degree)
    for number in range(40, SMALL_JOB, -1):
        partners.drop(f"n{number - 1}~{number - 1}")
        partners.validate()
    assert len(pairs(partners)) == SMALL_JOB * (SMALL_JOB - 1) // 2


def test_after_a_failover_pairs_are_those_of_the_last_view() -> None:
    before = of_many(80)
    after = Partners(DEGREE)
    after.seed([peer(number) for number in range(80)], pairs(before))
    assert pairs(after) == pairs(before)
    after.validate()


def test_two_incarnations_of_one_process_are_of_one_node() -> None:
    partners = of_many(3)
    again = Peer(Member("n2~9", "n2", "n2", "10.0.0.2", 1), Standing.LINKING)
    again.neighbours = ("n0",)
    partners.add(again)
    assert set(partners.of("n2~9")) == {"n0~0", "n2~2"}
    partners.validate()


@pytest.mark.parametrize("count", [3, 40])
def test_newcomers_that_came_before_a_lost_view_was_known_are_given_partners_of_it(count: int) -> None:
    partners = Partners(DEGREE)
    partners.add(peer(99))
    partners.seed([peer(number) for number in range(count)], pairs(of_many(count)))
    assert len(partners.of("n99~99")) == min(count, DEGREE)
    partners.validate()


def test_who_names_neighbours_is_given_none() -> None:
    partners = of_many(40)
    partners.add(peer(40, "n1", "n2~2"))
    assert set(partners.of("n40~40")) == {"n1~1", "n2~2"}
    partners.add(peer(41, "n40"))
    assert set(partners.of("n41~41")) == {"n40~40"}


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "go", "add", "remove", "names", "replace", "lose", "bridge"]),
        *[st.integers(0, 39)] * 2,
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_what_is_kept_step_by_step_is_what_all_of_it_comes_to(steps: list[Step]) -> None:
    here = {number: peer(number) for number in range(12)}
    partners = Partners(DEGREE)
    for each in here.values():
        partners.add(each)
    for what, one, other in steps:
        match what:
            case "come" if one not in here:
                here[one] = peer(one, *((f"n{other}",) if other % 7 == 0 else ()))
                partners.add(here[one])
            case "go" if one in here:
                partners.drop(here.pop(one).id)
            case "add" | "remove" if one != other:
                partners.wished(LinkWish(f"n{one}", f"n{other}", what == "add", "asked"))
            case "names" if one in here:
                here[one].neighbours = (f"n{other}",) if other % 2 else ()
                partners.add(here[one])
            case "replace" if one in here:
                partners.replace(here[one].id, list(partners.of(here[one].id))[:2])
            case "lose" if one in here:
                partners.lose(frozenset(pair(here[one].id, m) for m in list(partners.of(here[one].id))[:2]))
            case "bridge" if len(here) > 2:
                ids = [p.id for p in here.values()]
                partners.bridge([ids[:1], ids[1:]])
        partners.validate()
