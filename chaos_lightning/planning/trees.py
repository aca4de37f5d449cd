"""Expands plans into trees, which say which member sends which bytes of the gradient buffer to which other member.

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
    trees: explicit trees with weights instead of ranges, as `planning/overlay.py` draws them from measured links
        without knowing the buffer. Each section is assigned to the trees by weight, in chunks that take turns, so that
        all trees have work from the first byte to the last; what is too little for a chunk of its own is made up
        for in a later section.

Explicit trees name members, and members come and go: `plan_for` decides whether they fit the present members and links
and falls back to `rotating`, or to one tree over the links that there are, with the reason.

Where members own parts of the buffer, each section has trees of its owners alone (`expand_owned`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import (
    Pair,
    breadth_first,
    connected_parts,
    neighbours,
    not_connected,
    pairs_in_words,
)
from chaos_lightning.protocol.types import SMALL_JOB, PlanSpec, Span, TreeSpec

ALIGNMENT = 64
"""Bytes of which chunk borders inside a section are multiples."""

SMALLEST_CHUNK = 16384
"""Bytes below which a section is not split further to give every member a root."""

_LARGE_NBYTES = 32 << 20
_SMALL_CHUNK, _MEDIUM_CHUNK, _LARGE_CHUNK = 1 << 16, 1 << 18, 1 << 20

KINDS = ("rotating", "chain", "tree", "user", "trees")

DRAWN = ("auto", "widest", "packed", "star", "fapt", "local", "spread")
"""Kinds that are never expanded: the scheduler has `planning/overlay.py` draw trees in their place. So it is with
MODULE:FUNCTION, and with the names of installed planners (entry points in the group PLANNERS_GROUP).
"""

PLANNERS_GROUP = "chaos_lightning.planners"

_NOBODY: tuple[str, ...] = ()
_EXPLICIT = ("user", "trees")
_KNOWN = f"rotating, chain, tree, tree:K, user, trees, a planner ({', '.join(DRAWN)}) or MODULE:FUNCTION"
_WEIGHT_STEPS = 1 << 24
_FEW = 16
"""Number of members, or of missing links, up to which links that are missing are named one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Parents and children in a tree, without its bytes; chunks that use the same tree share one."""

    root: str
    parent: Mapping[str, str]
    """Parent of every member but the root."""
    below: Mapping[str, tuple[str, ...]]
    """Children in rank order; members without any are absent."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Tree that reduces the bytes [start, stop) of the gradient buffer."""

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
        """Returns the parent of a member; None for the root."""
        return self.shape.parent.get(member)

    def children(self, member: str) -> tuple[str, ...]:
        return self.shape.below.get(member, _NOBODY)


def expand(spec: PlanSpec, members: Sequence[str], nbytes: int, sections: Sequence[Span]) -> tuple[Tree, ...]:
    """Returns all chunks of a gradient buffer in byte order, each with its tree.

    Args:
        spec: the plan.
        members: ids in rank order.
        nbytes: length of the buffer.
        sections: byte spans that tile [0, nbytes) in order; empty means one section.

    Raises:
        PlanError: the plan does not fit; the message names the tree and what is wrong with it.
        ValueError: the sections do not tile the buffer (a mistake of the caller, not of the plan).
    """
    return _expand(spec, _members(members), nbytes, _sections(nbytes, sections))


class OwnedSpans(NamedTuple):
    """Parts of the gradient buffer that the same members own, who reduce them among themselves."""

    owners: tuple[str, ...]
    sections: tuple[Span, ...]


def expand_owned(
    spec: PlanSpec, members: Sequence[str], nbytes: int, owned: Sequence[OwnedSpans], links: Collection[Pair] = ()
) -> tuple[Tree, ...]:
    """Returns all chunks of a gradient buffer in byte order, each with a tree over its owners.

    Sections of the same owners share one plan: `spec` where it fits these owners (see `plan_for`), else another one.

    Args:
        spec: The view's plan.
        members: Ids in rank order.
        nbytes: Length of the buffer.
        owned: Sections with their owners, in any order; all sections together tile [0, nbytes).
        links: Links between members, as in `misfit`.

    Raises:
        PlanError: Bytes have no owner, or links do not connect their owners; names them.
        ValueError: `expand` raises it.
    """
    rank = {name: i for i, name in enumerate(_members(members))}
    _sections(nbytes, sorted(span for one in owned for span in one.sections if span[0] < span[1]) or [(0, 0)])
    spans: dict[tuple[str, ...], list[Span]] = {}
    for owners, sections in owned:
        if strangers := [name for name in owners if name not in rank]:
            raise PlanError(f"bytes {sections[:1]} are owned by {strangers}, which are no members")
        if not owners and any(start < stop for start, stop in sections):
            raise PlanError(f"bytes {sections[0]} of the gradients have no owner among {len(rank)} members")
        spans.setdefault(tuple(sorted(owners, key=rank.__getitem__)), []).extend(sections)
    found: list[Tree] = []
    for names, its in spans.items():
        plan = spec if len(names) == len(rank) else plan_for(spec, names, among(names, links))[0]
        found += _expand(plan, names, nbytes, [s for s in sorted(its) if s[0] < s[1]])
    return tuple(sorted(found, key=lambda tree: tree.start))


def among(names: Sequence[str], links: Collection[Pair]) -> tuple[Pair, ...]:
    """Returns the links between these members; an empty result means that every pair has a link.

    Raises:
        PlanError: There are no links between the members, and an empty result would mean every pair.
    """
    here = frozenset(names)
    found = tuple(pair for pair in links if here.issuperset(pair))
    if links and not found and len(names) > 1:
        raise PlanError(f"no link leads between {', '.join(names)}, which own the same layers; expected one")
    return found


def _expand(spec: PlanSpec, names: tuple[str, ...], nbytes: int, borders: list[Span]) -> tuple[Tree, ...]:
    arity = _arity(spec)
    if spec.chunk_nbytes and spec.chunk_nbytes < ALIGNMENT:
        raise PlanError(f"plan {spec.kind!r}: chunk_nbytes is {spec.chunk_nbytes}; expected 0 or at least {ALIGNMENT}")
    spec = replace(spec, chunk_nbytes=chunk_of(spec, nbytes))
    if spec.kind == "user":
        return _expand_user(spec, names, nbytes, borders)
    if spec.kind == "trees":
        return _expand_weighted(spec, names, borders)
    if spec.kind == "rotating":
        shapes = [_star(names, root) for root in names]
        chunks = [chunk for section in borders for chunk in _split(section, spec.chunk_nbytes, len(names))]
        return tuple(Tree(start, stop, shapes[i % len(shapes)]) for i, (start, stop) in enumerate(chunks))
    shape = _chain(names) if spec.kind == "chain" else _balanced(names, arity)
    return tuple(Tree(*chunk, shape) for section in borders for chunk in _split(section, spec.chunk_nbytes, 1))


def chunk_for(nbytes: int) -> int:
    """Returns the bytes of a chunk: few enough for overlap, enough that the cost of handling a chunk is small
    (docs/LOG.md).
    """
    return 524288 if nbytes < _LARGE_NBYTES else 1 << 20


def chunk_of(spec: PlanSpec, nbytes: int, members: int = 0) -> int:
    """Returns the bytes of this plan's chunks for a buffer of `nbytes`.

    Trees drawn for slow links have chunks of a 256th of the buffer, 64 KiB to 1 MiB: on its way up and down a tree of
    height h a chunk is sent 2 h times one after the other, and the last one's way is hidden behind nothing. Beyond
    `SMALL_JOB` members each chunk costs more processors, so chunks below 256 KiB are a 64th of the buffer. Where no
    tree is drawn yet, `members` is the number of those that it is for.
    """
    if spec.chunk_nbytes:
        return spec.chunk_nbytes
    if spec.kind != "trees":
        return chunk_for(nbytes)
    part = 1 << max((nbytes >> 8).bit_length() - 1, 0)
    if (len(spec.trees[0].members) if spec.trees else members) > SMALL_JOB:
        part = max(part, min(4 * part, _MEDIUM_CHUNK))
    return min(max(_SMALL_CHUNK, part), _LARGE_CHUNK)


def shares(spec: PlanSpec, members: Sequence[str]) -> tuple[tuple[Shape, float], ...]:
    """Returns the trees of a plan, each with the fraction of a large buffer that it carries.

    Raises:
        PlanError: as `expand`.
    """
    names = _members(members)
    arity = _arity(spec)
    if spec.kind == "rotating":
        return tuple((_star(names, root), 1 / len(names)) for root in names)
    if spec.kind == "chain":
        return ((_chain(names), 1.0),)
    if spec.kind not in _EXPLICIT:
        return ((_balanced(names, arity), 1.0),)
    parts = _weights(spec) if spec.kind == "trees" else [max(tree.stop - tree.start, 0) for tree in spec.trees]
    whole = sum(parts)
    shapes = _explicit_shapes(spec, names)
    return tuple((shape, part / whole if whole else 1.0) for shape, part in zip(shapes, parts, strict=True))


def edges(spec: PlanSpec, members: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Returns the links that a plan needs, each as (earlier, later) in rank order."""
    rank = {name: i for i, name in enumerate(members)}
    found = {pair for shape in dict(shares(spec, members)) for pair in shape.parent.items()}
    return frozenset((a, b) if rank[a] < rank[b] else (b, a) for a, b in found)


def check_plan(spec: PlanSpec) -> None:
    """Refuses a plan that fits no set of members; explicit trees must fit the members that they name.

    Raises:
        PlanError: as `expand`; only ranges beyond a buffer's end cannot be seen here.
    """
    drawn = spec.kind in DRAWN or (":" in spec.kind and not spec.kind.startswith("tree:"))
    if drawn or (spec.kind not in KINDS and spec.kind in entry_points(group=PLANNERS_GROUP).names):
        return
    _arity(spec)
    named = spec.trees[0].members if spec.trees else ("",)
    expand(spec, named, max((tree.stop for tree in spec.trees), default=0), ())


def misfit(spec: PlanSpec, members: Sequence[str], links: Collection[Pair] = ()) -> str:
    """Returns why a plan cannot be used for these members and links; "" if it can.

    Args:
        spec: the plan.
        members: ids in rank order.
        links: pairs of ids, in any order; empty means every pair.
    """
    there = {frozenset(pair) for pair in links}
    try:
        if spec.kind == "rotating":  # all pairs of a thousand members are half a million
            names = set(_members(members))
            lacking = len(names) * (len(names) - 1) // 2 - sum(len(pair) == 2 and pair <= names for pair in there)
            if not links or not lacking:
                return ""
            if len(names) > _FEW:
                return f"plan 'rotating' needs a link between every pair, and {lacking} are not there"
        needed = edges(spec, members)
    except PlanError as error:
        return str(error)
    if not links:
        return ""
    missing = sorted(pair for pair in needed if frozenset(pair) not in there)
    more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW and len(members) > _FEW else ""
    named = pairs_in_words(missing[:_FEW] if more else missing) + more
    return f"plan {spec.kind!r} needs links that are not there: {named}" if missing else ""


def plan_for(spec: PlanSpec, members: Sequence[str], links: Collection[Pair] = ()) -> tuple[PlanSpec, str]:
    """Returns the plan to use for these members, and the reason in words.

    It is `spec` where that fits (see `misfit`), else rotating, or the tree of fewest hops where links are missing.

    Raises:
        PlanError: The links do not connect the members; names the parts.
    """
    names = _members(members)
    why = misfit(spec, names, links)
    if not why:
        return spec, f"{spec.kind} as configured"
    rotating = PlanSpec(chunk_nbytes=spec.chunk_nbytes)
    if not misfit(rotating, names, links):
        return rotating, f"rotating instead: {why}"
    return replace(fewest_hops(names, links), chunk_nbytes=spec.chunk_nbytes), f"the tree of fewest hops instead: {why}"


def fewest_hops(members: Sequence[str], links: Collection[Pair]) -> PlanSpec:
    """Returns a plan of one tree with the fewest hops, for links of unknown speed.

    Raises:
        PlanError: The links do not connect the members; names the parts.
    """
    names = _members(members)
    near = neighbours(names, links)
    parts = connected_parts(names, near)
    if len(parts) > 1:
        raise PlanError(not_connected(parts))
    trees = [breadth_first(root, near, "") for root in names]
    heights = [len({depth for _, depth in tree.values()}) for tree in trees]
    best = min(range(len(names)), key=lambda i: (heights[i], i))
    parents = tuple(trees[best][name][0] for name in names)
    return PlanSpec("trees", trees=(TreeSpec(0, 0, names, parents, weight=1.0),))


# --- chunks ------------------------------------------------------------------------------------------------------


def _split(section: Span, chunk_nbytes: int, at_least: int) -> list[Span]:
    """Divides a part of the buffer into chunks of nearly equal size, at most `chunk_nbytes`, and at least `at_least`
    chunks unless they would get too small.
    """
    start, stop = section
    low = start // ALIGNMENT  # borders lie on multiples of ALIGNMENT in the buffer, whatever the section begins at
    cells = -(-stop // ALIGNMENT) - low
    number = max(-(-cells // (chunk_nbytes // ALIGNMENT)), min(at_least, (stop - start) // SMALLEST_CHUNK))
    if number > at_least > SMALL_JOB:
        number = -(-number // at_least) * at_least  # each member is the root of equally many
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
    """Returns the number of children per node in the balanced tree of a plan; refuses unknown kinds of plans."""
    match = re.fullmatch(r"tree(?::(\d+))?", spec.kind)
    if match:
        arity = int(match.group(1) or 2)
        if arity < 2:
            raise PlanError(f"plan {spec.kind!r}: a tree has at least 2 children per member; use 'chain' for 1")
        return arity
    if spec.kind in DRAWN:
        raise PlanError(f"plan {spec.kind!r} has no trees before the scheduler has drawn them from measured links")
    if spec.kind not in KINDS:
        raise PlanError(f"plan {spec.kind!r} is unknown; expected one of {_KNOWN}")
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


# --- explicit trees ----------------------------------------------------------------------------------------------


def _explicit_shapes(spec: PlanSpec, names: tuple[str, ...]) -> tuple[Shape, ...]:
    if not spec.trees:
        raise PlanError(f"plan {spec.kind!r} has no trees; give at least one TreeSpec")
    return tuple(_explicit_shape(tree, f"tree {i}", names) for i, tree in enumerate(spec.trees))


@lru_cache(maxsize=256)
def _explicit_shape(tree: TreeSpec, label: str, names: tuple[str, ...]) -> Shape:
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
        path: dict[str, None] = {}
        while name not in safe:
            if name in path:
                way = list(path)
                raise PlanError(f"{label} has a cycle: {' -> '.join([*way[way.index(name) :], name])}")
            path[name] = None
            name = parent[name]
        safe.update(path)
    return _shape(names, roots[0], parent)


def _expand_user(spec: PlanSpec, names: tuple[str, ...], nbytes: int, sections: list[Span]) -> tuple[Tree, ...]:
    shapes = _explicit_shapes(spec, names)
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


def _weights(spec: PlanSpec) -> list[int]:
    """Returns the trees' weights as integers, so that every machine computes the same chunks."""
    for i, tree in enumerate(spec.trees):
        if tree.start or tree.stop:
            raise PlanError(
                f"tree {i} of plan 'trees' has the range [{tree.start}, {tree.stop}); expected a weight only"
            )
        if not 0 < tree.weight < math.inf:
            raise PlanError(f"tree {i} of plan 'trees' has weight {tree.weight}; expected a number above 0")
    heaviest = max((tree.weight for tree in spec.trees), default=1.0)
    return [max(round(tree.weight / heaviest * _WEIGHT_STEPS), 1) for tree in spec.trees]


def _expand_weighted(spec: PlanSpec, names: tuple[str, ...], sections: list[Span]) -> tuple[Tree, ...]:
    shapes = _explicit_shapes(spec, names)
    weights = _weights(spec)
    whole = sum(weights)
    owed = [0] * len(weights)  # cells times `whole` that a tree should have had by now, less what it got
    out: list[Tree] = []
    for start, stop in sections:
        low = start // ALIGNMENT
        cells = -(-stop // ALIGNMENT) - low
        owed = [due + weight * cells for due, weight in zip(owed, weights, strict=True)]
        given = _apportioned(owed, cells, SMALLEST_CHUNK // ALIGNMENT * whole)
        owed = [due - got * whole for due, got in zip(owed, given, strict=True)]
        at = 0
        for i, count in _take_turns(given, spec.chunk_nbytes // ALIGNMENT):
            begin = start if at == 0 else (low + at) * ALIGNMENT
            at += count
            out.append(Tree(begin, min((low + at) * ALIGNMENT, stop), shapes[i]))
    return tuple(out)


def _apportioned(owed: Sequence[int], cells: int, least: int) -> list[int]:
    """Returns the number of cells (aligned units) that each tree gets of a part of the buffer, in proportion to its
    share `owed`; none below `least`.
    """
    top = max(owed)
    due = [o if o >= least or o == top else 0 for o in owed]
    if top < least:  # too little for several
        first = owed.index(top)
        due = [int(i == first) for i in range(len(owed))]
    whole, sofar, before, given = sum(due), 0, 0, []
    for part in due:
        sofar += part
        border = cells * sofar // whole
        given.append(border - before)
        before = border
    return given


def _take_turns(given: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Returns (tree, number of cells) for each chunk in order, with chunks of the trees interleaved in proportion."""
    turns: list[tuple[int, int, int]] = []
    for i, cells in enumerate(given):
        number = -(-cells // most)
        turns += [
            (((2 * j + 1) << 32) // (2 * number), i, cells * (j + 1) // number - cells * j // number)
            for j in range(number)
        ]
    return [(i, count) for _, i, count in sorted(turns)]
