"""Simulates the reduction by parts of the model: each layer among its owners, over a tree whose root changes with the
slot.

Theory of operation. An owner gives its raw sum of a layer once its last unit of that layer is over. Sums are merged on
their way to the root, which is an owner, too, and sends the result back. The tree has the fewest hops that the links of
the view allow; where each pair has one, it is a star. Members hold one result. It stays until the next
attempt opens, since a header is handed on without bytes (P4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.membership.topology import links_of
from chaos_lightning.planning.graph import breadth_first, neighbours
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId
from lab.simulate.staged_training import RawSum


@dataclass(frozen=True, slots=True)
class SumUp:
    """Message to the next owner up the tree: the raw sum of its sender and of the owners below it."""

    view: ViewId
    seq: int
    part: int
    owner: str
    raw: RawSum


@dataclass(frozen=True, slots=True)
class SumDown:
    """Message down the tree from the root: the result for a part."""

    view: ViewId
    seq: int
    part: int
    result: RawSum


@dataclass(slots=True)
class _Open:
    view: View
    seq: int
    division: Division
    raw: dict[int, dict[str, RawSum]] = field(default_factory=dict)
    results: dict[int, RawSum] = field(default_factory=dict)
    trees: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Trees by part: the owner to which each owner sends its sums; the root names itself."""
    dropped: bool = False
    told: bool = False


class PartPlane:
    """One member's data plane for the reduction by parts.

    Args:
        send: Function that sends to a member.
        done: Function that is called with (view, seq) when all that this member owns is reduced here.
    """

    def __init__(self, send: Callable[[str, SumUp | SumDown], None], done: Callable[[ViewId, int], None]) -> None:
        self.me = ""
        self._send = send
        self._done = done
        self._open: _Open | None = None
        self._dropped = NO_VIEW
        self._early: dict[tuple[ViewId, int], list[SumUp | SumDown]] = {}

    def open(self, view: View, seq: int) -> None:
        """Starts an attempt, and drops all data of the previous one."""
        self._open = _Open(view, seq, division(view))
        for message in self._early.pop((view.id, seq), []):
            self.take(message)
        self._early = {k: v for k, v in self._early.items() if k > (view.id, seq)}

    def drop(self, view: ViewId) -> None:
        """Drops all attempts of this view and older ones: none of them completes any more."""
        self._dropped = max(self._dropped, view)
        if self._open is not None and self._open.view.id <= view:
            self._open.dropped = True

    def _layers(self, opened: _Open, member: str) -> tuple[int, ...]:
        """Returns the parts that this member reduces: all that it owns, except the one that all members own."""
        return tuple(p for p in numbers(opened.division.owned(member)) if p < len(opened.division.names) - 1)

    def owners(self, parts: Division, part: int) -> tuple[str, ...]:
        """Returns the members whose sums of a part are added up."""
        return parts.owners[part]

    def give(self, part: int, raw: RawSum) -> None:
        """Starts to reduce this member's raw sum of a layer, which is final."""
        opened = self._open
        if opened is None or opened.dropped:
            return
        self.take(SumUp(opened.view.id, opened.seq, part, self.me, raw))

    def _tree(self, opened: _Open, part: int) -> Mapping[str, str]:
        if part not in opened.trees:
            owners = self.owners(opened.division, part)
            root = owners[(opened.seq + part) % len(owners)]
            near = neighbours(owners, [(a, b) for a, b in links_of(opened.view)])
            found = breadth_first(root, near, root)
            opened.trees[part] = {m: found[m][0] for m in owners}
        return opened.trees[part]

    def take(self, message: SumUp | SumDown) -> None:
        """Handles a sum or a result from another member, or this member's own sum."""
        opened = self._open
        if message.view <= self._dropped:
            return
        if opened is None or (message.view, message.seq) != (opened.view.id, opened.seq):
            if opened is None or (message.view, message.seq) > (opened.view.id, opened.seq):
                self._early.setdefault((message.view, message.seq), []).append(message)
            return
        tree = self._tree(opened, message.part)
        below = [m for m, to in tree.items() if to == self.me != m]
        if isinstance(message, SumUp):
            raw = opened.raw.setdefault(message.part, {})
            raw[message.owner] = message.raw
            if len(raw) <= len(below):
                return
            merged = tuple(sorted(g for row in raw.values() for g in row))
            if tree[self.me] != self.me:
                self._send(tree[self.me], replace(message, owner=self.me, raw=merged))
                return
            message = SumDown(message.view, message.seq, message.part, merged)
        opened.results[message.part] = message.result
        for member in below:
            self._send(member, message)
        self.look()

    def look(self) -> None:
        """Reports, once, that all parts of this member are reduced."""
        opened = self._open
        if opened is None or opened.told or opened.dropped:
            return
        if all(part in opened.results for part in self._layers(opened, self.me)):
            opened.told = True
            self._done(opened.view.id, opened.seq)

    def results(self, view: ViewId, seq: int) -> Mapping[int, RawSum]:
        """Returns the results of exactly this attempt; empty for any other."""
        opened = self._open
        return opened.results if opened is not None and (opened.view.id, opened.seq) == (view, seq) else {}
