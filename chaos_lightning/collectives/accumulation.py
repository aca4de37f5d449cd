"""Manages the gradients of one optimizer step (an accumulation), from autograd's hooks until a slot commits them.

Theory of operation. `arm` opens the accumulation for the coming slot and tells the reducer so; cells that hooks
complete are passed on at once. A collective that comes between (a metric logged in the training step) takes the slot
that was meant for the gradients; `move` gives them to the next one, by then a new attempt of every member alike.

In a pipeline the accumulation belongs to one attempt (`open`): it is done again for the next one, of which nothing of
this one is seen. Its gradients are given away part by part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from chaos_lightning.collectives.gradients import Gradients
from chaos_lightning.collectives.layout import section_of
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.collectives.reducer import Reducer
from chaos_lightning.membership.recovery import needs_bytes
from chaos_lightning.protocol.types import Header, Span, ViewId
from chaos_lightning.transport.loop import IoLoop


class Accumulation:
    """Gradients of the step under way. An engine uses one object for all steps.

    Args:
        memory: Memory of gradients and results.
        overlap: Whether gradients are launched during backward passes.
        loop: The I/O thread.
        reducer: Reducer, used in the I/O thread.
    """

    def __init__(self, memory: Memory, overlap: bool, loop: IoLoop, reducer: Reducer) -> None:
        self.memory, self.layout = memory, memory.layout
        self.section = 0
        self.seq = -1
        """Slot that the armed accumulation is meant for; -1 if none is armed."""
        self.empty = False
        self._view: ViewId | None = None
        self._gradients = Gradients(memory, overlap, self._launch)
        self._loop = loop
        self._reducer = reducer
        self._launched: list[int] = []
        self._lock = threading.Lock()
        self._holds = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Context manager in whose block backward passes add up gradients without sending them."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def arm(self, seq: int, *, coefficient: float, section: int, empty: bool) -> None:
        """Begins an accumulation whose gradients are for slot `seq`; they are sent in the coming backward pass."""
        self._gradients.arm(section, coefficient)
        if self._holds or empty:
            self._gradients.disarm()
        with self._lock:
            self.section, self.empty, self.seq, self._launched = section, empty, seq, []
            self._view = None
        self._begin()

    def open(self, view: ViewId, seq: int, *, section: int = 0) -> None:
        """Begins an accumulation for one attempt of a pipeline, whose gradients are sent part by part; discards an
        earlier one.
        """
        self._gradients.arm(section, 1.0, by_part=True)
        with self._lock:
            self.section, self.empty, self.seq, self._launched = section, False, seq, []
            self._view = view
        self._begin()

    def closing(self, parts: Collection[str]) -> None:
        """Announces that the next backward pass is the last one for these parts, so that it sends their gradients."""
        self._gradients.closing(parts)

    def closed(self, parts: Collection[str]) -> None:
        """Notes that the last backward pass for these parts is over, and sends gradients that no hook reported."""
        self._gradients.closed(parts)

    @property
    def sending(self) -> bool:
        """Whether gradients of the accumulation under way have been taken for sending already."""
        return self.seq >= 0 and self._gradients.taken

    def move(self, seq: int) -> None:
        """Moves an accumulation that has begun to slot `seq`, because another collective took the slot that it was
        meant for.
        """
        if self.seq >= 0:
            with self._lock:
                self.seq = seq
            self._begin()

    def flush(self, shares: Mapping[str, float] | None = None) -> bytes:
        """Takes the gradients that no hook reported; returns one bit for each parameter, set if it has a gradient.
        Shares are those of `Gradients.flush`.
        """
        return b"" if self.empty else self._gradients.flush(shares)

    def apply(self, header: Header, totals: Mapping[str, float] | None = None) -> None:
        """Writes the committed average into `.grad` and ends the accumulation."""
        self.seq = -1
        self._gradients.apply(header, totals=totals)

    def lay_out(self, owned: Sequence[Span] | None) -> None:
        """Allocates memory for the bytes of the layout that this member owns from now on; no accumulation may be under
        way.
        """
        self._gradients.lay_out(owned)

    def scope_of(self, header: Header) -> Sequence[Span]:
        """Returns the byte ranges that a committed slot reduced; empty unless it was a step."""
        return self.layout.scope(section_of(header)) if needs_bytes(header) else ()

    def replay(self, header: Header, raw: memoryview) -> None:
        """Writes the average of a step that this newcomer replays into `.grad` (protocol.md 17)."""
        self._gradients.arm(section_of(header), 0.0)
        self._gradients.disarm()
        self._gradients.apply(header, raw)

    def settle(self) -> None:
        """Saves a copy of the reduced buffers in the job's present state, to which `restore` returns."""
        self._gradients.settle()

    def restore(self) -> None:
        """Restores reduced buffers that forward passes changed in an accumulation that was not committed."""
        self._gradients.restore()

    def abandon(self) -> None:
        """Drops the accumulation, because this member is out of the job."""
        self.seq = -1
        self._gradients.disarm()

    def close(self) -> None:
        self._gradients.close()

    def _begin(self) -> None:
        seq, scope, empty, launched = self.seq, self.layout.scope(self.section), self.empty, list(self._launched)
        view = self._view

        def begin() -> None:
            self._reducer.begin(seq, scope, empty=empty, view=view)
            self._reducer.ready(seq, launched, view)

        self._loop.call(begin)

    def _launch(self, cells: Sequence[int]) -> None:
        with self._lock:
            self._launched.extend(cells)
            seq, view = self.seq, self._view
        self._loop.call(lambda: self._reducer.ready(seq, cells, view))
