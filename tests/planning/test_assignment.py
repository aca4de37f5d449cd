"""Tests the assignment of samples over any sequence of commits, deaths, joins and leaves."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chaos_lightning.planning.assignment import (
    after_step,
    assign_micro_batches,
    assign_step,
    local_steps_left,
    ruling_view,
    steps_left,
)
from chaos_lightning.planning.ledger import announce_length, is_spent, merge, remaining
from chaos_lightning.protocol.spans import count, normalise
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Ledger, Member, Spent, View, ViewId


def member(name, quota=1):
    return Member(f"{name}~1", name, "h", "127.0.0.1", 1, quota=quota)


def view_of(members, accumulate=1, number=1):
    return View(ViewId(1, number), NO_VIEW, tuple(members), accumulate=accumulate)


def positions_of(spans):
    return [p for start, stop in spans for p in range(start, stop)]


quotas = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(quotas, st.integers(1, 3), st.sets(st.integers(0, 79)), st.integers(0, 80), st.integers(0, 9), st.booleans())
def test_one_assignment(quota, accumulate, spent, length, ahead, drop_last):
    view = view_of([member(f"m{i}", q) for i, q in enumerate(quota)], accumulate)
    ledger = merge(Ledger(), [Spent("", 0, normalise((p, p + 1) for p in spent))])
    arguments = {"epoch": 0, "length": length, "drop_last": drop_last}
    # `ahead` is what becomes of committing every assignment in between.
    later = ledger
    for _ in range(ahead):
        later = merge(later, [Spent("", 0, d.spans) for d in assign_step(view, later, **arguments).values()])
    assignments = assign_step(view, ledger, ahead=ahead, **arguments)
    assert assignments == assign_step(view, later, **arguments)
    unspent = positions_of(remaining(later, "", 0, length))
    # Micro-batch by micro-batch, in rank order, the first unspent positions; nobody above the quota.
    assigned = []
    for j in range(accumulate):
        for m in view.members:
            part = positions_of(assignments[m.id].micro_batches[j])
            assert len(part) <= m.quota
            assert not drop_last or len(part) in (0, m.quota)
            assigned += part
    assert assigned == unspent[: len(assigned)]
    dropped = [p for d in assignments.values() for p in positions_of(d.dropped)]
    if drop_last:
        assert len(dropped) < min(quota)
        assert assigned + dropped == unspent[: len(assigned) + len(dropped)]
    else:
        assert not dropped
        assert len(assigned) == min(len(unspent), accumulate * sum(quota))
    assert not unspent or assigned or dropped  # every step makes progress
    assert [d.samples for d in assignments.values()] == [
        sum(count(part) for part in d.micro_batches) for d in assignments.values()
    ]
    rest = positions_of(after_step(view, ledger, ahead=ahead, **arguments))
    assert rest == unspent[len(assigned) + len(dropped) :]


@given(quotas, st.integers(1, 3), st.integers(0, 80))
@example([16, 16], 1, 49)
def test_with_drop_last_micro_batches_stay_whole_whatever_the_model_needs(quota, accumulate, length):
    view = view_of([member(f"m{i}", q) for i, q in enumerate(quota)], accumulate)
    arguments = {"epoch": 0, "length": length, "drop_last": True}
    assert assign_step(view, Ledger(), least=2, **arguments) == assign_step(view, Ledger(), **arguments)


@given(quotas, st.integers(1, 3), st.integers(0, 80), st.integers(2, 3))
@example([16, 16], 1, 49, 2)
def test_a_step_leaves_no_micro_batch_too_few_for_the_model(quota, accumulate, length, least):
    view = view_of([member(f"m{i}", q) for i, q in enumerate(quota)], accumulate)
    ledger = Ledger()
    for _ in range(steps_left(view, ledger, epoch=0, length=length)):
        usual = assign_step(view, ledger, epoch=0, length=length)
        assigned = assign_step(view, ledger, epoch=0, length=length, least=least)
        spans = [normalise(span for d in each.values() for span in d.spans) for each in (usual, assigned)]
        assert spans[0] == spans[1]
        sizes = [count(part) for d in assigned.values() for part in d.micro_batches if part]
        if min(quota) >= 2 * least and sum(sizes) >= least:
            assert min(sizes) >= least
        ledger = merge(ledger, [Spent("", 0, d.spans) for d in assigned.values()])
    assert is_spent(ledger, "", 0, length)


@given(quotas, st.integers(1, 3), st.integers(0, 80), st.booleans())
def test_steps_left_is_the_number_of_steps(quota, accumulate, length, drop_last):
    view = view_of([member(f"m{i}", q) for i, q in enumerate(quota)], accumulate)
    arguments = {"epoch": 0, "length": length, "drop_last": drop_last}
    ledger, steps = Ledger(), 0
    foreseen = steps_left(view, ledger, **arguments)
    while not is_spent(ledger, "", 0, length):
        ledger = merge(ledger, [Spent("", 0, d.spans) for d in assign_step(view, ledger, **arguments).values()])
        steps += 1
        assert steps_left(view, ledger, **arguments) == foreseen - steps
    assert steps == foreseen


class Job:
    """Simulated job, in which only the ledger and the view change, as a commit root would change them."""

    def __init__(self, members, accumulate, length, drop_last):
        self.views = [view_of(members, accumulate)]
        self.header = replace(GENESIS)
        self.length, self.drop_last = length, drop_last
        self.used, self.dropped, self.drops = [], [], []

    @property
    def view(self):
        return self.views[-1]

    def change(self, members, number_of_predecessor=None):
        self.views.append(
            replace(self.view, id=ViewId(1, len(self.views) + 1), predecessor=self.view.id, members=members)
        )

    def step(self, dead=(), late=False, joiner=None, leaver=None):
        """Simulates one step, in which members in `dead` die before the commit, or, if `late`, after their
        contribution.
        """
        ruling = ruling_view(self.header, self.views)
        assignments = assign_step(ruling, self.header.ledger, epoch=0, length=self.length, drop_last=self.drop_last)
        for each in self.view.members:  # each member computes it alone, from the header
            known = [v for v in self.views if each in v.members]
            mine = ruling_view(self.header, known)
            if mine is not None:
                again = assign_step(mine, self.header.ledger, epoch=0, length=self.length, drop_last=self.drop_last)
                assert again[each.id] == assignments[each.id]
            else:
                assert each.id not in assignments
        committed_under = self.view
        if dead and not late:
            self.change(tuple(m for m in self.view.members if m.id not in dead))
            committed_under = self.view
        spent = []
        for each in committed_under.members:
            if each.id in assignments:
                spent.append(Spent("", 0, assignments[each.id].spans))
                self.used += positions_of(s for part in assignments[each.id].micro_batches for s in part)
                self.dropped += positions_of(assignments[each.id].dropped)
                self.drops.append(len(positions_of(assignments[each.id].dropped)))
        if joiner is not None:
            self.change((*self.view.members, joiner))
        if leaver is not None and len(self.view.members) > 1:
            self.change(tuple(m for m in self.view.members if m.id != leaver))
        self.header = Header(
            seq=self.header.seq + 1,
            kind=Kind.STEP,
            step=self.header.step + 1,
            view=committed_under.id,
            prev_hash=self.header.hash,
            next_view=self.view.id,
            ledger=merge(self.header.ledger, spent),
        )
        if dead and late:  # the header names a view whose dead members never contribute again
            self.change(tuple(m for m in self.view.members if m.id not in dead))


events = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("die"), st.sets(st.integers(0, 5), min_size=1, max_size=3), st.booleans()),
    st.tuples(st.just("join"), st.integers(1, 5)),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("rescue"), st.integers(1, 5)),
)


@example([6, 4], 1, 22, True, [("die", {1}, True)])
@example([7], 1, 73, True, [("join", 3), ("step",), ("step",), ("join", 1), ("join", 2), ("die", {0}, True)])
@given(quotas, st.integers(1, 3), st.integers(1, 120), st.booleans(), st.lists(events, max_size=25))
def test_every_position_in_exactly_one_committed_step(quota, accumulate, length, drop_last, history):
    job = Job([member(f"m{i}", q) for i, q in enumerate(quota)], accumulate, length, drop_last)
    smallest = min(quota)
    born = len(quota)

    def one(event):
        nonlocal born, smallest
        present = job.view.members
        kind, *rest = event
        if kind == "die":
            dead = {present[i % len(present)].id for i in rest[0]}
            job.step(dead=dead if len(dead) < len(present) else (), late=rest[1])
        elif kind == "join":
            job.step(joiner=member(f"m{born}", rest[0]))
            smallest, born = min(smallest, rest[0]), born + 1
        elif kind == "leave":
            job.step(leaver=present[rest[0] % len(present)].id)
        elif kind == "rescue" and len(present) > 1 and job.header.seq:
            # A view decided after a death lets somebody in who never saw the header's view: idle for this step.
            # Not before slot 1, where the assignment is the founding view's.
            job.change((*present[1:], member(f"m{born}", rest[0])))
            smallest, born = min(smallest, rest[0]), born + 1
            job.step()
        else:
            job.step()

    for event in history:
        if not is_spent(job.header.ledger, "", 0, length):
            one(event)
    if not is_spent(job.header.ledger, "", 0, length):
        job.step()  # the last header may name a member that is dead by now, whose share is assigned again
    bound = job.header.step + steps_left(job.view, job.header.ledger, epoch=0, length=length, drop_last=drop_last)
    while not is_spent(job.header.ledger, "", 0, length):
        job.step()
        assert job.header.step <= bound
    assert sorted(job.used + job.dropped) == list(range(length))
    if drop_last:
        # Each time less than a micro-batch. A second time, if a dead member's share comes back behind what was dropped.
        assert max(job.drops, default=0) < max(m.quota for v in job.views for m in v.members)
    else:
        assert not job.dropped


def test_the_dead_members_share_is_assigned_next():
    a, b, c = members = [member(n, 4) for n in "abc"]
    job = Job(members, 1, 100, False)
    job.step(dead={b.id})
    assignments = assign_step(job.view, job.header.ledger, epoch=0, length=100)
    assert assignments[a.id].micro_batches == (((4, 8),),)
    assert assignments[c.id].micro_batches == (((12, 16),),)


def test_shares_jump_over_what_is_spent():
    ledger = merge(Ledger(), [Spent("", 0, ((2, 6), (8, 9)))])
    assignments = assign_step(view_of([member("a", 3), member("b", 3)]), ledger, epoch=0, length=20)
    assert assignments["a~1"].micro_batches == (((0, 2), (6, 7)),)
    assert assignments["b~1"].micro_batches == (((7, 8), (9, 11)),)
    assert assignments["a~1"].spans == ((0, 2), (6, 7))


def test_ruling_view_is_the_headers_own_not_the_latest():
    first, second = view_of([member("a")], number=1), view_of([member("b")], number=2)
    second = replace(second, predecessor=first.id)
    named = Header(seq=4, kind=Kind.STEP, step=3, view=first.id, prev_hash="", next_view=first.id)
    assert ruling_view(named, [second, first]) is first
    assert ruling_view(named, [second]) is None
    assert ruling_view(GENESIS, [second, first]) is first  # the founding view
    assert ruling_view(GENESIS, []) is None


def test_a_job_that_is_founded_again_assigns_from_its_first_step():
    """A job that is founded again, after all members of earlier views are gone, assigns its first step by the new
    founding view.
    """
    again = replace(view_of([member("a")], number=3), predecessor=ViewId(1, 2))
    recovered = replace(again, id=ViewId(1, 4), predecessor=again.id)
    assert ruling_view(GENESIS, [again]) is again
    assert ruling_view(GENESIS, [recovered, again]) is again


def test_local_streams_assign_to_their_member_only():
    view = view_of([member("a", 2), member("b", 3)])
    ledger = merge(Ledger(), [Spent("b", 0, ((0, 3),)), announce_length("b", 0, 10)])
    assignments = assign_step(view, ledger, epoch=0, length=10, stream="b")
    assert list(assignments) == ["b~1"]
    assert assignments["b~1"].micro_batches == (((3, 6),),)
    assert assign_step(view, ledger, epoch=0, length=10, stream="z") == {}
    assert steps_left(view, ledger, epoch=0, length=10, stream="b") == 3
    assert local_steps_left(view, ledger, 0) is None
    assert local_steps_left(view, merge(ledger, [announce_length("a", 0, 9)]), 0) == 5


@pytest.mark.parametrize(("quota", "accumulate"), [(0, 1), (1, 0)])
def test_impossible_views_are_refused(quota, accumulate):
    with pytest.raises(ValueError, match="expected at least 1"):
        assign_step(view_of([member("a", quota)], accumulate), Ledger(), epoch=0, length=4)


@given(st.integers(0, 80), st.integers(1, 7), st.integers(1, 5), st.booleans())
@example(3, 4, 2, True)
def test_numbered_micro_batches_are_those_of_one_process(length, quota, micro_batches, drop_last):
    ends = range(0, length - quota + 1 if drop_last else length, quota)
    batches = [((start, min(length, start + quota)),) for start in ends]
    of_step = {"micro_batches": micro_batches, "quota": quota, "epoch": 0, "length": length, "drop_last": drop_last}
    ledger, ahead = Ledger(), 0
    for first in range(0, len(batches), micro_batches):
        assigned = assign_micro_batches(ledger, **of_step)
        wanted = batches[first : first + micro_batches]
        assert assigned.micro_batches == (*wanted, *[()] * (micro_batches - len(wanted)))
        assert assigned.samples == sum(count(part) for part in wanted)
        assert assigned == assign_micro_batches(Ledger(), ahead=ahead, **of_step)
        ledger, ahead = merge(ledger, [Spent("", 0, assigned.spans)]), ahead + 1
    assert is_spent(ledger, "", 0, length) or not batches
    assert not assign_micro_batches(ledger, **of_step).samples
