"""Measures how many inner steps survivors lose under torchft's DiLoCo when one replica is killed.

Three replica groups of one process each train the same model with torchft.local_sgd.DiLoCo, gloo, and a lighthouse that
is tuned as in peers/torchft.py. An exchange that fails is given up, and torchft puts the parameters back to those of
the last exchange: the inner steps since then are thrown away. One replica is killed at a drawn instant of its round, or
of its all-reduce, which it announces. Another one comes in its place, whose first round heals it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.common import Result, median
from benchmarks.outer_clusters import model_of
from benchmarks.peers.torchft import TUNED, TUNED_TIMEOUT_S, Lighthouse, missing
from benchmarks.workers import Worker

REPLICAS = 3
INNER_STEPS = 32
PACE_S = 0.04
PATIENCE_S = 60.0
_TURN_S = 0.5


def replica(pipe: Connection, address: str, name: str, params_mib: float) -> None:
    """Trains one replica until its pipe ends.

    Says ("reduces", 0, 0.0, 0.0) as the all-reduce of an exchange begins, and ("kept" or "thrown", inner steps, seconds
    of the exchange, seconds from that word on) when it is over.
    """
    import torch

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not os.environ.get("BENCH_VERBOSE"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable(logging.CRITICAL)
    import torchft
    from torch.distributed import TCPStore
    from torchft.local_sgd import DiLoCo

    torch.set_num_threads(1)
    model, width = model_of(params_mib)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.8, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=TUNED_TIMEOUT_S)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        timeout=timeout,
        load_state_dict=lambda s: (model.load_state_dict(s["model"]), inner.load_state_dict(s["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        hostname="127.0.0.1",
    )
    reduce, begun = manager.allreduce, [0.0]

    def allreduce(*given: Any, **more: Any) -> Any:
        if not begun[0]:
            begun[0] = time.monotonic()
            pipe.send(("reduces", 0, 0.0, 0.0))
        return reduce(*given, **more)

    manager.allreduce = allreduce
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    with contextlib.suppress(BrokenPipeError, EOFError), DiLoCo(manager, [model], inner, outer, INNER_STEPS):
        while True:
            before, exchange_s = manager.current_step(), 0.0
            for _ in range(INNER_STEPS):
                time.sleep(PACE_S)
                inner.zero_grad()
                model(torch.randn(1, width, generator=draw)).square().mean().backward()
                begun[0], began = 0.0, time.monotonic()
                inner.step()
                exchange_s = time.monotonic() - began
            word = "kept" if manager.current_step() > before else "thrown"
            reduced_s = time.monotonic() - begun[0] if begun[0] else 0.0
            pipe.send((word, INNER_STEPS, exchange_s, reduced_s))


@dataclass
class Crew:
    """Replicas of one job and their messages: the time (ns), the replica's name, and the message."""

    context: Any
    address: str
    params_mib: float
    workers: dict[str, Worker] = field(default_factory=dict)
    said: list[tuple[int, str, tuple[str, int, float, float]]] = field(default_factory=list)
    _number: int = 0

    def start(self) -> None:
        """Starts replicas until `REPLICAS` of them run."""
        while len(self.workers) < REPLICAS:
            self._number += 1
            name = f"r{self._number}"
            self.workers[name] = Worker(self.context, replica, self.address, name, self.params_mib)

    def until(self, ready: Any, what: str) -> None:
        """Takes in the messages of replicas until a condition holds.

        Raises:
            TimeoutError: The condition does not hold in time, or a replica died of itself.
        """
        end = time.monotonic() + PATIENCE_S
        while not ready():
            dead = [name for name, worker in self.workers.items() if worker.process.exitcode is not None]
            if dead or time.monotonic() > end:
                raise TimeoutError(f"{what}: {f'{dead} died of themselves' if dead else f'waited {PATIENCE_S:g} s'}")
            pipes = {worker.pipe: name for name, worker in self.workers.items()}
            for pipe in wait(list(pipes), _TURN_S):
                with contextlib.suppress(EOFError, OSError):
                    words = pipe.recv()  # type: ignore[union-attr]
                    self.said.append((time.monotonic_ns(), pipes[pipe], words))  # type: ignore[index]

    def ends(self, since: int, name: str) -> list[tuple[str, int, float, float]]:
        """Returns the messages about finished exchanges that this replica sent after `since` (ns)."""
        return [words for t, n, words in self.said if t > since and n == name and words[0] != "reduces"]

    def together(self, rounds: int = 1) -> None:
        """Waits until each replica has completed so many more rounds."""
        since = time.monotonic_ns()

        def all_keep() -> bool:
            return all(sum(end[0] == "kept" for end in self.ends(since, name)) >= rounds for name in self.workers)

        self.until(all_keep, "rounds of all replicas")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


@dataclass
class Thrown:
    """Outcomes of all runs of one kind: inner steps that survivors lost, and the longest exchange, s."""

    steps: list[int] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    hung: int = 0


def strike(crew: Crew, case: Thrown, rng: random.Random, *, exchanging: bool) -> None:
    """Kills one replica, and waits until each of the others has completed a round again."""
    crew.start()
    crew.together()
    victim = rng.choice(sorted(crew.workers))
    since = time.monotonic_ns()
    usual_s = crew.ends(0, victim)[-1][3] if exchanging else INNER_STEPS * PACE_S
    if exchanging:
        crew.until(lambda: any(t > since and n == victim and w[0] == "reduces" for t, n, w in crew.said), victim)
    time.sleep(rng.uniform(0.0, 1.0) * usual_s)
    since = time.monotonic_ns()
    crew.workers.pop(victim).kill()
    crew.together()
    ends = [end for name in crew.workers for end in crew.ends(since, name)]
    case.steps.append(sum(steps for word, steps, *_ in ends if word == "thrown"))
    case.exchange.append(max(end[2] for end in ends))


def measure(result: Result, ctx: Any, args: Any) -> None:
    """Adds torchft's figures; notes it if torchft cannot run on this machine.

    Args:
        result: Result to which the figures are added.
        ctx: Multiprocessing context of the fork server.
        args: Arguments of the benchmark (`runs`, `seed`, `params_mib`).
    """
    if missing(result):
        result.left_out.append("torchft's DiLoCo")
        return
    rng = random.Random(args.seed)
    for title, exchanging in (("at a drawn instant", False), ("in its all-reduce", True)):
        case, index = Thrown(), 0
        while index < args.runs:
            with (
                Lighthouse(TUNED) as lighthouse,
                contextlib.closing(Crew(ctx, lighthouse.address, args.params_mib)) as crew,
            ):
                while index < args.runs:
                    index += 1
                    try:
                        strike(crew, case, rng, exchanging=exchanging)
                    except TimeoutError as error:
                        case.hung += 1
                        result.remark(f"torchft's DiLoCo, killed {title}, run {index}: {error}")
                        break
        key = f"torchft's DiLoCo, a replica SIGKILLed {title}"
        result.add(f"{key}: runs that did not survive it, of {args.runs}", case.hung, "count")
        if case.steps:
            n = len(case.steps)
            result.add(f"{key}: inner steps that survivors throw away, mean of {n}", sum(case.steps) / n, "count")
            result.add(f"{key}: the same, most of {n}", max(case.steps), "count")
            result.add(f"{key}: longest exchange, median of {n}", median(case.exchange), "s")
        result.details[key] = vars(case)
