"""Tests the memory of a member's device: as given, or the machine's, shared among its members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.pipeline import device_memory as module
from chaos_lightning.pipeline.device_memory import default_device_memory, device_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(("given", "nbytes"), [("8 GiB", 8 << 30), (1000, 1000), ("500 MB", 500_000_000)])
def test_what_is_given_counts(given: Any, nbytes: int) -> None:
    found = device_memory(given, CPU, 3)
    assert found.nbytes == nbytes
    assert f"device_memory={given!r}" in found.words


@pytest.mark.parametrize("given", ["8", "lots", 0, -1, "0 GiB", True, [1]])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="device_memory="):
        device_memory(given, CPU)


def test_processes_of_a_machine_share_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_nbytes", lambda: 3 << 30)
    assert default_device_memory(CPU) == 3 << 30
    found = device_memory(None, CPU, 3)
    assert found.nbytes == 1 << 30
    assert found.words.startswith("memory for layers: 1 GiB of what this machine")
    assert "shared by 3 processes" in found.words


def test_limits_of_control_groups_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from chaos_lightning.replication import snapshot

    group = tmp_path / "job"
    group.mkdir()
    for name, text in (("memory.max", "5000"), ("memory.current", "2000"), ("memory.stat", "inactive_file 500")):
        (group / name).write_text(text)
    assert snapshot.left_in_groups("0::/job", tmp_path) == [3500]
    monkeypatch.setattr(snapshot, "left_in_groups", lambda *args: [3500])
    assert default_device_memory(CPU, 7) == 500


@pytest.mark.parametrize(("processes", "nbytes"), [(1, 80), (2, 80), (3, 40), (5, 26)])
def test_processes_share_accelerators(monkeypatch: pytest.MonkeyPatch, processes: int, nbytes: int) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (70, 80))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert default_device_memory(torch.device("cuda", 0), processes) == nbytes
    assert device_memory(None, torch.device("cuda", 0)).words.startswith("memory for layers: 80 B cuda:0 has")


def test_a_device_that_does_not_tell_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> Any:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    with pytest.raises(ConfigurationError, match=r"mps does not tell its memory .*device_memory='8 GiB'"):
        default_device_memory(torch.device("mps"))
