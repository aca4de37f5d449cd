"""Makes views: who is in the next one, in which order, by which reduction plan, and why (pure functions; reasons in
words).

A plan that the user drew for certain members may not fit those of a view, and one that needs a link between every pair
may not fit its links: then `plan_for` or the generator (planning/overlay.py) gives another one, and the view's reason
says so, as it does when the configured plan fits again. Where a planner is configured ("auto", ...) it draws every
plan. Beyond `SMALL_JOB` members neither has the time that a decision has: a plan that still fits is kept, or one is
made in milliseconds (planning/quick.py), and `replanned` looks for a better one meanwhile (redrawing.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from chaos_lightning.membership.effects import DrawPlan
from chaos_lightning.membership.peers import listed
from chaos_lightning.membership.pipelining import Lineup
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.topology import Measured, Net
from chaos_lightning.planning import overlay
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import KINDS, misfit, plan_for
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.types import NO_VIEW, SMALL_JOB, Member, PlanSpec, View, ViewId


def founding_view(
    number: ViewId,
    members: Sequence[Member],
    *,
    plan: PlanSpec,
    accumulate: int,
    chain: Sequence[View],
    net: Net,
    chain_id: str = "",
    state: str = "",
) -> View:
    """Returns the first view of a job: the first member's state is the job's, and the others receive what differs
    (protocol.md 14).

    `state` says what becomes of the state that the job had, if it is founded again.
    """
    names = listed(m.id for m in members)
    reason = f"founded by {names}"
    if chain:
        reason = f"founded again by {names}: nobody of view {chain[-1].id} is left"
        reason += f"; {state}" if state else ""
    plan, reason = _planned(plan, members, plan, reason, net)
    return View(
        id=number,
        predecessor=chain[-1].id if chain else NO_VIEW,
        members=tuple(members),
        joiners=tuple(m.id for m in members[1:]),
        plan=plan,
        accumulate=accumulate,
        reason=bounded(reason),
        links=net.specs([m.id for m in members]),
        chain=chain_id,
    )


def in_pipelines(view: View, pipelines: str, holders: Collection[str]) -> View:
    """Returns the first view of a job with pipelines, made from the founding view.

    The oldest owner of each part makes it, so there are no joiners but those that lack a state which others have in
    files (P13, P14).

    Args:
        view: View that `founding_view` has made.
        pipelines: Pipelines as text; "": the view stays as it is.
        holders: Ids of members that have parts of the base in files; none if it is GENESIS.
    """
    joiners = tuple(m for m in view.ids() if m not in holders) if holders else ()
    return replace(view, pipelines=pipelines, joiners=joiners) if pipelines else view


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Intended change of a view that all its members have entered."""

    members: tuple[Member, ...]
    joiners: tuple[str, ...]
    reason: str
    plan: PlanSpec | None = None
    """Plan of the new view, whatever is configured; None: as configured."""


def intended_change(
    view: View, *, leavers: Sequence[str], newcomers: Sequence[Member], min_nodes: int
) -> Change | None:
    """Returns the next change of a view that all its members have entered; None if there is nothing to change.

    Leaves go first, since they need no boundary, unless too few members would be left: then newcomers come in with the
    same view, or even before, so that somebody holds the state for them.
    """
    out = set(leavers)
    staying = tuple(m for m in view.members if m.id not in out)
    going = [m.id for m in view.members if m.id in out]
    coming = tuple(newcomers)
    words_out, words_in = f"{listed(going)} leave", f"{listed(m.id for m in coming)} join"
    if going and nodes.count(staying) >= max(1, min_nodes):
        return Change(members=staying, joiners=(), reason=words_out)
    if coming:
        ids = tuple(m.id for m in coming)
        if going and staying:
            return Change(members=(*staying, *coming), joiners=ids, reason=f"{words_out}; {words_in}")
        return Change(members=(*view.members, *coming), joiners=ids, reason=words_in)
    if going and staying:
        return Change(members=staying, joiners=(), reason=f"{words_out}; fewer than min_nodes={min_nodes} stay")
    return None


def plan_within(
    spec: PlanSpec, members: Sequence[Member], net: Net, before: PlanSpec | None = None
) -> tuple[PlanSpec, str]:
    """Returns the reduction plan for these members over these links, configured or generated, and the reason in words.

    Args:
        spec: Reduction plan as configured.
        members: Members of the view, in rank order.
        net: Links of the members.
        before: Plan that ruled so far: a large job keeps it if it fits.
    """
    ids = [m.id for m in members]
    links = net.known(ids)
    wrong = misfit(spec, ids, links)
    if not wrong:
        return spec, f"{spec.kind} as configured"
    if not _drawn(spec) and len(links) == len(ids) * (len(ids) - 1) // 2:
        return plan_for(spec, ids)
    many = len(ids) > SMALL_JOB
    if many and before is not None and not misfit(before, ids, links):
        return before, "as before"
    plan, reason = quick(members, links) if many else _draw(spec, members, links)
    return _chunked(plan, spec), reason if _drawn(spec) else f"{reason}, as {wrong}"


def _chunked(plan: PlanSpec, spec: PlanSpec) -> PlanSpec:
    return replace(plan, chunk_nbytes=spec.chunk_nbytes or plan.chunk_nbytes)


def _drawn(spec: PlanSpec) -> bool:
    """Returns whether the configuration names a planner rather than a reduction plan."""
    return spec.kind not in KINDS and not spec.kind.startswith("tree")


def _draw(spec: PlanSpec, members: Sequence[Member], links: Measured) -> tuple[PlanSpec, str]:
    if not _drawn(spec):
        return overlay.plan(members, links)[:2]
    try:
        return overlay.plan(members, links, policy=spec.kind)[:2]
    except Exception as error:  # a planner of the user's may raise anything, and the job must go on
        plan, reason, _ = overlay.plan(members, links)
        return plan, f"{reason}, since planner {spec.kind!r} failed: {type(error).__name__}: {error}"


def replanned(wish: DrawPlan) -> tuple[PlanSpec | None, str]:
    """Returns a better reduction plan than the present one (or None), and the reason in words.

    In place of a plan that was drawn in a hurry a planner that the configuration names has its own way. Any other
    change must pay, by what was measured.
    """
    spec, members, links = wish.spec, wish.members, wish.links
    if not _drawn(spec) and not misfit(spec, [m.id for m in members], links):
        return None, f"the plan is {spec.kind}, as configured"
    named = _drawn(spec) and spec.kind != "auto"
    policy = spec.kind if named else "auto"
    present = replace(wish.present, chunk_nbytes=0)  # as planners leave it
    plan: PlanSpec | None
    try:
        if wish.hasty and named:
            plan, reason, _ = overlay.plan(members, links, policy=policy)
        else:
            plan, reason = overlay.replan(present, members, links, policy=policy)
    except Exception as error:  # as in `_draw`
        return None, f"planner {spec.kind!r} failed: {type(error).__name__}: {error}"
    return (None if plan is None or plan == present else _chunked(plan, spec)), reason


def _planned(
    spec: PlanSpec, members: Sequence[Member], before: PlanSpec, reason: str, net: Net
) -> tuple[PlanSpec, str]:
    """Returns the reduction plan for these members, and the given reason, which also explains the plan if that has
    changed.
    """
    plan, why = plan_within(spec, members, net, before)
    return plan, reason if plan == before else f"{reason}; plan: {why}"


def changed_view(
    view: View,
    number: ViewId,
    change: Change,
    plan: PlanSpec,
    net: Net,
    pipelines: str = "",
    why: str = "",
    batch: str = "",
) -> View:
    """Returns the view that results from an intended change.

    Args:
        view: View that the new one follows.
        number: Number of the new view.
        change: Intended change.
        plan: Reduction plan as configured.
        net: Links of the new view's members.
        pipelines: Pipelines of the new view, as text.
        why: Reason of the pipelines in words, if they are others than before.
        batch: Split of a batch of fixed size among the new view's members.
    """
    plan, reason = (
        (change.plan, change.reason)
        if change.plan is not None
        else _planned(plan, change.members, view.plan, change.reason, net)
    )
    return replace(
        view,
        id=number,
        predecessor=view.id,
        members=change.members,
        joiners=change.joiners,
        plan=plan,
        reason=bounded(f"{reason}; pipelines: {why}" if why else reason),
        links=net.specs([m.id for m in change.members]),
        pipelines=pipelines,
        leaving=tuple(m for m in view.members if m not in change.members) if pipelines else (),
        batch=batch,
    )


def recovered_view(
    view: View, number: ViewId, ruling: Ruling, plan: PlanSpec, why: str, net: Net, lineup: Lineup, batch: str = ""
) -> View:
    """Returns the view after a failure: the members of the recovery's ruling in their old rank order, and those whom
    the pipelines need besides. `batch` is the split of a batch of fixed size among them.
    """
    reason = f"{why}; {ruling.reason}"
    plan, reason = _planned(plan, lineup.members, view.plan, reason, net) if lineup.members else (view.plan, reason)
    return replace(
        view,
        id=number,
        predecessor=view.id,
        members=lineup.members,
        joiners=lineup.joiners,
        plan=plan,
        reason=bounded(f"{reason}; {lineup.reason}" if lineup.reason else reason),
        links=net.specs([m.id for m in lineup.members]),
        pipelines=lineup.pipelines,
        leaving=lineup.leaving,
        batch=batch,
    )
