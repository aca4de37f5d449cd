"""A simulated cluster that is an elastic job itself: ranks that hold the real `RanksMachine` each, and their commits.

Theory of operation. The inner job is as simple as it can be: ranks contribute, a header goes out to each of them after
a while, and the next commit begins when all that are left have it. Ranks die or stand still at any moment. Who stands
still is put out, and wakes as one that was. A header that some of those that are left have is handed on to the others;
one that nobody of them has is taken back, whoever else had it. Newcomers get what another rank holds, as it travels.

The oracle compares what all ranks hold after each commit (O8). What a commit threw away, or trained, counts once the
commit stands.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chaos_lightning.lab.outer.content import Content
from chaos_lightning.lab.outer.oracle import Violation
from chaos_lightning.lab.outer.processes import (
    AGAIN_S,
    TICK_S,
    Client,
    ClusterSpec,
    Job,
    Stream,
    agreement,
    contents_of,
)
from chaos_lightning.lab.simulate.kernel import Process
from chaos_lightning.outer import cluster as cl
from chaos_lightning.outer import effects as fx
from chaos_lightning.outer.cluster import ClusterMachine, Phase
from chaos_lightning.outer.messages import Beat, ClusterHello, PushAnswered
from chaos_lightning.outer.ranks_machine import RankSays, RanksEffect, RanksMachine, Sealed
from chaos_lightning.outer.ranks_say import read_text, text_of
from chaos_lightning.outer.types import NO_VERSION, PushAnswer, PushId
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Span

PUT_OUT_S = 0.3
"""Who stands still for so long is put out."""


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """A header; `step` numbers the inner step that it is, 0: it is none."""

    ranks: tuple[str, ...]
    said: tuple[RankSays, ...]
    step: int
    spent: tuple[Span, ...]


class Rank(Client):
    """One rank of an elastic cluster."""

    def __init__(self, job: Job, ranks: RanksJob, name: str) -> None:
        super().__init__(job, name)
        self.ranks = ranks
        self.state = ranks.made()
        self.content = Content(job.codec == "int8", job.machines.residual)
        self.hello: ClusterHello = self.state.machine.hello()
        self.attends = False
        self.fetched = NO_VERSION
        self.taken: Commit | None = None
        self.gone: list[int] = []
        """Inner steps that the last commit threw away."""
        self.given_up: list[int] = []
        self._encoded: tuple[PushId, str] | None = None
        self._news: deque[cl.ClusterEvent] = deque()
        self._sent = 0
        self._beat: Beat | None = None
        self.timer(TICK_S, self._tick)
        self.timer(AGAIN_S, self._fetch)

    # ------------------------------------------------------------------ the stream

    def attend(self) -> None:
        """From here on it talks to the leader."""
        self.attends = True
        self._news.clear()
        self.connect()

    def connect(self) -> None:
        if self.attends:
            super().connect()

    def _tick(self) -> None:
        self.listen()
        if self.attends:
            if self._beat is not None:
                self.say(self._beat)
            self._news.append(fx.TimePassed())
        self.timer(TICK_S, self._tick)

    def begun(self) -> None:
        self.say(self.hello)
        self._news.append(fx.Connected())

    def ended(self) -> None:
        self._news.append(fx.Disconnected())

    def hear(self, message: object) -> None:
        if isinstance(message, PushAnswered):
            self.job.oracle.told(message)
        self._news.append(fx.Told(message))  # type: ignore[arg-type]

    def _said(self, message: object) -> None:
        self._beat = message if isinstance(message, Beat) else self._beat
        if not isinstance(message, ClusterHello):
            self.say(message)

    def kill(self) -> None:
        """SIGKILL; it proves nothing, since no process stands for the cluster."""
        if self.alive:
            self.die()
            if self.stream is not None:
                self.stream.cut()

    # ------------------------------------------------------------------ commits

    def says(self, samples: int) -> RankSays:
        """What it contributes."""
        events = tuple(self._news) if self.attends else ()
        self._sent = len(events)
        pace_s, ranks = self.ranks.spec.pace_s, self.ranks
        rates = (4 / pace_s, 1 / pace_s)
        says = RankSays(self.fetched, self._encoded, samples, rates, ranks.reason, ranks.leaves, "", events)
        return read_text(text_of(says))  # type: ignore[no-any-return]

    def take(self, commit: Commit) -> None:
        """A commit is known here."""
        if self.taken is commit or not self.alive:
            return
        self.taken, self.gone, self.given_up = commit, [], []
        self.hello = self.state.machine.hello()
        self.tell_known()
        if commit.ranks[0] == self.name:
            if self.attends:
                for _ in range(self._sent):
                    self._news.popleft()
            else:
                self.attend()
        self._sent = 0
        if commit.step:
            self.content.live.append(commit.step)
        said = commit.said
        if not self.job.machines.together:
            said = tuple(replace(each, holds=said[commit.ranks.index(self.name)].holds) for each in said)
        for effect in self.state.commit(commit.ranks, said, int(commit.step > 0), commit.spent):
            if self.dies():
                return
            self._carry_out(effect)
        if len(commit.ranks) == 1:
            self.tell_known()

    def tell_known(self) -> None:
        """What the former commit brought may be said."""
        for message in self.state.known():
            self._said(message)

    def _carry_out(self, effect: RanksEffect) -> None:
        match effect:
            case cl.Freeze(push, _):
                self.content.freeze(push)
                self._encode()
                if self.job.machines.early:
                    self._offer_early(push)
            case Sealed(push, manifest):
                self._seal(push, manifest)
            case cl.Settle(push, answer):
                self.gone += self.content.settle(push, PushAnswer(answer))
            case cl.Adopt(version, outright):
                if self.fetched != version:
                    raise Violation(f"{self.name} adopts {version} and holds {self.fetched} (O8)")
                self.gone += self.content.adopt(version, outright=outright)
                self.fetched = NO_VERSION
            case cl.Free(push):
                self.content.pushes.pop(push, None)
            case cl.FetchVersion():
                self.fetched = NO_VERSION
            case cl.Over(_, again) if again:
                self._over()

    def _encode(self) -> None:
        push = self.state.machine.freezing
        if push is None:
            return

        def encoded() -> None:
            if self.state.machine.freezing == push:
                self._encoded = (push, self.content.encoded().manifest)

        self.timer(self.kernel.between(0.002, 0.03), encoded)

    def _seal(self, push: PushId, manifest: str) -> None:
        pushed, self._encoded = self.content.encoded(), None
        if pushed.manifest != manifest:
            raise Violation(f"{push} is {pushed.manifest} at {self.name}, and {manifest} at the first rank (O8)")
        self.content.pushes[push] = pushed
        self.job.oracle.frozen(push, pushed, self.kernel.now)

    def _offer_early(self, push: PushId) -> None:
        """Planted: it counts as frozen at once, and is offered before another commit is known."""
        self._seal(push, self.content.encoded().manifest)
        for effect in self.state.machine.on(cl.Frozen(push, self.content.pushes[push].manifest)):
            if isinstance(effect, fx.Say):
                self._said(effect.message)

    def _over(self) -> None:
        machine = self.state.machine
        self.gone += self.content.forget()
        for push in [push for push in self.content.pushes if push not in machine.kept]:
            self.given_up += self.content.pushes.pop(push).steps
        self.fetched, self._encoded = NO_VERSION, None
        self.hello = machine.anew().hello()
        if self.attends:
            if self.stream is not None:
                self.stream.cut()
                self.stream = None
            self._news.clear()
            self.timer(self.kernel.between(0.02, 0.1), self.connect)

    # ------------------------------------------------------------------ versions

    def _fetch(self) -> None:
        """Looks for the version that is wanted, again and again: at ranks that have it, or at the followers."""
        self.timer(self.kernel.between(0.01, 0.08), self._fetch)
        wanted = self.state.machine.fetching
        if wanted in (NO_VERSION, self.fetched):
            return
        others = [rank for rank in self.ranks.up() if rank.name in self.state.having and rank is not self]
        if any(rank.fetched == wanted for rank in others):
            self.fetched = wanted
        elif self.attends and not others and (contents := contents_of(self.job, wanted)) is not None:
            self.job.oracle.adopted(wanted, contents)
            self.fetched = wanted

    # ------------------------------------------------------------------ newcomers

    def come_in(self, donor: Rank) -> None:
        """It gets what another one holds."""
        self.state.restore(read_text(text_of(donor.state.facts())))
        self.content, lacks = copy.deepcopy(donor.content), self.job.machines.joiner_lacks
        if lacks == "base":
            self.content.base = NO_VERSION
        elif lacks == "frozen":
            self.content.last = None
        elif lacks == "pushes":
            self.content.pushes = {}
        elif lacks == "residual":
            self.content.residual = []
        self.hello = self.state.machine.hello()
        self._encode()


class RanksJob(Process):
    """The cluster as the rest of the simulated job sees it."""

    def __init__(self, job: Job, name: str, spec: ClusterSpec) -> None:
        super().__init__(job.kernel, name)
        self.job, self.spec = job, spec
        self.trained: set[int] = set()
        self.given_up: set[int] = set()
        self.left = self.reason = ""
        self.leaves = False
        self.takes_back = False
        """The next header reaches the first rank alone, which is put out then."""
        self._nonce = f"{name}-{job.number()}"
        self._count = 0
        self._out: list[Rank] = []
        self._newcomers = 0
        self.ranks: list[Rank] = []
        for _ in range(spec.ranks):
            self.ranks.append(self._rank())
        self.ranks[0].attend()
        self._cycle()

    def _rank(self) -> Rank:
        self._count += 1
        return Rank(self.job, self, f"{self.name}:{self._count}")

    def made(self) -> RanksMachine:
        """Of a rank that is new."""
        agreed = agreement(self.job.settings, self.job.length, self.job.codec)
        machine = ClusterMachine(self.name, self.name, self._nonce, agreed, overlap=self.spec.overlap)
        return RanksMachine(machine)

    # ------------------------------------------------------------------ what the rest of the job asks

    @property
    def machine(self) -> ClusterMachine:
        """Of its oldest rank."""
        return self.ranks[0].state.machine

    @property
    def stream(self) -> Stream | None:
        """Its first rank's, if there is one."""
        return self.ranks[0].stream

    @property
    def cut_at(self) -> float:
        """When one of its streams was lost last."""
        return max(rank.cut_at for rank in [*self.ranks, *self._out])

    def up(self) -> list[Rank]:
        """Ranks that are in, live and run."""
        return [rank for rank in self.ranks if rank.alive and not rank.frozen]

    @property
    def bytes(self) -> dict[PushId, str]:
        """Pushes that can be had here; whoever was put out may serve them, too."""
        here = [*self.up(), *(rank for rank in self._out if rank.alive and not rank.frozen)]
        return {push: pushed.manifest for rank in here for push, pushed in rank.content.pushes.items()}

    def serves(self, push: PushId) -> bool:
        """Whether its bytes can be had here now."""
        return push in self.bytes

    def unaccounted(self) -> set[int]:
        """Inner steps of which it knows nothing any more, though it has not thrown them away."""
        return self.trained - self.ranks[0].content.held - self.given_up - self.job.oracle.discarded

    # ------------------------------------------------------------------ what happens to it

    def kill(self) -> None:
        """All ranks die."""
        self.die()
        for rank in [*self.ranks, *self._out]:
            rank.kill()

    def strike(self, action: str, lasts: float) -> None:
        """One rank is killed, between two effects, or stands still; one comes; a header is taken back."""
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
        """Ctrl+C."""
        self.leaves = True

    # ------------------------------------------------------------------ commits

    def _cycle(self) -> None:
        if not self.alive:
            return
        if self._newcomers:
            self._newcomers -= 1
            self.kernel.after(self.kernel.between(0.05, 0.2), self._join)
            return
        machine, leased = self.machine, self.ranks[0].state.leased
        trains = machine.phase is Phase.TRAINING and machine.may_train and not (leased is not None and leased.used_up)
        pace_s = self.spec.pace_s * self.kernel.between(0.7, 1.3) if trains else self.kernel.between(0.005, 0.03)
        self.kernel.after(pace_s, lambda: self._form(trains=trains))

    def _join(self) -> None:
        up = self.up()
        if self.alive and up:
            newcomer = self._rank()
            newcomer.come_in(up[0])
            self.ranks.append(newcomer)
        self._cycle()

    def _put_out(self) -> bool:
        """Whether somebody had to be put out, or all stand still: then there is more to wait for."""
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
        leased, step, spent = self.ranks[0].state.leased, 0, tuple[Span, ...]()
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
        """All that are left have it, or nobody has."""
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
        self.job.oracle.discarded.update(one.gone)
        self.given_up.update(one.given_up)
        for other in up[1:]:
            if (difference := _difference(one, other)) is not None:
                raise Violation(f"{one.name} and {other.name} differ after a commit in {difference} (O8)")
        if len(self.trained) >= self.spec.loop > 0:
            self.reason = "its loop is over"
        if one.state.over:
            self.left = one.state.over
            for rank in up:
                rank.tell_known()
            self.kill()


def _difference(one: Rank, other: Rank) -> str | None:
    """What of all that is to be equal is not."""
    if one.content != other.content:
        return f"what they hold: {one.content}, {other.content}"
    return "their machines" if text_of(one.state.facts()) != text_of(other.state.facts()) else None
