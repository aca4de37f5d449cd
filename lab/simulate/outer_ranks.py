"""Simulates members that are ranks of an outer-sync cluster: they hold its outer state, and adopt new versions of the
model.

Theory of operation. A rank is to the simulator what strategies/session.py, strategies/elastic.py and
outer/cluster/elastic.py are to a process. Beside its gradient each rank says what its `RankPart` says, and where the
cluster may not train the ranks meet in collectives. What a header carries is taken in at its commit, by the real
`RanksMachine`. The outer state is part of the training state then, as a number that stands for all of it, so newcomers
get it and the oracle compares it (contract 1, O8). All other slots make known what the one before brought. Whoever is
put out forgets all of it, and gets it again.

Who comes in by replay (observing.py) takes the log's headers in as the members did. Where these adopted a version it
gets that from a member that has it, as its base; where no one has it any more, for they have adopted the next, it gives
way to a pause and says why.
"""

from __future__ import annotations

from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.cluster import ClusterMachine, Phase
from chaos_lightning.outer.rules.ranks_machine import RanksMachine
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, PushId, VersionId
from chaos_lightning.protocol.plain import read_text
from chaos_lightning.protocol.types import Header, Kind
from lab.outer.content import Content, Pushed
from lab.outer.processes import TICK_S, Machines, agreement
from lab.outer.rank_part import Held, RankPart
from lab.simulate.dataplane import SumEntry
from lab.simulate.job import Job
from lab.simulate.node import Node
from lab.simulate.observing import Observation
from lab.simulate.oracle import Violation
from lab.simulate.outer_leader import Line, ScriptedLeader
from lab.simulate.plan import NodeSpec
from lab.simulate.training import State
from lab.simulate.world import Hooks

MEETING = "outer"
"""Name of the collective in which ranks meet that may not train."""
LOOP_OVER = "its loop is over"
_RATES = (100.0, 50.0)


def _number(header: Header) -> int:
    """Returns a number for the inner step of this header; a step that survivors redo has another number."""
    return int(header.hash[:12], 16) if header.kind is Kind.STEP else 0


def _adopted(state: State, ranges: int, version: VersionId, *, outright: bool) -> State:
    """Returns the state after a version's parameters are adopted; unless `outright`, later training is kept on top of
    them.
    """
    return (*(hash((old, version.number, outright)) for old in state[:ranges]), *state[ranges:])


def _take(part: RankPart, me: str, header: Header, contributors: tuple[str, ...]) -> None:
    """Updates a rank's outer state with the content of a committed header."""
    said = header.kind is Kind.STEP or header.name == MEETING
    part.commit(me, contributors, header.answers if said else (), _number(header))


class Replica:
    """Outer state of a learner: it follows commits, but sends nothing and serves nothing.

    Args:
        observation: Observation of this newcomer.
    """

    def __init__(self, observation: OuterObservation) -> None:
        self._observation = observation

    def dies(self) -> bool:
        return self._observation.stopped

    def attend(self) -> None:
        """Does nothing: a learner contributes nothing."""

    again = to_encode = attend

    def tell_leader(self, message: object) -> None:
        """Drops the message: a learner has no leader."""

    def sealed(self, push: PushId, pushed: Pushed) -> None:
        """Ignores the push: a learner computes it as all ranks do, but sends nothing."""

    def adopts(self, version: VersionId, *, outright: bool) -> None:
        self._observation.adopts(version, outright=outright)


class OuterObservation(Observation):
    """Replay by a learner whose log includes adoptions of outer-sync versions."""

    node: OuterNode  # type: ignore[assignment]
    part: RankPart | None = None

    def apply(self, entry: SumEntry) -> None:
        super().apply(entry)
        if self.state is None or entry.header.error:
            return
        if self.part is None:
            self.part = self.node.made(Replica(self), self.state[-1])
        _take(self.part, "", entry.header, self.job.oracle.contributors[entry.header.hash])
        if not self.stopped:
            self.state = (*self.state[:-1], self.node.leader.number_of(self.part))

    def adopts(self, version: VersionId, *, outright: bool) -> None:
        """Adopts a version if some member still has it; otherwise gives up the replay."""
        found = (node.part for node in self.node.leader.ranks if node.alive and not node.frozen)
        if not any(version in (part.content.base, part.fetched) for part in found if part is not None):
            self._give_up(f"version {version}, which slot {self.log.at.seq + 1} adopted, is at no member any more")
        elif self.state is not None:
            self.state = _adopted(self.state, self.job.program.ranges, version, outright=outright)
            self.node.leader.replayed += 1


class OuterNode(Node):
    """Process of a rank that holds the outer-sync cluster's outer state."""

    observation_class = OuterObservation
    machines = Machines()

    def __init__(self, world: Job, spec: NodeSpec, number: int) -> None:
        super().__init__(world, spec, number)
        self.part: RankPart | None = None
        """Outer state of this rank, once it is in the job."""
        self.state = self.live = (*self.state, 0)
        self.leader.ranks.append(self)
        self._line: Line | None = None

    @property
    def leader(self) -> ScriptedLeader:
        """Leader of this rank's cluster."""
        assert self.world.outer is not None
        return self.world.outer

    def made(self, home: OuterNode | Replica, facts: int) -> RankPart:
        """Creates a rank's outer state: a founder's first one (`facts` 0), or a copy of another member's."""
        script, view = self.leader.script, self.machine.view
        held = self.leader.facts_of(facts) if facts else b""
        nonce = read_text(Held, held).state.nonce if held else view.chain if view is not None else ""
        settings = OuterSettings(inner_steps=script.inner_steps)
        machine = ClusterMachine("e0", "e0", nonce, agreement(settings, 0), overlap=script.overlap)
        part = RankPart(home, RanksMachine(machine), Content(script.lossy), self.machines)
        if held:
            part.restore(held)
        return part

    # ------------------------------------------------------------------ coming in, and going

    def _start(self, header: Header) -> None:
        self.part = self.made(self, self.state[-1])
        view, life = self.machine.view, self.life
        if view is not None and view.ids()[0] == self.machine.member_id:
            self.part.attend()
        self.timer(TICK_S, lambda: self._tick(life))
        self.timer(0.01, lambda: self._fetch(life))
        super()._start(header)

    def forget(self) -> None:
        super().forget()
        self.state = self.live = (*self.state, 0)
        self.part = None
        self._hang_up()

    def die(self) -> None:
        super().die()
        self._hang_up()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            self.leader.close(line)

    # ------------------------------------------------------------------ the leader

    def attend(self) -> None:
        if self._line is None and self.part is not None and self.part.attends and not self.outcome:
            self._line = self.leader.connect(self, self._heard, self._lost)
            self.tell_leader(self.part.hello)
            self.part.news.append(fx.Connected())

    def again(self) -> None:
        self._hang_up()
        life = self.life
        self.timer(self.kernel.between(0.01, 0.05), lambda: self._attend(life))

    def _attend(self, life: int) -> None:
        if life == self.life:
            self.attend()

    def _heard(self, line: Line, message: object) -> None:
        if line is self._line and self.part is not None:
            self.part.news.append(fx.Told(message))  # type: ignore[arg-type]

    def _lost(self, line: Line) -> None:
        if line is self._line and self.part is not None:
            self.part.news.append(fx.Disconnected())
            self.again()

    def _tick(self, life: int) -> None:
        part = self.part
        if life != self.life or part is None:
            return
        if part.attends:
            if part.beat is not None:
                self.tell_leader(part.beat)
            part.news.append(fx.TimePassed())
        self.timer(TICK_S, lambda: self._tick(life))

    def _fetch(self, life: int) -> None:
        """Fetches the version that this rank needs: from ranks that have it or, as the first rank, from the
        followers.
        """
        part = self.part
        if life != self.life or part is None:
            return
        self.timer(self.kernel.between(0.01, 0.05), lambda: self._fetch(life))
        wanted = part.state.machine.fetching
        if wanted in (NO_VERSION, part.fetched):
            return
        others = [m for m in part.state.having if m != self.machine.member_id]
        nodes = [node for node in self.leader.ranks if node.alive and not node.frozen and node.part is not None]
        if others:
            having = [n for n in nodes if isinstance(n, OuterNode) and n.machine.member_id in others]
            if any(n.part is not None and n.part.fetched == wanted for n in having):
                part.fetched = wanted
        elif part.attends and self.leader.has(wanted):
            part.fetched = wanted
        elif part.attends and (missed := cl.Missed(wanted)) not in part.news:
            part.news.append(missed)

    def tell_leader(self, message: object) -> None:
        if self._line is not None:
            self.leader.say(self._line, message)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ the training thread

    def strays(self) -> bool:
        """Returns False: a leaving rank follows the script to the end, as in Lightning's loops, which let ranks go
        between steps.
        """
        return False

    @property
    def meets(self) -> bool:
        """Whether the next slot must be a meeting of the ranks rather than a step; all ranks compute the same
        answer.
        """
        part, kind = self.part, super().next_kind()
        if part is None or part.state.over or kind not in (Kind.STEP, Kind.CLOSING):
            return False
        machine = part.state.machine
        return kind is Kind.CLOSING or machine.phase is not Phase.TRAINING or machine.waits

    @property
    def lets_go(self) -> bool:
        return self.meets

    def next_kind(self) -> Kind:
        return Kind.GATHER if self.meets else super().next_kind()

    def rest_s(self) -> float:
        return self.kernel.between(0.003, 0.02) if self.meets else super().rest_s()

    def vote(self) -> tuple[str, bytes]:
        return (MEETING, self.answer(())) if self.meets else super().vote()

    def answer(self, spans: tuple[tuple[int, int], ...]) -> bytes:
        assert self.part is not None
        samples = sum(stop - start for start, stop in spans)
        over = LOOP_OVER if super().next_kind() is Kind.CLOSING else ""
        return self.part.says(samples, _RATES, over)

    def beside(self, before: Header, header: Header, contributors: tuple[str, ...]) -> None:
        part = self.part
        if header.error or part is None:
            return
        self.keeper.settle()  # meetings change it, too
        _take(part, self.machine.member_id, header, contributors)
        self.state = (*self.state[:-1], self.leader.number_of(part))
        gone = {*part.gone, *part.given_up}
        self.leader.steps.took(self.lineage, before, header, _number(header), gone, part.content)

    # ------------------------------------------------------------------ what a commit means

    def dies(self) -> bool:
        return not self.alive

    def to_encode(self) -> None:
        life = self.life

        def encoded() -> None:
            if life == self.life and self.part is not None and self.part.encoded is None:
                self.part.encode()

        self.timer(self.kernel.between(0.001, 0.03), encoded)

    def sealed(self, push: PushId, pushed: Pushed) -> None:
        """Ignores the push: as part of the state it is compared by the oracle."""

    def adopts(self, version: VersionId, *, outright: bool) -> None:
        part = self.part
        assert part is not None
        if version not in (part.fetched, part.content.base):
            raise Violation(f"{self.name} adopts {version} and holds {part.fetched} (O8)")
        self.state = _adopted(self.state, self.world.program.ranges, version, outright=outright)
        self.leader.adopted += 1


class OuterHooks(Hooks):
    """Hooks for jobs whose members are ranks of an outer-sync cluster."""

    node_class = OuterNode
