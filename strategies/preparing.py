"""Runs prepare_data on every machine, in one process of the machine after the other, since machines share no files.

Theory of operation. Lightning lets one process prepare data while the others wait at a barrier. Here there is no
barrier: a process that is setting up knows no other. So every process prepares data, under a lock file of its machine,
user and job; the first one downloads, the next ones find everything there, as prepare_data is meant to be written
anyway. A process alone on its machine takes no lock.

The lock file (machine/lock_files.py) holds the process id of the one that has the lock, for the message of those who
wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from chaos_lightning.errors import DeadlineError
from chaos_lightning.machine.lock_files import lock_path, open_lock
from chaos_lightning.strategies.environment import ChaosEnvironment

_log = logging.getLogger("chaos_lightning")
_LOOK_INTERVAL_S = 0.1


class DataTurn:
    """This process's turn to run prepare_data: from `setup_environment` to the barrier after prepare_data.

    Args:
        environment: Environment, which is told that every process counts as its machine's first one meanwhile.
        deadline_s: Seconds to wait for this process's turn. The others' downloads count.
    """

    def __init__(self, environment: ChaosEnvironment, deadline_s: float = 3600.0) -> None:
        self._environment = environment
        self._deadline_s = deadline_s
        self._file: int | None = None

    def begin(self, job: str) -> None:
        """Waits for this process's turn, if this machine has other processes.

        Raises:
            ConfigurationError: The lock file is a link, or not this user's.
            DeadlineError: Another process did not finish in time; the message says which.
        """
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
            return
        self.end()
        path = lock_path(job)
        file = open_lock(path)
        try:
            self._lock(file, path, job)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._environment.preparing_data = True

    def _lock(self, file: int, path: Path, job: str) -> None:
        end = time.monotonic() + self._deadline_s
        said = ""
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pid = os.pread(file, 32, 0).decode(errors="replace").strip()
                holder = f"process {pid} of this machine" if pid else "another process of this machine"
            if holder != said:
                said = holder
                _log.info("%s prepares data for job %r; this one comes after it", holder, job)
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"{holder} has been preparing data for job {job!r}, or holds {path} for "
                    f"another reason, and this process has waited {self._deadline_s:g} s for its turn; if that process "
                    "hangs, end it and start again"
                )
            time.sleep(_LOOK_INTERVAL_S)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)

    def end(self) -> None:
        """Ends this process's turn to prepare data. Idempotent. Unlocks the file explicitly, since a process forked
        in prepare_data has it open, too.
        """
        self._environment.preparing_data = False
        if self._file is not None:
            file, self._file = self._file, None
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)
