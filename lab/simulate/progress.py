"""Checks the liveness of a simulated job: every view has a cause, views lead to committed slots, and members that are
stuck can say why.

Theory of operation. Three things must hold in every run, whatever goes wrong:

- *Numbers without a slot* (protocol.md 31). Each attempt to go on takes a number from the store. Between two slots that
  are new to the job no more may be taken than what went wrong meanwhile explains, a few at once, and from then on
  fewer and fewer a minute (membership/backoff.py).
- *Views without a cause.* Over a whole run views may not outnumber what they can be about: processes that came, faults
  that struck, and schedulers that began.
- *Stuck without an explanation.* A run that does not end must be one in which the members cannot go on: in no part of
  the graph that the network and everybody's wishes allow are there enough to reach min_nodes with the training state,
  or with room for any pipelines, and each of them has been told what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.effects import Persist
from chaos_lightning.membership.member import MemberPhase
from chaos_lightning.membership.topology import components, pair
from chaos_lightning.protocol.types import NO_VIEW, View
from lab.simulate.fabric import Endpoint
from lab.simulate.job import Job
from lab.simulate.oracle import Violation

AT_ONCE = 16
"""Number of view numbers that may be taken without a slot between them; the scheduler hears of a slot late, and counts
anew.
"""
PER_TROUBLE = 3
"""Number of further view numbers for each thing that went wrong or ended meanwhile, or process that came."""
PER_S = 1.0
"""Number of further view numbers a second."""
VIEWS = 4
"""Number of views that a run may have without a cause."""
VIEWS_PER_CAUSE = 2
"""Number of further views for each cause."""
_WATCH_S = 0.25


class Progress:
    """Counters of a job's reserved numbers, slots and views, with the limits that they must not exceed.

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
        """Most numbers that were taken between two slots."""

    def struck(self, troubles: int = 1, causes: int = 1) -> None:
        """Counts faults and other events, each of which may cause a view or two."""
        self._troubles += troubles
        self._causes += causes

    def committed(self) -> None:
        """Counts a slot when the first member commits it."""
        self._numbers = self._troubles = 0
        self._since = self._world.kernel.now

    def wrote(self, entry: Persist) -> None:
        """Counts an entry that was written to the store, and checks the limits."""
        if entry.kind not in ("reserve", "view"):
            return
        world = self._world
        views = world.store.views
        self._causes += entry.kind == "view" and _divides_anew(views[-2:])  # measured times are a cause, too
        if len(views) > VIEWS + VIEWS_PER_CAUSE * self._causes:
            raise Violation(
                f"view {entry.number} is the {len(views)}th though only {self._causes} things have happened (31)"
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

    def explained(self, may_link: Callable[[Endpoint, Endpoint], bool]) -> bool:
        """Returns whether a job that did not end had a reason to stop, which its members know.

        Args:
            may_link: Whether the network and everybody's wishes allow a link (`edges.Edges.may_link`).
        """
        world = self._world
        here = [n for n in world.nodes.values() if n.alive and not n.frozen and not n.outcome]
        if not here or world.scheduler.finished or not world.scheduler.alive:
            return False
        holders = {n.name for n in here if n.training}
        links = frozenset(pair(a.name, b.name) for a in here for b in here if a is not b and may_link(a, b))
        groups = [g for g in components([n.name for n in here], links) if not holders or holders & set(g)]
        least = max(world.settings.min_nodes, world.program.needed)
        enough = any(len(group) >= least for group in groups) and least <= world.settings.max_nodes
        return not enough and all(n.machine.notice for n in here)


def _divides_anew(views: Sequence[View]) -> bool:
    """Returns whether the last of these views gives the members of the one before other shares of a batch."""
    return len(views) > 1 and views[-1].ids() == views[-2].ids() and views[-1].batch != views[-2].batch


class Patience:
    """Check that newcomers get in and leavers out in time, whatever happened before (liveness from states in mid-run).

    Args:
        world: The job; its plan says how long they may wait once the last fault is over (protocol.md 18, 2).
    """

    def __init__(self, world: Job) -> None:
        self._world = world
        self._calm_at = 0.0
        # A member that is silent for longer is dead, or is passed over: it excuses no other's waiting.
        self._longest_s = min(
            max((fault.lasts for fault in world.plan.faults), default=0.0), world.settings.hang_timeout_s
        )
        if world.plan.patience_s:
            world.kernel.after(_WATCH_S, self._look)

    def disturbed(self) -> None:
        """Notes that a fault happens now, which restarts the time limits."""
        self._calm_at = self._world.kernel.now + self._longest_s

    def _look(self) -> None:
        world = self._world
        now, scheduler = world.kernel.now, world.scheduler
        running = scheduler.alive and not scheduler.frozen and scheduler.machine.phase is SchedulerPhase.RUNNING
        for node in world.nodes.values() if running else ():
            if not node.alive or node.outcome or node.frozen:
                continue
            if node.leaving:
                self._must_go(node)
                continue
            if node.newcomer_since < 0:
                continue
            since = max(node.newcomer_since, self._calm_at, node.thawed_at)
            if node.machine.phase in (MemberPhase.WAITING, MemberPhase.LOADING) and now - since > world.plan.patience_s:
                peer = scheduler.machine.roster.peers.get(node.machine.member_id)
                raise Violation(
                    f"{node.machine.member_id} has been ready for {now - since:.1f} s and is not in; to the scheduler "
                    f"it is {peer}"
                )
        world.kernel.after(_WATCH_S, self._look)

    def _must_go(self, node: Endpoint) -> None:
        """Raises Violation if a leaver has waited for too long, unless it is the last member."""
        world, view = self._world, node.machine.view
        waited_s = world.kernel.now - max(node.asked_at, self._calm_at, node.thawed_at)
        alone = view is None or len(view.members) == 1
        if node.machine.phase is MemberPhase.ACTIVE and not alone and waited_s > world.plan.patience_s:
            raise Violation(f"{node.machine.member_id} asked to leave {waited_s:.1f} s ago, and is not let go (2)")
