"""Tests how a process follows its sources of notices in threads: it leaves once, says why, and a server that hangs
holds nothing up.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from until_support import DEADLINE_S, until

from benchmarks.metadata import PREEMPTED, SPOT, MetadataServer
from chaos_lightning.events.events import EventLog, Record, read_events
from chaos_lightning.events.registry import problems
from chaos_lightning.machine import notice_sources, notice_watch, notices
from chaos_lightning.machine.notice_watch import NoticeWatch
from chaos_lightning.machine.notices import NoticePlan


class Watched:
    """Watch of a member called "a", with all that it says and does."""

    def __init__(self, folder: Path, text: str, over: Callable[[], bool], step_s: float) -> None:
        self.left: queue.Queue[str] = queue.Queue()
        self.log = EventLog.in_directory(folder, "a")
        self.folder = folder
        plan = NoticePlan.read(text)
        self.watch = NoticeWatch(plan, "a", self.log, self.left.put, over, lambda: step_s)

    def reason(self) -> str:
        return self.left.get(timeout=DEADLINE_S)

    def events(self, name: str) -> list[Record]:
        return [r for r in read_events(self.folder) if r.name == name]

    def hears(self, words: str) -> None:
        until(lambda: any(words in r["text"] for r in self.events("notice")), words)


Start = Callable[..., Watched]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Function that starts a watch; all sources are asked often."""
    monkeypatch.setattr(notice_watch, "EVERY_S", dict.fromkeys(notice_sources.EVERY_S, 0.01))
    monkeypatch.setattr(notices, "LONGEST_PAUSE_S", 0.05)
    made: list[Watched] = []

    def begin(text: str, *, over: Callable[[], bool] = lambda: False, step_s: float = 0.0) -> Watched:
        made.append(Watched(tmp_path / f"events-{len(made)}", text, over, step_s))
        made[-1].watch.start()
        return made[-1]

    yield begin
    for one in made:
        one.watch.close()
        one.log.close()
        assert [text for r in read_events(one.folder) for text in problems(r.name, r.fields)] == []


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as made:
        yield made


def spot(in_s: float) -> dict[str, str]:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + in_s))
    return {"action": "terminate", "time": at}


def test_a_spot_notice_is_a_leave_that_says_why(
    start: Start, server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    one = start(f"aws:{server.base}")
    server.wait_asked(SPOT)
    assert one.watch.reason == ""
    server.set(spot=spot(110))
    reason = one.reason()
    assert reason.startswith("spot notice of AWS (terminate), in 1")
    assert one.watch.reason == reason
    (taken,) = one.events("notice_taken")
    assert (taken["source"], taken["reason"]) == ("aws", reason)
    assert 60 < taken["left_s"] < 112
    assert f"a leaves the job after the present step: {reason}" in caplog.text


def test_a_preemption_is_heard_at_once_though_the_server_holds_its_answer_back(
    start: Start, server: MetadataServer
) -> None:
    one = start(f"gcp:{server.base}")
    server.wait_asked(f"{PREEMPTED}?wait_for_change=true")
    server.set(preempted="TRUE")
    assert one.reason().startswith("preemption by Google Cloud, in ")


def test_of_several_notices_one_counts(start: Start, server: MetadataServer, tmp_path: Path) -> None:
    flag = tmp_path / "leave"
    one = start(f"file:{flag}+aws:{server.base}+deadline:9h")
    one.hears("this member leaves 2 min before")
    flag.touch()
    server.set(spot=spot(110))
    reason = one.reason()
    assert reason == f"file {flag}" or reason.startswith("spot notice")
    until(lambda: not following(), "the end of all threads")
    assert one.left.empty()
    assert len(one.events("notice_taken")) == 1


def following() -> list[str]:
    """Returns the names of threads that follow a source which may still end by itself."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("chaos-notice-file", "chaos-notice-aws"))]


def test_a_notice_that_is_withdrawn_in_time_changes_nothing(start: Start, server: MetadataServer) -> None:
    one = start(f"aws:{server.base}+lead:10s")
    server.set(spot=spot(3600))
    one.hears("notice: spot notice of AWS (terminate), in ")
    server.set(spot=None)
    one.hears("the notice is withdrawn (spot notice of AWS (terminate)); this member stays")
    assert one.left.empty()
    server.set(spot=spot(5))
    assert one.reason()


def test_a_server_that_hangs_holds_up_no_other_source(
    start: Start, server: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_sources, "ANSWER_S", DEADLINE_S)
    server.set(fault="hangs")
    one = start(f"aws:{server.base}+file:{tmp_path / 'leave'}")
    server.wait_asked("/latest/api/token")
    (tmp_path / "leave").touch()
    assert one.reason() == f"file {tmp_path / 'leave'}"


def test_a_server_that_hung_is_heard_again(
    start: Start, server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_sources, "ANSWER_S", 0.05)
    server.set(fault="hangs")
    one = start(f"aws:{server.base}")
    one.hears("notice=aws is not heard: ")
    monkeypatch.setattr(notice_sources, "ANSWER_S", DEADLINE_S)
    server.set(fault="")
    one.hears("notice=aws is heard again")
    server.set(spot=spot(100))
    assert one.reason()


def test_nonsense_is_told_and_does_not_end_the_training(start: Start, server: MetadataServer) -> None:
    server.set(spot="<html>")
    one = start(f"aws:{server.base}")
    one.hears("""notice=aws is not heard: it answered '<html>'; expected {"action": "terminate\"""")
    server.wait_asked(SPOT, 3)
    assert one.left.empty()
    assert len(one.events("notice")) == 1, "it is told once"


def test_a_deadline_ends_the_training_in_time(start: Start) -> None:
    assert start(f"deadline:@{time.time() + 5.1}+lead:5s").reason().startswith("deadline, in ")


def test_a_deadline_that_allows_three_steps_is_left_before_that(start: Start) -> None:
    """The deadline is 200 s ahead, beyond the lead; three steps take 240 s."""
    assert start(f"deadline:@{time.time() + 200}", step_s=80.0).reason()


def test_sigterm_is_followed_until_its_grace_time_allows_no_more(start: Start) -> None:
    one = start("sigterm:5.1s+lead:5s")
    assert one.watch.heed("SIGTERM")
    assert one.reason().startswith("end of the grace time of SIGTERM, in ")
    (taken,) = one.events("notice_taken")
    assert taken["source"] == "sigterm"
    one.hears("this member leaves 5 s before")
    assert not one.watch.heed("SIGINT")


def test_a_notice_behind_the_jobs_end_changes_nothing(start: Start, tmp_path: Path) -> None:
    """A member that is out of its job is not asked to leave it; if it joins again, it is."""
    asked: list[bool] = []
    over = [True]
    (tmp_path / "leave").touch()
    one = start(f"file:{tmp_path / 'leave'}", over=lambda: asked.append(True) or over[0])
    until(lambda: len(asked) > 2, "several looks")
    assert one.left.empty()
    assert one.watch.reason == ""
    assert one.events("notice_taken") == []
    over[0] = False
    assert one.reason() == f"file {tmp_path / 'leave'}"


def test_a_watch_that_is_closed_says_nothing_more(start: Start, tmp_path: Path) -> None:
    one = start(f"file:{tmp_path / 'leave'}")
    one.watch.close()
    (tmp_path / "leave").touch()
    until(lambda: not following(), "the end of the thread")
    assert one.left.empty()
    assert one.watch.heed("SIGTERM") is False


# ------------------------------------------------------------------------------------------------ Slurm's queue


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of Slurm for a job that ends in 20 s; returns the file in which scontrol writes its arguments."""
    said = tmp_path / "said"
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 20))
    for name, script in (("squeue", f"echo {end}"), ("scontrol", f'echo "$@" >> {said}')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in (("SLURM_JOB_ID", "42"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    return said


def requeued() -> None:
    """Waits until no thread has a job to queue again."""
    for thread in threading.enumerate():
        if thread.name == "chaos-requeue":
            thread.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("text", "last", "finished", "said"),
    [
        ("slurm:requeue", True, False, "requeue 42\n"),
        ("slurm:requeue", False, False, "requeue 42\n"),
        ("slurm:requeue", True, True, None),
        ("slurm", True, False, None),
    ],
)
def test_a_slurm_job_is_queued_again_if_that_is_wanted(
    start: Start, slurm: Path, text: str, last: bool, finished: bool, said: str | None
) -> None:
    one = start(text)
    assert one.reason().startswith("end of Slurm job 42, in ")
    one.watch.close(last=last, finished=finished)
    one.watch.close(last=last)
    requeued()
    assert (slurm.read_text() if slurm.exists() else None) == said


def test_slurm_that_does_not_queue_the_job_again_is_told(
    start: Start, slurm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (slurm.parent / "scontrol").write_text("#!/bin/sh\necho Requested operation is presently disabled >&2; exit 1\n")
    one = start("slurm:requeue")
    assert one.reason()
    with caplog.at_level(logging.ERROR):
        one.watch.close(last=True)
        requeued()
    assert (
        "Slurm job 42 is not queued again: scontrol failed (Requested operation is presently disabled)" in caplog.text
    )
