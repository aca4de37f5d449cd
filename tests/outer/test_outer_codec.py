"""Codecs of pushes and versions: decoded values, special numbers, and that a block's bytes depend on that block
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from chaos_lightning.errors import ConfigurationError, WireError
from chaos_lightning.outer.exchange import codec as codecs
from chaos_lightning.outer.exchange.codec import BF16, FP32, INT8, Codec, Format, Part, codec_named, register_codec
from chaos_lightning.outer.rules.grid import Grid

FORMATS = (FP32, BF16, INT8)
LARGEST = float(np.finfo(np.float32).max)
LEAST = 2.0**-149
"""The smallest subnormal."""

every_float = st.floats(width=32)
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def blocks_of(elements: st.SearchStrategy[float], most: int = 80) -> st.SearchStrategy[Tensor]:
    return arrays.arrays(np.float32, st.integers(1, most), elements=elements).map(torch.from_numpy)


def there_and_back(format: Format, values: Tensor) -> Tensor:
    data = torch.full((format.nbytes(len(values)),), 255, dtype=torch.uint8)
    format.encode(values, data)
    out = torch.full_like(values, 7.0)
    format.decode(data, out)
    return out


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def random(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- values


@given(blocks_of(every_float))
def test_fp32_is_exact(values: Tensor) -> None:
    assert bits(there_and_back(FP32, values)) == bits(values)


@given(blocks_of(every_float))
def test_bf16_rounds_to_the_nearest_with_halves_to_even(values: Tensor) -> None:
    raw = values.numpy().view(np.uint32).astype(np.uint64)
    nearest = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    back = there_and_back(BF16, values).numpy()
    nan = np.isnan(values.numpy())
    assert np.isnan(back[nan]).all()
    assert back[~nan].tobytes() == nearest[~nan].tobytes()  # -0.0, subnormals and infinities are among them


@given(blocks_of(finite_floats))
def test_int8_is_the_rule_of_the_module(values: Tensor) -> None:
    exact = values.numpy()
    scale = np.float32(np.abs(exact.astype(np.float64)).max() / 127)
    levels = np.zeros_like(exact)
    if scale > 0:
        with np.errstate(over="ignore"):
            levels = np.clip(np.round(exact / scale), -127, 127) + np.float32(0)
    with np.errstate(over="ignore"):
        expected = levels * scale
    assert there_and_back(INT8, values).numpy().tobytes() == expected.tobytes()


@given(blocks_of(st.floats(-(2.0**100), 2.0**100, width=32)))
@example(torch.tensor([6.43198153171927e16, 5.39374834983895e16]))
def test_int8_is_wrong_by_half_a_scale_at_most(values: Tensor) -> None:
    largest = values.abs().max().item()
    wrong = (there_and_back(INT8, values).double() - values.double()).abs().max().item()
    # Scale, quotient and product are rounded to 24 bits, 127 levels away from zero at most.
    assert wrong <= largest / 254 * (1 + 5e-5) or largest < 1e-36


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 70, 130])
def test_what_is_not_finite_stays_so(format: Format, bad: float, at: int) -> None:
    values = random(131)
    values[at] = bad
    back = there_and_back(format, values)
    assert not back[at].isfinite()
    assert format is INT8 or (torch.isfinite(back).sum() == 130 and (math.isnan(bad) or back[at] == bad))
    assert format is not INT8 or back.isnan().all()


def test_special_numbers_become_what_the_module_says() -> None:
    subnormal = 2.0**-130
    values = torch.tensor([-0.0, 0.0, subnormal, LARGEST])
    assert bits(there_and_back(BF16, values))[:3] == bits(values)[:3]
    assert there_and_back(BF16, values)[3] == math.inf
    assert there_and_back(BF16, torch.tensor([3.3961e38])).isfinite()
    assert bits(there_and_back(INT8, torch.tensor([-0.0, 1.0, -1.0])))[0] == 0
    for nothing in ([-0.0, 0.0], [LEAST, -60 * LEAST]):
        assert bits(there_and_back(INT8, torch.tensor(nothing))) == [0, 0]
    tiny = torch.tensor([178 * LEAST, LEAST])  # the scale is one of two numbers that are far apart
    assert there_and_back(INT8, tiny).tolist() == [127 * LEAST, LEAST]
    assert there_and_back(INT8, torch.tensor([LARGEST]))[0] >= LARGEST * (1 - 1e-6)


# ---------------------------------------------------------------------- blocks


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shards", [1, 2, 5, 8])
def test_bytes_do_not_depend_on_the_cut_nor_on_neighbours(format: Format, shards: int) -> None:
    grid = Grid((333, 0, 1, 65, 200), 64)
    values = random(grid.elements)
    whole = Part.encoded(grid.whole, format, values)
    parts = [Part.encoded(s, format, values[slice(*s.span)]) for s in grid.cut(shards)]
    assert torch.equal(torch.cat([p.data for p in parts]), whole.data)
    assert torch.equal(torch.cat([p.decoded() for p in parts]), whole.decoded())
    assert [d for p in parts for d in p.digests()] == whole.digests()
    changed = values.clone()
    changed[64:128] = math.nan
    other = Part.encoded(grid.whole, format, changed)
    assert [a == b for a, b in zip(whole.digests(), other.digests(), strict=True)] == [
        block != 1 for block in range(grid.blocks)
    ]
    assert whole.hash != other.hash


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("offset", range(5))
def test_bytes_may_lie_anywhere(format: Format, offset: int) -> None:
    grid = Grid((131, 3), 64)
    values = random(grid.elements)
    aligned = Part.encoded(grid.whole, format, values)
    memory = torch.zeros(aligned.data.numel() + offset + 3, dtype=torch.uint8)
    part = Part(grid.whole, format, memory[offset:-3])
    for block, place in enumerate(grid.whole.places):
        part.encode(block, values[place])
    assert torch.equal(part.data, aligned.data)
    assert torch.equal(part.decoded(), aligned.decoded())
    assert not memory[:offset].any()
    assert not memory[-3:].any()


def test_fp32_is_read_and_written_in_place() -> None:
    grid = Grid((70,), 64)
    values = random(70)
    part = Part.of(grid.whole, values)
    part.encode(1, torch.zeros(6))
    assert not values[64:].any()
    assert part.block(0).data_ptr() == values.data_ptr()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_block_has_the_same_bytes_with_more_threads(threads: int) -> None:
    values = random(100_003)
    expected = [there_and_back(f, values) for f in FORMATS]
    torch.set_num_threads(threads)
    assert all(torch.equal(there_and_back(f, values), e) for f, e in zip(FORMATS, expected, strict=True))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("format", "given", "expected"), [(FP32, 39, 40), (FP32, 0, 40), (BF16, 21, 20), (INT8, 10, 14), (INT8, 3, 14)]
)
def test_a_block_of_another_size_is_refused_with_both_sizes(format: Format, given: int, expected: int) -> None:
    words = f"{given} bytes for 10 elements of format {format.name}, expected {expected}"
    with pytest.raises(WireError, match=words):
        format.decode(torch.zeros(given, dtype=torch.uint8), torch.empty(10))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_part_of_another_size_is_refused_with_both_sizes(wrong: int) -> None:
    shard = Grid((100,), 64).whole
    with pytest.raises(WireError, match=f"{108 + wrong} bytes for 100 elements in 2 blocks .*int8, expected 108"):
        Part(shard, INT8, torch.zeros(108 + wrong, dtype=torch.uint8))


def test_a_scale_that_no_encoder_writes_is_refused() -> None:
    data = torch.zeros(14, dtype=torch.uint8)
    data[:4] = torch.tensor([-1.0]).view(torch.uint8)
    with pytest.raises(WireError, match=r"scale -1\.0"):
        INT8.decode(data, torch.empty(10))


# ---------------------------------------------------------------------- names


def test_a_codec_names_both_directions() -> None:
    found = {
        name: (c.push.name, c.version.name, c.residual)
        for name in ("fp32", "bf16", "int8")
        for c in [codec_named(name)]
    }
    assert found == {
        "fp32": ("fp32", "fp32", False),
        "bf16": ("bf16", "bf16", False),
        "int8": ("int8", "bf16", True),
    }
    assert codec_named(codecs.DEFAULT_CODEC).name == "bf16"


class Halves:
    """User's own codec that shares no base class with the built-in ones."""

    name = "halves"
    residual = True

    def nbytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(torch.float16).copy_(values)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.float16))


def test_others_register_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    with pytest.raises(ConfigurationError, match=r"no codec 'halves'; known are bf16, fp32, int8$"):
        codec_named("halves")
    mine = Codec("halves", Halves(), BF16)
    register_codec(mine)
    register_codec(mine)
    assert codec_named("halves") is mine
    assert mine.residual
    with pytest.raises(ConfigurationError, match="'halves' already"):
        register_codec(Codec("halves", Halves(), FP32))
    monkeypatch.setattr(Halves, "nbytes", lambda _, elements: 64 - elements % 64)
    with pytest.raises(ConfigurationError, match=r"'more': blocks of 1, 2, 4, .* no more than a larger block has"):
        register_codec(Codec("more", BF16, Halves()))
    monkeypatch.undo()
    shard = Grid((100,), 64).whole
    values = random(100)
    assert torch.equal(Part.encoded(shard, mine.push, values).decoded(), values.half().float())
