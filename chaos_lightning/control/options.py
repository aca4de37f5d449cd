"""What a scheduler process is told: its options, and the job's Settings as JSON (for command lines and files)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import WILDCARDS, join_endpoint, split_endpoint
from chaos_lightning.planning.plans import plan_from
from chaos_lightning.planning.trees import check_plan
from chaos_lightning.protocol.types import NAME, Settings
from chaos_lightning.transport.sealing import RULES

ETCD = "etcd://"
"""How the address of a store in etcd begins."""
MEMORY = ":memory:"
"""As a store: keep the chain in memory only. For tests; the job dies with the scheduler."""


GAVE_WAY = "it gives the endpoint up"
"""Begins the reason with which a scheduler ends that a member has started, where members know what its store lacks."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of one scheduler process.

    Attributes:
        listen: HOST:PORT to listen on.
        advertise: HOST:PORT at which others reach it, if that is another one.
        settings: The job's rules.
        store: The chain's file, MEMORY, "etcd://..." (etcd_client.EXPECTED), or "" for `default_store`.
        token_file: File of the cluster token; "" for the environment's, if any.
        keys_dir: Folder of keys, instead of a token alone.
        log_dir: Folder for the event log; "" for none.
        idle_timeout_s: End after so long without a member; 0 never.
        rebuild: The chain is lost: begin it anew, on an empty store, from what members report (docs/failover.md).
        hosted: A member started it, and not an operator.
        keep_finished: Serve a finished chain (newcomers are told so) instead of archiving it and beginning anew.
    """

    listen: str
    settings: Settings = field(default_factory=Settings)
    store: str = ""
    token_file: str = ""
    keys_dir: str = ""
    log_dir: str = ""
    idle_timeout_s: float = 0.0
    keep_finished: bool = False
    rebuild: bool = False
    advertise: str = ""
    hosted: bool = False

    @property
    def in_etcd(self) -> bool:
        """Other schedulers can stand by for this one."""
        return self.store.startswith(ETCD)

    @property
    def store_path(self) -> Path | None:
        """The chain's file; None in memory and in etcd."""
        if self.store == MEMORY or self.in_etcd:
            return None
        return Path(self.store) if self.store else default_store(self.settings.job, split_endpoint(self.listen)[1])


def default_store(job: str, port: int) -> Path:
    """`$XDG_STATE_HOME/chaos-lightning/<job>-<port>/chain.sqlite` (~/.local/state by default)."""
    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in job)
    return Path(root) / "chaos-lightning" / f"{safe}-{port}" / "chain.sqlite"


def check_advertise(text: str, where: str, store: str = ETCD) -> str:
    """The place at which others reach a candidate, written as everywhere else; "" for the one that it listens at.

    Args:
        text: HOST:PORT, or "".
        where: What the user wrote it after, for the error.
        store: Of the same scheduler, where it must be one that candidates can share.

    Raises:
        ConfigurationError: It is no place that can be called, or nobody would be told of it.
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


def settings_to_json(settings: Settings) -> str:
    """One line of JSON."""
    return json.dumps(asdict(settings), separators=(",", ":"), sort_keys=True)


def settings_from_json(text: str) -> Settings:
    """Back from `settings_to_json`; absent keys take their defaults.

    Raises:
        ConfigurationError: No JSON object, an unknown key, or a value that cannot work; names it.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"settings are no JSON ({error}): {text[:200]}") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f"settings must be a JSON object, got {text[:200]}")
    plan = given.pop("plan", None)
    settings = change_settings(Settings(), given)
    if plan is not None:
        settings = replace(settings, plan=plan_from(plan, "setting plan"))
    return check_settings(settings)


def change_settings(settings: Settings, given: dict[str, Any]) -> Settings:
    """`settings` with some fields replaced, each converted to the field's type; text is parsed.

    Raises:
        ConfigurationError: An unknown name, or a value of the wrong type.
    """
    known = {f.name: f for f in fields(Settings) if f.name != "plan"}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigurationError(
            f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))} and plan"
        )
    values: dict[str, Any] = {}
    for name, value in given.items():
        kind: type = type(getattr(Settings(), name))
        try:
            if isinstance(value, bool) or (kind is not str and isinstance(value, str) and not value.strip()):
                raise ValueError(value)
            if kind is int and isinstance(value, float) and value != int(value):
                raise ValueError(value)
            values[name] = kind(value)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"setting {name}={value!r}: expected {_article(kind)}") from error
    return replace(settings, **values)


def check_settings(settings: Settings) -> Settings:
    """The settings, if they can work together.

    Raises:
        ConfigurationError: Names what was given and what is expected.
    """
    if not settings.job:
        raise ConfigurationError("setting job is empty; give the job a name")
    if not NAME.fullmatch(settings.job):
        raise ConfigurationError(
            f"job {settings.job!r} may have up to 64 letters, digits, dots, dashes and underscores"
        )
    if not 1 <= settings.min_nodes <= settings.max_nodes:
        raise ConfigurationError(
            f"min_nodes={settings.min_nodes}, max_nodes={settings.max_nodes}: expected 1 <= min_nodes <= max_nodes"
        )
    for f in fields(Settings):
        value = getattr(settings, f.name)
        if f.name.endswith("_s") and not (
            math.isfinite(value) and (value > 0 or (f.name == "reconnect_grace_s" and value == 0))
        ):
            raise ConfigurationError(f"setting {f.name}={value}: expected a positive number of seconds")
    if settings.last_holder_timeout_s < settings.hang_timeout_s:
        raise ConfigurationError(
            f"last_holder_timeout_s={settings.last_holder_timeout_s:g} with hang_timeout_s="
            f"{settings.hang_timeout_s:g}: who alone holds the training state must be given at least as long as others"
        )
    if settings.heartbeat_timeout_s < 2 * settings.heartbeat_interval_s:
        raise ConfigurationError(
            f"heartbeat_timeout_s={settings.heartbeat_timeout_s:g} with heartbeat_interval_s="
            f"{settings.heartbeat_interval_s:g}: one late heartbeat would be a suspicion; the timeout must be at least "
            "twice the interval"
        )
    if settings.links not in RULES:
        raise ConfigurationError(f"setting links={settings.links!r}: expected one of {', '.join(RULES)}")
    check_plan(settings.plan)
    return settings


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text"}.get(kind, kind.__name__)


def folder_beside(store: str, job: str, endpoint: str) -> Path:
    """Where a job's last state is kept: beside the chain's file, or where that would be by default."""
    if store and store != MEMORY and not store.startswith(ETCD):
        return Path(f"{store}-kept")
    return default_store(job, split_endpoint(endpoint)[1]).parent / "kept"
