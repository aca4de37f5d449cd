"""Packs a view compactly for messages and stores: names each member once, and refers to it by number elsewhere.

Theory of operation. A view's names form one table: "" is number 0, the members follow in rank order, then the few words
that are no member's id (a user's plan may go by names), in the order in which joiners, links and trees first use them.
Links are written as differences, since they are sorted. Members are written by columns: of each text only what differs
from the beginning of the text before it, of each number the difference. Names, addresses and ports of a fleet are much
alike, so a member takes about 30 bytes. Each view has exactly one packed form, and nothing else is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.limits import PLACE_NBYTES, nbytes
from chaos_lightning.protocol.types import MAX_MEMBERS, LinkSpec, Member, PlanSpec, TreeSpec, View, ViewId

_HALF, _WHOLE = 1 << 63, 1 << 64
_TEXTS, _NUMBERS = 5, 4


@dataclass(frozen=True, slots=True)
class PackedMembers:
    """Packed form of members, with all their names together, then all ids, and so on.

    Attributes:
        texts: All texts, each without the beginning that it shares with the text before it (an id: with the member's
            name), one column after another: names, ids, hosts, addresses, nodes.
        lengths: Number of characters of each shared beginning, then of each rest.
        differences: Ports, pids, starts of processes and quotas, each less the one before it.
    """

    texts: str
    lengths: tuple[int, ...]
    differences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedTree:
    """Packed form of a TreeSpec; a `whole` tree has all members in rank order, and leaves `members` empty."""

    start: int
    stop: int
    whole: bool
    members: tuple[int, ...]
    parents: tuple[int, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class PackedView:
    """Packed form of a View. `links` has the difference of each link's first end to that of the link before, then of
    each second end to its first.
    """

    id: ViewId
    predecessor: ViewId
    members: PackedMembers
    words: tuple[str, ...]
    joiners: tuple[int, ...]
    kind: str
    chunk_nbytes: int
    trees: tuple[PackedTree, ...]
    accumulate: int
    reason: str
    links: tuple[int, ...]
    chain: str
    pipelines: str
    leaving: PackedMembers | None
    """Members that the view lets go; None if there are none."""
    batch: str = ""


@dataclass(frozen=True, slots=True)
class PackedChange:
    """Packed form of the change from a view to the next one (protocol/changes.py).

    Attributes:
        before: Digest for the content of the view that it changes.
        gone: Ranks, in the view before, of members that are out.
        lost: Positions, in the view before, of links that are gone though both members stay.
        replans: Whether `view` has a plan of its own; else the plan before stays.
        view: The view, with new members and links alone.
        keeps_pipelines: Whether the text of the pipelines stays, and `view` has none.
    """

    before: str
    gone: tuple[int, ...]
    lost: tuple[int, ...]
    replans: bool
    view: PackedView
    keeps_pipelines: bool


class _Table(dict[str, int]):
    """Table of numbers by name; a new name gets the next number."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number

    def all(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(map(self.__getitem__, names))


def pack_view(view: View) -> PackedView:
    """Packs a view; equal views have equal packed forms.

    Raises:
        WireError: A member's text is too long, or two members have the same id.
        TypeError: A field has another type.
    """
    return pack_with(view, view.members)


def pack_with(view: View, members: Sequence[Member]) -> PackedView:
    """Packs a view as `pack_view` does, but with only these of its members, because the reader knows the others."""
    ids = view.ids()
    table = _Table({"": 0})
    joiners, links, trees = _numbered(view, table, ids)
    return PackedView(
        id=view.id,
        predecessor=view.predecessor,
        members=pack_members(members),
        words=tuple(table)[len(ids) + 1 :],
        joiners=joiners,
        kind=view.plan.kind,
        chunk_nbytes=view.plan.chunk_nbytes,
        trees=trees,
        accumulate=view.accumulate,
        reason=view.reason,
        links=links,
        chain=view.chain,
        pipelines=view.pipelines,
        leaving=pack_members(view.leaving) if view.leaving else None,
        batch=view.batch,
    )


def _numbered(
    view: View, table: _Table, ids: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[PackedTree, ...]]:
    if len({0, *table.all(ids)}) <= len(ids):
        raise WireError(f"view {view.id} has two members of one id, or one without an id")
    _check_leaving(ids, view.leaving)
    joiners = table.all(view.joiners)
    ends = [(table[link.a], table[link.b]) for link in view.links]
    links = (*_differences([a for a, _ in ends]), *(b - a for a, b in ends))
    trees = []
    for tree in view.plan.trees:
        whole = tree.members == ids
        members = () if whole else table.all(tree.members)
        trees.append(PackedTree(tree.start, tree.stop, whole, members, table.all(tree.parents), tree.weight))
    return joiners, links, tuple(trees)


def unpack_view(packed: PackedView) -> View:
    """Unpacks a view that `pack_view` packed.

    Raises:
        WireError: The given form is not that of a view.
    """
    return unpack_with(packed, unpack_members(packed.members))


def unpack_with(packed: PackedView, members: tuple[Member, ...]) -> View:
    """Unpacks a view that `pack_with` packed; `members` are all members of the view."""
    ids = tuple(m.id for m in members)
    names = ("", *ids, *packed.words)
    if len(frozenset(names)) < len(names):
        raise WireError("View names somebody twice")
    if len(packed.links) % 2:
        raise WireError("View with half a link")
    count = len(packed.links) // 2
    first = list(accumulate(packed.links[:count]))
    second = [a + b for a, b in zip(first, packed.links[count:], strict=True)]
    named = _namer(names)
    leaving = _unpack_leaving(packed.leaving, ids)
    view = View(
        id=packed.id,
        predecessor=packed.predecessor,
        members=members,
        joiners=named(packed.joiners),
        plan=PlanSpec(packed.kind, packed.chunk_nbytes, tuple(_tree(tree, ids, named) for tree in packed.trees)),
        accumulate=packed.accumulate,
        reason=packed.reason,
        links=tuple(map(LinkSpec, named(first), named(second))),
        chain=packed.chain,
        pipelines=packed.pipelines,
        leaving=leaving,
        batch=packed.batch,
    )
    _check_words(packed, first, second, len(ids))
    return view


def _unpack_leaving(packed: PackedMembers | None, ids: tuple[str, ...]) -> tuple[Member, ...]:
    leaving = unpack_members(packed) if packed is not None else ()
    if packed is not None and not leaving:
        raise WireError("View that lets nobody go, and says so")
    _check_leaving(ids, leaving)
    return leaving


def _check_leaving(ids: tuple[str, ...], leaving: Sequence[Member]) -> None:
    if len(frozenset(("", *ids, *(m.id for m in leaving)))) <= len(ids) + len(leaving):
        raise WireError("View that lets go one of its members, somebody twice, or somebody without an id")


def _tree(tree: PackedTree, ids: tuple[str, ...], named: Callable[[Sequence[int]], tuple[str, ...]]) -> TreeSpec:
    members = ids if tree.whole else named(tree.members)
    if (tree.whole and tree.members) or (not tree.whole and members == ids):
        raise WireError("View with a tree that lists all members")
    return TreeSpec(tree.start, tree.stop, members, named(tree.parents), tree.weight)


def _namer(names: Sequence[str]) -> Callable[[Sequence[int]], tuple[str, ...]]:
    def named(numbers: Sequence[int]) -> tuple[str, ...]:
        if numbers and not (min(numbers) >= 0 and max(numbers) < len(names)):
            raise WireError(f"View refers to name {min(numbers)} or {max(numbers)} of {len(names)}")
        return tuple(map(names.__getitem__, numbers))

    return named


def _check_words(packed: PackedView, first: Sequence[int], second: Sequence[int], members: int) -> None:
    """Raises WireError if a packed view lists names that it does not use, or in another order than that of first
    use.
    """
    if not packed.words:
        return
    used = [*packed.joiners, *(end for ends in zip(first, second, strict=True) for end in ends)]
    for tree in packed.trees:
        used += [*tree.members, *tree.parents]
    if list(dict.fromkeys(n for n in used if n > members)) != [*range(members + 1, members + 1 + len(packed.words))]:
        raise WireError("View whose words are not in the order of their use")


def pack_members(members: Sequence[Member]) -> PackedMembers:
    """Packs members, field by field; raises the errors of `pack_view`."""
    names = [m.name for m in members]
    columns = [[m.host for m in members], [m.address for m in members], [m.node for m in members]]
    pairs = [*_with_before(names), *zip([m.id for m in members], names, strict=True)]
    pairs += [pair for column in columns for pair in _with_before(column)]
    shared = [_shared(text, other) for text, other in pairs]
    parts = [text[n:] for (text, _), n in zip(pairs, shared, strict=True)]
    if pairs and max(nbytes(text) for text, _ in pairs) > PLACE_NBYTES:
        raise WireError(f"a member's name, host or address has more than {PLACE_NBYTES} bytes")
    numbers = [[m.port for m in members], [m.pid for m in members], [m.pid_start for m in members]]
    numbers.append([m.quota for m in members])
    differences = [d for column in numbers for d in _differences(column)]
    return PackedMembers("".join(parts), (*shared, *map(len, parts)), tuple(differences))


def unpack_members(packed: PackedMembers) -> tuple[Member, ...]:
    """Unpacks members that `pack_members` packed; raises WireError for anything else."""
    count, rest = divmod(len(packed.lengths), 2 * _TEXTS)
    if rest or count > MAX_MEMBERS or len(packed.differences) != _NUMBERS * count or min(packed.lengths, default=0) < 0:
        raise WireError(f"View whose members have no whole columns, or that has more than {MAX_MEMBERS}")
    total = _TEXTS * count
    shared, added = packed.lengths[:total], packed.lengths[total:]
    if sum(added) != len(packed.texts):
        raise WireError("View whose members' texts are cut off")
    parts = [packed.texts[a:b] for a, b in pairwise(accumulate(added, initial=0))]
    pairs = list(zip(shared, parts, strict=True))
    columns = [pairs[i * count : (i + 1) * count] for i in range(_TEXTS)]
    names, hosts, addresses, nodes = map(_texts, (columns[0], *columns[2:]))
    ids = [_joined(n, part, name) for (n, part), name in zip(columns[1], names, strict=True)]
    ports, pids, starts, quotas = (
        [_wrapped(n) for n in accumulate(packed.differences[i * count : (i + 1) * count])] for i in range(_NUMBERS)
    )
    return tuple(map(Member, ids, names, hosts, addresses, ports, pids, starts, quotas, nodes))


def _with_before(column: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(column, ["", *column], strict=False))


def _shared(text: str, other: str) -> int:
    """Returns the length of the longest common prefix of two texts."""
    if text.startswith(other):
        return len(other)
    for n, (a, b) in enumerate(zip(text, other, strict=False)):
        if a != b:
            return n
    return len(text)


def _texts(column: Sequence[tuple[int, str]]) -> list[str]:
    found, before = [], ""
    for n, part in column:
        before = _joined(n, part, before)
        found.append(before)
    return found


def _joined(shared: int, part: str, other: str) -> str:
    text = other[:shared] + part
    if shared > len(other) or nbytes(text) > PLACE_NBYTES or other[shared : shared + 1] == part[:1] != "":
        raise WireError(f"View with a text that shares {shared} characters with {other[:99]!r} and adds {part[:99]!r}")
    return text


def _differences(column: Sequence[int]) -> list[int]:
    if any(type(n) is not int for n in column):
        raise TypeError(f"expected integers, got {column[:9]!r}")
    return [_wrapped(b - a) for a, b in zip([0, *column], column, strict=False)]


def _wrapped(number: int) -> int:
    """Wraps a number around to a signed 64-bit integer."""
    return (number + _HALF) % _WHOLE - _HALF
