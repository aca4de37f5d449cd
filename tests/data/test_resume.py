"""Tests that joiners and whole jobs resume at the ledger's position, so that each sample is used once."""

import json

import pytest
import torch
from elastic_job import Job
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elastic_loader import Numbers, numbers
from torch.utils.data import DataLoader, IterableDataset

from chaos_lightning.errors import ConfigurationError

NAMES = "abcdefgh"


def finish(job):
    while job.step():
        pass
    return [s for _, s in job.new_epoch()]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4),
)
def test_stopped_job_resumes_exactly_once_with_any_number_of_members(length, runs):
    """A job is stopped and resumed several times with other numbers of members and micro-batches; each sample is used
    once.
    """
    used, state = [], None
    for members, accumulate, steps in runs:
        job = Job(numbers(length, {}, shuffle=True), NAMES[:members], accumulate=accumulate)
        if state is not None:
            for loader in job.loaders.values():
                loader.load_state_dict(json.loads(state))
        for _ in range(steps):
            if not job.loaders["a~1"].epoch_spent():
                assert job.step()
        used += [s for _, s in job.used]
        if not job.loaders["a~1"].epoch_spent():
            job.draw("a~1")  # stopped in the middle of a window: what was drawn for it is not spent
        state = json.dumps(job.loaders["a~1"].state_dict())
    job = Job(numbers(length, {}, shuffle=True), "ab")
    for loader in job.loaders.values():
        loader.load_state_dict(json.loads(state))
    used += finish(job)
    assert sorted(used) == list(range(length))
    assert sorted(finish(job)) == list(range(length))  # the next epoch is whole
    assert job.header.ledger.streams[0].epoch == 1


def test_state_of_a_finished_pass_leads_to_the_next_epoch():
    job = Job(numbers(6, {}), "a")
    finish(job)
    state = job.loaders["a~1"].state_dict()
    again = Job(numbers(6, {}), "a")
    again.loaders["a~1"].load_state_dict(state)
    assert again.loaders["a~1"].epoch == 1
    kept = again.loaders["a~1"].state_dict()
    assert [kept[k] for k in ("epoch", "yielded", "finished", "ledger")] == [0, 3, True, [["", 0, [[0, 6]]]]]
    assert sorted(finish(again)) == list(range(6))


def test_counts_go_on():
    job = Job(numbers(20, {}), "a")
    job.step(), job.step(), job.step()
    job.draw("a~1")  # handed out, not committed: it does not count
    again = Job(numbers(20, {}), "ab")
    for loader in again.loaders.values():
        loader.load_state_dict(job.loaders["a~1"].state_dict())
        assert len(loader) == 3 + 4  # 14 samples are left for two members
    again.step()
    assert {len(loader) for loader in again.loaders.values()} == {7}


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (lambda name: DataLoader(Numbers(21), batch_size=2), "order"),
        (lambda name: DataLoader(Numbers(20), batch_size=2, shuffle=True), "order"),
    ],
)
def test_other_data_are_refused(other, field):
    job = Job(numbers(20, {}), "a")
    job.step()
    state = job.loaders["a~1"].state_dict()
    with pytest.raises(ConfigurationError, match=f"saved state has {field}"):
        Job(other, "a").loaders["a~1"].load_state_dict(state)
    with pytest.raises(ConfigurationError, match="saved state has version 0, this loader 1"):
        job.loaders["a~1"].load_state_dict(state | {"version": 0})
    with pytest.raises(ConfigurationError, match="saved state has mode 'shared', this loader 'local'"):
        Job(numbers(20, {}), "a", mode="local").loaders["a~1"].load_state_dict(state)


class Stream(IterableDataset):
    def __init__(self, name, length):
        self.name, self.length = name, length

    def __iter__(self):
        return (torch.tensor(i) for i in range(self.length))


@pytest.mark.parametrize("steps", range(6))
def test_local_streams_resume_too(steps):
    lengths = {"a": 9, "b": 4}

    def make(name):
        return DataLoader(Stream(name, lengths[name]), batch_size=2)

    job = Job(make, "ab", mode="local")
    for _ in range(steps):
        job.step()
    used = job.new_epoch()
    again = Job(make, "ba", mode="local")
    for loader in again.loaders.values():
        loader.load_state_dict(json.loads(json.dumps(job.loaders["a~1"].state_dict())))
    while again.step():
        pass
    used += again.new_epoch()
    assert sorted(used) == [(name, i) for name in "ab" for i in range(lengths[name])]
