"""Computes the arithmetic of outer sync: a round's update of a shard, the content of a push, and the adoption of a
version.

Theory of operation. A follower holds the parameters theta, the momentum m and the buffer b of its shard, fp32, 12 bytes
per parameter. A round gives it pushes D_j with their parts w_j, in the order of their names, and `Factors`. With [ ]
for "rounded to fp32, to the nearest", each element goes through

    delta  = [.. [[w_1 D_1] + [w_2 D_2]] + ..]             without a push: 0
    x      = [buffer delta]
    b      = [b + x];  b = x in a block whose b is all 0
    m      = [[momentum m] + [outer b]];  then b = 0       only if outer is not 0
    theta  = [theta - [[rate delta] + [step m]]]           without [step m] if outer is 0

Pushes may hold a cluster's parameters f_j (`OuterSettings.pushes_parameters`). Then D_j = [theta - f_j], of the theta
that the round finds: so it has the same bits whenever and by whomever the round is computed.

Blocks of reduced buffers are only *averaged*: theta = [theta - delta], without momentum, part of a round or clip.

This is Delayed Nesterov (Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3) generalised to any part of the clusters
(docs/outer.md, Equations). With buffer = outer = 1 and step = rate momentum it is DiLoCo's outer Nesterov (arXiv
2311.08105), theta <- theta - eta (delta + mu m). Factors are rounded to fp32 before they are used.

Bits. A version has the same bits for any cut, at any address, with any number of threads and on any machine with IEEE
arithmetic. The reason is that every torch operation used here rounds each element exactly once: a product with a
number, a sum or difference of two tensors, a conversion. So elements that the processor computes as a vector and those
that it computes singly cannot differ. Operations that do two things, such as `add` with alpha, `addcmul` or `lerp`, use
one rounding or two, as the processor likes; they must not be used. Nothing is reduced within a tensor but by `_dot`
(and `_dots`), which says its own order.

Memory. A block is read into scratch, used up, and its new parameters are encoded before the next block is touched, so
that all but the state itself stays in the core's cache. A buffer that is all 0 is neither read nor written where the
momentum moves: with pushes and versions in bf16 a round with everybody in moves 20 bytes per parameter. Whether it is
all 0 is looked up block by block in the content itself; so it is the same after a restart, and the rule above for b
can rest on it (0 + x is not x if x is -0.0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import torch
import xxhash
from torch import Tensor

from chaos_lightning.outer.exchange.codec import Part, PlainFormat
from chaos_lightning.outer.rules.grid import Shard
from chaos_lightning.outer.rules.types import Factors
from chaos_lightning.replication.memory import as_bytes, host_view

_LANES = 1 << 13
"""Number of sums that `_dot` keeps side by side: 64 KiB of fp64. A power of 2, and part of the protocol: it is in the
bits.
"""

_TOGETHER = 1 << 16
"""Number of elements of short blocks whose products are computed at once."""


class OuterState:
    """Parameters, momentum and buffer of one shard.

    Args:
        shard: Shard that the elements belong to.
        theta: Parameters: fp32, flat, contiguous, in host memory; taken over, not copied.
        momentum: Momentum, in the same form; taken over, not copied. None: 0.
        buffer: Buffer, in the same form; taken over, not copied. None: 0.
    """

    def __init__(
        self, shard: Shard, theta: Tensor, momentum: Tensor | None = None, buffer: Tensor | None = None
    ) -> None:
        self.shard = shard
        self.theta = theta
        self.momentum = torch.zeros_like(theta) if momentum is None else momentum
        self.buffer = torch.zeros_like(theta) if buffer is None else buffer
        for tensor in self.tensors:
            assert tensor.dtype == torch.float32
            assert tensor.device.type == "cpu"
            assert tensor.is_contiguous()
            assert tensor.shape == (shard.elements,)
        self.empty = [buffer is None or not bool(self.buffer[place].any()) for place in shard.places]
        """Whether the buffer of each block is all 0."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors that are saved in a snapshot: parameters (theta), momentum, buffer."""
        return self.theta, self.momentum, self.buffer

    def blocks(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns parameters, momentum and buffer of one of the shard's blocks, as views."""
        place = self.shard.places[block]
        return self.theta[place], self.momentum[place], self.buffer[place]

    def digests(self) -> list[bytes]:
        """Returns the xxh3-128 of each block's parameters, momentum and buffer together."""
        views = [host_view(as_bytes(tensor)) for tensor in self.tensors]
        found = []
        for place in self.shard.places:
            state = xxhash.xxh3_128()
            for view in views:
                state.update(view[4 * place.start : 4 * place.stop])
            found.append(state.digest())
        return found

    @property
    def digest(self) -> str:
        """Digest of the whole state, 32 hex digits."""
        return self.shard.content_hash(self.digests(), "state")

    def finite(self) -> bool:
        """Returns whether no element is NaN or infinite."""
        return all(_finite(tensor[place]) for tensor in self.tensors for place in self.shard.places)


def _finite(values: Tensor) -> bool:
    low, high = torch.aminmax(values)  # in one pass and without a tensor of flags
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _factor(value: float) -> Tensor | None:
    """Returns a factor as an fp32 tensor; None for 1, since multiplying by it changes nothing."""
    return None if value == 1.0 else torch.tensor(value, dtype=torch.float32)


def _times(values: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
    return values if factor is None else torch.mul(values, factor, out=out)


class RoundUpdate:
    """Update of a shard by one round, in place. Each block must be updated once, in any order, by one thread or
    several.

    Between the first block and the last one the state is no version. Whoever stops there loads it anew.

    Args:
        state: State of the version before.
        pushes: (w_j, D_j) in the order of their names; the parts are of the state's shard.
        factors: Factors of the round.
        version: Memory that gets the new parameters, block by block, if it is given.
        averaged: Index of the shard's first block that belongs to reduced buffers; None: none does.
        parameters: Whether pushes hold f_j in place of D_j.
    """

    def __init__(
        self,
        state: OuterState,
        pushes: Sequence[tuple[float, Part]],
        factors: Factors,
        version: Part | None = None,
        averaged: int | None = None,
        *,
        parameters: bool = False,
    ) -> None:
        assert all(part.shard == state.shard for _, part in pushes)
        assert version is None or version.shard == state.shard
        self._state, self._version, self._parameters = state, version, parameters
        self._averaged = state.shard.blocks if averaged is None else averaged
        self._pushes = [(_factor(weight), part) for weight, part in pushes]
        self._moves = factors.outer != 0.0
        self._rate, self._step = _factor(factors.rate), _factor(factors.step)
        self._into_buffer, self._outer = _factor(factors.buffer), _factor(factors.outer)
        self._momentum = _factor(factors.momentum)
        self._done = bytearray(state.shard.blocks)

    @property
    def complete(self) -> bool:
        """Whether all blocks are updated, so that the state is the new version."""
        return all(self._done)

    @torch.no_grad()
    def run(self, blocks: range | None = None) -> None:
        """Updates these blocks of the shard; None means all.

        Raises:
            WireError: A push has malformed bytes. The state is no version any more.
        """
        delta, other = _scratch(self._state.shard, 2)
        for block in range(self._state.shard.blocks) if blocks is None else blocks:
            assert not self._done[block]
            length = self._state.shard.lengths[block]
            self._update(block, delta[:length], other[:length])
            self._done[block] = 1

    def _update(self, block: int, delta: Tensor, other: Tensor) -> None:
        theta, momentum, buffer = self._state.blocks(block)
        self._average(block, theta, delta, other)
        if block < self._averaged:
            self._move(block, momentum, buffer, delta, other)
        theta.sub_(delta)
        if self._version is not None:
            self._version.encode(block, theta)

    def _move(self, block: int, momentum: Tensor, buffer: Tensor, delta: Tensor, other: Tensor) -> None:
        """Adds delta to the buffer and, if the momentum moves in this round, both to the momentum; delta becomes the
        amount to subtract from theta.
        """
        x = _times(delta, self._into_buffer, other)
        if self._moves:
            if not self._state.empty[block]:
                x = torch.add(x, buffer, out=other)
                buffer.zero_()
                self._state.empty[block] = True
            _times(momentum, self._momentum, momentum).add_(_times(x, self._outer, other))
            _times(delta, self._rate, delta).add_(_times(momentum, self._step, other))
        else:
            self._collect(block, buffer, x)
            _times(delta, self._rate, delta)

    def _average(self, block: int, theta: Tensor, delta: Tensor, other: Tensor) -> None:
        if not self._pushes:
            delta.zero_()
        for number, (weight, part) in enumerate(self._pushes):
            into = other if number else delta
            part.decode(block, into)
            if self._parameters:
                torch.sub(theta, into, out=into)
            _times(into, weight, into)
            if number:
                delta.add_(other)

    def _collect(self, block: int, buffer: Tensor, x: Tensor) -> None:
        if self._state.empty[block]:
            buffer.copy_(x)
        else:
            buffer.add_(x)
        self._state.empty[block] = not bool(buffer.any())
        if self._state.empty[block]:
            buffer.zero_()  # x may have been -0.0


def _scratch(shard: Shard, count: int) -> tuple[Tensor, ...]:
    """Returns `count` tensors, each as large as the shard's largest block."""
    return torch.empty(count, max(shard.lengths)).unbind()


# ---------------------------------------------------------------------- products, for the leader


@torch.no_grad()
def products(one: Part, other: Part, stop: int | None = None) -> list[float]:
    """Returns the scalar product <one, other> of each block, in fp64; of a push with itself it is the squared norm,
    with `Part.of(shard, momentum)` the product with the momentum.

    Products of fp32 numbers are exact in fp64. They are added in an order that depends on a block's length alone. A
    block in which either content is not finite gives NaN or infinity; so a push is finite exactly if its own products
    are.

    Args:
        one: A push.
        other: Push or content of the same shard; it may be the same one.
        stop: Index of the first of the shard's blocks that is left out, as are all after it; None: none is.

    Raises:
        WireError: One has malformed bytes.
    """
    assert one.shard == other.shard
    lengths = one.shard.lengths[:stop]
    x, y = torch.empty(2, max((_TOGETHER, *lengths))).unbind()
    lanes = torch.empty(3, _LANES, dtype=torch.float64).unbind()
    found: list[float] = []
    while (first := len(found)) < len(lengths):
        length = lengths[first]
        alike = sum(1 for _ in takewhile(length.__eq__, lengths[first : first + max(1, _TOGETHER // length)]))
        xs = _rows(one, first, alike, x[: alike * length])
        ys = xs if other is one else _rows(other, first, alike, y[: alike * length])
        found += _dots(xs, ys) if length <= _LANES else [_dot(xs[0], ys[0], lanes)]
    return found


def _rows(part: Part, first: int, count: int, memory: Tensor) -> Tensor:
    """Returns `count` consecutive blocks of equal length, decoded, as the rows of a matrix."""
    rows = memory.view(count, -1)
    if isinstance(part.format, PlainFormat):  # blocks follow each other without anything between them
        part.format.decode(part.run(first, first + count), memory)
        return rows
    for block, row in enumerate(rows.unbind(), first):
        part.decode(block, row)
    return rows


def _dots(xs: Tensor, ys: Tensor) -> list[float]:
    """Returns `_dot` of each pair of rows, with the same bits but faster; for rows that are shorter than `_dot`'s
    lanes.
    """
    rows, length = xs.shape
    width = 1 << (length - 1).bit_length()
    sums = torch.zeros(rows, width, dtype=torch.float64)
    sums[:, :length] += xs.double() * ys.double()
    while width > 1:
        width //= 2
        sums[:, :width] += sums[:, width : 2 * width]
    return [float(each) for each in sums[:, 0].tolist()]


def _dot(x: Tensor, y: Tensor, lanes: Sequence[Tensor]) -> float:
    """Returns a scalar product with a fixed order of additions: product i goes into lane i mod _LANES, then the upper
    half of the lanes is added to the lower one until one is left.
    """
    sums, left, right = lanes
    sums.zero_()
    for xs, ys in zip(torch.split(x, _LANES), torch.split(y, _LANES), strict=True):
        some = len(xs)
        left[:some].copy_(xs)
        right[:some].copy_(ys)
        left[:some].mul_(right[:some])
        sums[:some].add_(left[:some])
    width = _LANES
    while width > 1:
        width //= 2
        sums[:width].add_(sums[width : 2 * width])
    return float(sums[0].item())


# ---------------------------------------------------------------------- a cluster's side


@torch.no_grad()
def freeze(base: Part, parameters: Tensor, push: Part, residual: Tensor | None = None) -> None:
    """Encodes a push: encode([[base - f] + e]), with f the frozen parameters and e the residual (docs/outer.md,
    Equations).

    Args:
        base: Version that the cluster adopted last, as received (O9).
        parameters: f, fp32, flat, of the base's shard; they are only read.
        push: Memory for the push.
        residual: e, of what earlier pushes dropped; None: none is kept, as with a format that has none.

    Raises:
        WireError: The base has malformed bytes.
    """
    assert base.shard == push.shard
    (scratch,) = _scratch(base.shard, 1)
    for block, place in enumerate(base.shard.places):
        kept = None if residual is None else residual[place]
        push.encode(block, _gained(base, block, parameters[place], kept, scratch))


@torch.no_grad()
def settle(base: Part, parameters: Tensor, push: Part, residual: Tensor) -> None:
    """Updates the residual e after its push D was accepted, in place: e <- [[[base - f] + e] - D] (O10).

    Args:
        base: Base that the push was encoded against, as given to `freeze`.
        parameters: Frozen parameters (f), as given to `freeze`.
        push: Push that `freeze` encoded.
        residual: Residual (e) that was given to `freeze`; updated in place.
    """
    assert base.shard == push.shard
    scratch, sent = _scratch(base.shard, 2)
    for block, place in enumerate(base.shard.places):
        gained = _gained(base, block, parameters[place], residual[place], scratch)
        push.decode(block, sent[: len(gained)])
        torch.sub(gained, sent[: len(gained)], out=residual[place])


@torch.no_grad()
def adopt(parameters: Tensor, version: Part, frozen: Part | None = None) -> None:
    """Adopts a version, in place: theta <- [theta_v + [theta - f]], with f the parameters that were frozen last.

    What was trained since the freezing is kept, for no push has it (docs/outer.md, Overlap).

    Args:
        parameters: theta, fp32, flat, of the version's shard.
        version: Encoded version, as received.
        frozen: f: `Part.of` the parameters at the freezing; without an open push the base. None: theta <- theta_v
            exactly, for `overlap=False` and after a rejection.

    Raises:
        WireError: The version has malformed bytes; the parameters are adopted in part.
    """
    assert frozen is None or frozen.shard == version.shard
    (scratch,) = _scratch(version.shard, 1)
    for block, place in enumerate(version.shard.places):
        values = parameters[place]
        if frozen is None:
            version.decode(block, values)
        else:
            other = scratch[: len(values)]
            frozen.decode(block, other)
            values.sub_(other)
            version.decode(block, other)
            values.add_(other)


def _gained(base: Part, block: int, parameters: Tensor, residual: Tensor | None, scratch: Tensor) -> Tensor:
    gained = scratch[: len(parameters)]
    base.decode(block, gained)
    gained.sub_(parameters)
    return gained if residual is None else gained.add_(residual)
