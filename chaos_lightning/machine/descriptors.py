"""Raises the number of files and connections that this process may open."""

from __future__ import annotations

import contextlib
import resource


def allow_descriptors(count: int) -> int:
    """Raises this process's soft limit of open files to `count`, or to the hard limit if that is lower.

    Returns:
        The limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(count, soft) if soft == resource.RLIM_INFINITY else soft
