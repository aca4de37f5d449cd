"""Makes the hello of a member: the facts that it states about itself when it joins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from chaos_lightning.collectives.canonical import plain_name
from chaos_lightning.collectives.layout import Layout
from chaos_lightning.errors import ConfigurationError, WireError
from chaos_lightning.machine.addresses import WILDCARDS, facing, split_announced, split_endpoint
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.types import Hello, Welcome
from chaos_lightning.settings import EngineConfig


def package_version() -> str:
    """Returns the version of the installed package; a job admits only members of one version."""
    try:
        return version("chaos-lightning")
    except PackageNotFoundError:
        return "unknown"


_ADVICE = "set bind to an address of this machine that other members reach"


def listening_address(config: EngineConfig) -> str:
    """Returns the address at which this member listens: `bind`, or the one of the interface towards the scheduler.

    Raises:
        ConfigurationError: No route leads there.
    """
    return config.bind or facing(*split_endpoint(config.endpoints[0]), _ADVICE)


def reachable_at(config: EngineConfig, port: int) -> tuple[str, int]:
    """Returns the address that other members dial: `announce`, else `bind`, else the one of the interface towards the
    scheduler.

    Args:
        config: Configuration of this member.
        port: Port at which this member listens.

    Raises:
        ConfigurationError: No route leads to the scheduler, or the address is one of IPv6, and "0.0.0.0" does not
            listen there.
    """
    if config.announce:
        host, outside = split_announced(config.announce)
        return host, outside or port
    listens = listening_address(config)
    return (listens if listens not in WILDCARDS else _facing_all(config)), port


def _facing_all(config: EngineConfig) -> str:
    found = facing(*split_endpoint(config.endpoints[0]), _ADVICE)
    if ":" in found and config.bind != "::":
        raise ConfigurationError(
            f"{found} faces the scheduler at {config.endpoints[0]}, and bind={config.bind!r} takes connections over "
            f"IPv4 alone; {_ADVICE}, or to ::"
        )
    return found


def unheeded(config: EngineConfig, welcome: Welcome) -> list[str]:
    """Returns a message for each setting of this member that has no effect because the job's scheduler was started with
    another value.

    A setting that equals the default counts as not set, but for a min_nodes for which a founder has to wait.
    """
    if not welcome.max_nodes:
        return []
    plan, rules = config.plan_spec, welcome.plan
    words = {
        setting: (given, the_jobs)
        for setting in ("min_nodes", "max_nodes", "heartbeat_timeout_s")
        if (given := getattr(config, setting)) not in (the_jobs := getattr(welcome, setting), _default(setting))
    }
    if config.plan != _default("plan") and (plan.kind, plan.trees) != (rules.kind, rules.trees):
        words["plan"] = (config.plan, f"{rules.kind!r}")
    if config.chunk_nbytes not in (0, rules.chunk_nbytes):
        words["chunk_nbytes"] = (config.chunk_nbytes, rules.chunk_nbytes)
    if welcome.role == "founder" and config.min_nodes < welcome.min_nodes:
        words["min_nodes"] = (config.min_nodes, welcome.min_nodes)
    return [
        f"{setting}={given} of {config.name} is not honoured: the job's scheduler was started with {the_jobs}"
        for setting, (given, the_jobs) in words.items()
    ]


def _default(setting: str) -> object:
    return next(f.default for f in fields(EngineConfig) if f.name == setting)


def _workers() -> int:
    """Returns the number of workers that torchrun started on this node (LOCAL_WORLD_SIZE)."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


class Asks(NamedTuple):
    """Requests of a member to a job, beyond a batch of its own.

    Attributes:
        pipelines: Request for pipelines (`PipelineRequest.to_json`); "": it holds the whole state.
        batch: Batch of a step, whoever is there (planning/batch.py, BatchRule); "": each member adds its own.
    """

    pipelines: str = ""
    batch: str = ""


def hello(
    config: EngineConfig,
    *,
    port: int,
    quota: int,
    accumulate: int,
    fingerprint: Mapping[str, str],
    layout: Layout,
    no_replay: str = "",
    asks: Asks = Asks(),
) -> Hello:
    """Makes a first Hello; its fingerprint has each parameter's type and shape, so that a refusal can name the one that
    differs.

    Raises:
        ConfigurationError: Something in it is beyond its limit, and no scheduler would listen to it.
    """
    address, reached = reachable_at(config, port)
    shapes = {f"parameter {plain_name(s.name)}": f"{s.tensor.dtype} {tuple(s.tensor.shape)}" for s in layout.slots}
    made = Hello(
        job=config.job,
        name=config.name,
        host=host_identity(),
        address=address,
        port=reached,
        pid=os.getpid(),
        pid_start=start_time(os.getpid()),
        quota=quota,
        accumulate=accumulate,
        package=package_version(),
        fingerprint=tuple(sorted({**shapes, **fingerprint, "gradient layout": layout.hash}.items())),
        neighbours=config.neighbour_names,
        replay=bounded(no_replay),
        node=(node := os.environ.get("CHAOS_NODE", "")),
        workers=_workers() if node else 1,
        pipelines=asks.pipelines,
        batch=asks.batch,
    )
    try:
        return decode(Hello, encode(made))
    except WireError as error:
        raise ConfigurationError(f"this member cannot say who it is: {error}") from error
