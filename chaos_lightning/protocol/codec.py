"""Converts dataclasses to protobuf messages and back: the job's own (protocol/types.py) and those of other services.

Theory of operation. A `Vocabulary` is a set of dataclasses with a proto file that has a message of the same name for
each. For each dataclass a *plan* is made once, from its type hints and from the descriptor of the proto
message of the same name: one pair of small functions per field. A field that exists on one side only, or whose types do
not fit, is a TypeError at import. Encoding is strict about Python types (an `int` where a float is declared would hash
differently on the other side, and headers are compared by hash); decoding is strict about everything a wire can do
wrong and raises WireError: garbage, a missing part, an unknown enum, an interval that runs backwards, too many bytes,
and what the dataclass itself calls a `flaw`.
Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from chaos_lightning.errors import WireError
from chaos_lightning.protocol import chaos_pb2, limits, packing
from chaos_lightning.protocol import types as job_types
from chaos_lightning.protocol.types import MAX_PEER_NBYTES, FromMember, PeerMessage, ToMember, View

T = TypeVar("T")

MAX_CONTROL_NBYTES = 64 << 20
"""Limit of one gRPC message (bytes); a Decide may hold such a header."""

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Functions that make (part of) a message of a value, and the value of it."""
_INT64 = 1 << 63


@dataclasses.dataclass(slots=True)
class _Field:
    """Codec of one field of a dataclass; an `optional` field may be None, any other field that is a message must be
    set.
    """

    name: str
    put: Callable[[Any], Any]
    get: Callable[[Any], Any]
    message: bool
    optional: bool


class _Plan:
    """Encoder and decoder of one dataclass, field by field."""

    def __init__(self, cls: type, message: Any) -> None:
        self.cls = cls
        self.message = message
        self.fields: list[_Field] = []
        self.flaw: Callable[[Any], str] | None = getattr(cls, "flaw", None)

    def build(self, vocabulary: Vocabulary) -> None:
        hints = typing.get_type_hints(self.cls)
        ours = [f.name for f in dataclasses.fields(self.cls)]
        theirs = {f.name: f for f in self.message.DESCRIPTOR.fields}
        if ours != list(theirs):
            raise TypeError(f"{self.cls.__name__}: dataclass has {ours}, {vocabulary.proto} has {list(theirs)}")
        for name in ours:
            try:
                field = _field(vocabulary, name, hints[name], theirs[name])
                field.get = _limited(self.cls.__name__, name, hints[name], field.get)
                self.fields.append(field)
            except TypeError as error:
                raise TypeError(f"{self.cls.__name__}.{name} {error} ({vocabulary.proto})") from None

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
        value = self.cls(*values)
        if self.flaw is not None and (words := self.flaw(value)):
            raise WireError(f"{self.cls.__name__}: {words}")
        return value


class _Packed:
    """Encoder and decoder of a dataclass that is sent as another dataclass, its packed form."""

    def __init__(self, cls: type, form: _Plan, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.cls = cls
        self.message = form.message
        self._form = form
        self._pack = pack
        self._unpack = unpack

    def encode(self, value: Any) -> Any:
        return self._form.encode(self._pack(value))

    def decode(self, message: Any) -> Any:
        return self._unpack(self._form.decode(message))


def _exact(kind: type) -> Codec:
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


def _span(message: Any) -> Codec:
    def put(value: Any) -> Any:
        start, stop = value
        return message(start=_put_int(start), stop=_put_int(stop))

    def get(said: Any) -> tuple[int, int]:
        start, stop = said.start, said.stop
        if not 0 <= start <= stop:
            raise WireError(f"interval [{start}, {stop}) is none")
        return (start, stop)

    return put, get


def _pair(message: Any) -> Codec:
    def put(value: Any) -> Any:
        name, text = value
        return message(name=name, value=text)

    name_of = _limited("NamedText", "name", str, lambda value: value)
    value_of = _limited("NamedText", "value", str, lambda value: value)
    return put, lambda said: (name_of(said.name), value_of(said.value))


def _limited(message: str, name: str, hint: Any, get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the decoder of a field, so that it checks the field's limits (protocol/limits.py) first."""
    where, many = f"{message}.{name}", typing.get_args(hint)[-1:] == (Ellipsis,)
    inner = typing.get_args(hint)[0] if many else hint
    most_items, most_nbytes = limits.LISTS.get(name), limits.most_nbytes(message, name)
    in_range = limits.range_of(message, name)
    least, greatest = in_range or (-_INT64, _INT64)

    def check(value: Any) -> None:
        if inner is str and len(value) > most_nbytes // 4 and (size := limits.nbytes(value)) > most_nbytes:
            raise WireError(f"{where} has {size} bytes; expected {most_nbytes} at most")
        if inner in (int, float) and not least <= value <= greatest:
            raise WireError(f"{where} is {value}; expected {least} to {greatest}")

    def limited(value: Any) -> Any:
        if many and most_items is not None and len(value) > most_items:
            raise WireError(f"{where} has {len(value)} items; expected {most_items} at most")
        for one in value if many else (value,):
            check(one)
        return get(value)

    bounded = inner is str or in_range is not None or (many and most_items is not None)
    return limited if bounded else get


def _enum(cls: type[enum.Enum], descriptor: Any) -> Codec:
    numbers = {member: descriptor.values_by_name[member.name].number for member in cls}
    members = {number: member for member, number in numbers.items()}
    if len(descriptor.values) != len(numbers) + 1 or 0 in members:
        raise TypeError(f"{cls.__name__}: its values in the proto file differ (0 must stay unused)")

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
_SCALARS: dict[type, tuple[tuple[str, ...], Codec]] = {
    int: (("TYPE_INT64", "TYPE_SINT64"), (_put_int, lambda value: value)),
    float: (("TYPE_DOUBLE",), (_put_float, _get_float)),
    bool: (("TYPE_BOOL",), _exact(bool)),
    str: (("TYPE_STRING",), _exact(str)),
    bytes: (("TYPE_BYTES",), _exact(bytes)),
}


def _single(vocabulary: Vocabulary, hint: Any, descriptor: Any) -> tuple[Codec, bool]:
    """Returns the codec of a single value of this type, and whether it is encoded as a message."""
    if hint in _SCALARS:
        fitting, codec = _SCALARS[hint]
        if descriptor.type not in [getattr(descriptor, name) for name in fitting]:
            raise TypeError(f"is a {hint.__name__}, but {' or '.join(fitting)} is not its type")
        return codec, False
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if descriptor.enum_type is None or descriptor.enum_type.name != hint.__name__:
            raise TypeError(f"is the enum {hint.__name__}, and no such enum there")
        return _enum(hint, descriptor.enum_type), False
    wanted, codec = vocabulary.message(hint)
    name = descriptor.message_type.name if descriptor.message_type is not None else "no message"
    if name != wanted:
        raise TypeError(f"is a {wanted}, and {name} there")
    return codec, True


def _field(vocabulary: Vocabulary, name: str, hint: Any, descriptor: Any) -> _Field:
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        (put, get), message = _single(vocabulary, inner, descriptor)
        if not message or not descriptor.has_presence:
            raise TypeError("may be None, so it must be an optional message")
        return _Field(name, put, get, True, True)
    if typing.get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        if not descriptor.is_repeated:
            raise TypeError("is a tuple, so it must be repeated")
        (put, get), message = _single(vocabulary, arguments[0], descriptor)
        puts = _put_integers if arguments[0] is int else _all(put)
        return _Field(name, puts, _every(get, message or arguments[0] in (float,)), False, False)
    if descriptor.is_repeated:
        raise TypeError("is repeated there, so it must be a tuple")
    (put, get), message = _single(vocabulary, hint, descriptor)
    return _Field(name, put, get, message, False)


def _all(put: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def puts(value: Any) -> Any:
        if type(value) is not tuple:
            raise TypeError(f"expected a tuple, got {type(value).__name__}")
        return [put(v) for v in value]

    return puts


def _put_integers(value: Any) -> Any:
    """Checks that a value is a tuple of integers and returns it; quicker than `_all`, for tuples of thousands.

    Protobuf rejects integers of more than 64 bits.
    """
    if type(value) is not tuple or not {int}.issuperset(map(type, value)):
        raise TypeError("expected a tuple of int")
    return value


def _every(get: Callable[[Any], Any], convert: bool) -> Callable[[Any], Any]:
    if not convert:
        return tuple
    return lambda values: tuple([get(v) for v in values])


def snake(name: str) -> str:
    """Converts a class's name to the name of its field in an envelope: LinkEvent -> link_event."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Vocabulary:
    """Messages of one service: dataclasses, each with a protobuf message of the same name.

    Args:
        classes: Dataclasses, and anything else, which is left out as are dataclasses that have no message.
        stubs: The module that protoc made of the proto file. Intervals (tuple[int, int]) are its `Span`, pairs of texts
            its `NamedText`.
        known: Vocabularies whose dataclasses may be parts of these; the proto file imports theirs.
        special: Types that travel in another way: the message's name, and how.
        packed: Dataclasses that travel in the form of another one of `classes`: that one, and the way there and back.

    Raises:
        TypeError: A dataclass and its message differ.
    """

    def __init__(
        self,
        classes: Iterable[Any],
        stubs: Any,
        known: Iterable[Vocabulary] = (),
        special: Mapping[Any, tuple[str, Codec]] | None = None,
        packed: Mapping[type, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] | None = None,
    ) -> None:
        self.proto = str(stubs.DESCRIPTOR.name).rpartition("/")[2]
        self.envelopes: list[Envelope] = []
        """All that were made by `envelope`."""
        own = {
            cls: _Plan(cls, getattr(stubs, cls.__name__))
            for cls in classes
            if dataclasses.is_dataclass(cls) and isinstance(cls, type) and hasattr(stubs, cls.__name__)
        }
        self._plans: dict[type, _Plan | _Packed] = {}
        self._plain: dict[Any, tuple[str, Codec]] = {}
        for other in known:
            self._plans |= other._plans
            self._plain |= other._plain
        self._plans |= own
        for cls, (form, pack, unpack) in (packed or {}).items():
            self._plans[cls] = _Packed(cls, own[form], pack, unpack)
        self._plain |= special or {}
        if hasattr(stubs, "Span"):
            self._plain |= dict.fromkeys((tuple[int, int], _SPAN_HINT), ("Span", _span(stubs.Span)))
        if hasattr(stubs, "NamedText"):
            self._plain[tuple[str, str]] = ("NamedText", _pair(stubs.NamedText))
        for plan in own.values():
            plan.build(self)

    @property
    def classes(self) -> frozenset[type]:
        """Dataclasses that have a message."""
        return frozenset(self._plans)

    def stub(self, cls: type) -> Any:
        """Returns the protobuf class for this dataclass."""
        return self._plans[cls].message

    def message(self, hint: Any) -> tuple[str, Codec]:
        """Returns the message's name and the codec for values of this type.

        Raises:
            TypeError: There is none.
        """
        if hint in self._plain:
            return self._plain[hint]
        plan = self._plans.get(hint)
        if plan is None:
            raise TypeError(f"has the type {hint}, which has no place in a message")
        return plan.message.DESCRIPTOR.name, (plan.encode, plan.decode)

    def encode(self, value: object, limit: int = MAX_CONTROL_NBYTES) -> bytes:
        """Encodes one of these dataclasses as bytes, as stores keep views and headers.

        Raises:
            TypeError: The value's type has no message, or a field has another type.
            WireError: The encoding has more than `limit` bytes.
        """
        plan = self._plans.get(type(value))
        if plan is None:
            raise TypeError(f"{type(value).__name__} has no message in {self.proto}")
        return _serialize(plan.encode(value), limit)

    def decode(self, cls: type[T], data: bytes | bytearray | memoryview, limit: int = MAX_CONTROL_NBYTES) -> T:
        """Decodes bytes from `encode` to the dataclass `cls`.

        Raises:
            WireError: These bytes are no such message.
        """
        plan = self._plans[cls]
        result: T = plan.decode(_parse(plan.message, data, limit))
        return result

    def envelope(self, union: Any, message: Any, limit: int = MAX_CONTROL_NBYTES) -> Envelope:
        """Makes an envelope for a union of these dataclasses; checks that it matches the proto file.

        Args:
            union: Union of the dataclasses.
            message: Proto message that has a oneof `message` with a field for each (`snake`).
            limit: Largest number of bytes.

        Raises:
            TypeError: The union and the proto message differ.
        """
        fields = {cls: snake(cls.__name__) for cls in typing.get_args(union)}
        there = {f.name: f.message_type.name for f in message.DESCRIPTOR.oneofs_by_name["message"].fields}
        if there != {field: cls.__name__ for cls, field in fields.items()}:
            raise TypeError(
                f"{message.DESCRIPTOR.name}: {self.proto} has {sorted(there)}, the union {sorted(fields.values())}"
            )
        self.envelopes.append(
            Envelope(message, limit, {cls: (field, self._plans[cls]) for cls, field in fields.items()})
        )
        return self.envelopes[-1]


class Envelope:
    """Codec of a message that contains one of several messages; made by `Vocabulary.envelope`."""

    def __init__(self, message: Any, limit: int, plans: dict[type, tuple[str, _Plan | _Packed]]) -> None:
        self.message = message
        self.classes = tuple(plans)
        self._limit = limit
        self._plans = plans
        self._by_field = dict(plans.values())

    def wrap(self, value: Any) -> Any:
        """Puts a message into a protobuf envelope."""
        field, plan = self._plans.get(type(value), ("", None))
        if plan is None:
            raise TypeError(f"{type(value).__name__} is no message of {self.message.DESCRIPTOR.name}")
        return self.message(**{field: plan.encode(value)})

    def unwrap(self, envelope: Any) -> Any:
        """Returns the message in a protobuf envelope; raises WireError if it is malformed."""
        field = envelope.WhichOneof("message")
        if field is None:
            raise WireError(f"{self.message.DESCRIPTOR.name} without a known message")
        return self._by_field[field].decode(getattr(envelope, field))

    def encode(self, value: Any) -> bytes:
        """Encodes a message in its envelope as bytes."""
        return _serialize(self.wrap(value), self._limit)

    def parse(self, data: bytes | bytearray | memoryview) -> Any:
        """Decodes bytes from `encode` to a protobuf envelope; raises WireError if they are none."""
        return _parse(self.message, data, self._limit)

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Decodes bytes from `encode` to the message in the envelope; raises WireError if they are malformed."""
        return self.unwrap(self.parse(data))


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


# --- what the members and the scheduler of a job say ----------------------------------------------------------------

JOB = Vocabulary(  # Settings never travels
    [*vars(job_types).values(), packing.PackedMembers, packing.PackedTree, packing.PackedView, packing.PackedChange],
    chaos_pb2,
    packed={View: (packing.PackedView, packing.pack_view, packing.unpack_view)},
)
FROM_MEMBER = JOB.envelope(FromMember, chaos_pb2.FromMemberEnvelope)
TO_MEMBER = JOB.envelope(ToMember, chaos_pb2.ToMemberEnvelope)
PEER = JOB.envelope(PeerMessage, chaos_pb2.PeerEnvelope, MAX_PEER_NBYTES)

encode, decode = JOB.encode, JOB.decode


def encode_peer(message: PeerMessage) -> bytes:
    """Encodes a Contribution or Header as bytes, for another member."""
    return PEER.encode(message)


def decode_peer(data: bytes | bytearray | memoryview) -> PeerMessage:
    """Decodes bytes from `encode_peer`; raises WireError if they are malformed."""
    message: PeerMessage = PEER.decode(data)
    return message


def wrap_from_member(message: FromMember) -> Any:
    """Puts a member's message to the scheduler into a FromMemberEnvelope."""
    return FROM_MEMBER.wrap(message)


def unwrap_from_member(envelope: Any) -> FromMember:
    message: FromMember = FROM_MEMBER.unwrap(envelope)
    return message


def wrap_to_member(message: ToMember) -> Any:
    """Puts a scheduler's message to a member into a ToMemberEnvelope."""
    return TO_MEMBER.wrap(message)


def encode_to_member(message: ToMember) -> bytes:
    """Encodes a scheduler's message as bytes once, to be sent to many members."""
    return TO_MEMBER.encode(message)


def unwrap_to_member(envelope: Any) -> ToMember:
    message: ToMember = TO_MEMBER.unwrap(envelope)
    return message
