"""Tests two pipelines of two stages over real links: a member dies in the middle of a step, and the others run the step
again on other routes.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from border_nodes import BorderNode
from executor_support import FIRST, SECOND, SequentialLayers, one_process, plan_of, vacant
from torch import nn

from chaos_lightning.errors import AttemptOverError
from chaos_lightning.pipeline.executor import PipelineExecutor, StepWork
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage_error

WIDTH, ROWS = 256, 1024
"""A border has 1 MiB: more than a socket takes at once."""


class DeathError(Exception):
    pass


def numbered(view):
    """Returns the pipelines with member ids instead of names; the number in an id decides which end of a link dials."""
    text = view.to_json()
    for number, name in enumerate("abcd", 1):
        text = text.replace(f'"{name}"', f'"{name}~{number}"')
    return ViewPipelines.from_json(text)


def a_loss(x, batch):
    return F.mse_loss(x, batch[1])


class LinkedMember:
    """Member that exchanges border tensors over links, and may die before a given unit."""

    def __init__(self, name, net):
        self.name, self.net, self.dies_at = name, copy.deepcopy(net), None
        self.node = BorderNode(name)
        self.executor = PipelineExecutor(self.net, SequentialLayers(self.net, a_loss), self.node.exchange)
        self.executor.remember_base()

    def step(self, view, batches, attempt):
        units = view.units(self.name)
        self.node.exchange.open(attempt, units)
        looks = iter(range(len(units) + 2))
        check = self.node.exchange.check

        def look(attempt):
            if next(looks) == self.dies_at:
                self.node.close()
                raise DeathError
            check(attempt)

        self.executor._exchange = Overridden(self.node.exchange, look)
        return self.executor.run(StepWork(attempt, 1, units, batches.__getitem__, lambda j: 1.0))

    def recover(self, view):
        """Ends attempts of a view, as a member does when the scheduler's Prepare begins a recovery."""
        self.node.links.drop(view)
        self.node.exchange.drop(view)


class Overridden:
    def __init__(self, exchange, check):
        self.send, self.there, self.take, self.check = exchange.send, exchange.there, exchange.take, check


def run_all(members, view, batches, attempt):
    def one(member):
        try:
            return member.step(view, batches, attempt)
        except (AttemptOverError, DeathError) as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return dict(zip([m.name for m in members], pool.map(one, members), strict=True))


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3])
def test_the_others_run_the_step_again(dies_at):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).double()
    batches = [(torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()) for _ in range(5)]
    members = [LinkedMember(name, net) for name in ("a~1", "b~2", "c~3", "d~4")]
    rows = [m.node.member for m in members]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda m: m.node.connect(*(r for r in rows if r.id != m.name)), members))
    left = [m for m in members if m.name != "b~2"]
    members[1].dies_at = dies_at

    def hears():
        assert left[0].node.wait_broken() == "bye"
        for m in left:
            m.node.loop.call(lambda m=m: m.recover(FIRST.view))

    hearing = threading.Thread(target=hears)
    hearing.start()
    before = numbered(ViewPipelines.of(plan_of([(0, 2, 4), (0, 2, 4)], [2, 3])))
    ended = run_all(members, before, batches, FIRST)
    hearing.join()
    assert isinstance(ended["b~2"], DeathError)
    assert isinstance(ended["a~1"], AttemptOverError)
    for m in left:
        m.executor.drop()
    sums = run_all(left, numbered(vacant()), batches, SECOND)
    expected, _ = one_process(net, a_loss, batches, [1.0] * 5, range(5))
    for name, value in expected.items():
        got = sum(p.grad for m in left for n, p in m.net.named_parameters() if n == name and p.grad is not None)
        assert float((got - value).abs().max()) <= 1e-13 * max(1.0, float(value.abs().max())), name
    assert coverage_error(4, [(0, 5)], {m: s.covered for m, s in sums.items()}) == ""
    assert all(m.node.exchange.nbytes == 0 for m in left)
    for m in left:
        m.node.close()
