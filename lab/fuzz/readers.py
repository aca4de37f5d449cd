"""Fuzzes readers that need no connection: state machines, manifests of states, stores, and texts such as options."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sqlite3
import tempfile
import typing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from chaos_lightning.errors import ConfigurationError, StateError, StoreError, WireError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.codec import FROM_MEMBER, JOB, PEER, TO_MEMBER
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Entered,
    FromMember,
    Hello,
    LinkEvent,
    Member,
    Ready,
    Report,
    Settings,
    View,
    ViewId,
    Welcome,
)
from lab.fuzz import mutate
from lab.fuzz.messages import Words, each, mutation, record, said
from lab.fuzz.target import FindingError, Target, settle

# ------------------------------------------------------------------ machines


def hello(name: str, number: int) -> Hello:
    """Returns the `Hello` message of a process that fits the job."""
    place = ("host", "127.0.0.1", 1000 + number, number, 1)
    return Hello("default", name, *place, quota=1, accumulate=1, package="1", fingerprint=())


def _said(conn: int, message: FromMember) -> tuple[int, bytes]:
    return (conn, FROM_MEMBER.encode(message))


def _opened(conn: int) -> tuple[int, bytes]:
    return (conn | 0x10, b"")


def _tick() -> tuple[int, bytes]:
    return (0x20, b"")


def _scheduler_seeds() -> list[bytes]:
    joined = [_opened(0), _said(0, hello("a", 1)), _said(0, Ready()), _tick(), _tick()]
    joined += [_said(0, Entered(ViewId(1, 1), 0, 0, "")), _tick()]
    two = [_opened(1), _said(1, hello("b", 2)), _said(1, Ready()), _tick(), _tick()]
    links = [_said(conn, LinkEvent(peer, True, "connected")) for conn, peer in enumerate(("b~2", "a~1"))]
    both = [_said(conn, Entered(ViewId(1, 2), 0, 0, GENESIS.hash)) for conn in (0, 1)]
    loss = [_said(0, LinkEvent("b~2", False, "closed (reset)")), (0x31, b"x"), _tick()]
    report = Report(ViewId(1, 3), ViewId(1, 2), 0, GENESIS.hash, last=GENESIS)
    recovers = [*joined, *two[:2], *links, *two[2:], *both, *loss, _tick(), _said(0, report), _tick()]
    chatter = [(0, said) for said in each(FROM_MEMBER, Random(1))]
    inputs = (joined, joined + two, joined + chatter, recovers, *([*joined, one] for one in chatter))
    return [mutate.joined(parts) for parts in inputs]


def _feed_scheduler(data: bytes) -> None:
    """Feeds the input to a scheduler machine, as messages on streams 0 to 7; stores accept every write."""
    machine = SchedulerMachine(Settings(min_nodes=1), fx.Chain(1, NO_VIEW))
    streams: set[int] = set()
    now = 1.0

    def on(event: fx.SchedulerEvent) -> Iterable[fx.SchedulerEffect]:
        nonlocal now
        now += 0.01
        return machine.on(now, event)

    def answer(effect: fx.SchedulerEffect) -> fx.Stored | None:
        if isinstance(effect, fx.Send):
            TO_MEMBER.encode(effect.message)
        return fx.Stored(effect.token, True) if isinstance(effect, fx.Persist) else None

    for tag, part in mutate.split(data):
        conn, what = tag & 7, tag >> 4 & 3
        if what == 1 and conn not in streams:
            streams.add(conn)
            settle(on, fx.Opened(conn), answer)
        elif what == 2:
            now += 0.2
            settle(on, fx.SchedulerTick(), answer)
        elif what == 3 and conn in streams:
            streams.discard(conn)
            settle(on, fx.Closed(conn, bool(part)), answer)
        elif what == 0 and conn in streams:
            with contextlib.suppress(WireError):
                settle(on, fx.MessageIn(conn, FROM_MEMBER.decode(part)), answer)
    machine.validate_state()


def _member_seeds() -> list[bytes]:
    me = Member("b~2", "b", "host", "127.0.0.1", 2)
    welcomed = [(1, TO_MEMBER.encode(Welcome(me, 1, "founder", "", 0.1, 0.5)))]
    rng = Random(2)
    chatter = [(tag, said) for tag, words in _MEMBER_HEARS.items() for said in each(words, rng)]
    staged = PipelinePlan(2, (Pipeline((PlanStage("a~1", 0, 1), PlanStage("b~2", 1, 2)), 1),))
    text = ViewPipelines.of(staged, shared={"wte.weight": (0, 1)}).to_json()
    view = View(ViewId(1, 1), NO_VIEW, (replace(me, id="a~1", name="a"), me), pipelines=text)
    founded = [*welcomed, (1, TO_MEMBER.encode(Decide(view, GENESIS)))]
    return [
        mutate.joined(welcomed),
        *(mutate.joined([*begun, part]) for begun in (welcomed, founded) for part in chatter),
    ]


_MEMBER_HEARS: dict[int, Words] = {1: TO_MEMBER, 2: PEER}


def _feed_member(data: bytes) -> None:
    machine = MemberMachine()
    now = 1.0
    for tag, part in mutate.split(data):
        now += 0.01
        which, peer = tag & 3, mutate.IDS[tag >> 4 & 3]
        event: fx.MemberEvent = fx.Tick()
        if which in _MEMBER_HEARS:
            try:
                said = _MEMBER_HEARS[which].decode(part)
            except WireError:
                continue
            event = fx.ControlIn(said) if which == 1 else fx.PeerIn(peer, said)
        elif which == 3:
            event = fx.LinkChanged(peer, bool(tag & 4), "said so")
        settle(functools.partial(machine.on, now), event)


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


def _store_seeds() -> list[bytes]:
    from chaos_lightning.control.job_chain import Tip, advance, entry_bytes, entry_of, summary_of
    from chaos_lightning.service.election import Candidate
    from chaos_lightning.service.etcd_store import FORMAT, _record_bytes
    from chaos_lightning.service.store import EMPTY, End, StoreRecord

    views = record(JOB, View)
    view = views.decode(said(views, Random(3), accepted=True))
    entries = [entry_of(fx.Persist(1, "view", view.id, view)), entry_of(fx.Persist(2, "reserve", ViewId(1, 2)))]
    records = [StoreRecord(at, entry.kind, 1, entry_bytes(entry)) for at, entry in enumerate(entries, 1)]
    tip = json.dumps({"format": FORMAT, **asdict(End(1, "c", 2))}).encode()
    row = json.dumps([1, "view", 1, "{}", "", 1.5]).encode()
    bodies = [one.body for one in records] + [entry_bytes(summary_of(advance(Tip(), entries[0], EMPTY), entries[:1]))]
    alone = [*((1, body) for body in bodies), (2, Candidate("a", "a:1", "h", 1, 1).packed()), (3, row)]
    chain = [(0, tip), *((1, _record_bytes(one)) for one in records)]
    return [mutate.joined(parts) for parts in (chain, *([one] for one in alone))]


class _Keys:
    """Fake etcd client that returns the given values to a store."""

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
    from chaos_lightning.control.job_chain import entry_from
    from chaos_lightning.service.election import Candidate
    from chaos_lightning.service.etcd_store import EtcdStore
    from chaos_lightning.service.store import StoreRecord

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
    """Writes a row with the given values into a chain's SQLite file, and reads it as a store does."""
    from chaos_lightning.control.job_chain import JobChain
    from chaos_lightning.service.sqlite_store import SqliteStore

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
    """Silences a logger during the block, since it would warn thousands of times."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _each_text(data: bytes) -> None:
    from chaos_lightning.control.options import settings_from_json
    from chaos_lightning.machine.addresses import split_endpoints
    from chaos_lightning.planning.plans import read_plan
    from chaos_lightning.rendezvous.options import read_options
    from chaos_lightning.service.etcd_address import read_address

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
    """Reads --rdzv-conf options; any error but ConfigurationError is a finding, even its base class ValueError."""
    try:
        read(endpoint="127.0.0.1:29400", run_id="job", nodes=(1, 2), given=given, environ={})
    except ConfigurationError:
        return
    except (ValueError, RecursionError) as error:
        raise FindingError(f"--rdzv-conf {given}: {error!r}") from error


def _harmless(name: str, value: str) -> bool:
    """Returns whether reading an option neither opens a file nor looks up a host name."""
    return not (name == "plan" and (value.startswith("file:") or "." in value)) and name not in ("bind", "token_file")


def _mutate_texts(data: bytes, rng: Random) -> bytes:
    def change(tag: int, part: bytes, r: Random) -> bytes:
        if tag % 5 in (2, 3) and r.randint(0, 3):
            return mutate.json_of(part or b"{}", r)
        return mutate.text_of(part.decode(errors="replace"), r, ":/?&=@,+[]%.#~ 019").encode(errors="replace")

    return mutate.parts_of(data, rng, change, range(5))


READERS = (
    Target(
        "scheduler",
        "what members say, by the scheduler's machine",
        _scheduler_seeds,
        _feed_scheduler,
        mutation(lambda tag: FROM_MEMBER, (0, 1, 2, 0x10, 0x11, 0x12, 0x20, 0x30, 0x31)),
    ),
    Target(
        "member",
        "what scheduler and members say, by a member's machine",
        _member_seeds,
        _feed_member,
        mutation(
            lambda tag: _MEMBER_HEARS.get(tag & 3),
            [which | sender << 4 for which in (0, 1, 1, 2, 2, 3) for sender in range(4)],
        ),
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
