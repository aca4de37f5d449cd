"""Tests the state machine that all ranks of an elastic cluster share, in cases that the simulator seldom reaches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.cluster import ClusterMachine
from chaos_lightning.outer.rules.messages import Granted, Holder, Holders, Welcomed
from chaos_lightning.outer.rules.ranks_machine import RankSays, RanksFacts, RanksMachine
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import Covered, IncarnationId, JobProgress, Offer, PushId, VersionId
from chaos_lightning.protocol.plain import read_text, text_of
from lab.outer.processes import agreement

HERE = VersionId(1, "a" * 32)


def test_a_version_that_all_ranks_still_have_is_not_dropped_to_be_fetched_again() -> None:
    state = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 0)))
    welcome = fx.Told(Welcomed(1, IncarnationId("e", 1), 1, HERE, True, JobProgress()))
    events = (fx.Connected(), welcome)
    said = [RankSays(holds=HERE, events=events), RankSays(holds=HERE)]
    effects = list(state.commit(["a", "b"], said, 0, ()))
    assert [type(effect) for effect in effects] == [fx.Told, cl.Adopt]
    assert state.machine.base == HERE


def test_a_cluster_leaves_when_its_first_rank_says_so_or_all_are_held() -> None:
    def leaves(*said: RankSays) -> bool:
        state = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 0)))
        list(state.commit(["a", "b"], said, 0, ()))
        return state.machine.leaving

    stays, held, asks = RankSays(), RankSays(held=True), RankSays(leaves=True)
    assert [leaves(stays, stays), leaves(stays, asks), leaves(held, stays), leaves(stays, held)] == [False] * 4
    assert [leaves(asks, stays), leaves(held, held)] == [True] * 2


PUSH = PushId(IncarnationId("e", 1), 1)
SAYS = RankSays(
    HERE,
    (PUSH, "m"),
    4,
    (8.0, 2.0),
    "its loop is over",
    True,
    "",
    (fx.Connected(), fx.Told(Holders(1, (Holder("f0", "127.0.0.1:1", "k", b"key"),))), cl.Missed(HERE)),
)


def test_what_a_rank_says_is_the_same_when_it_is_read() -> None:
    for said in (RankSays(), SAYS):
        assert read_text(RankSays, text_of(RankSays, said)) == said


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), None),
        ((), [1, 2, 3]),
        ((), {"kind": "RankSays", "of": [1, 2, 3]}),
        ((0,), None),
        ((0,), "v1"),
        ((0, 0), "1"),
        ((0, 0), True),
        ((0, 0), 1 << 63),
        ((0, 1), "\ud800"),
        ((1,), ["str", "x"]),
        ((1, 1), []),
        ((3, 0), 8),
        ((3, 0), float("inf")),
        ((5,), 1),
        ((7,), "x"),
        ((7, 0), None),
        ((7, 0), ["Trained", [1, [], 1]]),
        ((7, 1, 1, 0, 0), "Applied"),
        ((7, 1, 1, 0, 1, 1, 0, 3), "no base64"),
    ],
)
def test_whatever_a_rank_cannot_say_is_refused_when_it_is_read(path: tuple[int, ...], value: object) -> None:
    """Former bug: messages between ranks were decoded without checks, so that malformed ones failed later, in the
    training thread.
    """
    root: list[Any] = [json.loads(text_of(RankSays, SAYS))]
    place, last = root, 0
    for at in path:
        place, last = place[last], at
    place[last] = value
    with pytest.raises(WireError, match="malformed"):
        read_text(RankSays, json.dumps(root[0]).encode())


def test_reversed_spans_and_documents_nested_without_end_are_refused_too() -> None:
    granted = text_of(RankSays, RankSays(events=(fx.Told(Granted(1, (Covered(0, ((2, 5),)),))),)))
    assert b"[2,5]" in granted
    for data in (granted.replace(b"[2,5]", b"[5,2]"), b"[" * 100_000, b"\xff", b""):
        with pytest.raises(WireError, match="malformed"):
            read_text(RankSays, data)


def test_what_all_ranks_hold_is_the_same_text_in_whatever_order_it_came_about() -> None:
    kept = {PushId(PUSH.incarnation, n): Offer(PushId(PUSH.incarnation, n), HERE, "m", 1, 1) for n in (1, 2)}
    texts = []
    for held in (kept, dict(reversed(kept.items()))):
        state = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 64)))
        state.machine.kept = held
        texts.append(text_of(RanksFacts, state.facts()))
    assert texts[0] == texts[1]
    other = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 64)))
    other.restore(read_text(RanksFacts, texts[0]))
    assert other.facts() == state.facts()


def test_positions_that_are_leased_twice_are_an_error_that_says_so() -> None:
    """Former bug: if the leader leased positions twice, the training threads of all ranks ended with a ValueError."""
    state = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 64)))
    granted = RankSays(events=(fx.Told(Granted(1, (Covered(0, ((0, 8), (4, 12))),))),))
    with pytest.raises(StateError, match=r"contradicts what is held: .*named twice"):
        list(state.commit(["a"], [granted], 0, ()))
