"""torchft as a peer in the join benchmark: the same guest at the door, the same clock, the same definitions.

A guest has built model, Adam state and its `Manager` (which talks to the lighthouse already) when it says "ready"; its
first quorum begins when it is told to go. It contributes when a step counts it among its participants: torchft lets a
newcomer heal during a step that it does not take part in. It cannot leave, so it is killed, and the hosts' timeouts see
to the rest before the next one is let in.
"""

from __future__ import annotations

import logging
import os
import random
import time
from datetime import timedelta
from multiprocessing.connection import Connection

from benchmarks.common import Result, state_model
from benchmarks.join import House, Visits, say, visit
from benchmarks.join_members import warm_up
from benchmarks.peers_torchft import TUNED, TUNED_TIMEOUT_S, available, lighthouse, version
from benchmarks.victims import BATCH, fingerprint
from benchmarks.workers import Worker, context

PATIENCE_S = 30.0


def member(pipe: Connection, address: str, name: str, state_mib: float, guest: bool) -> None:
    """One replica group of one process."""
    import torch
    from torch.distributed import TCPStore

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not os.environ.get("BENCH_VERBOSE"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable(logging.CRITICAL)
    import torchft

    torch.set_num_threads(1)
    torch.manual_seed(os.getpid() if guest else 0)
    plain = state_model(state_mib)
    inner = torch.optim.Adam(plain.parameters(), lr=1e-4, fused=True)
    width = warm_up(plain, inner)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TUNED_TIMEOUT_S)),
        timeout=timedelta(seconds=TUNED_TIMEOUT_S),
        load_state_dict=lambda s: (plain.load_state_dict(s["model"]), inner.load_state_dict(s["optimizer"])),
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        hostname="127.0.0.1",
    )
    model = torchft.DistributedDataParallel(manager, plain)
    optimizer = torchft.Optimizer(manager, inner)
    draw = torch.Generator().manual_seed(os.getpid())
    if guest:
        pipe.send(("ready", time.monotonic_ns()))
        assert pipe.recv()[0] == "go"
        pipe.send(("going", time.monotonic_ns(), time.process_time()))
    pipe.send(("in", time.monotonic_ns(), name))
    wanted: set[int] = set()
    fresh, backwards = guest, 0
    try:
        while True:
            while pipe.poll():
                order, *values = pipe.recv()
                if order == "hash":
                    wanted.add(values[0])
            optimizer.zero_grad()
            model(torch.randn(BATCH, width, generator=draw)).square().mean().backward()
            backwards += 1
            before = manager.current_step()
            optimizer.step()
            step, now = manager.current_step(), time.monotonic_ns()
            if step == before:
                continue
            rank = manager.participating_rank()
            contributors = manager.num_participants()
            if fresh and rank is not None and contributors == 3:
                fresh = False
                pipe.send(("contributed", now, time.process_time()))
            pipe.send(("cpu", step, time.process_time()))
            pipe.send(("step", now, step, step, "", contributors, -1 if rank is None else rank, backwards))
            if step in wanted:
                pipe.send(("hash", step, "", fingerprint(plain, inner)))
    except (BrokenPipeError, EOFError):
        return


def joins(result: Result, title: str, state_mib: float, runs: int, rng: random.Random) -> Visits:
    """So many joins, in a new world after each failure; says so if torchft cannot run here."""
    visits = Visits()
    if missing := available():
        result.notes.append(f"no comparison with torchft: {missing}")
        print(f"  torchft: {missing}")
        return visits
    result.details["torchft"] = " ".join(f"{d} {version(d)}" for d in ("torchft", "torchft-nightly") if version(d))
    ctx = context("benchmarks.join_members", "torch._dynamo")
    failed = tried = 0
    while tried < runs:
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
    result.add(f"{title}: joins that came to nothing within {PATIENCE_S:g} s, of {runs}", failed, "count")
    return visits
