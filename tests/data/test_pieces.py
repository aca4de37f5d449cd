"""Tests the pieces in which members compute their shares of a step: together they are the step, each sample once, in
pieces that fit.
"""

import json

import pytest
from elastic_job import Job
from hypothesis import example, given, settings
from hypothesis import strategies as st
from step_job import StepJob
from test_elastic_loader import numbers

from chaos_lightning.data.pieces import Share, SharePiece, between, present
from chaos_lightning.planning.assignment import assign_micro_batches
from chaos_lightning.planning.batch import BatchRule, Split, divided
from chaos_lightning.protocol.spans import count, normalise
from chaos_lightning.protocol.types import Ledger, Spent


def positions_of(spans):
    return [p for start, stop in spans for p in range(start, stop)]


holes = st.sets(st.integers(0, 60), max_size=20)


@given(holes, st.integers(0, 60), st.integers(0, 60))
def test_positions_between_two_numbers(spent, a, b):
    start, stop = sorted((a, b))
    spans = normalise((p, p + 1) for p in range(61) if p not in spent)
    assert positions_of(between(spans, start, stop)) == positions_of(spans)[start:stop]


@st.composite
def steps(draw):
    """Draws a rule, speeds, what fits, and the positions of a step of an epoch that may have few samples left."""
    unit = draw(st.integers(0, 4))
    rule = BatchRule(draw(st.integers(1, 12)) * max(unit, 1), unit)
    spent, length = draw(holes), draw(st.integers(1, 60))
    ledger = Ledger((Spent("", 0, normalise((p, p + 1) for p in spent if p < length)),))
    given_ = assign_micro_batches(
        ledger,
        micro_batches=rule.units if unit else 1,
        quota=unit or rule.samples,
        epoch=0,
        length=length,
    )
    speeds = draw(st.lists(st.sampled_from([0.1, 1.0, 2.0, 20.0]), min_size=1, max_size=5))
    return rule, speeds, draw(st.integers(1, 9)), given_.micro_batches


@given(steps())
@example((BatchRule(4), [1.0, 1.0], 1, (((0, 1), (3, 4), (6, 8)),)))
@example((BatchRule(4, 2), [1.0], 1, ((), ())))
def test_pieces_of_all_members_are_the_step(step):
    rule, speeds, fits, positions = step
    split = Split(rule, divided(rule.units, speeds))
    shares = [Share(split, rank, fits) for rank in range(len(speeds))]
    pieces = [piece for share in shares for piece in share.pieces(positions)]
    whole = [p for spans in positions for p in positions_of(spans)]
    assert [p for piece in pieces for p in positions_of(piece.spans)] == whole
    assert all(piece.spans for piece in pieces)
    assert [share.parts(positions) for share in shares] == [
        tuple(piece.spans for piece in share.pieces(positions)) for share in shares
    ]
    units = [n for share in shares for n in range(*share.units(positions))]
    assert units == list(range(present(split, positions)))
    if rule.micro_batch:
        assert [piece.number for piece in pieces] == [j for j, spans in enumerate(positions) if spans]
        assert all(piece.spans == positions[piece.number] for piece in pieces)
    else:
        sizes = [count(piece.spans) for piece in pieces]
        assert [piece.number for piece in pieces] == [sum(sizes[:k]) for k in range(len(sizes))]


@given(steps())
def test_pieces_fit_and_are_as_few_and_as_equal_as_may_be(step):
    rule, speeds, fits, positions = step
    split = Split(rule, divided(rule.units, speeds))
    for rank in range(len(speeds)):
        share = Share(split, rank, fits)
        sizes = [count(piece.spans) for piece in share.pieces(positions)]
        if rule.micro_batch:
            assert all(size <= rule.micro_batch for size in sizes)
            continue
        assert all(size <= fits for size in sizes)
        assert len(sizes) == -(-sum(sizes) // fits)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(steps(), st.integers(1, 3))
@example((BatchRule(5), [1.0] * 4, 2, (((0, 5),),)), 2)
def test_no_share_or_piece_has_fewer_samples_than_a_model_trains_on(step, least):
    rule, speeds, fits, positions = step
    if rule.micro_batch:
        return
    split, total = Split(rule, divided(rule.units, speeds)), count(positions[0])
    shares = [Share(split, rank, fits, least) for rank in range(len(speeds))]
    assert [n for share in shares for n in range(*share.units(positions))] == list(range(total))
    sizes = [count(piece.spans) for share in shares for piece in share.pieces(positions)]
    assert sum(sizes) == total
    assert all(size >= min(least, total) for size in sizes)


def test_a_member_without_units_has_no_pieces():
    idle = Share(Split(BatchRule(2), (1, 1, 0)), 2, 4)
    assert idle.pieces((((0, 2),),)) == []
    assert idle.units((((0, 2),),)) == (2, 2)


def test_a_piece_has_the_same_number_wherever_it_is_computed():
    positions = (((0, 3),), ((3, 6),), ((6, 8),))
    rule = BatchRule(9, 3)
    alone = Share(Split(rule, (3,)), 0, 1).pieces(positions)
    shared = [Share(Split(rule, (1, 2)), rank, 1).pieces(positions) for rank in range(2)]
    assert alone == [piece for pieces in shared for piece in pieces]
    assert alone[2] == SharePiece(2, ((6, 8),))


class ShareJob(StepJob):
    """Simulated job whose members share a batch of fixed size; deaths end an attempt, and the others begin anew."""

    def __init__(self, make, names, rule, fits):
        self.rule, self.fits = rule, fits
        micro_batches = rule.units if rule.micro_batch else 1
        super().__init__(make, names, micro_batches=micro_batches, micro_batch=rule.micro_batch or rule.samples)

    def shares(self):
        split = Split(self.rule, divided(self.rule.units, [1.0 + i for i in range(len(self.members))]))
        return {m.id: Share(split, rank, self.fits) for rank, m in enumerate(self.members)}

    def run(self, steps, *, until=None):
        """Runs an attempt: each member fetches the pieces of its share. Returns samples by member."""
        seen = {}
        for name, share in self.shares().items():
            step = steps[name]
            step.expect_share(share)
            pieces = share.pieces(step.positions)
            if until is not None:
                pieces = pieces[:until]
            seen[name] = [sample for piece in pieces for sample in step.piece(piece, share).tolist()]
        return seen

    def step(self, *, dead=(), until=None):
        victims = {self.members[i % len(self.members)].id for i in dead}
        steps = {m.id: self.begin(m.id) for m in self.members}
        if all(step is None for step in steps.values()):
            return False
        if victims and len(victims) < len(self.members):
            self.run(steps, until=until)
            self.put_out(victims)
        seen, shares = self.run(steps), self.shares()
        for samples in seen.values():
            self.used += samples
        self.commit(spent=[spent for name, share in shares.items() for spent in steps[name].spent_by(share)])
        return True


@settings(max_examples=60)
@given(
    length=st.integers(1, 50),
    batch_size=st.integers(1, 5),
    rule=st.sampled_from([BatchRule(1), BatchRule(5), BatchRule(12), BatchRule(6, 2), BatchRule(4, 4)]),
    fits=st.integers(1, 6),
    deaths=st.lists(st.none() | st.tuples(st.sets(st.integers(0, 3), min_size=1, max_size=2), st.integers(0, 3))),
)
def test_each_sample_is_in_the_step_of_its_place_whoever_dies(length, batch_size, rule, fits, deaths):
    job = ShareJob(numbers(length, dict.fromkeys("abc", batch_size)), "abc", rule, fits)
    steps, before = [], 0
    strikes = iter(deaths)
    while True:
        dead, until = next(strikes, None) or ((), None)
        if not job.step(dead=dead, until=until):
            break
        steps.append(job.used[before:])
        before = len(job.used)
    assert steps == [list(range(length))[i : i + rule.samples] for i in range(0, length, rule.samples)]
    assert job.header.ledger.streams[0].spans == ((0, length),)
    job.close()


RULES = [BatchRule(8), BatchRule(12), BatchRule(6, 2), None]


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in RULES for b in RULES if a != b])
def test_a_job_of_another_rule_and_world_goes_on_with_what_is_left(before, after):
    """None: each member adds its own batch."""
    used, state, taken = [], None, 2
    for rule, names, steps in ((before, "ab", taken), (after, "abc", 99)):
        job = ShareJob(numbers(50, {}), names, rule, 3) if rule is not None else Job(numbers(50, {}), names)
        for loader in job.loaders.values() if state is not None else ():
            loader.load_state_dict(json.loads(state))
        for _ in range(steps):
            if job.loaders["a~1"].epoch_spent() or not job.step():
                break
        used += [entry if rule is not None else entry[1] for entry in job.used]
        state = json.dumps(job.loaders["a~1"].state_dict())
        job.close()
    assert sorted(used) == list(range(50))
    if before is not None and after is not None:
        assert used == list(range(50)), "the order is the epoch's, whatever the rule"
        assert len(job.loaders["a~1"]) == taken + -(-(50 - taken * before.samples) // after.samples)


@pytest.mark.parametrize("rule", [BatchRule(4), BatchRule(4, 2)])
def test_the_member_with_the_last_unit_names_what_the_epoch_drops(rule):
    job = ShareJob(numbers(11, dict.fromkeys("abc", 2), drop_last=True), "abc", rule, 2)
    while job.step():
        pass
    assert job.used == list(range(8 if not rule.micro_batch else 10))
    assert job.header.ledger.streams[0].spans == ((0, 11),)
    job.close()
