"""Anything may arrive in any order: the member machine keeps its invariants and its promises."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from membership_script import contribution, header_after, member

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Header,
    Kind,
    NextView,
    OpenLinks,
    Prepare,
    Source,
    View,
    ViewId,
    Welcome,
)

ME = "b~2"


def view(number: int, predecessor: int, *members: str, joiners: tuple[str, ...] = ()) -> View:
    before = ViewId(1, predecessor) if predecessor else NO_VIEW
    return View(ViewId(1, number), before, tuple(member(m) for m in members), joiners)


V1 = view(1, 0, "a~1", "b~2", "c~3")
V2 = view(2, 1, "a~1", "b~2", "c~3", "d~4", joiners=("d~4",))
V4 = view(4, 2, "b~2", "c~3")
V6 = view(6, 4, "b~2")
VIEWS = (V1, V2, V4, V6)


def tree() -> list[Header]:
    """Headers of every kind, on each other, in every view: most of them will be out of place."""
    found = [GENESIS]
    frontier = [GENESIS]
    for _ in range(3):
        frontier = [
            header_after(v, prev, kind, V2 if v is V1 and kind == "boundary" else None)
            for prev in frontier[:4]
            for v, kind in ((V1, "step"), (V1, "boundary"), (V2, "step"), (V4, "gather"))
        ]
        found += frontier
    return found


HEADERS = tree()
headers = st.sampled_from(HEADERS)
numbers = st.integers(1, 7).map(lambda n: ViewId(1, n))
decisions = st.builds(
    Decide, st.sampled_from(VIEWS), headers, st.booleans(), st.just((Source("c~3", ()),)), st.just("a test")
)
peers = st.sampled_from(["a~1", "c~3", "d~4"])


def from_peer(who: str, of: View, prev: Header, kind: str) -> fx.PeerIn:
    return fx.PeerIn(who, contribution(of, prev, kind, who))


events = st.one_of(
    st.builds(fx.ControlIn, st.builds(Prepare, numbers, st.just("a test"))),
    st.builds(fx.ControlIn, decisions),
    st.builds(fx.ControlIn, st.sampled_from([NextView(V2), OpenLinks((member("d~4"),))])),
    st.builds(fx.ControlIn, st.just(Welcome(member(ME), 1, "joiner", "again", 0.1, 0.35))),
    st.builds(fx.PeerIn, peers, headers),
    st.builds(from_peer, peers, st.sampled_from(VIEWS), headers, st.sampled_from(["step", "gather"])),
    st.builds(fx.RangesDone, st.sampled_from(VIEWS).map(lambda v: v.id), st.integers(0, 4)),
    st.builds(fx.ResultPulled, st.integers(0, 4)),
    st.builds(fx.StateLoaded, headers.map(lambda h: h.hash)),
    st.builds(fx.LinkChanged, peers, st.booleans(), st.just("closed")),
    st.sampled_from([Kind.STEP, Kind.GATHER, Kind.BOUNDARY]),  # the training thread contributes
    st.sampled_from([fx.Tick(), fx.LeaveRequested("")]),
)


class Watch:
    """What no order of events may lead to."""

    def __init__(self) -> None:
        self.machine = MemberMachine()
        self.head = GENESIS.hash
        self.at = 0
        self.feed(fx.ControlIn(Welcome(member(ME), 1, "founder", "hello", 0.1, 0.35)))

    def feed(self, event: fx.MemberEvent | Kind) -> None:
        machine = self.machine
        if isinstance(event, Kind):
            if machine.phase is not MemberPhase.ACTIVE or machine.view is None:
                return
            mine = contribution(machine.view, machine.header, event, ME)
            event = fx.Contribute(replace(mine, view=NO_VIEW))
        promised, loading = machine.promised, machine.phase is MemberPhase.LOADING
        self.at = machine.seq
        for effect in machine.on(0.0, event):
            self.check(effect, promised)
        machine.validate_state()
        assert machine.promised >= promised
        if loading or machine.phase is MemberPhase.LOADING:
            self.head = machine.header.hash  # a pulled state is another beginning

    def check(self, effect: fx.MemberEffect, promised: ViewId) -> None:
        match effect:
            case fx.Committed(header, _):
                assert header.prev_hash == self.head, "does not stand on the last one (4a)"
                self.head, self.at = header.hash, header.seq
            case fx.OpenAttempt(view, seq):
                assert view.id >= promised, "opens what it promised to forget (8)"
                assert seq == self.at + 1, "a result buffer would be used too early (3)"
            case fx.ToPeer(_, Header() as header):
                assert header.view >= promised or header.view_change is not None, "sends an old header (8)"
            case _:
                pass


@settings(max_examples=400, deadline=None)
@given(st.lists(events, max_size=40))
def test_member_keeps_its_promises_in_any_order_of_events(script: list[fx.MemberEvent | Kind]) -> None:
    watch = Watch()
    watch.feed(fx.ControlIn(Decide(V1, GENESIS)))
    for event in script:
        watch.feed(event)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=40))
def test_newcomer_keeps_its_promises_in_any_order_of_events(script: list[fx.MemberEvent | Kind]) -> None:
    watch = Watch()
    for event in script:
        watch.feed(event)


@settings(max_examples=100, deadline=None)
@given(st.lists(events, max_size=30))
def test_same_events_give_the_same_effects(script: list[fx.MemberEvent | Kind]) -> None:
    one, other = Watch(), Watch()
    for event in script:
        one.feed(event)
        other.feed(event)
    assert [e for _, e in one.machine.stimulus_log] == [e for _, e in other.machine.stimulus_log]
    assert one.machine.header == other.machine.header
    assert one.machine.promised == other.machine.promised


def test_one_that_stands_in_a_view_and_is_taken_for_another_process_begins_anew() -> None:
    """A scheduler never says that; whoever did ended the member with an assertion."""
    machine = MemberMachine()
    machine.on(0.0, fx.ControlIn(Welcome(member(ME), 1, "founder", "hello", 0.1, 0.35)))
    machine.on(0.0, fx.ControlIn(Decide(V1, GENESIS)))
    effects = machine.on(0.0, fx.ControlIn(Welcome(member("z~9"), 1, "founder", "hello", 0.1, 0.35)))
    (ejected,) = [effect for effect in effects if isinstance(effect, fx.Ejected)]
    assert ejected.rejoin
    assert ejected.reason == "the scheduler takes b~2 in view 1.1 for another process: it welcomes z~9"
    assert machine.phase is MemberPhase.GONE
