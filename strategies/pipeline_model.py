"""Holds the user's model in a fit with pipelines: its construction, its chain of layers, and its parts.

Theory of operation. `configure_model` runs within a record, on the meta device, so that each member makes only what it
owns; a model that was built in `__init__` is accepted, and what is not owned is freed. Once the first micro-batch is
there, the user's step is looked at without effect: which parameter belongs to which layer, and what layers cost
(pipeline/describe.py). `training_step` of a unit is the user's own, on the micro-batch as Lightning's hooks hand it on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_iter

from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.find_chain import find_chain
from chaos_lightning.pipeline.held import HeldModel
from chaos_lightning.pipeline.loaded import LoadedParts
from chaos_lightning.pipeline.parts import ModelParts, find_parts
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.recording import Recording
from chaos_lightning.pipeline.whole_file import PartialModel
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.users_step import UsersStep

_log = logging.getLogger("chaos_lightning")


class PipelineModel:
    """The user's model in one fit with pipelines.

    Args:
        trainer: Trainer in fit.
        seed: Seed of the job.
        device: Device on which layers run.
        chain: Name of the list of blocks; "": the module's `chaos_chain`, or the one that can be meant.
    """

    def __init__(self, trainer: Trainer, seed: int, device: torch.device, chain: str = "") -> None:
        self._trainer, self.seed, self._device, self._path = trainer, seed, device, chain
        self.users_step = UsersStep(trainer)
        self.moved, self.around, self.begin = self.users_step.moved, self.users_step.around, self.users_step.begin
        self._recording = Recording(seed)
        self._memory: ModelMemory | None = None
        self._chain: LayerChain | None = None
        self.parts = ModelParts(0, {}, {})
        self._loaded: LoadedParts | None = None

    @property
    def loaded(self) -> LoadedParts:
        """Values read from a checkpoint, for parts that this member owns now or will own."""
        if self._loaded is None:
            self._loaded = LoadedParts(self.module)
        return self._loaded

    @property
    def partial(self) -> PartialModel:
        """The part of the model that this member owns, for checkpoints."""
        return PartialModel(self.module, self.parts, self._trainer.optimizers)

    @property
    def module(self) -> LightningModule:
        return self._trainer.lightning_module

    @property
    def memory(self) -> ModelMemory:
        assert self._memory is not None, "the model is not built yet"
        return self._memory

    @property
    def chain(self) -> LayerChain:
        assert self._chain is not None, "the model is not built yet"
        return self._chain

    # ------------------------------------------------------------------ building

    def recorded(self) -> AbstractContextManager[None]:
        """Returns a context in which a model that is built takes no memory."""
        return self._recording.recorded()

    def take(self) -> None:
        """Registers the model as it was built, and cuts it into a chain of layers. Called before its optimizers are
        made.

        Raises:
            ConfigurationError, UnsupportedError: The model has no chain that can be cut; says why.
        """
        self._memory = ModelMemory(self.module, self.seed, self._device, self._recording)
        path = find_chain(self.module, self._path).path
        randomness = Randomness(self.seed, self._device)
        self._chain = LayerChain(self.module, path, self.users_step, randomness=randomness)
        if built := self._memory.built_nbytes:
            _log.info(
                "the whole model was built here, %.1f MB; build it in configure_model, and each member builds only "
                "what it owns", built / 1e6,
            )  # fmt: skip

    def close(self) -> None:
        """Restores the module to what it was before fit."""
        if self._chain is not None:
            self._chain.close()

    # ------------------------------------------------------------------ looking at it

    def look(self, batch: Any) -> None:
        """Finds the parts of the model by running the user's step on a micro-batch.

        Args:
            batch: A micro-batch, past Lightning's hooks.
        """
        self.begin(0)
        with self.muted():
            self.parts = find_parts(self.chain, batch)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Makes `self.log` of the user's module do nothing within this context."""
        shadowed = {name: vars(self.module).get(name) for name in ("log", "log_dict")}
        for name in shadowed:
            object.__setattr__(self.module, name, _nothing)
        try:
            yield
        finally:
            for name, before in shadowed.items():
                if before is None:
                    object.__delattr__(self.module, name)
                else:
                    object.__setattr__(self.module, name, before)

    def held(self) -> HeldModel:
        """Returns access to the parts of the model that this member owns. To be called once parts and optimizers are
        known.
        """
        return HeldModel(self.module, self.memory, self.parts, self._trainer.optimizers, self.loaded)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def samples_of(batch: Any) -> int:
    """Returns the number of samples of a micro-batch: the first dimension of its first tensor that has one, else 1."""
    tensors = (t for t in tree_iter(batch) if isinstance(t, Tensor) and t.dim())
    return next((int(t.shape[0]) for t in tensors), 1)
