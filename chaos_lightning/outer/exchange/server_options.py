"""Options of a leader of outer sync, and of a whole server on one machine: leader, followers and a spare.

To add an option, write a field, and use it: `chaos-lightning ps leader` and `ps up` have it then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.declared import at_least, check_each, document, same_as, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.protocol.limits import PROCESS_NBYTES, at_most
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.options import (
    ETCD,
    MEMORY,
    absolute_store,
    check_advertise,
    check_reached,
    log_folder,
    state_folder,
)
from chaos_lightning.settings import EngineConfig, absolute_path

DEFAULT_PORT = 29470
DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"
VARIABLE = "CHAOS_PS"
"""Environment variable that names the server: HOST:PORT, several with commas."""


@dataclass(frozen=True, kw_only=True)
class LeaderOptions:
    """Options of one leader."""

    listen: str = setting(
        DEFAULT_SERVER, "Where to listen; beyond loopback keys or a token are demanded.", metavar="HOST:PORT"
    )
    advertise: str = setting(
        "",
        "Where others reach it, if that is not where it listens (0.0.0.0, a container). Only leaders with their chain "
        "in etcd are named to others.",
        metavar="HOST:PORT",
    )
    job: str = same_as(Settings, "job")
    followers: int = setting(
        0,
        "So many followers hold a shard of the outer state each. 0: as many as the job has; one, if it is new. For "
        "another number `ps up` cuts the shards of a job anew, if its chain is in a file and all of its followers' "
        "folders are on this machine. Others stand by. A shard is in its follower's folder alone. To take it over, "
        "copy that folder, and start a follower of that name on it.",
        check=at_least(0, "a number of followers, or 0"),
        metavar="N",
    )
    store: str = setting(
        "",
        "The chain's file, or etcd://HOST:PORT+HOST:PORT for several leaders that stand by for each other; followers' "
        "shards are not in it (see --followers). By default "
        f"$XDG_STATE_HOME/chaos-lightning/outer-JOB-PORT/chain.sqlite. {MEMORY} keeps nothing (for tests).",
        absolute=absolute_store,
        metavar="PATH",
    )
    token_file: str = same_as(EngineConfig, "token_file")
    keys_dir: str = same_as(EngineConfig, "keys_dir")
    log_dir: str = same_as(EngineConfig, "log_dir")
    idle_timeout_s: float = setting(
        0.0,
        "End after so many seconds without a cluster; the job goes on when one comes again. 0: never.",
        check=at_least(0, "a positive number of seconds, or 0"),
        metavar="SECONDS",
    )
    keep_finished: bool = setting(
        False,
        "Serve the chain of a job that has ended, so that whoever comes is told so. Otherwise it is put away, and the "
        "job begins anew.",
    )

    def __post_init__(self) -> None:
        check_each(self)
        check_reached(self.listen, self.advertise, self.store, "leaders", "clusters")
        if not split_endpoint(self.listen)[1]:
            raise ConfigurationError(f"--listen {self.listen}: others must know the port; name one")
        check_advertise(self.advertise, "--advertise ", self.store)

    @property
    def in_etcd(self) -> bool:
        """Whether the chain is in etcd, so that further leaders can stand by for this one."""
        return self.store.startswith(ETCD)

    @property
    def folder(self) -> Path:
        """Default folder of the server's files on this machine."""
        return state_folder(f"outer-{self.job}", split_endpoint(self.listen)[1])

    @property
    def log_folder(self) -> Path | None:
        """Folder of the leader's event log; None if it has none."""
        return log_folder(self.log_dir, f"outer-{self.job}", split_endpoint(self.listen)[1], beside=True)

    @property
    def store_path(self) -> Path | None:
        """File of the chain; None if the chain is in memory or in etcd."""
        if self.store == MEMORY or self.in_etcd:
            return None
        return Path(self.store) if self.store else self.folder / "chain.sqlite"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(LeaderOptions):
    """Options of a leader and its followers on one machine."""

    dir: str = setting(
        "",
        "Folder of the chain and of each follower's files. By default $XDG_STATE_HOME/chaos-lightning/outer-JOB-PORT.",
        absolute=absolute_path,
        metavar="DIR",
    )
    bind: str = setting(
        "",
        "Address at which followers take data connections, on free ports; by default that of --listen.",
        metavar="HOST",
    )
    name: str = setting(
        "follower",
        "Followers are called by it and a number. Where several machines have followers of one job, they need names of "
        "their own.",
        check=at_most(PROCESS_NBYTES - 8),
    )

    links: str = same_as(EngineConfig, "links")
    codecs: str = setting(
        "", "Modules that followers import first, with commas: they register codecs.", metavar="MODULES"
    )

    @property
    def folder(self) -> Path:
        """Folder of the chain, with a folder in it for each follower."""
        return Path(os.path.abspath(self.dir)) if self.dir else super().folder


document(LeaderOptions)
document(ServerOptions)
