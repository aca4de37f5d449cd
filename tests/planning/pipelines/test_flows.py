"""Tests minimum-cost flows from several sources, and minimum cuts, against networkx."""

from __future__ import annotations

import networkx
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.planning.pipelines.flows import FlowNetwork

SINK = 0

arcs = st.dictionaries(
    st.tuples(st.integers(1, 6), st.integers(0, 6)).filter(lambda ends: ends[0] != ends[1]),
    st.tuples(st.integers(1, 9), st.integers(0, 9)),
    max_size=20,
)
"""Arcs of a network: (capacity, cost) by (from, to)."""


def network(given_arcs: dict[tuple[int, int], tuple[int, int]]) -> tuple[FlowNetwork, dict[tuple[int, int], int]]:
    net = FlowNetwork(7)
    return net, {ends: net.arc(*ends, *about) for ends, about in given_arcs.items()}


@given(arcs, st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_sources_served_in_turn_make_the_cheapest_flow(given_arcs: dict, wanted: list[int]) -> None:
    net, numbers = network(given_arcs)
    sent = [net.send(source, SINK, most) for source, most in enumerate(wanted, 1)]
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(7))
    for ends, (capacity, cost) in given_arcs.items():
        graph.add_edge(*ends, capacity=capacity, weight=cost)
    for source, amount in enumerate(sent, 1):
        graph.add_node(source, demand=-amount)
    graph.add_node(SINK, demand=sum(sent))
    flow = {ends: net.sent(number) for ends, number in numbers.items()}
    assert all(0 <= flow[ends] <= given_arcs[ends][0] for ends in flow)
    for node in range(7):
        out = sum(x for (a, _), x in flow.items() if a == node) - sum(x for (_, b), x in flow.items() if b == node)
        assert out == dict(enumerate([-sum(sent), *sent])).get(node, 0)
    assert sum(given_arcs[ends][1] * x for ends, x in flow.items()) == networkx.min_cost_flow_cost(graph)


@given(arcs)
def test_what_a_vain_search_reached_is_a_full_cut(given_arcs: dict) -> None:
    net, _ = network({ends: (capacity, 0) for ends, (capacity, _) in given_arcs.items()})
    sent = net.send(1, SINK, 10**6)
    assert SINK not in net.reached
    assert sent == sum(x for (a, b), (x, _) in given_arcs.items() if a in net.reached and b not in net.reached)
