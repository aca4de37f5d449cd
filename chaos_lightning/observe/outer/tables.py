"""Computes the tables of an outer job for report and pictures: rounds and rollbacks, clusters, followers.

Theory of operation. What was decided is the chain's word (`entries.py`), when it was staged, computed and saved
the followers', and what it cost to train so the clusters'. A time that needs two machines (from staged at a follower to
decided at the leader) is a difference of their wall clocks, so good for showing only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chaos_lightning.observe.outer.entries import JobEntries, Rollback
from chaos_lightning.observe.outer.fold import ClusterLog, FollowerLog, OuterRun
from chaos_lightning.observe.spans import size
from chaos_lightning.outer.rules.types import (
    TICKS,
    Founded,
    IncarnationId,
    Offer,
    PushAnswer,
    RolledBack,
    Round,
    VersionId,
    Voided,
)


@dataclass(frozen=True, slots=True)
class VersionRow:
    """Table row of one version, made by the founding, a round or a rollback.

    Attributes:
        version: Name of the version.
        t: Wall time (s) at which it was decided.
        kind: "founding", "round" or "rollback".
        accepted: Accepted pushes as (push, its factor, staleness in versions).
        rejected: Rejected pushes as (push, why).
        samples: Samples that it counts.
        window_s: Seconds from the first push that all shards had staged to the decision; None: not in the logs.
        momentum: Whether the outer momentum moved.
        reason: Reason for the time of the decision, and its outcome.
        computed_s: Seconds from the decision until all followers had computed it; None: not in the logs.
        durable_s: Seconds from the decision to its durable mark; None: it has none.
        stands: Whether no rollback went behind it.
    """

    version: VersionId
    t: float
    kind: str
    accepted: tuple[tuple[str, float, int], ...]
    rejected: tuple[tuple[str, str], ...]
    samples: int
    window_s: float | None
    momentum: bool
    reason: str
    computed_s: float | None
    durable_s: float | None
    stands: bool


@dataclass(slots=True)
class ClusterRow:
    """Table row of one incarnation of a cluster.

    Attributes:
        name: Name of the incarnation.
        place: Host on which it runs.
        joined: Wall time (s) at which the chain took it in; of its first event, if no log has that.
        ended: Wall time (s) at which it was over; None: it is not.
        why: Reason of its end.
        steps: Inner steps, as its log has them.
        samples: Samples that these steps used.
        answers: Number of its pushes by answer; those that a rollback made void, too.
        open: Pushes that are frozen and not answered.
        pushed: Bytes of its pushes.
        fetched: Bytes of versions.
        waited_s: Seconds that training stood still for pushes and versions.
        leased: Positions ever leased to it.
        held: Positions leased to it at the end.
        counted: Samples of its pushes that stand.
        progress: Samples and step number of the job with the version that it adopted last.
        loss: Loss that it told last.
    """

    name: str
    place: str
    joined: float
    ended: float | None = None
    why: str = ""
    steps: int = 0
    samples: int = 0
    answers: dict[PushAnswer, int] = field(default_factory=dict)
    open: int = 0
    pushed: int = 0
    fetched: int = 0
    waited_s: float = 0.0
    leased: int = 0
    held: int = 0
    counted: int = 0
    progress: tuple[int, int] | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class OuterFacts:
    """Facts of an outer job, computed for report and pictures."""

    run: OuterRun
    chain: JobEntries
    versions: list[VersionRow]
    clusters: list[ClusterRow]
    voids: list[tuple[float, Offer, str]]
    """Voided pushes as (time, push, why), from records; pushes that a rollback lost are with the rollbacks."""

    @classmethod
    def of(cls, run: OuterRun) -> OuterFacts:
        """Returns the facts of an outer job's events."""
        chain = JobEntries.of(run.entries)
        voids = [
            (told.t, told.entry.body.offer, told.entry.body.reason)
            for told in chain.told.values()
            if told.entry is not None and isinstance(told.entry.body, Voided)
        ]
        return cls(run, chain, _versions(run, chain), _clusters(run, chain), voids)

    @property
    def origin(self) -> float:
        """Wall time (s) at which the job began."""
        return self.run.start

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last event of the logs."""
        return self.run.stop - self.run.start

    @property
    def samples(self) -> int:
        """Number of samples of accepted pushes that no rollback took back."""
        newest = self.chain.versions.get(self.chain.newest)
        return newest.counters.samples if newest is not None and newest.counters is not None else 0

    @property
    def ticks(self) -> float:
        """Clock of the job: the inner steps that a synchronous job would have made."""
        newest = self.chain.versions.get(self.chain.newest)
        return newest.counters.ticks / TICKS if newest is not None and newest.counters is not None else 0.0


def _versions(run: OuterRun, chain: JobEntries) -> list[VersionRow]:
    marks = {mark.version: mark.t for mark in chain.marks}
    standing = {made.id for made in chain.line()}
    computed = _computed(run.followers.values())
    rows = []
    for version, made in sorted(chain.versions.items()):
        body, t = made.body, made.told.t
        accepted: tuple[tuple[str, float, int], ...] = ()
        rejected: tuple[tuple[str, str], ...] = ()
        samples, reason, momentum = 0, "", False
        match body:
            case Founded(_, offer):
                kind, accepted, reason = "founding", ((str(offer.push), 1.0, 0),), f"by {offer.push.incarnation}"
            case Round():
                kind, reason, momentum = "round", body.reason, bool(body.factors.outer)
                accepted = tuple((str(w.offer.push), w.factor, w.staleness) for w in body.accepted)
                rejected = tuple((str(r.offer.push), r.reason) for r in body.rejected)
                samples = sum(w.offer.samples for w in body.accepted)
            case RolledBack():
                kind, reason = "rollback", body.reason
            case _:
                continue
        pushes = [push for push, _, _ in accepted] + [push for push, _ in rejected]
        staged = [at for push in pushes if (at := _staged(push, t, run.followers)) is not None]
        times = computed.get(str(version), {})
        rows.append(
            VersionRow(
                version, t, kind, accepted, rejected, samples,
                max(0.0, t - min(staged)) if staged and kind == "round" else None,
                momentum, reason,
                max(0.0, max(times.values()) - t) if times and len(times) == len(run.followers) else None,
                max(0.0, marks[version] - t) if version in marks else None,
                version in standing,
            )
        )  # fmt: skip
    return rows


def _computed(followers: Iterable[FollowerLog]) -> dict[str, dict[str, float]]:
    """Returns when each follower first computed each version (wall time, s), by version and follower."""
    found: dict[str, dict[str, float]] = {}
    for follower in followers:
        for step in follower.states:
            if step.how == "computed":
                found.setdefault(step.version, {}).setdefault(follower.name, step.t)
    return found


def _staged(push: str, before: float, followers: Mapping[str, FollowerLog]) -> float | None:
    """Returns when a push had reached all shards (wall time, s, at most the time of its decision); None if no log says
    it.
    """
    times = [t for one in followers.values() for t, _, _ in one.staged.get(push, [])[:1]]
    return min(max(times), before) if times else None


def _clusters(run: OuterRun, chain: JobEntries) -> list[ClusterRow]:
    rows: dict[str, ClusterRow] = {}
    for who, member in chain.members.items():
        row = rows[str(who)] = ClusterRow(str(who), member.joined.place, member.t)
        row.ended, row.why = (member.over_t, member.over) if member.over else (None, "")
        row.leased, row.held = chain.leases.granted.get(who, 0), chain.leases.held(who)
    for push, given in chain.standing.items():
        row = rows.setdefault(str(push.incarnation), ClusterRow(str(push.incarnation), "", run.start))
        row.answers[given.answer] = row.answers.get(given.answer, 0) + 1
        if given.answer is PushAnswer.ACCEPTED:
            row.counted += given.offer.samples
    answered = {str(push) for push in chain.standing}
    for name, log in run.clusters.items():
        row = rows.setdefault(name, ClusterRow(name, "", log.first))
        if log.over is not None and row.ended is None:
            row.ended, row.why = log.over, log.reason
        _account(row, log, answered)
    return sorted(rows.values(), key=lambda row: (row.joined, row.name))


def _account(row: ClusterRow, log: ClusterLog, answered: set[str]) -> None:
    """Adds to a cluster's row the facts from the incarnation's own log."""
    row.steps, row.samples = log.steps, sum(x.samples for x in log.inner)
    row.open = sum(push not in answered for push in log.pushes)
    row.pushed, row.fetched = sum(push.nbytes for push in log.pushes.values()), log.fetched
    row.waited_s = log.waited_s
    if log.adoptions:
        row.progress = log.adoptions[-1].progress_samples, log.adoptions[-1].progress_steps
    row.loss = next((x.loss for x in reversed(log.inner) if x.loss is not None), None)


def lost_in(rollback: Rollback) -> tuple[int, int]:
    """Returns how many samples a rollback lost for good, and how many it took back to be counted again."""
    gone = sum(offer.samples for offer in rollback.lost)
    return gone, sum(offer.samples for offer in rollback.pushes) - gone


def spent_share(chain: JobEntries) -> list[tuple[int, int, int]]:
    """Returns (epoch, samples used, epoch length) of each epoch that the clusters share."""
    return [(epoch, size(spans), chain.leases.length) for epoch, spans in sorted(chain.leases.spent.items())]


def cluster_of(incarnation: IncarnationId | str) -> str:
    """Returns the cluster's name, taken from an incarnation's name."""
    return str(incarnation).rpartition("~")[0] or str(incarnation)
