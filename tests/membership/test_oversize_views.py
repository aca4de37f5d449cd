"""Tests views that are too large for the store when no newcomer can be refused instead: each is refused once, and the
job goes on.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_membership_terms import Job, hello

from chaos_lightning.membership import topology
from chaos_lightning.membership.effects import ChangeLink, Drain, Note
from chaos_lightning.membership.topology import components, every_pair, pair, thinned
from chaos_lightning.protocol.types import GENESIS, LinkEvent, LinkSpec, Notice, Prepare, Report

NAMES = "abcdef"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Returns a job of six members with all links, and with a limit on the size of stored views."""
    for module in ("graph", "topology"):
        monkeypatch.setattr(f"chaos_lightning.membership.{module}.THIN_DEGREE", 1)
    job = Job()
    for count, name in enumerate(NAMES, 1):
        job.comes(hello(name))
        job.passes(3.0)
        for member in NAMES[:count]:
            job.enters(member)
    assert job.names() == list(NAMES)
    return job


def errors(job: Job) -> list[object]:
    return [dict(said.fields)["text"] for said in job.done if isinstance(said, Note) and said.name == "error"]


def test_where_all_links_find_no_room_a_few_do(job: Job) -> None:
    job.most_links = 8
    job.feed(ChangeLink(1, "a", "b", False))
    job.passes(2.0)
    assert errors(job) == ["too many links"]
    assert len(job.refused) == 1
    links = job.views[-1].links
    assert len(links) == 6
    assert LinkSpec("a~1", "b~2") not in links
    assert job.names() == list(NAMES)


def test_a_view_that_finds_no_room_in_any_way_is_refused_once_and_the_scheduler_hears_on(job: Job) -> None:
    """Former bug: a view too large for the store was written again without end, and the scheduler handled no
    messages.
    """
    job.most_links = 0
    before = job.views[-1]
    job.feed(ChangeLink(1, "a", "b", False))
    job.passes(3.0)
    assert [len(view.links) for view in job.refused] == [14, 6], "with fewer links, and then no more"
    job.feed(Drain("f"))
    job.passes(3.0)
    assert len(job.refused) == 3, "a view without f has no room either"
    assert job.views[-1] == before
    assert job.machine.phase == "running"
    job.most_links = None
    job.feed(ChangeLink(2, "c", "d", False))
    for name in NAMES:
        job.enters(name)
    job.passes(1.0)
    assert job.views[-1] != before, "another view is tried"


def test_a_recovery_that_finds_no_room_waits_in_words(job: Job) -> None:
    job.feed(ChangeLink(1, "a", "b", False))
    for name in NAMES:
        job.enters(name)
    job.most_links, stands = 0, job.views[-1]

    def dies(name: str) -> None:
        job.closes(name)
        (gone,) = (m.id for m in stands.members if m.name == name)
        for other in job.conns:
            job.says(other, LinkEvent(gone, False, "closed by the other end"))
        job.passes(0.5)
        for other in job.conns:
            number = job.heard(other, Prepare)[-1].number  # type: ignore[union-attr]
            job.says(other, Report(number, stands.id, 0, GENESIS.hash, last=GENESIS))

    dies("f")
    job.passes(3.0)
    assert len(job.refused) == 1
    assert job.heard("a", Notice)[-1] == Notice("the job waits: too many links", waiting=True)
    job.most_links = None
    dies("e")
    assert job.names() == list("abcd")


PAIRS = st.sets(st.sampled_from(sorted(map(sorted, every_pair(NAMES)))).map(lambda ends: pair(*ends)))


@given(PAIRS, st.integers(1, 3))
def test_a_few_links_hold_those_together_whom_all_do(pairs: set[frozenset[str]], degree: int) -> None:
    before, topology.THIN_DEGREE = topology.THIN_DEGREE, degree
    try:
        few = thinned(NAMES, pairs)
    finally:
        topology.THIN_DEGREE = before
    assert few <= pairs
    assert components(NAMES, few) == components(NAMES, pairs)
    assert len(few) < (degree + 1) * len(NAMES)
