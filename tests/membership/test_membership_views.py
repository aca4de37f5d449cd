"""Tests views and their reduction plans: the user's plan where it fits, and the reason where it does not (any more)."""

from __future__ import annotations

from membership_script import member

from chaos_lightning.membership.peers import listed
from chaos_lightning.membership.pipelining import Lineup
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.topology import Net, every_pair
from chaos_lightning.membership.views import Change, changed_view, founding_view, intended_change, recovered_view
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Member, PlanSpec, TreeSpec, View, ViewId

PLAN = PlanSpec("user", 4096, (TreeSpec(0, 0, ("a", "b", "c"), ("", "a", "a")),))
INSTEAD = "plan: rotating instead: tree 0 does not span"


def members(ids: str) -> tuple[Member, ...]:
    return tuple(member(m) for m in ids.split())


def complete(ids: str) -> Net:
    return Net(every_pair(ids.split()))


def founded(ids: str) -> View:
    return founding_view(ViewId(1, 1), members(ids), plan=PLAN, accumulate=1, chain=(), net=complete(ids))


def changed(view: View, ids: str) -> View:
    change = Change(members=members(ids), joiners=(), reason="a change")
    return changed_view(view, ViewId(1, 2), change, PLAN, complete(ids))


def recovered(view: View, ids: str) -> View:
    ruling = Ruling(base=GENESIS, members=tuple(ids.split()), reason="redo")
    lineup = Lineup(members=tuple(m for m in view.members if m.id in ruling.members))
    return recovered_view(view, ViewId(1, 3), ruling, PLAN, "a death", complete(ids), lineup)


def test_founders_that_fit_go_by_the_users_trees() -> None:
    view = founded("a~1 b~2 c~3")
    assert view.plan == PLAN
    assert view.reason == "founded by a~1, b~2, c~3"


def test_founders_that_do_not_fit_go_by_rotating_and_it_says_why() -> None:
    view = founded("a~1 b~2 c~3 d~4")
    assert view.plan == PlanSpec("rotating", 4096)
    assert view.reason == f"founded by a~1, b~2, c~3, d~4; {INSTEAD} ['d~4']; a tree has all members"


def test_a_newcomer_ends_the_users_trees_and_its_leave_brings_them_back() -> None:
    three = founded("a~1 b~2 c~3")
    four = changed(three, "a~1 b~2 c~3 d~4")
    assert (four.plan.kind, four.reason) == ("rotating", f"a change; {INSTEAD} ['d~4']; a tree has all members")
    five = changed(four, "a~1 b~2 c~3 d~4 e~5")
    assert (five.plan.kind, five.reason) == ("rotating", "a change")
    again = recovered(four, "a~1 b~2 c~3")
    assert (again.plan, again.reason) == (PLAN, "a death; redo; plan: user as configured")


def test_a_death_ends_the_users_trees() -> None:
    view = recovered(founded("a~1 b~2 c~3"), "a~1 b~2")
    assert view.plan.kind == "rotating"
    assert "plan: rotating instead: tree 0 names 'c', which is no member" in view.reason


def test_another_incarnation_of_the_same_name_fits() -> None:
    view = changed(recovered(founded("a~1 b~2 c~3"), "a~1 b~2"), "a~1 b~2 c~4")
    assert (view.plan, view.reason) == (PLAN, "a change; plan: user as configured")


def test_a_reason_lists_some_of_many_names_and_counts_the_rest() -> None:
    many = tuple(Member(f"m{i}~{i}", f"m{i}", "h", "127.0.0.1", i) for i in range(300))
    change = intended_change(View(ViewId(1, 1), NO_VIEW, many[:1]), leavers=(), newcomers=many[1:], min_nodes=1)
    assert change is not None
    assert change.reason == "m1~1, m2~2, m3~3, m4~4, m5~5, m6~6, m7~7, m8~8, ... and 291 more join"
    assert listed("abc") == "a, b, c"
    assert len(bounded("x" * 100_000)) < 5000
