"""Tests that a member's state machine keeps its invariants and its promises when events arrive in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_script import contribution, header_after, member, pipelines_of

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    WHOLE,
    Contribution,
    Decide,
    Header,
    Kind,
    LinkSpec,
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


V6_STAGED = replace(V6, leaving=(member("c~3"),), pipelines=pipelines_of("b~2:2"))
STAGED = (
    replace(V1, pipelines=pipelines_of("a~1:1+b~2:1,c~3:2")),
    replace(V2, pipelines=pipelines_of("b~2:1+a~1:1,c~3:2")),
    replace(V4, pipelines=pipelines_of("c~3:2"), leaving=(member("a~1"),)),
    V6_STAGED,
    replace(V6_STAGED, id=ViewId(1, 7), members=V4.members[1:], leaving=V6.members, pipelines=pipelines_of("c~3:2")),
)
"""Views like `VIEWS` with pipelines, of which the last one lets this member go."""


def tree(views: Sequence[View]) -> list[Header]:
    """Returns headers of every kind in every view, each following another: most of them will not fit the member's
    state.
    """
    v1, v2, v4, *_ = views
    found = [GENESIS]
    frontier = [GENESIS]
    for _ in range(3):
        frontier = [
            header_after(v, prev, kind, v2 if v is v1 and kind == "boundary" else None)
            for prev in frontier[:4]
            for v, kind in ((v1, "step"), (v1, "boundary"), (v2, "step"), (v4, "gather"))
        ]
        found += frontier
    return found


numbers = st.integers(1, 8).map(lambda n: ViewId(1, n))
peers = st.sampled_from(["a~1", "c~3", "d~4"])


def from_peer(who: str, of: View, prev: Header, kind: str) -> fx.PeerIn:
    return fx.PeerIn(who, contribution(of, prev, kind, who))


def events_in(views: Sequence[View]) -> st.SearchStrategy[fx.MemberEvent | Kind]:
    """Returns a Hypothesis strategy of all events that may reach a member of a job with these views."""
    headers, ids = st.sampled_from(tree(views)), st.sampled_from([v.id for v in views])
    sources = st.just((Source("c~3", ()),))
    parts = st.sampled_from([WHOLE, ((0, 1), (2, 3)), ((1, 2),), ((0, 3),)])
    return st.one_of(
        st.builds(fx.ControlIn, st.builds(Prepare, numbers, st.just("a test"))),
        st.builds(
            fx.ControlIn, st.builds(Decide, st.sampled_from(views), headers, st.booleans(), sources, st.just("a test"))
        ),
        st.builds(fx.ControlIn, st.sampled_from([NextView(views[1]), OpenLinks((member("d~4"),))])),
        st.builds(fx.ControlIn, st.just(Welcome(member(ME), 1, "joiner", "again", 0.1, 0.35))),
        st.builds(fx.PeerIn, peers, headers),
        st.builds(from_peer, peers, st.sampled_from(views), headers, st.sampled_from(["step", "gather"])),
        st.builds(fx.RangesDone, ids, st.integers(0, 4)),
        st.builds(fx.ResultPulled, st.integers(0, 4)),
        st.builds(fx.StateLoaded, headers.map(lambda h: h.hash), parts, ids),
        st.builds(fx.LinkChanged, peers, st.booleans(), st.just("closed")),
        st.sampled_from([Kind.STEP, Kind.GATHER, Kind.BOUNDARY]),  # the training thread contributes
        st.sampled_from([fx.Tick(), fx.LeaveRequested("")]),
    )


both = pytest.mark.parametrize("views", [VIEWS, STAGED], ids=["whole", "staged"])


class Watch:
    """Member's state machine with checks that must hold after every order of events."""

    def __init__(self, *, staged: bool = False) -> None:
        self.staged = staged
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
            event = fx.Contribute(replace(mine, view=mine.view if mine.coverage else NO_VIEW, reduced=False))
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
            case fx.ToPeer(_, Contribution(kind=Kind.STEP) as mine) if self.staged:
                assert mine.reduced, "contributes before it has reduced what it owns (P4)"
                assert not self.machine.parts.missing, "contributes without a part that it owns (P4)"
            case fx.OpenAttempt(view, seq):
                assert view.id >= promised, "opens what it promised to forget (8)"
                assert seq == self.at + 1, "a result buffer would be used too early (3)"
            case fx.ToPeer(_, Header() as header):
                assert header.view >= promised or header.view_change is not None, "sends an old header (8)"
            case _:
                pass


@both
def test_member_keeps_its_promises_in_any_order_of_events(views: Sequence[View]) -> None:
    @settings(max_examples=400, deadline=None)
    @given(st.lists(events_in(views), max_size=40))
    def check(script: list[fx.MemberEvent | Kind]) -> None:
        watch = Watch(staged=views is STAGED)
        watch.feed(fx.ControlIn(Decide(views[0], GENESIS)))
        for event in script:
            watch.feed(event)

    check()


@both
def test_newcomer_keeps_its_promises_in_any_order_of_events(views: Sequence[View]) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(events_in(views), max_size=40))
    def check(script: list[fx.MemberEvent | Kind]) -> None:
        watch = Watch(staged=views is STAGED)
        for event in script:
            watch.feed(event)

    check()


@settings(max_examples=100, deadline=None)
@given(st.lists(events_in(VIEWS), max_size=30))
def test_same_events_give_the_same_effects(script: list[fx.MemberEvent | Kind]) -> None:
    one, other = Watch(), Watch()
    for event in script:
        one.feed(event)
        other.feed(event)
    assert [e for _, e in one.machine.stimulus_log] == [e for _, e in other.machine.stimulus_log]
    assert one.machine.header == other.machine.header
    assert one.machine.promised == other.machine.promised


def test_one_that_stands_in_a_view_and_is_taken_for_another_process_begins_anew() -> None:
    """Former bug: a scheduler's welcome to a member of a view, under another id, ended the member with an assertion; it
    joins again now.
    """
    machine = MemberMachine()
    machine.on(0.0, fx.ControlIn(Welcome(member(ME), 1, "founder", "hello", 0.1, 0.35)))
    machine.on(0.0, fx.ControlIn(Decide(V1, GENESIS)))
    effects = machine.on(0.0, fx.ControlIn(Welcome(member("z~9"), 1, "founder", "hello", 0.1, 0.35)))
    (ejected,) = [effect for effect in effects if isinstance(effect, fx.Ejected)]
    assert ejected.rejoin
    assert ejected.reason == "the scheduler takes b~2 in view 1.1 for another process: it welcomes z~9"
    assert machine.phase is MemberPhase.GONE


def test_a_view_that_cannot_be_read_is_not_entered() -> None:
    machine = MemberMachine()
    machine.on(0.0, fx.ControlIn(Welcome(member(ME), 1, "founder", "hello", 0.1, 0.35)))
    effects = machine.on(0.0, fx.ControlIn(Decide(replace(STAGED[0], members=V4.members), GENESIS)))
    (ejected,) = [effect for effect in effects if isinstance(effect, fx.Ejected)]
    assert not ejected.rejoin
    assert ejected.reason == (
        "view 1.1 cannot be entered: a view's pipelines name 'a~1', who is no member of that view"
    )


def test_a_view_whose_links_do_not_connect_the_owners_of_a_layer_is_not_entered() -> None:
    machine = MemberMachine()
    machine.on(0.0, fx.ControlIn(Welcome(member(ME), 1, "founder", "hello", 0.1, 0.35)))
    links = (LinkSpec("a~1", "c~3"), LinkSpec("b~2", "c~3"))
    view = replace(V1, links=links, pipelines=pipelines_of("a~1:4,b~2:4"))
    effects = machine.on(0.0, fx.ControlIn(Decide(view, GENESIS)))
    (ejected,) = [effect for effect in effects if isinstance(effect, fx.Ejected)]
    assert ejected.reason == (
        "view 1.1 cannot be entered: no links connect a~1, b~2 with each other, which own layer.0"
    )
