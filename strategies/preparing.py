"""prepare_data on machines that share nothing: each machine for itself, its processes one after the other.

Theory of operation. Lightning lets one process prepare data while the others wait at a barrier. Here there is no
barrier: who is setting up knows nobody. So every process prepares data, under a lock file of its machine and job; the
first one downloads, the next ones find everything there, as prepare_data is meant to be written anyway. A process
alone on its machine takes no lock.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

from chaos_lightning.strategies.environment import ChaosEnvironment


class DataTurn:
    """From `setup_environment`, just before prepare_data, until the barrier that follows it."""

    def __init__(self, environment: ChaosEnvironment) -> None:
        self._environment = environment
        self._file: IO[str] | None = None

    def begin(self, job: str) -> None:
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
            return
        path = os.path.join(tempfile.gettempdir(), f"chaos-lightning-{os.getuid()}-{job}.lock")
        self._file = open(path, "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._environment.preparing_data = True

    def end(self) -> None:
        self._environment.preparing_data = False
        if self._file is not None:
            self._file.close()
            self._file = None
