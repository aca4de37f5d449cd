"""Keeps the graph of links: which pairs are wanted, which links stand, what was measured, and which groups a missing
link separates.

Theory of operation. A *pair* is two members (or two names) regardless of order. Every view has a graph: `View.links`,
or every pair of its members where that is empty. `Topology` keeps what the scheduler knows beside it:

- *wanted*: see partners.py. Wishes (`wished`) are in the store, so they outlive a member's incarnation, and the
  scheduler's.
- *standing*: each end says when its link comes up or fails, and a pair of which either end's last word was bad is
  down. Nothing said is taken for good news where a view or a newcomer's Ready vouches for the pair. A link that failed
  must stand for a while before a view uses it again, for longer each time (`Fact.stand_s`): a flapping link changes no
  views.
- *measured*: rates and latencies by direction. A link that carries nothing is used only where the graph would fall
  apart without it.

When a graph falls into parts, `ranked` says which of them may go on: more members first; of equal ones the one with the
oldest member. As no two parts have the same oldest member there are no ties, and as the scheduler alone asks, no two
answers.

Nothing here takes longer than members and their links are many: no loop goes over all pairs of members, but where a
view has all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice

from chaos_lightning.membership.effects import LinkWish
from chaos_lightning.membership.partners import Pair as Pair
from chaos_lightning.membership.partners import Partners
from chaos_lightning.membership.partners import pair as pair
from chaos_lightning.membership.peers import Peer, listed
from chaos_lightning.planning.graph import connected_parts
from chaos_lightning.planning.graph import neighbours as links_by_member
from chaos_lightning.protocol.types import LinkReport, LinkSpec, View

Measured = Mapping[tuple[str, str], tuple[float, float, float]]
"""(latency in seconds, bits per second there, bits per second back) by (earlier, later) in rank order."""

FIRST_STAND_S = 0.5
"""Seconds for which a link that failed once stands before a view uses it again; twice as long after each further
failure.
"""
LONGEST_STAND_S = 60.0
FORGIVEN_S = 60.0
"""Seconds: a link that stood for so long has never failed."""
PROBE_PATIENCE_S = 1.0
"""Seconds after which a new link is used unmeasured."""
CUT_PATIENCE_S = 3.0
"""Seconds that parts of a graph wait for a link between them before one of them goes on alone."""
NEIGHBOUR_PATIENCE_S = 2.0
"""Seconds: a newcomer comes in without a neighbour that it could not reach for so long, if it reached another one."""
THIN_DEGREE = 16
"""Number of links that a member keeps to members behind it in rank where no store takes a view with all links."""
USUAL = (0.0005, 1e9, 1e9)
"""Latency (s) and rates (bit/s) that a link counts with while it is not measured."""


def every_pair(ids: Sequence[str]) -> frozenset[Pair]:
    return frozenset(pair(a, b) for a, b in combinations(ids, 2))


def links_of(view: View) -> frozenset[Pair]:
    """Returns the pairs of members whose links this view may use."""
    if not view.links:
        return every_pair(view.ids())
    return frozenset(pair(link.a, link.b) for link in view.links)


def in_rank_order(ids: Sequence[str], pairs: Iterable[Pair]) -> list[tuple[str, str]]:
    """Returns the pairs of these members, sorted by rank, each with the lower rank first."""
    place = {m: i for i, m in enumerate(ids)}
    ranks = [sorted(place[m] for m in ends) for ends in pairs if all(m in place for m in ends)]
    return [(ids[i], ids[j]) for i, j in sorted(ranks)]


def specs(ids: Sequence[str], pairs: Collection[Pair]) -> tuple[LinkSpec, ...]:
    """Returns the links that a view of these members (in rank order) lists; an empty list if every pair has one."""
    ordered = in_rank_order(ids, pairs)
    return () if len(ordered) == len(ids) * (len(ids) - 1) // 2 else tuple(LinkSpec(a, b) for a, b in ordered)


def by_member(ids: Sequence[str], pairs: Iterable[Pair]) -> dict[str, frozenset[str]]:
    """Returns, for each member, the members with which it has a link."""
    near = links_by_member(ids, [(a, b) for a, b in pairs])
    return {member: frozenset(others) for member, others in near.items()}


def neighbours(view: View, me: str) -> tuple[str, ...]:
    """Returns the members that `me` has a link to, in rank order."""
    if not view.links:
        return tuple(m for m in view.ids() if m != me)
    mine = {link.b if link.a == me else link.a for link in view.links if me in (link.a, link.b)}
    return tuple(m for m in view.ids() if m in mine)


def components(ids: Sequence[str], pairs: Collection[Pair]) -> list[tuple[str, ...]]:
    """Returns the connected groups, each in the order of `ids`; the group of the first id comes first."""
    found = connected_parts(ids, links_by_member(ids, [(a, b) for a, b in pairs]))
    return [tuple(part) for part in found]


def thinned(ids: Sequence[str], pairs: Collection[Pair]) -> frozenset[Pair]:
    """Returns a few of these pairs that still connect the same members: each member with those next in rank."""
    few: set[Pair] = set()
    for rank, member in enumerate(ids):
        linked = (ends for other in (*ids[rank + 1 :], *ids[:rank]) if (ends := pair(member, other)) in pairs)
        few.update(islice(linked, THIN_DEGREE))
    groups = components(ids, few)
    if len(groups) == len(components(ids, pairs)):
        return frozenset(few)
    part = {member: number for number, group in enumerate(groups) for member in group}
    for one, other in in_rank_order(ids, pairs):
        if part[one] != part[other]:
            few.add(pair(one, other))
            joined = part[other]
            part = {m: part[one] if number == joined else number for m, number in part.items()}
    return frozenset(few)


def connected(ids: Sequence[str], pairs: Collection[Pair]) -> bool:
    return len(components(ids, pairs)) <= 1


def ranked(groups: Iterable[tuple[str, ...]], order: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns these groups of members, best first, by which of them may go on: the larger one, or the one with the
    oldest member.
    """
    place = {m: i for i, m in enumerate(order)}
    return sorted(groups, key=lambda group: (-len(group), min(place[m] for m in group)))


def in_words(groups: Iterable[Sequence[str]]) -> str:
    return listed((listed(group) for group in groups), " | ")


@dataclass(slots=True)
class Fact:
    """Facts about the link of one pair of members (by id)."""

    words: dict[str, str] = field(default_factory=dict)
    """Last word of each end: "" that the link stands, else why it does not."""
    since: float = 0.0
    """Time at which the link began to stand, or to be down."""
    failures: int = 0
    reports: dict[str, LinkReport] = field(default_factory=dict)
    """Last measurement of each end."""

    @property
    def down(self) -> str:
        """Reason why the link is down, as one end reports it (a goodbye only if there is no other reason); "" if
        neither end says so.
        """
        bad = [(word == "bye", end, word) for end, word in self.words.items() if word]
        return f"{min(bad)[1]}: {min(bad)[2]}" if bad else ""

    @property
    def idle(self) -> str:
        """Report of an end that it measured that no data passes over the link; "" if there is none."""
        return next(
            (f"{end}: carries nothing ({r.evidence})" for end, r in self.reports.items() if r.rate_bps <= 0), ""
        )

    @property
    def stands(self) -> bool:
        """Whether both ends report that the link is up."""
        return len(self.words) == 2 and not any(self.words.values())

    @property
    def stand_s(self) -> float:
        """Seconds for which the link must be up before a view uses it (again)."""
        return 0.0 if not self.failures else min(LONGEST_STAND_S, FIRST_STAND_S * 2.0 ** (self.failures - 1))

    def say(self, now: float, end: str, word: str) -> None:
        """Records one end's report on the link: why it is down, or "" if it is up."""
        before = (self.stands, bool(self.down))
        if word and self.stands and now - self.since > FORGIVEN_S:
            self.failures = 0
        if word != self.words.get(end):
            self.reports.pop(end, None)  # another link than was measured
        self.words[end] = word
        if (self.stands, bool(self.down)) != before:
            self.since = now

    def seasoned(self, now: float) -> bool:
        """Returns whether the link has been up for long enough, and was measured unless nobody is going to."""
        if not self.stands or now - self.since < self.stand_s:
            return False
        return bool(self.reports) or now - self.since >= PROBE_PATIENCE_S


class Topology:
    """Graph of links between members. Members are identified by id, link requests by names.

    Args:
        wishes: Link requests that were granted so far, oldest first.
        degree: Number of links per member (see Partners).
    """

    def __init__(self, wishes: Iterable[LinkWish] = (), degree: int = 0) -> None:
        self.partners = Partners(degree)
        self.facts: dict[Pair, Fact] = {}
        self._of: dict[str, dict[str, Fact]] = {}
        """Facts by member and peer."""
        self.ailing: dict[Pair, Fact] = {}
        """Facts of links that are down, or carry nothing."""
        self.version = 0
        """Counter that grows with every measurement."""
        self.news = True
        """Whether something about links changed since they were looked at."""
        for wish in wishes:
            self.wished(wish)

    def fact(self, one: str, other: str) -> Fact:
        found = self._of.get(one, {}).get(other)
        if found is None:
            found = self.facts[pair(one, other)] = Fact()
            self._of.setdefault(one, {})[other] = self._of.setdefault(other, {})[one] = found
        return found

    def known(self, one: str, other: str) -> Fact | None:
        """Returns the facts about the link of these two; None if there are none."""
        return self._of.get(one, {}).get(other)

    def say(self, now: float, end: str, other: str, word: str) -> Fact:
        """Records one end's report on its link to another member: why it is down, or "" if it is up."""
        fact = self.fact(end, other)
        fact.say(now, end, word)
        self._look_at(end, other, fact)
        return fact

    def _look_at(self, one: str, other: str, fact: Fact) -> None:
        self.news = True
        if fact.down or fact.idle:
            self.ailing[pair(one, other)] = fact
        elif self.ailing:
            self.ailing.pop(pair(one, other), None)

    def down(self, one: str, other: str) -> str:
        """Returns in words why this link is down; "" if nobody says so."""
        fact = self.known(one, other)
        return fact.down if fact is not None else ""

    def stands(self, one: str, other: str) -> bool:
        """Returns whether both ends of this link report that it is up."""
        fact = self.known(one, other)
        return fact is not None and fact.stands

    def trouble(self, one: str, other: str) -> str:
        """Returns in words why this link cannot be used: it is down, or carries no data; "" if nobody says so."""
        fact = self.known(one, other)
        return (fact.down or fact.idle) if fact is not None else ""

    def forget(self, member: str) -> None:
        """Forgets the links of a member's incarnation that is gone."""
        self.partners.drop(member)
        self.news = True
        for other in self._of.pop(member, {}):
            self._of[other].pop(member, None)
            self.facts.pop(pair(member, other), None)
            self.ailing.pop(pair(member, other), None)

    def shift(self, gap: float) -> None:
        """Moves the times of links by the `gap` seconds for which the scheduler was frozen, which count neither as up
        nor as down.
        """
        for fact in self.facts.values():
            fact.since += gap

    def wants(self, one: Peer, other: Peer) -> bool:
        """Returns whether these two are to have a link."""
        return self.partners.wants(one, other)

    @property
    def removed(self) -> dict[Pair, str]:
        """Reasons of links that were removed on request, by the names of their ends."""
        return self.partners.removed

    def wished(self, wish: LinkWish) -> None:
        """Applies a granted request for or against a link that is in the store."""
        self.partners.wished(wish)
        self.news = True

    def report(self, by: str, report: LinkReport) -> None:
        """Records what one end measured of its link."""
        fact = self.fact(by, report.peer)
        fact.reports[by] = report
        self.version += 1
        self._look_at(by, report.peer, fact)

    def validate(self) -> None:
        """Asserts that the indexes, which are updated step by step, agree with the facts about all links."""
        self.partners.validate()
        assert {frozenset((a, b)) for a, of in self._of.items() for b in of} == self.facts.keys()
        assert {ends for ends, fact in self.facts.items() if fact.down or fact.idle} == self.ailing.keys()

    def measured(self, ids: Sequence[str], pairs: Collection[Pair]) -> Measured:
        """Returns the rates and latencies of these pairs' links: as measured at this end, else at the other end, else
        usual values.
        """
        found: dict[tuple[str, str], tuple[float, float, float]] = {}
        for a, b in in_rank_order(ids, pairs):
            fact = self.known(a, b)
            reports = {} if fact is None else {e: r for e, r in fact.reports.items() if r.rate_bps > 0}
            there, back = reports.get(a) or reports.get(b), reports.get(b) or reports.get(a)
            if there is None or back is None:
                found[a, b] = USUAL
            else:
                found[a, b] = (max(there.latency_s, back.latency_s), there.rate_bps, back.rate_bps)
        return found


@dataclass(frozen=True, slots=True)
class Net:
    """Links that the next view may use, and what was measured of them."""

    pairs: frozenset[Pair]
    measured: Measured = field(default_factory=dict)

    def specs(self, ids: Sequence[str]) -> tuple[LinkSpec, ...]:
        return specs(ids, self.pairs)

    def known(self, ids: Sequence[str]) -> Measured:
        """Returns all links among these members, with usual values for unmeasured ones, for the plan generator."""
        return {ends: self.measured.get(ends, USUAL) for ends in in_rank_order(ids, self.pairs)}
