"""Tests members that run a user's own step in stages: gradients equal those of one process, with dropout, tied weights
and so on.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from executor_support import FIRST, SECOND, Member, Post, detoured, plan_of, run_all, summed, vacant
from pipeline_models import GPT, Checkpointed, Holder, image_step, images, step_of, tokens
from torch import nn

from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.planning.pipelines.units import ViewPipelines

SEED = 11


def a_conv_net():
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o))

    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    blocks = [block(3, 8), nn.ReLU(inplace=True), nn.Sequential(block(8, 8), nn.Dropout(0.1)), head]
    return Holder(net=nn.Sequential(*blocks)).to(memory_format=torch.channels_last)


def a_gpt(kind=GPT, **more):
    torch.manual_seed(0)
    return kind(4, dropout=0.1, **more)


def gpt_batches(count):
    return [tokens(rows=2 + j % 2) for j in range(count)]


def image_batches(count):
    x, y = images()
    return [(x + j, y) for j in range(count)]


MODELS = {
    "GPT": (a_gpt, "blocks", step_of, gpt_batches),
    "GPT with tied weights": (lambda: a_gpt(tied=True), "blocks", step_of, gpt_batches),
    "GPT with activation checkpointing": (lambda: a_gpt(Checkpointed), "blocks", step_of, gpt_batches),
    "convolutions": (a_conv_net, "net", image_step, image_batches),
}
VIEWS = {
    "2 stages": ViewPipelines.of(plan_of([(0, 2, 4)], [5])),
    "3 stages": ViewPipelines.of(plan_of([(0, 1, 2, 4)], [5])),
    "a detour": detoured(),
    "a vacant place": vacant(),
}


class TakesTurns:
    """Chain that runs one pass at a time, since the members are threads that share the process's random numbers."""

    lock = threading.Lock()

    def __init__(self, chain):
        self.chain = chain

    def __len__(self):
        return len(self.chain)

    def run(self, *args, **kwargs):
        with self.lock:
            done = self.chain.run(*args, **kwargs)
        backward = done.backward

        def alone(*args):
            with self.lock:
                return backward(*args)

        done.backward = alone
        return done


def chain_of(path, step_for):
    return lambda root, _: TakesTurns(LayerChain(root, path, step_for(root), randomness=Randomness(SEED)))


def whole(model, path, step_for, batches, weights):
    """Runs the micro-batches in a single member with all layers, as reference."""
    view = ViewPipelines.of(plan_of([(0, 4)], [len(batches)]))
    member = Member(Post(), "a", model, None, chain_of(path, step_for))
    return run([member], view, batches, weights)


def run(members, view, batches, weights, attempt=FIRST):
    """Runs all members; returns the gradient sums over all members, and each member's own results."""
    sums = run_all(members, view, batches, weights, attempt)
    return summed(members), sums


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_member(name, view):
    make, path, step_for, batches_of = MODELS[name]
    model, batches = make(), batches_of(5)
    weights = [float(len(b[0])) for b in batches]
    expected, whole_sums = whole(copy.deepcopy(model), path, step_for, batches, weights)
    post = Post()
    members = [Member(post, m, model, None, chain_of(path, step_for)) for m in sorted(VIEWS[view].plan.stages)]
    got, sums = run(members, VIEWS[view], batches, weights)
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert float((got[key] - value).abs().max()) <= 1e-6 * max(1.0, float(value.abs().max())), key
    losses = {j: loss for s in sums.values() for j, loss in s.losses.items()}
    assert all(torch.equal(losses[j], loss) for j, loss in whole_sums["a"].losses.items())


@pytest.mark.parametrize("name", ["GPT", "convolutions"])
def test_a_rerun_has_equal_bits(name):
    make, path, step_for, batches_of = MODELS[name]
    model, batches, view = make(), batches_of(5), VIEWS["2 stages"]
    weights = [1.0] * 5
    post = Post()
    members = [Member(post, m, model, None, chain_of(path, step_for)) for m in ("a", "b")]
    expected, _ = run(members, view, batches, weights)
    buffers = [b.clone() for m in members for b in m.net.buffers()]
    for m in members:
        m.executor.drop()
    post.at_check = lambda me, number: post.end(FIRST.view) if (me, number) == ("b", 16) else None
    run(members, view, batches, weights)
    for m in members:
        m.executor.drop()
    post.at_check = None
    got, _ = run(members, view, batches, weights, SECOND)
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    assert all(map(torch.equal, [b for m in members for b in m.net.buffers()], buffers))


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("not this one")


def test_a_block_that_raises_is_named():
    model = a_conv_net()
    model.net[2] = Raises()
    view = VIEWS["2 stages"]
    post = Post()
    members = [Member(post, m, model, None, chain_of("net", image_step)) for m in ("a", "b")]
    with pytest.raises(ValueError, match="not this one") as caught:
        run(members, view, image_batches(5), [1.0] * 5)
    assert caught.value.__notes__ == [
        "This was raised in net.2.",
        "This happened in the forward pass of micro-batch 0 through layers 2 to 3 (step 3).",
    ]
