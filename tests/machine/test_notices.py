"""Tests how notices that a machine will be taken away are read, and when a member leaves because of them."""

from __future__ import annotations

import re
import time

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine import notices
from chaos_lightning.machine.notices import (
    LEAD_S,
    REQUEUE_S,
    Listener,
    MachineNotice,
    NoAnswerError,
    NoticePlan,
    NoticeVerdict,
)
from chaos_lightning.settings import EngineConfig, absolute_notice

NOW = 1_900_000_000.0
"""A time in 2030, Unix seconds."""

# ------------------------------------------------------------------------------------------------ the setting


def test_sources_are_joined_by_a_plus_which_a_zone_may_have_too() -> None:
    plan = NoticePlan.read("aws:http://127.0.0.1:8080+deadline:2030-01-31T18:00:00+02:00+file:/run/a-b+lead:1m30s")
    assert plan.sources == {
        "aws": "http://127.0.0.1:8080",
        "deadline": "2030-01-31T18:00:00+02:00",
        "file": "/run/a-b",
    }
    assert plan.lead_s == 90.0
    assert NoticePlan.read("gcp, slurm:requeue").sources == {"gcp": "", "slurm": "requeue"}
    assert (NoticePlan.read("").sources, NoticePlan.read("").lead_s) == ({}, LEAD_S)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("azure", "'azure' is no source of notices; expected some of aws, aws-rebalance, gcp, slurm, sigterm, file,"),
        ("aws+azure", "'azure' is no source of notices"),
        ("aws+gcp+aws", "aws is given twice; expected it once"),
        ("aws:169.254.169.254", "'aws:169.254.169.254': expected aws or aws:http://HOST:PORT"),
        ("gcp:https://a", "'gcp:https://a': expected gcp or gcp:http://HOST:PORT"),
        ("gcp:http://a/b", "'gcp:http://a/b': expected gcp or gcp:http://HOST:PORT"),
        ("aws:http://a:port", "'aws:http://a:port': expected aws or aws:http://HOST:PORT"),
        ("slurm:again", "'slurm:again': expected slurm or slurm:requeue"),
        ("sigterm", "'sigterm': expected sigterm:TIME, a duration such as 90s, 30m or 1h30m"),
        ("sigterm:30", "'sigterm:30': expected sigterm:TIME, a duration such as 90s, 30m or 1h30m"),
        ("file:", "'file:': expected file:PATH"),
        ("deadline:soon", "'deadline:soon': expected deadline:TIME, a duration such as 90s, 30m or 1h30m, or a time"),
        ("deadline:0s", "'deadline:0s': expected deadline:TIME"),
        ("deadline:@nan", "'deadline:@nan': expected deadline:TIME"),
        ("deadline:1.2.3h", "'deadline:1.2.3h': expected deadline:TIME"),
        ("deadline:" + "9" * 400 + "d", "expected deadline:TIME"),
        ("lead:fast", "'lead:fast': expected lead:TIME"),
    ],
)
def test_a_wrong_setting_says_what_was_given_and_what_is_expected(given: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as error:
        EngineConfig(notice=given)
    assert str(error.value).startswith("notice='")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("0.5d", 43200), ("8h", 28800), ("1m1s", 61), ("1.5s", 1.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert notices.read_duration(text) == seconds
    assert notices.read_deadline(text, NOW) == NOW + seconds


def test_times_with_and_without_a_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-2")  # two hours before Greenwich
    time.tzset()
    try:
        assert notices.read_time("2030-03-17T19:46:40") == NOW
    finally:
        monkeypatch.undo()
        time.tzset()
    for text in ("2030-03-17T17:46:40Z", "2030-03-17T19:46:40+02:00", "@1900000000"):
        assert notices.read_deadline(text, 5.0) == NOW


def test_for_workers_a_duration_is_a_time_and_a_path_is_absolute() -> None:
    plan = NoticePlan.read("deadline:8h+file:leave+aws+lead:5m")
    text = plan.absolute(NOW, "/job")
    assert text == "deadline:@1900028800.000+file:/job/leave+aws+lead:300.000000s"
    assert NoticePlan.read(text).absolute(NOW + 1000.0, "/elsewhere") == text
    assert absolute_notice("aws") == "aws"
    assert absolute_notice("") == ""


def test_sigterm_with_a_grace_time_is_a_notice_and_other_signals_are_none() -> None:
    plan = NoticePlan.read("sigterm:10m+lead:1m")
    assert plan.on_signal("SIGTERM", NOW) == MachineNotice("sigterm", "end of the grace time of SIGTERM", NOW + 600.0)
    assert plan.on_signal("SIGINT", NOW) is None
    assert [plan.waits_s(name) for name in ("SIGTERM", "SIGINT")] == [540.0, 0.0]
    short = NoticePlan.read("sigterm:30s")
    assert short.waits_s("SIGTERM") == 0.0
    assert short.on_signal("SIGTERM", NOW) is not None
    assert NoticePlan.read("aws").on_signal("SIGTERM", NOW) is None


# ------------------------------------------------------------------------------------------------ answers


def test_awss_documents() -> None:
    body = '{"action": "terminate", "time": "2030-03-17T17:46:40Z"}'
    assert notices.spot_notice(body) == MachineNotice("aws", "spot notice of AWS (terminate)", NOW)
    assert notices.spot_notice('{"action": "hibernate"}').taken_at == 0.0
    assert notices.spot_notice('{"action": "stop", "time": "later"}').taken_at == 0.0
    rebalance = notices.rebalance_notice('{"noticeTime": "2030-03-17T17:46:40Z"}')
    assert rebalance == MachineNotice("aws-rebalance", "rebalance recommendation of AWS")


@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", "null", '{"action": 1}', '{"time": "2030-03-17T17:46:40Z"}', "[" * 100_000, '"action"']
)
def test_nonsense_is_no_notice(body: str) -> None:
    """A page of a login portal, or of another server at that address, must not end a training."""
    with pytest.raises(NoAnswerError, match=r"it answered .*; expected"):
        notices.spot_notice(body)
    with pytest.raises(NoAnswerError, match=r"it answered .*; expected"):
        notices.rebalance_notice(body)
    with pytest.raises(NoAnswerError, match=r"it answered .*; expected TRUE or FALSE"):
        notices.preempted(body)


def test_googles_words() -> None:
    assert [notices.preempted(word) for word in ("TRUE", "FALSE", "TRUE\n")] == [True, False, True]


def test_slurms_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert notices.slurm_end("2030-03-17T17:46:40\n", "7") == MachineNotice("slurm", "end of Slurm job 7", NOW)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [notices.slurm_end(word, "7") for word in ("N/A", "NONE", "Unknown")] == [None] * 3
    for word in ("", "slurm_load_jobs error"):
        with pytest.raises(NoAnswerError, match="squeue printed"):
            notices.slurm_end(word, "7")


def test_a_file_may_hold_a_time() -> None:
    assert notices.file_notice("/run/leave", "") == MachineNotice("file", "file /run/leave")
    assert notices.file_notice("/run/leave", "2030-03-17T17:46:40Z\n").taken_at == NOW
    assert notices.file_notice("/run/leave", "now, please").taken_at == 0.0


# ------------------------------------------------------------------------------------------------ decisions


def listener(lead_s: float = 120.0, every_s: float = 5.0) -> Listener:
    return Listener("aws", every_s, lead_s)


def notice(in_s: float) -> MachineNotice:
    return MachineNotice("aws", "spot notice of AWS (terminate)", NOW + in_s)


def test_a_notice_two_minutes_ahead_is_a_leave_at_once() -> None:
    one = listener()
    assert one.answered(None, NOW - 5) == NoticeVerdict(wait_s=5.0)
    assert one.answered(notice(118), NOW) == NoticeVerdict(leave="spot notice of AWS (terminate), in 118 s")


def test_one_of_unknown_time_is_a_leave_at_once() -> None:
    assert listener().answered(MachineNotice("file", "file /run/leave"), NOW).leave == "file /run/leave"


def test_a_late_one_is_a_leave_at_once_and_says_so() -> None:
    assert listener().answered(notice(-3), NOW).leave == "spot notice of AWS (terminate), 3 s ago"


def test_until_its_lead_the_member_trains_on_and_says_so_once() -> None:
    one = listener(every_s=30.0)
    first = one.answered(notice(3600), NOW)
    assert first == NoticeVerdict(
        wait_s=30.0, news=("notice: spot notice of AWS (terminate), in 60 min; this member leaves 2 min before",)
    )
    assert one.answered(notice(3600), NOW + 30) == NoticeVerdict(wait_s=30.0)
    assert one.answered(notice(3600), NOW + 3470).wait_s == 10.0, "no later than it is due"
    assert one.answered(notice(3600), NOW + 3480).leave


def test_three_long_steps_are_left_for() -> None:
    """The deadline is five minutes ahead, and a step takes a minute and a half: the member leaves before there is too
    little time for three steps.
    """
    one = listener()
    assert not one.answered(notice(300), NOW, step_s=90.0).leave
    assert one.answered(notice(300), NOW + 30, step_s=90.0).leave
    assert not listener().answered(notice(300), NOW + 30, step_s=1.0).leave


def test_a_notice_that_is_withdrawn_is_forgotten() -> None:
    one = listener()
    one.answered(notice(600), NOW)
    gone = one.answered(None, NOW + 5)
    assert gone == NoticeVerdict(
        wait_s=5.0, news=("the notice is withdrawn (spot notice of AWS (terminate)); this member stays",)
    )
    assert not one.answered(None, NOW + 600).leave
    assert one.answered(notice(700), NOW + 600).leave, "it may come again"


def test_one_that_moves_is_told_again() -> None:
    one = listener()
    one.answered(notice(600), NOW)
    assert one.answered(notice(600.5), NOW).news == ()
    assert "in 2 h" in one.answered(notice(7200), NOW).news[0]
    assert not one.answered(notice(7200), NOW + 590).leave
    assert one.answered(notice(120), NOW).leave, "a preemption moves the end forward"


def test_a_source_that_fails_is_told_once_asked_less_often_and_heard_again() -> None:
    one = listener()
    first = one.failed("no route", NOW)
    assert first.news == ("notice=aws is not heard: no route. It is asked again; meanwhile no notice of it can come",)
    pauses = [first.wait_s, *(one.failed("no route", NOW).wait_s for _ in range(5))]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert one.failed("no route", NOW).news == ()
    assert one.answered(None, NOW) == NoticeVerdict(wait_s=5.0, news=("notice=aws is heard again",))
    assert one.failed("no route", NOW).news != ()


def test_a_notice_counts_on_if_its_source_is_not_heard_any_more() -> None:
    one = listener()
    one.answered(notice(600), NOW)
    lost = one.failed("timed out", NOW + 5)
    assert lost.news == ("notice=aws is not heard: timed out. It is asked again; its last notice counts on",)
    assert one.failed("timed out", NOW + 475).wait_s == 5.0
    assert one.failed("timed out", NOW + 480).leave == "spot notice of AWS (terminate), in 2 min"


# ------------------------------------------------------------------------------------------------ Slurm's queue


@pytest.mark.parametrize(
    ("text", "source", "last", "environ", "seconds"),
    [
        ("slurm:requeue", "slurm", True, {"SLURM_PROCID": "3"}, 0.0),
        ("slurm:requeue", "slurm", False, {"SLURM_PROCID": "0"}, 120.0 - REQUEUE_S),
        ("slurm:requeue", "slurm", False, {"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, None),
        ("slurm:requeue", "slurm", False, {"SLURM_PROCID": "1"}, None),
        ("slurm", "slurm", True, {"SLURM_PROCID": "0"}, None),
        ("slurm:requeue+aws", "aws", True, {"SLURM_PROCID": "0"}, None),
        ("slurm:requeue", "", True, {"SLURM_PROCID": "0"}, None),
    ],
)
def test_who_has_the_job_queued_again_and_when(
    text: str, source: str, last: bool, environ: dict[str, str], seconds: float | None
) -> None:
    taken = MachineNotice(source, "end of Slurm job 7", NOW + 120.0) if source else None
    assert notices.requeues_in_s(NoticePlan.read(text), taken, NOW, environ, last=last) == seconds


def test_a_setting_reaches_the_engine_by_its_name() -> None:
    config = EngineConfig.build({}, {"CHAOS_NOTICE": "aws:http://127.0.0.1:1+lead:5m"})
    assert config.notice_plan.sources == {"aws": "http://127.0.0.1:1"}
    assert config.notice_plan.lead_s == 300.0
