"""Provides fixtures of the strategy tests (a double of the engine, jobs of real processes), and silences warnings of
Lightning.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

HOST_NOISE = (
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates.
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
    # Advice about workers and logging intervals, which tiny test data provoke.
    "ignore:.*does not have many workers:lightning.pytorch.utilities.warnings.PossibleUserWarning",
    "ignore:The number of training batches .* is smaller than the logging interval",
    # Loaders that are not shuffled, so that tests can tell their samples.
    "ignore:shuffle=False where clusters share the data",
    # Warnings to rank zero about models and checkpoints of which tests use only a part.
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:You are using the `dataloader_iter` step flavor",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:Checkpoint directory .* exists and is not empty",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            for text in HOST_NOISE:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type]:
    """Replaces the engine by one that needs no network, in a job of its own; yields the engine's class."""
    from engine_double import EngineDouble

    import chaos_lightning.strategies.session as module
    from chaos_lightning.machine.listener import free_port

    EngineDouble.made.clear()
    EngineDouble.setting.clear()
    monkeypatch.setattr(module, "Engine", EngineDouble)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("locks")))
    # A job that another test runs at the default port would say which rank this one comes to.
    monkeypatch.setenv("CHAOS_ENDPOINT", f"127.0.0.1:{free_port()}")
    yield EngineDouble
    EngineDouble.made.clear()
    EngineDouble.setting.clear()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Job whose members are real processes; its scheduler ends with the test."""
    # This seed keys the order of samples, and this process, or the one that members fork from, may have been seeded.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    from forked_support import patient, scheduler
    from strategy_job import Job

    from chaos_lightning.testing.harness import Harness

    options = patient(tmp_path)
    with Harness(tmp_path, deadline_s=90.0) as harness:
        made = Job(harness, tmp_path, options, scheduler(options))
        try:
            yield made
        finally:
            if made.scheduler is not None:
                made.scheduler.stop()
