"""Runs a leader's process: `chaos-lightning ps leader`, or `python -m chaos_lightning.outer.commands.leader_main`.

Neither imports torch. Nothing secret is accepted on the command line. The exit code tells whoever keeps the process
running (outer/commands/supervisor.py): 0, the job has ended; 2, it was told what cannot work; 3, nobody needs it for
now; all else, start it again. SIGTERM, SIGINT and SIGHUP end it; clusters train on and find the next leader by
themselves. Under a supervisor these are ignored: it alone says when to end (machine/signals.py).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos_lightning.declared import declared, read_options
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.signals import END, STAY, ends
from chaos_lightning.machine.terminal import TerminalGuard, printable
from chaos_lightning.outer.exchange.server_options import LeaderOptions
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.main import EXIT_FAILED, EXIT_OK, exit_code, options_parser

if TYPE_CHECKING:
    from chaos_lightning.outer.server.leader_server import OuterServer
    from chaos_lightning.service.store import Store

HELP = """\
Run the leader of outer sync in the foreground.

It decides what becomes of the pushes of all clusters, and holds no parameters: that is the followers' part
(`chaos-lightning ps follower`). `chaos-lightning ps up` runs both. It may be killed and started again at any time:
clusters train on meanwhile, and the chain of decisions is continued from its store.
"""
EXIT_IDLE = 3
"""Exit code of a leader to which no cluster came for long: the job goes on when one does."""


def open_store(options: LeaderOptions) -> Store:
    """Opens the chain that the leader continues; a chain whose job has ended is moved away first, unless
    `keep_finished` is set.
    """
    from chaos_lightning.outer.server.chain_store import load_chain
    from chaos_lightning.service.memory_store import MemoryStore
    from chaos_lightning.service.sqlite_store import SqliteStore, archive

    path = options.store_path
    if path is None:
        return MemoryStore(options.job)
    if path.exists() and not options.keep_finished:
        with SqliteStore(path, options.job) as old:
            ended = load_chain(old).ended
        if ended is not None:
            _say(f"job {options.job} has ended with {ended.version}; its chain is put away as {archive(path)}")
    return SqliteStore(path, options.job, exclusive=True)


def run(options: LeaderOptions) -> int:
    """Serves until the job has ended, idleness, a signal or a failure; returns the exit code."""
    from chaos_lightning.events.events import EventLog
    from chaos_lightning.outer.server.leader_server import LeaderConfig, OuterServer
    from chaos_lightning.outer.server.standing import candidacy_of, over
    from chaos_lightning.service.server import CANNOT_LEAD, keep_standing, serve

    host, port = split_endpoint(options.listen)
    secret = Credentials.load(options.keys_dir, options.token_file)
    config = LeaderConfig(options=options, host=host, port=port, secret=secret)
    stopped: list[signal.Signals] = []
    servers: list[OuterServer] = []

    def on_started(server: OuterServer) -> None:

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            server.life.end(f"stopped by {number.name}")

        def asked() -> None:
            stopped.append(STAY)
            server.asked_to_end("its supervisor was asked to end")

        loop = asyncio.get_running_loop()
        for number in (*ends(), END):
            loop.add_signal_handler(number, stop, number)
        loop.add_signal_handler(STAY, asked)
        _say(f"leader of job {options.job} at {server.endpoint}, store {options.store or options.store_path}")

    def once(followed: bool) -> tuple[str, bool]:
        if options.in_etcd:
            candidacy, keeps = candidacy_of(options.store, options.job), options.keep_finished or followed
            server = OuterServer(
                config, lambda: candidacy.open_store(lambda store: "" if keeps else over(store)), events, candidacy
            )
        else:
            server = OuterServer(config, lambda: open_store(options), events)
        servers.append(server)
        return asyncio.run(serve(server, on_started))

    def again(reason: str) -> bool:
        if not options.in_etcd or CANNOT_LEAD in reason:
            return False
        _say(f"leader of job {options.job} stands by again: {reason}")
        return True

    with EventLog.in_directory(options.log_folder, options.job, role="leader") as events:
        reason, failed = keep_standing(once, again)
    _say(f"leader of job {options.job} ends: {reason}")
    if stopped:
        return 128 + stopped[0]
    return EXIT_FAILED if failed else EXIT_OK if servers[-1].finished else EXIT_IDLE


def _say(text: str) -> None:
    print(printable(text), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the options of `ps leader` and runs a leader; returns the exit code."""
    known = declared(LeaderOptions)
    parser = options_parser("ps leader", HELP, known)
    TerminalGuard().open()
    return exit_code(lambda: run(LeaderOptions(**read_options(parser.parse_args(arguments), known))))


if __name__ == "__main__":
    sys.exit(main())
