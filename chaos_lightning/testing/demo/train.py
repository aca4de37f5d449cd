"""Training script of the demo's nodes under torchrun: a small GPT on English prose, as one writes it for Lightning.

Theory of operation. The model reads the language reference that ships inside Python, byte by byte. Nothing in here
knows that members come and go: `Trainer(strategy="chaos")` is all there is to it. Three things serve the demo: each
step is made longer by a pause, standing for a model that would keep an accelerator busy (so that two cores are enough
for four nodes and for whoever is just starting); training ends at the end of the epoch in which a file appears, by a
vote as EarlyStopping's; and at the end each member writes down the hash of its weights. With `--alone` plain
Lightning trains the same, without pauses, for comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import chaos_lightning  # noqa: F401  (makes "chaos" known to Lightning)
from chaos_lightning.events.events import EventLog
from chaos_lightning.testing.demo import ALONE, LOSS, STEP_LOSS

VOCABULARY = 256
"""One token per byte."""


class Prose(Dataset[tuple[Tensor, Tensor]]):
    """Dataset of text in blocks; a sample is a block and, as its target, the same block shifted by one byte."""

    def __init__(self, text: bytes, block: int) -> None:
        self.block = block
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.bytes[index * self.block : (index + 1) * self.block + 1].long()
        return piece[:-1], piece[1:]


def prose(block: int, limit: int) -> tuple[Prose, Prose]:
    """Returns training and validation text: `limit` bytes of Python's help topics, one twentieth of them for
    validation.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()[:limit]
    cut = len(text) - len(text) // 20
    return Prose(text[:cut], block), Prose(text[cut:], block)


class GPT(LightningModule):  # type: ignore[misc]
    """A small decoder-only transformer with tied embeddings, trained by AdamW."""

    chaos_chain = "blocks"
    sample_s = 0.0
    """Seconds added to each sample of a training step."""

    def __init__(self, layers: int, width: int, block: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers, self.width, self.block, self.heads, self.dropout = layers, width, block, heads, dropout

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        width = self.width
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(self.block, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, self.heads, 4 * width, self.dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(self.layers)
        )
        self.norm = nn.LayerNorm(width)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the model's mean cross entropy per byte, in nats."""
        tokens, targets = batch
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(F.linear(self.norm(x), self.token.weight).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.sample_s * len(batch[0]))
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Demo(Callback):  # type: ignore[misc]
    """Callback that slows down steps, logs validation losses, and ends training once a file asks for it.

    Args:
        folder: Training ends at the end of the epoch in which a file `enough` appears here. If the file holds a number,
            training goes on until there have been so many epochs.
        pause_s: Seconds added to each step.
    """

    def __init__(self, folder: Path, pause_s: float) -> None:
        self.folder = folder
        self.pause_s = pause_s

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pause_s)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        loss, session = trainer.callback_metrics.get("val_loss"), getattr(trainer.strategy, "session", None)
        if trainer.is_global_zero and loss is not None and session is not None and session.entered:
            session.engine.events.emit(LOSS, epoch=trainer.current_epoch, loss=float(loss))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.strategy.reduce_boolean_decision(self.enough(trainer), all=False):
            trainer.should_stop = True

    def enough(self, trainer: Trainer) -> bool:
        """Returns whether training should end with this epoch, as the file `enough` says at this moment."""
        asked = self.folder / "enough"
        return asked.exists() and trainer.current_epoch + 1 >= int(asked.read_text() or 0)


class StepLosses(Demo):
    """`Demo` callback that also logs each step's loss, which is the same at all members.

    Args:
        folder, pause_s: As for `Demo`.
        events: Event log of a process that is no member.
    """

    def __init__(self, folder: Path, pause_s: float, events: EventLog | None = None) -> None:
        super().__init__(folder, pause_s)
        self._events, self._step = events, 0

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        session = getattr(trainer.strategy, "session", None)
        step = session.engine.header.step if session is not None else trainer.global_step
        events = session.engine.events if session is not None else self._events
        if step > self._step and events is not None:  # not so if this member was put out: its batch does not count
            self._step = step
            events.emit(STEP_LOSS, step=step, loss=float(outputs["loss"]))


def options(description: str | None) -> argparse.ArgumentParser:
    """Returns an argument parser for the training scripts of demos."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--block", type=int, default=64)
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--text", type=int, default=200_000, help="bytes of text")
    options.add_argument("--pause", type=float, default=0.03, help="added to each step, s")
    options.add_argument("--sample-s", type=float, default=0.0, help="added to each sample of a training step")
    options.add_argument("--in-order", action="store_true", help="take the text from its beginning to its end")
    options.add_argument("--max-epochs", type=int, default=100)
    options.add_argument("--accelerator", default="cpu", help="as Lightning names it")
    return options


def fit(args: argparse.Namespace, strategy: Any, callback: Callback) -> tuple[Trainer, GPT]:
    """Trains the small GPT; returns the Trainer and the model."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    train, valid = prose(args.block, args.text)
    trainer = Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=1,
        max_epochs=args.max_epochs,
        callbacks=[callback],
        default_root_dir=args.folder / "checkpoints",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    model = GPT(args.layers, args.width, args.block)
    model.sample_s = args.sample_s
    trainer.fit(
        model,
        DataLoader(train, args.batch_size, shuffle=not args.in_order),
        DataLoader(valid, 4 * args.batch_size),
    )
    return trainer, model


def weights_of(model: LightningModule) -> str:
    """Returns a hash of all parameters and buffers, equal only if they are bit-identical."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_alone(args: argparse.Namespace) -> None:
    """Trains in plain Lightning what members train with a batch of fixed size; logs the loss of each step."""
    args.folder, args.sample_s = args.folder / ALONE, 0.0
    with EventLog.in_directory(os.environ["CHAOS_LOG_DIR"], ALONE, role="script") as events:
        fit(args, "auto", StepLosses(args.folder, args.pause, events))


def main() -> None:
    """Trains until the file `enough` asks for the end, and writes the hash of the weights into a file."""
    parser = options(__doc__)
    parser.add_argument("--step-losses", action="store_true", help="log each step's loss, equal at all members")
    parser.add_argument("--alone", action="store_true", help="train by plain Lightning, for comparison")
    args = parser.parse_args()
    if args.alone:
        train_alone(args)
        return
    callback = StepLosses if args.step_losses else Demo
    trainer, model = fit(args, "chaos", callback(args.folder, args.pause))
    session = trainer.strategy.session  # type: ignore[attr-defined]
    if session is not None and not session.departed:
        words = {"member": session.engine.name, "step": trainer.global_step, "weights": weights_of(model)}
        (args.folder / f"final-{session.engine.name}.json").write_text(json.dumps(words))


if __name__ == "__main__":
    main()
