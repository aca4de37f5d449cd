"""Tests the order of each epoch, which is derived from a user's loader."""

import random

import numpy as np
import pytest
import torch
from elastic_job import Job
from hypothesis import given
from hypothesis import strategies as st
from test_elastic_loader import Numbers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from chaos_lightning.data import ElasticLoader
from chaos_lightning.data.order import Orders, fast_permutation
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.planning.orders import permutation


@given(st.integers(0, 200), st.integers(0, 1 << 64), st.integers(0, 99), st.sampled_from(["", "node"]))
def test_both_implementations_are_one_definition(length, seed, epoch, stream):
    assert fast_permutation(length, seed, epoch, stream).tolist() == permutation(length, seed, epoch, stream)


def orders(seed=3, length=20, **kwargs):
    return Orders(DataLoader(Numbers(length), **kwargs), seed=seed, stream="")


def whole(one, epoch):
    return one.keys(epoch, ((0, one.length(epoch)),))


def test_shuffle_and_its_absence():
    assert whole(orders(shuffle=True), 4) == permutation(20, 3, 4)
    assert whole(orders(), 4) == list(range(20))
    one = orders(batch_size=6, drop_last=True)
    assert (one.unit, one.quota, one.drop_last, one.length(0)) == ("sample", 6, True, 20)
    explicit = orders(batch_sampler=BatchSampler(SequentialSampler(range(20)), 5, False))
    assert (explicit.unit, explicit.quota) == ("sample", 5)


class Reversed(Sampler):
    def __iter__(self):
        return iter(range(9, -1, -1))


class ByNumpy(Sampler):
    def __iter__(self):
        return iter(np.random.permutation(10).tolist())


class ByRandom(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter(random.sample(range(10), 10))

    def __len__(self):
        return 10


class OwnGenerator(Sampler):
    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(10, generator=self.generator).tolist())


class ByEpoch(Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(10))


@pytest.mark.parametrize(
    "make",
    [
        Reversed,
        ByNumpy,
        ByRandom,
        OwnGenerator,
        ByEpoch,
        lambda: SubsetRandomSampler(range(5)),
        lambda: WeightedRandomSampler([1.0] * 20, 35),
        lambda: RandomSampler(range(20), replacement=True, num_samples=12),
        lambda: RandomSampler(range(20), generator=torch.Generator(), num_samples=7),
    ],
)
def test_samplers_are_drawn_alike_everywhere(make):
    """A member that joins in epoch 3 gets the same order as one that has drawn all epochs before."""
    old, new = orders(sampler=make()), orders(sampler=make())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    before = [whole(old, epoch) for epoch in range(4)]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    assert whole(new, 3) == before[3]
    assert new.order_hash(3) == old.order_hash(3)
    assert new.fingerprint() == old.fingerprint()
    assert all(type(i) is int for i in before[0])
    if make is not Reversed:
        assert before[1] != before[2]


class Told(Sampler):
    """Batch sampler that records the epochs it is told, and does not pass them on."""

    def __init__(self, sampler):
        self.sampler, self.epochs = sampler, []

    def __iter__(self):
        return iter([[i] for i in self.sampler])

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("as_lightning", [True, False])
def test_who_is_told_the_epoch(as_lightning):
    """`set_epoch` is called on all samplers, or with Lightning only on those that Lightning would call it on."""
    batches = Told(ByEpoch())
    one = Orders(DataLoader(Numbers(10), batch_sampler=batches), seed=3, stream="", as_lightning=as_lightning)
    whole(one, 7)
    assert batches.sampler.epoch == 7
    assert batches.epochs[-1:] == ([] if as_lightning else [7])


def test_what_a_script_tells_its_sampler_before_a_pass_counts_in_it():
    """Settings that the script makes on its sampler before an epoch's first pass determine the order, which stays in
    later passes.
    """
    sampler = ByLoss()
    mine = orders(sampler=sampler)
    mine.length(1)
    sampler.loss = torch.arange(10.0)
    mine.begin(1)
    assert whole(mine, 1) == list(range(9, -1, -1))
    sampler.loss = torch.ones(10)
    mine.begin(1)
    assert whole(mine, 1) == list(range(9, -1, -1))


class Buckets(Sampler):
    """Batch sampler whose batches differ in size."""

    def __init__(self, sizes=(3, 1, 4, 1, 5)):
        self.sizes = sizes

    def __iter__(self):
        order = torch.randperm(sum(self.sizes)).tolist()
        for size in self.sizes:
            yield order[:size]
            order = order[size:]

    def __len__(self):
        return len(self.sizes)


def test_a_custom_batch_samplers_batch_is_the_unit():
    job = Job(lambda name: DataLoader(Numbers(14), batch_sampler=Buckets()), "ab")
    assert job.members[0].quota == 1
    sizes = []
    while job.step():
        sizes += [loader.current.samples for loader in job.loaders.values()]
    assert sizes == [3, 1, 4, 1, 5, 0]
    assert sorted(s for _, s in job.used) == list(range(14))


def test_without_automatic_batching_the_item_is_the_unit():
    job = Job(lambda name: DataLoader(Numbers(5), batch_size=None, shuffle=True), "ab")
    while job.step(unpack=lambda item: [item.item()]):
        pass
    assert [s for _, s in job.used] == permutation(5, 5, 0)


class Drifting(Sampler):
    """Sampler with a private random generator, so that its order cannot be reproduced."""

    def __init__(self):
        self.hidden = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.hidden.permutation(10).tolist())


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


class Flow(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(Numbers(10), sampler=Drifting()), "Drifting draws another order each time"),
        (lambda: DataLoader(Numbers(10), sampler=Endless()), "Endless went on after 640 units"),
        (
            lambda: DataLoader(Numbers(10), sampler=DistributedSampler(Numbers(10), num_replicas=2, rank=0)),
            "uses DistributedSampler, which shards by rank",
        ),
        (lambda: DataLoader(Flow()), 'Flow is an IterableDataset.*data="local"'),
        (lambda: [1, 2], 'the training loader is a list.*data="local"'),
        (lambda: OwnLoader(Numbers(3)), "OwnLoader has an __iter__ of its own"),
    ],
)
def test_refused_by_name(make, words):
    with pytest.raises(UnsupportedError, match=words):
        ElasticLoader(make(), mode="shared", seed=0, source=None)


def test_mistakes():
    with pytest.raises(ConfigurationError, match="data='both'; expected 'shared' or 'local'"):
        ElasticLoader([], mode="both", seed=0, source=None)
    with pytest.raises(ConfigurationError, match="has no samples"):
        ElasticLoader(DataLoader(Numbers(0)), mode="shared", seed=0, source=None)


def test_fingerprint_tells_orders_apart():
    prints = [
        ElasticLoader(DataLoader(Numbers(n), batch_size=2, shuffle=s), mode="shared", seed=seed, source=None)
        for n, s, seed in [(10, True, 0), (10, True, 0), (11, True, 0), (10, False, 0), (10, True, 1)]
    ]
    words = [p.order_fingerprint for p in prints]
    assert words[0] == words[1]
    assert len({str(w) for w in words}) == 4
    assert all(type(v) is str for w in words for v in w.values())
    assert prints[0]._units.order_hash(0) != prints[0]._units.order_hash(1)


class ByLoss(Sampler):
    """Sampler whose order depends on the losses of this member's training (hard mining)."""

    def __init__(self):
        self.loss = torch.ones(10)

    def __iter__(self):
        return iter(torch.argsort(self.loss, descending=True, stable=True).tolist())

    def __len__(self):
        return 10


def test_an_epochs_order_is_drawn_once():
    """An epoch's order is drawn once and stays, although a checkpoint or the length asks for other epochs in
    between.
    """
    sampler = ByLoss()
    mine = orders(sampler=sampler)
    told, first = dict(mine.fingerprint()), whole(mine, 0)
    sampler.loss = torch.arange(10.0)
    second = whole(mine, 1)
    sampler.loss = torch.arange(10.0) % 3
    assert mine.length(2) == 10
    assert mine.fingerprint() == told
    assert whole(mine, 1) == second
    assert second == first[::-1]
    other = orders(sampler=ByLoss())
    assert other.fingerprint() == told
    assert other.order_hash(1) != mine.order_hash(1)
