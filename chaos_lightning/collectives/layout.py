"""Lays out gradients and reduced buffers one after another in one range of bytes.

Theory of operation. Sections (one per optimizer, then one for reduced buffers) follow each other; in a section
parameters stand in reverse order, since backward finishes the last layers first; each parameter is aligned, so a chunk
can be viewed in its type. A *run* is a maximal stretch of one type in one section and one part of the training state;
chunk borders never cross runs, so chunks are summed in one type, and by the owners of one part. The layout's hash is
part of every contribution (protocol.md 20).

Only names, shapes and types are needed of a tensor that this member does not own: it may be on the meta device. So the
layout and its hash are of the whole model at every member, and bytes are named alike everywhere.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.planning.trees import OwnedSpans
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import Header, Span

ALIGN = 64
_SECTION = re.compile(r"section (\d{1,6})")


@dataclass(frozen=True, slots=True)
class Section:
    """Parameters of one optimizer, which one step reduces together."""

    name: str
    params: Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Byte range [start, stop) of one tensor in the layout."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    start: int
    stop: int
    part: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Byte range of one dtype and one part of the state; chunks do not cross its borders."""

    start: int
    stop: int
    dtype: torch.dtype
    section: int
    part: str = ""


class Layout:
    """Byte ranges of all tensors, grouped in runs of one dtype, and a hash of it all.

    Args:
        sections: Parameters of each optimizer. A parameter may be in one section only.
        buffers: Floating or integer buffers that forward passes change; reduced with every step as float32
            (integers are rounded back: exact up to 2**24).
        part_of: Part of the training state that each tensor belongs to, by name; None: there is one part, "".

    Raises:
        ConfigurationError: A parameter stands twice, has a type that cannot be summed, or is sparse; or no part is
            named for it.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        buffers: Sequence[tuple[str, Tensor]] = (),
        part_of: Mapping[str, str] | None = None,
    ) -> None:
        self._part_of = part_of
        self.slots: list[Slot] = []
        self.section_slots: list[range] = []
        self.runs: list[Run] = []
        seen: dict[int, str] = {}
        offset = 0
        for number, section in enumerate(sections):
            first = len(self.slots)
            for name, tensor in reversed(list(section.params)):
                if id(tensor) in seen:
                    raise UnsupportedError(
                        f"parameter {name!r} stands in two optimizers ({seen[id(tensor)]} and {section.name}); "
                        "give each parameter to one optimizer"
                    )
                seen[id(tensor)] = section.name
                if not tensor.dtype.is_floating_point or tensor.layout != torch.strided:
                    raise ConfigurationError(
                        f"parameter {name!r} has type {tensor.dtype} and layout {tensor.layout}; only dense floating "
                        "point gradients can be reduced (freeze it or make it real and dense)"
                    )
                offset = self._place(name, tensor, tensor.dtype, offset, number)
            self.section_slots.append(range(first, len(self.slots)))
        first = len(self.slots)
        for name, tensor in buffers:
            offset = self._place(name, tensor, torch.float32, offset, len(sections))
        self.buffer_slots = range(first, len(self.slots))
        self.nbytes = offset
        self._run_starts = [run.start for run in self.runs]
        self.hash = self._hash()

    def _place(self, name: str, tensor: Tensor, dtype: torch.dtype, offset: int, section: int) -> int:
        start = -(-offset // ALIGN) * ALIGN
        stop = start + tensor.numel() * dtype.itemsize
        end = -(-stop // ALIGN) * ALIGN
        part = self._part(name)
        self.slots.append(Slot(name, tensor, dtype, start, stop, part))
        last = self.runs[-1] if self.runs else None
        if last is not None and (last.dtype, last.section, last.part) == (dtype, section, part):
            self.runs[-1] = Run(last.start, end, dtype, section, part)
        else:
            self.runs.append(Run(start, end, dtype, section, part))
        return end

    def _part(self, name: str) -> str:
        if self._part_of is None:
            return ""
        if name not in self._part_of:
            raise ConfigurationError(f"{name!r} belongs to no part of the training state; name the layer that uses it")
        return self._part_of[name]

    def _hash(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for slot in self.slots:
            digest.update(f"{slot.name}|{slot.dtype}|{tuple(slot.tensor.shape)}|{slot.start};".encode())
            if slot.part:
                digest.update(f"{slot.part};".encode())
        return digest.hexdigest()

    @property
    def device(self) -> torch.device:
        """Device of all parameters; in a pipeline, of those that are not on the meta device.

        Raises:
            ConfigurationError: The parameters are on several devices, or there are none.
        """
        bare = self._part_of is not None
        devices = {slot.tensor.device for slot in self.slots if not (bare and slot.tensor.is_meta)}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "nowhere"
            raise ConfigurationError(f"parameters lie on {names}; a member trains at least one, on one device")
        return devices.pop()

    def spans(self) -> tuple[Span, ...]:
        """Returns the byte ranges whose borders chunks may not cross."""
        return tuple((run.start, run.stop) for run in self.runs if run.stop > run.start)

    def scope(self, section: int) -> tuple[Span, ...]:
        """Returns the byte ranges that a step of this optimizer reduces: its gradients and the reduced buffers."""
        count = len(self.section_slots)
        return tuple((r.start, r.stop) for r in self.runs if r.section in (section, count) and r.stop > r.start)

    def parts(self, section: int | None = None) -> tuple[str, ...]:
        """Returns the names of parts that have bytes in the layout, or in one section of it, in byte order."""
        runs = [r for r in self.runs if r.stop > r.start and section in (None, r.section)]
        return tuple(dict.fromkeys(run.part for run in runs))

    def spans_of(self, parts: Collection[str]) -> tuple[Span, ...]:
        """Returns the byte ranges of these parts; joins those that touch."""
        return union((run.start, run.stop) for run in self.runs if run.part in parts)

    def owned(self, owners: Mapping[str, Sequence[str]]) -> tuple[OwnedSpans, ...]:
        """Returns the byte ranges grouped by the members that own them, each of which groups gets trees of its own.

        Args:
            owners: Members that own each part, by part.
        """
        found: dict[tuple[str, ...], list[Span]] = {}
        for run in self.runs:
            if run.stop > run.start:
                found.setdefault(tuple(owners.get(run.part, ())), []).append((run.start, run.stop))
        return tuple(OwnedSpans(names, tuple(spans)) for names, spans in found.items())

    def dtype_at(self, start: int) -> torch.dtype:
        return self.runs[bisect.bisect_right(self._run_starts, start) - 1].dtype


def section_of(header: Header) -> int:
    """Returns the number of the optimizer that a step's header names."""
    found = _SECTION.fullmatch(header.name)
    if found is None:
        raise StateError(f"step {header.step} (slot {header.seq}) is named {header.name!r}; expected 'section N'")
    return int(found[1])
