"""The scheduler's side of the protocol, as a pure state machine.

Theory of operation. `on(now, event)` takes an event in, judges who is alive, and then turns until nothing is left to do
(`_turn`): one decision at a time, each persisted before anybody hears of it (PROTOCOL.md 7). While a `Persist` is out
nothing else is decided; events meanwhile only change the facts on which the next turn acts. Phases:

- FOUNDING: nobody holds the state. As soon as min_nodes newcomers are ready, the first view is decided.
- RUNNING: the latest view rules or is about to (a `NextView` that a header will carry). Once all its members have
  entered it, it is settled, and leaves and joins make the next one. A death, a remade link (bytes were lost on it) or
  a member that lags after a scheduler's restart starts a recovery.
- PREPARING: a number is reserved and promised; reports are collected (8, 9). A change among the living starts over.
- HOLDING: below min_nodes; all have promised and wait until enough newcomers are ready (14). The survivors then go on
  in a view of their own and the newcomers come in at the next boundary, as only there the state is at rest.
- STALE: members know what the store lacks; nothing is decided here (identity.py).
- FINISHED, DEPOSED: the end; the latter because the store refused a write: another scheduler rules.

After a restart on its store the scheduler knows the chain and nothing else. The last view's members come back by
Hello(resume) and tell where they stand; if any of them is not in the last view, a recovery puts all of them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chaos_lightning.membership import stimuli
from chaos_lightning.membership.backoff import LONGEST_S
from chaos_lightning.membership.effects import (
    Answer,
    ChangeLink,
    Closed,
    Drain,
    Gone,
    Look,
    MessageIn,
    Opened,
    Reset,
    SchedulerDone,
    SchedulerEffect,
    SchedulerEvent,
    SchedulerTick,
    Stored,
    TermTaken,
)
from chaos_lightning.membership.keeping import Keeping
from chaos_lightning.membership.recovery import Ruling, rule
from chaos_lightning.membership.roster import (
    NEWCOMER,
    Peer,
    Standing,
    has_place,
)
from chaos_lightning.membership.scheduler_state import Phase as Phase
from chaos_lightning.membership.topology import CUT_PATIENCE_S, connected, in_words, parts
from chaos_lightning.membership.views import Change, changed_view, founding_view, intended_change, recovered_view
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Fence,
    Header,
    NextView,
    Prepare,
    Released,
    Report,
    View,
    ViewId,
)


class SchedulerMachine(Keeping):
    """See the module. The shell feeds a SchedulerTick every `tick_interval_s` (or more often).

    Args:
        settings: The job's rules.
        chain: What the store holds.
    """

    # ------------------------------------------------------------------ entrance

    def on(self, now: float, event: SchedulerEvent) -> list[SchedulerEffect]:
        """Takes one event in; returns the effects in the order in which they must happen."""
        self.stimulus_log.append((now, stimuli.of_scheduler(event)))
        self._out = []
        if self._deposed:
            return []
        self._forgive(now)
        match event:
            case Opened(conn):
                self._conns[conn] = ""
            case MessageIn(conn, message):
                self._on_message(conn, message)
            case Closed(conn, abrupt):
                self._on_closed(conn, abrupt)
            case Stored(token, ok, detail):
                self._on_stored(token, ok, detail)
            case Drain(name):
                self._on_drain(name)
            case ChangeLink(token, a, b, add):
                self._on_change_link(token, (a, b), add)
            case Reset(token, force):
                self._on_reset(token, force)
            case Gone():
                self._on_gone(event)
            case TermTaken(term):
                self._on_term(term)
            case SchedulerTick():
                pass
        if self._deposed:
            return self._out
        self._judge()
        for _ in range(64):
            if not self._turn():
                break
        else:
            raise AssertionError(f"the scheduler turns without end in {self.phase}: {self.snapshot()}")
        self._links()
        self._seen()
        self._tell_observers()
        return self._out

    def _forgive(self, now: float) -> None:
        """A gap in this process's own clock is nobody's silence (PROTOCOL.md 12)."""
        first, before = self._now is None, self._now if self._now is not None else now
        self._now = now
        gap = now - before
        if first:
            self._hears_until = now + self._hears_s
            self.detector.grace_until = now + self.settings.reconnect_grace_s if self._returning else now
            for peer in self.peers.values():
                peer.heard = peer.closed_at = now
                self._out.append(Look(peer.member))
        elif gap > 3 * self.settings.heartbeat_interval_s:
            self._note("notice", text=f"this scheduler was frozen for {gap:.2f} s; nobody is judged by that time")
            self.detector.shift(now, gap)
            self._shift_links(gap)
            self._shift_rebuilding(gap)
            self._unready = {p: since if since is None else since + gap for p, since in self._unready.items()}
            self._backoff.shift(gap)
            if self._bridges_since is not None:
                self._bridges_since += gap
            self._prepared_at += gap
            self._hears_until = self._hears_until + gap if self._hears_until is not None else None
            if self._admitted_at is not None:
                self._admitted_at += gap
            for peer in self.peers.values():
                peer.heard += gap
                peer.closed_at += gap
                peer.observes_since += gap

    # ------------------------------------------------------------------ turns

    def _turn(self) -> bool:
        """Decides at most one thing; True if something changed that may allow another decision."""
        if self._persisting is not None or self._hearing:
            return False
        if self._let_in():
            return True
        if self.phase is Phase.STALE:
            return False
        if self._turn_wishes():
            return True
        if self.phase in (Phase.DEPOSED, Phase.FINISHED):
            return False
        if self._turn_terms() or self._promote():
            return True
        if self.phase is Phase.FOUNDING:
            return self._turn_founding()
        if self.phase is Phase.REBUILDING:
            return self._turn_rebuilding()
        if self._turn_again():
            return True
        if self._turn_finish():
            return True
        if not self._living():
            if not self._take_back():
                self._lose("all members of the last view are gone")
            return True
        if self.phase is Phase.RUNNING:
            return self._turn_running()
        return self._turn_recovering()

    def _promote(self) -> bool:
        """The oldest standby gets a place that became free, unless a member that may live has its name."""
        taken = {p.member.name for p in self._living()}
        for peer in self.peers.values():
            waits = peer.standing is Standing.STANDBY and not peer.differs
            if not waits or peer.conn is None or peer.member.name in taken:
                continue
            if has_place(peer.member, self.peers, self.settings):
                peer.standing = Standing.LINKING
                role = "founder" if self.phase is Phase.FOUNDING else "joiner"
                self._greet(peer, role, "promoted from standby: a place is free")
                return True
        return False

    def _turn_founding(self) -> bool:
        if self._living():
            self.phase = Phase.RUNNING
            return True
        self._refuse_foreign()
        why_not = self._why_not_found() or self._wait_for_kept()
        if why_not is not None:
            if why_not:
                self._tell(why_not, [p for p in self.peers.values() if p.standing in NEWCOMER])
            return False
        fitting = nodes.within([p.member for p in self._first_by_state(self._ready())], (), self.settings.max_nodes)
        ready = self._together([self.peers[m.id] for m in fitting])
        if nodes.count(p.member for p in ready) < max(1, self.settings.min_nodes):
            here = [p for p in self.peers.values() if p.standing in NEWCOMER and p.conn is not None and not p.leaving]
            if (number := nodes.count(p.member for p in here)) < self.settings.min_nodes:
                verb = "is" if number == 1 else "are"
                words = str(number) if number == len(here) else nodes.in_words([p.member for p in here])
                self._tell(f"the job waits for min_nodes={self.settings.min_nodes}: {words} {verb} here", here)
            elif all(p.standing is Standing.READY for p in here):
                self._tell_apart(here)
            return False
        assert self.reference is not None
        if self._paced(f"{len(ready)} newcomers are ready to found the job"):
            return False
        ready = self._first_by_state(ready)
        base, state = self._founding_base(ready[0])
        self._attempt()
        view = founding_view(
            self._next_number(),
            [p.member for p in ready],
            plan=self.settings.plan,
            accumulate=self.reference.accumulate,
            chain=self.chain,
            net=self._net([p.id for p in ready]),
            chain_id=self.chain_id,
            state=state,
        )
        ruling = Ruling(base=base, members=view.ids(), joiners=view.joiners, reason=view.reason)
        self._persist("view", view.id, lambda: self._decided(view, ruling), view=view, base=base)
        return True

    def _turn_finish(self) -> bool:
        """Over once every living member that holds the state has committed the closing header."""
        holders = [p for p in self._living() if not p.known or (p.entered != NO_VIEW and p.loaded)]
        if not holders or not all(p.finished for p in holders):
            return False
        self._persist("finish", self._next_number(), self._finished)
        return True

    def _turn_running(self) -> bool:
        latest = self.latest
        assert latest is not None
        # A leaver is still needed for the slot whose header will let it go.
        needed = (*self._members(), *(self._leavers() if self._announced is not None else ()))
        dead = [p for p in needed if not p.alive]
        settled = self._settled
        if settled:
            for peer in self._leavers():
                self._release(peer, f"view {latest.id} rules without it")
        elif dead or len(self._members()) < len(latest.members):
            words = [f"{p.id}: {p.condemned or p.dead}" for p in dead]
            words += [f"{m}: gone before it was in" for m in latest.ids() if m not in self.peers]
            return self._recover("; ".join(words), urgent=bool(dead))
        if self._again:
            return self._recover(self._again)
        if self._returning:
            return self._turn_returning(latest)
        if self._turn_failed():
            return True
        self._time_joiners(latest)
        if not settled or any(p.finished for p in self._members()):
            return False
        ready = self._ready()
        if nodes.count(latest.members) < self.settings.min_nodes:
            coming = (p.member for p in self._reachable(latest.ids()))
            if nodes.count([*latest.members, *coming]) < self.settings.min_nodes:
                here = nodes.in_words(latest.members)
                return self._recover(f"fewer than min_nodes={self.settings.min_nodes} are here: {here}")
        if self._turn_observe(latest, ready) or self._turn_change(latest, self._admissible(ready)):
            return True
        return self._turn_links(latest)

    def _turn_returning(self, latest: View) -> bool:
        members = self._living()
        if not all(p.known and p.conn is not None for p in members):
            return False
        self._returning = False
        if self._promised or any(p.entered != latest.id for p in members):
            return self._recover("the scheduler was restarted and not all members may move in the last view")
        self._may_rebuild = False  # all are here and lack nothing: whoever knows more later is of another part
        self._note("notice", text=f"all members of view {latest.id} are back")
        return True

    def _time_joiners(self, latest: View) -> None:
        """A joiner that does not get its state in time holds everybody up and goes out again."""
        if self._admitted_at is not None and self._waited_for:
            self._admitted_at = self.now  # its donors are silent
        if self._admitted_at is None or self.now - self._admitted_at <= self.settings.join_timeout_s:
            return
        for peer in self._members():
            if peer.id in latest.joiners and not peer.loaded and peer.alive:
                limit = self.settings.join_timeout_s
                self._condemn(peer, f"it did not load the state within join_timeout_s={limit:g}")
                self._again = self._again or f"{peer.id} is put out"

    def _turn_change(self, latest: View, ready: list[Peer]) -> bool:
        leaving = self._loose(latest, [p.id for p in self._members() if p.leaving])
        fitting = self._near(ready, latest, leaving)
        staying = [m for m in latest.members if m.id not in leaving]
        places = nodes.within([p.member for p in fitting], staying, self.settings.max_nodes)
        fitting = [self.peers[m.id] for m in places]
        change = intended_change(
            latest,
            leavers=leaving,
            newcomers=[p.member for p in fitting],
            min_nodes=self.settings.min_nodes,
        )
        if change is None:
            for peer in self._members() if leaving else []:
                self._let_keep(peer, "all members leave; the last one keeps the training state in a file")
            return bool(leaving)
        net = self._net([m.id for m in change.members])
        rest = [m.id for m in staying]
        if leaving and fitting and not connected(rest, self._graph(rest)):
            # Who leaves is a bridge for which newcomers may make up: they come in first, as they hold nothing yet.
            coming = tuple(p.member for p in fitting)
            ids = tuple(m.id for m in coming)
            reason = f"{', '.join(ids)} join, before {', '.join(leaving)} leave, without whom no link leads between all"
            change = Change(members=(*latest.members, *coming), joiners=ids, reason=reason)
            net = self._net([m.id for m in change.members])
        if not connected([m.id for m in change.members], net.pairs):
            return self._let_go(latest, leaving)
        self._bridges_since = None
        view = changed_view(latest, self._next_number(), change, self.settings.plan, net)
        self._persist("view", view.id, lambda: self._announce(view), view=view)
        return True

    def _near(self, ready: list[Peer], latest: View, leaving: list[str]) -> list[Peer]:
        """Newcomers with a link to a member that stays, if any stays."""
        staying = [self.peers[m] for m in latest.ids() if m not in leaving]
        return [p for p in ready if not staying or any(self._leads(p, m) for m in staying)]

    def _loose(self, latest: View, leaving: list[str]) -> list[str]:
        """Those of the leavers that can go without parting the others; all of them if there are none."""
        loose: list[str] = []
        for member in leaving:
            ids = [m for m in latest.ids() if m != member and m not in loose]
            if connected(ids, self._graph(ids)):
                loose.append(member)
        return loose or leaving

    def _let_go(self, latest: View, leaving: list[str]) -> bool:
        """Who leaves is the only way between others: they are given time to find one, then one side goes on."""
        ids = [m for m in latest.ids() if m not in leaving]
        if not leaving or not connected(latest.ids(), self._graph(latest.ids())):
            return False  # a link is down at the moment
        sides = in_words(parts(ids, self._graph(ids)))
        why = f"{', '.join(leaving)} leave, and without them no link leads between {sides}"
        if self._bridges_since is None:
            self._bridges_since = self.now
            text = f"{why}: they stay until there is one, {CUT_PATIENCE_S:g} s at most; then one side goes on alone"
            self._note("notice", text=text)
            self._tell(text, self._members())
        if self.now - self._bridges_since < CUT_PATIENCE_S:
            return False
        self._bridges_since = None
        for member in leaving:
            peer = self.peers[member]
            peer.condemned = peer.leaving
            self._release(peer, why)
        return self._recover(why, urgent=True)

    def _turn_recovering(self) -> bool:
        if self.phase is Phase.HOLDING:
            for peer in self._leavers():
                self._release(peer, "the others wait for members, and go on without it")
            for peer in [p for p in self._living() if p.leaving]:
                self._let_keep(peer, "the job waits for members; nobody needs this one meanwhile")
        living = frozenset(p.id for p in self._living())
        if living != self._expected or self._again:
            gone = ", ".join(sorted(self._expected - living)) or "nobody"
            why = self._again or f"{self._why}; gone since: {gone}"
            return self._recover(why, urgent=not living >= self._expected)
        reports = {p.id: p.report for p in self._living() if p.report is not None}
        if len(reports) < len(living):
            return False
        side = self._side(reports)
        if side is None:
            return False
        ruling = self._rule(side)
        if ruling.base is None:
            if self._take_back():
                return True
            if self._before is not None:
                return self._turn_short(ruling)  # who holds the state may be among those that did not report
            self._lose(ruling.reason, ruling)
            return True
        return self._turn_decide(ruling, ruling.base)

    def _rule(self, reports: Mapping[str, Report]) -> Ruling:
        """Base, hand-on or redo, and who goes on (PROTOCOL.md 9)."""
        return rule(self.chain, reports)

    def _turn_decide(self, ruling: Ruling, base: Header) -> bool:
        if self._before is not None and not self._enough(len(ruling.members), self._before):
            return self._turn_short(ruling)
        if not self._will_do(ruling):
            rejoin = ruling.rejoin or self._bridged(ruling)
            for member, reason in rejoin:
                # It would wait here in vain; as a newcomer it counts.
                self.peers[member].condemned = reason
                self._send(self.peers[member], Fence(f"{member} is out of the job: {reason}"))
            if rejoin:
                return True
            text = f"training waits: {self._able(ruling)} of min_nodes={self.settings.min_nodes} nodes are here"
            text += "".join(f"; {m}: {words}" for m, words in self._cut.items())
            self._tell(text, [*self._living(), *self._ready()])
            if self.phase is not Phase.HOLDING:
                self.phase = Phase.HOLDING
                self._note("notice", text=text)
                return True
            return False
        latest = self.latest
        assert latest is not None
        why = "; ".join([self._why, *(f"{m} is put out: {words}, who go on" for m, words in self._cut.items())])
        view = recovered_view(latest, self._number, ruling, self.settings.plan, why, self._net(ruling.members))
        view = self._begin_chain(view)
        self._persist(
            "view", view.id, lambda: self._decided(view, ruling), view=view, base=base, hand_on=ruling.hand_on
        )
        return True

    def _bridged(self, ruling: Ruling) -> tuple[tuple[str, str], ...]:
        """Members without a link to those who go on, if newcomers link them and they are enough together.

        As long as they are members they are cut off, and no newcomer comes in while too few are here; as newcomers
        they count, and come in after those that link them.
        """
        count = (*ruling.members, *ruling.waiting, *(p.id for p in super()._ready()), *self._cut)
        together = next((g for g in parts(count, self._graph(count)) if set(ruling.members) & set(g)), ())
        if nodes.count([p.member for m in together if not (p := self.peers[m]).leaving]) < self.settings.min_nodes:
            return ()
        return tuple((m, f"{words}; newcomers link it to them") for m, words in self._cut.items() if m in together)

    # ------------------------------------------------------------------ decisions, stored

    def _on_stored(self, token: int, ok: bool, detail: str) -> None:
        if self._persisting is None or self._persisting[0] != token:
            return
        _, then = self._persisting
        self._persisting = None
        if ok:
            then()
            return
        self._depose(f"the store refused a write ({detail})")

    def _recover(self, why: str, *, urgent: bool = False) -> bool:
        """Begins a recovery, unless those before brought nothing and it has to wait (see backoff.py).

        Args:
            why: In words.
            urgent: Somebody is to be excluded who was not when the last one began, so there is an end to it.
        """
        if not urgent and self._paced(why):
            return False
        self._attempt()
        number = self._next_number()
        self._why, self._again, self._returning = why, "", False
        self._persist("reserve", number, lambda: self._prepare(number))
        return True

    def _attempt(self) -> None:
        self._backoff.begins(self.now, self._slot())
        self._waits_because = ""

    def _paced(self, why: str) -> bool:
        """Whether the next attempt has to wait, since those before brought no slot; all are told why."""
        if not self._backoff.left_s(self.now, self._slot()):
            return False
        if not self._waits_because:
            text = f"{self._backoff.fruitless} attempts in a row to go on committed no slot; the next one waits up to "
            self._waits_because = f"{text}{LONGEST_S:g} s: {why}"
            self._note("notice", text=self._waits_because)
            self._tell(self._waits_because, [p for p in self.peers.values() if p.alive])
        return True

    def _prepare(self, number: ViewId) -> None:
        self.phase = Phase.PREPARING
        self._number, self._prepared_at = number, self.now
        self._again = ""  # what was lost while the number was written is made up for, too
        self._decision = self._announced = None
        living = self._living()
        self._expected = frozenset(p.id for p in living)
        self._note("prepare", number=str(number), reason=self._why)
        for peer in living:
            peer.report = None
            self._send(peer, Prepare(number, self._why))

    def _append(self, view: View) -> None:
        self._rewired(self.latest, view)
        self.chain.append(view)
        self._admitted_at = None
        self._note(
            "view", id=str(view.id), members=view.ids(), joiners=view.joiners, reason=view.reason, chain=view.chain
        )

    def _decided(self, view: View, ruling: Ruling) -> None:
        """A founding or recovered view is in the chain: tell its members; all others of the old one are out."""
        assert ruling.base is not None
        old = self._members()
        self._vouched = True  # who is in this view says what the job is
        self._append(view)
        self._chain_begun()
        if self.phase is Phase.FOUNDING:
            self._told, self._without, self._reached = None, "", ruling.base.step
            self._unready.clear()
            self._backoff.founded(ruling.base.seq)
        self.phase, self._returning, self._announced = Phase.RUNNING, False, None
        self._decision = Decide(view, ruling.base, ruling.hand_on, ruling.sources, view.reason)
        self._note(
            "decide", id=str(view.id), members=view.ids(), base=ruling.base.hash, hand_on=ruling.hand_on,
            reason=view.reason,
        )  # fmt: skip
        self._sort_out(old, view, ruling)
        for peer in self._members_of(view):
            peer.standing = Standing.MEMBER
            peer.report = None
            self._send(peer, self._decision)

    def _sort_out(self, old: Iterable[Peer], view: View | None, ruling: Ruling) -> None:
        reasons = dict(ruling.rejoin)
        for peer in old:
            if (view is not None and view.find(peer.id) is not None) or (view is None and peer in self._writing()):
                continue
            if peer.id in ruling.waiting and peer.alive and peer.conn is not None:
                peer.standing, peer.report, peer.entered = Standing.READY, None, NO_VIEW
                if peer.caught_up:
                    peer.standing, peer.observes_since = Standing.OBSERVING, self.now
            elif peer.standing is Standing.LEAVER:
                self._release(peer, "nobody is left who needs it")
            elif view is not None and peer.leaving and not peer.dead:
                self._release(peer, self._cut.get(peer.id) or reasons.get(peer.id) or "the others go on without it")
            elif view is None and not peer.condemned and peer.id not in reasons:
                continue  # dead without proof beyond time: if it comes back before others found the job, it goes on
            else:
                cut = f"{self._cut[peer.id]}, who go on" if peer.id in self._cut else ""
                self._fence(peer, reasons.get(peer.id) or peer.condemned or cut or peer.dead or "a view excluded it")

    def _announce(self, view: View) -> None:
        """A view that a header will carry."""
        self._append(view)
        self._changes.add(view.id)
        self._decision, self._announced = None, NextView(view)
        for peer in self._members_of(view):
            peer.standing = Standing.MEMBER
        for peer in self.peers.values():
            if peer.standing is Standing.MEMBER and view.find(peer.id) is None:
                peer.standing = Standing.LEAVER
            if peer.standing in (Standing.MEMBER, Standing.LEAVER):
                self._send(peer, self._announced)

    def _on_reset(self, token: int, force: bool) -> None:
        """The operator's word ends the job; not beside members that train on, unless it says so."""
        lives = [p.id for p in self._living() if p.conn is not None and p.id not in self.detector.suspicions]
        lost = self._lost_words()
        awaited = [
            p.id for p in self._living() if p.conn is None and not p.known and self.now < self.detector.grace_until
        ]
        why = ""
        if self._persisting is not None:
            why = "a decision is being written at this moment; ask again"
        elif self.phase is Phase.FINISHED:
            why = "the job is finished already; the next one by its name begins when this scheduler ends, in a moment"
        elif lost and not force:
            why = f"{lost}. To begin another job all the same: --force" if self.chain else lost
        elif not self.chain:
            why = "there is nothing to end: no view of this job was decided yet"
        elif lives and not force:
            why = (
                f"{', '.join(lives)} {'is' if len(lives) == 1 else 'are'} in the job and alive. Ask them to leave "
                "(`chaos-lightning drain NODE`, or Ctrl+C there); or end the job under them: --force"
            )
        elif awaited and not force:
            left = self.detector.grace_until - self.now
            why = (
                f"this scheduler has just begun, and {', '.join(awaited)} may be on the way back to it: ask again in "
                f"{left:.0f} s, or --force"
            )
        if why:
            self._out.append(Answer(token, False, why))
            return
        self._persist("finish", self._next_number(), lambda: self._reset(token))

    def _reset(self, token: int) -> None:
        """Who is in the job is let go, whatever it does; newcomers come again, and found the next one."""
        reason = "an operator has ended the job"
        who = [p.id for p in self._members()]
        self.phase = Phase.FINISHED
        for peer in self.peers.values():
            if peer.standing in (Standing.MEMBER, Standing.LEAVER):
                self._send(peer, Released(reason, asked=True))
        self._note("reset", members=who, view=str(self.chain[-1].id))
        self._out.append(Answer(token, True, f"the job is ended; its last view had {', '.join(who) or 'nobody'} in it"))
        self._out.append(SchedulerDone(reason, again=True))

    def _members_of(self, view: View) -> list[Peer]:
        return [self.peers[m] for m in view.ids() if m in self.peers]

    def _finished(self) -> None:
        self.phase = Phase.FINISHED
        for peer in list(self.peers.values()):
            self._send(peer, Released("the job is finished"))
        peers = self.peers.values()
        self._note("finished", seq=max(p.seq for p in peers), step=max(p.step for p in peers))
        self._out.append(SchedulerDone("the job is finished and all members are released"))

    def _lose(self, reason: str, ruling: Ruling | None = None) -> None:
        """Nobody holds the training state any more: the next newcomers found the job again."""
        self._note("notice", text=f"{reason}; the next members found the job again from their own state")
        ruling = ruling or Ruling(base=None)
        self._decision, self._announced, self._returning = None, None, False
        self._again = ""
        self._expected = frozenset()
        for peer in self.peers.values():
            if peer.standing is Standing.OBSERVING:
                peer.standing = Standing.READY
            peer.way, peer.caught_up = "", False
        self._sort_out([*self._members(), *self._leavers()], None, ruling)
        self.phase = Phase.FOUNDING  # not before all are sorted: those that are newcomers again say what the job is
        # One of them that comes back before others found the job holds its state, and says what it is.
        self._vouched = False
        self._forget_terms()
