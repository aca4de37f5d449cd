"""What a user may set beyond the strategy's own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from chaos_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Settings that most jobs leave alone. None means: the environment's CHAOS_<NAME>, else the engine's default.

    Attributes:
        keys_dir: This node's folder of keys (`chaos-lightning keys`).
        token_file: Instead, a file with the cluster's token.
        bind: Address that links listen on; beyond loopback keys or a token are demanded.
        plan: How gradients travel: auto (trees from the measured links), rotating, chain, tree, tree:K, another planner
            or a file of trees (chaos_lightning.planning.plans).
        chunk_nbytes: Size of one chunk of the all-reduce in bytes; 0 picks one by the model's size.
        heartbeat_timeout_s: Silence after which a member is suspected.
        join_timeout_s: How long to wait for admission and state.
        step_timeout_s: How long one slot may take.
        host_scheduler: Whether this process may start a scheduler at a free local endpoint.
        overlap: Send gradients while backward runs.
        by_reference: Whether members of one machine read gradients out of each other's memory, if the kernel lets them.
        state_hash_every: Compare state hashes of all members every so many steps; 0 never.
        join_by: How this member comes into a running job: "replay" (the others train on), "pause" (they wait while it
            gets the state), or "auto": by replay if its steps are a pure function of state and gradients.
        transfer: Which member sends a newcomer which part of the state: adaptive, greedy, optimal, even, single,
            shared, multi_source or stop_resume.
        ingress_bps: Access link of this machine, which all its links share, in bits per second; 0: none.
        transfer_folder: For stop_resume: a folder that all members see.
        neighbours: Nodes or members to have links with, separated by commas or +; all that can be reached by default.
        links: How data links are protected: checksum, authenticated, encrypted, or auto (docs/links.md).
        on_last_exit: Where the last member that goes keeps the training state, from which the next start goes on:
            "checkpoint" (beside the chain's file), a folder, or "none". `fit(ckpt_path=...)` goes before it.
        seed: Seed of the sample order; equal on all members. None takes `seed_everything`'s, else 0.
        leave_on_signals: Whether SIGINT and SIGTERM leave the job politely instead of aborting.
    """

    keys_dir: str | None = None
    token_file: str | None = None
    bind: str | None = None
    plan: str | None = None
    chunk_nbytes: int | None = None
    heartbeat_timeout_s: float | None = None
    join_timeout_s: float | None = None
    step_timeout_s: float | None = None
    host_scheduler: bool | None = None
    overlap: bool | None = None
    by_reference: bool | None = None
    state_hash_every: int | None = None
    join_by: str | None = None
    transfer: str | None = None
    ingress_bps: float | None = None
    transfer_folder: str | None = None
    neighbours: str | None = None
    links: str | None = None
    on_last_exit: str | None = None
    seed: int | None = None
    leave_on_signals: bool = True

    @classmethod
    def of(cls, given: ChaosOptions | Mapping[str, Any] | None) -> ChaosOptions:
        """Accepts what Hydra and jsonargparse hand over: an instance, a mapping or nothing."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"options is a {type(given).__name__}; expected ChaosOptions or a mapping")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ConfigurationError(f"unknown options {unknown}; expected some of {sorted(known)}")
        return cls(**given)

    def for_engine(self) -> dict[str, Any]:
        """Those that `EngineConfig` knows under the same name."""
        return {name: value for name, value in asdict(self).items() if name not in ("seed", "leave_on_signals")}
