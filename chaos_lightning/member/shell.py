"""Runs a member's state machine in the I/O thread: feeds it events and carries out its effects.

Theory of operation. `Shell` owns the loop, the links, the reducer, the state server and the only reference to the
`MemberMachine`. Whatever happens - a frame, a control message, a contribution of the training thread - becomes an
event; the effects that come back are carried out here in their order. What the training thread must know is put into
`Mailbox`, a condition it waits on; nothing else is shared with it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaos_lightning.collectives.memory import Memory
from chaos_lightning.collectives.reducer import Reducer
from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.process_table import same_machine_verdict
from chaos_lightning.member.events import committed_fields
from chaos_lightning.member.keyring import Keyring
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.telling import batch_once, lines
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.member.unit_steps import UnitStep, owned_spans
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.recovery import needs_bytes, with_scope
from chaos_lightning.membership.verdict import verdict
from chaos_lightning.protocol.codec import decode_peer, encode, encode_peer
from chaos_lightning.protocol.spans import subtract
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Contribution,
    Decide,
    FromMember,
    Header,
    Heartbeat,
    Kept,
    Kind,
    LinkKeys,
    LinkReport,
    NextView,
    Prepare,
    Probe,
    Source,
    Span,
    ToldEnd,
    ToMember,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.replication.by_reference import MemoryExport
from chaos_lightning.replication.forward import Forwarder
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.transport.links import PING_INTERVAL_S, Links, Takers
from chaos_lightning.transport.loop import IoLoop

LINKS_EVERY_S, LINKS_EVERY_STEPS = 2.0, 10
"""Seconds, and steps, in which traffic of links is logged once, so that it is a small part of the log."""
VIEW_PATIENCE_S = 2.0
"""Seconds that a request to pass bytes on waits for a view with its sender and its target: it may come before that."""


class Shell:
    """Shell around one member's state machine. Methods belong to the I/O loop's thread unless noted otherwise.

    Args:
        loop: I/O loop that serves everything here.
        mailbox: Mailbox that the training thread reads.
        events: This member's event log.
        links: Links to other members; they do not listen yet.
        transfer: Hands out and fetches state and raw results.
        keys: Keyring that takes the scheduler's keys.
        to_scheduler: Sends a control message (any thread).
        memory: Memory of gradients and results.
    """

    def __init__(
        self,
        loop: IoLoop,
        mailbox: Mailbox,
        events: EventLog,
        links: Links,
        transfer: Transfer,
        keys: Keyring,
        to_scheduler: Callable[[FromMember], None],
        memory: Memory,
    ) -> None:
        self.loop = loop
        self.mailbox = mailbox
        self.events = events
        self.transfer = transfer
        self.server = transfer.server
        self.machine = MemberMachine()
        self.links = links
        self.memory = memory
        self._shown: View | None = None
        """View that the console was told of last."""
        self.reducer = Reducer(memory, links.chunk, self._ranges_done, lambda view: owned_spans(memory.layout, view))
        self.units: UnitStep | None = None
        """Member's part of steps that run as units; set before `listen` if this job has pipelines."""
        self.welcome: Welcome | None = None
        self.to_scheduler = to_scheduler
        self._keys = keys
        self._observed = False
        self._abandoned: tuple[str, ...] = ()
        """Learners whose lease ran out while headers went on naming them."""
        self._left_out = 0
        """Number of entries that were left out of earlier logs."""
        self._contribution: Contribution | None = None
        self._said: tuple[Contribution | Header | None, bytes] = (None, b"")
        self._beat_at = self._links_at = 0.0
        self._contributed_at = self._committed_at = time.monotonic()
        if links.generation is not None:
            self.server.memory_export = MemoryExport(links.reads, links.generation, memory.result_bytes)

    # ------------------------------------------------------------------ set-up

    def listen(self, bind: str, ports: Sequence[int]) -> None:
        """Listens for connections from other members. Any thread, before the loop runs.

        Raises:
            ConfigurationError: `bind` is no address of this machine, or none of these ports is free.
        """
        borders = self.units.borders if self.units is not None else None
        self.links.listen(bind, Takers(self, self.reducer, self.server.serve, borders), ports)
        self.loop.call(self.beat)

    def offered(self, kept: Kept | None) -> None:
        """Notes the kept state in a file that this member's coming hello offers; None: it offers none."""
        self.machine.parts.kept = kept

    def reset(self) -> None:
        """Replaces the state machine by a fresh one, because the member joins again with nothing (protocol.md 11)."""
        self.machine = self.machine.anew()
        self._shown = None
        self.reducer.restart("")
        if self.units is not None:
            self.units.restart()
        self.transfer.arrived()
        self.links.abandon()
        if self.links.generation is not None:
            self.links.generation.set(NO_VIEW, 0)  # what lay in the result buffers is overwritten from now on

    def beat(self) -> None:
        """Pings idle links and sends the machine a tick, now and in regular intervals from now on."""
        self._beat_at = time.monotonic()
        self.links.ping()
        self._log_links()
        self.feed(fx.Tick())
        self.loop.later(PING_INTERVAL_S, self.beat)

    def _log_links(self) -> None:
        every_s = max(LINKS_EVERY_S, LINKS_EVERY_STEPS * self.server.pace.usual_s)
        if self.events.path is None or self._beat_at - self._links_at < every_s:
            return
        self._links_at = self._beat_at
        facts = self.links.facts()
        if facts["links"]:
            self.events.emit("links", **facts)

    def heartbeat(self) -> Heartbeat:
        """Returns the heartbeat, for the agent's thread; its values may be one slot old."""
        heartbeat, units = self.machine.heartbeat(), self.units
        if units is None:
            return replace(heartbeat, step_time_s=self.server.pace.usual_s)
        took, view = units.step_time(heartbeat.view), self.machine.view
        return replace(
            heartbeat,
            step_time_s=took.step_s if view is None or view.pipelines else self.server.pace.usual_s,
            between_s=took.between_s,
            speed=units.speed,
            sample_s=units.sample_s,
        )

    # ------------------------------------------------------------------ events

    def contribute(self, contribution: Contribution) -> None:
        """Takes the training thread's contribution to the next slot."""
        self._contribution, self._contributed_at = contribution, time.monotonic()
        self.feed(fx.Contribute(contribution))

    def control(self, message: ToMember) -> None:
        """Handles a message from the scheduler."""
        held: tuple[Span, ...] = ()
        if isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, Probe):
            self._probe(message)
            return
        elif isinstance(message, LinkKeys):
            self._keys.hear(message)
            return
        elif isinstance(message, ToldEnd):
            self.mailbox.post(job_over=message)
        elif isinstance(message, Prepare):
            ranges = self.reducer.held()
            held = with_scope(ranges, self.reducer.scope_spans()) if ranges is not None else ()
        elif isinstance(message, NextView):
            self.events.emit("next_view", id=str(message.view.id))
            self.links.foresee(message.view)
            self.reducer.foresee(message.view)
        elif isinstance(message, Decide):
            name = "hand_on" if message.hand_on else "redo"
            self.events.emit(name, view=str(message.view.id), base=message.base.seq, reason=message.reason)
            if message.hand_on:
                self._offer_partial(message.base)
        self.feed(fx.ControlIn(message, held))
        if isinstance(message, Welcome):
            for report in self.links.reports():  # a scheduler that was restarted does not know them
                self.to_scheduler(report)

    def _welcome(self, message: Welcome) -> None:
        self.welcome = message
        me = message.member.id
        self.links.me = me
        self.server.forwarder = Forwarder(me, self.dial)
        if self.reducer.me != me:  # a scheduler that was restarted gives newcomers new ids
            self.reducer.restart(me)
            self.transfer.arrived()
            self.links.abandon()
        if self.mailbox.who() != me:  # what the one was to observe that it was before
            self.mailbox.post(observe=None)
        self.mailbox.post(member=message.member)
        self.events.identify(me)
        self.events.emit("welcomed", id=me, role=message.role, reason=message.reason, chain=message.chain)

    def _offer_partial(self, base: Header) -> None:
        """Serves the byte ranges of the handed-on slot that this member has reduced, for members that lack them
        (protocol.md 9).
        """
        held = self.reducer.held((base.view, base.seq))
        if held and needs_bytes(base):
            self.server.publish_result(base.seq, base.hash, self.memory.result_bytes[base.seq % 2], held)

    def _probe(self, probe: Probe) -> None:
        """Reports to the scheduler whether a suspected member is alive, as seen from here."""
        suspect, now = probe.suspect, time.monotonic()
        silence_s = self.links.silence_s(suspect, now)
        # A member that was frozen itself has heard nothing; its peers were not silent (protocol.md 12).
        excused = self.links.up(suspect) and now - self._beat_at > silence_s / 2
        here, there = same_machine_verdict(probe.member), self.links.sight(suspect)
        limit_s = 2.5 * PING_INTERVAL_S
        self.to_scheduler(verdict(suspect, here, there, silence_s=silence_s, limit_s=limit_s, excused=excused))

    def _ranges_done(self, view: ViewId, seq: int) -> None:
        if self.units is not None:
            self.units.reduced(view, seq)
        self.feed(fx.RangesDone(view, seq))

    # Host of links -----------------------------------------------------------

    def message(self, peer: str, payload: memoryview) -> None:
        data = bytes(payload)
        message = decode_peer(data)
        if isinstance(message, Header):
            self._said = (message, data)  # it may be handed on as it came
        self.feed(fx.PeerIn(peer, message))

    def link_changed(self, peer: str, up: bool, evidence: str) -> None:
        if not up or not self.machine.neighbours.links.get(peer):  # what stands is told again whenever it is wanted
            self.events.emit("link_up" if up else "link_down", peer=peer, evidence=evidence)
        if up and self.machine.view is None and (member := self.links.wanted(peer)):
            self.transfer.expect(member)
        self.feed(fx.LinkChanged(peer, up, evidence))

    def measured(self, report: LinkReport) -> None:
        self.events.emit(
            "link_measured",
            peer=report.peer,
            latency_s=report.latency_s,
            rate_bps=report.rate_bps,
            evidence=report.evidence,
        )
        self.to_scheduler(report)

    def undelivered(self, to: str, source: str, reason: str) -> None:
        self.events.emit("dropped", what="message", to=to, source=source, reason=reason)

    # ------------------------------------------------------------------ effects

    def feed(self, event: fx.MemberEvent) -> None:
        """Feeds one event to the state machine, and carries out its effects in order."""
        for effect in self.machine.on(time.monotonic(), event):
            self._apply(effect)

    def _apply(self, effect: fx.MemberEffect) -> None:
        match effect:
            case fx.ToScheduler(message):
                self.to_scheduler(message)
            case fx.ToPeer(peer, message):
                if isinstance(message, Header) and message.view_change is not None:
                    self.links.foresee(message.view_change)
                if message is not self._said[0]:  # a header goes to several
                    self._said = (message, encode_peer(message))
                self.links.message(peer, self._said[1], message.view)
            case fx.Connect(peers):
                self.links.rule(self.machine.view)
                self.links.want(peers)
            case fx.OpenAttempt(view, seq):
                self._open(view, seq)
            case fx.DropAttempt(view):
                self.reducer.drop(view)
                # Only a recovery forgets what is queued: after a normal commit others still need this member's results.
                if self.machine.prepared:
                    self.links.drop(view)
                    self.end_units(view)
            case fx.Committed():
                self._committed(effect)
            case fx.PullResult(header, sources):
                self._hand_on(header, sources)
            case fx.PullState():
                self.mailbox.post(pull=effect, parts=None)  # what was asked for before is pointless
            case fx.PullParts() | fx.DropParts() | fx.Observe():
                self._ask(effect)
            case fx.Viewed(view):
                self._viewed(view, carried=False)
            case fx.Ejected(reason, rejoin, over):
                self.events.emit("fenced", reason=reason, rejoin=rejoin)
                self.mailbox.post(ejected=(reason, rejoin), ended=over)
                self.end_units()
            case fx.Left(reason, asked, keeps):
                self.events.emit("left", reason=reason)
                self.mailbox.post(left=reason, keeps=keeps, **({"giving_up": True} if asked else {}))
            case fx.Note(name, fields):
                self.events.emit(name, **dict(fields))

    def _ask(self, effect: fx.PullParts | fx.DropParts | fx.Observe) -> None:
        """Passes an effect on to the training thread, which carries it out."""
        match effect:
            case fx.PullParts():
                self.mailbox.post(parts=effect)
            case fx.DropParts(parts):
                self.mailbox.post(gone_parts=(*self.mailbox.gone_parts, *parts))
            case fx.Observe(header, view):
                self.mailbox.post(observe=(header, view))

    def _open(self, view: View, seq: int) -> None:
        self.links.opened(seq)
        if self.links.generation is not None:
            self.links.generation.set(view.id, seq)
        if view.pipelines or view.batch:
            self.mailbox.post(attempt=(view, seq))  # before it may complete, and the next one open
        self.reducer.open(view, seq)
        wanted = self.mailbox.parts
        if wanted is not None and wanted.view.id < view.id:  # what this view lacks was asked for before
            self.mailbox.post(parts=None)

    def end_units(self, view: ViewId | None = None) -> None:
        """Ends waiting units of micro-batches: those of this view and older ones, or of the present attempt."""
        attempt = self.mailbox.attempt
        if self.units is not None and (view is not None or attempt is not None):
            self.units.end(view or attempt[0].id)  # type: ignore[index]

    def _viewed(self, view: View, *, carried: bool) -> None:
        me = self.machine.member_id
        owned = {"owns": division(view).owned(me)} if view.pipelines and view.find(me) is not None else {}
        split = {"batch": view.batch} if view.batch else {}
        self.events.emit(
            "view",
            id=str(view.id),
            members=list(view.ids()),
            joiners=list(view.joiners),
            reason=view.reason,
            chain=view.chain,
            links=[(link.a, link.b) for link in view.links],
            plan=view.plan.kind,
            trees=[(tree.weight, tree.members, tree.parents) for tree in view.plan.trees],
            **owned,
            **split,
        )
        gone = view.find(self.machine.member_id) is None
        self.mailbox.post(
            view=view,
            together=self.mailbox.together or len(view.members) > 1,
            let_go=view if gone else None,
            **({"parts": None} if gone else {}),  # whoever goes needs none
        )
        teller, replays = self.transfer.teller, self.machine.header.learners
        teller.tell(*lines(self._shown, view, self.links.me, carried=carried, replays=replays))
        teller.tell(*batch_once(self._shown, view))
        self._shown = view

    def _committed(self, commit: fx.Committed) -> None:
        header = commit.header
        self.server.withdraw(header.seq)
        if needs_bytes(header) and not header.reduced:
            scope = self.reducer.scope_spans()
            self.server.publish_result(header.seq, header.hash, self.memory.result_bytes[header.seq % 2], scope)
        now = time.monotonic()
        self._log(header)
        self.mailbox.commit(commit)
        mine = self._contribution if self._contribution and self._contribution.seq == header.seq else None
        self.events.emit(
            "committed",
            **committed_fields(
                header,
                commit.contributors,
                duration_s=now - self._committed_at,
                wait_s=now - self._contributed_at,
                spent=mine.spent if mine is not None else (),
                mine=mine,
            ),
        )
        if header.kind == Kind.STEP:
            self.server.pace.step(now - self._committed_at, now)
        self._committed_at = now
        if header.view_change is not None:
            self._viewed(commit.view, carried=True)

    def _log(self, header: Header) -> None:
        """Keeps this slot in the log, if headers name learners (protocol.md 18); releases the log when they name none
        any more.
        """
        if self._observed:
            machine, reduced = self.machine, needs_bytes(header)
            self.server.keep(
                header,
                encode(header),
                self.memory.result_bytes[header.seq % 2] if reduced else None,
                self.reducer.scope_spans() if reduced else (),
                lambda: machine.seq <= header.seq,
            )
        expired = self._observed and self.server.expire(time.monotonic())
        if expired or (self._observed and not header.learners):
            left_out, self._left_out = self.server.log.late - self._left_out, self.server.log.late
            self.server.release()
            self.events.emit("released", seq=header.seq, left_out=left_out)
        if expired:
            self._abandoned = header.learners
        elif header.learners != self._abandoned:
            self._abandoned = ()
        # Without a scheduler headers go on naming learners that nobody keeps anything for any more.
        self._observed = self.machine.serving.keeps and not self._abandoned

    def dial(self, member_id: str) -> socket.socket:
        """Dials a member of the present view on behalf of another member (replication/forward.py); returns the bulk
        connection.

        In a thread of the state server. Who asks may have entered the view in which both are a moment earlier.

        Raises:
            RefusedError: No view came in which that member is.
        """
        end = time.monotonic() + VIEW_PATIENCE_S
        while (view := self.machine.view) is None or (member := view.find(member_id)) is None:
            if time.monotonic() < end:
                time.sleep(0.02)
                continue
            raise RefusedError(f"{member_id} is no member of the view that {self.machine.member_id} is in")
        return self.transfer.dial(Endpoint(member.id, member.address, member.port))

    def _hand_on(self, header: Header, sources: tuple[Source, ...]) -> None:
        view = self.machine.view
        resolved = []
        for source in sources:
            member = view.find(source.member) if view is not None else None
            if member is None:
                raise WireError(f"the decision names {source.member} as a source, which is not in the view")
            resolved.append((member, source.spans))
        own = self.reducer.held((header.view, header.seq)) or ()
        assert view is not None
        self.transfer.hand_on(
            header,
            view,
            tuple(resolved),
            subtract(self.reducer.scope_spans(), own),
            self.memory,
            lambda: self.loop.call(lambda: self.feed(fx.ResultPulled(header.seq))),
        )
