"""Tests that the tool that measures emulated links finds the rates set, with each backend that works on this
machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chaos_lightning.errors import ChaosError
from chaos_lightning.testing.edge import check, namespaces

BACKENDS = ["relay", *(["namespaces"] if namespaces.ability().works else [])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rate_is_measured(backend: str) -> None:
    found = list(check.measure(backend, (20e6, 50e6), 0.001, seconds=0.2))
    assert [(f.rate_bps, f.latency_s) for f in found] == [(20e6, 0.001), (50e6, 0.001)]
    for f in found:
        assert 0 < f.got_bps < 1.2 * f.rate_bps  # whatever else runs here, nothing is faster than its link
        assert f.trip_s > (0.0009 if backend == "relay" else 0)


def test_a_process_that_fails_is_no_result() -> None:
    process = subprocess.Popen([sys.executable, "-c", "exit(3)"], stdout=subprocess.PIPE, text=True)
    with process, pytest.raises(ChaosError, match="ended with exit code 3"):
        check._line(process)


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--backend", "relay", "--seconds", "0.05"])
    monkeypatch.setattr(check, "RATES_BPS", (100e6,))
    check.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("100 Mbps ")
    assert len(lines) == 2
    assert Path(check.__file__).name == "check.py"
