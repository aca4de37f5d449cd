"""Lets a newcomer observe: it pulls the state at one header while others train on, and replays the steps that they
commit since.

Theory of operation (protocol.md 15-19). In the training thread, before the first view: (1) the snapshot at the first
header that names this newcomer is read out of the memory of a member on this machine, if one lends it, or else pulled
from its donors at once, while a reader already collects their log. (2) Each
logged step is applied: the raw sums become averages in `.grad`, as at any member, and `Replay` does what training did
with them. (3) With nothing left to apply the newcomer says that it has caught up, and goes on applying until the header
arrives that lets it in. What then still differs is pulled at that header, whose hash check is the proof (19).

Whatever goes wrong here costs time only: the newcomer says why it cannot catch up and is let in by a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from chaos_lightning.collectives.accumulation import Accumulation
from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.membership.catching_up import CatchingUp
from chaos_lightning.protocol.codec import decode
from chaos_lightning.protocol.types import CatchUp, Header, Progress, View
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.log_reader import LogEntry, LogReader
from chaos_lightning.replication.replay import Replay


class Observation:
    """Attempt of a newcomer to join by replay.

    Args:
        transfer: Pulls the state, and connects to the members that send the log.
        mail: Mailbox that tells when this newcomer is let in, or out.
        events: This member's event log.
        accumulation: Turns raw sums into gradients.
        replay: Applies the gradients.
        send: Sends a message to the scheduler.
        me: Id of the observing member, which it had when it was told to observe.
    """

    def __init__(
        self,
        transfer: Transfer,
        mail: Mailbox,
        events: EventLog,
        accumulation: Accumulation,
        replay: Replay,
        send: Callable[[CatchUp | Progress], None],
        me: str,
    ) -> None:
        self._transfer = transfer
        self._mail = mail
        self._me = me
        self._events = events
        self._accumulation = accumulation
        self._replay = replay
        self._send = send
        self._catching_up = CatchingUp()
        self._attempt = 1

    def run(self, header: Header, view: View, state: StateAccess, deadline: float) -> None:
        """Observes from `header` on, until something else is decided about this newcomer or observing fails."""
        sources = [m for m in view.members if m.id not in view.joiners]
        self._attempt = header.learners.count(self._me)
        self._events.emit("observing", seq=header.seq, head=header.hash, sources=[m.id for m in sources])
        reader = LogReader(
            [e for e in self._transfer.ways(sources, view) if not e.route],
            self._transfer.dial,
            header,
            decode=lambda data: decode(Header, data),
            scope=self._accumulation.scope_of,
            buffers=self._accumulation.memory.result_bytes,  # this member reduces nothing meanwhile
            by_reference=True,
        )
        reader.start()
        at = header
        try:
            if not self._transfer.fetch(header, view, state, deadline, superseded=self._called):
                return
            self._accumulation.settle()
            report = self._transfer.report
            at = self._follow(reader, header, quick=report is not None and not report.state_hash)
        except ChaosError as error:
            self._give_up(at, str(error))
        finally:
            reader.close()
            self._events.emit(
                "replayed", seq=at.seq, step=at.step, steps=self._catching_up.applied, nbytes=reader.received_nbytes
            )

    # ------------------------------------------------------------------ the log

    def _follow(self, reader: LogReader, at: Header, *, quick: bool) -> Header:
        """Applies logged steps until something else is decided or catching up is hopeless; returns the last header.
        `quick`: the snapshot took about one step, so that there may be nothing to apply yet.
        """
        catching_up, told = self._catching_up, time.monotonic()
        while not self._called():
            entry = reader.take(0.1)
            if entry is not None:
                at = self._apply(reader, entry, at)
            elif reader.error:
                self._give_up(at, reader.error)
                return at
            lag = reader.newest - at.seq
            fresh = quick and reader.listening
            behind = reader.behind(at.seq) if catching_up.applied else float(lag)
            if catching_up.arrives(behind, idle=reader.waiting, fresh=fresh):
                self._send(CatchUp(at.seq, attempt=self._attempt))
            hopeless = catching_up.hopeless(lag, time.monotonic()) if entry is not None else ""
            if hopeless:
                self._give_up(at, hopeless)
                return at
            if time.monotonic() - told > 1.0:
                told = time.monotonic()
                now = Progress("replay", reader.received_nbytes, reader.received_nbytes, 0.0, lag)
                self._send(now)
                self._transfer.tell_progress(now)
        return self._finish(reader, at)

    def _finish(self, reader: LogReader, at: Header) -> Header:
        """Applies the log up to the header that admits this newcomer; what does not come in time is pulled at that
        header instead.
        """
        mail = self._mail
        with mail.changed:
            target = mail.pull.header if mail.pull is not None else None
        give_up = time.monotonic() + self._catching_up.final_wait_s
        while target is not None and at.seq < target.seq and time.monotonic() < give_up and not reader.error:
            entry = reader.take(0.05)
            if entry is not None and entry.header.seq <= target.seq:
                at = self._apply(reader, entry, at)
        return at

    def _apply(self, reader: LogReader, entry: LogEntry, at: Header) -> Header:
        header = entry.header
        if entry.raw is not None:
            self._accumulation.replay(header, entry.raw)
            self._replay.replay(header)
            self._catching_up.applied += 1
        reader.give_back(entry)
        return header

    # ------------------------------------------------------------------ ends

    def _called(self) -> bool:
        """Returns whether the scheduler has decided something about this newcomer, or has given it another id."""
        mail = self._mail
        return (
            mail.who() != self._me
            or mail.pull is not None
            or mail.observe is not None
            or mail.view is not None
            or mail.over
        )

    def _give_up(self, at: Header, reason: str) -> None:
        if not self._called():
            self._events.emit("notice", text=f"no replay: {reason}")
            self._send(CatchUp(at.seq, able=False, reason=reason[:2000], attempt=self._attempt))
