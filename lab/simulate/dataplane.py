"""Simulates the data plane symbolically: it adds up sets of contribution ids where collectives/reducer.py adds up
bytes.

Theory of operation. The result of a slot has a few *ranges*; each has a tree of the view's plan (planning/trees.py),
in the rotating plan another one in each slot. A member adds its contribution for a range, as it becomes ready, to what
its children sent, and sends that to its parent; the root, holding one of every member, has the result (the set of all
contribution ids), which comes down the same edges. What is sent where no link stands is lost, so a slot completes only
over links that stand. Results lie in two buffers that alternate by slot number, so that reuse, hand-on and late bytes
behave as with real memory. Ranges of one slot therefore complete at different times at different members, and which
contributions are in which sum is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chaos_lightning.membership.recovery import with_scope
from chaos_lightning.planning.trees import Shape, shares
from chaos_lightning.protocol.types import NO_VIEW, Header, Span, View, ViewId

Result = frozenset[int]
RANGE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Up:
    view: ViewId
    seq: int
    index: int
    parts: tuple[tuple[str, int], ...]
    """Pairs of (member, contribution id; 0: no gradient, weight 0), of the sender and all below it."""


@dataclass(frozen=True, slots=True)
class Down:
    view: ViewId
    seq: int
    index: int
    result: Result


@dataclass(slots=True)
class Buffer:
    """Buffer for the result of one slot, by range; each member has two, used in turn."""

    seq: int = -1
    view: ViewId = NO_VIEW
    head: str = ""
    """Hash of the header that committed the slot in it; "" before."""
    done: dict[int, Result] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SumEntry:
    """Log entry of one slot for learners: its header, and its reduced ranges in `results` (None: it has none)."""

    header: Header
    results: tuple[Result, ...] | None


@dataclass(slots=True)
class Attempt:
    view: View
    seq: int
    inputs: dict[int, dict[str, int]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    climbed: set[int] = field(default_factory=set)
    """Ranges whose sum went to the parent."""
    finished: bool = False


def _complete_below(shape: Shape, me: str, inputs: dict[str, int]) -> bool:
    """Returns whether this member and all members below it in the tree have contributed."""
    border = [me]
    while border:
        member = border.pop()
        if member not in inputs:
            return False
        border += shape.below.get(member, ())
    return True


class DataPlane:
    """Symbolic data plane of one member.

    Args:
        ranges: Number of ranges of a result.
        send: Function that sends Up or Down to a member.
        done: Function that is called with (view, seq) when all ranges are here.
    """

    BUFFERS = 2

    def __init__(
        self, ranges: int, send: Callable[[str, Up | Down], None], done: Callable[[ViewId, int], None]
    ) -> None:
        self.ranges = ranges
        self.me = ""
        self.attempt: Attempt | None = None
        self.buffers = [Buffer() for _ in range(self.BUFFERS)]
        self.dropped = NO_VIEW
        self.own: tuple[int, int, set[int]] | None = None
        """The member's own contribution: its slot, its id, and the ranges of it that are final."""
        self.own_view: ViewId | None = None
        """View in whose attempt alone that counts; None: in any at its slot."""
        self._send = send
        self._done = done
        self._early: dict[object, list[Up | Down]] = {}
        self._shapes: tuple[ViewId, tuple[Shape, ...]] = (NO_VIEW, ())

    def buffer(self, seq: int) -> Buffer:
        return self.buffers[seq % self.BUFFERS]

    def key(self, view: ViewId, seq: int) -> object:
        """Returns the key that identifies an attempt: messages with another key belong to another attempt (protocol.md
        1).
        """
        return (view, seq)

    def shape(self, view: View, seq: int, index: int) -> Shape:
        """Returns the reduction tree for a range."""
        if self._shapes[0] != view.id:
            self._shapes = (view.id, tuple(shape for shape, _ in shares(view.plan, view.ids())))
        shapes = self._shapes[1]
        return shapes[(seq + index if view.plan.kind == "rotating" else index) % len(shapes)]

    def open(self, view: View, seq: int) -> None:
        """Starts an attempt at slot `seq`; its result overwrites that of slot seq - 2."""
        self.attempt = Attempt(view, seq)
        buffer = self.buffer(seq)
        buffer.seq, buffer.view, buffer.head = seq, view.id, ""
        buffer.done = {}
        early = self._early.pop(self.key(view.id, seq), [])
        self._early = {k: v for k, v in self._early.items() if any(m.view >= view.id and m.seq >= seq for m in v)}
        for message in early:
            self.take(message)
        self._contribute()

    def drop(self, view: ViewId) -> None:
        """Drops all attempts of this view and older ones: none of them completes any more."""
        self.dropped = max(self.dropped, view)
        if self.attempt is not None and self.attempt.view.id <= view:
            self.attempt.finished = True

    def begin(self, seq: int, uid: int, view: ViewId | None = None) -> None:
        """Registers the member's own contribution to a STEP; `ready` reports later which of its ranges are final.

        Args:
            seq: The slot.
            uid: Id of the contribution; 0: the member has no gradient.
            view: View in whose attempt alone it counts (B3); None: it counts in any.
        """
        self.own, self.own_view = (seq, uid, set()), view

    def ready(self, seq: int, index: int) -> None:
        if self.own is not None and self.own[0] == seq:
            self.own[2].add(index)
            self._contribute()

    def _contribute(self) -> None:
        attempt = self.attempt
        if attempt is None or attempt.finished or self.own is None or self.own[0] != attempt.seq:
            return
        if self.own_view not in (None, attempt.view.id):
            return
        _, uid, ready = self.own
        for index in sorted(ready - attempt.sent):
            attempt.sent.add(index)
            self.take(Up(attempt.view.id, attempt.seq, index, ((self.me, uid),)))

    def take(self, message: Up | Down) -> None:
        """Handles the data of another member, or this member's own at the root of a range."""
        attempt = self.attempt
        if message.view <= self.dropped:
            return
        if attempt is None or self.key(message.view, message.seq) != self.key(attempt.view.id, attempt.seq):
            if attempt is None or (message.view >= attempt.view.id and message.seq >= attempt.seq):
                self._early.setdefault(self.key(message.view, message.seq), []).append(message)
            return
        if attempt.finished:
            return
        if isinstance(message, Down):
            self._complete(attempt, message.index, message.result)
            return
        inputs = attempt.inputs.setdefault(message.index, {})
        for member, uid in message.parts:
            inputs.setdefault(member, uid)
        self._climb(attempt, message.index, inputs)

    def _climb(self, attempt: Attempt, index: int, inputs: dict[str, int]) -> None:
        """Sends a sum to the next member up the tree once it is complete; at the root, stores it as the result."""
        if index in attempt.climbed:
            return
        shape = self.shape(attempt.view, attempt.seq, index)
        if not _complete_below(shape, self.me, inputs):
            return
        attempt.climbed.add(index)
        if shape.root == self.me:
            self._complete(attempt, index, frozenset(uid for uid in inputs.values() if uid))
        else:
            self._send(shape.parent[self.me], Up(attempt.view.id, attempt.seq, index, tuple(sorted(inputs.items()))))

    def _complete(self, attempt: Attempt, index: int, result: Result) -> None:
        buffer = self.buffer(attempt.seq)
        if index in buffer.done:
            return
        for member in self.shape(attempt.view, attempt.seq, index).below.get(self.me, ()):
            self._send(member, Down(attempt.view.id, attempt.seq, index, result))
        buffer.done[index] = result
        if len(buffer.done) == self.ranges and not attempt.finished:
            attempt.finished = True
            self._done(attempt.view.id, attempt.seq)

    # ------------------------------------------------------------------ hand-on

    def held(self, seq: int) -> tuple[Span, ...]:
        """Returns the byte spans of the ranges that are reduced here, for a report on the open slot `seq`."""
        buffer = self.buffer(seq)
        if buffer.seq != seq or self.own is None or self.own[0] != seq:
            return ()
        spans = [(i * RANGE_NBYTES, (i + 1) * RANGE_NBYTES) for i in sorted(buffer.done)]
        return with_scope(spans, [(0, self.ranges * RANGE_NBYTES)])

    def serve(self, seq: int, head: str, view: ViewId) -> dict[int, Result]:
        """Returns the reduced ranges of exactly this slot and attempt, for members to which a recovery hands the slot
        on.
        """
        buffer = self.buffer(seq)
        if buffer.seq != seq or (buffer.head and buffer.head != head) or (not buffer.head and buffer.view != view):
            return {}
        return dict(buffer.done)

    def adopt(self, seq: int, view: ViewId, ranges: dict[int, Result]) -> bool:
        """Stores reduced ranges of a slot that a recovery hands on; returns True once all are here."""
        buffer = self.buffer(seq)
        if buffer.seq != seq or buffer.view != view:
            buffer.seq, buffer.view, buffer.head, buffer.done = seq, view, "", {}
        buffer.done.update(ranges)
        return len(buffer.done) == self.ranges
