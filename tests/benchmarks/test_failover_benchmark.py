"""Tests the failover benchmark and the soak's faults of schedulers: judgements, the choice of victims, and cuts of some
members.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.common import Result
from benchmarks.failover import CASES, Case, Scene, Strike, report
from benchmarks.soak import schedulers as soak_schedulers
from benchmarks.soak.runs import Standstill
from benchmarks.soak.schedulers import SCHEDULER_KINDS, STALE_KINDS, Several, copy_chain
from benchmarks.soak.ways import Ways
from benchmarks.world import Seen, Step
from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.testing.edge.relay import Way

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0


# ------------------------------------------------------------------------------------------------ judging


def missed(result: Result) -> list[str]:
    return [f.name for f in result.figures if f.ok is False]


def test_a_step_that_waited_a_lost_step_and_a_late_recovery_miss_their_bounds(capsys: Any) -> None:
    alone = {
        "beyond": [0.004, 0.019],
        "control": [0.003, 0.1],
        "usual": [0.03, 0.03],
        "led": [2.0, 2.1],
        "found": [2.2, 2.3],
    }
    result = Result("failover")
    report(result, "apart", "scheduler SIGKILL", CASES["apart"]["scheduler SIGKILL"], Case(**alone))
    assert missed(result) == []
    report(result, "apart", "scheduler SIGKILL", Strike(), Case(**{**alone, "beyond": [0.001, 0.021]}))
    assert missed(result) == ["apart, scheduler SIGKILL: longest step beyond the median, worst of 2"]
    result = Result("failover")
    noisy = {**alone, "beyond": [0.05, 0.06], "control": [0.01, 0.04]}
    report(result, "apart", "scheduler SIGKILL", Strike(), Case(**noisy))
    assert missed(result)[-1] == "apart, scheduler SIGKILL: that median beyond the control's"
    death = CASES["shared"]["scheduler and a member SIGKILL"]
    for scene, slowest, late in (("apart", 2.9, False), ("apart", 3.1, True), ("shared", 1.1, True)):
        result = Result("failover")
        report(result, scene, "death", death, Case(**{**alone, "recovered": [0.5, slowest]}))
        assert bool(missed(result)) is late
    result = Result("failover")
    report(result, "shared", "death", death, Case(**alone, lost=1, fenced=1))
    assert missed(result) == ["shared, death: steps lost", "shared, death: living members fenced"]


def test_the_longest_step_counts_from_the_strike_on() -> None:
    times_ms = [0, 10, 20, 90, 100, 140]
    seen = Seen(worker=None, steps=[Step(t * 1_000_000, n, n, "", 3, 0, 0) for n, t in enumerate(times_ms)])  # type: ignore[arg-type]
    scene = Scene("apart", SimpleNamespace(members={"a": seen}), *[None] * 4)  # type: ignore[arg-type]
    assert scene.longest("a", 0) == pytest.approx(0.070)
    assert scene.longest("a", 95_000_000) == pytest.approx(0.040)
    assert scene.longest("a", 50_000_000) == pytest.approx(0.070), "the step that was open when it fell counts whole"
    assert scene.longest("a", 140_000_000) == 0.0


# ------------------------------------------------------------------------------------------------ the soak's schedulers


class World:
    """Stand-in for etcd servers and candidates that only records its orders."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.down: set[str] = set()
        self.servers = [SimpleNamespace(name=f"etcd-{n}", pid=n) for n in (1, 2, 3)]
        self.election = False

    # as EtcdServers
    def leader(self) -> Any:
        if self.election:
            raise StoreError("no etcd server says that it leads")
        return next(s for s in self.servers if s.name not in self.down)

    def kill(self, server: Any) -> None:
        self.down.add(server.name)

    def run(self, server: Any) -> None:
        self.down.remove(server.name)

    # as Candidates
    endpoint = "127.0.0.1:1"

    def by_pid(self, pid: int) -> str:
        return f"s{pid}"

    def wake(self, name: str) -> None:
        self.down.remove(name)

    # as EventLog
    def emit(self, name: str, **fields: Any) -> None:
        self.log.append((str(fields.get("kind", name)), str(fields.get("node", ""))))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr("chaos_lightning.control.requests.fetch_status", lambda *_, **__: {"role": "leader", "pid": 7})
    monkeypatch.setattr(soak_schedulers.os, "kill", lambda pid, number: made.down.add(f"s{pid}"))
    monkeypatch.setattr(soak_schedulers, "AWAY_S", dict.fromkeys(SCHEDULER_KINDS, (0.0, 0.0)))
    monkeypatch.setattr(soak_schedulers, "SETTLED_S", 0.0)
    return made


def test_each_kind_has_its_turn_and_one_is_away_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    struck_kinds = [kind for kind in SCHEDULER_KINDS if kind not in STALE_KINDS]
    monkeypatch.setattr(soak_schedulers, "SCHEDULER_KINDS", struck_kinds)
    control = Several(world, world, world, seed=3, every_s=1e-6)  # type: ignore[arg-type]
    until = time.monotonic() + PATIENCE_S
    while len(control.done) < 8 and time.monotonic() < until:
        control.turn(calm=True)
        assert len(world.down) <= 1, "etcd must keep its majority"
    counts = control.counts()
    assert {kind: counts[kind] for kind in struck_kinds} == dict.fromkeys(struck_kinds, 2)
    struck = [(kind, who) for kind, who in world.log if kind != "comes_back"]
    assert all(who == "etcd-1" for kind, who in struck if kind == "etcd_leader_sigkill")
    assert all(who != "etcd-1" for kind, who in struck if kind == "etcd_sigkill")
    control.calm()
    assert world.down == set()
    before = len(control.done)
    control.turn(calm=True)
    assert len(control.done) == before, "calm is calm"


def test_during_an_election_nobody_is_struck_and_no_card_is_lost(world: World) -> None:
    control = Several(world, world, world, seed=3, every_s=1e-6)  # type: ignore[arg-type]
    control._deck = ["etcd_sigkill"]
    world.election = True
    until = time.monotonic() + PATIENCE_S
    while ("notice", "") not in world.log and time.monotonic() < until:
        control.turn(calm=True)
    assert (control.done, control._deck) == ([], ["etcd_sigkill"])


def test_an_old_copy_takes_the_chains_place_only_when_it_is_old_and_no_link_is_hurt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    swaps: list[tuple[str, str]] = []
    monkeypatch.setattr(Several, "_swap_data", lambda self, name, keep="": swaps.append((name, keep)))
    monkeypatch.setattr(soak_schedulers, "AGE_S", (0.0, 0.0))
    control = Several(world, world, world, seed=3, every_s=1e-6)  # type: ignore[arg-type]
    control._deck = ["old_snapshot"]
    control._next_at = 0.0
    control.turn(calm=False)
    assert (swaps, control.stale, control.done) == ([("", "older")], True, []), "links are left alone from now on"
    control.turn(calm=True)
    assert swaps[1:] == [("older", "newer")]
    assert control.stale
    control.turn(calm=True)
    assert swaps[2:] == [("newer", "")]
    assert control.stale, "until the job's own schedulers have heard all members"
    monkeypatch.setattr(control, "_ruled_at", 0.0)
    assert not control.stale


def test_data_that_were_kept_come_back(tmp_path: Path) -> None:
    try:
        servers = EtcdServers(tmp_path, 1)
    except ConfigurationError as error:
        pytest.skip(str(error))
    with servers, contextlib.closing(servers.client()) as client:
        control = Several(Mock(), servers, Mock(), seed=3, every_s=1.0)

        def put(value: bytes) -> None:
            key = b"chaos-lightning/jobs/default/tip"
            client.transact([], [pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))])

        def read(prefix: str = "chaos-lightning") -> bytes:
            found = client.get(f"{prefix}/jobs/default/tip")
            return found.value if found is not None else b""

        put(b"1")
        copy_chain(client, "default")
        control._swap_data("", keep="older")
        put(b"2")
        control._swap_data("older", keep="newer")
        servers.wait_ready(PATIENCE_S)
        assert read() == b"1"
        put(b"3")
        control._swap_data("newer")
        servers.wait_ready(PATIENCE_S)
        assert (read(), read(soak_schedulers.OLD_PREFIX)) == (b"2", b"1")


def test_a_member_that_never_ends_after_the_job_is_over_is_told() -> None:
    watch = Standstill(60.0)
    assert not any(watch.lasts(t, False, t // 50) for t in range(200))
    assert not watch.lasts(200.0, False, 4)
    assert not watch.lasts(230.0, True, 3), "the job's end is progress"
    assert not watch.lasts(280.0, True, 1), "and so is the end of a process"
    assert not watch.lasts(340.0, True, 1)
    assert watch.lasts(341.0, True, 1)


# ------------------------------------------------------------------------------------------------ ways


@pytest.fixture
def echo() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock = listener.accept()[0]
                    threading.Thread(target=answer, args=(sock,), daemon=True).start()

        def answer(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                while data := sock.recv(100):
                    sock.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield "{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)


def passes(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
            sock.sendall(b"hello")
            return sock.recv(5) == b"hello"
    except OSError:
        return False


def ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


def test_ways_are_cut_for_one_and_whole_for_all_others(echo: str) -> None:
    pids = {os.getpid(): "me"}
    ways = [Way(echo, lambda: pids) for _ in range(2)]
    mine, yours = Ways(ways, "me"), Ways(ways, "you")
    try:
        host, port = ways[0].endpoint.split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as standing:
            standing.sendall(b"x")
            assert standing.recv(1) == b"x"
            yours.cut()
            assert all(passes(way.endpoint) for way in ways)
            mine.cut()
            assert ended(standing)
        assert not any(passes(endpoint) for endpoint in mine.endpoint.split(","))
        pids.clear()
        assert all(passes(way.endpoint) for way in ways), "strangers pass"
        pids[os.getpid()] = "me"
        mine.close()
        assert all(passes(way.endpoint) for way in ways)
    finally:
        for way in ways:
            way.close()


# ------------------------------------------------------------------------------------------------ real processes


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scene", ["shared", "embedded"])
def test_the_benchmark_measures_real_processes(tmp_path: Path, scene: str) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.failover", "--quick", "--runs", "1", "--no-peers"]
    done = subprocess.run(
        [*command, "--scenes", scene, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {f["name"]: f["value"] for f in json.loads(out.read_text())["figures"]}
    assert figures[f"{scene}: audit of the event logs, violations"] == 0
    assert figures[f"{scene}, scheduler SIGKILL: steps lost"] == 0
    assert figures[f"{scene}, scheduler and a member SIGKILL: to the survivors' next step, slowest of 1"] > 0
    assert done.stdout.splitlines()[-1].startswith("failover: ")


def test_signals_that_are_sent_are_named_in_the_log() -> None:
    said: list[dict[str, Any]] = []
    log = SimpleNamespace(emit=lambda name, **fields: said.append(fields))
    scene = Scene("apart", None, None, None, log, None)  # type: ignore[arg-type]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scene.strike(signal.SIGKILL, child.pid, "s0")
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert said == [{"kind": "sigkill", "node": "s0", "pid": child.pid}]
