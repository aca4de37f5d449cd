"""Exchanges border tensors (activations and gradients between stages) over links, and keeps received ones until the
executor takes them.

Theory of operation. A border goes as frames of the type FORWARD or BACKWARD, whose `start` holds the micro-batch and
the layer. Like chunks of gradients they carry their attempt, are purged with its view, and are kept where this member
has not opened that attempt yet. In the open attempt only the member that a unit names as its source may send, and each
border once. `send`, `take`, `check` and `open` belong to the training thread, the others to the loop's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from chaos_lightning.errors import AttemptOverError, DeadlineError, WireError
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.pipeline.tensors import Border, BorderReader, write
from chaos_lightning.planning.pipelines.units import BACKWARD, FORWARD, BorderKey, StepUnit
from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.settings import EngineConfig
from chaos_lightning.transport.frames import Frame, FrameType
from chaos_lightning.transport.reference import PartialSum

LIMIT_NBYTES = 16 << 30
"""Most bytes of all borders together that wait here."""

_TYPES = {FORWARD: FrameType.FORWARD, BACKWARD: FrameType.BACKWARD}
_KINDS = {frame_type: kind for kind, frame_type in _TYPES.items()}
_LAYER_BITS = 32

SendFrame = Callable[[str, FrameType, ViewId, int, int, Sequence[memoryview]], None]
"""Function of (peer, type, view, slot, start, pieces of the payload), called in the training thread."""


class BorderExchange:
    """Exchange that sends border tensors to other members and keeps received ones until they are taken.

    Args:
        send: Queues a frame for a peer; one that has no link loses it, and a recovery follows.
        limit_nbytes: Most bytes of borders that wait here.
        timeout_s: Seconds to wait for border tensors; as a rule a recovery ends the wait before.
    """

    def __init__(
        self, send: SendFrame, limit_nbytes: int = LIMIT_NBYTES, timeout_s: float = EngineConfig.step_timeout_s
    ) -> None:
        self._send = send
        self._limit_nbytes = limit_nbytes
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._open: SlotAttempt | None = None
        self._due: dict[BorderKey, str] = {}
        """Sender of each border of the open attempt that was not taken yet."""
        self._here: dict[SlotAttempt, dict[BorderKey, tuple[str, BorderReader]]] = {}
        self._dropped = NO_VIEW
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ the training thread

    def open(self, attempt: SlotAttempt, units: Sequence[StepUnit]) -> None:
        """Begins an attempt with these units; border tensors of older attempts are dropped."""
        due = {u.taken: u.source for u in units if u.taken is not None}
        with self._changed:
            self._open, self._due = attempt, due
            self._here = {a: found for a, found in self._here.items() if not self._over(a)}
            early = self._here.get(attempt, {})
            self._here[attempt] = {key: found for key, found in early.items() if due.get(key) == found[0]}
            self._changed.notify_all()

    def send(self, attempt: SlotAttempt, to: str, key: BorderKey, border: Border) -> None:
        """Sends border tensors, which must not change until they are on their way."""
        payloads = write(border)
        self.check(attempt)
        for payload in payloads:
            start = key.micro_batch << _LAYER_BITS | key.layer
            self._send(to, _TYPES[key.kind], attempt.view, attempt.seq, start, payload)

    def there(self, attempt: SlotAttempt, key: BorderKey) -> bool:
        """Returns whether border tensors can be taken without waiting."""
        with self._changed:
            return self._over(attempt) or self._there(attempt, key)

    def take(self, attempt: SlotAttempt, key: BorderKey) -> Border:
        """Waits for border tensors of the open attempt, and returns them.

        Raises:
            AttemptOverError: The attempt has ended, or ends meanwhile.
            DeadlineError: The border does not come, and no recovery ends the attempt.
        """
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._error or self._over(attempt) or self._there(attempt, key), self._timeout_s
            )
            self._check(attempt)
            if not came:
                raise DeadlineError(
                    f"{attempt}: {_in_words(key)} did not come from {self._due.get(key)} within {self._timeout_s:g} s, "
                    "and no recovery began; look whether that member computes, or give steps more time (step_timeout_s)"
                )
            del self._due[key]
            return self._here[attempt].pop(key)[1].border()

    def check(self, attempt: SlotAttempt) -> None:
        """Raises AttemptOverError if the attempt has ended.

        Raises:
            AttemptOverError: The attempt has ended.
        """
        with self._changed:
            self._check(attempt)

    def _check(self, attempt: SlotAttempt) -> None:
        if self._error is not None:
            raise self._error
        if self._over(attempt):
            raise AttemptOverError(f"{attempt} is over")

    def _there(self, attempt: SlotAttempt, key: BorderKey) -> bool:
        found = self._here[attempt].get(key)
        return found is not None and found[1].complete

    # ------------------------------------------------------------------ the loop's thread

    def drop(self, view: ViewId) -> None:
        """Ends the attempts of this view and of older ones."""
        with self._changed:
            self._dropped = max(self._dropped, view)
            self._here = {a: found for a, found in self._here.items() if not self._over(a)}
            self._changed.notify_all()

    def restart(self) -> None:
        """Forgets all attempts before this member joins again, since views of another chain may have lower numbers."""
        with self._changed:
            self._open, self._dropped = None, NO_VIEW
            self._due, self._here = {}, {}

    def stop(self, error: BaseException) -> None:
        """Ends all waits with this error, because this member has left the job."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _over(self, attempt: SlotAttempt) -> bool:
        now = self._open
        older = now is not None and (attempt.view < now.view or attempt.seq < now.seq)
        return attempt.view <= self._dropped or older

    @property
    def nbytes(self) -> int:
        """Bytes of received border tensors that wait to be taken, complete or not."""
        return sum(reader.nbytes for found in self._here.values() for _, reader in found.values())

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        """Returns the memory to receive a frame's payload in; None if the frame belongs to an attempt that is over.

        Raises:
            WireError: The peer does not send this border, or it is beyond the limits.
        """
        attempt, key = SlotAttempt(frame.view, frame.seq), _key(frame)
        with self._changed:
            if self._over(attempt):
                return None
            if attempt == self._open and self._due.get(key) != peer:
                raise WireError(f"{peer} sends {_in_words(key)}, which no unit here takes from it")
            borders = self._here.setdefault(attempt, {})
            sender, reader = borders.get(key, (peer, None))
            if sender != peer or (reader is not None and reader.complete):
                raise WireError(f"{peer} sends {_in_words(key)}, which {sender} has sent")
            if self.nbytes + frame.length > self._limit_nbytes:
                raise WireError(f"border tensors that wait here would have more than {self._limit_nbytes} bytes")
            if reader is None:
                reader = BorderReader(self._limit_nbytes)
                borders[key] = (peer, reader)
            return reader.room(frame.length)

    def arrived(self, peer: str, frame: Frame, payload: memoryview | PartialSum) -> None:
        """Records that a frame's payload has arrived in the memory that `target` returned.

        Raises:
            WireError: The frame has no bytes, belongs to no border that the peer sends, or exceeds the limit.
        """
        attempt, key = SlotAttempt(frame.view, frame.seq), _key(frame)
        with self._changed:
            if self._over(attempt):
                return
            found = self._here.get(attempt, {}).get(key)
            if found is None or found[0] != peer or not isinstance(payload, memoryview) or not payload.nbytes:
                raise WireError(f"{peer} sends a frame of no bytes for {_in_words(key)}")
            reader = found[1]
            reader.filled(payload.nbytes)
            if self.nbytes > self._limit_nbytes:
                raise WireError(f"border tensors that wait here would have more than {self._limit_nbytes} bytes")
            if reader.complete:
                self._changed.notify_all()


def _key(frame: Frame) -> BorderKey:
    return BorderKey(_KINDS[frame.type], frame.start >> _LAYER_BITS, frame.start & ((1 << _LAYER_BITS) - 1))


def _in_words(key: BorderKey) -> str:
    what = "activations" if key.kind == FORWARD else "gradients"
    return f"{what} of micro-batch {key.micro_batch} at layer {key.layer}"
