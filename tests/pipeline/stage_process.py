"""Runs one member of a pipeline for one optimizer step in a process of its own, with real links; started by
`test_two_processes.py`.

It writes its port, reads the others' members as JSON, runs its units, and writes gradients and parameters to a file.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from border_nodes import BorderNode
from executor_support import FIRST, SequentialLayers
from torch import nn

from chaos_lightning.pipeline.executor import PipelineExecutor, StepWork
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import Member

WIDTH, MICRO_BATCHES, RATE = 64, 5, 0.1


def a_net(dtype):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype)


def a_loss(x, batch):
    return F.mse_loss(x, batch[1])


def batches_of(dtype):
    torch.manual_seed(1)
    return [
        (torch.randn(4 + j % 2, WIDTH, dtype=dtype), torch.randn(4 + j % 2, WIDTH, dtype=dtype))
        for j in range(MICRO_BATCHES)
    ]


def weight_of(batch):
    return float(len(batch[0]))


def step_of(net, total):
    """Makes one step of SGD with the sums in `.grad` divided by the total weight."""
    for p in net.parameters():
        if p.grad is not None:
            p.grad /= total
    torch.optim.SGD(net.parameters(), RATE).step()


def main(name, path, kind):
    dtype = getattr(torch, kind)
    torch.set_num_threads(1)
    node = BorderNode(name)
    print(node.links.port, flush=True)
    others = [Member(*row) for row in json.loads(sys.stdin.readline())]
    node.connect(*others)
    view = ViewPipelines.from_json(sys.stdin.readline())
    net, batches = a_net(dtype), batches_of(dtype)
    executor = PipelineExecutor(net, SequentialLayers(net, a_loss), node.exchange)
    executor.remember_base()
    units = view.units(name)
    node.exchange.open(FIRST, units)
    work = StepWork(FIRST, 1, units, batches.__getitem__, lambda j: weight_of(batches[j]))
    sums = executor.run(work)
    gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    step_of(net, sum(map(weight_of, batches)))
    parameters = {n: p.detach() for n, p in net.named_parameters() if n in gradients}
    torch.save({"gradients": gradients, "parameters": parameters, "losses": sums.losses}, path)
    print("done", flush=True)
    sys.stdin.readline()  # what was sent has left when the other one is done
    node.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
