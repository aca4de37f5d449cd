"""Tests the all-reduce over several weighted trees at once: each byte uses one tree, and sums are equal everywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from test_reducer import a_view, cluster, summed  # noqa: F401  (a fixture)

from chaos_lightning.protocol.types import PlanSpec, TreeSpec

WEIGHTED = ((3.0, ("", 0, 1, 1)), (1.0, (3, 0, 0, "")), (2.0, (2, 2, "", 0)))
"""(weight, parent of each rank)"""


def weighted(names: list[str], chunk_nbytes: int) -> PlanSpec:
    return PlanSpec(
        "trees",
        chunk_nbytes,
        tuple(
            TreeSpec(0, 0, tuple(names), tuple("" if p == "" else names[int(p)] for p in parents), weight)
            for weight, parents in WEIGHTED
        ),
    )


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize("chunk_nbytes", [4096, 0])
def test_sum_is_exact_and_bit_identical_over_several_trees(cluster, by_reference, chunk_nbytes):  # noqa: F811
    nodes = cluster(4, torch.float64, by_reference=by_reference)
    summed(nodes, weighted([n.me for n in nodes], chunk_nbytes))


def test_only_links_of_the_trees_are_used(cluster):  # noqa: F811
    nodes = cluster(4)
    names = [n.me for n in nodes]
    line = PlanSpec("trees", 4096, (TreeSpec(0, 0, tuple(names), ("", names[0], names[1], names[2]), 1.0),))
    used = set()

    def watched(node):
        send = node.reducer._send

        def noting(peer, *rest):
            used.add((node.me, peer))
            send(peer, *rest)

        node.reducer._send = noting

    view = a_view(names, line)
    for i, n in enumerate(nodes):
        watched(n)
        n.fill(i)
        n.run(view, 1)
    for n in nodes:
        n.wait(view, 1)
    assert used == {pair for a, b in pairwise(names) for pair in ((a, b), (b, a))}
