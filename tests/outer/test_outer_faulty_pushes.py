"""A cluster sends pushes that are too long, point the wrong way, are empty or not finite, to a leader and a follower in
real processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outer_cluster_support import Cluster, Clusters
from until_support import until

from chaos_lightning.events.events import Record
from chaos_lightning.outer.rules.settings import OuterSettings

NAMES = ["a", "b", "odd"]
RULES = OuterSettings(
    policy="robust",
    inner_steps=1,
    batch=16,
    gate_warmup=2,
    gate_limit=20.0,
    gate_patience=9,
    gate_again=9,
    grace_cap=1.0,
)
"""A good push may be much longer than others, for few of them have said what is usual."""
TURNS = 8
"""Within so many one round has a push of each, however busy the machine is."""

Twist = Callable[[torch.Tensor], torch.Tensor]


def with_inf(delta: torch.Tensor) -> torch.Tensor:
    delta.view(-1)[0] = math.inf
    return delta


def settled(all_of_them: list[Cluster]) -> None:
    """Waits until all clusters have adopted the newest version that any of them knows."""
    machines = [each.session._life.machine for each in all_of_them]

    def same() -> bool:
        for each in all_of_them:
            each.session.boundary(0, steps=0)
        return len({machine.base for machine in machines} | {machine.newest for machine in machines}) == 1

    until(same, "one base of all")


def together(all_of_them: list[Cluster], twist: Twist = lambda delta: delta) -> None:
    """Has each cluster train a step from the newest version and push it; `twist` changes the push of the last
    cluster.
    """
    odd = all_of_them[-1]
    settled(all_of_them)
    before = [p.detach().clone() for p in odd.model.parameters()]
    for each in all_of_them:
        each.step()
    with torch.no_grad():
        for p, was in zip(odd.model.parameters(), before, strict=True):
            p.copy_(was + twist(p - was))
    for each in all_of_them:
        each.session.boundary(16)
    for each in all_of_them:
        each.hear()


def names_of(words: list[Any]) -> list[str]:
    return [each["offer"]["push"]["incarnation"]["cluster"] for each in words]


@pytest.mark.parametrize(
    ("twist", "answer", "reason"),
    [
        (lambda delta: 1e3 * delta, "rejected", "standard deviations above what is usual"),
        (lambda delta: -delta, "rejected", "its cosine with the sum of the round's other pushes"),
        (lambda delta: 0.0 * delta, "accepted", ""),
        (with_inf, "rejected", "not all of it is finite"),
    ],
    ids=["exploding", "flipped", "empty", "inf"],
)
def test_a_faulty_push_is_answered_with_its_reason_and_the_others_count(
    clusters: Clusters, twist: Twist, answer: str, reason: str
) -> None:
    all_of_them = [clusters.come_in(name, None, RULES) for name in NAMES]
    odd, harness = all_of_them[-1], clusters.harness
    heard: Record | None = None

    def round_of(twist: Twist) -> tuple[Record, dict[str, Any]]:
        """Returns the answer to the last cluster's changed push, and the round in which it was judged."""
        nonlocal heard
        together(all_of_them, twist)
        heard = harness.wait_for("push_answered", node="odd", after=heard)
        made = str(heard["version"])
        found = harness.wait_for(
            "entry", lambda r: r["kind"] == "Round" and made.startswith(f"v{r['body']['number']}-")
        )
        return heard, found["body"]

    for _ in range(2):
        round_of(lambda delta: delta)
    for _ in range(TURNS):
        said, body = round_of(twist)
        if sorted(names_of(body["accepted"]) + names_of(body["rejected"])) == NAMES:
            break
    else:
        pytest.fail(f"none of {TURNS} rounds has a push of each")
    assert (said["answer"], reason in said["reason"]) == (answer, True)
    assert [each["reason"] for each in body["rejected"]] == ([said["reason"]] if reason else [])
    assert names_of(body["accepted"]) == (NAMES[:-1] if reason else NAMES)
    settled(all_of_them)
    states = [[p.detach() for p in each.model.parameters()] for each in all_of_them]
    assert all(bool(p.isfinite().all()) for p in states[-1])
    assert all(torch.equal(p, q) for state in states for p, q in zip(state, states[0], strict=True))
    round_of(lambda delta: delta)
    assert odd.session.over == "", "it trains on"
