"""Opens event logs safely in folders where others may write: links, pipes and other users' files are refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_to_append(path: Path) -> int:
    """Opens this user's file for appending, or makes it; returns the descriptor.

    A new file is made exclusively, so it is this process's whatever a network file system says of its owner.

    Raises:
        OSError: Something else is at that path.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        file = _regular(path, flags, "a link or special file is there; remove it, or name another log_dir")
    status = os.fstat(file)
    if stat.S_ISCHR(status.st_mode) or (status.st_uid == os.geteuid() and status.st_nlink == 1):
        return file
    os.close(file)
    raise OSError(
        errno.EPERM,
        f"the file there belongs to user {status.st_uid} and has {status.st_nlink} names; expected user "
        f"{os.geteuid()} and one name: remove it, or name another log_dir",
        str(path),
    )


def open_to_read(path: Path) -> int:
    """Opens a regular file, or one that a link leads to, for reading; returns the descriptor.

    Raises:
        OSError: Something else is at that path, or nothing.
    """
    return _regular(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, "no regular file: remove it, or name another")


def _regular(path: Path, flags: int, otherwise: str) -> int:
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(error.errno, otherwise, str(path)) from None
        raise
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode) or stat.S_ISCHR(mode):  # only root makes devices
        return file
    os.close(file)
    raise OSError(errno.EINVAL, otherwise, str(path))
