"""A chain that is lost, or the end of it: on the operator's word it is rebuilt from what members report (14a).

Theory of operation. What a store lacks, members know (identity.py). A scheduler that was told to rebuild
(`Chain.rebuild`), and whose store is empty or turns out to be an older copy, takes such *reporters* in, founds nothing,
and asks them what they know (`Recall`), again when they come again or have moved. The last view that any of them stands
in, or was told of, is the one to go on from: of its members more than half must be here; where all of them are, or
`reconnect_grace_s` after the first came, it takes a term above all that they have heard of, and the rest is a recovery
like any other: a number above all promised ones, promises, reports, ruling (8, 9). The view that comes of it follows
what the store holds, under the id of the chain that the reporters are of, so that terms and views go on comparing.
Those that did not report count as if they lived until then, and are out from then on (14b).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from chaos_lightning.membership.effects import Chain, Close, TakeTerm
from chaos_lightning.membership.identity import REBUILT, Identity
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Peer, Reference, Standing, difference, first_incarnation, short
from chaos_lightning.membership.scheduler_state import Phase
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Hello,
    Member,
    Recall,
    Recollection,
    Settings,
    View,
    ViewId,
)


class Rebuilding(Identity):
    """See the module."""

    def __init__(self, settings: Settings, chain: Chain) -> None:
        super().__init__(settings, chain)
        if chain.rebuild and self.phase is Phase.FOUNDING:
            self.phase = Phase.REBUILDING
        self._may_rebuild = chain.rebuild
        """The operator's word: it is used up as soon as the job goes on by the chain, as it is or rebuilt."""
        self._prefix: tuple[View, ...] = ()
        """What an older copy holds: the rebuilt view follows it."""
        self._recalled: dict[str, Recollection] = {}
        self._recalled_at: dict[str, float] = {}
        """Since when (s) these owe an answer to `Recall`, on whichever stream."""
        self._terms = 0
        """The highest term that a reporter has heard of."""
        self._asked_term = 0
        self._asked_chain = ""
        """The chain that is rebuilt goes on under its id, so that terms and views go on comparing."""
        self._first_at: float | None = None
        self._before: View | None = None
        """The view that the chain is being rebuilt from."""

    @property
    def _rebuilds(self) -> bool:
        return self._before is not None or self.phase is Phase.REBUILDING

    @property
    def _holds_views(self) -> bool:
        return bool(self._prefix) or (bool(self.chain) and self._before is None)

    def _stored_in_vain(self, view: View | None) -> None:
        if view is not None and self._prefix:
            self._prefix += (view,)

    def _begin_to_rebuild(self) -> bool:
        if self._may_rebuild:
            self._prefix, self.chain, self._stale = tuple(self.chain), [], ""
            self.phase = Phase.REBUILDING
        return self._may_rebuild

    @abstractmethod
    def _recover(self, why: str, *, urgent: bool = False) -> bool: ...

    # ------------------------------------------------------------------ reporters

    def _take_in(self, conn: int, hello: Hello) -> None:
        newcomer = hello.view == NO_VIEW
        reason = self._is_of_another(hello)
        if reason:
            self._refuse(conn, hello, reason, retry=not newcomer)
            return
        old = self.peers.get(hello.resume)
        if old is not None and old.conn is not None:
            self._conns.pop(old.conn, None)
        peer = Peer(self._member_of(hello, hello.resume), Standing.REPORTER, conn=conn, heard=self.now)
        peer.neighbours, peer.no_replay, peer.entered = hello.neighbours, hello.replay, hello.view
        peer.chain = hello.chain
        peer.said = Reference.of(hello) if newcomer else None
        self.peers[peer.id], self._conns[conn] = peer, peer.id
        self._terms, self._relinked = max(self._terms, hello.term), True
        if not newcomer:
            self.reference = Reference.of(hello)
            self._turn_away_strangers()
        self._greet(peer, "joiner", "the chain is being rebuilt from what its members report")

    def _is_of_another(self, hello: Hello) -> str:
        """Words if this is another program than that of the members here; what newcomers say counts for nothing."""
        inside = (Standing.REPORTER, Standing.MEMBER)
        here = [p for p in self.peers.values() if p.standing in inside and p.conn is not None and p.said is None]
        return difference(hello, self.reference) if any(p.id != hello.resume for p in here) else ""

    def _greet(self, peer: Peer, role: str, reason: str) -> None:
        super()._greet(peer, role, reason)
        if self._rebuilds and peer.standing in (Standing.REPORTER, Standing.MEMBER):
            self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        self._recalled.pop(peer.id, None)
        self._recalled_at.setdefault(peer.id, self.now)
        self._send(peer, Recall())

    def _on_moved(self, peer: Peer) -> None:
        """A header that was under way has carried a view: what the member told before is out of date."""
        told = self._recalled.get(peer.id)
        if self._rebuilds and told is not None and peer.entered > (told.view.id if told.view is not None else NO_VIEW):
            self._ask(peer)

    def _on_recollection(self, peer: Peer, message: Recollection) -> None:
        if not self._rebuilds:
            return  # the chain is begun: what was before counts no more
        self._recalled[peer.id] = message
        self._recalled_at.pop(peer.id, None)
        if self._first_at is None and (message.view is not None or message.waiting is not None):
            self._first_at = self.now

    def _owing(self) -> list[Peer]:
        """Who was asked what it knows, and is about to tell: nothing is decided meanwhile.

        Heartbeats come from another thread than the answer. Who lets `report_timeout_s` pass counts as silent until it
        answers, also on its next streams.
        """
        settings = self.settings
        return [
            p
            for p in self.peers.values()
            if p.standing in (Standing.REPORTER, Standing.MEMBER)
            and p.conn is not None
            and p.alive
            and p.id not in self._recalled
            and self.now - p.heard <= settings.heartbeat_timeout_s
            and self.now - self._recalled_at.get(p.id, float("-inf")) <= settings.report_timeout_s
        ]

    def _shift_rebuilding(self, gap: float) -> None:
        """This process was frozen for so long (s): that was nobody's silence."""
        self._recalled_at = {m: at + gap for m, at in self._recalled_at.items()}
        if self._first_at is not None:
            self._first_at += gap

    def _reporters(self) -> list[Peer]:
        """Who has told what it knows, and can still be counted on."""
        return [
            p for p in self.peers.values() if p.standing is Standing.REPORTER and p.alive and p.id in self._recalled
        ]

    def _last_known(self) -> View | None:
        """The last view that anybody here stands in or was told of.

        One that a header was to carry counts for nothing while all members of the view before are here, and none of
        them stands in it: then nobody does, since its header took a contribution of each (1).
        """
        told = {
            p.id: self._recalled[p.id] for p in self.peers.values() if p.id in self._recalled and p.conn is not None
        }
        entered = max((r.view for r in told.values() if r.view is not None), key=lambda v: v.id, default=None)
        waiting = max((r.waiting for r in told.values() if r.waiting is not None), key=lambda v: v.id, default=None)
        if waiting is None or entered is None or waiting.id < entered.id:
            return entered
        return entered if all(m in told for m in entered.ids()) else waiting

    def _enough(self, here: int, view: View) -> bool:
        """More than half of the members of the view before: no two such groups are disjoint (14a)."""
        return 2 * here > len(view.members)

    def _turn_rebuilding(self) -> bool:
        owing = self._owing()
        if owing:
            self._waits = (
                f"to rebuild the chain, {', '.join(p.id for p in owing)} must tell what they know: they were asked, "
                f"and are waited for, for {self.settings.report_timeout_s:g} s"
            )
            return False
        reporters = self._reporters()
        chains = sorted({p.chain for p in reporters if p.chain and p.entered != NO_VIEW})
        if len(chains) > 1:
            who = "; ".join(f"{', '.join(p.id for p in reporters if p.chain == c)} of {short(c)}" for c in chains)
            self._waits = f"members of several chains report ({who}): end those that are not to go on"
            return False
        latest = self._last_known()
        if latest is None:
            self._waits = "to rebuild the chain, members that stand in a view must report; none is here yet"
            return False
        here = [p for p in reporters if latest.find(p.id) is not None]
        missing = [m for m in latest.members if m.id not in {p.id for p in here}]
        assert self._first_at is not None
        waiting = self.now - self._first_at < self.settings.reconnect_grace_s
        if not self._enough(len(here), latest) or (missing and waiting):
            self._say_missing(latest, here, [self._absence(m) for m in missing])
            return False
        if self._terms >= self.term or latest.chain not in ("", self.chain_id):
            if self._asked_term <= self._terms:
                self._asked_term = self._terms + 1
                self._asked_chain = latest.chain or self.chain_id
                self._out.append(TakeTerm(self._terms, self._asked_chain))
            return False
        self._adopt(latest, here)
        names = ", ".join(p.id for p in here)
        why = f"{REBUILT} from the reports of {names}: the chain was lost after view {latest.id}"
        return self._recover(why, urgent=True)

    def _absence(self, member: Member) -> str:
        peer = self.peers.get(member.id)
        mute = peer is not None and peer.conn is not None
        return f"{member.id} at {member.address}{' (it is connected, but does not answer)' if mute else ''}"

    def _say_missing(self, view: View, here: list[Peer], missing: list[str]) -> None:
        enough = self._enough(len(here), view)
        need = len(view.members) // 2 + 1
        text = (
            f"to rebuild the chain, {need} of the {len(view.members)} members of view {view.id} must report; "
            f"{len(here)} did ({', '.join(p.id for p in here) or 'nobody'}). Missing: {', '.join(missing)}"
        )
        if enough:
            text += f"; they are waited for, for {self.settings.reconnect_grace_s:g} s since the first came"
        self._waits = text
        self._tell(text, self._reporters())

    def _on_term(self, term: int) -> None:
        """The store has given this scheduler a higher term."""
        self.term, self._asked_term = term, 0
        self.chain_id = self._asked_chain
        self._incarnation = max(self._incarnation, first_incarnation(term, self.chain))

    def _adopt(self, latest: View, here: list[Peer]) -> None:
        """The last known view stands for the lost chain until the next one is decided."""
        told = [self._recalled[p.id] for p in self._reporters()]
        numbers = [r.promised.number for r in told]
        numbers += [v.id.number for r in told for v in (r.view, r.waiting) if v is not None]
        self.highest = ViewId(self.term, max([self.highest.number, *numbers]))
        self.chain, self._before, self._waits = [latest], latest, ""
        present = {p.id for p in here}
        for member in latest.members:
            if member.id not in present:
                silent = self.peers.get(member.id)
                if silent is not None and silent.conn is not None:
                    self._conns.pop(silent.conn, None)
                    self._out.append(Close(silent.conn, "it did not tell what it knows; connect again"))
                absent = Peer(member, Standing.MEMBER, heard=self.now, closed_at=self.now)
                absent.dead, absent.proven = "it did not report when the chain was rebuilt", True
                self.peers[member.id] = absent
            else:
                self.peers[member.id].standing = Standing.MEMBER
        self._note("rebuild", view=str(latest.id), reporters=sorted(present), term=self.term)

    def _turn_again(self) -> bool:
        """While the reports come in: back to the beginning if one may know a later view, or too few are left."""
        before = self._before
        if before is None:
            return False
        last, living = self._last_known(), self._living()
        known = (last is None or last.id <= before.id) and not self._owing()
        if known and self._enough(len(living), before):
            return False
        for peer in list(self.peers.values()):
            if peer.standing is Standing.MEMBER:
                peer.standing = Standing.REPORTER
                if peer.conn is None or peer.condemned:  # the latter was told that it is out
                    self._drop(peer)
        self.chain, self._before, self.phase, self._again = [], None, Phase.REBUILDING, ""
        return True

    def _turn_short(self, ruling: Ruling) -> bool:
        """Enough reported, but of these too few can go on from the base: those that cannot are no help either."""
        assert self._before is not None
        text = (
            f"the chain cannot be rebuilt: of the {len(self._before.members)} members of view {self._before.id} only "
            f"{', '.join(ruling.members) or 'nobody'} can go on ({ruling.reason}); more than half must"
        )
        self._waits = text
        self._tell(text, self._living())
        return False

    def _begin_chain(self, view: View) -> View:
        """The first view of the rebuilt chain; any other is as it is."""
        if self._before is None:
            return view
        return replace(view, predecessor=self._prefix[-1].id if self._prefix else NO_VIEW)

    def _chain_begun(self) -> None:
        """A view is in the store: if it is the first of a rebuilt chain, then what was before is over."""
        self._may_rebuild = False
        if self._before is None:
            return
        self._waits = ""
        self.chain[:-1] = self._prefix
        self._before, self._first_at, self._prefix = None, None, ()
        first = self.chain[-1].id
        for peer in [p for p in self.peers.values() if p.standing is Standing.REPORTER]:
            late = "before it told what it knows" if peer.id not in self._recalled else "from a later view than its own"
            self._fence(peer, f"the chain was rebuilt {late}, in view {first}")
        self._recalled.clear()
        self._recalled_at.clear()
