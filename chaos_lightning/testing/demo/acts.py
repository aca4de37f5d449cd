"""Acts that several demos share: nodes start, join, die, freeze and return, the scheduler ends, the job finishes.

Theory of operation. An act does something and says so, waits in the event logs for what must follow, and says what that
was. It lets some steps pass at its end, so that the next one has an undisturbed before.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.observe.fields import integer, number
from chaos_lightning.testing.demo import ALONE
from chaos_lightning.testing.demo.nodes import Cast
from chaos_lightning.testing.demo.proof import words_of
from chaos_lightning.testing.demo.stage import Stage


def founders_start(stage: Stage[Cast], founders: Sequence[str]) -> None:
    nodes = stage.nodes
    stage.say("do", f"{len(founders)} machines start: {nodes.words(founders[0])}")
    for name in founders:
        if nodes.workers_of(name) > 1:
            stage.say("do", f"{name} has {nodes.workers_of(name)} workers: {nodes.words(name)}")
        nodes.start(name)
    stage.say("seen", "each imports torch and Lightning first; the first one also starts the job's scheduler")
    for name in founders:
        for worker in range(nodes.workers_of(name)):
            joined = stage.joined(name, worker=worker)
            which = f"{name}, worker {worker}," if nodes.workers_of(name) > 1 else name
            stage.say("seen", f"{which} is in as {joined.get('role')} at step {joined.get('step')}")
    stage.rest()
    stage.say("good", f"{len(founders)} nodes train: {stage.progress()}")


def join(stage: Stage[Cast], name: str) -> None:
    before = stage.step
    stage.say("do", f"{name} starts: {stage.nodes.words(name).split()[0]}, as above, while the others train")
    stage.nodes.start(name)
    joined = stage.joined(name)
    pulled = stage.event("pull_done", name)
    stage.say(
        "good",
        f"{name} joined: {amount(integer(pulled.get('nbytes')))} of training state in "
        f"{duration(number(pulled.get('seconds')))} from {len(joined.get('by_source') or ())} members; "
        f"the others committed {stage.step - before} steps while it started",
    )
    stage.rest()


def kill(stage: Stage[Cast], name: str) -> None:
    """Kills agent and worker of a node with SIGKILL, and waits until the other members train on."""
    worker, member = stage.worker(name)
    stage.say("do", f"kill -9 for {name}, agent and worker at once: the machine is gone")
    stage.nodes.kill(name, worker)
    others_go_on(stage, member, time.time())


def others_go_on(stage: Stage[Cast], member: str, at: float) -> None:
    """Waits until the other members commit a step after the death of `member` at time `at`."""
    slot = stage.step_without(member, at)
    stage.say("good", f"step {slot.step} was committed {duration(slot.first - at)} later by the others")
    stage.rest()


def freeze(stage: Stage[Cast], name: str, seconds: float) -> None:
    """Freezes a node's worker until the job has excluded it, wakes it, and waits until it has joined again."""
    worker, member = stage.worker(name)
    stage.say("do", f"worker 0 of {name} freezes (SIGSTOP) for {seconds:g} s")
    stage.nodes.freeze(name, worker, seconds)
    wakes = time.monotonic() + seconds
    try:
        stage.without(member)
        stage.say("seen", "it was put out; the others go on without it")
        stage.wait(f"{seconds:g} s to pass", lambda: time.monotonic() >= wakes)
    finally:
        woken = time.time()
        stage.nodes.thaw(name, worker)
    stage.say("do", f"worker 0 of {name} wakes")
    stage.event("fenced", name, after=woken)
    joined = stage.event("joined", name, after=woken)
    again = stage.worker(name)[0]
    stage.judge(
        again == worker,
        f"it was told that it is out, took over the others' state and joined again at step {joined.get('step')}, "
        f"in the same process {again}",
    )
    stage.rest()


def start_again(stage: Stage[Cast], names: Sequence[str]) -> float:
    """Starts ended nodes again; returns the time just before."""
    at = time.time()
    stage.say("do", f"{' and '.join(names)} start again, by the same commands")
    for name in names:
        stage.nodes.start(name)
    return at


def are_in(stage: Stage[Cast], names: Sequence[str], after: float) -> None:
    """Waits until each of these nodes has joined, at a time later than `after`."""
    for name in names:
        stage.say("seen", f"{name} is in at step {stage.joined(name, after=after).get('step')}")


def scheduler_ends(stage: Stage[Cast], names: Sequence[str], nothing: str) -> None:
    """Ends the scheduler of a job that all nodes have left, and waits until scheduler and nodes have ended."""
    nodes = stage.nodes
    scheduler = integer(fetch_status(nodes.endpoint, timeout_s=stage.pace.act_deadline_s)["pid"])
    stage.say("do", "SIGTERM for the scheduler, too: nothing of the job is to be left")
    nodes.strike(signal.SIGTERM, "scheduler", scheduler, "scheduler_sigterm")
    stage.wait("the end of the scheduler", lambda: not nodes.runs(scheduler))
    codes = stage.exits(*names)
    stage.judge(not any(codes.values()), f"{nothing}; exit codes: {words_of(codes)}")


def enough(folder: Path, epochs: int = 0) -> None:
    """Writes the file that tells training scripts in `folder` to stop after the present epoch, or after `epochs`
    epochs.
    """
    folder.mkdir(exist_ok=True)  # on a busy machine the script has not begun
    part = folder / "enough.part"  # they never read half of it
    part.write_text(str(epochs))
    part.rename(folder / "enough")


def finish(stage: Stage[Cast], beside: Collection[str] = ()) -> None:
    """Makes the job finish after its present epoch, and waits until its nodes have ended, except those in `beside`."""
    nodes = stage.nodes
    stage.say("do", "enough: the job ends with this epoch, by a vote as EarlyStopping's")
    enough(nodes.folder)
    staying = [name for name in nodes.nodes if name not in nodes.fallen | nodes.left | {*beside}]
    for name in staying:
        stage.event("finished", name)
    codes = stage.exits(*staying)
    stage.judge(not any(codes.values()), f"the job finished at step {stage.step}; exit codes: {words_of(codes)}")
    stage.look()


def one_process_starts(stage: Stage[Cast]) -> None:
    stage.say("do", "the same script starts in one process, too, and trains without interruption, for comparison")
    nodes = stage.nodes
    command = [sys.executable, "-m", *nodes.training(), "--alone", "--pause=0"]
    nodes.run(ALONE, command, {}, events=nodes.folder / ALONE)


def one_process_ends(stage: Stage[Cast]) -> None:
    epochs = 1 + max(epoch for slot in stage.timeline.chain() for _, epoch in slot.ledger)
    stage.say("do", f"the one process ends, once it has trained {epochs} epochs")
    enough(stage.nodes.folder / ALONE, epochs)
    stage.exits(ALONE)
