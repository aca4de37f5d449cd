"""Tests timed layers, which take a given time and compute a known formula."""

from __future__ import annotations

import time

import torch

from lab.timed_layer import TimedLayer
from lab.timed_layers import PARAMETERS, TimedModel

SHORT_S, LONG_S = 0.02, 0.04


def test_passes_end_at_their_deadlines_also_where_no_gradient_of_the_input_is_wanted():
    layer = TimedLayer(4, SHORT_S, LONG_S)
    x = torch.randn(3, 4)
    began = time.monotonic()
    y = layer(x)
    between = time.monotonic()
    y.square().sum().backward()
    assert between - began >= SHORT_S
    assert time.monotonic() - between >= LONG_S
    expected = torch.autograd.grad((x + 0.1 * layer.linear(x)).square().sum(), layer.linear.weight)[0]
    torch.testing.assert_close(layer.linear.weight.grad, expected)


def test_no_optimizer_state_stays_zero():
    """No optimizer state of a timed layer is zero after a step, since zero state would be left out of a pull, whose
    bytes would then be too few.
    """
    layer = TimedLayer(4, 0.0, 0.0)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        assert all(t.count_nonzero() for t in state.values())


def test_the_planner_is_told_of_every_byte():
    model = TimedModel(2, 5, SHORT_S, LONG_S)
    model.configure_model()
    optimizer = model.configure_optimizers()
    model.layers[1](model.layers[0](torch.randn(3, 5))).sum().backward()
    optimizer.step()
    parameters = list(model.layers[0].parameters())
    (layer, _) = model.job(micro_batches=4, samples=3, owned=1.5).layers
    assert len(parameters) == PARAMETERS
    assert layer.parameter_nbytes == layer.gradient_nbytes == sum(p.nbytes for p in parameters)
    assert layer.optimizer_nbytes == sum(t.nbytes for p in parameters for t in optimizer.state[p].values())
