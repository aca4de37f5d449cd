"""Tests a view's packed form: unique for each view and small, and anything else is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from large_views import sparse_view

from chaos_lightning.errors import WireError
from chaos_lightning.protocol import chaos_pb2, codec, packing
from chaos_lightning.protocol.limits import PLACE_NBYTES
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, PlanSpec, TreeSpec, View, ViewId

SMALL = View(
    ViewId(1, 2),
    ViewId(1, 1),
    (Member("a~1", "a", "host", "10.0.0.1", 4000, 7, 8), Member("b~2", "b", "host", "10.0.0.2", 4001, 9, 8, 2)),
    joiners=("b~2",),
    plan=PlanSpec("user", 4096, (TreeSpec(0, 0, ("a", "b"), ("", "a")), TreeSpec(0, 0, ("a~1", "b~2"), ("b~2", "")))),
    links=(LinkSpec("a~1", "b~2"),),
)


@pytest.mark.parametrize("count", [1, 2, 16, 512])
def test_a_view_comes_back_and_names_each_member_once(count: int) -> None:
    view = sparse_view(count)
    data = codec.encode(view)
    assert codec.decode(View, data) == view
    assert data.count(b"node") <= 2, "a name and a host, from which the others differ"


def test_bytes_grow_with_members() -> None:
    sizes = {count: len(codec.encode(sparse_view(count))) for count in (64, 512)}
    assert sizes[512] < 8 * 1.35 * sizes[64], sizes


LEAVING = replace(SMALL, pipelines="{}", leaving=(Member("c~3", "c", "host", "10.0.0.3", 4002),))


def test_a_view_with_pipelines_and_leavers_comes_back() -> None:
    assert codec.decode(View, codec.encode(LEAVING)) == LEAVING
    assert len(codec.encode(SMALL)) == len(codec.encode(replace(LEAVING, pipelines="", leaving=())))


def packed(view: View = SMALL) -> Any:
    return chaos_pb2.PackedView.FromString(codec.encode(view))


def test_odd_names_travel_too() -> None:
    links = (LinkSpec("b~2", "x"), LinkSpec("", "a~1"), LinkSpec("x", "y"))
    odd = replace(SMALL, joiners=("y", "a~1", "y"), links=links)
    assert codec.decode(View, codec.encode(odd)) == odd
    assert packed(odd).words == ["y", "x", "a", "b"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.joiners.append(5), "refers to name 2 or 5 of 5"),
        (lambda v: v.joiners.append(-1), "refers to name -1"),
        (lambda v: v.links.append(1), "half a link"),
        (lambda v: v.links.__setitem__(1, 99), "refers to name"),
        (lambda v: v.words.append("c"), "words are not in the order"),
        (lambda v: v.words.__setitem__(slice(None), ["b", "a", "a"]), "twice"),
        (lambda v: v.words.__setitem__(0, "a~1"), "twice"),
        (lambda v: v.words.__setitem__(0, ""), "twice"),
        (lambda v: v.trees[0].members.reverse(), "words are not in the order"),
        (lambda v: v.trees[1].members.append(1), "lists all members"),
        (lambda v: v.trees[1].MergeFrom(chaos_pb2.PackedTree(members=[1, 2])), "lists all members"),
        (lambda v: (v.trees[1].ClearField("whole"), v.trees[1].members.extend([1, 2])), "lists all members"),
        (lambda v: v.members.lengths.append(0), "no whole columns"),
        (lambda v: v.members.lengths.__setitem__(0, -1), "no whole columns"),
        (lambda v: v.members.differences.append(0), "no whole columns"),
        (lambda v: setattr(v.members, "texts", v.members.texts + "x"), "cut off"),
        (lambda v: v.members.lengths.__setitem__(1, 9), "shares 9 characters"),
        (lambda v: v.ClearField("members"), "without members"),
        (lambda v: v.leaving.SetInParent(), "lets nobody go"),
        (lambda v: v.leaving.CopyFrom(v.members), "lets go one of its members"),
    ],
)
def test_what_is_no_views_packed_form_is_refused(change: Any, words: str) -> None:
    message = packed()
    change(message)
    with pytest.raises(WireError, match=words):
        codec.decode(View, message.SerializeToString())


def test_a_text_that_repeats_what_it_shares_is_refused() -> None:
    said = packing.pack_members(SMALL.members)
    lengths = list(said.lengths)
    at = 5  # the second host, which shares "host" and adds nothing
    lengths[at], lengths[at + 10] = 0, 4
    start = sum(lengths[10 : 10 + at])
    texts = f"{said.texts[:start]}host{said.texts[start:]}"
    with pytest.raises(WireError, match="shares 0 characters with 'host'"):
        packing.unpack_members(replace(said, texts=texts, lengths=tuple(lengths)))


def test_shared_beginnings_cannot_multiply_a_long_text() -> None:
    long = replace(SMALL.members[0], host="\u00e9" * (PLACE_NBYTES // 2 + 1))
    with pytest.raises(WireError, match="more than 255 bytes"):
        codec.encode(replace(SMALL, members=(long,)))
    message = packed(View(ViewId(1, 1), NO_VIEW, (Member("a~1", "a", "h", "", 0),)))
    message.members.texts = message.members.texts.replace("h", "\u00e9" * 128)
    message.members.lengths[7] = 128
    with pytest.raises(WireError, match="shares 0 characters"):
        codec.decode(View, message.SerializeToString())


def test_members_without_an_id_of_their_own_are_refused() -> None:
    for member_id in ("a~1", ""):
        members = (SMALL.members[0], replace(SMALL.members[1], id=member_id))
        with pytest.raises(WireError, match="two members of one id, or one without"):
            codec.encode(replace(SMALL, members=members))
    for member_id in ("a~1", ""):
        with pytest.raises(WireError, match="lets go one of its members, somebody twice, or somebody without an id"):
            codec.encode(replace(LEAVING, leaving=(replace(LEAVING.leaving[0], id=member_id),)))
    with pytest.raises(WireError, match="somebody twice"):
        codec.encode(replace(LEAVING, leaving=LEAVING.leaving * 2))
    with pytest.raises(TypeError, match="expected integers"):
        codec.encode(replace(SMALL, members=(replace(SMALL.members[0], port=1.0),)))  # type: ignore[arg-type]
