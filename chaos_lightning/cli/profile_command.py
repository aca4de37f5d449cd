"""Measures a user's own model while their script trains it, and writes a profile for the planner (`chaos-lightning
profile`).

Theory of operation. The script runs as it is, with a hook that measures some of its steps and then ends it
(`pipeline.hooked`). Devices and links are those of a running job, else this machine's. The file is read again as `plan`
would read it, and its estimate for one device is told beside the step that was measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaos_lightning.control.commands import KeysDir, TokenFile
from chaos_lightning.errors import ConfigurationError, ProfileError
from chaos_lightning.pipeline import hooked

if TYPE_CHECKING:
    from chaos_lightning.pipeline.model_profile import ModelProfile, ProfiledFleet


def profile(
    command: Annotated[
        list[str], typer.Argument(help="What starts your training, behind two dashes.", metavar="-- COMMAND")
    ],
    out: Annotated[Path, typer.Option(help="The file to write; JSON if its name ends with .json.")] = Path(
        "profile.yaml"
    ),
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to measure, behind five that warm up; half of them by layer.")
    ] = 20,
    chain: Annotated[
        str,
        typer.Option(
            help="The list of blocks, such as model.layers; default: the longest of alike blocks.", metavar="PATH"
        ),
    ] = "",
    endpoint: Annotated[
        str,
        typer.Option(
            help="The scheduler of a running job, whose devices and links are taken. Default: one that answers at "
            "CHAOS_ENDPOINT or on this machine.",
        ),
    ] = "",
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    force: Annotated[bool, typer.Option("--force", help="Write over the file.")] = False,
) -> None:
    """Measure the layers of your own model, and write the file that `plan` and `simulate` take.

    Your script trains as ever for some steps, and is ended then: no line of it changes. It may use Lightning, or a loop
    of your own. Its model needs a list of blocks, an nn.Sequential or nn.ModuleList.

      chaos-lightning profile -- python train.py --lr 0.1

      chaos-lightning plan profile.yaml --devices 8 --micro-batches 32

    The script itself writes what it writes when it trains: logs, checkpoints. Exit code 2 if the model or its loop
    could not run as a pipeline, 1 if the script ended before enough steps.
    """
    if steps < 4:
        raise ConfigurationError(f"--steps is {steps}; expected at least 4")
    if out.exists() and not force:
        raise ConfigurationError(f"{out} is there already; give --force to write over it, or --out FILE")
    if not out.absolute().parent.is_dir():
        raise ConfigurationError(f"--out {out}: there is no folder {out.absolute().parent}")
    facts = _job(endpoint, token_file, keys_dir)
    measured = _measured(command, steps, chain)
    from chaos_lightning.pipeline.model_profile import fleet_of_job, this_machine, write

    fleet = fleet_of_job(facts, measured) or this_machine(measured)
    write(out, measured, fleet)
    _show(out, measured, fleet)


def _job(endpoint: str, token_file: str, keys_dir: str) -> dict[str, Any]:
    """Returns the status of the scheduler's job; {} if no endpoint was given and none answers at the default one."""
    from chaos_lightning.control.requests import fetch_all
    from chaos_lightning.errors import ChaosError
    from chaos_lightning.security.credentials import Credentials
    from chaos_lightning.settings import DEFAULT_ENDPOINT

    place = endpoint or os.environ.get("CHAOS_ENDPOINT") or DEFAULT_ENDPOINT  # the script itself may start that one
    try:
        return fetch_all(place, Credentials.load(keys_dir, token_file), 5.0 if endpoint else 1.0)
    except ChaosError:
        if endpoint:
            raise
        return {}


def _measured(command: list[str], steps: int, chain: str) -> ModelProfile:
    """Runs the user's script until the model's profile is measured; returns the profile."""
    from chaos_lightning.pipeline.model_profile import ModelProfile

    words = list(command)
    if words[0] in ("python", "python3"):
        words[0] = sys.executable  # of this environment, which has this package
    elif words[0].endswith(".py"):
        words.insert(0, sys.executable)
    with tempfile.TemporaryDirectory(prefix="chaos-profile-") as place:
        folder = Path(place)
        environ = hooked.prepare(folder, {"steps": steps, "chain": chain}, os.environ)
        try:
            code = subprocess.run(words, env=environ).returncode
        except OSError as error:
            raise ConfigurationError(
                f"{words[0]} cannot be run: {error}; expected a command such as python train.py"
            ) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        if (folder / hooked.PROFILE).exists():
            return ModelProfile.from_json((folder / hooked.PROFILE).read_text())
        if (folder / hooked.REFUSED).exists():
            raise ConfigurationError((folder / hooked.REFUSED).read_text())
        raise ProfileError(_too_early(folder, words, code, steps))


def _too_early(folder: Path, words: list[str], code: int, steps: int) -> str:
    """Returns why the script gave no profile, as text."""
    ended = f"{' '.join(words[:2])} ended with code {code}"
    if (folder / hooked.PROGRESS).exists():
        done = (folder / hooked.PROGRESS).read_text()
        return (
            f"{ended} after {done} of {steps} measured steps; let it train longer, or give fewer --steps (at least 4)"
        )
    if code:
        return f"{ended} before an optimizer stepped; its own words are above"
    return (
        f"{ended}, and no optimizer of torch stepped in it, so nothing was measured; expected a script that trains, "
        "run by a Python that has chaos-lightning (not python -I, -S or -E)"
    )


def _show(out: Path, measured: ModelProfile, fleet: ProfiledFleet) -> None:
    from rich.console import Console

    from chaos_lightning.cli.plan_picture import layer_table
    from chaos_lightning.machine.terminal import printable
    from chaos_lightning.machine.units import duration
    from chaos_lightning.pipeline.model_profile import estimated_s
    from chaos_lightning.planning.pipelines.files import read_job

    console = Console(markup=False, highlight=False)
    estimated, took = estimated_s(out), measured.step_s
    console.print(layer_table(read_job(out)))
    number = f"{measured.micro_batches} micro-batch" + "es" * (measured.micro_batches > 1)
    console.print(
        f"a step of {number} takes {duration(took)} here, {duration(measured.period_s)} with what lies between two "
        f"steps; estimated from the layers {duration(estimated)}, which is {estimated / took - 1:+.1%}"
    )
    for note in measured.notes:
        console.print(f"note: {printable(note)}", style="yellow")
    console.print(printable(fleet.words))
    more = " --micro-batches N, since a pipeline needs several" * (measured.micro_batches == 1)
    console.print(f"written to {out}; go on with chaos-lightning plan {out}{more}")
