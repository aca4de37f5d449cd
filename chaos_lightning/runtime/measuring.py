"""What this member knows of its links: latency and rate for the scheduler, bytes and rates for status and heartbeats.

Theory of operation. Rates come from two sources. A probe measures a link when it is made, when somebody asks, and when
nothing was heard of its rate for `RENEW_S`; the meter learns from the job's own bytes. Each result becomes a
LinkReport, and the last one of each link is kept, so that a scheduler that was restarted can be told again.

Links between processes of one machine are not measured: their bytes cross no medium. Unless the medium is emulated, by
a table of rates (transport/pacing.py) or a relay (testing/relay.py); such links send nothing by reference either, since
that would go round what is emulated.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chaos_lightning.membership.types import LinkReport
from chaos_lightning.runtime.link_meter import Meter
from chaos_lightning.transport.frames import Frame
from chaos_lightning.transport.handshake import RELAY
from chaos_lightning.transport.link import Link, on_this_machine
from chaos_lightning.transport.pacing import EMULATE, checked, pace, rate_to, rates_from
from chaos_lightning.transport.probe import ProbeConfig, Probes

RENEW_S = 60.0
"""A link of whose rate nothing was heard for so long is probed again."""
_SOON_S = 0.025
_WINDOW_S = 1.0
"""Over which bytes per second are shown."""


@dataclass(slots=True)
class _Flow:
    """Bytes to and from one peer, over all its links."""

    sent_before: int = 0
    received_before: int = 0
    window: deque[tuple[float, int, int]] = field(default_factory=deque)

    def rates(self, now: float, sent: int, received: int) -> tuple[float, float]:
        """Bits per second over the window that ends now."""
        window = self.window
        window.append((now, sent, received))
        while window[0][0] < now - _WINDOW_S and len(window) > 1:
            window.popleft()
        at, sent_then, received_then = window[0]
        seconds = now - at
        return (
            ((sent - sent_then) * 8 / seconds, (received - received_then) * 8 / seconds) if seconds > 0 else (0.0, 0.0)
        )


class Measuring:
    """See the module. Methods belong to the loop's thread unless said otherwise.

    Args:
        later: Calls a function after so many seconds, in the loop's thread.
        report: Takes each LinkReport.
        config: Sizes and waits of probes.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[LinkReport], None],
        config: ProbeConfig | None = None,
    ) -> None:
        self._later = later
        self._report = report
        self._probes = Probes(later, self._on_probe, config)
        self._meter = Meter(self._on_transfer)
        self._rates = rates_from(os.environ.get(EMULATE, ""))
        self._relayed = bool(os.environ.get(RELAY))
        self._links: dict[str, Link] = {}
        self._asked_at: dict[str, float] = {}
        self._flows: dict[str, _Flow] = {}
        self._soon = False
        self.reports: dict[str, LinkReport] = {}
        """The last one of each link that stands."""
        self.facts: dict[str, dict[str, object]] = {}
        """By peer; replaced as a whole at each tick, so that any thread may read it."""

    # ------------------------------------------------------------------ emulation

    def emulated(self, peer: str) -> bool:
        """Whether bytes to this peer go through an emulated medium. Any thread."""
        return self._relayed or rate_to(self._rates, peer) is not None

    def emulate(self, rates: Mapping[str, float]) -> None:
        """From now on this member sends to these peers (ids, names or nodes) at most so many bits per second."""
        self._rates = checked(rates)
        for peer, link in self._links.items():
            link.pace(rate_to(self._rates, peer))

    # ------------------------------------------------------------------ links

    def added(self, peer: str, link: Link) -> None:
        """A link was made."""
        self._links[peer] = link
        rate = rate_to(self._rates, peer)
        if rate is not None:
            link.pace(rate)
        if self._measured(peer, link):
            self._meter.watch(peer, link.sock)
            self._probe(peer, link, "link made")

    def lost(self, peer: str, link: Link) -> None:
        """A link has broken or is not wanted any more."""
        if self._links.get(peer) is link:
            del self._links[peer]
            self.reports.pop(peer, None)
        flow = self._flows.setdefault(peer, _Flow())
        flow.sent_before += link.sent_nbytes
        flow.received_before += link.received_nbytes
        self._probes.lost(peer, link)
        self._meter.unwatch(peer, link.sock)

    def forget(self, peer: str) -> None:
        """This peer is not wanted any more."""
        self._meter.forget(peer)
        self._flows.pop(peer, None)
        self._asked_at.pop(peer, None)

    def measure(self, peer: str, why: str) -> bool:
        """Probes the link to this peer; False if there is none, or its bytes cross no medium."""
        link = self._links.get(peer)
        if link is None or not self._measured(peer, link):
            return False
        self._probe(peer, link, why)
        return True

    def _measured(self, peer: str, link: Link) -> bool:
        return not link.local or self.emulated(peer)

    def _probe(self, peer: str, link: Link, why: str) -> None:
        self._asked_at[peer] = time.monotonic()
        self._probes.measure(peer, link, why)

    def target(self, link: Link, frame: Frame) -> memoryview:
        """Memory for a PROBE frame."""
        return self._probes.target(link, frame)

    def arrived(self, peer: str, link: Link, frame: Frame, payload: memoryview) -> None:
        """A PROBE frame is here."""
        self._probes.arrived(peer, link, frame, payload)

    # ------------------------------------------------------------------ transfers beside the links

    def begin_bulk(self, peer: str, sock: socket.socket) -> bool:
        """Paces a bulk connection on which this member sends; says whether to `watch_bulk` it. Any thread."""
        rate = rate_to(self._rates, peer)
        if rate is not None:
            pace(sock, rate)
        return not on_this_machine(sock) or self.emulated(peer)

    def watch_bulk(self, peer: str, sock: socket.socket) -> None:
        self._meter.watch(peer, sock)

    def end_bulk(self, peer: str, sock: socket.socket) -> None:
        self._meter.unwatch(peer, sock)
        if peer not in self._links:
            self._meter.forget(peer)

    def carried(self, peer: str, nbytes: int, seconds: float) -> None:
        """Somebody who kept the link to this peer filled for so long says what it carried."""
        self._meter.carried(peer, nbytes, seconds, time.monotonic())

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Reads the counters; call it several times a second."""
        self._read(now)
        facts: dict[str, dict[str, object]] = {}
        for peer, link in list(self._links.items()):
            flow = self._flows.setdefault(peer, _Flow())
            sent, received = flow.sent_before + link.sent_nbytes, flow.received_before + link.received_nbytes
            sent_bps, received_bps = flow.rates(now, sent, received)
            facts[peer] = {
                "sent_nbytes": sent,
                "received_nbytes": received,
                "sent_bps": sent_bps,
                "received_bps": received_bps,
                "queued_nbytes": link.queued_nbytes,
                "by_reference": link.by_reference,
                **self._known(peer),
            }
            asked = now - self._asked_at.get(peer, 0.0) > RENEW_S
            if asked and self._measured(peer, link) and self._meter.stale(peer, now, RENEW_S):
                self._probe(peer, link, f"nothing was heard of its rate for {RENEW_S:g} s")
        self.facts = facts

    def _known(self, peer: str) -> dict[str, object]:
        report = self.reports.get(peer)
        if report is None:
            return {}
        return {"rate_bps": self._meter.rate(peer), "latency_s": report.latency_s, "evidence": report.evidence}

    def _read(self, now: float) -> None:
        if self._meter.tick(now, self._probes.measuring) and not self._soon:
            self._soon = True
            self._later(_SOON_S, self._again)

    def _again(self) -> None:
        self._soon = False
        self._read(time.monotonic())

    # ------------------------------------------------------------------ results

    def _on_probe(self, report: LinkReport) -> None:
        self._meter.known(report.peer, report.rate_bps, time.monotonic())
        self.reports[report.peer] = report
        self._report(report)

    def _on_transfer(self, peer: str, rate_bps: float) -> None:
        if peer not in self._links:
            return  # a newcomer pulls from us without being a neighbour
        before = self.reports.get(peer)
        words = f"transfer (it carries {rate_bps / 1e6:.3g} Mbit/s"
        words += f", before {before.rate_bps / 1e6:.3g})" if before is not None else ")"
        report = LinkReport(peer, before.latency_s if before is not None else 0.0, rate_bps, words)
        self.reports[peer] = report
        self._report(report)
