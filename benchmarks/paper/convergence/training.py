"""Trainings of the convergence figures: real member processes, each with its own data, one of which comes or goes.

Theory of operation. Every node is a process with the plain loop of the paper's Listings 1 and 2 (`Trainer` with
`data="local"`); a scheduler process serves them. Nodes are let in one after the other, so that ranks, and with them the
order of every sum, are the same in each run: runs that differ in the fifth node's coming or going alone are equal up to
it, bit for bit, as long as the scheduler changes no trees (`Run.rewired`). The first node sends what was learned every
so many steps, and this process measures it on the test set while training goes on. A fifth node that comes is built and
waits at the door; it asks to be let in when the first one tells of the step of the change. One that goes asks for it
after that step. (The scheduler, told to found the job with all of them, would have the others wait below that number,
so it is started again with a lower one while they train.) Who contributed to which step, and which bytes a join moved,
is read from the members' event logs afterwards.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import workers
from benchmarks.paper.convergence.curves import Change, Curve
from benchmarks.paper.convergence.data import Samples, Stream
from benchmarks.paper.convergence.models import Judge, Problem, Recipe, learned_arrays, loss_of, one_thread
from chaos_lightning.events.events import Record, Tail

DEADLINE_S = 240.0
"""After so long without a word from any node a run has failed."""
PRELOAD = ("benchmarks.paper.convergence.training", "chaos_lightning.trainer", "chaos_lightning.replication.replay")


# ---------------------------------------------------------------------------------------------------- one node


@dataclass(frozen=True)
class Part:
    """Settings of one node, given before it starts.

    Attributes:
        name: its name.
        endpoint: of the scheduler.
        log_dir: folder of its event log.
        last: step after which the job ends, if `size` nodes took part in it; else the first such step after it,
            so that who comes or goes slowly is waited for.
        size: nodes at the end.
        every: the first node sends what was learned every so many steps; 0: it does not.
        leaves: step after which this node goes; 0: it stays.
    """

    name: str
    endpoint: str
    log_dir: str
    last: int
    size: int
    every: int = 0
    leaves: int = 0


def node(pipe: Connection, part: Part, recipe: Recipe, samples: Samples, number: int) -> None:
    """Runs a node's process: builds everything, waits for "go", trains, and reports how it ended."""
    import torch

    from chaos_lightning.replication.access import ModuleState, optimizer_tensors
    from chaos_lightning.replication.table import state_hash
    from chaos_lightning.trainer import Trainer

    torch.set_num_threads(1)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    stream = Stream(samples, recipe.batch, seed=1000 * recipe.seed + number)
    torch.manual_seed(1000 * recipe.seed + number)  # dropout: each node draws its own
    pipe.send(("ready", part.name))
    assert pipe.recv() == "go"
    with Trainer(
        endpoint=part.endpoint,
        name=part.name,
        log_dir=part.log_dir,
        host_scheduler=False,
        by_reference=False,  # each stands for a machine of its own
        join_timeout_s=120.0,
        step_timeout_s=120.0,
    ) as trainer:
        for inputs, targets in trainer.prepare(model, optimizer, stream, data="local", seed=recipe.seed):
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            trainer.update()
            size = trainer.engine.header.contributors  # equal on all nodes; who is about to go counts until it is gone
            trainer.check_state_replication()
            if part.every and trainer.step % part.every == 0:
                pipe.send(("learned", trainer.step, learned_arrays(model)))
            if part.leaves and trainer.step >= part.leaves:
                trainer.request_node_exit("this node takes its data away")
                break
            if trainer.step >= part.last and size == part.size:
                break
        end = trainer.step
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    sizes = {
        "trained_nbytes": _nbytes(trained),
        "optimizer_nbytes": _nbytes(t for _, t in optimizer_tensors(optimizer)),
        "buffers_nbytes": _nbytes(model.buffers()),
        "frozen_nbytes": _nbytes(frozen),
    }
    whole = state_hash(ModuleState(model, optimizer).tensors())
    base = state_hash((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    pipe.send(("bye", part.name, end, whole, base if frozen else "", sizes))


def _nbytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ---------------------------------------------------------------------------------------------------- what a run shows


@dataclass
class Run:
    """Outcome of one training.

    Attributes:
        change: "": the same nodes all along; "out": the fifth came; "in": it went.
        curve: the quality on all of the test.
        newcomers: the quality on the fifth node's kinds.
        states: a hash of what was learned, at each step of the curves.
        changed: the first step without (or with) the fifth node; 0: nothing changed.
        contributors: nodes with samples in each step, by step.
        equal: whether all nodes that were there at the end ended with the same state, by hash.
        rewired: why the scheduler changed trees before the fifth node came or went, in its words; the order of sums
            changes with them, and with it the last bits of what is learned.
        transfer: what the join moved (see `transfer_facts`), and how large the parts of the state are.
        seconds: wall-clock time.
    """

    change: Change
    curve: Curve = field(default_factory=lambda: Curve((), ()))
    newcomers: Curve = field(default_factory=lambda: Curve((), ()))
    states: dict[int, str] = field(default_factory=dict)
    changed: int = 0
    contributors: dict[int, int] = field(default_factory=dict)
    equal: bool = False
    rewired: list[str] = field(default_factory=list)
    transfer: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def contributors_by_step(records: Iterable[Record], node_name: str) -> dict[int, int]:
    """Returns how many nodes contributed samples to each optimizer step, by the log of node `node_name`."""
    found = {}
    for r in records:
        if r.name == "committed" and r.node == node_name and r["kind"] == "step":
            found[int(r["step"])] = sum(weight > 0 for _, weight in r["contributors"])
    return found


def change_in(contributors: Mapping[int, int]) -> int:
    """Returns the first step with another number of nodes than the step before it; 0 if there is none.

    Raises:
        ValueError: there is more than one: somebody else came or went, and the run shows something else.
    """
    steps = sorted(contributors)
    changes = [b for a, b in pairwise(steps) if contributors[a] != contributors[b]]
    if len(changes) > 1:
        raise ValueError(f"the number of nodes changed before steps {changes}; expected one change")
    return changes[0] if changes else 0


def transfer_facts(records: Iterable[Record], node_name: str) -> dict[str, Any]:
    """Returns facts about the pulls and the replay of `node_name`'s join, from its own event log.

    Returns:
        way: "replay" or "pause"; pulls: for each pull of state {nbytes: moved, skipped: held already, recognised by
        hash and not moved, hash: of the whole state at the end}; log_nbytes: reduced gradients that it
        replayed; replayed: how many steps.
    """
    pulls: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"way": "pause", "pulls": pulls, "log_nbytes": 0, "replayed": 0}
    for r in records:
        if r.node != node_name:
            continue
        if r.name == "observing":
            facts["way"] = "replay"
        elif r.name == "pull_done":
            pulls.append({"nbytes": int(r["nbytes"]), "skipped": int(r["skipped"]), "hash": str(r["hash"])})
        elif r.name == "replayed":
            facts["log_nbytes"] += int(r.get("nbytes", 0))
            facts["replayed"] += int(r["steps"])
    return facts


def rewirings(records: Iterable[Record], node_name: str, changed: int) -> list[str]:
    """Returns the reasons of views that kept the members of the view before, decided before `node_name` committed step
    `changed`.

    Args:
        records: of members and scheduler.
        node_name: of a member.
        changed: 0: all such views.
    """
    ordered = sorted(records, key=lambda r: r.t)
    until = next(
        (r.t for r in ordered if changed and r.name == "committed" and r.node == node_name and r["step"] == changed),
        math.inf,
    )
    views = [r for r in ordered if r.name == "view" and r.node == "default" and r.t < until]
    return [str(b.get("reason")) for a, b in pairwise(views) if a["members"] == b["members"]]


# ---------------------------------------------------------------------------------------------------- a run


def train(
    problem: Problem,
    change: Change,
    *,
    nodes: int,
    change_at: int,
    last: int,
    every: int,
    folder: Path,
    joiner_recipe: Recipe | None = None,
) -> Run:
    """Trains with real processes, one of which may come or go; returns the outcome.

    Args:
        problem: what.
        change: whether the last of the problem's nodes comes, or goes, or neither.
        nodes: how many the job begins with; with "out" the last one comes on top of them.
        change_at: step after which it comes or goes.
        last: step after which the job ends.
        every: steps between measurements; 0: nothing is measured.
        folder: an empty one, for event logs.
        joiner_recipe: how the node that comes builds its model, if not like the others.

    Raises:
        RuntimeError: a node failed, or the event log tells of other comings and goings.
    """
    if every and change and change_at % every:
        raise ValueError(
            f"a change after step {change_at} is not seen by measurements every {every} steps: use a multiple"
        )
    began = time.monotonic()
    context = workers.context(*PRELOAD)
    run = Run(change)
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        size = nodes + {"": 0, "out": 1, "in": -1}[change]
        scheduler, needed = workers.Scheduler(str(folder / "chain.sqlite"), log_dir=str(folder)), nodes
        stack.callback(scheduler.stop)
        scheduler.start(needed)
        endpoint = scheduler.endpoint
        fleet = _Fleet(folder)
        stack.callback(fleet.kill)
        for number in range(nodes + (change == "out")):
            comes = number == nodes
            goes = change == "in" and number == nodes - 1
            name = f"node{number + 1}"
            measured = every or (change_at if change == "out" else 0)
            part = Part(
                name, endpoint, str(folder), last, size, measured if number == 0 else 0, change_at if goes else 0
            )
            recipe = joiner_recipe if comes and joiner_recipe is not None else problem.recipe
            share = problem.shares[-1 if comes else number]
            fleet.workers[name] = workers.Worker(context, node, part, recipe, share, number)
        judge = Judge(problem) if every else None
        fleet.await_all("ready", len(fleet.workers))
        for name in [f"node{n + 1}" for n in range(nodes)]:
            fleet.let_in(name)
        measured_at: list[tuple[int, float, float]] = []

        def learned(step: int, arrays: Mapping[str, Any]) -> None:
            nonlocal needed
            if change == "in" and needed == nodes:
                needed = nodes - 1
                scheduler.kill()
                scheduler.start(needed)
            if change == "out" and step == change_at:
                fleet.workers[f"node{nodes + 1}"].pipe.send("go")
            run.states[step] = _digest(arrays)
            if judge is not None:
                measured_at.append((step, *judge(arrays)))

        fleet.await_all("bye", len(fleet.workers), learned)
    _finish(run, fleet, problem, nodes, measured_at)
    run.seconds = time.monotonic() - began
    return run


def _digest(arrays: Mapping[str, Any]) -> str:
    """Returns a hash of named arrays, which is equal exactly if their bytes are."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].tobytes())
    return digest.hexdigest()


def _finish(
    run: Run, fleet: _Fleet, problem: Problem, nodes: int, measured: Sequence[tuple[int, float, float]]
) -> None:
    """Fills in the facts known at the end of a run and from its event logs."""
    steps = tuple(step for step, _, _ in measured)
    run.curve = Curve(steps, tuple(value for _, value, _ in measured))
    run.newcomers = Curve(steps, tuple(value for _, _, value in measured))
    records = Tail(fleet.folder).poll()
    run.contributors = contributors_by_step(records, "node1")
    run.changed = change_in(run.contributors)
    run.rewired = rewirings(records, "node1", run.changed)
    expected = {"": {nodes}, "out": {nodes, nodes + 1}, "in": {nodes, nodes - 1}}[run.change]
    if set(run.contributors.values()) != expected:
        raise RuntimeError(
            f"steps had {sorted(set(run.contributors.values()))} contributing nodes, expected {sorted(expected)}: "
            f"{fleet.troubles(records)}"
        )
    byes = {name: rest for name, *rest in fleet.said["bye"]}
    stayed = [rest for rest in byes.values() if rest[0] == max(run.contributors)]
    run.equal = len(stayed) >= min(expected) and len({rest[1] for rest in stayed}) == 1
    if run.change == "out":
        run.transfer = transfer_facts(records, f"node{nodes + 1}") | byes[f"node{nodes + 1}"][3]
        run.transfer["base_equal"] = len({rest[2] for rest in byes.values()}) == 1


class _Fleet:
    """All processes of one run, and their messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: dict[str, workers.Worker] = {}
        self.said: dict[str, list[tuple[Any, ...]]] = {}
        self._tail = Tail(folder)
        self._ended: set[str] = set()

    def let_in(self, name: str) -> None:
        """Starts a node's join; returns when the scheduler has welcomed the node."""
        self.workers[name].pipe.send("go")
        deadline = time.monotonic() + DEADLINE_S
        while not any(r.name == "welcomed" and r.node == name for r in self._tail.poll()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name} was not welcomed by the scheduler within {DEADLINE_S:g} s: see {self.folder}"
                )
            wait([w.pipe for w in self.workers.values()], 0.01)

    def await_all(self, kind: str, count: int, learned: Callable[[int, Any], None] | None = None) -> None:
        """Waits until `count` nodes have sent a message of this kind; takes in other messages meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.said.get(kind, [])) < count:
            pipes = {w.pipe: n for n, w in self.workers.items() if n not in self._ended}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"no node said a word for {DEADLINE_S:g} s while {kind!r} was awaited: {self.folder}"
                )
            deadline = time.monotonic() + DEADLINE_S
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._hear(pipe, pipes[pipe], learned)

    def _hear(self, pipe: Connection, name: str, learned: Callable[[int, Any], None] | None) -> None:
        try:
            said = pipe.recv()
        except EOFError as error:
            process = self.workers[name].process
            process.join(5)
            raise RuntimeError(f"{name} ended with exit status {process.exitcode} and without a word") from error
        if isinstance(said, Exception):
            raise RuntimeError(f"{name} failed: {said}")
        kind, *rest = said
        if kind == "learned" and learned is not None:
            learned(*rest)
            return
        if kind == "bye":
            self._ended.add(name)
        self.said.setdefault(kind, []).append(tuple(rest))

    def troubles(self, records: Iterable[Record]) -> str:
        """Returns the logged deaths, removals and errors in words."""
        kinds = ("death", "fenced", "error", "suspect", "refused")
        lines = [str(r) for r in records if r.name in kinds]
        return "; ".join(lines[:5]) or "the event log tells of no trouble"

    def kill(self) -> None:
        """Ends all processes that still run."""
        for worker in self.workers.values():
            worker.kill(2.0 if len(self._ended) == len(self.workers) else 0.0)  # where all is said they end
