"""What a member says on its console when others come and go."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.member.telling import WAITING_LINES, Teller, console, lines, progress_line
from chaos_lightning.protocol.types import NO_VIEW, Member, Progress, SourceProgress, View, ViewId


def view(*ids: str, reason: str = "") -> View:
    members = tuple(Member(id=i, name=i, host="h", address="h", port=1) for i in ids)
    return View(id=ViewId(1, 1), predecessor=NO_VIEW, members=members, reason=reason)


def test_each_change_is_one_line_and_ranks_follow() -> None:
    three = view("a~1", "b~2", "c~3")
    assert lines(None, three, "b~2", carried=False) == ["I am rank 1 of 3"]
    assert lines(view("a~1", "b~2"), three, "b~2", carried=True, replays={"c~3"}) == [
        "c~3 joins by replay: 3 members",
        "I am rank 1 of 3",
    ]
    assert lines(three, view("b~2", "c~3"), "b~2", carried=True) == ["a~1 left: 2 members", "I am rank 0 of 2"]
    died = view("a~1", reason="b~2: no heartbeat for 0.34 s (limit 0.3 s); nobody holds all: reduced again")
    assert lines(view("a~1", "b~2"), died, "a~1", carried=False) == [
        "b~2 is out (no heartbeat for 0.34 s (limit 0.3 s)): 1 member",
        "I am rank 0 of 1",
    ]


@given(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1), st.lists(st.sampled_from("abcdef"), unique=True))
def test_who_comes_or_goes_is_named_once(old: list[str], new: list[str]) -> None:
    said = lines(view(*old), view(*new), "me", carried=True)
    assert sorted(line.split()[0] for line in said) == sorted(set(old) ^ set(new))


def test_a_newcomer_says_how_far_it_is() -> None:
    sources = (SourceProgress("a~1", 1, 1.0), SourceProgress("b~2", 1, 1.0))
    now = Progress("pull", 120 << 20, 512 << 20, (392 << 20) * 8 / 8, sources=sources)
    assert progress_line(now) == "fetching the training state: 120 of 512 MiB from a~1, b~2, about 8 s left"


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
