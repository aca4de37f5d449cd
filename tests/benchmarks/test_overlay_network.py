"""Tests what the overlay benchmark compares with: gloo's routes, the bounds, and the link that is slowed down."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.overlay import net as overlay_net
from benchmarks.overlay import reduce as overlay
from benchmarks.overlay import replan as overlay_replan
from benchmarks.overlay.net import MBPS, NAMES
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId


def width(a: str, b: str) -> float:
    return MBPS.get((a, b)) or MBPS[b, a]


def follow(routes: overlay_net.Routes, here: str, target: str) -> list[str]:
    way = [here]
    while here != target:
        here = routes[here, target]
        way.append(here)
        assert len(way) <= len(NAMES), f"a loop: {way}"
    return way


@pytest.mark.parametrize("widest", [True, False])
def test_routes_reach_everybody_by_the_best_way(widest: bool) -> None:
    routes = overlay_net.routes(MBPS, widest=widest)
    ways: dict[tuple[str, str], list[list[str]]] = {}

    def walk(way: list[str]) -> None:
        ways.setdefault((way[0], way[-1]), []).append(way)
        for there in NAMES:
            if there not in way and ((way[-1], there) in MBPS or (there, way[-1]) in MBPS):
                walk([*way, there])

    for name in NAMES:
        walk([name])
    for here in NAMES:
        for target in NAMES:
            if here == target:
                continue
            way = follow(routes, here, target)
            options = ways[here, target]
            narrow = [min(width(a, b) for a, b in pairwise(w)) for w in (way, *options)]
            if widest:
                assert narrow[0] == max(narrow[1:])
            else:
                assert len(way) == min(map(len, options))


def test_bounds_of_the_benchmarks_network() -> None:
    """The bounds equal those computed by hand: 200 Mbps for the widest tree, 450 Mbps per cut into ab, c, d and ef for
    several trees.
    """
    found = {case.name: case for case in overlay.cases(1 << 25)}
    assert found["widest (1 tree)"].bound_s == pytest.approx(8 * (1 << 25) / 200e6)
    crossing = sum(MBPS.values()) - MBPS["a", "b"] - MBPS["e", "f"]
    assert crossing / 3 == 450
    assert found["packed (5 trees)"].bound_s == pytest.approx(8 * (1 << 25) / 450e6, rel=1e-4)
    assert found["packed (5 trees)"].limit == overlay.BOUND_SEVERAL


def test_the_link_that_is_slowed_down_is_one_that_the_trees_fill() -> None:
    trees = [(1.0, ("a~1", "b~2", "c~3"), ("", "a~1", "b~2")), (0.5, ("a~1", "b~2", "c~3"), ("", "a~1", "b~2"))]
    assert overlay_replan._busiest(trees) == ("b", "c")


def test_a_node_whose_link_broke_says_so_at_once() -> None:
    node = overlay.Node(NAMES[0], 1 << 16, "127.0.0.1")
    try:
        node.fill(1)
        node.broken(NAMES[1], None, "closed (Connection timed out)")
        with pytest.raises(RuntimeError, match=f"65536 bytes are missing, broken links .*{NAMES[1]}: closed"):
            node.reduce(View(ViewId(1, 1), NO_VIEW, overlay.MEMBERS[:2]), 1, 0.0)
    finally:
        node.close()
