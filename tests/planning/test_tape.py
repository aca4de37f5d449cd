"""Tests tapes (sequences of leased samples): places on a tape, and the positions at these places."""

from __future__ import annotations

import pytest

from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.spans import count, normalise


def test_places_are_numbered_in_the_order_of_granting() -> None:
    tape = Tape(3, 1).longer([(40, 44)]).longer([(0, 3), (10, 12)])
    assert tape.length == 9
    assert tape.positions([(0, 9)]) == ((40, 44), (0, 3), (10, 12))
    assert tape.positions([(3, 6)]) == ((43, 44), (0, 2))
    assert tape.positions([(8, 9), (0, 1)]) == ((11, 12), (40, 41))
    assert normalise(tape.positions([(0, 9)])) == ((0, 3), (10, 12), (40, 44))


def test_each_place_is_one_position() -> None:
    tape = Tape().longer([(5, 8), (1, 2), (20, 24)])
    found = [tape.positions([(place, place + 1)]) for place in range(tape.length)]
    assert all(count(each) == 1 for each in found)
    assert len(set(found)) == tape.length


def test_beyond_its_end_there_is_nothing() -> None:
    with pytest.raises(ValueError, match="a tape of 2"):
        Tape().longer([(0, 2)]).positions([(1, 3)])


def test_the_next_one_is_empty_and_has_a_higher_number() -> None:
    tape = Tape(3, 1).longer([(0, 2)]).next(2)
    assert (tape.number, tape.epoch, tape.length) == (4, 2, 0)
