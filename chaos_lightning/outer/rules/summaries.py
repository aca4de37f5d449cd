"""Makes summaries of the chain: an entry that replaces all entries before it, which the store then drops (O1a).

Theory of operation. A chain grows with the job, and who takes over must read all of it. So from time to time the leader
appends a `Summary`: what the entries fold to, in place of them. The store drops them in the same moment
(service/store.py). Whoever reads the chain from there on goes on as if it had read all; the leader that wrote it goes
on from it, too, so that its memory keeps within bounds.

Nothing is cut that anybody may ask for. With their entries there are the second newest durable version and what was
made since, for followers compute from there and no rollback goes behind it. Of older versions there is what they hold
of the pushes of those who live, as long as a push may name them as its base: the last `versions` ones, and whatever
somebody is known to have for its base. Of pushes there are the last answers of all who live, and all that a rollback
could take back. Incarnations that are over stay as long as their pushes are needed. A base that was cut is old beyond
measure, so a push from it is void (O10a); an incarnation that was cut is over.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection
from dataclasses import replace

from chaos_lightning.outer.rules.attendance import Attendance
from chaos_lightning.outer.rules.chain import Incarnation, OuterChain, SummedChain
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.types import NO_VERSION, PushId, Summary, VersionId
from chaos_lightning.protocol.plain import text_of

EVERY = 2048
"""Number of entries from one summary to the next."""
VERSIONS = 64
"""Number of the newest versions of which each may be the base of a push, whoever's it is."""
ANSWERS = 16
"""Number of answers of each incarnation that are kept: it asks for that to its last push alone, and frees what it
keeps.
"""
MOST_CHARACTERS = 700_000
"""Largest number of characters of a summary: etcd takes no larger one."""


def summary_of(chain: OuterChain, bases: Collection[VersionId], versions: int = VERSIONS) -> Summary:
    """Returns a summary entry for this chain.

    Args:
        chain: Chain that has a second newest durable version, and has not ended.
        bases: Versions, beside the newest ones, that may be named as the base of a next push.
        versions: Number of newest versions that may be named so.
    """
    kept = {version.id: version for version in chain.since(chain.safe)}
    if chain.safe in chain.versions:
        kept[chain.safe] = chain.versions[chain.safe]
    needed = {push for version in kept.values() for push in version.pushes if version.id != chain.safe}
    asked = {offer.base for version in kept.values() for offer in version.entry.offers}
    asked |= {offer.base for offer in chain.reopened.values()} | {*bases, *kept}
    floor = max(chain.floor, chain.newest.number - versions + 1)
    alive = {push.incarnation for push in needed} | {w for w, known in chain.incarnations.items() if not known.over}
    summed = SummedChain(
        agreement=chain.agreement,
        by=chain.by,
        job_id=chain.job_id,
        leases=json.dumps(chain.leases.encode()) if chain.leases is not None else "",
        newest=chain.newest,
        durable=tuple(chain.durable),
        safe=chain.safe,
        joined=chain.joined,
        floor=floor,
        incarnations=tuple(_cut(chain.incarnations[who], needed) for who in sorted(alive)),
        starts=chain.starts,
        cut=chain.cut,
        counters=chain.counters,
        gate=chain.gate,
        rates=chain.rates,
        paced=chain.paced,
        rounds=chain.rounds,
        rollbacks=chain.rollbacks,
        tally=chain.tally,
        versions=tuple(kept[version] for version in sorted(kept)),
        bases={
            version: {who: digest for who, digest in holds.items() if who in alive}
            for version, holds in chain.bases.items()
            if version.number >= floor or version in asked
        },
        states={version: state for version, state in chain.states.items() if version in (NO_VERSION, *kept)},
        reopened=chain.reopened,
    )
    return Summary(chain.hash, base64.b64encode(zlib.compress(text_of(SummedChain, summed))).decode())


def _cut(known: Incarnation, needed: Collection[PushId]) -> Incarnation:
    """Returns an incarnation with only those answers to its pushes that somebody may still ask for."""
    own = [push.number for push in needed if push.incarnation == known.id]
    forgotten = max(known.forgotten, min([known.next - ANSWERS, *own]))
    answers = {number: given for number, given in known.answers.items() if number >= forgotten}
    return replace(known, forgotten=forgotten, low=0, answers=answers)


class Summaries:
    """Part of the leader that makes a summary of the chain now and then.

    Args:
        desk: Desk of the leader.
        attendance: List of the clusters, with their bases.

    Attributes:
        every: Number of entries from one summary to the next.
        versions: Number of newest versions that a summary keeps as bases.
    """

    def __init__(self, desk: LeaderDesk, attendance: Attendance) -> None:
        self._desk = desk
        self._attendance = attendance
        self._not_before = 0
        self.every = EVERY
        self.versions = VERSIONS

    def next_summary(self) -> Summary | None:
        """Returns a summary if one is due, the chain can be shortened, and all clusters in the job have told what their
        base is.
        """
        chain, clusters = self._desk.chain, self._attendance.clusters
        if chain.position < max(chain.summed + self.every, self._not_before) or chain.safe == NO_VERSION:
            return None
        if not self._attendance.spoken:
            return None
        bases = {version for state in clusters.values() for version in (state.base, state.fetching)}
        bases |= {offer.base for offer in self._attendance.offers()}
        found = summary_of(chain, bases, self.versions)
        if len(found.state) <= MOST_CHARACTERS:
            return found
        self._not_before = chain.position + self.every
        text = f"the chain's summary has {len(found.state)} characters, a store takes {MOST_CHARACTERS}: it is not cut"
        self._desk.note("notice", text=text)
        return None
