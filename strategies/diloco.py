"""Defines `DiLoCoStrategy`, which makes a Trainer one cluster of an outer job (docs/diloco.md).

Theory of operation. Clusters that are far apart train one model. Each trains by itself for some steps, with its own
optimizer, and a parameter server makes versions of what they gained (docs/outer.md). `DiLoCoStrategy` returns one of
two strategies. If the ranks of the cluster come and go, it is a `ChaosStrategy` with a part in the outer job
(elastic.py). Else it is a `ClusterStrategy`: Lightning's DDP with a part in the outer job for the time of fit,
`OuterFit`. A cluster enters the outer job when the model is on its device, so everything after that, `on_fit_start` and
the sanity check included, sees the job's newest version.

The number of devices is known only once the Trainer has looked, so `ClusterStrategy` serves a single process, too: it
has no process group then, and its collectives return what they are given. Several processes hold equal parameters after
each optimizer step, so rank 0 alone is the member of the outer job (outer_ranks.py).

Only the oldest cluster of a job logs and writes files, as rank 0 does elsewhere; each cluster draws its own progress
bar.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.connectors.data_connector import _worker_check
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

from chaos_lightning.data.leased import LeasedLoader
from chaos_lightning.data.workers import tie_workers
from chaos_lightning.declared import options_of
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.orphan import VARIABLE as UNDER_OUR_TORCHRUN
from chaos_lightning.member.training import least_batch
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.server_start import others_in
from chaos_lightning.outer.cluster.session import OuterSession, agreement_of
from chaos_lightning.outer.cluster.strategy_options import ARGUMENTS, DiLoCoOptions, build
from chaos_lightning.outer.rules.types import Agreement
from chaos_lightning.pipeline.hooked import alone
from chaos_lightning.planning.batches import UNTOLD, Batches
from chaos_lightning.strategies.companion import Launcher, RankLauncher
from chaos_lightning.strategies.elastic import OuterTerms, replica_of, words_of
from chaos_lightning.strategies.environment import OneProcess
from chaos_lightning.strategies.fingerprint import seed_of
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.outer_fit import OuterCompanion, OuterFit, SharedLoader
from chaos_lightning.strategies.outer_ranks import RankedSession, RankGroup
from chaos_lightning.strategies.outer_refusals import OUTER_TABLE, refuse_inner, refuse_one_process
from chaos_lightning.strategies.refusals import check_host_version, refuse, refuse_loaders
from chaos_lightning.strategies.session import DataMode
from chaos_lightning.strategies.strategy import ChaosStrategy
from chaos_lightning.variables import warn_of_unknown

NAME = "chaos_diloco"
MARGIN_S = 60.0
"""Seconds by which other ranks wait longer for rank 0's word than rank 0 waits for anything."""


class ClusterStrategy(DDPStrategy):
    """Strategy of a cluster that is one process, or several on one machine that DDP keeps in step.

    Args:
        inner: Way in which the cluster trains: "auto", "single", "ddp", or a `DDPStrategy` whose settings are taken.
        options: Further options.
        given: Arguments of `DiLoCoStrategy` that are settings, by name.

    Attributes:
        data: "shared" if clusters share the data, "local" if each has its own.
        fit: Part of this fit in the outer job; None outside of fit.
    """

    strategy_name = NAME

    def __init__(self, inner: str | DDPStrategy, options: DiLoCoOptions, given: dict[str, Any]) -> None:
        super().__init__()
        if isinstance(inner, DDPStrategy):
            vars(self).update(vars(inner))
        self.inner, self.options, self._given = inner, options, given
        self.data = build(options, given)[1].data
        self.fit: OuterFit | None = None
        self._manual_steps = 0
        self._oldest = True

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of the strategy, without this fit's part in the job."""
        return {**super().__getstate__(), "fit": None}

    def _present_fit(self) -> OuterFit | None:
        return self.fit

    # ------------------------------------------------------------------ one process or several

    def set_world_ranks(self) -> None:
        """Decides whether the cluster is one process: Lightning calls this once it knows how many devices there are."""
        if self.inner == "single" or (self.inner == "auto" and len(self.parallel_devices or ()) < 2):
            self.cluster_environment, self._layer_sync = OneProcess(), None
        else:
            super().set_world_ranks()
            self.writes(self._oldest)

    @property
    def single(self) -> bool:
        """Whether the cluster is one process, without a process group or a DDP wrapper."""
        return isinstance(self.cluster_environment, OneProcess)

    @property
    def place(self) -> tuple[int, int]:
        """Rank of this process within its cluster, and the cluster's number of processes."""
        return (0, 1) if self.single else (self.global_rank, self.world_size)

    @property
    def is_global_zero(self) -> bool:
        return self._oldest and self.global_rank == 0

    def writes(self, oldest: bool) -> bool:
        """Takes in whether this cluster is the oldest one, which alone logs and writes files.

        Returns:
            Whether the cluster has become the oldest one now.
        """
        promoted, self._oldest = oldest and not self._oldest, oldest
        if isinstance(self.cluster_environment, OneProcess):
            self.cluster_environment.place(int(not oldest), 1)
        else:
            rank_zero_only.rank = self.global_rank + (0 if oldest else self.world_size)  # type: ignore[attr-defined]
        return promoted

    def _configure_launcher(self) -> None:
        if self.single:
            self._launcher = Launcher(self._present_fit)
        else:
            assert self.cluster_environment is not None
            self._launcher = RankLauncher(
                self._present_fit, self.cluster_environment, self.num_processes, num_nodes=self.num_nodes
            )

    def _setup_model(self, model: Any) -> Any:
        return model if self.single else super()._setup_model(model)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self.single else super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if self.single else super().all_gather(tensor, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.single:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.single else super().broadcast(obj, src)

    # ------------------------------------------------------------------ set-up

    def connect(self, model: Any) -> None:
        super().connect(model)
        trainer: Trainer | None = model._trainer
        self.fit = None
        if trainer is None:
            return
        if self.single:  # else Lightning takes this process for one of several
            trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if alone(f"strategy {NAME}"):
            return
        check_host_version(NAME)
        patience_s = build(self.options, self._given)[1].patience_s
        self.fit = OuterFit(trainer, self.writes, patience_s, self.place[1])
        # Last: `teardown` takes the callback out only if there is a fit.
        trainer.callbacks[:] = [OuterCompanion(self.fit), *_others(trainer)]

    def setup_environment(self) -> None:
        if self.single:
            if self.fit is not None:
                refuse_one_process(len(self.parallel_devices or ()))
            Strategy.setup_environment(self)
        else:
            super().setup_environment()
        if self.fit is not None:
            refuse(self.fit.trainer, early=True, table=OUTER_TABLE, strategy=NAME)
            # Loggers open while Lightning sets up, and empty a folder that is named, which may be another cluster's.
            self.writes(not self.broadcast(others_in(build(self.options, self._given)[1])))

    def setup(self, trainer: pl.Trainer) -> None:
        fit = self.fit
        if self.single:
            Strategy.setup(self, trainer)
        else:
            if fit is not None and self.data == "shared":
                # Lightning would have ranks share the training samples out; the loader of leased samples does.
                connector = trainer._data_connector
                asked = connector._requires_distributed_sampler
                vars(connector)["_requires_distributed_sampler"] = lambda loader: not trainer.training and asked(loader)
            super().setup(trainer)
        if fit is None:
            return
        refuse(fit.trainer, early=False, table=OUTER_TABLE, strategy=NAME)
        fit.trainer.fit_loop.setup_data()
        if self.data == "shared":
            refuse_loaders(fit.trainer, NAME)
        elif self.options.seed is not None:
            warnings.warn(
                f"options.seed={self.options.seed} is not honoured with data='local': a cluster of one process, or of "
                "DDP's ranks, goes over its own loader, in the order that this draws",
                stacklevel=2,
            )
        self._come_in(fit)

    def _come_in(self, fit: OuterFit) -> None:
        warn_of_unknown()
        settings, options = build(self.options, self._given, batch=fit.batch)
        replica = replica_of(fit.trainer.lightning_module)
        words = words_of(fit.trainer)
        length, batches = 0, None
        if fit.loader is not None:
            length, batches = fit.loader.leased.length, fit.loader.leased.batches(fit.trainer.accumulate_grad_batches)
            words |= fit.loader.leased.words
        agreement = agreement_of(replica, options, settings, length=length, words=words)
        fit.start(self._session(replica, agreement, options, batches), self.options.start_timeout_s)

    def _session(
        self, replica: Replica, agreement: Agreement, options: ClusterOptions, batches: Batches | None
    ) -> OuterSession | RankedSession:
        rank, member = self.place[0], None
        if rank == 0:
            events = EventLog.in_directory(options.log_folder, options.name, role="cluster")
            member = OuterSession(replica, agreement, options, events, batches or UNTOLD)
            if self.single:
                return member
        patience = timedelta(seconds=2 * options.patience_s + self.options.start_timeout_s + MARGIN_S)
        return RankedSession(member, replica, RankGroup(rank, patience), batches)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of the samples that the job leases to this cluster, if clusters share the data; else the
        user's own loader.
        """
        fit = self.fit
        if fit is None or self.data != "shared" or not fit.trainer.training:
            return tie_workers(dataloader) if fit is not None else dataloader
        # Lightning checks what it gets from here, which is no DataLoader of torch's.
        _worker_check(fit.trainer, dataloader, "train_dataloader")
        who = self._given["name"] or ""
        leased = LeasedLoader(
            dataloader,
            seed=seed_of(self.options.seed),
            source=fit,
            who=str(who),
            part=self.place,
            least=least_batch(fit.trainer.lightning_module),
        )
        return fit.share(SharedLoader(leased, fit.trainer, fit))

    def on_train_start(self) -> None:
        """Begins training in the outer job. Lightning calls no later hook before it fetches batches."""
        if self.fit is not None:
            self.fit.begin(self.options.leave_on_signals)

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._manual_steps = 0
        if self.fit is not None:
            self.fit.fetched(batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        fit = self.fit
        if fit is not None:
            fit.saw(output)
            if self._manual and (self._manual_steps or fit.last_known):
                fit.stepped(self._manual_steps)
        return output

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._manual_steps += 1
        if self.fit is not None and not self._manual:
            self.fit.stepped()
        return output

    @property
    def _manual(self) -> bool:
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    # ------------------------------------------------------------------ what is judged and written

    def on_validation_start(self) -> None:
        if self.fit is not None:
            self.fit.show_base()

    def on_validation_end(self) -> None:
        """Restores the cluster's own parameters after validation, once ModelCheckpoint and EarlyStopping have judged
        the version.
        """
        if self.fit is not None:
            self.fit.show_own()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the version adopted last, so that a checkpoint holds parameters that all
        clusters have.
        """
        fit = self.fit
        if fit is None or not fit.in_step or fit.shows_base:
            return super().lightning_module_state_dict()
        with fit.showing_base():
            state = super().lightning_module_state_dict()
            return {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}

    # ------------------------------------------------------------------ the end

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.fit is not None:
            self.fit.close()

    def teardown(self) -> None:
        if self.fit is not None:
            self.fit.close()
            self.fit.trainer.callbacks[:] = _others(self.fit.trainer)
            vars(self.fit.trainer._data_connector).pop("_requires_distributed_sampler", None)
        super().teardown()


def DiLoCoStrategy(
    inner: str | ChaosStrategy | DDPStrategy = "auto",
    server: str | None = None,
    name: str | None = None,
    inner_steps: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    policy: str | None = None,
    codec: str | None = None,
    data: DataMode | None = None,
    overlap: bool | None = None,
    options: DiLoCoOptions | dict[str, Any] | None = None,
) -> Strategy:
    """Makes a strategy for one of several clusters that train one model, each by itself, through a parameter server.

    Arguments that are None come from the environment (CHAOS_INNER_STEPS and so on), else they have their defaults. Two
    things are read from the LightningModule if it has them: `chaos_buffers`, names of buffers that forward passes
    change and that are to be averaged, and `chaos_words`, a mapping of what else must be equal in all clusters, such as
    a tokenizer's hash.

    Args:
        inner: How this cluster trains: "single" is one process with one device. "ddp", or a `DDPStrategy` with settings
            of its own: a process per device of this machine. "chaos", or a `ChaosStrategy`: this process is one of its
            ranks, which come and go. "auto" takes chaos under torchrun's backend chaos, ddp for several devices, else
            one process.
        server: The parameter server as HOST:PORT; where several leaders stand by for each other, all of them, with
            commas. Without it (and without the environment's CHAOS_PS) the first process of a machine starts one there.
        name: This cluster's name, unique in the job. All its ranks have the same one.
        inner_steps: Inner steps of a usual cluster from one push to the next (H).
        outer_lr: Learning rate of the server (eta).
        outer_momentum: Momentum of the server (mu).
        policy: When a round is decided, and which pushes count. One of robust, sync, async and di_ps.
        codec: How pushes and versions travel: bf16, fp32, int8, or one that was registered.
        data: shared: all clusters train one data set, each sample once an epoch. local: each has its own.
        overlap: Train on while a push travels and is judged. Off: wait for its version.
        options: `DiLoCoOptions` or a mapping of its fields.

    Returns:
        A `ChaosStrategy` with this cluster's part in the outer job around it if the inner strategy is chaos, else a
        `ClusterStrategy`.
    """
    told = locals()
    given = {name: told[name] for name in ARGUMENTS}
    if inner == "auto" and UNDER_OUR_TORCHRUN in os.environ:
        inner = "chaos"
    if inner == "chaos" or isinstance(inner, ChaosStrategy):
        strategy = inner if isinstance(inner, ChaosStrategy) else ChaosStrategy()
        strategy.outer = OuterTerms(options_of(DiLoCoOptions, options), given)
        return strategy
    refuse_inner(inner)
    return ClusterStrategy(inner, options_of(DiLoCoOptions, options), given)


def _others(trainer: Trainer) -> list[pl.Callback]:
    return [c for c in trainer.callbacks if not isinstance(c, OuterCompanion)]
