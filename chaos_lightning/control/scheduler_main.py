"""A scheduler process: `python -m chaos_lightning.control.scheduler_main --listen HOST:PORT ...`.

`chaos-lightning scheduler` runs the same in the foreground; control/hosting.py runs it detached, as a grandchild that
survives the member which needed it. Heavy imports (gRPC) come after the detaching fork. Nothing secret is accepted on
the command line. SIGTERM and SIGINT end it; members train on and find the next scheduler by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_lightning.control.options import SchedulerOptions, check_advertise, check_settings, settings_from_json
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.machine.addresses import WILDCARDS, split_endpoint
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Credentials

if TYPE_CHECKING:
    from chaos_lightning.control.candidacy import EtcdCandidacy
    from chaos_lightning.control.server import SchedulerServer
    from chaos_lightning.control.store import Store

_AGAIN_S = 0.2
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def open_store(options: SchedulerOptions) -> Store:
    """The chain to continue; a finished one is archived first, unless it is to be kept."""
    from chaos_lightning.control.chain import JobChain
    from chaos_lightning.control.memory_store import MemoryStore
    from chaos_lightning.control.sqlite_store import SqliteStore, archive

    path, job = options.store_path, options.settings.job
    if path is None:
        return MemoryStore(job)
    if path.exists() and not options.keep_finished:
        with JobChain(SqliteStore(path, job)) as old:
            finished = old.tip().finished
        if finished:
            _say(f"the chain in {path} is finished; archived as {archive(path)}")
    return SqliteStore(path, job, exclusive=True)


def _seat(options: SchedulerOptions, *, followed: bool) -> EtcdCandidacy | None:
    """In etcd several schedulers stand by for each other."""
    if not options.in_etcd:
        return None
    from chaos_lightning.control.candidacy import EtcdCandidacy
    from chaos_lightning.control.etcd_address import read_address

    return EtcdCandidacy(
        read_address(options.store), options.settings.job, keep_finished=options.keep_finished, followed=followed
    )


def _take_all_descriptors() -> None:
    """Each connection needs one, and the usual soft limit of 1,024 is no more than a crowd of strangers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(options: SchedulerOptions) -> int:
    """Serves until the job is finished, idleness, a signal or a failure; returns the exit code."""
    from chaos_lightning.control.server import CANNOT_LEAD, serve
    from chaos_lightning.control.server_config import ServerConfig
    from chaos_lightning.events.events import EventLog

    _take_all_descriptors()
    host, port = split_endpoint(options.listen)
    if options.in_etcd and host in WILDCARDS and not options.advertise:
        raise ConfigurationError(
            f"--listen {options.listen}: other schedulers would name that to members, who cannot call it; say where "
            "this one is reached: --advertise HOST:PORT"
        )
    config = ServerConfig(
        host=host,
        port=port,
        advertise=check_advertise(options.advertise, "--advertise "),
        token=Credentials.load(options.keys_dir, options.token_file),
        settings=check_settings(options.settings),
        idle_timeout_s=options.idle_timeout_s,
        linger_s=options.settings.linger_timeout_s,
        rebuild=options.rebuild,
        gives_way=options.hosted and not options.in_etcd,
    )

    servers: list[SchedulerServer] = []

    def on_started(server: SchedulerServer) -> None:
        servers.append(server)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.end, f"stopped by {number.name}")
        facts = server.status()
        place = f"term {facts['term']}, chain in {facts['store']}" if not options.in_etcd else f"store {options.store}"
        _say(
            f"scheduler of job {facts['job']} at {facts['endpoint']} (pid {facts['pid']}, "
            f"min_nodes {facts['min_nodes']}, max_nodes {facts['max_nodes']}, {place})"
        )

    with EventLog.in_directory(options.log_dir or None, options.settings.job, role="scheduler") as events:
        first = look = True
        while True:
            seat = _seat(options, followed=not first)
            if seat is not None and look and (words := seat.check(config.settings)):
                _say(words)
            open_it = seat.open_store if seat is not None else lambda: open_store(options)
            reason, failed = asyncio.run(serve(config, open_it, events, on_started=on_started, candidacy=seat))
            if seat is None or not failed:
                break
            _say(f"scheduler of job {options.settings.job} stands by again: {reason}")
            config = replace(config, owed=servers.pop().owed if servers else config.owed)
            first = False
            look = CANNOT_LEAD in reason  # what lies in etcd may be damaged: then it must not be tried for ever
            time.sleep(_AGAIN_S)
    _say(f"scheduler of job {options.settings.job} ends: {reason}")
    return EXIT_FAILED if failed else EXIT_OK


def _say(text: str) -> None:
    print(text, flush=True)


def detach(log: Path) -> None:
    """Goes on as a grandchild of the caller, in a session of its own, writing to `log`; the parent prints its pid."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid:
        os.write(1, f"{pid}\n".encode())
        os._exit(EXIT_OK)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    # A relative working directory must not keep a file system busy that its user wants to unmount.
    os.chdir("/")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos_lightning.control.scheduler_main", description=__doc__)
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--advertise", default="", help="HOST:PORT at which others reach it, if that is another one")
    parser.add_argument("--settings", default="{}", help="the job's rules, a JSON object of membership.types.Settings")
    parser.add_argument("--store", default="", help="the chain's file (default: below XDG_STATE_HOME), or etcd://...")
    parser.add_argument("--token-file", default="", help="file of the cluster token (or CHAOS_TOKEN_FILE, CHAOS_TOKEN)")
    parser.add_argument("--keys-dir", default="", help="folder of keys for mutual TLS (or CHAOS_KEYS_DIR)")
    parser.add_argument("--log-dir", default="", help="folder of the event log")
    parser.add_argument("--idle-timeout", type=float, default=0.0, help="seconds without any member; 0 never")
    parser.add_argument("--keep-finished", action="store_true", help="do not begin anew where a job is finished")
    parser.add_argument("--rebuild", action="store_true", help="begin a lost chain anew from what members report")
    parser.add_argument("--detach", default="", metavar="LOGFILE", help="run in the background")
    given = parser.parse_args(arguments)
    if given.detach:
        detach(Path(given.detach).absolute())
    try:
        settings: Settings = settings_from_json(given.settings)
        return run(
            SchedulerOptions(
                listen=given.listen,
                advertise=given.advertise,
                settings=settings,
                store=given.store,
                token_file=given.token_file,
                keys_dir=given.keys_dir,
                log_dir=given.log_dir,
                idle_timeout_s=given.idle_timeout,
                keep_finished=given.keep_finished,
                rebuild=given.rebuild,
                hosted=bool(given.detach),
            )
        )
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except ChaosError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
