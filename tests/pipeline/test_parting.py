"""Tests that all members of a pipeline can leave, keep their parts in files, and resume the job from these files
(protocol.md P13).

Engines are the product's, from their hello to the files; a script is in the scheduler's place.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import pytest
from border_nodes import DEADLINE_S
from executor_support import SequentialLayers
from scripted_job import Dying, ScriptedJob
from test_engine_steps import adam, check, equal, one_process
from test_step import NAMES, A, B, C, D, a_loss, a_net, pipelines
from until_support import until

from chaos_lightning.errors import ConfigurationError, DepartedError
from chaos_lightning.membership.parts import numbers
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.protocol.types import Decide, Hello, Kept, Prepare, Released, Report, ViewId

BEFORE = pipelines([(0, 2, 4)], [5])


@pytest.fixture
def jobs(tmp_path):
    made = []

    def make(net, names):
        config = {"job": tmp_path.name, "on_last_exit": str(tmp_path)}
        made.append(ScriptedJob(net, names, lambda net: SequentialLayers(net, a_loss), adam, config))
        return made[-1]

    yield make
    for job in made:
        job.close()


def kept(member):
    member.engine.keep(member.rest)
    return member.last(Kept)


def parted(job, batches, weights, steps=1):
    """Lets all members leave with one header; returns the record that each of them keeps."""
    job.announce(BEFORE, (), job.members)
    job.train(steps, batches, weights)
    assert all(m.engine.out and m.engine.header.step == m.shell.machine.step for m in job.members)
    return {m.name: kept(m) for m in job.members}


def come_back(job, number, pipelines, *, joiners, batches, weights, steps):
    """Starts new processes for these pipelines; returns for each its kept record, the tensors that it had, and the
    headers of the steps it trains.
    """
    job.number = number

    def one(member):
        head = member.join()
        return (
            head,
            {n for n, p in member.net.named_parameters() if not is_absent(p)},
            member.train(steps, batches, weights),
        )

    with ThreadPoolExecutor(len(job.members)) as pool:
        futures = {}
        for m in job.members:  # one after the other: the last one finds all files offered
            futures[m.name] = pool.submit(one, m)
            until(lambda m=m: m.last(Hello), f"the hello of {m.name}")
        job.welcome()
        offers = {m.name: m.last(Hello).kept for m in job.members}
        base = next(k.header for k in offers.values() if k is not None)
        late = [m for m in job.members if m.name in joiners]
        view = job.view(pipelines, job.members, joiners=late)
        for m in job.members:
            m.hear(Decide(view, base, reason="founded from files"))
        for f in as_completed(futures.values(), DEADLINE_S):
            f.result()  # what ended one of them, before the others have waited for it
        return offers, {name: f.result() for name, f in futures.items()}


def test_all_leave_and_all_come_back_from_their_files(jobs):
    """All members leave and come back from their files; one that had no layers before now gets some, from both of the
    others.
    """
    net, (batches, weights) = a_net(tied=True), equal()
    job = jobs(net, NAMES[:3])
    job.found(BEFORE)
    job.train(2, batches, weights)
    told = parted(job, batches, weights)
    state = job.parameters()
    check(state, one_process(net, adam, batches, weights, 3))
    last = job.members[0].engine.header
    assert len({k.header.hash for k in told.values()}) == 1, "all name the same view"
    assert (told[A].header.prev_hash, told[A].header.view) == (last.hash, last.view)
    assert {name: numbers(k.parts) for name, k in told.items()} == {A: (0, 1, 4, 5), B: (2, 3, 4, 5), C: ()}
    job.close()

    again = jobs(a_net(tied=True), ("a~5", "b~6", "c~7"))
    after = pipelines([(0, 1, 4)], [5], names=("a~5", "c~7"))
    offers, came = come_back(again, job.number, after, joiners="c~7", batches=batches, weights=weights, steps=2)
    assert (offers["a~5"], offers["b~6"], offers["c~7"]) == (told[A], told[B], None)
    assert [m.engine.role for m in again.members] == ["founder", "founder", "joiner"]
    parts = {name: {again.parts.part_of[n] for n in names} for name, (_, names, _) in came.items()}
    shared = "shared.0.0.weight"
    assert parts["a~5"] == {"layer.0", "layer.1", shared}
    assert parts["b~6"] == {"layer.2", "layer.3", shared}
    assert parts["c~7"] == {"layer.1", "layer.2", "layer.3", shared}
    check(again.parameters(), one_process(net, adam, batches, weights, 5))
    assert all(len(headers) == 2 and headers[0].prev_hash == told[A].header.hash for _, _, headers in came.values())
    assert again.members[1].attempts
    assert all(is_absent(p) for p in again.members[1].net.parameters()), "it stands by, and has dropped its parts"


def owned(member):
    """Returns parameters, buffers and optimizer state of the layers that a member has memory for."""
    found = {}
    for state in member.held.states([f"layer.{i}" for i in range(4)]):
        if not any(is_absent(t) for _, t in state.tensors()):
            found |= {n: t.clone() for n, t in state.tensors()}
    assert any("exp_avg" in n for n in found)
    return found


def test_what_comes_back_is_what_was_kept(jobs):
    net, (batches, weights) = a_net(norm=True), equal()
    job = jobs(net, NAMES[:2])
    job.found(BEFORE)
    told = parted(job, batches, weights)
    before = {m.name: owned(m) for m in job.members}
    job.close()
    again = jobs(a_net(norm=True), ("b~7", "a~8"))
    same = pipelines([(0, 2, 4)], [5], names=("a~8", "b~7"))
    _, came = come_back(again, job.number, same, joiners="", batches=batches, weights=weights, steps=0)
    for name, old in (("a~8", A), ("b~7", B)):
        member = next(m for m in again.members if m.name == name)
        assert came[name][0] == told[old].header
        now = owned(member)
        assert now.keys() == before[old].keys()
        assert all(t.equal(before[old][n]) for n, t in now.items())


def test_a_decision_that_lets_all_go_ends_the_step_that_is_open(jobs):
    """A member dies in a step while the others want to leave: the step is dropped, and all leave with the state of the
    header before.
    """
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    left = [m for m in job.members if m.name != D]
    dying = Dying(job, job.members[3], 2, None)

    def part():
        assert dying._died.wait(DEADLINE_S)
        job.number += 1
        number = ViewId(1, job.number)
        for m in left:
            m.hear(Prepare(number, "d died"))
        until(lambda: all(m.last(Report) for m in left), "reports")
        job.number -= 1
        view = job.view(BEFORE, (), left)
        for m in left:
            m.hear(Decide(view, left[0].last(Report).last, reason="all leave"))

    with pytest.raises(DepartedError, match="let go with all other members"):
        job.train(1, batches, weights, meanwhile=part)
    assert all(m.engine.out and m.engine.header.step == 1 for m in left)
    told = [kept(m) for m in left]
    assert len({k.header.hash for k in told}) == 1
    check(job.parameters(left), one_process(net, adam, batches, weights, 1))
    for m in left:
        m.hear(Released("all leave", asked=True))
        m.engine.wait_released(1.0)
        assert m.engine._mail.left


def test_a_state_that_is_not_stepped_is_neither_kept_nor_given(jobs):
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES[:2])
    job.found(BEFORE)
    job.announce(BEFORE, (), job.members)
    refused = []

    def early(member):
        for call in (
            lambda: member.engine.keep(member.rest),
            member.engine.wait_released,
            lambda: member.engine.gather("x", b""),
        ):
            with pytest.raises(
                ConfigurationError, match=r"call optimizer\.step\(\) and then engine\.stepped\(\) first"
            ):
                call()
            refused.append(member.name)

    for m in job.members:
        m.after_commit = lambda outcome, m=m: early(m)
    job.train(1, batches, weights)
    assert sorted(refused) == [A] * 3 + [B] * 3
    assert all(kept(m) for m in job.members)


def test_a_process_offers_a_file_that_no_other_one_offers(jobs):
    """A process offers the file of an earlier member of its own name; processes with new names offer the remaining
    files, one each.
    """
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES[:3])
    job.found(pipelines([(0, 1, 2, 4)], [5]))
    told = parted(job, batches, weights)
    job.close()
    again = jobs(a_net(), ("x~4", "b~5", "y~6", "z~7"))
    said = [replace(m.engine._hello or hello_of(m), chain="") for m in again.members]
    b, *strangers = [m.engine._keeping.offer(h) for m, h in [(again.members[i], said[i]) for i in (1, 0, 2, 3)]]
    assert b == told[B]
    assert strangers == [told[A], told[C], None]
    assert again.members[0].engine._keeping.offer(said[0]) == told[A], "and so again"
    again.members[0].close()
    assert again.members[3].engine._keeping.offer(said[3]) == told[A]


def hello_of(member):
    """Returns the hello message of a member that has not joined."""
    member.found(member.job.view(BEFORE, ()))
    return member.engine._hello
