"""Runs a follower: the process around the state machine in rules/follower.py, with the shard's state, its files and its
connections.

Theory of operation. One thread, the inbox, feeds the machine one event at a time and has its effects carried out by
others, so that it never waits:

- the *state thread* loads, computes and copies, in the order in which it is told to. So the copy for a save is made
  before the state moves on. While it computes a version it encodes it, block by block. It also multiplies pushes with
  the momentum (or the parameters: `HeldShard.lean`), which nobody else may read meanwhile;
- the *save thread* writes such a copy. Where the disk is full it says so and tries again, with growing pauses; there is
  one copy at most, and training goes on meanwhile (O6);
- each push that is fetched has a thread (staging.py), and so has each data connection (lines.py).

An error that nobody expects ends the process: who starts it again gets the same state out of files and chain (O5).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.machine.addresses import join_endpoint, split_endpoint
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.exchange.fetching import drop_version, hold_version, version_name
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate
from chaos_lightning.outer.exchange.line_keys import LineKeyring
from chaos_lightning.outer.exchange.lines import SERVING, DataListener
from chaos_lightning.outer.exchange.serving import ServedVersions
from chaos_lightning.outer.follower.follower_options import has_port
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.follower.staging import HeldShard, MeasuredPart, StagedPushes
from chaos_lightning.outer.rules.effects import (
    Compute,
    Computed,
    Connected,
    Delete,
    Disconnected,
    DiskTrouble,
    Empty,
    Fetched,
    FetchPush,
    FollowerEffect,
    FollowerEvent,
    Forget,
    HoldShard,
    HoldVersion,
    JobOver,
    Load,
    Loaded,
    NotFetched,
    OuterNote,
    Save,
    Say,
    StateSaved,
    Told,
    TurnedAway,
)
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.messages import LineKey, PushProduct, ToFollower
from chaos_lightning.outer.rules.types import NO_VERSION, Counters, Entry, Founded, ProcessPlace, Round, VersionId
from chaos_lightning.replication.server import StateServer
from chaos_lightning.security.credentials import Secret

logger = logging.getLogger("chaos_lightning.outer")

SAVE_AGAIN_S = 0.2
"""Seconds after a failed save until the next attempt; twice as long after each further failure."""
SAVE_AGAIN_MOST_S = 30.0
LINGER_S = 60.0
"""Longest time, s, for which a job's last version is served to those who fetch it."""
_JOIN_S = 5.0
_TURN_S = 0.2

Note = Callable[..., None]
"""Function that writes an event: its name, and fields by name."""


class LeaderStream(Protocol):
    """Stream to the leader: those methods of the control client (outer/exchange/control_client.py) that a follower
    calls.
    """

    def start(self) -> None: ...

    def say(self, message: Any) -> None: ...

    def close(self, timeout_s: float = ...) -> None: ...


class StreamTo(Protocol):
    """Function that makes a stream to the leader, without starting it."""

    def __call__(
        self,
        *,
        on_connected: Callable[[], None],
        on_message: Callable[[Any], None],
        on_disconnected: Callable[[str], None],
    ) -> LeaderStream: ...


@dataclass(frozen=True, slots=True)
class FollowerEnd:
    """Reason for which a follower ended; `failed` means that it should not have ended."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copy of the state at a version, made so that it can be saved while the state changes."""

    version: VersionId
    state: OuterState
    counters: Counters


class _Worker(threading.Thread):
    """Thread that carries out queued work in order; an error is reported once, and ends the thread."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._failed = failed
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def do(self, work: Callable[[], None]) -> None:
        """Queues a piece of work behind all that was queued before."""
        self._work.put(work)

    def end(self) -> None:
        """Ends the thread once its present piece of work is done."""
        self._work.put(None)

    def run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                work()
                del work  # what it holds of the state must not outlive it, whenever the next one comes
        except BaseException as error:
            self._failed(error)


class _Saver(threading.Thread):
    """Thread that saves versions and deletes their files; see the module."""

    def __init__(
        self,
        files: ShardFiles,
        post: Callable[[FollowerEvent], None],
        note: Note,
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="chaos-follower-save", daemon=True)
        self._files, self._post, self._note, self._failed = files, post, note, failed
        self.inbox: queue.SimpleQueue[_Copy | VersionId | None] = queue.SimpleQueue()
        """Copies to be saved, versions to be deleted, and last None."""
        self._waiting: _Copy | None = None
        self._began, self._at, self._pause_s = 0.0, 0.0, 0.0

    def run(self) -> None:
        try:
            self._turn()
        except BaseException as error:
            self._failed(error)

    def _turn(self) -> None:
        while True:
            timeout = None if self._waiting is None else max(0.0, self._at - time.monotonic())
            try:
                item = self.inbox.get(timeout=timeout)
            except queue.Empty:
                self._try()
                continue
            match item:
                case None:
                    return
                case VersionId():
                    self._files.delete(item)
                    self._at = 0.0  # there may be room now
                case _Copy():
                    assert self._waiting is None  # the machine has one at a time saved
                    self._waiting, self._began, self._at, self._pause_s = item, time.monotonic(), 0.0, 0.0
            del item  # a copy must not outlive its save

    def _try(self) -> None:
        copy = self._waiting
        assert copy is not None
        try:
            digest = self._files.save(copy.version, copy.state, copy.counters)
        except StateError as error:
            if not self._pause_s:
                self._note("disk_trouble", reason=str(error))
            self._pause_s = min(SAVE_AGAIN_MOST_S, max(SAVE_AGAIN_S, 2 * self._pause_s))
            self._at = time.monotonic() + self._pause_s
            self._post(DiskTrouble(str(error)))
            return
        if self._pause_s:
            self._note("disk_trouble", reason="")
            self._post(DiskTrouble(""))
        seconds, nbytes = time.monotonic() - self._began, copy.state.shard.nbytes(4) * len(copy.state.tensors)
        self._note("version_saved", version=str(copy.version), seconds=round(seconds, 4), nbytes=nbytes, digest=digest)
        self._waiting = None
        self._post(StateSaved(copy.version, digest))


QUIET_S = 3.0
"""Seconds without a request or an answer after which a fetch of a version counts as over."""


class _State:
    """Shard of the outer state that a follower holds; methods are called in one thread, the state thread."""

    def __init__(self, files: ShardFiles, staged: Callable[[], StagedPushes], server: StateServer, note: Note) -> None:
        self._files, self._staged, self._note = files, staged, note
        self.versions = ServedVersions[Part](partial(hold_version, server), partial(drop_version, server))
        self._server = server
        self._held: HeldShard | None = None
        self._state: OuterState | None = None
        self._counters = Counters()
        self._version = NO_VERSION

    def hold(self, held: HeldShard) -> None:
        self._held = held

    def fetched(self) -> bool:
        """Returns whether a cluster is fetching one of the versions that are served. Any thread."""
        asked = [
            self._server.asked_at(version_name(version, part.shard, part.format.name), 0)
            for version, part in self.versions.served.items()
        ]
        return any(time.monotonic() - asked_at < QUIET_S for asked_at in asked)

    def compute(self, entry: Entry, parts: Sequence[Part], marked: str) -> FollowerEvent:
        """Computes the version that this chain entry makes from the present state; returns the event for the follower's
        machine.

        Args:
            entry: Chain entry that makes the version.
            parts: Pieces of the pushes that the entry names, in their order.
            marked: Digest that the version had when it became durable; "" if it is not durable.
        """
        began, body, held = time.monotonic(), entry.body, self._held
        assert held is not None
        self.versions.make_room()
        version = Part.empty(held.shard, held.codec.version)
        if isinstance(body, Round):
            assert self._state is not None
            pushes = [(weighed.factor, part) for weighed, part in zip(body.accepted, parts, strict=True)]
            parameters = held.codec.parameters
            RoundUpdate(self._state, pushes, body.factors, version, held.averaged, parameters=parameters).run()
            self._counters = body.counters
        else:
            if isinstance(body, Founded):
                self._state, self._counters = OuterState(held.shard, parts[0].decoded()), Counters()
            self._encode(version)  # of a rollback, too: the state stands at the version whose content it has
        momentum = self._stand(entry.version, version)
        seconds = round(time.monotonic() - began, 4)
        self._note("version_computed", version=str(entry.version), seconds=seconds, nbytes=held.shard.nbytes(12))
        assert self._state is not None
        found = self._state.digest if marked else ""
        if differs := found != marked:
            self._note("bits_differ", version=str(entry.version), digest=found, marked=marked)
        return Computed(entry.version, momentum, differs)

    def empty(self, version: VersionId) -> FollowerEvent:
        """Drops the state when a rollback leads to a version without content; returns the event for the follower's
        machine.
        """
        self._state, self._counters, self._version = None, Counters(), version
        self.versions.go_back(NO_VERSION)
        self._note("version_computed", version=str(version), seconds=0.0, nbytes=0)
        return Computed(version)

    def load(self, version: VersionId, digest: str, job_id: str) -> FollowerEvent:
        """Loads a version from its file, for the leader of the job `job_id`; returns the event for the follower's
        machine.
        """
        began, held = time.monotonic(), self._held
        assert held is not None
        self.versions.go_back(version)
        try:
            state, counters = self._files.load(version, digest)
            if state.shard != held.shard:
                raise StateError(f"{self._files.path(version)} is of another shard than this follower holds")
        except StateError as error:
            return Loaded(version, False, reason=str(error))
        self._state, self._counters = state, counters
        self.versions.make_room()
        served = Part.empty(held.shard, held.codec.version)
        self._encode(served)
        momentum = self._stand(version, served)
        seconds = round(time.monotonic() - began, 4)
        self._note("version_loaded", version=str(version), seconds=seconds, chain=job_id)
        return Loaded(version, True, momentum)

    def copy(self, version: VersionId) -> _Copy:
        """Returns a copy of the present state, which must be at this version."""
        assert self._state is not None
        assert self._version == version
        tensors = [tensor.clone() for tensor in self._state.tensors]
        return _Copy(version, OuterState(self._state.shard, *tensors), self._counters)

    def measure(self, measured: MeasuredPart) -> FollowerEvent:
        """Returns the event that a push has been fetched and measured, with its `HeldShard.lean` at the present
        version.
        """
        offer = measured.offer
        found = self._lean(measured.part) if measured.products else "0"
        return Fetched(offer.push, offer.manifest, measured.products, measured.finite, found, self._version)

    def _encode(self, version: Part) -> None:
        assert self._state is not None
        for block, place in enumerate(version.shard.places):
            version.encode(block, self._state.theta[place])

    def _stand(self, version: VersionId, served: Part) -> tuple[PushProduct, ...]:
        self._version = version
        self.versions.add(version, served)
        return tuple(PushProduct(push, self._lean(part)) for push, part in self._staged().open())

    def _lean(self, part: Part) -> str:
        if self._state is None or self._held is None or self._version == NO_VERSION:
            return "0"
        return self._held.lean(part, self._state)


class FollowerProcess:
    """Process of one follower. `start` it, `wait` for its end, `close` it.

    Args:
        name: Name of this follower.
        files: Files of this follower's shard.
        bind: Host and port at which it takes data connections; port 0: any free one.
        secret: Token or credentials.
        stream: Makes the stream to the leader.
        note: Writes an event; any thread.
        advertise: HOST:PORT where clusters reach this follower, or HOST alone, with the port as bound; "": as bound.
        links: Rule for the protection of data connections (line_keys.LineKeyring).

    Raises:
        ConfigurationError: The follower cannot listen at this address, that would let anyone in, or this protection is
            not possible.
    """

    def __init__(
        self,
        name: str,
        files: ShardFiles,
        bind: tuple[str, int],
        secret: Secret,
        stream: StreamTo,
        note: Note,
        advertise: str = "",
        links: str = "auto",
    ) -> None:
        self._note = note
        self._inbox: queue.SimpleQueue[FollowerEvent | _Stop] = queue.SimpleQueue()
        self._server = StateServer(SERVING)
        self._keys = LineKeyring(secret, links)
        self._listener = DataListener(
            *bind, job=files.job, me=name, secret=secret, server=self._server, note=note, keys=self._keys
        )
        self.endpoint = advertise or self._listener.endpoint
        """HOST:PORT of the follower's data connections."""
        if advertise and not has_port(advertise):
            bound = split_endpoint(self._listener.endpoint)[1]
            self.endpoint = join_endpoint(split_endpoint(advertise)[0], bound)
        self._staged = StagedPushes(self._listener, self.post, self._on_measured, note, self._fail)
        self._state = _State(files, lambda: self._staged, self._server, note)
        self._worker = _Worker("chaos-follower-state", self._fail)
        self._saver = _Saver(files, self.post, note, self._fail)
        self._thread = threading.Thread(target=self._run, name="chaos-follower-inbox", daemon=True)
        found = files.look()
        for strange, reason in found.strange:
            note("file_damaged", version=strange, reason=reason)
        pid = os.getpid()
        place = ProcessPlace(host_identity(), pid, start_time(pid))
        self._machine = FollowerMachine(name, os.urandom(8).hex(), found.whole, self.endpoint, place)
        self._holding: HoldShard | None = None
        self._connected = False
        self._stream = stream(
            on_connected=self._on_connected,
            on_message=lambda message: self.post(Told(cast(ToFollower, message))),
            on_disconnected=self._on_disconnected,
        )
        self._end: FollowerEnd | None = None
        self._ends: queue.SimpleQueue[FollowerEnd] = queue.SimpleQueue()  # a signal's handler may put something in
        files_here = tuple(str(file.version) for file in found.whole)
        digests = tuple(file.digest for file in found.whole)
        note("follower_started", follower=name, endpoint=self.endpoint, files=files_here, digests=digests)

    def start(self) -> None:
        """Starts the threads, one of which looks for the leader."""
        for thread in (self._thread, self._worker, self._saver):
            thread.start()
        self._stream.start()

    def post(self, event: FollowerEvent) -> None:
        """Queues an event for the follower's machine, behind all earlier ones; any thread."""
        self._inbox.put(event)

    def wait(self, timeout_s: float | None = None) -> FollowerEnd | None:
        """Returns why the follower has ended; None if it still runs. For one thread."""
        if self._end is None:
            with contextlib.suppress(queue.Empty):
                self._end = self._ends.get(timeout=timeout_s)
        return self._end

    def end(self, reason: str, *, failed: bool = False) -> None:
        """Makes `wait` return, with the first reason that was given. Any thread may call it, and a signal's handler."""
        self._ends.put(FollowerEnd(reason, failed))

    def linger(self) -> None:
        """Serves the job's last version after the job's end, as long as the leader is connected or a cluster fetches
        it.
        """
        deadline = time.monotonic() + LINGER_S
        while (self._connected or self._state.fetched()) and time.monotonic() < deadline:
            time.sleep(_TURN_S)

    def close(self) -> None:
        """Ends all threads and connections. A save under way is given up, and the next start deletes its partial
        file.
        """
        self._stream.close()
        self._staged.close()
        self._inbox.put(_Stop())
        self._worker.end()
        self._saver.inbox.put(None)
        self._listener.close()
        self._server.close()
        until = time.monotonic() + _JOIN_S
        for thread in (self._thread, self._worker, self._saver):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------ the inbox's thread

    def _run(self) -> None:
        try:
            while not isinstance(event := self._inbox.get(), _Stop):
                self._feed(event)
        except BaseException as error:
            self._fail(error)

    def _feed(self, event: FollowerEvent) -> None:
        effects = self._machine.on(event)
        if isinstance(event, Told) and isinstance(event.message, LineKey) and event.message.term == self._machine.term:
            self._keys.hear(event.message)
        self._staged.decide(self._machine.decided)
        for effect in effects:
            self._carry_out(effect)
        if isinstance(event, NotFetched) and not any(
            isinstance(effect, FetchPush) and effect.offer.push == event.push for effect in effects
        ):
            self._staged.forget(event.push)  # nobody wants it any more

    def _carry_out(self, effect: FollowerEffect) -> None:
        state, worker = self._state, self._worker
        match effect:
            case Say(message):
                self._stream.say(message)
            case HoldShard():
                self._hold(effect)
            case FetchPush(offer):
                self._staged.fetch(offer)
            case Compute(entry):
                parts = [self._staged.part(offer.push) for offer in entry.offers]  # held, whatever is forgotten
                marked = self._machine.marked(entry.version)
                worker.do(lambda: self.post(state.compute(entry, parts, marked)))
            case Empty(version):
                worker.do(lambda: self.post(state.empty(version)))
            case Save(version):
                worker.do(lambda: self._saver.inbox.put(state.copy(version)))
            case Load(version, digest):
                job_id = self._machine.job_id
                worker.do(lambda: self.post(state.load(version, digest, job_id)))
            case Delete(version):
                self._saver.inbox.put(version)
            case Forget(push):
                self._staged.forget(push)
            case HoldVersion(version):
                worker.do(lambda: state.versions.hold(version))
            case JobOver(version, reason):
                self.end(f"the job is over with {version}: {reason}")
            case TurnedAway(reason):
                self.end(f"it was turned away: {reason}", failed=True)
            case OuterNote(name, fields):
                self._note(name, **dict(fields))

    def _hold(self, effect: HoldShard) -> None:
        if self._holding is not None and self._holding != effect:
            raise ConfigurationError(
                f"this follower held shard {self._holding.shard} of {self._holding.shards} and is to hold "
                f"{effect.shard} of {effect.shards}: it begins anew"
            )
        self._holding = effect
        held = HeldShard.of(effect.agreement, effect.shard, effect.shards)
        self._staged.hold(held)
        self._worker.do(lambda: self._state.hold(held))

    # ------------------------------------------------------------------ other threads

    def _on_connected(self) -> None:
        self._connected = True
        self.post(Connected())

    def _on_disconnected(self, reason: str) -> None:
        self._connected = False
        self.post(Disconnected())

    def _on_measured(self, measured: MeasuredPart) -> None:
        self._worker.do(lambda: self.post(self._state.measure(measured)))

    def _fail(self, error: BaseException) -> None:
        logger.error("this follower cannot go on", exc_info=error)
        self.end(f"{type(error).__name__}: {error}", failed=True)


@dataclass(frozen=True, slots=True)
class _Stop:
    """Last item of the inbox, which ends its thread."""
