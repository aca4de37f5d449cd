"""Tests that a founder that gets the state slowly delays the others only for a while, if enough nodes can do without
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_gathering import founding
from test_membership_terms import hello

from benchmarks.scale.fake import StandIn
from benchmarks.scale.machine import rules
from benchmarks.scale.standins import Stage
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import Chain
from chaos_lightning.membership.founders import PATIENCE, Founders
from chaos_lightning.membership.peers import process_of
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import GENESIS, Entered, Progress, View

FOUNDERS = 256
COPY_S = 2.0
ROUNDS = 12
"""So many copies one after the other take as long as all of 256."""
HALF_S = COPY_S * (1 + ROUNDS // 2)
SLOW = 200
"""Number of the founder to which the state trickles."""


class Spreading(Stage):
    """Founders that load the state one after the other; a slow one reports a little progress each second.

    Args:
        size: Number of founders.
        min_nodes: Number of nodes with which the job begins.
        slow_s: Seconds that the slow one takes.
    """

    def __init__(self, size: int, min_nodes: int, slow_s: float) -> None:
        super().__init__(replace(rules(size, 8), min_nodes=min_nodes, join_timeout_s=2 * COPY_S))
        self._slow_s = slow_s
        self._entering: StandIn | None = None
        self._loads_at: dict[int, float] = {}
        self.start(size, every_s=0.0)
        self.wait(lambda: len(self.view.members) == size, "the first view")
        self.founded_at = self.clock.now

    def entered(self, one: StandIn, view: View, *, decided: bool) -> None:
        super().entered(one, view, decided=decided)
        self._entering = one

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        one = self._entering
        assert one is not None
        takes_s = self._slow_s if one.number == SLOW else COPY_S * (1 + ROUNDS * one.number / FOUNDERS)
        again = one.number in self._loads_at
        super().later(
            max(0.0, self._loads_at.setdefault(one.number, self.clock.now + takes_s) - self.clock.now), action
        )
        if one.number != SLOW or again:  # in the view of a recovery it goes on loading
            return
        for second in range(1, int(self._slow_s)):
            super().later(second, lambda second=second: self._grows(one, second))  # type: ignore[misc]

    def _grows(self, one: StandIn, second: int) -> None:
        if one.here:
            self.say(one, Progress("pull", second, 1_000_000, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_256_founders_go_on_without_one_to_which_the_state_trickles(dies: int) -> None:
    """One of 256 founders gets the state very slowly: once most have it the others go on without it, even if another
    one dies.
    """
    job = Spreading(FOUNDERS, FOUNDERS - 2, slow_s=1000.0)
    for member in job.view.ids()[3 : 3 + dies]:
        job.wait(lambda: job.clock.now > job.founded_at + 0.8 * COPY_S * ROUNDS, "time to pass")
        job.kill(job.members[member])
    job.wait(lambda: job.settled(FOUNDERS - 1 - dies), "a view without it")
    job.machine.validate_state()
    (reason,) = job.put_out
    assert "half of the others had it" in reason
    assert 0.9 * HALF_S * PATIENCE < job.clock.now - job.founded_at < 1.1 * HALF_S * PATIENCE


def test_deaths_are_no_copies_that_are_done() -> None:
    """Half of the founders die before any has the state: they do not count as having it, and the others are waited
    for.
    """
    desk = Desk(rules(FOUNDERS, 8))
    founders, peers = Founders(desk), [SimpleNamespace(id=f"n{i}~{i}") for i in range(1, FOUNDERS)]
    left, loads_s = peers[::2], 100.0

    def late(now: float, here: list[SimpleNamespace], lacking: list[SimpleNamespace]) -> str:
        desk.clock = now
        return founders.late(lacking, ["n0~0", *(p.id for p in here)], spreads=True)  # type: ignore[arg-type]

    assert not late(0.0, peers, peers)
    for second in range(1, int(loads_s)):
        assert not late(float(second), left, left)
    some = left[: len(left) // 4]
    assert not late(loads_s, left, some)
    assert not late((PATIENCE - 1) * loads_s, left, some)
    assert "half of the others had it after 99 s" in late((PATIENCE + 1) * loads_s, left, some)


def test_a_scheduler_that_is_restarted_knows_that_most_get_the_state() -> None:
    job, founded = founding(32)
    chain = Chain(term=2, highest=founded.id, views=(founded,), id=founded.chain)
    assert job.machine.book.spreads
    assert SchedulerMachine(job.machine.settings, chain).book.spreads


def test_a_newcomer_to_whom_no_link_leads_is_no_node_to_spare() -> None:
    """Neither a newcomer without links nor a leaving member counts as a spare node for a slow founder."""
    job, founded = founding(32)
    machine = job.machine
    late = [machine.roster.peers[founded.ids()[-1]]]
    machine.settings = replace(machine.settings, min_nodes=31)
    assert machine._can_do_without(founded, late)
    machine.roster.peers[founded.ids()[1]].leaving = "asked"
    assert not machine._can_do_without(founded, late)
    job.comes(hello("spare", pid=7))
    job.passes(0.5)
    spare = next(p for p in machine.roster.peers.values() if p.member.name == "spare")
    assert machine._can_do_without(founded, late) is (spare in machine.graph.reachable(founded.ids()[:-1]))
    spare.stranded = True
    assert not machine._can_do_without(founded, late)


@pytest.mark.slow
def test_where_no_node_is_to_spare_all_wait_for_it_as_long_as_something_comes() -> None:
    job = Spreading(FOUNDERS, FOUNDERS, slow_s=1.3 * HALF_S * PATIENCE)
    job.wait(lambda: job.settled(FOUNDERS), "all of them in the first view")
    assert job.clock.now - job.founded_at > 1.2 * HALF_S * PATIENCE
    assert job.put_out == []
    assert job.meter.said["Notice"] >= FOUNDERS


@pytest.mark.parametrize("left", [True, False])
def test_one_that_was_left_behind_is_waited_for_no_more(left: bool) -> None:
    """A founder that was left behind comes again before the first step: it must learn by replay, so that nobody waits
    for it.
    """
    job, founded = founding(32)
    for member in founded.members:
        job.says(member.name, Entered(founded.id, 0, 0, GENESIS.hash))
    again = hello("late", pid=7, replay="")
    if left:
        job.machine.roster.left_behind.add(process_of(again))
    job.comes(again)
    job.passes(0.5)
    (peer,) = (p for p in job.machine.roster.peers.values() if p.member.name == "late")
    assert peer.way == ("replay" if left else "pause")
