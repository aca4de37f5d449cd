"""Tests the way of gradients from hooks to flat memory and back into `.grad`, with a simulated reducer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chaos_lightning.collectives.gradients import LEND_NBYTES, Gradients
from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.protocol.types import NO_VIEW, Header, Kind, equal_shares


class Bench:
    """Model with its gradients; `commit` commits `times` times its own contribution, as if equal members had sent
    it.
    """

    def __init__(self, model: nn.Module, *, overlap: bool = True, buffers=()) -> None:
        self.model = model
        self.layout = Layout([Section("all", list(model.named_parameters()))], buffers)
        self.memory = Memory(self.layout, 16384)
        self.ready: list[int] = []
        self.cells = [start for start, _ in self.memory.grid]
        self.gradients = Gradients(self.memory, overlap, lambda cells: self.ready.extend(cells))

    def commit(self, presence: bytes, weights: list[float], times: int = 1) -> Header:
        result = self.memory.result_bytes[1]
        at = 0
        for piece in self.memory.pieces(0, self.layout.nbytes):
            result[at : at + piece.nbytes] = piece
            at += piece.nbytes
        self.memory.results[1].view(torch.float32).mul_(times)
        shares = equal_shares((w, w) for w in weights)
        header = Header(1, Kind.STEP, 1, NO_VIEW, "", NO_VIEW, shares=shares, presence=presence)
        self.gradients.apply(header)
        return header


def model(width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))


def expected(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    grads = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    return [g.clone() for g in grads]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_average_is_what_one_process_would_have(overlap: bool, coefficient: float) -> None:
    net = model()
    assert any(p.numel() * 4 >= LEND_NBYTES for p in net.parameters())
    assert any(p.numel() * 4 < LEND_NBYTES for p in net.parameters())
    bench = Bench(net, overlap=overlap)
    x = torch.randn(8, 16)
    wanted = expected(net, x)
    bench.gradients.arm(0, coefficient)
    net(x).sum().backward()
    assert bool(bench.ready) == overlap
    presence = bench.gradients.flush()
    assert sorted(bench.ready) == bench.cells
    bench.commit(presence, [coefficient, coefficient], times=2)
    for p, want in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want)


def test_raw_results_stay_as_they_were_when_gradients_are_clipped() -> None:
    net = model()
    bench = Bench(net)
    bench.gradients.arm(0, 1.0)
    net(torch.randn(8, 16)).sum().backward()
    bench.commit(bench.gradients.flush(), [1.0])
    raw = bench.memory.results[1].clone()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    torch.optim.SGD(net.parameters(), 0.1).step()
    assert torch.equal(bench.memory.results[1], raw)


def test_a_parameter_absent_everywhere_has_no_gradient() -> None:
    net = model()
    bench = Bench(net)
    bench.gradients.arm(0, 1.0)
    net[0](torch.randn(4, 16)).sum().backward()
    bench.commit(bench.gradients.flush(), [1.0])
    assert net[0].weight.grad is not None
    assert net[3].weight.grad is None


def test_a_step_in_which_nobody_had_samples_leaves_no_gradient() -> None:
    net = model()
    bench = Bench(net)
    net(torch.randn(4, 16)).sum().backward()  # the dummy batch of an idle member
    bench.gradients.arm(0, 0.0)
    bench.gradients.disarm()
    bench.commit(b"", [0.0])
    assert all(p.grad is None for p in net.parameters())


def test_a_step_in_which_nobody_had_samples_leaves_buffers_as_they_were() -> None:
    """In a step without samples, stand-in batches must not change the running statistics."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    bench = Bench(net, buffers=list(net[1].named_buffers()))
    bench.gradients.arm(0, 1.0)
    net(torch.randn(8, 4)).sum().backward()
    bench.commit(bench.gradients.flush(), [1.0])
    settled = {n: b.clone() for n, b in net[1].named_buffers()}
    net(torch.randn(8, 4) + 7.0).sum().backward()
    assert not torch.equal(net[1].running_mean, settled["running_mean"])
    bench.gradients.arm(0, 0.0)
    bench.gradients.disarm()
    bench.commit(b"", [0.0])
    for name, buffer in net[1].named_buffers():
        assert torch.equal(buffer, settled[name]), name


def add_to_what_the_last_step_left(bench: Bench, coefficient: float, zeroed: bool) -> None:
    """Makes two steps, with gradients zeroed in place (`zeroed`) or kept in between, and checks the second one's
    average.
    """
    net, device = bench.model, next(bench.model.parameters()).device
    first, second = torch.randn(8, 16, device=device), torch.randn(8, 16, device=device)
    wanted = [expected(net, second)] if zeroed else [expected(net, first), expected(net, second)]
    for x in (first, second):
        if zeroed:
            net.zero_grad(set_to_none=False)
        bench.gradients.arm(0, coefficient)
        net(x).sum().backward()
        bench.commit(bench.gradients.flush(), [coefficient, coefficient], times=2)
    for p, parts in zip(net.parameters(), zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(p.grad, torch.stack(parts).sum(0))


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("apart", [False, True], ids=["host", "as on a device"])
def test_a_backward_pass_may_add_to_what_the_last_step_left(coefficient: float, zeroed: bool, apart: bool) -> None:
    """A backward pass adds to gradients that view the flat memory of the last average; the average is right, on the
    host and as on a device.
    """
    bench = Bench(model())
    if apart:
        bench.gradients._flat = torch.zeros_like(bench.memory.own)
    add_to_what_the_last_step_left(bench, coefficient, zeroed)


def test_a_gradient_that_the_last_step_left_and_that_changes_after_it_was_sent_is_named() -> None:
    net = model()
    bench = Bench(net)
    for _ in range(2):
        net.zero_grad(set_to_none=False)
        bench.gradients.arm(0, 1.0)
        net(torch.randn(4, 16)).sum().backward()
        bench.commit(bench.gradients.flush(), [1.0])
    bench.gradients.arm(0, 1.0)
    net(torch.randn(4, 16)).sum().backward()
    net[2].weight.grad.mul_(0.5)
    with pytest.raises(ConfigurationError, match=r"2\.weight.*changed between backward and the optimizer step"):
        bench.gradients.flush()


def test_gradients_changed_after_they_were_sent_are_named() -> None:
    net = model()
    bench = Bench(net)
    bench.gradients.arm(0, 1.0)
    net(torch.randn(4, 16)).sum().backward()
    net[2].weight.grad.mul_(0.5)
    with pytest.raises(ConfigurationError, match=r"2\.weight.*changed between backward and the optimizer step"):
        bench.gradients.flush()


def test_a_second_backward_after_sending_is_named() -> None:
    net = model()
    bench = Bench(net)
    bench.gradients.arm(0, 1.0)
    net(torch.randn(4, 16)).sum().backward()
    net(torch.randn(4, 16)).sum().backward()
    with pytest.raises(ConfigurationError, match="overlap=False"):
        bench.gradients.flush()


def test_two_backward_passes_are_one_step_without_overlap() -> None:
    net = model()
    bench = Bench(net, overlap=False)
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    wanted = [a + b for a, b in zip(expected(net, x), expected(net, y), strict=True)]
    bench.gradients.arm(0, 1.0)
    net(x).sum().backward()
    net(y).sum().backward()
    bench.commit(bench.gradients.flush(), [1.0])
    for p, want in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want)


def test_buffers_are_averaged_and_counters_stay_whole() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    bench = Bench(net, buffers=list(net[1].named_buffers()))
    bench.gradients.arm(0, 0.5)
    net(torch.randn(8, 4)).sum().backward()
    mean = net[1].running_mean.clone()
    bench.commit(bench.gradients.flush(), [0.5, 0.5], times=2)
    torch.testing.assert_close(net[1].running_mean, mean)
    assert net[1].num_batches_tracked.item() == 1


def test_layout_refuses_what_cannot_be_summed() -> None:
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedError, match="stands in two optimizers"):
        Layout([Section("one", [("w", weight)]), Section("two", [("w", weight)])])
    with pytest.raises(ConfigurationError, match="complex"):
        Layout([Section("one", [("z", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))])])
