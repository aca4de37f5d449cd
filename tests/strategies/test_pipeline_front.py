"""Tests strategy `chaos_pipeline` as its user meets it: refusals, warnings, a dry run, and a job that ends to
restart.
"""

from __future__ import annotations

import gc
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, Timer
from test_pipelines_train import HALF, alone, check_equal, start

from chaos_lightning.errors import RESTART_CODE, DryRunError, UnsupportedError
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.strategies import ChaosPipelineStrategy, DiLoCoStrategy, pipeline_fit

QUARTER = 40_000
"""Bytes of memory in which two of the blocks can be compared."""


def trainer_of(tmp_path: Path, strategy: Any, **settings: Any) -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu", strategy=strategy, default_root_dir=tmp_path, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, **settings,
    )  # fmt: skip


def batches() -> Any:
    from pipeline_members import digits
    from torch.utils.data import DataLoader

    return DataLoader(digits(32), batch_size=4)


def fit(tmp_path: Path, model: Any = None, strategy: dict[str, Any] | None = None, **settings: Any) -> Any:
    from pipeline_members import Tower

    model, loaders = model or Tower(), settings.pop("loaders", None) or batches()
    trainer_of(tmp_path, ChaosPipelineStrategy(**(strategy or {})), **settings).fit(model, loaders)
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
    options = {"transfer": "shared", "ingress_bps": 1e9}
    with (
        pytest.warns(UserWarning, match="transfer='shared' is not honoured by strategy chaos_pipeline"),
        pytest.warns(UserWarning, match=r"ingress_bps=1000000000\.0 is not honoured"),
        pytest.raises(UnsupportedError, match="Mixing"),
    ):
        fit(tmp_path, refused_late(), {"options": options})


def kept_aside() -> Any:
    from pipeline_members import Block, Tower

    class Keeps(Block):
        kept: list[torch.Tensor]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.append(x.square().mean())
            return super().forward(x)

    class Routed(Tower):
        """Model with an additional loss, computed from what its blocks store beside their output."""

        def configure_model(self) -> None:
            super().configure_model()
            for block in self.blocks:
                block.__class__, block.kept = Keeps, self.__dict__.setdefault("kept", [])

        def loss(self, batch: Any) -> torch.Tensor:
            self.kept.clear()
            return super().loss(batch) + 0.1 * sum(self.kept)

    return Routed()


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({}, r"in 4 stages the step gives something else than as a whole: the loss is"),
        ({"dry_run": True, "device_memory": QUARTER}, r"in 2 stages the step \(layers \d to 3\) gives something else"),
    ],
    ids=["as a whole", "a dry run, in stretches"],
)
def test_a_model_that_gives_something_else_in_stages_is_refused(
    tmp_path: Path, double: Any, strategy: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        fit(tmp_path, kept_aside(), strategy)
    assert not [made for made in double.made if made.log]


def unsteady() -> Any:
    import numpy as np
    from pipeline_members import Tower
    from torch import nn

    class Unsteady(Tower):
        """Model whose training_step draws random numbers, counts its calls, and updates buffers."""

        steps = 0

        def configure_model(self) -> None:
            super().configure_model()
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("centre", torch.zeros(8))

        def loss(self, batch: Any) -> torch.Tensor:
            self.steps += 1
            self.__dict__.setdefault("drawn", []).append(torch.rand(1) + random.random() + np.random.rand())
            logits = self.logits(batch[0])
            self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
            return nn.functional.cross_entropy(logits, batch[1]) * (1 + 0.1 * self.drawn[-1].sum())

    return Unsteady()


def traces(module: Any) -> dict[str, Any]:
    """Returns all values that looking at the model must not change: random states, gradients, tensors, counts,
    memory.
    """
    import numpy as np

    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {
        "numbers": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "gradients": [name for name, p in module.named_parameters() if p.grad is not None],
        "tensors": [(name, id(t), is_absent(t), str(t.tolist())) for name, _, _, t in named_tensors(module)],
        "counted": (module.steps, len(module.__dict__.get("drawn", ()))),
        "nbytes": sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()),
    }


@pytest.mark.parametrize(("memory", "words"), [(None, "in 4 stages as in one"), (QUARTER, "compared at")])
def test_the_comparison_before_training_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Any, memory: int | None, words: str
) -> None:
    found: list[Any] = []
    compare = pipeline_fit.check_before_training

    def between(chain: Any, *given: Any) -> str:
        found.append(traces(chain.root))
        found.append(compare(chain, *given))
        found.append(traces(chain.root))
        return str(found[1])

    monkeypatch.setattr(pipeline_fit, "check_before_training", between)
    with pytest.raises(DryRunError):
        fit(tmp_path, unsteady(), {"dry_run": True, "device_memory": memory})
    before, said, after = found
    assert words in said
    assert after == before


class Looks(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...


def test_hooks_that_look_at_gradients_are_told_once_what_they_see(tmp_path: Path, double: Any) -> None:
    from pipeline_members import Tower, Watched

    dry = {"dry_run": True}
    with pytest.warns(UserWarning, match="the layers that this member owns") as told, pytest.raises(DryRunError):
        fit(tmp_path, Watched(), dry, callbacks=[Looks(), Timer()])
    (text,) = [str(w.message) for w in told if "this member owns" in str(w.message)]
    assert text.startswith(
        "Watched.on_before_optimizer_step, Watched.configure_gradient_clipping, Looks.on_after_backward: a hook sees"
    )
    with warnings.catch_warnings(record=True) as told, pytest.raises(DryRunError):
        fit(tmp_path, Tower(), dry)
    assert not [w for w in told if "this member owns" in str(w.message)]


def test_outside_of_fit_the_whole_model_is_run_by_one_process(tmp_path: Path, double: Any) -> None:
    from pipeline_members import Tower

    class Evaluated(Tower):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.logits(batch[0])

    found = []
    for strategy in ("auto", ChaosPipelineStrategy()):
        trainer = trainer_of(tmp_path, strategy)
        evaluated = [call(Evaluated(), batches(), verbose=False) for call in (trainer.validate, trainer.test)]
        found.append((evaluated, torch.cat(trainer.predict(Evaluated(), batches())).tolist()))
    assert found[0] == found[1]


def test_fabric_has_no_pipelines() -> None:
    from lightning.fabric import Fabric

    with pytest.raises(UnsupportedError, match=r'strategy="chaos_pipeline"\) is not supported.*Use Trainer'):
        Fabric(accelerator="cpu", devices=1, strategy="chaos_pipeline")


def test_several_training_loaders_are_refused(tmp_path: Path, double: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"2 training loaders; strategy chaos_pipeline .*ConcatDataset"):
        fit(tmp_path, loaders=[batches(), batches()])


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (
            2,
            [
                "fits: least is left at process",
                "  blocks.0 to blocks.1: process",
                "any loss stops this job",
            ],
        ),
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
    assert "chaos: any loss stops this job: no layer has two owners" in "".join(told)


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
    from pipeline_members import Tower

    strategy = DiLoCoStrategy(name="paris", inner=ChaosPipelineStrategy())
    with pytest.raises(UnsupportedError, match=r"DiLoCoStrategy\(inner=ChaosPipelineStrategy"):
        trainer_of(tmp_path, strategy).fit(Tower(), batches())
