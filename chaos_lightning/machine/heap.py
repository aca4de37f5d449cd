"""Tunes glibc's allocator: how freed memory is kept or returned. Does nothing with other C libraries."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NAMES = {
    _M_TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
    _M_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_",
    _M_ARENA_MAX: "MALLOC_ARENA_MAX",
}
"""Environment variables by which users set the allocator's values."""
_MOST_MMAP_THRESHOLD_NBYTES = 32 << 20
"""Largest value that glibc takes (bytes)."""
_LARGE_NBYTES = 1 << 20


def _set(*values: tuple[int, int]) -> bool:
    """Sets allocator parameters, unless the user has set one of them by its environment variable; returns whether it
    did.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(_NAMES[which] in os.environ for which, _ in values):
        return False
    return all(mallopt(which, value) for which, value in values)


def keep_heap(nbytes: int) -> bool:
    """Makes the allocator keep up to `nbytes` of freed memory. Returns False if that cannot be set.

    Autograd allocates all gradients anew in each step; if their pages were given back in between, each 4 KiB of them
    would cost a page fault (a tenth of a small step).
    """
    trim = min(2 * nbytes + (64 << 20), (1 << 31) - 1)
    return _set((_M_TRIM_THRESHOLD, trim), (_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD_NBYTES))


def give_back_large() -> bool:
    """Makes the allocator return freed blocks of 1 MiB or more at once, and use one heap for all threads.

    Returns False where one of both cannot be set. Left to itself it takes pieces of up to 32 MiB from its heap once one
    of that size was freed. A follower's staged pushes come and go beside what stays, so their memory was not given
    back: 2 to 4 bytes per parameter.

    And threads have heaps of their own, each of which keeps what was freed in it; a follower starts threads for each
    push: 7 MiB.
    """
    large = _set((_M_MMAP_THRESHOLD, _LARGE_NBYTES))
    return _set((_M_ARENA_MAX, 1)) and large
