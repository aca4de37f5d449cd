"""`--rdzv-conf` of the backend "chaos": names, meanings, and what becomes of them (no torch here).

Theory of operation. Everything a worker needs is an EngineConfig field, and each of those can come from the environment
as CHAOS_<FIELD>. So the agent merges torchrun's parameters and --rdzv-conf into one EngineConfig and one Settings, and
hands them to its workers as environment variables; a variable that the user had set already stands in for an option
that was not given. Names that nobody knows are errors: a mistyped timeout that is silently ignored is found out too
late.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from chaos_lightning.control.options import (
    ETCD,
    MEMORY,
    change_settings,
    check_advertise,
    settings_from_json,
    settings_to_json,
)
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import (
    DEFAULT_PORT,
    WILDCARDS,
    addresses,
    is_loopback,
    join_endpoint,
    split_endpoint,
    split_endpoints,
)
from chaos_lightning.planning.plans import absolute_plan
from chaos_lightning.protocol.types import Settings
from chaos_lightning.settings import DEFAULT_ENDPOINT, ON_LAST_EXIT, TRANSFERS, EngineConfig
from chaos_lightning.transport.sealing import RULES

logger = logging.getLogger("chaos_lightning.rendezvous")

MEMBER_OPTIONS = {
    "keys_dir": "this node's folder of keys (chaos-lightning keys, docs/access.md)",
    "token_file": "instead, file with the cluster token, the same on all nodes",
    "log_dir": "folder of the event logs",
    "bind": "address that this node's links listen on (default: the one that faces the endpoint)",
    "plan": "how gradients travel: auto, rotating, chain, tree, tree:K, a planner, or a file (file:PATH, *.yaml)",
    "chunk_nbytes": "size of one chunk of the all-reduce",
    "join_timeout_s": "how long a worker waits for admission and state (default: torchrun's rendezvous timeout, 900)",
    "step_timeout_s": "how long one step may take before a worker gives up",
    "host_scheduler": "0: never start a scheduler from here",
    "overlap": "0: send gradients only after backward",
    "by_reference": "0: workers of one machine do not read gradients out of each other's memory",
    "state_hash_every": "compare state hashes every so many steps; 0 never",
    "join_by": "how a worker comes into a running job: auto, replay (the others train on) or pause (they wait)",
    "transfer": f"who sends a newcomer what: {', '.join(TRANSFERS)}",
    "ingress_bps": "access link of this machine, which all its links share, in bits per second (default: none)",
    "transfer_folder": "for transfer=stop_resume: a folder that all members see",
    "neighbours": "nodes to have links with, such as a+b (default: all that can be reached)",
    "on_last_exit": "checkpoint: the last worker keeps the state, and the next start goes on from it; none; a folder",
    "links": f"how data links are protected: {', '.join(RULES)} (docs/links.md)",
}
"""EngineConfig fields that can be given."""

SETTING_OPTIONS = {
    "heartbeat_interval_s": "heartbeat_interval_s",
    "heartbeat_timeout_s": "heartbeat_timeout_s",
    "hang_timeout_s": "hang_timeout_s",
    "last_holder_timeout_s": "last_holder_timeout_s",
    "confirm_timeout_s": "confirm_timeout_s",
    "silence_timeout_s": "silence_timeout_s",
    "report_timeout_s": "report_timeout_s",
    "load_timeout_s": "join_timeout_s",
    "linger_timeout_s": "linger_timeout_s",
    "reconnect_grace_s": "reconnect_grace_s",
}
"""Names of Settings here and there: the scheduler's rules, which count on the node that hosts it."""

OWN_OPTIONS = {
    "node": "this node's name, unique in the job (default: host name and process id of the agent)",
    "store": "the chain's file on the scheduler's host; or etcd://a+b+c: every agent is a candidate (docs/failover.md)",
    "advertise": "HOST:PORT at which others reach this node's candidate, if not where it listens (with store=etcd://...)",
    "idle_timeout_s": "a hosted scheduler ends after so long without a worker",
}

FOREIGN = frozenset(
    (
        *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval"),
        *("keep_alive_max_attempt", "is_host", "store_type", "read_timeout", "use_libuv", "protocol", "rank"),
    )
)
"""Options of torch's own backends: they mean nothing here and are named in a warning."""

_PATHS = ("keys_dir", "token_file", "log_dir", "transfer_folder")


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """What the handler goes by.

    Attributes:
        config: The workers' configuration but for their names.
        settings: The rules for a scheduler started here.
        node: This node's name.
        store: The chain's file, "" for the default place.
        advertise: Where others reach a candidate hosted here, "" for where it listens.
        idle_timeout_s: See OWN_OPTIONS; 0 for the default.
    """

    config: EngineConfig
    settings: Settings
    node: str
    store: str = ""
    advertise: str = ""
    idle_timeout_s: float = 0.0

    def environment(self) -> dict[str, str]:
        """Variables for the workers: EngineConfig.build and hosting.host_for_engine read them."""
        default = EngineConfig()
        always = {"endpoint", "job", "min_nodes", "max_nodes", "bind", "join_timeout_s"}
        found = {"CHAOS_NODE": self.node, "CHAOS_SETTINGS": settings_to_json(self.settings)}
        for field in fields(EngineConfig):
            value = getattr(self.config, field.name)
            if field.name != "name" and (field.name in always or value != getattr(default, field.name)):
                found[f"CHAOS_{field.name.upper()}"] = str(int(value)) if isinstance(value, bool) else str(value)
        if self.store:
            found["CHAOS_STORE"] = self.store
        if self.advertise:
            found["CHAOS_ADVERTISE"] = self.advertise
        if self.idle_timeout_s:
            found["CHAOS_IDLE_TIMEOUT_S"] = f"{self.idle_timeout_s:g}"
        return found


def read_options(
    *,
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    given: Mapping[str, Any],
    local_addr: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RendezvousOptions:
    """Merges torchrun's parameters, --rdzv-conf and the environment.

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
    ignored = sorted(set(conf) & FOREIGN)
    if ignored:
        logger.warning("--rdzv-conf %s: not used by the backend chaos", ", ".join(ignored))
    known = {**MEMBER_OPTIONS, **OWN_OPTIONS, **dict.fromkeys(SETTING_OPTIONS, "a rule of the scheduler, in seconds")}
    unknown = sorted(set(conf) - FOREIGN - set(known))
    if unknown:
        raise ConfigurationError(
            f"--rdzv-conf: unknown {', '.join(unknown)}; known are " + "; ".join(f"{k} ({v})" for k, v in known.items())
        )
    host, port = split_endpoint(split_endpoints(endpoint or DEFAULT_ENDPOINT)[0])
    values: dict[str, Any] = {name: _typed(name, conf[name]) for name in MEMBER_OPTIONS if name in conf}
    for name in _PATHS:
        text = values.get(name) or environ.get(f"CHAOS_{name.upper()}")
        if text:
            # Workers may change their directory.
            values[name] = str(Path(text).absolute())
    kept = str(values.get("on_last_exit") or environ.get("CHAOS_ON_LAST_EXIT", ""))
    if kept not in ("", *ON_LAST_EXIT):
        values["on_last_exit"] = str(Path(kept).absolute())
    if plan := values.get("plan") or environ.get("CHAOS_PLAN"):
        values["plan"] = absolute_plan(plan)
    if "join_timeout_s" not in values and timeout:
        values["join_timeout_s"] = _parse("timeout", timeout, float)
    if "heartbeat_timeout_s" in conf:
        values["heartbeat_timeout_s"] = _parse("heartbeat_timeout_s", conf["heartbeat_timeout_s"], float)
    values.setdefault("bind", environ.get("CHAOS_BIND") or local_addr or facing(host, port))
    store = conf.get("store") or environ.get("CHAOS_STORE", "")
    advertise = conf.get("advertise") or environ.get("CHAOS_ADVERTISE", "")
    config = EngineConfig.build(
        {
            **values,
            "endpoint": candidates(endpoint or DEFAULT_ENDPOINT, str(values["bind"]), store),
            "job": "default" if run_id in ("", "none") else run_id,
            "min_nodes": nodes[0],
            "max_nodes": nodes[1],
            "name": "unnamed",
        },
        environ,
    )
    base = settings_from_json(environ.get("CHAOS_SETTINGS") or "{}")
    changed = {theirs: conf[ours] for ours, theirs in SETTING_OPTIONS.items() if ours in conf}
    changed.setdefault("heartbeat_timeout_s", str(config.heartbeat_timeout_s))
    if config.links != "auto":
        changed["links"] = config.links
    return RendezvousOptions(
        config=config,
        settings=replace(
            change_settings(base, changed), job=config.job, min_nodes=config.min_nodes, max_nodes=config.max_nodes
        ),
        node=_node_name(conf.get("node") or environ.get("CHAOS_NODE", "")),
        store=store if store in ("", MEMORY) or store.startswith(ETCD) else str(Path(store).absolute()),
        advertise=check_advertise(advertise, "--rdzv-conf advertise=", store),
        idle_timeout_s=_number(conf, "idle_timeout_s", float, 0.0),
    )


def candidates(endpoint: str, bind: str, store: str) -> str:
    """Where workers look for the scheduler. With a chain in etcd every agent hosts a candidate, and its workers ask
    that one first, which knows who leads; without, there is one scheduler at the endpoint."""
    named = split_endpoints(endpoint)
    if not store.startswith(ETCD):
        return ",".join(named)
    host, port = split_endpoint(named[0])
    here = facing(host, port) if bind in WILDCARDS else bind  # standbys name it to members elsewhere
    return ",".join(dict.fromkeys((join_endpoint(here, port), *named)))


def facing(host: str, port: int = DEFAULT_PORT) -> str:
    """This machine's address that peers near `host` reach: loopback for loopback, else what the routing table says."""
    if is_loopback(host):
        return "127.0.0.1"
    address = addresses(host)[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"no route to the endpoint {join_endpoint(host, port)} ({error}); give bind=ADDRESS in --rdzv-conf"
        ) from error


def _node_name(given: str) -> str:
    if not given:
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40] or "node"
        return f"{host}-{os.getpid()}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,56}", given):
        raise ConfigurationError(f"node={given!r}: up to 56 letters, digits, dots, dashes and underscores, please")
    return given


def _typed(name: str, text: str) -> Any:
    default = next(f.default for f in fields(EngineConfig) if f.name == name)
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false", "yes", "no"):
            raise ConfigurationError(f"--rdzv-conf {name}={text}: expected 0 or 1")
        return text.lower() in ("1", "true", "yes")
    return _parse(name, text, type(default))


def _parse(name: str, text: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigurationError(f"--rdzv-conf {name}={text}: expected a number") from error


def _number(conf: Mapping[str, str], name: str, kind: Any, default: Any) -> Any:
    value = _parse(name, conf[name], kind) if name in conf else default
    if value < 0 or (kind is int and value < 1):
        raise ConfigurationError(f"--rdzv-conf {name}={value}: expected a positive number")
    return value
