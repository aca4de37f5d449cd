"""torchft as a peer in the join benchmark: the same guest at the door, the same clock, the same definitions.

A guest has built model, Adam state and its `Manager` (which talks to the lighthouse already) when it says "ready"; its
first quorum begins when it is told to go. It contributes when a step counts it among its participants: torchft lets a
newcomer heal during a step that it does not take part in. It cannot leave, so it is killed, and the hosts' timeouts see
to the rest before the next one is let in.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from multiprocessing.connection import Connection

from benchmarks.common import Result
from benchmarks.join import House, Visits, say, visit
from benchmarks.join_members import warm_up
from benchmarks.peers_torchft import (
    TUNED,
    TUNED_TIMEOUT_S,
    Replica,
    available,
    lighthouse,
    model_and_adam,
    version,
)
from benchmarks.workers import Worker, context

PATIENCE_S = 30.0
HOPELESS = 3
"""After so many failures and no success there are no more tries."""


def member(pipe: Connection, address: str, name: str, state_mib: float, guest: bool) -> None:
    """One replica group of one process; a guest's own weights are worth nothing."""
    plain, inner = model_and_adam(state_mib, seed=os.getpid() if guest else 0)
    warm_up(plain, inner)
    replica = Replica(pipe, address, name, plain, inner, TUNED_TIMEOUT_S)
    if guest:
        pipe.send(("ready", time.monotonic_ns()))
        assert pipe.recv()[0] == "go"
        pipe.send(("going", time.monotonic_ns(), time.process_time()))
    pipe.send(("in", time.monotonic_ns(), name))
    fresh = guest
    with contextlib.suppress(BrokenPipeError, EOFError):
        for commit in replica.commits():
            if fresh and commit.rank is not None and commit.contributors == 3:
                fresh = False
                pipe.send(("contributed", commit.at_ns, time.process_time()))
            pipe.send(("cpu", commit.step, time.process_time()))
            replica.tell(commit)


def joins(result: Result, title: str, state_mib: float, runs: int, rng: random.Random) -> Visits:
    """So many joins, in a new world after each failure, or `HOPELESS` failures; says so if torchft cannot run here."""
    visits = Visits()
    if missing := available():
        result.notes.append(f"no comparison with torchft: {missing}")
        print(f"  torchft: {missing}")
        return visits
    result.details["torchft"] = " ".join(f"{d} {version(d)}" for d in ("torchft", "torchft-nightly") if version(d))
    ctx = context("benchmarks.join_members", "torch._dynamo")
    failed = tried = 0
    while tried < runs and (visits.kept or failed < HOPELESS):
        with lighthouse(TUNED) as address:
            house = House(
                lambda name, guest, at=address: Worker(ctx, member, at, name, state_mib, guest), rng, PATIENCE_S
            )
            try:
                house.open()
                while tried < runs:
                    tried += 1
                    one = visit(house, leave=False)
                    visits.kept.append(one)
                    say("torchft", one)
            except (TimeoutError, RuntimeError) as error:
                failed += 1
                result.notes.append(f"{title}, join {tried}: {error}")
                print(f"    {title}, join {tried}: {str(error)[:160]}", flush=True)
            finally:
                house.close()
    result.add(f"{title}: joins that came to nothing within {PATIENCE_S:g} s, of {tried}", failed, "count")
    return visits
