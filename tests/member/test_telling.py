"""Tests the lines that a member prints on its console when other members come and go."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.machine.console import WAITING_LINES, Teller, console
from chaos_lightning.member.telling import (
    batch_line,
    fetched_line,
    lines,
    progress_line,
)
from chaos_lightning.protocol.types import NO_VIEW, Member, Progress, SourceProgress, View, ViewId


def view(*ids: str, quotas: Sequence[int] = (), **more: Any) -> View:
    given = quotas or [1] * len(ids)
    members = tuple(Member(i, i, host="h", address="h", port=1, quota=q) for i, q in zip(ids, given, strict=True))
    return View(id=ViewId(1, 1), predecessor=NO_VIEW, members=members, **more)


def test_each_change_is_one_line_and_ranks_follow() -> None:
    three = view("a~1", "b~2", "c~3")
    assert lines(None, three, "b~2", carried=False) == ["I am rank 1 of 3"]
    assert lines(view("a~1", "b~2"), three, "b~2", carried=True, replays={"c~3"}) == [
        "c~3 joins by replay: 3 members, 3 samples a step",
        "I am rank 1 of 3",
    ]
    assert lines(three, view("b~2", "c~3"), "b~2", carried=True) == [
        "a~1 left: 2 members, 2 samples a step",
        "I am rank 0 of 2",
    ]
    died = view("a~1", reason="b~2: no heartbeat for 0.34 s (limit 0.3 s); nobody holds all: reduced again")
    assert lines(view("a~1", "b~2"), died, "a~1", carried=False) == [
        "b~2 is out (no heartbeat for 0.34 s (limit 0.3 s)): 1 member, 1 sample a step",
        "I am rank 0 of 1",
    ]


def test_that_all_leave_is_one_line() -> None:
    assert lines(view("a~1", "b~2"), view(), "a~1", carried=True) == ["all members leave"]


def test_a_newcomer_says_how_it_comes_in() -> None:
    came = view("a~1", "b~2", joiners=("b~2",))
    assert lines(None, came, "b~2", carried=False) == [
        "I join by pause: 2 members, 2 samples a step",
        "I am rank 1 of 2",
    ]
    assert lines(None, came, "b~2", carried=False, replays=["b~2"])[0].startswith("I join by replay: 2 members")
    other = view("b~2", "c~3")
    assert lines(view("a~1", "b~2"), other, "b~2", carried=True)[0] == "a~1 left: 2 members"


def test_what_becomes_of_the_batch_is_said_if_it_changes() -> None:
    said = (
        "batch=member: a step takes {} samples now, {} before; batch=fixed keeps the batch, lr_scaling scales the rate"
    )
    two = view("a~1", "b~2", quotas=(4, 6), accumulate=2, joiners=("b~2",))
    assert batch_line(view("a~1", quotas=(4,), accumulate=2), two) == said.format(20, 8)
    assert batch_line(None, two) == said.format(20, 8)
    assert batch_line(two, view("b~2", quotas=(6,), accumulate=2)) == said.format(12, 20)
    assert batch_line(None, view("a~1", "b~2")) == ""
    assert batch_line(view("a~1", "b~2"), view("b~2", "c~3")) == ""


ONE, TWO, SLOW = (
    "a step has 1 sample to divide",
    "a step has 2 micro-batches to divide",
    "a share would hold up the others",
)


@pytest.mark.parametrize(
    ("size", "split", "samples", "shares"),
    [
        (2, "256:171,85", "256 samples", "171, 85"),
        (2, "64/16:2x2", "64 samples", "32, 32"),
        (2, "1:0,1", "1 sample", f"0, 1; idle: 1 of 2 members, since {ONE}"),
        (4, "32/16:1,0,1,0", "32 samples", f"16, 0, 16, 0; idle: 2 of 4 members, since {TWO}"),
        (2, "64/16:4,0", "64 samples", f"64, 0; idle: 1 of 2 members, since {SLOW}"),
        (9, "9:1x9", "9 samples", "1, 1, 1, 1, 1, 1, 1, 1, ..."),
    ],
)
def test_a_batch_of_fixed_size_is_one_line_with_each_members_share(
    size: int, split: str, samples: str, shares: str
) -> None:
    ids = [f"m{n}~1" for n in range(size)]
    now = view(*ids, batch=split)
    *_, last = lines(None, now, ids[0], carried=False)
    assert last == f"a step takes {samples}, whoever is there; by rank: {shares}"
    assert batch_line(None, now) == ""
    assert lines(now, now, ids[0], carried=True) == []


def test_another_split_for_the_same_members_is_a_line() -> None:
    before, after = (view("a~1", "b~2", batch=split) for split in ("4:2x2", "4:3,1"))
    assert lines(before, after, "a~1", carried=True) == ["a step takes 4 samples, whoever is there; by rank: 3, 1"]


@given(*[st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)] * 2)
def test_who_comes_or_goes_is_named_once(old: list[str], new: list[str]) -> None:
    said = lines(view(*old), view(*new), "me", carried=True)
    assert sorted(line.split()[0] for line in said) == sorted(set(old) ^ set(new))


def test_a_newcomer_says_how_far_it_is() -> None:
    sources = (SourceProgress("a~1", 1, 1.0), SourceProgress("b~2", 1, 1.0))
    now = Progress("pull", 120 << 20, 512 << 20, (392 << 20) * 8 / 8, sources=sources)
    line = "fetching the training state: 120 of 512 MiB from a~1, b~2 at 49 MiB/s, about 8 s left"
    assert progress_line(now) == line
    assert progress_line(Progress("prove", 0, 1 << 19, 0.0)) == "fetching the training state: 0 of 512 KiB"
    assert progress_line(Progress("replay", 7, 7, 0.0, 3)) == "replaying what the others train: 3 steps behind"
    there = "the training state is here: 512 MiB from a~1, b~2 in 3.2 s"
    assert fetched_line({"a~1": 256 << 20, "b~2": 256 << 20, "c~3": 0}, 0, 3.2) == there
    assert fetched_line({"a~1": 1 << 20}, 2 << 20, 0.1).endswith("1 MiB from a~1 in 0.1 s, 2 MiB were here")
    assert fetched_line({"a~1": 5000}, 0, 0.002) == "the training state is here: 4.883 KiB from a~1 in 2 ms"


def test_a_console_that_nobody_reads_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    began, free, last = threading.Event(), threading.Event(), threading.Event()
    heard: list[str] = []

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            began.set()
            free.wait(20)
            heard.append(record.getMessage())
            if "left out" in heard[-1]:
                last.set()

    handler = Blocked()
    monkeypatch.setattr(console, "level", logging.INFO)
    console.addHandler(handler)
    try:
        teller = Teller()
        teller.tell("first\x1b[2J")
        assert began.wait(20)
        teller.tell(*(f"line {n}" for n in range(WAITING_LINES + 3)))
        free.set()
        assert last.wait(20)
        teller.close(20)
    finally:
        free.set()
        console.removeHandler(handler)
    assert heard[:2] == [
        "chaos: first\N{REPLACEMENT CHARACTER}[2J",
        "chaos: 3 lines were left out, as nobody read them in time",
    ]
    assert len(heard) == WAITING_LINES + 2


def test_lines_go_on_where_a_handler_or_what_stands_for_stderr_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise LookupError("no such channel")

    class Notebook(io.StringIO):
        def write(self, text: str) -> int:
            if "first" in text:
                raise LookupError("no such cell")
            return super().write(text)

    shown, handler = Notebook(), Raises()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(console, "level", logging.INFO)
    console.addHandler(handler)
    try:
        teller = Teller()
        teller.tell("first", "second")
        teller.close(20)
    finally:
        console.removeHandler(handler)
    assert shown.getvalue() == "chaos: second (a handler of the log raised LookupError('no such channel'))\n"


BASIC = 'logging.basicConfig(format="mine: %(message)s"{})'
CONFIGURED = {
    # Lines of the user's before the first line and before the second one; what is to be on stderr.
    "not at all": ("", "", ["chaos: 1", "chaos: 2"]),
    "before": (BASIC.format(""), "", ["mine: chaos: 1", "mine: chaos: 2"]),
    "before, as Hydra does": (BASIC.format(", level=20"), "", ["mine: chaos: 1", "mine: chaos: 2"]),
    "later": ("", BASIC.format(", level=20"), ["chaos: 1", "mine: chaos: 2"]),
    "later, by a warning": (
        "",
        "logging.warning('w')",
        ["chaos: 1", "WARNING:root:w", "INFO:chaos_lightning.console:chaos: 2"],
    ),
    "for errors only": (BASIC.format(", level=40"), "", []),
    "later, for errors only": ("", BASIC.format(", level=40"), ["chaos: 1"]),
    "off": ("logging.getLogger('chaos_lightning.console').setLevel('WARNING')", "", []),
    "off, with all of ours": ("", "logging.getLogger('chaos_lightning').setLevel('WARNING')", ["chaos: 1"]),
    "off, altogether": ("logging.disable(logging.WARNING)", "", []),
    "a handler for warnings": (BASIC.format("") + "; logging.root.handlers[0].setLevel('WARNING')", "", []),
    "no stderr": ("sys.stderr = None", "", []),
    "another stderr": (
        "import io; sys.stderr = type('Notebook', (io.StringIO,), {'write': sys.stdout.write})()",
        "",
        [],
    ),
}
TELLING = """
import logging, sys
from chaos_lightning.machine.console import Teller
teller = Teller()
for number, user in enumerate(sys.argv[1:], 1):
    exec(user)
    teller.tell(str(number))
    teller.close(30)
"""


@pytest.mark.parametrize("when", CONFIGURED)
def test_lines_come_once_however_logging_is_configured(when: str) -> None:
    first, second, shown = CONFIGURED[when]
    run = subprocess.run([sys.executable, "-c", TELLING, first, second], capture_output=True, text=True, check=True)
    assert run.stderr.splitlines() == shown
    assert run.stdout.splitlines() == (["chaos: 1", "chaos: 2"] if when == "another stderr" else [])


def test_a_process_without_stderr_goes_on() -> None:
    command = [sys.executable, "-c", TELLING + "print('done')", "", ""]
    run = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], capture_output=True, text=True, check=True)
    assert run.stdout == "done\n"


def test_a_terminal_of_40_columns_gets_text_alone() -> None:
    """On a plain terminal the lines have no colours, and overwrite what a progress bar left in the line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    command = [sys.executable, "-c", TELLING, "sys.stderr.write('#' * 38)", ""]
    subprocess.run(command, stderr=theirs, env={**os.environ, "TERM": "dumb"}, check=True)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert shown == "#" * 38 + "".join("\r" + f"chaos: {n}".ljust(39) + "\r\n" for n in (1, 2))
