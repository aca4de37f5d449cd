"""Tests how processes that set up get rank numbers: by lock files on one machine, and through the scheduler from
others.
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from served import PATIENCE_S, Served, serving
from until_support import until

from chaos_lightning.control import claims
from chaos_lightning.control.claims import Claim, ask, lock_lowest
from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.errors import ConfigurationError, RefusedError, SchedulerUnreachableError
from chaos_lightning.machine.lock_files import lock_path
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.service import channel

CLAIMANT = """
import os, signal, sys
from chaos_lightning.control import claims
from chaos_lightning.control.claims import ask, lock_lowest

way, port, claims.WORD_S = sys.argv[1], int(sys.argv[2]), 0.05
claim = ask(f"127.0.0.1:{port}", b"", "default", 20.0) if way == "asks" else lock_lowest("default", port)
if not os.fork():  # as a loader's worker, which outlives its parent; it ends with the test, which holds its input
    os.read(0, 1)
    os._exit(0)
print(claim.number, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _own_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Scheduler that would tolerate silence for very long, so that tests see whether it notices a closed connection at
    once.
    """
    monkeypatch.setattr(claims, "SILENCE_S", 10 * PATIENCE_S)
    with serving() as served:
        yield served


def asked(served: Served, job: str = "default") -> Claim:
    return ask(served.endpoint, b"", job, PATIENCE_S)


@contextmanager
def claimant(way: str, port: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Starts a process that claims a number, and its forked child, which outlives it; yields the process and the
    number.
    """
    command = [sys.executable, "-c", CLAIMANT, way, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], PATIENCE_S)[0], "no number"
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_each_has_the_lowest_number_that_is_free_wherever_it_is(scheduler: Served) -> None:
    """Callers on the scheduler's machine (lock files) and elsewhere (calls) always get the lowest number that is
    free.
    """
    port = scheduler.server.port
    held = [lock_lowest("default", port), asked(scheduler), lock_lowest("default", port), asked(scheduler)]
    assert [claim.number for claim in held] == [0, 1, 2, 3]
    held[1].release()
    held[0].release()
    again = [asked(scheduler), lock_lowest("default", port)]
    assert [claim.number for claim in again] == [0, 1]
    for claim in (*held[2:], *again):
        claim.release()
    assert not scheduler.server._claims
    assert not lock_path(f"default-{port}-founder-0").exists()


@pytest.mark.parametrize("way", ["asks", "locks"])
def test_a_killed_process_holds_no_number_though_its_worker_lives_on(scheduler: Served, way: str) -> None:
    with claimant(way, scheduler.server.port) as (process, number):
        assert number == 0
        second = asked(scheduler)
        assert second.number == 1
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        found: list[int] = []

        def free() -> bool:
            claim = asked(scheduler)
            claim.release()
            found.append(claim.number)
            return claim.number == 0

        until(free, "number 0 after its holder's death")
        assert set(found) <= {0, 2}
        second.release()


def test_a_stopped_machine_holds_no_number_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a stopped process is freed after some silence, although its connection stays open."""
    monkeypatch.setattr(claims, "SILENCE_S", 1.0)
    with serving() as served, claimant("asks", served.server.port) as (process, _):
        process.send_signal(signal.SIGSTOP)
        until(lambda: not served.server._claims, "the end of the claim")


class Pauses:
    """gRPC context of a client that pauses for `pause_s` (of the loop's clock, which is moved) before each message but
    the first.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        real, self.ahead_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: real() + self.ahead_s)
        self.pause_s = pause_s
        self.heard = 0

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, reply: object) -> None:
        pass

    async def read(self) -> object:
        if self.heard:
            self.ahead_s += self.pause_s
            for _ in range(5):  # the loop looks for timers that are due
                await asyncio.sleep(0)
        self.heard += 1
        return chaos_pb2.ClaimRequest(job="default") if self.heard < 9 else channel.END_OF_STREAM


@pytest.mark.parametrize(("share", "heard"), [(0.9, 9), (1.1, 1)])
def test_the_patience_is_for_each_word(monkeypatch: pytest.MonkeyPatch, share: float, heard: int) -> None:
    async def hold() -> tuple[int, int]:
        context, held = Pauses(monkeypatch, share * claims.SILENCE_S), claims.Claims("default", PATIENCE_S)
        await held.hold(context, 1)
        return context.heard, len(held)

    assert asyncio.run(hold()) == (heard, 0)


def test_who_has_a_number_speaks_until_the_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a number repeats its request until the scheduler ends the call, several times per silence
    limit.
    """
    assert claims.SILENCE_S >= 4 * claims.WORD_S
    jobs: list[str] = []

    async def hold(self: claims.Claims, context: Any, port: int) -> None:
        jobs.append((await context.read()).job)
        await context.write(chaos_pb2.ClaimReply(number=0))
        while len(jobs) < 4:
            jobs.append((await context.read()).job)

    monkeypatch.setattr(claims, "WORD_S", 0.01)
    monkeypatch.setattr(claims.Claims, "hold", hold)
    with serving() as served:
        claim = asked(served)
        until(lambda: all(thread.name != "chaos-claim" for thread in threading.enumerate()), "the claimant's silence")
        assert jobs == ["default"] * 4
        claim.release()


def test_another_jobs_scheduler_gives_no_number(scheduler: Served) -> None:
    with pytest.raises(RefusedError, match="here is the scheduler of job 'default', not of 'other'"):
        asked(scheduler, "other")
    assert not scheduler.server._claims


def test_one_connection_has_one_number(scheduler: Served) -> None:
    request = chaos_pb2.ClaimRequest(job="default")
    with grpc.insecure_channel(scheduler.endpoint) as one:
        says: queue.SimpleQueue[object] = queue.SimpleQueue()
        says.put(request)
        first = SchedulerStub(one).Claim(iter(says.get, None))
        assert next(first).number == 0
        with pytest.raises(grpc.RpcError, match="this connection has a number already"):
            next(SchedulerStub(one).Claim(iter([request])))
        says.put(None)
        assert next(first, None) is None
        assert next(SchedulerStub(one).Claim(iter([request]))).number == 0


def test_who_names_no_job_in_time_is_sent_away() -> None:
    with serving(hello_timeout_s=0.05) as served, grpc.insecure_channel(served.endpoint) as one:
        said = os.eventfd(0)
        call = SchedulerStub(one).Claim(iter(lambda: os.read(said, 8), b""))
        with pytest.raises(grpc.RpcError, match="a claim that names no job"):
            next(call)
        os.eventfd_write(said, 1)
        os.close(said)


def test_a_scheduler_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hold(self: claims.Claims, context: object, port: int) -> None:
        await context.read()  # type: ignore[attr-defined]
        await context.read()  # type: ignore[attr-defined]

    monkeypatch.setattr(claims.Claims, "hold", hold)
    with serving() as served, pytest.raises(SchedulerUnreachableError, match="no scheduler answered"):
        ask(served.endpoint, b"", "default", 0.2)


def test_a_scheduler_that_cannot_lock_says_so(scheduler: Served, tmp_path: Path) -> None:
    lock_path(f"default-{scheduler.server.port}-founder-0").symlink_to(tmp_path / "victim")
    with pytest.raises(SchedulerUnreachableError, match="a link or another user's file there is not used"):
        asked(scheduler)
    with pytest.raises(ConfigurationError, match="a link or another user's file there is not used"):
        lock_lowest("default", scheduler.server.port)


def test_an_idle_scheduler_waits_for_who_sets_up() -> None:
    with serving(idle_timeout_s=0.3) as served:
        claim = asked(served)
        with pytest.raises(AssertionError, match="waited 1 s"):
            until(lambda: served.outcome, "an end that must not come", 1.0)
        claim.release()
        assert served.wait_ended()[0].startswith("no member for 0.3 s")


def test_a_claim_outlives_no_scheduler() -> None:
    with serving() as served:
        claim = asked(served)
        port = served.server.port
    claim.release()
    other = lock_lowest("default", port)
    assert other.number == 0
    other.release()
