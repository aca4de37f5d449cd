"""Strategy `chaos_pipeline` as its user meets it: refusals, warnings, a dry run, and a job that ends to restart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from test_pipelines_train import HALF, alone, check_equal, start

from chaos_lightning.errors import RESTART_CODE, DryRunError, UnsupportedError
from chaos_lightning.strategies import ChaosPipelineStrategy, DiLoCoStrategy


def fit(tmp_path: Path, model: Any = None, strategy: dict[str, Any] | None = None, **settings: Any) -> Any:
    import lightning.pytorch as pl
    from pipeline_members import Tower, digits
    from torch.utils.data import DataLoader

    model = model or Tower()
    trainer = pl.Trainer(
        accelerator="cpu", strategy=ChaosPipelineStrategy(**(strategy or {})), default_root_dir=tmp_path, max_epochs=1,
        logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(model, DataLoader(digits(32), batch_size=4))
    return model


class Mixing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refused_late() -> Any:
    from pipeline_members import Tower

    class Mixes(Tower):
        def configure_optimizers(self) -> Any:
            return Mixing(self.parameters(), 0.1)

    return Mixes()


def test_what_is_refused_is_refused_before_training(tmp_path: Path, double: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"strategy chaos_pipeline does not support:\n- accumulate_grad_"
    ) as all_:
        fit(tmp_path, accumulate_grad_batches=2, callbacks=[EMAWeightAveraging()])
    assert "- EMAWeightAveraging: averages of weights" in str(all_.value)
    with pytest.raises(UnsupportedError, match=r"strategy chaos_pipeline does not support:\n- Mixing: optimizers that"):
        fit(tmp_path, refused_late())
    assert not double.made


def test_a_chain_that_there_is_not_is_refused(tmp_path: Path, double: Any) -> None:
    from strategy_models import Regression

    with pytest.raises(UnsupportedError, match="'rows' is no list of blocks"):
        fit(tmp_path, Regression(), {"chain": "rows"})


def test_settings_that_are_not_honoured_are_told(tmp_path: Path, double: Any) -> None:
    options = {"transfer": "greedy", "ingress_bps": 1e9}
    with (
        pytest.warns(UserWarning, match="transfer='greedy' is not honoured by strategy chaos_pipeline"),
        pytest.warns(UserWarning, match=r"ingress_bps=1000000000\.0 is not honoured"),
        pytest.raises(UnsupportedError, match="Mixing"),
    ):
        fit(tmp_path, refused_late(), {"options": options})


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (2, ["fits: least is left at process", "  blocks.0 to blocks.1: process", "any loss ends this job"]),
        (1, ["does not fit 1 member: ", "it takes 2 members such as process0 (78.1"]),
    ],
)
def test_a_dry_run_says_the_plan_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], double: Any, nodes: int, says: list[str]
) -> None:
    with pytest.raises(DryRunError) as ended:
        fit(tmp_path, strategy={"dry_run": True, "device_memory": HALF, "min_nodes": nodes})
    assert ended.value.code == 0
    assert not double.made
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        rf"dry run: no member of job default is at 127\.0\.0\.1:\d+; min_nodes={nodes} assumed, each taken to be like "
        r"this one, with [\d.]+ [KM]i?B of memory for layers$",
        lines[0],
    )
    for words in says:
        assert any(line.startswith(words) for line in lines[1:]), lines


def output(job: Any, name: str) -> str:
    return str(job.harness.children[name].log.read_text())


def test_a_dry_run_asks_the_job_that_runs_and_the_oldest_member_tells_its_plan(job: Any) -> None:
    job.fresh(min_nodes=2)
    start(job, "a", device_memory=HALF, gates={2: job.gate("two")})
    start(job, "b", device_memory=HALF)
    job.harness.wait_step(1)
    start(job, "d", device_memory=HALF, dry_run=True)
    assert job.harness.wait_exit("d") == 0
    said = output(job, "d")
    assert re.search(r"dry run: 2 processes of job \S+ at 127\.0\.0\.1:\d+, each taken to be like this one", said)
    plan = "1 pipeline of 2 stages; a step of 4 micro-batches (16 samples) takes about "
    assert plan in said
    job.open("two")
    check_equal(job.finish("a", "b"), *alone())
    told = [output(job, name) for name in "ab"]
    assert sorted(text.count(f"chaos: {plan}") for text in told) == [0, 1]
    assert "chaos: any loss ends this job: no layer has two owners" in "".join(told)


def test_a_loss_under_the_policy_restart_ends_the_job_and_it_begins_from_the_checkpoint(
    job: Any, tmp_path: Path
) -> None:
    job.fresh(min_nodes=4)
    folder = tmp_path / "files"
    job.harness.declare(*"abcd")
    more: dict[str, Any] = {"device_memory": HALF, "policy": "restart", "saves": folder}
    start(job, "abc", **more)
    start(job, "d", dies=(7, 1, 0), **more)
    for name in "abc":
        assert job.harness.wait_exit(name) == RESTART_CODE
        said = output(job, name)
        assert "policy restart: member d~" in said
        assert f"the newest checkpoint is {folder}/step=6.ckpt (step 6); the exit code is 79" in said
    start(job, "efgh", **{**more, "ckpt_path": folder / "step=6.ckpt"})
    losses, parameters = alone()
    check_equal(job.finish("e", "f", "g", "h", audit=False), losses[6:], parameters)


def test_a_cluster_of_outer_sync_has_no_stages(tmp_path: Path, double: Any) -> None:
    import lightning.pytorch as pl
    from pipeline_members import Tower, digits
    from torch.utils.data import DataLoader

    strategy = DiLoCoStrategy(name="paris", inner=ChaosPipelineStrategy())
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, default_root_dir=tmp_path, logger=False, max_epochs=1)
    with pytest.raises(UnsupportedError, match=r"DiLoCoStrategy\(inner=ChaosPipelineStrategy"):
        trainer.fit(Tower(), DataLoader(digits(32), batch_size=4))
