"""Leases the samples of an epoch to clusters that share the data (O11).

Theory of operation. An epoch is an order of positions [0, length), as everywhere. A position is *free*, *leased* to one
incarnation, *spent* by a round that accepted a push that covers it, or *set aside*. The leader leases some minutes'
worth of positions ahead, in whole inner steps of the cluster (`Batches`), so that it trains no short batches; a fast
cluster gets more of them. Only the last positions of an epoch may be fewer. They are leased once no cluster could make
a whole step of them, and set aside if no cluster makes a batch of so few. `Leases` is the fold of the chain's entries.
It asks no clock and knows nothing of pushes that are merely offered or staged: what they cover stays leased until the
chain answers, and nothing else keeps it from being leased again. So a new leader, an audit and the simulator come to
the same leases. `grant` only proposes; the entry counts once it is folded, and each grant must be folded before the
next one is asked for.

What an answer does to a cluster's leases:

- Accepted: what the push covers is spent. What was trained since stays leased.
- Void: nothing. The next push covers it.
- Rejected: all that is leased to the incarnation is free again, since the cluster discards what it trained since the
  push froze (O10), and the chain cannot tell that from what it has not trained yet. Only what another unanswered push
  of it covers stays leased, if the chain knows that push: a rollback made it unanswered (O5a).

A rejection is held against the positions that the push covered, and against its cluster, whatever the number of the
incarnation. The positions go to clusters that had no rejection for them; if there is none left, to any cluster but the
last that had one. They are set aside once three incarnations had one, or after three rejections if each cluster that is
left had one. A push that covers positions which are not leased to its cluster was not judged, so its rejection says
nothing about them.

An epoch is over when each position is spent or set aside, and only then the next one is leased: a used-up lease ends
no epoch. A rollback can open an epoch again that was over. Leases of the later one stand then, and the earlier one is
leased first. So an epoch is held until all pushes that spent it are behind the second newest durable version.

All work is linear in the number of spans, whatever the number of positions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chaos_lightning.outer.rules.types import (
    Covered,
    IncarnationId,
    Leased,
    LeftOver,
    Offer,
    PushId,
    RolledBack,
)
from chaos_lightning.planning.batches import Batches
from chaos_lightning.protocol.spans import count, first_positions, in_words, normalise, subtract, union
from chaos_lightning.protocol.types import Span

REJECTIONS = 3
"""Number of rejections that set a position aside; so many in a row end an incarnation."""

_Key = TypeVar("_Key")
_Spans = tuple[Span, ...]
_Blame = tuple[IncarnationId, ...]
"""Incarnations whose pushes of a position were rejected, in order."""


def wanted(rate: float, lease_ahead_s: float, held: int) -> int:
    """Returns how many samples to lease to a cluster so that it has enough for `lease_ahead_s` seconds.

    Args:
        rate: Samples a second that the cluster trains; 0.0 while nothing is measured. Then it gets one step at a time.
        lease_ahead_s: Seconds for which the samples should last.
        held: Samples that it holds and has not trained, as far as known.
    """
    return max(0, max(1, math.ceil(rate * lease_ahead_s)) - held)


@dataclass(frozen=True, slots=True)
class Aside:
    """Positions that are set aside, so not trained any more in this epoch, and the incarnations whose pushes of them
    were rejected.
    """

    epoch: int
    spans: _Spans
    rejected_at: tuple[IncarnationId, ...]

    def __str__(self) -> str:
        where = ", ".join(in_words(span) for span in self.spans)
        if not self.rejected_at:
            return (
                f"positions {where} of epoch {self.epoch} are set aside: they are too few for a batch (drop_last, or a "
                "model with BatchNorm)"
            )
        who = ", ".join(str(incarnation) for incarnation in self.rejected_at)
        return f"positions {where} of epoch {self.epoch} are set aside: pushes that cover them were rejected at {who}"


@dataclass(slots=True)
class _Epoch:
    """State of the positions of one epoch. The spans in `spent`, `leased` and `aside` are sorted and disjoint; all
    other positions are free.

    `rejected` tells of positions that are not set aside, whatever became of them since.
    """

    spent: _Spans = ()
    leased: dict[IncarnationId, _Spans] = field(default_factory=dict)
    rejected: dict[_Blame, _Spans] = field(default_factory=dict)
    aside: dict[_Blame, _Spans] = field(default_factory=dict)

    def left(self, length: int) -> int:
        return length - count(self.spent) - sum(count(spans) for spans in self.aside.values())


@dataclass(frozen=True, slots=True)
class _Spent:
    """Positions of an accepted push, and its round; or positions of a push that a rollback made unanswered."""

    round: int
    covers: tuple[Covered, ...]

    def of(self, epoch: int) -> _Spans:
        """Returns the push's positions in this epoch."""
        return next((each.spans for each in self.covers if each.epoch == epoch), ())


class Leases:
    """Leases, spent positions and rejections, as they result from the chain's entries."""

    def __init__(self, length: int) -> None:
        """Makes the leases of a job that has leased nothing yet.

        Args:
            length: Positions of an epoch.

        Raises:
            ValueError: There is none.
        """
        if length < 1:
            raise ValueError(f"an epoch of {length} positions; expected at least 1")
        self._length = length
        self._epochs: dict[int, _Epoch] = {0: _Epoch()}  # in ascending order; the last one is not over
        self._in_a_row: dict[IncarnationId, int] = {}  # of all that live: rejections since the last acceptance
        self._accepted: dict[PushId, _Spent] = {}  # what a rollback can take back
        self._unanswered: dict[PushId, _Spent] = {}  # what a rollback took back from those that live
        self._settled = 0

    # ------------------------------------------------------------------ questions

    @property
    def living(self) -> tuple[IncarnationId, ...]:
        """Incarnations in the job: they joined and were not removed."""
        return tuple(sorted(self._in_a_row))

    @property
    def failing(self) -> tuple[IncarnationId, ...]:
        """Incarnations that must end and join again, since so many of their pushes in a row were rejected."""
        return tuple(sorted(who for who, times in self._in_a_row.items() if times >= REJECTIONS))

    @property
    def epoch(self) -> int:
        """First epoch that is not over; its positions are leased."""
        return next(epoch for epoch, state in self._epochs.items() if state.left(self._length))

    @property
    def left(self) -> int:
        """Number of positions of the present epoch that are neither spent nor set aside."""
        return self._epochs[self.epoch].left(self._length)

    @property
    def free(self) -> int:
        """Number of positions of the present epoch that may be leased."""
        return count(self._free(self._epochs[self.epoch]))

    @property
    def aside(self) -> tuple[Aside, ...]:
        """Positions that are set aside, in epochs that can still change."""
        return tuple(
            Aside(epoch, spans, blame)
            for epoch, state in self._epochs.items()
            for blame, spans in sorted(state.aside.items())
        )

    def over(self, epoch: int) -> bool:
        """Returns whether each position of the epoch is spent or set aside."""
        state = self._epochs.get(epoch)
        return epoch < max(self._epochs) if state is None else not state.left(self._length)

    def leased(self, incarnation: IncarnationId) -> dict[int, tuple[Span, ...]]:
        """Returns, by epoch, the positions that are leased to this incarnation, including those in its unanswered
        pushes.
        """
        found = {epoch: state.leased.get(incarnation, ()) for epoch, state in self._epochs.items()}
        return {epoch: spans for epoch, spans in found.items() if spans}

    def spent(self, epoch: int) -> tuple[Span, ...]:
        """Returns the spent positions of an epoch; once the epoch cannot change any more, all its positions, even those
        set aside.
        """
        state = self._epochs.get(epoch)
        if state is None:
            return ((0, self._length),) if self.over(epoch) else ()
        return state.spent

    def held(self, incarnation: IncarnationId) -> int:
        """Returns how many samples are leased to an incarnation, without those in pushes that a rollback made
        unanswered.
        """
        return sum(
            count(subtract(spans, self._offered_again(incarnation, epoch)))
            for epoch, spans in self.leased(incarnation).items()
        )

    def objection(self, offer: Offer) -> str:
        """Returns why a round must reject this push because of the positions that it covers; "" if they are all
        right.
        """
        who = offer.push.incarnation
        if who not in self._in_a_row:
            return f"{who} is not in the job"
        if [each.epoch for each in offer.covers] != sorted({each.epoch for each in offer.covers}):
            return f"it covers the epochs {[each.epoch for each in offer.covers]}; expected each once, in order"
        for each in offer.covers:
            if objection := self._amiss(who, offer.push, each):
                return objection
        covered = sum(count(each.spans) for each in offer.covers)
        if covered != offer.samples:
            return f"it covers {covered} positions and names {offer.samples} samples"
        return ""

    def _amiss(self, who: IncarnationId, push: PushId, covered: Covered) -> str:
        """Returns in words what is wrong with a push's positions in one epoch; "" if nothing is."""
        state = self._epochs.get(covered.epoch)
        if state is None:
            began = "over" if self.over(covered.epoch) else "not begun"
            return f"epoch {covered.epoch} is {began}; epoch {self.epoch} is leased"
        try:
            normal = normalise(covered.spans, what=f"push {push}")
        except ValueError as error:
            return str(error)
        if normal != covered.spans:
            return f"spans {covered.spans} are not normal; expected {normal}"
        amiss = subtract(normal, subtract(state.leased.get(who, ()), state.spent))
        return f"{self._whereabouts(covered.epoch, amiss)}, not leased to {who}" if amiss else ""

    def grant(
        self,
        incarnation: IncarnationId,
        samples: int,
        batches: Batches,
        among: Collection[IncarnationId] | None = None,
    ) -> Leased | None:
        """Returns a lease of free positions, lowest first and whole steps only, to an incarnation; changes nothing, as
        `lease` is called once it is stored.

        Args:
            incarnation: Incarnation that gets the positions.
            samples: Number of samples that are wanted; it gets one step at least, and no part of one.
            batches: Batch sizes of its cluster, in positions.
            among: Incarnations that train at present, so that rejected positions can wait for another one; by default
                all that live.

        Returns:
            None if too few are free that this one may train, or no samples are asked for.

        Raises:
            ValueError: The incarnation is not in the job.
        """
        spans = self._for(incarnation, among)
        return self._lease(incarnation, spans, batches.whole(samples, count(spans)) if samples > 0 else 0)

    def grant_rest(
        self, incarnation: IncarnationId, batches: Batches, among: Collection[IncarnationId] | None = None
    ) -> Leased | None:
        """Returns a lease of the free positions if they make no whole step; called when `grant` has found none."""
        spans = self._for(incarnation, among)
        return self._lease(incarnation, spans, batches.rest(count(spans)))

    def left_over(self) -> LeftOver | None:
        """Returns the entry that sets all free positions aside; None if there are none."""
        spans = self._free(self._epochs[self.epoch])
        return LeftOver(self.epoch, spans) if spans else None

    def _lease(self, incarnation: IncarnationId, spans: _Spans, positions: int) -> Leased | None:
        return Leased(incarnation, self.epoch, first_positions(spans, positions)) if positions else None

    def _for(self, incarnation: IncarnationId, among: Collection[IncarnationId] | None) -> _Spans:
        """Returns the free positions that this incarnation may train."""
        self._must_live(incarnation)
        state = self._epochs[self.epoch]
        clusters = {incarnation.cluster, *(who.cluster for who in (self._in_a_row if among is None else among))}
        barred = [
            span
            for blame, spans in state.rejected.items()
            if not _may_train(incarnation.cluster, blame, clusters)
            for span in spans
        ]
        return subtract(self._free(state), normalise(barred))

    # ------------------------------------------------------------------ entries

    def join(self, incarnation: IncarnationId) -> None:
        """Adds an incarnation to those in the job.

        Raises:
            ValueError: it is in already.
        """
        if incarnation in self._in_a_row:
            raise ValueError(f"{incarnation} is in the job already")
        self._in_a_row[incarnation] = 0

    def lease(self, body: Leased) -> None:
        """Leases the entry's positions to the entry's incarnation.

        Raises:
            ValueError: the incarnation is not in the job, the epoch is not the one that is leased, or a position is
                not free.
        """
        self._must_live(body.incarnation)
        if body.epoch != self.epoch:
            raise ValueError(f"a lease of epoch {body.epoch} for {body.incarnation}; epoch {self.epoch} is leased")
        state = self._epochs[body.epoch]
        spans = normalise(body.spans, what=f"lease of {body.incarnation}")
        amiss = subtract(spans, self._free(state))
        if amiss:
            raise ValueError(f"a lease for {body.incarnation}: {self._whereabouts(body.epoch, amiss)}, not free")
        state.leased[body.incarnation] = normalise((*state.leased.get(body.incarnation, ()), *spans))

    def set_aside(self, body: LeftOver) -> None:
        """Sets the entry's positions aside.

        Raises:
            ValueError: The epoch is not the one that is leased, or a position is not free.
        """
        if body.epoch != self.epoch:
            raise ValueError(f"positions of epoch {body.epoch} are left over; epoch {self.epoch} is leased")
        state = self._epochs[body.epoch]
        spans = normalise(body.spans, what="what is left over")
        if amiss := subtract(spans, self._free(state)):
            raise ValueError(f"what is left over: {self._whereabouts(body.epoch, amiss)}, not free")
        state.aside[()] = normalise((*state.aside.get((), ()), *spans))
        self._turn()

    def accept(self, offer: Offer, round: int) -> None:
        """Marks the positions of a push as spent, since this round accepted it.

        Raises:
            ValueError: it covers a position that is not leased to its incarnation; the message names it, and what
                spent it.
        """
        objection = self.objection(offer)
        if objection:
            raise ValueError(f"round {round} accepts push {offer.push}: {objection}")
        who = offer.push.incarnation
        for covered in offer.covers:
            state = self._epochs[covered.epoch]
            state.spent = normalise((*state.spent, *covered.spans))
            _put(state.leased, who, subtract(state.leased.get(who, ()), covered.spans))
        self._in_a_row[who] = 0
        self._unanswered.pop(offer.push, None)
        self._accepted[offer.push] = _Spent(round, offer.covers)
        self._turn()

    def reject(self, offer: Offer) -> tuple[Aside, ...]:
        """Frees all positions that are leased to the incarnation of a rejected push; `failing` says whether that
        incarnation must end.

        Returns:
            What is set aside by this.
        """
        who = offer.push.incarnation
        judged = not self.objection(offer)
        self._unanswered.pop(offer.push, None)
        if who not in self._in_a_row:
            return ()
        self._in_a_row[who] += 1
        for epoch, state in self._epochs.items():
            _put(state.leased, who, _common(state.leased.get(who, ()), self._offered_again(who, epoch)))
        aside: tuple[Aside, ...] = ()
        for each in offer.covers if judged else ():
            aside += self._blame(each.epoch, subtract(each.spans, self._offered_again(who, each.epoch)), who)
        self._turn()
        return aside

    def void(self, offer: Offer) -> None:
        """Changes no lease: a void push's positions are covered by the next push."""
        self._unanswered.pop(offer.push, None)

    def remove(self, incarnation: IncarnationId) -> None:
        """Ends an incarnation's leases; its unanswered pushes are void.

        Raises:
            ValueError: the incarnation is not in the job.
        """
        self._must_live(incarnation)
        del self._in_a_row[incarnation]
        for state in self._epochs.values():
            state.leased.pop(incarnation, None)
        for push in [push for push in self._unanswered if push.incarnation == incarnation]:
            del self._unanswered[push]

    def rollback(self, body: RolledBack) -> None:
        """Makes positions unspent again that rounds after a version had spent, and changes nothing else (O5a).

        It is leased to the same incarnation as before, which offers the push again. What nobody can offer again is
        free.

        Raises:
            ValueError: the version is older than what `settle` was told.
        """
        if body.to.number < self._settled:
            raise ValueError(
                f"version {body.number} goes back to {body.to}; rounds up to {self._settled} cannot be taken back"
            )
        for push, covered in sorted(self._accepted.items()):
            if covered.round <= body.to.number:
                continue
            del self._accepted[push]
            who = push.incarnation
            again = who in self._in_a_row and push not in body.lost
            for each in covered.covers:
                state = self._epochs[each.epoch]
                state.spent = subtract(state.spent, each.spans)
                if again:
                    _put(state.leased, who, normalise((*state.leased.get(who, ()), *each.spans)))
            if again:
                self._unanswered[push] = covered

    def settle(self, number: int) -> None:
        """Notes that no rollback will go behind this version, the second newest durable one."""
        self._settled = max(self._settled, number)
        self._accepted = {push: covered for push, covered in self._accepted.items() if covered.round > self._settled}
        self._turn()

    # ------------------------------------------------------------------ the summary

    def encode(self) -> dict[str, Any]:
        """Returns all leases as JSON values, for the chain's summary (O1a). Equal states give equal values."""
        return {
            "length": self._length,
            "settled": self._settled,
            "living": [[*_words(who), times] for who, times in sorted(self._in_a_row.items())],
            "epochs": [
                {
                    "epoch": epoch,
                    "spent": _lists(state.spent),
                    "leased": [[*_words(who), _lists(spans)] for who, spans in sorted(state.leased.items())],
                    "rejected": _blames(state.rejected),
                    "aside": _blames(state.aside),
                }
                for epoch, state in self._epochs.items()
            ],
            "accepted": _pushes(self._accepted),
            "unanswered": _pushes(self._unanswered),
        }

    @classmethod
    def decode(cls, plain: Mapping[str, Any]) -> Leases:
        """Returns the leases that `encode` encoded.

        Raises:
            ValueError: a position is in two places.
        """
        leases = cls(plain["length"])
        leases._settled = plain["settled"]
        leases._in_a_row = {IncarnationId(name, number): times for name, number, times in plain["living"]}
        leases._epochs = {
            each["epoch"]: _Epoch(
                _spans(each["spent"]),
                {IncarnationId(name, number): _spans(spans) for name, number, spans in each["leased"]},
                {_blame(who): _spans(spans) for who, spans in each["rejected"]},
                {_blame(who): _spans(spans) for who, spans in each["aside"]},
            )
            for each in plain["epochs"]
        }
        leases._accepted = _by_push(plain["accepted"])
        leases._unanswered = _by_push(plain["unanswered"])
        for state in leases._epochs.values():
            leases._free(state)
        return leases

    # ------------------------------------------------------------------ parts

    def _free(self, state: _Epoch) -> _Spans:
        """Returns the positions of an epoch that are neither leased, spent nor set aside.

        Raises:
            ValueError: a position is two of these.
        """
        taken = [state.spent, *state.leased.values(), *state.aside.values()]
        return subtract(((0, self._length),), normalise(span for spans in taken for span in spans))

    def _must_live(self, incarnation: IncarnationId) -> None:
        if incarnation not in self._in_a_row:
            raise ValueError(f"{incarnation} is not in the job")

    def _offered_again(self, incarnation: IncarnationId, epoch: int) -> _Spans:
        """Returns an incarnation's positions in pushes that a rollback made unanswered."""
        return union(
            span
            for push, covered in self._unanswered.items()
            if push.incarnation == incarnation
            for span in covered.of(epoch)
        )

    def _whereabouts(self, epoch: int, amiss: _Spans) -> str:
        """Returns in words the state of the first of these positions, such as who has spent it."""
        state = self._epochs[epoch]
        places = [
            *((f"spent by {push}", won.of(epoch)) for push, won in sorted(self._accepted.items())),
            ("spent", state.spent),
            *((f"leased to {who}", spans) for who, spans in sorted(state.leased.items())),
            *(("set aside", spans) for spans in state.aside.values()),
            ("free", ((0, self._length),)),
        ]
        found = [(_common(amiss, spans), words) for words, spans in places]
        first, words = next(((spans[0], words) for spans, words in found if spans), (amiss[0], "beyond its end"))
        return f"positions {in_words(first)} of epoch {epoch} are {words}"

    def _blame(self, epoch: int, spans: _Spans, who: IncarnationId) -> tuple[Aside, ...]:
        """Counts one more rejection for these positions.

        Returns:
            Those that are set aside by it.
        """
        state = self._epochs[epoch]
        blamed: list[tuple[_Blame, _Spans]] = []
        fresh = spans
        for blame, those in sorted(state.rejected.items()):
            again = _common(those, spans)
            if again:
                blamed.append(((*blame, who), again))
                fresh = subtract(fresh, again)
                _put(state.rejected, blame, subtract(those, again))
        if fresh:
            blamed.append(((who,), fresh))
        aside: list[Aside] = []
        for blame, those in blamed:
            enough = self._enough(blame)
            goal = state.aside if enough else state.rejected
            goal[blame] = normalise((*goal.get(blame, ()), *those))
            if enough:
                aside.append(Aside(epoch, those, blame))
        return tuple(aside)

    def _enough(self, blame: _Blame) -> bool:
        """Returns whether these rejections suffice to set a position aside."""
        if len(set(blame)) >= REJECTIONS:
            return True
        return len(blame) >= REJECTIONS and {who.cluster for who in self._in_a_row} <= {who.cluster for who in blame}

    def _turn(self) -> None:
        """Begins the next epoch when the last one is over, and forgets epochs that cannot change any more."""
        last = max(self._epochs)
        if self.over(last):
            self._epochs[last + 1] = _Epoch()
        needed = {each.epoch for covered in self._accepted.values() for each in covered.covers}
        for epoch in [epoch for epoch in self._epochs if epoch not in needed and self.over(epoch)]:
            del self._epochs[epoch]


def _may_train(cluster: str, blame: _Blame, clusters: set[str]) -> bool:
    """Returns whether a cluster may get positions that were rejected so: clusters that did not fail on them come
    first.
    """
    rest = clusters - {who.cluster for who in blame}
    return cluster in rest if rest else cluster != blame[-1].cluster or clusters == {cluster}


def _common(one: _Spans, other: _Spans) -> _Spans:
    """Returns the positions that are in both lists of spans."""
    return subtract(one, subtract(one, other))


def _put(table: dict[_Key, _Spans], key: _Key, spans: _Spans) -> None:
    """Sets a table's value for a key; deletes the key if there are no spans, so that equal states are equal tables."""
    if spans:
        table[key] = spans
    else:
        table.pop(key, None)


def _lists(spans: _Spans) -> list[list[int]]:
    return [list(span) for span in spans]


def _spans(lists: Iterable[Iterable[int]]) -> _Spans:
    return normalise((start, stop) for start, stop in lists)


def _words(incarnation: IncarnationId) -> tuple[str, int]:
    return incarnation.cluster, incarnation.number


def _blames(table: dict[_Blame, _Spans]) -> list[Any]:
    return [[[list(_words(who)) for who in blame], _lists(spans)] for blame, spans in sorted(table.items())]


def _blame(plain: Iterable[Iterable[Any]]) -> _Blame:
    return tuple(IncarnationId(name, number) for name, number in plain)


def _pushes(table: dict[PushId, _Spent]) -> list[Any]:
    return [
        [*_words(push.incarnation), push.number, won.round, [[c.epoch, _lists(c.spans)] for c in won.covers]]
        for push, won in sorted(table.items())
    ]


def _by_push(plain: Iterable[Any]) -> dict[PushId, _Spent]:
    return {
        PushId(IncarnationId(name, incarnation), number): _Spent(
            round, tuple(Covered(epoch, _spans(spans)) for epoch, spans in covers)
        )
        for name, incarnation, number, round, covers in plain
    }
