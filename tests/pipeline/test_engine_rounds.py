"""Tests evaluation rounds of engines: forward passes over the routes of a training step, closed by a collective
(P17).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from border_nodes import DEADLINE_S
from executor_support import SequentialLayers
from scripted_job import DeathError, Dying, ScriptedJob
from test_engine_steps import check, momentum, one_process
from test_step import NAMES, VACANT, A, B, C, D, a_loss, a_net, batches_of, pipelines, weights_of

from chaos_lightning.errors import DisagreementError
from chaos_lightning.member.unit_steps import UnitsDone
from chaos_lightning.membership.parts import division
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.planning.pipelines.units import FORWARD, coverage
from chaos_lightning.protocol.types import Kind
from chaos_lightning.replication.payload import decode_payload, encode_payload

MICRO_BATCHES = 5


@pytest.fixture
def job():
    made = []

    def make(net, names):
        made.append(ScriptedJob(net, names, lambda net: SequentialLayers(net, a_loss), momentum))
        return made[-1]

    yield make
    for each in made:
        each.close()


def call(given):
    x, batch = given
    return a_loss(x, batch) + 1


class Rounds:
    """Evaluation rounds of a job, run in a thread for each member."""

    def __init__(self, job, batches):
        self.job, self.batches = job, batches
        self.covered = lambda units: coverage(units, FORWARD)
        self.attempts = []

    def one(self, member, number, count):
        torch.set_num_threads(1)

        def attempt(view, seq):
            self.attempts.append((member.name, view.id, seq))
            looks = iter(range(1000))
            real = type(member.step.borders).check

            def look(at):
                if member.at_unit is not None:
                    member.at_unit(next(looks))
                real(member.step.borders, at)

            member.step.borders.check = look
            these = division(view).pipelines
            empty = range(count, MICRO_BATCHES)
            sums = member.step.evaluate(
                SlotAttempt(view.id, seq), these, member.name, empty, self.batches.__getitem__, call
            )
            covered = self.covered([time.unit for time in sums.times])
            payload = encode_payload({j: float(result) for j, result in sums.results.items()})
            return UnitsDone(weight=0.0, presence=b"", micro_batches=((0, count),), coverage=covered, payload=payload)

        with torch.no_grad():
            header = member.engine.gather_by_units(f"round {number}", attempt)
        assert header.kind is Kind.GATHER
        found = {}
        for contributor, data in zip(member.engine.contributors, header.answers, strict=True):
            found |= {j: (contributor, value) for j, value in decode_payload(data).items()}
        return header, found

    def run(self, number=0, count=MICRO_BATCHES, members=None, meanwhile=lambda: None):
        members = members or self.job.members

        def alone(member):
            try:
                return self.one(member, number, count)
            except (DeathError, DisagreementError) as error:
                return error

        with ThreadPoolExecutor(len(members)) as pool:
            futures = {m.name: pool.submit(alone, m) for m in members}
            meanwhile()
        return {name: future.result(DEADLINE_S) for name, future in futures.items()}


def expected(net, batches, count=MICRO_BATCHES):
    with torch.no_grad():
        return [float(call((net(batch[0]), batch))) for batch in batches[:count]]


def assert_round(results, values):
    """Checks that all members have the same header and the expected value of each batch."""
    assert len({header.hash for header, _ in results.values()}) == 1
    for _, found in results.values():
        assert [found[j][1] for j in sorted(found)] == values


@pytest.mark.parametrize(
    ("names", "view"),
    [
        (NAMES[:1], pipelines([(0, 4)], [5])),
        (NAMES[:3], pipelines([(0, 1, 2, 4)], [5])),
        (NAMES, pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])),
        (NAMES[:3], pipelines([(0, 2, 4)], [5])),
    ],
    ids=["one member", "three stages", "DP 2 x PP 2", "one stands by"],
)
def test_all_members_get_the_results_of_a_round(job, names, view):
    net, batches = a_net(), batches_of(MICRO_BATCHES)
    made = job(net, names)
    made.found(view)
    rounds = Rounds(made, batches)
    assert_round(rounds.run(0), expected(net, batches))
    assert_round(rounds.run(1, count=2), expected(net, batches, 2))
    assert all(p.grad is None for m in made.members for p in m.net.parameters())


def test_rounds_and_steps_follow_each_other(job):
    net, batches = a_net(norm=True), batches_of(MICRO_BATCHES)
    weights = weights_of(batches)
    made = job(net, NAMES)
    made.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    rounds = Rounds(made, batches)
    for m in made.members:
        m.net.eval()
    rounds.run(0)
    made.train(1, batches, weights)
    rounds.run(1)
    rounds.run(2, count=3)
    headers = made.train(1, batches, weights)
    assert [h.seq for h in headers[A]] == [5]
    check(made.parameters(), one_process(net.eval(), momentum, batches, weights, 2))


@pytest.mark.parametrize("at", [0, 2])
def test_the_others_run_the_round_again_when_a_member_dies_in_it(job, at):
    """A round in which a member dies is run again by the others, with the right values; earlier rounds and the next
    training step are not affected.
    """
    net, batches = a_net(tied=True), batches_of(MICRO_BATCHES)
    weights, made = weights_of(batches), job(net, NAMES)
    first = made.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    rounds = Rounds(made, batches)
    assert_round(rounds.run(0), expected(net, batches))
    dying = Dying(made, made.members[1], at, VACANT)
    results = rounds.run(1, meanwhile=dying.recover)
    assert isinstance(results.pop(B), DeathError)
    assert_round(results, expected(net, batches))
    assert {member for _, found in results.values() for member, _ in found.values()} == {D}
    again = [(name, seq) for name, view, seq in rounds.attempts if view > first.id]
    assert sorted(again) == [(A, 2), (C, 2), (D, 2)]
    left = [m for m in made.members if m.name != B]
    made.train(1, batches, weights, left)
    check(made.parameters(left), one_process(net, momentum, batches, weights, 1))


def test_a_round_that_leaves_a_batch_out_is_refused_by_all(job):
    net, batches = a_net(), batches_of(MICRO_BATCHES)
    made = job(net, NAMES[:2])
    made.found(pipelines([(0, 2, 4)], [5]))
    rounds = Rounds(made, batches)
    rounds.covered = lambda units: coverage([u for u in units if u.micro_batch != 3], FORWARD)
    for error in rounds.run(0).values():
        assert isinstance(error, DisagreementError)
        assert "micro-batches [3, 4)" in str(error)
        assert "sum of no member" in str(error)
