"""Tests speeds of members as plans use them: a factor common to all changes no choice, and small changes are
ignored.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.membership.peers import Peer, Standing, Tempo
from chaos_lightning.membership.speeds import NOTICED, Speeds, changes
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.protocol.types import MOST_SPEED, Member


def request(layer_s: float = 1.0) -> PipelineRequest:
    layers = tuple(Layer(name=f"l{i}", forward_s=layer_s, backward_s=2 * layer_s) for i in range(4))
    job = TrainingJob(layers=layers, devices=(Device(name="me", memory_nbytes=1),), micro_batches=4)
    return PipelineRequest(job, "adaptive", 1)


class Told:
    """Members a, b, ... and the speeds that they report."""

    def __init__(self, *layer_s: float) -> None:
        self.peers = {
            n: Peer(Member(n, n, "", "", 0), Standing.MEMBER) for n, _ in zip("abcdef", layer_s, strict=False)
        }
        self.requests = {n: request(s) for n, s in zip("abcdef", layer_s, strict=False)}
        self.speeds = Speeds(self.peers, self.requests)

    def tell(self, **speeds: float) -> dict[str, float]:
        for name, speed in speeds.items():
            self.peers[name].tempo = Tempo(speed=speed)
        self.speeds.look(self.requests["a"])
        return self.speeds.own(self.peers)


def test_what_all_share_scales_estimates_and_makes_nobody_unlike_the_others() -> None:
    told = Told(1, 1, 1, 1)
    assert told.tell(a=0.5, b=0.52, c=0.48) == dict.fromkeys("abcd", 1.0)
    assert told.speeds.planned == dict.fromkeys("abcd", 0.5), "also of one that has told nothing yet"


def test_a_slow_member_is_planned_as_slow_beside_the_others() -> None:
    told = Told(1, 1, 1)
    assert told.tell(a=1.0, b=1.02, c=0.4) == {"a": 1.0, "b": 1.0, "c": 0.4}
    assert told.tell(a=0.5, b=0.5, c=0.2) == {"a": 1.0, "b": 1.0, "c": 0.4}
    assert told.speeds.planned == {"a": 0.5, "b": 0.5, "c": 0.2}


def test_a_speed_that_wavers_counts_once_and_one_that_recovers_is_as_foreseen() -> None:
    told = Told(1, 1, 1)
    for speed in (0.9, 1.1, 0.88, 1.14):
        assert told.tell(a=1.0, b=1.0, c=speed)["c"] == 1.0
    for speed in (0.5, 0.45, 0.56, 0.44):
        assert told.tell(c=speed)["c"] == 0.5
    assert told.tell(c=0.4)["c"] == 0.4
    assert told.tell(c=1.1)["c"] == 1.0
    assert told.tell(c=1.3)["c"] == 1.3
    assert told.tell(c=0.0)["c"] == 1.0, "it has forgotten it"


def test_each_member_is_measured_by_its_own_request_and_planned_by_the_oldest() -> None:
    """A slow machine that meets its own slow forecast still counts as slow, since plans forecast by the oldest member's
    layer times.
    """
    told = Told(1.0, 1.0, 3.0)
    assert told.tell(a=1.0, b=1.0, c=1.0) == {"a": 1.0, "b": 1.0, "c": pytest.approx(1 / 3, rel=0.01)}
    oldest_slow = Told(3.0, 1.0, 1.0)
    assert oldest_slow.tell(a=1.0, b=1.0, c=1.0) == {"a": pytest.approx(1 / 3, rel=0.01), "b": 1.0, "c": 1.0}
    assert oldest_slow.speeds.planned["b"] == 3.0, "beside the layers of the oldest"


def test_who_has_gone_is_forgotten() -> None:
    told = Told(1, 1, 1)
    told.tell(a=1.0, b=1.0, c=0.2)
    del told.peers["c"], told.requests["c"]
    assert told.tell() == {"a": 1.0, "b": 1.0}
    assert set(told.speeds.planned) == {"a", "b"}


@given(st.lists(st.floats(0.0, exclude_min=True) | st.just(math.nan), min_size=3, max_size=3), st.floats(1e-300, 1e300))
def test_nonsense_is_bounded_and_settles(speeds: list[float], layer_s: float) -> None:
    told = Told(1.0, 1.0, layer_s)
    own = told.tell(**dict(zip("abc", speeds, strict=True)))
    for speed in told.speeds.planned.values():
        assert 1 / (2 * MOST_SPEED) ** 2 <= speed <= (2 * MOST_SPEED) ** 2
        assert Device(name="d", memory_nbytes=1, speed=speed)
    assert told.tell() == own


def test_changes_are_told_in_words_the_slowest_first() -> None:
    now = {"a~1": 1.0, "b~2": 0.47, "c~3": 1.1, "d~4": 0.2}
    assert changes({}, now) == [
        "d~4 computes 5 times slower than foreseen",
        "b~2 computes 2.1 times slower than foreseen",
    ]
    assert changes(now, now) == []
    assert changes(now, {**now, "b~2": 1.0}) == ["b~2 computes 2.1 times faster than foreseen"]
    assert changes({"a~1": 1.0}, {"a~1": 1.0 + NOTICED}) == []
