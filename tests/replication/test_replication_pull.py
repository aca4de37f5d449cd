"""Tests pulling a state and reduced bytes from donors that behave well."""

from __future__ import annotations

import threading

import pytest
import torch
from replication_support import HEAD, LIMIT_S, OTHER, SEQ, Network, Plain, dial, donors, numbered, publishing, train
from torch import nn

from chaos_lightning.errors import StateError
from chaos_lightning.replication import (
    Endpoint,
    ModuleState,
    PullConfig,
    PullReport,
    StateAccess,
    StateServerConfig,
    pull_result,
    pull_state,
    state_hash,
)
from chaos_lightning.replication.table import PIECE_NBYTES

CONFIG = PullConfig(deadline_s=LIMIT_S, request_nbytes=1 << 16)


def pull(endpoints: list[Endpoint], state: StateAccess, config: PullConfig = CONFIG) -> PullReport:
    return pull_state(endpoints, dial, head=HEAD, seq=SEQ, state=state, config=config)


def test_state_arrives_from_three_donors() -> None:
    theirs, mine = numbered(10, 50_000), numbered(10, 50_000, seed=1)
    seen: list[tuple[int, int]] = []
    with publishing(theirs, "a", "b", "c") as started:
        report = pull_state(
            [d.endpoint for d in started],
            dial,
            head=HEAD,
            seq=SEQ,
            state=mine,
            config=CONFIG,
            progress=lambda p: seen.append((p.done_nbytes, p.total_nbytes)),
        )
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors()) == report.state_hash
    assert report.nbytes == 2_000_000 == sum(report.by_source.values())
    assert report.skipped == report.retries == report.corrupted == 0
    assert mine.adopted == {"step": 0}
    assert seen[0] == (0, 2_000_000)
    assert seen[-1] == (2_000_000, 2_000_000)
    assert seen == sorted(seen)


def test_pieces_that_are_here_already_do_not_travel() -> None:
    theirs, mine = numbered(20, 600_000), numbered(20, 600_000)
    mine.named[17][1][599_999] += 1
    with publishing(theirs, "a", "b") as started:
        report = pull([d.endpoint for d in started], mine)
        served = sum(sum(d.server.served_nbytes.values()) for d in started)
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    assert served == sum(report.by_source.values()) == 2_400_000 % PIECE_NBYTES
    assert report.skipped == 48_000_000 - served


def test_a_joiner_that_holds_everything_asks_for_nothing() -> None:
    theirs, mine = numbered(3, 100), numbered(3, 100)
    with publishing(theirs, "a") as started:
        report = pull([started[0].endpoint], mine)
    assert report.by_source == {}
    assert report.skipped == report.nbytes == 1200
    assert mine.adopted == {"step": 0}


@pytest.mark.parametrize("trained_before", [0, 2])
def test_module_with_lazy_optimizer_state(trained_before: int) -> None:
    def build(seed: int) -> ModuleState:
        torch.manual_seed(seed)
        module = Network()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        return ModuleState(module, optimizer, {"lr": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)})

    theirs, mine = build(1), build(2)
    train(theirs, 5)
    train(mine, trained_before, seed=3)
    with publishing(theirs, "a", "b") as started:
        pull([d.endpoint for d in started], mine)
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    train(theirs, 3, seed=9)
    train(mine, 3, seed=9)
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    assert mine.optimizers[0].param_groups[0]["lr"] == theirs.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**4
    assert mine.extra["lr"].state_dict() == theirs.extra["lr"].state_dict()


AWKWARD = [
    ("scalar", torch.tensor(3.5)),
    ("empty", torch.zeros(0, 4)),
    ("half", torch.arange(9, dtype=torch.bfloat16)),
    ("flags", torch.tensor([True, False, True])),
    ("long", torch.arange(-5, 5)),
    ("small", torch.arange(5, dtype=torch.int8)),
    ("complex", torch.randn(3, dtype=torch.complex64)),
    ("transposed", torch.randn(5, 7).t()),
    ("strided", torch.randn(40)[::3]),
    ("channels", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    ("fp8", torch.randn(6).to(torch.float8_e4m3fn)),
    ("weight", nn.Parameter(torch.randn(3, 3))),
    ("conjugate", torch.randn(4, dtype=torch.complex64).conj()),
]


def test_tensors_of_all_kinds_travel() -> None:
    theirs = Plain(AWKWARD)
    mine = Plain([(name, torch.zeros_like(t)) for name, t in AWKWARD])
    with publishing(theirs, "a") as started:
        pull([started[0].endpoint], mine)
    for (name, a), (_, b) in zip(theirs.named, mine.named, strict=True):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        assert torch.equal(a.to(torch.complex128), b.to(torch.complex128)), name
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_strides_are_no_part_of_the_state() -> None:
    mine = Plain([("w", torch.zeros(6, 4).t())])
    theirs = Plain([("w", torch.randn(4, 6))])
    with publishing(theirs, "a") as started:
        pull([started[0].endpoint], mine)
    assert not mine.named[0][1].is_contiguous()
    assert torch.equal(mine.named[0][1], theirs.named[0][1])
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_tensors_within_the_manifest_travel() -> None:
    weight = torch.randn(100)
    theirs = Plain([("w", weight)], {"ema": {"shadow": torch.arange(50_000.0), "source": weight, "decay": 0.9}})
    mine = Plain([("w", torch.zeros(100))])
    with publishing(theirs, "a", "b") as started:
        theirs.values["ema"]["shadow"].zero_()  # published tensors of a manifest are copies
        report = pull([d.endpoint for d in started], mine)
    assert mine.adopted is not None
    ema = mine.adopted["ema"]
    assert torch.equal(ema["shadow"], torch.arange(50_000.0))
    assert ema["source"] is mine.named[0][1]
    assert report.nbytes == 200_400


def test_copies_are_made_at_publication() -> None:
    theirs, mine = numbered(2, 100), numbered(2, 100, seed=1)
    expected = state_hash(theirs.tensors())
    with donors("a") as started:
        started[0].server.publish(HEAD, SEQ, theirs.tensors(), {}, copies=["t1"])
        theirs.named[1][1].zero_()
        report = pull([started[0].endpoint], mine)
    assert report.state_hash == expected == state_hash(mine.tensors())


def test_copying_an_unknown_tensor_is_refused() -> None:
    with donors("a") as started, pytest.raises(StateError, match="'t9'"):
        started[0].server.publish(HEAD, SEQ, numbered(2, 3).tensors(), {}, copies=["t9"])


def test_a_donor_on_its_way_to_the_header_is_waited_for() -> None:
    theirs, mine = numbered(3, 1000), numbered(3, 1000, seed=1)
    config = StateServerConfig(publish_timeout_s=LIMIT_S, pending_interval_s=0.02)
    with donors("a", config=config) as started:
        donor = started[0]
        donor.server.publish(OTHER, SEQ - 1, theirs.tensors(), {})
        asked = threading.Event()
        find = donor.server._find

        def find_and_tell(request, tick):  # type: ignore[no-untyped-def]
            def tick_and_tell(idle_s: float) -> None:
                tick(idle_s)
                asked.set()

            return find(request, tick_and_tell)

        donor.server._find = find_and_tell  # type: ignore[method-assign]
        reports: list[PullReport] = []
        thread = threading.Thread(target=lambda: reports.append(pull([donor.endpoint], mine)))
        thread.start()
        assert asked.wait(LIMIT_S)
        donor.server.publish(HEAD, SEQ, theirs.tensors(), theirs.manifest())
        thread.join(LIMIT_S)
    assert reports[0].state_hash == state_hash(theirs.tensors()) == state_hash(mine.tensors())


def test_reduced_bytes_come_from_whoever_holds_them() -> None:
    result = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8)
    mine = torch.zeros_like(result)
    spans = {"a": [(0, 600_000)], "b": [(400_000, 1_000_000)]}
    with donors("a", "b") as started:
        for donor in started:
            donor.server.publish_result(SEQ, HEAD, result, spans[donor.member])
        report = pull_result(
            [d.endpoint for d in started], dial, head=HEAD, seq=SEQ, memory=mine, spans=spans, config=CONFIG
        )
    assert torch.equal(result, mine)
    assert report.nbytes == 1_000_000 == sum(report.by_source.values())
    assert all(n >= 400_000 for n in report.by_source.values())


def test_only_wanted_reduced_bytes_travel() -> None:
    result = bytearray(range(256)) * 10
    mine = bytearray(len(result))
    with donors("a") as started:
        started[0].server.publish_result(SEQ, HEAD, memoryview(result), [(0, 2000), (2000, len(result))])
        pull_result(
            [started[0].endpoint],
            dial,
            head=HEAD,
            seq=SEQ,
            memory=memoryview(mine),
            spans={"a": [(0, len(result))]},
            wanted=[(100, 200), (1990, 2010)],
        )
    assert mine[100:200] == result[100:200]
    assert mine[1990:2010] == result[1990:2010]
    assert not any(mine[:100] + mine[200:1990] + mine[2010:])


def test_reduced_bytes_that_nobody_holds_are_named() -> None:
    with pytest.raises(StateError, match=r"nobody holds the reduced bytes \[5, 10\)"):
        pull_result(
            [Endpoint("a", "127.0.0.1", 1)],
            dial,
            head=HEAD,
            seq=SEQ,
            memory=torch.zeros(10, dtype=torch.uint8),
            spans={"a": [(0, 5)]},
        )
