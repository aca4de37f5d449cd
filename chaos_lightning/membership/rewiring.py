"""Changes views because of links: those that fail, come back, are asked for or removed, or whose loss splits the
members.

Theory of operation. Three moves, none of which moves training state:

- A link between two members that both speak to the scheduler is down for longer than it takes to dial again: the slot
  that needs it can never complete, so a recovery puts the same members into a view without it (`_turn_failed`).
- A link that is removed, added, or back for long enough (`Fact.seasoned`): a view of the same members with another
  graph rides on the next header (`turn_links`).
- The graph falls apart. Nobody goes on for `CUT_PATIENCE_S` if a link that is dialled could mend it; then one part
  goes on (`_side`). It holds the training state and reaches min_nodes, with newcomers if need be, or all wait. Of
  several it is the one with the most members, and of equal ones that with the oldest member. All members have
  promised by then (protocol.md 8), so the others cannot go on: they are put out, throw their state away, and come in
  again as newcomers when a link of theirs stands (11, 14b).

The scheduler decides all this alone and stores it first, as any view (7). Members that it does not reach are judged by
the detector and cannot complete a slot meanwhile, as each takes a contribution of every member (1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.peers import Peer, Standing, listed
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.topology import (
    CUT_PATIENCE_S,
    Net,
    Pair,
    Topology,
    components,
    connected,
    in_words,
    pair,
    ranked,
)
from chaos_lightning.membership.views import Change
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import NO_VIEW, SMALL_JOB, Kind, Report, View

Rule = Callable[[Mapping[str, Report]], Ruling]
_PAUSE_S = 0.02
"""Seconds after which links are looked at again while time alone may change something about them; where more than
`SMALL_JOB` members have links, as many times more.
"""


class Rewiring:
    """Changes of views that links make necessary. Arguments are scheduler components that it uses."""

    def __init__(
        self,
        desk: Desk,
        book: Book,
        roster: Roster,
        recovery: Recovery,
        graph: Graph,
        topology: Topology,
        detector: Detector,
    ) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._recovery = recovery
        self._graph = graph
        self._topology = topology
        self._detector = detector
        self._look_at = self._failed_at = float("-inf")
        self._cut_at: float | None = None
        """Time since which the living members have been in parts, ..."""
        self._parts = 1
        """... and the largest number of these parts."""
        self.cut: Mapping[str, str] = MappingProxyType({})
        """Members that are put out because no link leads to the side that goes on, with the reason."""
        self._ailing = False
        """Whether some link is down, or carries nothing."""
        self._news = True
        """Whether anything was said about links since they were looked at."""
        self._unsettled = True
        """Whether the latest view's graph may have to change."""

    def seen(self) -> None:
        """Notes, after each event, whether it brought news of links."""
        if self._topology.news:
            self._unsettled = self._news = True
        self._topology.news = False

    def shift(self, gap: float) -> None:
        """Moves the deadlines of links and of waiting groups by the `gap` seconds for which the scheduler was
        frozen.
        """
        self._topology.shift(gap)
        if self._cut_at is not None:
            self._cut_at += gap

    def _failing(self) -> list[tuple[Pair, str]]:
        """Returns the links of present views that are down though both ends live, each with one end's reason."""
        found = []
        suspected = self._detector.suspicions
        for ends, fact in self._topology.ailing.items():
            if self._desk.now - fact.since < self._settings.confirm_timeout_s:
                continue
            peers = [p for m in ends if (p := self._roster.peers.get(m)) is not None]
            if len(peers) < 2 or not all(self._speaks(p, fact.since) and p.id not in suspected for p in peers):
                continue
            if self._graph.in_force(*ends):
                found.append((ends, fact.down or fact.idle))
        return found

    def _speaks(self, peer: Peer, since: float) -> bool:
        inside = peer.standing in (Standing.MEMBER, Standing.LEAVER)
        return inside and peer.alive and peer.known and peer.conn is not None and peer.heard > since

    def turn_failed(self) -> bool:
        """Starts a recovery if living members cannot reach each other: the next view will lack their link, or include
        one side only.
        """
        if not self._due():
            self._cut_at = None if not self._ailing else self._cut_at
            return False
        ids = self._remaining()
        graph, all_of_them = self._graph.pairs(ids), self._graph.pairs([p.id for p in self._roster.living()])
        failing = [
            (ends, words)
            for ends, words in self._failing()
            if ends not in (graph if ends <= frozenset(ids) else all_of_them)
        ]
        if not failing:
            self._cut_at = None
            return False
        (ends, words), *more = failing
        one, other = sorted(ends)
        why = f"the link between {one} and {other} failed ({words}) and both live"
        why += f"; {len(more)} more failed" if more else ""
        if connected(ids, graph):
            self._cut_at = None
        elif self._awaits_mending(ids):
            return False
        return self._recovery.begin(why)

    def _remaining(self) -> list[str]:
        """Returns the members that a recovery begun now would put into its view: living ones of the latest view that
        have entered any view.

        A newcomer that no header has let in yet holds nothing and waits for a later view (`Ruling.waiting`), so its
        links hold nobody together until then. Whether their own links are missed is judged by these alone: by the
        graph of the announced view, newcomer included, one could be missed in the view before, which a recovery would
        only bring back, and so on without end. A newcomer's links are judged by the view that it is to come in with.
        """
        return [p.id for p in self._roster.living() if not p.known or p.entered != NO_VIEW]

    def _due(self) -> bool:
        """Returns whether to check links now: there is news of them, or some are down and the pause since the last
        check is over.
        """
        news = self._topology.news or self._news
        if news:
            self._ailing, self._news = bool(self._topology.ailing), False
        due = self._ailing and (news or self._desk.now >= self._failed_at)
        if due:
            self._failed_at = self._desk.now + self._pause_s()
        return due

    def _pause_s(self) -> float:
        return _PAUSE_S * max(1.0, len(self._roster.peers) / SMALL_JOB)

    def _awaits_mending(self, ids: list[str]) -> bool:
        """Returns whether separated groups of members are to wait, since a missing link between them may soon come
        back.
        """
        groups = components(ids, self._graph.pairs(ids))
        place = {m: i for i, part in enumerate(groups) for m in part if self._roster.peers[m].conn is not None}
        if self._cut_at is None:
            self._cut_at, self._parts = self._desk.now, 1
            self._desk.note("notice", text=f"links hold the members together no more: {in_words(groups)}")
        if len(groups) > self._parts:
            self._parts = len(groups)
            self._topology.partners.bridge([[m for m in part if m in place] or part for part in groups])
        mendable = any(place.get(b, at) != at for a, at in place.items() for b in self._topology.partners.of(a))
        if not mendable or self._desk.now - self._cut_at >= CUT_PATIENCE_S:
            return False
        text = f"no link between {in_words(groups)}: all wait {CUT_PATIENCE_S:g} s for one"
        self._roster.tell(text, [self._roster.peers[m] for m in ids])
        return True

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        """Returns the reports of the members that may go on together; None while separated groups wait for a link
        between them.

        Args:
            reports: All that came.
            rule: Base, hand-on or redo, and who goes on, by some of them.
        """
        assert self._book.latest is not None
        self.cut = {}
        latest = self._book.latest
        order = [m for m in (*latest.ids(), *(m.id for m in latest.leaving)) if m in reports]
        chosen = order
        while True:
            groups = components(chosen, self._graph.pairs(chosen))
            if len(groups) > 1 and self._awaits_mending(chosen):
                return None
            rulings = {part: rule({m: reports[m] for m in part}) for part in ranked(groups, order)}
            best = [part for part, ruling in rulings.items() if ruling.base is not None]
            best.sort(key=lambda part: not self.will_do(rulings[part]))
            together = {m: reports[m] for m in chosen}
            if not best:
                return None if len(groups) > 1 and self._waits_for_links(groups, rule(together)) else together
            members, leaving = rulings[best[0]].members, rulings[best[0]].leaving
            if connected(members, self._graph.pairs(members)):
                break
            # A member that cannot go on, or leaves, held them together.
            going = [m for m in chosen if m in members or m in leaving]
            chosen = going if going != chosen else [m for m in chosen if m in members]
        for member in (m for m in order if m not in best[0]):
            whom = listed(best[0])
            self.cut[member] = f"no link leads to {whom} ({len(best[0])} of {len(order)} members)"
        if not self.cut:
            self._cut_at = None
        for member in order:  # if too few are left, a newcomer that links them takes the place of one that is cut off
            self._roster.peers[member].stranded = member in self.cut
        return {m: reports[m] for m in best[0]}

    def _waits_for_links(self, groups: list[tuple[str, ...]], ruling: Ruling) -> bool:
        """Returns whether all members wait for links, as only all groups together have the whole training state (P6);
        tells them.
        """
        if ruling.base is None:
            return False
        text = f"no link between {in_words(groups)}, and none of these has all parts of the training state: all wait"
        self._roster.tell(text, [self._roster.peers[m] for group in groups for m in group])
        return True

    def able(self, ruling: Ruling) -> int:
        """Returns the number of nodes that can go on by this ruling, including newcomers that its members have links
        to.
        """
        here = [*(m for m in ruling.members if not self._roster.peers[m].leaving), *ruling.waiting]
        coming = (p.member for p in self._graph.reachable(ruling.members))
        return nodes.count([*(self._roster.peers[m].member for m in here), *coming])

    def will_do(self, ruling: Ruling) -> bool:
        """Returns whether enough nodes can go on by this ruling, or the job has only to be closed."""
        closing = ruling.base is not None and ruling.base.kind is Kind.CLOSING
        return closing or self.able(ruling) >= self._settings.min_nodes

    def turn_links(self, latest: View) -> tuple[Change, Net] | None:
        """Returns a change of the view's links, with the same members, for the next header; None if links need no
        change.
        """
        if not self._topology.news and (not self._unsettled or self._desk.now < self._look_at):
            return None
        self._look_at = self._desk.now + self._pause_s()
        ids = latest.ids()
        before = self._graph.of_view(latest)
        self._unsettled = any(
            fact.down or fact.idle or fact.failures or ends not in before for ends, fact in self._topology.facts.items()
        )
        pairs = self._graph.pairs(ids)
        # `_turn_failed` sees to links that are down: they may be back in a moment.
        pairs |= {p for p in before - pairs if self._kept(p)}
        if pairs == before:
            return None
        if not connected(ids, pairs):
            return None
        gained, lost = sorted(map(sorted, pairs - before)), sorted(map(sorted, before - pairs))
        words = [f"link {a} {b} comes in" for a, b in gained]
        words += [f"link {a} {b} goes ({self._removed(a, b)})" for a, b in lost]
        net = Net(frozenset(pairs), self._topology.measured(ids, pairs))
        change = Change(members=latest.members, joiners=(), reason=listed(words, "; "))
        return change, net

    def _kept(self, ends: Pair) -> bool:
        one, other = (self._roster.peers[m] for m in ends)
        fact = self._topology.known(one.id, other.id)
        left_out = self._graph.thins and not (fact is not None and (fact.down or fact.idle))
        return self._topology.wants(one, other) and not left_out

    def _removed(self, one: str, other: str) -> str:
        names = pair(self._roster.peers[one].member.name, self._roster.peers[other].member.name)
        usual = "no record has room for all links" if self._graph.thins else "no longer wanted"
        return self._topology.removed.get(names, usual)

    def plan_facts(self) -> dict[str, object]:
        latest = self._book.latest
        if latest is None:
            return {"kind": self._settings.plan.kind, "trees": 0, "reason": ""}
        reason = self._book.past.plan_reason or "as configured"
        return {"kind": latest.plan.kind, "trees": len(latest.plan.trees), "reason": reason}
