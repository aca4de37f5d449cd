"""Simulated job in one process for tests of data: real loaders, and commits that only merge ledgers and change
views.
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.data import ElasticLoader
from chaos_lightning.planning.assignment import ruling_view
from chaos_lightning.planning.ledger import merge
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Member, View, ViewId


class Source:
    """Facts about the simulated job, as one member's loader asks for them."""

    def __init__(self, job: Job, member_id: str, name: str) -> None:
        self.job, self.member_id, self.name = job, member_id, name

    @property
    def header(self) -> Header:
        return self.job.header

    @property
    def view(self) -> View | None:
        return self.job.views[-1] if self.job.views else None

    @property
    def ruling_view(self) -> View | None:
        known = [v for v in self.job.views if v.find(self.member_id) is not None]
        return ruling_view(self.job.header, known)


class Job:
    """Simulated job; each member has an ElasticLoader around the loader that `make` returns for its name."""

    def __init__(self, make, names, *, mode="shared", accumulate=1, seed=5, least=1):
        self.least = least
        self.make, self.mode, self.seed, self.accumulate = make, mode, seed, accumulate
        self.header: Header = GENESIS
        self.views: list[View] = []
        self.loaders: dict[str, ElasticLoader] = {}
        self.passes: dict[str, object] = {}
        self.born = 0
        self.used: list[tuple[str, object]] = []
        """(stream, sample) of committed steps in this epoch."""
        self.change([self.enter(name) for name in names])

    # members

    def enter(self, name: str) -> Member:
        self.born += 1
        member = Member(f"{name}~{self.born}", name, "h", "", 0)
        source = Source(self, member.id, name)
        loader = ElasticLoader(self.make(name), mode=self.mode, seed=self.seed, source=source, least=self.least)
        self.loaders[member.id] = loader
        return replace(member, quota=loader.quota)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.views[-1].members if self.views else ()

    def change(self, members) -> None:
        before = self.views[-1].id if self.views else NO_VIEW
        number = ViewId(1, len(self.views) + 1)
        self.views.append(View(number, before, tuple(members), accumulate=self.accumulate))

    def put_out(self, ids) -> None:
        self.change([m for m in self.members if m.id not in ids])
        for gone in ids:
            self.loaders.pop(gone).close()
            self.passes.pop(gone, None)

    # slots

    def commit(self, kind=Kind.STEP, spent=()):
        self.header = Header(
            seq=self.header.seq + 1,
            kind=kind,
            step=self.header.step + (kind is Kind.STEP),
            view=self.views[-1].id,
            prev_hash=self.header.hash,
            next_view=self.views[-1].id,
            ledger=merge(self.header.ledger, spent),
        )

    def join(self, name: str) -> str:
        """Admits a newcomer at a boundary, with a donor's loader state; returns its id."""
        donor = self.loaders[self.members[0].id]
        member = self.enter(name)
        self.change([*self.members, member])
        self.commit(Kind.BOUNDARY)
        self.loaders[member.id].load_state_dict(donor.state_dict())
        return member.id

    def draw(self, member_id: str):
        """Returns one member's next accumulation as a list of (MicroBatch, batch); None if its epoch is over."""
        loader = self.loaders[member_id]
        if member_id not in self.passes:
            self.passes[member_id] = iter(loader)
        it = self.passes[member_id]
        accumulation = []
        for i in range(self.accumulate):
            try:
                batch = next(it)
            except StopIteration:
                assert i == 0, "an epoch ends between accumulations"
                return None
            current = loader.current
            assert (current.first, current.last) == (i == 0, i == self.accumulate - 1)
            accumulation.append((current, batch))
        return accumulation

    def step(self, *, dead=(), late=False, unpack=lambda batch: batch.tolist(), gather=False, meanwhile=None) -> bool:
        """Makes one step with all members; returns False if their epoch is over.

        `dead` (indices) die in it: after their contribution (`late`), else while the others begin their accumulations,
        some before and some after the new view is decided. `meanwhile` may change the view likewise.
        """
        victims = {self.members[i % len(self.members)].id for i in dead}
        if len(victims) == len(self.members):
            victims = set()
        early = self.members[: (len(self.members) + 1) // 2]
        accumulations = {m.id: self.draw(m.id) for m in early}
        if accumulations[early[0].id] is not None:
            if victims and not late:
                self.put_out(victims)
                accumulations = {m: accumulation for m, accumulation in accumulations.items() if m not in victims}
            if meanwhile is not None:
                meanwhile()
        accumulations |= {m.id: self.draw(m.id) for m in self.members if m.id not in accumulations}
        over = [accumulation is None for accumulation in accumulations.values()]
        assert all(over) == any(over), f"members disagree about the epoch's end: {accumulations}"
        lengths = {len(self.loaders[m.id]) for m in self.members if self.mode == "shared"}
        assert len(lengths) <= 1, f"members disagree about the length: {lengths}"
        if all(over):
            return False
        if gather:  # Lightning's collectives commit slots between an accumulation's first batch and its step
            self.commit(Kind.GATHER)
        spent = []
        for member in accumulations:
            if member not in self.loaders:
                continue
            spent += self.loaders[member].spent()
            stream = "" if self.mode == "shared" else member.split("~")[0]
            for current, batch in accumulations[member]:
                assert current.idle == (current.samples == 0) == (not current.spans)
                if not current.idle:
                    samples = unpack(batch)
                    assert len(samples) == current.samples
                    self.used += [(stream, sample) for sample in samples]
        self.commit(spent=spent)
        for m in self.members:
            assert self.loaders[m.id].spent() == () if m.id in accumulations else True
        if victims and late:
            self.put_out(victims)
        return True

    def new_epoch(self) -> list[tuple[str, object]]:
        used, self.used = self.used, []
        self.passes.clear()
        return used

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()
