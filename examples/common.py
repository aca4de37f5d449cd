"""Parts that the example scripts share: the command line and the Trainer."""

from __future__ import annotations

import argparse

import lightning as L

import chaos_lightning  # noqa: F401  (makes "chaos" known to Lightning)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every example has."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--strategy", default="chaos", help="'chaos', or anything else that Lightning knows")
    options.add_argument(
        "--endpoint", default="", help="HOST:PORT of the scheduler (default: torchrun's, or this machine)"
    )
    options.add_argument("--accelerator", default="cpu")
    options.add_argument("--batch-size", type=int, default=16, help="samples per member and micro-batch")
    options.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    options.add_argument("--max-epochs", type=int, default=1)
    options.add_argument("--max-steps", type=int, default=-1)
    options.add_argument("--seed", type=int, default=1, help="must be the same for all members")
    options.add_argument("--quick", action="store_true", help="no validation, no checkpoints, no progress bar")
    return options


def build_trainer(args: argparse.Namespace) -> L.Trainer:
    """Returns a Trainer with strategy "chaos" and the settings of the command line."""
    strategy: object = args.strategy
    if args.endpoint:
        from chaos_lightning.strategies import ChaosStrategy

        strategy = ChaosStrategy(endpoint=args.endpoint)
    return L.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=getattr(args, "devices", 1),
        max_epochs=args.max_epochs,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        limit_val_batches=0 if args.quick else 1.0,
        logger=False,
        enable_checkpointing=not args.quick,
        enable_progress_bar=not args.quick,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
