"""Registers "chaos", "chaos_pipeline" and "chaos_diloco" in Lightning's strategy registry without importing Lightning.

Theory of operation. There is no entry-point group for strategies, so `import chaos_lightning` has to register. If
Lightning's strategy package is imported already, it registers at once, otherwise after that module's own code has run
(`machine.imports`). What is registered is a small factory, so `chaos_lightning.strategies` (and with it torch) is only
imported when a Trainer asks for the strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from chaos_lightning.machine.imports import call_after_import

HOST = "lightning.pytorch.strategies"
OTHER_HOST = "pytorch_lightning.strategies"


@dataclass(frozen=True)
class Registered:
    """Entry of Lightning's strategy registry, with texts for errors.

    Attributes:
        kind: Name of its class in `chaos_lightning.strategies`, or of the function that makes it.
        description: Description in the registry.
        loop: Name of what a plain loop uses instead.
        why_no_fabric: Reason why Fabric cannot have it.
    """

    kind: str
    description: str
    loop: str
    why_no_fabric: str


NAMES = {
    "chaos": Registered(
        "ChaosStrategy",
        "members may join, leave and die while training goes on",
        "chaos_lightning.trainer.Trainer, which has prepare() and update() where Fabric has setup() and backward()",
        "members come and go between two steps, where Fabric has no hook that could hand over the training state, and "
        "it cannot know which samples a step has used",
    ),
    "chaos_pipeline": Registered(
        "ChaosPipelineStrategy",
        "a model in stages, one per process, that goes on when stages die",
        "chaos_lightning.trainer.Trainer, for models that fit one device",
        "stages come and go between two steps, where Fabric has no hook, and a step of Fabric is no whole step",
    ),
    "chaos_diloco": Registered(
        "DiLoCoStrategy",
        "clusters that are far apart train one model, whoever dies",
        "chaos_lightning.diloco",
        "versions of the model are adopted between two steps, where Fabric has no hook, and it cannot know which "
        "samples a step has used",
    ),
}


def make_strategy(name: str, **options: Any) -> Any:
    """Makes the strategy of this registered name, as `Trainer(strategy="chaos")` requests it."""
    from chaos_lightning import strategies

    return getattr(strategies, NAMES[name].kind)(**options)


def refuse_other_host(name: str, **_: Any) -> Any:
    """Raises UnsupportedError for a Trainer of the package `pytorch_lightning`, whose classes differ from those of
    `lightning.pytorch`.
    """
    from chaos_lightning.errors import UnsupportedError

    raise UnsupportedError(
        f'Trainer(strategy="{name}") of the package `pytorch_lightning` is not supported, since its classes are others '
        "than those of `lightning.pytorch`; write `import lightning.pytorch as pl` instead of `import "
        "pytorch_lightning as pl`"
    )


def refuse_fabric(name: str, **_: Any) -> Any:
    """Raises UnsupportedError for `Fabric(strategy="chaos")` and the like."""
    from chaos_lightning.errors import UnsupportedError

    raise UnsupportedError(
        f'Fabric(strategy="{name}") is not supported: {NAMES[name].why_no_fabric}. Use Trainer(strategy="{name}") of '
        f"lightning.pytorch, or keep your loop and write it with {NAMES[name].loop}"
    )


_FACTORIES: dict[str, Callable[..., Any]] = {
    HOST: make_strategy,
    OTHER_HOST: refuse_other_host,
    "lightning.fabric.strategies": refuse_fabric,
    "lightning_fabric.strategies": refuse_fabric,
}
_REGISTRIES = ("StrategyRegistry", "STRATEGY_REGISTRY")
"""Names of the registries in the Trainer's package and in Fabric's."""


def registry_of(module: ModuleType) -> Any:
    """Returns the registry of Lightning's strategy package `module`; None while the package is being imported."""
    return next((found for name in _REGISTRIES if (found := getattr(module, name, None)) is not None), None)


def register(module: ModuleType) -> None:
    """Registers all strategies in an imported Lightning strategy package."""
    factory = _FACTORIES[module.__name__]
    for name, made in NAMES.items():
        registry_of(module).register(name, partial(factory, name), description=made.description, override=True)


def install() -> None:
    """Registers the strategies in Lightning packages that are imported already, and in others once they are.
    Idempotent.
    """
    for name in _FACTORIES:
        module = sys.modules.get(name)
        if module is not None and registry_of(module) is not None:
            register(module)
    call_after_import(_FACTORIES, register)
