"""Tests that the fuzzer makes each message type of each vocabulary, even one added later, and that it reaches its
reader.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from chaos_lightning.errors import WireError
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, FROM_FOLLOWER, OUTER, TO_CLUSTER, TO_FOLLOWER
from chaos_lightning.outer.rules.cluster import ClusterMachine
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.types import Body
from chaos_lightning.protocol.codec import FROM_MEMBER, JOB, PEER, TO_MEMBER, Envelope, Vocabulary
from lab.fuzz import links, messages, mutate
from lab.fuzz.drivers import TARGETS


def _read(vocabulary: Vocabulary, read: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, type]]:
    """Runs `read`, and returns (envelope, type) of each value that a vocabulary's codecs decode during it."""
    found: set[tuple[str, type]] = set()
    unwrap, decode = Envelope.unwrap, Vocabulary.decode

    def unwrapped(self: Envelope, envelope: Any) -> Any:
        value = unwrap(self, envelope)
        found.add((self.message.DESCRIPTOR.name, type(value)))
        return value

    def decoded(self: Vocabulary, cls: Any, *given: Any) -> Any:
        value = decode(self, cls, *given)
        found.add(("", type(value)))
        return value

    with monkeypatch.context() as patch:
        patch.setattr(Envelope, "unwrap", unwrapped)
        patch.setattr(Vocabulary, "decode", decoded)
        read()
    return found


def _all(vocabulary: Vocabulary) -> set[tuple[str, type]]:
    said = {(words.message.DESCRIPTOR.name, cls) for words in vocabulary.envelopes for cls in words.classes}
    return said | {("", cls) for cls in vocabulary.classes}


@pytest.mark.parametrize(("name", "vocabulary"), [("messages", JOB), ("outer-messages", OUTER)])
def test_each_type_of_a_vocabulary_is_accepted_by_its_codec(
    name: str, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS[name]
    seeds = target.seeds()

    def read() -> None:
        for seed in seeds:
            target.run(seed)

    missing = _all(vocabulary) - _read(vocabulary, read, monkeypatch)
    assert not missing
    assert target.seeds() == seeds, "the same each time"


HEARD = [
    ("scheduler", SchedulerMachine, (FROM_MEMBER,)),
    ("member", MemberMachine, (TO_MEMBER, PEER)),
    ("outer-leader", LeaderMachine, (FROM_CLUSTER, FROM_FOLLOWER)),
    ("outer-cluster", ClusterMachine, (TO_CLUSTER,)),
    ("outer-follower", FollowerMachine, (TO_FOLLOWER,)),
]


@pytest.mark.parametrize(("name", "machine", "words"), HEARD)
def test_a_machine_hears_each_type_of_its_envelopes(
    name: str, machine: Any, words: tuple[Envelope, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: set[type] = set()
    on = machine.on

    def listening(self: Any, *given: Any) -> Any:
        heard.update(type(getattr(event, "message", getattr(event, "said", None))) for event in given)
        return on(self, *given)

    monkeypatch.setattr(machine, "on", listening)
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)
    assert {cls for one in words for cls in one.classes} <= heard


@pytest.mark.parametrize(("name", "words"), [("server", FROM_MEMBER), ("agent", TO_MEMBER), ("frames", PEER)])
def test_each_type_is_said_to_a_live_reader(name: str, words: Envelope) -> None:
    said = set()
    for seed in TARGETS[name].seeds():
        for _, part in links._frames(seed) if name == "frames" else mutate.split(seed):
            with contextlib.suppress(WireError):
                said.add(type(words.decode(part)))
    assert said >= set(words.classes)


def test_each_kind_of_entry_is_read_as_from_a_store() -> None:
    assert {one.classes[0] for one in messages._bodies()} == set(get_args(Body))


# ------------------------------------------------------------------ a message that is added


@dataclasses.dataclass(frozen=True)
class Weather:
    seconds: float
    place: str
    days: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tomorrow:
    weather: Weather | None
    port: int

    def flaw(self) -> str:
        return "" if self.port != 7 else "no such port"


def _added() -> Vocabulary:
    """Returns a made-up vocabulary with an envelope, as if it had been added to the code."""
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="fuzzed/added.proto", package="fuzzed", syntax="proto3")

    def message(name: str, *fields: tuple[str, Any, str]) -> Any:
        made = file.message_type.add(name=name)
        for number, (field, type_, of) in enumerate(fields, 1):
            label = kind.LABEL_REPEATED if field == "days" else kind.LABEL_OPTIONAL
            named = {"type_name": f".fuzzed.{of}"} if of else {}
            made.field.add(name=field, number=number, type=type_, label=label, **named)
        return made

    message(
        "Weather", ("seconds", kind.TYPE_DOUBLE, ""), ("place", kind.TYPE_STRING, ""), ("days", kind.TYPE_INT64, "")
    )
    message("Tomorrow", ("weather", kind.TYPE_MESSAGE, "Weather"), ("port", kind.TYPE_INT64, ""))
    envelope = message(
        "Envelope", ("weather", kind.TYPE_MESSAGE, "Weather"), ("tomorrow", kind.TYPE_MESSAGE, "Tomorrow")
    )
    envelope.oneof_decl.add(name="message")
    for field in envelope.field:
        field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    described = pool.Add(file) or pool.FindFileByName(file.name)
    made = {name: message_factory.GetMessageClass(its) for name, its in described.message_types_by_name.items()}
    vocabulary = Vocabulary([Weather, Tomorrow], SimpleNamespace(DESCRIPTOR=described, **made))
    vocabulary.envelope(Weather | Tomorrow, made["Envelope"])
    return vocabulary


def test_a_message_that_is_added_is_made_changed_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, rng = _added(), Random(1)
    target = messages.reading("added", "", *messages.words_of(vocabulary))
    seeds = target.seeds()
    changed = [target.mutate(seed, rng) for seed in seeds * 40]

    def read() -> None:
        for data in (*seeds, *changed):
            target.run(data)

    assert _read(vocabulary, read, monkeypatch) == _all(vocabulary)
    assert len(set(changed)) > len(changed) // 2


def test_a_message_that_no_value_fits_is_named() -> None:
    @dataclasses.dataclass(frozen=True)
    class Never:
        def flaw(self) -> str:
            return "always"

    def decode(data: bytes) -> None:
        raise WireError("always")

    with pytest.raises(AssertionError, match=r"none of \d+ values of .*Never.* is accepted"):
        messages.each(messages.Record(None, (Never,), lambda value: b"", decode), Random(1))
