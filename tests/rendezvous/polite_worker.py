"""Runs a worker that only writes the signals it gets, one word a line. Arguments: file to write, and how the worker
ends.

"leave" ends well when it is asked to; "fail" ends with an error then; "stay" ignores the first wish.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

path, end = sys.argv[1] + "." + os.environ["LOCAL_RANK"], sys.argv[2]
asked = threading.Event()
wishes: list[int] = []


def say(word: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{word} {os.getpid()}\n".encode())
    os.close(file)


def on_signal(number: int, frame: object) -> None:
    wishes.append(number)
    say(signal.Signals(number).name)
    if end != "stay" or len(wishes) > 1:
        asked.set()


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)
say("start")
asked.wait()
say("end")
sys.exit(3 if end == "fail" else 0)
