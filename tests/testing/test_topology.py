"""Tests topologies: the state of the links at each time, and the errors for impossible descriptions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.testing.edge.topology import (
    Change,
    Condition,
    EdgeNode,
    Link,
    LinkState,
    Topology,
    differences,
    links_of,
    next_change_s,
    rate_text,
    story,
)

A_B, B_C = ("a", "b"), ("b", "c")


def network(*schedule: Change, **more: Any) -> Topology:
    nodes = (EdgeNode("a"), EdgeNode("b"), EdgeNode("c"))
    links = (Link("a", "b", 300e6, 0.02), Link("b", "c", 100e6))
    return Topology(**{"nodes": nodes, "links": links, "schedule": schedule, **more})


def test_without_a_schedule_links_stay_as_they_are() -> None:
    topology = network()
    for t_s in (0.0, 1e6):
        assert links_of(topology, t_s) == {A_B: LinkState(300e6, 0.02), B_C: LinkState(100e6)}
    assert next_change_s(topology, 0.0) is None


def test_a_change_overlays_only_what_it_names_from_its_time_on() -> None:
    slow = Change(at_s=30, links=(("b", "a"),), share=0.1)  # ends in the other order are the same link
    later = Change(at_s=40, links=(A_B,), latency_s=0.5)
    topology = network(slow, later)
    assert links_of(topology, 29.9)[A_B] == LinkState(300e6, 0.02)
    assert links_of(topology, 30.0)[A_B] == LinkState(30e6, 0.02)
    assert links_of(topology, 40.0)[A_B] == LinkState(30e6, 0.5)
    assert links_of(topology, 99.0)[B_C] == LinkState(100e6)


def test_the_later_of_two_changes_rules_wherever_it_is_written() -> None:
    one, other = Change(at_s=20, rate_bps=(2e6, 2e6)), Change(at_s=10, rate_bps=(1e6, 1e6))
    for order in ((one, other), (other, one)):
        assert links_of(network(*order), 30.0)[A_B].rate_bps == 2e6
        assert links_of(network(*order), 15.0)[A_B].rate_bps == 1e6


def test_what_lasts_for_a_while_is_afterwards_as_if_it_had_not_been() -> None:
    topology = network(
        Change(at_s=5, links=(A_B,), rate_bps=(50e6, 50e6)),
        Change(at_s=10, links=(A_B,), condition=Condition.CUT, rate_bps=(1e6, 1e6), for_s=4),
    )
    assert links_of(topology, 12.0)[A_B] == LinkState(1e6, 0.02, Condition.CUT)
    assert links_of(topology, 14.0)[A_B] == LinkState(50e6, 0.02)
    assert next_change_s(topology, 12.0) == 14.0


def test_a_link_flaps_again_and_again() -> None:
    topology = network(Change(at_s=10, every_s=60, for_s=5, links=(A_B,), condition=Condition.STALLED))
    seen = [links_of(topology, t)[A_B].usable for t in (9, 10, 14.9, 15, 69, 70, 75)]
    assert seen == [True, False, False, True, True, False, True]
    times = [0.0]
    while len(times) < 6:
        times.append(next_change_s(topology, times[-1]) or 0.0)
    assert times[1:] == [10, 15, 70, 75, 130]


def test_random_rates_depend_on_seed_time_and_link_alone() -> None:
    change = Change(every_s=180, rate_bps=(100e6, 1000e6), seed=7)
    topology = network(change)
    first = links_of(topology, 0.0)
    assert links_of(topology, 179.9) == first
    assert links_of(topology, 180.0)[A_B] != first[A_B]
    assert first[A_B].rate_bps != first[B_C].rate_bps
    assert all(100e6 <= s.rate_bps <= 1000e6 for t in range(0, 9000, 180) for s in links_of(topology, t).values())
    turned = network(change, links=(Link("c", "b", 5e6), Link("b", "a", 5e6)))
    assert links_of(turned, 0.0)[("b", "a")].rate_bps == first[A_B].rate_bps
    assert links_of(network(Change(every_s=180, rate_bps=(100e6, 1000e6), seed=8)), 0.0)[A_B] != first[A_B]


times = st.floats(0, 100, allow_nan=False)
changes = st.builds(
    lambda at, every, part, share, links, condition: Change(
        at_s=at, every_s=every, for_s=part * (every or 9.0), share=share, links=links, condition=condition
    ),
    times,
    st.sampled_from([0.0, 0.1, 0.3, 7.7]),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.floats(0.01, 2.0),
    st.sampled_from([(), (A_B,), (B_C,)]),
    st.sampled_from([None, *Condition]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(changes, max_size=4), st.lists(times, min_size=1, max_size=5))
def test_nothing_changes_between_two_changes(schedule: list[Change], moments: list[float]) -> None:
    """No link changes between a time and the next change that `next_change_s` gives for it."""
    topology = network(*schedule)
    for t_s in moments:
        coming = next_change_s(topology, t_s)
        end = t_s + 20.0 if coming is None else coming
        assert end > t_s
        now = links_of(topology, t_s)
        for part in (0.1, 0.5, 0.9):
            moment = t_s + part * (end - t_s)
            if t_s < moment < end:
                assert links_of(topology, moment) == now


def test_differences_and_story_are_told_in_words() -> None:
    cut = Change(at_s=60, links=(A_B,), condition=Condition.CUT, for_s=5)
    topology = network(Change(at_s=30, links=(A_B,), share=0.1, latency_s=0.04), cut)
    assert list(story(topology, 100.0)) == [
        (30, "a - b: 300 Mbps -> 30 Mbps, latency 20 ms -> 40 ms"),
        (60, "a - b: cut"),
        (65, "a - b: restored"),
    ]
    same = links_of(topology, 0.0)
    assert differences(same, same) == []
    assert str(links_of(topology, 60.0)[A_B]) == "cut (30 Mbps, 40 ms)"
    assert [str(c) for c in topology.schedule] == [
        "at 30 s: a - b: rate 0.1 of its own, latency 40 ms",
        "at 60 s: a - b: cut for 5 s",
    ]
    assert str(Change(every_s=180, rate_bps=(1e8, 1e9), seed=3)) == (
        "every 3 min: all links: random rate 100 Mbps to 1 Gbps (seed 3)"
    )


def test_members_are_found_by_their_nodes_names() -> None:
    topology = network(nodes=(EdgeNode("a"), EdgeNode("b"), EdgeNode("c"), EdgeNode("edge-b")), links=(
        Link("a", "b", 1e6), Link("b", "c", 1e6), Link("c", "edge-b", 1e6),
    ))  # fmt: skip
    assert topology.node_of("a") == "a"
    assert topology.node_of("a-0") == "a"
    assert topology.node_of("a-11~3") == "a"
    assert topology.node_of("edge-b-1~1") == "edge-b"
    assert [topology.node_of(x) for x in ("x", "a-", "a-x", "edge-0", "")] == [None] * 5
    assert topology.neighbours("c") == ("b", "edge-b")
    assert not topology.delays
    assert network().delays
    assert network(Change(latency_s=0.1), links=(Link("a", "b", 1), Link("b", "c", 1))).delays


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": ()}, "nodes: there are none"),
        (
            {"nodes": (EdgeNode("a"), EdgeNode("b"), EdgeNode("c"), EdgeNode("a"))},
            r"nodes\[3\]: node 'a' is named twice",
        ),
        (
            {"nodes": (EdgeNode("a"), EdgeNode("b"), EdgeNode("c d"))},
            r"nodes\[2\]: name 'c d': expected up to 56 letters",
        ),
        (
            {"nodes": (EdgeNode("a"), EdgeNode("b"), EdgeNode("c"), EdgeNode("a-1"))},
            r"nodes\[3\]: node 'a-1' is also what rank 1",
        ),
        (
            {"nodes": (EdgeNode("a", access_bps=0), EdgeNode("b"), EdgeNode("c"))},
            r"nodes\[0\].access: 0 bps: expected a positive",
        ),
        ({"nodes": (EdgeNode("a", starts_s=-1), EdgeNode("b"), EdgeNode("c"))}, r"nodes\[0\].starts: -1 s: expected"),
        ({"links": (Link("a", "x", 1),)}, r"links\[0\].between: unknown node 'x'; expected some of a, b, c"),
        ({"links": (Link("a", "a", 1),)}, r"links\[0\].between: a link from 'a' to itself"),
        (
            {"links": (Link("a", "b", 1), Link("b", "c", 1), Link("b", "a", 1))},
            r"links\[2\].between: b and a have a link already \(links\[0\]\)",
        ),
        ({"links": (Link("a", "b", 0),)}, r"links\[0\].rate: 0 bps: expected a positive rate"),
        ({"links": (Link("a", "b", -5),)}, r"links\[0\].rate: -5 bps: expected a positive rate"),
        ({"links": (Link("a", "b", float("nan")),)}, r"links\[0\].rate: nan bps: expected a positive rate"),
        ({"links": (Link("a", "b", 1, -1),)}, r"links\[0\].latency: -1 s: expected 0 or more"),
        ({"links": (Link("a", "b", 1),)}, r"links: the graph is not connected, it has 2 parts: a, b \| c; add links"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        network(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(links=(("a", "x"),), share=1), r"schedule\[0\].link: unknown node 'x'"),
        (Change(links=(("a", "c"),), share=1), r"schedule\[0\].link: a and c have no link; there are a - b, b - c"),
        (Change(at_s=1), r"schedule\[0\]: it changes nothing"),
        (Change(rate_bps=(1, 1), share=1), r"schedule\[0\].rate: both"),
        (Change(rate_bps=(0, 0)), r"schedule\[0\].rate: 0 to 0 bps: expected a positive rate; .*state: cut"),
        (Change(rate_bps=(9, 5)), r"schedule\[0\].rate: from 9 to 5 bps: expected the lower one first"),
        (Change(share=0), r"schedule\[0\].rate: 0 %: expected a positive rate"),
        (Change(latency_s=-1), r"schedule\[0\].latency: -1 s"),
        (Change(at_s=-1, share=1), r"schedule\[0\].at: -1 s"),
        (Change(every_s=1e-9, share=1), r"schedule\[0\].every: 1e-09 s: expected 0.01 s or more"),
        (Change(every_s=-1, share=1), r"schedule\[0\].every: -1 s"),
        (Change(for_s=-1, share=1), r"schedule\[0\].for: -1 s"),
        (Change(every_s=5, for_s=5, share=1), r"schedule\[0\].for: 5 s, every 5 s: expected an end before"),
    ],
)
def test_what_cannot_happen_is_refused(change: Change, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        network(change)


def test_rates_are_told_in_words() -> None:
    assert list(map(rate_text, (1e9, 3e8, 2.5e9, 64e3, 12))) == ["1 Gbps", "300 Mbps", "2.5 Gbps", "64 kbps", "12 bps"]


def test_one_node_needs_no_link() -> None:
    assert links_of(Topology((EdgeNode("alone"),), ()), 5.0) == {}
    many = tuple(EdgeNode(f"n{i}.x") for i in range(251))
    chain = tuple(Link(a.name, b.name, 1) for a, b in itertools.pairwise(many))
    with pytest.raises(ConfigurationError, match="there are 251; expected at most 250"):
        Topology(many, chain)
