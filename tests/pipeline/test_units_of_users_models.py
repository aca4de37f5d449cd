"""Tests the executor with a user's own model, of which each member has built only the parts that it owns."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from executor_support import Member, Post, detoured, plan_of, run_all, vacant
from pipeline_models import GPT, Checkpointed, step_of, tokens

from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.forward import ForwardUnit
from chaos_lightning.pipeline.parts import ModelParts, find_parts
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.recording import Recording
from chaos_lightning.planning.pipelines.units import ViewPipelines

ONE_AT_A_TIME = threading.RLock()
"""Members are threads here, and a process has its random numbers but once."""


class LockedLayers:
    """Chain that runs one pass at a time among all chains of the process."""

    def __init__(self, chain: LayerChain) -> None:
        self.chain = chain

    def __len__(self) -> int:
        return len(self.chain)

    def run(self, *args: Any, **options: Any) -> ForwardUnit:
        with ONE_AT_A_TIME:
            unit = self.chain.run(*args, **options)
        backward = unit.backward

        def locked(*args: Any) -> Any:
            with ONE_AT_A_TIME:
                return backward(*args)

        unit.backward = locked  # type: ignore[method-assign]
        return unit


def build(kind: type[GPT], layers: set[int]) -> tuple[Any, ModelParts, LayerChain]:
    recording = Recording(5)
    with ONE_AT_A_TIME, recording.recorded():
        model = kind(tied=True, dropout=0.2).double()
    memory = ModelMemory(model, 5, "cpu", recording)
    chain = LayerChain(model, "blocks", step_of(model), randomness=Randomness(5))
    parts = find_parts(chain, tokens())
    memory.own([name for part in parts.owned_by(layers) for name in parts.names(part)])
    return model, parts, chain


def a_member(post: Post, name: str, view: ViewPipelines, kind: type[GPT]) -> Member:
    layers = {layer for unit in view.units(name, ()) for layer in range(unit.first, unit.end)}
    model, _, chain = build(kind, layers)
    member = Member(post, name, torch.nn.Module(), None)
    member.net, member.layers = model, LockedLayers(chain)
    member.executor = type(member.executor)(model, member.layers, member.exchange, member.finished)
    member.executor.remember_base()
    return member


VIEWS = {
    "3 stages": ViewPipelines.of(plan_of([(0, 1, 3, 4)], [5])),
    "DP 2 x PP 2": ViewPipelines.of(plan_of([(0, 2, 4), (0, 1, 4)], [3, 2])),
    "a detour": detoured(),
    "a vacant place": vacant(),
}


@pytest.mark.parametrize("kind", [GPT, Checkpointed])
@pytest.mark.parametrize("name", VIEWS)
def test_gradients_do_not_depend_on_the_plan(name: str, kind: type[GPT]) -> None:
    view = VIEWS[name]
    batches = [tokens(rows) for rows in (3, 2, 4, 1, 2)]
    weights = [float(len(inputs)) for inputs, _ in batches]
    post = Post()
    members = [a_member(post, member, view, kind) for member in sorted(view.plan.stages) if member]
    sums = run_all(members, view, batches, weights)

    whole, _, chain = build(kind, set(range(4)))
    losses = {}
    for j, batch in enumerate(batches):
        unit = chain.run(0, 4, batch, at=(3, j))
        losses[j] = unit.result.detach()
        unit.backward([unit.result * weights[j]], [None])
    expected = {n: p.grad for n, p in whole.named_parameters()}

    assert {j: float(loss) for s in sums.values() for j, loss in s.losses.items()} == pytest.approx(
        {j: float(loss) for j, loss in losses.items()}, rel=1e-12
    )
    total: dict[str, torch.Tensor] = {}
    for member in members:
        for n, p in member.net.named_parameters():
            assert p.grad is None or not is_absent(p), n
            if p.grad is not None:
                total[n] = total[n] + p.grad if n in total else p.grad
    assert total.keys() == expected.keys()
    for n, gradient in expected.items():
        assert float((total[n] - gradient).abs().max()) <= 1e-12 * max(1.0, float(gradient.abs().max())), n
    held = [{n for n, _, _, t in named_tensors(m.net) if not is_absent(t)} for m in members]
    assert all("blocks.0.ln.weight" not in mine or "blocks.3.ln.weight" not in mine for mine in held)
