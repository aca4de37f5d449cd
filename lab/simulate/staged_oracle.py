"""Checks jobs with pipelines: computes each step itself, with all parts of the state in one place, and compares.

Theory of operation. Whatever a member holds after a header must be what one process would hold that has all parts and
ran every micro-batch once, in the attempt that the header closed. So a sum that misses a micro-batch, has one twice, or
has a gradient of another attempt or another state shows at the first commit. So do norms of other parts than all, and
batches that a round of evaluation counts twice. Before slot 1 each view has a state of its own, made part by part by
the oldest owners in it (P14). What lies in files at one header counts as if it were held (P13).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.parts import division, numbers
from chaos_lightning.protocol.types import GENESIS, Header, Kept, Kind, ViewId
from lab.simulate.oracle import Oracle, Violation, positions_in
from lab.simulate.staged_training import (
    Parts,
    batch_of,
    clipping,
    norms,
    result_of,
    stepped,
    tensors_of,
    work_of,
)
from lab.simulate.training import Attempt

_Key = tuple[str, str]


class HoldsParts(Protocol):
    """Interface of a member's process for the oracle."""

    alive: bool
    frozen: bool
    outcome: str
    training: bool
    header: Header
    values: Parts
    machine: MemberMachine
    file: tuple[Kept, Parts, str] | None


@dataclass(slots=True)
class StagedOracle(Oracle):
    """Checker of a job with pipelines that sees the state of all processes."""

    truths: dict[_Key, Parts] = field(default_factory=dict)
    """Values of all parts, by lineage and header; of GENESIS by lineage and view."""
    pulls: int = 0
    """Number of parts that moved to another member."""
    members: list[HoldsParts] = field(default_factory=list)
    """Processes of all members."""

    def _key(self, lineage: str, header: Header, view: ViewId) -> _Key:
        return (lineage, header.hash) if header.seq > GENESIS.seq else (lineage, f"{GENESIS.hash} in {view}")

    def makes(self, lineage: str, view: ViewId, made: Mapping[int, int]) -> None:
        """Checks parts of the state that their first owner made before slot 1: none is made twice with different values
        (P14).
        """
        truth = self.truths.setdefault(self._key(lineage, GENESIS, view), {})
        for part, value in made.items():
            if truth.setdefault(part, value) != value:
                raise Violation(f"part {part} of view {view} is made twice (P14)")

    def resumed(self, lineage: str, header: Header) -> None:
        """Notes the state on which the job is founded: that which files contain at the header before this one (P13)."""
        key = (lineage, header.hash)
        self.truths[key], self.headers[key] = self.truths[lineage, header.prev_hash], header

    def begins_anew(self) -> None:
        """Checks that a job is founded anew only if members died before they left in good order, and files lack some
        part (P13).
        """
        files = [m.file[0] for m in self.members if m.file is not None]
        whole = any(self._filed(k.header.prev_hash) >= self.every for k in files)
        if whole or (files and not any(m.outcome == "killed" for m in self.members)):
            where = sorted({f"{k.member}: {k.parts} at slot {k.header.seq - 1}" for k in files})
            raise Violation(f"the job begins again from nothing, and this was written down: {where} (P13)")

    def _filed(self, head: str) -> set[int]:
        """Returns the parts of the state that files contain at this header."""
        files = [m.file[0] for m in self.members if m.file is not None]
        return {p for k in files if k.header.prev_hash == head for p in numbers(k.parts)}

    @property
    def every(self) -> set[int]:
        """Numbers of all parts of the state."""
        return set(range(self.program.rest + 1))

    def put_out(self, who: str, member: HoldsParts) -> None:
        """Checks that no part of the state is lost when a living member is put out (P6).

        At GENESIS owners make their parts, so nothing is lost for those that stand there (P14).
        """
        here = [m for m in self.members if m.alive and not m.outcome and m.training and m is not member]
        over = any(m.header.kind is Kind.CLOSING for m in here) or all(m.header.seq == GENESIS.seq for m in here)
        if member.header.seq == GENESIS.seq or over:
            return
        before = [*here, member]
        if any(self._held(m.header, before) >= self.every for m in before) and not self._whole(here):
            raise Violation(f"{who} is out, and the others do not hold all parts of the state without it (P6)")

    def _whole(self, here: list[HoldsParts]) -> bool:
        """Returns whether these members and the files together hold all parts at some header."""
        return any(self._held(m.header, here) | self._filed(m.header.hash) >= self.every for m in here)

    def pulled(self, who: str, lineage: str, header: Header, view: ViewId, values: Mapping[int, int]) -> None:
        """Checks the parts that a member reports to have pulled (P8)."""
        self.joins += 1
        self.pulls += len(values)
        self._compare(f"{who} pulled", lineage, header, view, values)

    def _compare(self, what: str, lineage: str, header: Header, view: ViewId, values: Mapping[int, int]) -> None:
        truth = self.truths[self._key(lineage, header, view)]
        if wrong := sorted(p for p, value in values.items() if truth.get(p) != value):
            raise Violation(f"{what} parts {wrong} at slot {header.seq} ({header.hash}), and they are others' (P8)")

    def applied(
        self,
        who: str,
        lineage: str,
        before: Header,
        header: Header,
        contributors: tuple[str, ...],
        values: Mapping[int, int],
    ) -> None:
        """Checks a commit: `who` has applied `header`, and holds these parts of the state now."""
        self.commits += 1
        if header.prev_hash != before.hash:
            raise Violation(f"{who} stands on {before.hash}, yet applied a header that is on {header.prev_hash} (4a)")
        if header.error:
            raise Violation(f"slot {header.seq} is refused: {header.error} (P3)")
        key = (lineage, header.hash)
        if key not in self.truths:
            self.truths[key] = self._next(lineage, before, header)
            self.headers[key], self.contributors[header.hash] = header, contributors
            if header.contributors != len(contributors):
                raise Violation(f"slot {header.seq} has shares of {header.contributors}, not of {contributors} (1)")
            if header.seq > self.furthest.get(lineage, 0):
                self.furthest[lineage] = header.seq
                self.on_slot()
            if header.kind is Kind.GATHER:
                self._check_votes(header)
        self._compare(f"{who} committed", lineage, header, header.view, values)

    def lost(self) -> bool:
        """Returns whether the living members hold all parts at no header, not even after a hand-on, and know that (P5,
        P14).
        """
        here = [m for m in self.members if m.alive and not m.outcome and m.training]
        if not here or any(m.header.seq == GENESIS.seq for m in here):
            return False
        return not self._whole(here) and all(m.machine.notice for m in here)

    def passed_over(self, who: str, header: Header) -> None:
        """Checks that a member at this header is put out only if no answering member holds some part of the state there
        (P5).

        Nothing is lost where its side of a split goes on from GENESIS, for owners make their parts there (P14).
        """
        here = [m for m in self.members if m.alive and not m.frozen and not m.outcome and m.training]
        if header.prev_hash == GENESIS.hash and any(m.header.seq == GENESIS.seq for m in here):
            return
        if self._held(header, here) >= self.every:
            raise Violation(
                f"{who} is out though all parts at its slot {header.seq} are held by members that live (P5)"
            )

    def goes_without(self, who: str, member: HoldsParts) -> None:
        """Checks that a member is released because parts of the state are lost only if they really are (P14)."""
        here = [m for m in self.members if m.alive and not m.frozen and not m.outcome and m.training]
        if member.header.seq != GENESIS.seq and self._whole(here):
            raise Violation(f"{who} is let go for lost parts, and all are there at slot {member.header.seq} (P14)")

    def goes(self, who: str, member: HoldsParts) -> None:
        """Checks that a released member leaves only when members that lack a part at its header can get it elsewhere
        (P9).

        After the closing header nobody needs any, nor where other parts are lost, so that nobody can go on (P14).
        """
        if member.header.seq == GENESIS.seq or member.header.kind is Kind.CLOSING:
            return
        others = [m for m in self.members if m is not member and m.alive and not m.outcome]
        at = [m for m in others if m.machine.header.hash == member.header.hash]
        needed = {p for m in at for p in numbers(m.machine.parts.missing)} & set(member.values)
        if (lost := needed.difference(*(m.values for m in at))) and self._whole([*at, member]):
            raise Violation(f"{who} goes, and others need parts {sorted(lost)} of it at slot {member.header.seq} (P9)")

    def _held(self, header: Header, here: list[HoldsParts]) -> set[int]:
        found: set[int] = set()
        for member in here:
            entered = member.machine.view
            if member.header.hash == header.hash:
                found.update(member.values)
            elif entered is not None and member.header.hash == header.prev_hash and entered.id == header.view:
                owned = numbers(division(entered).owned(member.machine.member_id))
                found.update(owned if header.kind is Kind.STEP else member.values)
        return found

    def _next(self, lineage: str, before: Header, header: Header) -> Parts:
        """Returns the values of all parts after this header."""
        base = self.truths[self._key(lineage, before, header.view)]
        if header.kind is not Kind.STEP:
            if header.kind is Kind.GATHER and self.program.evaluates:
                self._check_round(before, header, base)
            return dict(base)
        if not header.reduced:
            raise Violation(f"slot {header.seq} is a step of pipelines, and its header needs bytes (P4)")
        program, batch = self.program, batch_of(self.program, before.ledger)
        if missing := sorted(self.every - set(base)):
            raise Violation(f"slot {header.seq} is committed, and nobody has ever had parts {missing} (P14)")
        used = sorted(p for spans in batch.positions for p in positions_in(spans))
        left = set(positions_in(program.unspent(before.ledger, batch.epoch)))
        spent = sorted(left - set(positions_in(program.unspent(header.ledger, batch.epoch))))
        if spent != used or header.total_weight != len(used):
            raise Violation(
                f"slot {header.seq}: its ledger spends {spent} and it weighs {header.total_weight:g}; the header "
                f"before gives it {used} (P2)"
            )
        sums = dict(enumerate(result_of(program, Attempt(header.view, header.seq, before.hash), batch, base)))
        return stepped(base, sums, program.rest, header, clipping([norms(sums)]))

    def _check_round(self, before: Header, header: Header, base: Parts) -> None:
        """Checks that a round of evaluation counts each of its batches once, in the attempt that its header closed
        (P17).
        """
        program, batch = self.program, work_of(self.program, before, header.kind)
        attempt = Attempt(header.view, header.seq, before.hash)
        due = {j: tensors_of(program, attempt, batch, base, j)[-1] for j in range(program.micro_batches)}
        found = sorted((j, value) for text in header.answers if text for j, value in json.loads(text))
        if found != [(j, due[j]) for j in sorted(due) if j not in batch.empty]:
            raise Violation(f"slot {header.seq}: metrics have counted batches {[j for j, _ in found]} (P17)")
