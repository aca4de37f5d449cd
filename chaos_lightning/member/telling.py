"""What a member says on its console of the job: who joins, dies and leaves, its rank, and how far a newcomer is.

Theory of operation. `lines` compares two views. `Teller` gives what it says to the logger "chaos_lightning.console" at
INFO, in a daemon thread: a terminal or pipe that nobody reads holds up that thread alone. The queue between is bounded;
what does not fit is counted, and the count is said. Handlers that the user has configured by then get each line; where
there are none it goes to stderr. No level and no handler is ever set here, so the user may configure logging at any
time. The level that holds for the logger is the switch, but for a root logger at WARNING, which is what nobody has
set: `logging.getLogger("chaos_lightning.console").setLevel("WARNING")` turns the lines off.
"""

from __future__ import annotations

import io
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Collection, Mapping

from chaos_lightning.machine.terminal import printable
from chaos_lightning.machine.units import amount, duration, part
from chaos_lightning.protocol.types import Progress, View

console = logging.getLogger("chaos_lightning.console")
WAITING_LINES = 256
"""So many lines wait for a console that is slow; further ones are dropped."""
PROGRESS_EVERY_S = 5.0
_batches_told = False
"""What becomes of the global batch is said once per process."""


def lines(before: View | None, after: View, me: str, *, carried: bool, replays: Collection[str] = ()) -> list[str]:
    """What is to be said of a change of views; nothing if the same members are in, in the same order.

    Args:
        before: The view that this member stood in; None: it has just come in.
        after: The one that it stands in now.
        me: This member's id.
        carried: A header carried the change: who is missing was let go. Else a recovery made it.
        replays: Newcomers that came in by replay; the others came in by a pause.
    """
    new = after.ids()
    old = before.ids() if before is not None else tuple(m for m in new if m != me or me not in after.joiners)
    size = f"{len(new)} member{'s' if len(new) != 1 else ''}"
    if (batch := global_batch(after)) != (global_batch(before) if before is not None else 0):
        size += f", {batch} sample{'s' if batch != 1 else ''} a step"
    said = [f"{m} {'left' if carried else _lost(m, after.reason)}: {size}" for m in old if m not in new]
    for m in new:
        if m not in old:
            who = "I join" if m == me else f"{m} joins"
            said.append(f"{who} by {'replay' if m in replays else 'pause'}: {size}")
    place = (new.index(me), len(new)) if me in new else None
    if place and (before is None or me not in old or place != (old.index(me), len(old))):
        said.append(f"I am rank {place[0]} of {place[1]}")
    return said


def global_batch(view: View) -> int:
    """Returns the samples of a full step of all members of a view."""
    return sum(m.quota for m in view.members) * view.accumulate


def batch_line(before: View | None, after: View) -> str:
    """What becomes of batch and learning rate, if this change of views changes the batch; "" if not.

    Each member takes batches of the size that its loader has (protocol.md 10, 25), so that a step has all of theirs.
    """
    now = global_batch(after)
    old = before.members if before is not None else [m for m in after.members if m.id not in after.joiners]
    then = sum(m.quota for m in old) * after.accumulate
    if now == then:
        return ""
    return (
        f"the global batch is the sum of the members' batches, {now} now and {then} before; the learning rate stays as "
        "the script sets it"
    )


def _lost(member: str, reason: str) -> str:
    """What became of a member that a recovery left out, by the reason of the view."""
    told = re.search(rf"(?:^|; ){re.escape(member)}(?:: | is put out: )([^;]*)", reason)
    return f"is out ({told[1]})" if told else "is out"


def progress_line(now: Progress) -> str:
    """How far a newcomer is."""
    if now.phase == "replay":
        return f"replaying what the others train: {now.lag} step{'s' if now.lag != 1 else ''} behind"
    sources = ", ".join(s.member for s in now.sources)
    rate = f" at {amount(now.rate_bps / 8)}/s" if now.rate_bps > 0 else ""
    left = f", about {now.remaining_s:.0f} s left" if math.isfinite(now.remaining_s) else ""
    done = part(now.done_nbytes, now.total_nbytes)
    return f"fetching the training state: {done}{' from ' + sources if sources else ''}{rate}{left}"


def fetched_line(by_source: Mapping[str, int], skipped: int, seconds: float) -> str:
    """A newcomer has the state."""
    here = f", {amount(skipped)} were here" if skipped else ""
    sources = ", ".join(source for source, nbytes in by_source.items() if nbytes)
    came = f"{amount(sum(by_source.values()))}{' from ' + sources if sources else ''}"
    return f"the training state is here: {came} in {duration(seconds)}{here}"


class Teller:
    """See the module. Any thread may tell."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        self._lock = threading.Lock()
        """Of starting the thread."""
        self._thread: threading.Thread | None = None
        self._told_progress = 0.0

    def tell(self, *said: str) -> None:
        """Waits for no reader."""
        with self._lock:
            if said and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="chaos-console", daemon=True)
                self._thread.start()
        for line in said:
            try:
                self._queue.put_nowait(line)
            except queue.Full:
                self._dropped += 1

    def tell_batch(self, before: View | None, after: View) -> None:
        """Says what becomes of the batch, at the first change of views that this process sees."""
        global _batches_told
        if not _batches_told and (line := batch_line(before, after)):
            _batches_told = True
            self.tell(line)

    def progress(self, now: Progress) -> None:
        """A newcomer's transfer; said every few seconds."""
        if time.monotonic() - self._told_progress >= PROGRESS_EVERY_S:
            self._told_progress = time.monotonic()
            self.tell(progress_line(now))

    def close(self, timeout_s: float = 0.5) -> None:
        """What was told is shown, if somebody reads it within `timeout_s`."""
        if self._thread is not None:
            until = time.monotonic() + timeout_s
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._thread.join(max(0.0, until - time.monotonic()))
            self._thread = None

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            _show(printable(line))
            dropped, self._dropped = self._dropped, 0
            if dropped:
                _show(f"{dropped} lines were left out, as nobody read them in time")


def _show(line: str) -> None:
    if not _wanted():
        return
    if console.hasHandlers():
        # Not `console.info`, which a root logger that nobody has set would stop.
        record = console.makeRecord(console.name, logging.INFO, __file__, 0, "chaos: %s", (line,), None)
        try:
            console.handle(record)
        except Exception as error:  # a handler of the user's own; the next line may fare better
            _write(f"chaos: {line} (a handler of the log raised {error!r})")
    else:
        _write(f"chaos: {line}")


def _wanted() -> bool:
    """Whether the user lets lines of this level through."""
    ruling = console
    while not ruling.level and ruling.parent is not None:
        ruling = ruling.parent
    unset = ruling is logging.root and ruling.level == logging.WARNING
    return not console.disabled and console.manager.disable < logging.INFO and (unset or ruling.level <= logging.INFO)


def _write(text: str) -> None:
    """To stderr as it is now. A file is written to past Python's buffers, without their lock: so the process can end
    while this waits for a reader. A notebook or a progress bar has put something else in its place, which gets it."""
    stream = sys.stderr
    try:
        if not isinstance(stream, io.TextIOWrapper):
            stream.write(f"{text}\n")
            stream.flush()
            return
        file = stream.fileno()
        if os.isatty(file):  # a progress bar may stand in this line
            text = "\r" + text.ljust(os.get_terminal_size(file).columns - 1)
        os.write(file, f"{text}\n".encode(stream.encoding, "backslashreplace"))
    except Exception:  # there is none, nobody reads it any more, or what is in its place raises what it likes
        return
