"""Tests the choice of donors: a fixed number for each newcomer, the same at all members, and copies of the state that
spread as a tree (protocol.md 15-18).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from membership_script import member
from test_gathering import PATIENT, Wave
from test_membership_terms import Job, hello

from chaos_lightning.membership.donors import DONORS, PULLS, Serving, copiers, groups, of_learner
from chaos_lightning.membership.effects import Observe, SchedulerTick
from chaos_lightning.membership.learning import Learning
from chaos_lightning.membership.peers import Standing
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    SMALL_JOB,
    Kind,
    LinkSpec,
    Member,
    ServeLearners,
    View,
    ViewId,
)


def view(size: int, joiners: int = 0, links: tuple[tuple[int, int], ...] = ()) -> View:
    """Returns a view of `size` members, the last ones of which are joiners; links are pairs of ranks."""
    members = tuple(member(f"m{i}~{i}") for i in range(size))
    names = [m.id for m in members]
    return View(
        id=ViewId(1, 1),
        predecessor=NO_VIEW,
        members=members,
        joiners=tuple(names[size - joiners :]),
        links=tuple(LinkSpec(names[a], names[b]) for a, b in links),
    )


def ring(size: int, reach: int) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({tuple(sorted((i, (i + k) % size))) for i in range(size) for k in range(1, reach + 1)}))  # type: ignore[misc]


def ids(members: list[Member]) -> list[str]:
    return [m.id for m in members]


# ------------------------------------------------------------------ whom a joiner asks


def test_in_a_small_job_all_that_hold_the_state_are_asked() -> None:
    small = view(SMALL_JOB, joiners=1)
    assert [ids(g) for g in groups(small, small.joiners[0], ())] == [list(small.ids()[:-1])]


def test_in_a_large_job_few_are_asked_and_all_in_the_end() -> None:
    large = view(101, joiners=1)
    found = groups(large, large.joiners[0], large.ids())
    assert {len(g) for g in found[:-1]} == {DONORS}
    assert sorted(m.id for g in found for m in g) == sorted(large.ids()[:-1])
    rank = {m: i for i, m in enumerate(large.ids())}
    assert all(sorted(g, key=lambda m: rank[m.id]) == g for g in found)


def test_many_newcomers_spread_over_the_members() -> None:
    large = view(164, joiners=64)
    asked = Counter(m.id for j in large.joiners for m in groups(large, j, ())[0])
    assert sum(asked.values()) == 64 * DONORS
    assert max(asked.values()) <= 4 * 64 * DONORS / 100


def test_members_that_it_has_links_with_come_first() -> None:
    sparse = view(60, joiners=1, links=ring(60, 4))
    near = {"m51~51", "m55~55", "m3~3"}
    assert {m.id for m in groups(sparse, sparse.joiners[0], near)[0]} > near


def test_some_of_its_own_machine_come_first_and_not_all() -> None:
    large = view(101, joiners=1)
    members = tuple(replace(m, host="here") if i % 4 == 0 else m for i, m in enumerate(large.members))
    here = replace(large, members=members)
    assert here.members[-1].host == "here"
    first = groups(here, here.joiners[0], ())[0]
    assert sum(m.host == "here" for m in first) >= DONORS // 2
    assert any(m.host != "here" for m in first)


# ------------------------------------------------------------------ foundings


def loads(founded: View, near: dict[str, set[str]]) -> tuple[int, Counter[str]]:
    """Returns the number of rounds until all joiners have the state, if each gets it a round after a donor, and how
    many joiners ask each member.
    """
    asked = {j: [m.id for m in groups(founded, j, near.get(j, set()))[0]] for j in founded.joiners}
    loaded, rounds = set(founded.ids()) - set(founded.joiners), 0
    while len(loaded) < len(founded.members):
        now = {j for j, whom in asked.items() if loaded.intersection(whom)}
        assert not now <= loaded, f"{set(asked) - loaded} ask nobody who loads before them"
        loaded, rounds = loaded | now, rounds + 1
    return rounds, Counter(m for whom in asked.values() for m in whom)


@pytest.mark.parametrize("size", [6, 16, 17, 64, 1024])
def test_founders_ask_others_that_load_before_them(size: int) -> None:
    founded = view(size, joiners=size - 1)
    _, asked = loads(founded, {})
    if size > SMALL_JOB:
        assert max(asked.values()) <= PULLS + PULLS**2


def test_founders_of_a_sparse_graph_ask_their_neighbours() -> None:
    founded = view(200, joiners=199, links=ring(200, 12))
    ranks = {m: i for i, m in enumerate(founded.ids())}
    near = {m: {o for o, k in ranks.items() if 0 < min((i - k) % 200, (k - i) % 200) <= 12} for m, i in ranks.items()}
    rounds, asked = loads(founded, near)
    assert rounds <= 10
    assert asked["m0~0"] <= 24
    for joiner in founded.joiners:
        assert {m.id for m in groups(founded, joiner, near[joiner])[0]} <= near[joiner]


def test_few_founders_ask_the_first_one_alone() -> None:
    founded = view(1 + PULLS, joiners=PULLS)
    assert all([ids(g) for g in groups(founded, j, ())] == [["m0~0"]] for j in founded.joiners)


def test_where_shares_are_fixed_nobody_is_asked_that_still_loads() -> None:
    founded = view(30, joiners=29)
    assert [ids(g) for g in groups(founded, "m9~9", (), fellows=False)] == [["m0~0"]]


def copies(founded: View, near: dict[str, set[str]], slow: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns when each founder has the state, in units of the time that one copy takes over a usual network card.

    Args:
        founded: All but one or few are joiners.
        near: Members that each one has links with; nothing where every pair has one.
        slow: Rates of some members' cards; others have 1.
    """
    rates = {m: (slow or {}).get(m, 1.0) for m in founded.ids()}
    asked = {j: {m.id for m in groups(founded, j, near.get(j, ()))[0]} for j in founded.joiners}
    lacks, at = dict.fromkeys(founded.joiners, 1.0), 0.0
    loaded = dict.fromkeys(set(founded.ids()) - set(founded.joiners), 0.0)
    served: dict[str, list[str]] = {}
    while lacks:
        for donor in loaded:  # a turn lasts until its founder has the state
            waiting = [j for j in lacks if donor in asked[j] and j not in served.get(donor, ())]
            going_on = [j for j in served.get(donor, ()) if j in lacks]
            served[donor] = [*going_on, *waiting][:PULLS]
        comes = dict.fromkeys(lacks, 0.0)
        for donor, peers in served.items():
            for joiner in peers:
                comes[joiner] += rates[donor] / len(peers)
        comes = {j: min(rate, rates[j]) for j, rate in comes.items() if rate}
        assert comes, f"{sorted(lacks)} ask nobody who loads before them"
        passed = min(lacks[j] / rate for j, rate in comes.items())
        at += passed
        for joiner, rate in comes.items():
            lacks[joiner] -= passed * rate
            if lacks[joiner] < 1e-9:
                del lacks[joiner]
                loaded[joiner] = at
    return loaded


def as_founded(size: int) -> tuple[View, dict[str, set[str]]]:
    """Returns the founding view of `size` members with the links that the scheduler assigns, and the neighbours of each
    member.
    """
    job = Job(min_nodes=size, **{**PATIENT, "max_nodes": size})
    job.machine.validate_state = lambda: None  # type: ignore[method-assign]
    for i in range(size):
        job.comes(hello(f"m{i}", pid=1000 + i, address=f"10.0.{i // 200}.{i % 200}"))
    for _ in range(2):
        job.feed(SchedulerTick())
    founded, near = job.views[-1], dict[str, set[str]]()
    assert len(founded.joiners) == size - 1
    for link in founded.links:
        near.setdefault(link.a, set()).add(link.b)
        near.setdefault(link.b, set()).add(link.a)
    return founded, near


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("every_pair", [False, True])
def test_a_founding_takes_time_by_the_logarithm_of_its_size(size: int, every_pair: bool) -> None:
    """All founders have the state after a time logarithmic in their number, as those that have it pass it on; one after
    the other would take `size` - 1 copies.

    A member that sends to `PULLS` others at a time has helped to make as many donors after as many copies. A usual
    graph of 256 takes 12.3.
    """
    founded, near = (view(size, joiners=size - 1), {}) if every_pair else as_founded(size)
    loaded = copies(founded, near)
    assert max(loaded.values()) <= 2 * math.log2(size)


def test_a_slow_founder_holds_up_few() -> None:
    """The first founder to get the state passes it on 20 times slower than usual: the others are delayed only a
    little.
    """
    founded, near = as_founded(256)
    first = founded.joiners[0]
    usual, loaded = copies(founded, near), copies(founded, near, {first: 0.05})
    assert loaded[first] == pytest.approx(20.0)
    assert max(loaded[j] - usual[j] for j in founded.joiners[1:]) < 3


# ------------------------------------------------------------------ learners


def test_donors_of_a_learner_are_linked_with_it_and_few() -> None:
    large, learner = view(100), member("new~200")
    linked = {m.id for m in large.members[10:50]}
    chosen = of_learner(learner, large.members, linked)
    assert len(chosen) == DONORS
    assert set(chosen) <= linked
    assert of_learner(learner, large.members, {"m7~7"}) == ("m7~7",)


def test_a_change_of_the_view_changes_few_donors() -> None:
    large, learner = view(100), member("new~200")
    everybody = set(large.ids())
    before = of_learner(learner, large.members, everybody)
    after = of_learner(learner, large.members[1:], everybody)
    assert len(set(before) - set(after)) <= 1


def header(*learners: str) -> object:
    return replace(GENESIS, seq=GENESIS.seq + 1, learners=learners)


@pytest.mark.parametrize(
    ("size", "told", "linked", "keeps"),
    [
        (10, None, False, True),
        (10, True, False, True),
        (40, True, False, True),
        (40, False, True, False),
        (40, None, True, True),
        (40, None, False, False),
    ],
)
def test_a_member_keeps_state_and_log_if_it_is_a_donor(size: int, told: bool | None, linked: bool, keeps: bool) -> None:
    """A member keeps state and log for a learner if it is named as a donor or, if the list is still to come, has a link
    with the learner.
    """
    ruling, serving = view(size), Serving()
    if told is not None:
        named = ruling.members[:1] if told else ()
        serving.told("m0~0", ServeLearners(("new~200",), replace(ruling, members=named)))
    serving.committed(GENESIS, header("new~200"), ruling, {"new~200": linked})  # type: ignore[arg-type]
    assert serving.keeps is keeps
    serving.committed(header("new~200"), header("new~200"), ruling, {})  # type: ignore[arg-type]
    assert serving.keeps is keeps
    serving.committed(header("new~200"), header(), ruling, {})  # type: ignore[arg-type]
    assert not serving.keeps


def test_the_scheduler_names_few_donors_and_tells_the_root_last() -> None:
    wave = Wave(SMALL_JOB + 4, replays=True)
    said: list[tuple[str, ServeLearners]] = []
    send = wave.job.machine.roster.send
    wave.job.machine.roster.send = lambda peer, message: (said.append((peer.id, message)), send(peer, message))[1]  # type: ignore[method-assign,assignment]
    wave.come(range(1))
    wave.passes(0.2)
    told = [(who, message) for who, message in said if isinstance(message, ServeLearners)]
    learner = next(p.id for p in wave.job.machine.roster.peers.values() if p.standing is Standing.OBSERVING)
    donors = dict(told)[learner].view.ids()
    assert 1 < len(donors) <= DONORS
    assert {who for who, message in told if message.view.ids() == (who,)} == set(donors)
    assert sum(message.view.ids() == () for _, message in told) == SMALL_JOB + 4 - len(donors)
    assert told[-1][0] == wave.job.views[-1].root


def test_a_learner_that_is_named_once_more_is_served_by_those_that_keep_nothing_yet() -> None:
    """A learner begins again: members without a copy make one for it, while a member that keeps one for another learner
    goes on with that.
    """
    ruling, first, again = view(40), header("x~200", "y~201"), header("x~200", "x~200", "y~201")
    keeper, other, late = Serving(), Serving(), Serving()
    for serving, names in ((keeper, ("m0~0",)), (other, ()), (late, ())):
        told = replace(ruling, members=tuple(m for m in ruling.members if m.id in names))
        serving.told("m0~0", ServeLearners(("x~200", "y~201"), told))
        serving.committed(GENESIS, first, ruling, {})  # type: ignore[arg-type]
    assert [(s.keeps, s.copies) for s in (keeper, other, late)] == [(True, True), (False, False), (False, False)]
    for serving in (keeper, other):
        mine = replace(ruling, members=ruling.members[:1])
        serving.told("m0~0", ServeLearners(("x~200", "x~200", "y~201"), mine))
    for serving in (keeper, other, late):
        serving.committed(first, again, ruling, {"x~200": serving is late})  # type: ignore[arg-type]
    assert [(s.keeps, s.copies) for s in (keeper, other, late)] == [(True, False), (True, True), (True, True)]
    keeper.committed(again, header("x~200", "x~200"), ruling, {})  # type: ignore[arg-type]
    assert (keeper.keeps, keeper.copies) == (True, False)


def test_a_learner_waits_until_it_is_given_members_that_live() -> None:
    """A learner whose list of donors is empty waits; once it has donors it begins at the newest header that names
    it.
    """
    learning, ruling = Learning(), view(40)
    first, later = (replace(GENESIS, seq=i, kind=Kind.STEP, learners=("m1~1",) * i) for i in (1, 2))
    assert learning.told(replace(ruling, members=())) == []
    assert learning.consider("m1~1", first) == []
    assert learning.told(ruling) == [Observe(first, ruling)]
    assert learning.told(ruling) == []
    assert learning.consider("m1~1", later) == [Observe(later, ruling)]


@pytest.mark.parametrize(("size", "learners", "share"), [(16, 1, 16), (24, 1, 8), (24, 2, 16), (24, 5, 24)])
def test_all_members_of_a_machine_that_may_copy_the_state_share_its_memory(
    size: int, learners: int, share: int
) -> None:
    """Several learners have different donors, which may all be on one machine: these share its memory for copies."""
    ruling = view(size)
    here = replace(ruling, members=tuple(replace(m, host="here") for m in ruling.members))
    assert copiers(here, "here", learners) == share
    assert copiers(ruling, "here", learners) == 0
