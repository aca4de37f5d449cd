"""Keeps a training state in a file: the last member of a job leaves it behind, and the next founder resumes from it
(protocol.md 14c).

Theory of operation. The bytes go into a file beside, all tensors end to end, which is flushed to the disk and renamed
into place. Beside it, and after it, comes a *record*: one JSON document with the table of tensors and piece hashes, the
manifest, and what the caller says of the state. A record without its bytes, bytes without a record, and bytes that do
not have their hashes are no state. Nothing here is unpickled.

A member of a pipeline keeps the parts of the state that it holds. Each has a folder of its own with a record as above,
and these are written before the record of the rest, which names them: so what that record names is there, of the same
header, and parts without it are none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.bulk import head_bytes
from chaos_lightning.replication.landing import Landing
from chaos_lightning.replication.manifest import encode_manifest
from chaos_lightning.replication.memory import region, synchronize
from chaos_lightning.replication.parts import part_of, sweep
from chaos_lightning.replication.policy import cut_jobs
from chaos_lightning.replication.published import Published, lay_out
from chaos_lightning.replication.pull import StateSink
from chaos_lightning.replication.table import StateTable, build_table, decode_table

RECORD = "kept.json"
PART_NBYTES = 4 << 20
_VERSION, _VERSION_WITH_PARTS = 1, 2
"""Versions of a record without and with parts: a release that does not know of parts must not take the rest for the
whole.
"""
MAX_ATTACHED_NBYTES = 8 << 30
"""Most bytes of tensors that only the manifest refers to."""


@dataclass(frozen=True)
class StateOnDisk:
    """Training state on disk."""

    folder: Path
    said: Mapping[str, Any]
    """Facts that its keeper has told about the state: plain values."""
    name: str
    nbytes: int
    table: str
    manifest: str
    parts: Mapping[str, StateOnDisk] = field(default_factory=dict)
    """Parts of the state beside the rest, by name, each as a state."""

    @property
    def path(self) -> Path:
        """Path of the file with the bytes."""
        return self.folder / self.name

    @property
    def state_hash(self) -> str:
        """Hash of the tensors at the time when they were written."""
        return decode_table(self.table.encode()).state_hash


def write(
    folder: Path,
    head: str,
    seq: int,
    state: StateAccess,
    said: Mapping[str, Any],
    parts: Mapping[str, StateAccess] | None = None,
) -> StateOnDisk:
    """Writes the state, which must not change during this, to files in this folder.

    Args:
        folder: Folder for one state; made if it is not there.
        head: Hash of the header that the state is founded on.
        seq: Slot of the header.
        state: The training state, or the rest of it where there are parts.
        said: Values that go into the record.
        parts: Parts of the state that are held here, by name.

    Raises:
        StateError: The state cannot be written; the message says why.
    """
    at = {"head": head, "seq": seq}
    written = {}
    for name, part in (parts or {}).items():
        written[name] = _write(folder / _part_folder(head, name), head, seq, part, {"part": name, **at}, {})
    record = _write(folder, head, seq, state, said, written)
    _remove_parts(folder, but={part.folder for part in written.values()})
    return record


def _part_folder(head: str, part: str) -> str:
    head_bytes(head)
    return f"part-{head}-{hashlib.blake2b(part.encode(), digest_size=8).hexdigest()}"


def _remove_parts(folder: Path, but: set[Path]) -> None:
    for path in folder.glob("part-*"):
        if path not in but:
            shutil.rmtree(path, ignore_errors=True)


def _write(
    folder: Path, head: str, seq: int, state: StateAccess, said: Mapping[str, Any], parts: Mapping[str, StateOnDisk]
) -> StateOnDisk:
    tensors = state.tensors()
    synchronize(t for _, t in tensors)
    encoded = encode_manifest(state.manifest(), tensors)
    synchronize(t for _, t in encoded.tensors)
    item = lay_out(head, seq, [region(name, t) for name, t in (*tensors, *encoded.tensors)])
    table = build_table(tensors, encoded.tensors, regions=item.regions)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = write_bytes(folder, item)
        text = encoded.data.decode("utf-8", "surrogatepass")
        record = StateOnDisk(folder, said, file.name, item.nbytes, table.encode().decode(), text, parts)
        version = _VERSION_WITH_PARTS if parts else _VERSION
        document = {"version": version, "said": dict(said), "name": record.name, "nbytes": record.nbytes}
        named = {"parts": [*parts], "head": head} if parts else {}
        document |= {**named, "table": record.table, "manifest": text}
        _replace(folder / RECORD, json.dumps(document).encode())
    except OSError as error:
        raise StateError(f"the training state could not be kept in {folder}: {error}") from error
    return record


def write_bytes(folder: Path, source: Published) -> Path:
    """Writes all tensors of a state, end to end, into one file of this folder; returns the file's path.

    Raises:
        StateError: The file cannot be written; nothing is left behind.
    """
    head_bytes(source.head)
    path = folder / f"chaos-{source.seq}-{source.head}.state"
    sweep(folder)
    part = part_of(path)
    try:
        with part.open("wb", buffering=0) as file:
            for start in range(0, source.nbytes, PART_NBYTES):
                for view in source.read(start, min(start + PART_NBYTES, source.nbytes)):
                    while view:
                        view = view[file.write(view) :]
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StateError(f"the checkpoint could not be written to {folder}: {error}") from error
    return path


def read(folder: Path) -> StateOnDisk:
    """Reads the record in this folder; returns it if all files of the state and of its parts exist with the recorded
    sizes.

    Raises:
        StateError: There is no record that can be used; the message says why.
    """
    path = folder / RECORD
    try:
        document = json.loads(path.read_bytes())
        version, known = document["version"], (_VERSION, _VERSION_WITH_PARTS)
        if version not in known:
            raise StateError(f"{path} has version {version!r}, this release reads {known[0]} and {known[1]}")
        if (version == _VERSION_WITH_PARTS) != bool(document.get("parts")):
            raise StateError(f"{path} has version {version} and parts {document.get('parts', [])}, which do not fit")
        said, name, nbytes = document["said"], document["name"], document["nbytes"]
        table, manifest, parts = document["table"], document["manifest"], document.get("parts", [])
        if not (isinstance(said, dict) and all(isinstance(t, str) for t in (name, table, manifest, *parts))):
            raise StateError(f"{path} is no record of a training state")
        found = {part: _read_part(folder, part, document["head"]) for part in parts}
        record = StateOnDisk(folder, said, Path(name).name, int(nbytes), table, manifest, found)
        size = record.path.stat().st_size
    except OSError as error:
        raise StateError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is no record of a training state ({error!r})") from error
    if size != record.nbytes:
        raise StateError(f"{record.path} has {size} bytes, its record says {record.nbytes}")
    return record


def _read_part(folder: Path, part: str, head: str) -> StateOnDisk:
    record = read(folder / _part_folder(head, part))
    if (record.said.get("part"), record.said.get("head")) != (part, head):
        raise StateError(
            f"{record.folder} has part {record.said.get('part')!r} at header {record.said.get('head')}; expected "
            f"{part!r} at {head}"
        )
    return record


def load(record: StateOnDisk, state: StateAccess) -> None:
    """Loads the state on disk into this member's training state.

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
    """Removes the kept state from this folder, the record before the files that it names."""
    with contextlib.suppress(OSError):
        (folder / RECORD).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # each member that finishes a job removes the folders of all
        _remove_parts(folder, but=set())
        for path in folder.glob("*.state"):
            path.unlink(missing_ok=True)
        sweep(folder)
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
    """Removes all states that members of this chain kept below the folder; returns the folders that had one."""
    found = []
    for path in sorted(folder.glob(f"*/{RECORD}")):
        with contextlib.suppress(StateError):  # what cannot be read is nobody's, and is named when a member comes
            record = read(path.parent)
            if (record.said.get("job"), record.said.get("chain")) == (job, chain):
                remove(record.folder)
                found.append(record.folder)
    return found
