"""Targets that read bytes without anybody at the other end: codecs, machines, stores, texts."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import sqlite3
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError

from chaos_lightning.errors import ConfigurationError, StateError, StoreError, WireError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol import chaos_pb2, codec
from chaos_lightning.protocol.changes import change_to, changed
from chaos_lightning.protocol.packing import PackedChange
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Entered,
    FromMember,
    Header,
    Hello,
    LinkEvent,
    LinkSpec,
    Member,
    PeerMessage,
    Ready,
    Report,
    Settings,
    ToMember,
    View,
    ViewId,
    Welcome,
)
from lab.fuzz import mutate
from lab.fuzz.target import FindingError, Target

_ENVELOPES = (chaos_pb2.FromMemberEnvelope, chaos_pb2.ToMemberEnvelope, chaos_pb2.PeerEnvelope)
_KINDS = (FromMember, ToMember, PeerMessage)
MOST_EFFECTS = 20_000
"""Largest number of effects of one message; more would be a reader that can be made to flood others."""


# ------------------------------------------------------------------ messages


def message(kind: Any, rng: Random) -> Any:
    """Some message of FromMember, ToMember or PeerMessage."""
    return mutate.value_of(rng.choice(typing.get_args(kind)), rng)


def wrapped(kind: Any, value: Any) -> bytes:
    """As it travels."""
    if kind is PeerMessage:
        return codec.encode_peer(value)
    wrap = codec.wrap_from_member if kind is FromMember else codec.wrap_to_member
    data: bytes = wrap(value).SerializeToString()
    return data


def each(kind: Any, rng: Random) -> Iterator[bytes]:
    """One message of each class of FromMember, ToMember or PeerMessage, as it travels; without those that cannot be."""
    for cls in typing.get_args(kind):
        with contextlib.suppress(WireError, TypeError):
            yield wrapped(kind, mutate.value_of(cls, rng))


def mutated_message(tag: int, data: bytes, rng: Random) -> bytes:
    """Another field in this message; or another message."""
    which = tag % len(_KINDS)
    if not data or rng.randint(0, 3) == 0:
        with contextlib.suppress(WireError, TypeError):
            return wrapped(_KINDS[which], message(_KINDS[which], rng))
    if rng.randint(0, 9) == 0:
        return mutate.bytes_of(data, rng)
    try:
        envelope = _ENVELOPES[which].FromString(data)
    except DecodeError:
        return data
    for _ in range(rng.randint(1, 3)):
        mutate.proto_of(envelope, rng)
    changed: bytes = envelope.SerializeToString()
    return changed


def unwrapped(which: int, data: bytes) -> Any:
    """The message; None if it is refused, as a wire's garbage is."""
    try:
        if which == 2:
            return codec.decode_peer(data)
        envelope = _ENVELOPES[which].FromString(data)
        return codec.unwrap_from_member(envelope) if which == 0 else codec.unwrap_to_member(envelope)
    except (WireError, DecodeError):
        return None


_MEMBERS = tuple(Member(f"{name}~{i}", name, "host", "127.0.0.1", i) for i, name in enumerate("abch", 1))
_BEFORE = View(ViewId(1, 1), ViewId(), _MEMBERS[:3], links=(LinkSpec("a~1", "b~2"), LinkSpec("b~2", "c~3")))
_AFTER = View(
    ViewId(1, 2), ViewId(1, 1), _MEMBERS[1:], ("h~4",), links=(LinkSpec("b~2", "h~4"), LinkSpec("c~3", "h~4"))
)
_CHANGE = change_to(_BEFORE, _AFTER, "0")
assert _CHANGE is not None


def _message_seeds() -> list[bytes]:
    rng = Random(0)
    seeds = [mutate.joined([(which, said)]) for which, kind in enumerate(_KINDS) for said in each(kind, rng)]
    seeds += [
        mutate.joined([(3, _record(View, rng))]),
        mutate.joined([(4, _record(Header, rng))]),
        mutate.joined([(5, codec.encode(_CHANGE))]),
    ]
    return seeds


def _record(kind: Any, rng: Random) -> bytes:
    """Some record of the chain, as the store has it; values that none can have are drawn again."""
    while True:
        with contextlib.suppress(WireError):
            return codec.encode(mutate.value_of(kind, rng))


def _read_messages(data: bytes) -> None:
    for tag, part in mutate.split(data):
        which = tag % 6
        if which == 5:
            with contextlib.suppress(WireError):
                changed(_BEFORE, codec.decode(PackedChange, part), "0")
        elif which < 3:
            found = unwrapped(which, part)
            if found is not None and unwrapped(which, wrapped(_KINDS[which], found)) != found:
                raise FindingError(f"{type(found).__name__} is another one when it is written and read again")
        else:
            with contextlib.suppress(WireError):
                codec.decode(View if which == 3 else Header, part)


def _mutate_messages(data: bytes, rng: Random) -> bytes:
    return mutate.parts_of(data, rng, _mutated_value, range(6))


def _mutated_value(tag: int, data: bytes, rng: Random) -> bytes:
    if tag % 6 != 5:
        return mutated_message(tag % 6, data, rng)
    change = chaos_pb2.PackedChange.FromString(codec.encode(_CHANGE))
    for _ in range(rng.randint(1, 3)):
        mutate.proto_of(change, rng)
    found: bytes = change.SerializeToString()
    return found


# ------------------------------------------------------------------ machines


def hello(name: str, number: int, **changes: Any) -> Hello:
    """Returns the hello of a process that fits the job."""
    given: dict[str, Any] = {"pid": number, "pid_start": 1, "quota": 1, "accumulate": 1, "package": "1"}
    return Hello("default", name, "host", "127.0.0.1", 1000 + number, fingerprint=(), **(given | changes))


def _opened(conn: int) -> tuple[int, bytes]:
    return (conn | 0x10, b"")


def _tick() -> tuple[int, bytes]:
    return (0x20, b"")


def _scheduler_seeds() -> list[bytes]:
    joined = [_opened(0), (0, wrapped(FromMember, hello("a", 1))), (0, wrapped(FromMember, Ready())), _tick(), _tick()]
    first = ViewId(1, 1)
    stands = Entered(first, 0, 0, "")
    joined += [(0, wrapped(FromMember, stands)), _tick()]
    two = [_opened(1), (1, wrapped(FromMember, hello("b", 2))), (1, wrapped(FromMember, Ready())), _tick(), _tick()]
    links = [(0, wrapped(FromMember, LinkEvent("b~2", True, "connected")))]
    links += [(1, wrapped(FromMember, LinkEvent("a~1", True, "connected")))]
    both = [(conn, wrapped(FromMember, Entered(ViewId(1, 2), 0, 0, GENESIS.hash))) for conn in (0, 1)]
    loss = [(0, wrapped(FromMember, LinkEvent("b~2", False, "closed (reset)"))), (0x31, b"x"), _tick()]
    report = Report(ViewId(1, 3), ViewId(1, 2), 0, GENESIS.hash, last=GENESIS)
    recovers = [*joined, *two[:2], *links, *two[2:], *both, *loss, _tick(), (0, wrapped(FromMember, report)), _tick()]
    chatter = [(0, said) for said in each(FromMember, Random(1))]
    return [mutate.joined(parts) for parts in (joined, joined + two, joined + chatter[:20], recovers)]


def _feed_scheduler(data: bytes) -> None:
    """Streams 0 to 7 say this; stores and process table answer as they do."""
    machine = SchedulerMachine(Settings(min_nodes=1), fx.Chain(1, NO_VIEW))
    streams: set[int] = set()
    now = 1.0

    def on(event: fx.SchedulerEvent) -> None:
        nonlocal now
        waiting, count = [event], 0
        while waiting:
            now += 0.01
            for effect in machine.on(now, waiting.pop(0)):
                count += 1
                if isinstance(effect, fx.Persist):
                    waiting.append(fx.Stored(effect.token, True))
                elif isinstance(effect, fx.Send):
                    codec.wrap_to_member(effect.message)
            if count > MOST_EFFECTS:
                raise FindingError(f"{event} has {count} effects")

    for tag, part in mutate.split(data):
        conn, what = tag & 7, tag >> 4 & 3
        if what == 1 and conn not in streams:
            streams.add(conn)
            on(fx.Opened(conn))
        elif what == 2:
            now += 0.2
            on(fx.SchedulerTick())
        elif what == 3 and conn in streams:
            streams.discard(conn)
            on(fx.Closed(conn, bool(part)))
        elif what == 0 and conn in streams and (said := unwrapped(0, part)) is not None:
            on(fx.MessageIn(conn, said))
    machine.validate_state()


def _mutate_scheduler(data: bytes, rng: Random) -> bytes:
    return mutate.parts_of(
        data, rng, lambda tag, part, r: mutated_message(0, part, r), (0, 1, 2, 0x10, 0x11, 0x12, 0x20, 0x30, 0x31)
    )


def _member_seeds() -> list[bytes]:
    me = Member("b~2", "b", "host", "127.0.0.1", 2)
    welcomed = [(1, wrapped(ToMember, Welcome(me, 1, "founder", "", 0.1, 0.5)))]
    rng = Random(2)
    chatter = [(tag, said) for kind, tag in ((ToMember, 1), (PeerMessage, 2)) for said in each(kind, rng)]
    staged = PipelinePlan(2, (Pipeline((PlanStage("a~1", 0, 1), PlanStage("b~2", 1, 2)), 1),))
    text = ViewPipelines.of(staged, shared={"wte.weight": (0, 1)}).to_json()
    view = View(ViewId(1, 1), NO_VIEW, (replace(me, id="a~1", name="a"), me), pipelines=text)
    founded = [*welcomed, (1, wrapped(ToMember, Decide(view, GENESIS)))]
    return [
        mutate.joined(welcomed),
        *(mutate.joined([*begun, part]) for begun in (welcomed, founded) for part in chatter),
    ]


def _feed_member(data: bytes) -> None:
    machine = MemberMachine()
    now = 1.0
    for tag, part in mutate.split(data):
        now += 0.01
        which = tag & 3
        event: fx.MemberEvent = fx.Tick()
        if which in (1, 2):
            said = unwrapped(which, part)
            if said is None:
                continue
            event = fx.ControlIn(said) if which == 1 else fx.PeerIn(mutate.IDS[tag >> 4 & 3], said)
        elif which == 3:
            event = fx.LinkChanged(mutate.IDS[tag >> 4 & 3], bool(tag & 4), "said so")
        count = len(machine.on(now, event))
        if count > MOST_EFFECTS:
            raise FindingError(f"{type(event).__name__} has {count} effects")


def _mutate_member(data: bytes, rng: Random) -> bytes:
    tags = [which | sender << 4 for which in (0, 1, 1, 2, 2, 3) for sender in range(4)]
    return mutate.parts_of(data, rng, mutated_message_of_either, tags)


def mutated_message_of_either(tag: int, data: bytes, rng: Random) -> bytes:
    """Returns a mutated message of the scheduler (1) or of a member (2)."""
    return mutated_message(tag & 3, data, rng) if tag & 3 in (1, 2) else data


# ------------------------------------------------------------------ state


def _state_seeds() -> list[bytes]:
    import torch

    from chaos_lightning.replication.manifest import encode_manifest
    from chaos_lightning.replication.table import build_table

    tensors = [("w", torch.zeros(3, 4)), ("b", torch.ones(4))]
    value = {
        "epoch": 3,
        "lr": [0.1, 1e-3],
        "t": (1, None),
        "s": {"a", "b"},
        "n": {1: "x"},
        "w": tensors[0][1],
        "h": b"x",
    }
    table = build_table(tensors, [])
    return [mutate.joined([(0, encode_manifest(value, tensors).data)]), mutate.joined([(1, table.encode())])]


def _read_state(data: bytes) -> None:
    import torch

    from chaos_lightning.replication.manifest import decode_manifest
    from chaos_lightning.replication.table import decode_table, make_attached

    for tag, part in mutate.split(data):
        with contextlib.suppress(WireError, StateError):
            if tag & 1:
                make_attached(decode_table(part), 1 << 20)
            else:
                decode_manifest(part, {"w": torch.zeros(3, 4)})


def _mutate_parts_of_json(data: bytes, rng: Random) -> bytes:
    return mutate.parts_of(data, rng, lambda tag, part, r: mutate.json_of(part or b"{}", r), (0, 1, 2, 3))


# ------------------------------------------------------------------ stores


def _view(rng: Random) -> View:
    """Any that a record may have: no text of it is beyond its limit."""
    while True:
        view: View = mutate.value_of(View, rng)
        with contextlib.suppress(WireError):
            codec.encode(view)
            return view


def _entry(rng: Random, number: int, view: bool) -> bytes:
    from chaos_lightning.control.chain import ChainEntry, entry_bytes

    some = _view(rng) if view else None
    body = entry_bytes(ChainEntry(0, "view" if view else "reserve", ViewId(1, number), some))
    document = {"format": 3, "kind": "view" if view else "reserve", "term": 1, "before": ""}
    return json.dumps({**document, "body": base64.b64encode(body).decode(), "wall": 1.5}).encode()


def _summary(rng: Random) -> bytes:
    from chaos_lightning.control.chain import Tip, advance, entry_bytes, entry_of, summary_of
    from chaos_lightning.control.store import EMPTY

    view = _view(rng)
    entry = entry_of(fx.Persist(1, "view", view.id, view))
    return entry_bytes(summary_of(advance(Tip(), entry, EMPTY), [entry]))


def _store_seeds() -> list[bytes]:
    rng = Random(3)
    tip = {"format": 3, "term": 1, "id": "c", "position": 2, "hash": "", "first": 1, "ended": []}
    leader = {"id": "a", "endpoint": "a:1", "host": "h", "pid": 1, "pid_start": 1, "lease": 0}
    chain = [(0, json.dumps(tip).encode()), (1, _entry(rng, 1, True)), (1, _entry(rng, 2, False))]
    row = [1, "view", 1, "{}", "", 1.5]
    return [
        mutate.joined(chain),
        mutate.joined([(1, _summary(rng))]),
        mutate.joined([(2, json.dumps(leader).encode())]),
        mutate.joined([(3, json.dumps(row).encode())]),
    ]


class _Keys:
    """etcd as a store sees it, with these values in it."""

    def __init__(self, tip: bytes, entries: list[bytes]) -> None:
        self.address = SimpleNamespace(prefix="p")
        self._tip = tip
        self._entries = entries

    def get(self, key: str) -> Any:
        return SimpleNamespace(key=key.encode(), value=self._tip, mod_revision=1) if self._tip else None

    def _kv(self, number: int) -> Any:
        key = f"p/jobs/j/record/{number:016d}".encode()
        return SimpleNamespace(key=key, value=self._entries[number - 1], mod_revision=1)

    def get_all(self, prefix: str, *, deadline_s: float | None = None) -> tuple[list[Any], int]:
        return [self._kv(n + 1) for n in range(len(self._entries))], 1


def _read_store(data: bytes) -> None:
    from chaos_lightning.control.chain import entry_from
    from chaos_lightning.control.election import Candidate
    from chaos_lightning.control.etcd_store import EtcdStore
    from chaos_lightning.control.store import StoreRecord

    parts = mutate.split(data)
    entries = [part for tag, part in parts if tag & 3 == 1]
    for tag, part in parts:
        if tag & 3 == 0:
            store = EtcdStore(typing.cast(Any, _Keys(part, entries)), "p/jobs/j/", owned=False)
            with contextlib.suppress(StoreError):
                store.read()
        elif tag & 3 == 1:
            for kind in ("view", "reserve", "summary"):
                with contextlib.suppress(StoreError):
                    entry_from(StoreRecord(1, kind, 1, part))
        elif tag & 3 == 2:
            Candidate.read(part)
        elif tag & 3 == 3:
            _read_row(part)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return tempfile.TemporaryDirectory(prefix="chaos-fuzz-", dir=place)


def _read_row(part: bytes) -> None:
    """A row of an embedded chain with these values, as SQLite takes them."""
    from chaos_lightning.control.chain import JobChain
    from chaos_lightning.control.sqlite_store import SqliteStore

    try:
        given = json.loads(part)
    except (ValueError, RecursionError):
        return
    path = Path(_folder().name) / "chain"
    for old in path.parent.iterdir():
        old.unlink()
    with JobChain(SqliteStore(path, "j")) as store:
        store.take_term()
        store.append(fx.Persist(1, "reserve", ViewId(1, 1)))
    db = sqlite3.connect(path)
    try:
        names = [row[1] for row in db.execute("PRAGMA table_info(record)")]
        values = given if isinstance(given, list) else [given]
        with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
            for name, value in zip(names, values, strict=False):
                if isinstance(value, list | dict):
                    value = json.dumps(value)
                db.execute(f"UPDATE record SET {name} = ?", (value,))
            db.commit()
    finally:
        db.close()
    with contextlib.suppress(StoreError), JobChain(SqliteStore(path, "j", read_only=True)) as store:
        store.load()


# ------------------------------------------------------------------ texts


_TEXT_SEEDS = (
    (0, "etcd://ann@10.0.0.1:2379,b,[::1]:3/prefix?ca=/ca&cert=/c&key=/k&password-file=/p&client=etcd3"),
    (1, "10.0.0.5:29400,[::1]:29401"),
    (2, '{"min_nodes": 1, "max_nodes": 4, "heartbeat_timeout_s": 1.5, "plan": {"kind": "rotating"}}'),
    (3, '{"step_timeout_s": "30", "plan": "tree:4", "store": "etcd://a+b", "neighbours": "a+b"}'),
    (4, "tree:4"),
)


def _read_texts(data: bytes) -> None:
    with _silenced(logging.getLogger("chaos_lightning")):
        _each_text(data)


@contextlib.contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    """Silences a logger for a while: it would warn thousands of times."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _each_text(data: bytes) -> None:
    from chaos_lightning.control.etcd_address import read_address
    from chaos_lightning.control.options import settings_from_json
    from chaos_lightning.machine.addresses import split_endpoints
    from chaos_lightning.planning.plans import read_plan
    from chaos_lightning.rendezvous.options import read_options

    for tag, part in mutate.split(data):
        text = part.decode(errors="replace")
        with contextlib.suppress(ConfigurationError):
            match tag % 5:
                case 0:
                    read_address(text)
                case 1:
                    split_endpoints(text)
                case 2:
                    settings_from_json(text)
                case 3:
                    with contextlib.suppress(ValueError, RecursionError):
                        given = json.loads(text)
                        if isinstance(given, dict):
                            words = {k: v for k, v in given.items() if isinstance(v, str) and _harmless(k, v)}
                            _options(read_options, words)
                case 4:
                    if _harmless("plan", text):
                        read_plan(text)


def _options(read: Any, given: dict[str, str]) -> None:
    """Only errors of ours may come out; ValueError is the base of ConfigurationError, so it is told apart here."""
    try:
        read(endpoint="127.0.0.1:29400", run_id="job", nodes=(1, 2), given=given, environ={})
    except ConfigurationError:
        return
    except (ValueError, RecursionError) as error:
        raise FindingError(f"--rdzv-conf {given}: {error!r}") from error


def _harmless(name: str, value: str) -> bool:
    """No files are read and no names are looked up."""
    return not (name == "plan" and (value.startswith("file:") or "." in value)) and name not in ("bind", "token_file")


def _mutate_texts(data: bytes, rng: Random) -> bytes:
    def change(tag: int, part: bytes, r: Random) -> bytes:
        if tag % 5 in (2, 3) and r.randint(0, 3):
            return mutate.json_of(part or b"{}", r)
        return mutate.text_of(part.decode(errors="replace"), r, ":/?&=@,+[]%.#~ 019").encode(errors="replace")

    return mutate.parts_of(data, rng, change, range(5))


READERS = (
    Target(
        "messages", "control messages and stored views, by the codec", _message_seeds, _read_messages, _mutate_messages
    ),
    Target(
        "scheduler",
        "what members say, by the scheduler's machine",
        _scheduler_seeds,
        _feed_scheduler,
        _mutate_scheduler,
    ),
    Target(
        "member", "what scheduler and members say, by a member's machine", _member_seeds, _feed_member, _mutate_member
    ),
    Target(
        "state", "manifests and tables of a training state", _state_seeds, _read_state, _mutate_parts_of_json, 8 << 20
    ),
    Target("stores", "values in etcd, rows in SQLite", _store_seeds, _read_store, _mutate_parts_of_json),
    Target(
        "texts",
        "addresses, settings and --rdzv-conf",
        lambda: [mutate.joined([(tag, text.encode())]) for tag, text in _TEXT_SEEDS],
        _read_texts,
        _mutate_texts,
    ),
)

__all__ = ["READERS", "hello", "message", "mutated_message", "unwrapped", "wrapped"]
