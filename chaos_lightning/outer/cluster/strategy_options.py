"""Settings of `DiLoCoStrategy`: the job's rules and those of one cluster, in one place.

Theory of operation. Each setting is declared once, in `OuterSettings` or in `ClusterOptions`. Some are arguments of the
strategy; the others are fields of `DiLoCoOptions`, where None means: the environment's CHAOS_<NAME>, else the default.
Nothing here imports torch or Lightning, so Hydra's types can be made of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from chaos_lightning.declared import declared, document, optional_base, same_as, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.settings import ChaosOptions, from_environment

OWNERS = (OuterSettings, ClusterOptions)
ARGUMENTS = ("server", "name", "inner_steps", "outer_lr", "outer_momentum", "policy", "codec", "data", "overlap")
"""Settings that are arguments of the strategy; all others are in its `options`."""


if TYPE_CHECKING:
    _Options = OuterSettings  # as far as type checkers and completion know them
else:
    _Options = optional_base(__name__, *OWNERS, without=ARGUMENTS)


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(_Options):
    """Settings of `DiLoCoStrategy` that are no arguments of its own and that most jobs leave alone: of the job, of the
    cluster, and a few more. The default of `batch` is the loader's batch size.
    """

    seed: int | None = setting(
        None, "Seed of the sample order; equal in all clusters. None takes `seed_everything`'s, else 0."
    )
    leave_on_signals: bool = same_as(ChaosOptions, "leave_on_signals")
    start_timeout_s: float = setting(60.0, "How long to wait for the parameter server at the start.")


def build(
    options: DiLoCoOptions,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    batch: int | None = None,
) -> tuple[OuterSettings, ClusterOptions]:
    """Returns the job's rules and this cluster's settings: from the given values, else from the environment, else the
    defaults.

    Args:
        options: Options of the strategy.
        arguments: Arguments of the strategy; None where nothing was given.
        environ: Environment variables of the process.
        batch: Samples of a step as the training loader says, which is the default then; 0: it does not say.

    Raises:
        ConfigurationError: A value is not possible; the message names the setting or the variable.
    """
    declared(DiLoCoOptions)["start_timeout_s"].demand(options.start_timeout_s)
    given = {k: v for k, v in {**asdict(options), **arguments}.items() if v is not None}
    rules = declared(OuterSettings)
    told = from_environment(rules, environ) | {k: v for k, v in given.items() if k in rules}
    if batch is not None and "batch" not in told:
        if not batch:
            raise ConfigurationError(
                "the training loader does not say how many samples a batch has, by which the server weighs rounds: "
                "set options.batch to the samples of a step of this cluster, on all its devices"
            )
        told["batch"] = batch
    settings = OuterSettings(**told)
    own = {name: value for name, value in given.items() if name in declared(ClusterOptions)}
    return settings, ClusterOptions.build(own, environ)


document(DiLoCoOptions)
