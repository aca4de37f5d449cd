"""Collects, for `chaos-lightning status`, who is in a job and which links they have.

Theory of operation. Up to SHOWN members and newcomers everything is listed, every pair of them with its link. Of a
larger job the answer lists what is not as it should be, SHOWN of a kind at most, and counts the rest; so it takes
milliseconds and some kB, whatever the job's size. Everything is told in pages of PAGE members and newcomers, with the
links of each to those that come after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.peers import Peer, Standing
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.topology import Fact, Topology, pair
from chaos_lightning.planning.batch import FIXED, read_split
from chaos_lightning.protocol.types import Progress

SHOWN = 16
"""Number of members and newcomers up to which all is listed; of a larger job that many lines of each kind."""
PAGE = 32
"""Number of members and newcomers on a page."""
_STATES = ("in use", "down", "stands, not in use yet", "not there yet", "not wanted")
"""States of links that are counted; a link that was taken away, for whatever reason, counts as not wanted."""


class Showing:
    """Facts about members and links for people. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, book: Book, roster: Roster, graph: Graph, topology: Topology) -> None:
        self._desk = desk
        self._book = book
        self._roster = roster
        self._graph = graph
        self._topology = topology

    def facts(self, page: int) -> dict[str, object]:
        """Returns facts on members, newcomers and links: those of one page (1, 2, ...), or for page 0 only the abnormal
        ones.
        """
        members, (batch, samples) = self._roster.members(), self._shared()
        peers = [*members, *(p for p in self._roster.peers.values() if p.standing is not Standing.MEMBER)]
        counts: dict[str, object] = {
            "members": len(members),
            "living": sum(p.alive for p in members),
            "connected": sum(p.conn is not None for p in members),
            "here": sum(p.conn is not None for p in peers),
            "leaving": sum(p.conn is not None and bool(p.leaving) for p in peers),
            "others": dict(Counter(str(p.standing) for p in peers[len(members) :])),
        }
        if len(peers) <= SHOWN:
            shown, links = peers, self._rows(combinations(self._placed(peers), 2))
        elif page > 0:
            shown = peers[(page - 1) * PAGE : page * PAGE]
            ids = {p.id for p in shown}
            links = self._rows((a, b) for a, b in self._known(peers) if a.id in ids)
        else:
            amiss = [p for p in members if self._odd(p)]
            shown = [*amiss[:SHOWN], *peers[len(members) :][:SHOWN]]
            states, odd = self._link_states(peers)
            counts["links"] = dict(states)
            links = self._rows(odd[:SHOWN])
        return {
            "members": [
                self._described(p) | ({"samples": samples[p.id]} if p.id in samples else {})
                for p in shown
                if p.standing is Standing.MEMBER
            ],
            "others": [self._described(p) for p in shown if p.standing is not Standing.MEMBER],
            "links": links,
            **batch,
            "counts": counts,
            "pages": -(-len(peers) // PAGE) if len(peers) > SHOWN else 0,
        }

    def _odd(self, member: Peer) -> bool:
        """Returns whether this member's state is abnormal, so that it has a line of its own even in a large job."""
        latest = self._book.latest
        behind = latest is not None and member.entered != latest.id
        silent = self._desk.clock is not None and self._desk.now - member.heard > self._desk.settings.silence_timeout_s
        here = member.conn is not None and member.loaded and member.alive
        return bool(behind or silent or not here or member.leaving)

    def _runs(self, peer: Peer) -> dict[str, object]:
        """Returns which layers this member runs in the view's pipelines, in words, and its speed if known."""
        latest = self._book.latest
        pipelines = division(latest).pipelines if latest is not None and latest.pipelines else None
        if pipelines is None or peer.standing is not Standing.MEMBER:
            return {}
        mine = pipelines.plan.stages.get(peer.id, ())
        runs = ", ".join(f"{s.first}-{s.end - 1}" if s.end - s.first > 1 else str(s.first) for s in mine)
        one = sum(s.end - s.first for s in mine) == 1
        told = {"speed": round(peer.tempo.speed, 2)} if peer.tempo.speed else {}
        return {"runs": f"layer{'' if one else 's'} {runs}" if runs else "stands by", **told}

    def _shared(self) -> tuple[dict[str, object], dict[str, int]]:
        """Returns the rule of a batch of fixed size and each member's samples of a step; both empty without one."""
        latest = self._book.latest
        split = read_split(latest.batch, len(latest.members)) if latest is not None else None
        if latest is None or split is None:
            return {}, {}
        return {"batch": f"{FIXED}:{split.rule}"}, dict(zip(latest.ids(), split.samples(), strict=True))

    def _described(self, peer: Peer) -> dict[str, object]:
        return {
            "id": peer.id,
            "host": peer.member.host,
            "standing": str(peer.standing),
            "connected": peer.conn is not None,
            "view": str(peer.entered),
            "seq": peer.seq,
            "step": peer.step,
            "step_time_s": round(peer.tempo.step_s, 6),
            "loaded": peer.loaded,
            "way": peer.way,
            "progress": _in_words(peer.progress) if peer.progress is not None and not peer.loaded else "",
            "leaving": peer.leaving,
            "dead": peer.condemned or peer.dead,
            "silent_s": round(self._desk.now - peer.heard, 3) if self._desk.clock is not None else 0.0,
            **self._runs(peer),
        }

    # ------------------------------------------------------------------ links

    @staticmethod
    def _placed(peers: Iterable[Peer]) -> list[Peer]:
        return [p for p in peers if p.standing is not Standing.STANDBY]

    def _known(self, peers: Sequence[Peer]) -> Iterator[tuple[Peer, Peer]]:
        """Yields the pairs with a link in the latest view or in any report, the older end first."""
        here = self._placed(peers)
        places = {p.id: i for i, p in enumerate(here)}
        latest = self._book.latest
        pairs = {*self._topology.facts, *(self._graph.of_view(latest) if latest is not None else ())}
        ends = sorted(sorted(places[m] for m in ends) for ends in pairs if places.keys() >= ends)
        return ((here[a], here[b]) for a, b in ends)

    def _link_states(self, peers: Sequence[Peer]) -> tuple[Counter[str], list[tuple[Peer, Peer]]]:
        """Returns the number of links in each state, and the abnormal links."""
        states, odd = Counter[str](), list[tuple[Peer, Peer]]()
        latest = self._book.latest
        used = self._graph.of_view(latest) if latest is not None else frozenset()
        wished = bool(self._topology.removed)
        for one, other in self._known(peers):
            fact = self._topology.facts.get(ends := pair(one.id, other.id))
            plain = ends in used and not wished and (fact is None or not (fact.down or fact.idle))
            state = "in use" if plain else self._state(one, other, fact or Fact())
            word = "down" if state.startswith("down: ") else state
            states[word if word in _STATES else "not wanted"] += 1
            if state not in ("in use", "not wanted"):
                odd.append((one, other))
        return states, odd

    def _rows(self, pairs: Iterable[tuple[Peer, Peer]]) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for one, other in pairs:
            ends = pair(one.id, other.id)
            fact = self._topology.facts.get(ends, Fact())
            ((latency_s, there_bps, back_bps),) = self._topology.measured((one.id, other.id), [ends]).values()
            known = bool(fact.reports)
            rows.append(
                {
                    "a": one.id,
                    "b": other.id,
                    "state": self._state(one, other, fact),
                    "latency_s": latency_s if known else None,
                    "there_bps": there_bps if known else None,
                    "back_bps": back_bps if known else None,
                    "failures": fact.failures,
                }
            )
        return rows

    def _state(self, one: Peer, other: Peer, fact: Fact) -> str:
        if not self._topology.wants(one, other):
            return self._topology.removed.get(pair(one.member.name, other.member.name), "not wanted")
        if fact.down or fact.idle:
            return f"down: {fact.down or fact.idle}"
        if self._graph.in_force(one.id, other.id):
            return "in use"
        return "stands, not in use yet" if fact.stands else "not there yet"


def _in_words(progress: Progress) -> str:
    """Returns one line on how far a newcomer's transfer of the state is."""
    if progress.phase == "replay":
        return f"replays, {progress.lag} behind"
    words = f"{progress.done_nbytes / 2**20:.1f} of {progress.total_nbytes / 2**20:.1f} MiB"
    if progress.rate_bps > 0:
        words += f" at {progress.rate_bps / 1e6:.0f} Mbps, {progress.remaining_s:.0f} s left"
    sources = ", ".join(f"{s.member} {s.nbytes / 2**20:.1f} MiB" for s in progress.sources)
    return f"{words} ({sources})" if sources else words
