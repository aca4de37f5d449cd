"""Options that all services have in common: where a store, state and logs are, and where others reach a server."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.declared import check_each, document, same_as, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import FORGOTTEN_S, forget_old
from chaos_lightning.machine.addresses import WILDCARDS, join_endpoint, split_endpoint
from chaos_lightning.protocol.types import Settings
from chaos_lightning.settings import EngineConfig, absolute_path

_log = logging.getLogger("chaos_lightning")

ETCD = "etcd://"
"""Beginning of the address of a store in etcd."""
MEMORY = ":memory:"
"""Store that keeps the chain in memory only. For tests; the job dies with the scheduler."""


def absolute_store(text: str) -> str:
    """Returns a store's name that is valid in every working directory: file paths become absolute."""
    return text if text.startswith(ETCD) else absolute_path(text, ("", MEMORY))


def state_folder(name: str, port: int) -> Path:
    """Returns `$XDG_STATE_HOME/chaos-lightning/<name>-<port>`, the default folder for the state of a service at this
    port.

    Raises:
        ConfigurationError: This user has no home, and the variable is not set.
    """
    try:
        root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:
        raise ConfigurationError("this user has no home directory: set XDG_STATE_HOME, or name a folder") from None
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    return Path(root) / "chaos-lightning" / f"{safe}-{port}"


def log_folder(log_dir: str, name: str, port: int, *, beside: bool = False) -> Path | None:
    """Returns the folder for the event log of a process of this job; None if events are not logged.

    Args:
        log_dir: Setting `log_dir`, as the user gave it.
        name: Name of the job, or of another service that has a state folder.
        port: Port of its endpoint.
        beside: Whether the default is a folder beside the state folder, not in it: the state folder is put away at
            the job's end.
    """
    if log_dir in ("", "none"):
        return None
    if log_dir != "auto":
        return Path(log_dir)
    try:
        folder = state_folder(name, port)
    except ConfigurationError as error:  # a container's user without a home trains all the same
        _log.warning("events are logged nowhere: %s by log_dir", error)
        return None
    return folder.with_name(f"{folder.name}-events") if beside else folder / "events"


def default_log_folders() -> list[Path]:
    """Returns the folders of event logs that `log_folder` chose by default for jobs of this machine.

    Raises:
        ConfigurationError: This user has no home.
    """
    root = state_folder("", 0).parent
    return [*root.glob("*/events"), *root.glob("*-events")]


def forget_logs(log_dir: str) -> None:
    """Deletes old event logs in the default folders of this machine's jobs; call it after opening the process's own
    log.

    Each process that logs there does it, for many a machine hosts no scheduler that could.

    Args:
        log_dir: The process's own, as the user gave it.
    """
    now = time.time()
    with contextlib.suppress(ConfigurationError, OSError):
        for folder in default_log_folders() if log_dir == "auto" else ():
            unused = now - folder.stat().st_mtime > FORGOTTEN_S  # nobody has just made it, to log there
            forget_old(folder, now)
            if unused:
                with contextlib.suppress(OSError):  # files that are left keep it
                    folder.rmdir()


def check_reached(listen: str, advertise: str, store: str, servers: str, clients: str) -> None:
    """Checks that others can call a server where it would be named to them: one with its store in etcd.

    Args:
        listen: HOST:PORT at which it listens.
        advertise: HOST:PORT under which it is named; "" if that is where it listens.
        store: The server's store.
        servers: Text that names such servers, for the error message.
        clients: The same of their clients.

    Raises:
        ConfigurationError: It listens at all addresses of its machine, and is named under none.
    """
    if store.startswith(ETCD) and split_endpoint(listen)[0] in WILDCARDS and not advertise:
        raise ConfigurationError(
            f"--listen {listen}: other {servers} would name that to {clients}, who cannot call it; say where this one "
            "is reached: --advertise HOST:PORT"
        )


def check_advertise(text: str, where: str, store: str = ETCD) -> str:
    """Checks the address under which a candidate is announced to others; returns it normalized, "" if it is where it
    listens.

    Args:
        text: HOST:PORT, or "".
        where: Words of the user before the address, for the error message.
        store: The scheduler's store, which candidates must be able to share.

    Raises:
        ConfigurationError: The address cannot be called, or the store does not announce it to others.
    """
    if not text:
        return ""
    try:
        host, port = split_endpoint(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}{text}: expected HOST:PORT ({error})") from error
    if host in WILDCARDS or not port or {",", "+"} & set(host):
        raise ConfigurationError(f"{where}{text}: nobody can call that; name the one place at which others reach it")
    if not store.startswith(ETCD):
        raise ConfigurationError(
            f"{where}{text}: only candidates with their chain in etcd are named to others (store=etcd://...); one "
            "scheduler is reached at the endpoint"
        )
    return join_endpoint(host, port)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of a service that is given as a machine and its vocabulary (ready.py)."""

    listen: str = setting(
        "127.0.0.1:29480", "Where to listen; beyond loopback keys or a token are demanded.", metavar="HOST:PORT"
    )
    advertise: str = setting(
        "", "Where others reach it, if that is not where it listens (0.0.0.0, a container).", metavar="HOST:PORT"
    )
    job: str = same_as(Settings, "job")
    store: str = setting(
        "",
        "The records' file, or etcd://HOST:PORT+HOST:PORT for several servers that stand by for each other. By default "
        f"$XDG_STATE_HOME/chaos-lightning/SERVICE-JOB-PORT/records.sqlite. {MEMORY} keeps nothing (for tests).",
        absolute=absolute_store,
        metavar="PATH",
    )
    token_file: str = same_as(EngineConfig, "token_file")
    keys_dir: str = same_as(EngineConfig, "keys_dir")
    log_dir: str = same_as(EngineConfig, "log_dir")

    def __post_init__(self) -> None:
        check_each(self)
        if not split_endpoint(self.listen)[1]:
            raise ConfigurationError(f"--listen {self.listen}: others must know the port; name one")
        check_reached(self.listen, self.advertise, self.store, "servers", "clients")
        check_advertise(self.advertise, "--advertise ", self.store)

    @property
    def in_etcd(self) -> bool:
        """Whether the records are in etcd, so that several servers can share them."""
        return self.store.startswith(ETCD)

    def store_path(self, service: str) -> Path | None:
        """Returns the file of the records; None if they are in memory or in etcd."""
        if self.store == MEMORY or self.in_etcd:
            return None
        if self.store:
            return Path(self.store)
        return state_folder(f"{service}-{self.job}", split_endpoint(self.listen)[1]) / "records.sqlite"

    def log_folder(self, service: str) -> Path | None:
        """Returns the folder of the server's event log; None if it has none."""
        return log_folder(self.log_dir, f"{service}-{self.job}", split_endpoint(self.listen)[1])


document(ServiceOptions)
