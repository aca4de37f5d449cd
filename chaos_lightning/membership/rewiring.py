"""Views because of links: one that fails, comes back, is asked for or removed, and a graph that falls apart.

Theory of operation. Three moves, none of which moves training state:

- A link between two members that both speak to the scheduler is down for longer than it takes to dial again: the slot
  that needs it can never complete, so a recovery puts the same members into a view without it (`_turn_failed`).
- A link that is removed, added, or back for long enough (`Fact.seasoned`): a view of the same members with another
  graph rides on the next header (`_turn_links`), as does a better plan over the same graph, once measurements say that
  it pays.
- The graph falls apart. Nobody goes on for `CUT_PATIENCE_S` if a link that is dialled could mend it; then one part
  goes on (`_side`). It holds the training state and reaches min_nodes, with newcomers if need be, or all wait. Of
  several it is the one with the most members, and of equal ones that with the oldest member. All members have
  promised by then (PROTOCOL.md 8), so the others cannot go on: they are put out, throw their state away, and come in
  again as newcomers when a link of theirs stands (11, 14b).

The scheduler decides all this alone and stores it first, as any view (7). Members that it does not reach are judged by
the detector and cannot complete a slot meanwhile, as each takes a contribution of every member (1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType

from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Peer, Standing
from chaos_lightning.membership.serving import Serving
from chaos_lightning.membership.topology import (
    CUT_PATIENCE_S,
    REPLAN_PAUSE_S,
    Fact,
    Net,
    Pair,
    connected,
    in_words,
    pair,
    parts,
    ranked,
)
from chaos_lightning.membership.views import Change, changed_view, replanned
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import NO_VIEW, Kind, Report, View

_PAUSE_S = 0.02
"""Links are looked at again after so long while time alone may change something about them."""


class Rewiring(Serving):
    """See the module."""

    _look_at = _failed_at = float("-inf")
    _cut_at: float | None = None
    """Since when the living members have been in parts."""
    _cut: Mapping[str, str] = MappingProxyType({})
    """Who is put out because no link leads to the side that goes on, with the reason."""
    _ailing = False
    """Some link is down, or carries nothing."""
    _news = True
    """Something was said about links since they were looked at for that."""
    _unsettled = True
    """The latest view's graph may have to change."""
    _replanned_at = float("-inf")
    _planned_version = 0

    def _seen(self) -> None:
        """An event is through."""
        if self._relinked:
            self._unsettled = self._news = True
        self._relinked = False

    def _shift_links(self, gap: float) -> None:
        """The scheduler was frozen for so long (s)."""
        self.topology.shift(gap)
        if self._cut_at is not None:
            self._cut_at += gap

    @abstractmethod
    def _recover(self, why: str, *, urgent: bool = False) -> bool:
        """Begins a recovery, unless it has to wait (membership/scheduler.py, as the next two)."""

    @abstractmethod
    def _announce(self, view: View) -> None:
        """A view that a header will carry."""

    @abstractmethod
    def _rule(self, reports: Mapping[str, Report]) -> Ruling:
        """Base, hand-on or redo, and who goes on."""

    # ------------------------------------------------------------------ a link fails

    def _failing(self) -> list[tuple[Pair, str]]:
        """Links of a view in force that are down though both ends live, with the words of one end."""
        found = []
        suspected = self.detector.suspicions
        for ends, fact in self.topology.facts.items():
            if not (fact.down or fact.idle) or self.now - fact.since < self.settings.confirm_timeout_s:
                continue
            peers = [p for m in ends if (p := self.peers.get(m)) is not None]
            if len(peers) < 2 or not all(self._speaks(p, fact.since) and p.id not in suspected for p in peers):
                continue
            if self._in_force(*ends):
                found.append((ends, fact.down or fact.idle))
        return found

    def _speaks(self, peer: Peer, since: float) -> bool:
        inside = peer.standing in (Standing.MEMBER, Standing.LEAVER)
        return inside and peer.alive and peer.known and peer.conn is not None and peer.heard > since

    def _turn_failed(self) -> bool:
        """Members that live and cannot reach each other: a view without their link, or of one side only."""
        if not self._due():
            self._cut_at = None if not self._ailing else self._cut_at
            return False
        ids = self._remaining()
        graph, all_of_them = self._graph(ids), self._graph([p.id for p in self._living()])
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
        return self._recover(why)

    def _remaining(self) -> list[str]:
        """Whom a recovery begun now would put into its view: members of the latest view that stand in one.

        A newcomer that no header has let in yet holds nothing and waits for a later view (`Ruling.waiting`), so its
        links hold nobody together until then. Whether their own links are missed is judged by these alone: by the
        graph of the announced view, newcomer included, one could be missed in the view before, which a recovery would
        only bring back, and so on without end. A newcomer's links are judged by the view that it is to come in with.
        """
        return [p.id for p in self._living() if not p.known or p.entered != NO_VIEW]

    def _due(self) -> bool:
        """Links are looked at when something was said about them, and every now and then while some are unsettled."""
        news = self._relinked or self._news
        if news:
            self._ailing, self._news = any(f.down or f.idle for f in self.topology.facts.values()), False
        due = self._ailing and (news or self.now >= self._failed_at)
        if due:
            self._failed_at = self.now + _PAUSE_S
        return due

    # ------------------------------------------------------------------ a graph in parts

    def _awaits_mending(self, ids: list[str]) -> bool:
        """Whether the parts are to wait: a link between them is wanted, both its ends live, and it is not long down."""
        place = {m: i for i, part in enumerate(parts(ids, self._graph(ids))) for m in part}
        mendable = any(
            self.topology.wants(self.peers[a], self.peers[b])
            for a in ids
            for b in ids
            if place[a] < place[b] and self.peers[a].conn is not None and self.peers[b].conn is not None
        )
        if self._cut_at is None:
            self._cut_at = self.now
            groups = parts(ids, self._graph(ids))
            self._note("notice", text=f"links hold the members together no more: {in_words(groups)}")
        if not mendable or self.now - self._cut_at >= CUT_PATIENCE_S:
            return False
        text = f"no link between {in_words(parts(ids, self._graph(ids)))}: all wait {CUT_PATIENCE_S:g} s for one"
        self._tell(text, [self.peers[m] for m in ids])
        return True

    def _side(self, reports: Mapping[str, Report]) -> Mapping[str, Report] | None:
        """The reports of the members that may go on together; None while parts wait for a link between them."""
        assert self.latest is not None
        self._cut = {}
        order = [m for m in self.latest.ids() if m in reports]
        chosen = order
        while True:
            groups = parts(chosen, self._graph(chosen))
            if len(groups) > 1 and self._awaits_mending(chosen):
                return None
            rulings = {part: self._rule({m: reports[m] for m in part}) for part in ranked(groups, order)}
            best = [part for part, ruling in rulings.items() if ruling.base is not None]
            best.sort(key=lambda part: not self._will_do(rulings[part]))
            if not best:
                return {m: reports[m] for m in chosen}
            members = rulings[best[0]].members
            if connected(members, self._graph(members)):
                break
            chosen = [m for m in chosen if m in members]  # somebody who cannot go on held them together
        for member in (m for m in order if m not in best[0]):
            whom = ", ".join(best[0])
            self._cut[member] = f"no link leads to {whom} ({len(best[0])} of {len(order)} members)"
        if not self._cut:
            self._cut_at = None
        for member in order:  # if too few are left, a newcomer that links them takes the place of one that is cut off
            self.peers[member].stranded = member in self._cut
        return {m: reports[m] for m in best[0]}

    def _able(self, ruling: Ruling) -> int:
        """How many nodes can go on by this ruling, with the newcomers that links lead to from them."""
        here = [*(m for m in ruling.members if not self.peers[m].leaving), *ruling.waiting]
        coming = (p.member for p in self._reachable(ruling.members))
        return nodes.count([*(self.peers[m].member for m in here), *coming])

    def _will_do(self, ruling: Ruling) -> bool:
        """Whether these reach min_nodes, or have only to close."""
        closing = ruling.base is not None and ruling.base.kind is Kind.CLOSING
        return closing or self._able(ruling) >= self.settings.min_nodes

    # ------------------------------------------------------------------ links that come and go in good order

    def _turn_links(self, latest: View) -> bool:
        """A view of the same members with other links, or with a better plan, for the next header."""
        if not self._relinked and (not self._unsettled or self.now < self._look_at):
            return self._turn_replan(latest)
        self._look_at = self.now + _PAUSE_S
        ids = latest.ids()
        before = self._view_pairs(latest)
        self._unsettled = any(
            fact.down or fact.idle or fact.failures or ends not in before for ends, fact in self.topology.facts.items()
        )
        pairs = self._graph(ids)
        # What is down is the business of `_turn_failed`: it may be back in a moment.
        pairs |= {p for p in before - pairs if self._kept(p)}
        if pairs == before:
            return self._turn_replan(latest)
        if not connected(ids, pairs):
            return False
        gained, lost = sorted(map(sorted, pairs - before)), sorted(map(sorted, before - pairs))
        words = [f"link {a} {b} comes in" for a, b in gained]
        words += [f"link {a} {b} goes ({self._removed(a, b)})" for a, b in lost]
        net = Net(frozenset(pairs), self.topology.measured(ids, pairs))
        change = Change(members=latest.members, joiners=(), reason="; ".join(words))
        return self._rewire(latest, change, net)

    def _kept(self, ends: Pair) -> bool:
        one, other = (self.peers[m] for m in ends)
        return self.topology.wants(one, other)

    def _removed(self, one: str, other: str) -> str:
        names = pair(self.peers[one].member.name, self.peers[other].member.name)
        return self.topology.removed.get(names, "no longer wanted")

    def _rewire(self, latest: View, change: Change, net: Net) -> bool:
        view = changed_view(latest, self._next_number(), change, self.settings.plan, net)
        self._persist("view", view.id, lambda: self._announce(view), view=view)
        return True

    def _turn_replan(self, latest: View) -> bool:
        """Another plan over the same links, if measurements say that it pays."""
        fresh = self.topology.version != self._planned_version
        if not fresh or self.now - self._replanned_at < REPLAN_PAUSE_S:
            return False
        self._planned_version, self._replanned_at = self.topology.version, self.now
        ids = latest.ids()
        pairs = self._view_pairs(latest)
        net = Net(pairs, self.topology.measured(ids, pairs))
        plan, reason = replanned(self.settings.plan, latest, net)
        if plan is None:
            return False
        self._note("notice", text=f"the plan changes: {reason}")
        change = Change(members=latest.members, joiners=(), reason=reason, plan=plan)
        return self._rewire(latest, change, net)

    # ------------------------------------------------------------------ status

    def snapshot(self) -> dict[str, object]:
        """For `chaos-lightning status`: plain values only."""
        return {**super().snapshot(), "plan": self._plan_facts(), "links": self._link_facts()}

    def _plan_facts(self) -> dict[str, object]:
        latest = self.latest
        if latest is None:
            return {"kind": self.settings.plan.kind, "trees": 0, "reason": ""}
        reason = next((v.reason for v in reversed(self.chain) if "plan" in v.reason), "as configured")
        return {"kind": latest.plan.kind, "trees": len(latest.plan.trees), "reason": reason}

    def _link_facts(self) -> list[dict[str, object]]:
        """All pairs of members, and of newcomers with them."""
        here = [p for p in self.peers.values() if p.standing is not Standing.STANDBY]
        rows: list[dict[str, object]] = []
        for one, other in combinations(here, 2):
            fact = self.topology.facts.get(pair(one.id, other.id), Fact())
            ((_, (latency_s, there_bps, back_bps)),) = self.topology.measured(
                (one.id, other.id), [pair(one.id, other.id)]
            ).items()
            known = bool(fact.reports)
            rows.append(
                {
                    "a": one.id,
                    "b": other.id,
                    "state": self._link_state(one, other, fact),
                    "latency_s": latency_s if known else None,
                    "there_bps": there_bps if known else None,
                    "back_bps": back_bps if known else None,
                    "failures": fact.failures,
                }
            )
        return rows

    def _link_state(self, one: Peer, other: Peer, fact: Fact) -> str:
        if not self.topology.wants(one, other):
            return self.topology.removed.get(pair(one.member.name, other.member.name), "not wanted")
        if fact.down or fact.idle:
            return f"down: {fact.down or fact.idle}"
        if self._in_force(one.id, other.id):
            return "in use"
        return "stands, not in use yet" if fact.stands else "not there yet"
