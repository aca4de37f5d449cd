"""Tests the ruling after a failure (protocol.md 9): base, hand-on or redo, and the members that go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from membership_script import MemberScript, header_after, member

from chaos_lightning.membership import recovery
from chaos_lightning.membership.past import Past
from chaos_lightning.membership.recovery import Ruling, needs_bytes, scope_of, with_scope
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Report, Source, Span, View, ViewId

SCOPE: tuple[Span, ...] = ((0, 40), (60, 100))


def view(number: int, predecessor: int, *members: str, joiners: tuple[str, ...] = ()) -> View:
    before = ViewId(1, predecessor) if predecessor else NO_VIEW
    return View(ViewId(1, number), before, tuple(member(m) for m in members), joiners)


V1 = view(1, 0, "a~1", "b~2", "c~3", "d~4")
H1 = header_after(V1, GENESIS, "step")
H2 = header_after(V1, H1, "step")


def report(header: Header, entered: View = V1, **fields: object) -> Report:
    words: dict[str, object] = {"number": ViewId(1, 9), "entered": entered.id, "seq": header.seq, "head": header.hash}
    return Report(**{**words, "last": header, **fields})  # type: ignore[arg-type]


def rule(chain: Sequence[View], reports: Mapping[str, Report]) -> Ruling:
    """Returns the recovery's ruling by these reports, given all decided views."""
    return recovery.rule(chain[-1], Past.of(chain), reports)


def test_nobody_has_the_next_header_so_the_slot_is_reduced_again() -> None:
    ruling = rule([V1], {"b~2": report(H1), "c~3": report(H1)})
    assert (ruling.base, ruling.hand_on, ruling.members) == (H1, False, ("b~2", "c~3"))


def test_root_dies_after_one_member_committed() -> None:
    """The commit root dies after one member committed its header: the others commit that slot with that member's
    bytes.
    """
    ruling = rule([V1], {"b~2": report(H1), "c~3": report(H2), "d~4": report(H1)})
    assert (ruling.base, ruling.hand_on, ruling.sources) == (H2, True, (Source("c~3", ()),))
    assert ruling.members == ("b~2", "c~3", "d~4")


def test_header_without_its_bytes_anywhere_is_not_handed_on() -> None:
    reports = {
        "b~2": report(H1, pending=H2, held=with_scope(((0, 40),), SCOPE)),
        "c~3": report(H1, held=with_scope(((60, 90),), SCOPE)),
    }
    ruling = rule([V1], reports)
    assert (ruling.base, ruling.hand_on) == (H1, False)


def test_header_whose_bytes_the_survivors_hold_together_is_handed_on() -> None:
    reports = {
        "b~2": report(H1, pending=H2, held=with_scope(((0, 40), (60, 70)), SCOPE)),
        "c~3": report(H1, held=with_scope(((70, 100),), SCOPE)),
    }
    ruling = rule([V1], reports)
    assert (ruling.base, ruling.hand_on) == (H2, True)
    assert ruling.sources == (Source("b~2", ((0, 40), (60, 70))), Source("c~3", ((70, 100),)))


def test_unknown_scope_counts_as_missing_bytes() -> None:
    ruling = rule([V1], {"b~2": report(H1, pending=H2, held=((0, 100),))})
    assert (ruling.base, ruling.hand_on) == (H1, False)


def test_collective_needs_no_bytes() -> None:
    vote = header_after(V1, H1, "gather")
    ruling = rule([V1], {"b~2": report(H1), "c~3": report(vote)})
    assert (ruling.base, ruling.hand_on, ruling.sources) == (vote, True, ())


def test_ranges_of_another_attempt_do_not_count() -> None:
    """A member is at the right header, but summed its bytes in another view: they do not count, and the slot is not
    handed on.
    """
    v2 = view(2, 1, "a~1", "b~2", "c~3", "d~4")
    header = header_after(v2, H1, "step")
    whole = with_scope(SCOPE, SCOPE)
    reports = {"b~2": report(H1, entered=v2, pending=header), "c~3": report(H1, entered=V1, held=whole)}
    assert not rule([V1, v2], reports).hand_on


def test_report_of_a_member_that_a_later_view_excluded_does_not_count() -> None:
    """A report of a member that a later view excluded is not taken for the base, and the member must join again."""
    v2 = view(2, 1, "b~2", "c~3", "d~4")
    v3 = view(3, 2, "a~1", "b~2", "c~3", joiners=("a~1",))
    ruling = rule([V1, v2, v3], {"a~1": report(H2), "b~2": report(H1, entered=v2)})
    assert ruling.base == H1
    assert dict(ruling.rejoin).keys() == {"a~1"}


def test_higher_view_wins_over_higher_slot() -> None:
    v2 = view(2, 1, "a~1", "b~2", "c~3", "d~4")
    header = header_after(v2, H1, "gather")
    ruling = rule([V1, v2], {"b~2": report(H1, entered=v2), "c~3": report(header, entered=V1)})
    assert ruling.base == H1
    assert [m for m, _ in ruling.rejoin] == ["c~3"]


def test_joiner_by_pause_alone_holds_a_step_so_it_joins_again() -> None:
    ruling = rule([V1], {"b~2": report(H1), "d~4": report(H2, raw=False)})
    assert (ruling.base, ruling.hand_on, ruling.members) == (H1, False, ("b~2",))
    assert [m for m, _ in ruling.rejoin] == ["d~4"]


def test_joiner_in_flight_stays_if_its_header_is_the_base() -> None:
    v2 = view(2, 1, "a~1", "b~2", "c~3", "d~4", "e~5", joiners=("e~5",))
    rest = header_after(V1, H1, "boundary", v2)
    reports = {"b~2": report(rest, entered=v2), "e~5": report(rest, entered=v2, parts=(), raw=False)}
    ruling = rule([V1, v2], reports)
    assert (ruling.members, ruling.joiners) == (("b~2", "e~5"), ("e~5",))


def test_joiner_in_flight_joins_again_if_its_header_is_lost() -> None:
    v2 = view(2, 1, "a~1", "b~2", "c~3", "d~4", "e~5", joiners=("e~5",))
    rest = header_after(V1, H1, "boundary", v2)
    reports = {"b~2": report(H1), "e~5": report(rest, entered=v2, parts=(), raw=False)}
    ruling = rule([V1, v2], reports)
    assert (ruling.base, ruling.members) == (H1, ("b~2",))
    assert [m for m, _ in ruling.rejoin] == ["e~5"]


def test_newcomer_whose_view_no_header_carried_waits_for_another() -> None:
    v2 = view(2, 1, "a~1", "b~2", "c~3", "d~4", "e~5", joiners=("e~5",))
    nothing = Report(ViewId(1, 9), NO_VIEW, 0, GENESIS.hash, parts=(), raw=False, last=GENESIS)
    ruling = rule([V1, v2], {"b~2": report(H1), "e~5": nothing})
    assert (ruling.members, ruling.waiting) == (("b~2",), ("e~5",))


def test_nobody_holds_the_state() -> None:
    loading = report(GENESIS, parts=(), raw=False)
    ruling = rule([replace(V1, joiners=("b~2", "c~3", "d~4"))], {"b~2": loading})
    assert ruling.base is None
    assert [m for m, _ in ruling.rejoin] == ["b~2"]


def test_founders_that_load_when_a_recovery_comes_load_on() -> None:
    """A recovery comes while founders load the state: they go on loading; one that never heard of the founding view
    waits.
    """
    founded = view(1, 0, "a~1", "b~2", "c~3", "d~4", joiners=("b~2", "c~3", "d~4"))
    loading = report(GENESIS, founded, parts=(), raw=False)
    ruling = rule(
        [founded], {"a~1": report(GENESIS, founded), "b~2": loading, "c~3": replace(loading, entered=NO_VIEW)}
    )
    assert (ruling.base, ruling.hand_on, ruling.rejoin) == (GENESIS, False, ())
    assert (ruling.members, ruling.joiners, ruling.waiting) == (("a~1", "b~2"), ("b~2",), ("c~3",))


def test_founder_that_loads_on_assigns_the_first_slot_by_the_founding_view() -> None:
    """A founder that goes on loading after a recovery assigns the first slot's samples by the founding view, as the
    others do (protocol.md 10).
    """
    founder = MemberScript()
    lines = """
        view v1 1.1 0.0 a~1 b~2* c~3*
        view v2 1.2 1.1 a~1 c~3*
        welcome c~3 founder
        open links a~1 b~2
        link a~1 up
        link b~2 up
        decide v1 after genesis
        prepare 1.2
        decide v2 after genesis
        loaded genesis
    """
    effects = [words for line in lines.split("\n") if line.strip() for words in founder.line(line.split())]
    assert effects[-2:] == ["tells the scheduler: entered 1.2 at 0 on genesis", "opens slot 1 in view 1.2"]
    assert not [words for words in effects if words.startswith("is out")]
    assert founder.machine.assigning == founder.names.views["v1"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5))
def test_scope_survives_the_report(pairs: list[tuple[int, int]]) -> None:
    start, scope = 0, []
    for gap, length in pairs:
        scope.append((start + gap + 1, start + gap + 1 + length))
        start += gap + 1 + length
    held = with_scope(scope[:1], scope)
    assert scope_of([report(H1, held=held)]) == (tuple(scope) or None)


@st.composite
def cuts(draw: st.DrawFn) -> dict[str, Report]:
    """Returns random reports of one view's members: slot 1 or 2 committed, header 2 known or not, some ranges reduced,
    some members loading.
    """
    reports = {}
    for name in draw(st.sets(st.sampled_from(V1.ids()), min_size=1)):
        held = draw(st.lists(st.sampled_from([(0, 40), (60, 70), (70, 100)]), unique=True))
        what = draw(st.sampled_from(["behind", "pending", "ahead", "loading"]))
        if what == "ahead":
            reports[name] = report(H2, raw=draw(st.booleans()))
        elif what == "loading":
            reports[name] = report(H1, parts=(), raw=False)
        else:
            pending = H2 if what == "pending" else None
            reports[name] = report(H1, pending=pending, held=with_scope(held, SCOPE))
    return reports


@settings(max_examples=300)
@given(cuts())
def test_ruling_loses_nothing_that_somebody_can_hand_on(reports: dict[str, Report]) -> None:
    ruling = rule([V1], reports)
    sorted_out = [*ruling.members, *ruling.waiting, *(m for m, _ in ruling.rejoin)]
    assert sorted(sorted_out) == sorted(reports)
    holders = {m: r for m, r in reports.items() if r.loaded}
    if ruling.base is None:
        assert not holders or all(not r.raw for r in holders.values())
        return
    for name in set(ruling.members) - set(ruling.joiners):
        stands = reports[name].head
        assert stands == ruling.base.hash or (ruling.hand_on and stands == ruling.base.prev_hash)
    # A member that committed slot 2 and can hand it on (or need not) is followed by all.
    if any(r.head == H2.hash and r.raw for r in holders.values()):
        assert ruling.base == H2
    if ruling.hand_on and needs_bytes(ruling.base):
        whole = [s for s in ruling.sources if not s.spans]
        covered = union(span for s in ruling.sources for span in s.spans)
        assert whole or all(any(a <= s and e <= b for a, b in covered) for s, e in SCOPE)
