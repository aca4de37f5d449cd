"""A link drops to a tenth while six members train, and recovers: how long until other trees rule, and what that cost.

Six processes train a plain loop on the engine, over the overlay's eight links only (each names its neighbours), paced
at both ends, with the plan "auto". When every link was measured and the plan stays, the pacing of the link that the
trees fill most is set to a tenth at both ends. Nobody is told. From that instant the time is taken until all six have
committed a step in a view with other trees. Some steps later the link has its old rate again, of which nobody is told
either, and the time is taken until trees rule that send more over it. The steps that each member committed must be
consecutive, none of them may have been reduced twice, and the audit of the event logs must be clean.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import Result, compute_alone, median, state_model
from benchmarks.overlay_net import MBPS, NAMES
from benchmarks.workers import Worker, context, scheduler, scratch

BATCH = 8
DROP = 0.1
STAYS_S = 8.0
"""A plan that was not changed for so long stays."""
SETTLE_S = 120.0
CHANGE_S = 60.0
AFTERWARDS = 5
"""Steps in the new view before the job ends."""


def member(pipe: Connection, endpoint: str, name: str, rates: dict[str, float], state_mib: float, logs: str) -> None:
    """One member; reports each step, and obeys ("rates", {peer: bps}) and ("end", step)."""
    import torch

    from chaos_lightning.collectives.layout import Section
    from chaos_lightning.lab.emulation import Emulated
    from chaos_lightning.machine.process_table import count_as
    from chaos_lightning.member.engine import Engine
    from chaos_lightning.replication.access import ModuleState
    from chaos_lightning.settings import EngineConfig
    from chaos_lightning.transport.medium import install

    compute_alone()
    count_as(name)
    emulated = Emulated("", rates)
    install(emulated)
    torch.manual_seed(0)
    try:
        model = state_model(state_mib)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        state = ModuleState(model, optimizer)
        width = int(next(model.parameters()).shape[1])
        draw = torch.Generator().manual_seed(os.getpid())
        engine = Engine(
            EngineConfig(
                endpoint=endpoint,
                name=name,
                host_scheduler=False,
                log_dir=logs,
                by_reference=False,
                neighbours=",".join(rates),
                plan="auto",
                step_timeout_s=120,
                join_timeout_s=120,
            )
        )
        engine.prepare(sections=[Section("all", list(model.named_parameters()))])
        engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=state)
        last = 0
        while not last or engine.header.step < last:
            while pipe.poll():
                order, value = pipe.recv()
                if order == "end":
                    last = value
                else:
                    engine._loop.call(lambda value=value: emulated.change(value))
            optimizer.zero_grad(set_to_none=True)
            engine.arm(coefficient=1.0)
            model(torch.randn(BATCH, width, generator=draw)).square().mean().backward()
            header = engine.step(weight=1.0, coefficient=1.0)
            now = time.monotonic()
            optimizer.step()
            pipe.send(("step", now, header.step, str(header.view), _trees(engine), len(header.contributors)))
            if header.boundary:
                engine.boundary(state)
        engine.finish()
        engine.close()
        pipe.send(("bye",))
    except BaseException as error:
        pipe.send(RuntimeError(f"{name}: {error!r}"))
        raise


def _trees(engine: Any) -> list[tuple[float, tuple[str, ...], tuple[str, ...]]]:
    """The plan of the view that rules now, in plain values."""
    return [(t.weight, t.members, t.parents) for t in engine.view.plan.trees]


class Run:
    """What the members say, by member."""

    def __init__(self, members: dict[str, Worker], logs: str) -> None:
        self.members = members
        self.logs = logs
        self.steps: dict[str, list[tuple[float, int, str, int]]] = {name: [] for name in members}
        self.trees: dict[str, Any] = {}
        self.changed_at = time.monotonic()
        self.ended: set[str] = set()
        self._look_at = 0.0

    def listen(self) -> None:
        """Takes what has been said."""
        for name, worker in self.members.items():
            while name not in self.ended and worker.pipe.poll(0.01):
                said = worker.receive(0)
                if said[0] == "bye":
                    self.ended.add(name)
                    continue
                _, at_s, step, view, trees, contributors = said
                self.steps[name].append((at_s, step, view, contributors))
                if trees != self.trees.get(name):
                    self.trees[name], self.changed_at = trees, time.monotonic()

    def until(self, what: str, done: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                last = {name: steps[-1][1:] for name, steps in self.steps.items() if steps}
                raise TimeoutError(f"{what} did not happen within {timeout_s:g} s; last steps {last}")
            self.listen()

    def measured(self) -> set[tuple[str, str]]:
        """(from, to) of the links that were measured."""
        from chaos_lightning.events.events import read_events

        found = (r for r in read_events(self.logs) if r.name == "link_measured")
        return {(r.member.partition("~")[0], str(r.get("peer")).partition("~")[0]) for r in found}

    def settled(self) -> bool:
        plans = list(self.trees.values())
        alike = len(plans) == len(NAMES) and all(plan == plans[0] for plan in plans)
        full = all(steps and steps[-1][3] == len(NAMES) for steps in self.steps.values())
        if not (alike and plans[0] and full and time.monotonic() - self.changed_at > STAYS_S):
            return False
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + 1
        return len(self.measured()) == 2 * len(MBPS)

    def pace(self, rates: dict[tuple[str, str], float]) -> None:
        for name, worker in self.members.items():
            worker.pipe.send(("rates", _rates_of(name, rates)))


def _rates_of(name: str, rates: dict[tuple[str, str], float]) -> dict[str, float]:
    return {(b if a == name else a): bps for (a, b), bps in rates.items() if name in (a, b)}


def _loads(trees: Any) -> Counter[tuple[str, str]]:
    """How much of the buffer crosses each link, by members' names."""
    load: Counter[tuple[str, str]] = Counter()
    for weight, members, parents in trees:
        for one, other in zip(members, parents, strict=True):
            if other:
                a, b = sorted((one.partition("~")[0], other.partition("~")[0]))
                load[a, b] += weight
    return load


def _busiest(trees: Any) -> tuple[str, str]:
    """The link that most of the buffer crosses; of equal ones the slowest."""
    load = _loads(trees)
    return max(load, key=lambda pair: (load[pair] / MBPS[pair], load[pair]))


def measure(result: Result, state_mib: float, scale: float) -> None:
    """One drop; adds its figures."""
    from chaos_lightning.events.events import read_events
    from chaos_lightning.observe.audit import audit, verdict, violations

    rates = {pair: mbps * 1e6 * scale for pair, mbps in MBPS.items()}
    ctx = context("benchmarks.overlay_replan", "chaos_lightning.replication.access")
    with scratch() as folder:
        logs = str(folder / "replan")
        with scheduler(len(NAMES), log_dir=logs, plan="auto") as endpoint:
            members = {n: Worker(ctx, member, endpoint, n, _rates_of(n, rates), state_mib, logs) for n in NAMES}
            said = Run(members, logs)
            try:
                said.until("a plan that stays", said.settled, SETTLE_S)
                before = dict(said.trees)
                pair = _busiest(before[NAMES[0]])
                settled_at, dropped_at = said.changed_at, time.monotonic()
                said.pace({**rates, pair: rates[pair] * DROP})
                said.until("another plan", lambda: all(said.trees[n] != before[n] for n in NAMES), CHANGE_S)
                floor = {n: len(s) for n, s in said.steps.items()}
                said.until(
                    "steps in the new view",
                    lambda: all(len(s) >= floor[n] + AFTERWARDS for n, s in said.steps.items()),
                    CHANGE_S,
                )
                less = _loads(said.trees[NAMES[0]])[pair]
                restored_at = time.monotonic()
                said.pace(rates)
                said.until(
                    "trees that use the recovered link",
                    lambda: all(_loads(said.trees[n])[pair] > less for n in NAMES),
                    CHANGE_S,
                )
                back_s = time.monotonic() - restored_at
                last = max(steps[-1][1] for steps in said.steps.values()) + 5
                for worker in members.values():
                    worker.pipe.send(("end", last))
                said.until("the end", lambda: len(said.ended) == len(NAMES), CHANGE_S)
            finally:
                for worker in members.values():
                    worker.kill()
        findings = audit(logs)
        records = list(read_events(logs))
    _report(result, said, pair, (settled_at, dropped_at, restored_at), records, violations(findings))
    words = f"link {'-'.join(pair)} as before, after {restored_at - dropped_at:.0f} s"
    result.add(f"{words}, until all committed by trees over it", back_s, "s")
    result.details["replan, audit"] = verdict(findings).splitlines()


def _report(
    result: Result,
    said: Run,
    pair: tuple[str, str],
    times: tuple[float, float, float],
    records: list[Any],
    problems: list[str],
) -> None:
    """Figures of the drop; `times` (CLOCK_MONOTONIC, s): the plan stayed, the link dropped, the link was restored."""
    settled_at, dropped_at, restored_at = times
    started_at = min(steps[0][0] for steps in said.steps.values())
    result.add("first step, until the plan that stayed ruled", settled_at - started_at, "s")
    old = {n: next(v for at_s, _, v, _ in reversed(s) if at_s <= dropped_at) for n, s in said.steps.items()}
    first = {n: next(at_s for at_s, _, v, _ in s if at_s > dropped_at and v != old[n]) for n, s in said.steps.items()}
    pairs = [pair for steps in said.steps.values() for pair in pairwise(steps)]
    lost = sum(after[1] - before[1] != 1 for before, after in pairs)
    again = [r for r in records if r.name in ("redo", "hand_on") and r.mono > dropped_at]
    ruled_at = max(first.values())
    phases = {
        "before": (0.0, dropped_at),
        "over the slow link": (dropped_at, ruled_at),
        "over other trees": (ruled_at, restored_at),
    }
    result.details["replan, link"] = "-".join(pair)
    result.add(f"link {'-'.join(pair)} to a tenth, until all committed by other trees", ruled_at - dropped_at, "s")
    for when, (low, high) in phases.items():
        found = [after[0] - before[0] for before, after in pairs if low <= before[0] and after[0] <= high]
        if found:  # the change may come before a whole step has passed over the slow link
            result.add(f"step {when}", median(found), "s")
    result.add("steps lost when trees changed", lost, "count", 0)
    result.add("steps reduced again when trees changed", len(again), "count", 0)
    result.add("audit of the event logs, violations, replan", len(problems), "count", 0)
    for line in problems[:10]:
        print(f"    audit: {line}")
