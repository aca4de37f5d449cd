"""Makes Lightning's DDP ranks one cluster: rank 0 is its member of the outer job, the other ranks follow rank 0.

Theory of operation. Ranks of DDP hold equal parameters after each optimizer step. So one session is enough
(outer/cluster/session.py): rank 0 has it, and `RankedSession` has its interface at every rank. Where something may
happen all ranks *meet*: rank 0 does it and tells the outcome over a process group of their own, on the CPU, so that no
device waits. If a version was adopted, its tensors follow by the group of the gradients, and all ranks hold rank 0's
bits.

All ranks must take the same branches. So what a session is asked between two meetings (how far the job is, whether the
cluster is to go on) is answered by every rank from what was told at the last one, never from what rank 0 knows by now.

Most steps bring nothing, and a meeting takes about a millisecond. So rank 0 says at each one how many steps go by
until the next: until the next push is due, or for about `MEET_S` of training. Positions of shared data are claimed for
as long ahead. What a rank is asked by a signal goes up with the next meeting.

What rank 0 cannot do (the server refuses the cluster, a wait was too long) all ranks raise. A rank that dies ends the
group, as with DDP alone: its peers' collectives fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chaos_lightning.errors import ChaosError
from chaos_lightning.outer.cluster.cluster_effects import Boundary
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.session import OuterSession
from chaos_lightning.outer.rules.cluster import reckon
from chaos_lightning.outer.rules.types import NO_VERSION, Covered, JobProgress, VersionId
from chaos_lightning.planning.batches import Batches
from chaos_lightning.protocol.spans import count, first_positions, subtract

MEET_S = 0.1
"""Seconds of training between two meetings of ranks, about; a meeting of two took 1 ms on a busy machine."""
_BUCKET = 64 << 20
"""Bytes of a version that are sent at once."""


class RankGroup:
    """Process group of the cluster's ranks, on the CPU, by which rank 0 gives the others what it knows.

    Args:
        rank: Rank of this process.
        timeout: Longest time that rank 0 may be silent.
    """

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def tell(self, make: Callable[[], Any]) -> Any:
        """Returns at all ranks the value that `make` returns at rank 0.

        Raises:
            ChaosError: Rank 0 could not make it; the same error at all ranks.
        """
        said: list[Any] = [None, None]
        if self.rank == 0:
            try:
                said[0] = make()
            except ChaosError as error:
                said[1] = error
        dist.broadcast_object_list(said, 0, group=self._group)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def sum(self, *numbers: int) -> list[int]:
        """Returns these numbers, each summed over all ranks."""
        summed = torch.tensor(numbers)
        dist.all_reduce(summed, group=self._group)
        return summed.tolist()  # type: ignore[no-any-return]

    @staticmethod
    @torch.no_grad()
    def share(tensors: Sequence[Tensor]) -> None:
        """Sets the tensors of all ranks to rank 0's, bit for bit."""
        whole = dist.group.WORLD
        assert whole is not None
        dist._broadcast_coalesced(whole, [t.detach() for t in tensors], _BUCKET, 0)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts about the cluster that all ranks know until their next meeting.

    Attributes:
        job: Progress of the job with the base.
        ahead: Samples and inner steps that the base does not hold.
        steps: Steps from one push to the next: as usual, and as the leader paces this cluster.
        meet_in: Number of steps until the next meeting.
    """

    incarnation: str = ""
    base: VersionId = NO_VERSION
    job: JobProgress = field(default_factory=JobProgress)
    ahead: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (1, 1)
    oldest: bool = True
    leaving: bool = False
    ending: bool = False
    over: str = ""
    waits_for: str = ""
    meet_in: int = 1


@dataclass(slots=True)
class _Untold:
    """Training since the last meeting, not yet reported. If each rank has data of its own, `samples` counts this
    rank's.
    """

    samples: int = 0
    covers: tuple[Covered, ...] = ()
    steps: int = 0
    loss: float | None = None


class RankedSession:
    """Session of one rank of a cluster, with the interface of `OuterSession`. Only the training thread calls it, except
    `leave` and `close`.

    Args:
        member: Rank 0's session; None at the other ranks.
        replica: Tensors of the model that travel.
        group: Process group of the ranks.
        batches: Tells how many positions of the shared data these ranks train at once; None: the cluster has its own
            data. With shared data all ranks count the same samples.

    Attributes:
        member: Rank 0's session, as given.
    """

    def __init__(
        self, member: OuterSession | None, replica: Replica, group: RankGroup, batches: Batches | None
    ) -> None:
        self.member = member
        self._replica, self._group, self._batches = replica, group, batches
        self._facts = ClusterFacts()
        self._untold = _Untold()
        self._claimed: list[Covered] = []
        """Positions that were claimed ahead of what the loader has asked for."""
        self._asked = False
        self._own: list[Tensor] | None = None

    # ------------------------------------------------------------------ as told last

    @property
    def incarnation(self) -> str:
        """Name of this cluster's present incarnation."""
        return self._facts.incarnation

    @property
    def base(self) -> VersionId:
        """Version that was adopted last."""
        return self._facts.base

    @property
    def progress(self) -> JobProgress:
        """Progress of the outer job at the version adopted last."""
        return self._facts.job

    @property
    def reckoned(self) -> JobProgress:
        """Progress of the outer job now, as this cluster estimates it from the version adopted last and its own
        steps.
        """
        told, untold = self._facts, self._untold
        samples = untold.samples * (1 if self._batches else dist.get_world_size())
        return reckon(told.job, told.ahead[0] + samples, told.ahead[1] + untold.steps, *told.steps)

    @property
    def job_id(self) -> str:
        """Id of the outer job, unique among all jobs, at rank 0; "" at the other ranks, which write nothing."""
        return self.member.job_id if self.member is not None else ""

    @property
    def oldest(self) -> bool:
        """Whether this cluster is the oldest one in the job."""
        return self._facts.oldest

    @property
    def leaving(self) -> bool:
        """Whether this cluster was asked to leave, and all ranks know."""
        return self._facts.leaving

    @property
    def ending(self) -> bool:
        """Whether this cluster is to stop training."""
        return self._facts.ending

    @property
    def over(self) -> str:
        """Reason why this cluster's part in the job is over; "" while it goes on."""
        return self._facts.over

    def waits_for(self) -> str:
        """Name of the event for which this cluster waits before it trains on."""
        return self._facts.waits_for

    @property
    def at_risk(self) -> int:
        """Number of inner steps of this cluster that no durable version holds, as far as this rank knows."""
        return self.member.at_risk if self.member is not None else self._untold.steps

    # ------------------------------------------------------------------ meetings

    def start(self, timeout_s: float) -> None:
        """Founds the job with the parameters, or sets them in place to the job's newest version.

        Raises:
            ChaosError: `OuterSession.start` failed at rank 0.
        """
        self._meet(lambda member: _nothing(member.start(timeout_s)))
        self._share()

    def boundary(
        self, samples: int, covers: Sequence[Covered] = (), steps: int = 1, loss: float | None = None
    ) -> Boundary:
        """Counts an inner step, or none if the cluster waits; all ranks meet if a meeting is due."""
        untold = self._untold
        untold.samples, untold.steps = untold.samples + samples, untold.steps + steps
        untold.covers = (*untold.covers, *covers)
        untold.loss = loss if loss is not None else untold.loss
        if steps and untold.steps < self._facts.meet_in:
            return Boundary()
        return self._tell_steps()

    def _tell_steps(self) -> Boundary:
        untold, self._untold = self._untold, _Untold()
        own = untold.samples if not self._batches or self.member is not None else 0
        samples, asked = self._group.sum(own, int(self._asked))

        def step(member: OuterSession) -> Boundary:
            if asked:
                member.leave()
            return member.boundary(samples, untold.covers, untold.steps, untold.loss)

        found: Boundary = self._meet(step)
        if found.outright:
            self._claimed.clear()
        if found.adopted is None:
            return found
        began = time.monotonic()
        self._share()
        shared_s = time.monotonic() - began
        if self.member is not None:
            self.member.waited(shared_s)
        return replace(found, waited_s=found.waited_s + shared_s)

    def _meet(self, act: Callable[[OuterSession], Any]) -> Any:
        def make() -> tuple[Any, ClusterFacts]:
            member = self.member
            assert member is not None, "rank 0 has the session"
            return act(member), _facts_of(member)

        found, self._facts = self._group.tell(make)
        return found

    def _share(self) -> None:
        self._group.share(self._replica.tensors)

    def claim(self, positions: int) -> tuple[Covered, ...]:
        """Returns the positions of the shared data that the cluster, all ranks together, trains next."""
        if not self._claimed:
            ahead = positions * max(1, self._facts.meet_in)
            self._claimed = list(self._meet(lambda member: member.claim(ahead)))
        if not self._claimed:
            return ()
        found = self._claimed[0]
        assert self._batches is not None, "clusters share the data"
        taken = first_positions(found.spans, self._batches.next(positions, count(found.spans)))
        if not taken:
            return ()
        left = subtract(found.spans, taken)
        self._claimed[:1] = [replace(found, spans=left)] if left else []
        return (Covered(found.epoch, taken),)

    def pause(self, timeout_s: float) -> None:
        """Waits for news from the job at rank 0. Other ranks return at once, and wait for rank 0 at the next
        meeting.
        """
        if self.member is not None:
            self.member.pause(timeout_s)

    # ------------------------------------------------------------------ what is judged

    def show_base(self) -> None:
        """Sets the model's parameters to the version adopted last at all ranks, until `show_own`."""
        if self._own is None:
            if self.member is not None:
                self.member.show_base()
            self._own = self._replica.copies() if self.member is None else []
            self._share()

    def show_own(self) -> None:
        """Sets the parameters back to the values that are trained. Idempotent."""
        own, self._own = self._own, None
        if own is not None and self.member is not None:
            self.member.show_own()
        elif own is not None:
            self._replica.restore(own)

    # ------------------------------------------------------------------ the end

    def finish(self, reason: str) -> None:
        """Finishes the cluster's part in the job, once the ranks' loops are over, as `OuterSession.finish` does."""
        if self._untold.steps:
            self._tell_steps()
        self._meet(lambda member: member.finish(reason))
        self._share()

    def leave(self) -> None:
        """Asks to leave the job. May be called in any thread; the ranks stop training together, after their next
        meeting.
        """
        self._asked = True
        if self.member is not None:
            self.member.leave()

    def close(self) -> None:
        """Ends this rank's threads and connections. Idempotent."""
        if self.member is not None:
            self.member.close()


def _nothing(_: object) -> None:
    """Returns None, in place of a result that the other ranks do not need."""


def _facts_of(member: OuterSession) -> ClusterFacts:
    return ClusterFacts(
        member.incarnation,
        member.base,
        member.progress,
        member.ahead,
        (member.usual_steps, member.inner_steps),
        member.oldest,
        member.leaving,
        member.ending,
        member.over,
        member.waits_for(),
        member.idle_steps(MEET_S),
    )
