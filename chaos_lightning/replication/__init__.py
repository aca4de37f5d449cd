"""Replicates the training state as byte ranges: donors publish it, joiners pull it.

`table` says what the state consists of, `memory` gets at its bytes, `manifest` carries the rest, `access` names the
parts of a training process, `bulk` frames them on a socket, `server` serves (and `forward` relays for those without a
link) and `pull` (over `session`, `client` and `work_queue`) fetches; `policies` says who sends what.
"""

from __future__ import annotations

from chaos_lightning.replication.access import (
    ModuleState,
    StateAccess,
    module_extra,
    module_tensors,
    optimizer_manifest,
    optimizer_tensors,
    restore_module_extra,
    restore_optimizer,
    unique,
)
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.manifest import decode_manifest, encode_manifest
from chaos_lightning.replication.policies import POLICIES, make_policy
from chaos_lightning.replication.policy import Job, PolicyOptions, SharedQueue, SourceStats, TransferPolicy
from chaos_lightning.replication.pull import PullReport, pull_result, pull_state
from chaos_lightning.replication.server import StateServer, StateServerConfig
from chaos_lightning.replication.session import SourceReport
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import StateTable, build_table, decode_table, layout_hash, state_hash

__all__ = [
    "POLICIES",
    "Endpoint",
    "Job",
    "ModuleState",
    "PolicyOptions",
    "PullConfig",
    "PullReport",
    "SharedQueue",
    "SourceReport",
    "SourceStats",
    "StateAccess",
    "StateServer",
    "StateServerConfig",
    "StateTable",
    "TransferPolicy",
    "build_table",
    "decode_manifest",
    "decode_table",
    "encode_manifest",
    "layout_hash",
    "make_policy",
    "module_extra",
    "module_tensors",
    "optimizer_manifest",
    "optimizer_tensors",
    "pull_result",
    "pull_state",
    "restore_module_extra",
    "restore_optimizer",
    "state_hash",
    "unique",
]
