"""Describes a service: a pure state machine, and the messages and records of its vocabulary.

Theory of operation. Whoever writes these gets a durable, elected and authenticated service (ready.py) and a simulated
world for it (testing/service_world.py). The machine has one entrance, `on(now, event)`, and returns effects, which are
carried out in order. It is made anew, from all records that its store holds, by each process that comes to lead. It
must tell nobody what a restart would not know: it puts a record, and tells of it once it hears `RecordStored`, which is
the next event after all effects beside the record are carried out.

Messages and records are dataclasses of plain parts, encoded by protocol/plain.py; each vocabulary is one of them, or a
union of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.plain import read_text, text_of


@dataclass(frozen=True, slots=True)
class ClientSaid:
    """Event: a client has said something.

    Attributes:
        conn: Number of its stream.
        name: Name by which the client introduced itself; another process may come with the same one.
        message: One of `ServiceSpec.hears`.
    """

    conn: int
    name: str
    message: Any


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Event: a stream has ended. `abrupt`: its process died or cannot be reached, rather than having closed it."""

    conn: int
    abrupt: bool


@dataclass(frozen=True, slots=True)
class RecordStored:
    """Event: a record is durable."""

    record: Any


@dataclass(frozen=True, slots=True)
class TimePasses:
    """Event: some time has passed, about a tenth of a second."""


ServiceEvent = ClientSaid | ClientLeft | RecordStored | TimePasses


@dataclass(frozen=True, slots=True)
class TellClient:
    """Effect: send a message, one of `ServiceSpec.says`, on a stream, if it still stands."""

    conn: int
    message: Any


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Effect: make a record durable, one of `ServiceSpec.records`. `sums_up`: it takes the place of all before it."""

    record: Any
    sums_up: bool = False


@dataclass(frozen=True, slots=True)
class EndStream:
    """Effect: end a stream after what was sent on it, and tell its client that it is refused and why."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndService:
    """Effect: the service has nothing more to do."""

    reason: str


ServiceEffect = TellClient | PutRecord | EndStream | EndService


class ServiceMachine(Protocol):
    """Interface of a service's state machine."""

    def on(self, now: float, event: ServiceEvent) -> Sequence[ServiceEffect]:
        """Handles an event that happened at `now` (monotonic, s); returns what is to be done, in order."""


class SpecClient(Protocol):
    """Interface of a pure client of a service, which outlives its streams (ready.talk, testing/service_world.py)."""

    name: str

    @property
    def done(self) -> bool:
        """Whether it has nothing more to say or to hear."""

    def connected(self) -> Iterable[Any]:
        """Returns what it says on a new stream: all that is not answered yet."""

    def heard(self, message: Any) -> Iterable[Any]:
        """Takes a message; returns what it says then."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """First message of every client."""

    name: str


def _written(hint: Any, value: Any) -> bytes:
    """Encodes a value of this type.

    Raises:
        TypeError: It is of another type, in a part of it perhaps: who reads it would not take it.
    """
    try:
        data = text_of(hint, value)
        if read_text(hint, data) == value:
            return data
    except (KeyError, AttributeError, ValueError, TypeError, WireError) as error:
        raise TypeError(f"{value!r:.200} is no message or record of this service: {error}") from error
    raise TypeError(f"{value!r:.200} is read as something else")


@dataclass(frozen=True)
class ServiceSpec:
    """A service.

    Attributes:
        name: Name of the service, a plain word; its call is "/chaos_lightning.service.NAME/Attend".
        hears: Dataclass, or union of them, that clients say.
        says: The same of what clients are told.
        records: The same of what is stored.
        machine: Makes the machine from the records, oldest first.
    """

    name: str
    hears: Any
    says: Any
    records: Any
    machine: Callable[[Sequence[Any]], ServiceMachine]

    @property
    def path(self) -> str:
        """Name of the gRPC service."""
        return f"chaos_lightning.service.{self.name}"

    def write_said(self, message: Any) -> bytes:
        """Encodes what a client says."""
        return _written(self.hears | Introduction, message)

    def read_said(self, data: bytes) -> Any:
        """Decodes what a client says; raises WireError if it is malformed."""
        return read_text(self.hears | Introduction, data)

    def write_told(self, message: Any) -> bytes:
        """Encodes what a client is told; None is the empty message, which says that this server leads."""
        return b"" if message is None else _written(self.says | None, message)

    def read_told(self, data: bytes) -> Any:
        """Decodes what a client is told; raises WireError if it is malformed."""
        return read_text(self.says | None, data) if data else None

    def write_record(self, record: Any) -> bytes:
        """Encodes a record."""
        return _written(self.records | None, record)

    def read_record(self, data: bytes) -> Any:
        """Decodes a record; raises WireError if it is malformed."""
        return read_text(self.records | None, data)
