"""Tests that min_nodes and max_nodes count nodes, whatever number of workers each has, and what becomes of a kept
state.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_membership_terms import Job, hello

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Entered,
    Fence,
    Header,
    Heartbeat,
    Hello,
    Kept,
    Kind,
    Leave,
    Member,
    Notice,
    Ready,
    Released,
    Settings,
    ViewId,
    Welcome,
    kept_header,
)


def worker(name: str, node: str = "") -> Member:
    return Member(f"{name}~1", name, "host", "127.0.0.1", 1, node=node)


def test_workers_of_one_node_are_one_node() -> None:
    a0, a1, b = worker("a-0", "a"), worker("a-1", "a"), worker("b")
    assert [nodes.count(m) for m in ([], [a0, a1], [a0, a1, b])] == [0, 1, 2]
    assert nodes.within([b, a1], [a0], 1) == [a1]
    assert nodes.within([b, a1], [a0], 2) == [b, a1]
    assert nodes.in_words([a0, a1]) == "1 node with 2 workers"


class Room:
    """Scheduler, and members that carry out its orders immediately."""

    def __init__(self, settings: Settings, chain: fx.Chain | None = None) -> None:
        self.machine = SchedulerMachine(settings, chain or fx.Chain(1, NO_VIEW, id="c"))
        self.now = 0.0
        self.said: dict[int, list[object]] = {}
        self.ids: dict[int, str] = {}

    def feed(self, event: fx.SchedulerEvent) -> None:
        for effect in self.machine.on(self.now, event):
            match effect:
                case fx.Send(conn, message):
                    self.said.setdefault(conn, []).append(message)
                    if isinstance(message, Welcome):
                        self.ids[conn] = message.member.id
                case fx.Persist(token):
                    self.feed(fx.Stored(token, True))

    def come(self, conn: int, name: str, node: str = "", kept: Kept | None = None, pid: int = 0) -> None:
        said = Hello(
            "default", name, f"host-{name}", "127.0.0.1", 1, pid or conn, 1, 1, 1, "0", (), node=node, kept=kept
        )
        self.feed(fx.Opened(conn))
        self.feed(fx.MessageIn(conn, said))
        self.feed(fx.MessageIn(conn, Ready()))

    def last(self, conn: int, kind: type) -> object:
        return next((m for m in reversed(self.said.get(conn, [])) if isinstance(m, kind)), None)

    def enter(self, conn: int, seq: int, step: int) -> Decide:
        decision = self.last(conn, Decide)
        assert isinstance(decision, Decide)
        self.feed(fx.MessageIn(conn, Entered(decision.view.id, decision.base.seq, 0, decision.base.hash)))
        self.feed(fx.MessageIn(conn, Heartbeat(decision.view.id, seq, step)))
        return decision


def test_a_job_for_two_nodes_does_not_begin_with_two_workers_of_one() -> None:
    room = Room(Settings(min_nodes=2))
    room.come(1, "a-0", "a")
    room.come(2, "a-1", "a")
    assert room.last(1, Decide) is None
    room.come(3, "b-0", "b")
    decision = room.last(1, Decide)
    assert isinstance(decision, Decide)
    assert [m.name for m in decision.view.members] == ["a-0", "a-1", "b-0"]


# --------------------------------------------------------------------------------- the last exit (protocol.md 14c)


def left_alone(settings: Settings | None = None) -> tuple[Room, Kept]:
    """Returns a job whose only member was let go at step 7 and has yet to close its stream, and the record of the state
    that it keeps.
    """
    room = Room(settings or Settings())
    room.come(1, "a")
    view = room.enter(1, 7, 7).view
    room.feed(fx.MessageIn(1, Leave("signal")))
    released = room.last(1, Released)
    assert isinstance(released, Released)
    assert released.keep
    last = Header(seq=7, kind=Kind.STEP, step=7, view=view.id, prev_hash="x", next_view=view.id)
    return room, Kept(kept_header(last, view.id), room.ids[1], view.chain)


def test_nobody_founds_the_job_while_the_last_member_writes() -> None:
    room, _ = left_alone()
    room.come(2, "b")
    assert room.last(2, Decide) is None
    room.feed(fx.Closed(1, abrupt=False))
    assert isinstance(room.last(2, Decide), Decide)


def test_the_founder_with_the_newest_state_comes_first_and_all_go_on_from_it() -> None:
    room, kept = left_alone(Settings(min_nodes=1))
    room.feed(fx.MessageIn(1, kept))
    older = replace(kept, header=replace(kept.header, seq=3, step=3))
    room.come(2, "b", kept=older)
    room.come(3, "c", kept=kept)
    room.feed(fx.Closed(1, abrupt=False))
    decision = room.last(3, Decide)
    assert isinstance(decision, Decide)
    assert decision.base == kept.header
    assert [m.name for m in decision.view.members] == ["c", "b"]
    assert decision.view.joiners == (room.ids[2],)


def test_founders_wait_for_the_machine_on_which_the_state_lies() -> None:
    room, kept = left_alone()
    room.feed(fx.MessageIn(1, kept))
    room.feed(fx.Closed(1, abrupt=False))
    room.come(2, "b")
    assert room.last(2, Decide) is None
    room.come(3, "a", kept=kept)
    decision = room.last(3, Decide)
    assert isinstance(decision, Decide)
    assert (decision.base, decision.view.members[0].name) == (kept.header, "a")


def test_who_comes_to_that_machine_and_does_not_go_on_from_the_state_founds_the_job() -> None:
    """A process on the kept state's machine does not go on from it: it is asked once more, and then the job is founded
    without that state.
    """
    room, kept = left_alone()
    room.feed(fx.MessageIn(1, kept))
    room.feed(fx.Closed(1, abrupt=False))
    room.come(2, "b")
    room.come(3, "a")
    assert isinstance(room.last(3, Fence), Fence), "its hello may be older than the file"
    room.feed(fx.Closed(3, abrupt=False))
    assert room.last(2, Decide) is None
    room.come(4, "a", pid=3)
    assert room.last(4, Fence) is None
    decision = room.last(2, Decide)
    assert isinstance(decision, Decide)
    assert decision.base.seq == 0
    assert "a~1 kept one at step 7" in decision.view.reason
    assert f"{room.ids[4]} on that machine does not go on from it" in decision.view.reason


def test_without_it_the_job_begins_anew_in_the_end_and_says_what_is_lost() -> None:
    room, kept = left_alone(Settings(last_holder_timeout_s=1.0))
    room.feed(fx.MessageIn(1, kept))
    room.feed(fx.Closed(1, abrupt=False))
    room.come(2, "b")
    for _ in range(12):
        room.now += 0.1
        room.feed(fx.MessageIn(2, Heartbeat(NO_VIEW, 0, 0)))
    decision = room.last(2, Decide)
    assert isinstance(decision, Decide)
    assert decision.base.seq == 0
    assert "(at step 7 or later) is lost" in decision.view.reason


def test_who_offers_the_kept_state_and_never_gets_ready_is_named_and_not_waited_for_without_end() -> None:
    """A newcomer that has the kept state never gets ready: others are told whom they wait for, and go on without it
    after a time.
    """
    room, kept = left_alone(Settings(last_holder_timeout_s=5.0))
    room.feed(fx.MessageIn(1, kept))
    room.feed(fx.Closed(1, abrupt=False))
    said = Hello("default", "c", "host-c", "127.0.0.1", 1, 3, 1, 1, 1, "0", (), kept=kept)
    room.feed(fx.Opened(3))
    room.feed(fx.MessageIn(3, said))
    room.come(2, "b")
    for _ in range(40):
        room.now += 0.1
        room.feed(fx.MessageIn(2, Heartbeat(NO_VIEW, 0, 0)))
    told = room.last(2, Notice)
    assert isinstance(told, Notice)
    assert "waits for c~2, which has the training state that a~1 kept at step 7" in told.text
    assert room.last(2, Decide) is None
    for _ in range(20):
        room.now += 0.1
        room.feed(fx.MessageIn(2, Heartbeat(NO_VIEW, 0, 0)))
    decision = room.last(2, Decide)
    assert isinstance(decision, Decide)
    assert decision.base.seq == 0
    assert "(at step 7 or later) is lost" in decision.view.reason
    assert "did not get ready within 5 s" in str(room.last(3, Fence))


def test_an_older_kept_state_is_gone_on_from_where_the_newest_ones_holder_never_gets_ready() -> None:
    room, kept = left_alone(Settings(last_holder_timeout_s=5.0))
    room.feed(fx.MessageIn(1, kept))
    room.feed(fx.Closed(1, abrupt=False))
    said = Hello("default", "c", "host-c", "127.0.0.1", 1, 3, 1, 1, 1, "0", (), kept=kept)
    room.feed(fx.Opened(3))
    room.feed(fx.MessageIn(3, said))
    older = replace(kept, header=replace(kept.header, seq=3, step=3))
    room.come(2, "b", kept=older)
    for _ in range(60):
        room.now += 0.1
        room.feed(fx.MessageIn(2, Heartbeat(NO_VIEW, 0, 0)))
    decision = room.last(2, Decide)
    assert isinstance(decision, Decide)
    assert decision.base == older.header


def test_a_kept_state_is_believed_only_of_who_leaves() -> None:
    """A kept state that a training member or a newcomer claims to have is ignored; others would wait for a state that
    does not exist.
    """
    room = Room(Settings())
    room.come(1, "a")
    view = room.enter(1, 7, 7).view
    room.feed(fx.Opened(2))
    room.feed(fx.MessageIn(2, Hello("default", "e", "host-e", "127.0.0.1", 1, 2, 1, 1, 1, "0", ())))
    last = Header(seq=10**9, kind=Kind.STEP, step=7, view=view.id, prev_hash="x", next_view=view.id)
    for conn in (1, 2):
        room.feed(fx.MessageIn(conn, Kept(kept_header(last, view.id), room.ids[1], view.chain)))
        room.feed(fx.Closed(conn, abrupt=True))
    room.feed(fx.Gone(room.ids[1], "its process is gone"))
    room.come(3, "b")
    assert isinstance(room.last(3, Decide), Decide)


@pytest.mark.parametrize(
    "wrong", [{"chain": "another"}, {"member": "stranger~9"}, {"header": ViewId(9, 9)}], ids=["chain", "member", "view"]
)
def test_a_state_of_another_chain_is_not_gone_on_from(wrong: dict[str, object]) -> None:
    room, kept = left_alone()
    room.feed(fx.Closed(1, abrupt=True))
    if isinstance(number := wrong.get("header"), ViewId):
        wrong = {"header": replace(kept.header, view=number)}
    room.come(2, "b", kept=replace(kept, **wrong))  # type: ignore[arg-type]
    decision = room.last(2, Decide)
    assert isinstance(decision, Decide)
    assert decision.base.seq == 0


def test_an_older_state_than_the_jobs_is_gone_on_from_but_not_silently() -> None:
    room, kept = left_alone()
    room.feed(fx.Closed(1, abrupt=True))
    room.come(2, "b")
    room.enter(2, 20, 20)
    room.feed(fx.Closed(2, abrupt=False))
    room.come(3, "c", kept=kept)
    decision = room.last(3, Decide)
    assert isinstance(decision, Decide)
    assert decision.base == kept.header
    assert "the job went on after that, up to view 1.2 (at step 20 or later), which is lost" in decision.view.reason


def test_a_node_founds_the_job_with_all_of_its_workers() -> None:
    """A node founds the job only when all of its workers are there; else one of them would train the first steps
    alone.
    """
    job = Job()
    job.comes(hello("n-0", pid=1, node="n", workers=2))
    assert not job.views
    (told,) = job.heard("n-0", Notice)
    assert told.text == "the job waits for all 2 workers of node n, for 30 s at most"  # type: ignore[union-attr]
    job.comes(hello("n-1", pid=2, node="n", workers=2))
    assert job.names() == ["n-0", "n-1"]


def test_a_worker_that_does_not_come_is_not_waited_for_without_end() -> None:
    job = Job(node_timeout_s=5.0)
    job.comes(hello("n-0", pid=1, node="n", workers=2))
    job.passes(4.0)
    assert not job.views
    job.passes(1.5)
    assert job.names() == ["n-0"]
