"""A training state in a file: what the last member leaves behind, and a founder goes on from (protocol.md 14c).

Theory of operation. The bytes are written as a checkpoint for a newcomer is (checkpoint.py): all tensors end to end,
flushed and renamed into place. Beside it, and after it, comes a *record*: one JSON document with the table of tensors
and piece hashes, the manifest, and what the caller says of the state. A record without its bytes, bytes without
a record, and bytes that do not have their hashes are no state. Nothing here is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.checkpoint import CheckpointWriter
from chaos_lightning.replication.landing import Landing
from chaos_lightning.replication.manifest import encode_manifest
from chaos_lightning.replication.memory import region, synchronize
from chaos_lightning.replication.parts import part_of, sweep
from chaos_lightning.replication.policy import cut_jobs
from chaos_lightning.replication.published import lay_out
from chaos_lightning.replication.pull import StateSink
from chaos_lightning.replication.table import StateTable, build_table, decode_table

RECORD = "kept.json"
_VERSION = 1
MAX_ATTACHED_NBYTES = 8 << 30
"""Limit for tensors that only the manifest refers to (bytes)."""


@dataclass(frozen=True)
class StateOnDisk:
    """A state on disk."""

    folder: Path
    said: Mapping[str, Any]
    """What the keeper said of it: plain values."""
    name: str
    nbytes: int
    table: str
    manifest: str

    @property
    def path(self) -> Path:
        """Of the bytes."""
        return self.folder / self.name

    @property
    def state_hash(self) -> str:
        """Of the tensors, as their keeper had them."""
        return decode_table(self.table.encode()).state_hash


def write(folder: Path, head: str, seq: int, state: StateAccess, said: Mapping[str, Any]) -> StateOnDisk:
    """Keeps the state, which must be still, in this folder.

    Args:
        folder: Holds one state; made if it is not there.
        head: Hash of the header that the state is founded on.
        seq: Its slot.
        state: The training state.
        said: Goes into the record.

    Raises:
        StateError: It cannot be written; the message says why.
    """
    tensors = state.tensors()
    synchronize(t for _, t in tensors)
    encoded = encode_manifest(state.manifest(), tensors)
    synchronize(t for _, t in encoded.tensors)
    item = lay_out(head, seq, [region(name, t) for name, t in (*tensors, *encoded.tensors)])
    table = build_table(tensors, encoded.tensors, regions=item.regions)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        done = json.loads(CheckpointWriter(folder).save(item, lambda: None))
        text = encoded.data.decode("utf-8", "surrogatepass")
        record = StateOnDisk(folder, said, done["name"], done["nbytes"], table.encode().decode(), text)
        document = {"version": _VERSION, "said": dict(said), "name": record.name, "nbytes": record.nbytes}
        _replace(folder / RECORD, json.dumps({**document, "table": record.table, "manifest": text}).encode())
    except OSError as error:
        raise StateError(f"the training state could not be kept in {folder}: {error}") from error
    return record


def read(folder: Path) -> StateOnDisk:
    """The record in this folder, if its bytes are there in their length.

    Raises:
        StateError: There is none that can be used; the message says why.
    """
    path = folder / RECORD
    try:
        document = json.loads(path.read_bytes())
        if document["version"] != _VERSION:
            raise StateError(f"{path} has version {document['version']!r}, this release reads {_VERSION}")
        said, name, nbytes = document["said"], document["name"], document["nbytes"]
        table, manifest = document["table"], document["manifest"]
        if not (isinstance(said, dict) and all(isinstance(t, str) for t in (name, table, manifest))):
            raise StateError(f"{path} is no record of a training state")
        record = StateOnDisk(folder, said, Path(name).name, int(nbytes), table, manifest)
        size = record.path.stat().st_size
    except OSError as error:
        raise StateError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path} is no record of a training state ({error!r})") from error
    if size != record.nbytes:
        raise StateError(f"{record.path} has {size} bytes, its record says {record.nbytes}")
    return record


def load(record: StateOnDisk, state: StateAccess) -> None:
    """Puts the kept state in the place of this one.

    Raises:
        StateError: The file is not what was written, or does not fit what is trained here.
    """
    try:
        table = decode_table(record.table.encode())
        manifest = record.manifest.encode("utf-8", "surrogatepass")
        landing = Landing(state, table, manifest, MAX_ATTACHED_NBYTES)
        _fill(record, table, StateSink(landing.regions))
        landing.finish()
    except (WireError, OSError) as error:
        raise StateError(f"{record.path} is not what was kept: {error}") from error


def _fill(record: StateOnDisk, table: StateTable, sink: StateSink) -> None:
    frame: Any = None  # pieces have their own hashes
    with record.path.open("rb", buffering=0) as file, torch.no_grad():
        for job in cut_jobs(table, list(table.pieces()), 1 << 20, attached=frozenset()):
            buffers, at = sink.land(job), job.start
            for buffer in buffers:
                at += os.preadv(file.fileno(), [buffer], at)
            bad = sink.landed(job, buffers, frame, in_place=True)
            if at != job.stop or bad:
                raise StateError(f"{record.path}: bytes [{job.start}, {job.stop}) are not those that were kept")


def remove(folder: Path) -> None:
    """Nothing is kept there any more; the record goes first."""
    for path in [folder / RECORD, *folder.glob("*.state")]:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    sweep(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _replace(path: Path, data: bytes) -> None:
    part = part_of(path)
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def forget(folder: Path, job: str, chain: str) -> list[Path]:
    """Removes what members of this chain kept in the folder; returns what was there."""
    found = []
    for path in sorted(folder.glob(f"*/{RECORD}")):
        with contextlib.suppress(StateError):  # what cannot be read is nobody's, and is named when a member comes
            record = read(path.parent)
            if (record.said.get("job"), record.said.get("chain")) == (job, chain):
                remove(record.folder)
                found.append(record.folder)
    return found
