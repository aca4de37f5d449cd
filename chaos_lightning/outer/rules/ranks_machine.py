"""State machine that is the same at all ranks of an elastic cluster; each commit of their inner job changes it.

Theory of operation. Each rank holds one `RanksMachine`. A commit hands all ranks the same answers (`RankSays`), so all
machines change alike: a push counts as frozen once all have encoded it, a version as there once all hold it (O8). What
the cluster's machine would say because of a commit is kept back until the next one is known (O8a): by then all ranks
had taken the former in, and it cannot be taken back. The simulator drives the same machines (lab/outer/ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.errors import StateError
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.cluster import ClusterMachine, Phase, Unpushed
from chaos_lightning.outer.rules.messages import FromCluster
from chaos_lightning.outer.rules.types import NO_VERSION, Covered, IncarnationId, JobProgress, Offer, PushId, VersionId
from chaos_lightning.planning.batches import UNTOLD, Batches
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.spans import count, normalise, subtract
from chaos_lightning.protocol.types import Span


@dataclass(frozen=True, slots=True)
class Sealed:
    """News that all ranks have encoded this push with this hash, so that each must keep and serve its bytes."""

    push: PushId
    manifest: str


RanksEffect = cl.ClusterEffect | Sealed | fx.Told
"""Effects of a commit; `Told`: the machines are about to hear this."""
RankNews = fx.Told | fx.Connected | fx.Disconnected | fx.TimePassed | cl.Missed
"""News that the first rank may pass on to the machines."""


@dataclass(frozen=True, slots=True)
class RankSays:
    """Message of one rank in a commit.

    Attributes:
        holds: Version that the rank has got.
        frozen: Push that it has encoded, and the manifest.
        samples: Number of samples that its part of the step used.
        rates: Samples and steps a second, as it measures.
        over: Reason for which the loop of all ranks is over; "" before.
        leaves: Whether the cluster is to leave.
        failed: Reason for which the server will not have this cluster, or this rank cannot go on.
        events: News for the machines of all ranks; only from the first rank.
        batches: Batch sizes of the rank, in positions of the shared data.
        held: Whether it was asked to leave after the loop of all ranks, and has not been let go.
    """

    holds: VersionId = NO_VERSION
    frozen: tuple[PushId, str] | None = None
    samples: int = 0
    rates: tuple[float, float] = (0.0, 0.0)
    over: str = ""
    leaves: bool = False
    failed: str = ""
    events: tuple[RankNews, ...] = ()
    held: bool = False
    batches: Batches = UNTOLD


@dataclass(slots=True)
class LeasedTape:
    """Positions that are leased to the cluster, as a numbered list, and which entries of the list steps have used."""

    tape: Tape = field(default_factory=Tape)
    spent: tuple[Span, ...] = ()

    @property
    def used_up(self) -> bool:
        return count(self.spent) >= self.tape.length

    def cover(self, spent: Sequence[Span]) -> tuple[Covered, ...]:
        """Returns the positions that a step has used, and marks them as used; `spent` are their numbers in the list,
        and all earlier ones.
        """
        new, self.spent = subtract(spent, self.spent), tuple(spent)
        return (Covered(self.tape.epoch, normalise(self.tape.positions(new))),) if new else ()

    def grow(self, free: Mapping[int, Sequence[Span]], *, anew: bool) -> None:
        """Appends to the list the positions that have been leased since.

        Args:
            free: Leased positions that no push covers, by epoch.
            anew: Whether earlier leases hold no more.
        """
        epoch = min(free, default=self.tape.epoch)
        if (anew and self.tape.pieces) or (epoch != self.tape.epoch and self.used_up):
            self.tape, self.spent = self.tape.next(epoch), ()
        unused = subtract([(0, self.tape.length)] if self.tape.pieces else (), self.spent)
        more = subtract(free.get(self.tape.epoch, ()), normalise(self.tape.positions(unused)))
        self.tape = self.tape.longer(more) if more else self.tape


@dataclass
class MachineFacts:
    """Fields of `ClusterMachine.facts`, with their types, so that their text can be read (plain.py)."""

    job_id: str
    inner_steps: int
    _usual_steps: int
    phase: Phase
    term: int
    incarnation: IncarnationId | None
    oldest: IncarnationId | None
    base: VersionId
    newest: VersionId
    open: Offer | None
    kept: dict[PushId, Offer]
    leased: dict[int, tuple[Span, ...]]
    unpushed: Unpushed
    job: JobProgress
    rate: float
    step_rate: float
    batches: Batches
    leaving: bool
    verdict: str
    _reopened: list[PushId]
    _freezing: PushId | None
    _covered: Unpushed
    _next: int
    _due: VersionId | None
    _outright: bool
    _served: VersionId
    _durable: VersionId
    _progress: dict[VersionId, JobProgress]
    _in: dict[PushId, VersionId]
    _fetching: VersionId
    _here: VersionId
    _last: tuple[VersionId, str, int] | None
    _stream: int
    _whole: bool
    _founded: bool


@dataclass(slots=True)
class RanksFacts:
    """Whole state of a `RanksMachine` between two commits, to be given to another rank: the objects themselves, no
    copies.
    """

    machine: MachineFacts
    nonce: str
    over: str
    leased: LeasedTape | None


class RanksMachine:
    """State machine of a cluster with several ranks; each rank has one, and all are in the same state.

    Args:
        machine: State machine of the cluster.

    Attributes:
        machine: State machine of the cluster; another one after its incarnation ended.
        leased: Positions to train; None where the cluster has its own data.
        over: Reason for which the cluster's part is over; "" while it goes on.
        having: Ranks that said in the last commit that they have the version which is wanted.
    """

    def __init__(self, machine: ClusterMachine) -> None:
        self.machine = machine
        self.leased = LeasedTape() if machine.agreement.length else None
        self.over = ""
        self.having: tuple[str, ...] = ()
        self._unsaid: list[FromCluster] = []

    def known(self) -> list[FromCluster]:
        """Returns the messages to the leader that the last commit caused; called once all ranks know that commit."""
        unsaid, self._unsaid = self._unsaid, []
        return unsaid

    def commit(
        self, ranks: Sequence[str], said: Sequence[RankSays], steps: int, spent: Sequence[Span]
    ) -> Iterator[RanksEffect]:
        """Handles a commit of the ranks' job; yields effects, each to be carried out before the next one is asked for.

        Args:
            ranks: Ranks that contributed, in rank order.
            said: Message of each of these ranks.
            steps: Number of inner steps in the commit: 1, or 0.
            spent: Places on the tape that are spent with it, if it is a step.

        Raises:
            StateError: A rank cannot go on, or what ranks or the leader say contradicts what is held.
        """
        try:
            yield from self._taken(ranks, said, steps, spent)
        except ValueError as error:  # spans, such as positions that are leased twice
            raise StateError(f"what was said in a commit contradicts what is held: {error}") from error

    def _taken(
        self, ranks: Sequence[str], said: Sequence[RankSays], steps: int, spent: Sequence[Span]
    ) -> Iterator[RanksEffect]:
        outright = False
        if said[0].rates[1]:
            self.machine.rate, self.machine.step_rate = said[0].rates
        parts = [each.batches for each in said]
        self.machine.batches = Batches(
            sum(part.step for part in parts),
            sum(part.batch for part in parts),
            1 if all(part.least == 1 for part in parts) else sum(part.least for part in parts),
        )
        for effect in self._changes(ranks, said, steps, spent):
            if isinstance(effect, fx.Say):
                self._unsaid.append(effect.message)  # type: ignore[arg-type]
                continue
            if isinstance(effect, cl.FetchVersion) and all(each.holds == effect.version for each in said):
                continue  # it was got before, and a push was frozen: all have it still
            yield effect
            if isinstance(effect, cl.Over):
                self._end(effect)
            outright = outright or isinstance(effect, cl.Over) or (isinstance(effect, cl.Adopt) and effect.outright)
        if failed := next((each.failed for each in said if each.failed), ""):
            if self.machine.base != NO_VERSION:
                raise StateError(failed)
            self.over = self.over or failed
        if self.leased is not None:
            self.leased.grow(self.machine.free_spans(), anew=outright)

    def _end(self, over: cl.Over) -> None:
        if over.again:
            self.machine = self.machine.anew()
            self._unsaid.clear()
        else:
            self.over = over.reason

    def _changes(
        self, ranks: Sequence[str], said: Sequence[RankSays], steps: int, spent: Sequence[Span]
    ) -> Iterator[RanksEffect]:
        first = said[0]
        if steps:
            covers = self.leased.cover(spent) if self.leased is not None else ()
            yield from self.machine.on(cl.Trained(sum(each.samples for each in said), covers, steps))
        for event in first.events:
            if isinstance(event, fx.Told):
                yield event
            yield from self.machine.on(event)
        yield from self._agreed(ranks, said)
        if first.over and not self.machine.verdict and not self.machine.leaving:
            yield from self.machine.on(cl.LoopOver(first.over))
        if (first.leaves or all(each.held for each in said)) and not self.machine.leaving:
            yield from self.machine.on(cl.LeaveAsked())
        yield from self.machine.on(cl.AtRest())

    def _agreed(self, ranks: Sequence[str], said: Sequence[RankSays]) -> Iterator[RanksEffect]:
        """Counts the push as frozen, and the version as fetched, if all ranks say that they have it."""
        push, wanted = self.machine.freezing, self.machine.fetching
        frozen = [each.frozen for each in said if each.frozen is not None and each.frozen[0] == push]
        if push is not None and len(frozen) == len(said):
            yield Sealed(push, frozen[0][1])
            yield from self.machine.on(cl.Frozen(push, frozen[0][1]))
        self.having = tuple(r for r, each in zip(ranks, said, strict=True) if each.holds == wanted != NO_VERSION)
        if self._there(said):
            yield from self.machine.on(cl.Got(wanted))

    def _there(self, said: Sequence[RankSays]) -> bool:
        """Returns whether all ranks have the version that is being fetched."""
        wanted = self.machine.fetching
        return wanted != NO_VERSION and all(each.holds == wanted for each in said)

    # ------------------------------------------------------------------ for newcomers

    def facts(self) -> RanksFacts:
        """Returns the machine's whole state, for `restore` at another rank."""
        return RanksFacts(MachineFacts(**self.machine.facts()), self.machine.nonce, self.over, self.leased)

    def restore(self, facts: RanksFacts) -> None:
        """Takes over the state that another rank's `facts` returned; its objects belong to this machine from then
        on.
        """
        self.machine.restore(vars(facts.machine))
        self.over, self.leased = facts.over, facts.leased
