"""Making views: who is in the next one, in which order, by which plan, and why (pure functions; reasons in words).

A plan that the user drew for certain members may not fit those of a view: then `plan_for` gives another one, and the
view's reason says so, as it does when the user's plan fits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.types import NO_VIEW, Member, PlanSpec, View, ViewId
from chaos_lightning.planning.trees import plan_for


def founding_view(
    number: ViewId, members: Sequence[Member], *, plan: PlanSpec, accumulate: int, chain: Sequence[View]
) -> View:
    """The first view: the first member's state is the job's, the others receive what differs (PROTOCOL.md 14)."""
    names = ", ".join(m.id for m in members)
    reason = f"founded by {names}"
    if chain:
        reason = f"founded again by {names}: nobody of view {chain[-1].id} is left"
    plan, reason = _planned(plan, members, plan, reason)
    return View(
        id=number,
        predecessor=chain[-1].id if chain else NO_VIEW,
        members=tuple(members),
        joiners=tuple(m.id for m in members[1:]),
        plan=plan,
        accumulate=accumulate,
        reason=reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An intended change of a settled view."""

    members: tuple[Member, ...]
    joiners: tuple[str, ...]
    reason: str


def intended_change(
    view: View, *, leavers: Sequence[str], newcomers: Sequence[Member], min_nodes: int
) -> Change | None:
    """The next change of a view that all its members have entered; None if there is nothing to change.

    Leaves go first, since they need no boundary, unless too few members would be left: then newcomers come in with the
    same view, or even before, so that somebody holds the state for them.
    """
    staying = tuple(m for m in view.members if m.id not in leavers)
    going = [m.id for m in view.members if m.id in leavers]
    coming = tuple(newcomers)
    words_out, words_in = f"{', '.join(going)} leave", f"{', '.join(m.id for m in coming)} join"
    if going and len(staying) >= max(1, min_nodes):
        return Change(members=staying, joiners=(), reason=words_out)
    if coming:
        ids = tuple(m.id for m in coming)
        if going and staying:
            return Change(members=(*staying, *coming), joiners=ids, reason=f"{words_out}; {words_in}")
        return Change(members=(*view.members, *coming), joiners=ids, reason=words_in)
    if going and staying:
        return Change(members=staying, joiners=(), reason=f"{words_out}; fewer than min_nodes={min_nodes} stay")
    return None


def _planned(spec: PlanSpec, members: Sequence[Member], before: PlanSpec, reason: str) -> tuple[PlanSpec, str]:
    """The plan for these members; where it is not the one before, the reason tells why."""
    plan, why = plan_for(spec, [m.id for m in members])
    return plan, reason if plan == before else f"{reason}; plan: {why}"


def changed_view(view: View, number: ViewId, change: Change, plan: PlanSpec) -> View:
    """The view of an intended change."""
    plan, reason = _planned(plan, change.members, view.plan, change.reason)
    return replace(
        view,
        id=number,
        predecessor=view.id,
        members=change.members,
        joiners=change.joiners,
        plan=plan,
        reason=reason,
    )


def recovered_view(view: View, number: ViewId, ruling: Ruling, plan: PlanSpec, why: str) -> View:
    """The view after a failure: the ruling's members in the old rank order."""
    members = tuple(m for m in view.members if m.id in ruling.members)
    plan, reason = _planned(plan, members, view.plan, f"{why}; {ruling.reason}")
    return replace(
        view,
        id=number,
        predecessor=view.id,
        members=members,
        joiners=ruling.joiners,
        plan=plan,
        reason=reason,
    )
