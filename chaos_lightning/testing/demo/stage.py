"""Performs a demo: plays its acts, shows and checks what happens, writes a report, and ends all processes it started.

Theory of operation. A `Scenario` is data: who takes part, which acts are played one after the other, and which lines
the logs must prove. An act is a function of the `Stage`: it strikes, says so, and waits in the members' event logs for
what must follow, with a deadline. Nothing in an act judges whether the training was right; the lines of the proof do.
A new story is a module with acts (acts.py has those that stories share), with lines (proof.py has those about any
training), and with a command that plays a `Scenario` of both; cli/__init__.py names the command.

`play` owns everything that outlives a mistake: the ending of all processes (also on Ctrl+C and SIGTERM) and the exit
code. 0 means that all acts took place and every line of the proof holds; 1 that something was not so, and then all logs
stay and their place is printed; 130 that it was interrupted.

What is said is final: it is printed once. A terminal has the board of `chaos-lightning top` under it, redrawn a few
times a second; a pipe gets a line of progress every few seconds.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Annotated, Generic, NoReturn, Protocol, TypeVar

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from chaos_lightning.errors import ChaosError, ConfigurationError, DeadlineError, needing
from chaos_lightning.events.events import Record, Tail
from chaos_lightning.machine.signals import ends
from chaos_lightning.machine.units import duration
from chaos_lightning.observe.fields import integer
from chaos_lightning.observe.outer.board import OuterBoard
from chaos_lightning.observe.render import draw, from_timeline
from chaos_lightning.observe.timeline import SlotFact, Timeline
from chaos_lightning.testing.demo import ALONE
from chaos_lightning.testing.demo.proof import Check, Evidence, table
from chaos_lightning.testing.faults import Fault, FaultPlan, Schedule

Directory = Annotated[
    Path | None, typer.Option("--dir", help="Folder for logs and report; default: a new one in ./runs.", metavar="DIR")
]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller model and shorter rests; the same story.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep checkpoints and outputs, too.")]
Accelerator = Annotated[
    str, typer.Option("--accelerator", help="Where all nodes train, as Lightning names it: cpu, gpu, auto.")
]
"""Options that demos share."""

NETWORK = "network.png"
"""Name of the file with a picture of the demo's network, if the demo has drawn one."""
_REDRAW_S = 0.33
_PLAIN_S = 5.0
_TURN_S = 0.04
_LEAST_ROOM = 20
"""Least number of characters for the words of a line of the story, however narrow the terminal is."""
_STYLES = {"do": "bold", "seen": "", "good": "green", "bad": "bold red"}
_SIGNS = {"do": ">", "seen": " ", "good": "+", "bad": "!"}


class Nodes(Protocol):
    """Nodes of a demo, in the interface through which a `Stage` watches them."""

    @property
    def events(self) -> Path:
        """Folder of all members' event logs."""

    def poll(self) -> Iterable[str]:
        """Does the nodes' pending work; returns lines about what was done since the last call. A stage calls it many
        times a second.
        """

    def check(self) -> None:
        """Raises a ChaosError if a node has ended that should still run."""

    def exit_codes(self) -> Mapping[str, int | None]:
        """Returns each node's exit code; None while it runs, negative for a signal."""


N = TypeVar("N", bound=Nodes)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Number of undisturbed steps between the acts of a demo, and deadlines.

    Attributes:
        rest_steps: Undisturbed steps between two acts; of clusters far apart, rounds.
        start_deadline_s: Deadline for a node that starts (importing torch and Lightning takes a while), s.
        act_deadline_s: Deadline for everything else that is waited for, s.
    """

    rest_steps: int = 15
    start_deadline_s: float = 240.0
    act_deadline_s: float = 90.0


@dataclass(frozen=True, kw_only=True)
class Scenario(Generic[N]):
    """A demo: its nodes, its acts and its checks.

    Attributes:
        name: Name of its command.
        nodes: Nodes that train; their logs are in `events` of the demo's folder.
        acts: Acts, in order; a ChaosError in one breaks the demo off, and is shown.
        prove: Returns the lines that the logs must prove.
        plan: Faults that acts wait for by `Stage.due`.
        pace: Rests and deadlines.
        tells: Returns words about an event, which are said once; "": none.
        begin: Called before the first act, to start what it needs.
        parts: Further parts, each a job with a folder of its own, which are played after the acts.
        endings: Called at the end; they end everything that was started, also by `begin` and by an act that broke off.
    """

    name: str
    nodes: N
    acts: Sequence[Callable[[Stage[N]], None]]
    prove: Callable[[Evidence], Sequence[Check]]
    plan: FaultPlan = field(default_factory=FaultPlan)
    pace: Pace = field(default_factory=Pace)
    tells: Callable[[Record], str] = lambda record: ""
    begin: Callable[[], object] = lambda: None
    parts: Sequence[Scenario[N]] = ()
    endings: Sequence[Callable[[], object]]


# ------------------------------------------------------------------ playing


def play(scenario: Scenario[N], folder: Path, *, keep: bool = False) -> NoReturn:
    """Plays a whole demo, and exits with its exit code.

    Args:
        scenario: The demo.
        folder: Folder of the demo, as `edge.runner.prepare` made it.
        keep: Whether to keep more than logs and report.

    Raises:
        typer.Exit: Always; 0 if every line holds, 1 if not, 130 if it was interrupted.
        MissingExtraError: lightning is not installed, so nodes could not train.
    """
    with needing(f"chaos-lightning {scenario.name}"):
        # Looked for, not imported: its nodes import it, and this process stays light.
        if find_spec("lightning") is None:
            raise ModuleNotFoundError(name="lightning")
    console = Console()
    problem, began, stories = "", time.monotonic(), (scenario, *scenario.parts)
    with on_stage(console, folder, *(end for story in stories for end in story.endings)):
        scenario.begin()
        screen = Screen(console)
        with screen.live or contextlib.nullcontext():
            try:
                for story in stories:
                    stage = Stage(story, screen)
                    for act in story.acts:
                        act(stage)
            except ChaosError as error:
                problem = str(error)
                screen.say("bad", problem)
            codes = [story.nodes.exit_codes() for story in stories]
    found = (s.prove(Evidence(s.nodes.events.parent, its)) for s, its in zip(stories, codes, strict=True))
    checks = [check for each in found for check in each]
    good = judge(console, folder, checks, problem, time.monotonic() - began, f"chaos-lightning {scenario.name}")
    for story in stories if good and not keep else ():
        tidy(story.nodes.events.parent)
    raise typer.Exit(0 if good else 1)


@contextlib.contextmanager
def on_stage(console: Console, folder: Path, *endings: Callable[[], object]) -> Iterator[None]:
    """Calls all of `endings` after the block, even after an exception, Ctrl+C or SIGTERM, which cannot cut them short.

    Raises:
        typer.Exit: The block was interrupted; the code is 130.
    """
    # Explicitly for SIGINT, too: a shell's background job comes with it ignored.
    before = {number: signal.signal(number, _interrupt) for number in ends()}
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"interrupted; logs are in\n{folder}", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # this takes some seconds at most, and must not be cut off
        for end in endings:
            end()
        for number, handler in before.items():
            signal.signal(number, handler)


def judge(console: Console, folder: Path, checks: Sequence[Check], problem: str, seconds: float, title: str) -> bool:
    """Prints a demo's checks and writes the report; returns whether all checks pass and no act broke off."""
    from chaos_lightning.observe.outer.report import write_reports

    console.print(table(checks, f"\nWhat this proves ({seconds:.0f} s)"))
    failed = [check for check in checks if not check.ok]
    try:
        written, *inner = write_reports(folder / "events", folder, title=title)
        console.print(f"\n{written.summary}")
        picture = written.picture or "none; the extra report brings what draws it"
        console.print(f"report   {written.page}\npicture  {picture}", soft_wrap=True)
        for other in inner:
            console.print(f"cluster  {other.page}", soft_wrap=True)
        if (network := folder / NETWORK).exists():
            console.print(f"network  {network}", soft_wrap=True)
        console.print(
            f"logs     {folder / 'events'}\n         (chaos-lightning audit judges them anew)", soft_wrap=True
        )
    except ConfigurationError as error:
        console.print(f"no report: {error}", soft_wrap=True)
    if problem or failed:
        console.print(f"FAILED: {len(failed)} of {len(checks)} lines; all logs are in\n{folder}", soft_wrap=True)
        if problem:
            console.print(f"the story broke off: {problem.splitlines()[0]}", markup=False)
        return False
    console.print(f"ALL {len(checks)} LINES HOLD", style="bold green")
    return True


def tidy(folder: Path) -> None:
    """Deletes everything from the demo's folder except event logs and report."""
    for path in (
        *(folder / name for name in ("out", "checkpoints", "etcd", f"{ALONE}/checkpoints")),
        *folder.glob("*-kept"),
    ):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob("chain.sqlite*"), *folder.glob("final-*.json"), *folder.glob("*.log"), folder / "enough"):
        path.unlink(missing_ok=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------------ what an act stands on


class Stage(Generic[N]):
    """Interface through which a demo's acts show what they do, and wait for events.

    Attributes:
        nodes: Nodes that train.
        pace: Rests and deadlines.
        records: All events so far.
        timeline: Events of members, folded.
        outer: Events of an outer job, folded.
    """

    def __init__(self, scenario: Scenario[N], screen: Screen) -> None:
        self.nodes = scenario.nodes
        self.pace = scenario.pace
        self.records: list[Record] = []
        self.timeline = Timeline()
        self.outer = OuterBoard()
        self._screen = screen
        self._tells = scenario.tells
        self._tail = Tail(scenario.nodes.events)
        self._schedule = Schedule(scenario.plan)
        self._due: list[Fault] = []
        self._told = {""}

    def say(self, kind: str, text: str) -> None:
        """Prints a line of the story; its kind is "do", "seen", "good" or "bad"."""
        self._screen.say(kind, text)

    def judge(self, good: bool, text: str) -> None:
        """Prints a line of the story as good or bad news."""
        self.say("good" if good else "bad", text)

    def look(self) -> None:
        """Reads new events, shows them, and notes which faults of the plan they make due."""
        for text in self.nodes.poll():
            self.say("do", text)
        for record in self._tail.poll():
            self.records.append(record)
            if self.outer.take(record):
                self.timeline.take(record)
            self._schedule.saw(record.name, record.node.removesuffix("-0"))
            if (words := self._tells(record)) not in self._told:
                self._told.add(words)
                self.say("seen", words)
        self._due += self._schedule.due(step=self.step)
        self._screen.refresh(self.timeline, self.outer)

    # ------------------------------------------------------------------ waiting

    def wait(self, what: str, ready: Callable[[], T | None], deadline_s: float | None = None) -> T:
        """Waits until `ready` returns anything but None or False; returns its result.

        Raises:
            DeadlineError: Nothing was returned in time; the message says what was waited for.
            ChaosError: A node has ended that should still run.
        """
        limit = self.pace.act_deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit
        while True:
            self.look()
            result = ready()
            if result is not None and result is not False:
                return result
            self.nodes.check()
            if time.monotonic() > end:
                last = "\n".join(f"  {str(r)[:200]}" for r in self.records[-8:])
                raise DeadlineError(f"waited {limit:g} s for {what}; the last events were:\n{last}")
            time.sleep(_TURN_S)

    def due(self, fault: Fault) -> None:
        """Waits until a fault of the plan is due."""
        self.wait(f"the time for '{fault}'", lambda: fault in self._due)

    def first(
        self,
        name: str,
        wanted: Callable[[Record], bool] = lambda r: True,
        *,
        after: float = 0.0,
        deadline_s: float | None = None,
        what: str = "",
    ) -> Record:
        """Waits for the first event with this name after time `after` that satisfies `wanted`; error messages call it
        `what`.
        """
        place = 0

        def found() -> Record | None:
            nonlocal place
            unread, place = self.records[place:], len(self.records)
            return next((r for r in unread if r.name == name and r.t > after and wanted(r)), None)

        return self.wait(what or f"'{name}'", found, deadline_s)

    def event(
        self, event: str, node: str, deadline_s: float | None = None, *, worker: int = 0, after: float = 0.0
    ) -> Record:
        """Waits for the first event with this name that a node's worker logged after time `after`."""

        def wanted(r: Record) -> bool:  # the scheduler writes about members, too
            return r.node == f"{node}-{worker}" and r.source.startswith("member")

        which = f"'{event}' of {node}" + (f", worker {worker}" if worker else "")
        return self.first(event, wanted, after=after, deadline_s=deadline_s, what=which)

    def joined(self, node: str, *, worker: int = 0, after: float = 0.0) -> Record:
        """Waits, no longer than a start may take, until a node's worker has joined; returns the event."""
        return self.event("joined", node, self.pace.start_deadline_s, worker=worker, after=after)

    def rest(self) -> None:
        """Waits for `pace.rest_steps` more steps of undisturbed training."""
        goal = self.step + self.pace.rest_steps
        self.wait(f"step {goal}", lambda: self.step >= goal)

    def without(self, member: str) -> None:
        """Waits until the latest membership view lacks this member."""
        views = self.timeline.views
        self.wait(
            f"a view without {member}",
            lambda: bool(views) and member not in max(views.values(), key=lambda v: v.number).members,
        )

    def step_without(self, member: str, at: float) -> SlotFact:
        """Waits for the first step after time `at` that was committed without this member; returns the step."""
        self.without(member)
        return self.wait(
            f"a step without {member}",
            lambda: next((s for s in self.timeline.recent(50) if s.first > at and member not in s.who), None),
        )

    def exits(self, *names: str) -> dict[str, int | None]:
        """Waits until all of these nodes have ended; returns their exit codes."""
        for name in names:
            self.wait(f"the end of {name}'s torchrun", lambda n=name: self.nodes.exit_codes()[n] is not None)  # type: ignore[misc]
        return {name: self.nodes.exit_codes()[name] for name in names}

    # ------------------------------------------------------------------ looking

    @property
    def step(self) -> int:
        recent = self.timeline.recent(1)
        return recent[-1].step if recent else 0

    def progress(self) -> str:
        """Returns the present pace as text: time and samples per step."""
        steps = [slot for slot in self.timeline.recent(20) if slot.kind == "step"]
        pace = (steps[-1].first - steps[0].first) / max(1, len(steps) - 1)
        return f"{duration(pace)} a step, {sum(w for _, w in steps[-1].contributors):g} samples each"

    def worker(self, name: str, worker: int = 0) -> tuple[int, str]:
        """Returns process id and member id of a node's worker that is alive."""
        life = self.timeline.living(f"{name}-{worker}", time.time())
        opened = [r for r in self.records if r.name == "opened" and life is not None and r.source == life.source]
        if life is None or not opened:
            raise DeadlineError(f"worker {worker} of {name} is no living member; its log is in {self.nodes.events}")
        return integer(opened[-1].get("pid")), life.member


# ------------------------------------------------------------------ what a person sees


class Screen:
    """Output of a demo on a terminal or pipe: lines of its story and, on a terminal, the live state of the job.

    Attributes:
        console: Console to print to.
        live: Live display under the story; None unless the console is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._began = time.monotonic()
        self._drawn = 0.0

    def say(self, kind: str, text: str) -> None:
        """Prints a line of the story; long lines are wrapped between words, which stay whole, so that they can be
        copied.
        """
        head = f"{time.monotonic() - self._began:6.1f} s  "
        room = max(_LEAST_ROOM, self.console.width - len(head) - 2)
        first, *more = [
            part
            for line in text.splitlines()
            for part in wrap(line, room, break_long_words=False, break_on_hyphens=False)
        ]
        self.console.print(Text.assemble((head, "dim"), (f"{_SIGNS[kind]} {first}", _STYLES[kind])), soft_wrap=True)
        for part in more:
            indent = len(head) + 2 if len(part) <= room else 2
            self.console.print(Text(f"{'':{indent}}{part}", style=_STYLES[kind]), soft_wrap=True)

    def refresh(self, timeline: Timeline, outer: OuterBoard) -> None:
        """Redraws the state of the job, unless it was drawn a moment ago."""
        now = time.monotonic()
        if now - self._drawn < (_PLAIN_S if self.live is None else _REDRAW_S):
            return
        self._drawn = now
        board = from_timeline(timeline, time.time(), title="chaos-lightning demo", lines=4)
        if outer.there:
            board = outer.draw(time.time(), title=board.title, members=board, lines=4)
        if self.live is not None:
            self.live.update(draw(board), refresh=True)
        elif outer.there or timeline.slots:
            words = ", ".join(f"{k} {v}" for k, v in board.figures) if outer.there else progress(timeline)
            self.say("seen", words)


def progress(timeline: Timeline) -> str:
    """Returns the job's state as one line: step, epoch, number of members, pace."""
    recent = [slot for slot in timeline.recent(40) if slot.kind == "step"]
    if not recent:
        return "no step yet"
    last = recent[-1]
    words = [f"step {last.step}", f"epoch {max((e for _, e in last.ledger), default=0)}"]
    words.append(f"{len(last.contributors)} members")
    if len(recent) > 1:
        words.append(f"{duration((last.first - recent[0].first) / (len(recent) - 1))} a step")
    return ", ".join(words)
