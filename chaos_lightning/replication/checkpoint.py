"""State through a file: what stop-and-resume systems do, kept for comparison.

Theory of operation. A SAVE request has a donor write its state at the header, all tensors end to end, into its
checkpoint folder, flush it to the disk and answer SAVED with name and size; PENDING tells meanwhile that it lives.
The joiner reads the file of that name in the folder that it was told of by its own user (never a path that came over
the wire) and verifies each piece by hash as it would verify what a connection brings. Both hold themselves to a
disk's rate if one is given. The file is written beside and renamed, and its pages are dropped from the page cache, so
that reading it is reading the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos_lightning.errors import ConfigurationError, StateError, WireError
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import Frame, Type
from chaos_lightning.replication.client import Deliver, Donor, Sink
from chaos_lightning.replication.parts import part_of, sweep
from chaos_lightning.replication.work_queue import WorkQueue

PART_NBYTES = 4 << 20
SYNC_NBYTES = 64 << 20
KEPT_FILES = 3
"""A member deletes its older checkpoints; somebody may still be about to open the last ones."""
_NAP_S = 0.05


class Source(Protocol):
    """A published state."""

    head: str
    seq: int
    nbytes: int

    def read(self, start: int, stop: int) -> Sequence[memoryview]: ...


def file_name(head: str, seq: int) -> str:
    """Both sides name the file alike."""
    bulk.head_bytes(head)
    return f"chaos-{seq}-{head}.state"


class Pace:
    """Holds a stream of bytes to a rate."""

    def __init__(self, rate_bps: float, tick: Callable[[], None] = lambda: None) -> None:
        """`rate_bps` in bits per second, 0 for none; `tick` is called now and then while it waits."""
        self._rate = rate_bps / 8
        self._tick = tick
        self._began = time.monotonic()
        self._nbytes = 0

    def passed(self, nbytes: int) -> None:
        """So much more was moved: wait until it may have been."""
        self._nbytes += nbytes
        self._tick()
        while self._rate and (left := self._began + self._nbytes / self._rate - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_S))
            self._tick()


@dataclass
class CheckpointWriter:
    """Lets this member's server write checkpoints."""

    folder: Path
    disk_bps: float = 0.0
    """Writing is held to this rate in bits per second; 0: as fast as the disk is."""
    _written: list[Path] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def save(self, source: Source, tick: Callable[[], None]) -> bytes:
        """Write the state; what SAVED carries. Whoever asks for the same one meanwhile or soon gets that file."""
        path = self.folder / file_name(source.head, source.seq)
        while not self._lock.acquire(timeout=_NAP_S):
            tick()
        try:
            if path not in self._written or not path.exists():
                self._write(path, source, tick)
        except OSError as error:
            raise StateError(f"the checkpoint could not be written to {self.folder}: {error}") from error
        finally:
            self._lock.release()
        return json.dumps({"name": path.name, "nbytes": source.nbytes}).encode()

    def _write(self, path: Path, source: Source, tick: Callable[[], None]) -> None:
        sweep(self.folder)
        part = part_of(path)
        pace = Pace(self.disk_bps, tick)
        try:
            with part.open("wb", buffering=0) as file:
                for start in range(0, source.nbytes, PART_NBYTES):
                    stop = min(start + PART_NBYTES, source.nbytes)
                    for view in source.read(start, stop):
                        while view:
                            view = view[file.write(view) :]
                    if stop % SYNC_NBYTES < PART_NBYTES:  # the last one must not take long: nobody ticks meanwhile
                        os.fdatasync(file.fileno())
                    pace.passed(stop - start)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._written = [old for old in self._written if old != path] + [path]
        while len(self._written) > KEPT_FILES:
            with contextlib.suppress(OSError):  # what cannot be deleted is no reason to refuse what was written
                self._written.pop(0).unlink()


def reader(folder: Path, disk_bps: float) -> Deliver:
    """How a joiner gets bytes from a donor through its checkpoint.

    Args:
        folder: Where the donor's checkpoints can be read.
        disk_bps: Reading is held to this rate in bits per second; 0: as fast as the disk is.
    """

    def deliver(donor: Donor, work_queue: WorkQueue, sink: Sink) -> None:
        request = work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline)
        if request is None:
            return
        name = _saved(donor.ask(Type.SAVE, Type.SAVED), file_name(donor.head, donor.seq))
        try:
            file = (folder / name).open("rb", buffering=0)
        except OSError as error:
            raise ConfigurationError(
                f"{donor.member} has written the checkpoint {name}, but it cannot be read in {folder} here ({error}): "
                "stop_resume needs a folder that both see"
            ) from error
        pace = Pace(disk_bps)
        with file:
            while request is not None:
                job = request.job
                buffers = sink.land(job)
                at = job.start
                for buffer in buffers:
                    got = os.preadv(file.fileno(), [buffer], at)
                    at += got
                    work_queue.arrived(request, got)
                    if got != len(buffer):
                        raise StateError(f"the checkpoint {name} ends at byte {at}, expected were {job.stop}")
                frame = Frame(Type.DATA, donor.head, donor.seq, job.start, job.nbytes, sink.flags)
                bad = sink.landed(job, buffers, frame, in_place=True)
                if bad is None or bad:
                    work_queue.wrong(request, bad or ())
                else:
                    work_queue.done(request, buffers)
                pace.passed(job.nbytes)
                request = work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline)

    return deliver


def _saved(data: bytes, expected: str) -> str:
    try:
        document = json.loads(data)
        name = document["name"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"malformed answer to SAVE: {error!r}") from error
    if name != expected:
        raise WireError(f"the donor saved {name!r}, expected was {expected!r}")
    return expected
