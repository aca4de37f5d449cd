"""Detects tensors of a model that user code changes in hooks that not all members run, so that members would differ.

Theory of operation. A training step sees this member's batch, and a member without samples runs none. So a parameter
or buffer that it changes differs between members from then on, unless the next step averages it (protocol.md 21).
`Watch` looks at all tensors before such code and after it. Each look notes which tensor stands at a name, its version
counter and its memory: so it sees in-place changes, `x.data = ...` and `self.buffer = ...`. A change of `x.data` in
place moves none of them. Therefore the tensors' bits are compared, too, in batches 1, 2, 4, 8, ... of a fit.

A buffer that is averaged may be assigned anew. Once the backward pass, which may need its value of before, is over,
`put_back` gives the tensor that the job averages the new value and its place again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.replication.memory import region
from chaos_lightning.replication.table import hash_region

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 5
"""Number of names in a message."""
_NOTHING = torch.empty(0)
"""Tensor that stands where there is no tensor."""
_version = operator.attrgetter("_version")
_address = Tensor.data_ptr
_Look = tuple[list[Tensor], list[int], list[int]]
"""All tensors, their versions and their addresses."""


@dataclass(frozen=True)
class _Place:
    """Name in the model at which a tensor is registered.

    Attributes:
        name: Dotted, as in `named_parameters`.
        holder: `_parameters` or `_buffers` of the module that has it.
        key: Key of the tensor in `holder`.
        trained: Whether it is a parameter.
        averaged: The tensor that each step averages; None if this is no such buffer.
    """

    name: str
    holder: dict[str, Tensor | None]
    key: str
    trained: bool
    averaged: Tensor | None


class Watch:
    """Watch on the tensors of one model, compared before and after user code.

    Args:
        module: The model.
        averaged: Buffers of the model that are averaged with each step.
        named_by: Setting by which a user has buffers averaged, for messages.
        parameters: Whether parameters are watched, too.

    Attributes:
        closely: Whether the present batch gets the checks that cost more (digests), too.
    """

    def __init__(
        self, module: nn.Module, averaged: Sequence[tuple[str, Tensor]], *, named_by: str, parameters: bool = True
    ) -> None:
        known = {id(buffer): buffer for _, buffer in averaged}
        self._named_by = named_by
        self._places: list[_Place] = []
        self._sizes: list[tuple[str, dict[str, Tensor | None], int]] = []
        for prefix, child in module.named_modules():
            dot = f"{prefix}." if prefix else ""
            for trained, holder in ((True, child._parameters), (False, child._buffers)):
                if trained and not parameters:
                    continue
                self._sizes.append((dot, holder, len(holder)))
                self._places += [
                    _Place(dot + key, holder, key, trained, known.get(id(tensor))) for key, tensor in holder.items()
                ]
        self._slots = [(place.holder, place.key) for place in self._places]
        self._averaged = [(p.averaged, p.holder, p.key) for p in self._places if p.averaged is not None]
        self.closely = False
        self._before: _Look = ([], [], [])
        self._digested: list[object] | None = None
        self._begun = 0

    def begin(self) -> None:
        """Records all tensors before user code sees a batch."""
        self._begun += 1
        self.closely = self._begun & (self._begun - 1) == 0
        self._before = self._look()
        self._digested = self._digests() if self.closely else None

    def check(self, where: str) -> None:
        """Raises UnsupportedError if the user code that just ran changed a tensor that no step averages.

        Args:
            where: Name of the code, for the message.

        Raises:
            UnsupportedError: The code changed a tensor that no step averages.
        """
        if found := self.changed():
            raise UnsupportedError(self.words(found, where))

    def changed(self) -> list[str]:
        """Returns the names of tensors that changed since `begin` and that no step averages."""
        names = [place.name for place, before, now in self._moved() if not self._is_served(place, before, now)]
        for dot, holder, size in self._sizes:
            if len(holder) != size:
                known = {place.key for place in self._places if place.holder is holder}
                names += [dot + key for key in holder if key not in known]
        if not names and self._digested is not None:
            pairs = zip(self._places, self._digested, self._digests(), strict=True)
            names = [place.name for place, before, now in pairs if before != now]
        self._digested = None
        return names

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores averaged buffers that user code replaced by new tensors, with the new values; to be called after
        backward passes.
        """
        for averaged, holder, key in self._averaged:
            now = holder.get(key)
            if now is not None and now is not averaged:
                averaged.copy_(now)
                holder[key] = averaged

    def words(self, names: Sequence[str], where: str) -> str:
        """Composes an error text: what changed, why members differ by that, and what to do."""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"{', '.join(names[:_SHOWN])}{more} changed within {where}; members see different batches (or none), so "
            f"they would drift apart. Name buffers in `{self._named_by} = [...]` of the module to have them averaged "
            "with each step; change parameters in on_train_batch_end, which runs on all members; make buffers that are "
            "new in __init__; keep what is only a cache in a plain attribute"
        )

    def _is_served(self, place: _Place, tensor: Tensor, now: Tensor) -> bool:
        """Returns whether members stay equal although the tensor at a name was replaced or written to."""
        if now is tensor:
            return place.averaged is not None
        if place.trained or tensor is _NOTHING or now is _NOTHING:
            return False
        if now.shape != tensor.shape or now.dtype != tensor.dtype or now.device != tensor.device:
            return False
        return place.averaged is not None or torch.equal(now, tensor)

    def _look(self) -> _Look:
        """Records all tensors, their versions and addresses, by fast built-in loops, since models have thousands."""
        tensors = [_NOTHING if (t := holder.get(key)) is None else t for holder, key in self._slots]
        return tensors, list(map(_version, tensors)), list(map(_address, tensors))

    def _moved(self) -> Iterator[tuple[_Place, Tensor, Tensor]]:
        """Yields the names at which the tensor, its version or its memory changed since `begin`, with old and new
        tensor.
        """
        before, now = self._before, self._look()
        if not before[0] or (before[1:] == now[1:] and all(map(operator.is_, before[0], now[0]))):
            return
        for place, *looks in zip(self._places, *before, *now, strict=True):
            if looks[0] is not looks[3] or looks[1:3] != looks[4:]:
                yield place, looks[0], looks[3]

    @torch.no_grad()
    def _digests(self) -> list[object]:
        """Returns a digest for each tensor: a hash for those in host memory, a sum of bits for those on a device."""
        found: list[object] = [b""] * len(self._places)
        sums: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, place in enumerate(self._places):
            tensor = place.holder.get(place.key)
            if tensor is None or place.averaged is not None or not tensor.numel():
                continue
            if tensor.device.type == "cpu":
                found[number] = hash_region(region(place.name, tensor))
                continue
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
            words = flat.reshape(-1).view(_WORDS[flat.element_size()])
            sums.setdefault(tensor.device, []).append((number, words.sum(dtype=torch.int64)))
        for summed in sums.values():  # waits for each device once
            values = torch.stack([value for _, value in summed]).tolist()
            for (number, _), value in zip(summed, values, strict=True):
                found[number] = value
        return found
