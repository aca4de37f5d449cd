"""Runs the members of a pipeline as threads of one process: with the layers of an `nn.Sequential`, and an exchange in
memory.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import torch
from torch.autograd.graph import get_gradient_edge

from chaos_lightning.errors import AttemptOverError
from chaos_lightning.pipeline.executor import PipelineExecutor, SlotAttempt, StepWork
from chaos_lightning.planning.pipelines.plan import Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.schedules import Instruction
from chaos_lightning.planning.pipelines.units import FORWARD, ViewPipelines
from chaos_lightning.protocol.types import ViewId

FIRST = SlotAttempt(ViewId(1, 1), 7)
SECOND = SlotAttempt(ViewId(1, 2), 7)
DEADLINE_S = 60.0


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, gradients, at, tensor):
        ctx.gradients, ctx.at = gradients, at
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.gradients[ctx.at] = gradient
        return None, None, None, None


class SequentialPass:
    def __init__(self):
        self.tensors, self.specs, self.result, self.gradients, self.left = (), "", None, [], False

    def let_go(self):
        found = tuple(get_gradient_edge(t) if t.requires_grad else t for t in self.tensors)
        self.tensors, self.left = (), True
        return found

    def backward(self, roots, gradients):
        needs = lambda r: not isinstance(r, torch.Tensor) or r.requires_grad  # noqa: E731
        pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if needs(r)]
        pairs = [(r, g) for r, g in pairs if g is not None or not self.left]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        self.tensors, self.result = (), None
        return tuple(self.gradients)


class SequentialLayers:
    """Layers of an `nn.Sequential` for the executor; the last stage computes `loss(x, batch)`. Specs say which tensors
    need a gradient.
    """

    def __init__(self, net, loss):
        self.net, self.loss = net, loss
        self.ran = []

    def __len__(self):
        return len(self.net)

    def run(self, first, end, batch, received, specs, *, at, call=None):
        self.ran.append((first, end, at))
        done = SequentialPass()
        x = batch[0]
        if first:
            done.gradients = [None] * len(received)
            needed = [c == "g" for c in specs]
            anchor = torch.zeros((), requires_grad=True)
            entered = [Enter.apply(anchor, done.gradients, i, t) if needed[i] else t for i, t in enumerate(received)]
            x = entered[0] if len(entered) == 1 else tuple(entered)
        for i in range(first, end):
            try:
                x = self.net[i](x)
            except Exception as error:
                error.add_note(f"in layer {i}")
                raise
        if end < len(self.net):
            done.tensors = x if isinstance(x, tuple) else (x,)
            done.specs = "".join("g" if t.requires_grad else "-" for t in done.tensors)
        else:
            done.result = self.loss(x, batch) if call is None else call((x, batch))
        return done


class Post:
    """In-memory store of the border tensors between members, kept until they are taken or their attempt ends."""

    def __init__(self):
        self.lock = threading.Condition()
        self.sent = {}
        self.over = ViewId(0, 0)
        self.at_check = None
        """Called with the member and the number of its look at the attempt."""

    def end(self, view):
        with self.lock:
            self.over = max(self.over, view)
            self.sent = {k: v for k, v in self.sent.items() if k[0].view > view}
            self.lock.notify_all()


class MemoryExchange:
    """Exchange of one member that sends and takes border tensors through a `Post`."""

    def __init__(self, post, me):
        self.post, self.me, self.looks = post, me, 0

    def send(self, attempt, to, key, border):
        with self.post.lock:
            self._check(attempt)
            assert (attempt, to, key) not in self.post.sent
            tensors = tuple(None if t is None else t.clone() for t in border.tensors)
            self.post.sent[attempt, to, key] = replace(border, tensors=tensors)
            self.post.lock.notify_all()

    def there(self, attempt, key):
        with self.post.lock:
            return attempt.view <= self.post.over or (attempt, self.me, key) in self.post.sent

    def take(self, attempt, key):
        with self.post.lock:
            there = lambda: attempt.view <= self.post.over or (attempt, self.me, key) in self.post.sent  # noqa: E731
            assert self.post.lock.wait_for(there, DEADLINE_S), f"{self.me} waits for {key}"
            self._check(attempt)
            return self.post.sent.pop((attempt, self.me, key))

    def check(self, attempt):
        self.looks += 1
        if self.post.at_check is not None:
            self.post.at_check(self.me, self.looks)
        self._check(attempt)

    def _check(self, attempt):
        if attempt.view <= self.post.over:
            raise AttemptOverError(str(attempt))


class Finished:
    def __init__(self):
        self.told = []

    def closing(self, layers):
        self.told.append(("closing", *layers))

    def layer_done(self, layer):
        self.told.append(("done", layer))


class Member:
    """A member of a pipeline with its own copy of the model."""

    def __init__(self, post, name, net, loss, layers=SequentialLayers, **more):
        self.name, self.net = name, copy.deepcopy(net)
        self.layers, self.finished = layers(self.net, loss), Finished()
        self.exchange = MemoryExchange(post, name)
        self.executor = PipelineExecutor(self.net, self.layers, self.exchange, self.finished, **more)
        self.executor.remember_base()

    def run(self, view, batches, weights, attempt=FIRST, empty=(), call=None):
        units = view.units(self.name, empty)
        units = units if call is None else [u for u in units if u.kind == FORWARD]
        work = StepWork(attempt, 3, units, batches.__getitem__, weights.__getitem__, call)
        return self.executor.run(work)


def run_all(members, view, batches, weights, attempt=FIRST, empty=(), call=None):
    """Runs all members, a thread each; returns by name their sums, or the error of an attempt that was ended."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def one(member):
        try:
            return member.run(view, batches, weights, attempt, empty, call)
        except AttemptOverError as error:
            return error
        except BaseException:
            member.exchange.post.end(attempt.view)  # the others must not wait for it
            raise

    with ThreadPoolExecutor(len(members)) as pool:
        futures = {m.name: pool.submit(one, m) for m in members}
        errors = [f.exception() for f in futures.values() if f.exception() is not None]
    torch.set_num_threads(threads)
    if errors:
        raise errors[0]
    return {name: f.result() for name, f in futures.items()}


def plan_of(cuts, micro_batches, **more):
    """Returns a plan over members a, b, c, ... in order; each cut lists the stage borders of a pipeline."""
    names = iter("abcdefghijklm")
    rows = [
        Pipeline(tuple(PlanStage(next(names), a, b) for a, b in pairwise(c)), m)
        for c, m in zip(cuts, micro_batches, strict=True)
    ]
    plan = PipelinePlan(cuts[0][-1], tuple(rows), **more)
    plan.check()
    return plan


def detoured():
    """Returns two pipelines of two stages, with 2 and 3 micro-batches, in which c runs the first two layers of
    micro-batch 1 for a.
    """
    plan = plan_of([(0, 2, 4), (0, 2, 4)], [2, 3], detours=(Detour(1, 0, 2, "c"),))
    lists = {
        "a": "0F0 0B0",
        "b": "1F0 1B0 1F1 1B1",
        "c": "0F1 0F2 0F3 0B1 0B2 0F4 0B3 0B4",
        "d": "1F2 1B2 1F3 1B3 1F4 1B4",
    }
    view = ViewPipelines(plan, {m: tuple(map(_instruction, row.split())) for m, row in lists.items()})
    view.check()
    return view


def vacant():
    """Returns the two pipelines of two stages after the loss of b: d runs the last layers of all micro-batches."""
    rows = (
        Pipeline((PlanStage("a", 0, 2), PlanStage("", 2, 4)), 2),
        Pipeline((PlanStage("c", 0, 2), PlanStage("d", 2, 4)), 3),
    )
    plan = PipelinePlan(4, rows, tuple(Detour(j, 2, 4, "d") for j in range(2)))
    lists = {"a": "0F0 0F1 0B0 0B1", "c": "0F2 0F3 0B2 0F4 0B3 0B4", "d": "1F2 1B2 1F0 1B0 1F3 1B3 1F1 1B1 1F4 1B4"}
    view = ViewPipelines(plan, {m: tuple(map(_instruction, row.split())) for m, row in lists.items()})
    view.check()
    return view


def _instruction(text):
    return Instruction(int(text[0]), text[1], int(text[2:]))


def one_process(net, loss, batches, weights, order):
    """Returns the sums of weighted gradients, by parameter, from a run of all micro-batches in a single process."""
    net = copy.deepcopy(net)
    for j in order:
        (loss(net(batches[j][0]), batches[j]) * weights[j]).backward()
    return {name: p.grad for name, p in net.named_parameters()}, net


def summed(members):
    """Returns the sums over members, by parameter; None for a parameter without a gradient at any member."""
    found = {}
    for m in members:
        for name, p in m.net.named_parameters():
            if p.grad is not None:
                found[name] = found[name] + p.grad if name in found else p.grad.clone()
    return found
