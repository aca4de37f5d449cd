"""What all compared training loops share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from benchmarks.members import compute_alone
compute_alone()
print((torch.tensor([1e-30]) * 1e-10).item(), torch.get_num_threads())
"""


def test_numbers_too_small_for_a_normal_float_count_as_zero() -> None:
    """In a process of its own, since it is a state of the processor."""
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout.split() == ["0.0", "1"]
