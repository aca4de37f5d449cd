"""Serves a donor's state at committed headers, the reduced bytes of the latest slots, and the log.

Theory of operation. The training thread *publishes*: it hands over live references to the tensors of the state after
header h and promises not to change them until it withdraws them. (Donors rest at h until the joiner contributes to
the next slot, so nothing is copied, except tensors that the next forward pass writes: those are named in `copies`.)
Threads that serve a bulk socket read that memory directly into the socket. The table of hashes is built once, by the
first thread that needs it.

For learners the state at a header is kept as a copy (`snapshot`), beside what is published live, and slots from there
on are kept in `log`, until `release` or the end of a lease: a scheduler that died cannot pin them. Learners that can
read this process's memory (`memory_export`) are given some time to do so before anything is copied for them.

A request names header and slot. What this member does not hold for exactly that header is refused by name
(protocol.md 11, 15): another header of the same slot is a fork, an older slot is gone. Only a slot that is still
ahead is waited for, since a donor may be on its way to the boundary that the joiner heard of already, or be loading
this state itself: as long as something of it comes here (`grew`), and for a bounded time after that. PENDING frames
tell the joiner that this donor lives, and how long ago something came, so that members that all lack the state do not
wait for each other. They are also sent while others have their turn (turns.py). Withdrawing waits for nobody: a range
on its way may then carry newer bytes, which the joiner's piece hashes (or the frame's checksum) refuse.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.membership.donors import PULLS
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import Header, Span
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.replication.by_reference import MemoryExport, refuse_unless
from chaos_lightning.replication.forward import Forwarder
from chaos_lightning.replication.log import DEFAULT_CAP_NBYTES, LoggedSlot, SlotLog
from chaos_lightning.replication.manifest import encode_manifest
from chaos_lightning.replication.memory import in_place, region, synchronize
from chaos_lightning.replication.pace import Pace
from chaos_lightning.replication.published import Published, RefusalError, lay_out
from chaos_lightning.replication.snapshot import Snapshot, available_nbytes
from chaos_lightning.replication.table import PIECE_NBYTES
from chaos_lightning.replication.turns import Turns
from chaos_lightning.transport.pacing import pace

HOLD = 0.6
"""Part of a usual step's time that learners have for reading a state or sums in place, before a copy is made for
them.
"""

_MOST_DROPPED = 4096
"""Number of names that are known to have been dropped; other names are waited for."""

_MOST_IDLE_MS = 1e9


@dataclass(frozen=True, kw_only=True)
class StateServerConfig:
    """Timeouts in seconds, and limits, of the serving side."""

    publish_timeout_s: float = 30.0
    """Most seconds that a request waits for a header that this member has yet to commit, or for a state that it is
    getting while nothing of it comes.
    """
    idle_timeout_s: float = 120.0
    """Seconds without a request after which a connection is closed."""
    stall_timeout_s: float = 10.0
    """Seconds in mid-frame after which a peer that neither sends nor takes a byte is given up."""
    pending_interval_s: float = 0.25
    """Seconds between two messages to a waiting peer that this donor lives."""
    snapshot_cap_nbytes: int = 0
    """Most bytes of a state that is copied for learners; 0: half of the memory that is available then, shared by the
    members of this machine.
    """
    log_cap_nbytes: int = DEFAULT_CAP_NBYTES
    lease_s: float = 600.0
    """Seconds without a request after which a snapshot is given up."""
    pulls: int = PULLS
    """Number of peers to which this member's state is sent at a time, beside those that take it slowly (turns.py)."""
    results_kept: int = 2
    """Number of reduced slots kept servable: the last one, and the one before until all members are known to hold the
    last.
    """

    def __post_init__(self) -> None:
        for name in ("publish_timeout_s", "idle_timeout_s", "stall_timeout_s", "pending_interval_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("results_kept", "pulls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class StateServer:
    """Server of published states and slots to any number of peers, each in a thread of its own."""

    def __init__(self, config: StateServerConfig | None = None) -> None:
        self.config = config or StateServerConfig()
        self._changed = threading.Condition()
        self._state: Published | None = None
        self._versions: dict[str, dict[int, Published]] = {}
        """Versions of other states, by the head that stands for the state's name."""
        self._dropped: dict[str, None] = {}
        """Heads of the last dropped names of which nothing is held any more."""
        self._results: list[Published] = []
        self._snapshot: Published | None = None
        self._copying: Snapshot | None = None
        self._lent: Published | None = None
        """Last snapshot's state, as those learners see it that read it in place."""
        self._leased_at = 0.0
        self._refused: tuple[int, str] = (-1, "")
        """Slot whose snapshot was not made, and the reason."""
        self.pace = Pace()
        self.log = SlotLog(self._changed, self.config.log_cap_nbytes)
        self._gone = {"state": -1, "result": -1}
        """Highest slot that was published and withdrawn, for the words of a refusal."""
        self._grew_at = -math.inf
        """Moment (monotonic, s) at which something came of the state that this member is getting."""
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._turns = Turns()
        self.served_nbytes: dict[str, int] = {}
        """Payload bytes sent so far, or being sent, by peer."""
        self.forwarder: Forwarder | None = None
        """Forwarder, to be set to let others reach members through this one."""
        self.memory_export: MemoryExport | None = None
        """Export of memory, to be set to let members of this machine read this process's memory."""

    # --- the training thread's side -------------------------------------------------------------------------------

    def publish(
        self,
        head: str,
        seq: int,
        tensors: Sequence[tuple[str, Tensor]],
        manifest: Mapping[str, object],
        *,
        copies: Collection[str] = (),
    ) -> None:
        """Begins to serve the state after this header, instead of the one published before.

        Args:
            head: Hash of the committed header.
            seq: Slot of the header.
            tensors: Replicated tensors in their fixed order. They must not change until `withdraw`.
            manifest: Everything else; encoded here and now. Tensors in it that are none of `tensors` are copied.
            copies: Names of tensors that will change before the withdrawal: they are copied now.
        """
        item = self._described(head, seq, tensors, manifest, copies)
        with self._changed:
            self._state = item
            self._changed.notify_all()

    def hold(
        self,
        name: str,
        version: int,
        tensors: Sequence[tuple[str, Tensor]],
        manifest: Mapping[str, object],
        *,
        copies: Collection[str] = (),
        ready: bool = False,
        hashes: Sequence[tuple[bytes, ...]] | None = None,
        piece_nbytes: int = PIECE_NBYTES,
    ) -> None:
        """Begins to serve a version of a named state other than the training state, beside all others, until `drop`.

        Who pulls it asks for the head `bulk.named_head(name)` and the slot `version`; who asks for a version that is
        still ahead waits for it, as for a header's state.

        Args:
            name: Name of the state, any text.
            version: Number of the version, not negative.
            tensors: Tensors of the state, in their fixed order. They must not change until the version is dropped.
            manifest: Everything else, as in `publish`.
            copies: Names of tensors that will change before the version is dropped: they are copied now.
            ready: Whether to hash the version here and now, and not when somebody asks for it first.
            hashes: Hashes of the pieces of each tensor, if the caller has them already; the manifest has no tensors
                then.
            piece_nbytes: Bytes of a piece; whoever pulls must expect the same (`PullConfig.piece_nbytes`).
        """
        head = bulk.named_head(name)
        item = self._described(head, version, tensors, manifest, copies)
        item.piece_nbytes, item.hashes = piece_nbytes, [*hashes] if hashes is not None else None
        if ready:
            item.build(lambda: None)
        with self._changed:
            self._versions.setdefault(head, {})[version] = item
            self._dropped.pop(head, None)
            self._changed.notify_all()

    def drop(self, name: str, before: int | None = None) -> None:
        """Stops serving versions of this named state below `before` (all if None); afterwards their memory may change.

        Of a state of which nothing is left, nothing is waited for either, until something of it is held again.
        """
        head = bulk.named_head(name)
        with self._changed:
            versions = self._versions.pop(head, {})
            kept = {v: item for v, item in versions.items() if before is not None and v >= before}
            if kept:
                self._versions[head] = kept
                return
            self._dropped[head] = None
            while len(self._dropped) > _MOST_DROPPED:
                del self._dropped[next(iter(self._dropped))]
            self._changed.notify_all()

    def asked_at(self, name: str, version: int) -> float:
        """Returns when a peer last requested, or was sent, something of this version (`time.monotonic()`); 0.0 if
        never.
        """
        with self._changed:
            item = self._versions.get(bulk.named_head(name), {}).get(version)
            if item is not None and item.sending:
                return time.monotonic()  # over a slow link a single answer takes long
            return item.asked_at if item is not None else 0.0

    @staticmethod
    def _described(
        head: str,
        seq: int,
        tensors: Sequence[tuple[str, Tensor]],
        manifest: Mapping[str, object],
        copies: Collection[str],
    ) -> Published:
        bulk.head_bytes(head)
        unknown = set(copies) - {name for name, _ in tensors}
        if unknown:
            raise StateError(f"cannot copy {sorted(unknown)[0]!r}: no such tensor in the training state")
        synchronize(t for _, t in tensors)
        encoded = encode_manifest(manifest, tensors)
        with torch.no_grad():
            named = [(name, t.detach().clone() if name in copies else t) for name, t in tensors]
            attached = [(name, t.detach().clone()) for name, t in encoded.tensors]
        synchronize(t for _, t in attached)
        item = lay_out(head, seq, [region(name, t) for name, t in (*named, *attached)])
        item.named, item.attached, item.manifest = named, attached, encoded.data
        if len(item.manifest) > bulk.MAX_CONTROL_NBYTES:
            raise StateError(
                f"the manifest has {len(item.manifest)} bytes, the limit is {bulk.MAX_CONTROL_NBYTES}: keep large "
                "values of callbacks and schedulers in tensors or numpy arrays"
            )
        return item

    def snapshot(
        self,
        head: str,
        seq: int,
        tensors: Sequence[tuple[str, Tensor]],
        manifest: Mapping[str, object],
        *,
        volatile: Collection[str] = (),
        sharers: int = 1,
        learners: Collection[str] = (),
    ) -> Snapshot:
        """Begins to serve a copy of the state after this header, until `release`; replaces the previous snapshot.

        Args:
            head: Hash of the committed header.
            seq: Slot of the header.
            tensors: Replicated tensors in their fixed order. They must be still until the snapshot is settled.
            manifest: Everything else; encoded here and now.
            volatile: Names of tensors that change before the snapshot is settled: they are copied now.
            sharers: Members on this machine that make such a copy at the same time.
            learners: Learners for which the snapshot is made.

        Raises:
            StateError: The state is too large, or the manifest cannot travel; who asks for it hears the reason.
        """
        try:
            synchronize(t for _, t in tensors)
            encoded = encode_manifest(manifest, tensors)
            cap_nbytes = self.config.snapshot_cap_nbytes or available_nbytes() // (2 * max(1, sharers))
            with torch.no_grad():
                attached = [(name, t.detach().clone()) for name, t in encoded.tensors]
            readers = self._readers(learners) if all(in_place(t) for _, t in attached) else ()
            copy = Snapshot(
                tensors, volatile=volatile, cap_nbytes=cap_nbytes, readers=readers, hold_s=HOLD * self.pace.usual_s
            )
        except StateError as error:
            with self._changed:
                self._refused = (seq, str(error))
                self._changed.notify_all()
            raise
        self.pace.begin(copy.nbytes)

        def described() -> Published:
            item = lay_out(head, seq, [region(name, t) for name, t in (*copy.tensors, *attached)])
            item.named, item.attached, item.manifest = copy.tensors, attached, encoded.data
            return item

        with self._changed:
            self._copying = copy
            self._forget_lent()
            if copy.readers:
                self._lent, self._leased_at = described(), time.monotonic()
                self._lent.snapshot = copy
            self._changed.notify_all()

        def offer() -> None:
            copy.wait()
            item = described() if copy.whole else None
            with self._changed:
                if self._copying is not copy:
                    return
                self._copying = None
                if item is not None:
                    self._snapshot, self._leased_at = item, time.monotonic()
                else:
                    self._gone["state"] = max(self._gone["state"], seq)
                self._changed.notify_all()

        threading.Thread(target=offer, name="chaos-offer", daemon=True).start()
        return copy

    def keep(
        self,
        header: Header,
        encoded: bytes,
        raw: memoryview | None,
        spans: Sequence[Span],
        still: Callable[[], bool],
    ) -> None:
        """Takes a committed slot into the log, for the learners that its header names; see `SlotLog.keep`."""
        readers = self._readers(header.learners)
        self.log.keep(header, encoded, raw, spans, still, readers=readers, hold_s=HOLD * self.pace.usual_s)

    def _readers(self, learners: Collection[str]) -> Collection[str]:
        """Returns these learners if all of them can read this process's memory; else none."""
        export = self.memory_export
        return learners if export is not None and all(export.readable(o) for o in learners) else ()

    def release(self) -> None:
        """Gives up snapshot and log once no learner observes any more."""
        with self._changed:
            if self._snapshot is not None:
                self._gone["state"] = max(self._gone["state"], self._snapshot.seq)
            self._snapshot = self._copying = None
            self._forget_lent()
        self.pace.end()
        self.log.end()

    def _forget_lent(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None and lent.snapshot is not None:
            lent.snapshot.forget()

    def expire(self, now: float) -> bool:
        """Gives up a snapshot for which nobody has asked during its lease; returns whether it did."""
        with self._changed:
            held = self._snapshot or self._lent
            over = held is not None and now - self._leased_at > self.config.lease_s
        if over:
            self.release()
        return over

    def publish_result(self, seq: int, head: str, memory: Tensor | memoryview, spans: Sequence[Span]) -> None:
        """Begins to serve the reduced bytes of a slot for a hand-on (protocol.md 9).

        Args:
            seq: The slot.
            head: Hash of the slot's header.
            memory: Flat uint8, immutable until withdrawn (protocol.md 3); referred to, not copied.
            spans: Byte ranges of it that are completely reduced.
        """
        bulk.head_bytes(head)
        flat = memory if isinstance(memory, Tensor) else torch.frombuffer(memory.cast("B"), dtype=torch.uint8)
        if flat.dtype is not torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"reduced bytes must be flat contiguous uint8, got {flat.dtype}{list(flat.shape)}")
        if any(not 0 <= start <= stop <= flat.numel() for start, stop in spans):
            raise ValueError(f"spans {list(spans)} are not within the {flat.numel()} reduced bytes")
        synchronize([flat])
        item = lay_out(head, seq, [region("reduced bytes", flat)])
        item.spans = union(spans)
        with self._changed:
            kept = [r for r in self._results if r.seq != seq]
            self._results = sorted([*kept, item], key=lambda r: r.seq)[-self.config.results_kept :]
            self._changed.notify_all()

    def withdraw(self, before: int | None = None) -> None:
        """Stops serving the state and reduced slots below `before` (all if None); afterwards their memory may
        change.
        """
        with self._changed:
            if self._state is not None and (before is None or self._state.seq < before):
                self._gone["state"] = max(self._gone["state"], self._state.seq)
                self._state = None
            dropped = [r.seq for r in self._results if before is None or r.seq < before]
            self._gone["result"] = max([self._gone["result"], *dropped])
            self._results = [r for r in self._results if before is not None and r.seq >= before]

    def grew(self, idle_s: float = 0.0) -> None:
        """Notes that this member, still fetching its state, got more of it, so that peers waiting for that state wait
        on.

        Args:
            idle_s: Seconds since the state grew, here or at a member that this one waits for.
        """
        self._grew_at = max(self._grew_at, time.monotonic() - idle_s)

    def forget(self) -> None:
        """Forgets which slots were withdrawn, because this member joins anew and may publish the same slots again."""
        self.withdraw()
        with self._changed:
            self._gone = {"state": -1, "result": -1}

    def close(self) -> None:
        """Refuses all requests from now on; threads in `serve` return soon."""
        with self._changed:
            self._closed = True
            self._state = self._snapshot = self._copying = None
            self._forget_lent()
            self._results = []
            self._versions = {}
            sockets = list(self._sockets)
            self._changed.notify_all()
        if self.forwarder is not None:
            self.forwarder.close()
        self.log.close()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # --- the serving threads' side --------------------------------------------------------------------------------

    def serve(self, sock: socket.socket, peer: str) -> str:
        """Answers requests on this socket until its stream ends, then closes it.

        Args:
            sock: Socket: connected, authenticated, blocking.
            peer: Member id of the other end, for the account of bytes.

        Returns:
            Reason why serving ended, in words.
        """
        with self._changed:
            if self._closed:
                sock.close()
                return "this member's state server is closed"
            self._sockets.add(sock)
        channel = BulkSocket(sock, stall_timeout_s=self.config.stall_timeout_s)
        attends = False
        try:
            while True:
                request = channel.receive_header(patience_s=self.config.idle_timeout_s)
                if request is None:
                    return f"{peer} closed the connection"
                if request.type is Type.ROUTE and self.forwarder is not None:
                    return self.forwarder.relay(channel, request)
                if request.type is Type.PACE:
                    pace(sock, 8 * request.offset or None)
                    continue
                if request.type not in (*bulk.REQUESTS, *bulk.NEIGHBOURLY, Type.ROUTE):
                    raise WireError(f"{peer} sent {request.type.name} where a request was expected")
                attends |= request.type is Type.GET_BUFFERS
                try:
                    self._answer(channel, request, peer)
                except (RefusalError, StateError) as refusal:
                    note = str(refusal).encode()[: bulk.MAX_NOTE_NBYTES]
                    channel.send(*bulk.reply(Type.REFUSED, request.head, request.seq, note))
        except TimeoutError:
            return f"{peer} was silent for too long"
        except OSError as error:
            return f"the connection to {peer} broke: {error}"
        except WireError as error:
            return str(error)
        finally:
            with self._changed:
                self._sockets.discard(sock)
                self._turns.leave(sock)
                self._changed.notify_all()
                if attends:
                    self.log.attend(peer, until=True)
            sock.close()

    def _answer(self, channel: BulkSocket, request: BulkFrame, peer: str) -> None:
        if request.type is Type.ROUTE:
            channel.receive_payload(request)
            raise RefusalError("this member passes no requests on to others")
        last = time.monotonic()

        def tick(idle_s: float = 0.0) -> None:
            nonlocal last
            if time.monotonic() - last >= self.config.pending_interval_s:
                last = time.monotonic()
                idle_ms = int(min(1000 * idle_s, _MOST_IDLE_MS))
                channel.send(BulkFrame(Type.PENDING, request.head, request.seq, idle_ms))

        head, seq = request.head, request.seq
        if request.type in bulk.NEIGHBOURLY:
            self._answer_beside(channel, request, peer, tick)
            return
        if request.type is Type.GET_ENTRY:
            entry, newest = self._entry(request, tick)
            channel.send(*bulk.reply(Type.ENTRY, head, seq, entry.packed(request.length), newest))
            return
        item = self._find(request, tick)
        if request.type is Type.GET_MANIFEST:
            channel.send(*bulk.reply(Type.MANIFEST, head, seq, item.manifest))
        elif request.type is Type.GET_TABLE:
            item.build(tick)
            if len(item.encoded) > bulk.MAX_CONTROL_NBYTES:
                raise RefusalError(f"the state table has {len(item.encoded)} bytes, over the frame limit")
            channel.send(*bulk.reply(Type.TABLE, head, seq, item.encoded))
        elif request.type is Type.GET_DIGEST:
            table = item.build(tick)
            digest = {
                "state": table.state_hash,
                "attached": table.attached_hash,
                "manifest": xxhash.xxh3_128_hexdigest(item.manifest),
                "nbytes": table.nbytes,
            }
            channel.send(*bulk.reply(Type.DIGEST, head, seq, json.dumps(digest).encode()))
        else:
            self._send_range(channel, request, peer, item, tick)

    def _send_range(
        self, channel: BulkSocket, request: BulkFrame, peer: str, item: Published, tick: Callable[[], None]
    ) -> None:
        """Sends a range of bytes of a state, or of a slot's reduced bytes."""
        start, stop = request.offset, request.offset + request.length
        result = request.type is Type.GET_RESULT
        if result and not any(a <= start and stop <= b for a, b in item.spans):
            raise RefusalError(f"bytes [{start}, {stop}) of slot {request.seq} are not completely reduced here")
        if item is self._snapshot:
            self.pace.spend(request.length)
        elif item is self._state:
            self._wait_for_turn(channel.sock, request.length, tick)
        with self._changed:
            item.sending += 1
        try:
            views = item.read(start, stop)
            checksum, flags = (bulk.checksum_of(views), 0) if result else (0, bulk.UNSUMMED)
            with self._changed:  # before it can be seen that they have come
                self.served_nbytes[peer] = self.served_nbytes.get(peer, 0) + request.length
            channel.send(BulkFrame(Type.DATA, request.head, request.seq, start, request.length, flags, checksum), views)
        finally:
            with self._changed:
                item.sending, item.asked_at = item.sending - 1, time.monotonic()
                self._turns.done(channel.sock, item.asked_at)

    def _wait_for_turn(self, sock: socket.socket, nbytes: int, tick: Callable[[], None]) -> None:
        """Waits while the state is sent to other peers; reports to the waiting peer now and then that this donor
        lives.
        """
        while True:
            with self._changed:
                if self._closed or self._turns.take(sock, nbytes, self.config.pulls, time.monotonic()):
                    return
                self._changed.wait(self.config.pending_interval_s)
            tick()

    def _answer_beside(self, channel: BulkSocket, request: BulkFrame, peer: str, tick: Callable[[float], None]) -> None:
        """Answers a peer on the same machine, which reads this process's memory."""
        head, seq = request.head, request.seq
        if request.type is Type.HAVE_STATE:
            with self._changed:
                lent = self._lent
            if lent is not None and lent.snapshot is not None and lent.head == head:
                lent.snapshot.take(peer, request.offset)
        elif request.type is Type.HAVE_RESULT:
            with self._changed:
                self.log.taken(peer, seq)
        elif request.type is Type.GET_BUFFERS:
            buffers = refuse_unless(self.memory_export, peer).buffers()
            with self._changed:
                self.log.attend(peer)
            channel.send(*bulk.reply(Type.BUFFERS, head, seq, buffers))
        else:
            export = refuse_unless(self.memory_export, peer)
            places = export.places(self._find(request, tick), manifest=request.length == 1)
            channel.send(*bulk.reply(Type.PLACES, head, seq, places))

    def _find(self, request: BulkFrame, tick: Callable[[float], None]) -> Published:
        """Returns the publication for the requested header; if its slot is still to come, waits and calls `tick`
        meanwhile.
        """
        what = "result" if request.type is Type.GET_RESULT else "state"
        asked_at = time.monotonic()
        while True:
            with self._changed:
                held = self._held(what, request)
                for item in held:
                    if item.head == request.head and item.seq == request.seq:
                        self._leased_at = item.asked_at = time.monotonic()
                        return item
                self._refuse_if_hopeless(request, what, held)
                now = time.monotonic()
                idle_s = now - self._grew_at
                left = self.config.publish_timeout_s - min(now - asked_at, idle_s)
                if left <= 0:
                    raise RefusalError(
                        f"the {what} at header {request.head} (slot {request.seq}) was not published within "
                        f"{self.config.publish_timeout_s:g} s; {self._standing(what, held)}"
                    )
                self._changed.wait(min(left, self.config.pending_interval_s))
            tick(idle_s + 2 * self.config.pending_interval_s)  # words that go round in a circle must grow old

    def _held(self, what: str, request: BulkFrame) -> list[Published]:
        if request.type is Type.GET_PLACES and request.length:
            return [] if self._lent is None else [self._lent]
        if what == "state" and request.head in self._versions:
            return list(self._versions[request.head].values())
        if what == "state":
            return [item for item in (self._state, self._snapshot) if item is not None]
        entry = self.log.at(request.head, request.seq)
        if entry is None or entry.raw is None:
            return self._results
        item = lay_out(entry.head, entry.seq, [region("logged bytes", torch.frombuffer(entry.raw, dtype=torch.uint8))])
        item.spans = entry.spans
        return [item]

    def _entry(self, request: BulkFrame, tick: Callable[[], None]) -> tuple[LoggedSlot, int]:
        """Returns the log's entry that follows the requested header, and the number of the latest slot in the log."""
        give_up = time.monotonic() + self.config.publish_timeout_s
        while True:
            with self._changed:
                entry = self.log.after(request.head, request.seq)
                if entry is not None:
                    self._leased_at = time.monotonic()
                    return entry, self.log.newest
                asked = f"slot {request.seq} after header {request.head} is not in the log"
                if self._closed:
                    raise RefusalError(f"{asked}: this member is leaving or was excluded")
                if self.log.lacks(request.seq):
                    raise RefusalError(f"{asked}: {self.log.why_not(request.seq)}")
                left = give_up - time.monotonic()
                if left <= 0:
                    raise RefusalError(f"{asked}: nothing was committed for {self.config.publish_timeout_s:g} s")
                self._changed.wait(min(left, self.config.pending_interval_s))
            tick()

    def _refuse_if_hopeless(self, request: BulkFrame, what: str, held: Sequence[Published]) -> None:
        asked = f"the {what} at header {request.head} (slot {request.seq}) is not served here"
        if self._closed:
            raise RefusalError(f"{asked}: this member is leaving or was excluded")
        if what == "state" and request.seq == self._refused[0]:
            raise RefusalError(f"{asked}: {self._refused[1]}")
        if request.type is Type.GET_PLACES and request.length and self._lent is None:
            if self._copying is not None or (self._snapshot is not None and self._snapshot.seq >= request.seq):
                raise RefusalError(f"{asked} out of memory: learners elsewhere need a copy, or it is no plain memory")
        elif what == "state" and self._copying is not None and self._snapshot is None:
            return
        if what == "state" and request.head in self._dropped:
            raise RefusalError(f"{asked} any more")
        newest = max((item.seq for item in held), default=-1)
        if request.seq <= max(newest, self._gone[what]):
            raise RefusalError(f"{asked}: {self._standing(what, held)}")

    def _standing(self, what: str, held: Sequence[Published]) -> str:
        if held:
            places = ", ".join(f"header {item.head} (slot {item.seq})" for item in held)
            return f"this member serves the {what} at {places}"
        if self._gone[what] >= 0:
            return f"this member withdrew its last {what}, that of slot {self._gone[what]}"
        return f"this member has not published any {what}"


__all__ = ["StateServer", "StateServerConfig"]
