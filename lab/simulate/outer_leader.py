"""Simulates the leader (parameter server) of an elastic cluster in outer sync, by a script of answers and versions.

Theory of operation. The members of a simulated job may be ranks of a cluster of outer sync (outer_ranks.py). Their
leader is no machine here, for lab/outer simulates that one; it is a script with the words of outer/rules/messages.py.
It answers pushes after a while, accepts most of them, rejects some, and finds some void. It makes versions of its own,
as other clusters' pushes do, cuts its streams and comes back with a higher term, removes the cluster, which comes in
anew, and rolls accepted pushes back. The job is over when the ranks' loop is.

It takes a push only where its bytes can be had, and checks that all ranks that are as far serve what is offered (O8a).
An `InnerSteps` counts: what a rank has trained is in one accepted push, or it is held, or a rejection threw it away
(docs/outer.md, O9), and no push has an inner step that the ranks took back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from chaos_lightning.outer.rules.messages import (
    ClusterHello,
    Dismissed,
    Freed,
    FromCluster,
    JobFinished,
    LoopEnded,
    Offered,
    OnDisk,
    PushAnswered,
    Reopened,
    Served,
    ToCluster,
    Welcomed,
)
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    IncarnationId,
    JobProgress,
    Offer,
    PushAnswer,
    PushId,
    VersionId,
)
from chaos_lightning.planning.fleet.kernel import Action, Kernel, Pipe
from chaos_lightning.protocol.types import Header
from lab.outer.content import Content, Pushed
from lab.outer.rank_part import RankPart
from lab.simulate.oracle import Violation
from lab.simulate.plan import OuterScript


class OuterRank(Protocol):
    """Interface of a rank of the cluster for the simulated leader."""

    name: str
    alive: bool
    frozen: bool
    training: bool
    header: Header
    lineage: str

    @property
    def part(self) -> RankPart | None: ...

    def deliver(self, action: Action) -> None: ...


@dataclass(slots=True, eq=False)
class Line:
    """Stream between a rank and the leader."""

    rank: OuterRank
    up: Pipe
    down: Pipe
    hear: Callable[[Line, object], None]
    lost: Callable[[Line], None]


@dataclass(slots=True)
class InnerSteps:
    """Record of what became of each inner step: counted in an accepted push, or thrown away.

    Attributes:
        counted: Push that was accepted with each inner step, and the beginning of the job that the step was trained in.
    """

    counted: dict[int, tuple[PushId, str]] = field(default_factory=dict)
    _at: dict[tuple[str, str], tuple[frozenset[int], frozenset[int]]] = field(default_factory=dict)
    """Inner steps that led to a header, and those of them that were thrown away, by beginning and header."""
    _furthest: dict[str, int] = field(default_factory=dict)
    """Last slot that a rank has taken, by beginning."""

    def accept(self, push: PushId, pushed: Pushed, lineage: str) -> None:
        """Records the inner steps of an accepted push."""
        for step in pushed.steps:
            if step in self.counted:
                raise Violation(f"inner step {step:x} is in {push} and in {self.counted[step][0]} (O9)")
            self.counted[step] = (push, lineage)

    def reopen(self, pushes: Collection[PushId]) -> None:
        """Removes these pushes, which are unanswered again, from the record."""
        self.counted = {step: known for step, known in self.counted.items() if known[0] not in pushes}

    def took(self, lineage: str, before: Header, header: Header, step: int, gone: set[int], content: Content) -> None:
        """Checks, when a rank has committed a slot, that no inner step is missing and none is counted twice."""
        if (lineage, header.hash) in self._at:
            return
        trained, thrown = self._at.get((lineage, before.hash), (frozenset(), frozenset()))
        trained, thrown = trained | {step} if step else trained, thrown | gone
        self._at[lineage, header.hash] = trained, thrown
        if header.seq <= self._furthest.get(lineage, 0):
            return  # a rank that thawed takes a slot that the others made otherwise: what counts now is of theirs
        self._furthest[lineage] = header.seq
        if missing := trained - thrown - content.held - self.counted.keys():
            raise Violation(f"slot {header.seq}: inner step {min(missing):x} is in no push, and nobody holds it (O9)")
        if twice := set(content.live) & self.counted.keys():
            push = self.counted[min(twice)][0]
            raise Violation(f"slot {header.seq}: inner step {min(twice):x} is in {push}, and to be pushed again (O9)")
        ours = {step for step, (_, of) in self.counted.items() if of == lineage}
        if strange := ours - trained:
            push = self.counted[min(strange)][0]
            raise Violation(f"slot {header.seq}: {push} has an inner step that the ranks took back (O8a)")


class ScriptedLeader:
    """Leader that answers pushes and makes versions by a script.

    Args:
        kernel: Kernel of the job.
        script: Script that the leader follows.

    Attributes:
        ranks: All ranks of the job; each adds itself.
        steps: Places of their progress.
        answered: Number of answers by kind.
        adopted: Number of times that a rank adopted a version.
        replayed: Number of times that a newcomer that replays passed over a version.
    """

    def __init__(self, kernel: Kernel, script: OuterScript) -> None:
        self.script = script
        self.ranks: list[OuterRank] = []
        self.steps = InnerSteps()
        self.answered: Counter[PushAnswer] = Counter()
        self.adopted = self.replayed = 0
        self._kernel = kernel
        self._line: Line | None = None
        self._lines: list[Line] = []
        self._term = 1
        self._joined = 0
        self._who: tuple[IncarnationId, str] | None = None
        """Incarnation that is in the job, and its nonce."""
        self._next = 1
        self._newest = NO_VERSION
        self._answers: dict[PushId, PushAnswered] = {}
        self._kept: dict[PushId, VersionId] = {}
        """Pushes that are accepted and not freed, with the version that holds each."""
        self._freed: set[PushId] = set()
        self._reopened: list[PushId] = []
        self._judging: Offer | None = None
        self._over = ""
        self._numbers: dict[bytes, int] = {}
        self._states: dict[int, bytes] = {}
        """Outer states by number."""
        for at in script.cuts:
            kernel.at(at, self._cut)
        for at in script.removals:
            kernel.at(at, self._remove)
        for at in script.rollbacks:
            kernel.at(at, self._roll_back)
        for at in script.versions:
            kernel.at(at, self._others)

    def has(self, version: VersionId) -> bool:
        """Returns whether followers serve this version, which must be one of the two newest."""
        return version != NO_VERSION and self._newest.number - 1 <= version.number <= self._newest.number

    def number_of(self, part: RankPart) -> int:
        """Returns a number for a rank's outer state; equal states have equal numbers."""
        text = part.facts()
        number = self._numbers.setdefault(text, 2 * len(self._numbers) + 2)  # even: a damaged one is none
        self._states[number] = text
        return number

    def facts_of(self, number: int) -> bytes:
        """Returns the encoded outer state with this number."""
        return self._states[number]

    # ------------------------------------------------------------------ streams

    def connect(self, rank: OuterRank, hear: Callable[[Line, object], None], lost: Callable[[Line], None]) -> Line:
        """Opens a rank's stream to the leader."""
        line = Line(rank, Pipe(self._kernel, 0.0005, 0.01), Pipe(self._kernel, 0.0005, 0.01), hear, lost)
        self._lines.append(line)
        return line

    def say(self, line: Line, message: FromCluster) -> None:
        """Handles a message from a rank."""
        header = line.rank.header
        line.up.send(message, lambda _: self._hear(line, message, header))

    def close(self, line: Line) -> None:
        """Closes the stream of a process that died or hung up; its last messages may be lost."""
        now = self._kernel.now
        line.up.cut(now + self._kernel.between(0.0, 0.02))
        line.down.cut(now)

    def _tell(self, message: ToCluster) -> None:
        line = self._line
        if line is not None:
            for _ in range(1 + (self._kernel.random.random() < 0.05)):
                line.down.send(message, lambda m: line.rank.deliver(lambda: line.hear(line, m)))

    def _cut(self) -> None:
        """Replaces the leader by a new one; the old leader's last answer may be decided but not delivered."""
        self._term += 1
        lines, self._lines, self._line = self._lines, [], None
        for line in lines:
            self.close(line)
            self._kernel.after(
                self._kernel.between(0.001, 0.05),
                lambda it=line: it.rank.deliver(lambda: it.lost(it)),  # type: ignore[misc]
            )
        if self._kernel.random.random() < 0.5:
            self._judging = None

    # ------------------------------------------------------------------ what is said

    def _hear(self, line: Line, message: FromCluster, header: Header) -> None:
        if line not in self._lines:
            return
        match message:
            case ClusterHello():
                self._line = line
                self._welcome(message)
            case Offered(offer) if self._who is not None and offer.push.incarnation == self._who[0]:
                self._line = line
                self._offered(line.rank, offer, header)
            case LoopEnded(incarnation, reason) if self._who is not None and incarnation == self._who[0]:
                if not self._reopened and self._judging is None:
                    self._over = reason
        if self._over:
            self._tell(JobFinished(self._term, self._newest, self._over))

    def _welcome(self, hello: ClusterHello) -> None:
        who = self._who
        if hello.resume is not None and (who is None or hello.resume != who[0]):
            self._tell(Dismissed(self._term, "it was removed", True))
            return
        if who is None or who[1] != hello.nonce:
            self._joined += 1
            who = self._who = IncarnationId(hello.cluster, self._joined), hello.nonce
            self._next, self._reopened, self._judging = 1, [], None
        founded = self._newest != NO_VERSION
        self._tell(Welcomed(self._term, who[0], self._next, self._newest, founded, self._progress()))
        self._tell(Freed(self._term, tuple(p for p in hello.kept if p in self._freed)))
        if self._reopened:
            self._tell(Reopened(self._term, self._newest, tuple(self._reopened)))

    def _progress(self) -> JobProgress:
        return JobProgress(self._newest.number, self._newest.number)

    def _offered(self, rank: OuterRank, offer: Offer, header: Header) -> None:
        if offer.push in self._answers:
            self._tell(replace(self._answers[offer.push], term=self._term))
            return
        due = self._reopened[0] if self._reopened else PushId(offer.push.incarnation, self._next)
        if offer.push != due or offer == self._judging or self._over:
            return
        self._served_by_all(rank, offer, header)
        self._judging = offer
        self._kernel.after(self._kernel.between(*self.script.answer_s), lambda: self._judge(offer))

    def _served_by_all(self, rank: OuterRank, offer: Offer, header: Header) -> None:
        for other in self.ranks:
            part = other.part
            if part is None or not other.alive or not other.training or other.lineage != rank.lineage:
                continue
            pushed = part.content.pushes.get(offer.push)
            # It is said with the next commit, to which all have contributed: who had not taken this one is put out.
            if header.hash in (other.header.hash, other.header.prev_hash) and (
                pushed is None or pushed.manifest != offer.manifest
            ):
                raise Violation(f"{rank.name} offers {offer.push}, which {other.name} does not serve (O8a)")

    # ------------------------------------------------------------------ what is decided

    def _judge(self, offer: Offer) -> None:
        if self._judging is not offer or self._over:
            return
        here = [r for r in self.ranks if r.alive and not r.frozen and r.part is not None]
        held = [(r, r.part.content.pushes.get(offer.push)) for r in here if r.part is not None]
        found = next(((r, pushed) for r, pushed in held if pushed and pushed.manifest == offer.manifest), None)
        if found is None:  # its holders stand still
            self._kernel.after(0.05, lambda: self._judge(offer))
            return
        self._judging = None
        if self._reopened:
            del self._reopened[0]
        else:
            self._next += 1
        answer = self._answer(offer)
        self.answered[answer] += 1
        if answer is PushAnswer.ACCEPTED:
            self.steps.accept(offer.push, found[1], found[0].lineage)  # type: ignore[arg-type]
        if answer is not PushAnswer.VOID:  # a round, with other clusters' pushes
            self._make()
        if answer is PushAnswer.ACCEPTED:
            self._kept[offer.push] = self._newest
        said = self._answers[offer.push] = PushAnswered(self._term, offer.push, answer, self._newest, "by the script")
        self._tell(said)

    def _answer(self, offer: Offer) -> PushAnswer:
        if offer.base == NO_VERSION:
            return PushAnswer.VOID if self._newest != NO_VERSION else PushAnswer.ACCEPTED
        drawn = self._kernel.random.random()
        if drawn < self.script.rejects:
            return PushAnswer.REJECTED
        return PushAnswer.VOID if drawn < self.script.rejects + self.script.voids else PushAnswer.ACCEPTED

    def _make(self) -> None:
        """Makes a version, which is served a little later; the version two before it is durable now."""
        number = self._newest.number + 1
        self._newest = VersionId(number, f"{number:032x}")
        self._kernel.after(self._kernel.between(0.0, 0.06), self._serve)
        free = tuple(push for push, version in self._kept.items() if version.number <= number - 2)
        for push in free:
            del self._kept[push]
        self._freed.update(free)
        self._tell(Freed(self._term, free))

    def _serve(self) -> None:
        self._tell(Served(self._term, self._newest, self._progress()))
        if self._newest.number > 2:
            durable = self._newest.number - 2
            self._tell(OnDisk(self._term, VersionId(durable, f"{durable:032x}")))

    def _others(self) -> None:
        if self._newest != NO_VERSION and not self._over:
            self._make()

    def _remove(self) -> None:
        if self._who is not None and not self._over and not self._reopened:  # else what is reopened would be lost
            self._who, self._judging = None, None
            self._tell(Dismissed(self._term, "it was removed", True))

    def _roll_back(self) -> None:
        """Undoes accepted pushes whose versions are not durable yet: they are unanswered again."""
        if self._who is None or self._over:
            return
        pushes = sorted(push for push in self._kept if push.incarnation == self._who[0])
        if not pushes:
            return
        for push in pushes:
            del self._kept[push]
            self._answers.pop(push, None)
        self.steps.reopen(pushes)
        self._reopened, self._judging = sorted({*self._reopened, *pushes}), None
        self._make()
        self._tell(Reopened(self._term, self._newest, tuple(self._reopened)))
