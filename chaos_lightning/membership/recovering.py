"""Runs recoveries: when one begins, whom it asks for promises and reports, and how long the next one waits (8, 9,
31).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from chaos_lightning.membership.backoff import LONGEST_S, Backoff
from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.effects import Persist
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.roster import Roster
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, SMALL_JOB, Header, Prepare, Report, ViewId


class Recovery:
    """Recovery under way, if any. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, book: Book, roster: Roster) -> None:
        self._desk = desk
        self._book = book
        self._roster = roster
        self.again = ""
        """Reason why another recovery is due; "" if none is."""
        self.why = ""
        self.number: ViewId = NO_VIEW
        self.expected: frozenset[str] = frozenset()
        """Members that the present recovery has asked for a report, ..."""
        self.missing: set[str] = set()
        """... and those of them that have not given it."""
        self._whole: set[str] = set()
        """Members that were asked for a whole report: the others name their headers, ..."""
        self._first: dict[str, Report] = {}
        """... and these, whose first reports are kept, had named one that nobody told."""
        self._briefly: Counter[str] = Counter()
        """Number of questions for a brief report that a member has not answered."""
        self._questions = (Prepare(NO_VIEW, ""),) * 2
        """Question for a brief report, and question for a whole one."""
        self.prepared_at = 0.0
        self.returning = desk.phase is SchedulerPhase.RUNNING
        """Whether members of the last view are still to come back after a scheduler's restart."""
        # A number beyond the last view: members may have promised it and wait for its decision.
        self.promised = bool(book.views) and book.highest.number > book.views[-1].id.number
        self.backoff = Backoff()
        self.waits_because = ""
        """Words by which the wait for the next recovery was told; "" if it was not."""

    def pause_words(self) -> str:
        """Text that says why the next recovery has to wait; "" if it has not (membership/backoff.py)."""
        waits = self._desk.clock is not None and self.backoff.left_s(self._desk.now, self._roster.slot())
        return self.waits_because if waits else ""

    def begin(self, why: str, *, urgent: bool = False) -> bool:
        """Begins a recovery, unless earlier ones led to no committed slot and this one has to wait (see backoff.py).

        Args:
            why: Reason in words.
            urgent: Whether the recovery excludes a member that the last one did not, so there is an end to such
                recoveries. It does not wait.
        """
        if not urgent and self.paced(why):
            return False
        self.attempt()
        number = self._roster.next_number()
        self.why, self.again, self.returning = why, "", False
        self._book.persist(Persist(0, "reserve", number), lambda: self._prepare(number))
        return True

    def attempt(self) -> None:
        self.backoff.begins(self._desk.now, self._roster.slot())
        self.waits_because = ""

    def paced(self, why: str) -> bool:
        """Returns whether the next recovery has to wait, since earlier ones led to no committed slot; tells all members
        why.
        """
        if not self.backoff.left_s(self._desk.now, self._roster.slot()):
            return False
        if not self.waits_because:
            text = f"{self.backoff.fruitless} attempts in a row to go on committed no slot; the next one waits up to "
            self.waits_because = f"{text}{LONGEST_S:g} s: {why}"
            self._desk.note("notice", text=self.waits_because)
            self._roster.tell(self.waits_because, [p for p in self._roster.peers.values() if p.alive])
        return True

    def _prepare(self, number: ViewId) -> None:
        self._desk.phase = SchedulerPhase.PREPARING
        self.number, self.prepared_at = number, self._desk.now
        self.again = ""  # what was lost while the number was written is made up for, too
        self._book.decision = self._book.announced = None
        living = self._roster.party()
        self.expected = frozenset(p.id for p in living)
        self.missing, self._whole, self._first = set(self.expected), self._tellers(living), {}
        self._briefly.clear()
        self._questions = (Prepare(number, self.why, brief=True), Prepare(number, self.why))
        self._desk.note("prepare", number=str(number), reason=self.why)
        for peer in living:
            self.ask(peer)

    def _tellers(self, living: Sequence[Peer]) -> set[str]:
        """Returns the members whose reports contain whole headers; in a large job the others report only hashes (9)."""
        return {p.id for p in living[:SMALL_JOB]}

    def ask(self, peer: Peer) -> None:
        """Asks a member to promise the recovery's number and to report what it holds."""
        peer.report = None
        self._briefly[peer.id] += peer.id not in self._whole
        self._roster.send(peer, self._questions[peer.id in self._whole])

    def told(self, peer: Peer, report: Report) -> bool:
        """Stores a member's report; returns False if it does not answer the latest question to that member."""
        before = self._first.get(peer.id)
        if report.last is None and self._briefly[peer.id]:
            self._briefly[peer.id] -= 1
            if before is not None:
                return False  # it was under way when the member was asked for the header
        same = before is not None and before.head == report.head
        # The member told the first time what it held.
        peer.report = replace(report, held=before.held) if before is not None and same else report
        self.missing.discard(peer.id)
        return True

    def with_headers(self, reporters: Sequence[Peer]) -> dict[str, Report] | None:
        """Returns the members' reports, each with the headers whose hashes it names.

        Where nobody has told one of them, one of those that name it is asked for it. Until it answers: None.
        """
        headers: dict[str, Header] = {GENESIS.hash: GENESIS}
        reports = {p.id: p.report for p in reporters if p.report is not None}
        for report in reports.values():
            for name, header in ((report.head, report.last), (report.pending_hash, report.pending)):
                if name not in headers and header is not None and header.hash == name:
                    headers[name] = header
        asked, complete = set[str](), True
        for peer in reporters:
            report = reports[peer.id]
            if not report.loaded and report.head != GENESIS.hash:
                continue  # nobody goes on from there
            lacking = [name for name in self._needs(report) if name not in headers]
            complete = complete and not lacking
            if not lacking:
                pending = headers.get(report.pending_hash, report.pending)
                if report.last is not headers[report.head] or report.pending is not pending:
                    peer.report = reports[peer.id] = replace(report, last=headers[report.head], pending=pending)
            elif peer.id in self._whole or report.last is not None:
                self._roster.condemn(peer, f"it reports to have header {lacking[0]}, and does not tell that one")
            elif asked.isdisjoint(lacking):
                asked.update(lacking)
                self._whole.add(peer.id)
                self._first[peer.id], self.prepared_at = report, self._desk.now
                self.missing.add(peer.id)
                self.ask(peer)
        return reports if complete else None

    def _needs(self, report: Report) -> tuple[str, ...]:
        """Returns the hashes of the headers in this report that the recovery needs."""
        return (report.head, report.pending_hash) if report.pending_hash else (report.head,)

    def shift(self, gap: float) -> None:
        """Prolongs the recovery's deadlines by the `gap` seconds for which the scheduler was frozen."""
        self.backoff.shift(gap)
        self.prepared_at += gap
