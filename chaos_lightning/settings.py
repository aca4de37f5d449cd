"""Settings of one member, each of them declared once, with its type, default, help and check.

To add one, write a field into `EngineConfig` and use it. All else is derived from that field (declared.py): the option
of `ChaosStrategy(options=...)`, of Hydra (`strategy.options.NAME`) and of LightningCLI, `--rdzv-conf NAME=...`, the
environment variable CHAOS_<NAME>, by which torchrun's backend hands settings to its workers, and a row in
docs/settings.md. An explicit argument goes before the environment, and that before the default.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos_lightning.declared import (
    PREFIX,
    Check,
    Setting,
    at_least,
    check_each,
    declared,
    document,
    one_of,
    optional_base,
    same_as,
    setting,
)
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import DAY_NBYTES
from chaos_lightning.machine.addresses import DEFAULT_PORT, read_ports, split_announced, split_endpoints
from chaos_lightning.machine.notices import NoticePlan
from chaos_lightning.machine.process_table import process_began
from chaos_lightning.planning.batch import MEMBER, UNSCALED, check_rule, check_scaling
from chaos_lightning.planning.plans import DEFAULT_PLAN, absolute_plan, read_plan
from chaos_lightning.planning.shards import POLICIES, wrong_policy
from chaos_lightning.protocol.types import PlanSpec, Settings, check_nodes, is_name
from chaos_lightning.transport.sealing import RULES, Level, require_library

_log = logging.getLogger("chaos_lightning")

DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"
PROFILED = "CHAOS_PROFILED"
"""Variable that `chaos-lightning profile` sets: this process trains alone, and has no part in a job of others."""
ON_LAST_EXIT = ("checkpoint", "none")
"""Values of `on_last_exit` beside a folder."""


LOG_DIRS = ("auto", "none")
"""Values of `log_dir` beside a folder; "" is none, too."""


def absolute_path(text: str, words: tuple[str, ...] = ("",)) -> str:
    """Converts a path to an absolute one, for a process that may run in another folder; leaves texts in `words` as they
    are.
    """
    return text if text in words else str(Path(text).absolute())


absolute_log_dir = partial(absolute_path, words=("", *LOG_DIRS))
"""Function that gives the same place of event logs for a process that may run in another folder."""


def absolute_notice(text: str) -> str:
    """Converts durations until a deadline to times, for a process that starts later, and paths to absolute ones."""
    return NoticePlan.read(text).absolute(process_began(), os.getcwd())


def _read_by(read: Callable[[str], object]) -> Check:
    """Makes a setting's check from a parser: returns the parser's error text, or "" for a valid or empty text."""

    def wrong(text: str) -> str:
        try:
            if text:
                read(text)
        except ConfigurationError as error:
            return str(error)
        return ""

    return wrong


def _chunk(value: int) -> str:
    return "" if not value or 4096 <= value <= 16 << 20 else f"expected 0 or 4096 to {16 << 20}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one member. Each is explained where it is declared, and in docs/settings.md."""

    endpoint: str = setting(
        DEFAULT_ENDPOINT,
        "The scheduler as HOST:PORT. If it is this machine's and nobody listens there, this member hosts it. Where "
        "several schedulers stand by for each other (docs/failover.md), all of them, with commas.",
        metavar="HOST:PORT",
    )
    job: str = same_as(Settings, "job")
    name: str = setting(
        "",
        "This node's name, unique in the job. By default host name, local rank and process id.",
        check=lambda name: is_name(name or "x"),
    )
    min_nodes: int = same_as(Settings, "min_nodes")
    max_nodes: int = same_as(Settings, "max_nodes")
    keys_dir: str = setting(
        "",
        "This node's folder of keys, made by `chaos-lightning keys` (docs/access.md). With it the scheduler and its "
        "members prove to each other who they are (mutual TLS).",
        absolute=absolute_path,
        metavar="DIR",
    )
    token_file: str = setting(
        "",
        "Instead of keys, a file with the cluster token, the same on all nodes. The environment's CHAOS_TOKEN serves "
        "as well.",
        absolute=absolute_path,
        metavar="PATH",
    )
    bind: str = setting(
        "",
        "Address that links listen on, :: for all of IPv4 and IPv6; by default the one that faces the endpoint. Beyond "
        "loopback keys or a token are demanded.",
    )
    port: str = setting(
        "",
        "Port that links listen at, or a range of which the first free one is taken, such as 29500-29599: one for each "
        "member of this machine (docs/ports.md). By default any.",
        check=_read_by(read_ports),
        metavar="PORT",
    )
    announce: str = setting(
        "",
        "Address that other members dial, as HOST or HOST:PORT, where it is another one than that listened on, such as "
        "behind NAT.",
        check=_read_by(split_announced),
        metavar="HOST",
    )
    plan: str = setting(
        DEFAULT_PLAN,
        "How gradients travel: auto, rotating, chain, tree, tree:K, another planner, or a file of trees. auto draws "
        "trees from the measured links, again when these change enough to pay for it (rotating where all links are "
        "alike); other planners are widest, packed, star, fapt, local, spread and MODULE:FUNCTION; a file is "
        "file:PATH or ends in .yaml, .yml or .json (planning/plans.py). The job goes by the plan of whoever starts "
        "its scheduler.",
        absolute=absolute_plan,
    )
    chunk_nbytes: int = setting(
        0,
        "Size of one chunk of the all-reduce; 0 picks one by the size of the gradients and the plan, 1 MiB at most.",
        check=_chunk,
    )
    log_dir: str = setting(
        "auto",
        "Folder of the event log, by which audit, report and top know what happened: auto, none, or a folder. auto is "
        "~/.local/state/chaos-lightning/JOB-PORT/events, on this machine.",
        absolute=absolute_log_dir,
        metavar="DIR",
    )
    log_day_nbytes: int = setting(
        DAY_NBYTES,
        "What this member may write into its event log in 24 hours, bytes; 0: without limit. Beyond it the oldest part "
        "is deleted, and audits do not show it.",
        check=at_least(0, "a number of bytes, or 0 for no limit"),
    )
    heartbeat_timeout_s: float = same_as(Settings, "heartbeat_timeout_s")
    finished_s: float = same_as(Settings, "finished_s")
    join_timeout_s: float = setting(
        600.0, "How long to wait for admission and state; under torchrun by default its rendezvous timeout, 900."
    )
    step_timeout_s: float = setting(600.0, "How long one slot may take before this member gives up with an error.")
    host_scheduler: bool = setting(True, "Whether this member may start a scheduler at a free local endpoint.")
    overlap: bool = setting(True, "Send gradients while backward runs, and not only after it.")
    by_reference: bool = setting(
        True,
        "Whether members of one machine read gradients out of each other's memory, where the kernel permits it. Off: "
        "everything passes through sockets (transport/reference.py).",
    )
    state_hash_every: int = setting(
        100,
        "Compare state hashes of all members every so many steps; 0 never.",
        check=at_least(0, "a number of steps, or 0 for never"),
    )
    join_by: str = setting(
        "auto",
        "How this member comes into a running job: replay (the others train on), pause (they wait while it gets the "
        "state), or auto. auto: by replay if its steps are a pure function of state and gradients, else by pause; the "
        "event log gives the reason.",
        check=one_of(("auto", "replay", "pause")),
    )
    batch: str = setting(
        MEMBER,
        "Batch of an optimizer step: member, fixed, fixed:N or fixed:N/B. member: the sum of the members' batches, so "
        "it grows and shrinks with them. fixed: as many samples as the loader's batch, whoever is there, divided by "
        "the members' speeds; fixed:N: N samples; fixed:N/B: N samples in micro-batches of exactly B, each of which "
        "computes the same wherever it runs. Equal at all members.",
        check=check_rule,
        metavar="RULE",
    )
    fits: int = setting(
        0,
        "Samples that this member computes at once under batch=fixed; a larger share becomes several micro-batches. 0: "
        "as many as the loader's batch.",
        check=at_least(0, "a number of samples, or 0 for the loader's batch"),
    )
    lr_scaling: str = setting(
        UNSCALED,
        "Learning rate under batch=member: none or linear:M0. none: what the script sets, whoever is there. linear:M0: "
        "each step multiplies it by the samples of that step / M0, the samples of a step that it was chosen for; "
        "schedules and checkpoints keep the script's own rate. Equal at all members.",
        check=check_scaling,
        metavar="RULE",
    )
    transfer: str = setting(
        "adaptive",
        f"Which member sends this one which part of the state: {', '.join(POLICIES)}, or MODULE:CLASS. adaptive is "
        "planned by what is known of the links and corrected by what is measured; with shared, whoever has room takes "
        "the next piece; MODULE:CLASS is a policy of your own (docs/transfer.md).",
        check=wrong_policy,
    )
    ingress_bps: float = setting(
        0.0,
        "Access link of this member's machine, which all its links share, in bits per second; 0: each link has its "
        "own. Policies plan by it.",
        check=at_least(0, "bits per second, or 0 if links share nothing"),
    )
    neighbours: str = setting(
        "", "Nodes or members to have links with, separated by commas or +; by default all that can be reached."
    )
    links: str = same_as(Settings, "links", check=one_of(RULES))
    on_last_exit: str = setting(
        "checkpoint",
        "What the last member does with the training state when it goes before the job is finished: checkpoint, none, "
        "or a folder. checkpoint keeps it beside the chain's file (by default in "
        "~/.local/state/chaos-lightning/JOB-PORT), a folder keeps it there, in JOB-PORT, none lets it go. Whoever "
        "founds the job again goes on from it, and says so.",
        absolute=partial(absolute_path, words=("", *ON_LAST_EXIT)),
    )
    resume_from: str = setting(
        "newest",
        "Which state counts if the last member has kept one that goes on from a checkpoint that the script loads. "
        "newest: the kept state; checkpoint: the checkpoint, so that a job can go back on purpose.",
        check=one_of(("newest", "checkpoint")),
    )
    notice: str = setting(
        "",
        "Sources of notices that this machine will be taken away, joined by +: aws, aws-rebalance, gcp, slurm, "
        "sigterm:TIME, file:PATH, deadline:TIME. The member leaves 2 minutes before that, or as lead:TIME says. The "
        "address of a metadata server may follow (aws:http://HOST:PORT); slurm:requeue has the Slurm job queued again; "
        "sigterm:TIME is the time from SIGTERM to SIGKILL (docs/notices.md).",
        check=_read_by(NoticePlan.read),
        absolute=absolute_notice,
        metavar="SOURCES",
    )

    def __post_init__(self) -> None:
        _ = self.endpoints
        check_each(self)
        check_nodes(self.min_nodes, self.max_nodes)
        if self.lr_scaling != UNSCALED and self.batch != MEMBER:
            raise ConfigurationError(
                f"lr_scaling={self.lr_scaling!r} with batch={self.batch!r}: such a batch is the same whoever is there, "
                f"so nothing is to be scaled. Leave lr_scaling at {UNSCALED}, or take batch={MEMBER}"
            )
        for name in self.neighbour_names:
            if is_name(name):
                raise ConfigurationError(f"neighbours={self.neighbours!r}: {name!r} is no node's or member's name")
            if name == self.name:
                raise ConfigurationError(f"neighbours={self.neighbours!r}: {name!r} is this member itself")
        if self.links not in ("auto", Level.CHECKSUM):
            require_library()
        _ = self.plan_spec

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints at which a scheduler may be: one, or the candidates of the job."""
        return split_endpoints(self.endpoint)

    @property
    def neighbour_names(self) -> tuple[str, ...]:
        """Names of nodes or members in the setting `neighbours`."""
        return tuple(name for name in re.split(r"[\s,+]+", self.neighbours) if name)

    @cached_property
    def plan_spec(self) -> PlanSpec:
        """Plan that `plan` names; a file is read once, when the configuration is made."""
        return read_plan(self.plan, self.chunk_nbytes)

    @cached_property
    def notice_plan(self) -> NoticePlan:
        """Sources of notices that `notice` names."""
        return NoticePlan.read(self.notice)

    @classmethod
    def build(cls, given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EngineConfig:
        """Makes a configuration from the arguments that are not None, then the environment, then the defaults.

        Under `chaos-lightning profile` arguments do not count: the environment names a job of this process alone.
        """
        if unknown := set(given) - set(declared(cls)):
            raise ConfigurationError(f"unknown settings {sorted(unknown)}; expected some of {sorted(declared(cls))}")
        own = {} if PROFILED in environ else {k: v for k, v in given.items() if v is not None}
        values = from_environment(declared(cls), environ) | own
        if not values.get("name"):
            node = environ.get("CHAOS_NODE")
            local = environ.get("LOCAL_RANK", "0")
            values["name"] = f"{node}-{local}" if node else f"{host_name()}-{local}-{os.getpid()}"
        return cls(**values)


def host_name() -> str:
    """Returns this machine's name, as part of a node's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40] or "node"


def from_environment(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that are given by environment variables, by name. Warns of a variable that is another
    setting's, with the same name.

    Raises:
        ConfigurationError: One is of another type; names the variable.
    """
    if "CHAOS_NODE" not in environ:  # else a launcher has told its own settings to this process
        for name, made in settings.items():
            if (other := f"{PREFIX}{name.upper()}") in environ and made.variable not in environ:
                _log.warning("environment variable %s changes nothing here; did you mean %s?", other, made.variable)
    return {
        name: made.read(text, f"environment variable {made.variable}")
        for name, made in settings.items()
        if (text := environ.get(made.variable))
    }


def to_environment(settings: Mapping[str, Setting], instance: object) -> dict[str, str]:
    """Converts these settings of an object to environment variables, which `from_environment` reads."""
    values = {made.variable: getattr(instance, name) for name, made in settings.items()}
    return {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in values.items()}


# ------------------------------------------------------------------------------------------------ of a strategy

ARGUMENTS = ("endpoint", "job", "name", "min_nodes", "max_nodes", "log_dir")
"""Settings that are arguments of `ChaosStrategy`; all others are in its `options`."""


if TYPE_CHECKING:
    _Options = EngineConfig  # the same names and types: so type checkers and completion know them
else:
    _Options = optional_base(__name__, EngineConfig, without=ARGUMENTS)


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(_Options):
    """Settings that most jobs leave alone: those of `EngineConfig` but for the strategy's own arguments, and two more.

    None means: the environment's CHAOS_<NAME>, else the default.
    """

    seed: int | None = setting(
        None, "Seed of the sample order; equal on all members. None takes `seed_everything`'s, else 0."
    )
    leave_on_signals: bool = setting(True, "Whether SIGINT, SIGTERM and SIGHUP leave the job politely, or abort.")

    def for_engine(self) -> dict[str, Any]:
        """Returns those of these options that are fields of `EngineConfig`, by name."""
        return {name: value for name, value in asdict(self).items() if name in declared(EngineConfig)}


for _told in (EngineConfig, ChaosOptions):
    document(_told)
