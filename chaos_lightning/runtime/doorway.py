"""What a member says of itself when it comes in."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from chaos_lightning.collectives.layout import Layout
from chaos_lightning.membership.types import Hello
from chaos_lightning.runtime.config import EngineConfig
from chaos_lightning.runtime.process_table import host_identity, start_time


def package_version() -> str:
    """Version of the installed package; members of different versions never meet."""
    try:
        return version("chaos-lightning")
    except PackageNotFoundError:
        return "unknown"


def reachable_address(config: EngineConfig) -> str:
    """The address that other members dial: `bind`, or the one that faces the scheduler if that is a wildcard."""
    if config.bind not in ("0.0.0.0", "::", ""):
        return config.bind
    host, _, port = config.endpoint.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing: the routing table names our address
        return str(probe.getsockname()[0])


def hello(
    config: EngineConfig, *, port: int, quota: int, accumulate: int, fingerprint: Mapping[str, str], layout: Layout
) -> Hello:
    """A first Hello. Each parameter's type and shape is part of the fingerprint, so that a refusal can name it."""
    shapes = {f"parameter {s.name}": f"{s.tensor.dtype} {tuple(s.tensor.shape)}" for s in layout.slots}
    return Hello(
        job=config.job,
        name=config.name,
        host=host_identity(),
        address=reachable_address(config),
        port=port,
        pid=os.getpid(),
        pid_start=start_time(os.getpid()),
        quota=quota,
        accumulate=accumulate,
        package=package_version(),
        fingerprint=tuple(sorted({**shapes, **fingerprint, "gradient layout": layout.hash}.items())),
    )
