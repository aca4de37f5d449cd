"""Links between members: what both ends say becomes facts, and everybody is told whom to connect to.

Theory of operation. Members say when a link comes up or fails (LinkEvent) and what it carries (LinkReport); operators
and members ask for links or against them: what is granted is stored before it is answered, and holds from then on,
also for the next scheduler (`_turn_wishes`). All of it goes into `Topology` (topology.py). `OpenLinks`
names the peers that a member is to have links to beside those of the view that it stands in: newcomers, and wanted
pairs that the view does not use, so that a link that failed is dialled until it is back. Its list replaces the one
before.

A link that is made anew within a view may have lost bytes on the way: the open slot is reduced again (`_again`). What
becomes of a link that stays down is decided in rewiring.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from chaos_lightning.membership.effects import Answer, Chain, LinkWish
from chaos_lightning.membership.roster import NEWCOMER, Peer, Standing, has_place
from chaos_lightning.membership.scheduler_state import Phase, SchedulerState
from chaos_lightning.membership.topology import (
    NEIGHBOUR_PATIENCE_S,
    Fact,
    Net,
    Pair,
    Topology,
    connected,
    in_words,
    links_of,
    neighbours,
    node_of,
    pair,
    parts,
    ranked,
)
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import (
    MADE_ANEW,
    NO_VIEW,
    LinkReport,
    LinkRequest,
    Notice,
    OpenLinks,
    Settings,
    View,
    ViewId,
)

_NO_LINK = "no link"
"""Under this word a newcomer's `asked` tells since when no link has led to it; no id looks like this."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Somebody asks for or against a link, by words that name its ends, and waits for the answer."""

    ends: tuple[str, str]
    add: bool
    why: str
    answer: Callable[[bool, str], None]


class Linking(SchedulerState, ABC):
    """See the module; arguments and attributes are those of `SchedulerState`."""

    def __init__(self, settings: Settings, chain: Chain) -> None:
        super().__init__(settings, chain)
        self.topology = Topology(chain.wishes)
        self._asked: deque[_Asked] = deque()
        """Not answered yet, oldest first; the first may be on its way to the store."""
        self._pairs: dict[ViewId, frozenset[Pair]] = {}
        self._relinked = True
        """Something about links changed since they were looked at."""
        self._unused: dict[str, list[Peer]] = {}
        """Wanted neighbours that the latest view has no link to, by member."""

    @abstractmethod
    def _tell(self, text: str, peers: Sequence[Peer]) -> None:
        """Tells these, once each, what they wait for (membership/judging.py)."""

    # ------------------------------------------------------------------ the graph

    def _view_pairs(self, view: View) -> frozenset[Pair]:
        """The pairs of this view."""
        if view.id not in self._pairs:
            self._pairs = {v.id: links_of(v) for v in (*self.chain[-2:], view)}
        return self._pairs[view.id]

    def _in_force(self, one: str, other: str) -> bool:
        """Whether a view that members may stand in uses this link."""
        latest = self.latest
        if latest is None:
            return False
        views = [latest]
        before = self.chain[-2:-1] if self._announced is not None else []
        if any(self._inside(m) and self.peers[m].entered != latest.id for view in before for m in view.ids()):
            views += before
        return any(pair(one, other) in self._view_pairs(v) for v in views)

    def _usable(self, one: Peer, other: Peer, *, patient: bool = True) -> bool:
        """Whether a new view may use the link between these two.

        Args:
            one: A member, or a newcomer that is ready.
            other: Another one.
            patient: A link that the latest view does not use must have stood for long enough.
        """
        if not self.topology.wants(one, other):
            return False
        fact = self.topology.facts.get(pair(one.id, other.id))
        if fact is not None and (fact.down or (patient and fact.idle)):
            return False
        latest = self.latest
        if latest is None or latest.find(one.id) is None or latest.find(other.id) is None:
            return True  # whoever is ready vouches for its links
        if pair(one.id, other.id) in self._view_pairs(latest):
            return not patient or fact is None or fact.failures < 2 or fact.seasoned(self.now)
        if fact is None or not fact.stands:
            return False
        return not patient or fact.seasoned(self.now)

    def _graph(self, members: Iterable[str]) -> frozenset[Pair]:
        """What a view of these may use; links that have yet to prove themselves only where it would fall apart."""
        here = [self.peers[m] for m in members if m in self.peers]
        ids = [p.id for p in here]
        found = frozenset(pair(a.id, b.id) for a, b in combinations(here, 2) if self._usable(a, b))
        if connected(ids, found):
            return found
        return frozenset(pair(a.id, b.id) for a, b in combinations(here, 2) if self._usable(a, b, patient=False))

    def _net(self, members: Sequence[str]) -> Net:
        pairs = self._graph(members)
        return Net(pairs, self.topology.measured(members, pairs))

    def _together(self, peers: list[Peer]) -> list[Peer]:
        """The largest part of these that links hold together."""
        ids = [p.id for p in peers]
        best = next(iter(ranked(parts(ids, self._graph(ids)), ids)), ())
        return [p for p in peers if p.id in best]

    def _ready(self) -> list[Peer]:
        """Newcomers that can be let in now: a link to a member stands, or they hold together where nobody is in."""
        here = [p for p in super()._ready() if not p.stranded]
        anchors = self._living()
        ready = [p for p in here if not self._speaks_alone(p, [*anchors, *here])]
        if not anchors:
            return self._together(ready) if len(ready) > 1 else ready
        return [p for p in ready if any(self._leads(p, m) for m in anchors)]

    def _staying(self) -> int:
        """How many nodes of the latest view do not leave."""
        return nodes.count(p.member for p in self._members() if not p.leaving)

    def _few(self) -> bool:
        """Whether fewer than min_nodes can go on, so that newcomers count over any link that stands (14)."""
        return self.phase is Phase.HOLDING or self._staying() < max(1, self.settings.min_nodes)

    def _leads(self, newcomer: Peer, member: Peer) -> bool:
        """Whether it can come in by its link to this one; by a link that carries nothing only where it is needed."""
        return self._usable(newcomer, member, patient=not self._few())

    def _reachable(self, members: Sequence[str]) -> list[Peer]:
        """Newcomers that are ready and links lead to from these members, over each other if need be.

        They come in one after the other, each when somebody is in to whom it has a link.
        """
        here = [p for p in super()._ready() if not p.stranded]
        ids = [*members, *(p.id for p in here)]
        part = next((g for g in parts(ids, self._graph(ids)) if set(members) & set(g)), ())
        return [p for p in here if p.id in part]

    def _strand(self, newcomers: list[Peer], members: list[Peer]) -> None:
        """Takes their places from newcomers that no link leads to, and gives one to whom a link leads again."""
        anchors = self._anchors(newcomers, members)
        for peer in newcomers:
            others = (self.peers[m] for m in anchors)
            if peer.id in anchors or any(m.id in peer.up and self._leads(peer, m) for m in others):
                peer.asked.pop(_NO_LINK, None)
                if peer.stranded and has_place(peer.member, self.peers, self.settings):
                    peer.stranded = False
                elif peer.stranded and members:  # founders are told why the job does not begin
                    self._tell(f"on standby: {self.settings.max_nodes} members are in", [peer])
            elif self.now - peer.asked.setdefault(_NO_LINK, self.now) > NEIGHBOUR_PATIENCE_S:
                peer.stranded = True

    def _anchors(self, newcomers: list[Peer], members: list[Peer]) -> Sequence[str]:
        """To one of these a newcomer must have a link.

        That is a member; where fewer than min_nodes are in, also another newcomer that is linked to one, over others if
        need be. Who has no place holds nobody together.
        """
        placed = [p for p in newcomers if not p.stranded]
        ids = [m.id for m in members]
        if not members:
            best = self._best_part(newcomers)
            return self._best_part([p for p in placed if p.id in best]) or best
        if not self._few():
            return ids
        here = [*members, *placed]
        return [m for g in parts([p.id for p in here], self._linked(here)) if set(ids).intersection(g) for m in g]

    def _best_part(self, newcomers: list[Peer]) -> tuple[str, ...]:
        """Of newcomers that are to found the job the largest part that links hold together."""
        ids = [p.id for p in newcomers]
        return next(iter(ranked(parts(ids, self._linked(newcomers)), ids)), ())

    def _linked(self, peers: list[Peer]) -> frozenset[Pair]:
        """Pairs of which an end has said that their link stands."""
        return frozenset(
            pair(a.id, b.id)
            for a, b in combinations(peers, 2)
            if (b.id in a.up or a.id in b.up) and self._usable(a, b, patient=False)
        )

    def _speaks_alone(self, peer: Peer, others: Iterable[Peer]) -> bool:
        """Whether it says that a link stands of which its other end, which would say so, has not said a word yet.

        That one may be about to accept it: in a view before that, what it sent meanwhile would have gone nowhere. One
        that says nothing for NEIGHBOUR_PATIENCE_S hangs, and is no reason to keep others out.
        """
        alone = False
        for other in others:
            fact = self.topology.facts.get(pair(peer.id, other.id)) if other is not peer else None
            since = f"{other.id} is silent on their link"
            if (
                fact is not None
                and fact.words == {peer.id: ""}
                and other.conn is not None
                and self.topology.wants(peer, other)
            ):
                alone = alone or self.now - peer.asked.setdefault(since, self.now) <= NEIGHBOUR_PATIENCE_S
            else:
                peer.asked.pop(since, None)
        return alone

    def _drop(self, peer: Peer) -> None:
        super()._drop(peer)
        self.topology.forget(peer.id)
        self._relinked = True

    def _rewired(self, before: View | None, view: View) -> None:
        """A view is in the chain: links that it gave up are no sign of anybody's death, and have failed once more."""
        self._relinked = True
        if before is None:
            return
        lost = [p for p in self._view_pairs(before) - self._view_pairs(view) if all(view.find(m) for m in p)]
        for one, other in sorted(map(sorted, lost)):
            fact = self.topology.fact(one, other)
            fact.failures += 1 if fact.down or fact.idle else 0
            for me, them in ((one, other), (other, one)):
                if me in self.peers:
                    self.peers[me].down.pop(them, None)
                    self.peers[me].silent.pop(them, None)

    # ------------------------------------------------------------------ what members say

    def _on_link(self, peer: Peer, other: str, up: bool, evidence: str) -> None:
        fact = self.topology.fact(peer.id, other) if other in self.peers else Fact()
        self._relinked = True
        if up:
            anew = evidence == MADE_ANEW
            if anew:
                fact.say(self.now, peer.id, "closed")
            fact.say(self.now, peer.id, "")
            self._on_link_up(peer, other, fact, anew)
            return
        fact.say(self.now, peer.id, evidence or "down")
        peer.up.discard(other)
        latest = self.latest
        if latest is not None and latest.find(peer.id) and latest.find(other) and not self._in_force(peer.id, other):
            return
        if evidence.startswith("silent"):
            peer.silent[other] = evidence
        if not evidence.startswith("closed"):
            return
        peer.down[other] = evidence
        subject = self.peers.get(other)
        if subject is not None and subject.alive and subject.standing in (Standing.MEMBER, Standing.LEAVER):
            self.detector.suspect(self.now, other, f"{peer.id} says that its link is {evidence}")

    def _on_link_up(self, peer: Peer, other: str, fact: Fact, anew: bool) -> None:
        silent, before = peer.silent.pop(other, None), peer.down.pop(other, None)
        before = before or silent or ("closed" if anew else None)
        subject = self.peers.get(other)
        together = subject is not None and peer.entered == subject.entered
        if before is None and together and other not in peer.up and peer.known and peer.entered.number:
            before = "it was not there when the view began"
        peer.up.add(other)
        # Whatever was sent on the link before is lost; a new attempt makes up for it.
        if before is None or self._reserving or not (self._inside(peer.id) and self._inside(other)):
            return
        if self._in_force(peer.id, other):
            fact.failures += fact.stands  # both ends tell
            self._again = f"the link between {peer.id} and {other} was made anew ({before})"

    def _on_link_report(self, peer: Peer, report: LinkReport) -> None:
        if report.peer in self.peers:
            self.topology.report(peer.id, report)
            self._relinked = True

    def _may_witness(self, by: Peer, suspect: str) -> bool:
        """Whether a missing link says anything: to a neighbour it does; to others only if no neighbour lives to ask."""
        latest = self.latest
        if latest is None or not latest.links or latest.find(by.id) is None or latest.find(suspect) is None:
            return True
        near = neighbours(latest, suspect)
        living = [p for m in near if (p := self.peers.get(m)) is not None and p.alive and p.conn is not None]
        return by.id in near or not living

    @staticmethod
    def _is_stranger(by: Peer, suspect: str) -> bool:
        """A newcomer that never had a link to the suspect, so that it misses none."""
        return by.standing not in (Standing.MEMBER, Standing.LEAVER) and suspect not in by.up and suspect not in by.down

    # ------------------------------------------------------------------ connect-link, disconnect-link

    def _on_link_request(self, peer: Peer, request: LinkRequest) -> None:
        def answer(granted: bool, text: str) -> None:
            self._send(peer, Notice(text if granted else f"refused: {text}"))

        why = f"{peer.id} asks: {request.reason or 'no reason given'}"
        self._asked.append(_Asked((peer.id, request.peer), request.add, why, answer))

    def _on_change_link(self, token: int, ends: tuple[str, str], add: bool) -> None:
        def answer(granted: bool, text: str) -> None:
            self._out.append(Answer(token, granted, text))

        self._asked.append(_Asked(ends, add, "an operator asks", answer))

    def _turn_wishes(self) -> bool:
        """Refuses what cannot be, and has the first wish that can be stored; nothing else is decided meanwhile."""
        while self._asked:
            asked = self._asked[0]
            found = self._ends(asked)
            if not isinstance(found, str):
                one, other = found
                refusal = self._needless(one, other) if asked.add else self._indispensable(one, other)
                if not refusal:
                    why = asked.why if asked.add else f"removed, {asked.why}"
                    wish = LinkWish(one.member.name, other.member.name, asked.add, why)
                    self._persist("link", NO_VIEW, partial(self._granted, wish, one.id, other.id), wish=wish)
                    return True
                self._note_wish(asked, one.id, other.id, refusal)
                found = refusal
            self._asked.popleft()
            asked.answer(False, found)
        return False

    def _granted(self, wish: LinkWish, one: str, other: str) -> None:
        """A wish for or against the link of these members is in the store."""
        asked = self._asked.popleft()
        self.topology.wished(wish)
        self._relinked = True
        fact = self.topology.facts.get(pair(one, other))
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
        self._note("notice", text=f"link {'add' if asked.add else 'remove'} {one} {other} ({asked.why}): {text}")

    def _ends(self, asked: _Asked) -> tuple[Peer, Peer] | str:
        """Who is meant; words if that is not clear, or nothing can be changed any more."""
        if self.phase in (Phase.FINISHED, Phase.DEPOSED):
            return f"this scheduler is {self.phase}: no link changes any more"
        a, b = asked.ends
        one, other = self._find(a), self._find(b)
        if isinstance(one, str):
            return f"{a!r} {one}"
        if isinstance(other, str):
            return f"{b!r} {other}"
        return f"{a!r} and {b!r} are both {one.id}: a link has two ends" if one is other else (one, other)

    def _find(self, word: str) -> Peer | str:
        """Who is meant by an id, a name or a node; words if that is nobody, or not clear."""
        here = [p for p in self.peers.values() if p.alive and p.standing in (*NEWCOMER, Standing.MEMBER)]
        exact = [p for p in here if word in (p.id, p.member.name)]
        found = exact or [p for p in here if node_of(p.member.name) == word]
        if len(found) == 1:
            return found[0]
        if not found:
            return f"is no member; present: {', '.join(p.id for p in here) or 'nobody'}"
        return f"is the node of {', '.join(p.id for p in found)}: name one of them"

    def _needless(self, one: Peer, other: Peer) -> str:
        """Why a link cannot be added; "" if it can."""
        latest = self.latest
        both = latest is not None and latest.find(one.id) is not None and latest.find(other.id) is not None
        there = both and latest is not None and pair(one.id, other.id) in self._view_pairs(latest)
        if there and pair(one.member.name, other.member.name) not in self.topology.removed:
            return f"{one.id} and {other.id} have a link already"
        return ""

    def _indispensable(self, one: Peer, other: Peer) -> str:
        """Why a link cannot be removed; "" if it can."""
        if not self.topology.wants(one, other):
            names = pair(one.member.name, other.member.name)
            was = self.topology.removed.get(names, "neither named the other as its neighbour")
            return f"{one.id} and {other.id} have no link: {was}"
        inside = [p.id for p in self._living()] or [p.id for p in self.peers.values() if p.standing in NEWCOMER]
        if one.id in inside and other.id in inside:
            rest = parts(inside, self._graph(inside) - {pair(one.id, other.id)})
            if len(rest) > 1:
                return f"without the link of {one.id} and {other.id} the members fall apart: {in_words(rest)}"
        return ""

    # ------------------------------------------------------------------ telling whom to connect to

    def _links(self) -> None:
        """Tells newcomers and members of each other; the list replaces the one before."""
        if self.phase in (Phase.FINISHED, Phase.DEPOSED):
            return
        wants = self.topology.wants
        newcomers = [p for p in self.peers.values() if p.standing in NEWCOMER]
        members = self._living()
        latest = self.latest
        joining = [p for p in members if latest is not None and p.entered != latest.id and p.id in latest.joiners]
        for peer in newcomers:
            others = [p for p in (*members, *newcomers) if p is not peer and wants(peer, p)]
            others.sort(key=lambda p: p.member.name not in peer.neighbours)
            self._open_links(peer, self._within_reach(peer, others))
        self._tell_lonely(newcomers)
        self._strand(newcomers, members)
        unused = self._unused_links(members)
        for peer in members:
            # Until it has entered the last view, a member knows the newer ones by this list only; a link that it
            # gave up in between would be missed when it enters.
            standing_in = latest is not None and peer.entered == latest.id
            known = [*joining, *(p for p in unused.get(peer.id, ()) if p not in joining)] if standing_in else members
            self._open_links(peer, [p for p in (*known, *newcomers) if p is not peer and wants(peer, p)])

    def _unused_links(self, members: list[Peer]) -> dict[str, list[Peer]]:
        """By member: neighbours that it wants and the latest view has no link to. They are dialled all the same."""
        latest = self.latest
        if latest is None or not latest.links:
            return {}
        if self._relinked:
            used, wants = self._view_pairs(latest), self.topology.wants
            self._unused = {
                p.id: [q for q in members if q is not p and pair(p.id, q.id) not in used and wants(p, q)]
                for p in members
            }
        return self._unused

    def _within_reach(self, peer: Peer, others: list[Peer]) -> list[Peer]:
        """Without neighbours that a newcomer does not reach, if it has reached another one.

        They may not reach the scheduler, which so cannot tell them of the newcomer, and train on. Where nobody is in
        yet, it may found the job without them.
        """
        if peer.standing is not Standing.LINKING or peer.conn is None:
            return others
        for other in others:
            peer.asked.setdefault(other.id, self.now)
        late = [p for p in others if p.id not in peer.up and self.now - peer.asked[p.id] > NEIGHBOUR_PATIENCE_S]
        if not late:
            return others
        words = ", ".join(f"{p.id} ({self.topology.down(peer.id, p.id) or 'no answer'})" for p in late)
        if self.phase is not Phase.FOUNDING and not any(p.id in peer.up for p in others):
            self._tell(f"{peer.id} reaches none of its neighbours: {words}; it comes in when a link stands", [peer])
            return others
        for other in late:
            fact = self.topology.fact(peer.id, other.id)
            if not fact.words.get(peer.id):
                fact.say(self.now, peer.id, f"not reached within {NEIGHBOUR_PATIENCE_S:g} s")
        self._tell(f"{peer.id} comes in without its links to {words}", [peer])
        return [p for p in others if p not in late]

    def _tell_lonely(self, newcomers: list[Peer]) -> None:
        """Newcomers that are ready but have no link to a member learn what they wait for."""
        members = self._living()
        for peer in newcomers if members else ():
            if peer.standing is Standing.LINKING or any(self._leads(peer, m) for m in members):
                peer.asked.pop("", None)
                continue
            if self.now - peer.asked.setdefault("", self.now) > NEIGHBOUR_PATIENCE_S:
                wanted = [m for m in members if self.topology.wants(peer, m)]
                words = ", ".join(f"{m.id} ({self.topology.trouble(peer.id, m.id) or 'no answer'})" for m in wanted)
                nobody = f"none of the neighbours that it names is in the job: {', '.join(peer.neighbours)}"
                self._tell(f"{peer.id} has no link to a member: {words or nobody}; it comes in when one stands", [peer])

    def _open_links(self, peer: Peer, others: list[Peer]) -> None:
        ids = tuple(p.id for p in others)
        linked = peer.linked if peer.linked is not None or peer.standing is Standing.LINKING else ()
        if peer.conn is not None and ids != linked:
            self._send(peer, OpenLinks(tuple(p.member for p in others)))
            peer.linked = ids
