"""Who this process is while it sets up: the truth where it can be known, else what does the least harm.

Theory of operation. A member learns its rank when it enters the job, at its first batch. But `setup`, `on_fit_start`,
loggers and the making of loaders come sooner, and ask. So before them this process looks who is there. Where members
are in, it will be the next one: rank W of W + 1, and never the writer. Where nobody is in, it is a founder, or comes
right after one. Those of one machine agree by lock files: the first is rank 0 of the members that the job starts with,
the next one rank 1, and so on. Alone with `min_nodes=1` that is the truth. Where several founders are wanted, or
somebody is waiting already, only the scheduler's machine has a rank 0, so that there is one at most; with a scheduler
elsewhere there is none, and who becomes the writer makes up at its first batch for what Lightning writes as rank 0.
Of several schedulers' machines, that of the last one named counts, whoever leads: all go by the same one.

Who validates, tests or predicts before fit takes such a place, too, so that one of the processes writes, and keeps it
until fit: else one that comes when another is through would write as well. All Trainers of a process share it.

The founders' order in the job is the order in which they come, so a founder may get another rank at its first batch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ChaosError
from chaos_lightning.runtime.access import is_local, split_endpoint
from chaos_lightning.runtime.channel import fetch_status
from chaos_lightning.runtime.config import EngineConfig
from chaos_lightning.runtime.credentials import Credentials
from chaos_lightning.runtime.hosting import listens
from chaos_lightning.strategies.preparing import lock_path, open_lock

_LOOK_TIMEOUT_S = 5.0
_MOST_FOUNDERS = 4096


class Place:
    """The place of one process in one fit, until it enters the job, or until the object is no longer needed.

    Attributes:
        rank: Its own.
        world_size: Of the job.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.leave: Callable[[], object] = lambda: None
        """The job says from here on who this process is. Idempotent."""
        status = _status(config)
        members = _members(status)
        if members:
            self.rank, self.world_size = members, members + 1
            return
        least = max(1, config.min_nodes)
        # With the chain in etcd each machine names its own candidate first, and all of them the same one last.
        here = is_local(split_endpoint(config.endpoints[-1])[0])
        if not here and (least > 1 or status.get("streams")):
            self.rank, self.world_size = 1, max(2, least)
            return
        self.rank = self._number(config)
        self.world_size = max(least, self.rank + 1)

    def _number(self, config: EngineConfig) -> int:
        """This process's number among those of this machine that set up for this job now."""
        number = 0
        while number < _MOST_FOUNDERS:
            path = _path(config, number)
            file = FileIO(open_lock(path), "r+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                number += 1
                continue
            if _is(file, path):
                self.leave = weakref.finalize(self, _release, file, path, os.getpid())
                break
            file.close()  # whoever had it took the file away with it
        return number


_evaluating: weakref.WeakValueDictionary[Path, Place] = weakref.WeakValueDictionary()


def place_to_evaluate(config: EngineConfig) -> Place:
    """Of this process before it trains; whoever evaluates holds it."""
    key = _path(config, 0)
    place = _evaluating.get(key)
    if place is None:
        place = _evaluating[key] = Place(config)
    return place


def end_evaluating(config: EngineConfig) -> None:
    """This process is about to take a place in a fit."""
    place = _evaluating.pop(_path(config, 0), None)
    if place is not None:
        place.leave()


def _release(file: FileIO, path: Path, owner: int) -> None:
    """Unlocks explicitly: a process forked meanwhile, such as a loader's worker, has the file open, too. In such a one
    nothing is done."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            path.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def _is(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _path(config: EngineConfig, number: int) -> Path:
    return lock_path(f"{config.job}-{config.endpoints[0]}-founder-{number}")


def _status(config: EngineConfig) -> dict[str, Any]:
    """What the scheduler says; nothing if there is none. Whatever is wrong with it is told when this process joins."""
    if not any(listens(endpoint) for endpoint in config.endpoints):
        return {}
    with contextlib.suppress(ChaosError):
        credentials = Credentials.load(config.keys_dir, config.token_file)
        status = fetch_status(config.endpoint, credentials, timeout_s=_LOOK_TIMEOUT_S)
        if status.get("job") == config.job and not status.get("finished"):
            return status
    return {}


def _members(status: dict[str, Any]) -> int:
    """How many members are in and live."""
    return sum(not m.get("dead") for m in (status.get("machine") or {}).get("members", ()))
