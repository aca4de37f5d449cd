"""What a member needs to know before it starts; defaults work on one machine, torchrun's backend fills the rest in.

Every field can come from the environment as CHAOS_<NAME IN CAPITALS>, which is how the rendezvous backend hands
settings to its workers; an explicit argument wins.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoints
from chaos_lightning.planning.plans import DEFAULT_PLAN, read_plan
from chaos_lightning.protocol.types import NAME, PlanSpec
from chaos_lightning.transport.sealing import RULES, Level, require_library

TRANSFERS = ("adaptive", "greedy", "optimal", "even", "single", "multi_source", "stop_resume", "shared")
"""replication.POLICIES; said once more, since torch must not be imported for it."""
DEFAULT_ENDPOINT = "127.0.0.1:29400"
ON_LAST_EXIT = ("checkpoint", "none")
"""What `on_last_exit` may be beside a folder."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one member.

    Attributes:
        endpoint: Scheduler as HOST:PORT. If it is this machine's and nobody listens there, this member hosts it. Where
            several schedulers stand by for each other (docs/failover.md), all of them, with commas.
        job: Name of the job; members of different jobs never meet.
        name: This node's name, unique in the job; default host name, local rank and process id.
        min_nodes: Training starts with, and pauses below, so many nodes; a node is a torchrun with all its workers, or
            `chaos-lightning run` with all of its, or one process that was started by itself.
        max_nodes: Workers of further nodes wait as standbys.
        keys_dir: This node's folder of keys (`chaos-lightning keys`, docs/access.md): mutual TLS with the scheduler.
        token_file: Instead, a file with the cluster token alone; the environment's CHAOS_TOKEN serves as well.
        bind: Address that links listen on; beyond loopback keys or a token are demanded.
        plan: How gradients travel: auto (trees from the measured links, drawn again when these change enough to pay for
            it; rotating where all links are alike), a plan (rotating, chain, tree, tree:K), another planner (widest,
            packed, star, fapt, local, MODULE:FUNCTION) or a file of trees (see planning/plans.py). The job goes by
            the plan of whoever starts its scheduler.
        chunk_nbytes: Size of one chunk of the all-reduce; 0 picks 512 KiB for small and 1 MiB for large models.
        log_dir: Folder of the event log; empty for none.
        heartbeat_timeout_s: Silence after which a member is suspected (its neighbours must confirm).
        join_timeout_s: How long to wait for admission and state.
        step_timeout_s: How long one slot may take before this member gives up with an error.
        host_scheduler: Whether this member may start a scheduler at a free local endpoint.
        overlap: Send gradients while backward runs.
        by_reference: Between members of one machine, let neighbours read chunks out of this process's memory where the
            kernel permits it (see transport/reference.py). Off: everything passes through sockets.
        state_hash_every: Compare state hashes of all members every so many steps; 0 never.
        join_by: How this member comes into a running job: "replay" (it replays what the others commit, and nobody
            waits), "pause" (all wait while it gets the state), "auto" (by replay if its steps are a pure function of
            state and gradients, else by pause; the event log gives the reason).
        transfer: Which member sends this one which part of the state: adaptive (planned by what is known of the links,
            corrected by what is measured), or greedy, optimal, even, single, shared, multi_source, stop_resume, as in
            the paper Chaos and in what it compares with (docs/transfer.md).
        ingress_bps: Access link of this member's machine, which all its links share, in bits per second; 0: each link
            has its own. Policies plan by it.
        transfer_folder: For stop_resume, and on all members: the folder where the member that is asked writes its
            checkpoint, and from which newcomers read it.
        neighbours: Nodes or members to have links with, separated by commas or +; empty: all that can be reached.
        links: How data links are protected: checksum (for networks that you trust), authenticated, encrypted, or auto:
            checksums within a machine; between machines encryption, if the nodes have folders of keys (keys_dir; a
            token alone is not enough), else checksums (docs/links.md). It must be the job's, or auto.
        on_last_exit: What the last member does with the training state when it goes before the job is finished:
            "checkpoint" keeps it beside the chain's file (by default in ~/.local/state/chaos-lightning/JOB-PORT), a
            folder keeps it there, in JOB-PORT, "none" lets it go. Whoever founds the job again goes on from it, and
            says so, unless its script has loaded a checkpoint.
    """

    endpoint: str = DEFAULT_ENDPOINT
    job: str = "default"
    name: str = ""
    min_nodes: int = 1
    max_nodes: int = 64
    keys_dir: str = ""
    token_file: str = ""
    bind: str = "127.0.0.1"
    plan: str = DEFAULT_PLAN
    chunk_nbytes: int = 0
    log_dir: str = ""
    heartbeat_timeout_s: float = 0.3
    join_timeout_s: float = 600.0
    step_timeout_s: float = 600.0
    host_scheduler: bool = True
    overlap: bool = True
    by_reference: bool = True
    state_hash_every: int = 100
    join_by: str = "auto"
    transfer: str = "adaptive"
    ingress_bps: float = 0.0
    transfer_folder: str = ""
    neighbours: str = ""
    links: str = "auto"
    on_last_exit: str = "checkpoint"

    def __post_init__(self) -> None:
        _ = self.endpoints
        for what, value in (("job", self.job), ("name", self.name or "x")):
            if not NAME.fullmatch(value):
                raise ConfigurationError(
                    f"{what} {value!r} may have up to 64 letters, digits, dots, dashes and underscores"
                )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigurationError(
                f"min_nodes {self.min_nodes} and max_nodes {self.max_nodes}: expected 1 <= min_nodes <= max_nodes"
            )
        if self.chunk_nbytes and not 4096 <= self.chunk_nbytes <= 16 << 20:
            raise ConfigurationError(f"chunk_nbytes {self.chunk_nbytes}: expected 0 or 4096 to {16 << 20}")
        for setting in ("heartbeat_timeout_s", "join_timeout_s", "step_timeout_s"):
            seconds = getattr(self, setting)
            if not 0 < seconds < math.inf:
                raise ConfigurationError(f"{setting} {seconds}: expected a positive number of seconds")
        if self.state_hash_every < 0:
            raise ConfigurationError(
                f"state_hash_every {self.state_hash_every}: expected a number of steps, or 0 for never"
            )
        if self.join_by not in ("auto", "replay", "pause"):
            raise ConfigurationError(f"join_by {self.join_by!r}: expected 'auto', 'replay' or 'pause'")
        for name in self.neighbour_names:
            if not NAME.fullmatch(name):
                raise ConfigurationError(f"neighbours {self.neighbours!r}: {name!r} is no node's or member's name")
            if name == self.name:
                raise ConfigurationError(f"neighbours {self.neighbours!r}: {name!r} is this member itself")
        if self.links not in RULES:
            raise ConfigurationError(f"links {self.links!r}: expected one of {', '.join(RULES)}")
        if self.links not in ("auto", Level.CHECKSUM):
            require_library()
        self._check_transfer()
        _ = self.plan_spec

    def _check_transfer(self) -> None:
        if self.transfer not in TRANSFERS:
            raise ConfigurationError(f"transfer {self.transfer!r}: expected one of {', '.join(TRANSFERS)}")
        if not 0 <= self.ingress_bps < math.inf:
            raise ConfigurationError(
                f"ingress_bps {self.ingress_bps}: expected bits per second, or 0 if links share nothing"
            )
        folder = self.transfer_folder
        if folder and not Path(folder).is_dir():
            raise ConfigurationError(f"transfer_folder {folder!r}: no such folder; name one that all members see")
        if self.transfer != "stop_resume":
            return
        if not folder:
            raise ConfigurationError("transfer 'stop_resume' needs transfer_folder, a folder that all members see")
        if self.join_by == "replay":
            raise ConfigurationError(
                "transfer 'stop_resume' lets all wait: write join_by='auto' or 'pause', not 'replay'"
            )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where a scheduler may be: one, or the candidates of the job."""
        return split_endpoints(self.endpoint)

    @property
    def neighbour_names(self) -> tuple[str, ...]:
        """What `neighbours` names."""
        return tuple(name for name in re.split(r"[\s,+]+", self.neighbours) if name)

    @cached_property
    def plan_spec(self) -> PlanSpec:
        """What `plan` says; a file is read once, when the configuration is made."""
        return read_plan(self.plan, self.chunk_nbytes)

    @classmethod
    def build(cls, given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EngineConfig:
        """Merges arguments that are not None over the environment over the defaults."""
        values: dict[str, object] = {}
        for field in fields(cls):
            text = environ.get(f"CHAOS_{field.name.upper()}")
            if given.get(field.name) is not None:
                values[field.name] = given[field.name]
            elif text:
                values[field.name] = _parse(field.name, text, field.default)
        unknown = set(given) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigurationError(
                f"unknown settings {sorted(unknown)}; expected some of {sorted(f.name for f in fields(cls))}"
            )
        if not values.get("name"):
            node = environ.get("CHAOS_NODE")
            local = environ.get("LOCAL_RANK", "0")
            values["name"] = f"{node}-{local}" if node else f"{_hostname()}-{local}-{os.getpid()}"
        return cls(**values)  # type: ignore[arg-type]


def _hostname() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40] or "node"


def _parse(name: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            if text.lower() not in ("0", "1", "true", "false", "yes", "no"):
                raise ValueError(text)
            return text.lower() in ("1", "true", "yes")
        return type(default)(text)  # type: ignore[call-arg]
    except ValueError as error:
        raise ConfigurationError(
            f"environment variable CHAOS_{name.upper()}={text!r}: expected a {type(default).__name__}"
        ) from error
