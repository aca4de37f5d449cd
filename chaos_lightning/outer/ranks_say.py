"""What ranks of an elastic cluster say to each other in commits, and their machine's state, as text.

Theory of operation. The values are those of outer/types.py and what a `ClusterMachine` holds. They travel as the
manifests of training states do (replication/manifest.py): a closed set of kinds, and nothing is unpickled. What the
leader said travels as its own bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from chaos_lightning.errors import WireError
from chaos_lightning.outer import cluster as cl
from chaos_lightning.outer import effects as fx
from chaos_lightning.outer.cluster import Phase
from chaos_lightning.outer.ranks_machine import RankSays
from chaos_lightning.outer.types import (
    Covered,
    IncarnationId,
    JobProgress,
    Offer,
    PushId,
    VersionId,
)
from chaos_lightning.outer.vocabulary import TO_CLUSTER
from chaos_lightning.replication.manifest import decode_manifest, encode_manifest

_VALUES = (IncarnationId, VersionId, PushId, Offer, Covered, JobProgress, cl.Unpushed, RankSays)
_EVENTS = (fx.Connected, fx.Disconnected, fx.TimePassed, cl.Missed)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*_VALUES, *_EVENTS)}


def tree_of(value: Any) -> Any:
    """As values that a manifest takes; equal values in equal order give equal trees."""
    if isinstance(value, fx.Told):
        return {"kind": "Told", "of": TO_CLUSTER.encode(value.message)}
    if isinstance(value, Phase):
        return {"kind": "Phase", "of": str(value)}
    if dataclasses.is_dataclass(value):
        return {
            "kind": type(value).__name__,
            "of": [tree_of(getattr(value, each.name)) for each in dataclasses.fields(value)],
        }
    if isinstance(value, dict):
        return {"kind": "dict", "of": [(tree_of(key), tree_of(each)) for key, each in value.items()]}
    if isinstance(value, (tuple, list)):
        return type(value)(tree_of(each) for each in value)
    return value


def value_of(tree: Any) -> Any:
    """Back from `tree_of`."""
    if isinstance(tree, dict):
        kind, of = tree["kind"], tree["of"]
        if kind == "Told":
            return fx.Told(TO_CLUSTER.decode(of))
        if kind == "Phase":
            return Phase(of)
        if kind == "dict":
            return {value_of(key): value_of(each) for key, each in of}
        return _KINDS[kind](*map(value_of, of))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(value_of, tree))
    return tree


def text_of(value: Any) -> bytes:
    """Values of outer sync as bytes; equal values give equal bytes."""
    return encode_manifest(tree_of(value)).data


def read_text(data: bytes) -> Any:
    """Back from `text_of`; WireError if it is malformed."""
    try:
        return value_of(decode_manifest(data))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"{len(data)} bytes of a rank's answer are malformed: {error!r}") from error
