"""Defines `ChaosStrategy`, which passes Lightning's hooks on to the parts of this package that handle them.

Theory of operation. The strategy itself knows what Lightning calls when, and nothing else: a `FitSession` is this fit's
part in the job, `Collectives` are Lightning's small collectives, `ChaosEnvironment` tells this process's rank. Outside
of fit there is no session, and everything behaves as on a single device.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import ReduceOp
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.data_connector import _worker_check
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.data.workers import tie_workers
from chaos_lightning.declared import options_of
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.pipeline.device_memory import device_memory
from chaos_lightning.pipeline.hooked import alone
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.planning.batch import MEMBER, UNSCALED
from chaos_lightning.settings import ARGUMENTS, ChaosOptions, EngineConfig
from chaos_lightning.strategies.collectives import LOG_DIR, Collectives, call_site, users_call_site
from chaos_lightning.strategies.companion import Companion, Launcher, watch_spikes
from chaos_lightning.strategies.elastic import ElasticPart, OuterTerms, refuse_ranks
from chaos_lightning.strategies.environment import ChaosEnvironment, local_rank
from chaos_lightning.strategies.evaluation import EvalLoader, can_be_assigned, unsharded, whole
from chaos_lightning.strategies.fingerprint import seed_of
from chaos_lightning.strategies.fixed_fit import FIXED_TABLE, FixedFit, warn_unused_fits
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import agree_on_validation
from chaos_lightning.strategies.outer_refusals import RANKS_TABLE
from chaos_lightning.strategies.pipeline_fit import PipelineFit
from chaos_lightning.strategies.pipeline_model import PipelineModel
from chaos_lightning.strategies.place import Place, end_evaluating, place_to_evaluate
from chaos_lightning.strategies.preparing import DataTurn
from chaos_lightning.strategies.refusals import (
    SCALED_TABLE,
    TABLE,
    Refusal,
    check_host_version,
    refuse,
    refuse_loaders,
    warn_ignored,
)
from chaos_lightning.strategies.saving import KEY, convert_position, save, with_loaders
from chaos_lightning.strategies.schedules import go_by_step
from chaos_lightning.strategies.session import DataMode, FitSession
from chaos_lightning.strategies.unit_stepper import UnitStepper
from chaos_lightning.variables import warn_of_unknown

_log = logging.getLogger("chaos_lightning")


class ChaosStrategy(ParallelStrategy):
    """Data-parallel training whose members may join, leave and die.

    Args:
        endpoint: The scheduler as HOST:PORT. If it is this machine's and free, the first process hosts it.
        job: Name of the job; members of different jobs never meet.
        name: This node's name, unique in the job.
        min_nodes: Training starts with, and pauses below, so many nodes.
        max_nodes: Workers of further nodes wait as standbys.
        data: "shared": all members have the same data set and each sample is used once per epoch. "local": each
            member has data of its own.
        log_dir: Folder of the event log, by which audit, report and top know what happened: auto, none, or a folder.
            auto is one in ~/.local/state, which is said at the join.
        options: `ChaosOptions` or a mapping of its fields.

    Arguments that are None come from the environment (CHAOS_ENDPOINT and so on, set by the torchrun backend), else
    from the engine's defaults. Two things are read from the LightningModule if it has them: `chaos_buffers`, names of
    buffers that forward passes change and that are to be averaged with each step, and `chaos_weight(batch, batch_idx)`,
    what a batch weighs in the average if not its number of samples. While fit trains, the process switches threads
    after 0.5 ms (`sys.setswitchinterval`); afterwards the interval is what it was.
    """

    strategy_name = "chaos"
    refused: ClassVar[tuple[Refusal, ...]] = TABLE

    def __init__(
        self,
        endpoint: str | None = None,
        job: str | None = None,
        name: str | None = None,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        data: DataMode = "shared",
        log_dir: str | None = None,
        options: ChaosOptions | dict[str, Any] | None = None,
    ) -> None:
        told = locals()
        super().__init__(cluster_environment=ChaosEnvironment())
        if data not in ("shared", "local"):
            raise ConfigurationError(f"data={data!r}; expected 'shared' or 'local'")
        self.data = data
        self.options = options_of(ChaosOptions, options)
        self._given = {name: told[name] for name in ARGUMENTS}
        self.session: FitSession | None = None
        self.outer: OuterTerms | None = None
        """Settings of outer sync; if set before fit, the members are ranks of one cluster (diloco.py)."""
        self.pipeline: PipelineOptions | None = None
        """Options of pipelines; if set before fit, members own parts of the model (pipeline.py)."""
        self.collectives = Collectives(self._gather, self._device, self.reduce)
        self._turn = DataTurn(self.environment)
        self._place: Place | None = None
        """Place of this process among those that evaluate before fit."""
        self._has_fitted = False
        self._assign_validation: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of the strategy, without this fit's part in the job."""
        return {**super().__getstate__(), "session": None, "_place": None}

    # ------------------------------------------------------------------ where this process runs

    @property
    def environment(self) -> ChaosEnvironment:
        assert isinstance(self.cluster_environment, ChaosEnvironment)
        return self.cluster_environment

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[min(local_rank(), len(devices) - 1)]

    def _device(self) -> torch.device:
        return self.root_device

    @property
    def is_distributed(self) -> bool:
        """Whether this is a fit: only then Lightning honours `sync_dist=True`. Outside of fit one process works
        alone, and the user's sampler stays.
        """
        return self.session is not None and not self.session.closed

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def in_job(self) -> bool:
        """Whether this process is in a job, so that collectives reach other members."""
        return self.session is not None and self.session.in_job

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self._present_session)

    def _present_session(self) -> FitSession | None:
        return self.session

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ------------------------------------------------------------------ set-up

    def connect(self, model: Any) -> None:
        super().connect(model)
        # Without one, as after `strategy.connect(model)` by hand, there is nothing but a model to save.
        trainer: Trainer | None = model._trainer
        self.session = None
        if trainer is None:
            return
        if trainer.state.fn != TrainerFn.FITTING:
            if trainer.state.fn is not None:
                self._evaluate()
            return
        self._has_fitted = True
        if alone(f"strategy {self.strategy_name}"):
            self._train_alone(trainer)
            return
        check_host_version(self.strategy_name)
        # Samples are assigned here; a DistributedSampler would shard a second time.
        connector = trainer._accelerator_connector
        if self._assign_validation is None:
            self._assign_validation = connector.use_distributed_sampler
        connector.use_distributed_sampler = False
        config = self._config()
        end_evaluating(config)
        place = Place(config)
        self.environment.place(place.rank, place.world_size)
        self.session = FitSession(
            trainer,
            config,
            place,
            self.options,
            self.data,
            self._assign_validation,
            self.environment,
            self.collectives,
        )
        if self.pipeline is not None:
            self.session.hooks = self._pipeline_fit(trainer, self.pipeline)
        if self.outer is not None:
            self.session.hooks = ElasticPart(trainer, self.outer)
            for name, plain in (("batch", MEMBER), ("lr_scaling", UNSCALED)):
                if (given := getattr(config, name)) != plain:
                    raise UnsupportedError(
                        f"{name}={given!r} in a cluster of outer sync: a cluster's push weighs what its members "
                        f"trained, and its batch follows from them. Use {name}={plain} there"
                    )
        elif self.pipeline is None:
            warn_unused_fits(config)
        if self.pipeline is None and config.batch != MEMBER:
            self.session.hooks = FixedFit(trainer, config, self.collectives, seed_of(self.options.seed))
        if place.rank == 0 and not self.session.hooks.writes:  # a rank of another cluster does
            self.environment.place(1, place.world_size + 1)
        # Last: teardown takes it out where there is a session.
        trainer.callbacks[:] = [
            Companion(self.session),
            *(c for c in trainer.callbacks if not isinstance(c, Companion)),
        ]

    def _train_alone(self, trainer: Trainer) -> None:
        """Prepares a fit that trains without a job."""

    def _pipeline_fit(self, trainer: Trainer, options: PipelineOptions) -> PipelineFit:
        memory = device_memory(options.given_memory, self.root_device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        model = PipelineModel(trainer, seed_of(self.options.seed), self.root_device, options.chain)
        return PipelineFit(trainer, options, model, memory, self.collectives)

    def _config(self) -> EngineConfig:
        warn_of_unknown()
        options = self.options.for_engine()
        if self.outer is not None:
            options["notice"] = options["notice"] or self.outer.cluster.notice or None
        return EngineConfig.build({**self._given, **options})

    def _evaluate(self) -> None:
        """Gives this process a rank for validate, test or predict. Every process evaluates everything, but one alone
        is to write: so each takes, before fit, the rank that it would have in fit. After fit it keeps fit's rank.
        """
        if self._has_fitted or self._place is not None:
            return
        self._place = place_to_evaluate(self._config())
        self.environment.place(self._place.rank, self._place.world_size)
        if self._place.rank:
            _log.warning(
                "this process evaluates all data, and logs and writes nothing: it would be rank %d of job %r, and rank "
                "0 writes. To evaluate beside the job, use another strategy, or another job name",
                self._place.rank, self._config().job,
            )  # fmt: skip

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.session is not None:
            refuse(self.session.trainer, early=True, table=self.refused, strategy=self.strategy_name)
            if self.outer is not None:
                refuse(self.session.trainer, early=True, table=RANKS_TABLE, strategy="chaos_diloco")
                refuse_ranks(self.session.config, self.data, self.outer)
            if isinstance(self.session.hooks, FixedFit):
                refuse(self.session.trainer, early=True, table=FIXED_TABLE, strategy="chaos with batch=fixed")
            elif self.pipeline is None and self.session.config.lr_scaling != UNSCALED:
                refuse(self.session.trainer, early=True, table=SCALED_TABLE, strategy="chaos with lr_scaling")
            warn_ignored(self.session.trainer, len(self.parallel_devices or ()))
            self._turn.begin(self.session.config.job)

    def setup(self, trainer: pl.Trainer) -> None:
        session = self.session
        if session is None:
            super().setup(trainer)
            return
        with session.lengths.estimating():
            super().setup(trainer)
        go_by_step(trainer.lr_scheduler_configs)
        refuse(session.trainer, early=False, table=self.refused, strategy=self.strategy_name)
        session.handover.metrics.install()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader that Lightning uses. Loaders of fit are divided among members; those of validate, test
        and predict yield everything in this process.
        """
        if self.session is None:
            return unsharded(dataloader)
        trainer = self.session.trainer
        if trainer.training:
            # Lightning checks what it gets from here, which is no DataLoader of torch's.
            _worker_check(trainer, dataloader, "train_dataloader")
            return self.session.wrap(dataloader)
        everything = tie_workers(whole(dataloader))
        wanted = self._assign_validation or everything is not dataloader
        if wanted and can_be_assigned(everything, trainer):
            _worker_check(trainer, dataloader, "val_dataloader")
            return EvalLoader(everything, self.session.evaluation)
        return everything

    def on_train_start(self) -> None:
        """Prepares training, in the last hook before batches are fetched. Makes the validation loaders already here,
        while this process is alone: a member that joins later would wait in their barriers for members that have
        them.
        """
        if self.session is None:
            return
        trainer = self.session.trainer
        refuse_loaders(trainer, self.strategy_name)
        self.session.hooks.begin()
        # Lightning does this where it makes the loader: for estimated_stepping_batches, before it reads the checkpoint.
        trainer.fit_loop._load_combined_loader_states()
        self.session.loader.warn_of_lost_place()
        agree_on_validation(trainer, self.broadcast)
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        if trainer.enable_validation and val_loop._combined_loader is None:
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
            if trainer.reload_dataloaders_every_n_epochs:
                # They are made anew when Lightning would make them for the first time, and counted from there on.
                val_loop._last_val_dl_reload_epoch = float("-inf")

    # ------------------------------------------------------------------ training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        session, parent = self.session, super().training_step
        if session is None or not session.in_job:
            return parent(*args, **kwargs)
        return session.hooks.training_step(session, lambda: parent(*args, **kwargs), args[0])

    def on_validation_start(self) -> None:
        if self.session is not None:
            self.session.hooks.show_base()

    def on_validation_end(self) -> None:
        """Restores the trained parameters after validation, once ModelCheckpoint and EarlyStopping have judged."""
        if self.session is not None:
            self.session.hooks.show_own()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        parent = super().lightning_module_state_dict
        return parent() if self.session is None else self.session.hooks.state_dict(parent)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        session, parent = self.session, super().validation_step
        if session is None or not session.in_job:
            return parent(*args, **kwargs)
        return session.evaluation.step(lambda: parent(*args, **kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        session, parent = self.session, super().backward
        if session is None or not session.entered:
            return parent(closure_loss, optimizer, *args, **kwargs)
        if isinstance(session.stepper, UnitStepper):  # a member that is released by the step's header takes it, too
            return session.stepper.backward(closure_loss) if session.within else closure_loss
        if session.stepper.manual is not None:
            return self._manual_backward(session, closure_loss, optimizer, *args, **kwargs)
        if session.stepper.hooked:
            return self._hooked_backward(session, closure_loss, optimizer, *args, **kwargs)
        return session.backward(closure_loss, lambda loss: parent(loss, optimizer, *args, **kwargs))

    def _manual_backward(
        self, session: FitSession, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs a backward pass of manual optimization, and averages gradients before `on_after_backward`, as DDP
        does.
        """
        module, precision = session.trainer.lightning_module, self.precision_plugin
        scaled = precision.pre_backward(loss, module)
        session.manual_backward(lambda: precision.backward(scaled, module, optimizer, *args, **kwargs))
        return precision.post_backward(scaled, module)

    def _hooked_backward(
        self, session: FitSession, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs a backward pass; if it is a step's last one, averages gradients before `on_after_backward`, as DDP
        does.
        """
        module, precision = session.trainer.lightning_module, self.precision_plugin

        def run(given: Tensor) -> Tensor:
            scaled = precision.pre_backward(given, module)
            precision.backward(scaled, module, optimizer, *args, **kwargs)
            return scaled

        return session.backward(loss, run, lambda given: precision.post_backward(given, module))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients of accumulating micro-batches unsent during this context. Manual optimization averages
        them nevertheless, so that micro-batches of different sizes get the right weights.
        """
        with self.session.engine.hold() if self.in_job and self.session is not None else nullcontext():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs an optimizer's step, with gradients averaged after the closure and before the precision plugin uses
        them.
        """
        session, parent = self.session, super().optimizer_step
        if session is None or not session.entered:
            return parent(optimizer, closure, model, **kwargs)
        return session.optimizer_step(optimizer, closure, lambda given: parent(optimizer, given, model, **kwargs))

    # ------------------------------------------------------------------ collectives

    def _gather(self, name: str, payload: bytes, line: str) -> list[tuple[str, bytes]] | None:
        return self.session.gather(name, payload, line=line) if self.session is not None else None

    def _early(self) -> None:
        """Warns if user code calls a collective before the first batch: members meet only there, so it reaches no
        other member.
        """
        session = self.session
        if session is None or session.entered or session.closed or self.world_size == 1:
            return
        if not session.trainer.sanity_checking and (site := users_call_site()):
            warnings.warn(
                f"{site} asks all members before the first batch, where they meet: it gets this process's own value, "
                "and waits for nobody. Do it in on_train_batch_start or later, or make the same value everywhere, from "
                "a seed or a file that all see",
                stacklevel=3,
            )

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        self._turn.end()
        self._early()
        self.collectives.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.session is not None and self.collectives.in_step and call_site() == LOG_DIR:
            return self.session.writer.told_log_dir(obj)
        self._early()
        return self.collectives.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        self._early()
        return self.collectives.reduce(tensor, _op_name(reduce_op))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads and tensor.requires_grad:
            raise UnsupportedError(
                "all_gather(sync_grads=True) is not supported by strategy chaos: gradients would have to flow "
                "to members "
                "that may be gone; compute the loss on local samples, or detach"
            )
        self._early()
        return self.collectives.all_gather(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._early()
        return self.collectives.decide(decision, all)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lets the writer alone write a checkpoint, after a barrier that makes the last step final. If the file
        cannot be written, all members raise.
        """
        if self.in_job:
            # Members' names of a collective must be equal; their paths need not be, as only the writer's is used.
            self.barrier("before saving")
        if self.session is not None and self.session.says_unsaved(str(filepath)):
            return
        save(self, self.session, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = with_loaders(self._read(checkpoint_path, weights_only))
        ours = checkpoint.pop(KEY, {})  # `on_load_checkpoint` sees what Lightning has written, and no more
        if self.session is not None:
            of_steps = self.pipeline.micro_batches if self.pipeline is not None else int(bool(self.session.hooks.batch))
            convert_position(checkpoint, of_steps, self.session.trainer.accumulate_grad_batches)
            self.session.member.checkpoints.load({**ours, "step": checkpoint.get("global_step", 0)})
        return checkpoint

    def _read(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint from its file."""
        return super().load_checkpoint(path, weights_only)

    # ------------------------------------------------------------------ the end

    def on_train_end(self) -> None:
        if self.session is not None:
            self.session.finish()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.session is not None:
            self.session.abandon(exception)

    def teardown(self) -> None:
        self._turn.end()
        if self.session is not None:
            self.session.close()
            trainer = self.session.trainer
            trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, Companion)]
            watch_spikes(trainer.callbacks, idle=False)
            # The rank stays, so that one process saves the final model; the others are gone.
            rank = self.global_rank
            self.environment.place(rank, rank + 1)
        super().teardown()


def _op_name(op: ReduceOp | str | None) -> str:
    if op is None:
        return "sum"
    if isinstance(op, str):
        return op
    known = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
    return next((word for name, word in known.items() if op == getattr(ReduceOp, name, object())), str(op))
