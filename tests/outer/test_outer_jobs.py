"""Whole outer jobs of real processes: clusters end with the computed values, whatever process is killed."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from forked_support import run
from outer_job_support import FOLLOWER, OuterJob, inner_step, open_session, small_model, wait_for_file

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.events.events import Record
from chaos_lightning.observe.audit import VIOLATED
from chaos_lightning.observe.outer.audit import audit_folder
from chaos_lightning.outer.cluster import push_serving
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.commands import export, follower_main
from chaos_lightning.outer.commands.recut import recut
from chaos_lightning.outer.exchange.codec import FP32, Part, codec_of
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate, freeze, products
from chaos_lightning.outer.exchange.vocabulary import entry_of
from chaos_lightning.outer.follower.follower_options import FollowerOptions
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.gates import MeasuredPush
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.judging import judge
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import Counters, Factors, Founded, GateState, Offer, RolledBack, Round
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.testing.harness import Harness

ROUNDS, STEPS = 10, 3
SYNC = OuterSettings(policy="sync", inner_steps=STEPS, batch=16, heartbeat_s=2.0)


def keep_pushes(pushes: str) -> None:
    """Makes this process save a copy of each later push in the folder `pushes`."""
    encoder = ClusterModel.encoder

    def keeping_encoder(content: ClusterModel) -> Callable[[], Part]:
        push, encode = content.pending, encoder(content)

        def encode_and_keep() -> Part:
            part = encode()
            torch.save(part.data.clone(), Path(pushes) / str(push).replace("/", ":"))
            return part

        return encode_and_keep

    ClusterModel.encoder = keeping_encoder


def train_locally(server: str, name: str, logs: str, go: str, out: str, rounds: int = ROUNDS) -> None:
    """Trains as a cluster with its own data, after waiting for the file `go` once it has joined; saves its pushes
    beside `go`.
    """
    keep_pushes(str(Path(go).parent / "pushes"))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(server, name, model, logs, SYNC, codec="fp32", overlap=False)
    try:
        session.start()
        wait_for_file(Path(go))
        last = rounds * STEPS - 1
        for step in range(last + 1):
            inner_step(model, optimizer, name, step)
            over = session.boundary(16).over
            assert not over or step == last, over  # where the other cluster is through, and the last version is there
        session.finish("its rounds are over", 60)
        torch.save([p.detach().clone() for p in model.parameters()], out)
    finally:
        session.close()


def one_process(names: list[str], rounds: int = ROUNDS) -> torch.Tensor:
    """Computes the parameters, flat, that a synchronous DiLoCo job of these clusters must have, in one process with the
    same kernel.
    """
    models = [small_model() for _ in names]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    replicas = [Replica.of_module(model) for model in models]
    grid = replicas[0].grid(64)
    state = OuterState(grid.whole, replicas[0].read(grid))
    eta, mu = SYNC.outer_lr, SYNC.outer_momentum
    factors = Factors(eta, 1.0, mu, 1.0, eta * mu)
    version = Part.encoded(grid.whole, FP32, state.theta)
    for number in range(rounds):
        pushes = []
        for model, optimizer, replica, name in zip(models, optimizers, replicas, names, strict=True):
            replica.adopt(version, None)
            for step in range(number * STEPS, (number + 1) * STEPS):
                inner_step(model, optimizer, name, step)
            push = Part.empty(grid.whole, FP32)
            freeze(version, replica.read(grid), push)
            pushes.append((1 / len(names), push))
        after = Part.empty(grid.whole, FP32)
        RoundUpdate(state, pushes, factors, after).run()
        version = after
    return version.decoded()


def with_torch(names: list[str]) -> torch.Tensor:
    """Computes the parameters, flat, that a synchronous DiLoCo job of these clusters must have, with torch's own SGD as
    outer optimizer.
    """
    outer = small_model()
    optimizer = torch.optim.SGD(outer.parameters(), lr=SYNC.outer_lr, momentum=SYNC.outer_momentum, nesterov=True)
    for number in range(ROUNDS):
        gained = [torch.zeros_like(p) for p in outer.parameters()]
        for name in names:
            model = small_model()
            model.load_state_dict(outer.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(number * STEPS, (number + 1) * STEPS):
                inner_step(model, inner, name, step)
            for one, ours, theirs in zip(gained, outer.parameters(), model.parameters(), strict=True):
                one.add_(ours.detach() - theirs.detach(), alpha=1 / len(names))
        for parameter, gradient in zip(outer.parameters(), gained, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in outer.parameters()])


def trained(path: Path) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in torch.load(path)])


@pytest.mark.parametrize("followers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sync_in_fp32_is_diloco_bit_for_bit(tmp_path: Path, followers: int) -> None:
    names = ["a", "b"]
    pushes = tmp_path / "pushes"
    pushes.mkdir()
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness, followers).start()
        go = tmp_path / "go"
        for name in names:
            out = str(tmp_path / f"{name}.pt")
            harness.start_function(name, train_locally, job.server, name, str(harness.logs), str(go), out)
        for name in names:
            harness.wait_for("version_adopted", node=name)
        go.touch()
        harness.wait_all()
    expected = one_process(names)
    for name in names:
        assert torch.equal(trained(tmp_path / f"{name}.pt"), expected)
    assert torch.allclose(expected, with_torch(names), rtol=0, atol=1e-6)
    assert torch.allclose(expected, by_robust(*chain_of(tmp_path / "chain.sqlite", pushes)), rtol=0, atol=1e-6)


def train_beyond_the_end(server: str, name: str, logs: str, out: str, go: str) -> None:
    """Trains as a cluster that ends the job once the file `go` exists; as "late" it has an unpushed step when the job
    ends.
    """
    model, settings = small_model(), OuterSettings(policy="async", inner_steps=STEPS, batch=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(server, name, model, logs, settings)
    try:
        session.start()
        if name != "late":
            wait_for_file(Path(go))
        for step in range(1 if name == "late" else 2 * STEPS):
            inner_step(model, optimizer, name, step)
            session.boundary(16)
        if name == "late":
            Path(go).touch()
        while name == "late" and not session.boundary(0, steps=0).over:
            session.pause(0.1)
        session.finish("it is through", 60)
        torch.save([p.detach().clone() for p in model.parameters()], out)
    finally:
        session.close()


def test_who_is_cut_off_by_the_end_has_the_jobs_last_version(tmp_path: Path) -> None:
    """Former bug: at the end of a job a cluster kept in its model the steps that it had not pushed, which no version
    contains.
    """
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness).start()
        arguments = train_beyond_the_end, job.server
        go = str(tmp_path / "go")
        harness.start_function("first", *arguments, "first", str(harness.logs), str(tmp_path / "first.pt"), go)
        harness.wait_for("version_adopted", node="first")
        harness.start_function("late", *arguments, "late", str(harness.logs), str(tmp_path / "late.pt"), go)
        harness.wait_all()
        taken = {r.node: r["steps"] for r in harness.records if r.name == "last_taken"}
    assert taken == {"first": 0, "late": 1}
    assert torch.equal(trained(tmp_path / "first.pt"), trained(tmp_path / "late.pt"))


def train_until_over(server: str, name: str, logs: str, done: str) -> None:
    """Trains as a cluster until its part in the job has ended, or the file `done` exists."""
    model, settings = small_model(), OuterSettings(policy="async", inner_steps=STEPS, batch=16, heartbeat_s=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(server, name, model, logs, settings)
    try:
        session.start()
        while not session.over and not Path(done).exists():
            inner_step(model, optimizer, name, 1)
            session.boundary(16)
            session.pause(0.02)
        session.finish("it is through", 60)
    finally:
        session.close()


@pytest.mark.slow
def test_a_cluster_of_an_earlier_job_that_wakes_in_the_next_one_is_not_let_in(tmp_path: Path) -> None:
    """Former bug: a cluster of an earlier job on the same endpoint knew versions that the new job's chain lacked, and
    so ended its leader. Now it is refused.
    """
    with Harness(tmp_path, deadline_s=120) as harness:
        job, done = OuterJob(harness).start(), tmp_path / "done"
        given = (str(harness.logs), str(done))
        harness.start_function("old", train_until_over, job.server, "old", *given)
        harness.wait_for("version_adopted", lambda r: r["version"].startswith("v3-"), node="old")
        harness.stop("old")
        job.kill_server()
        job.folder = tmp_path / "next"
        job.folder.mkdir()
        job.start()
        harness.start_function("new", train_until_over, job.server, "new", *given)
        harness.wait_for("version_adopted", node="new")
        harness.cont("old")
        refused = harness.wait_for("cluster_refused", lambda r: r["of"] == "old")
        for _ in range(2):
            refused = harness.wait_for("version_adopted", node="new", after=refused)
            refused = harness.wait_for("cluster_refused", lambda r: r["of"] == "old", after=refused)
        assert harness.children["old"].running
        harness.kill("old")
        done.touch()
        assert harness.wait_exit("new") == 0
        harness.wait_all()
        led = [r["job"] for r in harness.records if r.name == "outer_leader_started"]
    assert "is of job" in refused["reason"]
    assert len(led) == 2, "one leader of each job"


def train_with_halves(server: str, name: str, logs: str) -> None:
    """Trains as a cluster whose pushes are encoded by a codec of the test's own."""
    importlib.import_module("halves_codec")
    model, settings = small_model(), replace(SYNC, policy="async")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(server, name, model, logs, settings, codec="halves", overlap=False)
    try:
        session.start()
        for step in range(3 * STEPS):
            inner_step(model, optimizer, name, step)
            session.boundary(16)
        session.finish("it is through", 60)
    finally:
        session.close()


def test_a_codec_of_a_users_own_is_imported_by_followers(tmp_path: Path) -> None:
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness)
        job.more = ["--codecs=halves_codec"]
        job.start()
        harness.start_function("home", train_with_halves, job.server, "home", str(harness.logs))
        harness.wait_all()
        nbytes = {r["nbytes"] for r in harness.records if r.name == "push_staged" and r["push"] != "home~1/1"}
        answers = [r["answer"] for r in harness.records if r.name == "push_answered"]
    assert nbytes == {2 * sum(p.numel() for p in small_model().parameters())}
    assert answers == ["accepted"] * 4
    with pytest.raises(ConfigurationError, match="--codecs no_such_module"):
        follower_main.run(FollowerOptions(codecs="no_such_module"))


SHARED = OuterSettings(
    inner_steps=4, batch=8, epochs=2, heartbeat_s=1.0, reconnect_s=30.0, lease_ahead_s=2.0, gate_cosine=-1.0
)
LENGTH = 1600
RULES = {
    "robust": SHARED,
    "sync": replace(SHARED, policy="sync"),
    "di_ps": replace(SHARED, policy="di_ps", clip=0.01, di_ps_alpha=1.0),  # so it refuses none, and clips what it takes
}


def train_shared(
    server: str, name: str, logs: str, pushes: str, pause_s: float, leave: str = "never", policy: str = "robust"
) -> None:
    """Trains as a cluster that shares the data, and saves a copy of each push; leaves once the file `leave` exists."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(server, name, model, logs, RULES[policy], length=LENGTH)
    keep_pushes(pushes)
    step = 0
    try:
        session.start(120)
        while not session.ending:
            claimed = session.claim(8, 0.2)
            samples = sum(stop - start for each in claimed for start, stop in each.spans)
            if claimed:
                inner_step(model, optimizer, name, step := step + 1)
                time.sleep(pause_s)  # as heavier steps would
            session.boundary(samples, claimed, steps=1 if claimed else 0)
            if Path(leave).exists():
                session.leave()
        session.finish("it is over", 60)
    finally:
        session.close()


PartOf = Callable[[Offer], Part]


def chain_of(store: Path, pushes: Path) -> tuple[OuterChain, PartOf]:
    """Returns the chain, and a function that loads the copy of a push which its cluster has saved."""
    chain = OuterChain()
    with SqliteStore(store, read_only=True) as log:
        for record in log.read()[1]:
            chain.follow(entry_of(record, chain.hash))
    assert chain.agreement is not None
    whole = grid_of(chain).whole
    codec = codec_of(chain.agreement)

    def part(offer: Offer) -> Part:
        data = torch.load(pushes / str(offer.push).replace("/", ":"))
        return Part(whole, codec.format_of(offer.base), data)

    return chain, part


def grid_of(chain: OuterChain) -> Grid:
    assert chain.agreement is not None
    return Grid(tuple(t.elements for t in chain.agreement.tensors), chain.agreement.block)


def by_robust(chain: OuterChain, part: PartOf) -> torch.Tensor:
    """Returns the parameters, flat, that the policy `robust` computes from these pushes if each round has all clusters;
    none may be rejected.
    """
    whole, robust = grid_of(chain).whole, replace(SYNC, policy="robust")
    state, counters, gate = OuterState(whole, torch.zeros(whole.elements)), Counters(), GateState()
    for version in [*chain.line()][::-1]:
        body = version.entry.body
        if isinstance(body, Founded):
            state = OuterState(whole, part(body.offer).decoded())
        elif isinstance(body, Round):
            parts = {one.offer.push: part(one.offer) for one in body.accepted}
            momentum = Part.of(whole, state.momentum)
            measured = [
                MeasuredPush(
                    one.offer,
                    one.staleness,
                    True,
                    math.fsum(products(parts[one.offer.push], momentum)),
                    math.fsum(products(parts[one.offer.push], parts[one.offer.push])),
                )
                for one in body.accepted
            ]
            pairs = {(a, b): math.fsum(products(parts[a], parts[b])) for a, b in combinations(sorted(parts), 2)}
            made = judge(measured, pairs, len(parts), counters, gate, robust, "all are in")
            assert not made.rejected
            RoundUpdate(state, [(one.factor, parts[one.offer.push]) for one in made.accepted], made.factors).run()
            counters, gate = made.counters, made.gate
    return state.theta


def replayed(store: Path, pushes: Path, shards: int) -> tuple[OuterChain, list[str]]:
    """Returns the chain, and the digests of its last version's shards, computed from the clusters' saved copies of
    pushes.
    """
    chain, part = chain_of(store, pushes)
    assert chain.agreement is not None
    grid, settings = grid_of(chain), OuterSettings.of_words(chain.agreement.settings)
    parameters = codec_of(chain.agreement).parameters
    state: OuterState | None = None
    for version in [*chain.line()][::-1]:
        match version.entry.body:
            case Founded(_, offer):
                state = OuterState(grid.whole, part(offer).decoded())
            case Round() as decided:
                assert state is not None
                weighed = [(one.factor, part(one.offer)) for one in decided.accepted]
                if parameters and weighed:  # the leader judged theta - f, of this version's theta
                    norm = sum(w * (state.theta - f.decoded()).double() for w, f in weighed).norm().item()
                    rate = settings.outer_lr * min(1.0, settings.clip_used / norm)
                    assert decided.factors.rate == pytest.approx(rate, rel=1e-5)
                RoundUpdate(state, weighed, decided.factors, parameters=parameters).run()
    assert state is not None
    digests = []
    for shard in grid.cut(shards):
        start, stop = shard.span
        digests.append(OuterState(shard, *(tensor[start:stop].clone() for tensor in state.tensors)).digest)
    return chain, digests


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["robust", "di_ps"])
def test_a_server_that_is_killed_again_and_again_loses_nothing(tmp_path: Path, policy: str) -> None:
    pushes = tmp_path / "pushes"
    pushes.mkdir()
    chance = Random(14)
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness, 2).start()
        for name, pause_s in (("a", 0.01), ("b", 0.02)):
            told = str(harness.logs), str(pushes), pause_s, "never", policy
            harness.start_function(name, train_shared, job.server, name, *told)
        seen = None
        for _ in range(5):
            for _ in range(chance.randint(1, 4)):
                seen = harness.wait_for("entry", lambda r: r.get("kind") == "Round", after=seen)
            until = time.monotonic() + chance.uniform(0.0, 0.1)
            harness.wait_until(lambda u=until: time.monotonic() > u, "the drawn instant")
            job.kill_server()
            job.start()
        harness.wait_all()
    chain, digests = replayed(tmp_path / "chain.sqlite", pushes, 2)
    assert chain.ended is not None
    assert chain.durable[-1] == (chain.ended.version, tuple(digests))
    assert chain.leases is not None
    assert chain.leases.over(1)
    assert chain.counters.samples == 2 * LENGTH
    assert not any(isinstance(version.entry.body, RolledBack) for version in chain.versions.values())


def copy_chain(store: Path, to: Path) -> None:
    """Copies the chain's file at this moment, with its write-ahead log; no process may use `to`."""
    for left in to.parent.glob(f"{to.name}-*"):
        left.unlink()  # of a leader that was killed
    with contextlib.closing(sqlite3.connect(store)) as source, contextlib.closing(sqlite3.connect(to)) as target:
        source.backup(target)


@pytest.mark.slow
def test_a_leader_on_an_older_copy_of_its_store_decides_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    """A leader on an older copy of the chain stops, and clusters train on; with the newest copy back, each sample
    counts once (O4).
    """
    store, older, newest = (tmp_path / f"{name}.sqlite" for name in ("chain", "older", "newest"))
    pushes = tmp_path / "pushes"
    pushes.mkdir()
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness, 2).start()
        for name in "ab":
            harness.start_function(name, train_shared, job.server, name, str(harness.logs), str(pushes), 0.02)
        seen = harness.wait_for("version_adopted", node="b")
        copy_chain(store, older)
        for _ in range(3):  # which all clusters and followers know of then
            seen = harness.wait_for("version_adopted", after=seen, node="b")
        harness.declare("leader")
        harness.kill("leader")
        harness.wait_exit("leader")
        copy_chain(store, newest)
        copy_chain(older, store)
        harness.declare("leader")
        job.start_leader()
        assert harness.wait_exit("leader") == 1
        ended = harness.wait_for("outer_leader_ended")
        with SqliteStore(store, read_only=True) as wrong, SqliteStore(older, read_only=True) as before:
            assert wrong.read()[1] == before.read()[1]
        copy_chain(newest, store)
        job.start_leader()
        harness.wait_all()
    assert "which this chain lacks: it is an older copy" in ended["reason"]
    chain, digests = replayed(store, pushes, 2)
    assert chain.ended is not None
    assert chain.durable[-1] == (chain.ended.version, tuple(digests))
    assert chain.counters.samples == 2 * LENGTH
    (judged,) = audit_folder(harness.logs)
    assert not [finding for finding in judged.findings if finding.verdict == VIOLATED]
    told = [line for finding in judged.findings for line in finding.details]
    assert [line for line in told if line.endswith(" led on another store, and decided nothing that counts")]


def follow_on_a_full_disk(full: str, arguments: list[str]) -> None:
    """Runs a follower whose disk counts as full as long as the file `full` exists."""
    write = ShardFiles._write

    def full_disk(*given: object) -> None:
        if Path(full).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    ShardFiles._write = staticmethod(full_disk)
    run(FOLLOWER, arguments)


@pytest.mark.slow
def test_a_follower_and_the_only_holder_of_a_push_die(tmp_path: Path) -> None:
    pushes, full = tmp_path / "pushes", tmp_path / "full"
    pushes.mkdir()
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness, 2)
        job.start_leader()
        job.start_follower("f0")
        harness.start_function("f1", follow_on_a_full_disk, str(full), job.arguments_of("f1"))
        told = str(pushes), 0.02, "never", "sync"
        for name in "ab":
            harness.start_function(name, train_shared, job.server, name, str(harness.logs), *told)

        def has_b(record: Record) -> bool:
            return record["kind"] == "Round" and "'cluster': 'b'" in str(record["body"]["accepted"])

        both = harness.wait_for("entry", has_b)
        # Nothing is durable while one disk is full, and no more than three versions are decided beyond that.
        full.touch()
        trouble = harness.wait_for("disk_trouble", after=both)
        of_b = harness.wait_for("entry", has_b, after=trouble)
        for name in ("b", "f0"):
            harness.declare(name)
            harness.kill(name)
            harness.wait_exit(name)
        job.start_follower("f0")
        back = harness.wait_for("entry", lambda r: r["kind"] == "RolledBack", after=of_b)
        full.unlink()
        harness.wait_all()
    assert "samples are taken back" in back["body"]["reason"]
    assert back["body"]["lost"] == [p for p in back["body"]["lost"] if p["incarnation"]["cluster"] == "b"] != []
    chain, digests = replayed(tmp_path / "chain.sqlite", pushes, 2)
    assert chain.ended is not None
    assert chain.durable[-1] == (chain.ended.version, tuple(digests))
    assert chain.counters.samples == 2 * LENGTH, "what was lost was trained again, and nothing else"


@pytest.mark.slow
def test_a_job_that_was_stopped_goes_on_from_its_files(tmp_path: Path) -> None:
    pushes, leave = tmp_path / "pushes", tmp_path / "leave"
    pushes.mkdir()
    with Harness(tmp_path, deadline_s=120) as harness:
        job = OuterJob(harness, 2).start()
        for name in "ab":
            given = (str(harness.logs), str(pushes), 0.02, str(leave))
            harness.start_function(name, train_shared, job.server, name, *given)
        rounds = harness.wait_for("entry", lambda r: r["kind"] == "Round")
        rounds = harness.wait_for("entry", lambda r: r["kind"] == "Round", after=rounds)
        leave.touch()
        for name in "ab":
            assert harness.wait_exit(name) == 0
        at_stop = harness.wait_for("entry", lambda r: r["kind"] == "Removed", after=rounds)
        job.kill_server()
        job.start()
        harness.start_function("c", train_shared, job.server, "c", str(harness.logs), str(pushes), 0.0)
        harness.wait_all()
    assert "asked to leave" in at_stop["body"]["reason"]
    chain, digests = replayed(tmp_path / "chain.sqlite", pushes, 2)
    assert chain.ended is not None
    assert chain.durable[-1] == (chain.ended.version, tuple(digests))
    assert chain.counters.samples == 2 * LENGTH
    assert {who.cluster for who in chain.incarnations} == {"a", "b", "c"}
    checkpoint = tmp_path / "last.ckpt"
    assert export.main(["newest", str(checkpoint), "--dir", str(tmp_path)]) == 0
    written = torch.load(checkpoint)
    small_model().load_state_dict(written["state_dict"])
    assert written["global_step"] == chain.progress(chain.ended.version).steps > 0
    with pytest.raises(ConfigurationError, match="durable are v"):
        export.main(["99999", str(checkpoint), "--dir", str(tmp_path)])


def train_shared_without_versions(hold: str, *told: Any) -> None:
    """Trains like `train_shared`, but this cluster can fetch no version while the file `hold` exists."""
    fetch = push_serving.fetch_version

    def fetch_later(*given: Any, **named: Any) -> int:
        if Path(hold).exists():
            raise StateError("this version is held back")
        return fetch(*given, **named)

    push_serving.fetch_version = fetch_later
    train_shared(*told)


def removes(record: Record, cluster: str) -> bool:
    return bool(record["kind"] == "Removed" and record["body"]["incarnation"]["cluster"] == cluster)


@pytest.mark.slow
def test_clusters_that_are_killed_come_back_and_each_sample_counts_once(tmp_path: Path) -> None:
    """A cluster is killed after its push was accepted and before it adopts the version; then all clusters are killed,
    and one starts again.
    """
    pushes, hold = tmp_path / "pushes", tmp_path / "hold"
    pushes.mkdir()
    with Harness(tmp_path, deadline_s=150) as harness:
        job = OuterJob(harness, 2).start()

        def start(name: str, pause_s: float) -> None:
            told = str(hold), job.server, name, str(harness.logs), str(pushes), pause_s
            harness.start_function(name, train_shared_without_versions, *told)

        def kill(*names: str) -> None:
            for name in names:
                harness.declare(name)
                harness.kill(name)
            for name in names:
                harness.wait_exit(name)

        for name in "ab":
            start(name, 0.02)
        seen = harness.wait_for("entry", lambda r: r["kind"] == "Round")
        hold.touch()
        answered = harness.wait_for("push_answered", lambda r: str(r["push"]).startswith("a~"), after=seen)
        kill("a")
        hold.unlink()
        start("a", 0.02)
        back = harness.wait_for("cluster_welcomed", lambda r: r.node == "a", after=answered)
        again = harness.wait_for("push_answered", lambda r: str(r["push"]).startswith("a~"), after=back)
        kill("a", "b")
        for name in "ab":
            harness.wait_for("entry", lambda r, of=name: removes(r, of), after=again)
        start("b", 0.0)
        harness.wait_all()
        told = [r for r in harness.records if r.name == "version_adopted" and r.node == "a" and r.t < back.t]
        adopted = {str(r["version"]) for r in told}
    assert answered["answer"] == "accepted"
    assert answered["version"] not in adopted
    chain, digests = replayed(tmp_path / "chain.sqlite", pushes, 2)
    assert chain.ended is not None
    assert chain.durable[-1] == (chain.ended.version, tuple(digests))
    assert chain.counters.samples == 2 * LENGTH, "what was in counts once, what was lost was trained again"
    rounds = [each.entry.body for each in chain.line() if isinstance(each.entry.body, Round)]
    taken = [str(one.offer.push) for each in rounds for one in each.accepted]
    assert taken.count(str(answered["push"])) == 1
    assert sorted(who.cluster for who in chain.incarnations) == ["a", "a", "b", "b"]
    (judged,) = audit_folder(harness.logs)
    assert [str(finding) for finding in judged.findings if finding.verdict == VIOLATED] == []


@pytest.mark.slow
def test_a_job_goes_on_with_another_number_of_followers(tmp_path: Path) -> None:
    pushes = tmp_path / "pushes"
    pushes.mkdir()
    with Harness(tmp_path, deadline_s=150) as harness:
        job = OuterJob(harness, 2).start()
        for name, pause_s in (("a", 0.01), ("b", 0.02)):
            harness.start_function(name, train_shared, job.server, name, str(harness.logs), str(pushes), pause_s)
        marked = None
        for followers in (3, 1):
            for _ in range(3):
                marked = harness.wait_for("entry", lambda r: r["kind"] == "Durable", after=marked)
            job.kill_server()
            job.followers = [f"f{number}" for number in range(followers)]
            with SqliteStore(tmp_path / "chain.sqlite") as store:
                assert "cut anew" in recut(store, tmp_path, "default", job.followers)
            job.start()
        harness.wait_all()
    chain, digests = replayed(tmp_path / "chain.sqlite", pushes, 1)
    assert chain.ended is not None
    assert chain.cut == ("f0",)
    assert chain.durable[-1] == (chain.ended.version, tuple(digests))
    assert chain.counters.samples == 2 * LENGTH
    assert chain.rollbacks == 0
    (judged,) = audit_folder(harness.logs)
    assert [str(finding) for finding in judged.findings if finding.verdict == VIOLATED] == []
