"""Tracks one member's links: which are wanted, which stand, and what the scheduler has yet to be told of them.

Theory of operation. A member has links to its neighbours in the view, and to whom the scheduler named: newcomers, and
links that may come back. Those of the view before stay until the first slot of this one commits, since then every
member has all that came over them (protocol.md 1).
"""

from __future__ import annotations

from chaos_lightning.membership.effects import Connect, MemberEffect, ToScheduler
from chaos_lightning.membership.topology import neighbours
from chaos_lightning.protocol.types import MADE_ANEW, LinkEvent, Member, OpenLinks, View


class Neighbours:
    """Links of one member."""

    def __init__(self) -> None:
        self.links: dict[str, bool] = {}
        """Whether each link stands, by member."""
        self.wanted: tuple[Member, ...] | None = None
        """Members that the scheduler named; None before it did."""
        self.former: View | None = None
        """The view before, while links of it stay."""
        self._settled = False
        """Whether a slot was committed in this view: all have their parts, and members that it lets go serve nobody
        any more.
        """
        self._remade: set[str] = set()
        """Members whose links were made anew since this member entered its view."""
        self._parted: dict[str, str] = {}
        """Reasons why the other links do not stand."""

    def asked(self, me: str, told: OpenLinks) -> None:
        """Stores the scheduler's list of the members to have links with, or applies changes of that list."""
        before = {p.id: p for p in self.wanted or ()} if told.changes else {}
        named = {**before, **{p.id: p for p in told.peers}}
        self.wanted = tuple(p for p in named.values() if p.id != me and p.id not in told.gone)

    def connect(self, me: str, view: View | None) -> list[MemberEffect]:
        """Returns effects that make the links that this member wants in this view, and end all other links."""
        wanted: dict[str, Member] = {}
        if view is not None:
            near = {m for v in (view, self.former) if v is not None for m in neighbours(v, me)}
            # Members that the view lets go serve their parts (P9), to all that have a link with them.
            leaving = () if self._settled else view.leaving
            near |= {m.id for m in leaving}
            wanted = {m.id: m for m in (*view.members, *leaving) if m.id in near}
        for member in self.wanted or ():
            wanted.setdefault(member.id, member)
        wanted.pop(me, None)
        effects: list[MemberEffect] = []
        for peer in [p for p, up in self.links.items() if up and p not in wanted]:
            effects += self._let_go_of(peer, view)
        return [*effects, Connect(tuple(wanted.values()))]

    def _let_go_of(self, peer: str, view: View | None) -> list[MemberEffect]:
        """Gives up a link that is not wanted any more; tells the scheduler if both ends are members of the view."""
        if view is None or view.find(peer) is None:
            del self.links[peer]
            return []
        self.links[peer], self._parted[peer] = False, "removed"
        return [ToScheduler(LinkEvent(peer, False, "removed"))]

    def enter(self, former: View | None) -> None:
        """Notes that this member enters a view; `former` is the previous view, if a header brought the new one."""
        self.former, self._settled = former, False
        self._remade.clear()

    def settle(self, me: str, view: View | None) -> list[MemberEffect]:
        """Gives up links that only members of the previous view or leavers needed, once all have entered this view and
        hold their parts.

        Those are links of the view before that this one does not have, and those with whom this one lets go.
        """
        former, self.former = self.former, None
        first, self._settled = not self._settled, True
        if view is None:
            return []
        gone = set(neighbours(former, me)) - set(neighbours(view, me)) if former is not None else set[str]()
        served = first and bool(view.leaving)
        return self.connect(me, view) if served or any(view.find(m) is not None for m in gone) else []

    def changed(self, peer: str, up: bool, evidence: str) -> list[MemberEffect]:
        """Notes that a link came up or failed, and returns the report to the scheduler."""
        before = self.links.get(peer)
        if before is up:
            return []
        self.links[peer] = up
        self._parted[peer] = "" if up or evidence.startswith("closed") else evidence
        if up and before is False:
            self._remade.add(peer)
        return [ToScheduler(LinkEvent(peer, up, evidence))]

    def again(self) -> list[MemberEffect]:
        """Returns reports of the state of all links, for a new control stream: reports on the old one may be lost."""
        words = {
            peer: (MADE_ANEW if peer in self._remade else "connected") if up else self._parted.get(peer) or "closed"
            for peer, up in self.links.items()
        }
        return [ToScheduler(LinkEvent(peer, up, words[peer])) for peer, up in self.links.items()]

    @property
    def ready(self) -> bool:
        """Whether links stand to all members that the scheduler has named."""
        return self.wanted is not None and all(self.links.get(p.id, False) for p in self.wanted)
