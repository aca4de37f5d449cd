"""Tests the way of gradients through an accelerator, by asynchronous copies to pinned memory, without a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_gradients import Bench, add_to_what_the_last_step_left, expected, model
from torch import nn

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch.accelerator finds no device here"),
]


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    """List for benches, which are closed when the test ends; their staging threads must end then."""
    made: list[Bench] = []
    yield made
    for bench in made:
        stage = bench.gradients._stage
        assert stage is not None
        bench.gradients.close()
        assert not stage._thread.is_alive()


def bench_of(benches: list[Bench], net: nn.Module, overlap: bool = True, buffers: object = ()) -> Bench:
    benches.append(Bench(net, overlap=overlap, buffers=buffers))
    return benches[-1]


def device() -> str:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_average_is_what_one_process_would_have(benches: list[Bench], overlap: bool, coefficient: float) -> None:
    net = model(1024).to(device())
    bench = bench_of(benches, net, overlap)
    for _ in range(3):  # the second step's copies go over the first one's memory
        x = torch.randn(8, 16, device=device())
        wanted = expected(net, x)
        bench.ready.clear()
        bench.gradients.arm(0, coefficient)
        net.zero_grad()
        net(x).sum().backward()
        presence = bench.gradients.flush()
        assert sorted(bench.ready) == bench.cells
        bench.commit(presence, [coefficient, coefficient], times=2)
        for p, want in zip(net.parameters(), wanted, strict=True):
            assert p.grad is not None
            assert p.grad.device == p.device
            torch.testing.assert_close(p.grad, want)


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
@pytest.mark.parametrize("zeroed", [True, False])
def test_a_backward_pass_may_add_to_what_the_last_step_left(
    benches: list[Bench], coefficient: float, zeroed: bool
) -> None:
    add_to_what_the_last_step_left(bench_of(benches, model(1024).to(device())), coefficient, zeroed)


def test_cells_are_reported_after_their_copies_have_landed(benches: list[Bench]) -> None:
    """A range of the gradient buffer is reported ready only after it was copied to host memory."""
    net = model(1024).to(device())
    bench = bench_of(benches, net)
    seen: dict[int, torch.Tensor] = {}
    bench.gradients._stage._ready = lambda cells: seen.update({c: bench.memory.own.clone() for c in cells})
    bench.gradients.arm(0, 1.0)
    net(torch.randn(512, 16, device=device())).sum().backward()
    bench.gradients.flush()
    assert sorted(seen) == bench.cells
    final = bench.memory.own
    for start, then in seen.items():
        stop = min([c for c in bench.cells if c > start], default=bench.layout.nbytes)
        assert torch.equal(then[start:stop], final[start:stop])


def test_raw_results_stay_as_they_were_when_gradients_are_clipped(benches: list[Bench]) -> None:
    net = model().to(device())
    bench = bench_of(benches, net)
    bench.gradients.arm(0, 1.0)
    net(torch.randn(8, 16, device=device())).sum().backward()
    bench.commit(bench.gradients.flush(), [1.0])
    raw = bench.memory.results[1].clone()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    torch.optim.SGD(net.parameters(), 0.1).step()
    torch.accelerator.synchronize()
    assert torch.equal(bench.memory.results[1], raw)


def test_a_parameter_absent_everywhere_has_no_gradient(benches: list[Bench]) -> None:
    net = model().to(device())
    bench = bench_of(benches, net)
    bench.gradients.arm(0, 1.0)
    net[0](torch.randn(4, 16, device=device())).sum().backward()
    bench.commit(bench.gradients.flush(), [1.0])
    assert net[0].weight.grad is not None
    assert net[3].weight.grad is None


def test_buffers_are_averaged_and_counters_stay_whole(benches: list[Bench]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device())
    bench = bench_of(benches, net, buffers=list(net[1].named_buffers()))
    bench.gradients.arm(0, 0.5)
    net(torch.randn(8, 4, device=device())).sum().backward()
    mean = net[1].running_mean.clone()
    bench.commit(bench.gradients.flush(), [0.5, 0.5], times=2)
    torch.testing.assert_close(net[1].running_mean, mean)
    assert net[1].num_batches_tracked.item() == 1


def test_an_error_of_the_reducer_is_told_by_the_next_step(benches: list[Bench]) -> None:
    """An error in the staging thread is raised by `flush`, instead of a wait for copies that are never reported."""
    net = model().to(device())
    bench = bench_of(benches, net)

    def broken(cells: object) -> None:
        raise RuntimeError("the reducer is gone")

    bench.gradients._stage._ready = broken
    bench.gradients.arm(0, 1.0)
    net(torch.randn(8, 16, device=device())).sum().backward()
    with pytest.raises(RuntimeError, match="the reducer is gone"):
        bench.gradients.flush()


def test_the_average_has_the_bits_that_the_host_would_compute(benches: list[Bench]) -> None:
    """The average computed on a device has the same bits as one computed on the host, since members and replay may use
    either.
    """
    net = model(256).to(device())
    bench = bench_of(benches, net)
    weights = [0.3, 0.7, 1.1]
    for step in range(4):
        bench.gradients.arm(0, 0.3)
        net.zero_grad()
        net(torch.randn(64, 16, device=device())).sum().backward()
        header = bench.commit(bench.gradients.flush(), weights, times=step + 1)
        host = bench.memory.results[1].view(torch.float32) * (1.0 / header.total_weight)
        for index, slot in enumerate(bench.layout.slots):
            assert slot.tensor.grad is not None
            assert torch.equal(slot.tensor.grad.cpu(), bench.memory.view(host.view(torch.uint8), index))
