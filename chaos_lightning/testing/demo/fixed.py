"""Part of `chaos-lightning demo` about a batch of fixed size: one to four members, a slow one among them, one killed.

Theory of operation. It is a job of its own, in a folder of its own. Its nodes have the setting `batch=fixed:N` in their
commands, and add a pause to each sample, one of them a longer one. Meanwhile plain Lightning trains the same in one
process with a batch of N. The lines of the proof read in the event logs how many samples each step had, who computed
how many of them, and each step's loss.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from chaos_lightning.machine.units import duration
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import folds
from chaos_lightning.observe.fields import node_of
from chaos_lightning.observe.timeline import SlotFact
from chaos_lightning.testing.demo import ALONE, acts, proof
from chaos_lightning.testing.demo.nodes import Cast, places_for
from chaos_lightning.testing.demo.proof import Check, Evidence
from chaos_lightning.testing.demo.stage import Pace, Scenario, Stage

FOLDER = "batch"
"""Name of the part's folder in that of the demo."""
FIRST, LEAVES, KILLED, SLOW = NODES = "batch-1", "batch-2", "batch-3", "batch-4"
SAMPLES = 24
"""Samples of a step."""
SAMPLE_S, SLOWNESS = 0.003, 5
"""Seconds that are added to each sample, and how much longer the slow node's are."""
ARGUMENTS = (
    "--layers=2", "--width=64", f"--batch-size={SAMPLES}", "--text=48000", "--pause=0.01", "--in-order",
    "--step-losses", f"--sample-s={SAMPLE_S}",
)  # fmt: skip
PACE = Pace(rest_steps=10)


def shares(slot: SlotFact) -> dict[str, int]:
    """Returns how many samples of a step each node computed."""
    return {node_of(member).removesuffix("-0"): round(weight) for member, weight in slot.contributors}


def less(slot: SlotFact) -> bool:
    """Returns whether all four nodes shared a step, and the slow one had fewer samples than each of the others."""
    found = shares(slot)
    return found.keys() == set(NODES) and 0 < found[SLOW] < min(found[name] for name in NODES if name != SLOW)


def words(slot: SlotFact) -> str:
    return ", ".join(f"{name} {count}" for name, count in shares(slot).items())


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def pace(slots: Sequence[SlotFact]) -> str:
    """Returns the median time between slots as text."""
    return duration(statistics.median([b.first - a.first for a, b in pairwise(slots)] or [0.0]))


# ------------------------------------------------------------------ acts


def newest(stage: Stage[Cast]) -> list[SlotFact]:
    """Returns the steps among the newest slots, oldest first."""
    return [slot for slot in stage.timeline.recent(PACE.rest_steps) if slot.kind == "step"]


def first_starts(stage: Stage[Cast]) -> None:
    stage.say("do", f"another job, whose steps have {SAMPLES} samples whoever is there: {stage.nodes.words(FIRST)}")
    stage.nodes.start(FIRST)
    stage.joined(FIRST)
    stage.rest()
    stage.say("good", f"{FIRST} trains alone; {stage.progress()}")


def others_join(stage: Stage[Cast]) -> None:
    stage.say("do", f"{', '.join(NODES[1:])} start; {SLOW} needs {SLOWNESS} times as long for a sample")
    for name in NODES[1:]:
        stage.nodes.start(name)
    acts.one_process_starts(stage)
    acts.are_in(stage, NODES[1:], 0.0)


def slow_one_gets_less(stage: Stage[Cast]) -> None:
    stage.wait(f"steps of four in which {SLOW} has fewer samples", lambda: any(map(less, newest(stage))))
    stage.rest()
    stage.say("good", f"samples of a step by measured speed: {words(newest(stage)[-1])}; {stage.progress()}")


def one_leaves(stage: Stage[Cast]) -> None:
    _, member = stage.worker(LEAVES)
    stage.say("do", f"Ctrl+C at the torchrun of {LEAVES}")
    stage.nodes.ask(LEAVES, signal.SIGINT)
    stage.without(member)
    stage.rest()
    stage.say("good", f"it left, and samples of a step are {words(newest(stage)[-1])}; {stage.progress()}")


def all_end(stage: Stage[Cast]) -> None:
    acts.finish(stage, beside=(ALONE,))
    acts.one_process_ends(stage)
    stage.exits(LEAVES)


# ------------------------------------------------------------------ what it proves


def one_batch(e: Evidence) -> Check:
    """Checks that each step has the chosen number of samples with one to four members, and the last one of an epoch
    what is left.
    """
    uses, totals = folds.samples(e.timeline).values(), [sum(shares(slot).values()) for slot in e.steps]
    rest = {use.length % SAMPLES for use in uses if use.length}
    others = [total for total in totals if total != SAMPLES]
    sizes = {len(slot.contributors) for slot in e.steps}
    text = f"{len(totals) - len(others)} steps of {SAMPLES} samples by {listed(sizes)} members"
    text += f", {len(others)} of {listed(set(others))} at the ends of {len(uses)} epochs" if others else ""
    good = set(others) <= rest and len(others) <= len(uses) and sizes == set(range(1, len(NODES) + 1))
    return Check(f"a step has {SAMPLES} samples, whoever is there", text, good)


def by_speed(e: Evidence) -> Check:
    what = f"{SLOW}, which needs {SLOWNESS} times as long for a sample, gets fewer than each other"
    four = [slot for slot in e.steps if len(slot.contributors) == len(NODES) and sum(shares(slot).values()) == SAMPLES]
    slower, faster = [slot for slot in four if not less(slot)], [slot for slot in four if less(slot)]
    text = "; then ".join(f"{words(some[0])} at {pace(some)} a step" for some in (slower, faster) if some)
    return Check(what, text or "no step of all four", bool(faster))


def killed(e: Evidence) -> Check:
    what, recovery = f"SIGKILL of {KILLED}: the others compute that step's samples", e.recovery(KILLED, "sigkill")
    after = next((slot for slot in e.steps if recovery is not None and slot.first > recovery.at), None)
    if recovery is None or recovery.seconds is None or after is None:
        return Check(what, "the logs show no step after it", False)
    text = f"all {recovery.survivors} held step {after.step} after {duration(recovery.seconds)}: {words(after)}"
    return Check(what, text, e.code(KILLED) == -9 and recovery.survivors >= 2 and KILLED not in shares(after))


def audited(e: Evidence) -> Check:
    findings = auditing.audit(e.folder / "events")
    text = "; ".join([*auditing.verdict(findings).splitlines()[-1:], *auditing.violations(findings)[:3]])
    return Check("audit of its logs", text, all(finding.verdict == auditing.OK for finding in findings))


def prove(e: Evidence) -> list[Check]:
    """Returns all checks of this part."""
    checks = [one_batch(e), by_speed(e), killed(e), *proof.losses(e), proof.no_step_lost(e), proof.samples(e)]
    checks += [proof.ended(e, KILLED), audited(e)]
    return [check._replace(what=f"fixed batch: {check.what}") for check in checks]


# ------------------------------------------------------------------ the part


def scenario(folder: Path, *arguments: str) -> Scenario[Cast]:
    """Returns the scenario of this part.

    Args:
        folder: Folder of the demo.
        arguments: Further arguments of the training script.
    """
    cast = Cast(
        folder / FOLDER,
        (*ARGUMENTS, *arguments),
        min_nodes=1,
        places=places_for(FIRST),
        conf=f"batch=fixed:{SAMPLES},",
        own={SLOW: (f"--sample-s={SLOWNESS * SAMPLE_S}",)},
    )
    return Scenario(
        name="demo",
        nodes=cast,
        acts=(
            first_starts,
            others_join,
            slow_one_gets_less,
            partial(acts.kill, name=KILLED),
            one_leaves,
            all_end,
        ),
        prove=prove,
        pace=PACE,
        endings=(cast.close,),
    )
