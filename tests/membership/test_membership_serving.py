"""Tests by which ways newcomers come in, and which learners members serve, in any order of events (protocol.md
15-18).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_script import NOT_OFFERED, MemberScript, SchedulerScript, contribution, header_after, member

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.peers import Standing
from chaos_lightning.membership.slots import close_slot
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Kind, ServeLearners, Spent, View, ViewId

JOB = """
set max_nodes 16
a hello
a ready
a entered 1.1 on=genesis
b hello
b link a up
a link b up
b ready
view v1 1.1 0.0 a~1
view v2 1.2 1.1 a~1 b~2*
header h1 genesis v1 step
header h2 h1 v1 boundary v2
a entered 1.2 on=h2
b entered 1.2 on=h2
"""
"""a and b train."""


def script(text: str) -> SchedulerScript:
    """Returns a scheduler after these lines of a scenario."""
    made = SchedulerScript()
    say(made, text)
    return made


def say(to: SchedulerScript | MemberScript, text: str) -> list[str]:
    """Carries out these lines of a scenario; returns all effects, in words."""
    return [words for line in text.splitlines() if line for words in to.line(line.split())]


def linked(name: str) -> str:
    """Returns the lines of a scenario that give a newcomer links with a and b."""
    return "".join(f"{name} link {m} up\n{m} link {name} up\n" for m in "ab")


def newcomers(*names: str) -> str:
    return "\n".join(f"{n} hello replays\n{linked(n)}{n} ready" for n in names)


def observing(to: SchedulerScript) -> set[str]:
    assert to.machine is not None
    return {p.member.name for p in to.machine.roster.peers.values() if p.standing is Standing.OBSERVING}


# ------------------------------------------------------------------ which way


def test_one_that_did_not_offer_to_replay_is_no_learner() -> None:
    scheduler = script(JOB + "c hello\nc link a up\na link c up\nc ready")
    assert observing(scheduler) == set()
    assert scheduler.machine is not None
    assert scheduler.machine.roster.peers["c~3"].way == "pause"
    assert scheduler.machine.roster.peers["c~3"].no_replay == NOT_OFFERED


def test_one_generation_at_a_time() -> None:
    """Members serve one group of learners at a time, and so keep one copy of the state: later newcomers wait."""
    scheduler = script(JOB + newcomers("c"))
    say(scheduler, newcomers("d", "e"))
    assert observing(scheduler) == {"c"}
    say(scheduler, "c closes")
    assert observing(scheduler) == {"d", "e"}


def test_newcomers_of_one_moment_are_one_generation() -> None:
    names = [f"x{i}" for i in range(10)]
    scheduler = script(JOB + "store waits\nc hello\n" + linked("c") + "c ready\n" + newcomers(*names))
    assert observing(scheduler) == set(), "a view is being decided"
    told = say(scheduler, "view v3 1.3 1.2 a~1 b~2 c~3*\nheader h3 h2 v2 boundary v3\nstored\na entered 1.3 on=h3")
    told += say(scheduler, "b entered 1.3 on=h3\nc entered 1.3 on=h3")
    assert observing(scheduler) == set(names)
    assert sum(words.startswith("to a: learners") for words in told) == 1


@pytest.mark.parametrize("leaver", ["a", "b"])
def test_one_of_two_leaves_and_nobody_hurries(leaver: str) -> None:
    """One of two members leaves while a newcomer learns: the other keeps the state, so the learner goes on
    replaying.
    """
    scheduler = script(JOB + newcomers("c"))
    told = say(scheduler, f"{leaver} leaves")
    assert observing(scheduler) == {"c"}
    assert not any("way_in" in words for words in told)


def test_list_stands_while_a_caught_up_newcomer_loads() -> None:
    """A caught-up newcomer stays on the list of learners until it has entered its view, as it may lack the last entries
    (18).
    """
    scheduler = script(JOB + newcomers("c"))
    told = say(
        scheduler,
        """c caught up at=4
view v3 1.3 1.2 a~1 b~2 c~3*
header h3 h2 v2 boundary v3
a entered 1.3 on=h3
b entered 1.3 on=h3
c entered 1.3 loading on=h3
beats a b c for=0.3""",
    )
    assert not any("learners: nobody" in words for words in told)
    assert "to a: learners: nobody; members are those of view 1.3 after 1.2 [a~1 b~2 c~3]" in say(
        scheduler, "c entered 1.3 on=h3"
    )


def test_members_of_a_restarted_scheduler_hear_that_nobody_observes() -> None:
    """A restarted scheduler tells members that nobody learns any more; otherwise they would keep the log for ever."""
    scheduler = script("view v1 1.1 0.0 a~1 b~2\nheader h1 genesis v1 step for=c~3\nchain 1.1 v1")
    told = say(scheduler, "a hello resume=a~1\nb hello resume=b~2\na entered 1.1 on=h1\nb entered 1.1 on=h1")
    assert [w.partition(";")[0] for w in told if "learners" in w] == [f"to {m}: learners: nobody" for m in "ab"]


def test_first_members_of_a_job_hear_of_no_learners() -> None:
    assert not any("learners" in words for words in say(SchedulerScript(), JOB))


# ------------------------------------------------------------------ headers


IDS = ("a~1", "b~2")
VIEW = View(id=ViewId(1, 1), predecessor=NO_VIEW, members=tuple(member(m) for m in IDS))


def test_learners_are_part_of_the_headers_hash() -> None:
    one, other = (header_after(VIEW, GENESIS, "step", learners=names) for names in ((), ("c~3",)))
    assert one.hash != other.hash


def test_header_with_an_error_names_nobody_new() -> None:
    """A header with an error names no new learners: members do not apply that slot, and so cannot copy the state at
    it.
    """
    box = {m: contribution(VIEW, GENESIS, "step", m, spent=(Spent("", 0, ((0, 4),)),)) for m in IDS}
    header = close_slot(view=VIEW, prev=GENESIS, contributions=box, learners=("c~3",))
    assert header.error
    assert header.learners == ()


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.STEP])
def test_only_steps_name_learners(kind: Kind) -> None:
    script = MemberScript()
    say(script, "view v1 1.1 0.0 a~1\nwelcome a~1 founder\ndecide v1 after genesis\nlearners in v1 c~3")
    told = say(script, f"own {kind}")
    assert script.machine.header.kind is kind
    assert script.machine.header.learners == ()
    assert not any("sends c~3" in words for words in told)


# ------------------------------------------------------------------ any order

WORDS = st.sampled_from(
    [
        *[f"{n} {what}" for n in "cde" for what in ("hello replays", "ready", "leaves", "closes")],
        *[f"{n} caught up at=4" for n in "cde"],
        *[f"{n} cannot catch up at=4" for n in "cde"],
        *[f"{n} link a up" for n in "cde"],
        "beats a b c for=0.1",
        "beats a b c d e for=0.5",
        "a leaves",
        "b closes",
        "a closes",
    ]
)


class Watch:
    """Scenario of a scheduler that records its messages on learners to each member."""

    def __init__(self) -> None:
        self.script = script("set observe_timeout_s 0.4\nset hang_timeout_s 0.8\n" + JOB)
        self.told: dict[int, tuple[str, ...]] = {}

    def line(self, words: str) -> None:
        script, machine = self.script, self.script.machine
        assert machine is not None
        name, first, *rest = words.split()
        if name == "beats":
            words = " ".join(["beats", *(n for n in (first, *rest) if n in script.conns or "=" in n)])
        elif name not in script.conns and first != "hello":
            return
        if first == "hello" and any(
            p.member.name == name and p.conn is not None for p in machine.roster.peers.values()
        ):
            return
        sent: list[fx.Send] = []
        feed = machine.on

        def on(now: float, event: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
            effects = feed(now, event)
            sent.extend(e for e in effects if isinstance(e, fx.Send) and isinstance(e.message, ServeLearners))
            return effects

        machine.on = on  # type: ignore[method-assign]
        try:
            script.line(words.split())
        finally:
            machine.on = feed  # type: ignore[method-assign]
        for effect in sent:
            assert isinstance(effect.message, ServeLearners)
            self.told[effect.conn] = effect.message.ids
        self.check()

    def check(self) -> None:
        machine = self.script.machine
        assert machine is not None
        served = {p.id for p in machine.roster.peers.values() if p.standing is Standing.OBSERVING}
        for peer in machine.roster.peers.values():
            if peer.standing is Standing.OBSERVING:
                assert peer.way == "replay"
                assert peer.conn is not None, "its stream is closed: it is nobody any more"
            if peer.caught_up:
                assert peer.standing in (Standing.OBSERVING, Standing.MEMBER)
        if machine.desk.reserving or machine.book.latest is None:
            return
        for peer in machine.roster.peers.values():
            if peer.conn is not None and peer.standing is Standing.MEMBER:
                ids = set(self.told.get(peer.conn, ()))
                assert served <= ids, f"{peer.id} does not serve {served - ids}"
                for extra in ids - served:
                    other = machine.roster.peers[extra]  # KeyError: it serves somebody who is gone
                    assert other.standing is Standing.MEMBER
                    assert not other.loaded, f"{peer.id} serves {extra}, who is in"


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS, max_size=25))
def test_members_serve_exactly_those_who_observe_or_have_yet_to_load(lines: list[str]) -> None:
    watch = Watch()
    for words in lines:
        watch.line(words)
