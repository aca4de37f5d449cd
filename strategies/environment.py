"""Gives Lightning rank and world size. They come from the present view, not from RANK and WORLD_SIZE.

Theory of operation. There are three phases. *Outside a job* this process is rank 0 of 1 and works alone. It also works
alone in validate, test and predict before fit, but has there the rank that it expects in fit (place.py), so that only
one of the processes that run the script writes. *Setting up* for fit, it has the rank that it expects at its first
batch, and collectives do nothing. *In the job* rank and world size are those of the view at the last committed slot;
the training thread sets them itself, so they never change while it works. Once this process has left the job, or was
put out, it must not look like the writer: it is rank 1 of 2.
"""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

ALONE = (0, 1)
ASIDE = (1, 2)


def local_rank() -> int:
    """Returns this process's index on its machine, which selects the accelerator."""
    return int(os.environ.get("LOCAL_RANK", "0"))


class ChaosEnvironment(ClusterEnvironment):
    """Cluster environment that gives Lightning the rank and world size of the present view. One per strategy."""

    def __init__(self) -> None:
        self._rank, self._world_size = ALONE
        self.preparing_data = False
        """Whether every process counts as its machine's first one: each prepares data then, one after the other."""

    def place(self, rank: int, world_size: int) -> bool:
        """Sets this process's rank and the world size.

        Returns:
            Whether this process has become the writer now.
        """
        promoted = rank == 0 and self._rank != 0
        self._rank, self._world_size = rank, world_size
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning's own place for it
        return promoted

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._world_size

    def set_global_rank(self, rank: int) -> None:
        """Ignores the rank: the view gives it."""

    def set_world_size(self, size: int) -> None:
        """Ignores the size: the view gives it."""

    def local_rank(self) -> int:
        return 0 if self.preparing_data else local_rank()

    def node_rank(self) -> int:
        """Returns 0 on every machine, so that each machine prepares data for itself: machines come and go."""
        return 0

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Returns an address that nobody uses, as there is no process group."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        """Returns False, so that Lightning never picks this environment by itself; the strategy brings it."""
        return False


class OneProcess(ChaosEnvironment):
    """Environment of a cluster of one process, which ignores the variables of the launcher that started it."""

    def local_rank(self) -> int:
        return 0
