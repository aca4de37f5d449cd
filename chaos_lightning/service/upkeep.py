"""Removes the folder of a service's job that nobody needs any more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from chaos_lightning.service.sqlite_store import FileLock


def remove_unless_served(folder: Path, store: Path, unneeded: Callable[[], bool] = lambda: True) -> bool:
    """Removes a folder, unless a server uses the store in it; returns whether it is gone.

    Args:
        folder: Folder to remove.
        store: File of the store.
        unneeded: Asked while the store is locked, so that nobody begins anew in it meanwhile.

    Raises:
        OSError: A file cannot be removed.
    """
    lock = FileLock(store)
    try:
        if not (lock.take() and unneeded()):
            return False
        shutil.rmtree(folder)
        return True
    finally:
        lock.close()
