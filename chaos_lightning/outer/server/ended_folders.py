"""Removes the folders of outer jobs that have ended, and says beforehand when each will be removed.

Theory of operation. A whole server looks when it starts. A folder goes once its job has ended and nothing in it was
written for a month. One stays if its server runs, if its chain cannot be read, or if there is something in it that no
server wrote, such as an export. So does one whose last version a cluster on this machine may still need: a cluster that
was in the job and whose process lives. For a cluster elsewhere that comes back a server is started on the folder, and
that writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import FORGOTTEN_S
from chaos_lightning.machine.process_table import host_identity, process_state
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.upkeep import remove_unless_served

CHAIN = "chain.sqlite"
ENDED = "-ended-"
"""Text between the name of a server's folder and the time at which it was put away."""


@dataclass(frozen=True, slots=True)
class EndedFolder:
    """Folder of a job that has ended.

    Attributes:
        path: Path of the folder.
        nbytes: Size of its files, in bytes.
        goes_at: Wall time (s) from which on a server that starts removes it.
    """

    path: Path
    nbytes: int
    goes_at: float

    @property
    def words(self) -> str:
        """Sentence about the folder: its job has ended, and when it will be removed."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.goes_at))
        return f"{self.path} ({self.nbytes / 1e6:.1f} MB) of a job that has ended is removed on {day}, or later"


def ended_folders(folder: Path) -> list[EndedFolder]:
    """Returns the folders, beside a server's own, whose jobs have ended and that will be removed one day.

    Args:
        folder: Folder of the server.
    """
    found = []
    for path in _beside(folder):
        with contextlib.suppress(OSError, ChaosError):
            if (one := _judged(path)) is not None:
                found.append(one)
    return found


def clean_up(folder: Path, now: float) -> list[EndedFolder]:
    """Removes the folders that are due for it, and returns them.

    Args:
        folder: Folder of the server, which stays.
        now: Wall time, s.
    """
    gone = []
    for one in ended_folders(folder):
        if one.goes_at > now:
            continue
        with contextlib.suppress(OSError, ChaosError):
            if remove_unless_served(one.path, one.path / CHAIN):
                gone.append(one)
    return gone


def _beside(folder: Path) -> Iterator[Path]:
    """Yields the folders that this server moved away after a job, and those of this user's other servers in the default
    place.
    """
    try:
        from_default = folder.parent.name == "chaos-lightning" and folder.name.startswith("outer-")
        places = sorted(folder.parent.glob("outer-*" if from_default else f"{folder.name}{ENDED}*"))
    except OSError:
        return
    yield from (place for place in places if place != folder and place.is_dir() and not place.is_symlink())


def _judged(path: Path) -> EndedFolder | None:
    """Returns the facts of a folder that will be removed one day; None for one that must stay."""
    store = path / CHAIN
    if not store.is_file():
        return None
    with SqliteStore(store, read_only=True) as opened:
        chain = load_chain(opened)
    if chain.ended is None or _is_needed(chain) or not _only_ours(path, chain):
        return None
    # Reading the chain, as here, touches the others.
    files = [each.stat() for each in path.rglob("*") if each.is_file() and not each.name.endswith(("-shm", ".lock"))]
    written = max(each.st_mtime for each in files if each.st_size)
    return EndedFolder(path, sum(each.st_size for each in files), written + FORGOTTEN_S)


def _is_needed(chain: OuterChain) -> bool:
    """Returns whether a process of the job still runs on this machine, which may not have the last version yet."""
    places = [known.process for known in chain.incarnations.values() if known.process is not None]
    here = [place for place in places if place.host == host_identity()]
    return any(process_state(place.pid, place.pid_start) not in ("", "gone") for place in here)


def _only_ours(path: Path, chain: OuterChain) -> bool:
    """Returns whether the folder contains nothing but the chain and the followers' shards."""
    for each in path.iterdir():
        if each.name.startswith(CHAIN):
            continue
        if not each.is_dir() or (each.name not in {*chain.cut, *chain.starts}):
            return False
        if any(file.is_file() and not file.name.startswith("v") for file in each.rglob("*")):
            return False
    return True
