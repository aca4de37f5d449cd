"""The demo's story: who comes, who is hurt and who goes, each as soon as the one before has been got over.

Theory of operation. What happens is a `FaultPlan` (`Plot.plan`), as tests and the simulator take it; `chaos-lightning
demo --plan` prints it; what comes after it, the end of all members and the job's return, no simulator can tell. The
story is told by events: every act begins when its fault is due, waits in the members' event logs for what must follow,
with a deadline, and lets some steps pass, so that each has an undisturbed before and after. Nothing in here judges
whether the training was right: `proof.py` does, from the logs alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chaos_lightning.control.channel import fetch_status
from chaos_lightning.errors import DeadlineError
from chaos_lightning.events.events import Record, Tail
from chaos_lightning.lab.demo.cast import Cast
from chaos_lightning.lab.demo.screen import Screen
from chaos_lightning.lab.faults import Action, Fault, FaultPlan, Schedule
from chaos_lightning.observe.fields import integer, number
from chaos_lightning.observe.timeline import SlotFact, Timeline
from chaos_lightning.observe.units import amount, duration

T = TypeVar("T")
_TURN_S = 0.04

FOUNDERS = ("edge-1", "edge-2", "edge-3")
JOINS, KILLED, FROZEN, LEAVES = "edge-4", "edge-2", "edge-3", "edge-1"
SEVERAL = "edge-3"
"""It has two workers; `WORKER` is its second one."""
WORKER = f"{SEVERAL}-1"
LAST = JOINS
AGAIN = (LAST, LEAVES)
"""Who is started again when nobody is left."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """How long things take.

    Attributes:
        rest_steps: Undisturbed steps between two acts.
        freeze_s: How long the frozen worker sleeps, s.
        start_deadline_s: For a torchrun that starts (importing torch and Lightning takes a while), s.
        act_deadline_s: For everything else that is waited for, s.
        arguments: For the training script.
    """

    rest_steps: int = 15
    freeze_s: float = 3.0
    start_deadline_s: float = 240.0
    act_deadline_s: float = 90.0
    arguments: tuple[str, ...] = ()

    @property
    def plan(self) -> FaultPlan:
        """Who joins, dies, freezes and leaves, each once the one before is over."""
        return FaultPlan(
            (
                Fault(action=Action.SIGKILL, node=WORKER, event="joined", event_node=WORKER),
                Fault(action=Action.JOIN, node=JOINS, event="death", event_node=WORKER),
                # Its agent starts it again, and nobody else does.
                Fault(action=Action.JOIN, node=WORKER, event="death", event_node=WORKER),
                Fault(action=Action.SIGKILL, node=KILLED, event="joined", event_node=JOINS),
                Fault(action=Action.SIGSTOP, node=FROZEN, event="death", event_node=KILLED, seconds=self.freeze_s),
                Fault(action=Action.LEAVE, node=LEAVES, event="fenced", event_node=FROZEN),
            )
        )


FULL = Plot(arguments=("--layers=4", "--width=128", "--batch-size=4", "--text=45000"))
QUICK = Plot(
    rest_steps=8, freeze_s=2.0, arguments=("--layers=2", "--width=64", "--batch-size=4", "--text=24000", "--pause=0.02")
)


class Story:
    """One telling.

    Args:
        cast: The nodes.
        screen: Where the story is shown.
        plot: How long things take.

    Attributes:
        timeline: Of all events so far.
    """

    def __init__(self, cast: Cast, screen: Screen, plot: Plot) -> None:
        self.cast = cast
        self.screen = screen
        self.plot = plot
        self.timeline = Timeline()
        self._tail = Tail(cast.events)
        self._records: list[Record] = []
        self._schedule = Schedule(plot.plan)
        self._due: list[Fault] = []

    def tell(self) -> None:
        """All acts.

        Raises:
            DeadlineError: Something did not happen in time; the message says what.
            NodeDied: A node ended that was not to.
        """
        self._start()
        acts = {
            Action.JOIN: self._join,
            Action.SIGKILL: self._kill,
            Action.SIGSTOP: self._freeze,
            Action.LEAVE: self._leave,
        }
        workers_acts = {Action.SIGKILL: self._kill_worker, Action.JOIN: self._worker_comes_back}
        for fault in self.plot.plan:
            self._wait(f"the time for '{fault}'", lambda f=fault: f in self._due)  # type: ignore[misc]
            (workers_acts if fault.node == WORKER else acts)[fault.action](fault)
        self._everybody_goes()
        self._all_begins_again()
        self._finish()

    # ------------------------------------------------------------------------------------------------ acts

    def _start(self) -> None:
        self._say("do", f"{len(FOUNDERS)} machines start: {self.cast.words(FOUNDERS[0])}")
        for name in FOUNDERS:
            if self.cast.workers_of(name) > 1:
                self._say("do", f"{name} has {self.cast.workers_of(name)} workers: {self.cast.words(name)}")
            self.cast.start(name)
        self._say("seen", "each imports torch and Lightning first; the first one also starts the job's scheduler")
        for name in FOUNDERS:
            for worker in range(self.cast.workers_of(name)):
                joined = self._event("joined", name, self.plot.start_deadline_s, worker=worker)
                which = f"{name}, worker {worker}," if self.cast.workers_of(name) > 1 else name
                self._say("seen", f"{which} is in as {joined.get('role')} at step {joined.get('step')}")
        self._rest()
        self._say("good", f"{len(FOUNDERS)} nodes train: {self._pace()}")

    def _kill_worker(self, fault: Fault) -> None:
        pid, member = self._worker(SEVERAL, 1)
        sibling = self._worker(SEVERAL)[1]
        self._say("do", f"kill -9 for worker 1 of {SEVERAL}; its agent and worker 0 live")
        self.cast.kill_worker(WORKER, pid)
        slot = self._step_without(member, time.time())
        self._say(
            "good" if sibling in slot.who else "bad",
            f"step {slot.step} was committed by the others, its sibling {sibling} among them",
        )

    def _worker_comes_back(self, fault: Fault) -> None:
        dead = max(i for i, r in enumerate(self._records) if r.get("kind") == "sigkill" and r.node == WORKER)
        joined = self._event("joined", SEVERAL, self.plot.start_deadline_s, worker=1, after=dead)
        pid, _ = self._worker(SEVERAL, 1)
        self._say(
            "good",
            f"worker 1 of {SEVERAL}, which its agent has started again, joined at step {joined.get('step')} in process "
            f"{pid}, {duration(joined.t - self._records[dead].t)} after its death",
        )
        self._rest()

    def _join(self, fault: Fault) -> None:
        name = fault.node
        before = self._step
        self._say("do", f"{name} starts: {self.cast.words(name).split()[0]}, as above, while the others train")
        self.cast.start(name)
        joined = self._event("joined", name, self.plot.start_deadline_s)
        pulled = self._event("pull_done", name)
        self._say(
            "good",
            f"{name} joined: {amount(integer(pulled.get('nbytes')))} of training state in "
            f"{duration(number(pulled.get('seconds')))} from {len(joined.get('by_source') or ())} members; "
            f"the others committed {self._step - before} steps while it started",
        )
        self._rest()

    def _kill(self, fault: Fault) -> None:
        name = fault.node
        worker, member = self._worker(name)
        self._say("do", f"kill -9 for {name}, agent and worker at once: the machine is gone")
        self.cast.kill(name, worker)
        at = time.time()
        slot = self._step_without(member, at)
        self._say("good", f"step {slot.step} was committed {duration(slot.first - at)} later by the others")
        self._rest()

    def _freeze(self, fault: Fault) -> None:
        name = fault.node
        worker, member = self._worker(name)
        seconds = fault.seconds
        self._say("do", f"worker 0 of {name} freezes (SIGSTOP) for {seconds:g} s")
        self.cast.freeze(name, worker, seconds)
        wakes = time.monotonic() + seconds
        try:
            self._without(member)
            self._say("seen", "it was put out; the others go on without it")
            self._wait(f"{seconds:g} s to pass", lambda: time.monotonic() >= wakes)
        finally:
            self.cast.thaw(name, worker)
        self._say("do", f"worker 0 of {name} wakes")
        woken = len(self._records)
        self._event("fenced", name, after=woken)
        joined = self._event("joined", name, after=woken)
        again = self._worker(name)[0]
        self._say(
            "good" if again == worker else "bad",
            f"it was told that it is out, took over the others' state and joined again at step "
            f"{joined.get('step')}, in the same process {again}",
        )
        self._rest()

    def _leave(self, fault: Fault) -> None:
        name = fault.node
        _, member = self._worker(name)
        self._say("do", f"Ctrl+C at the torchrun of {name} (it was the first, and writes the checkpoints)")
        at = time.time()
        self.cast.interrupt(name)
        left = self._event("left", name)
        self._without(member)
        self._say("seen", f"{name} finished its step and left {duration(left.t - at)} later")
        self._rest()
        code = self._exit(name)
        self._say("good" if code == 0 else "bad", f"its torchrun ended with exit code {code}")

    def _everybody_goes(self) -> None:
        """The last member, too; then the scheduler."""
        self._say("do", f"SIGTERM for {SEVERAL}, with both its workers, and then for {LAST}, the last one")
        self.cast.terminate(SEVERAL)
        for worker in range(self.cast.workers_of(SEVERAL)):
            self._event("left", SEVERAL, worker=worker)
        self._say("seen", f"{SEVERAL} has left; {LAST} trains alone")
        self._rest()
        self.cast.terminate(LAST)
        kept = self._event("kept", LAST)
        self._event("left", LAST)
        self._say("good", f"{LAST} left, and kept the training state at step {kept.get('step')} in a file")
        scheduler = integer(fetch_status(self.cast.endpoint, timeout_s=self.plot.act_deadline_s)["pid"])
        self._say("do", "SIGTERM for the scheduler, too: nothing of the job is to be left")
        self.cast.end_scheduler(scheduler)
        self._wait("the end of the scheduler", lambda: not self.cast.runs(scheduler))
        codes = {name: self._exit(name) for name in (SEVERAL, LAST)}
        self._say(
            "bad" if any(codes.values()) else "good",
            "nothing runs any more; exit codes: " + ", ".join(f"{name} {code}" for name, code in codes.items()),
        )

    def _all_begins_again(self) -> None:
        """The same commands."""
        nothing = len(self._records)
        self._say("do", f"{' and '.join(AGAIN)} start again, by the same commands")
        for name in AGAIN:
            self.cast.start(name)
        resumed = self._wait(
            "a member that goes on from the kept state",
            lambda: next((r for r in self._records[nothing:] if r.name == "resumed_kept"), None),
            self.plot.start_deadline_s,
        )
        self._say(
            "good",
            f"{resumed.node.removesuffix('-0')} founds the job at step {resumed.get('step')}, on the state that "
            f"{resumed.get('keeper')} kept",
        )
        for name in AGAIN:
            joined = self._event("joined", name, self.plot.start_deadline_s, after=nothing)
            self._say("seen", f"{name} is in at step {joined.get('step')}")
        self._rest()

    def _finish(self) -> None:
        self._say("do", "enough: the job ends with this epoch, by a vote as EarlyStopping's")
        (self.cast.folder / "enough").touch()
        staying = [name for name in self.cast.nodes if name not in self.cast.fallen | self.cast.left]
        for name in staying:
            self._event("finished", name)
        codes = {name: self._exit(name) for name in staying}
        good = not any(codes.values())
        self._say(
            "good" if good else "bad",
            f"the job finished at step {self._step}; exit codes: "
            + ", ".join(f"{name} {code}" for name, code in codes.items()),
        )
        self.look()

    # ------------------------------------------------------------------------------------------------ waiting

    def look(self) -> None:
        """Takes in what was logged since the last look."""
        for record in self._tail.poll():
            self._records.append(record)
            self.timeline.add(record)
            self._schedule.saw(record.name, record.node.removesuffix("-0"))
        self._due += self._schedule.due(step=self._step)
        self.screen.refresh(self.timeline)

    def _wait(self, what: str, ready: Callable[[], T | None], deadline_s: float | None = None) -> T:
        limit = self.plot.act_deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit
        while True:
            self.look()
            result = ready()
            if result is not None and result is not False:
                return result
            self.cast.check()
            if time.monotonic() > end:
                last = "\n".join(f"  {str(r)[:200]}" for r in self._records[-8:])
                raise DeadlineError(f"waited {limit:g} s for {what}; the last events were:\n{last}")
            time.sleep(_TURN_S)

    def _event(
        self, event: str, node: str, deadline_s: float | None = None, *, worker: int = 0, after: int = 0
    ) -> Record:
        """The first event of this name from this worker of this node, among those read after the first `after`."""
        place = after

        def found() -> Record | None:
            nonlocal place
            while place < len(self._records):
                record = self._records[place]
                place += 1
                # The scheduler writes about members, too.
                if record.name == event and record.node == f"{node}-{worker}" and record.source.startswith("member"):
                    return record
            return None

        which = f"{node}, worker {worker}" if worker else node
        return self._wait(f"'{event}' of {which}", found, deadline_s)

    def _rest(self) -> None:
        """Some steps in peace."""
        goal = self._step + self.plot.rest_steps
        self._wait(f"step {goal}", lambda: self._step >= goal)

    def _without(self, member: str) -> None:
        """Until a view without this member rules."""
        self._wait(
            f"a view without {member}",
            lambda: (
                bool(self.timeline.views)
                and member not in max(self.timeline.views.values(), key=lambda v: v.number).members
            ),
        )

    def _step_without(self, member: str, at: float) -> SlotFact:
        """The first step after this time that a view without this member committed."""
        self._without(member)
        return self._wait(
            f"a step without {member}",
            lambda: next((s for s in self.timeline.recent(50) if s.first > at and member not in s.who), None),
        )

    def _exit(self, name: str) -> int:
        code = self._wait(f"the end of {name}'s torchrun", lambda: _boxed(self.cast.exit_codes()[name]))
        return code[0]

    # ------------------------------------------------------------------------------------------------ looking

    @property
    def _step(self) -> int:
        recent = self.timeline.recent(1)
        return recent[-1].step if recent else 0

    def _pace(self) -> str:
        steps = [slot for slot in self.timeline.recent(20) if slot.kind == "step"]
        pace = (steps[-1].first - steps[0].first) / max(1, len(steps) - 1)
        return f"{duration(pace)} a step, {sum(w for _, w in steps[-1].contributors):g} samples each"

    def _worker(self, name: str, worker: int = 0) -> tuple[int, str]:
        """Process id and member id of this node's living worker."""
        life = self.timeline.living(f"{name}-{worker}", time.time())
        opened = [r for r in self._records if r.name == "opened" and life is not None and r.source == life.source]
        if life is None or not opened:
            raise DeadlineError(f"worker {worker} of {name} is no living member; its log is in {self.cast.events}")
        return integer(opened[-1].get("pid")), life.member

    def _say(self, kind: str, text: str) -> None:
        self.screen.say(kind, text)


def _boxed(code: int | None) -> tuple[int] | None:
    """An exit code of 0 is an answer, too."""
    return None if code is None else (code,)
