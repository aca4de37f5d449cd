"""The same training on any number of machines: a step takes 64 samples, whoever is there, and every loss is the same.

    python examples/fixed_batch.py
    for i in 1 2 3; do python examples/fixed_batch.py --min-nodes 3 & done; wait

Start further processes while it trains, and kill some: the losses in OUT/metrics.csv stay those of one process, dropout
and random augmentation included. Lightning alone takes the same steps, and without noise has the same losses, too:

    python examples/fixed_batch.py --no-noise --plain
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from chaos_lightning.examples.datasets import digits
from chaos_lightning.strategies import ChaosStrategy


class Classifier(L.LightningModule):
    """Small convolutional network with dropout."""

    def __init__(self, dropout: float, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Dropout(dropout), nn.Linear(16 * 64, 64), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        time.sleep(self.pause_s)
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(1) == labels).double().mean())

    def on_validation_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            found = {name: float(self.trainer.callback_metrics[name]) for name in ("val_loss", "val_accuracy")}
            values = ", ".join(f"{name} {value:.6f}" for name, value in found.items())
            print(f"step {self.trainer.global_step}, {self.trainer.world_size} processes: {values}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are shifted by up to a pixel, and made noisy, by random numbers of the loader's worker."""

    def __init__(self, images: Dataset[tuple[Tensor, ...]], noise: bool) -> None:
        self.images, self.noise = images, noise

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        if self.noise:
            image = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2))
            image = image + 0.1 * torch.randn_like(image)
        return image, label


class Shuffled(Sampler[int]):
    """Random order by an epoch's number, so that Lightning alone has the same one; shuffle=True serves all others.

    An epoch has whole steps only, since Lightning alone weighs the samples of a shorter last accumulation less.
    """

    def __init__(self, length: int, step: int) -> None:
        self.length, self.whole, self.epoch = length, length // step * step, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[: self.whole].tolist())

    def __len__(self) -> int:
        return self.whole


def main(argv: list[str] | None = None, *callbacks: L.Callback) -> None:
    """Trains `--epochs` epochs of scikit-learn's digits; validates and saves every 50 steps."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=64, help="of a step")
    options.add_argument("--micro-batch", type=int, default=8, help="samples that are computed at once")
    options.add_argument("--plain", action="store_true", help="Lightning alone, which accumulates the micro-batches")
    options.add_argument("--min-nodes", type=int, help="training starts once so many processes are here")
    options.add_argument("--no-noise", action="store_true", help="neither dropout nor random augmentation")
    options.add_argument("--epochs", type=int, default=7, help="of 22 steps, if these have 64 samples")
    options.add_argument("--pause-s", type=float, default=0.0, help="of each micro-batch, as if the model were larger")
    options.add_argument("--precision", default="32-true", help="64-true: losses are equal in ten digits and more")
    options.add_argument("--out", default="fixed-batch", help="folder of metrics.csv and of the checkpoints")
    args = options.parse_args(argv)

    L.seed_everything(1)
    training, held_out = digits()
    size, workers = args.micro_batch, {"num_workers": 2, "persistent_workers": True}
    data = Augmented(training, not args.no_noise)
    order = Shuffled(len(training), args.samples)
    rule = ChaosStrategy(min_nodes=args.min_nodes, options={"batch": f"fixed:{args.samples}/{size}"})
    accumulated = args.samples // size if args.plain else 1
    trainer = L.Trainer(
        strategy="auto" if args.plain else rule,
        accumulate_grad_batches=accumulated,
        val_check_interval=50 * accumulated,  # Lightning counts batches; one is a whole step under batch=fixed
        check_val_every_n_epoch=None,
        max_epochs=args.epochs,
        precision=args.precision,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(args.out, name="", version=""),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(args.out, "{step}-{val_loss:.4f}", monitor="val_loss", save_top_k=-1),
            LearningRateMonitor("step"),
            *callbacks,
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier(0.0 if args.no_noise else 0.2, args.pause_s),
        DataLoader(data, size, sampler=order, **workers),
        DataLoader(held_out, 64, **workers),
    )


if __name__ == "__main__":
    main()
