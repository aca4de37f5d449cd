"""Folds a chain's entries into leased and used samples, for the audit (rule O11).

Theory of operation. A position of an epoch is free, leased to one incarnation, or spent by an accepted push that covers
it. Each fold takes one entry in and returns what contradicts the entries before, in words, each with the position in
the chain of what it contradicts: a gap after that may explain it. What was wrong is taken in all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos_lightning.observe.spans import Spans, intersect, merge, size, subtract, words
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Covered,
    IncarnationId,
    Leased,
    LeftOver,
    Offer,
    PushAnswer,
    PushId,
)

Complaint = tuple[str, int]
"""Complaint in words, and the position since which what it contradicts is known."""


@dataclass(slots=True)
class LeaseBook:
    """Sample positions that the chain has leased, used up or set aside so far.

    Attributes:
        length: Positions of an epoch; 0: each cluster has its own data.
        spent: Spent positions by epoch.
        leased: Leased positions by incarnation and epoch; those that its unanswered pushes cover are among them.
        granted: Number of positions that were ever leased to each incarnation.
    """

    length: int = 0
    spent: dict[int, Spans] = field(default_factory=dict)
    leased: dict[tuple[IncarnationId, int], Spans] = field(default_factory=dict)
    granted: dict[IncarnationId, int] = field(default_factory=dict)
    _owners: dict[int, list[tuple[PushId, Spans, int]]] = field(default_factory=dict)
    """Accepted pushes of each epoch, with the positions that they spent and the entries' positions in the chain."""
    _rejected: dict[int, Spans] = field(default_factory=dict)
    """Positions that a rejected push ever covered: they may be set aside."""
    _aside: dict[int, Spans] = field(default_factory=dict)
    """Positions that were too few for a batch."""
    _reopened: dict[PushId, tuple[Covered, ...]] = field(default_factory=dict)
    """Positions of pushes that a rollback made unanswered."""

    def held(self, who: IncarnationId) -> int:
        """Returns the number of positions that are leased to an incarnation."""
        return sum(size(spans) for (owner, _), spans in self.leased.items() if owner == who)

    def lease(self, body: Leased) -> list[Complaint]:
        """Takes in an entry that leases positions; returns what contradicts earlier entries."""
        who, epoch, spans = body.incarnation, body.epoch, merge(body.spans)
        found: list[Complaint] = []
        if twice := intersect(spans, self.spent.get(epoch, ())):
            found.append((f"leases {_of(twice, epoch)} to {who}, which {self._spender(epoch, twice)} spent", 1))
        if twice := intersect(spans, self._aside.get(epoch, ())):
            found.append((f"leases {_of(twice, epoch)} to {who}, which were set aside", 1))
        for (owner, other), held in self.leased.items():
            if other == epoch and (twice := intersect(spans, held)):
                found.append((f"leases {_of(twice, epoch)} to {who}, which are leased to {owner}", 1))
        if epoch not in self.spent:
            self.spent[epoch] = ()
            counted = merge([*self.spent.get(epoch - 1, ()), *self._aside.get(epoch - 1, ())])
            before = subtract(((0, self.length),), counted)
            if epoch and (never := subtract(before, self._rejected.get(epoch - 1, ()))):
                found.append((f"leases epoch {epoch} while {_of(never, epoch - 1)} have not counted", 1))
        self.leased[who, epoch] = merge([*self.leased.get((who, epoch), ()), *spans])
        self.granted[who] = self.granted.get(who, 0) + size(spans)
        return found

    def set_aside(self, body: LeftOver) -> list[Complaint]:
        """Takes in an entry that sets aside positions too few for a batch; returns what contradicts earlier entries."""
        epoch, spans = body.epoch, merge(body.spans)
        found: list[Complaint] = []
        if twice := intersect(spans, self.spent.get(epoch, ())):
            found.append((f"sets aside {_of(twice, epoch)}, which {self._spender(epoch, twice)} spent", 1))
        for (owner, other), held in self.leased.items():
            if other == epoch and (twice := intersect(spans, held)):
                found.append((f"sets aside {_of(twice, epoch)}, which are leased to {owner}", 1))
        self._aside[epoch] = merge([*self._aside.get(epoch, ()), *spans])
        return found

    def answer(self, offer: Offer, answer: PushAnswer, position: int) -> list[Complaint]:
        """Takes in the chain's answer to a push; returns what contradicts earlier entries."""
        self._reopened.pop(offer.push, None)
        if not self.length or answer is PushAnswer.VOID:
            return []
        if answer is PushAnswer.ACCEPTED:
            return self._accept(offer, position) if offer.base != NO_VERSION else []
        who = offer.push.incarnation
        for owner, epoch in [key for key in self.leased if key[0] == who]:
            kept = [
                span for push, each in self._reopened.items() if push.incarnation == who for span in _in(each, epoch)
            ]
            self.leased[owner, epoch] = intersect(self.leased[owner, epoch], merge(kept))
        for covered in offer.covers:
            self._rejected[covered.epoch] = merge([*self._rejected.get(covered.epoch, ()), *covered.spans])
        return []

    def _accept(self, offer: Offer, position: int) -> list[Complaint]:
        who, push = offer.push.incarnation, offer.push
        found: list[Complaint] = []
        if (count := sum(size(covered.spans) for covered in offer.covers)) != offer.samples:
            found.append((f"{push} covers {count} positions and counts {offer.samples} samples", position))
        for covered in offer.covers:
            epoch, spans = covered.epoch, merge(covered.spans)
            spent = self.spent.get(epoch, ())
            twice = intersect(spans, spent)
            if twice or size(spans) != size(covered.spans):
                since = min(
                    (at for _, theirs, at in self._owners.get(epoch, ()) if intersect(theirs, twice)), default=1
                )
                found.append((f"{push} spends {_of(twice, epoch)}, which {self._spender(epoch, twice)} spent", since))
            if loose := subtract(subtract(spans, twice), self.leased.get((who, epoch), ())):
                found.append((f"{push} spends {_of(loose, epoch)}, not leased to {who}", 1))
            self.spent[epoch] = merge([*spent, *spans])
            self._owners.setdefault(epoch, []).append((push, spans, position))
            self.leased[who, epoch] = subtract(self.leased.get((who, epoch), ()), spans)
        return found

    def remove(self, who: IncarnationId) -> None:
        """Takes in that an incarnation has ended, and its leases with it."""
        self.leased = {key: spans for key, spans in self.leased.items() if key[0] != who}
        self._reopened = {push: each for push, each in self._reopened.items() if push.incarnation != who}

    def roll_back(self, taken: Iterable[Offer], lost: Iterable[PushId]) -> None:
        """Takes in a rollback: positions that it takes back are unused again, and leased as before if their push can be
        offered again.
        """
        gone = set(lost)
        for offer in taken:
            who = offer.push.incarnation
            for covered in offer.covers:
                epoch = covered.epoch
                self.spent[epoch] = subtract(self.spent.get(epoch, ()), covered.spans)
                self._owners[epoch] = [each for each in self._owners.get(epoch, ()) if each[0] != offer.push]
                if offer.push not in gone:
                    self.leased[who, epoch] = merge([*self.leased.get((who, epoch), ()), *covered.spans])
            if offer.push not in gone:
                self._reopened[offer.push] = offer.covers

    def _spender(self, epoch: int, spans: Spans) -> str:
        names = [str(push) for push, theirs, _ in self._owners.get(epoch, ()) if intersect(theirs, spans)]
        return " and ".join(names) or "it, too,"


def _in(each: Iterable[Covered], epoch: int) -> Spans:
    return tuple(span for covered in each if covered.epoch == epoch for span in covered.spans)


def _of(spans: Spans, epoch: int) -> str:
    return f"positions {words(spans)} of epoch {epoch}"
