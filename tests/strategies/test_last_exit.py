"""The last member of a job in Lightning goes, and the next fit goes on from where it stood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_job import Job

from chaos_lightning.runtime.channel import drain


@pytest.mark.parametrize("way", ["signal", "drained"])
@pytest.mark.parametrize("windows", [1, 2])
def test_a_fit_that_the_last_member_left_goes_on_as_if_it_had_not(
    job: Job, tmp_path: Path, way: str, windows: int
) -> None:
    """Weights, trace and schedules of both parts together are those of one run without a break."""
    spec: dict[str, Any] = {
        "model": "Scheduled",
        "samples": 52,
        "trainer": {"accumulate_grad_batches": windows},
        "callbacks": ("stopping",),
        "options": {"on_last_exit": str(tmp_path / "kept")},
    }
    job.start("a", **spec, gates={4: job.gate("a")})
    job.harness.wait_step(4)
    if way == "drained":
        assert drain(job.options.listen, "a") == ("a",)
        job.harness.wait_for("left", node="a")
    else:
        job.harness.terminate("a")
        job.harness.wait_for("leave")
    job.open("a")
    assert job.harness.wait_exit("a") == 0
    first = job.report("a")
    kept = job.harness.wait_for("kept", node="a")
    job.start("b", **spec)
    came = job.harness.wait_for("joined", node="b")
    assert came["step"] == kept["step"] >= 4
    (second,) = job.finish("b")
    assert f"goes on from step {kept['step']}: a~1 kept its training state" in job.harness.children["b"].tail()
    job.again()
    job.start("c", **spec)
    (whole,) = job.finish("c", audit=False)
    assert second["step"] == whole["step"] > kept["step"]
    assert torch.equal(second["weights"], whole["weights"])
    lines = [line for line in whole["trace"] if line.startswith("epoch")]
    mine = [line for line in second["trace"] if line.startswith("epoch") and "starts" not in line]
    assert mine == [line for line in lines if "starts" not in line][-len(mine) :]
    assert len(mine) < len(lines)
    assert first["step"] <= second["step"]
    said = [r for r in job.harness.records if r.name == "state_hash" and r["head"] == kept["head"]]
    assert {r.member for r in said} == {"a~1", "b~2"}, "for whoever reads the logs: what was kept is what came back"
    assert len({r["hash"] for r in said}) == 1
    assert not list((tmp_path / "kept").rglob("kept.json"))  # the job is finished


def test_a_checkpoint_that_the_script_names_is_what_fit_starts_from(job: Job, tmp_path: Path) -> None:
    """Not a state that the last member kept, whichever is newer."""
    spec: dict[str, Any] = {"callbacks": ("steps",), "options": {"on_last_exit": str(tmp_path / "kept")}}
    job.start("a", **spec, gates={7: job.gate("a")})
    job.harness.wait_step(7)
    job.harness.terminate("a")
    job.harness.wait_for("leave")
    job.open("a")
    assert job.harness.wait_exit("a") == 0
    assert job.harness.wait_for("kept", node="a")["step"] >= 7
    job.start("b", **spec, ckpt=str(job.out / "ckpt" / "step=5.ckpt"))
    (second,) = job.finish("b", audit=False)
    assert job.harness.wait_for("resumed", node="b")["step"] == 5
    assert "starts from what its script has loaded" in job.harness.children["b"].log.read_text()
    assert second["step"] == 18
