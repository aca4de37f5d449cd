"""Generator of views of many members, with about eight links per member and eight trees."""

from __future__ import annotations

import random

from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, PlanSpec, TreeSpec, View, ViewId


def sparse_view(count: int, *, trees: int = 8, number: ViewId = ViewId(1, 1), predecessor: ViewId = NO_VIEW) -> View:
    """Returns a view of `count` members, each on a machine of its own, with ring and random links, and random trees
    over them.
    """
    chance = random.Random(count)
    members = tuple(
        Member(
            id=f"node{i:04d}~{i + 1}",
            name=f"node{i:04d}",
            host=f"node{i:04d}.cluster",
            address=f"10.0.{i // 250}.{i % 250 + 1}",
            port=chance.randrange(32768, 60999),
            pid=chance.randrange(1000, 4_000_000),
            pid_start=chance.randrange(10**6, 10**8),
        )
        for i in range(count)
    )
    ids = [m.id for m in members]
    pairs = {(i, i + 1) for i in range(count - 1)}
    pairs |= {(a, b) for a in range(count) for b in chance.sample(range(count), min(3, count)) if a < b}
    near: dict[int, list[int]] = {i: [] for i in range(count)}
    for a, b in sorted(pairs):
        near[a].append(b)
        near[b].append(a)
    specs = []
    for weight in range(trees):
        root = chance.randrange(count)
        parents, queue = {root: ""}, [root]
        for at in queue:
            chance.shuffle(near[at])
            fresh = [b for b in near[at] if b not in parents]
            parents |= dict.fromkeys(fresh, ids[at])
            queue += fresh
        specs.append(TreeSpec(0, 0, tuple(ids), tuple(parents[i] for i in range(count)), 1.0 / (1 + weight)))
    links = tuple(LinkSpec(ids[a], ids[b]) for a, b in sorted(pairs))
    plan = PlanSpec("trees", trees=tuple(specs))
    return View(number, predecessor, members, (), plan, reason="because", links=links, chain="0123456789abcdef")
