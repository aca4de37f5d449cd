"""Compares chaos.proto with protocol/types.py, and tests the codec between them."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import WireError
from chaos_lightning.protocol import chaos_pb2, codec, generate
from chaos_lightning.protocol import types as vocabulary
from chaos_lightning.protocol.types import (
    GENESIS,
    MAX_MEMBERS,
    MAX_PARTS,
    Contribution,
    Entered,
    EqualShares,
    FromMember,
    Header,
    Heartbeat,
    Kept,
    Kind,
    Leave,
    LinkEvent,
    Member,
    PeerMessage,
    Report,
    Spent,
    ToMember,
    View,
    ViewId,
    equal_shares,
)

sys.path.insert(0, str(Path(__file__).parent))
from vocabulary import PACKED, messages, values

ROOT = Path(__file__).resolve().parents[2]
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
CONTRIBUTION = Contribution(
    member="a~1", view=ViewId(1, 2), seq=3, kind=Kind.STEP, step=2, prev_hash="00", weight=4.0, coefficient=4.0
)
HEADER = Header(
    seq=3,
    kind=Kind.STEP,
    step=3,
    view=ViewId(1, 2),
    prev_hash="00",
    next_view=ViewId(1, 2),
    shares=(EqualShares(1, 4.0, 1.0),),
    ledger=vocabulary.Ledger((Spent("", 0, ((0, 4),)),)),
)


GONE = {"Header": [8, 14, 16], "Report": [5], "Entered": [5]}
"""Numbers of fields that messages had once, which no other field may take."""


@pytest.mark.parametrize("cls", [*messages(), *PACKED], ids=lambda c: c.__name__)
def test_proto_and_dataclass_are_equal_field_by_field(cls: type) -> None:
    if cls is View:
        pytest.skip("it travels as a PackedView")
    descriptor = chaos_pb2.DESCRIPTOR.message_types_by_name[cls.__name__]
    hints = typing.get_type_hints(cls)
    there = {f.name: f for f in descriptor.fields}
    assert [f.name for f in dataclasses.fields(cls)] == list(there)
    numbers, gone = sorted(f.number for f in descriptor.fields), GONE.get(cls.__name__, [])
    assert sorted([*numbers, *gone]) == list(range(1, len(there) + len(gone) + 1))
    for name, hint in hints.items():
        field, text = there[name], str(hint)
        assert field.is_repeated == (text.startswith("tuple[") and text.endswith("...]")), name
        assert (field.has_presence and "None" in text) == ("None" in text), name
        inner = re.sub(r"chaos_lightning\.protocol\.\w+\.", "", text).removeprefix("tuple[").removesuffix(", ...]")
        inner = inner.removesuffix(" | None")
        scalar = {"<class 'int'>": "INT64", "<class 'float'>": "DOUBLE", "<class 'bool'>": "BOOL", "str": "STRING"}
        scalar |= {"<class 'str'>": "STRING", "<class 'bytes'>": "BYTES", "bytes": "BYTES", "<enum 'Kind'>": "ENUM"}
        scalar["int"] = "SINT64" if name in ("differences", "links") else "INT64"
        if inner in scalar:
            assert field.type == getattr(field, f"TYPE_{scalar[inner]}"), name
        else:
            expected = {"tuple[int, int]": "Span", "tuple[str, str]": "NamedText"}.get(inner, inner.split("'")[-2:][0])
            expected = expected.replace("View", "PackedView") if expected == "View" else expected
            assert field.message_type.name == expected, name


def test_every_message_of_the_proto_has_a_dataclass_or_is_known_plumbing() -> None:
    plumbing = {"Span", "NamedText", "FromMemberEnvelope", "ToMemberEnvelope", "PeerEnvelope"}
    plumbing |= {"StatusRequest", "StatusReply", "DrainRequest", "DrainReply", "LinkChangeRequest", "LinkChangeReply"}
    plumbing |= {"ResetRequest", "ResetReply", "ClaimRequest", "ClaimReply"}
    classes = {c.__name__ for c in [*messages(), *PACKED]} - {"View"}
    assert set(chaos_pb2.DESCRIPTOR.message_types_by_name) == plumbing | classes


@pytest.mark.parametrize(
    ("union", "envelope"),
    [(FromMember, "FromMemberEnvelope"), (ToMember, "ToMemberEnvelope"), (PeerMessage, "PeerEnvelope")],
)
def test_envelopes_hold_exactly_their_union(union: Any, envelope: str) -> None:
    fields = chaos_pb2.DESCRIPTOR.message_types_by_name[envelope].oneofs_by_name["message"].fields
    assert [f.message_type.name for f in fields] == [c.__name__ for c in typing.get_args(union)]


def test_settings_never_travel() -> None:
    with pytest.raises(TypeError, match="Settings has no message"):
        codec.encode(vocabulary.Settings())


@pytest.mark.parametrize("cls", messages(), ids=lambda c: c.__name__)
def test_everything_comes_back_as_it_was(cls: type) -> None:
    @RELAXED
    @given(values(cls))
    def check(value: Any) -> None:
        assert codec.decode(cls, codec.encode(value)) == value

    check()


@RELAXED
@given(values(Header))
@example(GENESIS)
@example(replace(HEADER, shares=(EqualShares(1, -0.0, 1e-300), EqualShares(9, 0.1 + 0.2, 3.0))))
def test_a_header_keeps_its_hash(header: Header) -> None:
    back = codec.decode_peer(codec.encode_peer(header))
    assert isinstance(back, Header)
    assert back == header
    assert back.hash == header.hash


def test_headers_of_version_4_are_read_and_keep_their_hash() -> None:
    """Headers written by protocol version 4 can be read and keep their hash, by which checkpoints and stores name
    them.
    """
    old = (
        "0803100118032204080110022a02303032040801100252060a041a0210049a011a0a04080110031204080110021a003208726f746174696e"
        "674801a20114080111000000000000104019000000000000f03f"
    )
    view = View(ViewId(1, 3), ViewId(1, 2), ())
    carrying = replace(HEADER, view_change=view)
    assert codec.decode(Header, bytes.fromhex(old)) == carrying
    assert (HEADER.hash, carrying.hash) == ("d6f43a5b03c960a4", "6a2e106ceedf7c1e")
    others = [replace(carrying, reduced=True), replace(carrying, view_change=replace(view, pipelines="{}"))]
    others.append(replace(carrying, view_change=replace(view, leaving=(Member("a~1", "a", "h", "", 0),))))
    assert len({carrying.hash, *(h.hash for h in others)}) == 4


@pytest.mark.parametrize(
    "parts",
    [((1, 1),), ((2, 3), (0, 1)), ((0, 1), (1, 2)), ((0, MAX_PARTS + 1),)],
    ids=["none", "order", "touch", "many"],
)
def test_parts_that_are_no_normal_spans_are_refused(parts: Any) -> None:
    report = Report(ViewId(1, 1), ViewId(1, 0), 3, "00")
    odd: list[Any] = [replace(report, parts=parts), replace(report, owns=parts), Entered(ViewId(), 0, 0, "", parts)]
    for value in [*odd, Kept(GENESIS, "a~1", "", parts)]:
        with pytest.raises(WireError, match=f"{type(value).__name__}: parts .* expected spans apart"):
            codec.decode(type(value), codec.encode(value))


@given(st.lists(st.tuples(st.floats(-9, 9), st.sampled_from([0.0, 0.1])), max_size=40), st.randoms())
def test_shares_are_those_of_each_member_and_their_sum_is_the_same_in_any_order(shares: Any, draw: Any) -> None:
    header = replace(HEADER, shares=equal_shares(shares))
    assert header.weights() == [weight for weight, _ in shares]
    assert header.contributors == len(shares)
    draw.shuffle(shares)
    assert replace(HEADER, shares=equal_shares(shares)).total_weight == header.total_weight


@RELAXED
@given(st.one_of(values(FromMember)), st.one_of(values(ToMember)), st.one_of(values(PeerMessage)))
def test_envelopes_return_their_message(up: FromMember, down: ToMember, peer: PeerMessage) -> None:
    assert codec.unwrap_from_member(codec.wrap_from_member(up)) == up
    assert codec.unwrap_to_member(codec.wrap_to_member(down)) == down
    assert codec.decode_peer(codec.encode_peer(peer)) == peer


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=64))
def test_garbage_is_a_wire_error_or_a_message(data: bytes) -> None:
    try:
        message = codec.decode_peer(data)
    except WireError:
        return
    assert isinstance(message, Contribution | Header)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_flipped_bytes_are_a_wire_error_or_a_message(data: st.DataObject) -> None:
    good = bytearray(codec.encode_peer(data.draw(st.sampled_from([CONTRIBUTION, HEADER]))))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = good[: data.draw(st.integers(0, len(good)))]
    try:
        message = codec.decode_peer(cut)
    except WireError:
        return
    assert isinstance(message, Contribution | Header)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.header.ClearField("view"), "Header without view"),
        (lambda e: e.header.ClearField("kind"), "Kind number 0 is unknown"),
        (lambda e: setattr(e.header, "kind", 77), "Kind number 77 is unknown"),
        (lambda e: setattr(e.header.shares[0], "weight", float("nan")), "not finite"),
        (lambda e: setattr(e.header.shares[0], "coefficient", float("inf")), "not finite"),
        (lambda e: setattr(e.header.shares[0], "count", 0), "shares of 0 members"),
        (lambda e: setattr(e.header.shares[0], "count", MAX_MEMBERS + 1), f"shares of {MAX_MEMBERS + 1} members"),
        (lambda e: e.header.shares.add(count=2, weight=4.0, coefficient=1.0), "equal shares in two runs"),
        (lambda e: setattr(e.header.ledger.streams[0].spans[0], "start", 5), r"interval \[5, 4\)"),
        (lambda e: setattr(e.header.ledger.streams[0].spans[0], "start", -1), r"interval \[-1, 4\)"),
        (lambda e: e.ClearField("header"), "without a known message"),
    ],
)
def test_odd_but_parsable_bytes_are_named(change: Any, words: str) -> None:
    envelope = chaos_pb2.PeerEnvelope.FromString(codec.encode_peer(HEADER))
    change(envelope)
    with pytest.raises(WireError, match=words):
        codec.decode_peer(envelope.SerializeToString())


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(TypeError, match="Heartbeat is no message of ToMemberEnvelope"):
        codec.wrap_to_member(Heartbeat(ViewId(), 0, 0))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (replace(CONTRIBUTION, weight=4), r"Contribution\.weight: expected float, got 4 \(int\)"),
        (replace(CONTRIBUTION, seq=1.0), r"Contribution\.seq: expected an int"),
        (replace(CONTRIBUTION, seq=1 << 63), r"Contribution\.seq: expected an int of 64 bits"),
        (replace(CONTRIBUTION, seq=True), r"Contribution\.seq: expected an int"),
        (replace(CONTRIBUTION, payload=bytearray(b"x")), r"Contribution\.payload: expected bytes"),
        (replace(CONTRIBUTION, kind="step"), r"Contribution\.kind: expected Kind"),
        (replace(CONTRIBUTION, spent=[]), r"Contribution\.spent: expected a tuple"),
    ],
)
def test_what_would_come_back_different_is_not_sent(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        codec.encode_peer(value)


def test_surrogates_are_a_wire_error() -> None:
    with pytest.raises(WireError, match="Leave does not fit"):
        codec.encode(Leave("\ud800"))


def test_sizes_are_limited_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    big = replace(CONTRIBUTION, payload=bytes(2000))
    data = codec.encode_peer(big)
    monkeypatch.setattr(codec.PEER, "_limit", 1000)
    with pytest.raises(WireError, match="the limit is 1000"):
        codec.encode_peer(big)
    with pytest.raises(WireError, match="the limit is 1000"):
        codec.decode_peer(data)
    with pytest.raises(WireError, match="the limit is 10"):
        codec.encode(big, limit=10)


@dataclass(frozen=True)
class Odd:
    seq: float


@pytest.mark.parametrize(
    ("hints", "message", "words"),
    [
        ({"term": int}, chaos_pb2.ViewId, "dataclass has .'term'., chaos.proto has .'term', 'number'."),
        ({"term": float, "number": int}, chaos_pb2.ViewId, r"\.term is a float"),
        ({"reason": tuple[str, ...]}, chaos_pb2.Leave, r"\.reason is a tuple, so it must be repeated"),
        ({"streams": Spent}, chaos_pb2.Ledger, r"\.streams is repeated there"),
        (
            {"streams": tuple[View, ...]},
            chaos_pb2.Ledger,
            r"\.streams is a PackedView, and Spent there \(chaos\.proto\)",
        ),
        ({"view": View | None}, chaos_pb2.NextView, None),
        ({"reason": str | None}, chaos_pb2.Leave, r"\.reason may be None"),
        ({"reason": complex}, chaos_pb2.Leave, r"\.reason has the type"),
    ],
)
def test_a_drifted_dataclass_is_found_at_import(hints: dict[str, Any], message: Any, words: str | None) -> None:
    cls = dataclasses.make_dataclass("Drifted", hints.items())
    plan = codec._Plan(cls, message)
    if words is None:
        plan.build(codec.JOB)
        return
    with pytest.raises(TypeError, match=words):
        plan.build(codec.JOB)


def test_a_drifted_enum_or_union_is_found_at_import() -> None:
    few = SimpleNamespace(values_by_name=chaos_pb2.Kind.DESCRIPTOR.values_by_name, values=[0, 1])
    with pytest.raises(TypeError, match="Kind: its values"):
        codec._enum(Kind, few)
    with pytest.raises(TypeError, match=r"PeerEnvelope: chaos\.proto has"):
        codec.JOB.envelope(Contribution | LinkEvent, chaos_pb2.PeerEnvelope)


@dataclass(frozen=True)
class Push:
    """Message of a service other than the job's scheduler, for a second vocabulary."""

    view: ViewId
    spans: tuple[tuple[int, int], ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Applied:
    version: int


def other_stubs() -> SimpleNamespace:
    """Makes protobuf classes of a second proto file, which imports the job's."""
    file = descriptor_pb2.FileDescriptorProto(
        name="elsewhere/other.proto", package="other", syntax="proto3", dependency=[chaos_pb2.DESCRIPTOR.name]
    )
    fields = descriptor_pb2.FieldDescriptorProto
    one, many = fields.LABEL_OPTIONAL, fields.LABEL_REPEATED

    def add(name: str, *of: tuple[str, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for number, (field, label, kind, message) in enumerate(of, 1):
            made.field.add(name=field, number=number, label=label, type=kind, type_name=message or None)
        return made

    job = f".{chaos_pb2.DESCRIPTOR.package}."
    message, double, integer = fields.TYPE_MESSAGE, fields.TYPE_DOUBLE, fields.TYPE_INT64
    views, spans = ("view", one, message, f"{job}ViewId"), ("spans", many, message, f"{job}Span")
    add("Push", views, spans, ("values", many, double, ""))
    add("Applied", ("version", one, integer, ""))
    envelope = add("Envelope", ("push", one, message, ".other.Push"), ("applied", one, message, ".other.Applied"))
    envelope.oneof_decl.add(name="message")
    for field in envelope.field:
        field.oneof_index = 0
    pool = descriptor_pool.Default()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    classes = {name: message_factory.GetMessageClass(d) for name, d in found.message_types_by_name.items()}
    return SimpleNamespace(DESCRIPTOR=found, **classes)


def test_another_service_has_a_vocabulary_of_its_own() -> None:
    stubs = other_stubs()
    other = codec.Vocabulary([Push, Applied, Odd], stubs, known=[codec.JOB])
    said = Push(ViewId(2, 7), ((0, 8), (16, 24)), (0.5, -1.0))
    assert other.decode(Push, other.encode(said)) == said
    envelope = other.envelope(Push | Applied, stubs.Envelope, limit=100)
    assert [envelope.decode(envelope.encode(x)) for x in (said, Applied(3))] == [said, Applied(3)]
    with pytest.raises(TypeError, match=r"Push has no message in chaos\.proto"):
        codec.encode(said)
    with pytest.raises(WireError, match="the limit is 100"):
        envelope.encode(replace(said, values=(1.0,) * 20))
    with pytest.raises(WireError, match="interval"):
        other.decode(Push, other.encode(replace(said, spans=((8, 0),))))
    with pytest.raises(TypeError, match=r"Push\.view has the type .*ViewId.*, which has no place in a message \(other"):
        codec.Vocabulary([Push], stubs)


@pytest.mark.parametrize("name", ["LinkEvent", "Decide", "OpenLinks"])
def test_snake(name: str) -> None:
    assert codec.snake(name) == {"LinkEvent": "link_event", "Decide": "decide", "OpenLinks": "open_links"}[name]


def test_an_absent_header_stays_absent() -> None:
    report = Report(ViewId(1, 1), ViewId(1, 0), 3, "00", last=HEADER)
    back = codec.decode(Report, codec.encode(report))
    assert back.pending is None
    assert back.last == HEADER


def test_the_committed_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    """The generated stubs in the repository have the same descriptor as stubs generated now."""
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    generate.generate(tmp_path)
    marker = "AddSerializedFile("

    def descriptor(path: Path) -> str:
        text = path.read_text()
        return text[text.index(marker) : text.index("\n", text.index(marker))]

    for stub in ("protocol/chaos_pb2.py", "service/etcd_pb2.py"):
        made, committed = (folder / "chaos_lightning" / stub for folder in (tmp_path, ROOT))
        assert descriptor(made) == descriptor(committed)


def test_the_stubs_demand_no_more_than_the_package_does() -> None:
    """The lower bounds in pyproject.toml are no older than the protobuf and gRPC versions that the generated stubs
    require.
    """
    import re
    import tomllib

    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = {m[1]: m[2] for n in needs if (m := re.match(r"(grpcio|protobuf)>=([\d.]+)", n))}
    stubs = ROOT / "chaos_lightning"
    made = {
        "protobuf": re.search(r"Protobuf Python Version: ([\d.]+)", (stubs / "protocol" / "chaos_pb2.py").read_text()),
        "grpcio": re.search(
            r"GRPC_GENERATED_VERSION = '([\d.]+)'", (stubs / "control" / "service_pb2_grpc.py").read_text()
        ),
    }
    for package, match in made.items():
        assert match is not None
        version = tuple(map(int, match[1].split(".")))
        bound = tuple(map(int, bounds[package].split(".")))
        assert bound >= version[: len(bound)], (
            f"{package}: stubs need {match[1]}, pyproject.toml allows {bounds[package]}"
        )
