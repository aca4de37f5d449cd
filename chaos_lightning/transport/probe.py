"""Measures the latency and rate of links by probe frames.

Theory of operation. A measurement (`Probes.measure`) has two parts, both in PROBE frames of the link itself:

- *Echoes*, one after the other. The shortest round trip is taken, since only waiting lengthens the others; half of it
  is the latency.
- *Trains* of frames back to back. The first is small. Each of the next ones is so large that it takes `target_s` at the
  rate of the one before, so that a slow link is not filled for seconds and a fast one not misjudged by its first
  packets. Each train is timed twice, by the receiver as its pieces come, and by the sender from its first byte to the
  answer, less a round trip. The receiver finds too high a rate if it came late to the first pieces, the sender too low
  a one if either end was late; the smaller rate counts. Trains are sent until the best two are alike.

A measurement must not hold up the training: it begins when its link has been quiet for a moment, or when it has been
patient for long enough, and a train ends early as soon as a chunk or message wants the link (link.py `fill`). On a link
that is always busy it may come to nothing: there the traffic shows the rate (transport/link_meter.py). One train
at a time leaves a member, and one at a time comes in: the receiver grants them in turn, with a lease, since several at
once would measure the access that they share and not their links.

If nothing comes back within the deadline, that is a result, too: the link carries nothing, its rate is 0. A link that
breaks ends its measurement without one. All methods belong to the loop's thread.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import NO_VIEW, LinkReport
from chaos_lightning.transport.frames import HEADER_NBYTES, Frame, FrameType, pack
from chaos_lightning.transport.link import Link

PIECE_NBYTES = 256 << 10
"""Largest size, bytes, of a frame of a train."""
_SMALLEST_PIECE_NBYTES = 4 << 10
_DONE = struct.Struct("<Qdd")
_ALIKE = 0.8
"""Least ratio of the rates of the two best trains at which they count as alike: nobody was late."""
_ROUGH_NBYTES = 32 << 10
_EXTENSIONS = 5
"""Number of times that an answer is waited for anew, because the job's own traffic was before it."""
_GOES_ON_NBYTES = 4 << 10
"""Number of bytes, more than pings have, that show that the link carries something."""


class Op(enum.IntEnum):
    """Kind of a PROBE frame, sent in the frame's field `start`; the field `seq` has the sender's number."""

    ECHO = 1
    ECHOED = 2
    ASK = 3
    """Question whether a train may come."""
    GO = 4
    FILL = 5
    """Part of a train."""
    END = 6
    DONE = 7
    """Answer about a train: its bytes, the seconds from its first piece to its last, and the rate at which they
    came.
    """


_OPS = {int(op): op for op in Op}


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Sizes and timeouts of a measurement."""

    echoes: int = 5
    target_s: float = 0.075
    """Seconds that a train is to take; more where the round trip is long."""
    first_nbytes: int = 16 << 10
    max_nbytes: int = 8 << 20
    max_trains: int = 10
    quiet_s: float = 0.02
    """Seconds without chunks and messages after which a link counts as quiet."""
    patience_s: float = 3.0
    """Seconds after which a link that is never quiet is tried all the same, with trains that end early."""
    deadline_s: float = 5.0
    """Seconds without an answer after which the link counts as carrying nothing."""
    lease_s: float = 2.0
    """Seconds after which a peer that was granted a train and sends nothing loses its turn."""


@dataclass(slots=True)
class _Run:
    """Measurement of one link under way, at the sending end."""

    peer: str
    link: Link
    why: str
    since: float
    size: int
    number: int = -1
    sent_at: float = 0.0
    sent: int = 0
    ended: bool = False
    quiet: bool = False
    """Whether nothing was before the train."""
    traffic: int = 0
    waits: int = 0
    extensions: int = 0
    trains: int = 0
    trips: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    rough: float = 0.0
    """Best rate of trains that were shorter than they should be."""


@dataclass(slots=True)
class _Coming:
    """Train of PROBE frames that is being received from a peer."""

    peer: str
    link: Link
    number: int
    began_at: float = 0.0
    heard_at: float = 0.0
    nbytes: int = 0
    pieces: int = 0
    sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Sums over the train's pieces: seconds since the first one, bytes up to its middle, squares of the former,
    products of both.
    """

    def piece(self, now: float, nbytes: int) -> None:
        """Counts a frame of the train that has come."""
        self.heard_at = now
        self.began_at = self.began_at or now
        t, middle = now - self.began_at, self.nbytes + nbytes / 2
        self.nbytes += nbytes
        self.pieces += 1
        st, sb, stt, stb = self.sums
        self.sums = (st + t, sb + middle, stt + t * t, stb + t * middle)

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last frame of the train."""
        return self.heard_at - (self.began_at or self.heard_at)

    @property
    def rate_bps(self) -> float:
        """Rate of the train in bits per second: slope of the regression line of bytes over time; 0.0 if all frames came
        at once.

        Pacers and tunnels pass bytes in bursts. The line is not shifted by a first burst for which nobody had to wait.
        """
        st, sb, stt, stb = self.sums
        spread = self.pieces * stt - st * st
        slope = (self.pieces * stb - st * sb) / spread if spread > 0 else 0.0
        return slope * 8 if slope > 0 and math.isfinite(slope) else 0.0


@cache
def _filler() -> memoryview:
    # Random: a tunnel that compresses would carry zeros at any rate.
    return memoryview(os.urandom(PIECE_NBYTES))


class Probes:
    """Probes on all of one member's links.

    Args:
        later: Function that calls a function after so many seconds, in the loop's thread.
        report: Function that takes each result.
        config: Sizes and waits.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[LinkReport], None],
        config: ProbeConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._later = later
        self._report = report
        self._config = config or ProbeConfig()
        self._clock = clock
        self._numbers = itertools.count(1)
        self._runs: dict[str, _Run] = {}
        self._ready: deque[_Run] = deque()
        self._sending: _Run | None = None
        self._asking: deque[_Coming] = deque()
        self._coming: _Coming | None = None
        self._scratch = memoryview(bytearray(PIECE_NBYTES))

    def measure(self, peer: str, link: Link, why: str) -> None:
        """Starts to measure the link to `peer` soon; does nothing if that link is being measured already."""
        run = self._runs.get(peer)
        if run is not None and run.link is link:
            return
        if run is not None:
            self._end(run)
        run = self._runs[peer] = _Run(peer, link, why, self._clock(), self._config.first_nbytes)
        self._when_quiet(run, self._echo)

    def measuring(self, peer: str) -> bool:
        """Returns whether a measurement towards this peer is under way."""
        return peer in self._runs

    def lost(self, peer: str, link: Link) -> None:
        """Ends measurements on a link that broke or is not wanted any more."""
        run = self._runs.get(peer)
        if run is not None and run.link is link:
            self._end(run)
        self._asking = deque(c for c in self._asking if c.link is not link)
        if self._coming is not None and self._coming.link is link:
            self._release()

    # ------------------------------------------------------------------ frames

    def target(self, link: Link, frame: Frame) -> memoryview:
        """Returns memory for a PROBE frame's payload."""
        op = _OPS.get(frame.start)
        if op is Op.FILL and frame.length <= PIECE_NBYTES:
            coming = self._coming
            if coming is not None and self._comes(link, frame):
                coming.heard_at = self._clock()
            return self._scratch[: frame.length]
        if op is Op.DONE and frame.length == _DONE.size:
            return memoryview(bytearray(frame.length))
        raise WireError(f"a PROBE frame {op.name if op else frame.start} with {frame.length} bytes")

    def arrived(self, peer: str, link: Link, frame: Frame, payload: memoryview) -> None:
        """Handles a received PROBE frame."""
        match _OPS.get(frame.start):
            case Op.ECHO:
                self._say(link, Op.ECHOED, frame.seq)
            case Op.ECHOED:
                run = self._answered(peer, link, frame)
                if run is not None:
                    self._on_echoed(run)
            case Op.ASK:
                self._asking.append(_Coming(peer, link, frame.seq))
                self._grant()
            case Op.GO:
                run = self._answered(peer, link, frame)
                if run is not None:
                    self._train(run)
            case Op.FILL:
                if self._comes(link, frame):
                    assert self._coming is not None
                    self._coming.piece(self._clock(), frame.length + HEADER_NBYTES)
            case Op.END:
                self._on_end(link, frame)
            case Op.DONE:
                run = self._answered(peer, link, frame)
                if run is not None:
                    nbytes, seconds, rate_bps = _DONE.unpack(payload)
                    if not (0 <= seconds < math.inf and 0 <= rate_bps < math.inf):
                        raise WireError(f"a train that took {seconds} s and came at {rate_bps} bit/s")
                    self._on_done(run, nbytes, seconds, rate_bps)
            case _:
                raise WireError(f"PROBE frame {frame.start} is unknown; expected one of {sorted(_OPS)}")

    def _say(self, link: Link, op: Op, number: int, payload: bytes = b"") -> None:
        link.send(FrameType.PROBE, NO_VIEW, number, op, (memoryview(payload),) if payload else ())

    def _answered(self, peer: str, link: Link, frame: Frame) -> _Run | None:
        run = self._runs.get(peer)
        if run is None or run.link is not link or run.number != frame.seq:
            return None
        run.waits += 1  # ends the wait
        run.extensions = 0
        return run

    # ------------------------------------------------------------------ the measuring end

    def _current(self, run: _Run) -> bool:
        return self._runs.get(run.peer) is run

    def _when_quiet(self, run: _Run, then: Callable[[_Run], None]) -> None:
        if not self._current(run):
            return
        now = self._clock()
        if run.link.quiet(now, self._config.quiet_s) or now - run.since >= self._config.patience_s:
            then(run)
        else:
            self._later(self._config.quiet_s / 2, lambda: self._when_quiet(run, then))

    def _ask(self, run: _Run, op: Op, deadline_s: float) -> None:
        run.number = next(self._numbers)
        run.sent_at = self._clock()
        self._say(run.link, op, run.number)
        self._expect(run, deadline_s)

    def _echo(self, run: _Run) -> None:
        self._ask(run, Op.ECHO, self._config.deadline_s)

    def _on_echoed(self, run: _Run) -> None:
        run.trips.append(self._clock() - run.sent_at)
        if len(run.trips) < self._config.echoes:
            self._echo(run)
        else:
            self._ready.append(run)
            self._next_run()

    def _next_run(self) -> None:
        if self._sending is None and self._ready:
            self._sending = self._ready.popleft()
            self._when_quiet(self._sending, self._ask_for_train)

    def _ask_for_train(self, run: _Run) -> None:
        # Others may have their turns before.
        self._ask(run, Op.ASK, 4 * self._config.deadline_s)

    def _train(self, run: _Run) -> None:
        run.sent, run.ended, run.traffic = 0, False, run.link.traffic
        run.sent_at = self._clock()
        run.quiet = run.link.quiet(run.sent_at, 0.0)
        self._expect(run, self._config.deadline_s)
        run.link.fill(partial(self._piece, run, run.number))

    def _piece(self, run: _Run, number: int) -> list[memoryview] | None:
        """Returns the next frame of a train: filler frames until it is long enough or other traffic waits, then its END
        frame, then None.
        """
        if run.number != number or run.ended:
            return None
        left = run.size - run.sent
        if left > 0 and (run.sent == 0 or run.link.traffic == run.traffic):
            nbytes = min(left, PIECE_NBYTES, max(_SMALLEST_PIECE_NBYTES, run.size // 32))
            run.sent += nbytes
            head = pack(FrameType.PROBE, NO_VIEW, number, Op.FILL, nbytes, 0, summed=False)
            return [memoryview(head), _filler()[:nbytes]]
        run.ended = True
        return [memoryview(pack(FrameType.PROBE, NO_VIEW, number, Op.END, 0, 0, summed=False))]

    def _on_done(self, run: _Run, nbytes: int, seconds: float, rate: float) -> None:
        config, now = self._config, self._clock()
        trip = min(run.trips)
        whole = run.sent == run.size
        rate = rate or nbytes * 8 / max(seconds, 1e-6)
        took = now - run.sent_at - trip
        if run.quiet and run.link.traffic == run.traffic and took > 0:
            rate, seconds = min(rate, run.sent * 8 / took), max(seconds, took)
        target = max(config.target_s, min(0.5, 4 * trip))
        run.trains += 1
        if nbytes and (seconds >= target / 2 or (whole and run.size == config.max_nbytes)):
            run.rates.append(rate)
        elif nbytes >= _ROUGH_NBYTES and seconds >= target / 8:
            run.rough = max(run.rough, rate)
        if nbytes and whole:
            # A train that took its time because somebody was late looks slow: the best rate says how long one must be.
            fitting = round(max([rate, *run.rates]) * target / 8)
            run.size = min(max(fitting, run.size), 8 * run.size, config.max_nbytes)
        best = sorted(run.rates)[-2:]
        if len(best) == 2 and best[0] >= _ALIKE * best[1]:
            self._result(run, best[1], "")
        elif run.trains < config.max_trains:
            self._when_quiet(run, self._ask_for_train)
        elif run.rates or run.rough:
            words = "the link was busy" if len(run.rates) < 2 else "no two trains were alike"
            self._result(run, max([run.rough, *run.rates]), words)
        else:
            self._end(run)  # who keeps the link so busy shows its rate (transport/link_meter.py)

    def _expect(self, run: _Run, deadline_s: float) -> None:
        run.waits += 1
        wait, due, before = run.waits, self._clock() + deadline_s, run.link.delivered_nbytes

        def over() -> None:
            if not self._current(run) or run.waits != wait:
                return
            # A member that was frozen itself has heard nothing (protocol.md 12); and what the job sent before goes
            # first.
            goes_on = run.link.delivered_nbytes - before >= _GOES_ON_NBYTES
            held_up = self._clock() - due > 0.5 or goes_on
            if held_up and run.extensions < _EXTENSIONS:
                run.extensions += 1
                self._expect(run, deadline_s)
            elif deadline_s > self._config.deadline_s:
                self._end(run)  # it answers, but grants no train: nothing is known about the rate
            else:
                self._result(run, 0.0, f"nothing came back within {deadline_s:g} s")

        self._later(deadline_s, over)

    def _result(self, run: _Run, rate_bps: float, words: str) -> None:
        self._end(run)
        latency_s = min(run.trips) / 2 if run.trips else self._config.deadline_s
        evidence = f"probe ({run.why}; {words})" if words else f"probe ({run.why})"
        self._report(LinkReport(run.peer, latency_s, rate_bps, evidence))

    def _end(self, run: _Run) -> None:
        del self._runs[run.peer]
        run.number = -1
        if run in self._ready:
            self._ready.remove(run)
        if self._sending is run:
            self._sending = None
            self._next_run()

    # ------------------------------------------------------------------ the other end

    def _grant(self) -> None:
        if self._coming is None and self._asking:
            coming = self._coming = self._asking.popleft()
            coming.heard_at = self._clock()
            self._say(coming.link, Op.GO, coming.number)
            self._later(self._config.lease_s, lambda: self._lease_over(coming))

    def _lease_over(self, coming: _Coming) -> None:
        if self._coming is not coming:
            return
        left = self._config.lease_s - (self._clock() - coming.heard_at)
        if left > 0:
            self._later(left, lambda: self._lease_over(coming))
        else:
            self._release()

    def _release(self) -> None:
        self._coming = None
        self._grant()

    def _comes(self, link: Link, frame: Frame) -> bool:
        return self._coming is not None and self._coming.link is link and self._coming.number == frame.seq

    def _on_end(self, link: Link, frame: Frame) -> None:
        train = _Coming("", link, frame.seq)
        if self._comes(link, frame):
            assert self._coming is not None
            train = self._coming
            self._release()
        self._say(link, Op.DONE, frame.seq, _DONE.pack(train.nbytes, train.seconds, train.rate_bps))
