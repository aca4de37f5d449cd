"""Decides whether newcomers come in by replay or by a pause, and which learners are given donors (protocol.md 15-18).

Theory of operation. A newcomer that is READY gets a *way*, once, with its reason. By *pause* it waits for the next
view. By *replay* it is made a learner first: the list of learners is told to all members, whose commit root writes
it into the headers of steps, so that its donors (donors.py) keep the state at the same header and a log from there on.
One generation observes at a time: who comes later waits for the next one, so that members never keep more than one
state beside their own. A learner that says that it has caught up is let in like any other newcomer, at a safe point,
where hashes show that it lacks nothing; one that cannot catch up, takes too long or falls silent is let in by a pause.
So are all of them when too few members stay, or training would go on below min_nodes, and who leaves last would take
the state along.
A learner whose donors are all gone gets others that keep nothing yet, and is named once more: they copy the state at
the first header with that list, and it begins again there. Words of an attempt before that come to nothing.

Nothing here is persisted: to the protocol a learner is nobody. After a scheduler's restart newcomers knock again,
and members are told that nobody observes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.donors import of_learner
from chaos_lightning.membership.gathering import Gathering
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.peers import Peer, Standing, listed, process_of
from chaos_lightning.membership.roster import Roster
from chaos_lightning.protocol.types import SMALL_JOB, CatchUp, PlanSpec, ServeLearners, View


class Learners:
    """Newcomers that learn by replay, and their donors. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, book: Book, roster: Roster, graph: Graph) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._graph = graph
        self._joining, self._beginning = Gathering(desk), Gathering(desk)
        """Newcomers that wait for others before they are let in, and before they observe."""
        self._donors: dict[str, tuple[str, ...]] = {}
        """Members that keep the state and the log for each learner; those that are missing are served by all."""
        self._again: Counter[str] = Counter()
        """Number of times that each learner had to begin again, with other donors."""
        self._telling = True
        """Whether members may have to be told of learners, or that there are none."""

    def admissible(self, latest: View, ready: list[Peer]) -> list[Peer]:
        """Returns newcomers that the next view may include; none while they wait for others that will soon be ready
        too.
        """
        coming = [p for p in ready if p.way == "pause" or p.caught_up]
        others = [*self._linking(), *(p for p in self._observing() if not p.caught_up)] if coming else []
        wait = self._joining.waits(coming, others, len(latest.members)) and not self._too_few()
        return [] if wait else coming

    def _linking(self) -> list[Peer]:
        return [p for p in self._roster.peers.values() if p.standing is Standing.LINKING]

    def _observing(self) -> list[Peer]:
        return [p for p in self._roster.peers.values() if p.standing is Standing.OBSERVING]

    def turn_observe(self, latest: View, ready: list[Peer]) -> bool:
        """Decides by which way each newcomer comes in, and begins a new group of learners when there is none."""
        observing = self._observing()
        if not ready and not observing:
            return False
        few = self._too_few()
        for peer in [p for p in ready if not p.way]:
            peer.way, reason = self._way_in(peer, few)
            self._desk.note("way_in", member=peer.id, way=peer.way, reason=reason)
        for peer in [p for p in ready if few and p.way == "replay" and not p.caught_up]:
            self._pause_instead(peer, few)
        overdue = [(p, why) for p in observing if p.standing is Standing.OBSERVING and (why := self._overdue(p))]
        for peer, why in overdue:
            self._pause_instead(peer, why)
        if overdue:
            return True
        for peer in [p for p in ready if self._is_deserted(p)]:
            self._begin_again(peer)
        waiting = [p for p in ready if p.standing is Standing.READY and p.way == "replay"]
        if not waiting or self._observing() or self._listed():
            return False
        if self._beginning.waits(waiting, self._linking(), len(latest.members)):
            return False
        self._donors = {p.id: self._donors_of(p) for p in waiting if len(latest.members) > SMALL_JOB}
        self._again.clear()
        for peer in waiting:
            peer.standing, peer.observes_since = Standing.OBSERVING, self._desk.now
        return True

    def _donors_of(self, learner: Peer, busy: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the ids of the members that are to be this learner's donors; those that serve another learner are
        left out.
        """
        holders = [p for p in self._roster.members() if p.loaded and p.id not in busy]
        return of_learner(learner.member, [p.member for p in holders], self._graph.leading(learner))

    def _is_deserted(self, learner: Peer) -> bool:
        """Returns whether all donors of a learner that still needs them are gone."""
        donors = self._donors.get(learner.id, ())
        observes = learner.standing is Standing.OBSERVING and not learner.caught_up
        return observes and bool(donors) and not any(self._roster.inside(m) for m in donors)

    def _begin_again(self, learner: Peer) -> None:
        """Gives a learner new donors, which copy the state for it; members that keep a copy for another learner are
        left out.
        """
        gone = listed(self._donors[learner.id])
        others = [m for m in self._listed() if m != learner.id]
        donors = self._donors_of(learner, {donor for m in others for donor in self._donors.get(m, ())})
        if not donors:
            self._pause_instead(learner, f"its donors {gone} are gone, and all other members serve other newcomers")
            return
        self._donors[learner.id] = donors
        self._again[learner.id] += 1
        learner.observes_since = self._desk.now
        reason = f"it begins again: {gone} are gone, who kept the state for it"
        self._desk.note("way_in", member=learner.id, way=learner.way, reason=reason)

    def _too_few(self) -> str:
        """Returns in words that fewer than min_nodes nodes stay, so that newcomers must come in at once; "" if enough
        stay.
        """
        staying = self._graph.staying()
        if staying >= max(1, self._settings.min_nodes):
            return ""
        return f"{staying} of min_nodes={self._settings.min_nodes} nodes stay: nobody would train meanwhile"

    def _overdue(self, peer: Peer) -> str:
        """Returns in words why the next learners need not wait for this one any longer; "" if it is within its time."""
        limit, silent = self._settings.observe_timeout_s, self._settings.hang_timeout_s
        if self._desk.now - peer.heard > silent:
            return f"no word of it for hang_timeout_s={silent:g}"
        if self._desk.now - peer.observes_since <= limit:
            return ""
        return f"it {'was not let in' if peer.caught_up else 'did not catch up'} within observe_timeout_s={limit:g}"

    def _way_in(self, peer: Peer, few: str) -> tuple[str, str]:
        if peer.no_replay or few:
            return "pause", peer.no_replay or few
        if self._book.latest is not None and self._book.latest.pipelines:
            return "pause", "each member has only some parts of the training state, so nobody could replay all (P10)"
        late = process_of(peer.member) in self._roster.left_behind
        if not late and not any(p.step for p in self._roster.living()):
            return "pause", "no step is committed yet"
        return "replay", "its steps are a pure function of state and gradients: nobody needs to wait for it"

    def on_catch_up(self, peer: Peer, message: CatchUp) -> None:
        if peer.standing is not Standing.OBSERVING or message.attempt != self._attempt(peer.id):
            return
        if not message.able and self._is_deserted(peer):
            return  # it is given others as soon as there is a view without those
        if not message.able:
            self._pause_instead(peer, message.reason or "it cannot catch up")
        elif not peer.caught_up:
            peer.caught_up = True
            self._desk.note("caught_up", member=peer.id, seq=message.seq)

    def _attempt(self, learner: str) -> int:
        """Returns how many times this learner was told to begin to learn."""
        return 1 + self._again[learner]

    def _pause_instead(self, peer: Peer, reason: str) -> None:
        peer.standing, peer.way, peer.caught_up = Standing.READY, "pause", False
        self._desk.note("way_in", member=peer.id, way="pause", reason=reason)

    def _listed(self) -> tuple[str, ...]:
        """Returns the ids of learners, and of let-in learners that have yet to enter their view; an id occurs once for
        each time the learner has begun.
        """
        return tuple(
            p.id
            for p in self._roster.peers.values()
            for _ in range(self._attempt(p.id))
            if p.alive
            and (p.standing is Standing.OBSERVING or (p.caught_up and p.standing is Standing.MEMBER and not p.loaded))
        )

    def tell(self) -> None:
        """Sends the list of learners to each learner, member and donor that does not have this list yet."""
        latest = self._book.latest
        if latest is None or self._desk.reserving:
            return
        ids = self._listed()
        if not ids and not self._telling:
            return
        told, peers = self._messages(latest, ids), list(self._roster.peers.values())
        if len(latest.members) > SMALL_JOB:  # who names the learners in a header is told last: then the others know
            peers.sort(key=lambda p: p.id == latest.root)
        for peer in peers:
            concerned = peer.standing is Standing.MEMBER or peer.id in ids or peer.id in peer.learners[1]
            if peer.conn is None or not concerned:
                continue
            if peer.learners != (peer.conn, ids) and (ids or peer.learners[1]):
                peer.learners = (peer.conn, ids)
                self._roster.send(peer, told(peer))
        self._telling = bool(ids) or any(p.learners[1] for p in peers)

    def _messages(self, latest: View, ids: tuple[str, ...]) -> Callable[[Peer], ServeLearners]:
        """Returns a function that makes each peer's message with the list of learners. In a large job its view names
        only that peer's donors or learners.
        """
        if len(latest.members) <= SMALL_JOB or any(m not in self._donors for m in ids):
            # Any member of the view that has the state may be asked, though it came in with this very view.
            view = replace(latest, joiners=tuple(p.id for p in self._roster.members() if not p.loaded))
            return lambda peer: ServeLearners(ids, view)
        keepers = {m for learner in ids for m in self._donors[learner]}
        nobody = replace(latest, members=(), joiners=(), links=(), plan=PlanSpec())
        to_others = ServeLearners(ids, nobody)

        def told(peer: Peer) -> ServeLearners:
            whom = self._donors[peer.id] if peer.id in ids else (peer.id,) if peer.id in keepers else ()
            members = tuple(member for m in whom if (member := latest.find(m)) is not None)
            return ServeLearners(ids, replace(nobody, members=members)) if members else to_others

        return told
