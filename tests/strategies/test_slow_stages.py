"""Tests a stage that becomes slow: its layers move to other members, and the losses are those of one process."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from test_pipelines_train import alone, check_equal, plans, start

MOST = 120_000
"""Bytes of memory in which most of six blocks fit, and not all."""
MODEL = {"blocks": 6, "pause_s": 0.01, "lr": 0.002}


def owned(event: dict[str, Any], name: str) -> int:
    """Returns the number of layers that a member owns after this event."""
    return sum(end - first for m, spans in event["layers"].items() if m.startswith(name) for first, end in spans)


@pytest.mark.slow
def test_a_stage_that_becomes_slow_gets_fewer_layers_and_the_event_says_why(job: Any) -> None:
    job.fresh(min_nodes=3)
    job.harness.declare("a", "b", "c")
    asked = {"device_memory": MOST, "epochs": 14, "model": MODEL}
    start(job, "ab", **asked)
    start(job, "c", **asked, slows=(8, 4.0))
    reports = job.finish("a", "b", "c")
    check_equal(reports, *alone(epochs=14, model={**MODEL, "pause_s": 0.0}))
    found = plans(job)
    moves = [(e, before) for before, e in pairwise(found) if "; move by searched: " in e["reason"]]
    # A busy machine may make another member look slow for a moment, whose layers then move first.
    moved = next(e for e, before in moves if owned(e, "c~") < owned(before, "c~"))
    assert re.match(r"c~\d+ computes [\d.]+ times slower than foreseen; ", moved["reason"])
    ways = {way["name"]: way["step_s"] for way in moved["candidates"]}
    assert ways["searched: move"] < ways["searched: reroute"]
    assert moved["moved_nbytes"] > 0
