"""Runs one micro-batch through one stage: its forward pass, which is kept, and later its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from chaos_lightning.errors import StateError
from chaos_lightning.pipeline.specs import Form, Specs, fits, laid_out, put_together, tensor_forms
from chaos_lightning.pipeline.taint import Taint


class _Enter(torch.autograd.Function):
    """Autograd operation that inserts a received tensor into the graph, and stores its gradient in a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: list[Tensor | None], at: int, tensor: Tensor) -> Tensor:
        ctx.gradients, ctx.at = gradients, at
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.at] = grads[0]
        return None, None, None, None


Again = Callable[["ForwardUnit"], AbstractContextManager[None]]
"""Function that makes a unit the one under way."""


class ForwardUnit:
    """Forward pass of one micro-batch through the layers [first, end), kept for its backward pass.

    Attributes:
        tensors: Tensors that layer `end` receives, in the graph; empty at the last stage.
        specs: Text that travels with the tensors.
        result: Value that the user's step has returned, at the last stage.
    """

    def __init__(self, again: Again, first: int, end: int, at: tuple[int, int]) -> None:
        self.first, self.end, self.at = first, end, at
        self.tensors: tuple[Tensor, ...] = ()
        self.specs = ""
        self.result: Any = None
        self.entered: Any = None
        self.calls: list[tuple[str, Form]] = []
        self.given = 0
        self.due = 0
        self.inside = 0
        self.again = False
        self.left = False
        self.taint: Taint | None = None
        self.device = torch.device("cpu")
        self.counts: dict[str, int] = {}
        self.border: Form = ["plain", None]
        self._under_way = again
        self._gradients: list[Tensor | None] = []

    def enter(self, received: Sequence[Tensor], specs: Specs) -> None:
        """Inserts the tensors that the previous stage has sent into the graph.

        Raises:
            StateError: The tensors are not those of the specs.
        """
        forms = tensor_forms(specs.border)
        if len(forms) != len(received) or not all(map(fits, received, forms)):
            got = [(str(t.dtype), tuple(t.shape)) for t in received]
            raise StateError(f"layer {self.first} was sent {got}; its specs say {[(f[2], f[1]) for f in forms]}")
        received = [t.detach() for t in received]
        self.device = received[0].device
        self._gradients = [None] * len(received)
        anchor = torch.zeros((), requires_grad=True)
        entered = [
            _Enter.apply(anchor, self._gradients, at, laid_out(t, form)) if form[3] else laid_out(t, form)  # type: ignore[no-untyped-call]
            for at, (t, form) in enumerate(zip(received, forms, strict=True))
        ]
        self.entered = put_together(specs.border, iter(entered))
        self.calls = list(specs.calls)

    def let_go(self) -> tuple[Tensor | GradientEdge, ...]:
        """Releases `tensors` after they were sent; returns the points at which the backward pass begins.

        Returns:
            Graph edges at which the backward pass begins; for tensors without one, the tensors.
        """
        found = tuple(get_gradient_edge(t) if t.requires_grad else t for t in self.tensors)
        self.tensors = ()
        return found

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Allows activation checkpointing to call blocks again for this unit's backward pass, while the block of code
        runs.
        """
        self.again = True
        with self._under_way(self):
            yield

    def backward(
        self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Runs the backward pass.

        Args:
            roots: `tensors`, or their places in the graph (after `let_go`), or the loss.
            gradients: Gradients of the roots; None: 1 for a loss, nothing for another tensor.

        Returns:
            Gradients of the tensors that were received; None for those that need none.
        """
        pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if not isinstance(r, Tensor) or r.requires_grad]
        pairs = [(r, g) for r, g in pairs if g is not None or not self.left]
        if pairs:
            with self.backward_pass():
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])  # type: ignore[arg-type]
        return self.gradients()

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the received tensors, and releases the graph."""
        self.tensors, self.result, self.entered = (), None, None
        return tuple(self._gradients)


def some_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns made-up gradients for these tensors, for measurements in which values do not matter."""
    return tuple(torch.full_like(t, 1e-3) if t.requires_grad else None for t in tensors)
