"""Tests the Hydra config groups: every choice composes and fits the constructor that it names."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from hydra.utils import get_class, get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from chaos_lightning.configs.schema import ChaosStrategyConfig, DiLoCoStrategyConfig, PipelineStrategyConfig
from chaos_lightning.declared import declared
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies import ChaosPipelineStrategy, ChaosStrategy, DiLoCoStrategy
from chaos_lightning.strategies.session import DataMode

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
CHOICES = sorted(
    f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "experiment"
)
EXPERIMENTS = sorted(path.stem for path in CONFIGS.glob("experiment/*.yaml"))
SPECIAL = {"_target_", "_convert_", "_args_", "_partial_", "_recursive_"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("chaos_lightning.configs", version_base="1.3"):
        return compose("config", ["trainer.default_root_dir=.", *overrides])


def nodes(value: Any) -> list[dict[str, Any]]:
    """Returns all mappings in a plain config that have a `_target_`, nested ones included."""
    if isinstance(value, dict):
        inner = [n for item in value.values() for n in nodes(item)]
        return [value, *inner] if "_target_" in value else inner
    return [n for item in value for n in nodes(item)] if isinstance(value, list) else []


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(target).parameters.items() if name != "self"}


# ------------------------------------------------------------------------------------------------ composing


def test_the_groups_are_there() -> None:
    groups = {choice.partition("=")[0] for choice in CHOICES}
    assert groups == {"accelerator", "strategy", "data", "model", "callbacks"}
    assert {"accelerator=edge_cpu", "accelerator=gpu", "accelerator=npu"} <= set(CHOICES)


@pytest.mark.parametrize("choice", [*CHOICES, *(f"experiment={name}" for name in EXPERIMENTS)])
def test_choice_composes_and_fits_what_it_names(choice: str) -> None:
    overrides = [choice]
    if choice == "model=gpt_small":
        overrides.append("data=text")
    if "cifar10" in choice:
        overrides.append("data.root=somewhere")
    plain = OmegaConf.to_container(composed(*overrides), resolve=True)
    found = nodes(plain)
    assert {"lightning.pytorch.Trainer"} < {n["_target_"] for n in found}
    for node in found:
        known = parameters(get_object(node["_target_"]))
        if any(p.kind is p.VAR_KEYWORD for p in known.values()):
            continue
        assert set(node) - SPECIAL <= set(known), node["_target_"]


@pytest.mark.parametrize(
    ("strategy", "schema"),
    [
        (ChaosStrategy, ChaosStrategyConfig),
        (ChaosPipelineStrategy, PipelineStrategyConfig),
        (DiLoCoStrategy, DiLoCoStrategyConfig),
    ],
    ids=lambda value: value.__name__,
)
def test_a_signature_has_the_arguments_that_are_declared(strategy: Any, schema: type) -> None:
    """Strategies' signatures and docstrings list the declared settings, as type checkers, editors and LightningCLI
    need.
    """
    found = parameters(strategy)
    hints = typing.get_type_hints(strategy.__init__ if inspect.isclass(strategy) else strategy)
    rows = {f.name: f for f in dataclasses.fields(schema)}
    assert set(found) == set(rows) - SPECIAL
    assert all(p.default == rows[name].default for name, p in found.items() if name != "options")
    for name in declared(schema):
        assert hints[name] == {"device_memory": int | str | None, "data": DataMode | None}.get(name, rows[name].type)
    told = dict(re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", inspect.getdoc(strategy) or "", re.MULTILINE))
    assert list(told) == list(found)
    for name, made in declared(schema).items():
        assert " ".join(told[name].split()).startswith((made.short, "As of `ChaosStrategy`.")), name


def test_every_member_can_be_told_apart_and_reached() -> None:
    config = composed("strategy.endpoint=10.0.0.5:29400", "strategy.name=box-7", "strategy.options.plan=chain")
    strategy = instantiate(config.strategy)
    assert type(strategy).__name__ == "ChaosStrategy"
    assert strategy.options.plan == "chain"


def test_the_batch_and_the_rate_are_chosen_on_the_command_line() -> None:
    config = composed("strategy.options.batch=fixed:256/32", "strategy.options.fits=64")
    made = EngineConfig.build(instantiate(config.strategy).options.for_engine(), {})
    assert (made.batch, made.fits, made.lr_scaling) == ("fixed:256/32", 64, "none")
    made = EngineConfig.build(
        instantiate(composed("strategy.options.lr_scaling=linear:4").strategy).options.for_engine(), {}
    )
    assert (made.batch, made.lr_scaling) == ("member", "linear:4")


@pytest.mark.parametrize("prefix", ["", "file:"])
def test_the_plan_may_be_a_file_of_trees(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("trees: [{members: [a, b], parents: ['', a]}]")
    strategy = instantiate(composed(f"strategy.options.plan={prefix}{path}").strategy)
    assert EngineConfig.build(strategy.options.for_engine(), {}).plan_spec.trees[0].members == ("a", "b")
    path.write_text("trees: [{members: [a, b], parents: [b, a]}]")
    with pytest.raises(ConfigurationError, match=r"plan\.yaml.*tree 0 has 0 roots"):
        EngineConfig.build(strategy.options.for_engine(), {})


@pytest.mark.parametrize(
    "override",
    [
        "callbacks.faults.plan='at step 40 in allreduce: sigkill rank 1'",
        "callbacks.faults.plan=['at step 40 in allreduce: sigkill rank 1']",
        "callbacks.faults.plan=[{do: sigkill, rank: 1, at_step: 40, in: allreduce}]",
    ],
)
def test_fault_plan_on_the_command_line(override: str) -> None:
    config = composed("callbacks=faults", override)
    callback = instantiate(config.callbacks.faults, _convert_="all")
    assert [str(fault) for fault in callback.plan] == ["at step 40 in allreduce: sigkill rank 1"]


def test_callback_choices_extend_the_default() -> None:
    assert list(composed("callbacks=none").callbacks) == []
    default = list(composed().callbacks)
    for name in ("faults", "live", "on_change"):
        assert list(composed(f"callbacks={name}").callbacks) == [*default, name]
    made = [instantiate(c, _convert_="all") for c in composed("callbacks=live").callbacks.values()]
    assert [type(c).__name__ for c in made] == ["UsefulTime", "ChaosExit", "LiveView"]


@pytest.mark.parametrize("choice", ["faults", "live", "on_change"])
def test_callback_files_name_every_argument(choice: str) -> None:
    for node in nodes(OmegaConf.to_container(composed(f"callbacks={choice}").callbacks)):
        assert set(node) - SPECIAL == set(parameters(get_class(node["_target_"]))), node["_target_"]


def test_local_rank_picks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    config = composed("accelerator=gpu")
    assert list(config.trainer.devices) == [3]
    assert config.device == "cuda:3"


def test_experiment_wins_over_the_root_and_the_command_line_over_both() -> None:
    assert composed("experiment=gpt_text").trainer.max_epochs == 2
    assert composed("experiment=gpt_text", "trainer.max_epochs=9").trainer.max_epochs == 9


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy.endpiont=x", "endpiont"),
        ("strategy.min_nodes=two", "two"),
        ("strategy.options.overlap=perhaps", "perhaps"),
        ("trainer.max_stepz=3", "max_stepz"),
        ("accelerator=tpu", "edge_cpu"),
    ],
)
def test_mistake_is_refused_when_composing(override: str, words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        composed(override)
    assert isinstance(caught.value, ConfigCompositionException)


def printed(folder: Path, *command: str) -> list[str]:
    """Runs Python with these arguments in a folder, without the source tree in sight; returns the printed lines."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_another_project_uses_the_groups_beside_its_own(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: builtins.dict\nwidth: 7\n")
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [config, {override model: mine}, _self_]\n"
        "hydra: {searchpath: ['pkg://chaos_lightning.configs']}\nseed: 5\n"
    )
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='mine')\n"
        "def main(config):\n"
        "    print(hydra.utils.instantiate(config.model), config.seed, config.strategy.min_nodes)\n"
        "main()\n"
    )
    assert printed(tmp_path, "app.py", "strategy.min_nodes=2") == ["{'width': 7} 5 2"]


@pytest.mark.slow
def test_a_folder_without_the_examples_trains_their_model_by_the_groups(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "from hydra.utils import instantiate\n"
        "@hydra.main(version_base='1.3', config_path='pkg://chaos_lightning.configs', config_name='config')\n"
        "def main(config):\n"
        "    trainer = instantiate(config.trainer, strategy='auto', fast_dev_run=1)\n"
        "    trainer.fit(instantiate(config.model), instantiate(config.data))\n"
        "    print('trained', trainer.global_step)\n"
        "main()\n"
    )
    assert printed(tmp_path, "app.py", "data=digits", "model=cnn", "trainer.accelerator=cpu")[-1] == "trained 1"


# ------------------------------------------------------------------------------------------------ types


def test_pipelines_by_hydra() -> None:
    strategy = instantiate(
        composed("strategy=chaos_pipeline", "strategy.micro_batches=8", "strategy.device_memory=8 GiB").strategy
    )
    assert type(strategy).__name__ == "ChaosPipelineStrategy"
    assert (strategy.pipeline.micro_batches, strategy.pipeline.given_memory) == (8, "8 GiB")
    assert strategy.pipeline.policy == "adaptive"
    with pytest.raises(ConfigCompositionException, match="micro_batchez"):
        composed("strategy=chaos_pipeline", "strategy.micro_batchez=8")


def test_trainer_schema_has_only_arguments_of_the_trainer() -> None:
    import lightning

    from chaos_lightning.configs.schema import TrainerConfig

    assert {f.name for f in dataclasses.fields(TrainerConfig)} - SPECIAL <= set(parameters(lightning.Trainer))


def test_default_composition_equals_the_defaults_of_the_constructors() -> None:
    from chaos_lightning.strategies import ChaosOptions, ChaosStrategy

    made, plain = instantiate(composed().strategy), ChaosStrategy()
    assert made.options == plain.options == ChaosOptions()
    assert made.data == plain.data


# ------------------------------------------------------------------------------------------------ accelerators


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("edge_cpu", {"accelerator": "cpu", "devices": 1, "precision": "32-true", "plugins": None}),
        ("gpu", {"accelerator": "cuda", "devices": [0], "precision": "bf16-mixed", "plugins": None}),
    ],
)
def test_trainer_arguments_without_the_device(
    accelerator: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    arguments = instantiate(composed(f"accelerator={accelerator}").trainer, _target_="builtins.dict")
    assert {name: arguments[name] for name in expected} == expected
    assert type(arguments["devices"]) in (int, list)


@pytest.mark.filterwarnings("ignore")
def test_edge_cpu_makes_a_trainer() -> None:
    config = composed("accelerator=edge_cpu", "trainer.enable_checkpointing=false")
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy))
    assert str(trainer.strategy.root_device) == "cpu"
    assert type(trainer.strategy).__name__ == "ChaosStrategy"


def test_machine_without_an_npu_says_what_is_missing() -> None:
    import torch

    from chaos_lightning.errors import UnsupportedError

    current = torch.accelerator.current_accelerator(check_available=True)
    if current is not None and current.type == "npu":
        pytest.skip("this machine has an NPU")
    with pytest.raises(Exception, match="torch_npu is not installed") as caught:
        instantiate(composed("accelerator=npu").trainer)
    assert isinstance(caught.value.__cause__, UnsupportedError)


NPU = """
import torch
torch.utils.rename_privateuse1_backend("npu")
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("npu")
torch.accelerator.device_count = lambda: 2
import os
os.environ["LOCAL_RANK"] = "1"
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
with initialize_config_module("chaos_lightning.configs", version_base="1.3"):
    config = compose("config", ["accelerator=npu", "trainer.default_root_dir=.", "trainer.enable_checkpointing=false"])
trainer = instantiate(config.trainer, strategy=instantiate(config.strategy))
kind = type(trainer.accelerator).__name__
print(trainer.strategy.root_device, trainer.precision_plugin.device, trainer.precision, kind)
from chaos_lightning.configs.npu import NPUAccelerator
print(NPUAccelerator.parse_devices(-1), NPUAccelerator.parse_devices("0,1"), NPUAccelerator.parse_devices(1))
try:
    NPUAccelerator.parse_devices([2])
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_npu_trainer_is_made_of_the_right_parts(tmp_path: Path) -> None:
    """The NPU config makes a trainer with the right parts; runs in a process of its own, because it renames torch's
    third-party device for good.
    """
    assert printed(tmp_path, "-c", NPU)[-3:] == [
        "npu:1 npu bf16-mixed NPUAccelerator",
        "[0, 1] [0, 1] [0]",
        "devices [2] asked for, but this machine has 2 NPUs (numbered from 0)",
    ]


@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore")
def test_gpu_makes_a_trainer() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = composed("accelerator=gpu", "trainer.enable_checkpointing=false")
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy))
    assert trainer.strategy.root_device.type == "cuda"
