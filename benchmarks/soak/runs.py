"""Runs the soak, and the same training without faults; checks the records of each run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.members import fingerprint
from benchmarks.soak.checks import Parting, Verdict, check, read
from benchmarks.soak.crew import Crew, Driver
from benchmarks.soak.links import LONGEST_BLINK_S, PARTING, Hurt, Links
from benchmarks.soak.member import HELD_OUT, digits, make
from benchmarks.soak.schedulers import SETTLED_S, control
from benchmarks.workers import scheduler

C = TypeVar("C", bound=Crew)
HEARD_S = 1.0
"""A scheduler that has heard a member finds it gone within this time."""


@dataclass
class Run:
    """Results of one run of the soak."""

    verdict: Verdict
    curve: list[tuple[float, float]]
    """(epochs, training loss), from checkpoints."""
    final: dict[str, float]
    """Loss on training and held-out samples, and accuracy on the latter."""
    differing: int = 0
    """Members whose final checkpoint is not the others'."""


def evaluate(path: Path) -> tuple[dict[str, float], str]:
    """Returns (losses and accuracy of a checkpoint, SHA-256 of its state)."""
    import torch
    from torch.nn.functional import cross_entropy

    model, optimizer = make(0)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    images, labels = digits()
    with torch.no_grad():
        out = model(images)
    train, held = out[:-HELD_OUT], out[-HELD_OUT:]
    return {
        "training loss": float(cross_entropy(train, labels[:-HELD_OUT])),
        "held-out loss": float(cross_entropy(held, labels[-HELD_OUT:])),
        "held-out accuracy": float((held.argmax(1) == labels[-HELD_OUT:]).float().mean()),
    }, fingerprint(model, optimizer)


def parting(hurt: Hurt, struck: Sequence[tuple[int, str, str]]) -> Parting | None:
    """Returns how a fault of links cut members off, given the faults of schedulers (ns, kind, who); None if it cut
    nobody off.

    A blink is judged by how long it was. On a busy machine this process may stand still between a cut and its end.
    """
    stop = hurt.stop or time.monotonic_ns()
    taking_over = (hurt.start - int(SETTLED_S * 1e9), hurt.start + int(HEARD_S * 1e9))
    replaced = any(kind.startswith("scheduler") and taking_over[0] < ns < taking_over[1] for ns, kind, _ in struck)
    if hurt.kind not in PARTING:
        parted = bool(hurt.part) and stop - hurt.start > LONGEST_BLINK_S * 1e9
        return Parting(hurt.kind, hurt.part, hurt.start, stop, undecided=True) if parted else None
    cut_short = hurt.stop - hurt.start < hurt.seconds * 0.95e9
    return Parting(hurt.kind, hurt.part, hurt.start, stop, cut_short, hurt.kind == "island" and replaced)


def gather(crew: Crew, length: int, hurts: Sequence[Hurt] = (), struck: Sequence[tuple[int, str, str]] = ()) -> Run:
    """Checks the journals of a run, and evaluates its checkpoints."""
    partings = [declared for h in hurts if (declared := parting(h, struck))]
    verdict = check(read(crew.folder / "journals"), length, crew.freezes, crew.killed, partings)
    curve: dict[float, float] = {}
    finals: dict[str, dict[str, float]] = {}
    for path in sorted((crew.folder / "checkpoints").glob("*.pt")):
        label, head, _ = path.stem.split("-", 2)
        if head not in verdict.used:
            continue  # its writer's last word, which the job did not keep
        epochs = round(verdict.used[head] / length, 4)
        if label == "step" and epochs in curve:
            continue
        losses, sha = evaluate(path)
        if sha != verdict.headers[head]["sha"]:
            verdict.problems[1].append(f"checkpoint {path.name} is not the state that was hashed at its header")
        curve[epochs] = losses["training loss"]
        if label == "final":
            finals[sha] = losses
    final = next(iter(finals.values()), {})
    return Run(verdict, sorted(curve.items()), final, max(0, len(finals) - 1))


def undisturbed(folder: Path, seed: int, world: int, epochs: int, length: int) -> Run:
    """Runs the same training without faults."""
    with scheduler(world) as endpoint:
        crew = Crew(endpoint, folder, seed, epochs, 0.0)
        try:
            for index in range(world):
                crew.start(f"u{index}")
            end = time.monotonic() + 60 + 30 * epochs
            while crew.alive:
                crew.turn()
                if time.monotonic() > end or crew.undeclared:
                    raise RuntimeError(f"undisturbed training of {world} stuck at step {crew.step}: {crew.undeclared}")
        finally:
            crew.close()
    return gather(crew, length)


class Standstill:
    """Detects that a job makes no progress for too long: no step, or after the job's end no process that ends."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: tuple[bool, int] | None = None
        self._since = 0.0

    def lasts(self, now: float, over: bool, count: int) -> bool:
        """Returns whether the job has made no progress for too long; `count` is the last step, or after the end the
        running processes.
        """
        if (over, count) != self._seen:
            self._seen, self._since = (over, count), now
        return now - self._since > self._patience_s


def disturbed(folder: Path, args: argparse.Namespace, epochs: int, make: type[C]) -> tuple[C, Driver, float]:
    """Runs the soak with its faults; returns the processes, the driver of faults and the duration, s.

    Args:
        folder: Folder for all files that are kept.
        args: Arguments of the soak.
        epochs: Number of epochs that members train.
        make: Class of the crew.
    """
    from chaos_lightning.events.events import EventLog
    from chaos_lightning.testing.edge.relay import LinkRelay

    logs = str(folder / "events")
    with (
        EventLog.in_directory(logs, "soak", role="harness") as log,
        LinkRelay() if args.links_every_s else nullcontext() as relay,
        control(args, folder, log, ways=relay is not None) as schedulers,
    ):
        relayed = relay.address if relay else ""
        crew = make(schedulers.endpoint, folder, args.seed, epochs, args.pace_s, relayed, control=schedulers)
        links = Links(relay, log, schedulers.endpoint, crew.ways, args.seed, args.links_every_s, crew.kept, crew.deck)
        try:
            for index in range(crew.founders):
                crew.start(f"n{index}")
            patience = time.monotonic() + 60
            while len(crew.able()) < crew.founders and time.monotonic() < patience:
                crew.turn()
            began, told = time.monotonic(), time.monotonic()
            driver = Driver(crew, log, links, args.seed, args.every_s)
            watch = Standstill(args.stuck_s)
            while crew.alive:
                crew.turn()
                now = time.monotonic()
                if crew.over or crew.ending:
                    links.calm()
                    schedulers.calm()
                    for process in crew.alive.values():
                        if process.thaw_ns:
                            crew.wake(process)
                else:
                    driver.turn()
                    schedulers.turn(calm=links.calm_now([p.name for p in crew.alive.values()]))
                if watch.lasts(now, crew.over, len(crew.alive) if crew.over else crew.step):
                    names = ", ".join(f"{p.name} ({p.pid})" for p in crew.alive.values())
                    crew.undeclared.append(f"no progress for {args.stuck_s:g} s at step {crew.step}; alive: {names}")
                    break
                if now - told > 30:
                    told = now
                    print(f"    {now - began:.0f} s: step {crew.step}, {len(crew.alive)} processes", flush=True)
            return crew, driver, time.monotonic() - began
        finally:
            crew.close()
