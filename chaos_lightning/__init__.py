"""Trains models on machines that may join, leave and fail while training goes on.

Importing this package is light: neither torch nor Lightning is loaded, yet `Trainer(strategy="chaos")` works
afterwards (see `_register.py`). The engine lives in the subpackages; `chaos_lightning.strategies` and
`chaos_lightning.callbacks` hold what a Lightning user touches.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from chaos_lightning._register import install

__all__ = ["ChaosPipelineStrategy", "ChaosStrategy", "DiLoCoStrategy", "Engine", "EngineConfig", "Trainer"]

_LAZY = {
    "ChaosPipelineStrategy": "chaos_lightning.strategies",
    "ChaosStrategy": "chaos_lightning.strategies",
    "DiLoCoStrategy": "chaos_lightning.strategies",
    "Engine": "chaos_lightning.member.engine",
    "EngineConfig": "chaos_lightning.settings",
    "Trainer": "chaos_lightning.trainer",
}

install()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("chaos-lightning")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "__version__"})
