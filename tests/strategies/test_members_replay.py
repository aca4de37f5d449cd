"""Tests newcomers that replay under Lightning, as real processes: no member waits, and all end with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from strategy_job import Job
from test_members import same


def joined_by_replay(job: Job, name: str) -> tuple[int, int]:
    """Returns how many steps this newcomer has replayed, and the bytes of its last pull."""
    mine = [r for r in job.harness.records if r.node == name]
    replayed = [r for r in mine if r.name == "replayed"]
    pulled = [r for r in mine if r.name == "pull_done"]
    assert len(pulled) == 2, "one pull of the snapshot, one at the header that let it in"
    assert pulled[0].get("nbytes") > 0
    return sum(int(r.get("steps")) for r in replayed), int(pulled[-1].get("nbytes"))


def three(job: Job, join_by: str, *, steps: int = 1, **common: Any) -> None:
    """Starts two members, then a third; the first one waits after `steps` until the way in which the third joins is
    chosen.
    """
    job.fresh(min_nodes=2)
    job.start("a", gates={steps: job.gate("a")}, **common)  # before a step, everybody would come in by a pause
    job.start("b", **common)
    admitted = job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 2)
    job.start("c", **common, options={"join_by": join_by})
    job.harness.wait_for("way_in", lambda r: r.member.startswith("c~"), after=admitted)
    job.open("a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("Regression", {"model_args": {"norm": True, "sync": True}}),
        pytest.param("Regression", {"trainer": {"accumulate_grad_batches": 2}}, marks=pytest.mark.slow),
        pytest.param("Regression", {"trainer": {"gradient_clip_val": 0.05}}, marks=pytest.mark.slow),
        pytest.param("Regression", {"trainer": {"precision": "bf16-mixed"}}, marks=pytest.mark.slow),
        pytest.param("Scheduled", {}, marks=pytest.mark.slow),
    ],
)
def test_newcomer_replays_while_the_others_train(job: Job, model: str, extra: dict[str, Any]) -> None:
    common = {"model": model, "epochs": 40, "samples": 48, "callbacks": ("checkpoint",), **extra}
    three(job, "replay", **common)
    reports = job.finish("a", "b", "c")
    same(reports, lines=5)
    steps, left = joined_by_replay(job, "c")
    assert steps > 0
    assert left < 200, "counters may differ, weights and moments may not"


def test_what_cannot_be_replayed_comes_in_by_a_pause_and_says_why(job: Job) -> None:
    common = {"model": "Gan", "epochs": 4, "samples": 48}
    three(job, "auto", steps=2, **common)
    job.finish("a", "b", "c")
    way = next(r for r in job.harness.records if r.name == "way_in" and r.member.startswith("c~"))
    assert way.get("way") == "pause"
    assert "manual optimization" in str(way.get("reason"))
    assert not [r for r in job.harness.records if r.name == "replayed"]
