"""Handles links between members: records what both ends report, and tells members and newcomers whom to connect to.

Theory of operation. Members say when a link comes up or fails (LinkEvent) and what it carries (LinkReport); operators
and members ask for links or against them: what is granted is stored before it is answered, and holds from then on,
also for the next scheduler (`_turn_wishes`). All of it goes into `Topology` (topology.py). `OpenLinks`
names the peers that a member is to have links to beside those of the view that it stands in: newcomers, and wanted
pairs that the view does not use, so that a link that failed is dialled until it is back. Its list replaces the one
before, or says what has changed of that.

A link that is made anew within a view may have lost bytes on the way: the open slot is reduced again (`_again`). What
becomes of a link that stays down is decided in rewiring.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.effects import Answer, LinkWish, Persist
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.partners import node_of
from chaos_lightning.membership.peers import NEWCOMER, Peer, Standing
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.topology import (
    NEIGHBOUR_PATIENCE_S,
    Fact,
    Pair,
    Topology,
    components,
    in_words,
    pair,
)
from chaos_lightning.protocol.types import (
    MADE_ANEW,
    NO_VIEW,
    SMALL_JOB,
    LinkReport,
    LinkRequest,
    Notice,
    OpenLinks,
    View,
)

_LOOK_S, _LOOKS = 5.0, 3
"""Seconds between two looks, and the number of looks in a row after which a wanted link that does not stand is one
that stays down.
"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Request to add or remove a link, by words that name its ends; not answered yet."""

    ends: tuple[str, str]
    add: bool
    why: str
    answer: Callable[[bool, str], None]


class _Here:
    """Members and newcomers that are present, and may be told of each other.

    Args:
        members: Living members of the latest view, by id.
        newcomers: Newcomers that are present, by id.
        joins: Ids of those members that have yet to enter that view.
    """

    def __init__(self, members: Mapping[str, Peer], newcomers: Mapping[str, Peer], joins: Collection[str]) -> None:
        self.members, self.joins = members, joins
        self._all = {**members, **newcomers}
        self._place = {m: i for i, m in enumerate(self._all)}

    def those(self, ids: Iterable[str]) -> list[Peer]:
        """Returns the present peers that have these ids: members in rank order, then newcomers."""
        return [self._all[m] for m in sorted(self._all.keys() & ids, key=self._place.__getitem__)]


class LinkRegistry:
    """Link reports of members and link requests of operators. Arguments are scheduler components that it uses."""

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
        self._asked: deque[_Asked] = deque()
        """Requests that are not answered yet, oldest first; the first may be on its way to the store."""
        self._look_at = float("-inf")
        self._absent: dict[Pair, int] = {}
        """Number of looks in a row at which a wanted link did not stand, of those that the view lacks."""
        self._seen: object = None
        """Facts that decide whom members are told of, as they were at the last look."""

    def follow(self, before: View | None, view: View) -> None:
        """Handles a decided view: links that it no longer uses are no sign of a death any more, and their failures go
        up by one.
        """
        self._topology.news = True
        if before is None:
            return
        lost = [p for p in self._graph.of_view(before) - self._graph.of_view(view) if all(view.find(m) for m in p)]
        for one, other in sorted(map(sorted, lost)):
            fact = self._topology.fact(one, other)
            fact.failures += 1 if fact.down or fact.idle else 0
            for me, them in ((one, other), (other, one)):
                if me in self._roster.peers:
                    self._roster.peers[me].down.pop(them, None)
                    self._roster.peers[me].silent.pop(them, None)

    def on_link(self, peer: Peer, other: str, up: bool, evidence: str) -> None:
        known = other in self._roster.peers
        if up:
            anew = evidence == MADE_ANEW
            if anew and known:
                self._topology.say(self._desk.now, peer.id, other, "closed")
            fact = self._topology.say(self._desk.now, peer.id, other, "") if known else Fact()
            self._on_link_up(peer, other, fact, anew)
            return
        if known:
            self._topology.say(self._desk.now, peer.id, other, evidence or "down")
        peer.up.discard(other)
        latest = self._book.latest
        if (
            latest is not None
            and latest.find(peer.id)
            and latest.find(other)
            and not self._graph.in_force(peer.id, other)
        ):
            return
        if evidence.startswith("silent"):
            peer.silent[other] = evidence
        if not evidence.startswith("closed"):
            return
        peer.down[other] = evidence
        subject = self._roster.peers.get(other)
        if subject is not None and subject.alive and subject.standing in (Standing.MEMBER, Standing.LEAVER):
            self._detector.suspect(self._desk.now, other, f"{peer.id} says that its link is {evidence}")

    def _on_link_up(self, peer: Peer, other: str, fact: Fact, anew: bool) -> None:
        silent, before = peer.silent.pop(other, None), peer.down.pop(other, None)
        before = before or silent or ("closed" if anew else None)
        subject = self._roster.peers.get(other)
        together = subject is not None and peer.entered == subject.entered
        if before is None and together and other not in peer.up and peer.known and self._uses(peer, other):
            before = "it was not there when the view began"
        peer.up.add(other)
        # Whatever was sent on the link before is lost; a new attempt makes up for it.
        if before is None or self._desk.reserving or not (self._roster.inside(peer.id) and self._roster.inside(other)):
            return
        if self._graph.in_force(peer.id, other):
            fact.failures += fact.stands  # both ends tell
            self._recovery.again = f"the link between {peer.id} and {other} was made anew ({before})"

    def _uses(self, peer: Peer, other: str) -> bool:
        """Returns whether the view that this member is in has its link to the other. A coming view does not count, as
        the link may be made for it.
        """
        stands = next((v for v in reversed(self._book.views) if v.id == peer.entered), None)
        return stands is not None and pair(peer.id, other) in self._graph.of_view(stands)

    def on_link_report(self, peer: Peer, report: LinkReport) -> None:
        if report.peer in self._roster.peers:
            self._topology.report(peer.id, report)

    def on_link_request(self, peer: Peer, request: LinkRequest) -> None:
        def answer(granted: bool, text: str) -> None:
            self._roster.send(peer, Notice(text if granted else f"refused: {text}"))

        why = f"{peer.id} asks: {request.reason or 'no reason given'}"
        self._asked.append(_Asked((peer.id, request.peer), request.add, why, answer))

    def on_change_link(self, token: int, ends: tuple[str, str], add: bool) -> None:
        def answer(granted: bool, text: str) -> None:
            self._desk.out.append(Answer(token, granted, text))

        self._asked.append(_Asked(ends, add, "an operator asks", answer))

    def turn_wishes(self) -> bool:
        """Refuses link requests that cannot be granted, and has the store record the first one that can be.

        The scheduler decides nothing else until the store has it.
        """
        while self._asked:
            asked = self._asked[0]
            found = self._ends(asked)
            if not isinstance(found, str):
                one, other = found
                refusal = self._needless(one, other) if asked.add else self._indispensable(one, other)
                if not refusal:
                    why = asked.why if asked.add else f"removed, {asked.why}"
                    wish = LinkWish(one.member.name, other.member.name, asked.add, why)
                    then = partial(self._granted, wish, one.id, other.id)
                    self._book.persist(Persist(0, "link", NO_VIEW, wish=wish), then)
                    return True
                self._note_wish(asked, one.id, other.id, refusal)
                found = refusal
            self._asked.popleft()
            asked.answer(False, found)
        return False

    def _granted(self, wish: LinkWish, one: str, other: str) -> None:
        """Applies the granted request to add or remove the link of these members, now that the store has it, and
        answers the operator.
        """
        asked = self._asked.popleft()
        self._topology.wished(wish)
        fact = self._topology.known(one, other)
        if wish.add and fact is not None:
            fact.failures = 0
        text = (
            f"{one} and {other} are told to connect; the next view after their link stands has it"
            if wish.add
            else f"the next view has no link between {one} and {other}; it stays away until it is added again"
        )
        self._note_wish(asked, one, other, text)
        asked.answer(True, text)

    def _note_wish(self, asked: _Asked, one: str, other: str, text: str) -> None:
        self._desk.note("notice", text=f"link {'add' if asked.add else 'remove'} {one} {other} ({asked.why}): {text}")

    def _ends(self, asked: _Asked) -> tuple[Peer, Peer] | str:
        """Returns the two peers whose link a request means, or in words why that is unclear or no link can change any
        more.
        """
        if self._desk.phase in (SchedulerPhase.FINISHED, SchedulerPhase.DEPOSED):
            return f"this scheduler is {self._desk.phase}: no link changes any more"
        a, b = asked.ends
        one, other = self._find(a), self._find(b)
        if isinstance(one, str):
            return f"{a!r} {one}"
        if isinstance(other, str):
            return f"{b!r} {other}"
        return f"{a!r} and {b!r} are both {one.id}: a link has two ends" if one is other else (one, other)

    def _find(self, word: str) -> Peer | str:
        """Returns the peer that an id, a name or a node means, or in words why there is none or which is meant is
        unclear.
        """
        here = [p for p in self._roster.peers.values() if p.alive and p.standing in (*NEWCOMER, Standing.MEMBER)]
        exact = [p for p in here if word in (p.id, p.member.name)]
        found = exact or [p for p in here if node_of(p.member.name) == word]
        if len(found) == 1:
            return found[0]
        if not found:
            return f"is no member; present: {', '.join(p.id for p in here) or 'nobody'}"
        return f"is the node of {', '.join(p.id for p in found)}: name one of them"

    def _needless(self, one: Peer, other: Peer) -> str:
        """Returns in words why a link cannot be added (it exists already); "" if it can."""
        latest = self._book.latest
        both = latest is not None and latest.find(one.id) is not None and latest.find(other.id) is not None
        there = both and latest is not None and pair(one.id, other.id) in self._graph.of_view(latest)
        if there and pair(one.member.name, other.member.name) not in self._topology.removed:
            return f"{one.id} and {other.id} have a link already"
        return ""

    def _indispensable(self, one: Peer, other: Peer) -> str:
        """Returns in words why a link cannot be removed; "" if it can."""
        if not self._topology.wants(one, other):
            names = pair(one.member.name, other.member.name)
            was = self._topology.removed.get(names, "neither named the other as its neighbour")
            return f"{one.id} and {other.id} have no link: {was}"
        inside = [p.id for p in self._roster.living()] or [
            p.id for p in self._roster.peers.values() if p.standing in NEWCOMER
        ]
        if one.id in inside and other.id in inside:
            rest = components(inside, self._graph.pairs(inside) - {pair(one.id, other.id)})
            if len(rest) > 1:
                return f"without the link of {one.id} and {other.id} the members fall apart: {in_words(rest)}"
        return ""

    def tell_whom_to_dial(self) -> None:
        """Sends newcomers and members the lists of peers with which they are to have links."""
        if self._desk.phase in (SchedulerPhase.FINISHED, SchedulerPhase.DEPOSED):
            return
        newcomers = [p for p in self._roster.peers.values() if p.standing in NEWCOMER]
        members = self._roster.living()
        for peer in (*newcomers, *members):
            self._topology.partners.add(peer)
        self._lose_links(members)
        self._topology.partners.secure()
        if newcomers:
            self._seen = None
        elif not self._moved(members):
            return
        latest = self._book.latest
        here = _Here(
            {m.id: m for m in members},
            {p.id: p for p in newcomers},
            {p.id for p in members if latest is not None and p.entered != latest.id and p.id in latest.joiners},
        )
        for peer in newcomers:
            others = here.those(self._topology.partners.of(peer.id))
            others.sort(key=lambda p: p.member.name not in peer.neighbours)
            self._open_links(peer, self._within_reach(peer, others))
        self._tell_lonely(newcomers, here.members)
        self._graph.strand(newcomers, members)
        for peer in members:
            self._open_links(peer, self._to_know(peer, here))

    def _lose_links(self, members: list[Peer]) -> None:
        """Finds wanted links that stay down although both ends train on, in a view that does without these links."""
        latest, now, partners = self._book.latest, self._desk.now, self._topology.partners
        running = self._desk.phase is SchedulerPhase.RUNNING and partners.sparse
        if latest is None or not running or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        limit, used = now - self._desk.pacing.timeout_s, self._graph.of_view(latest)
        here = {p.id for p in members if p.conn is not None and p.entered != NO_VIEW and p.heard >= limit}
        wanted = (pair(one, other) for one in here for other in partners.of(one) if one < other and other in here)
        absent = [ends for ends in wanted if ends not in used and not self._topology.stands(*ends)]
        self._absent = {ends: self._absent.get(ends, 0) + 1 for ends in absent}
        partners.lose(frozenset(ends for ends, looks in self._absent.items() if looks >= _LOOKS))

    def _moved(self, members: list[Peer]) -> bool:
        """Returns whether anything that the lists of peers to dial depend on may have changed since the last call."""
        latest = self._book.latest
        seen = (
            latest.id if latest is not None else NO_VIEW,
            self._topology.partners.version,
            [(p.id, p.conn, p.entered) for p in members],
        )
        before, self._seen = self._seen, seen
        return seen != before

    def _to_know(self, peer: Peer, here: _Here) -> list[Peer]:
        """Returns the peers that a member must be told of besides those in its view: newcomers, and partners to which
        it has no link in that view.

        Until it has entered the last view, it knows the newer ones by this list only; a link that it gave up in between
        would be missed when it enters, though it has to go in the view after that.
        """
        latest = self._book.latest
        wanted = self._topology.partners.of(peer.id)
        linked = self._graph.near(latest, peer.id) if latest is not None else ()
        if latest is None or peer.entered != latest.id:
            return here.those({*wanted, *linked})
        return here.those(m for m in wanted if m not in linked or m in here.joins)

    def _within_reach(self, peer: Peer, others: list[Peer]) -> list[Peer]:
        """Returns these neighbours of a newcomer without those that it fails to reach, provided that it has reached
        another one.

        They may not reach the scheduler, which so cannot tell them of the newcomer, and train on. Where nobody is in
        yet, it may found the job without them.
        """
        if peer.standing is not Standing.LINKING or peer.conn is None:
            return others
        for other in others:
            peer.asked.setdefault(other.id, self._desk.now)
        late = [p for p in others if p.id not in peer.up and self._desk.now - peer.asked[p.id] > NEIGHBOUR_PATIENCE_S]
        if not late:
            return others
        words = ", ".join(f"{p.id} ({self._topology.down(peer.id, p.id) or 'no answer'})" for p in late)
        self._tell_missed(peer, late)
        if self._desk.phase is not SchedulerPhase.FOUNDING and not any(p.id in peer.up for p in others):
            self._roster.tell(
                f"{peer.id} reaches none of its neighbours: {words}; it comes in when a link stands", [peer]
            )
            return others
        for other in late:
            if not self._topology.fact(peer.id, other.id).words.get(peer.id):
                words_of_it = f"not reached within {NEIGHBOUR_PATIENCE_S:g} s"
                self._topology.say(self._desk.now, peer.id, other.id, words_of_it)
        if self._topology.partners.replace(peer.id, [p.id for p in late]):
            return others  # whom it is given instead, it is told at the next look
        self._roster.tell(f"{peer.id} comes in without its links to {words}", [peer])
        return [p for p in others if p not in late]

    def _tell_missed(self, newcomer: Peer, missed: list[Peer]) -> None:
        """Tells members that a newcomer cannot reach them: they may have to announce another address, or to open a
        port.
        """
        for other in missed:
            if other.id in newcomer.misses or other.conn is None or other.standing in NEWCOMER:
                continue
            newcomer.misses.add(other.id)
            place = f"{other.member.address}, port {other.member.port}"
            why = self._topology.down(newcomer.id, other.id) or "no answer"
            text = f"{newcomer.id} does not reach {other.id}, which announces {place} ({why})"
            self._roster.send(other, Notice(f"{text}; check `announce`, `port` and what lies between the two"))

    def _tell_lonely(self, newcomers: list[Peer], members: Mapping[str, Peer]) -> None:
        """Tells newcomers that are ready but have no link to a member what they are waiting for."""
        for peer in newcomers if members else ():
            if peer.standing is Standing.LINKING or self._graph.led([peer], members):
                peer.asked.pop("", None)
                continue
            if self._desk.now - peer.asked.setdefault("", self._desk.now) > NEIGHBOUR_PATIENCE_S:
                wanted = [members[m] for m in self._topology.partners.of(peer.id) if m in members]
                words = ", ".join(f"{m.id} ({self._topology.trouble(peer.id, m.id) or 'no answer'})" for m in wanted)
                self._tell_missed(peer, [m for m in wanted if m.id not in peer.up])
                nobody = f"none of the neighbours that it names is in the job: {', '.join(peer.neighbours)}"
                self._roster.tell(
                    f"{peer.id} has no link to a member: {words or nobody}; it comes in when one stands", [peer]
                )

    def _open_links(self, peer: Peer, others: list[Peer]) -> None:
        ids = tuple(p.id for p in others)
        linked = peer.linked if peer.linked is not None or peer.standing is Standing.LINKING else ()
        if peer.conn is None or ids == linked:
            return
        before = frozenset(peer.linked or ())
        fresh, gone = [p for p in others if p.id not in before], tuple(sorted(before.difference(ids)))
        large = len(self._roster.peers) > SMALL_JOB
        if large and peer.linked is not None and len(fresh) + len(gone) < len(ids):
            message = OpenLinks(tuple(p.member for p in fresh), True, gone)
        else:
            message = OpenLinks(tuple(p.member for p in others))
        self._roster.send(peer, message)
        peer.linked = ids

    def tell_apart(self, founders: Sequence[Peer]) -> None:
        """Tells founders, enough and all ready but not all connected by links, what they are waiting for."""
        ids = [p.id for p in founders]
        groups = components(ids, self._graph.pairs(ids))
        if len(groups) > 1:
            text = (
                f"the job waits for links: {len(ids)} members are here (min_nodes={self._settings.min_nodes}), but no "
                f"link leads between {in_words(groups)}; check which neighbours they name and whether they reach these"
            )
            self._roster.tell(text, founders)
