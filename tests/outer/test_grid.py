"""Blocks and shards: each element is in one block, each block in one shard, and the hash of a content is the same for
any cut.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.rules.grid import BLOCK, Grid, Shard

grids = st.builds(
    Grid,
    st.lists(st.integers(0, 700), min_size=1, max_size=8).map(tuple).filter(any),
    st.integers(64, 200),
)


@given(grids, st.data())
def test_a_shard_knows_which_of_its_blocks_belong_to_the_last_tensors(grid: Grid, data: st.DataObject) -> None:
    shard = data.draw(st.sampled_from(grid.cut(data.draw(st.integers(1, grid.blocks)))))
    tensor = data.draw(st.integers(0, len(grid.sizes)))
    since = shard.since(tensor)
    start = sum(grid.sizes[:tensor])
    assert all((grid.start(shard.first + block) >= start) == (block >= since) for block in range(shard.blocks))


@given(grids)
def test_blocks_are_counted_from_the_start_of_each_tensor(grid: Grid) -> None:
    expected = []
    offset = 0
    for size in grid.sizes:
        expected += [(offset + at, offset + min(at + grid.block, size)) for at in range(0, size, grid.block)]
        offset += size
    assert grid.blocks == len(expected)
    assert [grid.shard(b, b + 1).span for b in range(grid.blocks)] == expected
    assert grid.whole.lengths == tuple(stop - start for start, stop in expected)
    assert grid.whole.span == (0, grid.elements)


@given(grids, st.data())
def test_a_cut_has_each_block_once_and_is_even(grid: Grid, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, grid.blocks))
    shards = grid.cut(count)
    assert len(shards) == count
    assert [b for s in shards for b in range(s.first, s.stop)] == list(range(grid.blocks))
    assert all(s.blocks for s in shards)
    assert max(s.elements for s in shards) <= grid.elements / count + grid.block
    assert shards == Grid(grid.sizes, grid.block).cut(count)
    for shard in shards:
        assert sum(shard.lengths) == shard.elements == shard.nbytes(1) == shard.nbytes(4) // 4
        assert [p.stop - p.start for p in shard.places] == list(shard.lengths)
        assert shard.places[0].start == 0


def test_a_cut_of_equal_blocks_is_equal() -> None:
    assert [s.blocks for s in Grid((12 * BLOCK,)).cut(4)] == [3, 3, 3, 3]


def test_a_border_is_the_nearest_start_of_a_block() -> None:
    assert [s.blocks for s in Grid((10 * 64,), 64).cut(3)] == [3, 4, 3]
    assert [s.elements for s in Grid((64, 10, 64), 64).cut(2)] == [64, 74]


@given(grids, st.data())
def test_a_shard_knows_its_parts_of_tensors(grid: Grid, data: st.DataObject) -> None:
    labels = [(tensor, at) for tensor, size in enumerate(grid.sizes) for at in range(size)]
    for shard in grid.cut(data.draw(st.integers(1, grid.blocks))):
        found = [(tensor, at) for tensor, (start, stop) in shard.tensors() for at in range(start, stop)]
        assert found == labels[slice(*shard.span)]


@given(grids, st.data())
def test_a_content_has_one_hash_for_all_cuts(grid: Grid, data: st.DataObject) -> None:
    digests = data.draw(st.lists(st.binary(min_size=16, max_size=16), min_size=grid.blocks, max_size=grid.blocks))
    shards = grid.cut(data.draw(st.integers(1, grid.blocks)))
    gathered = [d for s in shards for d in digests[s.first : s.stop]]
    assert grid.whole.content_hash(gathered, "bf16") == grid.whole.content_hash(digests, "bf16")


def test_a_hash_tells_grids_formats_and_shards_apart() -> None:
    grid = Grid((128, 128), 64)
    digests = [bytes([b]) * 16 for b in range(4)]
    others = [Grid((256,), 64).whole, Grid((127, 128), 64).whole]
    hashes = [s.content_hash(digests, "bf16") for s in (grid.whole, *others)]
    hashes += [grid.whole.content_hash(digests, "fp32"), grid.whole.content_hash(digests[::-1], "bf16")]
    hashes += [grid.shard(0, 2).content_hash(digests[:2], "bf16"), grid.shard(2, 4).content_hash(digests[:2], "bf16")]
    assert len({*hashes}) == len(hashes)
    assert all(len(h) == 32 for h in hashes)
    with pytest.raises(ValueError, match="3 hashes of 4 blocks"):
        grid.whole.content_hash(digests[:3], "bf16")


@pytest.mark.parametrize("shards", [0, -1, 4, 1000])
def test_more_shards_than_blocks_are_refused_with_the_most_there_can_be(shards: int) -> None:
    with pytest.raises(ConfigurationError, match=f"into {shards} shards.*3 blocks.*give 1 to 3 followers"):
        Grid((100, 7), 64).cut(shards)


def test_what_is_no_grid_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 64 elements, got 63"):
        Grid((100,), 63)
    with pytest.raises(ConfigurationError, match="tensor 1 of the outer state cannot have -1"):
        Grid((100, -1))
    for empty in ((), (0, 0)):
        with pytest.raises(ConfigurationError, match="no elements"):
            Grid(empty)


def test_what_is_no_block_is_refused() -> None:
    grid = Grid((100, 0, 7), 64)
    assert grid.of_tensor(0) == Shard(grid, 0, 2)
    assert grid.of_tensor(2) == Shard(grid, 2, 3)
    with pytest.raises(ValueError, match="no run of the grid's 3 blocks"):
        grid.of_tensor(1)
    with pytest.raises(ValueError, match=r"blocks \[2, 4\)"):
        grid.shard(2, 4)
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        grid.start(4)


def test_the_grid_is_light() -> None:
    code = "import sys, chaos_lightning.outer.rules.grid; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@given(grids)
def test_runs_are_all_blocks_by_tensors(grid: Grid) -> None:
    for shards in {1, min(3, grid.blocks), grid.blocks}:
        for shard in grid.cut(shards):
            runs = [*shard.runs()]
            assert [block for first, stop in runs for block in range(first, stop)] == [*range(shard.blocks)]
            assert len(runs) == len([*shard.tensors()])
