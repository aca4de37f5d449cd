"""Tests the lines about pipelines on the console."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import NO_VIEW, Member, View, ViewId
from lab.simulate.pipelines import asked
from lab.simulate.training import Program


def view_of(*pipelines: tuple[str, ...]) -> View:
    """Returns a view with these pipelines: each stage has two layers, the last one the rest of six."""
    ends = [[2 * (i + 1) for i in range(len(names) - 1)] + [6] for names in pipelines]
    rows = [
        Pipeline(tuple(PlanStage(n, end[i - 1] if i else 0, end[i]) for i, n in enumerate(names)), 4 // len(pipelines))
        for names, end in zip(pipelines, ends, strict=True)
    ]
    members = tuple(Member(n, n, n, n, 1, 1, 1, 1) for names in pipelines for n in names)
    text = ViewPipelines.of(PipelinePlan(6, tuple(rows))).to_json()
    return View(ViewId(1, 1), NO_VIEW, members, pipelines=text)


@pytest.mark.parametrize(
    ("on_lost_parts", "words"), [("wait", "any loss stops this job"), ("end", "any loss ends this job")]
)
def test_later_pipelines_are_told_with_what_a_loss_does(on_lost_parts: str, words: str) -> None:
    from chaos_lightning.strategies.pipeline_fit import PipelineFit

    said: list[str] = []
    request = PipelineRequest.from_json(asked(Program(layers=6, stages=2, micro_batches=4)))
    fit: Any = object.__new__(PipelineFit)
    fit.request, fit._told = replace(request, on_lost_parts=on_lost_parts).to_json(), ""
    fit._teller = SimpleNamespace(tell=lambda *lines: said.extend(lines))
    fit.tell(view_of(("a", "b"), ("c", "d")))
    assert not any("no layer has two owners" in line for line in said)
    said.clear()
    fit.tell(view_of(("a", "b", "c")))
    assert said == ["pipelines x stages: 1 x 3 now", f"{words}: no layer has two owners"]
    fit.tell(view_of(("a", "b", "c")))
    assert len(said) == 2, "once for each change"
