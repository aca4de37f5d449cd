"""Tests what is asked of metadata servers, of Slurm and of a file, against servers and commands that answer as the real
ones do, hang, or answer nonsense.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.metadata import PREEMPTED, REBALANCE, SPOT, MetadataServer
from chaos_lightning.machine import notice_sources
from chaos_lightning.machine.notice_sources import Look, looks_of
from chaos_lightning.machine.notices import GOOGLES_GRACE_S, MachineNotice, NoAnswerError, NoticePlan
from chaos_lightning.machine.process_table import process_began

TOKEN = "/latest/api/token"
TERMINATE = {"action": "terminate", "time": "2030-03-17T17:46:40Z"}
END = 1_900_000_000.0


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as made:
        yield made


def look_of(text: str, **environ: str) -> Look:
    (look,) = looks_of(NoticePlan.read(text), environ).values()
    return look


# ------------------------------------------------------------------------------------------------ AWS


def test_aws_is_asked_with_one_token_until_there_is_a_notice(server: MetadataServer) -> None:
    look = look_of(f"aws:{server.base}")
    assert [look(), look()] == [None, None]
    server.set(spot=TERMINATE)
    assert look() == MachineNotice("aws", "spot notice of AWS (terminate)", END)
    assert server.asked == [("PUT", TOKEN), *[("GET", SPOT)] * 3]
    server.set(spot=None)
    assert look() is None, "it was withdrawn"


def test_a_token_that_has_expired_is_replaced(server: MetadataServer) -> None:
    look = look_of(f"aws:{server.base}")
    assert look() is None
    server.tokens.clear()
    server.set(spot=TERMINATE)
    assert look() is not None
    assert server.asked[2:] == [("GET", SPOT), ("PUT", TOKEN), ("GET", SPOT)]


def test_a_recommendation_to_rebalance_counts_if_it_is_wanted(server: MetadataServer) -> None:
    alone, both = look_of(f"aws:{server.base}"), look_of(f"aws-rebalance:{server.base}")
    server.set(rebalance={"noticeTime": "2030-03-17T17:46:40Z"})
    assert alone() is None
    assert ("GET", REBALANCE) not in server.asked
    assert both() == MachineNotice("aws-rebalance", "rebalance recommendation of AWS")
    server.set(spot=TERMINATE)
    found = both()
    assert found is not None
    assert found.taken_at == END, "the spot notice says more"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fails", "answered by 503 and no token"),
        ("foreign", "answered by 200 and no token; is this AWS's server"),
        ("hangs", "does not answer as it should"),
    ],
)
def test_aws_that_fails_is_no_notice(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    monkeypatch.setattr(notice_sources, "ANSWER_S", 0.05)
    look = look_of(f"aws:{server.base}")
    server.set(fault=fault)
    with pytest.raises(NoAnswerError, match=words):
        look()


def test_aws_that_fails_behind_its_token_is_no_notice(server: MetadataServer) -> None:
    look = look_of(f"aws:{server.base}")
    assert look() is None
    server.set(fault="fails")
    with pytest.raises(NoAnswerError, match="GET spot/instance-action was answered by 503; expected 200 or 404"):
        look()
    server.set(fault="foreign")
    with pytest.raises(NoAnswerError, match="Please log in"):
        look()


def test_nobody_at_the_address_is_named() -> None:
    with MetadataServer() as gone:
        base = gone.base
    with pytest.raises(NoAnswerError, match=rf"{base} does not answer as it should \(.*refused"):
        look_of(f"aws:{base}")()


def test_a_proxy_of_the_environment_is_not_asked(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert look_of(f"aws:{server.base}")() is None


# ------------------------------------------------------------------------------------------------ Google


def test_google_is_asked_to_answer_when_it_changes(server: MetadataServer) -> None:
    look = look_of(f"gcp:{server.base}")
    assert look() is None, "the first answer comes at once"
    server.set(preempted="TRUE")
    before = time.time()
    found = look()
    assert found is not None
    assert before <= found.taken_at - GOOGLES_GRACE_S <= time.time()
    assert [path for _, path in server.asked] == [
        PREEMPTED,
        f"{PREEMPTED}?wait_for_change=true&timeout_sec=30&last_etag=1",
    ]
    assert look() == found, "it is not put off by being asked again"
    server.set(preempted="FALSE")
    assert look() is None, "it was withdrawn"


def test_google_that_holds_back_its_answer_answers_nothing_new(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_sources, "HANGS_S", 0.0)
    look = look_of(f"gcp:{server.base}")
    assert [look() for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fails", "was answered by 503; expected 200 of Google's server"),
        ("foreign", "was answered by 200; expected 200 of Google's server"),
        ("hangs", "does not answer as it should"),
    ],
)
def test_google_that_fails_is_no_notice(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    monkeypatch.setattr(notice_sources, "ANSWER_S", 0.05)
    look = look_of(f"gcp:{server.base}")
    server.set(fault=fault)
    with pytest.raises(NoAnswerError, match=words):
        look()
    server.set(fault="", preempted="MAYBE")
    with pytest.raises(NoAnswerError, match="'MAYBE'; expected TRUE or FALSE"):
        look()


# ------------------------------------------------------------------------------------------------ this machine


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Puts commands of these names, as shell scripts, in front of PATH."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_end_of_a_slurm_job_is_asked_of_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    commands(tmp_path / "bin", monkeypatch, squeue=f'echo "$SLURM_TIME_FORMAT $@" > {said}; cat {tmp_path}/end')
    look = look_of("slurm", SLURM_JOB_ID="42", SLURM_JOB_END_TIME="1")
    (tmp_path / "end").write_text("2030-03-17T17:46:40\n")
    found = look()
    assert found is not None
    assert (found.source, found.why) == ("slurm", "end of Slurm job 42")
    assert said.read_text() == "standard --noheader --jobs=42 --format=%e\n"
    (tmp_path / "end").write_text("2030-03-17T18:46:40\n")
    later = look()
    assert later is not None
    assert later.taken_at == found.taken_at + 3600.0, "somebody has raised the time limit"
    (tmp_path / "end").write_text("N/A\n")
    assert look() is None


def test_until_squeue_answers_the_environments_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, squeue="echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1")
    look = look_of("slurm", SLURM_JOB_ID="42", SLURM_JOB_END_TIME="1900000000")
    assert look() == MachineNotice("slurm", "end of Slurm job 42", END)
    with pytest.raises(NoAnswerError, match=r"squeue failed \(slurm_load_jobs error: Unable to contact"):
        look_of("slurm", SLURM_JOB_ID="42")()
    commands(tmp_path, monkeypatch, squeue="echo N/A")
    assert look() is None
    commands(tmp_path, monkeypatch, squeue="exit 3")
    with pytest.raises(NoAnswerError, match=r"squeue failed \(exit code 3\)"):
        look()


def test_squeue_that_hangs_or_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_sources, "COMMAND_S", 0.05)
    commands(tmp_path, monkeypatch, squeue="exec sleep 60")
    with pytest.raises(NoAnswerError, match=r"squeue failed \(.*timed out"):
        look_of("slurm", SLURM_JOB_ID="42")()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(NoAnswerError, match=r"squeue failed \(.*No such file"):
        look_of("slurm", SLURM_JOB_ID="42")()


def test_slurm_outside_of_slurm_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert looks_of(NoticePlan.read("slurm"), {}) == {}
    assert "notice=slurm is not honoured: this process is in no Slurm job" in caplog.text


def test_a_file_is_a_notice_as_long_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    look = look_of(f"file:{path}")
    assert look() is None
    path.touch()
    assert look() == MachineNotice("file", f"file {path}")
    path.write_text("@1900000000")
    assert look() == MachineNotice("file", f"file {path}", END)
    path.unlink()
    assert look() is None


def test_a_deadline_counts_from_the_start_of_the_process() -> None:
    found = look_of("deadline:8h")()
    assert found is not None
    assert found.taken_at == pytest.approx(process_began() + 28800.0, abs=0.5)
    assert process_began() < time.time()


def test_sigterm_is_no_source_that_is_asked() -> None:
    assert looks_of(NoticePlan.read("sigterm:30s"), {}) == {}
