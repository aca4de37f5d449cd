"""Writes and reads a follower's files, each of which has the follower's shard of one version, so that a crash or a full
disk costs no version.

Theory of operation. A follower keeps a folder per job. A file has the form of safetensors: the length of a JSON header
(8 bytes), the header, and then `theta`, `momentum` and `buffer`, fp32, end to end. So other tools can read it. The
header's metadata says which job, version, grid and shard it is of, and the digest of the content (`OuterState.digest`);
it has a checksum of its own. The file's name holds the version's number and hash: contents of two branches of a chain
never have one name. Where a version was cut into other shards (outer/commands/recut.py) there are two files of it, and
the name of the one that came later has the digest, too.

A file is written beside its place, synced, renamed, and the folder is synced; then it is read back, past the page
cache where the system allows that, and compared with the digest. Only then is it reported (O6). Whatever a crash leaves
behind is a whole file, or none, or a part that the next start removes.

At a start all files are read and compared with their digests, since the leader marks versions as durable on the word of
a follower that starts. That costs as much as loading them. What is damaged, or is no file of ours, is named and left
alone. A folder with files of another job, or of another format, is refused: who gave it has made a mistake.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.outer.exchange.kernel import OuterState
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.messages import ShardFile
from chaos_lightning.outer.rules.types import Counters, VersionId
from chaos_lightning.replication.memory import as_bytes, host_view
from chaos_lightning.replication.parts import part_of, sweep

FORMAT = 1
"""Format of the files; raise it when their content changes."""
KIND = "chaos-lightning outer shard"
TENSORS = ("theta", "momentum", "buffer")
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_NBYTES = 64 << 20
_PIECE_NBYTES = 4 << 20
_NAME = re.compile(r"v([0-9]{8,12})-([0-9a-f]{32})(-[0-9a-f]{32})?\.safetensors")


@dataclass(frozen=True, slots=True)
class ShardHead:
    """Header of a shard's file.

    Attributes:
        job: Job that the file belongs to.
        version: Version whose content the file has.
        shard: Blocks of the shard, and their grid.
        counters: Counters of the job at this version.
        digest: Digest of the content.
    """

    job: str
    version: VersionId
    shard: Shard
    counters: Counters
    digest: str

    def encode(self) -> bytes:
        """Returns the first bytes of a file: all that comes before the tensors."""
        grid, size = self.shard.grid, self.shard.nbytes(4)
        words = {
            "kind": KIND,
            "format": str(FORMAT),
            "job": self.job,
            "version": str(self.version.number),
            "hash": self.version.hash,
            "digest": self.digest,
            "block": str(grid.block),
            "sizes": json.dumps(grid.sizes),
            "blocks": json.dumps([self.shard.first, self.shard.stop]),
            "counters": json.dumps(asdict(self.counters)),
        }
        words["check"] = xxhash.xxh3_64_hexdigest(json.dumps(words).encode())
        document: dict[str, Any] = {"__metadata__": words}
        for place, name in enumerate(TENSORS):
            offsets = [place * size, (place + 1) * size]
            document[name] = {"dtype": "F32", "shape": [self.shard.elements], "data_offsets": offsets}
        text = json.dumps(document).encode()
        text += b" " * (-len(text) % _LENGTH.size)  # so that the tensors are aligned
        return _LENGTH.pack(len(text)) + text


@dataclass(frozen=True, slots=True)
class FolderContents:
    """Content of a follower's folder at a start.

    Attributes:
        whole: Versions whose content is undamaged, oldest first.
        strange: Name and defect of everything else in the folder that is no part of a file.
    """

    whole: tuple[ShardFile, ...]
    strange: tuple[tuple[str, str], ...]


class ShardFiles:
    """Folder with the files of one follower and job. Several threads may use it, but each version's file only one at a
    time.

    Args:
        root: Folder of the follower.
        job: Name of the job.

    Raises:
        ConfigurationError: The folder cannot be made, or has files of another job or format.
    """

    def __init__(self, root: Path, job: str) -> None:
        self.job = job
        self.folder = root / (re.sub(r"[^A-Za-z0-9._-]", "_", job).lstrip(".") or "_")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sync_folder(root)
            with contextlib.suppress(PermissionError):  # who made that one made `root`, too
                _sync_folder(root.parent)
            for path in self._ours():
                self._refuse_strangers(path)  # before anything of theirs is touched
            sweep(self.folder)
            _sync_folder(self.folder)  # who was here before may have died between a file's name and this (O6)
        except OSError as error:
            raise ConfigurationError(f"the follower's folder {self.folder} cannot be used: {error}") from error

    def path(self, version: VersionId, digest: str = "") -> Path:
        """Returns the path of this version's file, whether it exists or not; with a digest, of a second file for it,
        beside one that holds another shard.
        """
        return self.folder / f"v{version.number:08d}-{version.hash}{digest and f'-{digest}'}.safetensors"

    def look(self) -> FolderContents:
        """Reads all files of the folder, and returns which are undamaged and which are not."""
        whole: list[ShardFile] = []
        strange: list[tuple[str, str]] = []
        named = self._ours()
        for path in named:
            try:
                head = self._check(path)
            except StateError as error:
                strange.append((path.name, str(error)))
            else:
                whole.append(ShardFile(head.version, head.digest))
        others = sorted(path.name for path in self.folder.iterdir() if path not in named)
        strange += [(name, "it is no file of a follower") for name in others if not name.endswith(".part")]
        return FolderContents(tuple(sorted(whole, key=lambda file: file.version)), tuple(strange))

    def save(self, version: VersionId, state: OuterState, counters: Counters, *, beside: bool = False) -> str:
        """Writes a version's file durably, reads it back and compares it; see the module.

        Args:
            version: Version to write.
            state: Content of the version, which must not change meanwhile.
            counters: Counters of the job at this version.
            beside: Whether a file of this version with another shard may be there.

        Returns:
            The digest.

        Raises:
            StateError: The file cannot be written, such as on a full disk, or other bytes came back. The call may be
                repeated.
        """
        head = ShardHead(self.job, version, state.shard, counters, state.digest)
        path = self.path(version, head.digest if beside else "")
        part = part_of(path)
        try:
            try:
                self._write(part, head, state)
                part.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
                raise
            _sync_folder(self.folder)
            self._check(path)
        except OSError as error:
            raise StateError(f"version {version} cannot be saved to {path}: {error.strerror or error}") from error
        return head.digest

    def load(self, version: VersionId, digest: str) -> tuple[OuterState, Counters]:
        """Returns a version's state and counters, read from its file.

        Raises:
            StateError: Its file is gone, damaged, or has another digest.
        """
        path = self.path(version, digest)
        path = path if path.exists() else self.path(version)
        with _opened(path) as file:
            head = self._head(path, file)
            tensors = torch.empty(len(TENSORS), head.shard.elements).unbind()
            for tensor in tensors:
                _fill(file, host_view(as_bytes(tensor)), path)
        state = OuterState(head.shard, *tensors)
        if (found := state.digest) != digest:
            raise StateError(f"{path} is damaged: its digest is {found}, expected {digest}")
        return state, head.counters

    def delete(self, version: VersionId) -> None:
        """Deletes this version's file. If that fails, the next start finds the file again."""
        with contextlib.suppress(OSError):
            for path in [path for path in self._ours() if path.name.startswith(self.path(version).stem)]:
                path.unlink(missing_ok=True)

    def delete_beyond(self, number: int) -> None:
        """Deletes files of all versions above this number, durably.

        Raises:
            StateError: One cannot be deleted.
        """
        try:
            for path in self._ours():
                if int(path.name[1:].partition("-")[0]) > number:
                    path.unlink(missing_ok=True)
            _sync_folder(self.folder)
        except OSError as error:
            raise StateError(f"files in {self.folder} cannot be deleted: {error.strerror or error}") from error

    # ------------------------------------------------------------------ within

    def _ours(self) -> list[Path]:
        """Returns the paths of all files whose names are those of a follower's files."""
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def _refuse_strangers(self, path: Path) -> None:
        try:
            with _opened(path) as file:
                words = _words(path, file)[1]
        except StateError:
            return  # `look` names it
        if words.get("kind") == KIND and words.get("format") != str(FORMAT):
            raise ConfigurationError(
                f"{path} has format {words.get('format')}, this package reads and writes format {FORMAT}: use the "
                "package that wrote it, or give the follower another folder"
            )
        if words.get("kind") == KIND and words.get("job") != self.job:
            raise ConfigurationError(
                f"{path} is of job {words.get('job')!r}, this follower is of job {self.job!r}: give it another folder"
            )

    @staticmethod
    def _write(part: Path, head: ShardHead, state: OuterState) -> None:
        with part.open("xb", buffering=0) as file:
            for view in (memoryview(head.encode()), *(host_view(as_bytes(tensor)) for tensor in state.tensors)):
                while view:
                    view = view[file.write(view[:_PIECE_NBYTES]) :]
            os.fsync(file.fileno())

    def _head(self, path: Path, file: BinaryIO) -> ShardHead:
        """Reads the header of a file, and compares it with the file's name and size."""
        tables, words = _words(path, file)
        try:
            version = VersionId(int(words["version"]), words["hash"])
            (first, stop), sizes = json.loads(words["blocks"]), json.loads(words["sizes"])
            counters = Counters(**json.loads(words["counters"]))
            if any(type(number) is not int for number in (first, stop, *sizes, *asdict(counters).values())):
                raise TypeError("a number is none")
            shard = Grid(tuple(sizes), int(words["block"])).shard(first, stop)
            head = ShardHead(words["job"], version, shard, counters, words["digest"])
            again = json.loads(head.encode()[_LENGTH.size :])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise StateError(f"{path} is damaged: its header says nothing that can be read ({error!r})") from error
        places = self.path(version), self.path(version, head.digest)
        if again != {**tables, "__metadata__": words} or head.job != self.job or path not in places:
            raise StateError(f"{path} is damaged: its header is not the one of such a file")
        expected = file.tell() + len(TENSORS) * shard.nbytes(4)
        if (size := os.fstat(file.fileno()).st_size) != expected:
            raise StateError(f"{path} is damaged: it has {size} bytes, expected {expected}")
        return head

    def _check(self, path: Path) -> ShardHead:
        """Reads the whole file, block by block; StateError if the content's digest is not the one in the header."""
        with _opened(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what the disk has, not what was written
            head = self._head(path, file)
            begin, size = file.tell(), head.shard.nbytes(4)
            room = memoryview(bytearray(4 * max(head.shard.lengths)))
            digests = []
            for place in head.shard.places:
                state = xxhash.xxh3_128()
                for tensor in range(len(TENSORS)):
                    file.seek(begin + tensor * size + 4 * place.start)
                    piece = room[: 4 * (place.stop - place.start)]
                    _fill(file, piece, path)
                    state.update(piece)
                digests.append(state.digest())
        if (found := head.shard.content_hash(digests, "state")) != head.digest:
            raise StateError(f"{path} is damaged: its digest is {found}, expected {head.digest}")
        return head


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading while the block runs; raises StateError for any error in reading it."""
    try:
        with path.open("rb", buffering=0) as file:
            yield file  # type: ignore[misc]
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error


def _words(path: Path, file: BinaryIO) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads a file's header; returns its description of the tensors and its metadata, with the file positioned behind
    the header.
    """
    try:
        length = bytearray(_LENGTH.size)
        _fill(file, memoryview(length), path)
        (nbytes,) = _LENGTH.unpack(length)
        if nbytes > min(_MOST_HEADER_NBYTES, os.fstat(file.fileno()).st_size):
            raise StateError(f"{path} is damaged: its header cannot have {nbytes} bytes")
        text = bytearray(nbytes)
        _fill(file, memoryview(text), path)
        document = json.loads(text)
        words = document.pop("__metadata__")
        if not all(isinstance(word, str) for word in words.values()):
            raise TypeError(words)
        return document, words
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged: its header cannot be read ({error!r})") from error


def _fill(file: BinaryIO, view: memoryview, path: Path) -> None:
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise StateError(f"{path} is damaged: it ends in the middle")
        view = view[got:]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
