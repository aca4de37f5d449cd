"""Options of a follower.

To add an option, write a field, and use it: `chaos-lightning ps follower` has it then.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.declared import check_each, document, same_as, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import WILDCARDS, facing, split_endpoint, split_endpoints
from chaos_lightning.outer.exchange.server_options import DEFAULT_SERVER
from chaos_lightning.protocol.limits import PROCESS_NBYTES, at_most
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.options import log_folder, state_folder
from chaos_lightning.settings import EngineConfig, absolute_path


def has_port(endpoint: str) -> bool:
    """Returns whether this HOST[:PORT] contains a port."""
    return re.search(r":[0-9]+$", endpoint) is not None


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """Options of one follower."""

    server: str = setting(
        DEFAULT_SERVER,
        "Where the leader is reached; several with commas, if they stand by for each other.",
        metavar="HOST:PORT",
    )
    job: str = same_as(Settings, "job")
    name: str = setting(
        "",
        "Its name, which no other follower of the job has. One that starts with the name and the files of another that "
        "is gone goes on in its place; one with a name that has no shard stands by. By default this machine's name.",
        check=at_most(PROCESS_NBYTES),
    )
    dir: str = setting(
        "",
        "Folder of its files, for itself alone. By default $XDG_STATE_HOME/chaos-lightning/outer-JOB-PORT/NAME.",
        absolute=absolute_path,
        metavar="DIR",
    )
    bind: str = setting(
        "127.0.0.1",
        "Where it takes data connections of clusters; beyond loopback keys or a token are demanded. Without a port it "
        "takes any free one.",
        metavar="HOST[:PORT]",
    )
    advertise: str = setting(
        "",
        "Where clusters reach it, if that is not where it listens (a container, a relay). If it listens at all of its "
        "addresses, that is by default the one that faces the leader.",
        metavar="HOST[:PORT]",
    )
    token_file: str = same_as(EngineConfig, "token_file")
    keys_dir: str = same_as(EngineConfig, "keys_dir")
    links: str = same_as(EngineConfig, "links")
    log_dir: str = same_as(EngineConfig, "log_dir")
    codecs: str = setting(
        "",
        "Modules to import first, with commas: they register codecs that a training script registers, too "
        "(chaos_lightning.outer.exchange.codec.register_codec).",
        metavar="MODULES",
    )

    def __post_init__(self) -> None:
        check_each(self)
        if not self.endpoints:
            raise ConfigurationError("--server: name at least one leader, as HOST:PORT")
        split_endpoint(self.bind)
        if self.advertise and (split_endpoint(self.advertise)[0] in WILDCARDS or self.advertise.endswith(":0")):
            raise ConfigurationError(f"--advertise {self.advertise}: nobody can call that; expected HOST:PORT")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """HOST:PORT of the leader, and of the leaders that stand by for it."""
        return split_endpoints(self.server)

    @property
    def called(self) -> str:
        """Name of the follower: the one that was given, else this machine's host name."""
        return self.name or socket.gethostname()

    @property
    def folder(self) -> Path:
        """Folder of the follower's files."""
        if self.dir:
            return Path(self.dir).absolute()
        return state_folder(f"outer-{self.job}", split_endpoint(self.endpoints[0])[1]) / self.called

    @property
    def log_folder(self) -> Path | None:
        """Folder of the follower's event log; None if it has none."""
        return log_folder(self.log_dir, f"outer-{self.job}", split_endpoint(self.endpoints[0])[1], beside=True)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port at which the follower listens; port 0 takes any free one."""
        host, port = split_endpoint(self.bind)
        return host, port if has_port(self.bind) else 0

    @property
    def advertised(self) -> str:
        """Address that clusters are told for the follower, with or without a port; "" means the address at which it
        listens.
        """
        host, _ = self.place
        if self.advertise or host not in WILDCARDS:
            return self.advertise
        return facing(*split_endpoint(self.endpoints[0]), advice="say where clusters reach it: --advertise HOST")


document(FollowerOptions)
