"""Offers of pushes with impossible numbers (outer/rules/offers.py) are rejected, and the leader goes on."""

from __future__ import annotations

import pytest
from leader_rig import Rig

from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.offers import MOST_SPANS, MOST_TIMES
from chaos_lightning.outer.rules.types import NO_VERSION, Covered, IncarnationId, Offer, PushAnswer, PushId, Round


def pushed(rig: Rig, who: IncarnationId, number: int, **changed: object) -> Offer:
    """Offers a push with usual values, except those in `changed`, and has the follower stage it."""
    base = rig.machine.chain.newest
    given: dict[str, object] = {"manifest": f"{who}/{number}", "samples": 8, "steps": 1, **changed}
    offer = Offer(PushId(who, number), base, **given)  # type: ignore[arg-type]
    conn = rig.machine.clusters[who].conn
    assert conn is not None
    rig.feed(fx.Heard(conn, say.Offered(offer)))
    product = say.PushProduct(offer.push, "1p0")
    rig.feed(fx.Heard(1, say.Staged("f", offer.push, offer.manifest, (product,), True, "0", base)))
    return offer


def begun(length: int = 0) -> tuple[Rig, IncarnationId]:
    rig = Rig(length)
    home = rig.comes("home", 2)
    rig.push(home, 1)
    rig.feed(fx.Heard(2, say.Beat(home, 1.0, 1.0, rig.machine.chain.newest, 0, 0, False)))
    return rig, home


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"samples": -3_000_000}, "expected none below 0"),
        ({"steps": -1}, "expected none below 0"),
        ({"steps": 1 << 62}, "steps for 8 samples"),
        ({"steps": 8 * MOST_TIMES + 1}, "steps for 8 samples"),
        ({"samples": 1 << 62}, "samples for 1 steps"),
        ({"samples": 1 << 61, "steps": 1 << 61}, "more than can be counted"),
        ({"covers": (Covered(0, ((0, 8),)),)}, "each cluster has its own data"),
    ],
)
def test_what_nobody_can_have_trained_is_rejected(changed: dict[str, object], words: str) -> None:
    """Former bug: an offer with a negative number of samples spoiled a round's factors and counters, and one with too
    many steps ended the leader.
    """
    rig, home = begun()
    before = rig.machine.chain.counters
    pushed(rig, home, 2, **changed)
    given = rig.machine.chain.incarnations[home].answers[2]
    assert given.answer is PushAnswer.REJECTED
    assert words in given.reason
    assert rig.machine.chain.counters == before
    pushed(rig, home, 3)
    assert rig.machine.chain.incarnations[home].answers[3].answer is PushAnswer.ACCEPTED


def test_positions_that_were_not_leased_are_rejected_whatever_their_number() -> None:
    rig, home = begun(64)
    pushed(rig, home, 2, samples=1 << 40, covers=(Covered(0, ((0, 1 << 40),)),))
    assert rig.machine.chain.incarnations[home].answers[2].answer is PushAnswer.REJECTED


@pytest.mark.parametrize(
    "changed",
    [
        {"covers": (Covered(0, tuple((2 * i, 2 * i + 1) for i in range(MOST_SPANS + 1))),)},
        {"manifest": "m" * 1_000_000},
    ],
)
def test_what_cannot_be_recorded_ends_its_incarnation_and_no_leader(changed: dict[str, object]) -> None:
    rig, home = begun()
    pushed(rig, home, 2, **changed)
    assert "are possible" in rig.machine.chain.incarnations[home].over
    assert rig.dismissed[2].again
    other = rig.comes("other", 3)
    pushed(rig, other, 1)
    assert rig.machine.chain.incarnations[other].answers[1].answer is PushAnswer.ACCEPTED


def test_an_entry_that_fits_into_no_record_ends_who_offered_it() -> None:
    rig, home = begun()
    unfit = fx.EntryStored(False, "too large", unfit=True)
    rig.stores = lambda entry: unfit if isinstance(entry.body, Round) else fx.EntryStored(True)
    pushed(rig, home, 2)
    assert "fits into no record: too large" in rig.machine.chain.incarnations[home].over
    assert not rig.machine.desk.done


@pytest.mark.parametrize("rate", [-1.0, 1e308])
def test_a_rate_that_nobody_has_ends_no_leader(rate: float) -> None:
    rig, home = begun(64)
    rig.feed(fx.Heard(2, say.Beat(home, rate, rate, rig.machine.chain.newest, 0, 0, False)))
    rig.feed(fx.TimePassed())
    assert not rig.machine.desk.done
    assert rig.granted[2]


def test_a_job_does_not_begin_with_a_push_that_was_trained() -> None:
    rig = Rig()
    home = rig.comes("home", 2)
    pushed(rig, home, 1, samples=8)
    rig.feed(fx.TimePassed())
    assert not rig.machine.chain.founded
    assert "no job can begin with its push" in rig.machine.chain.incarnations[home].over
    assert rig.machine.chain.newest == NO_VERSION
