"""Settings of one cluster, each declared once; the rules that all clusters of a job share are in settings.py.

To add one, write a field and use it: the strategy, the plain loop, Hydra and the environment have it then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chaos_lightning.declared import at_least, check_each, declared, document, one_of, positive, same_as, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoint, split_endpoints
from chaos_lightning.outer.exchange.server_options import DEFAULT_SERVER, VARIABLE, LeaderOptions
from chaos_lightning.outer.rules.settings import OUTER
from chaos_lightning.protocol.limits import PROCESS_NBYTES, at_most
from chaos_lightning.service.options import log_folder
from chaos_lightning.settings import EngineConfig, from_environment, host_name
from chaos_lightning.transport.sealing import RULES

CODECS = ("bf16", "fp32", "int8")
"""Codecs of this package; others are registered (codec.py)."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of one cluster."""

    server: str = setting(
        "",
        "The parameter server as HOST:PORT; where several leaders stand by for each other, all of them, with commas. "
        f"By default CHAOS_PS, else {DEFAULT_SERVER}, where the first process of a machine starts one.",
        metavar="HOST:PORT",
    )
    job: str = same_as(LeaderOptions, "job")
    name: str = setting(
        "",
        "This cluster's name, unique in the job. By default host name and process id.",
        check=at_most(PROCESS_NBYTES),
    )
    codec: str = setting(
        "bf16",
        f"How pushes and versions travel: {', '.join(CODECS)}, or one that was registered. fp32 is exact; int8 sends "
        "pushes in 1 byte per parameter and keeps what that drops for the next push.",
    )
    data: str = setting(
        "shared",
        "shared: all clusters train one data set, each sample once an epoch. local: each has its own.",
        check=one_of(("shared", "local")),
    )
    overlap: bool = setting(
        True, "Train on while a push travels and is judged. Off: wait for its version.", prefix=OUTER
    )
    ahead_steps: int = setting(
        0,
        "Inner steps that this cluster trains at most beyond a push whose version is under way, while the server is "
        "there; then it waits. Without overlap it trains none. 0: as many as from one push to the next.",
        check=at_least(0, "a number of steps, or 0"),
    )
    block: int = setting(
        1 << 16,
        "Elements of a block, by which hashes, shards and scales go.",
        check=at_least(64, "a number of elements"),
    )
    rate_bps: float = setting(
        0.0,
        "Bits a second that pushes may use, and versions as many. 0: as much as there is.",
        check=at_least(0, "bits per second, or 0"),
    )
    spread: float = setting(
        0.1,
        "Part of the time between two pushes over which one is spread, and a version likewise, while training goes "
        "on. 0: they travel as fast as they can.",
        check=at_least(0, "a part of the time between two pushes"),
    )
    patience_s: float = setting(
        1800.0,
        "How long to wait for samples, for a version or for the answer to a push, before this cluster gives up with an "
        "error, or for the job's end, before it leaves.",
        check=positive("seconds"),
    )
    followers: int = same_as(LeaderOptions, "followers")
    host_server: bool = setting(True, "Whether this process may start a server at a free endpoint of this machine.")
    links: str = setting("auto", "What protects data connections (docs/links.md).", check=one_of(RULES), prefix=OUTER)
    token_file: str = same_as(EngineConfig, "token_file")
    keys_dir: str = same_as(EngineConfig, "keys_dir")
    log_dir: str = same_as(EngineConfig, "log_dir")
    notice: str = same_as(EngineConfig, "notice")

    def __post_init__(self) -> None:
        check_each(self)
        if self.server:
            _ = self.endpoints

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints at which the leader, or one that stands by for it, may listen."""
        return split_endpoints(self.server or DEFAULT_SERVER)

    @property
    def log_folder(self) -> Path | None:
        """Folder of the cluster's event log; None if it has none."""
        return log_folder(self.log_dir, f"outer-{self.job}", split_endpoint(self.endpoints[0])[1], beside=True)

    @classmethod
    def build(cls, given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Self:
        """Builds the options from these arguments; where one is None from the environment, else from the default.

        Raises:
            ConfigurationError: An unknown setting, or a value that cannot work.
        """
        if unknown := sorted(set(given) - set(declared(cls))):
            raise ConfigurationError(f"unknown settings {unknown}; expected some of {sorted(declared(cls))}")
        # Under torchrun CHAOS_JOB names the job of a cluster's ranks, and CHAOS_NAME one of them.
        known = {name: made for name, made in declared(cls).items() if name not in ("server", "job", "name")}
        values = from_environment(known, environ) | {k: v for k, v in given.items() if v is not None}
        values["server"] = values.get("server") or environ.get(VARIABLE, "")
        values["name"] = values.get("name") or f"{host_name()}-{os.getpid()}"
        return cls(**values)


document(ClusterOptions)
