"""Copies the training state at one header while training continues (protocol.md 15).

Theory of operation. Between the optimizer's step and its next one the state is still, except for what a forward pass
writes. So the training thread copies only that, and a thread of the snapshot's own copies the rest during forward and
backward; before the optimizer writes again, `settle` waits for what is left, which is as a rule nothing. The copy is
one run of host memory, whose pages that thread touches first, so that no page fault falls on training.

If all who observe can read this process's memory (by_reference.py), the state itself is the snapshot while it is
still, and copying it is put off for `hold_s`. Readers go from the front to the back and say how far they are (`take`);
what none of them lacks is not copied at all. After the hold the copying goes from the back to the front, until it meets
them. `generation` tells readers whether what they have just read was still.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chaos_lightning.errors import DeadlineError, StateError
from chaos_lightning.protocol.types import NO_VIEW
from chaos_lightning.replication.memory import as_bytes, host_view, in_place, region
from chaos_lightning.transport.reference import Generation

_ALIGNMENT = 64
_BLOCK_NBYTES = 4 << 20
_LIMITS_V2 = ("memory.max", "memory.current"), "inactive_file"
_LIMITS_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
"""Files of a control group with its limit and its use, and the entry of memory.stat that counts pages of files."""
LIVE, COPIED, GONE = 1, 2, 3
"""Values of `generation`: the state itself may be read, or the copy of it, or nothing any more."""


def available_nbytes() -> int:
    """Returns the bytes of memory that this process can still use without swapping, within the machine and its control
    groups.
    """
    left = [1 << 62]
    with open("/proc/meminfo") as lines:
        left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError):
        left += left_in_groups(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    return max(0, min(left))


def left_in_groups(membership: str, root: Path) -> list[int]:
    """Returns the bytes that each memory limit of the process's control groups (container, batch system) still leaves.

    Args:
        membership: Names of the process's control groups, as the text of /proc/self/cgroup.
        root: Folder of all groups.
    """
    found = []
    for controllers, place in [line.split(":", 2)[1:] for line in membership.splitlines()]:
        if controllers and "memory" not in controllers.split(","):
            continue
        names, of_files = _LIMITS_V1 if controllers else _LIMITS_V2
        group = (root / "memory" if controllers else root) / place.strip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                most, used = (int((folder / name).read_text()) for name in names)
                kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                found.append(most - used + int(kinds.get(of_files, 0)))  # pages of files are given back
    return found


class Snapshot:
    """Copy of the training state at one header, made while training continues.

    Args:
        tensors: Live tensors of the state, in their fixed order.
        volatile: Names of the tensors that change before the optimizer's next step: they are copied here and now.
        cap_nbytes: Limit of the copy; 0: half of the memory that is available.
        readers: Members that read this process's memory; nobody else needs the copy.
        hold_s: Seconds to wait for the readers before the tensors are copied.

    Raises:
        StateError: The state is larger than the cap.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        *,
        volatile: Collection[str] = (),
        cap_nbytes: int = 0,
        readers: Collection[str] = (),
        hold_s: float = 0.0,
    ) -> None:
        self.nbytes = sum(t.numel() * t.element_size() for _, t in tensors)
        cap = cap_nbytes or available_nbytes() // 2
        if self.nbytes > cap:
            raise StateError(
                f"a snapshot of {self.nbytes} bytes is over the limit of {cap}: newcomers come in by a pause, or get "
                "their state from members with more memory"
            )
        self.tensors: list[tuple[str, Tensor]] = []
        """Copies of the tensors; all of them, once `settle` returned and if `whole`."""
        self.generation = Generation()
        self.readers = frozenset(readers) if all(in_place(t) for _, t in tensors) else frozenset()
        """Members that may read the state itself; none if a tensor is no plain host memory."""
        self._taken = dict.fromkeys(self.readers, 0)
        self._hold_s = hold_s
        self._live: list[tuple[Tensor, int]] = []
        """Tensors that hold the bytes until `settle`, each with its end in the state's address space."""
        self._pending: list[tuple[str, Tensor, Tensor, int]] = []
        room = sum(-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for _, t in tensors)
        self._memory = torch.empty(room, dtype=torch.uint8)
        _advise(self._memory)
        at = stop = 0
        with torch.no_grad():
            for name, tensor in tensors:
                nbytes = tensor.numel() * tensor.element_size()
                stop += nbytes
                copy = self._memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
                at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                if name in volatile:
                    copy.copy_(tensor)
                    self._live.append((copy, stop))
                else:
                    self._pending.append((name, tensor.detach(), copy, stop))
                    self._live.append((tensor.detach(), stop))
                self.tensors.append((name, copy))
        self._copied_from = self.nbytes
        """Address from which on everything is copied."""
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._state = LIVE
        self.generation.set(NO_VIEW, LIVE)
        threading.Thread(target=self._run, name="chaos-snapshot", daemon=True).start()

    @property
    def complete(self) -> bool:
        return self._done.is_set()

    @property
    def whole(self) -> bool:
        """Whether all of the state was copied, because no reader took any of it before."""
        return self.complete and self._error is None and self._copied_from == 0

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until the copy is finished, without hastening it.

        Raises:
            DeadlineError: The copy was not finished within the timeout.
            StateError: The copy has failed.
        """
        if not self._done.wait(timeout_s):
            raise DeadlineError(f"copying {self.nbytes} bytes of training state took longer than {timeout_s:g} s")
        if self._error is not None:
            raise StateError(f"the training state could not be copied: {self._error}") from self._error

    def settle(self, timeout_s: float = 60.0) -> None:
        """Hastens the copy and waits until all bytes that a reader still lacks are copied; afterwards the optimizer may
        write.

        Raises:
            DeadlineError: The copy was not finished within the timeout.
            StateError: The copy has failed.
        """
        self._go.set()
        try:
            self.wait(timeout_s)
        finally:
            self._turn(COPIED)

    # ------------------------------------------------------------------ for readers of this process's memory

    def take(self, reader: str, nbytes: int) -> None:
        """Notes that this reader has the first `nbytes` bytes of the state."""
        with self._lock:
            if reader in self._taken:
                self._taken[reader] = max(self._taken[reader], nbytes)
        if self._taken_nbytes() >= self.nbytes:
            self._go.set()

    def places(self) -> tuple[int, list[int]]:
        """Returns the generation, which must be the same after reading, and the address of each tensor in memory (0:
        gone).
        """
        with self._lock:
            if self._state == LIVE:
                return LIVE, [t.data_ptr() for t, _ in self._live]
            if self._state == GONE:
                return GONE, [0] * len(self.tensors)
            copies = zip(self.tensors, self._live, strict=True)
            return COPIED, [
                copy.data_ptr() if stop > self._copied_from or live is copy else 0 for (_, copy), (live, stop) in copies
            ]

    def forget(self) -> None:
        """Frees readers' claims on the snapshot: nobody reads it any more."""
        with self._lock:
            self._taken = dict.fromkeys(self._taken, self.nbytes)
        self._turn(GONE)
        self._go.set()

    def _turn(self, state: int) -> None:
        """Announces through `generation` that readers must not use the former memory any more; called before it is
        written or freed.
        """
        with self._lock:
            self._state = max(self._state, state)
            self.generation.set(NO_VIEW, self._state)

    def _taken_nbytes(self) -> int:
        with self._lock:
            return min(self._taken.values(), default=0)

    # ------------------------------------------------------------------ the snapshot's own thread

    def _run(self) -> None:
        try:
            if self.readers:
                self._go.wait(self._hold_s)
            while self._pending:
                name, tensor, copy, stop = self._pending[-1]
                if self.readers and stop <= self._taken_nbytes():
                    break
                self._copy(name, tensor, copy)
                del self._pending[-1]
                self._copied_from = stop - tensor.numel() * tensor.element_size()
            if not self._pending:
                self._copied_from = 0
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


def _advise(memory: Tensor) -> None:
    """Asks the system for huge pages, since touching small pages for the first time takes longer than copying into
    them.
    """
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (memory.data_ptr() + memory.nbytes - first) // mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if pages > 0 and advise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        advise(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
