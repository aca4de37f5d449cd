"""Tests that a program goes on, even within a progress bar, after its real terminal was closed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, select, signal, sys
from chaos_lightning.machine.signals import ExitSignals
went = []
signals = ExitSignals(lambda number, frame: went.append(number.name))
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
if sys.argv[1] != "unguarded":
    signals.install()
closed = select.poll()
closed.register(os.dup(0), 0)
print("up", flush=True)
while not (closed.poll(100) or went):
    pass
try:
    for _ in range(3):
        sys.stderr.write("\\r 50%")
        sys.stderr.flush()
        print("a line", flush=True)
        os.write(2, b"from C") if sys.argv[1] == "leaves" else None
except OSError as error:
    went.append(f"error {error.errno}")
signals.restore()
with open(sys.argv[2], "w") as told:
    told.write(" ".join(went))
print("after")
"""


@pytest.mark.parametrize(
    ("way", "leader", "expected"),
    [
        ("leaves", True, "SIGHUP"),  # the kernel tells the leader of the terminal's session
        ("nohup", True, ""),
        ("disowned", False, ""),  # nobody tells it, and it writes all the same
        ("unguarded", False, "error 5"),
    ],
)
def test_a_closed_terminal_breaks_no_print(tmp_path: Path, way: str, leader: bool, expected: str) -> None:
    ours, its = pty.openpty()
    told = tmp_path / "told"
    take = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" if leader else ""
    child = subprocess.Popen(
        [sys.executable, "-c", take + PROGRAM, way, str(told)],
        stdin=its, stdout=its, stderr=its, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    os.close(its)
    try:
        said = b""
        while not said.endswith(b"up\r\n"):
            assert select.select([ours], [], [], 60.0)[0], said
            said += os.read(ours, 1024)
    finally:
        os.close(ours)
    code = child.wait(60.0)
    assert told.read_text() == expected
    if way != "unguarded":
        assert code == 0, "nor does what is left in a buffer at the end"
