"""Measures a member's links: latency and rate for the scheduler, bytes and rates for the event log.

Theory of operation. Rates come from two sources. A probe measures a link when it is made, and when nothing was heard of
its rate for `RENEW_S`, or for much less if it fell behind or its first probe came to nothing (`ReprobeSchedule`); the
meter learns from the job's own bytes, those of state transfers included. Each result becomes a LinkReport, and the last
one of each link is kept, so that a scheduler that was restarted can be told again.

Links between processes of one machine are not measured: their bytes cross no medium. Unless the medium is emulated
(transport/medium.py); such links send nothing by reference either, since that would go round what is emulated.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chaos_lightning.protocol.types import LinkReport
from chaos_lightning.transport.frames import Frame
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.link_meter import LinkMeter, ReprobeSchedule
from chaos_lightning.transport.locality import on_this_machine
from chaos_lightning.transport.medium import Pacer
from chaos_lightning.transport.pacing import pace
from chaos_lightning.transport.probe import Probes

RENEW_S = 60.0
"""Seconds without news of a link's rate after which the link is probed again."""
_SOON_S = 0.025


@dataclass(slots=True)
class _Flow:
    """Byte counts to and from one peer, over all links to it, one after another."""

    sent_before: int = 0
    received_before: int = 0
    read: tuple[float, int, int] | None = None
    """Time of the last reading (monotonic, s), and the bytes then."""

    def rates(self, now: float, sent: int, received: int) -> tuple[float, float]:
        """Returns the rates sent and received since the last call, in bits per second; zeros at the first call."""
        at, sent_then, received_then = self.read or (now, sent, received)
        self.read = (now, sent, received)
        seconds = now - at
        if seconds <= 0:
            return 0.0, 0.0
        return (sent - sent_then) * 8 / seconds, (received - received_then) * 8 / seconds


class Measuring:
    """Measurements of one member's links. Methods belong to the I/O loop's thread unless noted otherwise.

    Args:
        later: Function that calls a function after so many seconds, in the loop's thread.
        report: Function that takes each LinkReport.
        pacer: Pacer, which is told of all connections on which this member sends.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[LinkReport], None],
        pacer: Pacer,
    ) -> None:
        self._later = later
        self._report = report
        self._probes = Probes(later, self._on_probe)
        self._meter = LinkMeter(self._on_transfer)
        self._pacer = pacer
        self._links: dict[str, Link] = {}
        self._asked_at: dict[str, float] = {}
        self._flows: dict[str, _Flow] = {}
        self._reprobes: dict[str, ReprobeSchedule] = {}
        self._soon = False
        self.reports: dict[str, LinkReport] = {}
        """Last report of each link that stands."""

    def emulated(self, peer: str) -> bool:
        """Returns whether the link to this peer is emulated by a lab. Any thread."""
        return self._pacer.emulates(peer)

    # ------------------------------------------------------------------ links

    def added(self, peer: str, link: Link) -> None:
        """Starts to measure a new link."""
        self._links[peer] = link
        self._pacer.join(peer, link.sock, link.pace, time.monotonic())
        if self._measured(peer, link):
            self._reprobes.setdefault(peer, ReprobeSchedule(RENEW_S)).made(time.monotonic())
            self._meter.watch(peer, link.sock)
            self._probe(peer, link, "link made")

    def lost(self, peer: str, link: Link) -> None:
        """Stops measuring a link that broke or is not wanted any more."""
        if self._links.get(peer) is link:
            del self._links[peer]
            self.reports.pop(peer, None)
        flow = self._flows.setdefault(peer, _Flow())
        flow.sent_before += link.sent_nbytes
        flow.received_before += link.received_nbytes
        self._probes.lost(peer, link)
        self._meter.unwatch(peer, link.sock)
        self._pacer.leave(peer, link.sock, time.monotonic())

    def forget(self, peer: str) -> None:
        """Forgets a peer to which no link is wanted any more."""
        self._meter.forget(peer)
        self._flows.pop(peer, None)
        self._asked_at.pop(peer, None)
        self._reprobes.pop(peer, None)

    def _measured(self, peer: str, link: Link) -> bool:
        return not link.local or self.emulated(peer)

    def unmeasured(self) -> set[str]:
        """Returns the peers whose links have no measurement yet. Any thread."""
        return {p for p, link in list(self._links.items()) if p not in self.reports and self._measured(p, link)}

    def _probe(self, peer: str, link: Link, why: str) -> None:
        self._asked_at[peer] = time.monotonic()
        self._probes.measure(peer, link, why)

    def target(self, link: Link, frame: Frame) -> memoryview:
        """Returns memory for a PROBE frame's payload."""
        return self._probes.target(link, frame)

    def arrived(self, peer: str, link: Link, frame: Frame, payload: memoryview) -> None:
        """Handles a received PROBE frame."""
        self._probes.arrived(peer, link, frame, payload)

    # ------------------------------------------------------------------ transfers beside the links

    def begin_bulk(self, peer: str, sock: socket.socket) -> bool:
        """Paces a bulk connection on which this member is about to send; returns whether to call `watch_bulk` for it.
        Any thread.
        """
        self._pacer.begin(peer, sock)
        return not on_this_machine(sock) or self.emulated(peer)

    def watch_bulk(self, peer: str, sock: socket.socket) -> None:
        self._meter.watch(peer, sock)
        self._pacer.join(peer, sock, partial(pace, sock), time.monotonic())

    def end_bulk(self, peer: str, sock: socket.socket) -> None:
        self._meter.unwatch(peer, sock)
        self._pacer.leave(peer, sock, time.monotonic())
        if peer not in self._links:
            self._meter.forget(peer)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Reads the counters, and probes links without recent news of their rates; to be called several times a
        second.
        """
        self._read(now)
        for peer, link in list(self._links.items()):
            reprobe = self._reprobes.get(peer)
            pause_s = RENEW_S if reprobe is None else reprobe.pause_s(now)
            if now - self._asked_at.get(peer, 0.0) <= pause_s or not self._meter.stale(peer, now, pause_s):
                continue
            if self._measured(peer, link):
                why = f"nothing was heard of its rate for {RENEW_S:g} s"
                if peer not in self.reports:
                    why = "not measured yet"
                elif reprobe is not None and reprobe.behind:
                    why = f"it carried {reprobe.best_bps / 1e6:.3g} Mbit/s before"
                self._probe(peer, link, why)

    def facts(self, now: float) -> list[dict[str, object]]:
        """Returns a dict for each link: total bytes, rates since the last call, and the latest measurement."""
        rows: list[dict[str, object]] = []
        for peer, link in self._links.items():
            flow = self._flows.setdefault(peer, _Flow())
            sent, received = flow.sent_before + link.sent_nbytes, flow.received_before + link.received_nbytes
            sent_bps, received_bps = flow.rates(now, sent, received)
            row: dict[str, object] = {
                "peer": peer,
                "sent_nbytes": sent,
                "received_nbytes": received,
                "sent_bps": round(sent_bps),
                "received_bps": round(received_bps),
                "queued_nbytes": link.queued_nbytes,
                "by_reference": link.by_reference,
            }
            report = self.reports.get(peer)
            if report is not None:
                row |= {"rate_bps": round(self._meter.rate(peer)), "latency_s": report.latency_s}
            rows.append(row)
        return rows

    def _read(self, now: float) -> None:
        waiting = self._meter.tick(now, self._probes.measuring)
        self._pacer.settle(now, self._meter.waiting)
        if waiting and not self._soon:
            self._soon = True
            self._later(_SOON_S, self._again)

    def _again(self) -> None:
        self._soon = False
        self._read(time.monotonic())

    # ------------------------------------------------------------------ results

    def _on_probe(self, report: LinkReport) -> None:
        self._meter.known(report.peer, report.rate_bps, time.monotonic())
        self._heard(report)

    def _on_transfer(self, peer: str, rate_bps: float) -> None:
        if peer not in self._links:
            return  # a newcomer pulls from us without being a neighbour
        before = self.reports.get(peer)
        words = f"transfer (it carries {rate_bps / 1e6:.3g} Mbit/s"
        words += f", before {before.rate_bps / 1e6:.3g})" if before is not None else ")"
        report = LinkReport(peer, before.latency_s if before is not None else 0.0, rate_bps, words)
        self._heard(report)

    def _heard(self, report: LinkReport) -> None:
        self._reprobes.setdefault(report.peer, ReprobeSchedule(RENEW_S)).heard(report.rate_bps, time.monotonic())
        self.reports[report.peer] = report
        self._report(report)
