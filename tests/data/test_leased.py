"""Tests batches of leased positions: each is trained once over all clusters, in one order, however claims are timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from chaos_lightning.data.leased import LeasedLoader
from chaos_lightning.data.order import Orders
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.planning.batches import Batches
from chaos_lightning.protocol.spans import count, normalise, subtract

LENGTH = 22


class Dealer:
    """Stand-in for the lease server, which deals out an epoch's positions, and the next epoch's once all of them are
    used.

    Attributes:
        free: Positions of the present epoch that nobody has.
        used: Positions that count as used, by epoch.
        at_once: Most positions that are dealt per claim.
    """

    def __init__(self, length: int = LENGTH, epochs: int = 2, at_once: int = 1 << 30) -> None:
        self.length, self.epochs, self.at_once = length, epochs, at_once
        self.epoch = 0
        self.free = [(0, length)]
        self.used: dict[int, tuple[tuple[int, int], ...]] = {}
        self.when_dry: Callable[[], None] = lambda: None

    def claim(
        self, positions: int, *, wait: bool, within: int = -1
    ) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        if wait and not self.free:
            self.when_dry()
        if not self.free:
            assert not wait or self.epoch == self.epochs or self.epoch > within >= 0, "it would wait for ever"
            return ()
        start, stop = self.free.pop(0)
        end = min(stop, start + min(positions, self.at_once))
        if end < stop:
            self.free.insert(0, (end, stop))
        return ((self.epoch, ((start, end),)),)

    def take(self, covers: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]) -> None:
        for epoch, spans in covers:
            self.used[epoch] = normalise([*self.used.get(epoch, ()), *spans])
        if count(self.used.get(self.epoch, ())) == self.length:
            self.epoch += 1
            self.free = [(0, self.length)] if self.epoch < self.epochs else []


@pytest.mark.parametrize(
    ("drop_last", "least", "ranks", "batches"),
    [
        (False, 1, 1, Batches(8, 4, 1)),
        (False, 2, 1, Batches(8, 4, 2)),
        (False, 2, 3, Batches(24, 12, 6)),
        (True, 2, 3, Batches(24, 12, 12)),
    ],
)
def test_a_loader_says_what_its_cluster_trains_at_once(
    *, drop_last: bool, least: int, ranks: int, batches: Batches
) -> None:
    """A loader reports the numbers of positions that its cluster trains together; with drop_last only whole batches
    count.
    """
    loader = LeasedLoader(data(drop_last=drop_last), seed=0, source=Dealer(), part=(0, ranks), least=least)
    assert loader.batches(accumulate=2) == batches
    assert len(loader) == (LENGTH // (4 * ranks) if drop_last else -(-LENGTH // (4 * ranks)))


def test_an_epoch_without_a_batch_is_refused() -> None:
    rows = TensorDataset(torch.arange(3))
    with pytest.raises(ConfigurationError, match=r"3 samples and drop_last=True, and a batch of this cluster has 4"):
        LeasedLoader(DataLoader(rows, 4, shuffle=True, drop_last=True), seed=0, source=Dealer())


def test_without_a_shuffle_clusters_share_no_mix_and_are_told(recwarn: pytest.WarningsRecorder) -> None:
    """Former bug: without a shuffle each cluster silently trained on neighbouring samples; there is a warning now."""
    rows = TensorDataset(torch.arange(LENGTH))
    for shuffle in (True, False):
        assert not recwarn.list
        LeasedLoader(DataLoader(rows, 4, shuffle=shuffle), seed=0, source=Dealer())
    assert "shuffle=False where clusters share the data" in str(recwarn.pop(UserWarning).message)


@pytest.mark.parametrize("size", [6, 5, 1])
def test_ranks_of_a_cluster_share_each_batch_out(size: int) -> None:
    """The ranks of a cluster load all positions of a batch; if there are more ranks than positions, some load the same
    one.
    """
    dealers = [Dealer(length=LENGTH, epochs=1) for _ in range(3)]
    for dealer in dealers:
        dealer.free = [(0, 12), (12, 12 + size)]
        dealer.epochs = 0
    ranks = [LeasedLoader(data(), seed=0, source=d, part=(rank, 3)) for rank, d in enumerate(dealers)]
    whole = Orders(data(), seed=0, stream="").keys(0, ((0, 12), (12, 12 + size)))
    first, rest = ([batch.tolist() for (batch,) in map(next, ranks)] for _ in range(2))
    assert [key for part in first for key in part] == whole[:12]
    assert len(ranks[0]) == 2
    assert all(rest)
    assert sorted({key for part in rest for key in part}) == sorted(whole[12:])
    assert max(map(len, rest)) <= 2
    assert [loader.used() for loader in ranks] == [(12 + size, ((0, ((0, 12 + size),)),))] * 3


def data(**kwargs: object) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(LENGTH)), **{"batch_size": 4, "shuffle": True, **kwargs})


def rows(batch: list[torch.Tensor]) -> list[int]:
    return batch[0].tolist()


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def walk(loader: LeasedLoader, dealer: Dealer, every: int = 1) -> list[list[list[int]]]:
    """Trains until no positions are left; returns the rows by pass and batch. A step takes `every` batches, or the
    rest.
    """
    passes = []
    while iter(loader).more():
        batches = []
        for batch in loader:
            batches.append(rows(batch))
            if len(batches) % every == 0 or not loader.known:
                samples, covers = loader.used()
                assert samples == sum(len(b) for b in batches[-(len(batches) % every or every) :])
                dealer.take(covers)
        passes.append(batches)
    return passes


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_one_cluster_trains_each_sample_once_per_epoch_in_the_seeds_order(workers: int, every: int) -> None:
    dealer = Dealer()
    loader = LeasedLoader(data(num_workers=workers), seed=3, source=dealer)
    first, second = walk(loader, dealer, every)
    loader.close()
    order = Orders(data(), seed=3, stream="")
    assert flat(first) == order.keys(0, ((0, LENGTH),))
    assert flat(second) == order.keys(1, ((0, LENGTH),))
    assert [len(batch) for batch in first] == [4, 4, 4, 4, 4, 2]
    assert first != second
    assert len(loader) == 6


def test_positions_that_come_in_pieces_make_whole_batches() -> None:
    dealer = Dealer(epochs=1, at_once=3)
    (batches,) = walk(LeasedLoader(data(), seed=3, source=dealer), dealer)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]


def test_two_clusters_of_other_batch_sizes_share_an_epoch() -> None:
    dealer = Dealer(epochs=1)
    one = LeasedLoader(data(), seed=3, source=dealer)
    two = LeasedLoader(data(batch_size=5), seed=3, source=dealer)
    seen = []
    while one.known or two.known:
        for loader in (one, two):
            if loader.known:
                seen += rows(next(loader))
                dealer.take(loader.used()[1])
    assert sorted(seen) == list(range(LENGTH))
    assert one.words == two.words
    assert one.words != LeasedLoader(data(), seed=4, source=dealer).words


def test_a_pass_goes_on_where_more_of_its_epoch_is_dealt_again() -> None:
    """A pass continues with the half of its epoch that another cluster had leased before it died."""
    dealer = Dealer(epochs=1)
    dealer.free = [(0, 12)]
    dealer.when_dry = lambda: dealer.free.append((12, LENGTH)) if count(dealer.used[0]) == 12 else None
    loader = LeasedLoader(data(), seed=3, source=dealer)
    batches = []
    for batch in loader:
        batches.append(rows(batch))
        assert loader.known is (len(batches) not in (3, 6))
        dealer.take(loader.used()[1])
    assert sorted(flat(batches)) == list(range(LENGTH))


def test_what_was_handed_out_and_not_used_is_handed_out_again() -> None:
    dealer = Dealer(epochs=1)
    loader = LeasedLoader(data(), seed=3, source=dealer)
    dropped = rows(next(loader))
    (batches,) = walk(loader, dealer)
    assert batches[0] == dropped
    assert len(flat(batches)) == LENGTH


def test_a_loader_that_takes_anothers_place_goes_on_with_what_that_one_claimed() -> None:
    dealer = Dealer(epochs=1)
    old, new = (LeasedLoader(data(), seed=3, source=dealer) for _ in range(2))
    next(old)
    assert old.known
    new.inherit(old)
    (batches,) = walk(new, dealer)
    assert sorted(flat(batches)) == list(range(LENGTH))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_taken_away_is_not_trained_though_it_was_fetched(workers: int) -> None:
    dealer = Dealer(epochs=1)
    loader = LeasedLoader(data(num_workers=workers, prefetch_factor=2 if workers else None), seed=3, source=dealer)
    next(loader)
    dealer.take(loader.used()[1])
    lost = rows(next(loader))
    loader.forget()
    assert loader.used() == (0, ())
    dealer.free = list(subtract(((0, LENGTH),), dealer.used[0]))
    (batches,) = walk(loader, dealer)
    loader.close()
    assert batches[0] == lost
    assert dealer.used == {0: ((0, LENGTH),)}


def test_an_epoch_that_a_rollback_opened_again_belongs_to_the_present_pass() -> None:
    dealer = Dealer(epochs=2)
    loader = LeasedLoader(data(), seed=3, source=dealer)
    for _ in loader:
        dealer.take(loader.used()[1])
    for number, _ in enumerate(loader):
        if number == 0:
            dealer.epoch, dealer.free = 0, [(0, 4)]
            loader.forget()
        elif number == 1:
            assert loader.used() == (4, ((0, ((0, 4),)),))
            dealer.epoch, dealer.free, dealer.used[1] = 1, [(0, LENGTH)], ()
        else:
            dealer.take(loader.used()[1])
    assert loader.epoch == 1
    assert dealer.used[1] == ((0, LENGTH),)


def test_the_first_epoch_may_have_a_number() -> None:
    """A job that resumes from a checkpoint of epoch 5 gets the order of epoch 5."""
    dealer = Dealer(epochs=1)
    (batches,) = walk(LeasedLoader(data(), seed=3, source=dealer, first=5), dealer)
    assert flat(batches) == Orders(data(), seed=3, stream="").keys(5, ((0, LENGTH),))


def test_batches_of_a_sampler_are_positions() -> None:
    sampler = BatchSampler(SequentialSampler(range(LENGTH)), 3, drop_last=False)
    dealer = Dealer(length=8, epochs=1)
    loader = LeasedLoader(
        DataLoader(TensorDataset(torch.arange(LENGTH)), batch_sampler=Own(sampler)), seed=0, source=dealer
    )
    assert loader.length == 8
    (batches,) = walk(loader, dealer)
    assert flat(batches) == list(range(LENGTH))


class Own:
    """Custom batch sampler, as a user might write it."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> object:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Endless(IterableDataset):
    def __iter__(self) -> object:
        return iter(range(3))


class Longer(RandomSampler):
    """Sampler that yields one sample more in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> object:
        return iter(range(10 + self.epoch))


def test_what_clusters_cannot_share_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="list, whose samples have no positions"):
        LeasedLoader([1, 2], seed=0, source=Dealer())
    with pytest.raises(UnsupportedError, match="IterableDataset"):
        LeasedLoader(DataLoader(Endless()), seed=0, source=Dealer())
    sampler = Longer(range(LENGTH))
    with pytest.raises(UnsupportedError, match="10 units in the first epoch and 11"):
        LeasedLoader(DataLoader(TensorDataset(torch.arange(LENGTH)), sampler=sampler), seed=0, source=Dealer())
