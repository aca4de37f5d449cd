"""Member processes that benchmarks kill, freeze and replace: what runs in them, and a trap that kills at one instant.

A member trains a plain loop on the engine, reports every committed step over its pipe with CLOCK_MONOTONIC, and obeys
orders between steps: ("hash", step) sends a SHA-256 of parameters and optimizer state at that step, ("trap", way,
chosen) sets a `Trap`, ("hold", seconds) holds the interpreter's lock for so long, ("gather", step, count, nbytes)
gathers so often at that step and tells what memory the process took before and after, ("end", step) finishes the job
there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import select
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import compute_alone, state_model

READ_BY_THEN_S = 0.15
BATCH = 32
GATHERS_BEFORE = 8
"""Until buffers of all sizes have been made."""
WAYS = ("header", "bytes", "split")
"""What a trapped commit root has sent when it dies; see benchmarks/kill.py."""


def fingerprint(model: Any, optimizer: Any) -> str:
    """SHA-256 over parameters and optimizer state, by torch and hashlib alone."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))
    state = optimizer.state_dict()["state"]
    for index in sorted(state):
        for key, value in sorted(state[index].items()):
            flat = torch.as_tensor(value).contiguous().flatten().view(torch.uint8)
            digest.update(f"{index}.{key}".encode() + memoryview(flat.numpy()))
    return digest.hexdigest()


def hold_the_lock(seconds: float) -> None:
    """One long call into C in which no other thread of this process runs Python."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def own_memory_nbytes() -> int:
    """Memory that is this process's alone."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


class Trap:
    """Kills this process, the commit root, once the header of slot `seq` has reached one survivor only (see WAYS)."""

    def __init__(self, engine: Any, pipe: Connection, way: str, chosen: int, seq: int) -> None:
        from chaos_lightning.protocol.codec import decode_peer

        shell = engine._shell
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
        for link in self._links._links.values():
            while link.open and link._queue:  # what is not withheld must have left this process
                select.select([], [link._fd], [], 1.0)
                link._write()
        # What was sent by reference must have been read out of this process's memory, and nothing tells when it was.
        time.sleep(READ_BY_THEN_S)
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
    """One training process of ours; see the module.

    Args:
        pipe: To the benchmark.
        endpoint: Of the scheduler, or of all candidates.
        name: Its own.
        state_mib: Parameters and Adam state.
        logs: Folder of its event log.
        pace_s: Pause in each step, for heavier computing that leaves the processors to others.
        environment: More of it. CHAOS_HOST: it counts as on a machine of its own, and no memory is shared.
            CHAOS_STORE: it hosts a scheduler on this chain.
    """
    import torch

    from chaos_lightning.collectives.layout import Section
    from chaos_lightning.errors import FencedError
    from chaos_lightning.lab.emulation import enter
    from chaos_lightning.member.engine import Engine
    from chaos_lightning.replication.access import ModuleState
    from chaos_lightning.replication.table import state_hash
    from chaos_lightning.settings import EngineConfig

    enter(environment or {})
    compute_alone()
    torch.manual_seed(0)
    model = state_model(state_mib)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    state = ModuleState(model, optimizer)
    width = int(next(model.parameters()).shape[1])
    draw = torch.Generator().manual_seed(os.getpid())
    engine = Engine(
        EngineConfig(
            endpoint=endpoint,
            name=name,
            host_scheduler="CHAOS_STORE" in os.environ,
            log_dir=logs,
            join_timeout_s=60,
            step_timeout_s=60,
            by_reference="CHAOS_HOST" not in os.environ,
        )
    )
    engine.prepare(sections=[Section("all", list(model.named_parameters()))])
    engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=state)
    pipe.send(("in", time.monotonic_ns(), engine.member_id))
    wanted: set[int] = set()
    last = backwards = gathers = gather_nbytes = before_nbytes = 0
    gather_at = -1
    while not last or engine.header.step < last:
        while pipe.poll():
            order, *values = pipe.recv()
            if order == "hash":
                wanted.add(values[0])
            elif order == "trap":
                Trap(engine, pipe, values[0], values[1], engine.header.seq + 2)
            elif order == "hold":
                pipe.send(("held", time.monotonic_ns()))
                hold_the_lock(values[0])
            elif order == "gather":
                gather_at, gathers, gather_nbytes = values
            elif order == "end":
                last = values[0]
        if engine.header.step == gather_at:
            gather_at = -1
            for index in range(GATHERS_BEFORE + gathers):
                if index == GATHERS_BEFORE:
                    before_nbytes = own_memory_nbytes()
                engine.gather("benchmark", bytes([index % 256]) * gather_nbytes)
            pipe.send(("memory", before_nbytes, own_memory_nbytes()))
        try:
            optimizer.zero_grad(set_to_none=True)
            engine.arm(coefficient=1.0)
            model(torch.randn(BATCH, width, generator=draw)).square().mean().backward()
            backwards += 1
            time.sleep(pace_s)
            header = engine.step(weight=1.0, coefficient=1.0)
            now = time.monotonic_ns()
            optimizer.step()
            pipe.send(
                ("step", now, header.seq, header.step, header.hash, len(header.contributors), engine.rank, backwards)
            )
            if header.step in wanted:
                value = state_hash(state.tensors())
                engine.events.emit("state_hash", seq=header.seq, step=header.step, head=header.hash, hash=value)
                pipe.send(("hash", header.step, header.hash, fingerprint(model, optimizer)))
            if header.boundary:
                engine.boundary(state)
        except FencedError:
            pipe.send(("fenced", time.monotonic_ns()))
            engine.rejoin(state)
            backwards = 0
            pipe.send(("in", time.monotonic_ns(), engine.member_id))
    engine.finish()
    engine.close()
    pipe.send(("bye",))
