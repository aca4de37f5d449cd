"""Encodes a view as a change of the view before it: members and links that go and come, another plan or other
pipelines.

Theory of operation. A change is made only where it leads back to the very view: members that stay keep their order and
those that come follow them, links are in rank order. It names the view that it changes by number and digest, and is
applied to nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.packing import PackedChange, pack_with, unpack_members, unpack_with
from chaos_lightning.protocol.types import LinkSpec, PlanSpec, View


def change_to(before: View, view: View, digest: str) -> PackedChange | None:
    """Returns the change that leads from `before` to `view`; None if no change can express the difference.

    Args:
        before: The view that `view` follows.
        view: The next view.
        digest: Whatever stands for the content of `before`.
    """
    ids = frozenset(view.ids())
    stay = sum(m.id in ids for m in before.members)
    links, known = frozenset(view.links), frozenset(before.links)
    same = view.plan == before.plan
    keeps_pipelines = bool(view.pipelines) and view.pipelines == before.pipelines
    said = replace(view, plan=PlanSpec() if same else view.plan, pipelines="" if keeps_pipelines else view.pipelines)
    come = tuple(link for link in view.links if link not in known)
    change = PackedChange(
        before=digest,
        gone=tuple(rank for rank, m in enumerate(before.members) if m.id not in ids),
        lost=tuple(n for n, link in enumerate(before.links) if link not in links and {link.a, link.b} <= ids),
        replans=not same,
        view=pack_with(replace(said, links=come), view.members[stay:]),
        keeps_pipelines=keeps_pipelines,
    )
    try:
        return change if view.predecessor == before.id and changed(before, change, digest) == view else None
    except WireError:
        return None


def changed(before: View, change: PackedChange, digest: str) -> View:
    """Applies a change to the view `before`, whose content has the digest `digest`; returns the new view.

    Raises:
        WireError: The change is none, or one of another view.
    """
    said = change.view
    if (said.predecessor, change.before) != (before.id, digest):
        raise WireError(f"a change of view {said.predecessor} ({change.before}) is none of view {before.id} ({digest})")
    gone, lost = _positions(change.gone, len(before.members)), _positions(change.lost, len(before.links))
    stay = tuple(m for rank, m in enumerate(before.members) if rank not in gone)
    made = unpack_with(said, (*stay, *unpack_members(said.members)))
    place = {member: rank for rank, member in enumerate(made.ids())}
    kept = [link for n, link in enumerate(before.links) if n not in lost and link.a in place and link.b in place]
    links = (*kept, *made.links)
    if not all(link.a in place and link.b in place for link in made.links):
        raise WireError("a change with a link of somebody who is no member")
    if made.plan == before.plan if change.replans else made.plan != PlanSpec():
        raise WireError("a change whose plan is none")
    if (made.pipelines or not before.pipelines) if change.keeps_pipelines else made.pipelines == before.pipelines != "":
        raise WireError("a change whose pipelines are none")

    def ends(link: LinkSpec) -> tuple[int, int]:
        return place[link.a], place[link.b]

    plan = made.plan if change.replans else before.plan
    pipelines = before.pipelines if change.keeps_pipelines else made.pipelines
    made = replace(made, plan=plan, pipelines=pipelines)
    return replace(made, links=tuple(sorted(links, key=ends)) if change.lost or made.links else links)


def _positions(numbers: Iterable[int], count: int) -> frozenset[int]:
    found = tuple(numbers)
    if list(found) != sorted(frozenset(found)) or (found and not 0 <= found[0] <= found[-1] < count):
        raise WireError(f"positions {found[:9]} of {count} are none")
    return frozenset(found)
