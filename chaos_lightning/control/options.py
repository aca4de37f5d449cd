"""Options of a scheduler process, and a job's settings as JSON (for command lines, environment and stores).

To add an option, write a field into `SchedulerOptions`, and use it: `chaos-lightning scheduler` has it then. One in
`HOSTED` is also taken by --rdzv-conf and from the environment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_lightning.declared import Setting, at_least, check_each, command_line, declared, document, same_as, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.membership.effects import Persist
from chaos_lightning.planning.plans import plan_from
from chaos_lightning.planning.trees import check_plan
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Secret
from chaos_lightning.service.options import ETCD, MEMORY, absolute_store, log_folder, state_folder
from chaos_lightning.settings import DEFAULT_ENDPOINT, EngineConfig

_log = logging.getLogger("chaos_lightning")

GAVE_WAY = "it gives the endpoint up"
"""Beginning of the reason with which a scheduler ends that a member has started, where members know what its store
lacks.
"""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of one scheduler process, in addition to its job's settings."""

    listen: str = setting(
        DEFAULT_ENDPOINT, "Where to listen; beyond loopback keys or a token are demanded.", metavar="HOST:PORT"
    )
    advertise: str = setting(
        "",
        "Where others reach it, if that is not where it listens (0.0.0.0, a container, a relay). Only candidates with "
        "their chain in etcd are named to others.",
        metavar="HOST:PORT",
    )
    store: str = setting(
        "",
        "The chain's file, or etcd://HOST:PORT+HOST:PORT for several schedulers that stand by for each other. By "
        "default $XDG_STATE_HOME/chaos-lightning/JOB-PORT/chain.sqlite. With etcd one of them leads, and every agent "
        f"is a candidate (docs/failover.md, docs/etcd.md). {MEMORY} keeps nothing (for tests).",
        absolute=absolute_store,
        metavar="PATH",
    )
    token_file: str = same_as(EngineConfig, "token_file")
    keys_dir: str = same_as(EngineConfig, "keys_dir")
    log_dir: str = same_as(EngineConfig, "log_dir")
    idle_timeout_s: float = setting(
        0.0,
        "End after so many seconds without a member. 0: never, or after 300 s if a member or an agent has started it.",
        check=at_least(0, "a positive number of seconds, or 0"),
        metavar="SECONDS",
    )
    keep_finished: bool = setting(
        False,
        "Serve a finished chain, so that newcomers are told so. Otherwise it is archived, and the job begins anew.",
    )
    rebuild: bool = setting(
        False,
        "The chain is lost for good (its machine is gone): begin it anew, on an empty store. It is made of what more "
        "than half of the last view's members report (docs/failover.md).",
    )
    settings: Settings = field(default_factory=Settings)
    """The job's rules."""
    hosted: bool = False
    """A member started it, and not an operator."""

    def __post_init__(self) -> None:
        check_each(self)

    def arguments(self) -> list[str]:
        """Returns the arguments of scheduler_main.py that express these options."""
        return [f"--settings={settings_to_json(self.settings)}", *command_line(self)]

    @property
    def in_etcd(self) -> bool:
        """Whether the chain is in etcd, so that several schedulers can share it and one succeeds another."""
        return self.store.startswith(ETCD)

    @property
    def log_folder(self) -> Path | None:
        """Folder of the scheduler's event log; None if events are not logged."""
        return log_folder(self.log_dir, self.settings.job, split_endpoint(self.listen)[1])

    @property
    def store_path(self) -> Path | None:
        """Path of the chain's file; None if the chain is in memory or etcd."""
        if self.store == MEMORY or self.in_etcd:
            return None
        return Path(self.store) if self.store else default_store(self.settings.job, split_endpoint(self.listen)[1])


HOSTED: Mapping[str, Setting] = {
    name: declared(SchedulerOptions)[name] for name in ("store", "advertise", "idle_timeout_s")
}
"""Options that agents and members hand to the schedulers that they start; all else follows from their settings."""


def default_store(job: str, port: int) -> Path:
    """Returns `$XDG_STATE_HOME/chaos-lightning/<job>-<port>/chain.sqlite` (~/.local/state by default)."""
    return state_folder(job, port) / "chain.sqlite"


def settings_to_json(settings: Settings) -> str:
    """Returns a job's settings as one line of JSON."""
    return json.dumps(asdict(settings), separators=(",", ":"), sort_keys=True)


def settings_from_json(text: str) -> Settings:
    """Returns the settings in a JSON text of `settings_to_json`; absent keys take their defaults.

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
    """Returns `settings` with the given fields replaced; values are converted to the field's type, text is parsed.

    Raises:
        ConfigurationError: An unknown name, or a value of the wrong type.
    """
    known = declared(Settings)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigurationError(
            f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))} and plan"
        )
    return replace(settings, **{name: known[name].read(value, f"setting {name}") for name, value in given.items()})


FOLLOWING = tuple(name for name in declared(Settings) if name in declared(EngineConfig) and name != "join_timeout_s")
"""Rules of a job that follow from what its members have under the same name; `join_timeout_s` of members is another."""


def rules_of(config: EngineConfig, base: Settings) -> Settings:
    """Returns the settings of a job whose scheduler this member starts: its own settings where it has them, else those
    of `base`.
    """
    own = {name: getattr(config, name) for name in FOLLOWING}
    return replace(base, **own | ({"links": base.links} if config.links == "auto" else {}))


def check_settings(settings: Settings) -> Settings:
    """Checks that the settings of a job are valid and work together; returns them.

    Raises:
        ConfigurationError: Names what was given and what is expected.
    """
    settings.check()
    declared(EngineConfig)["links"].demand(settings.links)
    check_plan(settings.plan)
    return settings


FINAL = "final"
"""Folder of the state at the job's end, among those of kept states; one member of each machine writes it."""


def folder_beside(store: str, job: str, endpoint: str) -> Path:
    """Returns the folder that keeps a job's last training state: next to the chain's file, or in the default state
    folder.
    """
    if store and store != MEMORY and not store.startswith(ETCD):
        return Path(f"{store}-kept")
    return default_store(job, split_endpoint(endpoint)[1]).parent / "kept"


# ------------------------------------------------------------------------------------------------ of its server


@dataclass(frozen=True)
class Owed:
    """The end of a job that its store has not accepted yet.

    Attributes:
        effect: Decision to append.
        chain: Id of the chain that it ends.
        view: The chain's last view, as text.
        reason: Text that says why the store has not taken it, if it was tried.
    """

    effect: Persist
    chain: str
    view: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulerServerConfig:
    """Configuration of a scheduler's server; the job's own settings are in `settings`.

    Attributes:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        advertise: HOST:PORT that others are told to reach it at; "" for where it listens.
        token: Cluster token, or credentials with a folder of keys; b"" only on loopback.
        settings: Rules of the job.
        tick_s: Seconds between ticks of the machine; 0 for a quarter of the heartbeat interval, 10 to 50 ms.
        idle_timeout_s: Seconds without any member's stream after which the scheduler ends; 0: never.
        rebuild: Whether the chain is lost, and begins anew from what members report (protocol.md 14a).
        outlives: Whether a member started the scheduler; asked to end, it stays until members that leave have left.
        gives_way: Whether a member started the scheduler on a store that may not be the job's: it ends if members know
            what the store lacks and none of its own is here, so that one on the right store can have the endpoint.
        keep_finished: Whether a finished job never begins anew here.
        hello_timeout_s: Seconds after which a stream that has sent no Hello is closed, since streams are limited.
        owed: End of a job that this process could not store when it led last; None if there is none.
    """

    host: str = "127.0.0.1"
    port: int = 29400
    advertise: str = ""
    token: Secret = field(default=b"", repr=False)
    settings: Settings = field(default_factory=Settings)
    tick_s: float = 0.0
    idle_timeout_s: float = 0.0
    hello_timeout_s: float = 5.0
    rebuild: bool = False
    gives_way: bool = False
    keep_finished: bool = False
    outlives: bool = False
    owed: Owed | None = None


document(SchedulerOptions)
