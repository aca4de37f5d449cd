"""Tests the process settings that all compared trainings share: one thread, and denormal numbers as zero."""

from __future__ import annotations

import select
from pathlib import Path

import torch

from chaos_lightning.testing.processes import start_function


def compute() -> None:
    from benchmarks.members import compute_alone

    torch.set_num_threads(2)
    compute_alone()
    print((torch.tensor([1e-30]) * 1e-10).item(), torch.get_num_threads())


def test_numbers_too_small_for_a_normal_float_count_as_zero(tmp_path: Path) -> None:
    """Denormal numbers count as zero after the set-up; checked in a process of its own, since that is a state of the
    processor.
    """
    child = start_function("alone", compute, (), tmp_path / "told", env={})
    assert select.select([child.sentinel], [], [], 60.0)[0]
    assert (child.tail(), child.poll()) == ("0.0 1", 0)
