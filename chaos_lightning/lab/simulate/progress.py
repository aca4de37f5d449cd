"""Liveness of a simulated job: views have causes, lead to committed slots, and whoever is stuck can say why.

Theory of operation. Three things must hold in every run, whatever goes wrong:

- *Numbers without a slot* (protocol.md 31). Each attempt to go on takes a number from the store. Between two slots that
  are new to the job no more may be taken than what went wrong meanwhile explains, a few at once, and from then on
  fewer and fewer a minute (membership/backoff.py).
- *Views without a cause.* Over a whole run views may not outnumber what they can be about: processes that came, faults
  that struck, and schedulers that began.
- *Stuck without an explanation.* A run that does not end must be one in which the members cannot go on: in no part of
  the graph that the network and everybody's wishes allow are there enough to reach min_nodes with the training state,
  and each of them has been told what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from chaos_lightning.lab.simulate.edges import Edges, Trainee
from chaos_lightning.lab.simulate.host import SchedulerHost
from chaos_lightning.lab.simulate.kernel import Kernel
from chaos_lightning.lab.simulate.oracle import Violation
from chaos_lightning.lab.simulate.store import Store
from chaos_lightning.membership.effects import Persist
from chaos_lightning.membership.topology import Pair, pair, parts
from chaos_lightning.protocol.types import NO_VIEW, Settings

AT_ONCE = 16
"""So many numbers may be taken without a slot between them; the scheduler hears of a slot late, and counts anew."""
PER_TROUBLE = 3
"""So many more for everything that went wrong or ended meanwhile, or process that came."""
PER_S = 1.0
"""So many more a second."""
VIEWS = 4
"""A run may have so many views,"""
VIEWS_PER_CAUSE = 2
"""and so many for each cause."""


class Job(Protocol):
    """What is asked of the job; `world.World` is one."""

    kernel: Kernel
    store: Store
    settings: Settings
    edges: Edges

    @property
    def nodes(self) -> Mapping[str, Trainee]: ...

    @property
    def scheduler(self) -> SchedulerHost: ...


class Progress:
    """See the module.

    Args:
        world: The job.
    """

    def __init__(self, world: Job) -> None:
        self._world = world
        self._numbers = self._troubles = 0
        self._since = 0.0
        self._last = NO_VIEW
        self._causes = 0
        self.most = 0
        """Numbers that were taken between two slots at most."""

    def struck(self, troubles: int = 1, causes: int = 1) -> None:
        """Something went wrong, or was over, or a process came; a view or two may be about each of the causes."""
        self._troubles += troubles
        self._causes += causes

    def committed(self) -> None:
        """A slot was committed that nobody had committed before."""
        self._numbers = self._troubles = 0
        self._since = self._world.kernel.now

    def wrote(self, entry: Persist) -> None:
        """An entry is in the store."""
        if entry.kind not in ("reserve", "view"):
            return
        world = self._world
        views = len(world.store.views)
        if views > VIEWS + VIEWS_PER_CAUSE * self._causes:
            raise Violation(
                f"view {entry.number} is the {views}th though only {self._causes} things have happened (31)"
            )
        if entry.number == self._last:
            return  # it was reserved
        self._last = entry.number
        self._numbers += 1
        self.most = max(self.most, self._numbers)
        seconds = world.kernel.now - self._since
        if self._numbers > AT_ONCE + PER_TROUBLE * self._troubles + PER_S * seconds:
            raise Violation(
                f"{self._numbers} numbers were taken in {seconds:.1f} s without a committed slot, in which "
                f"{self._troubles} things happened; the last is {entry.number} (31)"
            )

    # ------------------------------------------------------------------ at the end

    def explained(self) -> bool:
        """Whether a job that did not end could not go on, and its members know why."""
        world = self._world
        here = [n for n in world.nodes.values() if n.alive and not n.frozen and not n.outcome]
        if not here or world.scheduler.finished or not world.scheduler.alive:
            return False
        holders = {n.name for n in here if n.training}
        groups = [g for g in parts([n.name for n in here], self._links(here)) if not holders or holders & set(g)]
        enough = [g for g in groups if len(g) >= world.settings.min_nodes]
        return not enough and all(n.machine.notice for n in here)

    def _links(self, here: list[Trainee]) -> frozenset[Pair]:
        return frozenset(
            pair(a.name, b.name) for a in here for b in here if a is not b and self._world.edges.may_link(a, b)
        )
