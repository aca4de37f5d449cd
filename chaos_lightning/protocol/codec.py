"""Dataclasses of protocol/types.py to bytes and back.

Theory of operation. For each dataclass a *plan* is made once, from its type hints and from the descriptor of the proto
message of the same name: one pair of small functions per field. A field that exists on one side only, or whose types do
not fit, is a TypeError at import. Encoding is strict about Python types (an `int` where a float is declared would hash
differently on the other side, and headers are compared by hash); decoding is strict about everything a wire can do
wrong and raises WireError: garbage, a missing part, an unknown enum, an interval that runs backwards, too many bytes.
Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from chaos_lightning.errors import WireError
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol import types as vocabulary
from chaos_lightning.protocol.types import MAX_PEER_NBYTES, FromMember, PeerMessage, ToMember

T = TypeVar("T")

MAX_CONTROL_NBYTES = 64 << 20
"""Limit of one gRPC message (bytes); a Decide may hold such a header."""

_Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
_INT64 = 1 << 63


@dataclasses.dataclass(slots=True)
class _Field:
    """How one field travels. `present` fields are messages that must be there; `optional` ones may be None."""

    name: str
    put: Callable[[Any], Any]
    get: Callable[[Any], Any]
    message: bool
    optional: bool


class _Plan:
    """Encoder and decoder of one dataclass."""

    def __init__(self, cls: type, message: Any) -> None:
        self.cls = cls
        self.message = message
        self.fields: list[_Field] = []

    def build(self) -> None:
        hints = typing.get_type_hints(self.cls)
        ours = [f.name for f in dataclasses.fields(self.cls)]
        theirs = {f.name: f for f in self.message.DESCRIPTOR.fields}
        if ours != list(theirs):
            raise TypeError(f"{self.cls.__name__}: dataclass has {ours}, chaos.proto has {list(theirs)}")
        for name in ours:
            self.fields.append(_field(self.cls.__name__, name, hints[name], theirs[name]))

    def encode(self, value: Any) -> Any:
        values = {}
        for field in self.fields:
            given = getattr(value, field.name)
            if field.optional and given is None:
                continue
            try:
                values[field.name] = field.put(given)
            except TypeError as error:
                raise TypeError(f"{self.cls.__name__}.{field.name}: {error}") from None
        try:
            return self.message(**values)
        except (ValueError, TypeError, UnicodeError) as error:
            raise WireError(f"{self.cls.__name__} does not fit the wire: {error}") from error

    def decode(self, message: Any) -> Any:
        values: list[Any] = []
        for field in self.fields:
            if field.message and not message.HasField(field.name):
                if not field.optional:
                    raise WireError(f"{self.cls.__name__} without {field.name}")
                values.append(None)
            else:
                values.append(field.get(getattr(message, field.name)))
        return self.cls(*values)


def _exact(kind: type) -> _Codec:
    def put(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {value!r} ({type(value).__name__})")
        return value

    return put, lambda value: value


def _put_int(value: Any) -> Any:
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise TypeError(f"expected an int of 64 bits, got {value!r} ({type(value).__name__})")
    return value


def _put_float(value: Any) -> Any:
    if type(value) is not float:
        raise TypeError(f"expected float, got {value!r} ({type(value).__name__}); convert it, for headers are hashed")
    return value


def _get_float(value: float) -> float:
    if not math.isfinite(value):
        raise WireError(f"a number that is not finite: {value}")
    return value


def _put_span(value: Any) -> Any:
    start, stop = value
    return chaos_pb2.Span(start=_put_int(start), stop=_put_int(stop))


def _get_span(message: Any) -> tuple[int, int]:
    start, stop = message.start, message.stop
    if not 0 <= start <= stop:
        raise WireError(f"interval [{start}, {stop}) is none")
    return (start, stop)


def _put_pair(value: Any) -> Any:
    name, text = value
    return chaos_pb2.NamedText(name=name, value=text)


def _enum(cls: type[enum.Enum], descriptor: Any) -> _Codec:
    numbers = {member: descriptor.values_by_name[member.name].number for member in cls}
    members = {number: member for member, number in numbers.items()}
    if len(descriptor.values) != len(numbers) + 1 or 0 in members:
        raise TypeError(f"{cls.__name__}: its values in chaos.proto differ (0 must stay unused)")

    def put(value: Any) -> Any:
        if type(value) is not cls:
            raise TypeError(f"expected {cls.__name__}, got {value!r}")
        return numbers[value]

    def get(value: int) -> Any:
        member = members.get(value)
        if member is None:
            raise WireError(f"{cls.__name__} number {value} is unknown")
        return member

    return put, get


_SPAN_HINT = typing.Tuple[int, int]  # noqa: UP006  (compared with hints, which may be either form)
_SCALARS: dict[type, tuple[str, _Codec]] = {
    int: ("TYPE_INT64", (_put_int, lambda value: value)),
    float: ("TYPE_DOUBLE", (_put_float, _get_float)),
    bool: ("TYPE_BOOL", _exact(bool)),
    str: ("TYPE_STRING", _exact(str)),
    bytes: ("TYPE_BYTES", _exact(bytes)),
}


def _single(hint: Any, descriptor: Any) -> tuple[_Codec, bool]:
    """Codec of one value of this type, and whether it is a message."""
    if hint in _SCALARS:
        wanted, codec = _SCALARS[hint]
        if descriptor.type != getattr(descriptor, wanted):
            raise TypeError(f"is a {hint.__name__}, but {wanted} is not its type in chaos.proto")
        return codec, False
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if descriptor.enum_type is None or descriptor.enum_type.name != hint.__name__:
            raise TypeError(f"is the enum {hint.__name__}, chaos.proto disagrees")
        return _enum(hint, descriptor.enum_type), False
    name = descriptor.message_type.name if descriptor.message_type is not None else "no message"
    if hint in (tuple[int, int], _SPAN_HINT):
        wanted, codec = "Span", (_put_span, _get_span)
    elif hint == tuple[str, str]:
        wanted, codec = "NamedText", (_put_pair, lambda message: (message.name, message.value))
    elif hint in _PLANS:
        plan = _PLANS[hint]
        wanted, codec = hint.__name__, (plan.encode, plan.decode)
    else:
        raise TypeError(f"has the type {hint}, which has no place in a message")
    if name != wanted:
        raise TypeError(f"is a {wanted}, in chaos.proto it is {name}")
    return codec, True


def _field(owner: str, name: str, hint: Any, descriptor: Any) -> _Field:
    try:
        arguments = typing.get_args(hint)
        if isinstance(hint, types.UnionType):
            (inner,) = (a for a in arguments if a is not type(None))
            (put, get), message = _single(inner, descriptor)
            if not message or not descriptor.has_presence:
                raise TypeError("may be None, so it must be an optional message in chaos.proto")
            return _Field(name, put, get, True, True)
        if typing.get_origin(hint) is tuple and arguments[-1] is Ellipsis:
            if not descriptor.is_repeated:
                raise TypeError("is a tuple, so it must be repeated in chaos.proto")
            (put, get), message = _single(arguments[0], descriptor)
            return _Field(name, _all(put), _every(get, message or arguments[0] in (float,)), False, False)
        if descriptor.is_repeated:
            raise TypeError("is repeated in chaos.proto, so it must be a tuple")
        (put, get), message = _single(hint, descriptor)
        return _Field(name, put, get, message, False)
    except TypeError as error:
        raise TypeError(f"{owner}.{name} {error}") from None


def _all(put: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def puts(value: Any) -> Any:
        if type(value) is not tuple:
            raise TypeError(f"expected a tuple, got {type(value).__name__}")
        return [put(v) for v in value]

    return puts


def _every(get: Callable[[Any], Any], convert: bool) -> Callable[[Any], Any]:
    if not convert:
        return tuple
    return lambda values: tuple([get(v) for v in values])


def snake(name: str) -> str:
    """Name of a message's field in its envelope: LinkEvent -> link_event."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# Every dataclass of the vocabulary that has a message of its own; Settings never travels.
_PLANS: dict[type, _Plan] = {
    cls: _Plan(cls, getattr(chaos_pb2, name))
    for name, cls in vars(vocabulary).items()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type) and hasattr(chaos_pb2, name)
}
for _plan in _PLANS.values():
    _plan.build()


def _members(union: Any, envelope: Any) -> dict[type, str]:
    """Field of the envelope's oneof for each member of the union; both must have the same."""
    fields = {cls: snake(cls.__name__) for cls in typing.get_args(union)}
    there = {f.name: f.message_type.name for f in envelope.DESCRIPTOR.oneofs_by_name["message"].fields}
    if there != {field: cls.__name__ for cls, field in fields.items()}:
        raise TypeError(
            f"{envelope.DESCRIPTOR.name}: chaos.proto has {sorted(there)}, types.py {sorted(fields.values())}"
        )
    return fields


class _Envelope:
    """One of several messages."""

    def __init__(self, union: Any, message: Any, limit: int) -> None:
        self.message = message
        self.limit = limit
        self._fields = _members(union, message)
        self._plans = {field: _PLANS[cls] for cls, field in self._fields.items()}

    def wrap(self, value: Any) -> Any:
        field = self._fields.get(type(value))
        if field is None:
            raise TypeError(f"{type(value).__name__} is no message of {self.message.DESCRIPTOR.name}")
        return self.message(**{field: self._plans[field].encode(value)})

    def unwrap(self, envelope: Any) -> Any:
        field = envelope.WhichOneof("message")
        if field is None:
            raise WireError(f"{self.message.DESCRIPTOR.name} without a known message")
        return self._plans[field].decode(getattr(envelope, field))


_FROM_MEMBER = _Envelope(FromMember, chaos_pb2.FromMemberEnvelope, MAX_CONTROL_NBYTES)
_TO_MEMBER = _Envelope(ToMember, chaos_pb2.ToMemberEnvelope, MAX_CONTROL_NBYTES)
_PEER = _Envelope(PeerMessage, chaos_pb2.PeerEnvelope, MAX_PEER_NBYTES)


def _serialize(message: Any, limit: int) -> bytes:
    try:
        data: bytes = message.SerializeToString()
    except EncodeError as error:
        raise WireError(f"{message.DESCRIPTOR.name} cannot be written: {error}") from error
    if len(data) > limit:
        raise WireError(f"{message.DESCRIPTOR.name} of {len(data)} bytes, the limit is {limit}")
    return data


def _parse(cls: Any, data: bytes | bytearray | memoryview, limit: int) -> Any:
    if len(data) > limit:
        raise WireError(f"{cls.DESCRIPTOR.name} of {len(data)} bytes, the limit is {limit}")
    try:
        return cls.FromString(bytes(data))
    except (DecodeError, UnicodeError) as error:
        raise WireError(f"{len(data)} bytes are no {cls.DESCRIPTOR.name}: {error}") from error


def encode(value: object, limit: int = MAX_CONTROL_NBYTES) -> bytes:
    """Bytes of any dataclass of the vocabulary (stores keep views and headers this way)."""
    plan = _PLANS.get(type(value))
    if plan is None:
        raise TypeError(f"{type(value).__name__} has no message in chaos.proto")
    return _serialize(plan.encode(value), limit)


def decode(cls: type[T], data: bytes | bytearray | memoryview, limit: int = MAX_CONTROL_NBYTES) -> T:
    """The dataclass `cls` back from `encode`'s bytes.

    Raises:
        WireError: These bytes are no such message.
    """
    plan = _PLANS[cls]
    result: T = plan.decode(_parse(plan.message, data, limit))
    return result


def encode_peer(message: PeerMessage) -> bytes:
    """A Contribution or Header for another member."""
    return _serialize(_PEER.wrap(message), MAX_PEER_NBYTES)


def decode_peer(data: bytes | bytearray | memoryview) -> PeerMessage:
    """Back from `encode_peer`; WireError on anything odd."""
    message: PeerMessage = _PEER.unwrap(_parse(_PEER.message, data, MAX_PEER_NBYTES))
    return message


def wrap_from_member(message: FromMember) -> Any:
    """The FromMemberEnvelope around this message."""
    return _FROM_MEMBER.wrap(message)


def unwrap_from_member(envelope: Any) -> FromMember:
    message: FromMember = _FROM_MEMBER.unwrap(envelope)
    return message


def wrap_to_member(message: ToMember) -> Any:
    """The ToMemberEnvelope around this message."""
    return _TO_MEMBER.wrap(message)


def unwrap_to_member(envelope: Any) -> ToMember:
    message: ToMember = _TO_MEMBER.unwrap(envelope)
    return message
