"""The leader's dealing of samples, where clusters share the data: leases for a while ahead (O11)."""

from __future__ import annotations

from chaos_lightning.outer.attendance import Attendance
from chaos_lightning.outer.leader_desk import LeaderDesk
from chaos_lightning.outer.leases import wanted
from chaos_lightning.outer.messages import Granted
from chaos_lightning.outer.types import NO_VERSION, Covered, IncarnationId, Leased

FEWEST = 4
"""Towards an epoch's end this part of a usual round is dealt at a time, so that its last samples are nobody's alone."""


class Dealer:
    """See the module.

    Args:
        desk: The leader's.
        attendance: Whom samples are dealt to.
    """

    def __init__(self, desk: LeaderDesk, attendance: Attendance) -> None:
        self._desk = desk
        self._attendance = attendance

    def next_lease(self) -> Leased | None:
        """Samples for minutes ahead, to whoever has few left, but never so many that others find none."""
        leases, settings = self._desk.chain.leases, self._desk.settings
        if leases is None or not self._desk.chain.founded or 0 < settings.epochs <= leases.epoch:
            return None
        living = self._attendance.living()
        fair = max(settings.batch, settings.round_samples // FEWEST, leases.free // (2 * max(1, len(living))))
        for who in living:
            cluster = self._attendance.clusters[who]
            if cluster.base == NO_VERSION or cluster.leaving or cluster.conn is None:
                continue
            rate = cluster.rate or settings.round_samples / settings.lease_ahead_s
            samples = min(wanted(rate, settings.lease_ahead_s, leases.held(who)), fair - leases.held(who))
            leased = leases.grant(who, samples, living) if samples > 0 else None
            if leased is not None:
                return leased
        return None

    def tell(self, who: IncarnationId) -> None:
        """All that an incarnation is leased."""
        leases = self._desk.chain.leases
        if leases is None:
            return
        leased = tuple(Covered(epoch, spans) for epoch, spans in sorted(leases.leased(who).items()))
        self._attendance.tell(who, Granted(self._desk.term, leased))
