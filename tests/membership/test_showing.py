"""Tests the `status` of a large job: abnormal members in full, counts of the others, and all members page by page."""

from __future__ import annotations

import json
from typing import Any

from large_views import sparse_view

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.past import Numbers
from chaos_lightning.membership.peers import Standing
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.showing import PAGE, SHOWN
from chaos_lightning.protocol.types import NO_VIEW, WHOLE, Settings


def settled(count: int) -> SchedulerMachine:
    """Returns a restarted scheduler to which all members have come back, and which trains with them."""
    view = sparse_view(count)
    machine = SchedulerMachine(
        Settings(max_nodes=count), fx.Chain(2, view.id, (view,), id=view.chain, numbers=Numbers.of([NO_VIEW]))
    )
    machine.on(0.0, fx.SchedulerTick())
    for conn, member in enumerate(view.members):
        peer = machine.roster.peers[member.id]
        peer.conn, peer.standing, peer.entered, peer.parts = conn, Standing.MEMBER, view.id, WHOLE
        machine.roster.conns[conn] = member.id
    return machine


def shown(machine: SchedulerMachine, page: int = 0) -> Any:
    return json.loads(json.dumps(machine.snapshot(page)))


def test_a_small_job_is_listed_as_a_whole() -> None:
    facts = shown(settled(SHOWN))
    assert len(facts["members"]) == SHOWN
    assert len(facts["links"]) == SHOWN * (SHOWN - 1) // 2
    assert facts["pages"] == 0


def test_a_large_job_that_is_well_has_counts_and_no_lines() -> None:
    machine = settled(512)
    facts = shown(machine)
    assert (facts["members"], facts["others"], facts["links"]) == ([], [], [])
    links = len(machine.book.views[-1].links)
    assert facts["counts"] == {
        "members": 512,
        "living": 512,
        "connected": 512,
        "here": 512,
        "leaving": 0,
        "others": {},
        "links": {"in use": links},
    }
    assert len(json.dumps(facts)) < 4096


def test_what_is_not_as_it_should_be_has_a_line() -> None:
    machine = settled(64)
    view = machine.book.views[-1]
    gone, leaves, *_ = view.ids()
    machine.roster.peers[gone].conn = None
    machine.roster.peers[leaves].leaving = "asked to"
    down = view.links[3]
    machine.topology.fact(down.a, down.b).say(0.0, down.a, "closed")
    facts = shown(machine)
    assert [m["id"] for m in facts["members"]] == [gone, leaves]
    assert [(row["a"], row["b"]) for row in facts["links"]] == [(down.a, down.b)]
    assert facts["links"][0]["state"] == f"down: {down.a}: closed"
    assert facts["counts"]["links"] == {"in use": len(view.links) - 1, "down": 1}
    assert (facts["counts"]["connected"], facts["counts"]["leaving"]) == (63, 1)


def test_lines_are_bounded_when_all_is_odd() -> None:
    machine = settled(128)
    for member in machine.book.views[-1].ids():
        machine.roster.peers[member].conn = None
    for link in machine.book.views[-1].links:
        machine.topology.fact(link.a, link.b).say(0.0, link.a, "closed")
    facts = shown(machine)
    assert (len(facts["members"]), len(facts["links"])) == (SHOWN, SHOWN)
    assert facts["counts"]["connected"] == 0
    assert facts["counts"]["links"] == {"down": len(machine.book.views[-1].links)}


def test_pages_have_each_member_and_each_link_once() -> None:
    machine = settled(3 * PAGE - 5)
    view = machine.book.views[-1]
    pages = [shown(machine, page) for page in range(1, shown(machine)["pages"] + 1)]
    assert len(pages) == 3
    assert [m["id"] for page in pages for m in page["members"]] == list(view.ids())
    found = [(row["a"], row["b"]) for page in pages for row in page["links"]]
    assert sorted(found) == sorted((link.a, link.b) for link in view.links)
    assert shown(machine, 4)["members"] == []
