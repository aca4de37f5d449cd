"""Tracks, for manual optimization, which gradients are averages over members, and which a backward pass has changed
since.

Theory of operation. Nobody knows after which backward pass the user looks at `.grad`, clips it or steps. So each pass
ends with the average, as with DDP: one slot for each optimizer whose parameters it reached, weighted by the
micro-batch that it is of. What had been accumulated before is an average already, the same on all members, and stays
what it is. The optimizer then steps without a slot. A plain `loss.backward()` within training_step ends so, too: its
first gradient asks autograd to call back when the pass is over. Only gradients that came about in another way (assigned
by hand, or outside of training_step) are averaged when their optimizer steps. One that was assigned may have been made
of the average; then it is the same on all members, and its average is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from chaos_lightning.collectives.layout import Section


class ManualGradients:
    """State of the gradients of one member's optimizers: averaged over members, or changed since.

    Args:
        sections: Sections of the parameters that are trained, one per optimizer.
        pass_is_over: Takes the slots of the optimizers that a backward pass `reached`.
    """

    def __init__(self, sections: Sequence[Section], pass_is_over: Callable[[], None]) -> None:
        self._sections = sections
        self._pass_is_over = pass_is_over
        self._awaits_pass = False
        """Whether the next gradient is a plain pass's first one."""
        self._reached: set[int] = set()
        """Optimizers whose gradients have changed since they were averaged."""
        self._averaged: set[int] = set()
        """Optimizers whose gradients have been averaged since they stepped."""
        self._averages: dict[int, Tensor] = {}
        """The last average of each parameter's gradient, by the parameter's id."""
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._reaching(number))  # type: ignore[no-untyped-call]
            for number, section in enumerate(sections)
            for _, param in section.params
        ]

    # ------------------------------------------------------------------ backward passes

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Averages gradients at the end of each backward pass that the training step makes by `loss.backward()`
        within this context.
        """
        self._awaits_pass = True
        try:
            yield
        finally:
            self._awaits_pass = False

    def _reaching(self, number: int) -> Callable[[Tensor], None]:
        return lambda _: self._reaches(number)

    def _reaches(self, number: int) -> None:
        """Notes that a backward pass has added to the gradient of one of this optimizer's parameters."""
        self._reached.add(number)
        if self._awaits_pass:
            self._awaits_pass = False
            Variable._execution_engine.queue_callback(self._plain_pass_is_over)  # type: ignore[attr-defined]

    def _plain_pass_is_over(self) -> None:
        self._awaits_pass = True
        self._pass_is_over()

    @property
    def reached(self) -> tuple[int, ...]:
        """Optimizers whose gradients have changed since they were averaged, in ascending order."""
        return tuple(sorted(self._reached))

    def backward(self, run: Callable[[], None], *, stands_in: bool, unweighed: Callable[[], bool]) -> None:
        """Runs one backward pass of `LightningModule.manual_backward`, and averages the gradients that it has changed.

        Args:
            run: Runs the pass.
            stands_in: Whether the pass is of a stand-in batch.
            unweighed: Returns whether no member had samples in the slot that was closed last.
        """
        kept = None
        if stands_in:
            # Gradients of a stand-in batch must not add to the present ones, which stay if no member had samples.
            kept = [(p, p.grad) for s in self._sections for _, p in s.params]
            for param, _ in kept:
                param.grad = None
        awaited, self._awaits_pass = self._awaits_pass, False
        try:
            run()
        finally:
            self._awaits_pass = awaited
        self._pass_is_over()
        if kept is not None:
            nobody = unweighed()
            for param, grad in kept:
                if nobody or param.grad is None:
                    param.grad = grad
            for number in self._averaged:
                self._note(number)

    # ------------------------------------------------------------------ averages

    def averaged(self, number: int) -> None:
        """Notes that this optimizer's gradients are now the average of a slot."""
        self._reached.discard(number)
        self._averaged.add(number)
        self._note(number)

    def stepped(self, number: int) -> None:
        """Notes that this optimizer steps. Gradients that are assigned to it afterwards are this member's own."""
        self._averaged.discard(number)

    def hold_average(self, number: int) -> bool:
        """Returns whether this optimizer's gradients are an average that has not been used in a step yet."""
        return number in self._averaged and number not in self._reached

    def assigned(self, number: int) -> bool:
        """Returns whether user code has replaced one of the averaged gradients by another tensor."""
        return any(
            param.grad is not None and param.grad is not self._averages.get(id(param))
            for _, param in self._sections[number].params
        )

    def _note(self, number: int) -> None:
        self._averages |= {id(p): p.grad for _, p in self._sections[number].params if p.grad is not None}

    # ------------------------------------------------------------------ what travels, and the end

    def manifest(self) -> dict[str, Any]:
        """Returns the averaged gradients that are kept from one batch to the next, which newcomers need. To be
        called at a safe point, where all members have the same ones.
        """
        kept = {
            name: param.grad.detach().clone()
            for number, section in enumerate(self._sections)
            for name, param in section.params
            if param.grad is not None and number not in self._reached
        }
        return {"grads": kept, "averaged": sorted(self._averaged)}

    def adopt(self, given: Mapping[str, Any]) -> None:
        """Takes over the gradients that `manifest` returned at the donor."""
        for section in self._sections:
            for name, param in section.params:
                grad = given["grads"].get(name)
                param.grad = grad.to(param.device) if grad is not None else None
        self._averaged, self._reached = set(given["averaged"]), set()
        for number in self._averaged:
            self._note(number)

    def reset(self) -> None:
        """Forgets which gradients are averages and which have changed. To be called when the member joins again."""
        self._reached.clear()
        self._averaged.clear()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
