"""`chaos-lightning demo`: nodes join, die, freeze, all leave and return, each after recovery from the event before.

Theory of operation. What happens is a `FaultPlan` (`Size.plan`), as tests and the simulator take it; `chaos-lightning
demo --plan` prints it; what comes after it, the end of all members and the job's return, no simulator can tell. Every
act begins when its fault is due, and lets some steps pass, so that each has an undisturbed before and after. Then a
second job has a batch of fixed size (fixed.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import duration
from chaos_lightning.observe.charts import HOW
from chaos_lightning.observe.fields import node_of
from chaos_lightning.testing.demo import acts, fixed, proof
from chaos_lightning.testing.demo.nodes import Cast
from chaos_lightning.testing.demo.proof import Check, Evidence, consecutive, transfer
from chaos_lightning.testing.demo.stage import Accelerator, Directory, Keep, Pace, Quick, Scenario, Stage, play
from chaos_lightning.testing.edge.runner import prepare
from chaos_lightning.testing.faults import Action, Fault, FaultPlan


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Roles that nodes play in the demo.

    Attributes:
        founders, joins, killed, frozen, leaves: Nodes that found the job, join it, are killed, freeze and leave.
        several: A founder with two workers, of which the second one is killed.
        last: Node that leaves last.
        again: Nodes that are started again after that.
    """

    founders: tuple[str, ...]
    joins: str
    killed: str
    frozen: str
    leaves: str
    several: str
    last: str
    again: tuple[str, ...]

    @property
    def worker(self) -> str:
        """Name of the worker that the demo kills while its agent lives on."""
        return f"{self.several}-1"

    @property
    def founding(self) -> set[str]:
        """Names of the workers that found the job."""
        return {f"{n}-0" for n in self.founders} | {self.worker}


ROLES = Roles(
    founders=("edge-1", "edge-2", "edge-3"),
    joins="edge-4",
    killed="edge-2",
    frozen="edge-3",
    leaves="edge-1",
    several="edge-3",
    last="edge-4",
    again=("edge-4", "edge-1"),
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Pace and training arguments of the demo: full size or quick.

    Attributes:
        pace: Pace of its acts.
        freeze_s: Seconds for which the frozen worker sleeps.
        arguments: Arguments of the training script.
    """

    pace: Pace = field(default_factory=Pace)
    freeze_s: float = 3.0
    arguments: tuple[str, ...] = ()

    @property
    def plan(self) -> FaultPlan:
        """Fault plan: who joins, dies, freezes and leaves, each triggered by the recovery from the fault before."""
        worker, joins, killed, frozen = ROLES.worker, ROLES.joins, ROLES.killed, ROLES.frozen
        long_s = self.freeze_s
        return FaultPlan(
            (
                Fault(action=Action.SIGKILL, node=worker, event="joined", event_node=worker),
                Fault(action=Action.JOIN, node=joins, event="death", event_node=worker),
                # The worker's agent starts it again; the demo does not.
                Fault(action=Action.JOIN, node=worker, event="death", event_node=worker),
                Fault(action=Action.SIGKILL, node=killed, event="joined", event_node=joins),
                Fault(action=Action.SIGSTOP, node=frozen, event="death", event_node=killed, seconds=long_s),
                Fault(action=Action.LEAVE, node=ROLES.leaves, event="fenced", event_node=frozen),
            )
        )


FULL = Size(arguments=("--layers=4", "--width=128", "--batch-size=4", "--text=45000"))
QUICK = Size(
    pace=Pace(rest_steps=8),
    freeze_s=2.0,
    arguments=("--layers=2", "--width=64", "--batch-size=4", "--text=24000", "--pause=0.02"),
)


# ------------------------------------------------------------------ acts


def strike(stage: Stage[Cast], fault: Fault) -> None:
    """Waits until a fault of the plan is due, and performs it."""
    stage.due(fault)
    if fault.node == ROLES.worker:
        _AT_WORKER[fault.action](stage)
    elif fault.action == Action.SIGSTOP:
        acts.freeze(stage, fault.node, fault.seconds)
    else:
        _AT_NODE[fault.action](stage, fault.node)


def kill_worker(stage: Stage[Cast]) -> None:
    node = ROLES.several
    pid, member = stage.worker(node, 1)
    sibling = stage.worker(node)[1]
    stage.say("do", f"kill -9 for worker 1 of {node}; its agent and worker 0 live")
    stage.nodes.strike(signal.SIGKILL, ROLES.worker, pid)
    slot = stage.step_without(member, time.time())
    stage.judge(sibling in slot.who, f"step {slot.step} was committed by the others, its sibling {sibling} among them")


def worker_comes_back(stage: Stage[Cast]) -> None:
    node = ROLES.several
    dead = stage.first("fault_injected", lambda r: r.node == ROLES.worker)
    joined = stage.joined(node, worker=1, after=dead.t)
    pid, _ = stage.worker(node, 1)
    stage.say(
        "good",
        f"worker 1 of {node}, which its agent has started again, joined at step {joined.get('step')} in process "
        f"{pid}, {duration(joined.t - dead.t)} after its death",
    )
    stage.rest()


def leave(stage: Stage[Cast], name: str) -> None:
    _, member = stage.worker(name)
    stage.say("do", f"Ctrl+C at the torchrun of {name} (it was the first, and writes the checkpoints)")
    at = time.time()
    stage.nodes.ask(name, signal.SIGINT)
    left = stage.event("left", name)
    stage.without(member)
    stage.say("seen", f"{name} finished its step and left {duration(left.t - at)} later")
    stage.rest()
    code = stage.exits(name)[name]
    stage.judge(code == 0, f"its torchrun ended with exit code {code}")


_AT_NODE = {Action.JOIN: acts.join, Action.SIGKILL: acts.kill, Action.LEAVE: leave}
_AT_WORKER = {Action.SIGKILL: kill_worker, Action.JOIN: worker_comes_back}


def everybody_goes(stage: Stage[Cast]) -> None:
    """Makes the last two nodes leave, one after the other, and then ends the scheduler."""
    nodes, several, last = stage.nodes, ROLES.several, ROLES.last
    stage.say("do", f"SIGTERM for {several}, with both its workers, and then for {last}, the last one")
    nodes.ask(several, signal.SIGTERM)
    for worker in range(nodes.workers_of(several)):
        stage.event("left", several, worker=worker)
    stage.say("seen", f"{several} has left; {last} trains alone")
    stage.rest()
    nodes.ask(last, signal.SIGTERM)
    kept = stage.event("kept", last)
    stage.event("left", last)
    stage.say("good", f"{last} left, and kept the training state at step {kept.get('step')} in a file")
    acts.scheduler_ends(stage, (several, last), "nothing runs any more")


def all_begins_again(stage: Stage[Cast]) -> None:
    at = acts.start_again(stage, ROLES.again)
    what = "a member that goes on from the kept state"
    resumed = stage.first("resumed_kept", after=at, deadline_s=stage.pace.start_deadline_s, what=what)
    stage.say(
        "good",
        f"{resumed.node.removesuffix('-0')} founds the job at step {resumed.get('step')}, on the state that "
        f"{resumed.get('keeper')} kept",
    )
    acts.are_in(stage, ROLES.again, at)
    stage.rest()


# ------------------------------------------------------------------ what it proves


def founded(e: Evidence, roles: Roles) -> Check:
    names = roles.founders
    lives = {name: e.lives(name) for name in names}
    slots = [s for s in e.chain if {node_of(m) for m in s.who} == roles.founding]
    start = min((r.t for r in e.records), default=0.0)
    born = max((x[0].born for x in lives.values() if x), default=0.0)
    what = f"{len(names)} torchrun nodes start the job"
    if not slots:
        return Check(what, f"no step of {', '.join(names)} together", False)
    text = ", ".join(f"{name} as {x[0].role}" for name, x in lives.items() if x)
    text += f"; trained together {duration(slots[0].first - born)} after the last one was ready"
    return Check(what, f"{text}, {duration(slots[0].first - start)} after the start", True)


def sibling(e: Evidence, roles: Roles) -> Check:
    name = roles.several
    what = f"SIGKILL of one of {name}'s two workers: its sibling trains on, and the job is not founded again"
    recovery, back = e.recovery(name, "sigkill", 1), e.join(lambda j: j.node == roles.worker and j.again)
    if recovery is None or back is None or back.contributed is None:
        return Check(what, "the logs show no such worker that came back", False)
    chain = [s for s in e.steps if s.first <= back.contributed]
    steps = [s for s in chain if s.first > recovery.at]
    whole = len(steps) > 0 and consecutive([s.step for s in chain[-len(steps) - 1 :]])
    mine = [x for x in e.lives(name) if x.born <= back.contributed]
    with_it = [s for s in steps if s.who and mine and mine[0].member in s.who]
    founded = [r for r in e.foundings() if recovery.at < r.t <= back.contributed]
    code = e.code(name)
    text = (
        f"{', '.join(x.member for x in mine)} in process {', '.join(str(e.pid(x)) for x in mine)} was in "
        f"{len(with_it)} of {len(steps)} steps until the worker was back; {'none' if whole else 'SOME'} lost; "
        f"{len(founded)} foundings; {name}'s exit code {code}"
    )
    good = whole and len(with_it) == len(steps) and len(mine) == 1
    return Check(what, text, good and not founded and code == 0)


def worker(e: Evidence, roles: Roles) -> Check:
    name = roles.several
    what = f"{name}'s agent starts that worker again, and it joins the others"
    recovery, back = e.recovery(name, "sigkill", 1), e.join(lambda j: j.node == roles.worker and j.again)
    if recovery is None or back is None or back.contributed is None:
        return Check(what, "it did not come back", False)
    first, second = (e.timeline.lives[x.member] for x in (recovery, back))
    text = (
        f"{back.member} in process {e.pid(second)} instead of {e.pid(first)}; {transfer(back)}; "
        f"contributed {duration(back.contributed - recovery.at)} after the kill"
    )
    return Check(what, text, first.source != second.source and back.nbytes > 0)


def joined(e: Evidence, roles: Roles) -> Check:
    name = roles.joins
    what = f"{name} joins by replay while the others train, over links of different rates"
    join = e.join(lambda j: j.node == f"{name}-0")
    if join is None or join.contributed is None or join.pull_done is None:
        return Check(what, "it never contributed", False)
    away = [s for s in e.chain if s.first < join.contributed and join.member not in s.who]
    text = (
        f"{transfer(join)}; replayed {join.replayed} steps of the others'; contributed "
        f"{duration(join.contributed - join.born)} after its hello; the others waited {duration(join.pause)} for it"
    )
    if not join.replayed:
        text += f"; no replay: {join.why}"
    return Check(what, text, join.nbytes > 0 and len(join.sources) > 1 and bool(away) and join.replayed > 0)


def killed(e: Evidence, roles: Roles) -> Check:
    name = roles.killed
    what = f"SIGKILL of {name} (agent and worker) costs no step"
    recovery = e.recovery(name, "sigkill")
    if recovery is None or recovery.seconds is None:
        return Check(what, "the logs show no step after it", False)
    noticed = "" if recovery.noticed is None else f"noticed after {duration(recovery.noticed - recovery.at)}; "
    text = f"{noticed}all {recovery.survivors} survivors held the next step after {duration(recovery.seconds)}"
    return Check(what, f"{text}: {HOW[recovery.how]}", e.code(name) == -9 and recovery.survivors >= 2)


def frozen(e: Evidence, roles: Roles) -> Check:
    name = roles.frozen
    what = f"{name} freezes, is put out, wakes and joins again by itself"
    recovery, lives = e.recovery(name, "sigstop"), e.lives(name)
    if recovery is None or recovery.decided is None or recovery.resumed is None:
        return Check(what, "it was not put out", False)
    after = [x for x in lives if x.born >= recovery.at and x.joined is not None]
    before = [x for x in lives if x.member == recovery.member]
    if not after or not before:
        return Check(what, "it did not come back", False)
    join = e.join(lambda j: j.member == after[0].member)
    same = after[0].source == before[0].source
    wakes = [r.t for r in e.faults("sigcont")]
    back = f"back {duration((after[0].joined or 0.0) - wakes[-1])} after waking" if wakes else "back"
    text = (
        f"others waited {duration(recovery.resumed - recovery.at)} until it was out; {back}, "
        f"{'in the same process' if same else 'in ANOTHER process'}"
    )
    text += f", with {transfer(join)}" if join is not None else ", without the others' state"
    return Check(what, text, same and before[0].end == "fenced" and join is not None)


def left(e: Evidence, roles: Roles) -> Check:
    name = roles.leaves
    what = f"Ctrl+C at {name}'s torchrun is a polite leave"
    last, code = next(iter(e.lives(name)), None), e.code(name)
    if last is None or last.end != "left" or last.ended is None or last.leaving is None:
        return Check(what, f"it ended as {last.end if last else 'nothing'!r}; torchrun's exit code {code}", False)
    text = f"out {duration(last.ended - last.leaving)} after the wish; its torchrun ended with exit code {code}"
    return Check(what, text, code == 0)


def kept(e: Evidence, roles: Roles) -> Check:
    name = roles.last
    what = f"{name}, the last member, leaves, and keeps the training state in a file; the scheduler ends, too"
    kept = e.one("kept")
    life = e.timeline.lives.get(kept.member) if kept is not None else None
    if kept is None or life is None:
        return Check(what, "nobody kept it", False)
    earlier = [s for s in e.chain if s.first <= kept.t]
    ended = [r for r in e.records if r.name == "scheduler_ended" and kept.t < r.t < _next_lead(e, kept)]
    code = e.code(name)
    text = f"{kept.member} at step {kept.get('step')}; it ended as {life.end!r}, its torchrun with exit code {code}"
    text += "; the scheduler ended after that" if ended else "; the scheduler did not end"
    good = bool(earlier) and earlier[-1].step == kept["step"] and set(earlier[-1].who) == {kept.member}
    return Check(what, text, good and life.node == f"{name}-0" and life.end == "left" and code == 0 and bool(ended))


def _next_lead(e: Evidence, after: Record) -> float:
    """Returns the time at which the next scheduler after `after` began to lead; infinity if none did."""
    return min((r.t for r in e.leads() if r.t > after.t), default=float("inf"))


def resumed(e: Evidence, roles: Roles) -> Check:
    names = roles.again
    what = f"{' and '.join(names)} start again: the job goes on at that step, from that state"
    kept, resumed = e.one("kept"), e.one("resumed_kept")
    if kept is None or resumed is None:
        return Check(what, "nobody went on from it", False)
    hashes = {
        r.member: str(r["hash"])
        for r in e.records
        if r.name == "state_hash" and r["head"] == kept["head"] and r.member in (kept.member, resumed.member)
    }
    steps = [s for s in e.steps if s.first > kept.t]
    founded = [str(r.get("reason")) for r in e.foundings()]
    text = (
        f"{resumed.member} at step {resumed.get('step')}; state hash "
        + (" and then ".join(value[:12] for value in hashes.values()) or "of nobody")
        + f"; next step {steps[0].step if steps else None}; foundings: 1 and {len(founded) - 1} from the kept state"
    )
    good = (
        resumed["step"] == kept["step"]
        and len(hashes) == 2
        and len(set(hashes.values())) == 1
        and bool(steps)
        and steps[0].step == kept["step"] + 1
        and {node_of(m) for s in steps for m in s.who} == {f"{n}-0" for n in names}
        and [f"kept at step {kept['step']}" in words for words in founded] == [False, True]
    )
    return Check(what, text, good)


LINES: tuple[Callable[[Evidence, Roles], Check], ...] = (
    founded, sibling, worker, joined, killed, frozen, left, kept, resumed
)  # fmt: skip
"""Lines that this demo is about, in the order of the story."""


def prove(e: Evidence, roles: Roles = ROLES) -> list[Check]:
    """Returns all checks of this demo."""
    finished = proof.finished(e, roles.again, f"the job finishes with {' and '.join(roles.again)}")
    return [*(line(e, roles) for line in LINES), finished, *proof.training(e, roles.again), *proof.audited(e)]


# ------------------------------------------------------------------ the command


def scenario(cast: Cast, size: Size, *parts: Scenario[Cast]) -> Scenario[Cast]:
    """Returns the scenario of `chaos-lightning demo`, performed by the processes of `cast`, with these further
    parts."""
    plan = size.plan
    return Scenario(
        name="demo",
        nodes=cast,
        acts=(
            partial(acts.founders_start, founders=ROLES.founders),
            *(partial(strike, fault=fault) for fault in plan),
            everybody_goes,
            all_begins_again,
            acts.finish,
        ),
        prove=prove,
        plan=plan,
        pace=size.pace,
        parts=parts,
        endings=(cast.close,),
    )


def demo(
    directory: Directory = None,
    quick: Quick = False,
    keep: Keep = False,
    accelerator: Accelerator = "cpu",
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print what happens, as a fault plan, to simulate or to test with.")
    ] = False,
) -> None:
    """Train on this machine while nodes join, die, freeze, all leave and return; then prove that nothing was lost."""
    size = QUICK if quick else FULL
    if plan:
        print(size.plan)
        return
    folder = prepare(directory, "demo")
    there = f"--accelerator={accelerator}"
    cast = Cast(
        folder, (*size.arguments, there), min_nodes=1, workers={ROLES.several: 2}
    )  # the last node must be able to train alone
    play(scenario(cast, size, fixed.scenario(folder, there)), folder, keep=keep)
