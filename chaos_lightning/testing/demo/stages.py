"""`chaos-lightning demo-pipeline`: six devices train a model in pipeline stages, are killed, frozen and brought back.

Theory of operation. No device has memory for the whole model, so six torchrun nodes train it as three pipelines of two
stages (`train_stages.py`). One node dies in the middle of a backward pass, another one at any moment, a third freezes;
the dead ones come back; then all leave, each with its layers in a file, and come back. Meanwhile the same
script trains in one process without interruption. From the event logs alone it is judged that both have the same loss
in each step, and what each change cost: policy and reason, micro-batches run again, bytes moved, seconds.
"""

from __future__ import annotations

import json
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.observe.fields import integer
from chaos_lightning.observe.spans import merge, size
from chaos_lightning.planning.pipelines.files import to_dict
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.testing.demo import ALONE, acts, proof
from chaos_lightning.testing.demo.nodes import Cast, places_for
from chaos_lightning.testing.demo.proof import Check, Evidence
from chaos_lightning.testing.demo.stage import Accelerator, Directory, Keep, Pace, Quick, Scenario, Stage, play
from chaos_lightning.testing.edge.runner import prepare

DEVICES = tuple(f"dev-{i}" for i in range(1, 7))
IN_BACKWARD, KILLED, FROZEN = "dev-2", "dev-5", "dev-3"
SHAPE = "3 x 2"
VOCABULARY = 256


LAYERS, WIDTH, BLOCK, BATCH, MICRO_BATCHES = 6, 64, 64, 2, 6
DEVICE_MEMORY = 10 << 20
"""Bytes for layers on each device: four of six layers, or three, and no more."""
ARGUMENTS = (
    f"--layers={LAYERS}", f"--width={WIDTH}", f"--batch-size={BATCH}", "--text=12000", "--pause=0.1",
    f"--device-memory={DEVICE_MEMORY}",
)  # fmt: skip
QUICK = Pace(rest_steps=3)
FREEZE_S = 2.5


def gpt_job(
    layers: int, width: int, block: int, batch: int, micro_batches: int, memory_nbytes: int, itemsize: int = 4
) -> TrainingJob:
    """Returns a job with computed costs of the small GPT's layers; measured ones would be noisy with six processes on
    few cores.

    Args:
        layers: Number of blocks.
        width: Width of each block.
        block: Tokens of a sample.
        batch: Samples of a micro-batch.
        micro_batches: Micro-batches of a step.
        memory_nbytes: Memory for layers on a device.
        itemsize: Bytes of a number.
    """
    body, table, wide = 12 * width**2 + 13 * width, VOCABULARY * width, itemsize * block * batch * width
    numbers = [body] * layers
    numbers[0] += table + block * width
    numbers[-1] += table + 2 * width
    rows = (
        Layer(
            name=f"blocks.{i}",
            forward_s=0.004,
            backward_s=0.008,
            parameter_nbytes=itemsize * own,
            gradient_nbytes=itemsize * own,
            optimizer_nbytes=2 * itemsize * own,
            activation_nbytes=16 * wide,
            workspace_nbytes=6 * wide,
            output_nbytes=wide if i + 1 < layers else 0,
        )
        for i, own in enumerate(numbers)
    )
    device = Device(name="d", memory_nbytes=memory_nbytes)
    return TrainingJob(
        layers=tuple(rows), devices=(device,), micro_batches=micro_batches, samples=batch, tied_nbytes=itemsize * table
    )


# ------------------------------------------------------------------ acts


def pipelines(stage: Stage[Cast]) -> Record | None:
    """Returns the event about the latest pipelines."""
    return next((r for r in reversed(stage.records) if r.name == "pipelines" and r.get("view")), None)


def in_shape(stage: Stage[Cast], shape: str = SHAPE) -> None:
    """Waits until the devices have formed pipelines of this shape, and for some undisturbed steps."""

    def formed() -> Record | None:
        last = pipelines(stage)
        return last if last is not None and last.get("shape") == shape else None

    stage.wait(f"pipelines of shape {shape}", formed)
    stage.rest()
    stage.say("good", f"pipelines x stages: {shape}; {stage.progress()}")


def dies_in_backward(stage: Stage[Cast]) -> None:
    name = IN_BACKWARD
    _, member = stage.worker(name)
    stage.say("do", f"kill -9 for {name} in the middle of its next backward pass")
    at, ask = time.time(), stage.nodes.folder / f"strike-{name}-0"
    ask.touch()
    struck = stage.event("fault_injected", name, after=at)
    stage.nodes.kill_agent(name)
    ask.unlink()
    acts.others_go_on(stage, member, struck.t)


def freezes(stage: Stage[Cast]) -> None:
    """Freezes a device once others own its layers, too: for the last owner of a layer the job would wait."""
    _, member = stage.worker(FROZEN)

    def spared() -> bool:
        last = pipelines(stage)
        owned = {m: {n for a, b in spans for n in range(a, b)} for m, spans in last["layers"].items()} if last else {}
        return member in owned and owned.pop(member) <= set().union(*owned.values())

    stage.wait(f"other owners of {FROZEN}'s layers", spared)
    stage.rest()
    acts.freeze(stage, FROZEN, FREEZE_S)


def devices_come_back(stage: Stage[Cast], names: Sequence[str]) -> None:
    at = acts.start_again(stage, names)
    acts.are_in(stage, names, at)
    in_shape(stage)


def all_leave(stage: Stage[Cast]) -> None:
    at = time.time()
    stage.say("do", f"SIGTERM for all {len(DEVICES)} at once")
    for name in DEVICES:
        stage.nodes.ask(name, signal.SIGTERM)
    for name in DEVICES:
        stage.event("left", name, after=at)
    kept = [r for r in stage.records if r.name == "kept" and r.own and r.t > at]
    steps = sorted({integer(r["step"]) for r in kept})
    # A device that got the signal a step before the others may have left alone: they hold all layers that it held.
    words = f"{len(kept)} of them kept the layers that they hold in files, at step {', '.join(map(str, steps))}"
    stage.judge(len(steps) == 1, words)
    acts.scheduler_ends(stage, DEVICES, "no device runs any more")


def all_come_back(stage: Stage[Cast]) -> None:
    at = time.time()
    devices_come_back(stage, DEVICES)
    resumed = [r for r in stage.records if r.name == "resumed_kept" and r.t > at]
    stage.say("good", f"{len(resumed)} of them went on from their files")


# ------------------------------------------------------------------ what it proves


def decided(e: Evidence, at: float) -> Record | None:
    """Returns the first event, at time `at` or later, in which new pipelines were chosen; None if there is none."""
    return next((r for r in e.records if r.name == "pipelines" and r.t >= at and r.get("view")), None)


def cost(e: Evidence, since: float, until: float) -> str:
    """Returns a text about one change of pipelines: policy, reason, micro-batches run again, bytes moved."""
    choice = decided(e, since)
    why = f"{choice.get('shape')}: {choice.get('reason')}" if choice is not None else "pipelines as before"
    during = [r for r in e.records if since <= r.t <= until]
    spans = [tuple(span) for r in during if r.name == "units_dropped" for span in r["micro_batches"]]
    nbytes = sum(integer(r["nbytes"]) for r in during if r.name == "part_pulled")
    planned = integer(choice.get("moved_nbytes")) if choice is not None else 0
    moved = f"{amount(nbytes)} of layers moved ({amount(planned)} planned)" if nbytes or planned else "no layer moved"
    return f"{why}; {size(merge(spans))} micro-batches run again; {moved}"


def staged(e: Evidence) -> Check:
    what = f"six devices train as {SHAPE} a model that none of them has room for"
    choices = [r for r in e.records if r.name == "pipelines" and r.get("layers")]
    count = max((end for r in choices for spans in r["layers"].values() for _, end in spans), default=0)
    most = max((sum(b - a for a, b in spans) for r in choices for spans in r["layers"].values()), default=0)
    views = {str(r["view"]) for r in choices if r.get("shape") == SHAPE}
    slots = [s for s in e.steps if len(s.who) == len(DEVICES)]
    text = (
        f"{len(views)} views of this shape; {len(slots)} steps of six; a device held at most {most} of {count} layers"
    )
    return Check(what, text, bool(views) and bool(slots) and 0 < most < count)


def lost(e: Evidence, name: str, kind: str, phase: str, what: str) -> Check:
    """Checks that a device was struck in this phase of its step, and that at least two others went on at the same
    step.
    """
    found = e.recovery(name, kind)
    if found is None or found.recovered is None or found.resumed is None:
        return Check(what, "the logs show no step after it", False)
    text = f"all {found.survivors} others held the next step after {duration(found.recovered - found.at)}"
    fine = found.phase == phase and found.survivors >= 2
    return Check(what, f"{text}; {cost(e, found.at, found.recovered)}", fine)


def froze(e: Evidence) -> Check:
    check = lost(e, FROZEN, "sigstop", "", f"{FROZEN} freezes, is put out, wakes and comes in again")
    lives = e.lives(FROZEN)
    again = [b for a, b in pairwise(lives) if a.end == "fenced" and a.source == b.source]
    back = e.join(lambda j: bool(again) and j.member == again[0].member)
    text = "in the same process" if back is not None and back.contributed is not None else "it did NOT come back"
    return check._replace(found=f"{check.found}; {text}", ok=check.ok and text == "in the same process")


def came_back(e: Evidence, name: str) -> Check:
    what = f"{name} comes back, and gets layers"
    lives = e.lives(name)
    if len(lives) < 2 or lives[1].joined is None:
        return Check(what, "it did not", False)
    joined, member = lives[1].joined, lives[1].member
    held = e.first("pipelines", wanted=lambda r: member in r.get("layers", {}))
    step = next((s for s in e.steps if held is not None and s.first > held.t and member in s.who), None)
    if held is None or step is None:
        return Check(what, f"it joined {duration(joined - lives[1].born)} after its hello, and has no layers", False)
    return Check(what, f"layers from step {step.step} on: {cost(e, held.t, step.complete)}", True)


def parted(e: Evidence) -> Check:
    what = "all six leave, keep all layers in files, and go on from there"
    kept = [r for r in e.records if r.name == "kept" and r.own]
    resumed = [r for r in e.records if r.name == "resumed_kept" and r.own]
    if not kept or not resumed:
        return Check(what, f"{len(kept)} kept theirs, {len(resumed)} went on from it", False)
    at = sorted({integer(r["step"]) for r in kept})
    first = next((s for s in e.steps if s.first > kept[-1].t), None)
    went = f"{len(resumed)} went on from them at step {first.step if first else None}"
    text = f"{len(kept)} kept theirs at step {', '.join(map(str, at))}, {went}"
    return Check(what, text, len(at) == 1 and first is not None and first.step == at[0] + 1)


def equal_tensors(e: Evidence) -> Check:
    """Checks that all devices that own a tensor ended with the same values, by the hashes in their final files."""
    found: dict[str, set[str]] = defaultdict(set)
    files = sorted(e.folder.glob("final-dev-*.json"))
    for path in files:
        for name, value in json.loads(path.read_text(encoding="utf-8"))["tensors"].items():
            found[name].add(value)
    unequal = [name for name, values in found.items() if len(values) > 1]
    text = f"{len(found)} tensors at {len(files)} devices; owners differ in {len(unequal)}"
    return Check("final weights are bit-identical at all owners", text, bool(found) and not unequal)


def prove(e: Evidence) -> list[Check]:
    """Returns all checks of this demo."""
    return [
        staged(e),
        lost(e, IN_BACKWARD, "sigkill", "backward", f"SIGKILL of {IN_BACKWARD} in a backward pass costs no step"),
        lost(e, KILLED, "sigkill", "", f"SIGKILL of {KILLED} costs no step"),
        froze(e),
        *(came_back(e, name) for name in (IN_BACKWARD, KILLED)),
        parted(e),
        proof.finished(e, DEVICES, "the job finishes with all six"),
        proof.no_step_lost(e),
        proof.samples(e),
        proof.one_chain(e),
        *proof.losses(e),
        proof.equal_hashes(e),
        equal_tensors(e),
        proof.learned(e),
        *proof.audited(e),
    ]


# ------------------------------------------------------------------ the command


def demo_pipeline(
    directory: Directory = None, quick: Quick = False, keep: Keep = False, accelerator: Accelerator = "cpu"
) -> None:
    """Train a model in stages while devices die, freeze, come back, all leave and return; then prove it was exact."""
    folder: Path = prepare(directory, "demo")
    job = gpt_job(LAYERS, WIDTH, BLOCK, BATCH, MICRO_BATCHES, DEVICE_MEMORY)
    (folder / "profile.json").write_text(json.dumps(to_dict(job)))
    arguments = (*ARGUMENTS, f"--profile={folder / 'profile.json'}", f"--accelerator={accelerator}")
    script = "chaos_lightning.testing.demo.train_stages"
    cast = Cast(folder, arguments, places=places_for(DEVICES[0]), script=script)
    scenario = Scenario(
        name="demo-pipeline",
        nodes=cast,
        acts=(
            partial(acts.founders_start, founders=DEVICES),
            in_shape,
            dies_in_backward,
            partial(acts.kill, name=KILLED),
            freezes,
            acts.one_process_starts,
            partial(devices_come_back, names=(IN_BACKWARD, KILLED)),
            all_leave,
            all_come_back,
            partial(acts.finish, beside=(ALONE,)),
            acts.one_process_ends,
        ),
        prove=prove,
        pace=QUICK if quick else Pace(rest_steps=6),
        endings=(cast.close,),
    )
    play(scenario, folder, keep=keep)
