"""Tests that loaders assign each sample to exactly one committed step."""

import random
from collections import Counter

import pytest
import torch
from elastic_job import Job
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from chaos_lightning.data.order import fast_permutation
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.orders import permutation
from chaos_lightning.protocol.types import Kind, Spent


class Numbers(Dataset):
    """Data set whose sample i is the number i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if not 0 <= i < self.length:
            raise IndexError(i)
        return torch.tensor(i)


def numbers(length, batch_sizes, **kwargs):
    """Returns a function from a member's name to its loader of `length` numbers, with the batch size for that name."""
    return lambda name: DataLoader(Numbers(length), batch_size=batch_sizes.get(name, 2), **kwargs)


histories = st.lists(
    st.one_of(
        st.tuples(st.just("step")),
        st.tuples(st.just("gather")),
        st.tuples(st.just("die"), st.sets(st.integers(0, 3), min_size=1, max_size=2), st.booleans()),
        st.tuples(st.just("join")),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("rescue")),
        st.tuples(st.just("rejoin"), st.integers(0, 3)),
    ),
    max_size=12,
)


def run_epoch(job, history, limit=500):
    """Plays a history of events, then trains to the end of the epoch; returns the samples of committed steps."""
    names = iter("cdefghijklmnopqrstuvwxyz")
    steps = 0
    for event, *rest in history:
        if event == "die":
            more = job.step(dead=rest[0], late=rest[1])
        elif event == "join":
            job.join(next(names))
            more = job.step()
        elif event == "leave":
            if len(job.members) > 1:  # a header carries the view without it
                job.put_out({job.members[rest[0] % len(job.members)].id})
                job.commit(Kind.BOUNDARY)
            more = job.step()
        elif event == "rescue":
            # A view decided after a death lets a newcomer in that does not know the view which rules the assignment.
            def rescue(name=next(names)):
                state = job.loaders[job.members[-1].id].state_dict()
                gone = {job.members[0].id} if len(job.members) > 1 else set()
                member = job.enter(name)
                job.change([*(m for m in job.members if m.id not in gone), member])
                job.loaders[member.id].load_state_dict(state)
                for m in gone:
                    job.loaders.pop(m).close()

            # Before slot 1 no recovery lets anybody in: the assignment of that slot is the founding view's.
            more = job.step(meanwhile=rescue) if job.header.seq else job.step()
        elif event == "rejoin":
            # Fenced, its state void, back in the same process under a new id.
            gone = job.members[rest[0] % len(job.members)]
            if len(job.members) > 1:
                loader, it = job.loaders.pop(gone.id), job.passes.pop(gone.id, None)
                if it is not None:
                    next(it, None)  # it had begun an accumulation
                job.change([m for m in job.members if m.id != gone.id])
                job.commit(Kind.BOUNDARY)
                state = job.loaders[job.members[0].id].state_dict()
                job.born += 1
                back = type(gone)(f"{gone.name}~{job.born}", gone.name, "h", "", 0, quota=gone.quota)
                loader._source.member_id = back.id
                job.change([*job.members, back])
                job.commit(Kind.BOUNDARY)
                loader.load_state_dict(state)
                job.loaders[back.id] = loader
                if it is not None:
                    job.passes[back.id] = it
            more = job.step()
        else:
            more = job.step(gather=event == "gather")
        if not more:
            break
    else:
        while job.step():
            steps += 1
            assert steps < limit
    assert all(loader.epoch_spent() for loader in (job.loaders[m.id] for m in job.members))
    return job.new_epoch()


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 60),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(1, 3),
    st.booleans(),
    st.lists(histories, min_size=1, max_size=3),
)
def test_every_sample_in_exactly_one_committed_step(length, batch_sizes, accumulate, shuffle, epochs):
    make = numbers(length, dict(zip("ab", batch_sizes, strict=True)), shuffle=shuffle)
    job = Job(make, "ab", accumulate=accumulate)
    for history in epochs:
        used = run_epoch(job, history)
        assert sorted(sample for _, sample in used) == list(range(length))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_workers_draw_ahead_and_nothing_is_lost_or_repeated(seed, persistent):
    rng = random.Random(seed)
    make = numbers(70, {"a": 3, "b": 2}, shuffle=True, num_workers=2, persistent_workers=persistent, prefetch_factor=2)
    job = Job(make, "ab", accumulate=1 + seed % 2)
    discarded = 0
    kinds = [("step",), ("gather",), ("die", {0}, False), ("die", {1}, True), ("join",), ("rescue",), ("rejoin", 1)]
    for _ in range(2):
        history = [rng.choice(kinds) for _ in range(7)]
        if len(job.members) < 2:
            history.insert(0, ("join",))
        used = run_epoch(job, history)
        assert sorted(sample for _, sample in used) == list(range(70))
        discarded += sum(loader.stats.discarded for loader in job.loaders.values())
    assert discarded > 0  # else this showed nothing
    job.close()


def test_undisturbed_job_discards_nothing_and_opens_one_iterator_an_epoch():
    job = Job(numbers(64, {}, num_workers=1, persistent_workers=True), "ab")
    for epoch in range(2):
        while job.step():
            pass
        assert sorted(s for _, s in job.new_epoch()) == list(range(64))
        for loader in job.loaders.values():
            assert loader.stats.discarded == 0
            assert loader.stats.opened == epoch + 1
            assert loader.stats.drawn == 16 * (epoch + 1)
    job.close()


def test_share_that_was_not_committed_is_assigned_next_even_if_nobody_left():
    job = Job(numbers(40, {}, num_workers=1), "ab")
    job.step()
    accumulations = {m.id: job.draw(m.id) for m in job.members}
    assert accumulations["b~2"][0][0].spans == ((6, 8),)
    job.commit(spent=job.loaders["a~1"].spent())
    assert job.draw("a~1")[0][1].tolist() == [6, 7]
    assert job.draw("b~2")[0][1].tolist() == [8, 9]
    assert job.loaders["b~2"].stats.discarded == 2
    job.close()


def test_epoch_that_seemed_over_goes_on_with_the_dead_members_share():
    """A survivor whose iterator had drawn all its batches gets a dead member's share, and opens another iterator for
    it.
    """
    job = Job(numbers(8, {"a": 2, "b": 2}, num_workers=1), "ab")
    job.step()
    a = job.members[0].id
    assert len(job.loaders[a]) == 2
    job.step(dead={1})
    assert len(job.loaders[a]) == 3
    assert not job.loaders[a].epoch_spent()
    assert job.step()
    assert job.loaders[a].stats.opened == 2
    assert not job.step()
    assert sorted(s for _, s in job.used) == list(range(8))
    job.close()


def test_newcomer_of_a_recovery_takes_nothing_that_the_header_assigned_to_others():
    """A newcomer that knows only a later view than the header's is assigned nothing until the next header."""
    job = Job(numbers(20, {}), "ab")
    job.step()
    kept = job.draw("b~2")[0][0]
    newcomer = job.enter("c")
    job.change([job.members[1], newcomer])  # a is dead, c is let in at the header that assigned to a and b
    source = job.loaders[newcomer.id]._source
    source.__class__ = type("Hasty", (type(source),), {"ruling_view": property(lambda self: self.view)})
    ((mine, _),) = job.draw(newcomer.id)
    assert mine.idle
    assert kept.spans == ((6, 8),)
    job.commit(spent=[*job.loaders["b~2"].spent(), *job.loaders[newcomer.id].spent()])
    assert job.draw("b~2")[0][0].spans == ((4, 6),)
    assert job.draw(newcomer.id)[0][0].spans == ((8, 10),)


def test_the_order_is_the_keyed_permutation_whatever_the_world():
    alone = Job(numbers(20, {}, shuffle=True), "a")
    while alone.step():
        pass
    assert [s for _, s in alone.used] == permutation(20, 5, 0) == fast_permutation(20, 5, 0).tolist()
    three = Job(numbers(20, {}, shuffle=True), "abc")
    while three.step():
        pass
    assert [s for _, s in three.used] == [s for _, s in alone.used]


def test_tail_is_uneven_and_idle_members_get_a_dummy():
    job = Job(numbers(7, {}), "abc")
    job.step()
    accumulations = {m.id: job.draw(m.id) for m in job.members}
    (first, batch), (idle, dummy) = accumulations["a~1"][0], accumulations["b~2"][0]
    assert (first.samples, first.spans, batch.tolist()) == (1, ((6, 7),), [6])
    assert idle.idle
    assert idle.spans == ()
    assert job.loaders["b~2"].spent() == ()
    assert dummy.tolist() == [0, 1]
    assert job.loaders["b~2"].stats.idle == 1


def test_a_dummy_is_fresh_each_time():
    class Pairs(Numbers):
        def __getitem__(self, i):
            return {"x": super().__getitem__(i), "y": torch.tensor(1.0)}

    job = Job(lambda name: DataLoader(Pairs(9), batch_size=1), "ab")
    loader = job.loaders["b~2"]
    job.commit(spent=[Spent("", 0, ((0, 8),))])  # one sample is left, for the first member
    it = iter(loader)
    batch = next(it)
    assert loader.current.idle
    batch.pop("y")
    batch["x"] += 100
    job.commit()
    again = next(it)
    assert loader.current.idle
    assert {name: value.tolist() for name, value in again.items()} == {"x": [0], "y": [1.0]}


def test_drop_last_drops_fewer_than_the_smallest_quota():
    job = Job(numbers(23, {"a": 3, "b": 4}, drop_last=True), "ab", accumulate=2)
    sizes = Counter()
    while True:
        accumulations = {m.id: job.draw(m.id) for m in job.members}
        if None in accumulations.values():
            break
        for member, accumulation in accumulations.items():
            for current, batch in accumulation:
                if not current.idle:
                    sizes[(member, len(batch))] += 1
                    job.used += batch.tolist()
        job.commit(spent=[s for m in job.members for s in job.loaders[m.id].spent()])
    assert set(sizes) == {("a~1", 3), ("b~2", 4)}
    assert len(job.used) == len(set(job.used)) == 21
    assert job.header.ledger.streams == (Spent("", 0, ((0, 23),)),)


def test_a_model_with_batch_norm_gets_no_batch_of_one_where_its_step_has_more():
    """Former bug: the last 17 samples were split into batches of 16 and 1, and BatchNorm failed on the single
    sample.
    """
    job = Job(numbers(49, {"a": 16, "b": 16}), "ab", least=2)
    sizes = []
    while (accumulations := {m.id: job.draw(m.id) for m in job.members})["a~1"] is not None:
        sizes.append([len(batch) for accumulation in accumulations.values() for _, batch in accumulation])
        job.commit(spent=[s for m in job.members for s in job.loaders[m.id].spent()])
    assert sizes == [[16, 16], [15, 2]]


def test_several_windows_per_step_are_assigned_on():
    """With manual optimisation, which steps every third batch, no sample is assigned twice although no header comes in
    between.
    """
    job = Job(numbers(26, {"a": 2, "b": 3}), "ab")
    seen = []
    more = True
    while more:
        for _ in range(3):
            accumulations = {m.id: job.draw(m.id) for m in job.members}
            more = None not in accumulations.values()
            if not more:
                break
            seen += [s for w in accumulations.values() for c, batch in w if not c.idle for s in batch.tolist()]
            assert not job.loaders["a~1"].at_safe_point
        job.commit(spent=[s for m in job.members for s in job.loaders[m.id].spent()])
        assert job.loaders["a~1"].at_safe_point
    assert sorted(seen) == list(range(26))
    assert job.loaders["a~1"].epoch_spent()


def test_second_step_on_the_same_batch_spends_nothing():
    job = Job(numbers(8, {}), "a")
    job.draw("a~1")
    assert job.loaders["a~1"].spent() == (Spent("", 0, ((0, 2),)),)
    job.commit(spent=job.loaders["a~1"].spent())
    assert job.loaders["a~1"].spent() == ()
    job.commit(spent=job.loaders["a~1"].spent())
    job.draw("a~1")
    assert job.loaders["a~1"].current.spans == ((2, 4),)


def test_step_in_the_middle_of_a_window_ends_it():
    """Lightning steps early at the end of a limited epoch; the samples that were not handed out are assigned again."""
    job = Job(numbers(16, {}), "a", accumulate=4)
    loader = job.loaders["a~1"]
    it = iter(loader)
    next(it), next(it)
    job.commit(spent=loader.spent())
    assert job.header.ledger.streams[0].spans == ((0, 4),)
    assert next(it).tolist() == [4, 5]
    assert loader.current.first


def test_length_follows_the_members():
    job = Job(numbers(40, {}), "ab", accumulate=2)
    loader = job.loaders["a~1"]
    assert len(loader) == 10
    job.step()
    assert len(loader) == 10
    job.join("c")
    assert len(loader) == len(job.loaders["c~3"]) == 2 + 2 * 3
    job.step()
    job.step(dead={1, 2})
    assert len(loader) == 6 + 2 * 4
    while job.step():
        pass
    assert len(loader) == loader.stats.yielded == 14
    iter(loader)
    assert len(loader) == 20  # the next epoch's


def test_epochs_count_by_themselves_or_as_told():
    job = Job(numbers(6, {}, shuffle=True), "a")
    seen = []
    for _ in range(2):
        while job.step():
            pass
        seen.append([s for _, s in job.new_epoch()])
    job.loaders["a~1"].set_epoch(7)
    assert job.loaders["a~1"].epoch == 1
    while job.step():
        pass
    seen.append([s for _, s in job.new_epoch()])
    assert seen == [permutation(6, 5, e) for e in (0, 1, 7)]
    job.loaders["a~1"].set_epoch(3)
    with pytest.raises(ConfigurationError, match=r"epoch 3 was asked for, but the job's data stand in epoch 7"):
        job.step()


def test_an_epoch_left_early_is_left():
    job = Job(numbers(20, {}, num_workers=1), "ab")
    job.step()
    job.new_epoch()
    while job.step():
        pass
    assert sorted(s for _, s in job.used) == list(range(20))
    assert job.header.ledger.streams == (Spent("", 1, ((0, 20),)),)
    job.close()


def test_iterating_before_joining_is_refused_and_an_old_pass_cannot_go_on():
    job = Job(numbers(4, {}), "a")
    loader = job.loaders["a~1"]
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="a later pass over this loader has begun"):
        next(first)
    job.views.clear()
    with pytest.raises(RuntimeError, match="before this member joined a view"):
        next(iter(loader))
    assert len(loader) == 2  # as if alone


def test_a_sample_that_cannot_be_read_is_not_spent():
    class Flaky(Numbers):
        broken = True

        def __getitem__(self, i):
            if i == 3 and self.broken:
                raise OSError("disk on fire")
            return super().__getitem__(i)

    for workers in (0, 1):
        data = Flaky(8)
        job = Job(lambda name, data=data, n=workers: DataLoader(data, batch_size=2, num_workers=n), "a")
        job.step()
        with pytest.raises(OSError, match="disk on fire"):
            job.draw("a~1")
        assert job.loaders["a~1"].spent() == ()
        data.broken = False
        job.commit()
        while job.step():
            pass
        assert sorted(s for _, s in job.used) == list(range(8))
        job.close()
