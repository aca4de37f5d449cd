"""Replaces the engine without a network: one member, whose slots commit at once. For tests that concern Lightning
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.errors import DepartedError, FencedError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.keeping import LoadedCheckpoint
from chaos_lightning.member.losses import Losses
from chaos_lightning.planning import ledger
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    DriftedPart,
    Header,
    Kind,
    Member,
    Spent,
    View,
    ViewId,
    equal_shares,
)
from chaos_lightning.replication.manifest import decode_manifest, encode_manifest
from chaos_lightning.settings import EngineConfig


class EngineDouble:
    """Engine's interface for a single member; `made` lists all instances of a test."""

    made: ClassVar[list[EngineDouble]] = []
    setting: ClassVar[dict[str, Any]] = {}
    """Attributes that every new instance gets."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.name = config.name
        self.view: View | None = None
        self.ruling_view: View | None = None
        self.contributors: tuple[str, ...] = ()
        self.founders: tuple[str, ...] = ()
        self.header = GENESIS
        self.role, self.saved_by, self.noticed = "", "the others save", ""
        self.leaving = self.out = self.closed = self.resumed = False
        self.kept: list[int] = []
        self.log: list[Header] = []
        self.fence_at = -1
        self.rejoined = 0
        self.events = EventLog(None)
        self.losses = Losses(self.events)
        self.boundary_at = self.drift_at = -1
        self.depart_at, self.departs_armed = -1, False
        """Number of slots after which this member is released: no later one commits; whether `arm` says so."""
        self.steps: list[dict[str, Any]] = []
        self.member_id = ""
        for name, value in EngineDouble.setting.items():
            setattr(self, name, value)
        EngineDouble.made.append(self)

    @property
    def rank(self) -> int:
        return 0 if self.view is not None else -1

    @property
    def world_size(self) -> int:
        return 1

    @property
    def accumulation(self) -> Any:
        raise AssertionError("the double divides no batch")

    @property
    def sending(self) -> bool:
        return False

    def prepare(
        self, *, sections: Sequence[Section], buffers: Sequence[tuple[str, Tensor]] = (), part_of: None = None
    ) -> None:
        assert part_of is None, "the double runs no pipelines"
        self.layout = Layout(sections, buffers)

    def join(
        self,
        *,
        fingerprint: Mapping[str, str],
        quota: int,
        accumulate: int,
        state: Any,
        replay: Any = None,
        loaded: LoadedCheckpoint | None = None,
        pipelines: str = "",
        batch: str = "",
    ) -> Header:
        assert not pipelines, "the double runs no pipelines"
        assert not batch, "the double divides no batch"
        self.fingerprint, self.state, self.loaded = dict(fingerprint), state, loaded
        self.member_id = f"{self.name}~{len(self.log)}"
        me = Member(self.member_id, self.name, "here", "127.0.0.1", 1, quota=quota)
        self.view = self.ruling_view = View(ViewId(1, 1), NO_VIEW, (me,), accumulate=accumulate)
        self.role, self.founders = "founder", (self.member_id,)
        self._keep(state)
        return self.header

    def _keep(self, state: Any) -> None:
        """Keeps a copy of the state at the beginning, which a fenced member gets back when it joins again."""
        encoded = encode_manifest(state.manifest(), state.tensors())
        self._tensors = [(n, t.detach().clone()) for n, t in (*state.tensors(), *encoded.tensors)]
        self._manifest = encoded.data

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        yield

    def arm(self, *, coefficient: float, section: int = 0, empty: bool = False) -> None:
        if self.departs_armed and self.depart_at == len(self.log):
            raise DepartedError("the test said so")
        self.armed = (coefficient, section, empty)

    def step(self, *, weight: float, coefficient: float, spent: Sequence[Spent] = (), section: int = 0, hyper: str = "",
             order: str = "", state_hash: str = "", yields: bool = False, payload: bytes = b"") -> Header:  # fmt: skip
        for _, param in self.layout_params(section):
            if not weight:
                param.grad = None  # nobody had a sample, so there is no average
            elif param.grad is not None:
                param.grad.mul_(coefficient / weight)
        self.steps.append({"weight": weight, "coefficient": coefficient, "section": section, "spent": tuple(spent),
                           "hyper": hyper, "order": order, "state_hash": state_hash})  # fmt: skip
        answers = (payload,) if payload else ()
        return self._commit(Kind.STEP, f"section {section}", weight, spent=spent, answers=answers)

    def layout_params(self, section: int) -> list[tuple[str, Tensor]]:
        return [(self.layout.slots[i].name, self.layout.slots[i].tensor) for i in self.layout.section_slots[section]]

    def gather(
        self, name: str, payload: bytes, *, yields: bool = False, lets_go: bool = False, line: str = ""
    ) -> list[tuple[str, bytes]]:
        self._commit(Kind.GATHER, name, 0.0, answers=(payload,))
        return [(self.member_id, payload)]

    def serve(self, state: Any) -> None:
        pass

    def boundary(self, state: Any) -> Header:
        return self._commit(Kind.BOUNDARY, "boundary", 0.0)

    def _commit(self, kind: Kind, name: str, weight: float, spent: Sequence[Spent] = (), answers: Any = ()) -> Header:
        assert self.view is not None
        if len(self.log) == self.depart_at:
            self.leaving = True
            raise DepartedError("the test said so")
        if len(self.log) == self.fence_at:
            self.fence_at = -1
            raise FencedError("the test said so")
        before = self.header
        self.header = Header(
            seq=before.seq + 1,
            kind=kind,
            step=before.step + (kind == Kind.STEP),
            view=self.view.id,
            prev_hash=before.hash,
            next_view=self.view.id,
            name=name,
            shares=equal_shares([(weight, weight)]),
            ledger=ledger.merge(before.ledger, spent),
            answers=answers,
            boundary=kind is not Kind.BOUNDARY and (before.boundary or before.seq + 1 == self.boundary_at),
            drifted=(DriftedPart(self.member_id, 0),) if before.seq + 1 == self.drift_at and not self.rejoined else (),
        )
        self.contributors = (self.member_id,)
        self.log.append(self.header)
        return self.header

    def leave(self, reason: str) -> None:
        self.leaving = True

    def heed(self, signal_name: str) -> None:
        self.leave(f"signal {signal_name}")

    def may_go(self) -> bool:
        return True

    def keep(
        self, state: Any, checkpoints: Sequence[str] = (), *, counted: int | None = None, stuck: bool = False
    ) -> None:
        if self.role and not self.out:
            self.kept.append(self.header.step)

    def finish(self, state: Any = None, meanwhile: Any = None) -> None:
        self._commit(Kind.CLOSING, "closing", 0.0)

    def wait_released(self, timeout_s: float = 10.0) -> None:
        pass

    def rejoin(self, state: Any) -> Header:
        assert self.view is not None
        self.member_id += "'"
        me = self.view.members[0]
        again = Member(self.member_id, me.name, me.host, me.address, me.port, quota=me.quota)
        number = ViewId(1, self.view.id.number + 1)
        self.view = self.ruling_view = View(number, NO_VIEW, (again,), accumulate=self.view.accumulate)
        self.header, self.role, self.founders = GENESIS, "joiner", ()
        manifest = decode_manifest(self._manifest, dict(self._tensors))
        state.prepare(manifest, None)
        kept = dict(self._tensors)
        with torch.no_grad():
            for name, tensor in state.tensors():
                tensor.copy_(kept[name])
        state.adopt(manifest)
        self.rejoined += 1
        return self.header

    def close(self) -> None:
        self.closed = True
