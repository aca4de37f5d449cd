"""Brings gradients from autograd to the reducer by hooks, and averages back into `.grad`.

Theory of operation. A hook on every parameter fires when its gradient of this backward pass is complete; the gradient,
times the member's coefficient, is copied into own memory (cache-hot), and grid cells whose parameters are all there are
given to the reducer at once, while backward goes on. No DDP wrapper: its constructor and its bucket rebuild are
collectives that a newcomer cannot join. What no hook reported is settled by `flush`: a gradient from an earlier pass is
copied then, a parameter without one contributes zeros and an absent bit (protocol.md 5). On an accelerator copies run
asynchronously into pinned memory; a thread waits for their events so that autograd never does.

Where a step has several backward passes, as in a pipeline, gradients add up in `.grad`, and a part's are launched in
its last one: the caller says that before it (`closing`) and after it (`closed`). Only what this member owns has memory.
"""

from __future__ import annotations

import bisect
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chaos_lightning.collectives.memory import Memory
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import Header, Span

Ready = Callable[[Sequence[int]], None]

LEND_NBYTES = 32768
"""Size, bytes, from which on gradients are sent from autograd's own memory; smaller ones are cheaper to copy
together.
"""


class Gradients:
    """Gradients of one member for the step under way.

    Args:
        memory: The flat buffers, and cells.
        overlap: Whether hooks launch cells during backward; else everything happens in `flush`.
        ready: Function that is called with the start offsets of cells that are final (any thread).
    """

    def __init__(self, memory: Memory, overlap: bool, ready: Ready) -> None:
        self._layout = memory.layout
        self._memory = memory
        self._ready = ready
        self.overlap = overlap
        self.enabled = False
        self._coefficient = 1.0
        self._section = 0
        self._scope: range = range(0)
        self._launching: Collection[int] = range(0)
        """Slots whose gradient is launched when a hook reports it."""
        self._starts = [a for a, _ in memory.grid]
        self._missing: list[int] = []
        self._fired: dict[int, tuple[Tensor | None, int]] = {}
        """Gradients that were taken, each with its version then."""
        self._lent: list[int] = []
        self._repeated = ""
        self._hooks: list[Any] = []
        self._settled: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}
        """Views of own memory, by slot that lies here."""
        self._flat: Tensor | None = None
        self._stage: _Stage | None = None
        self._lay_out()

    def lay_out(self, owned: Sequence[Span] | None) -> None:
        """Allocates memory for other bytes of the layout than before, which this member owns now (see
        `Memory.lay_out`).

        `.grad` of parameters that were owned must not be used any more.
        """
        self.close()
        self.disarm()
        self._own, self._flat, self._stage = {}, None, None
        self._fired, self._lent = {}, []
        self._memory.lay_out(owned)
        self._lay_out()

    def _lay_out(self) -> None:
        layout, memory, starts = self._layout, self._memory, self._starts
        here = [i for i in range(len(layout.slots)) if memory.holds(layout.slots[i].start)]
        self._own = {i: memory.view(memory.own, i) for i in here}
        self._cells: dict[int, range] = {}
        self._expected = [0] * len(starts)
        for index in here:
            slot = layout.slots[index]
            first = bisect.bisect_right(starts, slot.start) - 1
            last = bisect.bisect_left(starts, max(slot.stop, slot.start + 1))
            self._cells[index] = range(first, last)
            for cell in self._cells[index]:
                self._expected[cell] += 1
        if here and (device := layout.device).type != "cpu":
            self._flat = torch.zeros(max(memory.nbytes, 1), dtype=torch.uint8, device=device)
            self._stage = _Stage(device, self._ready)
        for index in here:
            if index not in layout.buffer_slots:
                tensor = layout.slots[index].tensor
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._hook_for(index)))  # type: ignore[no-untyped-call]
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Saves a copy of the reduced buffers, which are equal at all members now; `restore` returns to it."""
        self._settled = {i: self._layout.slots[i].tensor.clone() for i in self._buffers()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the reduced buffers from the saved copy, which undoes what forward passes have changed since."""
        for index, settled in self._settled.items():
            self._layout.slots[index].tensor.copy_(settled)

    def _buffers(self) -> list[int]:
        """Returns the layout's slots of those reduced buffers for which this member has memory."""
        return [i for i in self._layout.buffer_slots if i in self._own]

    # ------------------------------------------------------------------ an accumulation

    def arm(self, section: int, coefficient: float, *, by_part: bool = False) -> None:
        """Enables the hooks: the next backward pass is the accumulation's last, and hands its gradients over as they
        come.

        Args:
            section: Number of the optimizer whose parameters get gradients.
            coefficient: Factor that gradients are multiplied with.
            by_part: Whether the pass is the last one only for parts that `closing` will name.
        """
        self._section = section
        self._scope = self._layout.section_slots[section]
        self._launching = set() if by_part else self._scope
        if self._stage is not None:
            self._stage.forget()
            if by_part:  # an attempt that was dropped may have left copies under way
                self._stage.settle()
                self._stage.await_taken_over()
        self._coefficient = coefficient
        self._missing = list(self._expected)
        self._fired = {}
        self._repeated = ""
        self._return_lent()
        self.enabled = self.overlap

    def closing(self, parts: Collection[str]) -> None:
        """Announces that the next backward pass is the last one for these parts."""
        assert isinstance(self._launching, set), "armed for the whole"
        self._launching |= {i for i in self._scope if self._layout.slots[i].part in parts and i in self._own}

    @torch.no_grad()
    def closed(self, parts: Collection[str]) -> None:
        """Hands over those gradients of these parts that no hook reported; their last backward pass is over."""
        for index in self._scope:
            slot = self._layout.slots[index]
            if slot.part in parts and index in self._own and index not in self._fired:
                self._take(index, slot.tensor.grad)

    @property
    def taken(self) -> bool:
        """Whether hooks have taken gradients since `arm`."""
        return bool(self._fired)

    def disarm(self) -> None:
        self.enabled = False

    def _hook_for(self, index: int) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            if not self.enabled or index not in self._launching:
                return
            if index in self._fired:
                self._repeated = self._layout.slots[index].name
                return
            self._take(index, param.grad)

        return hook

    def _take(self, index: int, grad: Tensor | None) -> None:
        """Copies or lends one gradient to the send buffer, and reports the byte ranges of the buffer that it
        completes.
        """
        self._fired[index] = (grad, grad._version if grad is not None else 0)
        own = self._own[index]
        if grad is None:
            own.zero_()
        elif grad.layout != torch.strided:
            raise ConfigurationError(
                f"the gradient of {self._layout.slots[index].name!r} is sparse; use sparse=False (dense gradients)"
            )
        elif self._stage is not None:
            self._stage.put(own, grad if self._coefficient == 1.0 else grad * self._coefficient)
        elif grad.data_ptr() != own.data_ptr():
            if self._coefficient == 1.0:
                if grad.is_contiguous() and grad.dtype == own.dtype and own.nbytes >= LEND_NBYTES:
                    self._memory.lend(index, grad)
                    self._lent.append(index)
                else:
                    own.copy_(grad)
            else:
                torch.mul(grad.detach(), self._coefficient, out=own)
        elif self._coefficient != 1.0:
            own.mul_(self._coefficient)
        if done := self._completed(index):
            if self._stage is not None:
                self._stage.after_copies(done)
            else:
                self._ready(done)

    def _completed(self, index: int) -> list[int]:
        """Returns the byte ranges of the buffer, by start offset, for which this tensor was the last one missing."""
        done = []
        for cell in self._cells[index]:
            self._missing[cell] -= 1
            if self._missing[cell] == 0:
                done.append(self._starts[cell])
        return done

    @torch.no_grad()
    def flush(self, shares: Mapping[str, float] | None = None) -> bytes:
        """Takes the gradients that no hook reported, zeros if there are none; returns one bit per parameter, set if it
        has a gradient.

        Args:
            shares: Coefficients of reduced buffers, by part; None: the one of gradients.

        Raises:
            ConfigurationError: A parameter's gradient grew after it had been launched (two backward passes in one
                step, or re-entrant checkpointing): launching during backward must be switched off.
        """
        self.enabled = False
        if self._repeated:
            raise ConfigurationError(
                f"parameter {self._repeated!r} received gradients twice in one step after they were sent; "
                "this model needs overlap=False (send gradients after backward, not during it)"
            )
        for index, (grad, taken_version) in self._fired.items():
            name, now = self._layout.slots[index].name, self._layout.slots[index].tensor.grad
            if now is not grad or (now is not None and now._version != taken_version):
                raise ConfigurationError(
                    f"the gradient of {name!r} was changed between backward and the optimizer step, after it had been "
                    "sent; change gradients in on_before_optimizer_step (then they are averaged), clip them by "
                    "prepare(clip_norm=...) in a plain loop, or set overlap=False"
                )
        bits = bytearray(-(-len(self._scope) // 8))
        for place, index in enumerate(self._scope):
            if index not in self._own:
                continue
            grad = self._layout.slots[index].tensor.grad
            if grad is not None:
                bits[place // 8] |= 1 << (place % 8)
            if index not in self._fired:
                self._take(index, grad)
        for index in self._buffers():
            slot = self._layout.slots[index]
            share = self._coefficient if shares is None else shares.get(slot.part, 0.0)
            self._own[index].copy_(slot.tensor.to(torch.float32) * share)
            if done := self._completed(index):
                self._ready(done)
        if self._stage is not None:
            self._stage.settle()
        return bytes(bits)

    # ------------------------------------------------------------------ after the commit

    @torch.no_grad()
    def apply(self, header: Header, raw: memoryview | None = None, totals: Mapping[str, float] | None = None) -> None:
        """Writes the committed average into `.grad` and into the reduced buffers.

        The sum over members of coefficient * gradient is not written to; its average goes to own memory (the
        accelerator's flat memory), which `.grad` then views.

        Args:
            header: Header of the step.
            raw: The sum; if None, it lies in results[seq % 2].
            totals: Sums of all owners' shares of reduced buffers, by part, if `flush` was given shares.
        """
        self._return_lent()
        self._fired = {}
        if self._stage is not None:
            self._stage.await_taken_over()  # the coming slot's sum goes where the last one's was read
        total = header.total_weight
        if total <= 0:  # nobody had a sample: no gradient, and buffers without what stand-in batches did to them
            for index in self._scope:
                if index in self._own:
                    self._layout.slots[index].tensor.grad = None
            self.restore()
            return
        total_sum = self._memory.results[header.seq % 2] if raw is None else torch.frombuffer(raw, dtype=torch.uint8)
        home = self._memory.own if self._flat is None else self._flat
        for run in self._layout.runs:
            reduced = run.section == len(self._layout.section_slots)
            if run.stop > run.start and (reduced or run.section == self._section) and self._memory.holds(run.start):
                scale = 1.0 / (totals[run.part] if reduced and totals is not None else total)
                at = self._memory.place(run.start)
                target = home[at : at + run.stop - run.start]
                source = total_sum[at : at + run.stop - run.start]
                if self._flat is not None:  # the device multiplies faster, and to the same bits
                    source = target.copy_(source, non_blocking=True)
                torch.mul(source.view(run.dtype), scale, out=target.view(run.dtype))
        for place, index in enumerate(self._scope):
            if index not in self._own:
                continue
            slot = self._layout.slots[index]
            present = header.presence[place // 8] >> (place % 8) & 1 if header.presence else 0
            # `.data`, since views of one memory share a version counter: a backward pass that adds to one gradient
            # here, zeroed in place or kept, would count as a change of all others.
            slot.tensor.grad = self._memory.view(home, index).data if present else None
        for index in self._buffers():
            buffer = self._layout.slots[index].tensor
            mean = self._memory.view(home, index)
            buffer.copy_(mean.round() if not buffer.dtype.is_floating_point else mean)
        self.settle()
        if self._stage is not None:
            self._stage.taken_over()
            if raw is not None:
                self._stage.await_taken_over()

    def _return_lent(self) -> None:
        for index in self._lent:
            self._memory.lend(index, None)
        self._lent.clear()

    def close(self) -> None:
        """Removes the hooks and ends the staging thread."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._stage is not None:
            self._stage.close()


class _Stage:
    """Thread that copies gradients from an accelerator to host memory on a separate stream, and reports when copies are
    complete.
    """

    def __init__(self, device: torch.device, ready: Ready) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._held: list[Tensor] = []
        """Tensors that are being copied: their memory must not be given to another tensor meanwhile."""
        self._taken_over: torch.Event | None = None
        self._ready = ready
        self._queue: queue.SimpleQueue[tuple[torch.Event, Sequence[int]] | None] = queue.SimpleQueue()
        self._pending = 0
        self._idle = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-stage", daemon=True)
        self._thread.start()

    def put(self, own: Tensor, gradient: Tensor) -> None:
        """Queues a gradient to be copied by the next call of `after_copies`."""
        self._waiting.append((own, gradient))

    def forget(self) -> None:
        """Drops the queued gradients, because their accumulation was discarded."""
        self._waiting.clear()

    def after_copies(self, cells: Sequence[int]) -> None:
        """Starts copying the queued gradients after the device's present work; reports `cells` as ready when the copies
        are complete.
        """
        computed, event = torch.Event(self._device), torch.Event(self._device)
        computed.record()
        self._stream.wait_event(computed)
        with self._stream:
            for own, gradient in self._waiting:
                own.copy_(gradient, non_blocking=True)
            event.record()
        self._held += [gradient for _, gradient in self._waiting]
        self._waiting.clear()
        with self._idle:
            self._pending += 1
        self._queue.put((event, cells))

    def settle(self, deadline_s: float = 60.0) -> None:
        """Waits until all copies are complete, so that the optimizer may overwrite gradients."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._pending == 0 or self._error is not None, deadline_s):
                raise ConfigurationError(f"copies from {self._device} did not finish in {deadline_s} s")
        if self._error is not None:
            raise self._error
        self._held.clear()

    def taken_over(self) -> None:
        """Notes that the device has begun to copy a sum from host memory, in its present stream."""
        self._taken_over = torch.Event(self._device)
        self._taken_over.record()

    def await_taken_over(self) -> None:
        """Waits until the device has copied the sum from host memory, which may be overwritten then."""
        if self._taken_over is not None:
            self._taken_over.synchronize()
            self._taken_over = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, cells = item
            try:
                event.synchronize()
                self._ready(cells)
            except BaseException as error:
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5.0)
