"""Simulates the coordination store: one chain, with the same checks as every real store (control/job_chain.py).

Theory of operation. `write` applies the rule that all stores share to one entry, at one instant. What makes stores
differ is around it, and is here, too. A *remote* store (etcd) applies a write that is under way whatever becomes of
who sent it, and takes entries only from the candidate that holds the lease (service/election.py): one that leads no
more can write nothing, even if nobody has taken a term since. And any store may fail: it is *down* for a while, or so
slow that a write takes long, or it does what it is told and the answer is lost. Its user hears `StoreError` for each
of these and tries again, as control/scheduler_server.py does.

The chain is cut after a few records, and what it comes to is compared with what all that was ever written comes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from chaos_lightning.control.job_chain import (
    SUMMARY,
    ChainEntry,
    Tip,
    advance,
    chain_of,
    check_id,
    entry_bytes,
    entry_from,
    entry_of,
    judge,
    summary_of,
    told,
)
from chaos_lightning.errors import StoreError, WireError
from chaos_lightning.membership.effects import Chain, Persist
from chaos_lightning.protocol.changes import changed
from chaos_lightning.protocol.packing import PackedChange
from chaos_lightning.protocol.types import View, ViewId
from chaos_lightning.service.store import Appended, StoreRecord


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy of a store's content."""

    tip: Tip
    entries: tuple[ChainEntry, ...] = ()
    kept: tuple[ChainEntry, ...] = ()

    def leftover(self) -> Backup:
        """Returns the content under another chain id and with other processes, as an earlier job of the same name would
        have left it.
        """
        end = replace(self.tip.end, id=LEFTOVER)
        others = (tuple(map(_by_others, entries)) for entries in (self.entries, self.kept))
        return Backup(replace(self.tip, end=end, digest=""), *others)


def _by_others(entry: ChainEntry) -> ChainEntry:
    if entry.view is None:
        return entry
    summed = entry.summed
    if summed is not None:
        summed = replace(summed, id=LEFTOVER, views=tuple(map(_of_others, summed.views)))
    return replace(entry, view=_of_others(entry.view), summed=summed, change=None, digest="")


def _of_others(view: View) -> View:
    return replace(view, chain=LEFTOVER, members=tuple(replace(m, pid=m.pid + 10_000) for m in view.members))


LEFTOVER = "chain-of-the-day-before"
CUT_EVERY = 2
"""Number of records after which one takes their place."""


class Store:
    """Simulated store of one job's chain."""

    def __init__(self) -> None:
        self.tip = Tip()
        self.entries: list[ChainEntry] = []
        """Entries that were ever written."""
        self.kept: list[ChainEntry] = []
        """Entries that the store holds: the first one may sum up others."""
        self.ever: dict[ViewId, View] = {}
        """Views that were ever written, those included that the store has lost since, by number."""
        self.ids = 0
        """Number of chains that began here."""
        self.remote = False
        self.leader = 0
        """Candidate that holds the lease; 0: none (only in a remote store)."""
        self.down = False
        self.loses_answers = False
        self.slow_s = 0.0
        """Most seconds that a write takes longer."""
        self.on_write: Callable[[Persist], None] = lambda entry: None
        """Function that is called with each entry that is in the store."""
        self.errors = 0
        """Number of failures that a user of the store heard of."""

    @property
    def term(self) -> int:
        return self.tip.term

    @property
    def views(self) -> list[View]:
        """Views that were decided, oldest first."""
        return [e.view for e in self.entries if e.view is not None]

    def open(self, above: int = 0, chain: str = "") -> Chain:
        """Opens the chain for a starting scheduler, whose term is above every older one and above `above`.

        Raises:
            StoreError: The store cannot be reached.
        """
        self._reach()
        if not self.tip.chain and not chain:
            self.ids += 1
        check_id(self.tip, chain)
        end = self.tip.end.with_term(above, chain or self.tip.chain or f"chain-{self.ids}", self.tip.term)
        self.tip = replace(self.tip, end=end)
        return chain_of(self.tip, self.tip.term, self._read())

    def write(self, term: int, persist: Persist, candidate: int = 0, seen: Tip | None = None) -> Appended:
        """Writes by compare-and-set; `seen` is the end of the chain that the writer knows.

        Raises:
            StoreError: The entry was not written, or it was and the answer is lost.
        """
        self._reach()
        verdict = self.judge(term, persist, seen)
        if verdict.ok and not verdict.detail:
            if not self.guards(candidate):
                return Appended(False, "this scheduler does not lead any more")
            self._append(persist)
        if self.loses_answers:
            self.errors += 1
            raise StoreError("no answer came")
        if verdict.ok and persist.kind == "view" and len(self.kept) > CUT_EVERY:
            self._cut()
        return verdict

    def judge(self, term: int, persist: Persist, seen: Tip | None) -> Appended:
        """Checks an entry by the rule that all stores share."""
        return judge(self.tip, term, entry_of(persist), seen)

    def guards(self, candidate: int) -> bool:
        """Returns whether this candidate may write, as far as the lease is concerned."""
        return not self.remote or candidate == self.leader

    def forget(self) -> None:
        """Loses the chain, as if it was in a process's memory; terms go on from the last one."""
        self.entries.clear()
        self.kept.clear()
        self.tip = Tip(self.tip.end, self.tip.highest)

    def lose(self) -> None:
        """Loses everything, as with a disk; a store that begins in its place knows nothing."""
        self.forget()
        self.tip = Tip()

    def backup(self) -> Backup:
        """Returns the present content of the store."""
        return Backup(self.tip, tuple(self.entries), tuple(self.kept))

    def restore(self, backup: Backup) -> None:
        """Replaces the content by that of a backup."""
        self.tip, self.entries, self.kept = backup.tip, list(backup.entries), list(backup.kept)

    def _append(self, persist: Persist) -> None:
        entry = self._told(entry_of(persist))
        self.tip = advance(self.tip, entry, replace(self.tip.end, position=self.tip.end.position + 1))
        self.entries.append(entry)
        self.kept.append(entry)
        if entry.view is not None:
            self.ever[entry.view.id] = entry.view
        self.on_write(persist)

    def _cut(self) -> None:
        """Replaces all records by a single summary record, once a view is in the store and its writer knows."""
        entry, whole = self._summary(), summary_of(self.tip, self.entries)
        assert entry == whole, f"the cut chain says {entry.summed}, the whole one {whole.summed}"
        end = replace(self.tip.end, position=self.tip.end.position + 1)
        record = StoreRecord(end.position, SUMMARY, end.term, entry_bytes(entry))
        self.kept = [entry_from(record, Tip(self.tip.end))]
        assert self.kept[0].same(entry), f"the record says {self.kept[0].summed}, and {entry.summed} was written"
        self.tip = advance(Tip(), self.kept[0], end)

    def _summary(self) -> ChainEntry:
        """Returns the entry that summarises the content of the store."""
        return summary_of(self.tip, self._read())

    def _told(self, entry: ChainEntry) -> ChainEntry:
        """Returns the entry with the record that stores it."""
        return told(self.tip, entry)

    def _read(self) -> list[ChainEntry]:
        """Returns the entries as a scheduler decodes them from the records."""
        found: list[ChainEntry] = []
        tip = Tip()
        for entry in self.kept:
            if entry.change is not None and tip.view is not None:
                entry = replace(entry, view=self._applied(tip.view, entry.change, tip.digest))
            found.append(entry)
            tip = advance(tip, entry, tip.end)
        return found

    @staticmethod
    def _applied(before: View, change: PackedChange, digest: str) -> View:
        try:
            return changed(before, change, digest)
        except WireError as error:
            raise StoreError(str(error)) from error

    def _reach(self) -> None:
        if self.down:
            self.errors += 1
            raise StoreError("the store cannot be reached")
