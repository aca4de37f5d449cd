"""Tests pipeline steps of engines: founding by parts, reruns after a death, and moves of layers with optimizer
state.
"""

from __future__ import annotations

import copy
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from border_nodes import DEADLINE_S
from executor_support import SequentialLayers
from scripted_job import DeathError, Dying, ScriptedJob, positions
from test_step import NAMES, VACANT, A, B, C, D, a_loss, a_net, batches_of, pipelines, weights_of
from until_support import until

from chaos_lightning.errors import FencedError, UnsupportedError
from chaos_lightning.membership.effects import PeerIn
from chaos_lightning.membership.parts import division
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.told import clip_coefficient, scale_gradients
from chaos_lightning.planning.ledger import spent_spans
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import DriftedPart, Fence, Header

BOUND = 1e-12


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def one_process(net, make_optimizer, batches, weights, steps, max_norm=math.inf):
    net = copy.deepcopy(net)
    optimizer = make_optimizer(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for batch, weight in zip(batches, weights, strict=True):
            (a_loss(net(batch[0]), batch) * weight / sum(weights)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def check(got, expected, bound=BOUND):
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert float((got[name] - value).abs().max()) <= bound, name


@pytest.fixture
def jobs():
    made = []

    def make(net, names, make_optimizer=momentum, **config):
        made.append(ScriptedJob(net, names, lambda net: SequentialLayers(net, a_loss), make_optimizer, config))
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
    """A member dies in the second step; the others run the step again, with the momentum of its layers from their other
    owner.
    """
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
    """The next view moves layer 1 to another member, which pulls it with optimizer state; the old owner drops it one
    header later.
    """
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
    """After a death in a step the recovery divides layers 0 and 1, which a and c both owned, between them; training
    goes on as in one process.
    """
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
    """After a death in a step the recovery gives layer 1 to d, which pulls it from an owner; c stands by, and its
    layers are freed.
    """
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


def test_a_step_that_is_handed_on_is_stepped_before_memory_is_laid_out_anew(jobs):
    """A header reaches only b before a dies; c and d receive it in the recovery, and commit its step before
    parts move.
    """
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    first, *left = job.members

    def hears(feed, event):
        if not (isinstance(event, PeerIn) and isinstance(event.message, Header)):
            feed(event)

    for m in left[1:]:
        m.shell.feed = partial(hears, m.shell.feed)

    def recover():
        until(lambda: left[0].shell.machine.seq == 2, "the header at b")
        first.die()
        job.recover(pipelines([(0, 1, 2, 4)], [5], names=(C, B, D)), left)

    headers = job.train(1, batches, weights, meanwhile=recover)
    assert len({headers[m.name][0].hash for m in left}) == 1
    check(job.parameters(left[1:]), one_process(net, momentum, batches, weights, 2))
    for m in left[1:]:
        del m.shell.feed
    job.train(1, batches, weights, left)
    check(job.parameters(left), one_process(net, momentum, batches, weights, 3))


def test_a_member_that_is_put_out_stops_waiting_for_the_others(jobs):
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES[:2])
    job.found(pipelines([(0, 2, 4)], [5]))
    job.train(1, batches, weights)
    last = job.members[1]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(last.train, 1, batches, weights)  # the first stage sends nothing
        until(lambda: len(last.attempts) > 1, "an attempt")
        last.hear(Fence("the operator's word", rejoin=True))
        with pytest.raises(FencedError, match="operator's word"):
            waits.result(DEADLINE_S)
    assert all(p.grad is None for p in last.net.parameters())


# ------------------------------------------------------------------------------------------------ what is said


def used(steps, batches):
    return union(
        s for step in range(1, steps + 1) for j, b in enumerate(batches) for s in positions(step, j, b)[0].spans
    )


@pytest.mark.parametrize("dies", [False, True])
def test_all_members_know_norm_losses_and_samples_of_a_step(jobs, dies):
    """Norm, losses and samples of a step are right and equal at all members, even if the step ran again after a
    death.
    """
    net, (batches, weights) = a_net(tied=True), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    if dies:
        left = [m for m in job.members if m.name != B]
        headers = job.train(1, batches, weights, meanwhile=Dying(job, job.members[1], 4, VACANT).recover)
    else:
        left = job.members
        headers = job.train(1, batches, weights)
    found = [m.outcomes[0] for m in left]
    assert all(outcome == found[0] for outcome in found)
    losses = [a_loss(net(b[0]), b).item() for b in batches]
    alone = copy.deepcopy(net)
    for loss, (batch, weight) in zip(losses, zip(batches, weights, strict=True), strict=True):
        (a_loss(alone(batch[0]), batch) * weight / sum(weights)).backward()
        assert loss > 0
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in alone.parameters()))
    assert math.isclose(found[0].norm, norm, rel_tol=1e-12)
    assert found[0].finite
    assert list(found[0].losses) == [0, 1, 2, 3, 4]
    for (loss, weight), theirs, its in zip(found[0].losses.values(), losses, weights, strict=True):
        assert math.isclose(loss, theirs, rel_tol=1e-12)
        assert weight == its
    mean = sum(loss * w for loss, w in zip(losses, weights, strict=True)) / sum(weights)
    assert math.isclose(found[0].loss, mean, rel_tol=1e-12)
    assert found[0].samples == sum(len(b[0]) for b in batches)
    assert found[0].extra == {j: b"%d" % j for j in range(5)}
    assert spent_spans(headers[A][0].ledger, "", 0) == used(1, batches)


def test_members_clip_alike_by_the_norm_of_the_whole(jobs):
    net, (batches, weights) = a_net(tied=True), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    clipped = []

    def clip(member, outcome):
        coefficient = clip_coefficient(outcome, 0.01)
        clipped.append(coefficient)
        scale_gradients(member.net.parameters(), coefficient)

    for m in job.members:
        m.after_commit = lambda outcome, m=m: clip(m, outcome)
    headers = job.train(2, batches, weights)
    assert max(clipped) < 1.0
    check(job.parameters(), one_process(net, momentum, batches, weights, 2, 0.01))
    assert spent_spans(headers[A][1].ledger, "", 0) == used(2, batches)


# ------------------------------------------------------------------------------------------------ buffers


def in_groups(net, batches, weights, steps):
    """Trains in one process as reference: in each step every group of micro-batches starts from the same buffers, which
    are then averaged.
    """
    net = copy.deepcopy(net)
    optimizer = momentum(net.parameters())
    for groups in steps:
        optimizer.zero_grad()
        before, found = {n: b.clone() for n, b in net.named_buffers()}, []
        for group in groups:
            for name, buffer in net.named_buffers():
                buffer.copy_(before[name])
            for j in group:
                (a_loss(net(batches[j][0]), batches[j]) * weights[j] / sum(weights)).backward()
            found.append({n: b.double() * len(group) / len(batches) for n, b in net.named_buffers()})
        for name, buffer in net.named_buffers():
            mean = sum(f[name] for f in found)
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        optimizer.step()
    return {n: t.detach() for n, t in (*net.named_parameters(), *net.named_buffers())}


def tensors(members):
    """Returns parameters and buffers by name; checks that all owners have equal values."""
    found = {}
    for m in members:
        for name, t in (*m.net.named_parameters(), *m.net.named_buffers()):
            if not is_absent(t):
                assert name not in found or torch.equal(found[name], t), (m.name, name)
                found[name] = t.detach()
    return found


GROUPS = [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("groups", [[range(5)], GROUPS])
def test_running_statistics_are_those_of_the_owners_micro_batches(jobs, groups):
    net, (batches, weights) = a_net(norm=True), equal()
    job = jobs(net, NAMES[: 2 * len(groups)])
    job.found(pipelines([(0, 2, 4)] * len(groups), [len(g) for g in groups]))
    job.train(3, batches, weights)
    check(tensors(job.members), in_groups(net, batches, weights, [groups] * 3), 1e-6)


def test_running_statistics_of_a_step_that_runs_again_count_each_micro_batch_once(jobs):
    """When a step runs again after a death, the running statistics count each micro-batch once, in the order in which d
    then runs them.
    """
    net, (batches, weights) = a_net(norm=True), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(2, batches, weights)
    job.train(1, batches, weights, meanwhile=Dying(job, job.members[1], 3, VACANT).recover)
    by_all = in_groups(net, batches, weights, [GROUPS] * 3)
    by_d = in_groups(net, batches, weights, [GROUPS, GROUPS, [[2, 0, 3, 1, 4]]])
    expected = by_all | {n: t for n, t in by_d.items() if n.startswith(("2.", "3."))}
    check(tensors([m for m in job.members if m.name != B]), expected, 1e-6)


def test_a_part_that_moves_within_a_step_has_the_buffers_of_its_base(jobs):
    """A layer that moves to d in the middle of a step starts there with the buffers of the last header, not with those
    of micro-batches already run.
    """
    net, (batches, weights) = a_net(norm=True), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    dying = Dying(job, job.members[1], 3, pipelines([(0, 1, 4)], [5], names=(A, D)))
    job.train(1, batches, weights, meanwhile=dying.recover)
    left = [m for m in job.members if m.name in (A, D)]
    check(tensors(left), in_groups(net, batches, weights, [GROUPS, [range(5)]]), 1e-6)


# ------------------------------------------------------------------------------------------------ drift


def test_a_part_that_drifts_is_pulled_anew_and_no_view_changes(jobs, caplog):
    """One changed element at one owner is found by the state hash; that owner pulls the part anew, and the view
    stays.
    """
    net, (batches, weights) = a_net(norm=False), equal()
    job = jobs(net, NAMES, state_hash_every=1)
    founded = job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(2, batches, weights)
    third = job.members[2]
    with torch.no_grad():
        third.net[1][0].bias[7] += 1e-3
    with caplog.at_level(logging.WARNING):
        headers = job.train(1, batches, weights)
    assert headers[A][0].drifted == (DriftedPart(C, 1),)
    assert (
        f"layer.1 of the training state differs here from that of {A} at step 3; this member gets theirs" in caplog.text
    )
    assert f"layer.1 of the training state of {C} differs at step 3; it gets that of the others" in caplog.text
    headers = job.train(2, batches, weights)
    assert all(h.drifted == () for h in headers[A])
    assert {h.view for h in headers[A]} == {founded.id}
    job.parameters()  # equal at all owners
    moments = [[s["momentum_buffer"] for s in m.optimizer.state.values()] for m in (job.members[0], third)]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


def test_a_part_that_drifts_again_is_refused(jobs):
    net, (batches, weights) = a_net(norm=False), equal()
    job = jobs(net, NAMES, state_hash_every=1)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    weight = job.members[3].net[3][0].weight
    with torch.no_grad():
        weight[0, 0] += 1.0
    job.train(2, batches, weights)
    with torch.no_grad():
        weight[0, 0] += 1.0
    with pytest.raises(UnsupportedError, match=r"layer\.3 of the training state of d~4 differs again .* step 4"):
        job.train(1, batches, weights)
