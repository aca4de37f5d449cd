"""A follower's process with a scripted leader and real data connections: it computes, saves, loads and reports."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from until_support import until

from chaos_lightning.errors import NoDonorError, StateError
from chaos_lightning.events.registry import problems
from chaos_lightning.outer.exchange.codec import BF16, FP32, Format, Part, codec_named, codec_of
from chaos_lightning.outer.exchange.fetching import drop_push, fetch_version, hold_push
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate, products
from chaos_lightning.outer.exchange.lines import SERVING, ParkedLines
from chaos_lightning.outer.exchange.serving import ServedVersions
from chaos_lightning.outer.follower import staging
from chaos_lightning.outer.follower.follower_process import FollowerProcess
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.messages import (
    Applied,
    Apply,
    DropPush,
    FollowerHello,
    Holder,
    JobFinished,
    Keep,
    Marked,
    Missing,
    Obey,
    ShardFile,
    Stage,
    Staged,
    Trouble,
    Written,
)
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Body,
    Counters,
    Entry,
    Factors,
    Founded,
    GateState,
    IncarnationId,
    Offer,
    PushId,
    RolledBack,
    Round,
    TensorSpec,
    VersionId,
    Weighed,
)
from chaos_lightning.protocol.types import Progress, SourceProgress
from chaos_lightning.replication.server import StateServer

JOB, TOKEN = "job", b"a token of a test"
HOME, FAR = IncarnationId("home", 1), IncarnationId("far", 1)
TENSORS = (
    TensorSpec("w", "float32", (30, 10)),
    TensorSpec("b", "float32", (70,)),
    TensorSpec("mean", "float32", (90,)),
)
AGREEMENT = Agreement(TENSORS, averaged=1, block=64, codec="bf16")
BY_PARAMETERS = replace(AGREEMENT, settings=OuterSettings(policy="di_ps").words)
"""Agreement of a job whose pushes hold parameters, in fp32."""
GRID = Grid(tuple(t.elements for t in TENSORS), 64)
DELAYED = Factors(rate=0.35, buffer=0.5, momentum=0.8)
MOVING = Factors(rate=0.35, buffer=0.5, momentum=0.8, outer=1.0, step=0.56)
T = TypeVar("T")


def noise(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(GRID.elements, generator=torch.Generator().manual_seed(seed)) * scale


class ScriptedLeader:
    """Leader's end of a follower's stream: records all messages, and sends those that a test wants."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.tell: Callable[[Any], None]
        self._connected: Callable[[], None]

    def __call__(self, *, on_connected: Any, on_message: Any, on_disconnected: Any) -> ScriptedLeader:
        self.tell, self._connected, self.hang_up = on_message, on_connected, on_disconnected
        return self

    def start(self) -> None:
        self._connected()

    def say(self, message: Any) -> None:
        self.said.append(message)

    def close(self, timeout_s: float = 2.0) -> None:
        pass

    def heard(self, kind: type[T], **fields: Any) -> T:
        """Waits until the follower has sent a message of this type with these fields; returns the last such message."""

        def found() -> list[T]:
            fits = [m for m in self.said if isinstance(m, kind)]
            return [m for m in fits if all(getattr(m, name) == value for name, value in fields.items())]

        until(found, f"{kind.__name__} with {fields}; heard {self.said}")
        return found()[-1]


class Chain:
    """Entries of a chain, one after the other."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, body: Body) -> Entry:
        before = self.entries[-1].hash if self.entries else ""
        self.entries.append(Entry(len(self.entries) + 1, 1, body, before))
        return self.entries[-1]

    @property
    def newest(self) -> VersionId:
        return self.entries[-1].version if self.entries else NO_VERSION

    def round(self, factors: Factors, *accepted: Offer) -> Entry:
        weighed = tuple(Weighed(offer, 1 / len(accepted), 0) for offer in accepted)
        number = self.newest.number + 1
        return self.add(
            Round(number, self.newest, weighed, (), factors, Counters(samples=number), GateState(), "a test")
        )


class Reference:
    """State of a shard, computed from the follower's entries by calling the kernel directly."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.state = OuterState(shard, torch.zeros(shard.elements))
        self.averaged = shard.since(2)

    def slice(self, values: Tensor, format: Format = BF16) -> Part:
        return Part.encoded(self.shard, format, values[slice(*self.shard.span)])

    def follow(self, entry: Entry, contents: dict[PushId, Tensor]) -> None:
        match entry.body:
            case Founded(_, offer):
                self.state = OuterState(self.shard, self.slice(contents[offer.push]).decoded())
            case Round() as body:
                pushes = [(w.factor, self.slice(contents[w.offer.push])) for w in body.accepted]
                RoundUpdate(self.state, pushes, body.factors, None, self.averaged).run()

    def product(self, one: Tensor, other: Tensor | Part) -> str:
        theirs = self.slice(other) if isinstance(other, Tensor) else other
        return ExactSum.of(products(self.slice(one), theirs)[: self.averaged]).encode()

    @property
    def momentum(self) -> Part:
        return Part.of(self.shard, self.state.momentum)


class ClusterEnd:
    """Process of a cluster, with the side of it that followers see: data connections and served pushes."""

    def __init__(self, who: IncarnationId, shards: int) -> None:
        self.who, self.server = who, StateServer(SERVING)
        self.shards = GRID.cut(shards)
        self.lines = ParkedLines(self.server, job=JOB, me=lambda: str(who), secret=TOKEN, note=lambda *a, **k: None)

    def push(self, number: int, content: Tensor, base: VersionId, format: Format = BF16) -> Offer:
        push = PushId(self.who, number)
        manifest = hold_push(self.server, push, Part.encoded(GRID.whole, format, content), self.shards)
        return Offer(push, base, manifest, 10, 1)

    def close(self) -> None:
        self.lines.close()
        self.server.close()


class Rig:
    """Follower that holds one shard, with two clusters and a chain that the test writes as its leader."""

    def __init__(self, folder: Path, shard: int = 0, shards: int = 1, agreement: Agreement = AGREEMENT) -> None:
        self.folder, self.shard, self.shards, self.agreement = folder, shard, shards, agreement
        self.clusters = {who: ClusterEnd(who, shards) for who in (HOME, FAR)}
        self.chain = Chain()
        self.contents: dict[PushId, Tensor] = {}
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.durable: tuple[ShardFile, ...] = ()
        self.base = NO_VERSION
        self.open = (PushId(HOME, 1), PushId(FAR, 1))
        self.process: FollowerProcess | None = None
        self.begin()

    def note(self, name: str, **fields: Any) -> None:
        self.notes.append((name, fields))

    def noted(self, name: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.notes if found == name]

    def begin(self) -> None:
        """Starts a new follower process on the same files, with a new scripted leader."""
        if self.process is not None:
            self.process.close()
        self.leader = ScriptedLeader()
        files = ShardFiles(self.folder, JOB)
        self.process = FollowerProcess("f", files, ("127.0.0.1", 0), TOKEN, self.leader, self.note)
        self.process.start()
        for cluster in self.clusters.values():
            cluster.lines.follow([Holder("f", self.process.endpoint)])
        self.hello = self.leader.heard(FollowerHello)
        self.obey()

    def obey(self) -> None:
        made = [entry.version for entry in self.chain.entries]
        since = self.chain.entries[made.index(self.base) + 1 :] if self.base in made else self.chain.entries
        place = self.shard, self.shards, self.agreement
        said = Obey(1, self.hello.nonce, *place, self.durable, self.base, tuple(since), open=self.open)
        self.leader.tell(said)

    def push(self, who: IncarnationId, number: int, content: Tensor, base: VersionId | None = None) -> Offer:
        base = self.chain.newest if base is None else base
        offer = self.clusters[who].push(number, content, base, codec_of(self.agreement).format_of(base))
        self.contents[offer.push] = content
        self.leader.tell(Stage(1, offer))
        return offer

    def staged(
        self, who: IncarnationId, number: int, content: Tensor, base: VersionId | None = None
    ) -> tuple[Offer, Staged]:
        offer = self.push(who, number, content, base)
        return offer, self.leader.heard(Staged, push=offer.push)

    def apply(self, entry: Entry) -> Applied:
        self.leader.tell(Apply(1, entry))
        return self.leader.heard(Applied, version=entry.version)

    def found(self) -> Entry:
        offer, _ = self.staged(HOME, 1, noise(0))
        entry = self.chain.add(Founded(1, offer))
        self.apply(entry)
        return entry

    def save(self, version: VersionId) -> str:
        self.leader.tell(Keep(1, version))
        return self.leader.heard(Written, version=version).digest

    def mark(self, *durable: ShardFile) -> None:
        self.durable, self.base = durable, durable[0].version if len(durable) > 1 else NO_VERSION
        self.leader.tell(Marked(1, self.durable, self.base))

    def reference(self) -> Reference:
        made = Reference(GRID.cut(self.shards)[self.shard])
        for entry in self.chain.entries:
            made.follow(entry, self.contents)
        return made

    def close(self) -> None:
        assert self.process is not None
        self.process.close()
        for cluster in self.clusters.values():
            cluster.close()
        wrong = [line for name, fields in self.notes for line in problems(name, fields)]
        assert wrong == []


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def three_rounds(rig: Rig) -> None:
    rig.found()
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    two, _ = rig.staged(FAR, 1, noise(2, 0.1))
    rig.apply(rig.chain.round(DELAYED, two, one))
    three, _ = rig.staged(HOME, 3, noise(3, 0.1))
    rig.apply(rig.chain.round(MOVING, three))
    four, _ = rig.staged(FAR, 2, noise(4, 0.1))
    rig.apply(rig.chain.round(MOVING, four))


@pytest.mark.parametrize(("shard", "shards"), [(0, 1), (0, 2), (1, 2)])
def test_versions_are_those_of_the_kernel_to_the_bit(tmp_path: Path, shard: int, shards: int) -> None:
    rig = Rig(tmp_path, shard, shards)
    try:
        three_rounds(rig)
        assert rig.save(rig.chain.newest) == rig.reference().state.digest
        assert [line["version"] for line in rig.noted("version_computed")] == [
            str(e.version) for e in rig.chain.entries
        ]
    finally:
        rig.close()


def test_products_are_exact_and_leave_out_reduced_buffers(rig: Rig) -> None:
    rig.found()
    one, said_one = rig.staged(HOME, 2, noise(1))
    two, said_two = rig.staged(FAR, 1, noise(2))
    reference = rig.reference()
    a, b = noise(1), noise(2)
    assert {p.push: p.sum for p in said_one.products} == {one.push: reference.product(a, a)}
    assert {p.push: p.sum for p in said_two.products} == {
        one.push: reference.product(b, a),
        two.push: reference.product(b, b),
    }
    assert (said_two.momentum, said_two.at) == ("0", rig.chain.newest)
    applied = rig.apply(rig.chain.round(MOVING, one))
    expected = rig.reference().product(b, rig.reference().momentum)
    assert {p.push: p.sum for p in applied.momentum} == {two.push: expected}
    assert expected != "0"
    _, said_three = rig.staged(HOME, 3, noise(3))
    assert said_three.momentum == rig.reference().product(noise(3), rig.reference().momentum)
    assert said_three.at == rig.chain.newest
    assert one.push not in {p.push for p in said_three.products}  # it is decided


def test_in_di_ps_a_stale_push_is_subtracted_from_the_version_before_its_round(tmp_path: Path) -> None:
    """A stale push changes theta by theta - f_j, where theta is that of the version before the round: the expected
    result is computed by hand.
    """
    rig = Rig(tmp_path, agreement=BY_PARAMETERS)
    try:
        rig.found()
        founded, theta = rig.chain.newest, Part.encoded(GRID.whole, BF16, noise(0)).decoded()
        files = [ShardFile(founded, rig.save(founded))]
        home, far = (theta + noise(seed, 0.1) for seed in (1, 2))
        early, _ = rig.staged(HOME, 2, home)
        late, said = rig.staged(FAR, 1, far)
        applied = rig.apply(rig.chain.round(MOVING, early))
        m, trained = MOVING.buffer * (theta - home), slice(0, 370)
        first = theta - MOVING.rate * (theta - home) - MOVING.step * m
        first[370:] = home[370:]  # reduced buffers: only theta - delta
        told = {p.push: float(ExactSum.decode(p.sum)) for p in applied.momentum}
        square = float(ExactSum.decode(next(p.sum for p in said.products if p.push == late.push)))
        expected = (first - far)[trained].double().pow(2).sum().item()
        assert square + told[late.push] == pytest.approx(expected, rel=1e-5)

        files.append(ShardFile(rig.chain.newest, rig.save(rig.chain.newest)))
        rig.apply(rig.chain.round(MOVING, late))  # its base is the founding, one version behind
        m = MOVING.momentum * m + MOVING.buffer * (first - far)
        second = first - MOVING.rate * (first - far) - MOVING.step * m
        second[370:] = far[370:]
        assert rig.process is not None
        digest = rig.save(rig.chain.newest)
        state, _ = ShardFiles(rig.folder, JOB).load(rig.chain.newest, digest)
        torch.testing.assert_close(state.theta, second, rtol=0, atol=1e-5)

        rig.durable, rig.base = tuple(files), founded
        for path in rig.folder.rglob("*.safetensors"):
            if rig.chain.newest.hash in path.name:
                path.unlink()
        rig.begin()  # it computes the round of the stale push again, from its file and the push alone
        rig.leader.heard(Applied, version=rig.chain.newest)
        assert rig.save(rig.chain.newest) == digest
    finally:
        rig.close()


def test_a_version_is_served_as_it_was_computed(rig: Rig) -> None:
    three_rounds(rig)
    assert rig.process is not None
    version = rig.chain.newest
    part = Part.empty(GRID.whole, BF16)
    lines = rig.clusters[HOME].lines
    holders = [Holder("f", rig.process.endpoint)]
    fetch_version(version, [GRID.whole], BF16, holders, part, lines.dial, deadline_s=20.0)
    assert torch.equal(part.data, Part.encoded(GRID.whole, BF16, rig.reference().state.theta).data)
    gone = rig.chain.entries[0].version
    with pytest.raises(NoDonorError):
        fetch_version(gone, [GRID.whole], BF16, holders, part, lines.dial, deadline_s=20.0)


def test_after_a_restart_it_computes_what_its_disk_lacks(rig: Rig) -> None:
    rig.found()
    founded = rig.chain.newest
    files = [ShardFile(founded, rig.save(founded))]
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    files.append(ShardFile(rig.chain.newest, rig.save(rig.chain.newest)))
    rig.mark(*files)
    two, _ = rig.staged(FAR, 1, noise(2, 0.1))
    rig.apply(rig.chain.round(DELAYED, two))
    open_push, _ = rig.staged(FAR, 2, noise(5, 0.1))
    rig.begin()
    assert rig.hello.disk == tuple(files)
    assert rig.hello.version == NO_VERSION
    rig.leader.heard(Applied, version=files[1].version)
    rig.leader.heard(Applied, version=rig.chain.newest)
    assert [line["version"] for line in rig.noted("version_loaded")] == [str(files[1].version)]
    assert rig.save(rig.chain.newest) == rig.reference().state.digest
    rig.leader.tell(Stage(1, open_push))
    rig.leader.heard(Staged, push=open_push.push)


def test_decided_pushes_are_staged_at_once_and_measured_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.found()
    one, before = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    monkeypatch.setattr(staging, "LATER_S", 0.0)
    rig.begin()
    rig.leader.heard(Applied, version=rig.chain.newest)
    assert rig.leader.heard(Staged, push=one.push, products=before.products).finite
    assert next(m for m in rig.leader.said if isinstance(m, Staged)).products == ()


def test_what_a_cluster_pushed_may_come_from_its_next_start(rig: Rig) -> None:
    rig.found()
    offer = rig.clusters[HOME].push(2, noise(1), rig.chain.newest)
    rig.contents[offer.push] = noise(1)
    before = rig.clusters[HOME]
    before.lines.close()
    again = rig.clusters[HOME] = ClusterEnd(replace(HOME, number=2), 1)
    again.server = before.server
    again.lines.server = before.server
    assert rig.process is not None
    again.lines.follow([Holder("f", rig.process.endpoint)])
    rig.leader.tell(Stage(1, offer))
    rig.leader.heard(Staged, push=offer.push)


def test_a_damaged_file_gives_way_to_the_one_before(rig: Rig) -> None:
    rig.found()
    founded = rig.chain.newest
    files = [ShardFile(founded, rig.save(founded))]
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    files.append(ShardFile(rig.chain.newest, rig.save(rig.chain.newest)))
    rig.mark(*files)
    (path,) = [p for p in rig.folder.rglob("*.safetensors") if rig.chain.newest.hash in p.name]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    rig.begin()
    assert rig.hello.disk == (files[0],)
    assert [line["version"] for line in rig.noted("file_damaged")] == [path.name]
    rig.leader.heard(Applied, version=rig.chain.newest)
    assert rig.save(rig.chain.newest) == rig.reference().state.digest == files[1].digest


def test_a_file_that_is_damaged_after_the_start_is_told_and_passed_over(rig: Rig) -> None:
    rig.found()
    founded = rig.chain.newest
    files = [ShardFile(founded, rig.save(founded))]
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    files.append(ShardFile(rig.chain.newest, rig.save(rig.chain.newest)))
    rig.durable = tuple(files)
    rig.base = founded
    chain, rig.chain = rig.chain, Chain()
    rig.begin()  # a leader that shows nothing yet
    for path in rig.folder.rglob("*.safetensors"):
        if files[1].version.hash in path.name:
            path.write_bytes(path.read_bytes()[:-1])
    rig.chain = chain
    rig.obey()
    rig.leader.heard(Applied, version=rig.chain.newest)
    (line,) = rig.noted("file_damaged")
    assert line["version"] == str(files[1].version)
    assert "is damaged" in line["reason"]
    assert rig.save(rig.chain.newest) == files[1].digest
    assert rig.noted("bits_differ") == []


def test_who_computes_other_bits_than_those_that_were_marked_is_named(rig: Rig) -> None:
    rig.found()
    files = [ShardFile(rig.chain.newest, rig.save(rig.chain.newest))]
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    rig.durable, rig.base = (*files, ShardFile(rig.chain.newest, "0" * 32)), files[0].version
    rig.begin()
    rig.leader.heard(Applied, version=rig.chain.newest)
    until(lambda: rig.noted("bits_differ"), "a note of it")
    assert rig.noted("bits_differ")[0]["marked"] == "0" * 32


def test_a_rollback_has_the_content_of_the_older_version(rig: Rig) -> None:
    """The older version is computed again from the founding's content alone, without the lost push."""
    rig.found()
    founded = rig.chain.newest
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    two, _ = rig.staged(FAR, 1, noise(2, 0.1))
    rig.apply(rig.chain.round(MOVING, two))
    before = rig.reference()
    assert before.state.digest != Reference(GRID.whole).state.digest
    entry = rig.chain.add(RolledBack(4, founded, (two.push,), "a test"))
    rig.apply(entry)
    expected = OuterState(GRID.whole, Part.encoded(GRID.whole, BF16, noise(0)).decoded())
    assert rig.save(entry.version) == expected.digest
    three, _ = rig.staged(HOME, 3, noise(3, 0.1))
    rig.apply(rig.chain.round(MOVING, three))
    RoundUpdate(
        expected, [(1.0, Part.encoded(GRID.whole, BF16, noise(3, 0.1)))], MOVING, None, GRID.whole.since(2)
    ).run()
    assert rig.save(rig.chain.newest) == expected.digest


def test_after_a_rollback_to_nothing_it_waits_without_a_state_and_is_founded_anew(rig: Rig) -> None:
    lost, _ = rig.staged(HOME, 1, noise(0))
    rig.chain.add(Founded(1, lost))
    nothing = rig.chain.add(RolledBack(2, NO_VERSION, (lost.push,), "a test"))
    rig.begin()  # it has no file, and nothing was durable
    rig.leader.heard(Applied, version=nothing.version)
    offer, staged = rig.staged(FAR, 1, noise(1))
    assert staged.momentum == "0"
    rig.apply(rig.chain.add(Founded(3, offer)))
    push, _ = rig.staged(FAR, 2, noise(2, 0.1))
    version = rig.apply(rig.chain.round(DELAYED, push)).version
    assert rig.save(version) == rig.reference().state.digest
    assert rig.noted("bits_differ") == []


def test_a_rollback_to_a_durable_version_loads_it(rig: Rig) -> None:
    rig.found()
    founded = rig.chain.newest
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    files = [ShardFile(rig.chain.newest, rig.save(rig.chain.newest))]
    two, _ = rig.staged(FAR, 1, noise(2, 0.1))
    rig.apply(rig.chain.round(MOVING, two))
    rig.durable = (ShardFile(founded, "not here"), *files)
    rig.base = founded
    rig.leader.tell(Marked(1, rig.durable, rig.base))
    entry = rig.chain.add(RolledBack(4, files[0].version, (two.push,), "a test"))
    rig.apply(entry)
    assert [line["version"] for line in rig.noted("version_loaded")] == [str(files[0].version)]
    assert rig.save(entry.version) == files[0].digest


# ---------------------------------------------------------------------- what goes wrong


def test_a_push_that_nobody_serves_is_missing_until_somebody_does(rig: Rig) -> None:
    rig.found()
    home = rig.clusters[HOME]
    offer = home.push(2, noise(1), rig.chain.newest)
    drop_push(home.server, offer.push, home.shards)
    rig.contents[offer.push] = noise(1)
    entry = rig.chain.round(MOVING, offer)
    rig.leader.tell(Apply(1, entry))
    rig.leader.heard(Missing, push=offer.push)
    assert len(rig.noted("push_not_fetched")) == 1
    home.push(2, noise(1), offer.base)
    rig.leader.heard(Applied, version=entry.version)
    assert rig.save(entry.version) == rig.reference().state.digest


def test_other_bytes_than_those_that_were_offered_are_not_staged(rig: Rig) -> None:
    rig.found()
    home = rig.clusters[HOME]
    offer = replace(home.push(2, noise(1), rig.chain.newest), manifest="0" * 32)
    rig.leader.tell(Stage(1, offer))
    until(lambda: rig.noted("push_not_fetched"), "a refusal")
    assert "was offered as" in rig.noted("push_not_fetched")[0]["reason"]
    rig.leader.tell(DropPush(1, offer.push))
    other, _ = rig.staged(FAR, 1, noise(2))
    assert [said.push for said in rig.leader.said if isinstance(said, Staged)][1:] == [other.push]


def test_what_no_round_will_take_goes_though_it_was_told_while_there_was_no_stream(rig: Rig) -> None:
    three_rounds(rig)
    lost, _ = rig.staged(HOME, 4, noise(9, 0.1))
    kept, _ = rig.staged(FAR, 3, noise(10, 0.1))
    rig.leader.said.clear()
    rig.open = (PushId(FAR, 3),)
    rig.obey()
    rig.leader.heard(Staged, push=kept.push)
    assert not [m for m in rig.leader.said if isinstance(m, Staged) and m.push == lost.push]


@pytest.mark.parametrize("place", [0, GRID.elements - 1])
def test_a_push_that_is_not_finite_is_told_as_such(rig: Rig, place: int) -> None:
    rig.found()
    content = noise(1)
    content[place] = math.nan
    _, said = rig.staged(HOME, 2, content)
    assert not said.finite
    assert said.products == ()
    _, said = rig.staged(FAR, 1, noise(2))
    assert said.finite
    assert len(said.products) == 1


def test_a_full_disk_is_told_and_tried_again_while_versions_go_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()
    full.set()
    true = ShardFiles.save

    def save(*args: Any) -> str:
        if full.is_set():
            raise StateError("No space left on device")
        return true(*args)

    monkeypatch.setattr(ShardFiles, "save", save)
    rig.found()
    founded, expected = rig.chain.newest, rig.reference().state.digest
    rig.leader.tell(Keep(1, founded))
    rig.leader.heard(Trouble, reason="No space left on device")
    one, _ = rig.staged(HOME, 2, noise(1, 0.1))
    rig.apply(rig.chain.round(MOVING, one))
    full.clear()
    assert rig.leader.heard(Written, version=founded).digest == expected
    assert rig.leader.heard(Trouble, reason="")
    assert [line["reason"] for line in rig.noted("disk_trouble")] == ["No space left on device", ""]


def test_a_new_leader_is_told_all_again(rig: Rig) -> None:
    rig.found()
    one, said = rig.staged(HOME, 2, noise(1))
    rig.leader.hang_up("it is gone")
    rig.leader.said.clear()
    rig.leader.start()
    hello = rig.leader.heard(FollowerHello)
    assert (hello.version, hello.term, hello.nonce) == (rig.chain.newest, 1, rig.hello.nonce)
    rig.leader.tell(
        Obey(2, hello.nonce, 0, 1, AGREEMENT, (), NO_VERSION, tuple(rig.chain.entries), open=(one.push,)),
    )
    assert rig.leader.heard(Staged, push=one.push) == said
    assert rig.leader.heard(Applied, version=rig.chain.newest)


def test_it_ends_with_the_job_and_begins_anew_for_another_cut(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        assert rig.process is not None
        rig.found()
        rig.leader.tell(JobFinished(1, rig.chain.newest, "a test"))
        end = rig.process.wait(20.0)
        assert end is not None
        assert not end.failed
        assert "a test" in end.reason
        rig.leader.hang_up("it is gone")
        rig.process.linger()
    finally:
        rig.close()
    rig = Rig(tmp_path)
    try:
        assert rig.process is not None
        rig.leader.tell(Obey(1, rig.hello.nonce, 1, 2, AGREEMENT, (), NO_VERSION, ()))
        end = rig.process.wait(20.0)
        assert end is not None
        assert end.failed
        assert "is to hold 1 of 2" in end.reason
    finally:
        rig.close()


def test_no_thread_of_it_is_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.found()
    rig.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("chaos-follower") and t.name[-5:] != "fetch"]
    assert left == []


# ---------------------------------------------------------------------- memory


class Alive:
    """Tensor memory that a follower's threads have allocated and not freed yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[StorageWeakRef] = []
        self._sizes: list[int] = []
        empty, init = Part.empty, OuterState.__init__

        def part_empty(shard: Shard, format: Format) -> Part:
            part = empty(shard, format)
            self._note(part.data)
            return part

        def state_init(state: OuterState, *given: Any) -> None:
            init(state, *given)
            for tensor in state.tensors:
                self._note(tensor)

        monkeypatch.setattr(Part, "empty", part_empty)
        monkeypatch.setattr(OuterState, "__init__", state_init)

    def _note(self, tensor: Tensor) -> None:
        if threading.current_thread().name.startswith("chaos-follower"):
            storage = tensor.untyped_storage()
            self._made.append(StorageWeakRef(storage))
            self._sizes.append(storage.nbytes())

    @property
    def nbytes(self) -> int:
        """Number of bytes that are still allocated."""
        return sum(size for made, size in zip(self._made, self._sizes, strict=True) if not made.expired())


def test_a_follower_holds_what_it_needs_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    alive = Alive(monkeypatch)
    three_rounds(rig)
    four = ShardFile(rig.chain.newest, rig.save(rig.chain.newest))
    last, _ = rig.staged(HOME, 4, noise(5, 0.1))
    rig.apply(rig.chain.round(MOVING, last))
    five = ShardFile(rig.chain.newest, rig.save(rig.chain.newest))
    dropped, _ = rig.staged(FAR, 3, noise(6, 0.1))
    state, two_versions, push = 12 * GRID.elements, 4 * GRID.elements, 2 * GRID.elements
    until(lambda: alive.nbytes == state + two_versions + 7 * push, "the end of a copy that was saved")
    assert rig.noted("push_staged")[-1]["held"] == 7
    rig.mark(four, five)
    until(lambda: alive.nbytes == state + two_versions + 2 * push, "pushes of versions that are twice durable")
    rig.leader.tell(DropPush(1, dropped.push))
    until(lambda: alive.nbytes == state + two_versions + push, "a push that was dropped")


def test_the_most_pushes_that_were_held_at_once_are_told(rig: Rig) -> None:
    for number in (1, 2, 3):
        rig.staged(HOME, number, noise(number))
    rig.leader.tell(DropPush(1, PushId(HOME, 1), later=True))
    rig.staged(FAR, 1, noise(4))
    rig.staged(FAR, 2, noise(5))
    rig.staged(HOME, 4, noise(6))
    assert [told["held"] for told in rig.noted("push_staged")] == [1, 2, 3, 3, 2, 3]
    assert [told["held_of_one"] for told in rig.noted("push_staged")] == [1, 2, 3, 3, 2, 2]


def test_bytes_of_a_push_are_told_over_all_attempts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: if an attempt fetched everything again, the event counted that attempt's bytes only, and hid those of
    earlier ones.
    """
    fetch_push, parts = staging.fetch_push, list[Part]()

    def fails_first(offer: Offer, part: Part, *given: Any, progress: Callable[[Progress], None], **more: Any) -> None:
        parts.append(part)
        if len(parts) == 1:
            progress(Progress("pull", 700, part.data.numel(), 1e6, sources=(SourceProgress("home~1/a", 700, 1e6),)))
        if len(parts) < 3:
            raise NoDonorError("it went")
        fetch_push(offer, part, *given, progress=progress, **{**more, "blank": True})

    monkeypatch.setattr(staging, "fetch_push", fails_first)
    offer = rig.push(HOME, 1, noise(0))
    rig.leader.heard(Staged, push=offer.push)
    (told,) = rig.noted("push_staged")
    assert told["sources"].pop("home~1/a") == 700
    assert sum(told["sources"].values()) == told["nbytes"]


# ---------------------------------------------------------------------- served versions


def test_two_versions_are_served_and_one_that_is_held_keeps_its_place() -> None:
    there: set[int] = set()
    served = ServedVersions[str](lambda v, _: there.add(v.number), lambda v, _: there.remove(v.number))

    def compute(number: int) -> set[int]:
        served.make_room()
        assert len(there) < 2, "there is memory for one more"
        served.add(VersionId(number, "a" * 32), "content")
        assert [version.number for version in served.served] == sorted(there)
        return there

    assert [sorted(compute(n)) for n in (1, 2, 3)] == [[1], [1, 2], [2, 3]]
    served.hold(VersionId(3, "a" * 32))
    assert [sorted(compute(n)) for n in (4, 5, 6)] == [[3, 4], [3, 5], [3, 6]]
    served.hold(VersionId(6, "a" * 32))
    assert [sorted(compute(n)) for n in (7, 8)] == [[6, 7], [6, 8]]
    served.hold(NO_VERSION)
    assert [sorted(compute(n)) for n in (9, 10)] == [[8, 9], [9, 10]]


def test_what_may_have_been_rolled_back_is_served_no_more() -> None:
    there: set[int] = set()
    served = ServedVersions[str](lambda v, _: there.add(v.number), lambda v, _: there.remove(v.number))
    for number in (4, 5):
        served.add(VersionId(number, "a" * 32), "content")
    served.hold(VersionId(5, "a" * 32))
    served.go_back(VersionId(4, "a" * 32))
    assert there == {4}


def test_the_first_content_travels_as_versions_do() -> None:
    int8 = codec_named("int8")
    assert int8.format_of(NO_VERSION) == BF16
    assert int8.format_of(VersionId(1, "a")).name == "int8"
    by_parameters = codec_of(replace(BY_PARAMETERS, codec="int8"))
    assert by_parameters.format_of(VersionId(1, "a")) == FP32
    assert not by_parameters.residual
    from_base = OuterSettings(policy="di_ps", di_ps_from="base").words
    assert codec_of(replace(AGREEMENT, codec="int8", settings=from_base)) == int8
