"""Reads state and reduced bytes straight out of a donor's memory where donor and newcomer share a machine.

Theory of operation. As with gradients (transport/reference.py) one copy by the kernel takes the place of two and of the
network stack, and it is the newcomer that makes it: donors, who train meanwhile, only say where their bytes lie. They
say so to those that have shown on their link that they can read here (`MemoryExport`). That the bytes were still the
right ones is known afterwards: a state that donors rest at is verified by its piece hashes; a snapshot by its own
generation (snapshot.py), which changes before the optimizer writes; a slot's sums by the generation of the open
attempt, which changes before another attempt overwrites them.

Snapshots are taken by `StateReader` (state_reader.py), logged slots by `LogReader`, and what a pull lacks by `deliver`.
"""

from __future__ import annotations

import json
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.protocol.types import Span
from chaos_lightning.replication.bulk import BulkFrame, Type
from chaos_lightning.replication.client import Donor, Sink, elsewhere
from chaos_lightning.replication.published import Published, RefusalError
from chaos_lightning.replication.table import DTYPES, StateTable, TableEntry, dtype_name
from chaos_lightning.replication.work_queue import WorkQueue
from chaos_lightning.transport.reference import MAX_PIECES, Generation, NeighbourMemory, address_of

UNCHECKED = 0
"""Value in place of a generation where none need be looked at: hashes tell whether the bytes were right."""
_LENGTH = struct.Struct("!I")
Readable = Callable[[str], bool]
"""Function that returns whether a member has shown that it can read this process's memory."""


class MemoryExport:
    """Offer of this process's memory to members of the same machine: tells them at which addresses its bytes lie. Any
    thread.

    Args:
        readable: Returns whether the member of this id may read the memory.
        generation: Tells which attempt this process has open.
        results: The buffers that slots are reduced into, in turn.
    """

    def __init__(self, readable: Readable, generation: Generation, results: Sequence[memoryview]) -> None:
        self.readable = readable
        self._generation = generation
        self._results = tuple(results)

    def places(self, item: Published, *, manifest: bool) -> bytes:
        """Returns the memory addresses of a state's tensors, encoded for `Places`.

        Args:
            item: The state, or what stands for it.
            manifest: Send the manifest along.
        """
        if item.snapshot is not None:
            offer = item.snapshot.generation.offer()
            generation, addresses = item.snapshot.places()
            addresses += [r.address for r in item.regions[len(addresses) :]]
        else:
            offer, generation, addresses = self._generation.offer(), UNCHECKED, [r.address for r in item.regions]
        named = [*((n, t, False) for n, t in item.named), *((n, t, True) for n, t in item.attached)]
        rows = [
            [n, dtype_name(t.dtype), list(t.shape), int(attached), t.device.type, address]
            for (n, t, attached), address in zip(named, addresses, strict=True)
        ]
        head = json.dumps({"offer": offer.hex(), "generation": generation, "tensors": rows}).encode()
        return _LENGTH.pack(len(head)) + head + (item.manifest if manifest else b"")

    def buffers(self) -> bytes:
        """Returns the memory addresses of the buffers of reduced bytes, encoded for `Buffers`."""
        at = [(address_of(b), b.nbytes) for b in self._results]
        return json.dumps({"offer": self._generation.offer().hex(), "results": at}).encode()


def refuse_unless(export: MemoryExport | None, peer: str) -> MemoryExport:
    """Returns the given memory export; raises RefusalError if there is none, or the peer may not read this process's
    memory.
    """
    if export is None or not export.readable(peer):
        raise RefusalError("this member's memory is not read from there")
    return export


class Places:
    """Memory addresses of a state's tensors in a donor's process.

    Args:
        data: Bytes from `MemoryExport.places`.

    Raises:
        WireError: The bytes are malformed.
        OSError: The donor's memory cannot be read from here.
    """

    def __init__(self, data: bytes) -> None:
        try:
            (length,) = _LENGTH.unpack_from(data)
            said = json.loads(data[_LENGTH.size : _LENGTH.size + length])
            self.generation = int(said["generation"])
            offer = bytes.fromhex(said["offer"])
            entries: list[TableEntry] = []
            at = 0
            self._addresses: list[int] = []
            for name, dtype, shape, attached, device, address in said["tensors"]:
                nbytes = DTYPES[dtype].itemsize
                for size in shape:
                    nbytes *= int(size)
                shape = tuple(int(size) for size in shape)
                entries.append(TableEntry(str(name), str(dtype), shape, at, nbytes, (), bool(attached), str(device)))
                self._addresses.append(int(address))
                at += nbytes
        except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
            raise WireError(f"malformed places: {error!r}") from error
        self.table = StateTable(tuple(entries))
        """Tensors of the state, without hashes."""
        self.manifest = data[_LENGTH.size + length :]
        self._starts = [e.offset for e in entries]
        self._neighbour = NeighbourMemory(offer)

    @property
    def readable(self) -> bool:
        """Whether all of the state lies in host memory."""
        return all(address or not e.nbytes for e, address in zip(self.table.entries, self._addresses, strict=True))

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the donor's memory blocks (address, length) that contain the bytes [start, stop) of the state."""
        found = []
        at = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            entry, address = self.table.entries[at], self._addresses[at]
            end = min(stop, entry.stop)
            if end > start:
                if not address:
                    raise WireError(f"bytes [{start}, {end}) of the state are not held any more, or not in host memory")
                found.append((address + start - entry.offset, end - start))
                start = end
            at += 1
        return found

    def read(self, start: int, into: Sequence[memoryview]) -> bool:
        """Copies the donor's bytes from offset `start` on into these buffers, each within one tensor; returns whether
        the donor changed nothing during the copy.

        Raises:
            OSError: The donor is gone, or its memory cannot be read.
            WireError: The donor does not hold these bytes any more, or not in host memory.
        """
        buffers = [b for b in into if b.nbytes]
        for first in range(0, len(buffers), MAX_PIECES // 2):
            group = buffers[first : first + MAX_PIECES // 2]
            stop = start + sum(b.nbytes for b in group)
            _, seen = self._neighbour.scatter(self._pieces(start, stop), group)
            if self.generation not in (UNCHECKED, seen):
                return False
            start = stop
        return True


class Buffers:
    """Memory addresses of the reduced bytes in a donor's process.

    Args:
        data: Bytes from `MemoryExport.buffers`.

    Raises:
        WireError: The bytes are malformed.
        OSError: The donor's memory cannot be read from here.
    """

    def __init__(self, data: bytes) -> None:
        try:
            said = json.loads(data)
            self._results = [(int(address), int(nbytes)) for address, nbytes in said["results"]]
            offer = bytes.fromhex(said["offer"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"malformed buffers: {error!r}") from error
        self._neighbour = NeighbourMemory(offer)

    def read(self, seq: int, raw: memoryview, spans: Sequence[Span]) -> bool:
        """Copies the donor's sums of slot `seq` into these ranges of `raw`; returns False if the donor has overwritten
        them by now.

        Raises:
            OSError: The donor is gone.
        """
        address, nbytes = self._results[seq % len(self._results)]
        wanted = [(a, b) for a, b in spans if b > a]
        if any(b > nbytes for _, b in wanted):
            raise WireError(f"slot {seq} has {nbytes} bytes there; wanted were {list(spans)}")
        seen = seq
        for first in range(0, len(wanted), MAX_PIECES):
            group = wanted[first : first + MAX_PIECES]
            pieces = [(address + a, b - a) for a, b in group]
            _, seen = self._neighbour.scatter(pieces, [raw[a:b] for a, b in group])
        # Open is what comes next, or nothing yet; the slot after that is reduced into the same buffer.
        return seen in (seq, seq + 1)


def deliver(donor: Donor, work_queue: WorkQueue, sink: Sink) -> None:
    """Receives the jobs of a donor: reads the bytes out of its memory if possible, else requests them over the
    connection.

    What was read counts after the sink has verified it.
    """
    places = _places_of(donor) if sink.request is Type.GET_STATE and donor.source.beside() else None
    if places is None:
        donor.stream(work_queue, sink)
        return
    while request := work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline):
        job = request.job
        buffers = elsewhere(job) if request.copy else sink.land(job)
        places.read(job.start, buffers)
        donor.heard_at = time.monotonic()
        work_queue.arrived(request, job.nbytes)
        donor.judge(
            request, work_queue, sink, buffers, BulkFrame(Type.DATA, donor.head, donor.seq, job.start, job.nbytes)
        )


def _places_of(donor: Donor) -> Places | None:
    try:
        places = Places(donor.ask(Type.GET_PLACES, Type.PLACES))
    except RefusedError:
        return None
    except PermissionError:
        return None
    return places if places.readable else None


__all__ = ["Buffers", "MemoryExport", "Places", "deliver", "refuse_unless"]
