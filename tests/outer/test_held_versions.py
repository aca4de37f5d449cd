"""Tests which older versions followers keep serving while clusters fetch them (O8c)."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import pytest
from until_support import until

from chaos_lightning.errors import NoDonorError, StateError
from chaos_lightning.outer.cluster.exchange import Attempt, Sought, VersionGetter
from chaos_lightning.outer.exchange.codec import BF16, Part
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import Beat, ClusterHello, FollowerHello, Hold
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.shards import HOLD_S, Follower
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, VersionId
from lab.outer.plans import FAMILIES
from lab.outer.processes import agreement
from lab.outer.world import World

A, B, C = IncarnationId("a", 1), IncarnationId("b", 2), IncarnationId("c", 3)
V1, V2, V3 = (VersionId(number, f"hash {number}") for number in (1, 2, 3))


class Rig:
    """Leader with a follower and three clusters, each of which reports the version that it is fetching."""

    def __init__(self) -> None:
        self.machine, self.now, self.held = LeaderMachine(OuterChain(), 1, 1), 0.0, list[VersionId]()
        self.feed(fx.Heard(1, FollowerHello("f", "n", 0, (), NO_VERSION)))
        agreed = agreement(OuterSettings(heartbeat_s=HOLD_S), 0)
        for conn, name in ((2, "a"), (3, "b"), (4, "c")):
            self.feed(fx.Heard(conn, ClusterHello(name, "here", name, 0, None, NO_VERSION, NO_VERSION, agreed)))
        self.held.clear()  # that nothing is fetched was told, too

    def feed(self, event: fx.LeaderEvent) -> None:
        waiting = [event]
        while waiting:
            for effect in self.machine.on(self.now, waiting.pop(0)):
                if isinstance(effect, fx.StoreEntry):
                    waiting.append(fx.EntryStored(True))
                elif isinstance(effect, fx.SendTo) and isinstance(effect.message, Hold):
                    assert effect.conn in (1, 5)
                    self.held.append(effect.message.version)

    def beats(self, who: IncarnationId, fetching: VersionId) -> list[VersionId]:
        """Sends a cluster's heartbeat; returns the versions that followers have been told to keep so far."""
        self.now += 1.0
        self.feed(fx.Heard(1 + who.number, Beat(who, 0.0, 0.0, NO_VERSION, 0, 0, False, fetching)))
        return self.held


def test_what_is_fetched_is_held_until_it_is_there() -> None:
    rig = Rig()
    assert rig.beats(A, V1) == [V1]
    assert rig.beats(A, V1) == [V1]
    assert rig.beats(A, NO_VERSION) == [V1, NO_VERSION]


def test_one_version_is_held_at_a_time_and_who_waited_longest_has_the_next() -> None:
    rig = Rig()
    rig.beats(A, V1)
    rig.beats(B, V2)
    rig.beats(C, V3)
    assert rig.held == [V1]
    assert rig.beats(A, NO_VERSION) == [V1, V2], "b has waited for longer than c"
    rig.beats(A, V2)
    assert rig.beats(B, NO_VERSION) == [V1, V2], "a fetches it, too"
    assert rig.beats(A, NO_VERSION) == [V1, V2, V3]


def test_nobody_holds_a_place_for_ever_while_another_waits() -> None:
    rig = Rig()
    rig.beats(A, V1)
    rig.now += HOLD_S
    assert rig.beats(A, V1) == [V1], "nobody else wants it"
    assert rig.beats(B, V2) == [V1, V2]


def test_a_follower_that_comes_hears_what_is_held() -> None:
    rig = Rig()
    rig.beats(A, V1)
    rig.feed(fx.StreamClosed(1))
    rig.feed(fx.Heard(5, FollowerHello("f", "another", 1, (), NO_VERSION)))
    assert rig.held == [V1, V1]


@pytest.mark.parametrize("refused", [True, False])
def test_who_wants_a_version_is_told_that_it_is_served_no_more(*, refused: bool) -> None:
    """A cluster is told that a version is gone if a follower refuses it, but not if a link breaks: then it retries and
    keeps the fetched bytes.
    """
    changed, missed, tries, whose = threading.Condition(), list[VersionId](), 0, object()

    def get(attempt: Attempt) -> None:
        nonlocal tries
        assert attempt.blank == (tries == 0)
        tries += 1
        if tries < 3:
            raise NoDonorError("it is gone", refused=refused)

    getter = VersionGetter(
        changed,
        lambda: Part.empty(Grid((64,), 64).whole, BF16),
        lambda: Sought(V1, whose, get),
        missed.append,
    )
    with closing(getter):
        getter.start()
        until(lambda: getter.here is not None, "the version")
    assert missed == ([V1, V1] if refused else [])


def test_a_fetch_of_what_nobody_wants_any_more_is_given_up() -> None:
    """Former bug: a fetch went on to its end though its version was not wanted any more, and only then the wanted
    version was fetched.
    """
    changed, wanted, begun, whose = threading.Condition(), [V1], threading.Event(), object()

    def get(attempt: Attempt) -> None:
        if wanted == [V1]:
            begun.set()
            until(attempt.abandoned, "the end of the attempt")
            raise StateError("it was abandoned")

    getter = VersionGetter(
        changed,
        lambda: Part.empty(Grid((64,), 64).whole, BF16),
        lambda: Sought(wanted[0], whose, get),
        lambda version: None,
    )
    with closing(getter):
        getter.start()
        assert begun.wait(30.0)
        with changed:
            wanted[:] = [V2]
        until(lambda: getter.here is not None and getter.here[0] == V2, "the other version")


def test_where_an_older_version_is_held_the_one_before_the_newest_is_not_served() -> None:
    """Former bug: a version was announced once all followers had computed it, though some had dropped it again for an
    older version that they kept.
    """
    world = World(replace(FAMILIES["far"](3), adopt_s=0.0))
    world.run()
    machine = world.leader.machine if world.leader is not None else None
    assert machine is not None
    shards, line = machine.shards, list(machine.chain.line())
    follower = Follower(9, "n", version=line[0].id)
    for held, serves in (
        (None, True),
        (NO_VERSION, True),
        (line[0].id, True),
        (line[1].id, True),
        (line[-1].id, False),
    ):
        shards._held = held
        assert shards._has(follower, line[0])
        assert shards._has(follower, line[1]) is serves
        assert not shards._has(follower, line[2])
