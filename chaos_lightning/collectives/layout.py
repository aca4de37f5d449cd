"""The gradient layout: every gradient (and every reduced buffer) has its place in one byte space.

Theory of operation. Sections (one per optimizer, then one for reduced buffers) follow each other; in a section
parameters stand in reverse order, since backward finishes the last layers first; each parameter is aligned, so a chunk
can be viewed in its type. A *run* is a maximal stretch of one type in one section; chunk borders never cross runs, so
chunks are summed in one type. The layout's hash is part of every contribution (protocol.md 20).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.protocol.types import Header, Span

ALIGN = 64
_SECTION = re.compile(r"section (\d{1,6})")


@dataclass(frozen=True, slots=True)
class Section:
    """Parameters that one optimizer step reduces together."""

    name: str
    params: Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one tensor: bytes [start, stop) of the layout."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of one type: chunks stay inside it."""

    start: int
    stop: int
    dtype: torch.dtype
    section: int


class Layout:
    """Places, runs and the hash.

    Args:
        sections: What each optimizer owns. A parameter may stand in one section only.
        buffers: Floating or integer buffers that forward passes change; reduced with every step as float32
            (integers are rounded back: exact up to 2**24).

    Raises:
        ConfigurationError: A parameter stands twice, has a type that cannot be summed, or is sparse.
    """

    def __init__(self, sections: Sequence[Section], buffers: Sequence[tuple[str, Tensor]] = ()) -> None:
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
        self.hash = self._hash()

    def _place(self, name: str, tensor: Tensor, dtype: torch.dtype, offset: int, section: int) -> int:
        start = -(-offset // ALIGN) * ALIGN
        stop = start + tensor.numel() * dtype.itemsize
        end = -(-stop // ALIGN) * ALIGN
        self.slots.append(Slot(name, tensor, dtype, start, stop))
        last = self.runs[-1] if self.runs else None
        if last is not None and last.dtype == dtype and last.section == section:
            self.runs[-1] = Run(last.start, end, dtype, section)
        else:
            self.runs.append(Run(start, end, dtype, section))
        return end

    def _hash(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for slot in self.slots:
            digest.update(f"{slot.name}|{slot.dtype}|{tuple(slot.tensor.shape)}|{slot.start};".encode())
        return digest.hexdigest()

    @property
    def device(self) -> torch.device:
        """Where all parameters lie.

        Raises:
            ConfigurationError: On several devices, or there are none.
        """
        devices = {slot.tensor.device for slot in self.slots}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "nowhere"
            raise ConfigurationError(f"parameters lie on {names}; a member trains at least one, on one device")
        return devices.pop()

    def spans(self) -> tuple[Span, ...]:
        """Borders that chunks keep."""
        return tuple((run.start, run.stop) for run in self.runs if run.stop > run.start)

    def scope(self, section: int) -> tuple[Span, ...]:
        """Bytes that a step of this section reduces: its own and the reduced buffers."""
        count = len(self.section_slots)
        return tuple((r.start, r.stop) for r in self.runs if r.section in (section, count) and r.stop > r.start)

    def dtype_at(self, start: int) -> torch.dtype:
        return next(run.dtype for run in self.runs if run.start <= start < run.stop)


def section_of(header: Header) -> int:
    """Which optimizer a step's header is about, as `Engine.step` names it."""
    found = _SECTION.fullmatch(header.name)
    if found is None:
        raise StateError(f"step {header.step} (slot {header.seq}) is named {header.name!r}; expected 'section N'")
    return int(found[1])
