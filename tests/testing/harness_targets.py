"""Programs that tests of the process harness run as children: they write events, and end in various ways."""

from __future__ import annotations

import os
import signal
import sys
import threading

from chaos_lightning.events.events import EventLog


def member(name: str, steps: int = 3, end: str = "finish") -> None:
    """Logs some steps as a member, then finishes, waits for SIGTERM, or crashes."""
    polite = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: polite.set())
    log = EventLog.in_directory(os.environ["CHAOS_LOG_DIR"], name)
    log.identify(f"{name}~1")
    log.emit("joined", role="founder", seq=0, step=0, view="1.1", head="")
    for step in range(1, steps + 1):
        log.emit(
            "committed", seq=step, kind="step", step=step, header=f"h{step}", prev=f"h{step - 1}" if step > 1 else ""
        )
    print(f"{name} did {steps} steps")
    if end == "crash":
        raise RuntimeError("the dog ate the gradients")
    if end == "wait":
        while not polite.wait(0.05):
            pass
        log.emit("left", reason="SIGTERM")
    log.close()


def imported(name: str) -> None:
    """Logs which of two modules were already loaded when this process began."""
    log = EventLog.in_directory(os.environ["CHAOS_LOG_DIR"], name)
    log.emit("notice", text=",".join(m for m in ("json.tool", "xml.dom.minidom") if m in sys.modules))
    log.close()


def preloading(directory: str) -> None:
    """Runs a child of a fork server with two preloaded modules; prints which of them it found loaded."""
    from chaos_lightning.testing.harness import Harness

    with Harness(directory) as harness:
        harness.start_function("b", imported, "b", preload=("json.tool", "xml.dom.minidom"))
        harness.wait_all()
        print(harness.wait_for("notice")["text"])


if __name__ == "__main__":
    if sys.argv[3] == "preload":
        preloading(sys.argv[1])
    else:
        member(sys.argv[1], int(sys.argv[2]), sys.argv[3])
