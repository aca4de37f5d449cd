"""A copy of the training state at one header, made while training goes on (PROTOCOL.md 15).

Theory of operation. Between the optimizer's step and its next one the state is still, except for what a forward pass
writes. So the training thread copies only that, and a thread of the snapshot's own copies the rest during forward and
backward; before the optimizer writes again, `settle` waits for what is left, which is as a rule nothing. The copy is
one run of host memory, whose pages that thread touches first, so that no page fault falls on training.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from chaos_lightning.errors import DeadlineError, StateError
from chaos_lightning.replication.memory import as_bytes, host_view, region

_ALIGNMENT = 64
_BLOCK_NBYTES = 4 << 20


def available_nbytes() -> int:
    """Memory that this machine can give without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


class Snapshot:
    """See the module.

    Args:
        tensors: Live, in their fixed order.
        volatile: Names of those that change before the optimizer's next step: they are copied here and now.
        cap_nbytes: Limit of the copy; 0: half of the memory that is available.

    Raises:
        StateError: The state is larger than the cap.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, Tensor]], *, volatile: Collection[str] = (), cap_nbytes: int = 0
    ) -> None:
        self.nbytes = sum(t.numel() * t.element_size() for _, t in tensors)
        cap = cap_nbytes or available_nbytes() // 2
        if self.nbytes > cap:
            raise StateError(
                f"a snapshot of {self.nbytes} bytes is over the limit of {cap}: newcomers come in by a pause, or get "
                "their state from members with more memory"
            )
        self.tensors: list[tuple[str, Tensor]] = []
        """The copies, complete once `settle` returned."""
        self._pending: list[tuple[str, Tensor, Tensor]] = []
        room = sum(-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for _, t in tensors)
        self._memory = torch.empty(room, dtype=torch.uint8)
        at = 0
        with torch.no_grad():
            for name, tensor in tensors:
                nbytes = tensor.numel() * tensor.element_size()
                copy = self._memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
                at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                if name in volatile:
                    copy.copy_(tensor)
                else:
                    self._pending.append((name, tensor.detach(), copy))
                self.tensors.append((name, copy))
        self._done = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="chaos-snapshot", daemon=True).start()

    @property
    def complete(self) -> bool:
        return self._done.is_set()

    def settle(self, timeout_s: float = 60.0) -> None:
        """Waits until everything is copied: the optimizer may write afterwards.

        Raises:
            DeadlineError: It was not within the timeout.
        """
        if not self._done.wait(timeout_s):
            raise DeadlineError(f"copying {self.nbytes} bytes of training state took longer than {timeout_s:g} s")
        if self._error is not None:
            raise StateError(f"the training state could not be copied: {self._error}") from self._error

    def _run(self) -> None:
        try:
            for name, tensor, copy in self._pending:
                self._copy(name, tensor, copy)
        except BaseException as error:
            self._error = error
        finally:
            self._pending = []
            self._done.set()

    @staticmethod
    @torch.no_grad()
    def _copy(name: str, tensor: Tensor, copy: Tensor) -> None:
        if tensor.device.type != "cpu":
            copy.copy_(tensor)
            return
        # numpy copies without the GIL and without a team of threads, for which training has no cores to spare
        source, target = region(name, tensor), np.frombuffer(host_view(as_bytes(copy)), np.uint8)
        for start in range(0, source.nbytes, _BLOCK_NBYTES):
            stop = min(start + _BLOCK_NBYTES, source.nbytes)
            np.copyto(target[start:stop], np.frombuffer(source.read(start, stop), np.uint8))
