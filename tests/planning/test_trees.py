"""Tests all-reduce plans and the trees that they expand to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.trees import ALIGNMENT, edges, expand, plan_for
from chaos_lightning.protocol.types import PlanSpec, TreeSpec

kinds = st.sampled_from(["rotating", "chain", "tree", "tree:3"])
worlds = st.integers(1, 9).map(lambda n: tuple(f"n{i}~{i}" for i in range(n)))


def check_tree(tree, members):
    """Checks that a tree spans all members with one root and without cycles, and that children match parents."""
    for m in members:
        at, hops = m, 0
        while (above := tree.parent_of(at)) is not None:
            assert at in tree.children(above)
            at, hops = above, hops + 1
            assert hops < len(members)
        assert at == tree.root
    assert sorted(c for m in members for c in tree.children(m)) == sorted(m for m in members if m != tree.root)


@given(kinds, worlds, st.lists(st.integers(0, 200_000), max_size=4), st.sampled_from([64, 100, 4096, 65536]))
def test_chunks_tile_the_buffer_and_respect_sections(kind, members, lengths, chunk):
    sections, at = [], 0
    for length in lengths:
        sections.append((at, at + length))
        at += length
    trees = expand(PlanSpec(kind=kind, chunk_nbytes=chunk), members, at, sections)
    assert [t.start for t in trees] == [0, *(t.stop for t in trees[:-1])][: len(trees)]
    assert (trees[-1].stop if trees else 0) == at
    ends = {stop for _, stop in sections}
    for tree in trees:
        assert 0 < tree.nbytes <= max(chunk, ALIGNMENT)
        assert tree.stop % ALIGNMENT == 0 or tree.stop in ends
        assert any(low <= tree.start and tree.stop <= high for low, high in sections)
    for tree in {id(t.shape): t for t in trees}.values():
        check_tree(tree, members)


def test_rotating_gives_every_member_an_equal_part():
    members = ("a", "b", "c", "d")
    trees = expand(PlanSpec(chunk_nbytes=1 << 16), members, 1 << 24, ())
    assert [t.root for t in trees[:5]] == ["a", "b", "c", "d", "a"]
    share = {m: sum(t.nbytes for t in trees if t.root == m) for m in members}
    assert max(share.values()) - min(share.values()) <= 1 << 16
    assert all(t.parent_of(m) == t.root for t in trees for m in members if m != t.root)
    # A small buffer is split further than asked for, so that no single member sums all of it.
    assert [t.root for t in expand(PlanSpec(), members, 100_000, ())] == ["a", "b", "c", "d"]


def test_each_of_many_members_is_the_root_of_equally_many_chunks():
    members = tuple(f"n{i}" for i in range(24))
    trees = expand(PlanSpec(), members, 16 << 20, ())
    assert [t.root for t in trees] == [*members, *members]
    assert max(t.nbytes for t in trees) - min(t.nbytes for t in trees) <= ALIGNMENT


def test_thousands_of_chunks_share_their_shapes():
    trees = expand(PlanSpec(chunk_nbytes=65536), [f"n{i}" for i in range(8)], 1 << 28, ())
    assert len(trees) == 4096
    assert len({id(t.shape) for t in trees}) == 8


def test_shapes():
    members = tuple("abcdefg")

    def tree(kind):
        return expand(PlanSpec(kind=kind), members, ALIGNMENT, ())[0]

    assert tree("chain").parent == {"a": "b", "b": "c", "c": "d", "e": "d", "f": "e", "g": "f"}
    assert tree("tree").children("a") == ("b", "c")
    assert tree("tree").children("c") == ("f", "g")
    assert tree("tree:3").children("a") == ("b", "c", "d")
    assert edges(PlanSpec(kind="rotating"), "abc") == {("a", "b"), ("a", "c"), ("b", "c")}
    assert edges(PlanSpec(kind="chain"), "abc") == {("a", "b"), ("b", "c")}


def user(*trees):
    return PlanSpec(kind="user", chunk_nbytes=128, trees=tuple(trees))


def test_user_trees_by_id_or_name():
    spec = user(
        TreeSpec(0, 256, ("a", "b", "c"), ("", "a", "b")),
        TreeSpec(256, 1000, ("a~7", "b", "c"), ("c~2", "c", "")),
    )
    members = ("a~7", "b~1", "c~2")
    trees = expand(spec, members, 1000, ((0, 500), (500, 1000)))
    assert [(t.start, t.stop) for t in trees][:2] == [(0, 128), (128, 256)]
    assert {t.root for t in trees if t.stop <= 256} == {"a~7"}
    assert {t.root for t in trees if t.start >= 256} == {"c~2"}
    assert not any(t.start < 500 < t.stop for t in trees)
    assert trees[-1].stop == 1000
    for tree in trees:
        check_tree(tree, members)
    whole = user(TreeSpec(0, 0, ("a", "b", "c"), ("", "a", "b")))
    assert expand(whole, members, 777, ())[-1].stop == 777


@pytest.mark.parametrize(
    ("trees", "words"),
    [
        ([], "has no trees"),
        ([TreeSpec(0, 640, ("a", "b"), ("", "a"))], r"tree 0 does not span \['c'\]"),
        ([TreeSpec(0, 640, ("a", "b", "c"), ("", "", "a"))], r"tree 0 has 2 roots"),
        ([TreeSpec(0, 640, ("a", "b", "c"), ("b", "c", "a"))], r"tree 0 has 0 roots"),
        ([TreeSpec(0, 640, ("a", "b", "c"), ("", "c", "b"))], r"tree 0 has a cycle: b -> c -> b"),
        ([TreeSpec(0, 640, ("a", "b", "b"), ("", "a", "a"))], r"tree 0 names 'b' twice"),
        ([TreeSpec(0, 640, ("a", "b", "x"), ("", "a", "a"))], r"tree 0 names 'x', which is no member"),
        ([TreeSpec(0, 640, ("a", "b", "c"), ("", "a"))], r"3 members but 2 parents"),
        ([TreeSpec(0, 320, ("a", "b", "c"), ("", "a", "a"))], r"bytes \[320, 640\) are covered by no tree"),
        ([TreeSpec(64, 640, ("a", "b", "c"), ("", "a", "a"))], r"bytes \[0, 64\) are covered by no tree"),
        ([TreeSpec(0, 704, ("a", "b", "c"), ("", "a", "a"))], r"ends at byte 704, but the buffer has 640"),
        ([TreeSpec(0, 640, ("a", "b", "c"), ("", "a", "a"))] * 2, r"the bytes before 640 are covered already"),
        ([TreeSpec(0, 100, ("a", "b", "c"), ("", "a", "a"))], r"ends at byte 100; borders are multiples of 64"),
        ([TreeSpec(9, 9, ("a", "b", "c"), ("", "a", "a"))], r"tree 0 has the empty range"),
    ],
)
def test_user_trees_that_do_not_fit(trees, words):
    with pytest.raises(PlanError, match=words):
        expand(user(*trees), ("a", "b", "c"), 640, ())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PlanSpec(kind="ring"), "'ring' is unknown; expected one of"),
        (PlanSpec(kind="tree:1"), "at least 2 children"),
        (PlanSpec(chunk_nbytes=8), "chunk_nbytes is 8"),
    ],
)
def test_impossible_plans(spec, words):
    with pytest.raises(PlanError, match=words):
        expand(spec, ("a", "b"), 640, ())


def test_members_must_be_distinct_and_present():
    with pytest.raises(PlanError, match="at least one member"):
        expand(PlanSpec(), (), 64, ())
    with pytest.raises(PlanError, match="not distinct"):
        expand(PlanSpec(), ("a", "a"), 64, ())
    with pytest.raises(ValueError, match="does not begin where"):
        expand(PlanSpec(), ("a",), 64, ((0, 10), (12, 64)))
    with pytest.raises(ValueError, match="the sections end at byte 10"):
        expand(PlanSpec(), ("a",), 64, ((0, 10),))


def test_user_plan_falls_back_when_its_members_are_gone():
    spec = user(TreeSpec(0, 0, ("a", "b"), ("", "a")))
    assert plan_for(spec, ("a~1", "b~1")) == (spec, "user as configured")
    plan, reason = plan_for(spec, ("a~1", "b~1", "c~1"))
    assert plan.kind == "rotating"
    assert plan.chunk_nbytes == 128
    assert reason == "rotating instead: tree 0 does not span ['c~1']; a tree has all members"
