"""Makes and mutates messages of all protocols from their types, and fuzzes the codecs that read them.

Theory of operation. `Words` is one way in which dataclasses become bytes: an envelope of a vocabulary, or a `Record` of
one dataclass by itself. Values are made from the types of fields, mostly within the limits that the codec has for them
(protocol/limits.py). So a message that is added to a vocabulary is said to whatever reads it without a line here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from google.protobuf.message import DecodeError

from chaos_lightning.errors import StoreError, WireError
from chaos_lightning.outer.exchange.vocabulary import OUTER, body_bytes, entry_of
from chaos_lightning.outer.rules.types import Body
from chaos_lightning.protocol import chaos_pb2, limits
from chaos_lightning.protocol.changes import change_to, changed
from chaos_lightning.protocol.codec import JOB, Envelope, Vocabulary
from chaos_lightning.protocol.packing import PackedChange
from chaos_lightning.protocol.types import LinkSpec, Member, Span, View, ViewId
from chaos_lightning.service.store import StoreRecord
from lab.fuzz import mutate
from lab.fuzz.target import FindingError, Target

UNSIGNED = (0, 1, 2, 6, 7, 8, 255, 3000, 4800, 1 << 20, (1 << 32) - 1, 1 << 32, (1 << 50) - 1, 1 << 63, (1 << 64) - 1)
"""Numbers that are put into the headers of frames."""
_DRAWS = 500
"""Number of values of one class of which its reader must accept one."""


# ------------------------------------------------------------------ values


def value_of(hint: Any, rng: Random) -> Any:
    """Returns a plausible random value of a field's type, mostly small numbers and ids that exist."""
    if hint is int:
        return rng.choice((0, 1, 2, 3, 4, 7, 1000)) if rng.randint(0, 9) else rng.choice(mutate.NUMBERS)
    if hint is float:
        return rng.choice((0.0, 0.1, 1.0, -1.0, 1e9, 1e308))
    if hint is bool:
        return bool(rng.randint(0, 1))
    if hint is str:
        return rng.choice(mutate.IDS) if rng.randint(0, 3) else rng.choice(mutate.TEXTS)
    if hint is bytes:
        return bytes(rng.randint(0, 255) for _ in range(rng.choice((0, 1, 16))))
    if hint is ViewId:
        return ViewId(rng.choice((1, 1, 1, 2)), rng.randint(0, 5))
    if hint == Span:
        start = rng.randint(0, 8)
        return (start, start + rng.randint(0, 8))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return rng.choice(list(hint))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        some = [one for one in inner if one is not types.NoneType]
        return None if len(some) < len(inner) and rng.randint(0, 1) else value_of(rng.choice(some), rng)
    if origin is dict:
        return {value_of(inner[0], rng): value_of(inner[1], rng) for _ in range(rng.randint(0, 2))}
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(value_of(one, rng) for one in inner)
    if origin in (tuple, list):
        return origin(value_of(inner[0], rng) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    return _dataclass_of(hint, rng)


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Returns the field types of a dataclass."""
    found = typing.get_type_hints(cls)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def _dataclass_of(cls: Any, rng: Random) -> Any:
    """Returns a random value of a dataclass, drawn again up to five times while its `flaw` objects."""
    flaw: Callable[[Any], str] = getattr(cls, "flaw", lambda value: "")
    for _ in range(5):
        fields = {name: _within(cls.__name__, name, value_of(hint, rng), rng) for name, hint in hints(cls).items()}
        value = _distinct(View(**fields), rng) if cls is View else cls(**fields)
        if not flaw(value):
            break
    return value


def _within(message: str, field: str, value: Any, rng: Random) -> Any:
    """Returns the value, mostly cut down to the limits of its message field."""
    if rng.randint(0, 30) == 0:
        return value
    if isinstance(value, tuple):
        return tuple(_within(message, field, one, rng) for one in value)
    if type(value) is str:
        return value.encode()[: limits.most_nbytes(message, field)].decode(errors="ignore")
    bounds = limits.range_of(message, field)
    if bounds is None or type(value) not in (int, float):
        return value
    return type(value)(min(max(value, bounds[0]), bounds[1]))


def _distinct(view: View, rng: Random) -> View:
    """Returns the view without duplicate members and members without id, which no decoder accepts, and mostly without
    pipelines.
    """
    members = {member.id: member for member in view.members if member.id}
    leaving = {member.id: member for member in view.leaving if member.id and member.id not in members}
    return dataclasses.replace(
        view,
        members=tuple(members.values()),
        leaving=tuple(leaving.values()),
        pipelines="" if rng.randint(0, 3) else view.pipelines,
    )


def field_of(frame: Any, rng: Random, **odd: Sequence[Any]) -> Any:
    """Returns a frame header with one random field changed, to a value from `odd` or else any of the field's type."""
    name, hint = rng.choice(list(hints(frame.__class__).items()))
    value = rng.choice(odd.get(name, UNSIGNED)) if name in odd or hint is int else value_of(hint, rng)
    return dataclasses.replace(frame, **{name: value})


# ------------------------------------------------------------------ their bytes


@dataclasses.dataclass(frozen=True)
class Record:
    """Codec of a single dataclass, as stores use it; attributes are named as in an `Envelope`.

    Attributes:
        message: Class of the protobuf message; None if the bytes are JSON.
        classes: Classes that travel so: this one.
        encode: Function that returns the bytes of a value.
        decode: Function that returns the value of bytes; raises WireError or StoreError on anything odd.
    """

    message: Any
    classes: tuple[type]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


Words = Envelope | Record


def record(vocabulary: Vocabulary, cls: type) -> Record:
    """Returns the codec of a dataclass by itself, outside of any envelope."""
    return Record(vocabulary.stub(cls), (cls,), vocabulary.encode, lambda data: vocabulary.decode(cls, data))


def words_of(vocabulary: Vocabulary) -> list[Words]:
    """Returns the codecs of all envelopes of a vocabulary, and of each of its dataclasses by itself."""
    alone = sorted(vocabulary.classes, key=lambda cls: cls.__name__)
    return [*vocabulary.envelopes, *(record(vocabulary, cls) for cls in alone)]


def said(words: Words, rng: Random, cls: type | None = None, *, accepted: bool = False) -> bytes:
    """Returns an encoded random message of the given class, or of any class of the codec.

    Args:
        words: Codec of the message.
        rng: Source of randomness.
        cls: One of the classes of `words`.
        accepted: Whether the codec must be able to decode the message.
    """
    for _ in range(_DRAWS):
        with contextlib.suppress(WireError, StoreError):
            data = words.encode(value_of(cls or rng.choice(words.classes), rng))
            if accepted:
                words.decode(data)
            return data
    kind = cls or words.classes
    raise FindingError(f"none of {_DRAWS} values of {kind} is accepted; give its fields limits (protocol/limits.py)")


def each(words: Words, rng: Random) -> list[bytes]:
    """Returns an encoded, acceptable message for each class of the codec."""
    return [said(words, rng, cls, accepted=True) for cls in words.classes]


def other(words: Words, data: bytes, rng: Random) -> bytes:
    """Returns a mutation of an encoded message, or another random message."""
    if not data or rng.randint(0, 3) == 0:
        return said(words, rng)
    if words.message is None:
        return mutate.json_of(data, rng)
    if rng.randint(0, 9) == 0:
        return mutate.bytes_of(data, rng)
    try:
        message = words.message.FromString(data)
    except DecodeError:
        return data
    for _ in range(rng.randint(1, 3)):
        mutate.proto_of(message, rng)
    result: bytes = message.SerializeToString()
    return result


def mutation(pick: Callable[[int], Words | None], tags: Sequence[int]) -> Callable[[bytes, Random], bytes]:
    """Returns a mutator (`Target.mutate`) for inputs whose parts are messages.

    Args:
        pick: Function of a part's number that returns the codec of its message; None: the part is no message.
        tags: Numbers that parts may have.
    """

    def change(tag: int, part: bytes, rng: Random) -> bytes:
        words = pick(tag)
        return part if words is None else other(words, part, rng)

    return lambda data, rng: mutate.parts_of(data, rng, change, tags)


# ------------------------------------------------------------------ targets


def reading(name: str, about: str, *words: Words) -> Target:
    """Returns a target that decodes each part of an input with one of the codecs, chosen by the part's number."""

    def read(data: bytes) -> None:
        for tag, part in mutate.split(data):
            one = words[tag % len(words)]
            try:
                found = one.decode(part)
            except (WireError, StoreError):
                continue
            if one.decode(one.encode(found)) != found:
                raise FindingError(f"{type(found).__name__} is another one when it is written and read again")

    def seeds() -> list[bytes]:
        rng = Random(0)
        return [mutate.joined([(tag, data)]) for tag, one in enumerate(words) for data in each(one, rng)]

    return Target(name, about, seeds, read, mutation(lambda tag: words[tag % len(words)], range(len(words))))


def _bodies() -> Iterable[Record]:
    """Yields the codec of each kind of chain entry as an outer leader's store keeps it."""
    for cls in typing.get_args(Body):

        def decode(data: bytes, kind: str = cls.__name__) -> Body:
            return entry_of(StoreRecord(1, kind, 1, data), "").body

        yield Record(OUTER.stub(cls), (cls,), body_bytes, decode)


_MEMBERS = tuple(Member(f"{name}~{i}", name, "host", "127.0.0.1", i) for i, name in enumerate("abch", 1))
_BEFORE = View(ViewId(1, 1), ViewId(), _MEMBERS[:3], links=(LinkSpec("a~1", "b~2"), LinkSpec("b~2", "c~3")))
_AFTER = View(
    ViewId(1, 2), ViewId(1, 1), _MEMBERS[1:], ("h~4",), links=(LinkSpec("b~2", "h~4"), LinkSpec("c~3", "h~4"))
)
_CHANGE = Record(
    chaos_pb2.PackedChange,
    (PackedChange,),
    JOB.encode,
    lambda data: changed(_BEFORE, JOB.decode(PackedChange, data), "0"),
)


def _read_change(data: bytes) -> None:
    with contextlib.suppress(WireError):
        _CHANGE.decode(data)


MESSAGES = (
    reading("messages", "control messages and stored views, by the codec", *words_of(JOB)),
    Target(
        "changes",
        "changes of a view, by who has the view before",
        lambda: [JOB.encode(change_to(_BEFORE, _AFTER, "0"))],
        _read_change,
        lambda data, rng: other(_CHANGE, data, rng),
    ),
    reading("outer-messages", "words of outer sync, and a chain's records", *words_of(OUTER), *_bodies()),
)
