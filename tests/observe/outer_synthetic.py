"""A made-up outer job, as lines of event logs: the reference for its audit, report and live board.

Two followers, two leaders one after the other, three clusters. `far` joins late and is killed; a push of it is
rejected, one is void, one is lost with a follower and taken back by a rollback. The epoch is 400 samples, and whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_lightning.outer.rules.gates import MeasuredPush
from chaos_lightning.outer.rules.judging import _factors, _weights
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    TICKS,
    Agreement,
    Body,
    Counters,
    Covered,
    Cut,
    Durable,
    Ended,
    Entry,
    Founded,
    GateState,
    IncarnationId,
    JobOpened,
    Joined,
    Leased,
    Offer,
    PushAnswer,
    PushId,
    Rejection,
    Removed,
    RolledBack,
    Round,
    Started,
    TensorSpec,
    VersionId,
    Voided,
    Weighed,
)

T0 = 1_700_000_000.0
Line = dict[str, Any]
Span = tuple[int, int]
NBYTES = 1 << 20


@dataclass
class Trainer:
    """Cluster of the made-up job, with its base, its pushes and what it has trained."""

    who: IncarnationId
    base: VersionId = NO_VERSION
    number: int = 1
    steps: int = 0
    spans: list[Span] = field(default_factory=list)
    loss: float = 3.0


@dataclass
class OuterScript:
    """Writer of an outer job's event logs, event by event; `lines[source]` are the lines of each file."""

    length: int = 400
    now: float = T0
    lines: dict[str, list[Line]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    term: int = 0
    leader: str = ""
    followers: list[str] = field(default_factory=list)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    newest: VersionId = NO_VERSION
    counters: Counters = field(default_factory=Counters)
    logged: bool = True
    """Whether the leader writes down its entries."""
    pid: int = 1

    # ------------------------------------------------------------------ lines

    def say(self, source: str, name: str, **fields: Any) -> Line:
        self.now += 0.01
        line: Line = {"t": round(self.now, 6), "mono": round(self.now - T0, 6), "member": "", "name": name, **fields}
        self.lines.setdefault(source, []).append(line)
        return line

    def opened(self, source: str, role: str) -> None:
        pid = 100 * self.pid + len(self.lines)  # each file is another process's
        self.say(source, "opened", pid=pid, host="box", role=role, format=1)

    def lead(self, name: str) -> None:
        self.term += 1
        self.leader = f"leader-{name}-{self.pid}.jsonl"
        self.opened(self.leader, "leader")
        where = {"endpoint": f"{name}:29470", "store": "sqlite:///chain.db"}
        self.say(self.leader, "outer_leader_started", job="chars", term=self.term, position=len(self.entries), **where)

    def enter(self, body: Body) -> Entry:
        entry = Entry(len(self.entries) + 1, self.term, body, self.entries[-1].hash if self.entries else "")
        self.entries.append(entry)
        if self.logged:
            self.tell(entry)
        return entry

    def tell(self, entry: Entry, source: str = "") -> Line:
        """Writes the leader's line for an entry of the chain."""
        return self.say(
            source or self.leader,
            "entry",
            position=entry.position,
            term=entry.term,
            kind=type(entry.body).__name__,
            version=str(entry.version),
            before=entry.before,
            hash=entry.hash,
            body=json.loads(json.dumps(asdict(entry.body))),
        )

    # ------------------------------------------------------------------ the server

    def follow(self, name: str, files: Iterable[VersionId] = ()) -> None:
        source = self.file(name)
        self.opened(source, "follower")
        self.say(source, "follower_started", follower=name, endpoint=f"{name}:4000", files=[str(v) for v in files])
        self.enter(Started(name, f"nonce-{len(self.entries)}"))
        if name not in self.followers:
            self.followers.append(name)
            self.say(self.leader, "follower_stream", of=name, peer="10.0.0.1:5", up=True)

    def file(self, follower: str) -> str:
        return f"follower-{follower}-{self.pid}.jsonl"

    def stage(self, push: PushId) -> None:
        for name in self.followers:
            self.say(self.file(name), "push_staged", push=str(push), nbytes=NBYTES // 2, seconds=0.1, held=1)

    def compute(self, version: VersionId) -> None:
        for name in self.followers:
            self.say(self.file(name), "version_computed", version=str(version), seconds=0.02, nbytes=3 * NBYTES)

    def digest(self, version: VersionId, shard: int) -> str:
        return f"{version.hash[:8]}{shard}"

    def mark(self, version: VersionId) -> Entry:
        for shard, name in enumerate(self.followers):
            digest = self.digest(version, shard)
            self.say(
                self.file(name), "version_saved", version=str(version), seconds=0.2, nbytes=3 * NBYTES, digest=digest
            )
        return self.enter(Durable(version, tuple(self.digest(version, s) for s in range(len(self.followers)))))

    # ------------------------------------------------------------------ clusters

    def join(self, cluster: str) -> None:
        number = sum(isinstance(e.body, Joined) for e in self.entries) + 1
        who = IncarnationId(cluster, number)
        self.trainers[cluster] = Trainer(who)
        source = self.member(cluster)
        self.opened(source, "cluster")
        self.enter(Joined(who, f"{cluster}.example"))
        self.say(self.leader, "cluster_stream", of=str(who), peer="10.0.0.2:7", up=True)
        self.say(source, "cluster_welcomed", incarnation=str(who), term=self.term, founded=self.newest != NO_VERSION)

    def member(self, cluster: str) -> str:
        return f"cluster-{self.trainers[cluster].who}-{self.pid}.jsonl"

    def lease(self, cluster: str, start: int, stop: int, epoch: int = 0) -> None:
        self.enter(Leased(self.trainers[cluster].who, epoch, ((start, stop),)))

    def train(self, cluster: str, start: int, stop: int) -> None:
        """Writes that a cluster trains these positions, ten samples a step."""
        one, steps = self.trainers[cluster], (stop - start) // 10
        one.steps, one.loss = one.steps + steps, one.loss * 0.98
        one.spans.append((start, stop))
        self.now += 1.0
        self.say(self.member(cluster), "inner_steps", steps=steps, samples=stop - start, loss=one.loss)

    def freeze(self, cluster: str, epoch: int = 0) -> Offer:
        one = self.trainers[cluster]
        covers = (Covered(epoch, tuple(sorted(one.spans))),) if one.spans else ()
        samples = sum(b - a for a, b in one.spans)
        push = PushId(one.who, one.number)
        offer = Offer(push, one.base, f"m{push}", samples, one.steps, covers)
        one.number, one.steps, one.spans = one.number + 1, 0, []
        self.say(
            self.member(cluster),
            "push_frozen",
            push=str(push),
            base=str(offer.base),
            steps=offer.steps,
            samples=samples,
            nbytes=NBYTES,
            seconds=0.005,
            manifest=offer.manifest,
        )
        self.stage(push)
        return offer

    def answer(self, offer: Offer, answer: PushAnswer, version: VersionId, reason: str = "in time") -> None:
        cluster = offer.push.incarnation.cluster
        if answer is PushAnswer.VOID and offer.covers:
            self.trainers[cluster].steps += offer.steps
            self.trainers[cluster].spans += offer.covers[0].spans
        self.say(
            self.member(cluster),
            "push_answered",
            push=str(offer.push),
            answer=answer.value,
            version=str(version),
            reason=reason,
        )

    def adopt(self, cluster: str, version: VersionId, *, outright: bool = False) -> None:
        one, source = self.trainers[cluster], self.member(cluster)
        self.say(source, "version_fetched", version=str(version), nbytes=2 * NBYTES, seconds=0.2)
        if outright:
            one.spans = []
        steps = sum(b - a for a, b in one.spans) // 10
        progress = {"progress_samples": self.counters.samples, "progress_steps": self.counters.ticks // TICKS}
        self.say(
            source,
            "version_adopted",
            version=str(version),
            outright=outright,
            steps=steps,
            waited_s=0.25,
            **progress,
        )
        one.base, one.steps = version, steps

    # ------------------------------------------------------------------ versions

    def found(self, cluster: str) -> VersionId:
        offer = self.freeze(cluster)
        self.newest = self.enter(Founded(self.newest.number + 1, offer)).version
        self.compute(self.newest)
        self.answer(offer, PushAnswer.ACCEPTED, self.newest, "it founded the job")
        self.adopt(cluster, self.newest, outright=True)
        return self.newest

    def round(
        self,
        *accepted: Offer,
        rejected: tuple[Offer, ...] = (),
        reason: str = "everybody is in",
        changed: Callable[[Round], Round] = lambda body: body,
    ) -> VersionId:
        measured = [MeasuredPush(o, self.newest.number - o.base.number, True, 0.0, 1.0) for o in accepted]
        factors, self.counters, _ = _factors(measured, max(1, len(accepted)), 1.0, self.counters, OuterSettings())
        weights = _weights(measured, OuterSettings())
        weighed = tuple(Weighed(m.offer, w, m.staleness) for m, w in zip(measured, weights, strict=True))
        refused = tuple(Rejection(o, "its length is far from the usual") for o in rejected)
        body = Round(
            self.newest.number + 1, self.newest, weighed, refused, factors, self.counters,
            GateState(), reason,
        )  # fmt: skip
        body = changed(body)
        self.counters = body.counters
        self.newest = self.enter(body).version
        self.compute(self.newest)
        for offer in accepted:
            self.answer(offer, PushAnswer.ACCEPTED, self.newest)
        for offer in rejected:
            self.answer(offer, PushAnswer.REJECTED, self.newest, "its length is far from the usual")
        return self.newest

    def void(self, offer: Offer) -> None:
        self.enter(Voided(offer, "its base is 9 versions old"))
        self.answer(offer, PushAnswer.VOID, NO_VERSION)

    def roll_back(self, to: VersionId, counters: Counters, *lost: PushId) -> VersionId:
        body = RolledBack(self.newest.number + 1, to, lost, f"{lost[0]}: no follower has all of it; it cost 40 samples")
        self.newest, self.counters = self.enter(body).version, counters
        for name in self.followers:
            self.say(self.file(name), "version_loaded", version=str(to), seconds=0.3)
        self.compute(self.newest)
        return self.newest

    def write(self, where: Path) -> Path:
        where.mkdir(parents=True, exist_ok=True)
        for source, lines in self.lines.items():
            (where / source).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return where

    def change(self, name: str, pick: Callable[[Line], bool] = lambda line: True, **fields: Any) -> Line:
        """Overwrites fields of the first event of this name for which `pick` is true."""
        for lines in self.lines.values():
            for line in lines:
                if line["name"] == name and pick(line):
                    line.update(fields)
                    return line
        raise AssertionError(f"no {name}")

    def drop(self, name: str, pick: Callable[[Line], bool] = lambda line: True) -> None:
        """Removes all events of this name for which `pick` is true."""
        for source, lines in self.lines.items():
            self.lines[source] = [line for line in lines if not (line["name"] == name and pick(line))]


def begun(length: int = 400) -> OuterScript:
    """Returns the beginning of a job with two followers and two clusters: it is founded, and samples are leased."""
    run = OuterScript(length=length)
    run.lead("alpha")
    run.follow("f0")
    run.follow("f1")
    run.enter(JobOpened(Agreement((TensorSpec("w", "float32", (1024, 512)),), length=length), "home.example"))
    run.enter(Cut(("f0", "f1")))
    run.join("home")
    founded = run.found("home")
    run.mark(founded)
    run.join("near")
    run.adopt("near", founded, outright=True)
    if length:
        run.lease("home", 0, 100)
        run.lease("near", 100, 200)
    return run


def one_round(run: OuterScript) -> tuple[Offer, Offer]:
    """Writes a round in which both clusters push and then adopt; returns their offers."""
    run.train("home", 0, 60)
    run.train("near", 100, 140)
    mine, yours = run.freeze("home"), run.freeze("near")
    run.train("home", 60, 80)  # while the push travels
    version = run.round(mine, yours)
    run.adopt("home", version)
    run.adopt("near", version)
    return mine, yours


def outer_story() -> OuterScript:
    """Returns the whole made-up job."""
    run = begun()
    one_round(run)
    run.mark(run.newest)
    run.join("far")
    run.adopt("far", run.newest, outright=True)
    run.lease("far", 200, 320)
    # A push of near is void, and covered by its next one.
    run.train("near", 140, 160)
    run.void(run.freeze("near"))
    run.train("near", 160, 200)
    run.train("home", 80, 100)
    both = run.freeze("home"), run.freeze("near")
    back, counted = run.round(*both), run.counters
    run.adopt("home", back)
    run.adopt("near", back)
    # Another leader. A push of far is accepted and lost with far.
    run.say(run.leader, "outer_leader_ended", reason="another leader rules", failed=True)
    run.lead("beta")
    run.train("far", 200, 240)
    lost = run.freeze("far")
    run.round(lost)
    run.enter(Removed(lost.push.incarnation, "it was silent"))
    version = run.roll_back(back, counted, lost.push)
    run.adopt("home", version)
    run.adopt("near", version)
    run.mark(version)
    # A push of near is rejected, and trained again by home.
    run.lease("near", 200, 300)
    run.train("near", 200, 260)
    bad = run.freeze("near")
    run.train("near", 260, 280)
    version = run.round(rejected=(bad,))
    run.adopt("near", version, outright=True)
    run.lease("home", 200, 400)
    run.train("home", 200, 400)
    version = run.round(run.freeze("home"))
    run.adopt("home", version)
    run.mark(version)
    run.enter(Ended(version, "1 epochs are over"))
    for cluster in ("home", "near"):
        run.say(run.member(cluster), "cluster_over", reason="1 epochs are over", again=False)
    run.say(run.leader, "outer_leader_ended", reason="1 epochs are over", failed=False)
    return run
