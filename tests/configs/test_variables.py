"""Tests that mistyped settings in the environment are reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_lightning.control.options import HOSTED
from chaos_lightning.declared import Setting, declared
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.settings import EngineConfig, from_environment
from chaos_lightning.variables import known, unknown, warn_of_unknown

ROOT = Path(__file__).parents[2]


def test_a_mistyped_setting_is_told_with_the_one_that_was_meant() -> None:
    (line,) = unknown({"CHAOS_ENDPIONT": "a:1", "CHAOS_PLAN": "tree", "PATH": "/bin"})
    assert line == "environment variable CHAOS_ENDPIONT is no setting and changes nothing; did you mean CHAOS_ENDPOINT?"
    (line,) = unknown({"CHAOS_MONKEY": "1"})
    assert line.endswith("see docs/settings.md for those that are")


def test_what_kubernetes_adds_for_a_service_is_no_mistake() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_29400_TCP", "PORT_29400_TCP_ADDR", "PORT"]
    assert unknown({f"CHAOS_{more}{name}": "x" for more in ("", "SCHEDULER_") for name in names}) == []


def test_every_variable_that_the_product_names_is_known() -> None:
    for folder in ("chaos_lightning", "strategies", "callbacks", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "variables.py":
                assert set(re.findall(r"[\"'](CHAOS_[A-Z_]*[A-Z])[\"'=]", path.read_text())) <= known(), path


def test_seed_is_no_variable() -> None:
    assert unknown({"CHAOS_SEED": "3"})


def test_each_way_to_start_tells_it_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CHAOS_ENDPIONT", "a:1")
    warn_of_unknown.cache_clear()
    warn_of_unknown()
    warn_of_unknown()
    assert caplog.text.count("did you mean CHAOS_ENDPOINT") == 1
    warn_of_unknown.cache_clear()


def test_the_command_tells_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaos_lightning", "plan", "--help"],
        env={"CHAOS_LOGDIR": "/x", "PATH": "/usr/bin:/bin", "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "CHAOS_LOGDIR is no setting and changes nothing; did you mean CHAOS_LOG_DIR?" in done.stderr


def test_a_variable_is_one_setting() -> None:
    """Members, clusters and pipelines read their settings from one environment, so a name means the same to all of
    them; a cluster reads no names of jobs and nodes there.
    """
    seen: dict[str, Setting] = {name: made for made in HOSTED.values() for name in [made.variable]}
    for owner in (EngineConfig, ClusterOptions, OuterSettings, PipelineOptions):
        for made in declared(owner).values():
            if owner is not ClusterOptions or made.name not in ("server", "job", "name"):
                assert seen.setdefault(made.variable, made) == made, owner


def test_a_setting_of_outer_sync_under_the_name_of_a_members_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rules = declared(OuterSettings)
    assert from_environment(rules, {"CHAOS_BATCH": "64", "CHAOS_CLIP": "1"}) == {"clip": 1.0}
    assert "CHAOS_BATCH changes nothing here; did you mean CHAOS_OUTER_BATCH?" in caplog.text
    caplog.clear()
    both = {"CHAOS_BATCH": "fixed", "CHAOS_OUTER_BATCH": "64"}
    assert from_environment(rules, both) == {"batch": 64}
    assert from_environment(rules, {"CHAOS_BATCH": "member", "CHAOS_NODE": "n"}) == {}
    assert not caplog.text
