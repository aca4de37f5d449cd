"""Tests who defines a job's terms: its living members; dead ones refuse no newcomer, and an operator can end their job
(protocol.md 12b).
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.membership.effects import (
    Answer,
    Chain,
    Closed,
    Gone,
    MessageIn,
    Opened,
    Persist,
    Reset,
    SchedulerDone,
    SchedulerEvent,
    SchedulerTick,
    Send,
    Stored,
)
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Entered,
    Fence,
    FromMember,
    Heartbeat,
    Hello,
    Leave,
    Member,
    Notice,
    OpenLinks,
    Probe,
    Ready,
    Refused,
    Released,
    Settings,
    ToMember,
    Verdict,
    View,
    ViewId,
    Welcome,
)

SMALL, LARGE = (("model", "small"),), (("model", "large"),)
AT = {"a": "there", "b": "there", "c": "here", "d": "here"}


def hello(name: str, *, large: bool = False, pid: int = 0, **changes: object) -> Hello:
    number = pid or ord(name)
    values = {"fingerprint": LARGE if large else SMALL, **changes}
    base = Hello("default", name, AT.get(name, "here"), "10.0.0.9", 1, number, 7, 1, 1, "0.1", SMALL)
    return replace(base, **values)  # type: ignore[arg-type]


class Job:
    """Scheduler with a store whose answers a test chooses; members answer `OpenLinks` by themselves."""

    def __init__(self, chain: Chain | None = None, **rules: object) -> None:
        settings = Settings(**{"min_nodes": 1, "reconnect_grace_s": 1.0, **rules})  # type: ignore[arg-type]
        self.machine = SchedulerMachine(settings, chain or Chain(1, NO_VIEW))
        self.now = 1.0
        self.said: dict[int, list[ToMember]] = {}
        self.conns: dict[str, int] = {}
        self.silent: set[str] = set()
        self.views: list[View] = []
        self.done: list[object] = []
        self.room: int | None = None
        """Number of members whose view fits into a record."""
        self.most_links: int | None = None
        """Number of links that fit into a record; None: any."""
        self.refused: list[View] = []
        """Views that fit into no record."""
        self.feed(SchedulerTick())

    def feed(self, event: SchedulerEvent) -> None:
        todo = [event]
        while todo:
            for effect in self.machine.on(self.now, todo.pop(0)):
                match effect:
                    case Send(conn, message):
                        self.said.setdefault(conn, []).append(message)
                        if isinstance(message, OpenLinks):
                            todo.append(MessageIn(conn, Ready()))
                    case Persist(token, _, _, view) if (
                        view and self.most_links is not None and len(view.links) > self.most_links
                    ):
                        self.refused.append(view)
                        todo.append(Stored(token, False, "too many links", len(view.members) - 1))
                    case Persist(token, _, _, view) if view and self.room and len(view.members) > self.room:
                        todo.append(Stored(token, False, f"{self.room} members fit", self.room))
                    case Persist(token, _, _, view):
                        self.views += [view] if view is not None else []
                        todo.append(Stored(token, True))
                    case _:
                        self.done.append(effect)
            self.machine.validate_state()

    def comes(self, who: Hello) -> None:
        conn = self.conns[who.name] = len(self.conns) + len(self.said) + 100
        self.feed(Opened(conn))
        self.feed(MessageIn(conn, who))

    def says(self, name: str, message: FromMember) -> None:
        self.feed(MessageIn(self.conns[name], message))

    def enters(self, name: str) -> None:
        """Reports that a member has entered the last view and holds the state."""
        self.says(name, Entered(self.views[-1].id, 0, 0, GENESIS.hash))

    def closes(self, name: str, *, abrupt: bool = True) -> None:
        self.feed(Closed(self.conns.pop(name), abrupt))

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for name, conn in self.conns.items():
                if name not in self.silent:
                    self.feed(MessageIn(conn, Heartbeat(NO_VIEW, 0, 0)))
            self.feed(SchedulerTick())

    def heard(self, name: str, kind: type) -> list[ToMember]:
        return [m for m in self.said.get(self.conns[name], []) if isinstance(m, kind)]

    def roles(self, name: str) -> list[str]:
        return [m.role for m in self.heard(name, Welcome)]  # type: ignore[union-attr]

    def names(self) -> list[str]:
        """Returns the names of the last view's members."""
        return [m.name for m in self.views[-1].members]


def trained_alone(**rules: object) -> Job:
    job = Job(**rules)
    job.comes(hello("a"))
    job.enters("a")
    return job


def test_a_script_that_failed_and_was_edited_begins_the_job_anew() -> None:
    job = trained_alone()
    job.closes("a", abrupt=False)
    job.comes(hello("a", large=True, pid=5))
    assert job.roles("a") == ["founder"]
    assert len(job.views) == 2
    job.comes(hello("c"))
    (refused,) = job.heard("c", Refused)
    assert "model of c is small, the job's (from a) is large" in refused.reason  # type: ignore[union-attr]


def test_also_where_its_process_is_known_to_be_dead() -> None:
    job = trained_alone()
    job.closes("a")
    job.feed(Gone("a~1", "its process is gone"))
    job.comes(hello("c", large=True))
    assert job.names() == ["c"]


def test_another_program_from_the_machine_of_the_dead_is_a_witness() -> None:
    """A newcomer with another program, on the dead member's machine, is asked about it; its answer proves the death,
    and it founds the job.
    """
    job = trained_alone()
    job.closes("a")
    job.comes(hello("b", large=True))
    assert job.roles("b") == ["standby"]
    (told,) = job.heard("b", Notice)
    assert "model of b is large, the job's (from a) is small" in told.text  # type: ignore[union-attr]
    assert "`chaos-lightning reset`" in told.text  # type: ignore[union-attr]
    job.passes(0.5)
    assert job.heard("b", Probe)
    job.says("b", Verdict("a~1", False, "its process is gone", certain=True))
    assert job.roles("b") == ["standby", "founder"]
    assert job.names() == ["b"]


def test_who_may_live_is_waited_for_and_turns_another_program_away() -> None:
    job = trained_alone()
    job.silent.add("a")
    job.passes(0.6)
    job.comes(hello("c", large=True))
    assert job.roles("c") == ["standby"]
    job.says("c", Verdict("a~1", False, "no link"))
    job.passes(20.0)
    assert len(job.views) == 1
    assert not job.heard("c", Refused)
    waits = str(job.machine.snapshot()["reason"])
    assert "`chaos-lightning reset`" in waits
    assert "no word comes from there for 21 s (no heartbeat for" in waits, waits
    job.silent.clear()
    job.passes(0.2)
    (refused,) = job.heard("c", Refused)
    assert "model of c is large" in refused.reason  # type: ignore[union-attr]
    assert not refused.retry  # type: ignore[union-attr]


def test_after_its_time_is_over_the_job_is_that_of_who_is_here() -> None:
    job = trained_alone(last_holder_timeout_s=20.0)
    job.silent.add("a")
    job.passes(0.6)
    job.comes(hello("c", large=True))
    job.passes(21.0)
    assert job.names() == ["c"]


def test_a_member_that_comes_back_before_the_job_is_founded_again_says_what_it_is() -> None:
    """A member that was given up comes back before another program founds the job: its terms count, and the other
    program is refused.
    """
    job = trained_alone(last_holder_timeout_s=20.0, min_nodes=1)
    job.closes("a")
    job.passes(21.0)
    assert job.machine.phase == "founding"
    job.machine.settings = replace(job.machine.settings, min_nodes=2)
    job.comes(hello("c", large=True))
    assert job.roles("c") == ["founder"]
    job.comes(hello("a", resume="a~1", view=ViewId(1, 1)))
    assert job.roles("a") == ["joiner"]
    assert job.heard("c", Refused)


def test_a_founder_that_is_silent_and_holds_nothing_refuses_nobody() -> None:
    job = Job(min_nodes=2)
    job.comes(hello("a"))
    job.comes(hello("b", large=True))
    (refused,) = job.heard("b", Refused)
    assert not refused.retry  # type: ignore[union-attr]
    job.closes("b")
    job.silent.add("a")
    job.passes(1.0)
    job.comes(hello("c", large=True))
    job.comes(hello("d", large=True))
    assert job.names() == ["c", "d"]
    job.silent.clear()
    job.passes(0.2)
    assert job.heard("a", Refused)


def test_two_programs_wait_for_the_members_of_a_restarted_scheduler() -> None:
    """After a scheduler's restart newcomers of two programs come: both wait until a member shows which program is the
    job's.
    """
    member = Member("a~1", "a", "there", "10.0.0.9", 1, pid=ord("a"), pid_start=7)
    job = Job(Chain(2, ViewId(1, 1), (View(ViewId(1, 1), NO_VIEW, (member,)),)))
    job.comes(hello("c", large=True))
    job.comes(hello("d"))
    assert job.roles("d") == ["standby"]
    job.comes(hello("a", resume="a~1", view=ViewId(1, 1)))
    assert job.heard("c", Refused)
    assert job.roles("d") == ["standby", "joiner"]


def test_a_resumed_newcomer_does_not_say_what_the_job_is() -> None:
    member = Member("a~1", "a", "there", "10.0.0.9", 1, pid=ord("a"), pid_start=7)
    job = Job(Chain(2, ViewId(1, 1), (View(ViewId(1, 1), NO_VIEW, (member,)),)))
    job.comes(hello("c", large=True))
    (welcome,) = job.heard("c", Welcome)
    job.comes(hello("c", large=True, resume=welcome.member.id))  # type: ignore[union-attr]
    job.comes(hello("a", resume="a~1", view=ViewId(1, 1)))
    assert job.roles("a") == ["joiner"]
    assert job.heard("c", Refused)


def of_kind(job: Job, kind: type) -> list[object]:
    return [effect for effect in job.done if isinstance(effect, kind)]


def reset(job: Job, *, force: bool = False) -> Answer:
    job.done.clear()
    job.feed(Reset(7, force))
    (answer,) = of_kind(job, Answer)
    assert isinstance(answer, Answer)
    return answer


def test_an_operator_ends_a_job_that_waits_for_who_may_live() -> None:
    job = trained_alone()
    job.silent.add("a")
    job.passes(0.6)
    job.comes(hello("c", large=True))
    job.passes(3.0)
    assert reset(job) == Answer(7, True, "the job is ended; its last view had a~1 in it")
    assert of_kind(job, SchedulerDone) == [SchedulerDone("an operator has ended the job", again=True)]
    assert job.heard("a", Released)
    assert not job.heard("c", Released)
    assert not job.heard("c", Refused)
    assert not reset(job).accepted


def test_a_job_whose_members_live_is_ended_by_force_only() -> None:
    job = trained_alone()
    answer = reset(job)
    assert not answer.accepted
    assert answer.text.startswith("a~1 is in the job and alive")
    assert "--force" in answer.text
    assert reset(job, force=True).accepted
    assert job.heard("a", Released)


def test_a_job_that_never_began_is_not_ended() -> None:
    job = Job(min_nodes=2)
    job.comes(hello("a"))
    assert "nothing to end" in reset(job).text


def test_a_restarted_scheduler_hears_its_members_before_an_operator_ends_their_job() -> None:
    member = Member("a~1", "a", "there", "10.0.0.9", 1, pid=ord("a"), pid_start=7)
    job = Job(Chain(2, ViewId(1, 1), (View(ViewId(1, 1), NO_VIEW, (member,)),)))
    assert "a~1 may be on the way back" in reset(job).text
    job.passes(1.2)
    assert reset(job).accepted


def test_what_the_address_tells_of_a_new_start_of_the_machine_is_no_proof_against_the_living() -> None:
    job = trained_alone()
    gone = Gone("a~1", "its machine was started anew since", rebooted=True)
    job.feed(gone)
    job.closes("a")
    job.feed(gone)
    assert len(job.machine.roster.living()) == 1
    job.passes(1.2)
    job.feed(gone)
    assert not job.machine.roster.living()
    assert job.machine.phase == "founding"


def test_a_newcomer_for_whom_no_record_has_room_is_refused_and_the_job_goes_on() -> None:
    """Former bug: a newcomer that made the view too large for the store ended the scheduler; it is refused now."""
    job = trained_alone()
    job.room = 2
    for name in "bc":
        job.comes(hello(name))
        job.passes(3.0)
        if name == "b":
            job.enters("a")
            job.enters("b")
    (said,) = job.heard("c", Fence)
    assert said == Fence("the job is full: 2 members fit", rejoin=False)
    assert job.names() == ["a", "b"]
    assert not [said for said in job.done if isinstance(said, SchedulerDone)]
    job.says("b", Leave("asked to"))
    assert job.names() == ["a"], "it still decides"
