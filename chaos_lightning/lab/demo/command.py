"""`chaos-lightning demo`, and how each of the demos is performed: tell the story, prove it, write the report, clean up.

Theory of operation. `perform` owns everything that outlives a mistake: the folder, the ending of all processes
(also on Ctrl+C and SIGTERM), and the exit code. 0 means that the whole story took place and every line of the proof
is fine; 1 that something was not, and then all logs stay and their place is printed; 130 that it was interrupted.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn, Protocol

import typer
from rich.console import Console

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.lab.demo import proof
from chaos_lightning.lab.demo.cast import Cast
from chaos_lightning.lab.demo.screen import Screen
from chaos_lightning.lab.demo.story import (
    AGAIN,
    FOUNDERS,
    FROZEN,
    FULL,
    JOINS,
    KILLED,
    LAST,
    LEAVES,
    QUICK,
    SEVERAL,
    Story,
)

NETWORK = "network.png"
"""A picture of the demo's network, if somebody has drawn one."""
ExitCodes = dict[str, int | None]


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for logs and report; default: a new one in ./runs.", metavar="DIR"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and shorter rests; the same story.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoints and outputs, too.")] = False,
    accelerator: Annotated[
        str, typer.Option("--accelerator", help="Where all nodes train, as Lightning names it: cpu, gpu, auto.")
    ] = "cpu",
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print what happens, as a fault plan, to simulate or to test with.")
    ] = False,
) -> None:
    """Train on this machine while nodes join, die, freeze, all leave and return; then prove that nothing was lost."""
    plot = QUICK if quick else FULL
    if plan:
        print(plot.plan)
        return
    folder = prepare(directory)
    arguments = (*plot.arguments, f"--accelerator={accelerator}")
    cast = Cast(folder, arguments, min_nodes=1, workers={SEVERAL: 2})  # the last one is to train alone

    def prove(codes: ExitCodes) -> list[proof.Check]:
        expected = proof.Expected(
            founders=FOUNDERS,
            joins=JOINS,
            killed=KILLED,
            frozen=FROZEN,
            leaves=LEAVES,
            exit_codes=codes,
            several=SEVERAL,
            last=LAST,
            again=AGAIN,
        )
        return proof.prove(folder, expected)

    perform(
        "demo", folder, cast, lambda screen: Story(cast, screen, plot).tell(), prove, endings=(cast.close,), keep=keep
    )


class Nodes(Protocol):
    """Those that train in a demo."""

    def exit_codes(self) -> ExitCodes: ...


def perform(
    name: str,
    folder: Path,
    nodes: Nodes,
    tell: Callable[[Screen], None],
    prove: Callable[[ExitCodes], Sequence[proof.Check]],
    *,
    endings: Sequence[Callable[[], object]],
    begin: Callable[[], object] = lambda: None,
    keep: bool = False,
) -> NoReturn:
    """A demo from the first line to the exit code.

    Args:
        name: Of the command.
        folder: As `prepare` made it.
        nodes: Asked for their exit codes when the story is over.
        tell: The story; a ChaosError breaks it off, and is shown.
        prove: The lines of the proof, from the logs and the exit codes.
        endings: End everything that was started, also what `begin` and an interrupted story have left.
        begin: What must be there before the first line.
        keep: Keep more than logs and report.

    Raises:
        typer.Exit: Always; 0 if every line holds, 1 if not, 130 if it was interrupted.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    problem, began = "", time.monotonic()
    with on_stage(console, folder, *endings):
        begin()
        with Screen(console) as screen:
            try:
                tell(screen)
            except ChaosError as error:
                problem = str(error)
                screen.say("bad", problem)
            codes = nodes.exit_codes()
    good = judge(console, folder, prove(codes), problem, time.monotonic() - began, f"chaos-lightning {name}")
    if good and not keep:
        tidy(folder)
    raise typer.Exit(0 if good else 1)


@contextlib.contextmanager
def on_stage(console: Console, folder: Path, *endings: Callable[[], object]) -> Iterator[None]:
    """Whatever happens in it, also Ctrl+C and SIGTERM, all of `endings` are called after it, and to their end.

    Raises:
        typer.Exit: It was interrupted; the code is 130.
    """
    # Explicitly for both: a shell's background job comes with SIGINT ignored.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"interrupted; logs are in {folder}", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # this takes some seconds at most, and must not be cut off
        for end in endings:
            end()
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(directory: Path | None) -> Path:
    """The demo's folder, empty.

    Raises:
        ConfigurationError: It holds something: an audit over two runs' logs would judge neither.
    """
    folder = directory or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"--dir {folder}: expected an empty or a new folder; logs of two runs must not mix")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def judge(
    console: Console, folder: Path, checks: Sequence[proof.Check], problem: str, seconds: float, title: str
) -> bool:
    """Prints the lines of a proof, writes the report; whether everything is fine."""
    from chaos_lightning.observe.report import write_report

    console.print(proof.table(checks, f"\nWhat this proves ({seconds:.0f} s)"))
    failed = [check for check in checks if not check.ok]
    try:
        written = write_report(folder / "events", folder, title=title)
        console.print(f"\n{written.summary}", soft_wrap=True)
        console.print(f"report   {written.page}\npicture  {written.picture}", soft_wrap=True)
        if (network := folder / NETWORK).exists():
            console.print(f"network  {network}", soft_wrap=True)
        console.print(f"logs     {folder / 'events'}  (chaos-lightning audit judges them anew)", soft_wrap=True)
    except ConfigurationError as error:
        console.print(f"no report: {error}", soft_wrap=True)
    if problem or failed:
        console.print(f"FAILED: {len(failed)} of {len(checks)} lines; all logs are in {folder}", soft_wrap=True)
        if problem:
            console.print(f"the story broke off: {problem.splitlines()[0]}", soft_wrap=True, markup=False)
        return False
    console.print(f"ALL {len(checks)} LINES HOLD", style="bold green")
    return True


def tidy(folder: Path) -> None:
    """Leaves event logs and report."""
    for path in (*(folder / name for name in ("out", "checkpoints", "etcd")), *folder.glob("*-kept")):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob("chain.sqlite*"), *folder.glob("final-*.json"), *folder.glob("*.log"), folder / "enough"):
        path.unlink(missing_ok=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
