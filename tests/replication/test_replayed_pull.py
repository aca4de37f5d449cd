"""Tests the pull that admits a newcomer after its replay: it usually only verifies the state, and repairs any
difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from replication_support import HEAD, LIMIT_S, SEQ, Plain, dial, numbered, publishing

from chaos_lightning.errors import StateError
from chaos_lightning.replication import Endpoint, PullConfig, PullReport, StateServerConfig, pull_state, state_hash
from chaos_lightning.replication.hashing import Own, hash_regions
from chaos_lightning.replication.memory import region
from chaos_lightning.replication.table import build_table, hash_region

SIZE = 600_000
"""Elements: several pieces for each tensor."""


def prove(started: Any, mine: Any, endpoints: Sequence[Endpoint] = ()) -> PullReport:
    config = PullConfig(deadline_s=LIMIT_S)
    asked = endpoints or [d.endpoint for d in started]
    return pull_state(asked, dial, head=HEAD, seq=SEQ, state=mine, config=config, replayed=True)


def test_a_state_that_is_equal_is_proved_without_a_byte_of_it() -> None:
    state, mine = numbered(3, SIZE, seed=1), numbered(3, SIZE, seed=1)
    mine.values = {"step": 17}
    with publishing(state, "a", "b") as started:
        report = prove(started, mine)
        assert not any(d.server.served_nbytes for d in started)
    assert (report.skipped, report.nbytes, report.rounds) == (report.nbytes, 3 * SIZE * 4, 1)
    assert report.state_hash == state_hash(state.tensors())
    assert mine.adopted == {"step": 1}, "counters come from the donors"


def test_what_a_replay_got_wrong_is_pulled() -> None:
    state, mine = numbered(3, SIZE, seed=1), numbered(3, SIZE, seed=1)
    mine.named[1][1][5] += 1
    with publishing(state, "a", "b") as started:
        report = prove(started, mine)
    assert sum(report.by_source.values()) == 1 << 20, "the piece that differs, no more"
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(mine.tensors(), state.tensors(), strict=True))


def test_an_adoption_that_changes_a_tensor_behind_torchs_back_is_found() -> None:
    class Rude(Plain):
        def adopt(self, manifest: Mapping[str, Any]) -> None:
            self.named[0][1].numpy()[3] = 7.0

    state = numbered(2, SIZE, seed=1)
    mine = Rude(numbered(2, SIZE, seed=1).named)
    with publishing(state, "a") as started, pytest.raises(StateError, match="adopting the manifest changed it"):
        prove(started, mine)


def test_tensors_that_only_the_manifest_has_are_pulled() -> None:
    state, mine = numbered(2, SIZE, seed=1), numbered(2, SIZE, seed=1)
    state.values["average"] = torch.arange(1000.0)
    with publishing(state, "a") as started:
        report = prove(started, mine)
    assert sum(report.by_source.values()) == 4000
    assert mine.adopted is not None
    assert torch.equal(mine.adopted["average"], torch.arange(1000.0))


def test_the_first_donor_may_be_dead() -> None:
    state, mine = numbered(2, SIZE, seed=1), numbered(2, SIZE, seed=1)
    with publishing(state, "a", "b", config=StateServerConfig(pending_interval_s=0.01)) as started:
        endpoints = [d.endpoint for d in started]
        started[0].close()
        report = prove(started, mine, endpoints)
    assert report.skipped == report.nbytes
    assert "a" in report.failed


def test_hashes_taken_before_count_only_for_memory_that_torch_has_not_written_to() -> None:
    named = numbered(3, SIZE, seed=1).tensors()
    named.append(("strided", torch.arange(12.0).reshape(3, 4).t()))
    own = Own(named)
    own._work.result(LIMIT_S)
    named[0][1].add_(1)
    named[1] = ("t1", torch.ones(SIZE))
    regions = [region(name, tensor) for name, tensor in named]
    assert own.of(named, regions) == [e.hashes for e in build_table(named).entries]


def test_hashing_on_several_cores_gives_what_one_gives() -> None:
    tensors = [torch.randn(n) for n in (0, 1, 300_000, 9_000_000, 5)]
    regions = [region("t", t) for t in tensors]
    assert hash_regions(regions) == [hash_region(r) for r in regions]
