"""Reads `--rdzv-conf` of the backend "chaos": names and meanings of the options, and where each goes. Imports no torch.

Theory of operation. What a worker needs is declared in EngineConfig, the rules of a scheduler in Settings, and what a
scheduler process needs in SchedulerOptions; `OPTIONS` collects all that can be given here. The agent merges torchrun's
parameters and --rdzv-conf into one of each, and hands them to its workers as environment variables; a variable that the
user had set already stands in for an option that was not given. Names that nobody knows are errors: a mistyped
timeout that is silently ignored is found out too late.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from chaos_lightning.control.options import (
    FOLLOWING,
    HOSTED,
    SchedulerOptions,
    rules_of,
    settings_from_json,
    settings_to_json,
)
from chaos_lightning.declared import Setting, declared, setting
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import (
    WILDCARDS,
    facing,
    join_endpoint,
    split_endpoint,
    split_endpoints,
)
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.options import ETCD, check_advertise
from chaos_lightning.settings import DEFAULT_ENDPOINT, EngineConfig, host_name, to_environment

logger = logging.getLogger("chaos_lightning.rendezvous")

FOREIGN = frozenset(
    (
        *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval"),
        *("keep_alive_max_attempt", "is_host", "store_type", "read_timeout", "use_libuv", "protocol", "rank"),
    )
)
"""Options of torch's own backends: they mean nothing here and are named in a warning."""
_ADVICE = "give bind=ADDRESS in --rdzv-conf"
_TORCHRUNS = ("endpoint", "job", "name", "min_nodes", "max_nodes")
"""Settings that torchrun's own options give (--rdzv-endpoint, --rdzv-id, --nnodes), and `node`."""
_RENAMED = {"join_timeout_s": "load_timeout_s"}
"""Rules of the scheduler that have another name here, as members have a setting of that name with another meaning."""


def _node(name: str) -> str:
    return "" if re.fullmatch(r"[A-Za-z0-9._-]{0,56}", name) else "expected up to 56 letters, digits, dots, dashes, _"


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """Options of the rendezvous handler.

    Attributes:
        config: The workers' configuration but for their names.
        scheduler: Options of a scheduler that is started here.
        node: This node's name.
    """

    config: EngineConfig
    scheduler: SchedulerOptions
    node: str = setting(
        "", "This node's name, unique in the job. By default host name and process id of the agent.", check=_node
    )

    def environment(self) -> dict[str, str]:
        """Returns the environment variables for the workers, which EngineConfig.build and hosting.host_for_engine read.

        All settings are told, defaults too: what was given explicitly goes before a variable that was set already.
        """
        found = {"CHAOS_NODE": self.node, "CHAOS_SETTINGS": settings_to_json(self.scheduler.settings)}
        found |= to_environment(declared(EngineConfig), self.config) | to_environment(HOSTED, self.scheduler)
        del found["CHAOS_NAME"]
        return found


MEMBER_OPTIONS = {name: made for name, made in declared(EngineConfig).items() if name not in _TORCHRUNS}
"""Options of the workers."""
SETTING_OPTIONS = {_RENAMED.get(name, name): made for name, made in declared(Settings).items() if name not in FOLLOWING}
"""Rules of the scheduler that are not also a member's settings; they count on the node that hosts it."""
OPTIONS: Mapping[str, Setting] = {**MEMBER_OPTIONS, **SETTING_OPTIONS, **declared(RendezvousOptions), **HOSTED}
"""All that --rdzv-conf takes."""


def conf_help() -> str:
    """Returns the help text of `--rdzv-conf`: a line for each option."""
    lines = (f"  {name:24}{made.short}" + f" ({made.shown})" * bool(made.shown) for name, made in OPTIONS.items())
    return "\n".join(("--rdzv-conf NAME=VALUE,... takes (docs/settings.md):", *lines))


def read_options(
    *,
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    given: Mapping[str, Any],
    local_addr: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RendezvousOptions:
    """Returns the handler's options, merged from torchrun's parameters, --rdzv-conf and the environment.

    Args:
        endpoint: --rdzv-endpoint; HOST, HOST:PORT or "" (this machine, port 29400).
        run_id: --rdzv-id: the job's name; torchrun's own default "none" becomes "default".
        nodes: --nnodes as (min, max); a node counts once, however many workers it has.
        given: --rdzv-conf and what torchrun adds to it.
        local_addr: --local-addr.
        environ: The agent's environment.

    Raises:
        ConfigurationError: An unknown name (with the known ones), or a value that cannot work.
    """
    conf = {k: str(v) for k, v in given.items()}
    timeout = conf.pop("timeout", "")
    _check_names(conf)
    endpoint = endpoint or DEFAULT_ENDPOINT
    values = _values(MEMBER_OPTIONS, conf, environ)
    if "join_timeout_s" not in values and timeout:
        values["join_timeout_s"] = MEMBER_OPTIONS["join_timeout_s"].read(timeout, "--rdzv-conf timeout")
    if "bind" not in values:
        values["bind"] = local_addr or facing(*split_endpoint(split_endpoints(endpoint)[0]), _ADVICE)
    hosted = _values(HOSTED, conf, environ)
    store = hosted.get("store", "")
    hosted["advertise"] = check_advertise(hosted.get("advertise", ""), "--rdzv-conf advertise=", store)
    config = EngineConfig(
        endpoint=candidates(endpoint, values["bind"], store),
        job="default" if run_id in ("", "none") else run_id,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        name="unnamed",
        **values,
    )
    own = _values(declared(RendezvousOptions), conf, environ)
    return RendezvousOptions(
        config=config,
        scheduler=SchedulerOptions(
            listen=config.endpoints[0], settings=_rules(config, conf, environ), log_dir=config.log_dir, **hosted
        ),
        node=own.get("node") or f"{host_name()}-{os.getpid()}",
    )


def _check_names(conf: Mapping[str, str]) -> None:
    if ignored := sorted(set(conf) & FOREIGN):
        logger.warning("--rdzv-conf %s: not used by the backend chaos", ", ".join(ignored))
    if unknown := sorted(set(conf) - FOREIGN - set(OPTIONS)):
        known = "; ".join(f"{name} ({made.short})" for name, made in OPTIONS.items())
        raise ConfigurationError(f"--rdzv-conf: unknown {', '.join(unknown)}; known are {known}")


def _values(options: Mapping[str, Setting], conf: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values given by --rdzv-conf or the environment, by field name. Paths are made absolute, as workers
    may change their directory.
    """
    values: dict[str, Any] = {}
    for name, made in options.items():
        where, text = f"--rdzv-conf {name}", conf.get(name)
        if text is None and (text := environ.get(made.variable)):
            where = f"environment variable {made.variable}"
        if text is not None and (text or name in conf):
            value = made.read(text, where)
            made.demand(value, where)
            values[made.name] = made.absolute(value) if made.absolute is not None else value
    return values


def _rules(config: EngineConfig, conf: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """Returns the job's settings for a scheduler: those of the environment, overridden by --rdzv-conf and the
    engine's configuration.
    """
    base = settings_from_json(environ.get("CHAOS_SETTINGS") or "{}")
    return replace(rules_of(config, base), **_values(SETTING_OPTIONS, conf, {}))


def candidates(endpoint: str, bind: str, store: str) -> str:
    """Returns the endpoints at which workers look for the scheduler, separated by commas. With a chain in etcd every
    agent hosts a candidate, which its workers ask first; otherwise there is one scheduler.
    """
    named = split_endpoints(endpoint)
    if not store.startswith(ETCD):
        return ",".join(named)
    host, port = split_endpoint(named[0])
    here = facing(host, port, _ADVICE) if bind in WILDCARDS else bind  # standbys name it to members elsewhere
    return ",".join(dict.fromkeys((join_endpoint(here, port), *named)))
