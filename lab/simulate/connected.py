"""Simulates the control stream of a training process: hello, heartbeats, probes, broken streams (as control/agent.py
does in a real process).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.leader_search import PULSE_S, PULSE_TIMEOUT_S, Conversation, LeaderSearch
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.verdict import UNSEEN, verdict
from chaos_lightning.planning.fleet.kernel import Pipe, Process
from chaos_lightning.protocol.types import (
    Contribution,
    Entered,
    FromMember,
    Header,
    Heartbeat,
    HeartbeatPace,
    Hello,
    Probe,
    Report,
    Span,
    Welcome,
)
from lab.simulate.fabric import Stream
from lab.simulate.job import Job
from lab.simulate.pipelines import asked
from lab.simulate.plan import NodeSpec

LATE_S = 3.0
"""Seconds that a word is under way at most: longer than any lag of a control stream, and the time to connect again."""
CALL_S = 0.002
"""Seconds of an attempt to reach a scheduler."""
SILENT_S = 0.3
"""Seconds of silence after which a neighbour that is asked calls a link silent."""


@dataclass(slots=True)
class Trap:
    """Trap that stops a process just before effect number `skip` + 1 of a kind, counted from slot `seq` on."""

    kind: str
    """Kind of effect: "header", "greeting" (to a learner), "contribution", "committed", "entered", "report", "observe",
    "pull" or "any"; where slots run in attempts also "forward" and "backward": a unit begins; with pipelines also
    "keeps" and "kept": before and after the process writes its parts down.
    """
    seq: int
    skip: int
    spring: Callable[[], None]

    def matches(self, effect: fx.MemberEffect, seq: int) -> bool:
        if seq < self.seq:
            return False
        if self.kind == "any":
            return not isinstance(effect, fx.Note)
        match effect:
            case fx.ToPeer(peer, Header() as header):
                greeting = peer in header.learners and header.view_change is None
                return self.kind == "header" or (self.kind == "greeting" and greeting)
            case fx.Observe():
                return self.kind == "observe"
            case fx.PullState() | fx.PullParts():
                return self.kind == "pull"
            case fx.ToPeer(_, Contribution()):
                return self.kind == "contribution"
            case fx.Committed():
                return self.kind == "committed"
            case fx.ToScheduler(Entered()):
                return self.kind == "entered"
            case fx.ToScheduler(Report()):
                return self.kind == "report"
            case _:
                return False


class Connected(Process):
    """Training process's member state machine and its control stream to the scheduler.

    Args:
        world: The job.
        spec: Properties of this process.
        number: Place of the process in the plan; also its pid.
    """

    machine_class: type[MemberMachine] = MemberMachine

    def __init__(self, world: Job, spec: NodeSpec, number: int) -> None:
        super().__init__(world.kernel, spec.name)
        self.world = world
        self.spec = spec
        self.number = number
        self.machine = self.machine_class(world.plan.spread)
        self.stream: Stream | None = None
        self.host = world.scheduler
        """Scheduler at the other end of the control stream."""
        self.outcome = ""
        self.control_lag = 0.0
        self.life = 0
        self.leaving = ""
        self.drained = False
        self.busy = False
        """Whether the process computes and does nothing else: as silent as a frozen one, though its machine sees it
        run.
        """
        self._spoke_at = self._last_word = 0.0
        self._search = LeaderSearch(world.plan.places)
        self._interval_s = world.settings.heartbeat_interval_s
        self._answered = self._silent = False
        """State of the conversation with the scheduler: whether it has answered, and whether it fell silent."""

    def silent_s(self) -> float:
        """Returns how long ago (s) this process last spoke, if it is stopped or was until a moment ago; otherwise 0."""
        awake = not self.frozen and self.kernel.now - self.thawed_at > LATE_S
        return 0.0 if awake else self.kernel.now - self._last_word

    def freeze(self) -> None:
        if self.alive and not self.frozen:
            self._last_word = self._spoke_at
        super().freeze()

    def occupy(self, lasts: float) -> None:
        """Keeps the process busy for some seconds, in which none of its threads runs."""
        if not self.alive or self.frozen:
            return
        self.busy = True
        Connected.freeze(self)

        def over() -> None:
            if self.busy:
                self.busy = False
                Process.thaw(self)

        self.kernel.after(lasts, over)

    def feed(self, event: fx.MemberEvent) -> None:
        """Feeds one event to the member's state machine."""
        raise NotImplementedError

    def welcomed(self, member_id: str) -> None:
        """Notes the id that the scheduler gave this process."""
        raise NotImplementedError

    def held(self) -> tuple[Span, ...]:
        """Returns the ranges of the open slot that are reduced here."""
        raise NotImplementedError

    # ------------------------------------------------------------------ control stream

    def connect(self) -> None:
        """Opens a control stream and says hello, at the start or after the stream broke."""
        if not self.alive or self.outcome or self.stream is not None:
            return
        host = self.world.ask(self._search.endpoint)
        if isinstance(host, Conversation):
            self._ask_again(host)
            return
        self._answered = self._silent = False
        kernel = self.kernel
        up, down = Pipe(kernel, 0.0002, 0.003), Pipe(kernel, 0.0002, 0.003)
        stream = Stream(
            self.world.next_number(), up, down,
            lambda m: self.deliver(lambda: self.control(stream, m)), lambda: self._stream_lost(stream),
        )  # fmt: skip
        stream.up.lag = self.control_lag
        self.stream, self.host = stream, host
        if self.world.plan.several:
            since = kernel.now
            self.timer(PULSE_S, lambda: self._listen(stream, since))
        host.dialled.append(stream)
        stream.up.send(None, lambda _: host.deliver(lambda: host.opened(stream)))
        self._tell(self._hello())

    def _hello(self) -> Hello:
        spec = self.spec
        return Hello(
            job="sim",
            name=spec.name,
            host=spec.host,
            address=spec.name,
            port=1,
            pid=self.number,
            pid_start=1,
            quota=spec.quota,
            accumulate=1,
            package="1",
            fingerprint=(("script", spec.script),),
            neighbours=spec.neighbours,
            **self.machine.knowledge(),
            replay="" if spec.replay else "it was told to join by pause",
            pipelines=asked(self.world.program),
            batch=self.world.program.batch,
            kept=self.machine.parts.kept,
        )

    def tell(self, message: FromMember) -> None:
        """Sends the scheduler a message that does not come from the member's state machine."""
        self._tell(message)

    def _tell(self, message: FromMember) -> None:
        stream, host = self.stream, self.host
        if isinstance(message, Report):
            self.world.reported(self.machine.member_id, replace(message, pending=self.machine.pending))
        if stream is not None:
            self._spoke_at = self.kernel.now
            for _ in range(self.world.copies(message)):
                stream.up.send(message, lambda m: host.deliver(lambda: host.message(stream, m)))  # type: ignore[arg-type]

    def _ask_again(self, attempt: Conversation) -> None:
        rest_s = self._search.ended(attempt, self.kernel.now, self.kernel.random.random())
        self.timer(rest_s + CALL_S, self.connect)

    def _listen(self, stream: Stream, since: float) -> None:
        """Gives up on a leading scheduler that is silent for too long, as another one may have been elected
        (control/agent.py).
        """
        if self.stream is not stream or self.outcome:
            return
        timeout_s = PULSE_TIMEOUT_S if self._answered else self._search.answer_timeout_s()
        if self.host.frozen and self.kernel.now - max(since, self.host.frozen_since) > timeout_s:
            self._silent = True
            self.break_stream()
        else:
            self.timer(PULSE_S, lambda: self._listen(stream, since))

    def _stream_lost(self, stream: Stream) -> None:
        """Handles the end of a broken control stream: the process notices it and connects again."""

        def lost() -> None:
            if self.stream is stream:
                self.stream = None
                self._ask_again(Conversation(self._answered, self._silent))

        self.deliver(lost)

    def break_stream(self) -> None:
        """Breaks the control stream, as a network fault does; both processes live."""
        stream, host = self.stream, self.host
        if stream is None:
            return
        now = self.kernel.now
        self.world.cut_streams += 1
        stream.up.cut(now + self.kernel.between(0.0, 0.004))
        stream.down.cut(now + self.kernel.between(0.0, 0.004))
        self.kernel.after(self.kernel.between(0.004, 0.03), lambda: host.deliver(lambda: host.closed(stream, True)))
        self.kernel.after(self.kernel.between(0.004, 0.03), stream.lost)

    def _close_stream(self) -> None:
        stream, host = self.stream, self.host
        self.stream = None
        if stream is not None:
            stream.down.cut(self.kernel.now)
            stream.up.end(lambda: host.deliver(lambda: host.closed(stream, False)))

    def control(self, stream: Stream, message: object) -> None:
        """Handles a message from the scheduler."""
        if stream is not self.stream or self.outcome:
            return
        admitted, self._answered = bool(self.machine.member_id), True
        if isinstance(message, Probe):
            self._probe(message.suspect)
            return
        if isinstance(message, HeartbeatPace | Welcome):
            self._interval_s = message.heartbeat_interval_s
        if isinstance(message, Welcome) and message.member.id != self.machine.member_id:
            self.welcomed(message.member.id)
            self._beat(self.life)
            if self.leaving:
                self.timer(0.0, lambda: self.feed(fx.LeaveRequested(self.leaving)))
        self.feed(fx.ControlIn(message, self.held()))  # type: ignore[arg-type]
        if type(message).__name__ == "Refused" and getattr(message, "retry", False):
            self._close_stream()
            self._ask_again(Conversation(answered=not admitted))  # who is in a job knocks ever more seldom

    def heartbeat(self) -> Heartbeat:
        """Returns the process's next heartbeat."""
        return self.machine.heartbeat()

    def _beat(self, life: int) -> None:
        if life != self.life or self.outcome:
            return
        self._tell(self.heartbeat())
        self.feed(fx.Tick())
        self.timer(self._interval_s, lambda: self._beat(life))

    def _probe(self, suspect: str) -> None:
        """Answers the scheduler's question whether a suspect lives, from the process table if the machine is shared,
        else from the link to it.

        The time for which this process itself was stopped does not count as silence.
        """
        node, now = self.world.fabric.nodes.get(suspect), self.kernel.now
        here, silence_s, linked = UNSEEN, float("inf"), False
        if node is not None and node.machine.member_id == suspect:
            linked = self.machine.neighbours.links.get(suspect, False)
            if node.spec.host == self.spec.host or self.world.plan.watched:
                here = (node.alive and (node.busy or not node.frozen), "process table", not node.alive)
            elif linked:
                silence_s = (now - node.frozen_since if node.frozen else 0.0) if node.alive else SILENT_S
        excused = linked and now - self.thawed_at < SILENT_S
        self._tell(verdict(suspect, here, silence_s=silence_s, limit_s=SILENT_S, excused=excused))
