"""Plans for losses that have not happened: of any 1 to k devices, and of any one host.

There is one for each way in which a loss can matter, which for devices of one kind is their number. Nothing here has a
clock: whoever has time left lets it prepare the next one, and asks what there is when devices are lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import fields, replace

from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.moves import renamed
from chaos_lightning.planning.pipelines.places import on_one_host
from chaos_lightning.planning.pipelines.planner import NoPlanError, PlannedPipelines, Planner

Composition = tuple[tuple[float, int], ...]
"""Kinds of the devices of a host, sorted."""
Left = tuple[Composition, ...] | frozenset[tuple[str, tuple[float, int]]]
"""Key of a prepared plan: the hosts that are left, by their devices; with links of their own, the very devices."""


class Prepared:
    """Plans for losses that have not happened.

    Args:
        job: The job and its whole fleet.
        losses: Plans are prepared for the loss of any 1 to so many devices, and of any one host.
        most: Plans that are kept at most; those for the largest losses are left out.
    """

    def __init__(self, job: TrainingJob, losses: int = 8, most: int = 64) -> None:
        self.planner, self.losses, self.most = Planner(job), losses, most
        self._plans: dict[Left, PlannedPipelines | NoPlanError] = {}

    def fleet(self, job: TrainingJob) -> None:
        """Devices came or went: plans for what can no longer be left soon are dropped; all, if anything else is new."""
        others = [f.name for f in fields(TrainingJob) if f.name != "devices"]
        if any(getattr(job, name) != getattr(self.planner.job, name) for name in others):
            self._plans = {}
        self.planner = Planner(job)
        wanted = [key for key, _ in self._wanted()]
        self._plans = {key: self._plans[key] for key in wanted if key in self._plans}

    def prepare_next(self) -> int | None:
        """Prepares the most urgent plan that is missing.

        Returns:
            How many devices would be left; None: all plans are there.
        """
        for key, names in self._wanted():
            if key not in self._plans:
                try:
                    self._plans[key] = self.planner.exact(names)
                except NoPlanError as error:
                    self._plans[key] = error
                return len(names)
        return None

    def after(self, lost: Collection[str]) -> tuple[PlannedPipelines, bool]:
        """The plan after a loss.

        Args:
            lost: Names of devices; those that are not there do not count.

        Returns:
            The plan, and whether it was prepared (the best one) or made now (a good one).

        Raises:
            NoPlanError: None fits what is left.
        """
        names = [n for n in sorted(self.planner.job.by_name) if n not in set(lost)]
        if not names:
            raise NoPlanError(f"no device is left of {len(self.planner.job.devices)}; expected one at least")
        found = self._plans.get(self._key(names))
        if isinstance(found, NoPlanError):
            raise found
        if found is None:
            return self.planner.first(names), False
        return self._onto(found, names), True

    def _hosts(self, names: Collection[str]) -> list[tuple[Composition, list[str]]]:
        """By host, the largest first: what is on it, and its devices in the order of their kinds."""
        by_name = self.planner.job.by_name
        hosts: dict[str, list[str]] = defaultdict(list)
        for n in sorted(names, key=lambda n: (by_name[n].kind, n)):
            hosts[by_name[n].place].append(n)
        rows = [(tuple(by_name[n].kind for n in found), found) for found in hosts.values()]
        return sorted(rows, key=lambda row: (-len(row[0]), row))

    def _key(self, names: Collection[str]) -> Left:
        if self.planner.job.links:
            return frozenset((n, self.planner.job.by_name[n].kind) for n in names)
        return tuple(composition for composition, _ in self._hosts(names))

    def _wanted(self) -> Iterator[tuple[Left, tuple[str, ...]]]:
        """Yields what may be left, the smallest losses first, with one host's after single devices'."""
        there = tuple(sorted(self.planner.job.by_name))
        seen = {self._key(there)}
        level, found = [there], 0
        for k in range(self.losses):
            fewer = []
            for names in level:
                for left in self._less_one(names):
                    key = self._key(left) if left else None
                    if key is not None and key not in seen and found < self.most:
                        seen.add(key)
                        found += 1
                        fewer.append(left)
                        yield key, left
            if k == 0:
                for _, host in self._hosts(there):
                    left = tuple(n for n in there if n not in host)
                    key = self._key(left) if left else None
                    if key is not None and key not in seen and found < self.most:
                        seen.add(key)
                        found += 1
                        yield key, left
            level = fewer

    def _less_one(self, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Without one device, once for each way in which that makes a difference."""
        by_name, seen = self.planner.job.by_name, set()
        for composition, host in self._hosts(names):
            for n in reversed(host):
                way = n if self.planner.job.links else (composition, by_name[n].kind)
                if way not in seen:
                    seen.add(way)
                    yield tuple(x for x in names if x != n)

    def _onto(self, planned: PlannedPipelines, names: Collection[str]) -> PlannedPipelines:
        """The same plan on hosts that have the same devices on them."""
        job = self.planner.job
        old, new = self._hosts(planned.plan.devices), self._hosts(names)
        pairs = zip((n for _, host in old for n in host), (n for _, host in new for n in host), strict=True)
        seats = dict(pairs)
        if all(a == b for a, b in seats.items()):
            return planned
        there = job.with_devices([job.by_name[n] for n in sorted(names)])
        plan = renamed(planned.plan, seats)
        hosts = {group.start: host for group, host in on_one_host(there, plan)}
        fates = tuple(replace(f, host=hosts.get(f.first, f.host)) for f in planned.shared_fate)
        return replace(planned, plan=plan, estimate=estimate(there, plan), shared_fate=fates)
