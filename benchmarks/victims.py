"""Runs members that benchmarks kill, freeze and replace, and a trap that kills a member at a chosen instant.

Besides the orders of members.py they obey ("trap", way, chosen), which sets a `Trap`, ("hold", seconds), which holds
the interpreter's lock for so long, and ("gather", step, count, nbytes), which gathers so often at that step and tells
what memory the process took before and after.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.members import Trainee, config_of, model_and_adam
from chaos_lightning.testing.processes import hold_the_lock

READ_BY_THEN_S = 0.15
GATHERS_BEFORE = 8
"""Until buffers of all sizes have been made."""
WAYS = ("header", "bytes", "split")
"""Parts that a trapped commit root has sent when it dies; see benchmarks/kill.py."""


def own_memory_nbytes() -> int:
    """Returns the bytes of memory that only this process uses."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def write_out(links: Any) -> None:
    """Sends all bytes that wait at a member's links; runs in the loop's thread."""
    for link in links._links.values():
        while link.open and link._queue:
            select.select([], [link._fd], [], 1.0)
            link._write()
    # Bytes sent by reference must have been read out of this process's memory, and nothing tells when they were.
    time.sleep(READ_BY_THEN_S)


class Trap:
    """Kills its own process, the commit root, once the header of slot `seq` has reached one survivor only (see
    WAYS).
    """

    def __init__(self, engine: Any, pipe: Connection, way: str, chosen: int, seq: int) -> None:
        from chaos_lightning.protocol.codec import decode_peer

        shell = engine._made.shell
        self._decode, self._links, self._pipe, self._way, self._seq = decode_peer, shell.links, pipe, way, seq
        self._events = engine.events
        others = [m for m in engine.view.ids() if m != engine.member_id]
        self._chosen, self._other = others[chosen], others[1 - chosen]
        self._message, self._chunk = shell.links.message, shell.reducer._send
        self._sizes: dict[int, int] = {}
        shell.links.message, shell.reducer._send = self.message, self.chunk

    def chunk(self, peer: str, kind: Any, view: Any, seq: int, start: int, payload: memoryview | None) -> None:
        from chaos_lightning.transport.frames import FrameType

        if seq == self._seq and kind == FrameType.DOWN:
            place = self._sizes.setdefault(start, len(self._sizes))
            if self._way == "bytes" and peer == self._other:
                return
            if self._way == "split" and (place % 2 == 0) is (peer == self._other):
                return
        self._chunk(peer, kind, view, seq, start, payload)

    def message(self, peer: str, payload: bytes, *ways: Any) -> None:
        from chaos_lightning.protocol.types import Header

        value = self._decode(payload)
        if not isinstance(value, Header) or value.seq != self._seq:
            self._message(peer, payload, *ways)
            return
        if peer != self._chosen:
            return
        self._message(peer, payload, *ways)
        write_out(self._links)
        self._events.emit("fault_injected", kind="sigkill", phase=f"handing out, {self._way}", step=value.step)
        self._pipe.send(("trap", time.monotonic_ns(), value.seq, value.step, value.hash))
        os.kill(os.getpid(), signal.SIGKILL)


def member(
    pipe: Connection,
    endpoint: str,
    name: str,
    state_mib: float,
    logs: str,
    pace_s: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs one member of this product, which obeys the orders listed in this module.

    Args:
        pipe: Connection to the benchmark.
        endpoint: Endpoint of the scheduler, or of all candidates.
        name: Name of the member.
        state_mib: MiB of parameters and Adam state.
        logs: Folder of its event log.
        pace_s: Pause in each step, in seconds, for heavier computing that leaves the processors to others.
        environment: Additional variables. CHAOS_HOST: it counts as on a machine of its own, and no memory is shared.
            CHAOS_STORE: it hosts a scheduler on this chain.
    """
    from chaos_lightning.errors import FencedError
    from chaos_lightning.testing.emulation import enter

    enter(environment or {})
    config = config_of(
        endpoint=endpoint,
        name=name,
        host_scheduler="CHAOS_STORE" in os.environ,
        log_dir=logs,
        by_reference="CHAOS_HOST" not in os.environ,
    )
    trainee = Trainee(pipe, config, *model_and_adam(state_mib))
    trainee.join()
    gather: tuple[int, int, int] | None = None
    while not trainee.over:
        for order, *values in trainee.orders():
            if order == "trap":
                Trap(trainee.engine, pipe, values[0], values[1], trainee.engine.header.seq + 2)
            elif order == "hold":
                trainee.say("held", time.monotonic_ns())
                hold_the_lock(values[0])
            elif order == "gather":
                gather = tuple(values)  # type: ignore[assignment]
        if gather is not None and trainee.engine.header.step == gather[0]:
            gather_often(trainee, *gather[1:])
        try:
            header = trainee.step(after_s=pace_s)
            trainee.report(header)
            trainee.between(header)
        except FencedError:
            trainee.rejoin()
    trainee.end()
    trainee.say("bye")


def gather_often(trainee: Trainee, count: int, nbytes: int) -> None:
    """Makes `count` gathers of `nbytes` each; reports how much memory the process used before and after."""
    before = 0
    for index in range(GATHERS_BEFORE + count):
        if index == GATHERS_BEFORE:
            before = own_memory_nbytes()
        trainee.engine.gather("benchmark", bytes([index % 256]) * nbytes)
    trainee.say("memory", before, own_memory_nbytes())
