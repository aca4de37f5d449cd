"""Reduces gradients along trees: chunks go up the trees, are summed on the way, and come back down as results.

Theory of operation. An *attempt* is one (view, slot): bytes of different attempts never meet (protocol.md 1). For each
chunk a member waits until its own gradient and every child's partial sum are there, adds them in a fixed order (its own
first, then children as the tree lists them: the sum does not depend on arrival), and passes the partial sum up; at the
root it is complete, is marked and sent down. Leaves send straight from gradient memory; what comes down is received
straight into result memory. Partial sums of members on this machine are read out of their memory when they are added
(transport/reference.py). Chunks that arrive before this member has opened their attempt are kept for it; chunks of
an older view are diverted. All methods run in the loop's thread.

Where a view has pipelines, each part of the layout has trees of its owners alone, so a member reduces the parts that it
owns, each as soon as its own gradient of it is ready; one with a single owner is done at once. Nothing of an attempt is
kept for the next one then: the step runs again, and its gradients are ready anew (`begin` and `ready` name the view).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chaos_lightning.collectives.memory import Adder, Memory
from chaos_lightning.errors import WireError
from chaos_lightning.planning.trees import OwnedSpans, Tree, expand, expand_owned
from chaos_lightning.protocol.types import NO_VIEW, Span, View, ViewId
from chaos_lightning.transport.frames import Frame, FrameType
from chaos_lightning.transport.reference import PartialSum, UnreadableError

BLOCK_NBYTES = 262144
"""Size of the blocks in which bytes read by reference are added: they stay in the processor's cache."""

Partial = memoryview | PartialSum
Owners = Callable[[View], "Sequence[OwnedSpans] | None"]
"""Function that returns who owns which bytes of the layout in a view; None: all members own all of them."""
SendChunk = Callable[[str, FrameType, ViewId, int, int, Sequence[memoryview]], None]
"""Function that sends a chunk: (peer, type, view, slot, start, pieces of the payload; none means zeros)."""


@dataclass(slots=True)
class _Chunk:
    """Chunk with this member's parent and children in its tree, constant within a view."""

    index: int
    start: int
    stop: int
    parent: str
    children: tuple[str, ...]
    add: Adder
    cells: tuple[int, ...]
    """Grid cells that the chunk lies in, by start offset."""


@dataclass(slots=True)
class _Route:
    """Plan of a view from this member's position: its chunks, and where they begin."""

    view: View
    chunks: list[_Chunk]
    by_start: dict[int, int]
    by_cell: dict[int, list[int]]


@dataclass(slots=True)
class _Attempt:
    route: _Route
    seq: int
    inputs: list[dict[str, Partial | None]]
    done: bytearray
    sent: bytearray
    wanted: set[int] | None = None
    """Chunks of the step's scope; known once the training thread began the step."""
    finished: bool = False


@dataclass(slots=True)
class _Own:
    """This member's own gradient for the open slot; kept over attempts."""

    seq: int = -1
    scope: tuple[Span, ...] = ()
    ready: set[int] = field(default_factory=set)
    """Start offsets of grid cells whose gradient is final."""
    empty: bool = False
    view: ViewId | None = None
    """View for whose attempt the gradient is; None: for any."""


def _copy(pieces: Sequence[memoryview], target: memoryview) -> None:
    at = 0
    for piece in pieces:
        target[at : at + piece.nbytes] = piece
        at += piece.nbytes


def _between(pieces: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Returns views of bytes [start, stop) of consecutive pieces of memory."""
    if len(pieces) == 1:
        return [pieces[0][start:stop]]
    found, at = [], 0
    for piece in pieces:
        low, high = max(start, at), min(stop, at + piece.nbytes)
        if low < high:
            found.append(piece[low - at : high - at])
        at += piece.nbytes
    return found


def _overlaps(spans: Iterable[Span], start: int, stop: int) -> bool:
    return any(a < stop and start < b for a, b in spans)


class Reducer:
    """Reducer of one member's chunks, up and down their trees.

    Args:
        memory: The flat buffers, and cells.
        send: Queues a chunk for a peer.
        on_done: Function that is told once when every chunk of an attempt is complete here.
        owners: Function that returns which members own which bytes; asked once for each view.
    """

    def __init__(
        self,
        memory: Memory,
        send: SendChunk,
        on_done: Callable[[ViewId, int], None],
        owners: Owners = lambda view: None,
    ) -> None:
        self.memory = memory
        self._owners = owners
        self._grid = memory.grid
        self._grid_starts = [start for start, _ in memory.grid]
        self._send = send
        self._on_done = on_done
        self.restart("")
        self._pool: dict[int, list[memoryview]] = {}
        self._block = memoryview(bytearray(BLOCK_NBYTES))

    def restart(self, me: str) -> None:
        """Forgets all attempts; this member's id is `me` from now on ("": none yet)."""
        self.me = me
        self._attempt: _Attempt | None = None
        self._own = _Own()
        self._routes: dict[ViewId, _Route] = {}
        self._early: dict[tuple[ViewId, int], list[tuple[str, int, Partial | None]]] = {}
        self._early_nbytes = 0
        self._dropped = NO_VIEW

    # ------------------------------------------------------------------ attempts

    def open(self, view: View, seq: int) -> None:
        """Begins an attempt at slot `seq` in this view; replaces any older attempt."""
        route = self._route(view)
        count = len(route.chunks)
        attempt = _Attempt(
            route,
            seq,
            [{} for _ in range(count)],
            bytearray(count),
            bytearray(count),
        )
        self._recycle()
        self._attempt = attempt
        stashed = self._early.pop((view.id, seq), [])
        for key in [k for k in self._early if k[0] < view.id or k[1] < seq]:
            del self._early[key]
        self._early_nbytes = sum(
            p.nbytes for held in self._early.values() for _, _, p in held if isinstance(p, memoryview)
        )
        for peer, start, payload in stashed:
            self._input(attempt, peer, start, payload)
        if self._own.seq == seq and self._own.view in (None, view.id):
            self._restart(attempt)

    def foresee(self, view: View) -> None:
        """Expands the trees of a view that is decided but not in force yet, to save time later."""
        if view.find(self.me) is not None:
            self._route(view)

    def drop(self, view: ViewId) -> None:
        """Ends the attempts of this and older views."""
        self._dropped = max(self._dropped, view)
        if self._attempt is not None and self._attempt.route.view.id <= view:
            self._attempt.finished = True

    def held(self, of: tuple[ViewId, int] | None = None) -> tuple[Span, ...] | None:
        """Returns the byte ranges that are completely reduced here, in the open attempt or in the attempt `of` (view,
        slot).

        Returns:
            None if there is no such attempt, or nobody has begun a step in it yet. What lies outside the step's scope
            counts as complete: nobody has to fetch it (see membership/recovery.py).
        """
        attempt = self._attempt
        if attempt is None or attempt.wanted is None or of not in (None, (attempt.route.view.id, attempt.seq)):
            return None
        spans: list[Span] = []
        for chunk in attempt.route.chunks:
            if attempt.done[chunk.index] or not _overlaps(self._own.scope, chunk.start, chunk.stop):
                if spans and spans[-1][1] == chunk.start:
                    spans[-1] = (spans[-1][0], chunk.stop)
                else:
                    spans.append((chunk.start, chunk.stop))
        return tuple(spans)

    def scope_spans(self) -> tuple[Span, ...]:
        """Returns the byte ranges that the open step reduces."""
        return self._own.scope

    # ------------------------------------------------------------------ the member's own gradient

    def begin(self, seq: int, scope: tuple[Span, ...], *, empty: bool = False, view: ViewId | None = None) -> None:
        """Begins to reduce slot `seq`, which the training thread has begun as a step.

        Args:
            seq: The slot.
            scope: Byte ranges that the step reduces.
            empty: Whether this member has no gradient (weight 0).
            view: View for whose attempt alone the gradient is; None: for any attempt at the slot.
        """
        self._own = _Own(seq, scope, set(), empty, view)
        attempt = self._attempt
        if attempt is not None and attempt.seq == seq and not attempt.finished and self._fits(attempt):
            self._restart(attempt)

    def _fits(self, attempt: _Attempt) -> bool:
        return self._own.view in (None, attempt.route.view.id)

    def ready(self, seq: int, cells: Iterable[int], view: ViewId | None = None) -> None:
        """Notes that this member's own gradient is final in these cells of the layout, and sums chunks that are
        complete by that; `view` as in `begin`.
        """
        if (self._own.seq, self._own.view) != (seq, view):
            return
        cells = tuple(cells)
        self._own.ready.update(cells)
        attempt = self._attempt
        if attempt is None or attempt.seq != seq or attempt.finished or not self._fits(attempt):
            return
        for cell in cells:
            for index in attempt.route.by_cell[cell]:
                self._advance(attempt, attempt.route.chunks[index])

    def _restart(self, attempt: _Attempt) -> None:
        attempt.wanted = {c.index for c in attempt.route.chunks if _overlaps(self._own.scope, c.start, c.stop)}
        self._advance_all(attempt)
        self._check_done(attempt)

    def _advance_all(self, attempt: _Attempt) -> None:
        for chunk in attempt.route.chunks:
            self._advance(attempt, chunk)

    # ------------------------------------------------------------------ the trees

    def _advance(self, attempt: _Attempt, chunk: _Chunk) -> None:
        index = chunk.index
        if attempt.finished or attempt.sent[index] or attempt.wanted is None or index not in attempt.wanted:
            return
        inputs = attempt.inputs[index]
        if len(inputs) < len(chunk.children) or not self._own_ready(chunk):
            return
        attempt.sent[index] = 1
        result = self._result(attempt, chunk)
        own = [] if self._own.empty else self.memory.pieces(chunk.start, chunk.stop)
        partials = [p for child in chunk.children if (p := inputs[child]) is not None]
        try:
            total = self._sum(chunk, own, partials, result)
        except UnreadableError:
            return  # its sender is dead, or this member is out: this attempt comes to nothing
        # At once: a chunk that completes may open the next attempt, which gives back what it finds.
        for child in chunk.children:
            self._give_back(inputs[child])
            inputs[child] = None
        if chunk.parent:
            self._send(chunk.parent, FrameType.UP, attempt.route.view.id, attempt.seq, chunk.start, total)
            return
        if not total:
            result[:] = bytes(result.nbytes)
        elif total[0] is not result:
            _copy(total, result)
        self._complete(attempt, chunk)

    def _sum(
        self, chunk: _Chunk, own: list[memoryview], partials: list[Partial], result: memoryview
    ) -> list[memoryview]:
        """Sums the own gradient and the children's partial sums, in this order; returns the sum, without a copy if
        there is nothing to add.
        """
        if not partials:
            return own
        for start in range(0, result.nbytes, BLOCK_NBYTES):
            stop = min(start + BLOCK_NBYTES, result.nbytes)
            self._sum_block(chunk.add, own, partials, result, start, stop)
        return [result]

    def _sum_block(
        self, add: Adder, own: list[memoryview], partials: list[Partial], result: memoryview, start: int, stop: int
    ) -> None:
        into = result[start:stop]
        summands: list[memoryview] = _between(own, start, stop) if own else []
        for partial in partials:
            if not summands and isinstance(partial, PartialSum):
                partial.read(start, stop, into)
                summands = [into]
                continue
            if isinstance(partial, PartialSum):
                block = self._block[: stop - start]
                partial.read(start, stop, block)
            else:
                block = partial[start:stop]
            if not summands:
                into[:] = block
                summands = [into]
                continue
            at = 0
            for piece in summands:
                end = at + piece.nbytes
                add(piece, block[at:end], into[at:end])
                at = end
            summands = [into]

    def _result(self, attempt: _Attempt, chunk: _Chunk) -> memoryview:
        """Returns the memory for a chunk's sum. To be called once the own gradient is ready, since memory may be
        allocated anew before that.
        """
        at = self.memory.place(chunk.start)
        return self.memory.result_bytes[attempt.seq % 2][at : at + chunk.stop - chunk.start]

    def _own_ready(self, chunk: _Chunk) -> bool:
        return self._own.empty or self._own.ready.issuperset(chunk.cells)

    def _complete(self, attempt: _Attempt, chunk: _Chunk) -> None:
        attempt.done[chunk.index] = 1
        result = self._result(attempt, chunk)
        for child in chunk.children:
            self._send(child, FrameType.DOWN, attempt.route.view.id, attempt.seq, chunk.start, [result])
        if attempt.wanted is not None:
            attempt.wanted.discard(chunk.index)
            self._check_done(attempt)

    def _check_done(self, attempt: _Attempt) -> None:
        if not attempt.finished and attempt.wanted is not None and not attempt.wanted:
            attempt.finished = True
            self._on_done(attempt.route.view.id, attempt.seq)

    # ------------------------------------------------------------------ frames

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        """Returns memory for a received chunk's payload; None discards it."""
        if frame.view <= self._dropped:
            return None
        attempt = self._attempt
        current = attempt is not None and frame.view == attempt.route.view.id and frame.seq == attempt.seq
        older = attempt is not None and (frame.view < attempt.route.view.id or frame.seq < attempt.seq)
        if older and not current:
            return None
        if frame.type == FrameType.DOWN:
            if attempt is None or not current:
                return None
            chunk = self._chunk(attempt.route, frame)
            if chunk.parent != peer:
                raise WireError(f"{peer} sends the result of bytes {frame.start}.. but is not the parent there")
            return self._result(attempt, chunk)
        if attempt is not None and current and frame.length != 0:
            chunk = self._chunk(attempt.route, frame)
            if frame.length != chunk.stop - chunk.start:
                raise WireError(f"{peer} sends {frame.length} bytes for a chunk of {chunk.stop - chunk.start}")
        if frame.pieces:
            return self._block[:0]  # it stays where it is until it is added
        if not current:
            self._early_nbytes += frame.length
            if self._early_nbytes > 64 * max(self.memory.layout.nbytes, 1 << 20):
                raise WireError("peers sent more early gradients than the job can have: limit 64 layouts")
        return self._take(frame.length)

    def arrived(self, peer: str, frame: Frame, payload: Partial) -> None:
        """Handles a received and verified chunk: a child's partial sum, or the parent's result."""
        attempt = self._attempt
        if frame.view <= self._dropped:
            return
        if attempt is None or frame.view != attempt.route.view.id or frame.seq != attempt.seq:
            newer = attempt is None or (frame.view >= attempt.route.view.id and frame.seq >= attempt.seq)
            if frame.type == FrameType.UP and newer:
                key = (frame.view, frame.seq)
                self._early.setdefault(key, []).append((peer, frame.start, payload if frame.length else None))
            return
        if frame.type == FrameType.UP:
            self._input(attempt, peer, frame.start, payload if frame.length else None)
            return
        chunk = self._chunk(attempt.route, frame)
        if not attempt.finished and not attempt.done[chunk.index]:
            self._complete(attempt, chunk)

    def _input(self, attempt: _Attempt, peer: str, start: int, payload: Partial | None) -> None:
        index = attempt.route.by_start.get(start)
        chunk = None if index is None else attempt.route.chunks[index]
        if chunk is None or peer not in chunk.children:
            raise WireError(f"{peer} sends a partial sum at byte {start}, where it is no child of {self.me}")
        inputs = attempt.inputs[chunk.index]
        if peer in inputs or attempt.finished:
            self._give_back(payload)
            return
        inputs[peer] = payload
        self._advance(attempt, chunk)

    @staticmethod
    def _chunk(route: _Route, frame: Frame) -> _Chunk:
        index = route.by_start.get(frame.start)
        if index is None:
            raise WireError(f"no chunk of view {route.view.id} starts at byte {frame.start}")
        return route.chunks[index]

    # ------------------------------------------------------------------ memory

    def _take(self, nbytes: int) -> memoryview:
        held = self._pool.get(nbytes)
        return held.pop() if held else memoryview(bytearray(nbytes))

    def _give_back(self, payload: Partial | None) -> None:
        if isinstance(payload, memoryview):
            self._pool.setdefault(payload.nbytes, []).append(payload)

    def _recycle(self) -> None:
        if self._attempt is not None:
            for inputs in self._attempt.inputs:
                for payload in inputs.values():
                    self._give_back(payload)

    def _route(self, view: View) -> _Route:
        route = self._routes.get(view.id)
        if route is None:
            shared: dict[int, Adder] = {}
            chunks = [self._place(index, tree, shared) for index, tree in enumerate(self._trees(view))]
            by_cell: dict[int, list[int]] = {start: [] for start, _ in self._grid}
            for chunk in chunks:
                for cell in chunk.cells:
                    by_cell[cell].append(chunk.index)
            route = _Route(view, chunks, {c.start: c.index for c in chunks}, by_cell)
            ruling = self._attempt.route if self._attempt is not None else route
            self._routes = {ruling.view.id: ruling, view.id: route}
        return route

    def _trees(self, view: View) -> Sequence[Tree]:
        """Returns the trees of a view that concern this member."""
        layout, members = self.memory.layout, view.ids()
        owned = self._owners(view)
        if owned is None:
            return expand(view.plan, members, layout.nbytes, layout.spans())
        links = [(link.a, link.b) for link in view.links]
        trees = expand_owned(view.plan, members, layout.nbytes, owned, links)
        return [t for t in trees if t.root == self.me or t.parent_of(self.me) is not None]

    def _place(self, index: int, tree: Tree, shared: dict[int, Adder]) -> _Chunk:
        dtype = self.memory.layout.dtype_at(tree.start)
        add = shared.setdefault(id(dtype), Adder(dtype))
        children = tuple(tree.children(self.me))
        parent = tree.parent_of(self.me) or ""
        first = bisect.bisect_right(self._grid_starts, tree.start) - 1
        last = bisect.bisect_left(self._grid_starts, tree.stop)
        return _Chunk(index, tree.start, tree.stop, parent, children, add, tuple(self._grid_starts[first:last]))
