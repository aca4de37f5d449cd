"""Tests that `import chaos_lightning` registers "chaos", whatever is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REGISTERED = """
import sys
from lightning.pytorch.strategies import StrategyRegistry
import lightning.pytorch.strategies as s
print('chaos' in StrategyRegistry.available_strategies(), 'chaos_lightning.strategies' in sys.modules,
      type(s.__loader__).__name__, type(s.__spec__.loader).__name__)
"""
OTHER_HOST = """
from chaos_lightning.errors import UnsupportedError
from pytorch_lightning.strategies import StrategyRegistry
try:
    StrategyRegistry.get('chaos')
except UnsupportedError as e:
    print(e)
"""
LAZY = """
from chaos_lightning import ChaosStrategy, Engine, EngineConfig
print(ChaosStrategy.__name__, EngineConfig.__name__, Engine.__name__)
"""


@pytest.mark.slow
def test_registered_before_lightning_comes() -> None:
    """chaos_lightning is imported before Lightning: "chaos" is registered once Lightning comes. Asking for "chaos"
    in the other package (`pytorch_lightning`) gives an error with advice.
    """
    code = f"import chaos_lightning; import lightning.pytorch as L\n{REGISTERED}{OTHER_HOST}{LAZY}"
    registered, refused, lazy = run(code).splitlines()
    assert registered == "True False SourceFileLoader SourceFileLoader"
    assert "import lightning.pytorch as pl" in refused
    assert lazy == "ChaosStrategy EngineConfig Engine"


@pytest.mark.slow
def test_registered_after_lightning_came() -> None:
    """If Lightning is imported first, "chaos" is registered at once; installing twice does no harm."""
    again = "import chaos_lightning._register as r; r.install(); r.install()"
    code = f"import lightning.pytorch as L; import chaos_lightning\n{again}\n{REGISTERED}"
    assert run(code) == "True False SourceFileLoader SourceFileLoader"
