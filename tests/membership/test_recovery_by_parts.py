"""Tests the ruling after a failure when members hold parts of the state (protocol.md P5), and when there is only one
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_script import member

from chaos_lightning.membership import recovery
from chaos_lightning.membership.past import Past
from chaos_lightning.membership.recovery import Ruling, needs_bytes, with_scope
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, WHOLE, Header, Kind, Report, Source, Span, View, ViewId

LAYERS, REST = 4, 4
"""Layers are parts 0 to 3, the rest is part 4."""
LOW, HIGH = ((0, 2), (4, 5)), ((2, 5),)
"""Parts of an owner of the first and of the last layers: the rest, too."""
SCOPE: tuple[Span, ...] = ((0, 40), (60, 100))


def text(*pipelines: str) -> str:
    """Returns the JSON text of pipelines, each with two stages ("a b") or one ("a")."""
    rows = []
    for names in pipelines:
        ids = names.split()
        cut = [0, 2, LAYERS] if len(ids) == 2 else [0, LAYERS]
        rows.append(Pipeline(tuple(map(PlanStage, ids, cut, cut[1:])), 2))
    return ViewPipelines.of(PipelinePlan(LAYERS, tuple(rows))).to_json()


def view(number: int, before: int, ids: str, pipelines: str = "", leaving: str = "", joiners: str = "") -> View:
    members, gone = (tuple(map(member, names.split())) for names in (ids, leaving))
    predecessor = ViewId(1, before) if before else NO_VIEW
    return View(ViewId(1, number), predecessor, members, tuple(joiners.split()), pipelines=pipelines, leaving=gone)


def header(
    seq: int, closed: View, prev: Header = GENESIS, kind: Kind = Kind.STEP, change: View | None = None
) -> Header:
    return Header(
        seq=seq, kind=kind, step=seq, view=closed.id, prev_hash=prev.hash,
        next_view=change.id if change is not None else closed.id, view_change=change, reduced=kind is Kind.STEP,
    )  # fmt: skip


FOUR = view(1, 0, "a~1 b~2 c~3 d~4", text("a~1 b~2", "c~3 d~4"))
"""a and c own the first layers, b and d the last ones."""
H1 = header(1, FOUR)
H2 = header(2, FOUR, H1)


def report(at: Header, parts: tuple[Span, ...], entered: View = FOUR, owns: tuple[Span, ...] | None = None) -> Report:
    return Report(
        ViewId(1, 9), entered.id, at.seq, at.hash, parts, raw=True, last=at, owns=parts if owns is None else owns
    )


def rule(chain: Sequence[View], reports: Mapping[str, Report], told: Sequence[Report] = ()) -> Ruling:
    return recovery.rule(chain[-1], Past.of(chain), reports, told)


# ------------------------------------------------------------------ where the state is in parts


def test_a_step_is_the_base_if_those_to_whom_it_can_be_handed_on_own_the_rest_of_it() -> None:
    ruling = rule([FOUR], {"a~1": report(H2, LOW), "d~4": report(H1, HIGH)})
    assert (ruling.base, ruling.hand_on, ruling.sources) == (H2, True, ())
    assert ruling.members == ("a~1", "d~4")
    assert dict(ruling.held or ()) == {"a~1": LOW, "d~4": HIGH}


def test_after_a_step_that_is_handed_on_a_member_has_what_it_owned_and_no_more() -> None:
    """A step can be handed on to a member, but parts that it only holds for others do not survive that commit: the
    earlier header is the base.
    """
    reports = {"a~1": report(H2, LOW), "c~3": report(H1, ((0, 5),), owns=LOW)}
    ruling = rule([FOUR], reports)
    assert (ruling.base, ruling.hand_on) == (H1, False)
    assert [m for m, _ in ruling.rejoin] == ["a~1"]


def test_after_another_slot_that_is_handed_on_it_has_what_it_holds() -> None:
    vote = header(2, FOUR, H1, Kind.GATHER)
    ruling = rule([FOUR], {"a~1": report(vote, LOW), "c~3": report(H1, ((0, 5),), owns=LOW)})
    assert (ruling.base, ruling.hand_on) == (vote, True)


def test_the_header_before_is_tried_where_parts_are_missing_at_the_last_one() -> None:
    """The new owner of some layers died, and they are missing at the last header: the header before, at which c still
    has them, is the base.
    """
    moved = view(2, 1, "a~1 b~2 c~3 d~4", text("d~4 b~2"))
    last = header(2, moved, H1)
    rest = ((REST, REST + 1),)
    reports = {
        "a~1": report(last, rest, moved),
        "b~2": report(H1, HIGH, moved),
        "c~3": report(H1, LOW, moved, owns=rest),
    }
    ruling = rule([FOUR, moved], reports)
    assert (ruling.base, ruling.hand_on, ruling.members) == (H1, False, ("b~2", "c~3"))
    assert "layer.0, layer.1 of the state at it are held by nobody" in dict(ruling.rejoin)["a~1"]


def test_nobody_guesses_where_parts_are_lost() -> None:
    ruling = rule([FOUR], {"a~1": report(H2, LOW), "c~3": report(H1, LOW)})
    assert (ruling.base, ruling.lost) == (None, ((2, 4),))
    assert ruling.reason == "no survivor holds layer.2, layer.3"


def test_a_plan_says_nothing_about_who_holds_what() -> None:
    """Member c owns some layers in the new view but has not fetched them: a recovery must count them as lost."""
    two = view(2, 1, "b~2 c~3", text("c~3 b~2"))
    ruling = rule([FOUR, two], {"b~2": report(H1, HIGH, two), "c~3": report(H1, ((4, 5),), two, owns=LOW)})
    assert (ruling.base, ruling.lost) == (None, ((0, 2),))


def test_whom_a_view_lets_go_counts_until_a_decision_names_it_no_more() -> None:
    let_go = view(2, 1, "b~2 c~3 d~4", text("c~3 d~4"), leaving="a~1")
    base = header(2, FOUR, H1, change=let_go)
    reports = {"a~1": report(base, LOW), "b~2": report(base, HIGH, let_go)}
    ruling = rule([FOUR, let_go], reports)
    assert (ruling.base, ruling.members, ruling.leaving) == (base, ("b~2",), ("a~1",))
    assert ruling.bound == ()  # the base has let it go
    again = view(3, 2, "b~2", text("b~2"), leaving="a~1")
    assert rule([FOUR, let_go, again], reports).leaving == ("a~1",)
    without = view(3, 2, "b~2", text("b~2"))
    assert rule([FOUR, let_go, without], reports).lost == ((0, 2),)


def test_a_leaver_that_no_header_has_let_go_may_stay() -> None:
    let_go = view(2, 1, "b~2 c~3 d~4", text("c~3 d~4"), leaving="a~1")
    ruling = rule([FOUR, let_go], {"a~1": report(H1, LOW), "b~2": report(H1, HIGH)})
    assert (ruling.leaving, ruling.bound) == (("a~1",), ("a~1",))


def test_a_leaver_that_stays_counts_as_if_it_had_never_gone() -> None:
    let_go = view(2, 1, "b~2 c~3 d~4", text("c~3 d~4"), leaving="a~1")
    back = view(3, 2, "b~2 a~1", text("a~1 b~2"))
    ruling = rule([FOUR, let_go, back], {"a~1": report(H1, LOW), "b~2": report(H1, HIGH)})
    assert ruling.members == ("b~2", "a~1")


def test_no_part_is_lost_at_genesis() -> None:
    """Before the first step no part can be lost: the oldest owners in each view initialise them (P14)."""
    ruling = rule([FOUR], {"b~2": report(GENESIS, ()), "c~3": report(GENESIS, ((0, 1),))})
    assert (ruling.base, ruling.members, ruling.joiners) == (GENESIS, ("b~2", "c~3"), ())
    assert ruling.held is None


def test_what_was_written_down_counts_though_its_process_has_gone() -> None:
    """All members leave at one header; parts that b has reported to be in its file count although its process has ended
    (P13).
    """
    parted = view(2, 1, "", FOUR.pipelines, leaving="a~1 b~2 c~3 d~4")
    told = Report(NO_VIEW, FOUR.id, H1.seq, H1.hash, HIGH, raw=False)
    reports = {"a~1": report(H1, LOW)}
    assert rule([FOUR, parted], reports).base is None
    ruling = rule([FOUR, parted], reports, [told])
    assert (ruling.base, ruling.members, ruling.leaving) == (H1, (), ("a~1",))


# ------------------------------------------------------------------ where it is one part


def rule_of_one_part(latest: View, past: Past, reports: Mapping[str, Report]) -> Ruling:
    """Returns the ruling of the former algorithm, by which a member holds the whole state or nothing."""
    order = [m for m in latest.ids() if m in reports]
    counting = frozenset(m for m in order if past.in_all_after(m, reports[m].entered))
    able = {m: reports[m] for m in order if reports[m].loaded and m in counting}
    unusable: dict[str, str] = {}

    def sources(of: Header) -> tuple[Source, ...] | None:
        if not needs_bytes(of):
            return ()
        whole = [Source(m, ()) for m, r in able.items() if r.head == of.hash and r.raw]
        if whole:
            return tuple(whole)
        holders = recovery._holders(of, able)
        scope = recovery.scope_of(holders.values())
        if scope is None or not recovery._covers(union(s for r in holders.values() for s in r.held), scope):
            return None
        return tuple(s for s in (Source(m, union(r.held)) for m, r in holders.items()) if s.spans)

    while able:
        best = max(able.values(), key=lambda r: (r.entered, r.seq))
        pending = recovery._pending(able, best)
        if pending is not None and (found := sources(pending)) is not None:
            return sorted_out(latest, counting, reports, pending, True, found, unusable)
        base = best.last
        assert base is not None
        if not any(r.head == base.prev_hash and r.seq == base.seq - 1 for r in able.values()):
            return sorted_out(latest, counting, reports, base, False, (), unusable)
        if (found := sources(base)) is not None:
            return sorted_out(latest, counting, reports, base, True, found, unusable)
        for name in [m for m, r in able.items() if r.head == base.hash]:
            unusable[name] = ""
            del able[name]
    return sorted_out(latest, counting, reports, None, False, (), unusable)


def sorted_out(latest, counting, reports, base, hand_on, sources, unusable) -> Ruling:  # type: ignore[no-untyped-def]
    """Returns a ruling on which members go on, go on loading, wait, or join again."""
    members, joiners, waiting, rejoin = [], [], [], []
    admitted = base.view_change.joiners if base is not None and base.view_change is not None else ()
    for name in [m for m in latest.ids() if m in reports]:
        told = reports[name]
        if name in unusable:
            rejoin.append((name, ""))
        elif not told.loaded:
            known = told.entered != NO_VIEW
            if base is not None and (told.head == base.hash if known else name in admitted):
                members.append(name)
                joiners.append(name)
            elif known:
                rejoin.append((name, ""))
            else:
                waiting.append(name)
        elif base is None or name not in counting:
            rejoin.append((name, ""))
        elif told.head == base.hash or (hand_on and told.head == base.prev_hash):
            members.append(name)
        else:
            rejoin.append((name, ""))
    return Ruling(
        base=base, hand_on=hand_on, sources=tuple(s for s in sources if s.member in members), members=tuple(members),
        joiners=tuple(joiners), waiting=tuple(waiting), rejoin=tuple(rejoin),
    )  # fmt: skip


class Counted(tuple[str, ...]):
    """Tuple of ids that counts how often an id is searched in it."""

    times = 0

    def __contains__(self, key: object) -> bool:
        Counted.times += 1
        return super().__contains__(key)


ONE = view(1, 0, "a~1 b~2 c~3 d~4")
TWO = view(2, 1, "a~1 b~2 c~3 e~5", joiners="e~5")
PLAIN1 = replace(header(1, ONE), reduced=False)
PLAIN2 = replace(header(2, ONE, PLAIN1), reduced=False)
VOTE2 = header(2, ONE, PLAIN1, Kind.GATHER)
ADMITTED = header(2, ONE, PLAIN1, Kind.BOUNDARY, TWO)
PLAIN3 = replace(header(3, TWO, ADMITTED), reduced=False)


@st.composite
def reports(draw: st.DrawFn) -> tuple[list[View], dict[str, Report]]:
    """Returns random views and reports of a job without parts: members hold the whole state or nothing; some reports
    contradict each other.
    """
    chain = draw(st.sampled_from([[ONE], [ONE, TWO]]))
    found = {}
    for name in draw(st.sets(st.sampled_from(chain[-1].ids()), min_size=1)):
        at = draw(st.sampled_from([GENESIS, PLAIN1, PLAIN1, PLAIN2, VOTE2, ADMITTED, PLAIN3]))
        entered = draw(st.sampled_from([v.id for v in chain] + [NO_VIEW]))
        loaded = draw(st.booleans()) or draw(st.booleans())
        pending = draw(st.sampled_from([None, *(h for h in (PLAIN2, VOTE2, PLAIN3) if h.prev_hash == at.hash)]))
        held = draw(st.lists(st.sampled_from([(0, 40), (60, 70), (70, 100)]), unique=True))
        found[name] = Report(
            ViewId(1, 9), entered, at.seq, at.hash, WHOLE if loaded else (), raw=draw(st.booleans()),
            pending=pending, last=at, held=with_scope(held, SCOPE), owns=WHOLE if entered != NO_VIEW or loaded else (),
        )  # fmt: skip
    return chain, found


@settings(max_examples=600)
@given(reports())
def test_with_one_part_the_ruling_is_what_it_was(case: tuple[list[View], dict[str, Report]]) -> None:
    chain, found = case
    now, then = rule(chain, found), rule_of_one_part(chain[-1], Past.of(chain), found)
    plain = replace(now, reason="", rejoin=tuple((m, "") for m, _ in now.rejoin), held=None, lost=())
    assert plain == then
    assert now.lost == (() if now.base is not None else WHOLE)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_header_of_a_reduced_step_needs_no_bytes(reduced: bool) -> None:
    assert needs_bytes(replace(H1, reduced=reduced)) is not reduced


def test_who_has_all_its_parts_is_not_looked_for_among_the_joiners() -> None:
    """A member with all its parts is never searched among the joiners, which in a new job are nearly all members: that
    would be slow.
    """
    latest = replace(ONE, joiners=Counted(ONE.ids()[1:]))
    Counted.times = 0
    ruling = rule([latest], {m: report(PLAIN1, WHOLE, ONE) for m in ONE.ids()})
    assert ruling.members == ONE.ids()
    assert Counted.times == 0
