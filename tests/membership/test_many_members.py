"""Tests jobs of many members (the benchmark's stand-ins): groups that die, crowds that join, and both at once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from benchmarks.scale.machine import rules
from benchmarks.scale.standins import Stage
from chaos_lightning.membership import judging, roster
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.peers import Peer
from chaos_lightning.protocol.types import LinkEvent, View

DEGREE = 8


def stage(size: int, degree: int = DEGREE) -> Stage:
    """Returns a job with `size` members in one view, which can go on with half of them and take in as many again."""
    made = Stage(replace(rules(size, degree), min_nodes=size // 2, max_nodes=2 * size))
    made.start(size)
    made.wait(lambda: made.settled(size), "the founding")
    return made


@pytest.mark.parametrize("degree", [3, DEGREE])
def test_a_third_dies_at_once_and_the_others_go_on_in_one_view(degree: int) -> None:
    job, size = stage(96, degree), 96
    view = job.view.id
    for member in random.Random(1).sample(job.view.ids(), size // 3):
        job.kill(job.members[member])
    job.wait(lambda: job.settled(size - size // 3), "a view of those who live")
    job.machine.validate_state()
    assert job.put_out == []
    assert job.view.id.number <= view.number + 2


def test_half_leave_at_once_and_links_are_not_gone_through_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, size = stage(96), 96
    looks, wanted = [], Graph._wanted

    def counted(self: Graph, members: Iterable[str]) -> Iterator[tuple[Peer, Peer]]:
        looks.append(members)
        return wanted(self, members)

    monkeypatch.setattr(Graph, "_wanted", counted)
    for member in job.view.ids()[::2]:
        job.leave(job.members[member])
    job.wait(lambda: job.settled(size // 2), "a view of those who stay")
    job.machine.validate_state()
    assert job.put_out == []
    assert len(looks) < size // 4


def test_a_crowd_that_comes_within_a_second_comes_in_by_few_views() -> None:
    job = stage(32)
    view = job.view.id
    job.start(32, every_s=1 / 32)
    job.wait(lambda: job.settled(64), "all newcomers in the job")
    job.machine.validate_state()
    assert job.view.id.number <= view.number + 4
    assert job.put_out == []


@pytest.mark.parametrize("seed", range(6))
def test_members_die_and_leave_while_others_come(seed: int) -> None:
    rng = random.Random(seed)
    job = stage(24)
    job.start(12, every_s=0.01)
    for _ in range(4):
        until = job.clock.now + rng.uniform(0, 0.05)
        job.wait(lambda until=until: job.clock.now >= until, "time to pass")  # type: ignore[misc]
        for strike in (job.kill, job.leave):
            strike(rng.choice([p for p in job.members.values() if p.here and p.loaded]))
    job.wait(job.calm, "all who are left in one view")
    job.machine.validate_state()
    assert job.put_out == []


def test_a_machine_that_falls_silent_is_put_out_on_its_neighbours_word() -> None:
    """A silent member is put out when its neighbours in the view confirm it, although other members with an unused link
    to it deny its death.
    """
    job, size = stage(24, 3), 24
    near, first = job.near(job.view), sorted(job.view.ids())[:2]
    silent = next(m for m in job.view.ids() if m not in first and near[m].isdisjoint(first))
    for member in first:
        job.say(job.members[member], LinkEvent(silent, True, "connected"))
    began = job.clock.now
    job.vanish(job.members[silent])
    job.wait(lambda: job.settled(size - 1), "a view without it")
    assert job.clock.now - began < 2 * job.settings.silence_timeout_s


def test_neighbours_that_stay_out_of_reach_are_replaced() -> None:
    job, size = stage(24, 4), 24
    one = job.members[job.view.ids()[0]]
    lost = sorted(job.near(job.view)[one.id])[1:]
    for other in lost:
        job.cut(one, job.members[other])
    job.wait(lambda: job.settled(size) and len(job.near(job.view)[one.id]) == 1, "a view without these links")
    job.wait(lambda: job.settled(size) and len(job.near(job.view)[one.id]) >= 4, "a view with others in their place")
    job.machine.validate_state()
    assert not set(lost) & set(job.machine.topology.partners.of(one.id))
    assert job.put_out == []


def test_views_with_one_part_are_not_divided_when_all_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging all members of a job without pipelines never divides the view's state into parts, which would be slow for
    each look-up.
    """
    asked: list[View] = []
    for module in (judging, roster):
        monkeypatch.setattr(module, "division", asked.append)
    job = stage(40)
    for member in job.view.ids()[:10]:
        job.kill(job.members[member])
    job.wait(lambda: job.settled(30), "a view of those who live")
    assert not asked
