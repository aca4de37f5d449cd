"""Planted bugs about progress: schedulers whose views bring nothing, or who keep others out (see bugs.py)."""

from __future__ import annotations

from collections.abc import Mapping

from chaos_lightning.lab.simulate.planting import Bug, hooks_of, with_parts
from chaos_lightning.lab.simulate.sparse import (
    bridge_plan,
    bridging_plan,
    flapping_link_plan,
    needed_plan,
    stranded_plan,
)
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.rewiring import Rewiring, Rule
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import Report


class AnnouncedRewiring(Rewiring):
    """Judges which links are missed by the announced view, in which a recovery would not put everybody."""

    def _remaining(self) -> list[str]:
        return [p.id for p in self._roster.living()]


class RestlessRecovery(Recovery):
    """Begins a recovery whenever there is a cause, whatever became of those before."""

    def paced(self, why: str) -> bool:
        return False


class HospitableGraph(Graph):
    """Keeps a place for whoever came first, though no link leads to it."""

    def strand(self, newcomers: list[Peer], members: list[Peer]) -> None:
        pass


class StubbornScheduler(SchedulerMachine):
    """Has members that are cut off wait for min_nodes, though they would count as newcomers."""

    def _bridged(self, ruling: Ruling) -> tuple[tuple[str, str], ...]:
        return ()


class ClingingRewiring(Rewiring):
    """Keeps the places of members that are cut off, though too few are left without them."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        side = super().side(reports, rule)
        for member in reports:
            self._roster.peers[member].stranded = False
        return side


class ChoosyGraph(Graph):
    """Lets nobody in by a link that carries nothing, though too few are left."""

    def _few(self) -> bool:
        return False


PROGRESS_BUGS: dict[str, Bug] = {
    "31-announced": Bug(
        rule="31",
        what="links are missed by the announced view, and brought back by the one after",
        hooks=hooks_of(scheduler=with_parts(rewiring=AnnouncedRewiring)),
        plan=bridging_plan,
    ),
    "31-restless": Bug(
        rule="31",
        what="recoveries that bring nothing follow each other at once",
        hooks=hooks_of(scheduler=with_parts(recovery=RestlessRecovery)),
        plan=flapping_link_plan,
    ),
    "31-hospitable": Bug(
        rule="31",
        what="newcomers that can link to nobody keep their places from others",
        hooks=hooks_of(scheduler=with_parts(graph=HospitableGraph)),
        plan=stranded_plan,
    ),
    "31-stubborn": Bug(
        rule="31",
        what="members that are cut off wait for min_nodes, though newcomers link them",
        hooks=hooks_of(scheduler=StubbornScheduler),
        plan=bridge_plan,
    ),
    "31-clinging": Bug(
        rule="31",
        what="members that are cut off keep their places from the newcomer that links them",
        hooks=hooks_of(scheduler=with_parts(rewiring=ClingingRewiring)),
        plan=needed_plan,
    ),
    "31-choosy": Bug(
        rule="31",
        what="a newcomer waits outside because its link carries nothing, though it is needed",
        hooks=hooks_of(scheduler=with_parts(graph=ChoosyGraph)),
        plan=needed_plan,
    ),
}
"""By name."""
