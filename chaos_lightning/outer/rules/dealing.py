"""Leases samples of the shared data to clusters, for some minutes ahead; part of the leader (O11)."""

from __future__ import annotations

from chaos_lightning.outer.rules.attendance import Attendance
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.leases import wanted
from chaos_lightning.outer.rules.messages import Granted
from chaos_lightning.outer.rules.types import NO_VERSION, Covered, IncarnationId, Leased, LeftOver
from chaos_lightning.planning.batches import Batches

FEWEST = 4
"""Divisor of a usual round: towards an epoch's end so small a part is dealt at a time, so that its last samples are not
one cluster's alone.
"""


class Dealer:
    """Part of the leader that leases samples to the clusters in the job.

    Args:
        desk: Desk of the leader.
        attendance: List of the clusters, to which samples are leased.
    """

    def __init__(self, desk: LeaderDesk, attendance: Attendance) -> None:
        self._desk = desk
        self._attendance = attendance

    def next_lease(self) -> Leased | LeftOver | None:
        """Returns the next lease: samples for some minutes to a cluster that has few left, but never so many that
        others find none.

        They are whole steps of the cluster that gets them. Fewer are dealt once no cluster could make a whole step of
        what is free, and what nobody makes a batch of is set aside.
        """
        leases, settings = self._desk.chain.leases, self._desk.settings
        if leases is None or not self._desk.chain.founded or 0 < settings.epochs <= leases.epoch or not leases.free:
            return None
        living = self._attendance.living()
        fair = max(settings.batch, settings.round_samples // FEWEST, leases.free // (2 * max(1, len(living))))
        takers, known = self._takers(leases.free)
        if not takers:
            return leases.left_over() if known and self._attendance.spoken else None
        wants: list[tuple[IncarnationId, Batches]] = []
        for who, batches in known.items():
            rate = self._attendance.clusters[who].rate or settings.round_samples / settings.lease_ahead_s
            samples = min(wanted(rate, settings.lease_ahead_s, leases.held(who)), fair - leases.held(who))
            if samples > 0:
                wants.append((who, batches))
                if (leased := leases.grant(who, samples, batches, takers)) is not None:
                    return leased
        if any(leases.grant(who, 1, batches, takers) for who, batches in known.items()):
            return None  # who has enough for now gets it later
        return next(filter(None, (leases.grant_rest(who, batches, takers) for who, batches in wants)), None)

    def _takers(self, free: int) -> tuple[list[IncarnationId], dict[IncarnationId, Batches]]:
        """Returns the incarnations that may get some of `free` positions now or later, and the batch sizes of those
        that are connected and train.
        """
        takers: list[IncarnationId] = []
        known: dict[IncarnationId, Batches] = {}
        usual = Batches(self._desk.settings.batch, self._desk.settings.batch)
        for who in self._attendance.living():
            cluster = self._attendance.clusters[who]
            if cluster.leaving:
                continue
            batches = cluster.batches
            if batches is None:  # it has not said a word yet
                takers.append(who)
                continue
            batches = batches if batches.step else usual  # of an older release, which does not say
            if batches.step <= free or batches.rest(free):
                takers.append(who)
            if cluster.base != NO_VERSION and cluster.conn is not None:
                known[who] = batches
        return takers, known

    def tell(self, who: IncarnationId) -> None:
        """Sends an incarnation all positions that are leased to it."""
        leases = self._desk.chain.leases
        if leases is None:
            return
        leased = tuple(Covered(epoch, spans) for epoch, spans in sorted(leases.leased(who).items()))
        self._attendance.tell(who, Granted(self._desk.term, leased))
