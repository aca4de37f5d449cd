"""A plain PyTorch loop as one of several clusters, without Lightning.

    python examples/diloco_loop.py                           # the first cluster; it starts the server of this machine
    python examples/diloco_loop.py                           # in a second terminal, at any time: the second cluster
    CHAOS_PS=HOST:29470 python examples/diloco_loop.py       # elsewhere

The loop is the usual one with two lines more: `prepare`, which returns once this cluster is in the job and its model is
the job's newest version, and `step` after each optimizer step. Each sample is trained once an epoch, by whichever
cluster it is dealt to, so the loop has no epochs of its own. Ctrl+C leaves once what was trained is durable.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from chaos_lightning.diloco import DiLoCo
from chaos_lightning.examples.datasets import digits


def main(argv: list[str] | None = None) -> None:
    """Trains a two-layer network on the digits."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=5, help="of all clusters together")
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--inner-steps", type=int, default=16, help="steps from one push to the next")
    args = options.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(digits()[0], args.batch_size, shuffle=True)

    with DiLoCo(model, optimizer, inner_steps=args.inner_steps) as diloco:
        for step, (images, labels) in enumerate(diloco.prepare(loader, epochs=args.epochs), 1):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            diloco.step(loss)  # what is due is pushed, and a new version taken over
            if step % 20 == 0:
                print(f"step {diloco.progress.steps} of the job: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
