"""Simulates a cluster that is itself an elastic job: ranks with a real `RanksMachine` each, and their commits.

Theory of operation. The inner job is as simple as it can be: ranks contribute, a header goes out to each of them after
a while, and the next commit begins when all that are left have it. Ranks die or stand still at any moment. A rank that
stands still is put out, and wakes as one that was. A header that some of the remaining ranks have is handed on to the
others; a header that none of them has is taken back, even if a rank that was put out had it. Newcomers get what another
rank holds, as it travels.

The oracle compares what all ranks hold after each commit (O8). What a commit threw away, or trained, counts once the
commit stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.cluster import ClusterMachine, Phase
from chaos_lightning.outer.rules.messages import PushAnswered
from chaos_lightning.outer.rules.ranks_machine import RanksMachine
from chaos_lightning.outer.rules.types import NO_VERSION, PushId, VersionId
from chaos_lightning.planning.fleet.kernel import Process
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Span
from chaos_lightning.testing.world import SimStream
from lab.outer.content import Content, Pushed
from lab.outer.oracle import Violation
from lab.outer.processes import (
    AGAIN_S,
    SILENT_S,
    TICK_S,
    Client,
    ClusterSpec,
    Job,
    VersionFetch,
    agreement,
)
from lab.outer.rank_part import RankPart

PUT_OUT_S = 0.3
"""Seconds of standing still after which a rank is put out."""


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """Header of a commit; `step` is the number of its inner step, or 0 if it has none."""

    ranks: tuple[str, ...]
    said: tuple[bytes, ...]
    step: int
    spent: tuple[Span, ...]


class Rank(Client):
    """Simulated process of one rank of an elastic cluster."""

    def __init__(self, job: Job, ranks: RanksJob, name: str) -> None:
        super().__init__(job, name)
        self.ranks = ranks
        content = Content(job.residual, job.machines.residual)
        self.part = RankPart(self, ranks.made(), content, job.machines)
        self.taken: Commit | None = None
        self._getting = VersionFetch(job, ranks.spec.fetch_s)
        self.timer(TICK_S, self._tick)
        self.timer(AGAIN_S, self._fetch)

    # ------------------------------------------------------------------ the stream

    def attend(self) -> None:
        """Lets the rank talk to the leader from now on."""
        self.connect()

    def connect(self) -> None:
        if self.part.attends:
            super().connect()

    def _tick(self) -> None:
        self.listen(SILENT_S)
        if self.part.attends:
            if self.part.beat is not None:
                self.say(self.part.beat)
            self.part.news.append(fx.TimePassed())
        self.timer(TICK_S, self._tick)

    def begun(self) -> None:
        self.say(self.part.hello)
        self.part.news.append(fx.Connected())

    def ended(self) -> None:
        self.part.news.append(fx.Disconnected())

    def hear(self, message: object) -> None:
        if isinstance(message, PushAnswered):
            self.job.oracle.told(message)
        self.part.news.append(fx.Told(message))  # type: ignore[arg-type]

    def tell_leader(self, message: object) -> None:
        self.say(message)

    def kill(self) -> None:
        """Kills the rank by SIGKILL; the leader does not take that as proof that the cluster is dead."""
        if self.alive:
            self.die()
            if self.stream is not None:
                self.stream.cut()

    # ------------------------------------------------------------------ commits

    def says(self, samples: int) -> bytes:
        """Returns this rank's contribution to the next commit."""
        pace_s, ranks = self.ranks.spec.pace_s, self.ranks
        return self.part.says(samples, (4 / pace_s, 1 / pace_s), ranks.reason, leaves=ranks.leaves)

    def take(self, commit: Commit) -> None:
        """Takes in a commit once this rank has learned of it."""
        if self.taken is commit or not self.alive:
            return
        self.taken = commit
        self.part.commit(self.name, commit.ranks, commit.said, commit.step, commit.spent)
        if len(commit.ranks) == 1:
            self.part.tell_known()

    def to_encode(self) -> None:
        push = self.part.state.machine.freezing

        def encoded() -> None:
            if self.part.state.machine.freezing == push:
                self.part.encode()

        self.timer(self.kernel.between(0.002, 0.03), encoded)

    def sealed(self, push: PushId, pushed: Pushed) -> None:
        self.job.oracle.frozen(push, pushed, self.kernel.now)

    def adopts(self, version: VersionId, *, outright: bool) -> None:
        if self.part.fetched != version and self.part.content.base != version:
            raise Violation(f"{self.name} adopts {version} and holds {self.part.fetched} (O8)")

    def again(self) -> None:
        if self.stream is not None:
            self.stream.cut()
            self.stream = None
        self.timer(self.kernel.between(0.02, 0.1), self.connect)

    # ------------------------------------------------------------------ versions

    def _fetch(self) -> None:
        """Tries again and again to get the wanted version, from ranks that have it or else from the followers."""
        self.timer(self.kernel.between(0.01, 0.08), self._fetch)
        part = self.part
        wanted = part.state.machine.fetching
        if wanted in (NO_VERSION, part.fetched):
            return
        others = [rank for rank in self.ranks.up() if rank.name in part.state.having and rank is not self]
        if any(rank.part.fetched == wanted for rank in others):
            part.fetched = wanted
        elif part.attends and not others:
            contents, refused = self._getting.ask(wanted)
            missed = cl.Missed(wanted)
            if contents is not None:
                self.job.oracle.adopted(wanted, contents)
                part.fetched = wanted
            elif refused and missed not in part.news:
                part.news.append(missed)


class RanksJob(Process):
    """Simulated elastic cluster, as the rest of the simulated job sees it."""

    def __init__(self, job: Job, name: str, spec: ClusterSpec) -> None:
        super().__init__(job.kernel, name)
        self.job, self.spec = job, spec
        self.trained: set[int] = set()
        self.given_up: set[int] = set()
        self.left = self.reason = ""
        self.leaves = False
        self.takes_back = False
        """Whether the next header reaches the first rank alone, which is put out then."""
        self._nonce = f"{name}-{job.number()}"
        self._count = 0
        self._out: list[Rank] = []
        self._newcomers = 0
        self.ranks: list[Rank] = []
        for _ in range(spec.ranks):
            self.ranks.append(self._rank())
        self.ranks[0].part.attend()
        self._cycle()

    def _rank(self) -> Rank:
        self._count += 1
        return Rank(self.job, self, f"{self.name}:{self._count}")

    def made(self) -> RanksMachine:
        """Returns the state machine of a new rank."""
        agreed = agreement(self.job.settings, self.job.length, self.job.codec)
        machine = ClusterMachine(self.name, self.name, self._nonce, agreed, overlap=self.spec.overlap)
        return RanksMachine(machine)

    # ------------------------------------------------------------------ what the rest of the job asks

    @property
    def machine(self) -> ClusterMachine:
        """State machine of the first rank."""
        return self.ranks[0].part.state.machine

    @property
    def stream(self) -> SimStream | None:
        """First rank's stream to the leader, if it has one."""
        return self.ranks[0].stream

    @property
    def cut_at(self) -> float:
        """Last time at which any of the ranks lost its stream (virtual s)."""
        return max(rank.cut_at for rank in [*self.ranks, *self._out])

    def up(self) -> list[Rank]:
        """Returns the current ranks that are alive and not frozen."""
        return [rank for rank in self.ranks if rank.alive and not rank.frozen]

    @property
    def bytes(self) -> dict[PushId, str]:
        """Manifests of the pushes that running ranks hold, excluded ranks among them."""
        here = [*self.up(), *(rank for rank in self._out if rank.alive and not rank.frozen)]
        return {push: pushed.manifest for rank in here for push, pushed in rank.part.content.pushes.items()}

    def serves(self, push: PushId) -> bool:
        """Returns whether a running rank can serve a push's bytes now."""
        return push in self.bytes

    def unaccounted(self) -> set[int]:
        """Returns trained inner steps that are in none of the cluster's records and were not discarded: the cluster
        lost them.
        """
        part = self.ranks[0].part
        last = {*part.gone, *part.given_up}  # the whole cluster may have died on a commit that it knew alone
        return self.trained - part.content.held - self.given_up - last - self.job.oracle.discarded

    # ------------------------------------------------------------------ what happens to it

    def kill(self) -> None:
        """Kills all ranks."""
        self.die()
        for rank in [*self.ranks, *self._out]:
            rank.kill()

    def strike(self, action: str, lasts: float) -> None:
        """Applies a fault: kills a rank (perhaps between two effects), freezes one, adds one, cuts the stream or takes
        a header back.
        """
        first, one = self.ranks[0], self.kernel.random.choice(self.ranks)
        match action:
            case "rank":
                one.kill()
            case "rank-effect" | "cluster-effect":
                one.die_at_effect = self.kernel.random.randrange(6)
            case "rank-join":
                self._newcomers += 1
            case "take-back":
                self.takes_back = len(self.ranks) > 1
            case "freeze-rank" | "freeze-cluster":
                one.freeze()
                self.kernel.after(lasts, one.thaw)
            case "stream" if first.stream is not None:
                first.stream.cut()

    def leave(self) -> None:
        """Makes the cluster leave, as Ctrl+C does."""
        self.leaves = True

    # ------------------------------------------------------------------ commits

    def _cycle(self) -> None:
        if not self.alive:
            return
        if self._newcomers:
            self._newcomers -= 1
            self.kernel.after(self.kernel.between(0.05, 0.2), self._join)
            return
        machine, leased = self.machine, self.ranks[0].part.state.leased
        trains = machine.phase is Phase.TRAINING and machine.may_train and not (leased is not None and leased.used_up)
        pace_s = self.spec.pace_s * self.kernel.between(0.7, 1.3) if trains else self.kernel.between(0.005, 0.03)
        self.kernel.after(pace_s, lambda: self._form(trains=trains))

    def _join(self) -> None:
        up = self.up()
        if self.alive and up:
            newcomer = self._rank()
            newcomer.part.restore(up[0].part.facts())
            self.ranks.append(newcomer)
        self._cycle()

    def _put_out(self) -> bool:
        """Excludes ranks that do not run; returns whether some rank does not run, so that the commit must wait."""
        up = self.up()
        if len(up) == len(self.ranks):
            return False
        if not any(rank.alive for rank in self.ranks):
            self.kill()
        elif up:
            for rank in self.ranks:
                if rank not in up:
                    self._out.append(rank)
                    rank.timer(self.kernel.between(0.0, 0.3), rank.kill)  # it wakes, and sees that it was put out
            self.ranks = up
        return True

    def _form(self, *, trains: bool) -> None:
        if not self.alive:
            return
        if self._put_out():
            self.kernel.after(self.kernel.between(0.05, PUT_OUT_S), lambda: self._form(trains=trains))
            return
        leased, step, spent = self.ranks[0].part.state.leased, 0, tuple[Span, ...]()
        samples = 4
        if trains:
            step = self.job.number()
            if leased is not None:
                used = count(leased.spent)
                samples = min(4, leased.tape.length - used)
                spent = ((0, used + samples),)
        said = [rank.says(samples if trains and rank is self.ranks[0] else 0) for rank in self.ranks]
        self._spread(Commit(tuple(rank.name for rank in self.ranks), tuple(said), step, spent))

    def _spread(self, commit: Commit) -> None:
        back, self.takes_back = self.takes_back and len(self.ranks) > 1, False
        lost = {rank for rank in self.ranks[1:] if self.kernel.random.random() < 0.1}  # others hand it on
        for rank in self.ranks[:1] if back else [rank for rank in self.ranks if rank not in lost]:
            delay_s = self.kernel.between(0.0, 0.02)
            rank.timer(delay_s, lambda r=rank: r.take(commit))  # type: ignore[misc]
        if back:
            self.kernel.after(0.05, self.ranks[0].freeze)
            self.kernel.after(self.kernel.between(0.3, 1.0), self.ranks[0].thaw)
        self.kernel.after(0.06, lambda: self._closed(commit))

    def _closed(self, commit: Commit) -> None:
        """Ends a commit: if one running rank has it, all get it, otherwise none."""
        if not self.alive:
            return
        if not self.up():
            if not self._put_out() or self.alive:
                self.kernel.after(AGAIN_S, lambda: self._closed(commit))
            return
        had = [rank for rank in self.up() if rank.taken is commit]
        if had:
            for rank in self.up():
                rank.take(commit)
            self._stands(commit)
        self._cycle()

    def _stands(self, commit: Commit) -> None:
        up: Sequence[Rank] = self.up()
        if not up:
            return
        one = up[0]
        if commit.step:
            self.trained.add(commit.step)
        self.job.oracle.discarded.update(one.part.gone)
        self.given_up.update(one.part.given_up)
        for other in up[1:]:
            if (difference := _difference(one, other)) is not None:
                raise Violation(f"{one.name} and {other.name} differ after a commit in {difference} (O8)")
        if len(self.trained) >= self.spec.loop > 0:
            self.reason = "its loop is over"
        if one.part.state.over:
            self.left = one.part.state.over
            for rank in up:
                rank.part.tell_known()
            self.kill()


def _difference(one: Rank, other: Rank) -> str | None:
    """Returns in words how two ranks differ that must be equal; None if they are equal."""
    mine, others = one.part, other.part
    if mine.content != others.content:
        return f"what they hold: {mine.content}, {others.content}"
    return "their machines" if mine.facts() != others.facts() else None
