"""Fuzzes outer sync: its state machines and the messages they read, summaries in a leader's store, and a follower's
files.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from chaos_lightning.errors import ConfigurationError, StateError, StoreError, WireError
from chaos_lightning.outer.cluster.elastic import NewcomerFacts
from chaos_lightning.outer.exchange.kernel import OuterState
from chaos_lightning.outer.exchange.vocabulary import (
    FROM_CLUSTER,
    FROM_FOLLOWER,
    TO_CLUSTER,
    TO_FOLLOWER,
    body_bytes,
)
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as ms
from chaos_lightning.outer.rules import types as ty
from chaos_lightning.outer.rules.chain import OuterChain, SummedChain
from chaos_lightning.outer.rules.cluster import ClusterMachine, Missed
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.ranks_machine import RankSays, RanksMachine
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.summaries import summary_of
from chaos_lightning.outer.rules.types import NO_VERSION
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.protocol.plain import read_text, text_of
from chaos_lightning.service.memory_store import MemoryStore
from lab.fuzz import mutate
from lab.fuzz.messages import Record, each, mutation
from lab.fuzz.target import EndedError, FindingError, Target, settle


def agreement(length: int = 64) -> ty.Agreement:
    """Returns the agreement (tensors, codec, settings) of a small job."""
    return ty.Agreement(
        (ty.TensorSpec("w", "float32", (256,)),), block=64, length=length, settings=OuterSettings().words
    )


# ------------------------------------------------------------------ the leader's and a cluster's machine


_LEADER_HEARS = {0: FROM_CLUSTER, 2: FROM_FOLLOWER}
"""Vocabulary of what a leader hears, by the lower two bits of a part's number; the next two are the stream's number."""


def _leader_seeds() -> list[bytes]:
    rng = Random(4)
    follower = FROM_FOLLOWER.encode(ms.FollowerHello("f0", "n0", 0, (), NO_VERSION, "127.0.0.1:1"))
    cluster = FROM_CLUSTER.encode(ms.ClusterHello("a", "here", "n1", 0, None, NO_VERSION, NO_VERSION, agreement()))
    begun = [(2 | 0x10, follower), (0 | 0x20, cluster), (0x40, b"")]
    chatter = [(tag, said) for tag in (0 | 0x20, 2 | 0x10) for said in each(_LEADER_HEARS[tag & 3], rng)]
    inputs = (begun, begun + chatter, begun + chatter + begun, *([*begun, one] for one in chatter))
    return [mutate.joined(parts) for parts in inputs]


def _feed_leader(data: bytes) -> None:
    """Feeds the input's messages to a leader machine, whose store accepts every write."""
    machine = LeaderMachine(OuterChain(), 1, 1)
    now = 1.0

    def on(event: fx.LeaderEvent) -> Iterable[fx.LeaderEffect]:
        nonlocal now
        now += 0.05
        return machine.on(now, event)

    def answer(effect: fx.LeaderEffect) -> fx.EntryStored | None:
        if isinstance(effect, fx.Done):
            raise EndedError
        if not isinstance(effect, fx.StoreEntry):
            return None
        body_bytes(effect.entry.body)
        return fx.EntryStored(True)

    for tag, part in mutate.split(data):
        which, conn = tag & 3, tag >> 4 & 3
        event: fx.LeaderEvent
        if tag & 0x40:
            event = fx.TimePassed()
        elif which == 1:
            event = fx.StreamClosed(conn, bool(part))
        elif which == 3:
            event = fx.EndAsked("asked")
        else:
            try:
                event = fx.Heard(conn, _LEADER_HEARS[which].decode(part))
            except WireError:
                continue
        try:
            settle(on, event, answer)
        except EndedError:
            return


def _cluster_seeds() -> list[bytes]:
    chatter = [(1, said) for said in each(TO_CLUSTER, Random(5))]
    welcome = (1, TO_CLUSTER.encode(ms.Welcomed(1, ty.IncarnationId("a", 1), 1, NO_VERSION, True, ty.JobProgress())))
    return [mutate.joined(parts) for parts in (chatter, [welcome, *chatter], *([welcome, one] for one in chatter))]


def _feed_cluster(data: bytes) -> None:
    """Feeds the input to a training cluster's machine, as messages from its leader."""
    machine = ClusterMachine("a", "here", "n1", agreement())
    machine.on(fx.Connected())
    for _, part in mutate.split(data):
        try:
            machine.on(fx.Told(TO_CLUSTER.decode(part)))
        except WireError:
            pass
        except ValueError as error:
            if "named twice" not in str(error):
                raise
            return  # leases that overlap end it
        if machine.gone:
            return
        machine.on(fx.TimePassed())


# ------------------------------------------------------------------ ranks of an elastic cluster


_STEP, _ALL, _FACTS = 1, 2, 4
"""Bits of a part's number: the commit is a step; both ranks say so; the part is what a newcomer gets."""


def _ranks() -> RanksMachine:
    return RanksMachine(ClusterMachine("a", "here", "n1", agreement()))


def _rank_seeds() -> list[bytes]:
    who, version = ty.IncarnationId("a", 1), ty.VersionId(1, "0" * 32)
    welcome = fx.Told(ms.Welcomed(1, who, 1, version, True, ty.JobProgress()))
    push = ty.PushId(who, 1)
    accepted = ms.PushAnswered(1, push, ty.PushAnswer.ACCEPTED, version, "")
    granted = fx.Told(ms.Granted(1, (ty.Covered(0, ((0, 16), (32, 48))),)))
    said = (
        RankSays(events=(fx.Connected(), welcome, granted, fx.TimePassed())),
        RankSays(version),
        RankSays(samples=4, rates=(8.0, 2.0)),
        RankSays(frozen=(push, "m"), over="its loop is over"),
        RankSays(events=(fx.Told(accepted),), leaves=True),
        RankSays(events=(fx.Disconnected(), Missed(version)), failed="it cannot"),
    )
    commits = [(_STEP | _ALL, text_of(RankSays, one)) for one in said]
    ranks = _ranks()
    for one in said[:3]:
        list(ranks.commit(("a", "b"), (one, one), 0, ()))
    facts = NewcomerFacts(ranks.facts(), push, 1, (ms.Holder("f0", "127.0.0.1:1", "k", b"key"),))
    newcomer = (_FACTS, text_of(NewcomerFacts, facts))
    some = [(tag, said) for tag in (_STEP | _ALL, _FACTS) for said in each(_spoken(tag), Random(6))]
    return [mutate.joined(parts) for parts in (commits, [newcomer, *commits[2:]], [*commits[:3], *some])]


def _text(kind: type) -> Record:
    return Record(None, (kind,), functools.partial(text_of, kind), functools.partial(read_text, kind))


_SAYS, _NEWCOMERS = _text(RankSays), _text(NewcomerFacts)


def _spoken(tag: int) -> Record:
    return _NEWCOMERS if tag & _FACTS else _SAYS


def _feed_ranks(data: bytes) -> None:
    """Feeds the input to an elastic cluster's machine, as contributions of two ranks to commits or as state for a
    newcomer.
    """
    ranks, spent = _ranks(), 0
    for tag, part in mutate.split(data):
        words = _spoken(tag)
        with contextlib.suppress(WireError):
            found = words.decode(part)
            if words.decode(words.encode(found)) != found:
                raise FindingError(f"{type(found).__name__} is another one when it is written and read again")
            if isinstance(found, NewcomerFacts):
                ranks = _ranks()
                ranks.restore(found.ranks)
                continue
            spent = min(spent + 1, ranks.leased.tape.length) if ranks.leased is not None else 0
            said = (found, replace(found, events=()) if tag & _ALL else RankSays())
            try:
                for _ in ranks.commit(("a", "b"), said, tag & _STEP, ((0, spent),) if spent else ()):
                    pass
            except StateError:
                return
            ranks.known()


# ------------------------------------------------------------------ a follower's machine


_ILL = 1
"""Bit of a part's number: fetches, saves and loads fail."""


def _follower_seeds() -> list[bytes]:
    who, job = ty.IncarnationId("a", 1), agreement()
    first, second = (ty.Offer(ty.PushId(who, n), NO_VERSION, "m", 4, 1) for n in (1, 2))
    founded = ty.Entry(1, 1, ty.Founded(1, first))
    weighed = (ty.Weighed(second, 1.0, 0),)
    made = ty.Round(
        2, founded.version, weighed, (), ty.Factors(1.0, 1.0, 0.9), ty.Counters(), ty.GateState(), "all are here"
    )
    decided = ty.Entry(2, 1, made, founded.hash)
    back = ty.Entry(3, 1, ty.RolledBack(3, founded.version, (), "lost"), decided.hash)
    nothing = ty.Entry(4, 1, ty.RolledBack(4, NO_VERSION, (), "lost"), back.hash)
    files = tuple(ms.ShardFile(entry.version, "d") for entry in (founded, decided))
    said = (
        ms.Obey(1, "n0", 0, 1, job, (), NO_VERSION, (founded,), "job"),
        ms.Stage(1, second),
        ms.Apply(1, decided),
        ms.Keep(1, decided.version),
        ms.Hold(1, founded.version),
        ms.Marked(1, files, founded.version),
        ms.Apply(1, founded),
        ms.Apply(1, back),
        ms.DropPush(1, second.push, later=True),
        ms.Obey(2, "n0", 0, 1, job, files, founded.version, (decided, back), "job"),
        ms.Apply(2, nothing),
        ms.LineKey(2, "a", "k", b"key"),
        ms.JobFinished(2, back.version, "asked"),
    )
    parts = [TO_FOLLOWER.encode(one) for one in said]
    chatter = each(TO_FOLLOWER, Random(6))
    inputs = (parts, *([*parts[:5], one] for one in chatter))
    return [mutate.joined([(tag, part) for part in some]) for some in inputs for tag in (0, _ILL)]


def _answered(effect: fx.FollowerEffect, late: list[fx.FollowerEvent], *, ill: bool) -> fx.FollowerEvent | None:
    """Returns the event with which a follower's process answers an effect at once; appends later events to `late`."""
    match effect:
        case fx.JobOver() | fx.TurnedAway():
            raise EndedError
        case fx.FetchPush(offer) if ill:
            late.append(fx.NotFetched(offer.push))
        case fx.FetchPush(offer):
            return fx.Fetched(offer.push, offer.manifest, (), True)
        case fx.Compute(entry):
            return fx.Computed(entry.version)
        case fx.Empty(version):
            return fx.Computed(version)
        case fx.Save(version):
            return fx.DiskTrouble("full") if ill else fx.StateSaved(version, "d")
        case fx.Load(version, _):
            return fx.Loaded(version, not ill)
    return None


def _feed_follower(data: bytes) -> None:
    """Feeds the input to a follower machine, as messages from its leader."""
    machine = FollowerMachine("f0", "n0", (ms.ShardFile(ty.VersionId(1, "0" * 32), "d"),))
    machine.on(fx.Connected())
    late: list[fx.FollowerEvent] = []
    for tag, part in mutate.split(data):
        with contextlib.suppress(WireError):
            events, late = [*late, fx.Told(TO_FOLLOWER.decode(part))], []
            answer = functools.partial(_answered, late=late, ill=bool(tag & _ILL))
            try:
                for event in events:
                    settle(machine.on, event, answer)
            except (EndedError, StateError):
                return


# ------------------------------------------------------------------ summaries


def _summary_seeds() -> list[bytes]:
    chain, rng = OuterChain(), Random(7)
    chain.follow(chain.entry(1, ty.JobOpened(agreement(), "a test", "n")))
    who = ty.IncarnationId("a", 1)
    chain.follow(chain.entry(1, ty.Joined(who, "a test")))
    chain.follow(chain.entry(1, ty.Founded(1, ty.Offer(ty.PushId(who, 1), NO_VERSION, "m", 0, 0))))
    for _ in range(2):
        chain.follow(chain.entry(1, ty.Durable(chain.newest, ("d",))))
    text = zlib.decompress(base64.b64decode(summary_of(chain, ()).state))
    return [text, *(mutate.json_of(text, rng) for _ in range(3))]


def _read_summary(data: bytes) -> None:
    """Reads the input as the summary in a leader's store; either the chain loads, or the store is refused."""
    body = ty.Summary("0" * 32, base64.b64encode(zlib.compress(data)).decode())
    with contextlib.suppress(ValueError):
        SummedChain.of(body)
    with contextlib.suppress(StoreError):
        store = MemoryStore()
        store.append(ty.Summary.__name__, body_bytes(body), store.take_term(), cut=True)
        load_chain(store)


# ------------------------------------------------------------------ files


def _file_seeds() -> list[bytes]:
    grid = Grid((256,), 64)
    state = OuterState(grid.whole, torch.arange(256, dtype=torch.float32))
    version = ty.VersionId(3, "0" * 32)
    with tempfile.TemporaryDirectory() as folder:
        files = ShardFiles(Path(folder), "job")
        files.save(version, state, ty.Counters(1, 2, 3))
        return [files.path(version).read_bytes()]


def _read_file(data: bytes) -> None:
    """Reads the input as a version's file in a follower's folder; either the file is complete, or an error must name
    it.
    """
    version = ty.VersionId(3, "0" * 32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job" / f"v{version.number:08d}-{version.hash}.safetensors"
        path.parent.mkdir()
        path.write_bytes(data)
        with contextlib.suppress(ConfigurationError):
            files = ShardFiles(Path(folder), "job")
            for file in files.look().whole:
                with contextlib.suppress(StateError):
                    files.load(file.version, file.digest)


OUTER = (
    Target(
        "outer-leader",
        "what clusters and followers say, by the leader",
        _leader_seeds,
        _feed_leader,
        mutation(lambda tag: _LEADER_HEARS.get(tag & 3), (0x10, 0x12, 0x20, 0x22, 0x21, 0x11, 0x40, 0x13)),
    ),
    Target(
        "outer-cluster",
        "what a leader says, by a cluster",
        _cluster_seeds,
        _feed_cluster,
        mutation(lambda tag: TO_CLUSTER, (1,)),
    ),
    Target(
        "outer-follower",
        "what a leader says, by a follower",
        _follower_seeds,
        _feed_follower,
        mutation(lambda tag: TO_FOLLOWER, (0, _ILL)),
    ),
    Target(
        "outer-ranks",
        "what ranks of a cluster say, by the others",
        _rank_seeds,
        _feed_ranks,
        mutation(_spoken, (0, _STEP, _ALL, _STEP | _ALL, _FACTS)),
    ),
    Target("outer-summary", "the text of a summary in a leader's store", _summary_seeds, _read_summary, mutate.json_of),
    Target("outer-files", "a follower's files", _file_seeds, _read_file, mutate.bytes_of, 8 << 20),
)
