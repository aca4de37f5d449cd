"""Runs a follower's process: `chaos-lightning ps follower`, or `python -m
chaos_lightning.outer.commands.follower_main`.

Heavy imports (torch, gRPC) come late; a warm spare (outer/commands/spare.py) has done them already, and calls `main`.
Nothing secret is accepted on the command line. The exit code tells whoever keeps the process running
(outer/commands/supervisor.py; outer/commands/leader_main.py has the same ones): 0, the job has ended; 2, it was told
what cannot work; all else, start it again. SIGTERM, SIGINT and SIGHUP end it; what it had not saved is computed again
at the next start.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos_lightning.declared import declared, read_options
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.heap import give_back_large
from chaos_lightning.machine.signals import END, ends
from chaos_lightning.machine.terminal import TerminalGuard, printable
from chaos_lightning.outer.follower.follower_options import FollowerOptions
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.main import EXIT_FAILED, EXIT_OK, exit_code, options_parser
from chaos_lightning.service.options import forget_logs

if TYPE_CHECKING:
    from chaos_lightning.outer.follower.follower_process import FollowerProcess

HELP = """\
Run a follower of outer sync in the foreground.

It holds a shard of the outer state: parameters, momentum and buffer. Clusters send it their pushes and fetch versions
from it; the leader (`chaos-lightning ps leader`) says what becomes of them. It may be killed and started again at any
time, on the same folder. `chaos-lightning ps up` runs a leader and its followers.
"""


def run(options: FollowerOptions) -> int:
    """Runs the follower until the job has ended, a signal or a failure; returns the exit code."""
    import torch

    from chaos_lightning.events.events import EventLog
    from chaos_lightning.outer.exchange.control_client import control_client
    from chaos_lightning.outer.follower.follower_process import FollowerProcess
    from chaos_lightning.outer.follower.shard_files import ShardFiles

    for module in filter(None, options.codecs.split(",")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(f"--codecs {module}: {error}; is it on PYTHONPATH here?") from error
    torch.set_num_threads(1)  # it shares its machine with those who train
    give_back_large()
    secret = Credentials.load(options.keys_dir, options.token_file)
    stopped: list[signal.Signals] = []
    with contextlib.ExitStack() as closing:
        events = closing.enter_context(EventLog.in_directory(options.log_folder, options.called, role="follower"))
        forget_logs(options.log_dir)
        process = FollowerProcess(
            options.called,
            ShardFiles(options.folder, options.job),
            options.place,
            secret,
            lambda **calls: control_client(
                options.endpoints,
                secret,
                call="Follow",
                on_trouble=lambda error: _say(f"follower {options.called} waits for the leader: {error}"),
                **calls,
            ),
            events.emit,
            options.advertised,
            options.links,
        )
        closing.callback(process.close)
        _end_on_signals(process, stopped)
        process.start()
        _say(f"follower {options.called} of job {options.job} at {process.endpoint}, files in {options.folder}")
        end = process.wait()
        assert end is not None
        if not end.failed and not stopped:
            process.linger()
    _say(f"follower {options.called} of job {options.job} ends: {end.reason}")
    if stopped:
        return 128 + stopped[0]
    return EXIT_FAILED if end.failed else EXIT_OK


def _end_on_signals(process: FollowerProcess, stopped: list[signal.Signals]) -> None:
    def stop(number: int, frame: object) -> None:
        stopped.append(signal.Signals(number))
        process.end(f"stopped by {signal.Signals(number).name}")

    for number in (*ends(), END):
        signal.signal(number, stop)


def _say(text: str) -> None:
    print(printable(text), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the options of `ps follower` and runs a follower; returns the exit code."""
    known = declared(FollowerOptions)
    parser = options_parser("ps follower", HELP, known)
    TerminalGuard().open()
    return exit_code(lambda: run(FollowerOptions(**read_options(parser.parse_args(arguments), known))))


if __name__ == "__main__":
    sys.exit(main())
