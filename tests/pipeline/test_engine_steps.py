"""Engines run steps as units: founding by parts, reruns after a death, moves of layers with optimizer state."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from border_nodes import DEADLINE_S
from executor_support import SequentialLayers
from scripted_job import DeathError, Dying, ScriptedJob
from test_step import NAMES, VACANT, A, B, C, D, a_loss, a_net, batches_of, pipelines, weights_of
from until_support import until

from chaos_lightning.errors import FencedError
from chaos_lightning.membership.parts import division
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.protocol.types import Fence

BOUND = 1e-12


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def one_process(net, make_optimizer, batches, weights, steps):
    net = copy.deepcopy(net)
    optimizer = make_optimizer(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for batch, weight in zip(batches, weights, strict=True):
            (a_loss(net(batch[0]), batch) * weight / sum(weights)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def check(got, expected, bound=BOUND):
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert float((got[name] - value).abs().max()) <= bound, name


@pytest.fixture
def jobs():
    made = []

    def make(net, names, make_optimizer=momentum):
        made.append(ScriptedJob(net, names, lambda net: SequentialLayers(net, a_loss), make_optimizer))
        return made[-1]

    yield make
    for job in made:
        job.close()


def equal(batches=5):
    found = batches_of(batches)
    return found, weights_of(found)


@pytest.mark.parametrize("shape", ["DP 1 x PP 2", "DP 2 x PP 2", "one stands by"])
@pytest.mark.parametrize("tied", [False, True])
def test_founders_pull_what_others_make_and_train_as_one_process(jobs, shape, tied):
    names = {"DP 1 x PP 2": NAMES[:2], "DP 2 x PP 2": NAMES, "one stands by": NAMES[:3]}[shape]
    view = pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]) if shape == "DP 2 x PP 2" else pipelines([(0, 2, 4)], [5])
    net, (batches, weights) = a_net(tied=tied), equal()
    job = jobs(net, names)
    founded = job.found(view)
    headers = job.train(3, batches, weights)
    assert all([h.hash for h in found] == [h.hash for h in headers[A]] for found in headers.values())
    assert all(h.reduced and not h.error and h.total_weight == sum(weights) for h in headers[A])
    assert [h.seq for h in headers[A]] == [1, 2, 3]
    check(job.parameters(), one_process(net, momentum, batches, weights, 3))
    assert all(m.attempts == [(founded.id, seq) for seq in (1, 2, 3)] for m in job.members)
    for m in job.members:  # nothing else has memory
        owned = division(founded).owned(m.name)
        mine = {job.parts.part_of[n] for n, p in m.net.named_parameters() if not is_absent(p)}
        assert mine == {division(founded).names[p] for a, b in owned for p in range(a, b)} - {"rest"}


@pytest.mark.parametrize("at", [0, 3, 5, 6])
def test_the_others_run_a_step_again_when_a_member_dies_in_it(jobs, at):
    """The death comes with the second step under way; momentum of the dead one's layers is at the other owner."""
    net, (batches, weights) = a_net(tied=True), equal()
    job = jobs(net, NAMES)
    first = job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    dying = Dying(job, job.members[1], at, VACANT)
    headers = job.train(1, batches, weights, meanwhile=dying.recover)
    assert isinstance(headers[B], DeathError)
    left = [m for m in job.members if m.name != B]
    for m in left:
        assert m.attempts[0] == (first.id, 1)
        assert m.attempts[-1][1] == 2
        assert m.attempts[-1][0] > first.id
    check(job.parameters(left), one_process(net, momentum, batches, weights, 2))
    job.train(1, batches, weights, left)
    check(job.parameters(left), one_process(net, momentum, batches, weights, 3))


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_a_layer_moves_with_its_optimizer_state(jobs, make_optimizer):
    """A header carries a view of other cuts: the new owner pulls, the old one drops the part a header later."""
    net, (batches, weights) = a_net(norm=False), equal()
    job = jobs(net, NAMES[:2], make_optimizer)
    before = job.found(pipelines([(0, 2, 4)], [5]))
    job.train(1, batches, weights)
    after = job.announce(pipelines([(0, 1, 4)], [5]), job.members)
    headers = job.train(1, batches, weights)
    assert headers[A][0].view_change == after
    one, other = job.members
    moved = [n for n, part in job.parts.part_of.items() if part == "layer.1"]
    has = lambda m: [n for n, p in m.net.named_parameters() if n in moved and not is_absent(p)]  # noqa: E731
    assert (has(one), has(other)) == (moved, [])
    job.train(1, batches, weights)
    assert (has(one), has(other)) == ([], moved)
    assert {n for n, p in one.net.named_parameters() if p in one.optimizer.state} == {
        n for n, part in job.parts.part_of.items() if part == "layer.0"
    }
    job.train(1, batches, weights)
    assert one.attempts == [(before.id, 1), (before.id, 2), (after.id, 3), (after.id, 4)]
    bound = 1e-9 if make_optimizer is adam else BOUND
    check(job.parameters(), one_process(net, make_optimizer, batches, weights, 4), bound)


def test_parts_move_with_a_decision_in_the_middle_of_a_step(jobs):
    """Another plan for those that are left: a keeps one of its layers, c the other one."""
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    three = pipelines([(0, 1, 2, 4)], [5], names=(A, C, D))
    dying = Dying(job, job.members[1], 3, three)
    headers = job.train(2, batches, weights, meanwhile=dying.recover)
    assert isinstance(headers[B], DeathError)
    left = [m for m in job.members if m.name != B]
    check(job.parameters(left), one_process(net, momentum, batches, weights, 3))
    assert {m.name: {job.parts.part_of[n] for n, p in m.net.named_parameters() if not is_absent(p)} for m in left} == {
        A: {"layer.0"},
        C: {"layer.1"},
        D: {"layer.2", "layer.3"},
    }


def test_a_member_without_the_part_pulls_it_from_its_owner_after_a_decision(jobs):
    """d takes layer 1 over in the middle of a step; c stands by from then on, and drops its layers with the header."""
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    dying = Dying(job, job.members[1], 4, pipelines([(0, 1, 4)], [5], names=(A, D)))
    headers = job.train(1, batches, weights, meanwhile=dying.recover)
    assert isinstance(headers[B], DeathError)
    left = [m for m in job.members if m.name != B]
    owned = {m.name: {job.parts.part_of[n] for n, p in m.net.named_parameters() if not is_absent(p)} for m in left}
    assert owned == {A: {"layer.0"}, C: set(), D: {"layer.1", "layer.2", "layer.3"}}
    job.train(1, batches, weights, left)
    check(job.parameters(left), one_process(net, momentum, batches, weights, 3))


def test_a_member_that_is_put_out_stops_waiting_for_the_others(jobs):
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES[:2])
    job.found(pipelines([(0, 2, 4)], [5]))
    last = job.members[1]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(last.train, 1, batches, weights)  # the first stage sends nothing
        until(lambda: last.attempts, "an attempt")
        last.hear(Fence("the operator's word", rejoin=True))
        with pytest.raises(FencedError, match="operator's word"):
            waits.result(DEADLINE_S)
    assert all(p.grad is None for p in last.net.parameters())
