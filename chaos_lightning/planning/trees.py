"""Plans become trees: which member sends which bytes to whom.

Theory of operation. A plan (`PlanSpec`) is a rule that every member expands alike, from the view's members in rank
order and the buffer's layout, without a message. The expansion is a list of trees, each over one *chunk* (a byte
range): partial sums climb from the leaves to the root, the result comes down the same edges. Chunks never cross the
border of a section (an optimizer's part of the buffer) and begin at multiples of 64 bytes within the buffer, so no
element is cut.

Kinds:
    rotating: each chunk has its own root, which rotates over the members; all others are its children. Two hops,
        and every member sums an equal part: reduce-scatter and all-gather in effect. Needs a link between every
        pair.
    chain: one line in rank order, rooted in its middle. Needs n-1 links.
    tree, tree:K: one balanced binary (K-ary) tree in rank order.
    user: explicit trees (`TreeSpec`) with their byte ranges; members by id or by name. Checked in full: each tree
        has exactly the view's members, one root, no cycle, and the ranges cover every byte once.

A user's trees name members, and members come and go: `plan_for` decides whether they fit the present members and
falls back to `rotating`, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from chaos_lightning.errors import PlanError
from chaos_lightning.membership.types import PlanSpec, Span, TreeSpec

ALIGNMENT = 64
"""Bytes; chunk borders inside a section are multiples of it."""

SMALLEST_CHUNK = 16384
"""Bytes; below this a section is not split further to give every member a root."""

_LARGE_NBYTES = 32 << 20

KINDS = ("rotating", "chain", "tree", "user")

_NOBODY: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A tree without its bytes; all chunks that climb the same tree share one."""

    root: str
    parent: Mapping[str, str]
    """Of every member but the root."""
    below: Mapping[str, tuple[str, ...]]
    """Children in rank order; members without any are absent."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of the bytes [start, stop)."""

    start: int
    stop: int
    shape: Shape

    @property
    def root(self) -> str:
        return self.shape.root

    @property
    def parent(self) -> Mapping[str, str]:
        """Parent of every member but the root."""
        return self.shape.parent

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def parent_of(self, member: str) -> str | None:
        """None at the root."""
        return self.shape.parent.get(member)

    def children(self, member: str) -> tuple[str, ...]:
        return self.shape.below.get(member, _NOBODY)


def expand(spec: PlanSpec, members: Sequence[str], nbytes: int, sections: Sequence[Span]) -> tuple[Tree, ...]:
    """All chunks of a buffer with their trees, in byte order.

    Args:
        spec: the plan.
        members: ids in rank order.
        nbytes: length of the buffer.
        sections: byte spans that tile [0, nbytes) in order; empty means one section.

    Raises:
        PlanError: the plan does not fit; the message names the tree and what is wrong with it.
        ValueError: the sections do not tile the buffer (a mistake of the caller, not of the plan).
    """
    names = _members(members)
    borders = _sections(nbytes, sections)
    arity = _arity(spec)
    if spec.chunk_nbytes and spec.chunk_nbytes < ALIGNMENT:
        raise PlanError(f"plan {spec.kind!r}: chunk_nbytes is {spec.chunk_nbytes}; expected 0 or at least {ALIGNMENT}")
    spec = replace(spec, chunk_nbytes=spec.chunk_nbytes or chunk_for(nbytes))
    if spec.kind == "user":
        return _expand_user(spec, names, nbytes, borders)
    if spec.kind == "rotating":
        shapes = [_star(names, root) for root in names]
        chunks = [chunk for section in borders for chunk in _split(section, spec.chunk_nbytes, len(names))]
        return tuple(Tree(start, stop, shapes[i % len(shapes)]) for i, (start, stop) in enumerate(chunks))
    shape = _chain(names) if spec.kind == "chain" else _balanced(names, arity)
    return tuple(Tree(*chunk, shape) for section in borders for chunk in _split(section, spec.chunk_nbytes, 1))


def chunk_for(nbytes: int) -> int:
    """A chunk's size in bytes for a buffer of this size: small enough to overlap, large enough that handling it costs
    little (docs/LOG.md)."""
    return 524288 if nbytes < _LARGE_NBYTES else 1 << 20


def commit_tree(spec: PlanSpec, members: Sequence[str], root: str) -> Tree:
    """The tree on which contributions climb to the commit root and headers come down (start = stop = 0).

    It uses the edges of the plan's (first) tree, seen from `root`, so it needs no link that the plan does not have.

    Raises:
        PlanError: as `expand`.
        ValueError: `root` is no member.
    """
    names = _members(members)
    if root not in names:
        raise ValueError(f"commit root {root!r} is no member; members are {list(names)}")
    arity = _arity(spec)
    if spec.kind == "rotating":
        return Tree(0, 0, _star(names, root))
    if spec.kind == "chain":
        shape = _chain(names)
    elif spec.kind == "user":
        shape = _user_shapes(spec, names)[0]
    else:
        shape = _balanced(names, arity)
    return Tree(0, 0, _seen_from(names, shape, root))


def edges(spec: PlanSpec, members: Sequence[str]) -> frozenset[tuple[str, str]]:
    """The links a plan needs, each as (earlier, later) in rank order."""
    names = _members(members)
    rank = {name: i for i, name in enumerate(names)}
    arity = _arity(spec)
    if spec.kind == "rotating":
        shapes: Iterable[Shape] = [_star(names, root) for root in names]
    elif spec.kind == "user":
        shapes = _user_shapes(spec, names)
    else:
        shapes = [_chain(names) if spec.kind == "chain" else _balanced(names, arity)]
    pairs = (sorted(pair, key=rank.__getitem__) for shape in shapes for pair in shape.parent.items())
    return frozenset((a, b) for a, b in pairs)


def check_plan(spec: PlanSpec) -> None:
    """Refuses a plan that fits no members at all: a user's trees must fit their own.

    Raises:
        PlanError: as `expand`; only ranges beyond a buffer's end cannot be seen here.
    """
    _arity(spec)
    named = spec.trees[0].members if spec.trees else ("",)
    expand(spec, named, max((tree.stop for tree in spec.trees), default=0), ())


def plan_for(spec: PlanSpec, members: Sequence[str]) -> tuple[PlanSpec, str]:
    """The plan for these members, and the reason in words: `spec`, or rotating where a user's trees do not fit."""
    names = _members(members)
    try:
        _arity(spec)
        if spec.kind == "user":
            _user_shapes(spec, names)
    except PlanError as error:
        return PlanSpec(chunk_nbytes=spec.chunk_nbytes), f"rotating instead: {error}"
    return spec, f"{spec.kind} as configured"


# --- chunks ------------------------------------------------------------------------------------------------------


def _split(section: Span, chunk_nbytes: int, at_least: int) -> list[Span]:
    """Chunks of nearly equal size, at most `chunk_nbytes`; `at_least` so many unless they would get too small."""
    start, stop = section
    low = start // ALIGNMENT  # borders lie on multiples of ALIGNMENT in the buffer, whatever the section begins at
    cells = -(-stop // ALIGNMENT) - low
    number = max(-(-cells // (chunk_nbytes // ALIGNMENT)), min(at_least, (stop - start) // SMALLEST_CHUNK))
    borders = [start, *((low + cells * i // number) * ALIGNMENT for i in range(1, number)), stop]
    return [(a, b) for a, b in pairwise(borders) if a < b]


def _sections(nbytes: int, sections: Sequence[Span]) -> list[Span]:
    at = 0
    for start, stop in sections:
        if start != at or stop < start:
            raise ValueError(f"section ({start}, {stop}) does not begin where the one before it ended ({at})")
        at = stop
    if sections and at != nbytes:
        raise ValueError(f"the sections end at byte {at}, the buffer at {nbytes}")
    return [(a, b) for a, b in (sections or ((0, nbytes),)) if a < b]


# --- shapes ------------------------------------------------------------------------------------------------------


def _members(members: Sequence[str]) -> tuple[str, ...]:
    names = tuple(members)
    if not names:
        raise PlanError("a plan needs at least one member; got none")
    if len(set(names)) != len(names):
        raise PlanError(f"members are not distinct: {list(names)}")
    return names


def _arity(spec: PlanSpec) -> int:
    """Children per node for the balanced tree; also the check of the kind."""
    match = re.fullmatch(r"tree(?::(\d+))?", spec.kind)
    if match:
        arity = int(match.group(1) or 2)
        if arity < 2:
            raise PlanError(f"plan {spec.kind!r}: a tree has at least 2 children per member; use 'chain' for 1")
        return arity
    if spec.kind not in KINDS:
        raise PlanError(f"plan {spec.kind!r} is unknown; expected one of rotating, chain, tree, tree:K, user")
    return 2


def _shape(names: Sequence[str], root: str, parent: Mapping[str, str]) -> Shape:
    below: dict[str, list[str]] = {}
    for name in names:
        if name != root:
            below.setdefault(parent[name], []).append(name)
    return Shape(root, MappingProxyType(dict(parent)), MappingProxyType({k: tuple(v) for k, v in below.items()}))


@lru_cache(maxsize=256)
def _star(names: tuple[str, ...], root: str) -> Shape:
    return _shape(names, root, {name: root for name in names if name != root})


@lru_cache(maxsize=64)
def _chain(names: tuple[str, ...]) -> Shape:
    middle = len(names) // 2
    parent = {name: names[i + 1] if i < middle else names[i - 1] for i, name in enumerate(names) if i != middle}
    return _shape(names, names[middle], parent)


@lru_cache(maxsize=64)
def _balanced(names: tuple[str, ...], arity: int) -> Shape:
    return _shape(names, names[0], {names[i]: names[(i - 1) // arity] for i in range(1, len(names))})


def _seen_from(names: tuple[str, ...], shape: Shape, root: str) -> Shape:
    """The same edges with another root: only the parents on the way from it to the old root turn around."""
    parent = dict(shape.parent)
    child, above = root, parent.pop(root, None)
    while above is not None:
        following = parent.pop(above, None)
        parent[above] = child
        child, above = above, following
    return _shape(names, root, parent)


# --- the user's own trees ----------------------------------------------------------------------------------------


def _user_shapes(spec: PlanSpec, names: tuple[str, ...]) -> tuple[Shape, ...]:
    if not spec.trees:
        raise PlanError("plan 'user' has no trees; give at least one TreeSpec")
    return tuple(_user_shape(tree, f"tree {i}", names) for i, tree in enumerate(spec.trees))


@lru_cache(maxsize=256)
def _user_shape(tree: TreeSpec, label: str, names: tuple[str, ...]) -> Shape:
    if len(tree.members) != len(tree.parents):
        raise PlanError(
            f"{label} has {len(tree.members)} members but {len(tree.parents)} parents; expected one for each"
        )
    by_name: dict[str, str] = {}
    for identity in names:  # an incarnation is not known when a plan is written, so plain names do as well
        by_name.setdefault(identity.rsplit("~", 1)[0], identity)
    by_name |= {identity: identity for identity in names}

    def resolve(word: str) -> str:
        if word not in by_name:
            raise PlanError(f"{label} names {word!r}, which is no member; members are {list(names)}")
        return by_name[word]

    parent: dict[str, str] = {}
    roots: list[str] = []
    for member, above in zip(map(resolve, tree.members), tree.parents, strict=True):
        if member in parent or member in roots:
            raise PlanError(f"{label} names {member!r} twice")
        if above:
            parent[member] = resolve(above)
        else:
            roots.append(member)
    missing = [name for name in names if name not in parent and name not in roots]
    if missing:
        raise PlanError(f"{label} does not span {missing}; a tree has all members")
    if len(roots) != 1:
        raise PlanError(f"{label} has {len(roots)} roots {roots}; expected exactly one member with parent ''")
    safe = {roots[0]}
    for name in names:
        path: list[str] = []
        while name not in safe:
            if name in path:
                raise PlanError(f"{label} has a cycle: {' -> '.join([*path[path.index(name) :], name])}")
            path.append(name)
            name = parent[name]
        safe.update(path)
    return _shape(names, roots[0], parent)


def _expand_user(spec: PlanSpec, names: tuple[str, ...], nbytes: int, sections: list[Span]) -> tuple[Tree, ...]:
    shapes = _user_shapes(spec, names)
    whole = len(spec.trees) == 1 and spec.trees[0].start == spec.trees[0].stop == 0
    ranges = [(0, nbytes, 0)] if whole else sorted((t.start, t.stop, i) for i, t in enumerate(spec.trees))
    at = 0
    for start, stop, i in ranges:
        if stop <= start and not whole:
            raise PlanError(f"tree {i} has the empty range [{start}, {stop})")
        if start < at:
            raise PlanError(f"tree {i} begins at byte {start}, but the bytes before {at} are covered already")
        if start > at:
            raise PlanError(f"bytes [{at}, {start}) are covered by no tree; tree {i} begins only at {start}")
        if stop > nbytes:
            raise PlanError(f"tree {i} ends at byte {stop}, but the buffer has {nbytes}")
        if stop % ALIGNMENT and stop != nbytes:
            raise PlanError(
                f"tree {i} ends at byte {stop}; borders are multiples of {ALIGNMENT} so that no element is cut"
            )
        at = stop
    if at != nbytes:
        raise PlanError(f"bytes [{at}, {nbytes}) are covered by no tree")
    out: list[Tree] = []
    for low, high in sections:
        for start, stop, i in ranges:
            a, b = max(low, start), min(high, stop)
            if a < b:
                out.extend(Tree(*chunk, shapes[i]) for chunk in _split((a, b), spec.chunk_nbytes, 1))
    return tuple(out)
