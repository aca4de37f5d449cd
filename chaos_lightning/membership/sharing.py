"""Divides a batch of fixed size among the members of each view, by the time that they report for a sample (B2, B4).

Theory of operation. Each view of a job with such a batch has a split (planning/batch.py). A view of other members gets
one that is as good as their reported times allow. While the members stay, their times are looked at now and then: where
another split would make steps shorter by a tenth, a view of the same members with that split rides on the next header,
like any other view (7). That waits until all members with a share have told a time, since a scheduler that was just
restarted knows none. In a view of other members one that has told no time counts as the median of the others. Nothing
is split anew within `PAUSE_STEPS` steps after a split came into force, since times have to be measured first.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.peers import listed
from chaos_lightning.membership.roster import Roster
from chaos_lightning.planning.batch import BatchRule, Split, better, divided, read_rule, read_split, speeds_of
from chaos_lightning.protocol.types import Member, View

PAUSE_STEPS = 30
"""Least number of steps between two splits for the same members."""


class Sharing:
    """Division of a batch of fixed size. Arguments are scheduler components that it uses.

    Attributes:
        pause_steps: Least number of steps between two splits for the same members.
    """

    def __init__(self, book: Book, roster: Roster) -> None:
        self._book, self._roster = book, roster
        self.pause_steps = PAUSE_STEPS
        self._ruling: tuple[tuple[str, ...], str] = ((), "")
        """Members and split of the view that was looked at last; none since other members were given a split."""
        self._since = 0
        """Steps that were committed when that split came into force, or when times were compared with it last."""

    def of(self, members: Sequence[Member], before: View | None = None) -> str:
        """Returns the split of a view of these members, as text; "" if each adds a batch of its own.

        Args:
            members: Members of the view, in rank order.
            before: View that it follows; None: the job is founded.
        """
        if before is not None and before.ids() == tuple(m.id for m in members):
            return before.batch
        rule = self._rule(before)
        if rule is None or not members:
            return ""
        self._ruling = ((), "")
        return str(Split(rule, divided(rule.units, self._speeds(members))))

    def _rule(self, before: View | None) -> BatchRule | None:
        if before is not None:
            split = read_split(before.batch, len(before.members))
            return split.rule if split is not None else None
        return read_rule(self._roster.reference.batch) if self._roster.reference is not None else None

    def _speeds(self, members: Sequence[Member]) -> list[float]:
        ids, peers = [m.id for m in members], self._roster.peers
        return speeds_of(ids, {m: peers[m].tempo.sample_s for m in ids if m in peers})

    def _told(self, latest: View, split: Split) -> bool:
        """Returns whether all members that have a share have told how long they compute for a sample."""
        told = {p.id for p in self._roster.members() if p.tempo.sample_s > 0}
        return all(m in told for m, share in zip(latest.ids(), split.shares, strict=True) if share)

    def turn(self, latest: View) -> tuple[str, str] | None:
        """Returns another split for the same members and the reason in words, if it is worth the change; else None.

        Args:
            latest: The view that rules, which all its members have entered.
        """
        if not latest.batch:
            return None
        reached = max((self._book.reached, *(p.step for p in self._roster.members())))
        if self._ruling != (ruling := (latest.ids(), latest.batch)) or reached < self._since:
            self._ruling, self._since = ruling, reached
        if reached - self._since < self.pause_steps:
            return None
        split = read_split(latest.batch, len(latest.members))
        assert split is not None
        if not self._told(latest, split):
            return None
        self._since = reached
        shares = better(split.shares, self._speeds(latest.members))
        if shares is None:
            return None
        now = Split(split.rule, shares)
        words = (f"{m} {share}" for m, share in zip(latest.ids(), now.samples(), strict=True))
        return str(now), f"samples of a step by measured speed: {listed(words)}"
