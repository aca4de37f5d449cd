"""Tests loaders of numbered micro-batches: steps are equal at all members, and each sample is used once."""

import json
import random

import numpy as np
import pytest
import torch
from elastic_job import Job
from hypothesis import given, settings
from hypothesis import strategies as st
from step_job import StepJob
from test_elastic_loader import Numbers, numbers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, get_worker_info

from chaos_lightning.data.steps import StepLoader
from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.planning.orders import permutation
from chaos_lightning.protocol.types import Kind

sizes = {"length": st.integers(1, 60), "batch_size": st.integers(1, 5), "micro_batches": st.integers(1, 6)}
events = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("die"), st.sets(st.integers(0, 3), min_size=1, max_size=2), st.integers(0, 6)),
    st.tuples(st.just("join")),
    st.tuples(st.just("rejoin"), st.integers(0, 3)),
)


def rejoin(job, index):
    """Fences a member in the middle of a step, and lets it join again in the same process under a new id."""
    gone = job.members[index % len(job.members)]
    loader = job.loaders.pop(gone.id)
    job.passes.pop(gone.id, None)
    step = next(iter(loader), None)
    if step is not None:
        step.batch(0)
    job.change([m for m in job.members if m.id != gone.id])
    if not job.loaders[job.members[0].id].epoch_spent():
        job.step()
    job.born += 1
    back = type(gone)(f"{gone.name}~{job.born}", gone.name, "h", "", 0, quota=gone.quota)
    loader._assigning._source._source.member_id = back.id
    job.change([*job.members, back])
    job.commit(Kind.BOUNDARY)
    loader.load_state_dict(json.loads(json.dumps(job.loaders[job.members[0].id].state_dict())))
    job.loaders[back.id] = loader


def run_epoch(job, history, names):
    more = True
    for event, *rest in history:
        if event == "die":
            more = job.step(dead=rest[0], until=rest[1])
        elif event == "join":
            job.join(next(names))
            more = job.step()
        elif event == "rejoin" and len(job.members) > 1:
            rejoin(job, rest[0])
            more = job.step()
        else:
            more = job.step()
        if not more:
            break
    while more:
        more = job.step()
    assert all(job.loaders[m.id].epoch_spent() for m in job.members)
    used, job.used = job.used, []
    job.passes.clear()
    return used


@settings(deadline=None, max_examples=150)
@given(**sizes, shuffle=st.booleans(), epochs=st.lists(st.lists(events, max_size=8), min_size=1, max_size=3))
def test_every_sample_in_exactly_one_committed_step(length, batch_size, micro_batches, shuffle, epochs):
    names = iter(f"n{i}" for i in range(100))
    make = numbers(
        length, dict.fromkeys("abc", batch_size) | {f"n{i}": batch_size for i in range(100)}, shuffle=shuffle
    )
    job = StepJob(make, "abc", micro_batches=micro_batches)
    for epoch, history in enumerate(epochs):
        used = run_epoch(job, history, names)
        assert used == (permutation(length, 5, epoch) if shuffle else list(range(length)))  # also in order


@settings(deadline=None, max_examples=100)
@given(**sizes, drop_last=st.booleans())
def test_steps_are_those_of_torch_with_so_many_batches_accumulated(length, batch_size, micro_batches, drop_last):
    plain = [batch.tolist() for batch in DataLoader(Numbers(length), batch_size, drop_last=drop_last)]
    make = numbers(length, {"a": batch_size, "b": batch_size}, drop_last=drop_last)
    job = StepJob(make, "ab", micro_batches=micro_batches)
    loader = job.loaders["a~1"]
    assert len(loader) == loader.foreseen(3) == -(-len(plain) // micro_batches)
    steps = []
    for step in loader:
        steps.append([step.batch(j).tolist() for j in range(micro_batches) if j not in step.empty])
        assert (step.index, loader.current) == (len(steps) - 1, step)
        assert step.samples == sum(map(len, steps[-1])) == sum(step.weight(j) for j in range(micro_batches))
        assert len(loader) == -(-len(plain) // micro_batches)
        job.commit(spent=[spent for j in range(micro_batches) for spent in step.spent(j)])
    assert steps == [plain[i : i + micro_batches] for i in range(0, len(plain), micro_batches)]
    assert loader.epoch_spent()
    if plain:
        assert job.header.ledger.streams[0].spans == ((0, length),)  # what is dropped is spent, too


def test_a_model_with_batch_norm_gets_no_micro_batch_of_one():
    job = StepJob(numbers(9, {"a": 4}), "a", micro_batches=3, least=2)
    step = job.begin("a~1")
    assert [step.batch(j).tolist() for j in range(3)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8]]


def test_batches_of_a_batch_sampler_are_micro_batches_whatever_their_size():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]

    class Uneven(BatchSampler):
        def __init__(self):
            pass

        def __iter__(self):
            return iter(batches)

        def __len__(self):
            return len(batches)

    job = StepJob(lambda name: DataLoader(Numbers(11), batch_sampler=Uneven()), "ab", micro_batches=2)
    step = job.begin("a~1")
    assert [step.weight(j) for j in range(2)] == [3.0, 1.0]
    assert step.samples == 4
    job.loaders["a~1"].give_up()
    job.loaders["a~1"].set_epoch(0)
    job.passes.clear()
    while job.step():
        pass
    assert job.used == list(range(11))


def test_a_batch_that_was_changed_is_given_as_it_was_fetched():
    class Pairs(Numbers):
        def __getitem__(self, i):
            return {"x": super().__getitem__(i), "name": str(i)}

    job = StepJob(lambda name: DataLoader(Pairs(4), batch_size=2), "a", micro_batches=2)
    step = job.begin("a~1")
    for _ in range(3):
        batch = step.batch(1)
        assert batch["x"].tolist() == [2, 3]
        assert batch.pop("name") == ["2", "3"]
        batch["x"] += 100
    assert job.loaders["a~1"].stats.drawn == 1


class Uncopied:
    def __init__(self, samples):
        self.samples = samples

    def __deepcopy__(self, _):
        raise TypeError("no copies")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_copied_is_fetched_again(workers):
    make = numbers(16, {}, collate_fn=Uncopied, num_workers=workers)
    job = StepJob(make, "a", micro_batches=2)
    step = job.begin("a~1")
    step.expect([0, 1])
    first = step.batch(0)
    assert step.batch(0) is not first
    assert step.batch(0).samples == first.samples == [torch.tensor(0), torch.tensor(1)]
    assert step.batch(1).samples == [2, 3]
    job.commit(spent=[*step.spent(0), *step.spent(1)])
    assert job.begin("a~1").batch(0).samples == [4, 5]
    job.close()


# ------------------------------------------------------------------------------------------------ prefetching


def test_workers_fetch_what_is_expected_and_nothing_else():
    job = StepJob(numbers(64, {}, num_workers=1, prefetch_factor=2), "ab", micro_batches=4)
    loader = job.loaders["a~1"]
    for index, step in enumerate(loader):
        step.expect([1, 3])
        assert index or loader.stats.drawn == 2  # before it is asked for
        assert step.batch(1).tolist() == [8 * index + 2, 8 * index + 3]
        assert step.batch(3).tolist() == [8 * index + 6, 8 * index + 7]
        job.commit(spent=[spent for j in range(4) for spent in step.spent(j)])
    assert (loader.stats.drawn, loader.stats.discarded, loader.stats.opened) == (16, 0, 1)
    job.close()


def test_a_rerun_by_other_numbers_keeps_what_was_fetched_ahead():
    job = StepJob(numbers(160, {}, num_workers=1, prefetch_factor=4), "ab", micro_batches=4)
    loader = job.loaders["a~1"]
    step = job.begin("a~1")
    step.expect([0])
    step.batch(0)
    drawn = loader.stats.drawn  # those of the next steps
    assert drawn == 5
    step.expect([0, 1, 2, 3])  # a neighbour died
    assert [step.batch(j).tolist() for j in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    job.commit(spent=[spent for j in range(4) for spent in step.spent(j)])
    for step in job.passes["a~1"]:
        assert [step.batch(j)[0].item() // 2 for j in range(4)] == [4 * step.index + j for j in range(4)]
        job.commit(spent=[spent for j in range(4) for spent in step.spent(j)])
    assert (loader.stats.drawn, loader.stats.discarded) == (80, 0)
    job.close()


def test_fewer_numbers_throw_away_what_another_member_runs_now():
    job = StepJob(numbers(160, {}, num_workers=1, prefetch_factor=4), "ab", micro_batches=4)
    loader = job.loaders["a~1"]
    step = job.begin("a~1")
    step.expect(range(4))
    step.batch(0)
    step.expect([0, 3])
    assert step.batch(3).tolist() == [6, 7]
    job.commit(spent=[spent for j in range(4) for spent in step.spent(j)])
    step = job.begin("a~1")
    assert step.batch(0).tolist() == [8, 9]
    assert loader.stats.discarded == 2  # 1 and 2 of the first step
    job.close()


def test_what_was_expected_and_never_asked_for_is_let_go():
    job = StepJob(numbers(160, {}, num_workers=1), "a", micro_batches=4)
    loader = job.loaders["a~1"]
    for step in loader:
        step.expect(range(4))
        step.batch(3)
        assert len(loader._assigning.feed._early) <= 3
        job.commit(spent=[spent for j in range(4) for spent in step.spent(j)])
    job.close()


def test_a_micro_batch_nobody_expected_is_fetched_when_it_is_asked_for():
    job = StepJob(numbers(40, {}, num_workers=1), "a", micro_batches=4)
    step = job.begin("a~1")
    assert [step.batch(j).tolist() for j in (2, 0, 3)] == [[4, 5], [0, 1], [6, 7]]
    job.close()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_workers_of_a_job_that_members_come_to_and_die_of(seed, persistent):
    rng = random.Random(seed)
    make = numbers(90, {}, shuffle=True, num_workers=2, persistent_workers=persistent)
    job = StepJob(make, "abc", micro_batches=5)
    names = iter("defghijkl")
    for epoch in range(2):
        history = [
            rng.choice([("step",), ("die", {0}, 2), ("die", {1}, 3), ("join",), ("rejoin", 1)]) for _ in range(6)
        ]
        if len(job.members) < 3:
            history[:0] = [("join",), ("join",)]
        assert run_epoch(job, history, names) == permutation(90, 5, epoch)
    job.close()


def test_a_sample_that_cannot_be_read_can_be_asked_for_again():
    class Flaky(Numbers):
        broken = True

        def __getitem__(self, i):
            if i == 3 and self.broken:
                raise OSError("disk on fire")
            return super().__getitem__(i)

    data = Flaky(8)
    job = StepJob(lambda name: DataLoader(data, batch_size=2), "a", micro_batches=2)
    step = job.begin("a~1")
    with pytest.raises(OSError, match="disk on fire"):
        step.batch(1)
    data.broken = False
    assert step.batch(1).tolist() == [2, 3]
    assert step.batch(0).tolist() == [0, 1]


# ------------------------------------------------------------------------------------------------ randomness


class Noisy(Numbers):
    """Data set that draws from all random generators, differently often for different samples."""

    def __getitem__(self, i):
        for _ in range(i % 3):
            torch.rand(1)
        return torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand()), float(i)])


def mixed(samples):
    return torch.stack(samples) * torch.rand(1)


class Many(Noisy):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Batches(BatchSampler):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, self.length, 2)])

    def __len__(self):
        return self.length // 2


NOISY = {
    "samples": lambda **kwargs: DataLoader(Noisy(48), batch_size=2, collate_fn=mixed, shuffle=True, **kwargs),
    "subset": lambda **kwargs: DataLoader(Subset(Noisy(60), range(48)), batch_size=2, shuffle=True, **kwargs),
    "many": lambda **kwargs: DataLoader(Many(48), batch_size=2, **kwargs),
    "batches": lambda **kwargs: DataLoader(Noisy(48), batch_sampler=Batches(48), collate_fn=mixed, **kwargs),
    "items": lambda **kwargs: DataLoader(Noisy(48), batch_size=None, **kwargs),
}


@pytest.mark.parametrize("kind", NOISY)
def test_augmentation_is_the_same_wherever_and_whenever_a_micro_batch_is_fetched(kind):
    def drawn(workers, orders, seed=5):
        job = StepJob(lambda name: NOISY[kind](num_workers=workers), "ab", micro_batches=4, seed=seed)
        random.seed(workers), np.random.seed(workers), torch.manual_seed(workers)
        states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
        seen = []
        for step, order in zip(job.loaders["a~1"], orders, strict=False):
            step.expect(order)
            seen.append({j: step.batch(j).tolist() for j in order})
            job.commit(spent=[spent for j in range(4) for spent in step.spent(j)])
        assert random.getstate() == states[0]
        assert np.random.get_state()[1].tolist() == states[1]
        assert torch.equal(torch.get_rng_state(), states[2])
        job.close()
        return seen

    first = drawn(0, [range(4)] * 3)
    flat = [tuple(np.ravel(batch)) for step in first for batch in step.values()]
    assert len(set(flat)) == len(flat) == 12
    assert drawn(2, [[2, 3, 0, 1], [3, 1], [0, 2]]) == [
        first[0], {j: first[1][j] for j in (3, 1)}, {j: first[2][j] for j in (0, 2)}
    ]  # fmt: skip
    assert drawn(0, [range(4)] * 3, seed=6) != first


@pytest.mark.parametrize("kind", ["batches", "many"])
def test_augmentation_is_another_in_each_epoch(kind):
    job = StepJob(lambda name: NOISY[kind](), "a", micro_batches=4)
    loader, seen = job.loaders["a~1"], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen += [row[1] for j in range(4) for row in loader.sample(j).tolist()]
    assert len(set(seen)) == len(seen) == 16


def test_augmentation_of_a_sample_does_not_depend_on_its_micro_batch():
    def drawn(batch_size):
        job = StepJob(lambda name: DataLoader(Noisy(12), batch_size=batch_size), "a", micro_batches=12 // batch_size)
        step = job.begin("a~1")
        return torch.cat([step.batch(j) for j in range(step.micro_batches)]).tolist()

    assert drawn(2) == drawn(4)


class Opened(Numbers):
    """Data set that needs a file which each worker opens in its worker_init_fn."""

    file = None

    def __getitem__(self, i):
        assert get_worker_info().dataset is self
        return torch.tensor(self.file + i)


def opens(worker):
    get_worker_info().dataset.file = 1000


def test_a_worker_init_fn_finds_the_users_data_set():
    loader = DataLoader(Opened(8), batch_size=2, num_workers=1, worker_init_fn=opens)
    job = StepJob(lambda name: loader, "a", micro_batches=2)
    assert job.begin("a~1").batch(1).tolist() == [1002, 1003]
    assert job.loaders["a~1"].sample(1).tolist() == [1002, 1003]
    job.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_advances_nothing_and_is_what_the_first_step_gives(workers):
    job = StepJob(lambda name: NOISY["samples"](num_workers=workers), "a", micro_batches=4)
    loader = job.loaders["a~1"]
    views, job.views = job.views, []
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    found = [loader.sample(), loader.sample(2)]
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert loader.stats == type(loader.stats)()
    job.views = views
    step = job.begin("a~1")
    assert torch.equal(step.batch(0), found[0])
    assert torch.equal(step.batch(2), found[1])
    assert torch.equal(loader.sample(2), found[1])  # also within a step
    assert step.batch(1).shape == (2, 4)
    job.close()


def test_a_sample_of_too_little_data_is_refused():
    job = StepJob(numbers(3, {}), "a", micro_batches=4)
    assert job.loaders["a~1"].sample(1).tolist() == [2]
    with pytest.raises(ConfigurationError, match=r"micro-batch 2 .* has no samples: the epoch has 3 sample positions"):
        job.loaders["a~1"].sample(2)


# ------------------------------------------------------------------------------------------------ state


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_a_job_goes_on_with_pipelines_and_without_exactly_once(length, runs):
    """A job is resumed several times, with or without pipelines and with other numbers of members and micro-batches;
    each sample is used once.
    """
    used, state = [], None
    for pipelines, members, micro_batches, steps in [*runs, (True, 2, 3, 100)]:
        make = numbers(length, {}, shuffle=True)
        job = (
            StepJob(make, "abc"[:members], micro_batches=micro_batches)
            if pipelines
            else Job(make, "abc"[:members], accumulate=micro_batches)
        )
        for loader in job.loaders.values() if state is not None else ():
            loader.load_state_dict(json.loads(state))
        for _ in range(steps):
            if job.loaders["a~1"].epoch_spent() or not job.step():
                break
        used += [s if pipelines else s[1] for s in job.used]
        state = json.dumps(job.loaders["a~1"].state_dict())
    assert sorted(used) == list(range(length))


def test_steps_are_counted_on_where_micro_batches_were():
    job = Job(numbers(40, {}), "ab", accumulate=3)
    job.step(), job.step()
    state = job.loaders["a~1"].state_dict()
    assert state["yielded"] == 6
    steps = StepJob(numbers(40, {}), "abc", micro_batches=4)
    for loader in steps.loaders.values():
        loader.load_state_dict(state)
        assert len(loader) == 2 + 2  # 16 samples are left, 8 a step
    assert steps.step()
    assert steps.loaders["a~1"].current.index == 2
    assert steps.used == list(range(24, 32))
    state = steps.loaders["b~2"].state_dict()
    assert (state["yielded"], state["micro_batches"]) == (3 * 4, 4)
    steps.begin("a~1")  # not committed: it does not count
    again = steps.loaders["a~1"].state_dict()
    assert again["yielded"] == 3 * 4
    assert steps.loaders["a~1"].uncommitted == 1


def test_loaders_of_other_orders_refuse_the_state():
    state = StepJob(numbers(40, {}), "a", micro_batches=4).loaders["a~1"].state_dict()
    other = StepJob(numbers(41, {}), "a", micro_batches=4).loaders["a~1"]
    with pytest.raises(ConfigurationError, match="saved state has order"):
        other.load_state_dict(state)


def test_a_rest_that_makes_no_micro_batch_ends_the_epoch():
    """With drop_last, an epoch ends when the remaining samples (here three, from a job without pipelines) do not fill a
    micro-batch.
    """
    job = StepJob(numbers(11, {"a": 4}, drop_last=True), "a", micro_batches=2)
    one = Job(numbers(11, {"a": 4}, drop_last=True), "a")
    one.step(), one.step()
    state = one.loaders["a~1"].state_dict()
    state["ledger"][0][2] = [[0, 8]]
    job.loaders["a~1"].load_state_dict(state)
    assert job.loaders["a~1"].epoch_spent()
    assert not job.step()
    assert len(job.loaders["a~1"]) == 2


def test_members_agree_on_micro_batches_and_batch_size():
    first, other = (StepJob(numbers(40, {"a": n}), "a", micro_batches=n).loaders["a~1"] for n in (2, 3))
    words = first.order_fingerprint
    assert {k for k, v in other.order_fingerprint.items() if words[k] != v} == {"data.micro_batches", "data.batch_size"}
    next(iter(first))
    assert first.order.startswith("epoch 0 in order ")


# ------------------------------------------------------------------------------------------------ misuse


def test_the_next_step_waits_for_the_commit():
    job = StepJob(numbers(40, {}), "a", micro_batches=2)
    loader = job.loaders["a~1"]
    step = job.begin("a~1")
    assert not loader.at_safe_point
    with pytest.raises(StateError, match="the present step has not been committed"):
        job.begin("a~1")
    loader.give_up()  # on_train_batch_start returned -1
    with pytest.raises(StateError, match="step 0 of epoch 0 is over"):
        step.batch(0)
    assert loader.current is None


def test_numbers_beyond_the_step_are_refused():
    step = StepJob(numbers(6, {}), "a", micro_batches=4).begin("a~1")
    assert step.empty == {3}
    with pytest.raises(ConfigurationError, match="numbers 0 to 3"):
        step.weight(4)
    with pytest.raises(ConfigurationError, match="numbers 0 to 3"):
        step.expect([-1])
    with pytest.raises(ConfigurationError, match="micro-batch 3 of step 0 has no samples"):
        step.batch(3)
    assert (step.weight(3), step.spent(3)) == (0.0, ())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Combined:
    """Stand-in for a loader that combines several, such as Lightning's CombinedLoader."""

    flattened = ()


@pytest.mark.parametrize(
    ("loader", "mode", "words"),
    [
        (DataLoader(Numbers(4)), "local", "data='local' does not go with pipelines"),
        (DataLoader(Stream()), "shared", "the training data are a Stream, whose samples have no positions"),
        ([DataLoader(Numbers(4))], "shared", "a list of training loaders does not go with pipelines"),
        ({"a": DataLoader(Numbers(4))}, "shared", "a dict of training loaders"),
        (Combined(), "shared", "a Combined of training loaders"),
        (iter([1]), "shared", "the training data are a list_iterator"),
    ],
)
def test_data_without_positions_are_refused(loader, mode, words):
    with pytest.raises(UnsupportedError, match=words):
        StepLoader(loader, mode=mode, seed=0, source=None, micro_batches=2)


def test_no_micro_batches_are_refused():
    with pytest.raises(ConfigurationError, match="micro_batches=0; expected at least 1"):
        StepLoader(DataLoader(Numbers(4)), seed=0, source=None, micro_batches=0)
