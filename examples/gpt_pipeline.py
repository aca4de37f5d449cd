"""A GPT of one's own in stages: each process holds some of its blocks, and the others go on when one of them dies.

    for i in 1 2 3 4; do python examples/gpt_pipeline.py --min-nodes 2 & done; wait

Four processes, each with memory for about half of the blocks; two of them begin. Kill one: its micro-batches go through
others that hold the same blocks. Start another one at any time: it gets blocks, too. What they would do, untrained:

    python examples/gpt_pipeline.py --min-nodes 4 --dry-run

The model is plain Lightning; "stages" marks the lines that it needs for this. In one process without them: --plain
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from chaos_lightning.examples.datasets import TextData
from chaos_lightning.strategies import ChaosPipelineStrategy  # stages


class GPT(L.LightningModule):
    """Byte-level GPT: takes bytes, returns the logits of each next byte."""

    chaos_chain = "blocks"  # stages: they are cut out of this list

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.layers, self.width, self.length = layers, width, length

    def configure_model(self) -> None:  # stages: each process makes only what it holds; __init__ would make all of it
        if hasattr(self, "blocks"):
            return
        self.token, self.place = nn.Embedding(256, self.width), nn.Embedding(self.length, self.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(self.layers)
        )
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, 256)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, following = batch
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.place(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero and self.trainer.global_step % 10 == 0:
            print(f"step {self.trainer.global_step}: loss {float(outputs['loss']):.3f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: list[str] | None = None) -> None:
    """Trains `--max-steps` steps of `--micro-batches` batches each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--min-nodes", type=int, help="training starts once so many processes are here")
    options.add_argument("--device-memory", default="24 MiB", help="of each process, as if it were a small device")
    options.add_argument("--micro-batches", type=int, default=8)
    options.add_argument("--policy", help="adaptive, reroute, dynamic or restart")
    options.add_argument("--checkpoints", help="a folder: save every 10 steps, and go on from the newest file")
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("--plain", action="store_true", help="one process, without stages")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--max-steps", type=int, default=40)
    args = options.parse_args(argv)

    L.seed_everything(1)
    strategy = ChaosPipelineStrategy(  # stages
        micro_batches=args.micro_batches,
        policy=args.policy,
        device_memory=args.device_memory,
        min_nodes=args.min_nodes,
        dry_run=args.dry_run,
    )
    # ckpt_path="last" finds only files that are called last.ckpt, which save_last=True writes.
    folder, saving = args.checkpoints, []
    if folder:
        saving.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=10, save_last=True))
    trainer = L.Trainer(
        strategy="auto" if args.plain else strategy,  # stages
        accumulate_grad_batches=args.micro_batches if args.plain else 1,
        accelerator="cpu",
        devices=1,
        max_steps=args.max_steps,
        limit_val_batches=0,
        callbacks=saving,
        logger=False,
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = GPT(args.layers, args.width, 64), TextData("stdlib", 64, batch_size=8)
    trainer.fit(model, data, ckpt_path="last" if saving else None)


if __name__ == "__main__":
    main()
