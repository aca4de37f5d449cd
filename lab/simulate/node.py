"""Simulates a training process: the real member state machine, a symbolic data plane, an agent, a training thread.

Theory of operation. This is to the simulator what member/shell.py and member/engine.py are to a real process:
events go into the `MemberMachine`, its effects are carried out in order, and the training thread does what the last
header says. A *trap* stops or kills the process right before one chosen effect, which is how "the root dies after it
sent the header to one member" is made to happen. Variants of the behaviour that a planted bug replaces are methods of
their own (`lab/simulate/bugs/` overrides them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.dialling import Dial, Dialling, LinkStep, Tell
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.membership.routing import Drop, Hand, RoutedMessage, Router, RouteStep, Take
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Contribution,
    FromMember,
    Header,
    Kind,
    LinkReport,
    Member,
    NextView,
    Ready,
    Span,
    View,
    ViewId,
)
from lab.simulate.connected import Connected
from lab.simulate.connected import Trap as Trap
from lab.simulate.dataplane import DataPlane, Down, SumEntry, Up
from lab.simulate.fabric import Stream
from lab.simulate.job import Job
from lab.simulate.observing import Keeper, Observation, StatePull
from lab.simulate.oracle import Made, Violation
from lab.simulate.plan import NodeSpec
from lab.simulate.puller import Pull, ResultPull
from lab.simulate.training import State, after_forward, apply_result, initial_state, spent_of

USUAL_BPS = 1e9


class Node(Connected):
    """Simulated training process with its member state machine, data plane, links and training thread."""

    plane_class: type[DataPlane] = DataPlane
    router_class: type[Router] = Router
    keeper_class: type[Keeper] = Keeper
    observation_class: type[Observation] = Observation

    def __init__(self, world: Job, spec: NodeSpec, number: int) -> None:
        super().__init__(world, spec, number)
        world.fabric.processes[spec.name] = self
        self.plane = self._make_plane()
        up = world.fabric.standing(self)
        self.dialling = Dialling(up)
        self.router = self.router_class("", up, self.dialling.wanted)
        self.traps: list[Trap] = []
        self.troubled_at = -100.0
        self.stale = False
        self.header: Header = GENESIS
        self.assigning: View | None = None
        self.lineage = ""
        self.state: State = initial_state(world.program, number)
        self.live: State = self.state
        self.published: tuple[str, State] | None = None
        self.kept: tuple[Header, State] | None = None
        self.training = False
        self._pull: Pull | None = None
        self.keeper = self.keeper_class(world, self)
        self.observation: Observation | None = None
        self.asked_at = -1.0
        """Moment (virtual s) at which the process was asked to leave; negative: it was not."""
        self.newcomer_since = -1.0
        """Moment (virtual s) since which the process has been ready to be let in; negative: it is not, or is in."""

    def _make_plane(self) -> DataPlane:
        return self.plane_class(self.world.program.ranges, self._send_chunk, self._ranges_done)

    def welcomed(self, member_id: str) -> None:
        self._abandon_links()
        self.world.fabric.nodes[member_id] = self
        self.world.struck()
        self.plane.me = self.dialling.me = self.router.me = member_id
        self.world.fabric.told(self)

    def held(self) -> tuple[Span, ...]:
        return self.plane.held(self.machine.seq + 1)

    # ------------------------------------------------------------------ links

    def link_changed(self, peer: str, up: bool, evidence: str) -> None:
        self.feed(fx.LinkChanged(peer, up, evidence))
        if up and self.world.plan.measured:
            self.timer(self.kernel.between(0.01, 0.06), lambda: self.measure(peer, "probe"))

    def measure(self, peer: str, evidence: str) -> None:
        """Reports to the scheduler the data rate that this end measures on a link."""
        other = self.world.fabric.nodes.get(peer)
        if other is not None and not self.outcome and self.machine.neighbours.links.get(peer):
            rate_bps = self.world.rates.get(frozenset((self.name, other.name)), USUAL_BPS)
            self._tell(LinkReport(peer, 0.0005, rate_bps, evidence))

    def _close_links(self) -> None:
        me = self.machine.member_id
        for peer in self.world.fabric.peers_of(me):
            self.world.fabric.bye(me, peer)

    def _abandon_links(self) -> None:
        """Closes all links of an old id, as `Links.abandon` does; calls under way may still finish, and are repeated
        under the new id.
        """
        self._close_links()
        self.dialling.want(())
        self.router = self.router_class("", self.world.fabric.standing(self), self.dialling.wanted)

    def link_ended(self, peer: str, evidence: str) -> None:
        """Handles the end of a link that broke or was closed by the other end."""
        self.follow(self.dialling.broken(peer, evidence))

    def follow(self, steps: Sequence[LinkStep]) -> None:
        """Carries out orders about links (to dial, or to report a link's state)."""
        for step in steps:
            match step:
                case Tell(peer, up, evidence):
                    self.link_changed(peer, up, evidence)
                case Dial(peer, after_s):
                    self.timer(after_s, lambda p=peer: self._dial(p))  # type: ignore[misc]

    def _dial(self, peer: str) -> None:
        if not self.outcome and self.dialling.due(peer):
            self.world.fabric.dial(self, peer)

    def expects(self, peer: str) -> bool:
        """Returns whether this process accepts a link that this peer dials."""
        return bool(self.machine.member_id) and peer in self.dialling.expected(self.router)

    def frame(self, peer: str, payload: object) -> None:
        """Handles a payload that arrived on a link."""
        if self.outcome:
            return
        if isinstance(payload, Up | Down):
            self.plane.take(payload)
        elif isinstance(payload, RoutedMessage):
            self.carry_on(self.router.arrived(payload, peer))
        else:
            self.feed(fx.PeerIn(peer, payload))  # type: ignore[arg-type]

    def control(self, stream: Stream, message: object) -> None:
        if stream is self.stream and not self.outcome and isinstance(message, NextView):
            self.foresee(message.view)
        super().control(stream, message)

    def foresee(self, view: View) -> None:
        """Prepares for a coming view: routes messages to its newcomers, and accepts links from them."""
        self.carry_on(self.router.foresee(view))
        self.world.fabric.told(self)

    def stands(self, peer: str) -> None:
        """Handles a new link."""
        self.dialling.made(peer)
        self.carry_on(self.router.again())
        self.link_changed(peer, True, "connected")

    def carry_on(self, steps: Sequence[RouteStep]) -> None:
        """Carries out the router's orders about messages."""
        fabric, me = self.world.fabric, self.machine.member_id
        for step in steps:
            match step:
                case Take(routed):
                    self.feed(fx.PeerIn(routed.source, routed.payload))  # type: ignore[arg-type]
                case Hand(peer, routed, bare):
                    fabric.send(me, peer, routed.payload if bare else routed)
                case Drop():
                    pass  # a recovery has it sent again

    def _send_chunk(self, peer: str, chunk: Up | Down) -> None:
        self.world.fabric.send(self.machine.member_id, peer, chunk)

    def _ranges_done(self, view: ViewId, seq: int) -> None:
        self.feed(fx.RangesDone(view, seq))

    # ------------------------------------------------------------------ effects

    def feed(self, event: fx.MemberEvent) -> None:
        """Feeds one event to the member's state machine, and carries out its effects in order."""
        machine = self.machine
        phase = machine.phase
        effects = machine.on(self.kernel.now, event)
        if self.world.validate:
            machine.validate_state()
        self._carry_out(deque(effects), machine, phase)

    def _carry_out(self, effects: deque[fx.MemberEffect], machine: MemberMachine, phase: MemberPhase) -> None:
        while effects and self.alive and machine is self.machine:
            if self.frozen:
                self._backlog.insert(0, lambda: self._carry_out(effects, machine, phase))
                return
            effect = effects.popleft()
            trap = next((t for t in self.traps if t.matches(effect, machine.seq)), None)
            if trap is not None:
                if trap.skip > 0:
                    trap.skip -= 1
                else:
                    self.traps.remove(trap)
                    effects.appendleft(effect)
                    trap.spring()
                    continue
            self._apply(effect, phase)

    def _apply(self, effect: fx.MemberEffect, phase: MemberPhase) -> None:
        self.world.on_effect(self, effect)
        match effect:
            case fx.ToScheduler(message):
                self._tell(message)
                if isinstance(message, Ready):
                    self.newcomer_since = self.kernel.now
            case fx.ToPeer(peer, message):
                if isinstance(message, Header) and message.view_change is not None:
                    self.foresee(message.view_change)
                self.carry_on(self.router.send(peer, message, message.view))  # type: ignore[arg-type]
            case fx.Connect(peers):
                self._connect(peers)
            case fx.OpenAttempt(view, seq):
                self.plane.open(view, seq)
            case fx.DropAttempt(view):
                self.plane.drop(view)
            case fx.Committed(header, _, contributors):
                self._commit(header, contributors)
            case fx.PullResult(header, sources):
                self._replace_pull(ResultPull(self.world, self, header, sources))
            case fx.PullState(header, view):
                self._replace_pull(StatePull(self.world, self, header, view, self.observation))
            case fx.Observe(header, view):
                self._observe(header, view)
            case fx.Viewed(view):
                self._viewed(view)
            case fx.Ejected(reason, rejoin):
                self._ejected(reason, rejoin, phase)
            case fx.Left(reason):
                self._left(reason)
            case fx.Note():
                pass

    def _connect(self, peers: tuple[Member, ...]) -> None:
        self.carry_on(self.router.rule(self.machine.view))
        self.dialling.want(peers)
        fabric, me = self.world.fabric, self.machine.member_id
        for peer in sorted(p for p in fabric.peers_of(me) if p not in self.dialling.wanted):
            fabric.bye(me, peer)
        self.carry_on(self.router.again())
        fabric.told(self)
        self.follow(sorted(self.dialling.look(), key=lambda step: step.peer))

    def _observe(self, header: Header, view: View) -> None:
        if self.observation is not None:
            self.observation.stop()
        self.observation = self.observation_class(self.world, self, header, view)
        self.observation.start()

    def say(self, message: FromMember) -> None:
        """Sends the scheduler a message from the training thread."""
        if not self.outcome:
            self._tell(message)

    def _replace_pull(self, pull: Pull) -> None:
        if self._pull is not None:
            self._pull.stop()
        self._pull = pull
        pull.start()

    # ------------------------------------------------------------------ the training thread

    def _viewed(self, view: View) -> None:
        if self.training or self.machine.member_id in view.joiners:
            return
        if self.header.seq == 0 and not self.lineage:
            self.lineage = str(view.id)
            self.world.founds(self)
            self._start(GENESIS)
            self.publish(GENESIS)

    def state_loaded(self, header: Header, state: State, lineage: str, moved: int) -> None:
        """Starts to train on a state that was pulled completely and checked; `moved` ranges of it came from other
        members.
        """
        self.state, self.lineage = state, lineage
        self.world.oracle.loaded(self.machine.member_id, lineage, header, state)
        self.publish(header)
        if self.observation is not None and self.observation.catching_up.done:
            self.world.oracle.replayed(self.machine.member_id, header, moved, self.world.plan.replaying.calm)
        self.feed(fx.StateLoaded(header.hash))
        if self.machine.phase is MemberPhase.ACTIVE and not self.training:
            self._start(header)

    def _start(self, header: Header) -> None:
        self.training, self.newcomer_since = True, -1.0
        self.header, self.assigning = header, self.machine.assigning
        self._begin()

    def _begin(self) -> None:
        """Lets the training thread do the next slot's work, and then contribute."""
        program, header, life = self.world.program, self.header, self.life
        strays = self.strays()
        kind = Kind.STEP if strays else self.next_kind()
        self.live = self.state
        if kind is not Kind.STEP:
            self.timer(self.rest_s() * self.spec.pace, lambda: self._collective(kind, life))
            return
        epoch, spans = self.samples() if not strays else (0, ())
        uid = 0
        if spans:
            uid = self.world.next_uid()
            base = self.kept if self.stale and self.kept is not None else (header, self.state)
            self.stale = False
            made = Made(self.machine.member_id, header.seq + 1, base[0].hash, base[1], epoch, spans)
            self.world.oracle.contributed(uid, made)
            self.live = after_forward(program, self.state, uid)
        work = program.work_s * self.spec.pace * self.kernel.between(0.4, 1.6) if spans else 0.0005
        for index in range(program.ranges):
            early = self.kernel.between(0.7, 1.15)
            self.timer(work * early, lambda i=index: self._ready(i, life))  # type: ignore[misc]
        self.timer(work * 0.7, lambda: self._arm(uid, life))
        self.timer(work, lambda: self._step(uid, epoch, spans, life))

    def rest_s(self) -> float:
        """Returns the simulated time (s) until the training thread reaches a collective."""
        return self.kernel.between(0.0002, 0.004)

    def strays(self) -> bool:
        """Returns whether this leaver has stopped following the script, as half of them do (like `request_node_exit` in
        a plain loop).
        """
        return bool(self.leaving) and self.number % 2 == 1

    def next_kind(self) -> Kind:
        """Returns the kind of the next slot, which depends on the last header alone."""
        return self.world.program.next_kind(self.header)

    def samples(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Returns (epoch, positions): this member's samples in the next step, which depend on the last header
        (protocol.md 10).
        """
        return self.world.program.share(self.assigning, self.machine.member_id, self.header.ledger)

    def _arm(self, uid: int, life: int) -> None:
        if life == self.life:
            self.plane.begin(self.header.seq + 1, uid)

    def _ready(self, index: int, life: int) -> None:
        if life == self.life:
            self.plane.ready(self.header.seq + 1, index)

    def _step(self, uid: int, epoch: int, spans: tuple[tuple[int, int], ...], life: int) -> None:
        if life != self.life:
            return
        yields = not spans and self.strays()
        if yields:
            self.world.oracle.strayed.add((self.machine.member_id, self.header.seq + 1))
        weight = float(sum(stop - start for start, stop in spans))
        base = self.world.oracle.made[uid].base if uid else self.header.hash
        self._contribute(
            Kind.STEP,
            weight=weight,
            coefficient=weight,
            spent=spent_of(epoch, spans),
            name="step",
            payload=self.answer(spans) if not yields else b"",
            prev_hash=base,
            yields=yields,
        )

    def _collective(self, kind: Kind, life: int) -> None:
        if life != self.life:
            return
        if self.keeper.copying:  # the slot after this one uses the buffer again
            self.timer(0.0005, lambda: self._collective(kind, life))
            return
        name, payload = str(kind), b""
        if kind is Kind.GATHER:
            name, payload = self.vote()
            self.world.oracle.voted(self.machine.member_id, self.header.seq + 1, payload)
        lets_go = kind is Kind.GATHER and self.lets_go
        self._contribute(kind, payload=payload, name=name, prev_hash=self.header.hash, lets_go=lets_go)

    @property
    def lets_go(self) -> bool:
        """Whether members may leave at the coming collective."""
        return False

    def answer(self, spans: tuple[tuple[int, int], ...]) -> bytes:
        """Returns the payload that a contribution has besides the gradient of these samples."""
        return b""

    def vote(self) -> tuple[str, bytes]:
        """Returns the name of the coming collective, and the member's payload for it."""
        return str(Kind.GATHER), f"{self.machine.member_id} says {self.kernel.random.randrange(1000)}".encode()

    def beside(self, before: Header, header: Header, contributors: tuple[str, ...]) -> None:
        """Updates additional values of the state when a slot is committed; a plain member has none."""

    def _contribute(self, kind: Kind, view: ViewId = NO_VIEW, **fields: object) -> None:
        if self.outcome or self.machine.phase is not MemberPhase.ACTIVE:
            return
        seq = self.header.seq + 1
        parts = 0 < self.spec.parts_at <= seq
        if parts:
            self.world.oracle.parted.add((self.machine.member_id, seq))
        contribution = Contribution(
            member=self.machine.member_id,
            view=view,
            seq=seq,
            kind=kind,
            step=self.header.step,
            hyper="another" if parts else "",
            **fields,  # type: ignore[arg-type]
        )
        self.feed(fx.Contribute(contribution))

    def _commit(self, header: Header, contributors: tuple[str, ...]) -> None:
        """Applies a committed slot in the training thread."""
        oracle, before = self.world.oracle, self.header
        self.kept = (before, self.state)
        results = None
        if header.kind is Kind.STEP and not header.error:
            self.keeper.settle()
            buffer = self.plane.buffer(header.seq)
            buffer.head = header.hash
            results = [buffer.done.get(i, frozenset()) for i in range(self.world.program.ranges)]
            self.state = apply_result(self.state, [oracle.gradients(result) for result in results])
        self.beside(before, header, contributors)
        oracle.committed(self.machine.member_id, self.lineage, before, header, contributors, self.state, results)
        self.header, self.assigning = header, self.machine.assigning
        self.keeper.committed(before, header)
        self.externalise(before, header)
        if header.error:
            self.outcome = f"disagreement: {header.error}"
            self.quit()
            return
        change = header.view_change
        if change is not None and change.joiners and change.find(self.machine.member_id) is not None:
            self.publish(header)
        if self.machine.phase is MemberPhase.ACTIVE:
            self._begin()

    def externalise(self, before: Header, header: Header) -> None:
        """Makes a slot's result visible outside the job (as in a checkpoint), which is safe once the next header is
        here (protocol.md 4).
        """
        self.world.oracle.externalised(self.machine.member_id, self.lineage, before)

    # ------------------------------------------------------------------ serving others

    def publish(self, header: Header) -> None:
        """Publishes a snapshot of the state at this header (protocol.md 15)."""
        self.published = (header.hash, self.state)

    def serve_state(self, header: Header) -> State | None:
        """Returns the state at exactly this header; None if this process does not have it (any more)."""
        if self.published is None or self.published[0] != header.hash or self.outcome:
            return None
        return self.published[1]

    def served_hash(self) -> int:
        """Returns the hash of the whole state that this process serves to joiners."""
        return hash(self.published[1]) if self.published is not None else 0

    def serve_copy(self, header: Header) -> State | None:
        """Returns the copy of the state that is kept for learners; None if it is not complete yet.

        Raises:
            LookupError: The copy is not here, and will not be.
        """
        state = self.keeper.state_at(header)
        return None if self.outcome else state

    def serve_entry(self, at: Header) -> tuple[SumEntry | None, int]:
        """Returns, for a learner, the log entry after header `at` (None: not committed yet), and the number of the
        log's last slot.

        Raises:
            LookupError: The entry is not here, and will not be.
        """
        return None if self.outcome else self.keeper.after(at), self.keeper.newest

    # ------------------------------------------------------------------ a state that it is served

    def kept_ranges(self, header: Header) -> dict[int, int]:
        """Returns state ranges that a joiner has already and need not pull: none, as it dropped its state when it was
        put out (11).
        """
        return {}

    def accept_state(self, equal: bool) -> bool:
        """Returns whether to use a pulled state; `equal`: its hash is the donors' (19)."""
        return equal

    # ------------------------------------------------------------------ going

    def leave(self, reason: str) -> None:
        """Asks the process to leave, as Ctrl+C does."""
        self.leaving, self.asked_at = reason, self.kernel.now
        if self.machine.member_id:
            self.feed(fx.LeaveRequested(reason))

    def _left(self, reason: str) -> None:
        asked, over = self.leaving or self.drained, self.world.store.tip.finished
        if self.training and not asked and not over and self.header.kind is not Kind.CLOSING:
            raise Violation(f"{self.machine.member_id} is let go in mid-training, and nobody had asked: {reason} (14a)")
        if self.machine.closing_is_stable:
            self.world.oracle.externalised(self.machine.member_id, self.lineage, self.header)
        self.outcome = f"left: {reason}"
        self.quit()

    def quit(self) -> None:
        """Ends the process in good order."""
        self._close_stream()
        self._close_links()
        self.life += 1
        self.die()

    def _ejected(self, reason: str, rejoin: bool, phase: MemberPhase) -> None:
        oracle = self.world.oracle
        oracle.ejections += 1
        if "no link leads to" in reason:
            self.world.look()
        # A joiner that was loading when it reported may have loaded since; it was none of the members yet.
        in_the_job = phase in (MemberPhase.ACTIVE, MemberPhase.CLOSED) and "it was loading slot" not in reason
        differs = (self.machine.member_id, self.header.seq + 1) in oracle.parted or "has prev_hash" in reason
        if in_the_job and not differs and self.kernel.now - self.troubled_at > 10.0:
            me = self.machine.member_id
            raise Violation(f"{me} lives and answered in time, yet it is out: {reason} (contract 5)")
        if not rejoin:
            self.outcome = f"refused: {reason}"
            self.quit()
            return
        self._close_stream()
        self.restart()
        self.timer(self.kernel.between(0.01, 0.05), self.connect)

    def restart(self) -> None:
        """Makes a process that was put out join again, without its old training state (protocol.md 11)."""
        self.life += 1
        if self._pull is not None:
            self._pull.stop()
            self._pull = None
        if self.observation is not None:
            self.observation.stop()
            self.observation = None
        self.keeper, self.newcomer_since = self.keeper_class(self.world, self), -1.0
        self._abandon_links()
        self.machine = self.machine.anew()
        self.plane = self._make_plane()
        self.training = False
        self.header, self.assigning, self.published, self.lineage = GENESIS, None, None, ""
        self.forget()

    def forget(self) -> None:
        """Drops the old training state, as in a newly started process."""
        self.kept = None
        self.state = self.live = initial_state(self.world.program, self.number + 1000 * self.life)

    def kill(self) -> None:
        """Kills the process as SIGKILL does: the kernel closes its sockets."""
        if not self.alive:
            return
        self.die()
        self.outcome = "killed"
        stream, host, kernel = self.stream, self.host, self.kernel
        if stream is not None:
            told = kernel.now + kernel.between(0.0005, 0.008)
            stream.up.cut(told if kernel.random.random() < 0.7 else kernel.between(kernel.now, told))
            kernel.at(told, lambda: host.deliver(lambda: host.closed(stream, True)))
        me = self.machine.member_id
        for peer in self.world.fabric.peers_of(me):
            self.world.fabric.snap(me, peer, dead=me)

    def freeze(self) -> None:
        super().freeze()
        self.busy = False
        self.troubled_at = self.kernel.now

    def thaw(self) -> None:
        self.troubled_at = self.kernel.now
        super().thaw()
