"""Tests two stages in two processes over real links: one optimizer step, equal to that of a single process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from executor_support import one_process
from stage_process import MICRO_BATCHES, a_loss, a_net, batches_of, step_of, weight_of

from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines

HERE = Path(__file__).parent


def line_of(process):
    line = process.stdout.readline()
    assert line, process.wait(30)
    return line.strip()


def run_processes(folder, view, kind):
    """Runs a process for each member; returns each one's output by member."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    names = sorted(view.plan.stages)
    with ExitStack() as stack:
        processes = {}
        for name in names:
            command = [sys.executable, str(HERE / "stage_process.py"), name, str(folder / name), kind]
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[name] = stack.enter_context(process)
            stack.callback(process.kill)
        ports = {name: int(line_of(p)) for name, p in processes.items()}
        for name, process in processes.items():
            rows = [[n, n.partition("~")[0], "host", "127.0.0.1", port] for n, port in ports.items() if n != name]
            process.stdin.write(f"{json.dumps(rows)}\n{view.to_json()}\n")
            process.stdin.flush()
        for process in processes.values():
            assert line_of(process) == "done"
        for process in processes.values():
            process.stdin.write("\n")
            process.stdin.flush()
        assert [p.wait(60) for p in processes.values()] == [0] * len(names)
    return {name: torch.load(folder / name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bound"), [pytest.param("float32", 1e-6, marks=pytest.mark.slow), ("float64", 1e-13)])
def test_one_step_is_that_of_one_process(tmp_path, kind, bound):
    dtype = getattr(torch, kind)
    stages = (PlanStage("a~1", 0, 2), PlanStage("b~2", 2, 4))
    view = ViewPipelines.of(PipelinePlan(4, (Pipeline(stages, MICRO_BATCHES),)))
    got = run_processes(tmp_path, view, kind)

    batches = batches_of(dtype)
    weights = [weight_of(b) for b in batches]
    gradients, net = one_process(a_net(dtype), a_loss, batches, weights, range(MICRO_BATCHES))
    gradients = {name: g.clone() for name, g in gradients.items()}
    step_of(net, sum(weights))
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    for what, expected in (("gradients", gradients), ("parameters", parameters)):
        found = {**got["a~1"][what], **got["b~2"][what]}
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) <= bound * float(value.abs().max().clamp_min(1)), name
    assert sorted(got["b~2"]["losses"]) == list(range(MICRO_BATCHES))
    assert not set(got["a~1"]["gradients"]) & set(got["b~2"]["gradients"])
