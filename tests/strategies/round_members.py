"""Runs members that validate in rounds as threads of one process, with Lightning's own loop, the real executor and
no network.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanSquaredError

from chaos_lightning.errors import AttemptOverError
from chaos_lightning.membership.parts import division
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.executor import PipelineExecutor, SlotAttempt, StepWork
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import FORWARD, ViewPipelines, coverage_error
from chaos_lightning.protocol.types import Member, View, ViewId
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.pipeline_evaluation import PipelineEvaluation, prepare_validation
from chaos_lightning.strategies.pipeline_logs import UnitLogs

BLOCKS, WIDTH, DEADLINE_S = 4, 6, 60.0
TURN = threading.RLock()
"""Held in each pass: metrics are looked after by patches of their class."""


class Model(pl.LightningModule):
    """Model of blocks between an embedding and a head. Training leaves them unchanged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.nothing = nn.Parameter(torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nothing * 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.nothing], lr=0.0)


class Validates(Model):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        rows = list(batch.values()) if isinstance(batch, dict) else [batch]
        x = torch.cat([row[0] for row in rows if row is not None])
        y = torch.cat([row[1] for row in rows if row is not None])
        out = self(x)
        loss = F.mse_loss(out, y)
        size = len(x) if len(rows) > 1 else None  # Lightning does not know which loader's counts
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=size)
        self.log("val_step", loss, on_step=True, batch_size=len(x))
        self.log_dict({"worst": (out - y).abs().max()}, reduce_fx="max")
        return {"loss": loss, "out": out, "batch_idx": batch_idx}


class Measures(Validates):
    """Model with two metrics in validation: one is logged, the other is computed at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.mse, self.late = MeanSquaredError().set_dtype(torch.float64), MeanSquaredError().set_dtype(torch.float64)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        out = self(x)
        self.mse(out, y)
        self.log("mse", self.mse, on_step=True, on_epoch=True)
        self.late.update(out, y)
        return out.sum()

    def on_validation_epoch_end(self) -> None:
        self.log("late", self.late.compute())
        self.late.reset()


class Endless(IterableDataset):
    """Iterable data set, whose number of samples is unknown."""

    def __init__(self, count: int) -> None:
        self.rows = list(samples(count))

    def __iter__(self) -> Any:
        return iter(self.rows)


def samples(count: int, seed: int = 3) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, generator=g).double(), torch.randn(count, 1, generator=g).double())


def loader(count: int, batch_size: int = 2, seed: int = 3) -> DataLoader:
    return DataLoader(samples(count, seed), batch_size=batch_size)


class Heard(pl.Callback):
    """Callback that records what callbacks and the progress bar get in a validation."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.ends: list[dict[str, float]] = []
        self.bars: list[dict[str, float]] = []

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.batches.append((batch_idx, dataloader_idx, outputs))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.ends.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.bars.append(dict(trainer.progress_bar_metrics))


class Memory(Logger):
    """Logger that keeps all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, float], int | None]] = []

    name, version = "memory", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


# ------------------------------------------------------------------------------------------------ members


class Post:
    """Carries tensors between the members' stages, and the members' contributions to a round."""

    def __init__(self, view: View, failing: Sequence[tuple[str, int, int]] = ()) -> None:
        self.view, self.changed = view, threading.Condition()
        self.sent: dict[Any, Any] = {}
        self.said: dict[Any, Any] = {}
        self.over: set[SlotAttempt] = set()
        self.failing = set(failing)
        """(Member, slot, number of the unit) at which the first attempt ends."""
        self.attempts: dict[int, int] = {}
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        assert self.changed.wait_for(lambda: self.error is not None or ready(), DEADLINE_S)
        if self.error is not None:
            raise RuntimeError("another member failed") from self.error


class Ends:
    """One member's doubles of the exchange of tensors, the pipeline step and the engine."""

    def __init__(self, post: Post, member: str) -> None:
        self.post, self.member_id, self.view = post, member, post.view
        self.seq, self.looks = 0, 0
        self.rounds: list[tuple[str, str]] = []
        self.out_after = -1
        """Number of the slot after which this member is out of the job."""
        self.executor: PipelineExecutor | None = None

    # exchange --------------------------------------------------------------------------------

    def send(self, attempt: Any, to: str, key: Any, border: Any) -> None:
        with self.post.changed:
            self.post.sent[attempt, to, key] = border
            self.post.changed.notify_all()

    def there(self, attempt: Any, key: Any) -> bool:
        with self.post.changed:
            return attempt in self.post.over or (attempt, self.member_id, key) in self.post.sent

    def take(self, attempt: Any, key: Any) -> Any:
        with self.post.changed:
            place = (attempt, self.member_id, key)
            self.post.wait(lambda: place in self.post.sent or attempt in self.post.over)
            self._check(attempt)
            return self.post.sent.pop(place)

    def check(self, attempt: Any) -> None:
        with self.post.changed:
            if (self.member_id, attempt.seq, self.looks) in self.post.failing and attempt.view == self.view.id:
                self.post.over.add(attempt)
                self.post.changed.notify_all()
            self.looks += 1
            self._check(attempt)

    def _check(self, attempt: Any) -> None:
        if attempt in self.post.over:
            raise AttemptOverError(str(attempt))

    # step ------------------------------------------------------------------------------------

    def evaluate(self, attempt: Any, view: Any, member: str, empty: Any, batch: Any, call: Any) -> Any:
        assert self.executor is not None
        self.looks = 0
        units = [u for u in view.units(member, empty) if u.kind == FORWARD]
        return self.executor.run(StepWork(attempt, -attempt.seq, units, batch, lambda j: 0.0, call))

    # engine ----------------------------------------------------------------------------------

    def gather_by_units(self, name: str, attempt: Any, order: str) -> dict[str, bytes]:
        """Runs the units of a round at all members; makes a second attempt if the first one fails."""
        self.seq += 1
        self.rounds.append((name, order))
        for number in (1, 2):
            view = replace(self.view, id=ViewId(1, number))
            try:
                done = attempt(view, self.seq)
            except AttemptOverError:
                done = None
            said = self._meet((self.seq, number), (name, order, done))
            if all(each[2] is not None for each in said.values()):
                return self._close(said)
        raise AssertionError("two attempts failed")

    def _meet(self, key: Any, mine: Any) -> dict[str, Any]:
        with self.post.changed:
            self.post.said[(*key, self.member_id)] = mine
            self.post.changed.notify_all()
            keys = [(*key, m) for m in self.view.ids()]
            self.post.wait(lambda: all(k in self.post.said for k in keys))
            return {k[-1]: self.post.said[k] for k in keys}

    def _close(self, said: dict[str, Any]) -> dict[str, bytes]:
        assert len({(name, order) for name, order, _ in said.values()}) == 1, said
        done = {member: each[2] for member, each in said.items()}
        spans = {each.micro_batches for each in done.values()}
        assert len(spans) == 1
        assert not coverage_error(BLOCKS, spans.pop(), {m: each.coverage for m, each in done.items()})
        return {member: each.payload for member, each in done.items()}


class LoggedLayers:
    """Chain whose units log for training, too. Only one pass at a time runs in this process."""

    def __init__(self, chain: LayerChain, logs: UnitLogs) -> None:
        self.chain, self.logs = chain, logs

    def __len__(self) -> int:
        return len(self.chain)

    def run(self, first: int, end: int, batch: Any, *args: Any, at: tuple[int, int], call: Any) -> Any:
        with TURN, self.logs.unit(at[1], end == len(self), batch):
            return self.chain.run(first, end, batch, *args, at=at, call=call)


class RoundStrategy(SingleDeviceStrategy):
    """Strategy that validates in rounds. With `frees`, it frees the layers that its member does not own."""

    def __init__(self, ends: Ends, *, frees: bool) -> None:
        super().__init__(device="cpu")
        self.ends, self.frees = ends, frees
        self.evaluation: PipelineEvaluation | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        self.chain = LayerChain(module, "blocks", module.training_step)
        if self.frees:
            pipelines = division(self.ends.view).pipelines
            assert pipelines is not None
            (stage,) = pipelines.plan.stages[self.ends.member_id]
            mine = [f"blocks.{layer}." for layer in stage.layers] + ["nothing"]
            mine += ["embed."] * (0 in stage.layers) + ["head."] * (BLOCKS - 1 in stage.layers)
            memory = ModelMemory(module, 1, "cpu")
            memory.leave_out([n for n, _ in module.named_parameters() if not n.startswith(tuple(mine))])
        collectives = Collectives(lambda *_: None, lambda: torch.device("cpu"), self.reduce)
        self.training = UnitLogs(trainer, collectives, self.chain.refuse_placeholders)
        self.chain.aside = self.training.aside
        self.ends.executor = PipelineExecutor(module, LoggedLayers(self.chain, self.training), self.ends)
        self.ends.executor.remember_base()
        logs = UnitLogs(trainer, collectives, self.chain.refuse_placeholders, "validation_step")
        ends: Any = self.ends
        self.evaluation = PipelineEvaluation(
            trainer, self.gather, lambda: ends, lambda: ends, logs, lambda: self.chain.is_last
        )
        self.metrics = [m for m in module.modules() if isinstance(m, MeanSquaredError)]
        prepare_validation(trainer)

    def gather(self, name: str, attempt: Any, order: str) -> dict[str, bytes] | None:
        """Runs a round; before each attempt, metrics are reset to the state before the round, as the engine's units
        do.
        """
        if self.ends.out_after == self.ends.seq:
            return None
        kept = [(m._copy_state_dict(), m._update_count) for m in self.metrics]

        def anew(view: View, seq: int) -> Any:
            self.training.forget()
            for metric, (states, count) in zip(self.metrics, kept, strict=True):
                for state, value in states.items():
                    setattr(metric, state, copy.deepcopy(value))
                metric._update_count, metric._computed = count, None
            return attempt(view, seq)

        return self.ends.gather_by_units(name, anew, order)

    def on_validation_start(self) -> None:
        assert self.evaluation is not None
        self.evaluation.begin()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.evaluation is not None
        return self.evaluation.step()

    def teardown(self) -> None:
        self.chain.close()
        super().teardown()


def a_view(cut: Sequence[int], micro_batches: int) -> View:
    """Returns a view with one pipeline of members a, b, ..., whose stages end at the layers of `cut`."""
    names = "abcdef"[: len(cut) - 1]
    stages = tuple(PlanStage(n, a, b) for n, (a, b) in zip(names, pairwise(cut), strict=True))
    plan = PipelinePlan(BLOCKS, (Pipeline(stages, micro_batches),))
    members = tuple(Member(n, n, "host", "127.0.0.1", 1) for n in names)
    return View(ViewId(1, 1), ViewId(1, 0), members, pipelines=ViewPipelines.of(plan).to_json())


def fit(
    tmp_path: Any, module: pl.LightningModule, loaders: Any, strategy: Any, **settings: Any
) -> tuple[Heard, Memory]:
    heard, memory = Heard(), Memory()
    settings = {"max_epochs": 2, **settings}
    if strategy == "auto":
        settings["num_sanity_val_steps"] = 0
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, logger=memory, callbacks=[heard], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, log_every_n_steps=1,
        limit_train_batches=1, **settings,
    )  # fmt: skip
    trainer.fit(module, loader(4), loaders)
    return heard, memory


def fit_in_rounds(
    tmp_path: Any,
    make: Callable[[], pl.LightningModule],
    loaders: Callable[[], Any],
    cut: Sequence[int] = (0, 2, BLOCKS),
    micro_batches: int = 3,
    failing: Sequence[tuple[str, int, int]] = (),
    out_after: int = -1,
    **settings: Any,
) -> dict[str, tuple[Heard, Memory, Ends]]:
    """Runs a fit at all members of one pipeline; returns each member's records, by name."""
    post = Post(a_view(cut, micro_batches), failing)
    # Threads share one generator of random numbers.
    made = {name: (make(), loaders()) for name in post.view.ids()}

    def one(member: str) -> Any:
        ends = Ends(post, member)
        ends.out_after = out_after
        try:
            strategy = RoundStrategy(ends, frees=len(cut) > 2)
            return (*fit(tmp_path / member, *made[member], strategy, **settings), ends)
        except BaseException as error:
            post.fail(error)
            raise

    names = post.view.ids()
    if len(names) == 1:
        return {names[0]: one(names[0])}
    with ThreadPoolExecutor(len(names)) as pool:
        futures = {name: pool.submit(one, name) for name in names}
    errors = [e for f in futures.values() if (e := f.exception()) is not None]
    if errors:
        raise next((e for e in errors if e is post.error), errors[0])
    return {name: f.result() for name, f in futures.items()}
