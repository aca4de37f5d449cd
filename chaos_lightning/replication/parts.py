"""Names temporary files (`.part`) by the process that writes them, and removes those that dead processes left behind.

Theory of operation. A part's name says of which machine and process its writer is. Who writes next into the same folder
removes what no living process of this machine writes any more. Of a writer on another machine (or where there is no
process table) only time tells: its part is removed once nothing has been written to it for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from pathlib import Path

from chaos_lightning.machine.process_table import host_identity, process_state, start_time

OLD_S = 24 * 3600.0
_PART = re.compile(r"\..+\.(?P<host>[0-9a-f]{16})-(?P<pid>[0-9]{1,10})-(?P<start>[0-9]{1,20})-[0-9a-f]{8}\.part")


def part_of(path: Path) -> Path:
    """Returns a new temporary file beside `path`, named after this process, which writes the content there first."""
    pid = os.getpid()
    return path.with_name(f".{path.name}.{_here()}-{pid}-{start_time(pid)}-{os.urandom(4).hex()}.part")


def sweep(folder: Path) -> None:
    """Removes temporary files in this folder whose writers have ended; keeps those whose writer lives or may live."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".*.part"):
            named = _PART.fullmatch(path.name)
            if named is not None and _is_left(path, named["host"], int(named["pid"]), int(named["start"])):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def _here() -> str:
    return hashlib.blake2b(host_identity().encode(), digest_size=8).hexdigest()


def _is_left(path: Path, host: str, pid: int, start: int) -> bool:
    if host == _here() and start and (state := process_state(pid, start)):
        return state == "gone"
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > OLD_S
    return False
