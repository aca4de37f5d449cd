"""Tests when a member tells the user what it waits for while no scheduler serves it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from chaos_lightning.errors import DeadlineError, RestartError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member import waiting
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.waiting import Waiting
from chaos_lightning.protocol.types import NO_VIEW, Notice, Refused, View, ViewId

LOST = "lost: no scheduler answered"


def member(severed: Sequence[str] = ()) -> tuple[Mailbox, Waiting]:
    mail = Mailbox("m", endpoint="h:1")
    return mail, Waiting(mail, EventLog.in_directory(None, "m"), lambda: severed)


def wait(mail: Mailbox, seconds: float = 0.05) -> str:
    """Waits for something that never comes; returns the text of the DeadlineError."""
    with mail.changed, pytest.raises(DeadlineError) as caught:
        mail.wait(lambda: False, "the commit of slot 5 (step)", time.monotonic() + seconds)
    return str(caught.value)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes members report links that are down at once, and slow slots only after 30 s."""
    monkeypatch.setattr(waiting, "SEVERED_S", 0.0)
    monkeypatch.setattr(waiting, "SLOW_S", 30.0)


@pytest.mark.usefixtures("hasty")
def test_it_is_said_once_per_loss_of_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    mail, speaker = member(["a~1", "b~2"])
    for _ in range(2):
        speaker.stream(LOST)
        wait(mail)
        wait(mail)
        speaker.stream("connected")
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    for part in (
        "m: waits for the commit of slot 5 (step): no scheduler serves it at h:1 (no scheduler answered)",
        "and no link to a~1, b~2 stands",
    ):
        assert part in caplog.messages[0]
    speaker.over("the job goes on after step 4")
    assert caplog.messages[2:] == ["m: waiting is over, the job goes on after step 4"]


def test_a_command_that_the_scheduler_advises_names_the_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    mail, speaker = member()
    speaker.hear(Notice("end the job (`chaos-lightning reset --force`)", waiting=True))
    assert caplog.messages == ["m: end the job (`chaos-lightning reset --endpoint h:1 --force`)"]
    assert mail.notice == "end the job (`chaos-lightning reset --endpoint h:1 --force`)"


@pytest.mark.usefixtures("hasty")
def test_a_slow_slot_before_does_not_silence_it_when_a_link_is_down_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "SLOW_S", 0.0)
    severed: list[str] = []
    mail, speaker = member(severed)
    speaker.stream(LOST)
    wait(mail)
    speaker.over("the job goes on after step 4")
    wait(mail)
    severed.append("a~1")
    for _ in range(2):
        wait(mail)
        wait(mail)
        speaker.over("the job goes on after step 5")
    said = [m for m in caplog.messages if "no scheduler serves it" in m]
    assert ["no link to a~1" in m for m in said] == [False, True, True]


@pytest.mark.usefixtures("hasty")
def test_who_leaves_or_is_refused_says_nothing_of_the_kind(caplog: pytest.LogCaptureFixture) -> None:
    mail, speaker = member(["a~1"])
    speaker.stream(LOST)
    with mail.changed, pytest.raises(DeadlineError):
        mail.wait(lambda: False, "release", time.monotonic() + 0.05, tells=False)
    assert caplog.messages == []
    mail, speaker = member(["a~1"])
    speaker.hear(Refused("m is in the job already", True))
    speaker.stream("lost: the scheduler said: m is in the job already")
    assert "no scheduler serves it" not in wait(mail)
    assert caplog.messages == ["m: m is in the job already"]


@pytest.mark.usefixtures("hasty")
def test_a_member_that_a_foreign_scheduler_has_refused_says_that_it_is_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mail, speaker = member(["a~1"])
    mail.post(view=View(ViewId(1, 1), NO_VIEW, ()))
    speaker.hear(Refused("the chain is lost", True))
    speaker.stream("lost: the scheduler said: the chain is lost")
    speaker.stream(LOST)
    wait(mail)
    assert caplog.messages[0] == "m: the chain is lost"
    assert "no scheduler serves it at h:1 (no scheduler answered), and no link to a~1 stands" in caplog.messages[1]


@pytest.mark.usefixtures("hasty")
def test_what_happens_while_it_is_said_is_not_missed() -> None:
    """Other threads can write into the mailbox while a slow terminal delays the message, and the wait sees it."""
    mail, speaker = member()
    speaker.stream(LOST)
    said: list[bool] = []

    def slow(*_: object) -> None:
        said.append(True)
        poster = threading.Thread(target=lambda: mail.post(left="let go"))
        poster.start()
        poster.join(10)
        assert not poster.is_alive()

    mail.on_lost = slow
    with mail.changed:
        mail.wait(lambda: bool(mail.left), "release", time.monotonic() + 30)
    assert said == [True]


@pytest.mark.usefixtures("hasty")
def test_nothing_is_said_while_the_scheduler_is_there_or_all_links_stand(caplog: pytest.LogCaptureFixture) -> None:
    """A waiting member says nothing while it has a scheduler, or while all its links are up."""
    mail, speaker = member(["a~1"])
    speaker.stream("connected")
    wait(mail)
    mail, speaker = member()
    speaker.stream(LOST)
    wait(mail)
    speaker.over("the job goes on after step 4")
    assert caplog.messages == []


def test_a_slow_slot_is_told_of_though_all_links_of_this_member_stand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slot that is slow without a scheduler is reported even if all of this member's links are up, since others' may
    be down.
    """
    monkeypatch.setattr(waiting, "SLOW_S", 0.0)
    mail, speaker = member()
    speaker.stream(LOST)
    wait(mail)
    (said,) = caplog.messages
    assert "no scheduler serves it at h:1 (no scheduler answered); it goes on" in said


def test_the_error_after_a_vain_wait_names_the_scheduler_that_was_not_reached() -> None:
    mail, speaker = member()
    speaker.stream(LOST)
    assert "; no scheduler serves it (no scheduler answered);" in wait(mail)
    speaker.stream("connected")
    assert "no scheduler serves it" not in wait(mail)


def test_who_waits_when_the_job_ends_for_all_hears_why_in_an_error_of_its_own() -> None:
    mail, _ = member()
    mail.post(ejected=("layers 0 and 1 are lost", False), ended=True, left="the job that it was in is ended")
    with mail.changed, pytest.raises(RestartError, match=r"^layers 0 and 1 are lost$"):
        mail.wait(lambda: False, "the commit of slot 5 (step)", time.monotonic() + 5.0)
    mail.reset()
    assert not mail.ended
    mail.check()


def test_a_newcomer_says_in_few_words_that_a_scheduler_starts_and_later_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mail, speaker = member()
    speaker.stream("waits: no scheduler answered at h:1: Connection refused")
    for waited_s in (1.0, 2.5, 3.5, 9.0, 10.5, 11.5, 16.0):
        mail.on_lost("admission to the job", waited_s, 600.0 - waited_s)
    calm, first, second = caplog.messages
    assert calm == "m: waits for admission to the job: the scheduler at h:1 does not answer yet"
    for line, left_s in ((first, 590), (second, 584)):
        assert "no scheduler answered at h:1: Connection refused. Start the scheduler, or the node" in line
        assert line.endswith(f"gives up in {left_s} s")
