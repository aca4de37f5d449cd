"""Summaries of the chain: a reader that begins with one continues like a reader of the whole chain, and records stay
small (O1a).
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from outer_served import AGREEMENT, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from until_support import until

from chaos_lightning.errors import StoreError
from chaos_lightning.events.events import EventLog
from chaos_lightning.events.reader import read_events
from chaos_lightning.observe.outer.entries import JobEntries, read_entry
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules import summaries
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.effects import EntryStored, Heard, LeaderEvent, SendTo
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.summaries import summary_of
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Body,
    Counters,
    Covered,
    Cut,
    Durable,
    Entry,
    Factors,
    Founded,
    GateState,
    IncarnationId,
    JobOpened,
    Joined,
    Offer,
    PushAnswer,
    PushId,
    Removed,
    Round,
    Started,
    Summary,
    VersionId,
    Weighed,
)
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.planning.batches import Batches
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.sqlite_store import SqliteStore
from lab.outer.plans import FAMILIES
from lab.outer.world import World

SHARED = replace(AGREEMENT, length=100)
HOME, AWAY, GONE = IncarnationId("home", 1), IncarnationId("away", 2), IncarnationId("gone", 3)


class Told:
    """Chain to which a test appends entries."""

    def __init__(self) -> None:
        self.chain = OuterChain()

    def put(self, *bodies: Body) -> Entry:
        for body in bodies:
            entry = self.chain.entry(1, body)
            self.chain.follow(entry)
        return entry

    def begin(self) -> Told:
        """Appends a job with one shard and three clusters, and its first version."""
        self.put(JobOpened(SHARED, "home at a test"), Started("one", "n"), Cut(("one",)))
        self.put(*(Joined(who, "a test") for who in (HOME, AWAY, GONE)))
        self.put(Founded(1, Offer(PushId(HOME, 1), NO_VERSION, "first", 0, 0)))
        return self

    def round(self, number: int, base: VersionId | None = None) -> None:
        """Appends a round that accepts one push of cluster home, and the mark that makes its version durable."""
        chain = self.chain
        assert chain.leases is not None
        leased = chain.leases.grant(HOME, 1, Batches(1, 1), (HOME,))
        assert leased is not None
        self.put(leased)
        offer = Offer(
            PushId(HOME, number), base or chain.newest, f"{number}", 1, 1, (Covered(leased.epoch, leased.spans),)
        )
        counters = Counters(samples=chain.counters.samples + 1)
        weighed = (Weighed(offer, 1.0, 0),)
        self.put(
            Round(chain.next_number, chain.newest, weighed, (), Factors(0.1, 1.0, 0.9), counters, GateState(number), "")
        )
        self.put(Durable(chain.newest, (f"digest {number}",)))


def begun_at(entry: Entry) -> OuterChain:
    chain = OuterChain()
    chain.follow(entry)
    return chain


def facts(chain: OuterChain) -> dict[str, object]:
    """Returns all facts of the chain on which later entries depend."""
    alive = {who: known for who, known in chain.incarnations.items() if not known.over}
    return {
        **{name: getattr(chain, name) for name in ("position", "hash", "newest", "durable", "safe", "joined", "cut")},
        **{name: getattr(chain, name) for name in ("starts", "counters", "gate", "rounds", "rollbacks", "tally")},
        **{name: getattr(chain, name) for name in ("founded", "ahead", "reopened", "ended", "agreement")},
        "leases": chain.leases and chain.leases.encode(),
        "versions": chain.since(chain.safe),
        "progress": [chain.progress(version.id) for version in chain.since(chain.safe)],
        "alive": {who: (known.next, known.rejected, known.tally) for who, known in alive.items()},
        "held": [chain.held(chain.newest, who) for who in sorted(alive)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fragile", "poisoned", "own"])
def test_who_begins_with_a_summary_goes_on_as_one_who_has_read_all(family: str) -> None:
    compared = 0
    for seed in range(5):
        world = World(FAMILIES[family](seed))
        assert world.run().violation == ""
        read: list[OuterChain] = [OuterChain(whole=True)]
        for entry in world.entries:
            if isinstance(entry.body, Summary):
                read.append(OuterChain())
            for chain in read:
                chain.follow(entry)
            assert all(facts(chain) == facts(read[0]) for chain in read[1:])
        compared += len(read) - 1
    assert compared > 2


def test_a_long_job_is_kept_in_little_space() -> None:
    told, sizes, largest = Told().begin(), [], 0
    for number in range(2, 800):
        told.round(number)
        if number % 50 == 0:
            entry = told.put(summary_of(told.chain, (), 8))
            assert isinstance(entry.body, Summary)
            largest = max(largest, len(entry.body.state))
            chain = told.chain
            kept = [known.answers for known in chain.incarnations.values()]
            sizes.append((len(chain.versions), len(chain.bases), len(chain.states), max(map(len, kept))))
    assert set(sizes[1:]) == {sizes[-1]}
    assert max(sizes[-1]) <= summaries.ANSWERS
    assert largest < 4000


def test_what_was_cut_is_over_or_old_and_ends_no_leader() -> None:
    told = Told().begin()
    old = told.chain.newest
    for number in range(2, 30):
        told.round(number)
    told.put(Removed(GONE, "it left"))
    told.put(summary_of(told.chain, (), 4))
    chain = told.chain
    assert GONE not in chain.incarnations
    assert "so long" in chain.over(GONE)
    assert chain.forgot(old)
    assert not chain.lacks(old)
    assert chain.lacks(replace(chain.newest, hash="another"))
    machine = LeaderMachine(chain, 2)

    def hello(conn: int, who: IncarnationId, base: VersionId) -> list[object]:
        word = say.ClusterHello(who.cluster, "a test", "n", 1, who, base, base, SHARED)
        return [effect.message for effect in machine.on(1.0, Heard(conn, word)) if isinstance(effect, SendTo)]

    assert hello(1, GONE, old) == [say.Dismissed(2, chain.over(GONE), again=True)]
    assert say.Welcomed(2, AWAY, 1, NO_VERSION, True, chain.progress(NO_VERSION), chain.job_id) in hello(2, AWAY, old)
    offer = Offer(PushId(AWAY, 1), old, "late", 1, 1)
    heard: list[object] = []
    event: LeaderEvent = Heard(2, say.Offered(offer))
    for _ in range(4):
        heard += [effect.message for effect in machine.on(1.0, event) if isinstance(effect, SendTo)]
        if machine.desk.persisting is None:
            break
        event = EntryStored(True)
    (answer,) = [message for message in heard if isinstance(message, say.PushAnswered)]
    assert (answer.push, answer.answer) == (offer.push, PushAnswer.VOID)
    assert "so old" in answer.reason
    known = told.chain.incarnations[HOME]
    assert known.forgotten > 1
    assert known.next == 30


def test_a_base_of_which_somebody_told_is_kept_though_it_is_old() -> None:
    told = Told().begin()
    old = told.chain.newest
    for number in range(2, 12):
        told.round(number)
    entry = told.put(summary_of(told.chain, {old}, 4))
    chain = begun_at(entry)
    assert not chain.forgot(old)
    assert chain.held(old, AWAY) == chain.held(chain.newest, AWAY) == ""
    assert chain.held(old, HOME) != chain.held(chain.newest, HOME)


def test_a_summary_waits_for_those_who_have_not_said_their_base() -> None:
    told = Told().begin()
    for number in range(2, 6):
        told.round(number)
    machine = LeaderMachine(told.chain, 2)
    machine.summaries.every = 10
    assert machine.summaries.next_summary() is None
    for conn, who in enumerate((HOME, AWAY, GONE)):
        word = say.ClusterHello(who.cluster, "a test", "n", 1, who, NO_VERSION, NO_VERSION, SHARED)
        machine.on(1.0, Heard(conn, word))
    assert isinstance(machine.desk.persisting and machine.desk.persisting.body, Summary)


def test_one_that_no_store_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "MOST_CHARACTERS", 10)
    told = Told().begin()
    told.round(2)
    told.round(3)
    told.put(*(Removed(who, "it left") for who in (HOME, AWAY, GONE)))
    machine = LeaderMachine(told.chain, 2)
    machine.summaries.every = 1
    assert machine.summaries.next_summary() is None
    assert "is not cut" in str(machine.desk.out)


def test_a_damaged_summary_is_an_error_of_the_store() -> None:
    store = MemoryStore()
    store.append("Summary", body_bytes(Summary("", "no state")), store.take_term(), cut=True)
    with pytest.raises(StoreError, match="does not follow"):
        load_chain(store)


def test_a_summary_of_nothing_is_an_error_of_the_store() -> None:
    store = MemoryStore()
    text = base64.b64encode(zlib.compress(b"null")).decode()
    store.append("Summary", body_bytes(Summary("", text)), store.take_term(), cut=True)
    with pytest.raises(StoreError, match="cannot be read"):
        load_chain(store)


def test_a_job_goes_on_from_a_summary_in_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "EVERY", 12)
    log = EventLog(tmp_path / "events.jsonl", role="leader")

    def opened() -> SqliteStore:
        return SqliteStore(tmp_path / "chain.sqlite", "default")

    disk: tuple[say.ShardFile, ...] = ()
    base, version, me, nonce, term, number = NO_VERSION, NO_VERSION, None, "", 0, 0
    for _ in range(2):
        with outer_serving(opened, log=log) as served:
            follower, cluster = ScriptedFollower(served.endpoint), ScriptedCluster(served.endpoint)
            follower.disk, follower.version, follower.term = disk, version, term
            cluster.me, cluster.base, cluster.newest, cluster.nonce = me, base, base, nonce or cluster.nonce
            with at_once(follower, cluster):
                for _ in range(12):
                    if me is not None or number:
                        cluster.heard.wait_for(say.Welcomed)
                        cluster.push()
                    version = base = cluster.served(number + 1)
                    number = version.number
                    until(lambda s=served: fetch_facts(s.endpoint, b"")["versions"]["ahead"] == 0, "a durable mark")
                told = fetch_facts(served.endpoint, b"")
            machine = served.server._machine
            assert machine is not None
            assert len(machine.followers["one"].staged) < 3, "what no round and no follower needs is forgotten"
            assert len(machine.followers["one"].disk) < 3
        disk, me, nonce, term = follower.disk, cluster.me, cluster.nonce, told["term"]
    assert told["rounds"] == told["accepted"] - 1 == number - 1
    with opened() as store:
        first, *rest = store.read()[1]
        assert first.kind == "Summary"
        assert len(rest) < 24
        chain = load_chain(store)
    log.close()
    entries = JobEntries.of(read_entry(r) for r in read_events(tmp_path / "events.jsonl") if r.name == "entry")
    assert (entries.gaps, entries.contradictions, entries.doubts) == ([], [], [])
    assert entries.newest == chain.newest == version
