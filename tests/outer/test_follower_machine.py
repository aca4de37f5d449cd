"""Tests how a follower reacts to messages that no leader of this package sends."""

from __future__ import annotations

import pytest

from chaos_lightning.errors import StateError
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.messages import Apply, Marked, Obey, ShardFile
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Entry,
    Founded,
    IncarnationId,
    Offer,
    PushId,
    Started,
    VersionId,
)
from lab.outer.processes import agreement

FOUNDED = Entry(1, 1, Founded(1, Offer(PushId(IncarnationId("a", 1), 1), NO_VERSION, "m", 0, 0)))


def obeying(base: VersionId = NO_VERSION, *entries: Entry) -> FollowerMachine:
    """Returns a follower that obeys a leader whose chain has these entries."""
    machine = FollowerMachine("f0", "n0")
    machine.on(fx.Connected())
    machine.on(fx.Told(Obey(1, "n0", 0, 1, agreement(OuterSettings(), 0), (), base, entries)))
    return machine


def computed(effects: list[fx.FollowerEffect]) -> list[Entry]:
    return [effect.entry for effect in effects if isinstance(effect, fx.Compute)]


def test_an_entry_that_is_told_again_when_its_version_is_twice_durable_is_not_computed_again_and_again() -> None:
    machine, (offer,) = obeying(NO_VERSION, FOUNDED), FOUNDED.offers
    assert computed(machine.on(fx.Fetched(offer.push, offer.manifest, (), finite=True))) == [FOUNDED]
    machine.on(fx.Computed(FOUNDED.version))
    machine.on(fx.Told(Marked(1, (ShardFile(FOUNDED.version, "d"),), FOUNDED.version)))
    for _ in range(2):
        assert not [e for e in machine.on(fx.Told(Apply(1, FOUNDED))) if isinstance(e, fx.Compute | fx.FetchPush)]


def test_a_leader_that_has_an_entry_without_a_version_applied_is_not_obeyed() -> None:
    """A follower told to compute an entry that makes no version would compute it again and again: it raises an
    error.
    """
    with pytest.raises(StateError, match="entry 2 applied, and its kind, Started, makes no version"):
        obeying().on(fx.Told(Apply(1, Entry(2, 1, Started("f0", "n0"), FOUNDED.hash))))
