"""What a member says on its console of the job: who joins, dies and leaves, its rank, and how far a newcomer is.

Theory of operation. `lines` compares two views. `Teller` gives what it says to the logger "chaos_lightning.console" at
INFO, in a daemon thread: a terminal or pipe that nobody reads holds up that thread alone. The queue between is bounded;
what does not fit is counted, and the count is said. Where the user has configured no logging that hears this logger,
it gets a handler of its own, for stderr. Its level is the switch:
`logging.getLogger("chaos_lightning.console").setLevel("WARNING")` turns the lines off.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Collection

from chaos_lightning.machine.terminal import printable
from chaos_lightning.protocol.types import Progress, View

console = logging.getLogger("chaos_lightning.console")
WAITING_LINES = 256
"""So many lines wait for a console that is slow; further ones are dropped."""
PROGRESS_EVERY_S = 5.0
_MIB = 1 << 20


def lines(before: View | None, after: View, me: str, *, carried: bool, replays: Collection[str] = ()) -> list[str]:
    """What is to be said of a change of views; nothing if the same members are in, in the same order.

    Args:
        before: The view that this member stood in; None: it has just come in.
        after: The one that it stands in now.
        me: This member's id.
        carried: A header carried the change: who is missing was let go. Else a recovery made it.
        replays: Newcomers that came in by replay; the others came in by a pause.
    """
    old = before.ids() if before is not None else after.ids()
    new = after.ids()
    size = f"{len(new)} member{'s' if len(new) != 1 else ''}"
    said = [f"{m} {'left' if carried else _lost(m, after.reason)}: {size}" for m in old if m not in new]
    said += [f"{m} joins by {'replay' if m in replays else 'pause'}: {size}" for m in new if m not in old and m != me]
    place = (new.index(me), len(new)) if me in new else None
    if place and (before is None or me not in old or place != (old.index(me), len(old))):
        said.append(f"I am rank {place[0]} of {place[1]}")
    return said


def _lost(member: str, reason: str) -> str:
    """What became of a member that a recovery left out, by the reason of the view."""
    told = re.search(rf"(?:^|; ){re.escape(member)}(?:: | is put out: )([^;]*)", reason)
    return f"is out ({told[1]})" if told else "is out"


def progress_line(now: Progress) -> str:
    """How far a newcomer's transfer is."""
    done, total = now.done_nbytes // _MIB, math.ceil(now.total_nbytes / _MIB)
    sources = ", ".join(s.member for s in now.sources)
    left = f", about {now.remaining_s:.0f} s left" if math.isfinite(now.remaining_s) else ""
    return f"fetching the training state: {done} of {total} MiB{' from ' + sources if sources else ''}{left}"


class Teller:
    """See the module. Any thread may tell."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._told_progress = 0.0

    def tell(self, *said: str) -> None:
        """Never blocks."""
        if not said or console.level > logging.INFO:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chaos-console", daemon=True)
            self._thread.start()
        for line in said:
            try:
                self._queue.put_nowait(line)
            except queue.Full:
                self._dropped += 1

    def progress(self, now: Progress) -> None:
        """A newcomer's transfer; said every few seconds."""
        if time.monotonic() - self._told_progress >= PROGRESS_EVERY_S:
            self._told_progress = time.monotonic()
            self.tell(progress_line(now))

    def close(self, timeout_s: float = 0.5) -> None:
        """What was told is shown, if somebody reads it within `timeout_s`."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            _listen()
            console.info("chaos: %s", printable(line))
            dropped, self._dropped = self._dropped, 0
            if dropped:
                console.info("chaos: %d lines were left out, as nobody read them in time", dropped)


class _Stderr(logging.Handler):
    """Writes past Python's buffers and holds no lock: the process can end while a write waits for a reader."""

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record) + "\n"
        try:
            os.write(sys.stderr.fileno(), text.encode(errors="replace"))
        except (OSError, ValueError, AttributeError):  # no descriptor, as in a notebook; or nobody reads any more
            self.handleError(record)


_OWN = _Stderr()


def _listen() -> None:
    """Somebody hears the console's logger: the user's handlers, or else one of its own."""
    console.removeHandler(_OWN)  # the user may have configured logging since
    if not console.hasHandlers():
        console.addHandler(_OWN)
        if not console.level:
            console.setLevel(logging.INFO)
