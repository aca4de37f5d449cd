"""Tests that headers go down a tree: each member gets one once, over links of the view, and no member sends it to
many.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from membership_script import contribution, header_after, member

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.membership.spreading import Spread, Spreading
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Header,
    LinkSpec,
    Prepare,
    View,
    ViewId,
    Welcome,
)


def a_view(count: int, links: list[tuple[int, int]] = [], joiners: tuple[int, ...] = ()) -> View:  # noqa: B006
    ids = [f"m{i}~{i}" for i in range(count)]
    return View(
        ViewId(1, 1),
        NO_VIEW,
        tuple(member(m) for m in ids),
        tuple(ids[j] for j in joiners),
        links=tuple(LinkSpec(ids[a], ids[b]) for a, b in links),
    )


def parents(view: View) -> dict[str, str]:
    """Returns, for each member, the one from which it gets headers; every sender computes its own receivers."""
    found: dict[str, str] = {}
    for sender in view.ids():
        for receiver in Spreading(Spread()).below(view, sender):
            assert receiver not in found, "nobody gets it twice"
            found[receiver] = sender
    return found


def depth(member_id: str, above: dict[str, str]) -> int:
    return 0 if member_id not in above else 1 + depth(above[member_id], above)


@pytest.mark.parametrize("count", [1, 2, 16, 17, 100, 1024])
def test_each_member_gets_a_header_from_one_other_where_every_pair_has_a_link(count: int) -> None:
    view = a_view(count, joiners=(0,) if count > 1 else ())
    above = parents(view)
    assert set(above) == set(view.ids()) - {view.root}
    most = max([len(Spreading(Spread()).below(view, m)) for m in view.ids()])
    assert most == (count - 1 if count <= 16 else 8)
    assert max(depth(m, above) for m in view.ids()) <= (1 if count <= 16 else 4)


@pytest.mark.parametrize("seed", range(8))
def test_headers_go_over_the_views_links_alone(seed: int) -> None:
    random = Random(seed)
    count = random.randint(17, 120)
    links = [(i, random.randrange(i)) for i in range(1, count)]
    links += [(a, b) for a, b in combinations(range(count), 2) if random.random() < random.choice((0.0, 0.05, 0.9))]
    random.shuffle(links)
    view = a_view(count, links)
    above = parents(view)
    assert set(above) == set(view.ids()) - {view.root}
    pairs = {frozenset((link.a, link.b)) for link in view.links}
    assert all(frozenset(edge) in pairs for edge in above.items())
    shuffled = replace(view, links=tuple(random.sample(view.links, len(view.links))))
    assert parents(shuffled) == above


def test_one_that_alone_reaches_many_sends_to_all_of_them() -> None:
    star = a_view(40, [(i, 7) for i in range(40) if i != 7])
    assert Spreading(Spread()).below(star, "m0~0") == ("m7~7",)
    assert len(Spreading(Spread()).below(star, "m7~7")) == 38


def test_a_few_members_greet_newcomers() -> None:
    spread = Spreading(Spread())
    small, full = a_view(5, joiners=(4,)), a_view(40, joiners=(0, 39))
    assert [m for m in small.ids()[:4] if spread.joiners(small, m) == small.joiners] == list(small.ids()[:4])
    assert [m for m in full.ids() if spread.joiners(full, m)] == list(full.ids()[1:5])
    ring = [(i, (i + 1) % 40) for i in range(40)]
    sparse = a_view(40, ring, joiners=(20, 21, 22))
    told = {j: [m for m in sparse.ids() if m not in sparse.joiners and j in spread.joiners(sparse, m)]
            for j in sparse.joiners}  # fmt: skip
    assert told["m20~20"] == ["m19~19"]
    assert told["m22~22"] == ["m23~23"]
    assert len(told["m21~21"]) == 37, "only newcomers have a link to it"
    assert spread.learners(small, "m3~3", ("x~9",), ()) == ("x~9",)
    assert spread.learners(sparse, "m3~3", ("x~9", "y~9"), ("y~9",)) == ("y~9",)
    assert [m for m in full.ids() if spread.learners(full, m, ("x~9",), ())] == list(full.ids()[1:5])


# ------------------------------------------------------------------ the machine


CHAIN = a_view(4)


def standing(me: str) -> MemberMachine:
    """Returns one of four members that forward headers along a chain."""
    machine = MemberMachine(Spread(direct=1, width=1))
    machine.on(0.0, fx.ControlIn(Welcome(member(me), 1, "founder", "", 0.1, 0.3)))
    machine.on(0.0, fx.ControlIn(Decide(CHAIN, GENESIS)))
    assert machine.phase is MemberPhase.ACTIVE
    return machine


def headers(effects: list[fx.MemberEffect]) -> list[tuple[str, Header]]:
    return [(e.peer, e.message) for e in effects if isinstance(e, fx.ToPeer) and isinstance(e.message, Header)]


def test_the_root_sends_a_header_to_those_below_it_alone() -> None:
    root = standing("m0~0")
    root.on(0.0, fx.Contribute(contribution(CHAIN, GENESIS, "gather", "m0~0")))
    for other in CHAIN.ids()[1:]:
        effects = root.on(0.0, fx.PeerIn(other, contribution(CHAIN, GENESIS, "gather", other)))
    assert [peer for peer, _ in headers(effects)] == ["m1~1"]


def test_a_header_is_handed_on_first_and_once_also_where_bytes_are_missing() -> None:
    machine = standing("m1~1")
    step = header_after(CHAIN, GENESIS, "step")
    effects = machine.on(0.0, fx.PeerIn("m0~0", step))
    assert headers(effects) == [("m2~2", step)]
    assert headers(effects)[0][1] is step, "the bytes that came are those that go"
    assert machine.pending is step
    assert not headers(machine.on(0.0, fx.PeerIn("m0~0", step)))
    done = machine.on(0.0, fx.RangesDone(CHAIN.id, 1))
    assert any(isinstance(e, fx.Committed) for e in done)
    assert not headers(done)


def test_who_does_not_stand_on_a_header_hands_it_on_to_those_who_may() -> None:
    machine = standing("m1~1")
    stray = replace(header_after(CHAIN, GENESIS, "gather"), prev_hash="feed")
    effects = machine.on(0.0, fx.PeerIn("m0~0", stray))
    assert headers(effects) == [("m2~2", stray)]
    assert any(isinstance(e, fx.Ejected) for e in effects)


def test_a_promise_forbids_to_hand_a_header_on() -> None:
    machine = standing("m1~1")
    machine.on(0.0, fx.ControlIn(Prepare(ViewId(1, 2), "somebody died")))
    assert not headers(machine.on(0.0, fx.PeerIn("m0~0", header_after(CHAIN, GENESIS, "gather"))))
    assert machine.pending is None


def test_the_last_of_the_chain_hands_on_nothing() -> None:
    machine = standing("m3~3")
    header = header_after(CHAIN, GENESIS, "gather")
    assert not headers(machine.on(0.0, fx.PeerIn("m2~2", header)))
    assert machine.header is header


def test_the_root_of_more_members_than_it_once_had_room_for_closes_their_slot() -> None:
    view = a_view(4200)
    root = MemberMachine()
    root.on(0.0, fx.ControlIn(Welcome(member(view.root), 1, "founder", "", 0.1, 0.3)))
    root.on(0.0, fx.ControlIn(Decide(view, GENESIS)))
    early = ViewId(1, 2)
    for other in view.ids()[1:]:  # of a view that it has not heard of yet, too
        root.on(0.0, fx.PeerIn(other, replace(contribution(view, GENESIS, "gather", other), view=early)))
        effects = root.on(0.0, fx.PeerIn(other, contribution(view, GENESIS, "gather", other)))
        assert not effects
    effects = root.on(0.0, fx.Contribute(contribution(view, GENESIS, "gather", view.root)))
    assert [peer for peer, _ in headers(effects)] == list(view.ids()[1:9])
    assert root.header.contributors == 4200
