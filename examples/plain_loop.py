"""A plain PyTorch loop, without Lightning: the listings of the Chaos paper, filled in.

    python examples/plain_loop.py                                   # the first member; it hosts the scheduler
    CHAOS_ENDPOINT=HOST:29400 python examples/plain_loop.py         # every further member, at any time
    torchrun --rdzv-backend=chaos --rdzv-endpoint=HOST:29400 --nnodes=1:16 --max-restarts=9 examples/plain_loop.py

Beside the calls of the paper there is one more: `prepare` says what is trained and on what. It returns when this member
is part of the job, with the others' training state loaded if there were others. The loader it gives back hands out
each sample once over all members and stops when the epochs are spent, so the loop has no epochs of its own.
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
    """Train a two-layer network on the digits."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=16, help="samples per member and step")
    args = options.parse_args(argv)

    with Trainer() as trainer:  # sends the join request; leaving the block closes the job, or this member's part in it
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(digits()[0], args.batch_size, shuffle=True)

        for images, labels in trainer.prepare(model, optimizer, loader, epochs=args.epochs):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            trainer.update()  # averages the gradients over all members, then optimizer.step()
            trainer.check_state_replication()  # if somebody waits to join, help to bring the state over
            if trainer.step % 20 == 0 and trainer.rank == 0:
                print(f"step {trainer.step}: loss {loss.item():.3f}, {trainer.world_size} members", flush=True)
            if capture_exit_event():
                trainer.request_node_exit()
                break


if __name__ == "__main__":
    main()
