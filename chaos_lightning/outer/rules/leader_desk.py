"""State that all parts of a leader share: the chain, the clock, the entry to store, and the effects of the present
event.
"""

from __future__ import annotations

from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.effects import Done, LeaderEffect, OuterNote, SendTo, StoreEntry
from chaos_lightning.outer.rules.messages import ToCluster, ToFollower
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import Body, Entry, PushId, VersionId


class LeaderDesk:
    """State that all parts of a leader share, such as the chain, the clock and the effects to return.

    Args:
        chain: Chain of the job, as the store has it.
        term: Term of this leader.

    Attributes:
        settings: Rules of the job, once its first cluster has brought them.
        now: Seconds, by a clock that never goes back.
        begun_s: Time when this leader began, by the same clock; its own gaps are added.
        persisting: Entry that is being stored; nothing else is decided meanwhile (O1).
        done: Reason for which this leader decides nothing more; "" while it does.
        out: Effects of the event that is being taken in.
    """

    def __init__(self, chain: OuterChain, term: int) -> None:
        self.chain = chain
        self.term = term
        self.settings = OuterSettings()
        self.now = 0.0
        self.begun_s = 0.0
        self.persisting: Entry | None = None
        self.done = ""
        self.out: list[LeaderEffect] = []
        self._begun = False
        self.take_settings()

    def take_settings(self) -> None:
        """Sets the job's rules to those in the agreement that the first cluster brought."""
        if self.chain.agreement is not None:
            self.settings = OuterSettings.of_words(self.chain.agreement.settings)

    def passed(self, now: float) -> float:
        """Sets the clock; returns for how many seconds this process itself did not run, which must not count as silence
        of others (O14).
        """
        if not self._begun:
            self._begun, self.begun_s = True, now
        gap_s = now - self.now if self.now else 0.0
        self.now = now
        if gap_s <= self.settings.heartbeat_s:
            return 0.0
        self.begun_s += gap_s
        return gap_s

    def send(self, conn: int | None, message: ToCluster | ToFollower) -> None:
        """Sends a message on a stream, if it is not None."""
        if conn is not None:
            self.out.append(SendTo(conn, message))

    def note(self, name: str, **fields: object) -> None:
        """Writes a line for the event log."""
        self.out.append(OuterNote(name, tuple(fields.items())))

    def end(self, reason: str, *, finished: bool = False) -> None:
        """Makes this leader stop deciding and end."""
        self.done = reason
        self.out.append(Done(reason, finished))

    def doubt(self, who: str, lacking: str) -> None:
        """Makes this leader end, since a process of the job knows something that the chain lacks (O4)."""
        self.end(
            f"{who} knows {lacking}, which this chain lacks: it is an older copy, or another leader rules by now. Stop "
            "this server, put the newest one in its place, and start it again: clusters and followers wait for that"
        )

    def persist(self, body: Body) -> None:
        """Orders to store the next entry of the chain; nobody is told of it before it is stored."""
        self.persisting = self.chain.entry(self.term, body)
        self.out.append(StoreEntry(self.persisting))

    def stranger(self, who: str, job_id: str) -> str:
        """Returns why a process of the job `job_id` is refused; "" if that is this job, or if the process is of no job
        yet.
        """
        chain = self.chain
        if job_id in ("", chain.job_id):
            return ""
        here = f"job {chain.job_id[:8]}, which {chain.by} began" if chain.job_id else "no job yet"
        return (
            f"{who} is of job {job_id[:8]}, and this server has {here}: start it again to take part here, or give it "
            "the server of its own job"
        )

    def lacks(self, term: int, *versions: VersionId, answered: PushId | None = None) -> str:
        """Returns in words what another process knows and this chain lacks; "" if nothing.

        Args:
            term: Highest term that the other process has heard of.
            versions: Versions that the other process knows.
            answered: Last push of the other process that was answered, of an incarnation that the chain has.
        """
        if term > self.term:
            return f"a leader with term {term}"
        unknown = [version for version in versions if self.chain.lacks(version)]
        if answered is not None and not self.chain.answered(answered):
            return f"an answer to push {answered}"
        return f"version {unknown[0]}" if unknown else ""
