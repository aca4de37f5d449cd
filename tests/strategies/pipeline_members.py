"""Runs member processes for tests of strategy `chaos_pipeline`, and the same training in one process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from strategy_members import Gates
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.callbacks import CheckpointOnChange
from chaos_lightning.member.part_moves import PartMoves
from chaos_lightning.membership.parts import REST
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.strategies import ChaosPipelineStrategy, ChaosStrategy

WIDTH, CLASSES = 16, 8


def digits(samples: int, seed: int = 3) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, CLASSES, (samples, 6), generator=g)
    return TensorDataset(x, (x.sum(1) * 3 + 1) % CLASSES)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.pause_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def set_without_chance(module: nn.Module) -> None:
    """Sets the parameters by a formula, since one process would draw other random numbers than several members."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            waves = torch.sin(torch.arange(1.0, parameter.numel() + 1) * (1.7 + number))
            parameter.copy_(waves.view(parameter.shape) * 0.3 + (parameter.dim() == 1))


class Tower(pl.LightningModule):
    """Model of embedding, blocks, norm and head; if tied, the head uses the embedding's weight."""

    chaos_chain = "blocks"

    def __init__(
        self, blocks: int = 4, dropout: float = 0.0, tied: bool = False, lr: float = 0.01, pause_s: float = 0.0
    ) -> None:
        super().__init__()
        self.count, self.dropout, self.tied, self.lr, self.pause_s = blocks, dropout, tied, lr, pause_s
        self.slows: tuple[int, float] | None = None
        self.dies: tuple[int, int, int] | None = None
        self.rows: list[dict[str, float]] = []

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(self.dropout) for _ in range(self.count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        if self.tied:
            self.head.weight = self.embedding.weight
        set_without_chance(self)

    def logits(self, x: Tensor) -> Tensor:
        h = self.embedding(x).mean(1)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.dies is not None and self.dies[0] == self.trainer.global_step:
            self.dies = (self.dies[0], self.dies[1] - 1, self.dies[2])
            if self.dies[1] < 0 and self.dies[2]:
                raise torch.OutOfMemoryError("a layer of the user's")
            if self.dies[1] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        slow = self.slows is not None and self.trainer.global_step >= self.slows[0]
        for block in self.blocks if self.pause_s else ():
            block.pause_s = self.pause_s * (self.slows[1] if self.slows and slow else 1.0)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.logits(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.logits(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_hits", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Llama(Tower):
    """Small Llama of `transformers`, made from a config."""

    chaos_chain = "net.model.layers"

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": CLASSES, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=self.count))
        set_without_chance(self)

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]


class Watched(Tower):
    """Tower that clips gradients in a hook, logs their norms before each step, and has a frozen block."""

    def configure_model(self) -> None:
        super().configure_model()
        self.blocks[0].requires_grad_(False)

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **more: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = grad_norm(self, 2)
        self.log_dict(self.seen)


class Last(pl.Callback):
    """Callback that saves a checkpoint at the end of training."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)


class Rows(pl.Callback):
    """Callback that records the loss of each step, from the hook's `outputs` and from the logged metrics."""

    def __init__(self, paced_s: float = 0.0) -> None:
        self.paced_s = paced_s
        self.losses: list[float] = []
        self.logged: list[float] = []
        self.epochs: list[float] = []
        self.validated: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated += [float(trainer.callback_metrics[name]) for name in ("val_loss", "val_hits")]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.paced_s)
        self.losses.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.epochs.append(float(trainer.callback_metrics["loss_epoch"]))


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for text in (
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        "The number of training batches.*",
        "Checkpoint directory .* exists.*",
        "You defined a `validation_step`.*",
        "Be aware that when using `ckpt_path`.*",
        "Watched.* a hook sees the gradients and weights.*",
        "The `srun` command is available",
    ):
        warnings.filterwarnings("ignore", message=text)


def trained(strategy: Any, spec: dict[str, Any], callbacks: list[pl.Callback], **trainer: Any) -> tuple[Tower, Rows]:
    """Trains the model that `spec` describes with this strategy; returns the model and its recorded losses. See
    `member`.
    """
    pl.seed_everything(7, verbose=False)
    module, rows = globals()[spec.get("kind", "Tower")](**spec.get("model", {})), Rows(spec.get("paced_s", 0.0))
    module.dies = spec.get("dies")
    module.slows = spec.get("slows")
    data = DataLoader(digits(spec.get("samples", 96)), batch_size=spec.get("batch", 4), shuffle=False)
    if "saves" in spec:
        callbacks.append(ModelCheckpoint(spec["saves"], "{step}", every_n_train_steps=3, save_top_k=-1))
    if "saves_changes" in spec:
        callbacks.append(CheckpointOnChange(spec["saves_changes"], keep=0))
    if "saves_last" in spec:
        callbacks.append(Last(spec["saves_last"]))
    held_out = DataLoader(digits(spec.get("validation", 0), 9), batch_size=4)
    fit = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=spec.get("epochs", 2),
        callbacks=[rows, *callbacks],
        enable_progress_bar=False,
        enable_checkpointing="saves" in spec or "saves_changes" in spec,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=1,
        precision=spec.get("precision", "32-true"),
        **trainer,
    )
    fit.fit(module, data, held_out if "validation" in spec else None, ckpt_path=spec.get("ckpt_path"))
    return module, rows


def let_rest_wait(path: Path) -> None:
    """Delays pulls of the training state without the model's parts until the file `path` exists; before the first
    such pull, creates the file "asked" beside it.
    """
    pull = PartMoves._pull

    def late(moves: Any, wanted: Any, part: int, state: Any, deadline: float) -> bool:
        if state.part == REST:
            path.with_name("asked").touch()
        while state.part == REST and not path.exists():
            time.sleep(0.01)
        return pull(moves, wanted, part, state, deadline)

    PartMoves._pull = late  # type: ignore[method-assign]


def member(spec: dict[str, Any]) -> None:
    """Runs one member of a job with pipelines; or, without `micro_batches`, of one in which all have the whole model.

    Args:
        spec: name, port, out (folder of the report); min_nodes, micro_batches, device_memory, policy, model (arguments
            of `Tower`), samples, batch, epochs, precision, gates, dies (at a step, in the unit of this number, 1: as
            it runs out of memory), slows (from a step on each block takes so many times its pause_s), validation
            (samples), saves (folder of checkpoints), saves_changes (folder of those at changes of the members),
            saves_last (a checkpoint at the end), ckpt_path, paced_s (after each step), dry_run, kind (a class of this
            module instead of `Tower`), rest_waits (path of a file without which it pulls no rest of the state).
    """
    quiet()
    if "rest_waits" in spec:
        let_rest_wait(Path(spec["rest_waits"]))
    common = {
        "endpoint": f"127.0.0.1:{spec['port']}",
        "name": spec["name"],
        "min_nodes": spec.get("min_nodes"),
        "log_dir": os.environ["CHAOS_LOG_DIR"],
        "options": {"join_timeout_s": 40.0, "step_timeout_s": 40.0, **spec.get("options", {})},
    }
    strategy: Any
    if "micro_batches" in spec:
        strategy = ChaosPipelineStrategy(
            micro_batches=spec["micro_batches"],
            policy=spec.get("policy"),
            dry_run=spec.get("dry_run"),
            device_memory=spec.get("device_memory"),
            **common,
        )
    else:
        strategy = ChaosStrategy(**common)
    gates = Gates(spec.get("gates", {}), spec.get("worlds", {}), "", {})
    module, rows = trained(strategy, spec, [gates])
    found = {n: p.detach().clone() for n, p in module.named_parameters() if not is_absent(p)}
    report = {
        "losses": rows.losses,
        "logged": rows.logged,
        "epochs": rows.epochs,
        "validated": rows.validated,
        "parameters": found,
        "seen": getattr(module, "seen", {}),
    }
    torch.save(report, Path(spec["out"]) / f"{spec['name']}.pt")
