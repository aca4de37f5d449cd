"""Keeps track of a model's parts in this process: which have memory, their states for other members, and their initial
values.

Theory of operation. Before the job's first slot a part is made by its oldest owner alone (protocol.md P14): from the
record of how the model was built, or it is here since it was built. Who that is may change with a recovery before that
slot, so a part is made when it is asked for, and nothing that is here is freed before the slot has closed (`settle`).
From then on parts come from other members or from a checkpoint, and go with the views.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.loaded import LoadedParts
from chaos_lightning.pipeline.parts import REST, ModelParts
from chaos_lightning.replication.part_state import PartState


class HeldModel:
    """Parts of a model that this process has; used by the training thread only.

    Args:
        module: The model.
        memory: Memory of the model's tensors.
        parts: Parts of the model.
        optimizers: Optimizers of the whole model.
        loaded: A checkpoint that first values are taken from; if none was read, it has nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        memory: ModelMemory,
        parts: ModelParts,
        optimizers: Sequence[Optimizer],
        loaded: LoadedParts,
    ) -> None:
        self._module, self._memory, self._parts, self._loaded = module, memory, parts, loaded
        self._optimizers = tuple(optimizers)
        self._first = True
        """Whether no slot has closed yet, so that first values may be made."""

    def _names(self, parts: Collection[str]) -> list[str]:
        return [name for part in parts for name in self._parts.names(part)]

    @property
    def present(self) -> frozenset[str]:
        """Names of the tensors that have memory in this process."""
        return frozenset(name for name, _, _, tensor in named_tensors(self._module) if not is_absent(tensor))

    def states(self, names: Collection[str]) -> Sequence[PartState]:
        """Returns the present states of the named parts; parts without tensors of their own, such as the rest, are left
        out.
        """
        wanted = [part for part in names if part != REST and self._parts.names(part)]
        self._make(self._names(wanted))
        return [PartState(p, self._module, self._parts.names(p), self._optimizers) for p in wanted]

    def room(self, names: Collection[str]) -> None:
        """Allocates memory for these parts before they are pulled from other members."""
        self._memory.room(self._names(names))

    def forget(self, names: Collection[str]) -> None:
        """Frees these parts, which only other members own from now on."""
        for state in self.states(names):
            state.forget()
        self._memory.leave_out(self._names(names))

    def rest(self) -> list[str]:
        """Makes the buffers that every member has (the rest); returns their names."""
        names = self._names([REST])
        self._make(names)
        return names

    def _make(self, names: Collection[str]) -> None:
        if not self._first:
            return
        if lacking := frozenset(names).difference(self.present):
            self._memory.make(lacking)
            self._loaded.fill(lacking)

    def settle(self, owned: Collection[str]) -> None:
        """Frees, after the first closed slot, all tensors that this member does not own, and the source of initial
        values.

        Args:
            owned: Parts that this member holds.
        """
        if not self._first:
            return
        self._first = False
        self._memory.leave_out(self.present.difference(self._names(owned), self._names([REST])))
        self._memory.forget()
        self._loaded.forget()

    def restart(self) -> None:
        """Frees all parts before this member joins again; does nothing if the job has not begun."""
        if not self._first:
            self.forget([part for part in self._parts.users if part != REST])
