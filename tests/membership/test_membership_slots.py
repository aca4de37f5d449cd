"""Tests how a slot is closed: agreement, folding, votes, and which header carries a view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_script import contribution, header_after, member, pipelines_of

from chaos_lightning.membership import slots
from chaos_lightning.membership.slots import carried, close_slot, differing, fitting, presence_of
from chaos_lightning.protocol.codec import encode_peer
from chaos_lightning.protocol.types import (
    GENESIS,
    MAX_GATHER_NBYTES,
    NO_VIEW,
    Kind,
    LayersCovered,
    Ledger,
    Spent,
    View,
    ViewId,
)

IDS = ("a~1", "b~2", "c~3")
VIEW = View(id=ViewId(1, 1), predecessor=NO_VIEW, members=tuple(member(m) for m in IDS))


def box(kind: str = "step", **fields: object) -> dict[str, object]:
    return {m: contribution(VIEW, GENESIS, kind, m, **fields) for m in IDS}


def closed(contributions: dict[str, object], waiting: View | None = None):  # type: ignore[no-untyped-def]
    return close_slot(view=VIEW, prev=GENESIS, contributions=contributions, waiting=waiting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prev_hash", "feed"),
        ("name", "other"),
        ("step", 7),
        ("layout_hash", "1234"),
        ("hyper", "opt0.lr=0.2"),
    ],
)
def test_disagreement_names_member_field_and_both_values(field: str, value: object) -> None:
    contributions = box()
    expected = getattr(contributions["a~1"], field)
    contributions["c~3"] = replace(contributions["c~3"], **{field: value})
    (told,) = differing(VIEW, contributions)  # type: ignore[arg-type]
    assert told.member == "c~3"
    for word in ("c~3", "a~1", field, str(value), str(expected)):
        assert word in told.reason
    assert told.rejoin == (field == "prev_hash"), "its state is not the job's, while its script may be"


@pytest.mark.parametrize(
    ("values", "out"),
    [
        ("xyx", ["b~2"]),
        ("xyy", ["a~1"]),
        ("xyz", ["b~2", "c~3"]),
        ("xxx", []),
    ],
    ids=["one differs", "the oldest differs", "all differ", "none differs"],
)
def test_who_differs_from_most_is_put_out_and_the_oldest_counts_on_a_tie(values: str, out: list[str]) -> None:
    contributions = {m: replace(c, hyper=v) for (m, c), v in zip(box().items(), values, strict=True)}  # type: ignore[type-var]
    assert [d.member for d in differing(VIEW, contributions)] == out  # type: ignore[arg-type]


def test_of_two_members_the_newcomer_is_put_out() -> None:
    view = replace(VIEW, members=VIEW.members[:2])
    contributions = {m: contribution(VIEW, GENESIS, "step", m) for m in IDS[:2]}
    contributions["b~2"] = replace(contributions["b~2"], hyper="opt0.lr=0.2;opt0.momentum=0.0")
    contributions["a~1"] = replace(contributions["a~1"], hyper="opt0.lr=0.1;opt0.momentum=0.0")
    (told,) = differing(view, contributions)
    assert "b~2 has hyper 'opt0.lr=0.2', a~1 has 'opt0.lr=0.1'" in told.reason, "only what differs is told"


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Kind.STEP, "section 0", "goes on to its next step"),
        (Kind.GATHER, "its own", "makes the collective 'its own'"),
        (Kind.BOUNDARY, "boundary", "goes on to let newcomers in"),
        (Kind.CLOSING, "closing", "has ended its training"),
    ],
)
def test_members_in_different_slots_are_told_both_calls_and_lines(kind: Kind, name: str, words: str) -> None:
    contributions = box("gather", name="barrier before saving", line="save() at train.py:31")
    contributions["c~3"] = replace(contributions["c~3"], kind=kind, name=name, line="update() at train.py:29")
    (told,) = differing(VIEW, contributions)  # type: ignore[arg-type]
    assert "a~1 makes the collective 'barrier before saving' (save() at train.py:31)" in told.reason
    assert f"c~3 {words} (update() at train.py:29)" in told.reason
    assert "move the call out of `if rank == 0:`" in told.reason


def test_lines_are_not_compared() -> None:
    contributions = box("gather")
    contributions["c~3"] = replace(contributions["c~3"], line="save() at another.py:7")
    assert closed(contributions).error == ""


@pytest.mark.parametrize("who", IDS)
@pytest.mark.parametrize("kind", ["step", "gather", "boundary", "closing"])
def test_who_leaves_goes_along_with_whatever_the_others_close(kind: str, who: str) -> None:
    contributions = box(kind)
    name = "" if kind == "step" else "section 0"
    leaver = contribution(VIEW, GENESIS, "step", who, name=name, hyper="opt0.lr=0.2", yields=True)
    contributions[who] = replace(leaver, weight=0.0, coefficient=0.0)
    header = closed(contributions)
    assert header.error == ""
    assert header.kind is Kind(kind)
    others = [m for m in IDS if m != who]
    assert header.contributors == len(IDS)
    votes = tuple(b"" if m == who else f"{m} votes".encode() for m in IDS)
    assert header.answers == (votes if kind == "gather" else ())
    assert header.hyper == contributions[others[0]].hyper


def test_who_left_without_a_share_is_put_out_unless_it_had_none_or_all_left() -> None:
    """B2: the others do the share of a member that left its script, in a view without it."""
    view = replace(VIEW, batch="6:2x3")
    units = {m: ((2 * i, 2 * i + 2),) for i, m in enumerate(IDS)}
    given = {
        m: contribution(view, GENESIS, "step", m, micro_batches=((0, 6),), coverage=(LayersCovered(0, 1, units[m]),))
        for m in IDS
    }
    assert differing(view, given) == ()
    left = {m: contribution(view, GENESIS, "step", m, yields=True) for m in IDS}
    (told,) = differing(view, given | {"b~2": left["b~2"]})
    assert (told.member, told.rejoin) == ("b~2", True)
    assert "left without computing its share" in told.reason
    assert differing(view, left) == ()
    assert differing(replace(view, batch="6:3,0,3"), given | {"b~2": left["b~2"]}) == (), "it had none"


@pytest.mark.parametrize("who", IDS)
def test_who_has_no_samples_goes_along_with_a_collective_that_it_did_not_foresee(who: str) -> None:
    contributions = box("gather", name="values")
    for kind in ("step", "gather"):
        idle = contribution(VIEW, GENESIS, kind, who, name="its own", yields=True)
        contributions[who] = replace(idle, weight=0.0, coefficient=0.0)
        header = closed(contributions)
        assert header.error == ""
        assert (header.kind, header.name) == (Kind.GATHER, "values")
        assert header.answers == tuple(b"" if m == who else f"{m} votes".encode() for m in IDS)


def test_a_collective_yields_to_collectives_only() -> None:
    contributions = box("step")
    contributions["c~3"] = contribution(VIEW, GENESIS, "gather", "c~3", name="values", yields=True)
    (told,) = differing(VIEW, contributions)  # type: ignore[arg-type]
    assert "c~3 makes the collective 'values'" in told.reason


def test_when_nobody_has_samples_they_are_in_the_middle_of_a_batch_and_let_nobody_in() -> None:
    prev = replace(GENESIS, boundary=True)
    given = {m: contribution(VIEW, prev, "step", m, hyper="opt0.lr=0.1", yields=True) for m in IDS}
    assert close_slot(view=VIEW, prev=prev, contributions=given).kind is Kind.STEP


def test_who_leaves_still_stands_on_the_same_chain() -> None:
    contributions = box()
    contributions["c~3"] = replace(contributions["c~3"], prev_hash="feed", yields=True)
    assert "prev_hash" in differing(VIEW, contributions)[0].reason  # type: ignore[arg-type]


def test_steps_of_other_sections_are_refused_also_from_who_leaves() -> None:
    contributions = box()
    contributions["c~3"] = replace(contributions["c~3"], name="section 1", yields=True)
    assert "section 1" in differing(VIEW, contributions)[0].reason  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("batch", ["", "6:2x3"])
def test_when_all_leave_they_take_a_step_or_let_in_who_waits(asked: bool, batch: str) -> None:
    """A batch of fixed size has no step without samples (B1)."""
    prev, view = replace(GENESIS, boundary=asked), replace(VIEW, batch=batch)
    given = {m: contribution(view, prev, "step", m, yields=True) for m in IDS}
    header = close_slot(view=view, prev=prev, contributions=given)
    assert header.error == ""
    assert (header.kind, header.step) == ((Kind.BOUNDARY, 0) if asked or batch else (Kind.STEP, 1))


def test_a_fixed_batch_goes_on_with_one_that_stays_and_closes_a_collective_that_all_yield_to() -> None:
    view = replace(VIEW, batch="6:6,0,0")
    left = {m: contribution(view, GENESIS, "step", m, name="section 0", yields=True) for m in IDS}
    stays = {"a~1": contribution(view, GENESIS, "step", "a~1", name="section 0", hyper="opt0.lr=0.1")}
    assert close_slot(view=view, prev=GENESIS, contributions=left | stays).kind is Kind.STEP
    gathers = {m: contribution(view, GENESIS, "gather", m, name="values", yields=True) for m in IDS}
    assert close_slot(view=view, prev=GENESIS, contributions=gathers).kind is Kind.GATHER


def test_sample_spent_twice_in_one_slot_is_an_error_and_spends_nothing() -> None:
    header = closed(box(spent=(Spent("", 0, ((0, 4),)),)))
    assert "0" in header.error
    assert header.ledger == Ledger()


def test_gather_answers_are_in_rank_order() -> None:
    header = closed(dict(reversed(box("gather").items())))
    assert header.answers == tuple(f"{m} votes".encode() for m in IDS)
    assert header.contributors == len(IDS)
    assert header.step == 0


@pytest.mark.parametrize("who", [*IDS, ""])
def test_a_step_hands_on_what_members_say_beside_their_gradients(who: str) -> None:
    contributions = box()
    if who:
        contributions[who] = replace(contributions[who], payload=b"it holds version 3")
    header = closed(contributions)
    assert header.error == ""
    assert header.answers == (tuple(b"it holds version 3" if m == who else b"" for m in IDS) if who else ())


@pytest.mark.parametrize(("sizes", "fits"), [((10, 5, 5), True), ((10, 6, 5), False), ((0, 90, 3), False)])
def test_payloads_that_do_not_fit_into_one_header_are_refused_for_all(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], fits: bool
) -> None:
    monkeypatch.setattr(slots, "MAX_GATHER_NBYTES", 20)
    sent = {m: fitting(bytes(n)) for m, n in zip(IDS, sizes, strict=True)}
    contributions = box("gather", name="broadcast")
    header = closed({m: replace(contributions[m], payload=p) for m, p in sent.items()})
    if fits:
        assert header.error == ""
        assert header.answers == tuple(sent.values())
        return
    for word in ("slot 1", "'broadcast'", "the limit is 20", f"{sum(map(len, sent.values()))} bytes"):
        assert word in header.error
    assert ("21 or more are of b~2" in header.error) is (max(sizes) > 20)
    assert header.answers == ()
    assert header.next_view == VIEW.id


def test_payloads_of_a_step_are_refused_under_the_steps_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_GATHER_NBYTES", 20)
    header = closed({m: replace(c, payload=bytes(10)) for m, c in box(name="section 0").items()})
    assert "the step 'section 0' have 30 bytes" in header.error
    assert (header.answers, header.step) == ((), 0)


def test_what_is_contributed_and_what_is_answered_can_be_sent() -> None:
    mine = contribution(VIEW, GENESIS, "gather", "a~1")
    assert len(encode_peer(replace(mine, payload=fitting(bytes(MAX_GATHER_NBYTES + (32 << 20)))))) > MAX_GATHER_NBYTES
    full = closed({m: replace(c, payload=bytes(MAX_GATHER_NBYTES // 3)) for m, c in box("gather").items()})
    assert full.error == ""
    assert len(encode_peer(full)) > MAX_GATHER_NBYTES - 3


def test_step_counts_and_keeps_the_last_words_on_layout() -> None:
    first = closed(box(layout_hash="abc", hyper="lr=1"))
    assert (first.step, first.layout_hash, first.hyper) == (1, "abc", "lr=1")
    second = close_slot(view=VIEW, prev=first, contributions={m: contribution(VIEW, first, "boundary", m) for m in IDS})
    assert (second.step, second.layout_hash, second.hyper) == (1, "abc", "lr=1")


def test_joiners_ride_on_a_boundary_only() -> None:
    joining = replace(VIEW, id=ViewId(1, 2), predecessor=VIEW.id, joiners=("c~3",))
    assert carried(Kind.STEP, joining) == (None, True)
    assert carried(Kind.GATHER, joining) == (None, True)
    assert carried(Kind.BOUNDARY, joining) == (joining, False)
    assert carried(Kind.CLOSING, joining) == (None, False)


@given(kind=st.sampled_from(Kind), lets_go=st.booleans(), joins=st.booleans())
def test_a_collective_carries_a_leave_only_if_it_lets_go(kind: Kind, lets_go: bool, joins: bool) -> None:
    """The header of a collective lets a member leave only if the call has `lets_go`; this flag does not affect other
    kinds of slots.
    """
    contributions = box(str(kind), lets_go=lets_go)
    waiting = replace(VIEW, id=ViewId(1, 2), predecessor=VIEW.id, joiners=("c~3",) if joins else ())
    change, boundary = carried(kind, waiting, lets_go=kind is Kind.GATHER and lets_go)
    header = closed(contributions, waiting)
    assert (header.view_change, header.boundary) == (change, boundary)
    assert (header.view_change is not None) == (
        kind is Kind.BOUNDARY or (not joins and (kind is Kind.STEP or (kind is Kind.GATHER and lets_go)))
    )


def test_who_yields_does_not_say_whether_a_collective_lets_go() -> None:
    leaving = replace(VIEW, id=ViewId(1, 2), predecessor=VIEW.id)
    for lets_go in (False, True):
        contributions = box("gather", lets_go=lets_go)
        idle = contribution(VIEW, GENESIS, "gather", "a~1", name="its own", yields=True, lets_go=not lets_go)
        contributions["a~1"] = idle
        assert (closed(contributions, leaving).view_change is not None) == lets_go


def test_leave_rides_on_a_step_never_on_a_collective() -> None:
    leaving = replace(VIEW, id=ViewId(1, 2), predecessor=VIEW.id)
    assert carried(Kind.STEP, leaving) == (leaving, False)
    assert carried(Kind.BOUNDARY, leaving) == (leaving, False)
    assert carried(Kind.GATHER, leaving) == (None, False)
    assert carried(Kind.CLOSING, leaving) == (None, False)


def test_error_header_carries_no_view() -> None:
    contributions = box(spent=(Spent("", 0, ((0, 4),)),))
    header = closed(contributions, waiting=replace(VIEW, id=ViewId(1, 2), predecessor=VIEW.id))
    assert header.error
    assert header.view_change is None


def drifted_at(view: View, hashes: dict[str, tuple[str, ...]]) -> list[tuple[str, int]]:
    """Returns the (member, part) pairs that a step's header reports as drifted, given the members' hashes."""
    box = {m: contribution(view, GENESIS, "step", m, state_hashes=hashes.get(m, ())) for m in view.ids()}
    header = close_slot(view=view, prev=GENESIS, contributions=box)
    assert not header.error
    return [(d.member, d.part) for d in header.drifted]


def test_minority_of_state_hashes_has_drifted_and_the_oldest_decides_a_tie() -> None:
    assert drifted_at(VIEW, {"a~1": ("x",), "b~2": ("y",), "c~3": ("y",)}) == [("a~1", 0)]
    assert drifted_at(VIEW, {"a~1": ("x",), "b~2": ("y",)}) == [("b~2", 0)]
    assert drifted_at(VIEW, {}) == []


def test_each_part_is_compared_among_its_owners() -> None:
    """Hashes of a part are compared only among its owners: a and b own both layers, c and d one each (P12)."""
    view = replace(VIEW, pipelines=pipelines_of("a~1:2,b~2:2,d~4:1+c~3:1"), members=(*VIEW.members, member("d~4")))
    alike = {"a~1": ("0", "1", "r"), "b~2": ("0", "1", "r"), "c~3": ("1", "r"), "d~4": ("0", "r")}
    assert drifted_at(view, alike) == []
    assert drifted_at(view, alike | {"c~3": ("x", "r")}) == [("c~3", 1)]
    assert drifted_at(view, alike | {"a~1": ("x", "y", "r"), "d~4": ("0", "z")}) == [("a~1", 0), ("a~1", 1), ("d~4", 2)]
    tie = {"b~2": ("0", "1", "r"), "c~3": ("2", "r")}
    assert drifted_at(view, tie) == [("c~3", 1)]


PIPED = replace(VIEW, pipelines=pipelines_of("a~1:1+b~2:2,c~3:3"))


@pytest.mark.parametrize(
    ("who", "change", "words"),
    [
        ("b~2", {"coverage": ()}, "layers 1 to 2: micro-batches [0, 1) are in the sum of no member"),
        ("b~2", {"coverage": (LayersCovered(1, 3, ((0, 2),)),)}, "micro-batches [1, 2) are in the sums of b~2 and c~3"),
        ("b~2", {"coverage": (LayersCovered(1, 9, ((0, 1),)),)}, "layers 3 to 8: none of this model's 3 layers"),
        ("c~3", {"state_hashes": ("x", "y")}, "c~3 gives hashes of 2 parts, and owns 4"),
    ],
)
def test_sums_that_lack_or_repeat_a_micro_batch_are_an_error(who: str, change: dict[str, Any], words: str) -> None:
    good = {m: contribution(PIPED, GENESIS, "step", m) for m in PIPED.ids()}
    header = close_slot(view=PIPED, prev=GENESIS, contributions=good)
    assert not header.error
    assert header.reduced
    found = close_slot(view=PIPED, prev=GENESIS, contributions=good | {who: replace(good[who], **change)})
    assert words in found.error
    assert (found.step, found.shares, found.reduced) == (0, (), False)


def test_an_empty_micro_batch_needs_no_cover() -> None:
    at_the_end = {
        m: replace(c, micro_batches=((1, 2),), coverage=c.coverage if m == "c~3" else ())
        for m in PIPED.ids()
        for c in [contribution(PIPED, GENESIS, "step", m)]
    }
    assert not close_slot(view=PIPED, prev=GENESIS, contributions=at_the_end).error
    odd = at_the_end | {"b~2": replace(at_the_end["b~2"], micro_batches=((0, 2),))}
    assert [who.member for who in differing(PIPED, odd)] == ["b~2"]


def test_a_round_of_evaluation_is_covered_as_a_step_is() -> None:
    said = {m: contribution(PIPED, GENESIS, "step", m) for m in PIPED.ids()}
    rounds = {m: replace(c, kind=Kind.GATHER, weight=0.0, coefficient=0.0, reduced=False) for m, c in said.items()}
    header = close_slot(view=PIPED, prev=GENESIS, contributions=rounds)
    assert (header.error, header.reduced) == ("", False)
    lacking = rounds | {"b~2": replace(rounds["b~2"], coverage=())}
    assert "in the sum of no member" in close_slot(view=PIPED, prev=GENESIS, contributions=lacking).error
    plain = {m: replace(c, micro_batches=(), coverage=()) for m, c in rounds.items()}
    assert not close_slot(view=PIPED, prev=GENESIS, contributions=plain).error


def test_who_has_not_reduced_differs_unless_it_yields_to_another_kind() -> None:
    good = {m: contribution(PIPED, GENESIS, "step", m) for m in PIPED.ids()}
    odd = good | {"b~2": replace(good["b~2"], reduced=False)}
    assert [who.member for who in differing(PIPED, odd)] == ["b~2"]
    yields = good | {"b~2": replace(contribution(PIPED, GENESIS, "boundary", "b~2"), yields=True)}
    assert differing(PIPED, yields) == ()


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=4))
def test_presence_is_the_union_of_all_masks(masks: list[bytes]) -> None:
    union = presence_of([contribution(VIEW, GENESIS, "step", "a~1", presence=m) for m in masks])
    for bit in range(48):
        expected = any(len(m) > bit // 8 and m[bit // 8] >> bit % 8 & 1 for m in masks)
        assert expected == (len(union) > bit // 8 and bool(union[bit // 8] >> bit % 8 & 1))


@given(st.permutations(IDS), st.sampled_from(["step", "gather", "boundary", "closing"]))
def test_header_does_not_depend_on_the_order_of_arrival(order: list[str], kind: str) -> None:
    contributions = box(kind)
    assert closed({m: contributions[m] for m in order}).hash == header_after(VIEW, GENESIS, kind).hash


def test_an_order_that_differs_is_named_and_one_that_yields_has_none() -> None:
    contributions = box(order="epoch 1 in order aa")
    contributions["b~2"] = replace(contributions["b~2"], order="epoch 1 in order bb")
    (told,) = differing(VIEW, contributions)  # type: ignore[arg-type]
    assert told.member == "b~2"
    assert "b~2 has epoch 1 in order bb, a~1 has epoch 1 in order aa" in told.reason
    assert "set_epoch" in told.reason
    contributions["b~2"] = replace(contributions["b~2"], order="", yields=True)
    assert not differing(VIEW, contributions)  # type: ignore[arg-type]
