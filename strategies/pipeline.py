"""Defines strategy `chaos_pipeline`: a model in stages, one per process, whose members may join, leave and die.

Theory of operation. It is strategy `chaos` in all that concerns the job: hooks, slots, safe points, collectives. What
differs is that each member owns parts of the model (pipeline_model.py), and that a batch of the loop is an optimizer
step of several micro-batches (pipeline_fit.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.trainer.states import TrainerFn

from chaos_lightning.declared import declared
from chaos_lightning.errors import UnsupportedError
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.settings import ARGUMENTS, ChaosOptions, EngineConfig
from chaos_lightning.strategies import pipeline_files
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.pipeline_evaluation import prepare_validation, refuse_freed, same_everywhere
from chaos_lightning.strategies.pipeline_fit import PipelineFit
from chaos_lightning.strategies.pipeline_refusals import PIPELINE_TABLE, warn_of_parts
from chaos_lightning.strategies.strategy import ChaosStrategy

NAME = "chaos_pipeline"

UNUSED = {
    "transfer": "a member pulls each part of the model from those that own it",
    "ingress_bps": "a member pulls each part of the model from those that own it",
    "batch": "a step has micro_batches times the loader's batch, whoever is there",
    "fits": "a micro-batch has the loader's batch",
    "lr_scaling": "a step has the same samples whoever is there",
}
"""Settings without effect with pipelines, and why."""


def warn_unused(config: EngineConfig) -> None:
    """Warns of settings that have no effect with pipelines, where members own parts of the model."""
    rows = declared(EngineConfig)
    for name, why in UNUSED.items():
        if (value := getattr(config, name)) != rows[name].default:
            warnings.warn(f"{name}={value!r} is not honoured by strategy {NAME}: {why}", stacklevel=2)


class ChaosPipelineStrategy(ChaosStrategy):
    """Data-parallel pipelines, a stage per process, that route around a dead stage or move its layers.

    The module names its chain of layers, `chaos_chain = "net"`, an `nn.Sequential` or a list of blocks that are called
    in order. Its `training_step` stays as it is for one device. Build the model in `configure_model`, and each member
    builds only what it owns.

    Args:
        micro_batches: Number of micro-batches in an optimizer step. Each has the training loader's batch size; one
            batch of the loop is one step.
        policy: How the job goes on after a loss: adaptive, reroute, dynamic or restart. reroute sends micro-batches
            through others that hold the same layers, dynamic moves layers, adaptive takes whichever trains more
            samples, restart ends the job with exit code 79 for a start from a checkpoint.
        device_memory: Memory for layers on this member's device, as bytes or a text such as 8 GiB. By default what the
            device has.
        chain: Name of the list of blocks that stages are cut from, such as model.layers. By default the module's
            attribute `chaos_chain`.
        profile: File of `chaos-lightning profile`, whose times and sizes of layers count. By default layers are
            measured at the start.
        copies: Number of members that hold each layer, as far as memory allows.
        on_lost_parts: What the job does when nobody is left who holds some layer: wait for a machine that comes back,
            or end (exit code 79).
        dry_run: Say what the planner makes of this model, and end before anything is trained.
        endpoint: As of `ChaosStrategy`.
        job: As of `ChaosStrategy`.
        name: As of `ChaosStrategy`.
        min_nodes: Training starts with, and pauses below, so many nodes. It also waits until some plan fits those who
            are here: with less memory than the model needs, the console says how many more nodes it takes.
        max_nodes: As of `ChaosStrategy`.
        log_dir: As of `ChaosStrategy`.
        options: `ChaosOptions` or a mapping of its fields.

    Arguments that are None come from the environment (CHAOS_MICRO_BATCHES and so on), else they have their defaults.
    docs/settings.md has all of them.
    """

    strategy_name = NAME
    refused = PIPELINE_TABLE

    def __init__(
        self,
        micro_batches: int | None = None,
        policy: str | None = None,
        device_memory: int | str | None = None,
        chain: str | None = None,
        profile: str | None = None,
        copies: int | None = None,
        on_lost_parts: str | None = None,
        dry_run: bool | None = None,
        endpoint: str | None = None,
        job: str | None = None,
        name: str | None = None,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        log_dir: str | None = None,
        options: ChaosOptions | dict[str, Any] | None = None,
    ) -> None:
        told = locals()
        super().__init__(**{name: told[name] for name in (*ARGUMENTS, "options")})
        given = {name: told[name] for name in declared(PipelineOptions)}
        if type(device_memory) is int:
            given["device_memory"] = str(device_memory)
        self.pipeline = PipelineOptions.build(given)

    @property
    def chain(self) -> str:
        """Name of the module's list of blocks to be cut into stages; "" if the user gave none."""
        return self.pipeline.chain if self.pipeline is not None else ""

    @property
    def _fit(self) -> PipelineFit | None:
        """This member's part in the pipelines; None outside of fit."""
        hooks = self.session.hooks if self.session is not None else None
        return hooks if isinstance(hooks, PipelineFit) else None

    # ------------------------------------------------------------------ the model

    def connect(self, model: Any) -> None:
        if self.outer is not None:
            raise UnsupportedError(
                "DiLoCoStrategy(inner=ChaosPipelineStrategy(...)) is not supported: a rank of a cluster exchanges the "
                "whole model with the parameter server, and here a member has some of its layers. Use "
                "inner='chaos', or strategy chaos_pipeline alone"
            )
        super().connect(model)
        trainer: Trainer | None = model._trainer
        if trainer is not None and trainer.state.fn not in (None, TrainerFn.FITTING):
            refuse_freed(model, str(trainer.state.fn))

    def _train_alone(self, trainer: Trainer) -> None:
        """Prepares a fit without a job: the whole model trains here, and each step accumulates its micro-batches."""
        assert self.pipeline is not None
        trainer.accumulate_grad_batches = self.pipeline.micro_batches
        if self.pipeline.chain:
            trainer.lightning_module.chaos_chain = self.pipeline.chain  # type: ignore[assignment]

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Lets a model that is built within this context take no memory; a part gets its memory when a member owns
        it.
        """
        if (fit := self._fit) is None:
            yield
            return
        with fit.model.recorded():
            yield

    def model_to_device(self) -> None:
        """Registers the model as it was built; it is not moved: layers get their memory when this member owns them."""
        if (fit := self._fit) is None:
            super().model_to_device()
        else:
            fit.model.take()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._fit is not None and self.session is not None:
            warn_unused(self.session.config)
            warn_of_parts(self.session.trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        if self.session is not None:
            prepare_validation(self.session.trainer)
        super().setup(trainer)

    # ------------------------------------------------------------------ validation

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader that Lightning uses. In validation all members see all batches, since each runs its own
        layers on them.
        """
        if self._fit is None or self.session is None or self.session.trainer.training:
            return super().process_dataloader(dataloader)
        return same_everywhere(dataloader)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._fit is not None and self.in_job:
            self._fit.evaluation.begin()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._fit is None or self.session is None:
            return super().validation_step(*args, **kwargs)
        return self._fit.evaluation.step()

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning reads a checkpoint only after set-up. In fit it must: then the layers that this member
        does not own have no memory, and are not read.
        """
        return self._fit is not None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        fit = self._fit
        return (
            super().lightning_module_state_dict()
            if fit is None
            else pipeline_files.lightning_module_state_dict(fit.model.module)
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if (fit := self._fit) is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            pipeline_files.load_model_state_dict(fit.model.loaded, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if (fit := self._fit) is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            pipeline_files.load_optimizer_state_dict(fit.model.loaded, self.optimizers, self.root_device, checkpoint)

    def _read(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._fit is None:
            return super()._read(path, weights_only)
        return pipeline_files.load_checkpoint(self.checkpoint_io, path, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if (fit := self._fit) is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.in_job:
            self.barrier("before saving")
        if self.session is not None and self.session.says_unsaved(str(filepath)):
            return
        pipeline_files.save_checkpoint(self, self.session, checkpoint, filepath, storage_options, fit.model.partial)
        if self.session is not None and self.in_job and self.is_global_zero:
            path = os.path.abspath(filepath) if _is_local_file_protocol(str(filepath)) else str(filepath)
            self.session.engine.saved(self.session.member.stepped[0], path)
