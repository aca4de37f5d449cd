"""Simulated job with pipelines in one process: loaders of steps, and commits that only merge ledgers."""

from __future__ import annotations

from dataclasses import replace

from elastic_job import Job, Source

from chaos_lightning.data.steps import StepLoader
from chaos_lightning.protocol.types import Member


class StepJob(Job):
    """Simulated job in which each member has a StepLoader; two members run each micro-batch, its first and its last
    layers.
    """

    def __init__(self, make, names, *, micro_batches, micro_batch=0, seed=5, least=1):
        self.micro_batches, self.micro_batch = micro_batches, micro_batch
        super().__init__(make, names, seed=seed, least=least)

    def enter(self, name: str) -> Member:
        self.born += 1
        member = Member(f"{name}~{self.born}", name, "h", "", 0)
        loader = StepLoader(
            self.make(name),
            seed=self.seed,
            source=Source(self, member.id, name),
            micro_batches=self.micro_batches,
            micro_batch=self.micro_batch,
            least=self.least,
        )
        self.loaders[member.id] = loader
        return replace(member, quota=loader.quota)

    def route(self, j: int) -> tuple[str, str]:
        """Returns the members that run the first and the last layers of micro-batch `j`."""
        ids = [member.id for member in self.members]
        return ids[j % len(ids)], ids[(j + 1) % len(ids)]

    def begin(self, member_id: str):
        """Returns a member's next step; None if the epoch is over."""
        if member_id not in self.passes:
            self.passes[member_id] = iter(self.loaders[member_id])
        return next(self.passes[member_id], None)

    def run(self, steps, *, until: int | None = None) -> dict[int, list[int]]:
        """Runs an attempt at a step: each member fetches the micro-batches that it needs, and overwrites them. Returns
        the samples of each micro-batch.

        `until`: the attempt ends before this micro-batch.
        """
        any_step = next(iter(steps.values()))
        numbers = [j for j in range(self.micro_batches) if j not in any_step.empty]
        for member in self.members:
            steps[member.id].expect(j for j in numbers if member.id in self.route(j))
        seen: dict[int, list[int]] = {}
        for j in numbers[:until]:
            for member_id in self.route(j):
                batch = steps[member_id].batch(j)
                samples = batch.tolist()
                assert seen.setdefault(j, samples) == samples, "two stages saw different samples"
                batch.fill_(-1)  # a training step may change its batch
        return seen

    def step(self, *, dead=(), until=None) -> bool:
        """Makes one step with all members; returns False if their epoch is over. Members with indices `dead` die in its
        first attempt.
        """
        victims = {self.members[i % len(self.members)].id for i in dead}
        steps = {m.id: self.begin(m.id) for m in self.members}
        over = [step is None for step in steps.values()]
        assert all(over) == any(over), "members disagree about the epoch's end"
        assert len({len(self.loaders[m.id]) for m in self.members}) == 1
        if all(over):
            return False
        assert len({(step.positions, step.samples, step.index, step.empty) for step in steps.values()}) == 1
        if victims and len(victims) < len(self.members):
            self.run(steps, until=until)
            self.put_out(victims)
        seen = self.run(steps)
        spent = []
        for j, samples in seen.items():
            first, last = self.route(j)
            spent += steps[first].spent(j)
            assert steps[last].weight(j) == len(samples)
            self.used += samples
        self.commit(spent=spent)
        assert all(self.loaders[m.id].at_safe_point for m in self.members)
        return True
