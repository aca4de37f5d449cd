"""A plain PyTorch loop, without Lightning: the listings of the Chaos paper, filled in.

    python examples/plain_loop.py                                   # the first member; it hosts the scheduler
    CHAOS_ENDPOINT=HOST:29400 python examples/plain_loop.py         # every further member, at any time
    torchrun --rdzv-backend=chaos --rdzv-endpoint=HOST:29400 --nnodes=1:16 --max-restarts=9 examples/plain_loop.py
    python examples/plain_loop.py --save digits.pt                  # a checkpoint every 100 steps and at the end
    python examples/plain_loop.py --save digits.pt --resume digits.pt

Beside the calls of the paper there are a few more. `prepare` says what is trained and on what. It returns when this
member is part of the job, with the others' training state loaded if there were others. The loader it gives back hands
out each sample once over all members and stops when the epochs are spent, so the loop has no epochs of its own.
`backward` weighs a batch by its samples, and `gather` and `save` are called by all members at the same place.
Ctrl+C leaves after the current step.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from chaos_lightning.examples.datasets import digits
from chaos_lightning.trainer import Trainer, capture_exit_event


def main(argv: list[str] | None = None) -> None:
    """Trains a two-layer network on the digits."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=16, help="samples per member and batch")
    options.add_argument("--accumulate", type=int, default=1, help="batches of each member per step")
    options.add_argument("--clip", type=float, default=1.0, help="bound for the norm of the averaged gradients")
    options.add_argument("--bf16", action="store_true", help="forward passes in bfloat16")
    options.add_argument("--save", metavar="FILE", help="where checkpoints are written; the last one is kept")
    options.add_argument("--resume", metavar="FILE", help="the checkpoint to go on from")
    args = options.parse_args(argv)

    with Trainer() as trainer:  # sends the join request; leaving the block closes the job, or this member's part in it
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(digits()[0], args.batch_size, shuffle=True)

        how = {"accumulate": args.accumulate, "clip_norm": args.clip, "resume": args.resume}
        for images, labels in trainer.prepare(model, optimizer, loader, epochs=args.epochs, **how):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(images), labels)
            trainer.backward(loss)
            if not trainer.update():  # averages over all members, clips, then optimizer.step()
                continue  # more batches belong to this step
            optimizer.zero_grad()
            if trainer.step % 20 == 0:
                losses = trainer.gather(loss.item())
                if trainer.rank == 0:
                    mean = sum(losses) / len(losses)
                    print(f"step {trainer.step}: loss {mean:.3f}, {len(losses)} members", flush=True)
            if args.save and trainer.step % 100 == 0:
                trainer.save(args.save)
            trainer.check_state_replication()  # if somebody waits to join, help to bring the state over
            if capture_exit_event():
                trainer.request_node_exit()
                break

        if args.save:
            trainer.save(args.save)


if __name__ == "__main__":
    main()
