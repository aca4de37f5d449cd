"""Tests the executor: gradients equal those of one process for all plans; dropped attempts; errors that name
the cause.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from executor_support import (
    FIRST,
    SECOND,
    Member,
    Post,
    detoured,
    one_process,
    plan_of,
    run_all,
    summed,
    vacant,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from chaos_lightning.errors import AttemptOverError, ConfigurationError, StateError, UnsupportedError
from chaos_lightning.pipeline.executor import loss_of
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage_error

WIDTH = 6


def loss(x, batch):
    return F.mse_loss(x, batch[1])


def a_net(layers=4, dtype=torch.float64, norm=True):
    torch.manual_seed(0)
    blocks = []
    for i in range(layers):
        block = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm and i % 2 else nn.Tanh()]
        blocks.append(nn.Sequential(*block))
    return nn.Sequential(*blocks).to(dtype)


def batches_of(count, dtype=torch.float64):
    torch.manual_seed(1)
    return [
        (torch.randn(3 + j % 2, WIDTH, dtype=dtype), torch.randn(3 + j % 2, WIDTH, dtype=dtype)) for j in range(count)
    ]


def weights_of(batches):
    return [float(len(b[0])) for b in batches]


def members_of(view, net, post=None, loss=loss, **more):
    post = post or Post()
    return [Member(post, name, net, loss, **more) for name in sorted(view.plan.stages)]


def by_itself(cuts, micro_batches, **more):
    return ViewPipelines.of(plan_of(cuts, micro_batches, **more))


VIEWS = {
    "2 stages": by_itself([(0, 2, 4)], [5]),
    "3 stages": by_itself([(0, 1, 2, 4)], [5]),
    "fewer micro-batches than stages": by_itself([(0, 1, 2, 3, 4)], [2]),
    "one stage": by_itself([(0, 4)], [3]),
    "more in flight": by_itself([(0, 2, 4)], [5], in_flight_extra=2),
    "DP 2 x PP 2": by_itself([(0, 2, 4), (0, 2, 4)], [3, 2]),
    "uneven pipelines": by_itself([(0, 1, 3, 4), (0, 3, 4), (0, 4)], [3, 1, 2]),
    "a pipeline without micro-batches": by_itself([(0, 2, 4), (0, 1, 4)], [3, 0]),
    "a detour": detoured(),
    "a vacant place": vacant(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", VIEWS)
def test_gradients_are_those_of_one_process(name, dtype):
    view, net = VIEWS[name], a_net(dtype=dtype)
    batches = batches_of(view.plan.micro_batches, dtype)
    weights = weights_of(batches)
    members = members_of(view, net)
    sums = run_all(members, view, batches, weights)
    expected, _ = one_process(net, loss, batches, weights, range(len(batches)))
    got = summed(members)
    assert set(got) == set(expected)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    for key, value in expected.items():
        assert float((got[key] - value).abs().max()) <= bound * max(1.0, float(value.abs().max())), key
    assert {j: w for s in sums.values() for j, w in s.weights.items()} == dict(enumerate(weights))
    assert sorted(j for s in sums.values() for j in s.losses) == list(range(len(batches)))
    due = [(0, len(batches))]
    assert coverage_error(4, due, {m: s.covered for m, s in sums.items()}) == ""
    assert all(m.executor._forwards == {} for m in members)


def test_one_pipeline_has_the_very_bits_of_one_process():
    view, net = VIEWS["3 stages"], a_net(norm=False, dtype=torch.float32)
    batches = batches_of(5, torch.float32)
    members = members_of(view, net)
    run_all(members, view, batches, weights_of(batches))
    expected, _ = one_process(net, loss, batches, weights_of(batches), range(5))
    assert all(torch.equal(value, expected[key]) for key, value in summed(members).items())


@pytest.mark.parametrize("empty", [{1}, {0, 4}, {0, 1, 2, 3, 4}])
@pytest.mark.parametrize("name", ["3 stages", "a detour", "a vacant place"])
def test_an_empty_micro_batch_has_no_units(name, empty):
    view, net = VIEWS[name], a_net()
    batches = batches_of(5)
    weights = weights_of(batches)
    members = members_of(view, net)
    sums = run_all(members, view, [None if j in empty else b for j, b in enumerate(batches)], weights, empty=empty)
    expected, _ = one_process(net, loss, batches, weights, [j for j in range(5) if j not in empty])
    got = summed(members)
    assert all(torch.allclose(got[key], v, rtol=1e-12, atol=1e-13) for key, v in expected.items() if v is not None)
    assert sorted(j for s in sums.values() for j in s.weights) == [j for j in range(5) if j not in empty]


def test_layers_are_done_with_their_last_backward_pass():
    view = VIEWS["2 stages"]
    members = members_of(view, a_net())
    batches = batches_of(5)
    run_all(members, view, batches, weights_of(batches))
    assert members[1].finished.told == [("closing", 3, 2), ("done", 3), ("done", 2)]
    assert members[0].layers.ran[0] == (0, 2, (3, 0))


# ------------------------------------------------------------------------------------------------ attempts


def state_of(members):
    return {
        m.name: [
            *(None if p.grad is None else p.grad.clone() for p in m.net.parameters()),
            *(b.clone() for b in m.net.buffers()),
        ]
        for m in members
    }


def equal_bits(one, other):
    return all(
        len(one[m]) == len(other[m])
        and all(
            (a is b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(one[m], other[m], strict=True)
        )
        for m in one
    )


@pytest.mark.parametrize("name", ["2 stages", "3 stages", "uneven pipelines", "a detour", "a vacant place"])
@pytest.mark.parametrize("look", [1, 2, 4, 6])
def test_a_dropped_attempt_leaves_nothing_and_runs_again_with_equal_bits(name, look):
    view, net = VIEWS[name], a_net(dtype=torch.float32)
    batches = batches_of(view.plan.micro_batches, torch.float32)
    weights = weights_of(batches)
    undisturbed = members_of(view, net)
    run_all(undisturbed, view, batches, weights)

    post = Post()
    members = members_of(view, net, post)
    at_base = state_of(members)
    busiest = max(members, key=lambda m: len(view.units(m.name))).name
    post.at_check = lambda me, number: post.end(FIRST.view) if (me, number) == (busiest, look) else None
    ended = run_all(members, view, batches, weights)
    assert any(isinstance(e, AttemptOverError) for e in ended.values())
    for m in members:
        m.executor.drop()  # a member that had run all its units hears of the end later
    assert equal_bits(state_of(members), at_base)
    post.at_check = None
    run_all(members, view, batches, weights, SECOND)
    assert equal_bits(state_of(members), state_of(undisturbed))
    assert post.sent == {}


def test_after_a_loss_the_step_runs_on_other_routes():
    net, batches = a_net(norm=False), batches_of(5)
    weights = weights_of(batches)
    post = Post()
    members = members_of(VIEWS["DP 2 x PP 2"], net, post)
    post.at_check = lambda me, number: post.end(FIRST.view) if (me, number) == ("b", 3) else None
    run_all(members, ViewPipelines.of(plan_of([(0, 2, 4), (0, 2, 4)], [2, 3])), batches, weights)
    left = [m for m in members if m.name != "b"]
    for m in left:
        m.executor.drop()
    post.at_check = None
    sums = run_all(left, vacant(), batches, weights, SECOND)
    expected, _ = one_process(net, loss, batches, weights, range(5))
    got = summed(left)
    assert all(torch.allclose(got[key], v, rtol=1e-13, atol=1e-14) for key, v in expected.items())
    assert coverage_error(4, [(0, 5)], {m: s.covered for m, s in sums.items()}) == ""


def test_a_wait_ends_with_its_attempt():
    post = Post()
    view = VIEWS["2 stages"]
    waiting = members_of(view, a_net(), post)[1]
    timer = threading.Timer(0.05, lambda: post.end(FIRST.view))
    timer.start()
    with pytest.raises(AttemptOverError):
        waiting.run(view, batches_of(5), [1.0] * 5)
    timer.join()


def test_the_next_step_begins_at_its_own_base():
    view, net = VIEWS["2 stages"], a_net()
    batches = batches_of(5)
    members = members_of(view, net)
    run_all(members, view, batches, weights_of(batches))
    for m in members:
        m.executor.remember_base()
    base = [b.clone() for b in members[1].net.buffers()]
    run_all(members, view, batches, weights_of(batches), SECOND)
    assert not all(torch.equal(a, b) for a, b in zip(base, members[1].net.buffers(), strict=True))
    members[1].executor.drop()
    assert all(torch.equal(a, b) for a, b in zip(base, members[1].net.buffers(), strict=True))


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + 1
        return x


def test_a_buffer_that_was_replaced_returns():
    net = nn.Sequential(Replacing(), nn.Linear(WIDTH, WIDTH)).double()
    view = by_itself([(0, 2)], [2])
    (member,) = members_of(view, net)
    before = member.net[0].count
    run_all([member], view, batches_of(2), [1.0] * 2)
    assert float(member.net[0].count) == 2
    member.executor.drop()
    assert member.net[0].count is before
    assert float(before) == 0


# ------------------------------------------------------------------------------------------------ models


def equal_to_whole(net, view, loss=loss, around=None, tolerance=0.0):
    batches = batches_of(view.plan.micro_batches, next(net.parameters()).dtype)
    weights = weights_of(batches)
    more = {} if around is None else {"around": around}
    members = members_of(view, net, loss=loss, **more)
    run_all(members, view, batches, weights)

    def whole(x):
        with (around or contextlib.nullcontext)():
            return net(x)

    net.zero_grad()
    for j, batch in enumerate(batches):
        with (around or contextlib.nullcontext)():
            value = loss(net(batch[0]), batch)
        if value.requires_grad:
            (value * weights[j]).backward()
    got = summed(members)
    for name, p in net.named_parameters():
        assert (p.grad is None) == (name not in got), name
        if p.grad is not None:
            assert float((got[name] - p.grad).abs().max()) <= tolerance, name
    return members


def test_bf16_autocast():
    view = by_itself([(0, 1, 2, 3)], [4])
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)], nn.Linear(WIDTH, WIDTH))
    members = equal_to_whole(net, view, around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert members[0].net[0][0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1,), (2,), (0, 1, 2)])
def test_frozen_layers(frozen):
    net = a_net(3, norm=False)
    for i in frozen:
        net[i].requires_grad_(False)
    equal_to_whole(net, by_itself([(0, 1, 2, 3)], [4]))


def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    equal_to_whole(nn.Sequential(*[Checkpointed() for _ in range(4)]).double(), by_itself([(0, 2, 4)], [4]))


def test_a_layer_may_write_to_what_it_receives():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)).double()
    equal_to_whole(net, by_itself([(0, 1, 2, 3)], [4]))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, mask, _ = x if isinstance(x, tuple) else (x, torch.ones_like(x, dtype=torch.bool), None)
        return self.linear(a) * mask, mask, a * 2


class Only(nn.Module):
    def forward(self, x):
        return x[0]


def test_tuples_with_tensors_that_need_no_gradient_or_get_none():
    net = nn.Sequential(Pairs(), Pairs(), Only(), nn.Linear(WIDTH, WIDTH)).double()
    equal_to_whole(net, by_itself([(0, 1, 2, 3, 4)], [4]))


def test_a_step_without_a_loss_counts_nothing():
    view, net = VIEWS["2 stages"], a_net(norm=False)
    batches = batches_of(5)
    skipping = lambda x, batch: None if batch is batches[1] else loss(x, batch)  # noqa: E731
    members = members_of(view, net, loss=skipping)
    sums = run_all(members, view, batches, weights_of(batches))
    expected, _ = one_process(net, loss, batches, weights_of(batches), [0, 2, 3, 4])
    assert all(torch.equal(value, expected[key]) for key, value in summed(members).items())
    assert (sums["b"].weights[1], sums["b"].losses[1], sums["b"].results[1]) == (0.0, None, None)


def test_results_are_kept_without_the_graph():
    view, net = by_itself([(0, 4)], [2]), a_net()
    members = members_of(view, net, loss=lambda x, batch: {"loss": loss(x, batch), "out": x, "words": "a"})
    sums = run_all(members, view, batches_of(2), [1.0, 1.0])["a"]
    assert sums.results[1]["words"] == "a"
    assert not sums.results[1]["out"].requires_grad
    assert not sums.losses[0].requires_grad


# ------------------------------------------------------------------------------------------------ evaluation, times


@pytest.mark.parametrize("name", ["3 stages", "a detour", "a vacant place"])
def test_evaluation_runs_forward_over_the_same_routes(name):
    view, net = VIEWS[name], a_net().eval()
    batches = batches_of(5)
    members = members_of(view, net)
    kept = [p.grad for p in members[0].net.parameters()]
    sums = run_all(
        members, view, batches, [1.0] * 5, empty={2}, call=lambda got: {"out": got[0], "count": len(got[1][0])}
    )
    results = {j: result for s in sums.values() for j, result in s.results.items()}
    assert sorted(results) == [0, 1, 3, 4]
    for j, result in results.items():
        assert torch.equal(result["out"], net(batches[j][0]).detach())
        assert result["count"] == len(batches[j][0])
        assert not result["out"].requires_grad
    assert all(s.covered == () and s.weights == {} for s in sums.values())
    assert [p.grad for p in members[0].net.parameters()] == kept
    assert all(m.executor._forwards == {} for m in members)


def test_units_are_timed():
    view = VIEWS["2 stages"]
    batches = batches_of(5)
    sums = run_all(members_of(view, a_net()), view, batches, [1.0] * 5)
    for name, found in sums.items():
        assert [t.unit for t in found.times] == list(view.units(name))
        marks = [mark for t in found.times for mark in (t.began, t.ended)]
        assert marks == sorted(marks)


# ------------------------------------------------------------------------------------------------ what goes wrong


class Raises(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words = words

    def forward(self, x):
        raise ValueError(self.words)


def test_a_layer_that_raises_ends_with_its_name():
    net = a_net()
    net[2] = Raises("not this one")
    view = VIEWS["2 stages"]
    with pytest.raises(ValueError, match="not this one") as caught:
        run_all(members_of(view, net), view, batches_of(5), [1.0] * 5)
    assert caught.value.__notes__ == [
        "in layer 2",
        "This happened in the forward pass of micro-batch 0 through layers 2 to 3 (step 3).",
    ]


class BreaksBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broken")


def test_a_layer_that_raises_in_backward_is_named():
    class Breaks(nn.Module):
        def forward(self, x):
            return BreaksBack.apply(x)

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Breaks()).double()
    view = by_itself([(0, 2)], [1])
    with pytest.raises(ArithmeticError, match="broken") as caught:
        run_all(members_of(view, net), view, batches_of(1), [1.0])
    assert "the backward pass of micro-batch 0 through layers 0 to 1" in caught.value.__notes__[-1]


class Remembers(nn.Module):
    """Module that, when called again, writes to its previous output in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        if self.last is not None:
            with torch.no_grad():
                self.last.mul_(2)
        self.last = self.linear(x)
        return self.last


def test_a_write_to_a_tensor_that_was_sent_is_found_and_named():
    net = nn.Sequential(Remembers(), nn.Linear(WIDTH, WIDTH)).double()
    view = by_itself([(0, 1, 2)], [3])
    with pytest.raises(UnsupportedError, match="tensor 0 that layer 0 passes to layer 1 was written to in place"):
        run_all(members_of(view, net), view, batches_of(3), [1.0] * 3)


def test_gradients_of_another_shape_are_refused():
    view, net = VIEWS["2 stages"], a_net()
    post = Post()
    members = members_of(view, net, post)
    send = members[1].exchange.send

    def shorter(attempt, to, key, border):
        send(attempt, to, key, replace(border, tensors=tuple(t[:1] for t in border.tensors)))

    members[1].exchange.send = shorter
    with pytest.raises(StateError, match="expected the same types and shapes"):
        run_all(members, view, batches_of(5), [1.0] * 5)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(3), r"a tensor of shape \(3,\)"),
        ("text", "a str"),
        ({"no": 1}, "a NoneType"),
        (1.0, "a float"),
    ],
)
def test_a_result_without_a_loss_is_refused(result, words):
    with pytest.raises(ConfigurationError, match=words):
        loss_of(result)


def test_losses_are_found():
    assert loss_of(None) is None
    assert float(loss_of({"loss": torch.tensor([2.0])})) == 2.0


# ------------------------------------------------------------------------------------------------ memory


def test_tensors_are_let_go_of_when_no_unit_needs_them():
    view, net = by_itself([(0, 2, 4)], [1]), a_net(norm=False)
    members = members_of(view, net)
    seen = []
    for m in members:
        run = m.layers.run

        def watched(*args, run=run, **kwargs):
            done = run(*args, **kwargs)
            seen.extend(weakref.ref(t) for t in done.tensors)
            seen.append(weakref.ref(done))
            return done

        m.layers.run = watched
    waiting = []

    def look(me, number):
        if (me, number) == ("a", 2):  # its forward pass is done and sent
            gc.collect()
            waiting.extend(ref() is None for ref in seen[:2])

    members[0].exchange.post.at_check = look
    run_all(members, view, batches_of(1), [1.0])
    gc.collect()
    assert len(seen) == 3
    assert [ref() for ref in seen] == [None] * 3
    assert waiting == [True, False]  # what was sent, and what waits for its backward pass


def test_kept_tensors_are_counted():
    view = by_itself([(0, 2, 4)], [6])
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    torch.manual_seed(0)
    batches = [(torch.randn(32, 64), torch.randn(32, 64)) for _ in range(6)]
    members = members_of(view, net, counted=True)
    sums = run_all(members, view, batches, [1.0] * 6)
    x = 32 * 64 * 4
    # A linear layer keeps its input and a tanh its output, which is the next one's input.
    assert sums["a"].peak_nbytes == 2 * (3 * x) + x
    assert sums["b"].peak_nbytes == pytest.approx(3 * x + 2 * x, rel=0.35)
    assert all(m.executor.kept.now_nbytes == 0 for m in members)
