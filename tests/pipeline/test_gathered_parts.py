"""Tests that the writer of a checkpoint reads the parts that it lacks from other members, as of the header before the
file.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from border_nodes import DEADLINE_S
from executor_support import SequentialLayers
from scripted_job import ScriptedJob
from test_engine_steps import adam, equal, momentum, one_process
from test_step import NAMES, VACANT, a_loss, a_net, pipelines

from chaos_lightning.errors import ConfigurationError, DeadlineError, StateError
from chaos_lightning.member.engine import Engine
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.whole_file import PartialModel, partial_state_dict, write_whole
from chaos_lightning.settings import EngineConfig


@pytest.fixture
def jobs():
    made = []

    def make(net, names, make_optimizer=adam):
        made.append(ScriptedJob(net, names, lambda net: SequentialLayers(net, a_loss), make_optimizer))
        return made[-1]

    yield make
    for job in made:
        job.close()


def save(job, path, members=None, dies=None, meanwhile=lambda: None):
    """Runs the two collectives of a checkpoint at all members; between them the first member writes the file.

    Args:
        dies: Member that is gone before the first one reads.
        meanwhile: Function called once that member is gone.
    """
    members = members or job.members
    gone = threading.Event()

    def one(member):
        member.engine.gather("before saving", b"")
        source = member.engine.share_parts()
        if member is dies:
            member.engine.server.close()
            member.die()
            gone.set()
            return
        if member is members[0]:
            assert dies is None or gone.wait(DEADLINE_S)
            model = PartialModel(member.net, job.parts, [member.optimizer])
            checkpoint = {
                "state_dict": partial_state_dict(member.net), "optimizer_states": [member.optimizer.state_dict()]
            }  # fmt: skip
            write_whole(path, checkpoint, model, source)
        member.engine.gather("outcome of saving", b"")

    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(one, m) for m in members]
        if dies is not None:
            assert gone.wait(DEADLINE_S)
        meanwhile()
        for future in futures:
            future.result(DEADLINE_S)
    return torch.load(path, weights_only=True)


def held(job, members=None):
    """Returns the members' parameters and optimizer states joined, as a single process would save them."""
    parameters, states = {}, {}
    for m in members or job.members:
        for at, (name, p) in enumerate(m.net.named_parameters()):
            if not is_absent(p):
                parameters[name] = p.detach().clone()
                states[at] = m.optimizer.state[p]
    return parameters, {at: states[at] for at in sorted(states)}


def check(saved, parameters, states):
    assert saved["state_dict"].keys() >= parameters.keys()
    for name, value in parameters.items():
        assert torch.equal(saved["state_dict"][name], value), name
    found = saved["optimizer_states"][0]["state"]
    assert list(found) == list(states)
    for at, state in states.items():
        assert list(found[at]) == list(state)
        assert all(torch.equal(found[at][key], state[key]) for key in state), at


@pytest.mark.parametrize("shape", ["DP 1 x PP 2", "DP 2 x PP 2", "the writer stands by"])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_a_checkpoint_is_whole_and_training_goes_on(jobs, tmp_path, shape, make_optimizer):
    names, view = {
        "DP 1 x PP 2": (NAMES[:2], pipelines([(0, 2, 4)], [5])),
        "DP 2 x PP 2": (NAMES, pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])),
        "the writer stands by": (NAMES[:3], pipelines([(0, 2, 4)], [5], names=NAMES[1:3])),
    }[shape]
    net, (batches, weights) = a_net(norm=True, tied=True), equal()
    job = jobs(net, names, make_optimizer)
    job.found(view)
    job.train(2, batches, weights)
    saved = save(job, tmp_path / "x")
    check(saved, *held(job))
    assert list(saved["state_dict"]) == list(net.state_dict())
    job.train(1, batches, weights)
    assert not torch.equal(saved["state_dict"]["1.0.weight"], job.parameters()["1.0.weight"])
    check(save(job, tmp_path / "x"), *held(job))


def test_another_owner_is_asked_when_one_dies(jobs, tmp_path):
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES)
    job.found(pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]))
    job.train(1, batches, weights)
    expected = held(job)
    dying, left = job.members[1], [m for m in job.members if m is not job.members[1]]
    saved = save(job, tmp_path / "x", dies=dying, meanwhile=lambda: job.recover(VACANT, left))
    check(saved, *expected)
    job.train(1, batches, weights, left)
    wanted = one_process(net, adam, batches, weights, 2)
    for name, value in job.parameters(left).items():
        assert float((value - wanted[name]).abs().max()) <= 1e-9, name


def test_parts_that_move_with_the_header_before_the_file_are_read_where_they_are(jobs, tmp_path):
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES[:2])
    job.found(pipelines([(0, 2, 4)], [5]))
    job.train(1, batches, weights)
    expected = held(job)
    job.announce(pipelines([(0, 1, 4)], [5]), job.members)
    check(save(job, tmp_path / "x"), *expected)
    job.train(1, batches, weights)
    check(save(job, tmp_path / "x"), *held(job))


def test_a_part_that_nobody_gives_is_an_error_in_time(jobs, tmp_path, monkeypatch):
    """If a part's only owner does not serve it, reading it fails within the time limit, and the collective that reports
    the outcome still completes.
    """
    monkeypatch.setattr("chaos_lightning.member.engine.READING_SHARE", 0.01)
    net, (batches, weights) = a_net(), equal()
    job = jobs(net, NAMES[:2])
    job.found(pipelines([(0, 2, 4)], [5]))
    job.train(1, batches, weights)
    one, other = job.members

    def alone(member):
        member.engine.gather("before saving", b"")
        if member is one:
            source = member.engine.share_parts()
            with pytest.raises((StateError, DeadlineError), match=r"no donor is left|took longer"):
                source.tensors("layer.2")
        return member.engine.gather("outcome of saving", b"")

    with ThreadPoolExecutor(2) as pool:
        answers = [f.result(DEADLINE_S) for f in [pool.submit(alone, one), pool.submit(alone, other)]]
    assert answers[0] == answers[1]


def test_an_engine_without_parts_says_so():
    engine = Engine(EngineConfig(endpoint="127.0.0.1:9", log_dir="none"))
    with pytest.raises(ConfigurationError, match="attach"):
        engine.share_parts()
    engine.close()
