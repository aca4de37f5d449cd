"""Writes a state to a file: what the last member keeps (kept.py), and what a donor of `stop_resume` is asked for.

Theory of operation. All tensors end to end go into a file beside, which is flushed to the disk and renamed; its pages
are dropped from the page cache, so that reading it is reading the disk. A SAVE request has a donor write its state at
the header into its checkpoint folder and answer SAVED with name and size; PENDING tells meanwhile that it lives. It
holds itself to a disk's rate if one is given. How a newcomer reads the file: baselines.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lightning.errors import StateError
from chaos_lightning.replication import bulk
from chaos_lightning.replication.parts import part_of, sweep
from chaos_lightning.replication.published import Published

PART_NBYTES = 4 << 20
SYNC_NBYTES = 64 << 20
KEPT_FILES = 3
"""A member deletes its older checkpoints; somebody may still be about to open the last ones."""
_NAP_S = 0.05


def file_name(head: str, seq: int) -> str:
    """Both sides name the file alike."""
    bulk.head_bytes(head)
    return f"chaos-{seq}-{head}.state"


class DiskThrottle:
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

    def save(self, source: Published, tick: Callable[[], None]) -> bytes:
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

    def _write(self, path: Path, source: Published, tick: Callable[[], None]) -> None:
        sweep(self.folder)
        part = part_of(path)
        throttle = DiskThrottle(self.disk_bps, tick)
        try:
            with part.open("wb", buffering=0) as file:
                for start in range(0, source.nbytes, PART_NBYTES):
                    stop = min(start + PART_NBYTES, source.nbytes)
                    for view in source.read(start, stop):
                        while view:
                            view = view[file.write(view) :]
                    if stop % SYNC_NBYTES < PART_NBYTES:  # the last one must not take long: nobody ticks meanwhile
                        os.fdatasync(file.fileno())
                    throttle.passed(stop - start)
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
