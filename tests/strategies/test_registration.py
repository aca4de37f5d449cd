"""`import chaos_lightning` is light and registers "chaos" whatever is imported first."""

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


def test_import_is_light() -> None:
    code = "import sys, chaos_lightning; print([m for m in ('torch', 'lightning', 'grpc') if m in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "order",
    [
        "import chaos_lightning; import lightning.pytorch as L",
        "import lightning.pytorch as L; import chaos_lightning",
        "import lightning; import chaos_lightning; import chaos_lightning._register as r; r.install(); r.install()",
    ],
)
def test_registered_in_either_order(order: str) -> None:
    code = (
        f"{order}\nimport sys\nfrom lightning.pytorch.strategies import StrategyRegistry\n"
        "import lightning.pytorch.strategies as s\n"
        "print('chaos' in StrategyRegistry.available_strategies(), 'chaos_lightning.strategies' in sys.modules, "
        "type(s.__loader__).__name__, type(s.__spec__.loader).__name__)"
    )
    assert run(code) == "True False SourceFileLoader SourceFileLoader"


def test_the_other_host_is_refused_by_name() -> None:
    code = (
        "import chaos_lightning\nfrom chaos_lightning.errors import UnsupportedError\n"
        "from pytorch_lightning.strategies import StrategyRegistry\n"
        "try:\n    StrategyRegistry.get('chaos')\nexcept UnsupportedError as e:\n    print(e)"
    )
    assert "import lightning.pytorch as pl" in run(code)


def test_folder_under_its_short_name_is_refused() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "try:\n    import strategies\nexcept ImportError as e:\n    print(e)"
    )
    assert "import chaos_lightning.strategies" in run(code)


def test_lazy_names_of_the_package() -> None:
    code = "import chaos_lightning as c; print(c.ChaosStrategy.__name__, c.EngineConfig.__name__, c.Engine.__name__)"
    assert run(code) == "ChaosStrategy EngineConfig Engine"
