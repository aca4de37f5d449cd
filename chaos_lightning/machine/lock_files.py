"""Opens lock files by which one user's processes on a machine coordinate while no server runs.

They lie where everybody may write: one is never followed as a link, and must belong to this user.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from chaos_lightning.errors import ConfigurationError


def lock_path(job: str) -> Path:
    """Returns the path of this user's lock file for a job."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", job)
    return Path(tempfile.gettempdir()) / f"chaos-lightning-{os.getuid()}-{name}.lock"


def open_lock(path: Path) -> int:
    """Opens or makes a lock file; refuses a link or another user's file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"the lock file {path}, by which processes of this machine set up in turn, cannot be opened "
            f"({error.strerror}); a link or another user's file there is not used: remove it, or set TMPDIR"
        ) from error
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        return file
    os.close(file)
    raise ConfigurationError(
        f"the lock file {path}, by which processes of this machine set up in turn, is not a file of this user "
        f"(owner {status.st_uid}, expected {os.getuid()}): remove it, or set TMPDIR"
    )
