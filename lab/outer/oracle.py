"""Checks the rules that every simulated outer job must obey, whatever fails (docs/outer.md).

Theory of operation. The state of a block is a symbol: a digest of the entries and of the bytes that it was computed
from, which anybody can compute again from the chain. A shard is a run of these, so that its content is compared
whatever the cut (blocks.py). Each inner step has a number of its own, and a push is the set of those that it covers. So
the oracle sees a version that mixes rounds or cuts, a push that counts twice, and progress that was discarded and
counts all the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.grid import Shard
from chaos_lightning.outer.rules.messages import PushAnswered
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Cut,
    Durable,
    Ended,
    Entry,
    Founded,
    GateState,
    Leased,
    PushAnswer,
    PushId,
    RolledBack,
    Round,
    Summary,
    VersionId,
    Voided,
)
from chaos_lightning.planning.batches import Batches
from chaos_lightning.protocol.spans import count, normalise
from chaos_lightning.protocol.types import Span
from lab.outer.blocks import blocks_of, grid_of, joined
from lab.outer.content import Pushed
from lab.outer.store import Disk, digest_of


class Violation(AssertionError):
    """Error: a simulated job broke a rule."""


def computed(content: str, entry: Entry, parts: Sequence[str]) -> str:
    """Returns a shard's state after an entry that makes a version.

    Args:
        content: State of the shard before the entry; "": none.
        entry: A founding, a round or a rollback.
        parts: Bytes of the entry's pushes for this shard, in order.

    Raises:
        Violation: There is no state that this could be computed from.
    """
    pushed, words = [blocks_of(part) for part in parts], repr(entry.body)
    before = [""] * len(pushed[0]) if isinstance(entry.body, Founded) else blocks_of(content)
    if not before:
        raise Violation(f"{entry.version} is computed from no state (O1)")
    if isinstance(entry.body, RolledBack):
        return content
    if any(len(part) != len(before) for part in pushed):
        raise Violation(f"{entry.version} is computed from bytes of another cut (O15)")
    return joined(
        hashlib.blake2b("/".join((*block, words)).encode(), digest_size=8).hexdigest()
        for block in zip(before, *pushed, strict=True)
    )


class Oracle:
    """Checker of a simulated outer job's rules, with what it has seen of the job.

    Attributes:
        pushes: Numbers of the inner steps that each push covers.
        discarded: Inner steps that their cluster has thrown away.
        lost: Inner steps of pushes that a rollback took back for good: also of who was removed, and came in anew.
        versions: Symbol that a block of a version must be, by version and block.
    """

    def __init__(self) -> None:
        self.pushes: dict[PushId, frozenset[int]] = {}
        self.manifests: dict[PushId, str] = {}
        self.bases: dict[PushId, VersionId] = {}
        self.frozen_at: dict[PushId, float] = {}
        self.answers: set[tuple[PushId, PushAnswer]] = set()
        """Answers that the chain ever gave."""
        self.ended = False
        self.made = {NO_VERSION}
        """Versions that were ever stored."""
        self.discarded: set[int] = set()
        self.lost: set[int] = set()
        self.staged: set[tuple[str, PushId]] = set()
        """Pairs of a follower and a push that it has ever had."""
        self.versions: dict[tuple[VersionId, int], str] = {}
        self.in_a_row: Counter[str] = Counter()
        """Number of pushes of each cluster that were rejected since the last accepted one."""
        self.counted: set[int] = set()
        """Inner steps that the newest version holds."""

    def frozen(self, push: PushId, content: Pushed, now: float) -> None:
        """Checks a push when a cluster, or one of its ranks, fixes its content: one content per push, and no inner step
        twice.
        """
        if self.manifests.setdefault(push, content.manifest) != content.manifest:
            raise Violation(f"push {push} stands for two contents (O3)")
        if len(set(content.steps)) < len(content.steps):
            raise Violation(f"push {push} holds an inner step twice (O10)")
        self.pushes[push], self.bases[push] = frozenset(content.steps), content.base
        self.frozen_at.setdefault(push, now)

    def stored(self, chain: OuterChain, entry: Entry, disks: Mapping[str, Disk]) -> None:
        """Checks an entry that the store has made durable; `chain` already includes it."""
        self._answered(entry)
        if isinstance(entry.body, Durable | Cut):
            for mark in chain.durable[-1:] if isinstance(entry.body, Durable) else chain.durable:
                self._on_disk(chain, mark, disks)
        if isinstance(entry.body, RolledBack) and entry.body.to < chain.safe:
            raise Violation(f"{entry.version} goes back behind the durable {chain.safe} (O5a)")
        durable = chain.durable[-1][0] if chain.durable else NO_VERSION  # an operator may end what has not begun
        last = chain.newest if chain.founded else NO_VERSION
        if isinstance(entry.body, Ended) and not (entry.body.version == durable == last):
            raise Violation(f"the job ends with {entry.body.version}, which is not durable (O16)")
        if isinstance(entry.body, Ended) and (
            any(not known.over for known in chain.incarnations.values()) or (chain.leases and chain.leases.living)
        ):
            raise Violation("somebody is in, or has leases, after the job's end (O16)")
        if isinstance(entry.body, Round) and not (entry.body.accepted or entry.body.rejected):
            raise Violation(f"{entry.version} is a round on nothing")
        for offer in entry.offers:
            if (offer.base, offer.manifest) != (self.bases[offer.push], self.manifests[offer.push]):
                raise Violation(f"{entry.version} takes {offer}, which was made on another base, or of others (O3, O4)")
            if lacking := [name for name in chain.cut if (name, offer.push) not in self.staged]:
                raise Violation(f"{entry.version} takes {offer.push}, which {lacking[0]} has never had (O2)")
        if isinstance(entry.body, Summary):
            self._sums(chain, entry)
        if entry.version != NO_VERSION:
            self._counts(chain)

    def leased(self, chain: OuterChain, body: Leased, known: Mapping[str, Batches]) -> None:
        """Checks that a lease consists of whole steps, except for remainders of which no cluster could make one (O11).

        Args:
            chain: Chain that has the entry.
            body: The lease.
            known: Sizes of clusters' batches, by cluster.
        """
        assert chain.leases is not None
        batches, size = known[body.incarnation.cluster], count(body.spans)
        if not batches.step or size % batches.step == 0:
            return
        if size < batches.least:
            raise Violation(f"{body.incarnation} is leased {size} positions, which are no batch (O11)")
        barred = any(each["rejected"] for each in chain.leases.encode()["epochs"])  # for this one, perhaps
        if chain.leases.free >= batches.step and not barred:
            raise Violation(f"{body.incarnation} is leased {size} positions, no whole steps of {batches.step} (O11)")

    def ordered(self, chain: OuterChain, entry: Entry) -> None:
        """Checks, before a push counts, that all earlier pushes of its cluster are answered and that its base holds
        those accepted (O3).
        """
        standing = {push for version in chain.line() for push in version.pushes}
        for offer in entry.offers:
            push, who = offer.push, offer.push.incarnation
            if push in standing:
                raise Violation(f"push {push} counts twice (O3)")
            if chain.incarnations[who].next < push.number:
                raise Violation(f"{push} is accepted, and number {chain.incarnations[who].next} is not answered (O3)")
            held = {each for version in chain.line(offer.base) for each in version.pushes}
            if other := [each for each in sorted(held ^ standing) if each.incarnation == who]:
                raise Violation(f"{push} is accepted, and its base and what stands do not both hold {other[0]} (O3)")

    def _answered(self, entry: Entry) -> None:
        """Records the answers to pushes in an entry of the chain, and the inner steps that a rollback lost."""
        body = entry.body
        self.made.add(entry.version)
        self.ended = self.ended or isinstance(body, Ended)
        self.answers.update((offer.push, PushAnswer.ACCEPTED) for offer in entry.offers)
        if isinstance(body, Voided):
            self.answers.add((body.offer.push, PushAnswer.VOID))
        if isinstance(body, RolledBack):
            self.lost.update(step for push in body.lost for step in self.pushes[push])
        if isinstance(body, Round):
            self.answers.update((refusal.offer.push, PushAnswer.REJECTED) for refusal in body.rejected)

    def ends(self, body: Ended, reopened: Collection[PushId]) -> None:
        """Checks that only an operator ends a job while pushes reopened by a rollback have no new answer (O5a, O16)."""
        if reopened and "operator" not in body.reason:
            raise Violation(f"the job ends ({body.reason}), and {min(reopened)} was accepted once (O5a)")

    def judged(self, before: GateState, body: Round, settings: OuterSettings) -> None:
        """Checks that the gate has learned from exactly the pushes that a round accepted unchanged (O12; policy
        `robust`).
        """
        if settings.policy != "robust":
            return
        whole = sum(weighed.part == 1.0 for weighed in body.accepted)
        others = len(body.accepted) - whole + len(body.rejected)
        anew = not whole and before.in_a_row + others >= settings.gate_again
        if body.gate.count != before.count + whole and not (anew and body.gate == GateState()):
            raise Violation(
                f"round {body.number} accepts {whole} as they are, and its gate knows {body.gate.count} pushes after "
                f"{before.count} (O12)"
            )

    def refused(self, body: Round, most: int) -> None:
        """Checks that rounds reject no more than `most` pushes of one cluster in a row (O12)."""
        for weighed in body.accepted:
            self.in_a_row[weighed.offer.push.incarnation.cluster] = 0
        for refusal in body.rejected:
            cluster = refusal.offer.push.incarnation.cluster
            self.in_a_row[cluster] += 1
            if self.in_a_row[cluster] > most:
                raise Violation(f"round {body.number} rejects more than {most} pushes of {cluster} in a row (O12)")

    def _sums(self, chain: OuterChain, entry: Entry) -> None:
        """Checks that a summary contains everything a leader needs from the entries that it replaces (O1a)."""
        said = OuterChain()
        said.follow(entry)
        for name in (
            "newest", "durable", "safe", "joined", "cut", "starts", "counters", "gate", "rates", "paced", "agreement",
            "job_id", "founded", "ahead", "reopened", "rounds", "rollbacks", "tally", "hash",
        ):  # fmt: skip
            if (found := getattr(said, name)) != (has := getattr(chain, name)):
                raise Violation(f"the summary at {entry.position} has {name} {found}, the chain {has} (O1a)")
        if chain.leases is not None and (said.leases is None or said.leases.encode() != chain.leases.encode()):
            raise Violation(f"the summary at {entry.position} has other leases than the chain (O1a)")
        if said.since(said.safe) != chain.since(chain.safe):
            raise Violation(f"the summary at {entry.position} has other versions since {chain.safe} (O1a)")
        for who, known in chain.incarnations.items():
            if not known.over and said.incarnations[who].next != known.next:
                raise Violation(f"the summary at {entry.position} lacks answers of {who} (O1a)")
        for base, holds in said.bases.items():
            if any(chain.held(base, who) != digest for who, digest in holds.items()):
                raise Violation(f"the summary at {entry.position} is wrong about what {base} holds (O1a)")
            if any(
                not known.over and (who in chain.bases[base]) != (who in holds)
                for who, known in chain.incarnations.items()
            ):
                raise Violation(f"the summary at {entry.position} lacks what {base} holds of those who live (O1a)")

    def _on_disk(self, chain: OuterChain, mark: tuple[VersionId, tuple[str, ...]], disks: Mapping[str, Disk]) -> None:
        """Checks that the files of a durable mark are safe on the disks (O6), and hold the shards that the chain names
        (O15).
        """
        version, digests = mark
        assert chain.agreement is not None
        shards = grid_of(chain.agreement).cut(len(chain.cut))
        for name, shard, digest in zip(chain.cut, shards, digests, strict=True):
            content = joined(self.versions[version, block] for block in range(shard.first, shard.stop))
            if digest != digest_of(content):
                raise Violation(f"{version} is marked durable with what is not shard {shard.first} at {name} (O15)")
            if not disks[name].safe(version, digest):
                raise Violation(f"{version} is marked durable and is not on the disk of {name} (O6)")

    def told(self, message: PushAnswered) -> None:
        """Checks that the answer a cluster hears to its push is one that the chain gave."""
        if message.version not in self.made:
            raise Violation(f"{message.push} is told {message.version}, which is not stored (O1)")
        voided = self.ended and message.answer is PushAnswer.VOID  # by the end, which names no push
        if not voided and (message.push, message.answer) not in self.answers:
            raise Violation(f"{message.push} is told to be {message.answer}, which no entry says (O3)")

    def _counts(self, chain: OuterChain) -> None:
        """Checks that each push, inner step and sample counts at most once in the standing versions, and discarded
        inner steps never.
        """
        seen: dict[int, PushId] = {}
        counted: set[PushId] = set()
        spent: dict[int, list[Span]] = {}
        for version in chain.line():
            for push in version.pushes:
                if push in counted:
                    raise Violation(f"push {push} counts twice (O3)")
                counted.add(push)
                for step in self.pushes[push]:
                    if step in seen:
                        raise Violation(f"inner step {step} counts in {seen[step]} and in {push} (O9)")
                    seen[step] = push
            for offer in version.entry.offers:
                for each in offer.covers:
                    spent.setdefault(each.epoch, []).extend(each.spans)
        for epoch, spans in spent.items():
            if count(normalise(spans)) != count(tuple(spans)):
                raise Violation(f"a sample of epoch {epoch} counts twice (O11)")
        self.counted = set(seen)
        if wrong := self.discarded.intersection(seen):
            raise Violation(f"inner step {min(wrong)} was discarded and counts in {seen[min(wrong)]} (O10)")

    def stands(self, version: VersionId, shard: Shard, content: str) -> None:
        """Checks that a follower's shard of a version has the content that every other computation of it has."""
        for block, symbol in enumerate(blocks_of(content), shard.first):
            if self.versions.setdefault((version, block), symbol) != symbol:
                raise Violation(f"block {block} of {version} was computed twice with two contents (O1)")

    def adopted(self, version: VersionId, contents: Sequence[str]) -> None:
        """Checks that the version a cluster fetched from all shards is what the followers computed."""
        symbols = [symbol for content in contents for symbol in blocks_of(content)]
        known = [self.versions.get((version, block)) for block in range(len(symbols))]
        if symbols != known or (version, len(symbols)) in self.versions:
            raise Violation(f"{version} is fetched and is not what its followers computed")
