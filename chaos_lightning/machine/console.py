"""Prints lines on a process's console without waiting for a slow terminal.

Theory of operation. `Teller` gives lines to the logger "chaos_lightning.console" at INFO, in a daemon thread: a
terminal or pipe that nobody reads holds up that thread alone. The queue between is bounded; what does not fit is
counted, and the count is said. Handlers that the user has configured by then get each line; where there are none it
goes to stderr. No level and no handler is ever set here, so the user may configure logging at any time. The level that
holds for the logger is the switch, but for a root logger at WARNING, which is what nobody has set:
`logging.getLogger("chaos_lightning.console").setLevel("WARNING")` turns the lines off.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
import time

from chaos_lightning.machine.terminal import printable

console = logging.getLogger("chaos_lightning.console")
WAITING_LINES = 256
"""Number of lines that wait for a slow console; further ones are dropped."""


class Teller:
    """Queue of lines that a thread prints on the console. Any thread may call `tell`."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        self._lock = threading.Lock()
        """Lock that guards the start of the thread."""
        self._thread: threading.Thread | None = None

    def tell(self, *said: str) -> None:
        """Queues lines for the console; never waits."""
        with self._lock:
            if said and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="chaos-console", daemon=True)
                self._thread.start()
        for line in said:
            try:
                self._queue.put_nowait(line)
            except queue.Full:
                self._dropped += 1

    def close(self, timeout_s: float = 0.5) -> None:
        """Waits until all queued lines are printed, at most `timeout_s`."""
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
    """Returns whether the user's logging configuration lets INFO lines of this logger through."""
    ruling = console
    while not ruling.level and ruling.parent is not None:
        ruling = ruling.parent
    unset = ruling is logging.root and ruling.level == logging.WARNING
    return not console.disabled and console.manager.disable < logging.INFO and (unset or ruling.level <= logging.INFO)


def _write(text: str) -> None:
    """Writes a line to stderr, past Python's buffer and its lock where possible, so that this process can end although
    the write blocks.
    """
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
