"""Measures how soon training uses other reduction trees after a link drops to a tenth and after it recovers, and the
costs.

Six processes train a plain loop on the engine, over the overlay's eight links only (each names its neighbours), paced
at both ends, with the plan "auto". When every link was measured and the plan stays, the pacing of the link that the
trees fill most is set to a tenth at both ends. Nobody is told. From that instant the time is taken until all six have
committed a step in a view with other trees. Some steps later the link has its old rate again, of which nobody is told
either, and the time is taken until trees rule that send more over it. The steps that each member committed must be
consecutive, none of them may have been reduced twice, and the audit of the event logs must be clean.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import Result, median
from benchmarks.members import Trainee, compute_alone, config_of, state_model
from benchmarks.overlay.net import MBPS, NAMES
from benchmarks.workers import Worker, context, scheduler, scratch
from benchmarks.world import World, lost_or_repeated

BATCH = 8
DROP = 0.1
STAYS_S = 8.0
"""A plan that was not changed for so long stays."""
SETTLE_S = 120.0
CHANGE_S = 60.0
AFTERWARDS = 5
"""Steps in the new view before the job ends."""

Rates = dict[tuple[str, str], float]
Trees = list[tuple[float, tuple[str, ...], tuple[str, ...]]]
"""A plan in plain values: (weight, members, their parents) of each tree."""


def member(pipe: Connection, endpoint: str, name: str, rates: dict[str, float], state_mib: float, logs: str) -> None:
    """Runs one member; reports each step with its view's reduction trees, and changes its links' rates on ("rates",
    {peer: bps}).
    """
    import torch

    from chaos_lightning.machine.process_table import count_as
    from chaos_lightning.testing.emulation import Emulated
    from chaos_lightning.transport.medium import install

    count_as(name)
    emulated = Emulated("", rates)
    install(emulated)
    compute_alone()
    torch.manual_seed(0)
    model = state_model(state_mib)
    config = config_of(
        endpoint=endpoint,
        name=name,
        log_dir=logs,
        by_reference=False,
        neighbours=",".join(rates),
        plan="auto",
        step_timeout_s=120,
        join_timeout_s=120,
    )
    trainee = Trainee(pipe, config, model, torch.optim.SGD(model.parameters(), lr=1e-4), batch=BATCH)
    engine = trainee.engine
    trainee.join()
    while not trainee.over:
        for _, rates in trainee.orders():
            engine._loop.call(lambda rates=rates: emulated.change(rates))
        header = trainee.step()
        trees = [(t.weight, t.members, t.parents) for t in engine.view.plan.trees]
        trainee.report(header, str(header.view), trees)
        trainee.between(header)
    trainee.end()
    trainee.say("bye")


class Planned(World):
    """Members of the benchmark, and the reduction trees of their views.

    Args:
        endpoint: Endpoint of the scheduler.
        rates: Bits per second of each link.
        state_mib: MiB of the trained state.
        logs: Folder of event logs.
    """

    def __init__(self, endpoint: str, rates: Rates, state_mib: float, logs: str) -> None:
        ctx = context("benchmarks.overlay.replan", "chaos_lightning.replication.access")
        super().__init__(
            lambda name: Worker(ctx, member, endpoint, name, _rates_of(name, rates), state_mib, logs),
            random.Random(0),
            CHANGE_S,
        )
        self.trees: dict[str, Trees] = {}
        self.views: dict[str, list[tuple[int, str]]] = {name: [] for name in NAMES}
        """(ns, view) of each step, by member."""
        self.changed_at = time.monotonic()
        self._logs, self._look_at = logs, 0.0

    def _hear(self, name: str, word: str, *values: Any) -> None:
        if word == "step":
            *values, view, trees = values
            self.views[name].append((values[0], view))
            if trees != self.trees.get(name):
                self.trees[name], self.changed_at = trees, time.monotonic()
        super()._hear(name, word, *values)

    def measured(self) -> set[tuple[str, str]]:
        """Returns (from, to) of the links that members have measured so far."""
        from chaos_lightning.events.events import read_events

        found = (r for r in read_events(self._logs) if r.name == "link_measured")
        return {(r.member.partition("~")[0], str(r.get("peer")).partition("~")[0]) for r in found}

    def settled(self) -> bool:
        """Returns whether all links were measured, and all members have had one and the same plan for a while."""
        plans = list(self.trees.values())
        alike = len(plans) == len(NAMES) and all(plan == plans[0] for plan in plans)
        full = all(s.steps and s.steps[-1].contributors == len(NAMES) for s in self.members.values())
        now = time.monotonic()
        if not (alike and plans[0] and full and now - self.changed_at > STAYS_S and now >= self._look_at):
            return False
        self._look_at = now + 1
        return len(self.measured()) == 2 * len(MBPS)

    def pace(self, rates: Rates) -> None:
        for name, seen in self.members.items():
            seen.worker.pipe.send(("rates", _rates_of(name, rates)))


def _rates_of(name: str, rates: Rates) -> dict[str, float]:
    return {(b if a == name else a): bps for (a, b), bps in rates.items() if name in (a, b)}


def _loads(trees: Trees) -> Counter[tuple[str, str]]:
    """Returns the share of the gradient buffer that crosses each link, by members' names."""
    load: Counter[tuple[str, str]] = Counter()
    for weight, members, parents in trees:
        for one, other in zip(members, parents, strict=True):
            if other:
                a, b = sorted((one.partition("~")[0], other.partition("~")[0]))
                load[a, b] += weight
    return load


def _busiest(trees: Trees) -> tuple[str, str]:
    """Returns the link that the largest share of the buffer crosses; of equal ones the slowest."""
    load = _loads(trees)
    return max(load, key=lambda pair: (load[pair] / MBPS[pair], load[pair]))


def measure(result: Result, state_mib: float, scale: float) -> None:
    """Measures one drop of a link's rate, and adds its figures."""
    rates = {pair: mbps * 1e6 * scale for pair, mbps in MBPS.items()}
    with scratch() as folder:
        logs = str(folder / "replan")
        with (
            scheduler(len(NAMES), log_dir=logs, plan="auto") as endpoint,
            Planned(endpoint, rates, state_mib, logs) as world,
        ):
            for name in NAMES:
                world.start(name)
            world.pump(world.settled, "a plan that stays", SETTLE_S)
            before = dict(world.trees)
            pair = _busiest(before[NAMES[0]])
            settled_at, dropped_at = world.changed_at, time.monotonic()
            world.pace({**rates, pair: rates[pair] * DROP})
            world.pump(lambda: all(world.trees[n] != before[n] for n in NAMES), "another plan")
            floor = {n: len(s.steps) for n, s in world.members.items()}
            world.pump(
                lambda: all(len(s.steps) >= floor[n] + AFTERWARDS for n, s in world.members.items()),
                "steps in the new view",
            )
            less = _loads(world.trees[NAMES[0]])[pair]
            restored_at = time.monotonic()
            world.pace(rates)
            world.pump(
                lambda: all(_loads(world.trees[n])[pair] > less for n in NAMES), "trees that use the recovered link"
            )
            back_s = time.monotonic() - restored_at
            world.end(5)
        _report(result, world, pair, (settled_at, dropped_at, restored_at), logs)
    words = f"link {'-'.join(pair)} as before, after {restored_at - dropped_at:.0f} s"
    result.add(f"{words}, until all committed by trees over it", back_s, "s")


def _report(
    result: Result, world: Planned, pair: tuple[str, str], times: tuple[float, float, float], logs: str | Path
) -> None:
    """Adds the figures of a drop; `times` (CLOCK_MONOTONIC, s): when the plan was stable, the link dropped, the link
    recovered.
    """
    from chaos_lightning.events.events import read_events

    settled_at, dropped_at, restored_at = times
    steps = [s.steps for s in world.members.values()]
    result.add("first step, until the plan that stayed ruled", settled_at - min(s[0].ns for s in steps) / 1e9, "s")
    old = {n: next(v for ns, v in reversed(s) if ns <= dropped_at * 1e9) for n, s in world.views.items()}
    ruled_at = max(
        next(ns for ns, v in s if ns > dropped_at * 1e9 and v != old[n]) / 1e9 for n, s in world.views.items()
    )
    again = [r for r in read_events(logs) if r.name in ("redo", "hand_on") and r.mono > dropped_at]
    phases = {
        "before": (0.0, dropped_at),
        "over the slow link": (dropped_at, ruled_at),
        "over other trees": (ruled_at, restored_at),
    }
    result.details["replan, link"] = "-".join(pair)
    result.add(f"link {'-'.join(pair)} to a tenth, until all committed by other trees", ruled_at - dropped_at, "s")
    for when, (low, high) in phases.items():
        pairs = [(a.ns / 1e9, b.ns / 1e9) for s in steps for a, b in pairwise(s)]
        found = [end - begin for begin, end in pairs if low <= begin and end <= high]
        if found:  # the change may come before a whole step has passed over the slow link
            result.add(f"step {when}", median(found), "s")
    result.add("steps lost when trees changed", sum(map(lost_or_repeated, steps)), "count", 0)
    result.add("steps reduced again when trees changed", len(again), "count", 0)
    result.audit(logs, "audit of the event logs, violations, replan", "replan")
