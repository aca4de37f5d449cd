"""Assigns the samples of the next step to members (protocol.md 10, 25, 26).

Theory of operation. The assignment of step s+1 is a function of header s alone: its ledger says what is unspent, the
view that it names (`ruling_view`) says among whom to assign. The first unspent positions go out micro-batch by
micro-batch and, within a micro-batch, member by member in rank order, each up to its quota; so micro-batch j of all
members together is one stretch of the epoch's order (with jumps over what was spent before). Nothing is padded: at the
end of an epoch the last member to get any gets fewer and the others are idle (an empty micro-batch, weight 0). Where
these are too few for the model (BatchNorm has no variance of one), the member before leaves it some of its own. Because
no message is involved, all members know the whole assignment, a member's death needs no new assignment (its share is
simply not in the next ledger and so the first to be assigned again), and a DataLoader can draw ahead: `ahead=k` is the
assignment k steps later if every step until then commits as assigned.

drop_last. If the user's loader drops incomplete batches, a member that would get less than its quota gets nothing
in that micro-batch, and what no member's quota fits into any more is *dropped*: the view's first member marks it
spent in that step. So at most min(quota)-1 positions of an epoch are unused, and "the epoch is spent" stays a
question to the ledger.

Pipelines. Members of a job with pipelines share the M numbered micro-batches of a step by layers, not by samples. So
the assignment is that of a view with one member, which accumulates M micro-batches (`step_view`), whoever is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from chaos_lightning.planning.ledger import SHARED, announced_length, remaining
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import NO_VIEW, Header, Ledger, Member, Span, View, ViewId


@dataclass(frozen=True, slots=True)
class Assignment:
    """Positions of an epoch's order that one member trains on in one step."""

    member: str
    micro_batches: tuple[tuple[Span, ...], ...]
    """Positions by micro-batch: exactly `view.accumulate` entries, of which an empty one is idle."""
    samples: int
    """Number of positions in all micro-batches together (of batches, where a custom batch sampler makes the batch the
    unit).
    """
    stream: str
    epoch: int
    dropped: tuple[Span, ...] = ()
    """Positions to be marked spent without use; only with drop_last, only in an epoch's last step."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """All positions that the member gets in the step, dropped ones included, in the order of assignment."""
        return (*(span for part in self.micro_batches for span in part), *self.dropped)


def ruling_view(header: Header, known: Iterable[View]) -> View | None:
    """Returns the view among whose members the samples of the step after `header` are divided; None if this member does
    not know that view.

    It is the one the header names, even if a later view was decided since (protocol.md 10: a view change reassigns
    nothing). The genesis header names none: there the view rules that founded the job, or founded it again when nobody
    of the views before was left. No recovery lets a newcomer in before slot 1, so of the views in which a member stands
    at genesis the founding one is the oldest; it has a predecessor if the job was founded again.

    Args:
        header: the last committed one.
        known: at genesis views since the job was founded; afterwards any that this member stands or stood in.

    Returns:
        None if this member does not know that view. Then it is not in it and no assignment of the step is its own: it
        was let in by a view decided after a failure and contributes weight 0 until the next header.
    """
    if header.next_view == NO_VIEW:
        return min(known, key=lambda view: view.id, default=None)
    return next((view for view in known if view.id == header.next_view), None)


def assign_step(
    view: View,
    ledger: Ledger,
    *,
    epoch: int,
    length: int,
    stream: str = SHARED,
    ahead: int = 0,
    drop_last: bool = False,
    least: int = 1,
) -> dict[str, Assignment]:
    """Returns the samples that each member of a view gets in the view's next step.

    Args:
        view: the view that rules the step (`ruling_view`); all its members get some, joiners included.
        ledger: the last committed header's.
        epoch: the pass over the data.
        length: positions in this epoch of the stream.
        stream: "" for the shared order; a member's name for its own data, and then only that member gets any.
        ahead: how many further steps are assumed to have committed as assigned.
        drop_last: whether short micro-batches are dropped (see the module).
        least: fewest positions of a micro-batch, unless a step has fewer; with drop_last all are whole anyhow.

    Returns:
        An Assignment per member id. Members without samples have one, too, with idle micro-batches.

    Raises:
        ValueError: a quota or `accumulate` below 1, or the ledger stands in a later epoch.
    """
    members = _assigned_to(view, stream)
    if not members:
        return {}
    spans = remaining(ledger, stream, epoch, length)
    total = count(spans)
    quotas = _quotas(view, members)
    skipped = _used_by(quotas, view.accumulate, total, drop_last, ahead)
    cursor = _Cursor(spans)
    cursor.skip(skipped)
    total -= skipped
    parts: list[list[tuple[Span, ...]]] = [[] for _ in members]
    samples = [0] * len(members)
    room = view.accumulate * sum(quotas)
    for _ in range(view.accumulate):
        for i, quota in enumerate(quotas):
            room -= quota
            take = _taken(quota, total, room, 1 if drop_last else least)
            if drop_last and take < quota:
                take = 0
            parts[i].append(cursor.take(take) if take else ())
            samples[i] += take
            total -= take
    left = cursor.take(total) if drop_last and 0 < total < min(quotas) else ()
    return {
        member.id: Assignment(member.id, tuple(parts[i]), samples[i], stream, epoch, left if i == 0 else ())
        for i, member in enumerate(members)
    }


def step_view(micro_batches: int, quota: int, view_id: ViewId = NO_VIEW, member: str = "") -> View:
    """Returns a stand-in view with one member, which takes all micro-batches of a step: members of a pipeline share
    layers, not samples.

    Args:
        micro_batches: Micro-batches of a step.
        quota: Positions of a micro-batch.
        view_id: Number of the view in whose place it stands.
        member: Id of its member.
    """
    return View(view_id, NO_VIEW, (Member(member, member, "", "", 0, quota=quota),), accumulate=micro_batches)


def assign_micro_batches(
    ledger: Ledger,
    *,
    micro_batches: int,
    quota: int,
    epoch: int,
    length: int,
    ahead: int = 0,
    drop_last: bool = False,
    least: int = 1,
) -> Assignment:
    """Returns the positions of the epoch that each micro-batch of a pipeline job's next step trains on (protocol.md
    P2).

    They are those of plain Lightning with `accumulate_grad_batches=micro_batches` in one process.

    Args:
        ledger: Ledger of the last committed header.
        micro_batches: Micro-batches of a step; at the end of an epoch some may be short or empty.
        quota: Positions of a micro-batch.
        epoch: Pass over the data.
        length: Number of positions in this epoch.
        ahead: Number of further steps that are assumed to have committed as assigned.
        drop_last: Whether short micro-batches are dropped.
        least: Fewest positions of a micro-batch, unless the step has fewer.

    Raises:
        ValueError: See there.
    """
    view = step_view(micro_batches, quota)
    return assign_step(view, ledger, epoch=epoch, length=length, ahead=ahead, drop_last=drop_last, least=least)[""]


def steps_left(
    view: View, ledger: Ledger, *, epoch: int, length: int, stream: str = SHARED, drop_last: bool = False
) -> int:
    """Returns how many more steps the epoch takes if every step commits as assigned and the view stays as it is."""
    members = _assigned_to(view, stream)
    if not members:
        return 0
    quotas = _quotas(view, members)
    total = count(remaining(ledger, stream, epoch, length))
    full = view.accumulate * sum(quotas)
    if not drop_last:
        return -(-total // full)
    steps = max(0, total // full - 1)  # the last full step may drop the rest, so it is walked
    total -= steps * full
    while total > 0:
        total -= sum(_used(quotas, view.accumulate, total, drop_last))
        steps += 1
    return steps


def after_step(
    view: View,
    ledger: Ledger,
    *,
    epoch: int,
    length: int,
    stream: str = SHARED,
    ahead: int = 0,
    drop_last: bool = False,
) -> tuple[Span, ...]:
    """Returns the positions that stay unspent after the next step, if that commits as `assign_step` assigns it."""
    members = _assigned_to(view, stream)
    spans = remaining(ledger, stream, epoch, length)
    if not members:
        return spans
    cursor = _Cursor(spans)
    cursor.skip(_used_by(_quotas(view, members), view.accumulate, count(spans), drop_last, ahead + 1))
    return cursor.rest()


def local_steps_left(view: View, ledger: Ledger, epoch: int) -> int | None:
    """Returns the number of steps until all members have trained on their own data; None while a member has not
    announced the length of its data.
    """
    most = 0
    for member in view.members:
        length = announced_length(ledger, member.name, epoch)
        if length is None:
            return None
        most = max(most, steps_left(view, ledger, epoch=epoch, length=length, stream=member.name))
    return most


def _assigned_to(view: View, stream: str) -> Sequence[Member]:
    return view.members if stream == SHARED else [member for member in view.members if member.name == stream][:1]


def _quotas(view: View, members: Sequence[Member]) -> list[int]:
    if view.accumulate < 1:
        raise ValueError(f"view {view.id}: accumulate is {view.accumulate}; expected at least 1")
    for member in members:
        if member.quota < 1:
            raise ValueError(f"view {view.id}: quota of {member.id} is {member.quota}; expected at least 1")
    return [member.quota for member in members]


def _used(quotas: Sequence[int], accumulate: int, total: int, drop_last: bool) -> tuple[int, int]:
    """Returns how many of `total` unspent positions one step trains on, and how many it drops (drop_last)."""
    full = accumulate * sum(quotas)
    if not drop_last:
        return min(full, total), 0
    if total >= full:
        used = full
    else:
        used = 0
        for _ in range(accumulate):
            for quota in quotas:
                if total - used >= quota:
                    used += quota
    left = total - used
    return used, left if left < min(quotas) else 0


def _used_by(quotas: Sequence[int], accumulate: int, total: int, drop_last: bool, steps: int) -> int:
    """Returns how many of `total` unspent positions the next `steps` steps train on or drop."""
    full = accumulate * sum(quotas)
    if not drop_last:
        return min(total, steps * full)
    quick = min(steps, max(0, total // full - 1))
    done = quick * full
    for _ in range(steps - quick):
        if done == total:
            break
        done += sum(_used(quotas, accumulate, total - done, drop_last))
    return done


def _taken(quota: int, total: int, room: int, least: int) -> int:
    """Returns how many positions a micro-batch takes such that later micro-batches of the step still get at least
    `least`; `room` is the most that they can take.
    """
    short = least - (total - quota)
    return quota - short if 0 < short < least <= min(quota - short, room) else min(quota, total)


class _Cursor:
    """Cursor that takes positions from the front of a sorted list of spans."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans: Iterator[Span] = iter(spans)
        self._start = self._stop = 0

    def take(self, number: int) -> tuple[Span, ...]:
        out: list[Span] = []
        while number:
            if self._start == self._stop:
                self._start, self._stop = next(self._spans)
            stop = min(self._stop, self._start + number)
            out.append((self._start, stop))
            number -= stop - self._start
            self._start = stop
        return tuple(out)

    def rest(self) -> tuple[Span, ...]:
        head = ((self._start, self._stop),) if self._start < self._stop else ()
        return (*head, *self._spans)

    def skip(self, number: int) -> None:
        self.take(number)
