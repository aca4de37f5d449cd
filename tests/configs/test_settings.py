"""Tests that settings are declared once: each appears in all places derived from the declaration, and in the docs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from chaos_lightning.configs.schema import (
    ChaosStrategyConfig,
    DiLoCoOptionsConfig,
    DiLoCoStrategyConfig,
    OptionsConfig,
    PipelineStrategyConfig,
)
from chaos_lightning.control import scheduler_main
from chaos_lightning.control.options import (
    FOLLOWING,
    HOSTED,
    SchedulerOptions,
    change_settings,
    rules_of,
    settings_from_json,
)
from chaos_lightning.declared import Setting, at_least, declared, options_of, positive
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.cluster import strategy_options
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.strategy_options import DiLoCoOptions
from chaos_lightning.outer.rules.settings import OUTER as PREFIX_OF_OUTER
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.protocol.types import Settings
from chaos_lightning.rendezvous.options import MEMBER_OPTIONS, OPTIONS, SETTING_OPTIONS, conf_help, read_options
from chaos_lightning.service.options import MEMORY
from chaos_lightning.settings import ARGUMENTS, ChaosOptions, EngineConfig, from_environment, to_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "settings.md"
CLASSES = (EngineConfig, ChaosOptions, Settings, SchedulerOptions, PipelineOptions)
UNITS = {"_s", "_nbytes", "_bps", "_every", "_nodes", "_degree", "_batches", "copies", "fits"}

MEMBERS, RULES, SCHEDULERS = declared(EngineConfig), declared(Settings), declared(SchedulerOptions)
PIPELINES = declared(PipelineOptions)
OUTER, CLUSTERS = declared(OuterSettings), declared(ClusterOptions)


def other(made: Setting) -> Any:
    """Returns a valid value for a setting other than its default."""
    special = {
        "endpoint": "127.0.0.2:5",
        "plan": "tree:3",
        "port": "29500-29599",
        "announce": "10.0.0.5:6",
        "chunk_nbytes": 8192,
        "join_by": "pause",
        "resume_from": "checkpoint",
        "transfer": "shared",
        "links": "checksum",
        "listen": "127.0.0.1:5",
        "advertise": "10.0.0.5:6",
        "store": MEMORY,
        "policy": "reroute",
        "device_memory": "8 GiB",
        "profile": str(PAGE),
        "on_lost_parts": "end",
        "notice": "aws",
        "batch": "fixed:8/4",
        "lr_scaling": "linear:2",
    }
    if made.name in special:
        return special[made.name]
    return not made.default if made.kind is bool else f"/{made.name}" if made.kind is str else made.default + 1


def text_of(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ the declaration


@pytest.mark.parametrize("owner", CLASSES)
def test_a_class_declares_all_that_a_user_may_set(owner: type) -> None:
    bare = {f.name for f in fields(owner)} - set(declared(owner))
    assert bare == {Settings: {"plan"}, SchedulerOptions: {"settings", "hosted"}}.get(owner, set())


@pytest.mark.parametrize("made", [m for owner in CLASSES for m in declared(owner).values()], ids=lambda m: m.name)
def test_help_is_made_of_sentences_and_numbers_have_units(made: Setting) -> None:
    assert re.fullmatch(r"[A-Z].*\.", made.help)
    assert len(made.short) < 150
    if made.kind in (int, float):
        assert any(made.name.endswith(unit) for unit in UNITS), made.name


# ------------------------------------------------------------------------------------------------ of a member


@pytest.mark.parametrize("name", MEMBERS)
def test_a_members_setting_is_a_strategys(name: str) -> None:
    holder, schema = (ChaosStrategyConfig, ChaosStrategyConfig) if name in ARGUMENTS else (ChaosOptions, OptionsConfig)
    for place in (holder, schema):
        assert next(f.default for f in fields(place) if f.name == name) is None
    if name not in ARGUMENTS:
        value = other(MEMBERS[name])
        assert options_of(ChaosOptions, {name: value}).for_engine()[name] == value
        assert MEMBERS[name].help in (ChaosOptions.__doc__ or "")


@pytest.mark.parametrize("name", [*OUTER, *CLUSTERS])
def test_a_setting_of_outer_sync_is_a_strategys(name: str) -> None:
    argument = name in strategy_options.ARGUMENTS
    for place in (DiLoCoStrategyConfig,) if argument else (DiLoCoOptions, DiLoCoOptionsConfig):
        assert next(f.default for f in fields(place) if f.name == name) is None


@pytest.mark.parametrize("name", PIPELINES)
def test_a_setting_of_pipelines_is_a_strategys_and_in_the_environment(name: str) -> None:
    assert next(f.default for f in fields(PipelineStrategyConfig) if f.name == name) is None
    value = other(PIPELINES[name])
    environ = {f"CHAOS_{name.upper()}": text_of(value)}
    assert getattr(PipelineOptions.build({}, environ), name) == value
    default = PIPELINES[name].default
    assert getattr(PipelineOptions.build({name: default}, environ), name) == default
    assert PIPELINES[name].help in (PipelineOptions.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("micro_batches", 0, "micro_batches=0: expected a whole number of at least 1"),
        ("micro_batches", 1.5, "micro_batches=1.5: expected a whole number"),
        ("copies", "two", "copies='two': expected a whole number"),
        ("policy", "oobleck", "policy='oobleck': expected one of adaptive, reroute, dynamic, restart"),
        ("on_lost_parts", "stop", "on_lost_parts='stop': expected one of wait, end"),
        ("device_memory", "8", None),
        ("device_memory", "8 GiB", None),
        ("device_memory", "0", "device_memory='0': expected bytes above 0"),
        ("device_memory", "8 apples", "device_memory='8 apples': '8 apples': expected a size such as '80 GiB'"),
        ("profile", "nowhere.yaml", "profile='nowhere.yaml': no such file"),
    ],
)
def test_a_setting_of_pipelines_is_checked(name: str, value: Any, words: str | None) -> None:
    if words is None:
        assert getattr(PipelineOptions.build({name: value}, {}), name) == value
        return
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        PipelineOptions.build({name: value}, {})


@pytest.mark.parametrize("name", MEMBERS)
def test_a_members_setting_is_in_the_environment(name: str) -> None:
    value = other(MEMBERS[name])
    variable = f"CHAOS_{name.upper()}"
    assert from_environment(MEMBERS, {variable: text_of(value)}) == {name: value}
    given = {"name": value.strip("/")} if name == "name" else {name: value}
    if name in ("job", "name", "neighbours"):
        given[name] = value = value.strip("/")
    config = EngineConfig(**{"max_nodes": 99, **given})
    assert to_environment(MEMBERS, config)[variable] == text_of(value)
    assert getattr(EngineConfig.build({}, to_environment(MEMBERS, config)), name) == value


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_torchrun_is_told_and_read(name: str) -> None:
    made, value = OPTIONS[name], other(OPTIONS[name])
    if name in ("neighbours", "node"):
        value = value.strip("/")
    more = {"store": "etcd://a"} if name == "advertise" else {}
    asked: dict[str, Any] = {"endpoint": "127.0.0.1:5", "run_id": "j", "nodes": (1, 4), "environ": {}}
    read = read_options(given={name: text_of(value), **more}, **asked)
    holder = read.config if name in MEMBER_OPTIONS else read.scheduler if name in HOSTED else read
    found = getattr(read.scheduler.settings if name in SETTING_OPTIONS else holder, made.name)
    assert found == value
    assert re.search(rf"^  {name} +{re.escape(made.short)}", conf_help(), re.MULTILINE)
    with pytest.raises(ConfigurationError, match=re.escape(f"{name} ({made.short})")):
        read_options(given={"unheard_of": "1"}, **asked)


def test_torchrun_hands_the_rule_for_the_batch_to_its_workers() -> None:
    given = _parse_rendezvous_config("batch=fixed:64/8,fits=16")
    asked: dict[str, Any] = {"endpoint": "127.0.0.1:5", "run_id": "j", "nodes": (1, 4), "environ": {}}
    worker = read_options(given=given, **asked).environment()
    made = EngineConfig.build({}, worker)
    assert (made.batch, made.fits, made.lr_scaling) == ("fixed:64/8", 16, "none")
    assert EngineConfig.build({"batch": "fixed"}, worker).batch == "fixed", "the script's own word goes first"
    with pytest.raises(ConfigurationError, match=r"batch='fixed:64/7': 64 samples .* take N = 63 or 70"):
        read_options(given={"batch": "fixed:64/7"}, **asked)


def test_torchrun_takes_all_that_it_does_not_say_itself() -> None:
    assert {*MEMBERS} - {*MEMBER_OPTIONS} == {"endpoint", "job", "name", "min_nodes", "max_nodes"}
    assert {made.name for made in SETTING_OPTIONS.values()} | {*MEMBERS} >= {*RULES}


# ------------------------------------------------------------------------------------------------ of a scheduler


@pytest.mark.parametrize("name", sorted(RULES.keys() & MEMBERS.keys()))
def test_a_rule_that_members_have_follows_from_theirs(name: str) -> None:
    assert (name in FOLLOWING) == (MEMBERS[name].help == RULES[name].help)
    value = "mine" if name == "job" else other(MEMBERS[name])
    made = rules_of(EngineConfig(**{"max_nodes": 99, name: value}), Settings())
    assert getattr(made, name) == (value if name in FOLLOWING else RULES[name].default)


def parsed(*arguments: str) -> SchedulerOptions:
    return scheduler_main.read(scheduler_main.parser().parse_args(arguments))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_told_and_read(name: str) -> None:
    value = other(RULES[name])
    value = value.strip("/") if isinstance(value, str) else value
    assert getattr(change_settings(Settings(), {name: text_of(value)}), name) == value
    limits = {"heartbeat_interval_s": ["--set", "heartbeat_timeout_s=9"], "min_nodes": [], "hang_timeout_s": []}
    rules = parsed(*limits.get(name, []), "--set", f"{name}={value}").settings
    assert getattr(rules, name) == value
    assert RULES[name].short in scheduler_main.parser().format_help()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_option_of_a_scheduler_is_told_and_read(name: str) -> None:
    made, value = SCHEDULERS[name], other(SCHEDULERS[name])
    words = [made.option] if made.kind is bool else [made.option, text_of(value)]
    options = parsed(*words)
    assert getattr(options, name) == value
    assert parsed(*options.arguments()) == options
    assert made.option in scheduler_main.parser().format_help()


@pytest.mark.parametrize("number", ["1e400", "NaN", '"inf"', "null", '"1_0x"', "[1]"])
@pytest.mark.parametrize("name", ["min_nodes", "hang_timeout_s"])
def test_a_rule_that_is_no_number_is_named(name: str, number: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}="):
        settings_from_json(f'{{"{name}": {number}}}')


def test_a_text_is_a_text() -> None:
    with pytest.raises(ConfigurationError, match="setting job=None: expected a text"):
        settings_from_json('{"job": null}')


# ------------------------------------------------------------------------------------------------ one more

ONE_MORE = """
import pathlib, sys, types
import chaos_lightning
path = pathlib.Path(chaos_lightning.__file__).with_name("settings.py")
field = '    patience_s: float = setting(1.5, "How patient it is.")\\n'
before, after = path.read_text().split("    overlap: bool", 1)
settings = types.ModuleType("chaos_lightning.settings")
sys.modules["chaos_lightning.settings"] = settings
exec(compile(before + field + "    overlap: bool" + after, str(path), "exec"), settings.__dict__)

from chaos_lightning.configs.schema import OptionsConfig
from chaos_lightning.rendezvous.options import conf_help, read_options
assert OptionsConfig().patience_s is None
assert settings.ChaosOptions(patience_s=2.0).for_engine()["patience_s"] == 2.0
assert settings.EngineConfig.build({}, {"CHAOS_PATIENCE_S": "3"}).patience_s == 3.0
asked = {"endpoint": "127.0.0.1:5", "run_id": "j", "nodes": (1, 4), "environ": {}}
assert read_options(given={"patience_s": "2"}, **asked).environment()["CHAOS_PATIENCE_S"] == "2.0"
assert "How patient it is (1.5)" in conf_help()
try:
    read_options(given={"patience_s": "-1"}, **asked)
except ValueError as error:
    print(error)
print(*[m for m in ("torch", "lightning", "grpc") if m in sys.modules])
"""


def test_a_new_field_is_all_that_a_new_setting_takes() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_MORE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["--rdzv-conf patience_s=-1.0: expected a positive number of seconds", ""]


# ------------------------------------------------------------------------------------------------ the page

INTRODUCTION = """\
# Settings

What can be set, made from where it is declared (`CHAOS_REWRITE=1 pytest tests/configs/test_settings.py` writes it
again). An explicit argument goes before the environment's `CHAOS_<NAME>`, and that before the default.

## Of a member

Declared in `chaos_lightning/settings.py`. To be given as

- an argument of `ChaosStrategy` ({arguments}), or in its `options`: `ChaosStrategy(options={{"plan": "tree"}})`, for
  Hydra `strategy.options.plan=tree`, for LightningCLI `--trainer.strategy.init_args.options.plan=tree`;
- an argument of `chaos_lightning.trainer.Trainer`;
- under torchrun and `chaos-lightning run` as `--rdzv-conf plan=tree,overlap=0`, but for endpoint, job, min_nodes and
  max_nodes, which are torchrun's own (`--rdzv-endpoint`, `--rdzv-id`, `--nnodes`);
- an environment variable: `CHAOS_PLAN=tree`.

"""
BETWEEN = """
## Of a strategy alone

Declared in `chaos_lightning/settings.py`, given as its `options`.

{own}
## Of pipelines

Declared in `chaos_lightning/pipeline/options.py`. To be given as arguments of `ChaosPipelineStrategy`, or as
environment variables: `CHAOS_DEVICE_MEMORY="8 GiB"`. All but device_memory, profile and dry_run must be equal at all
members.

{pipelines}
## Rules of a job

Declared in `chaos_lightning/protocol/types.py`, and applied by the scheduler. To be given as `chaos-lightning scheduler
--set NAME=VALUE`, or as `--rdzv-conf NAME=VALUE` on the node that hosts the scheduler, where join_timeout_s is called
load_timeout_s. What members have too (job, min_nodes, max_nodes, heartbeat_timeout_s, links, and the plan) follows from
theirs.

{rules}
## Of a scheduler process

Declared in `chaos_lightning/control/options.py`. Options of `chaos-lightning scheduler`; {hosted} and node
(`CHAOS_NODE`: this node's name) also in `--rdzv-conf` and from the environment.

{scheduler}
## Rules of an outer job

Declared in `chaos_lightning/outer/rules/settings.py`; what the first cluster brings is the job's. To be given as an
argument of `DiLoCoStrategy` ({diloco}), or in its `options`; to `chaos_lightning.diloco.DiLoCo`; by Hydra and
LightningCLI likewise. Their environment variables are `CHAOS_<NAME>`, but `CHAOS_OUTER_<NAME>` for {outers}, which are
also settings of members and pipelines, of another meaning.

{outer}
## Of a cluster of an outer job

Declared in `chaos_lightning/outer/cluster/cluster_options.py` and `strategy_options.py`, given likewise.

{cluster}"""


def table(rows: dict[str, Setting], *, option: bool = False) -> str:
    lines = [f"| {made.option if option else name} | {made.shown} | {made.help} |" for name, made in rows.items()]
    return "\n".join(("| name | default | meaning |", "|---|---|---|", *lines, ""))


def test_the_page_tells_each_setting() -> None:
    own = {name: made for name, made in declared(ChaosOptions).items() if name not in MEMBERS}
    only_of_options = {n: m for n, m in declared(DiLoCoOptions).items() if n not in (*OUTER, *CLUSTERS)}
    text = (
        INTRODUCTION.format(arguments=", ".join(ARGUMENTS))
        + table(dict(MEMBERS))
        + BETWEEN.format(
            own=table(own), pipelines=table(dict(PIPELINES)), scheduler=table(dict(SCHEDULERS), option=True),
            rules=table(dict(RULES)),
            hosted=", ".join(HOSTED), diloco=", ".join(strategy_options.ARGUMENTS), outer=table(dict(OUTER)),
            cluster=table({**CLUSTERS, **only_of_options}),
            outers=", ".join(n for n, made in {**OUTER, **CLUSTERS}.items() if made.prefix == PREFIX_OF_OUTER),
        )
    )  # fmt: skip
    if os.environ.get("CHAOS_REWRITE"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "docs/settings.md is of yesterday; CHAOS_REWRITE=1 writes it again"


@pytest.mark.parametrize("name", strategy_options.ARGUMENTS)
def test_the_page_of_outer_sync_has_each_argument_with_its_default(name: str) -> None:
    default = {**OUTER, **CLUSTERS}[name].default
    row = rf"^\| {name} \| {re.escape(str(default).lower())}[^|]* \| "
    assert re.search(row, PAGE.with_name("diloco.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("value", "fits"), [(0, False), (-1, False), (1e-9, True), (math.inf, False), (math.nan, False)]
)
def test_a_positive_number_is_above_zero_and_finite(value: float, fits: bool) -> None:
    assert positive("seconds")(value) == ("" if fits else "expected a positive number of seconds")


@pytest.mark.parametrize(("value", "fits"), [(2, True), (1.9, False), (math.inf, False), (math.nan, False)])
def test_at_least_takes_its_bound(value: float, fits: bool) -> None:
    assert at_least(2, "2 or more")(value) == ("" if fits else "expected 2 or more")
