"""Tests mode="local": each node has its own data, and trains its samples exactly once."""

import math

import pytest
import torch
from elastic_job import Job
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elastic_loader import Numbers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import Kind


class Stream(IterableDataset):
    """Iterable data set of numbers, divided among the loader's workers."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        return (torch.tensor(i) for i in range(first, self.length, stride))


def loaders(lengths, iterable, **kwargs):
    def make(name):
        length = lengths[name]
        return DataLoader(Stream(length) if iterable else Numbers(length), batch_size=3, **kwargs)

    return make


def expected(lengths, names):
    return [(name, i) for name in sorted(names) for i in range(lengths[name])]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_each_node_spends_its_own(lengths, iterable, accumulate, join_after):
    lengths = dict(zip("abcd", lengths, strict=False)) | {"z": 7}
    names = [name for name in lengths if name != "z"]
    job = Job(loaders(lengths, iterable), names, mode="local", accumulate=accumulate)
    for epoch in range(2):
        steps = 0
        more = True
        while more:
            if epoch == 0 and steps == join_after:
                job.join("z")
                names.append("z")
            more = job.step()
            steps += more
        assert sorted(job.new_epoch()) == expected(lengths, names)
        # No member did an idle window more than the longest needed.
        if epoch == 1:
            assert steps == max(math.ceil(math.ceil(lengths[n] / 3) / accumulate) for n in names)


@pytest.mark.parametrize("iterable", [False, True])
def test_a_dead_node_takes_its_data_with_it_and_back(iterable):
    lengths = {"a": 12, "b": 12}
    job = Job(loaders(lengths, iterable), "ab", mode="local")
    job.step()
    job.step(dead={1})
    assert not job.loaders["a~1"].epoch_spent()
    back = job.join("b")
    assert not job.loaders[back].epoch_spent()
    while job.step():
        pass
    assert sorted(job.used) == expected(lengths, "ab")


def test_an_iterables_workers_share_it_out():
    job = Job(loaders({"a": 17}, True, num_workers=2), "a", mode="local")
    while job.step():
        pass
    assert sorted(job.used) == expected({"a": 17}, "a")
    job.close()


def test_an_epoch_is_not_over_before_everybody_said_so():
    job = Job(loaders({"a": 3, "b": 9}, True), "ab", mode="local")
    a, b = (job.loaders[m.id] for m in job.members)
    assert job.step()
    assert not a.epoch_spent()
    assert len(a) == 1 + 1  # b has not said how much it has: never call the epoch over too early
    assert job.step()
    assert a.current.idle
    assert job.step()
    assert a.epoch_spent()
    assert b.epoch_spent()
    assert not job.step()
    assert len(a) == len(b) == 3
    assert sorted(job.used) == expected({"a": 3, "b": 9}, "ab")


def test_uncommitted_batches_of_an_iterable_are_kept():
    """A fenced member's uncommitted batches are yielded again after it rejoins, since an iterable cannot be drawn
    twice.
    """
    job = Job(lambda name: DataLoader(Stream(9), batch_size=3), "a", mode="local")
    loader = job.loaders["a~1"]
    job.step()
    it = job.passes["a~1"]
    assert next(it).tolist() == [3, 4, 5]
    (old,) = job.members
    back = type(old)("a~2", "a", "h", "", 0)
    loader._source.member_id = "a~2"
    job.change([back])
    job.commit(Kind.BOUNDARY)
    assert loader.spent() == ()
    assert next(it).tolist() == [3, 4, 5]


def test_committed_batches_of_an_iterable_are_let_go():
    job = Job(loaders({"a": 300}, True), "a", mode="local", accumulate=2)
    while job.step():
        assert len(job.loaders["a~1"]._feed._buffer) <= 3


def test_any_iterable_will_do():
    job = Job(lambda name: [torch.tensor([i, i + 1]) for i in (0, 2)], "ab", mode="local")
    while job.step():
        pass
    assert sorted(job.used) == expected({"a": 4, "b": 4}, "ab")


def test_a_batch_may_be_taken_apart():
    job = Job(lambda name: [{"x": torch.tensor([1])}, {"x": torch.tensor([2])}], "a", mode="local")
    loader = job.loaders["a~1"]
    it = iter(loader)
    next(it).pop("x")
    loader._source.member_id = "a~9"
    job.change([type(job.members[0])("a~9", "a", "h", "", 0)])
    job.commit(Kind.BOUNDARY)
    assert next(it) == {"x": torch.tensor([1])}


def test_a_node_without_data_is_told():
    job = Job(loaders({"a": 0}, True), "a", mode="local")
    with pytest.raises(ConfigurationError, match="yielded nothing in epoch 0; expected at least one batch"):
        job.step()
    with pytest.raises(ConfigurationError, match="has no samples"):
        Job(loaders({"a": 0}, False), "a", mode="local")


def test_orders_of_nodes_differ():
    lengths = {"a": 30, "b": 30}
    job = Job(loaders(lengths, False, shuffle=True), "ab", mode="local")
    while job.step():
        pass
    a, b = ([s for name, s in job.used if name == n] for n in "ab")
    assert sorted(a) == sorted(b)
    assert a != b
