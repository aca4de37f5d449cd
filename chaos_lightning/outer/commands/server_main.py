"""Runs a whole server of outer sync on one machine: `chaos-lightning ps up`.

One supervisor (outer/commands/supervisor.py) runs the leader, the followers and a warm spare. All that must not be lost
lies in one folder: the chain, and a folder for each follower. Whoever starts a server on that folder again continues
the job (O5), with another number of followers, too (O15); a lock keeps a second one off it. The folder of a job that
has ended is put away first, unless it is to be kept. outer/cluster/server_start.py runs this detached, so that it
outlives the training that needed it first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chaos_lightning.declared import absolute, command_line, declared, read_options
from chaos_lightning.errors import ConfigurationError, StateError, StoreError
from chaos_lightning.machine.addresses import WILDCARDS, join_endpoint, split_endpoint
from chaos_lightning.machine.terminal import TerminalGuard, printable
from chaos_lightning.outer.commands.leader_main import EXIT_IDLE
from chaos_lightning.outer.commands.supervisor import Supervisor
from chaos_lightning.outer.exchange.server_options import LeaderOptions, ServerOptions
from chaos_lightning.outer.follower.follower_options import FollowerOptions
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.recut_steps import must_recut, needless
from chaos_lightning.outer.server.ended_folders import ENDED, clean_up, ended_folders
from chaos_lightning.security.credentials import Credentials, check_bind
from chaos_lightning.service.main import EXIT_OK, EXIT_USAGE, detach, exit_code, options_parser
from chaos_lightning.service.options import forget_logs

HELP = """\
Run a leader and followers of outer sync on this machine, with a warm spare.

What dies is started again, on its files. Ctrl+C ends all of it; clusters train on, and the job goes on when the same
command is given again. Usually not needed: the first training script on a machine starts one.
"""


def gives_way(pid: int) -> str:
    """Returns the words that the server with this pid logs when it ends because another server uses its folder; the pid
    is in them since both may write to one log.
    """
    return f"pid {pid} gives way"


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks a server's folder while the block runs, so that no other server uses it.

    Raises:
        ConfigurationError: Another one runs on it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder.with_name(f"{folder.name}.lock")
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another server uses {folder}, so {gives_way(os.getpid())}; if that one is not wanted end it, or "
                "choose another --dir and port"
            ) from error
        yield


def put_away(options: ServerOptions) -> str:
    """Moves the folder of a job that has ended to another place; returns that place, or "" if nothing was moved.

    Raises:
        StoreError: The store in the folder contains no chain of outer sync.
    """
    path = options.store_path
    if options.keep_finished or path is None or not path.exists():
        return ""
    from chaos_lightning.outer.server.chain_store import load_chain
    from chaos_lightning.service.sqlite_store import SqliteStore

    with SqliteStore(path, options.job) as old:
        if load_chain(old).ended is None:
            return ""
    if path.parent != options.folder:
        raise StoreError(
            f"job {options.job} has ended, and its chain {path} is not in the folder of its followers, "
            f"{options.folder}: put both away, or give the job another name"
        )
    place = options.folder.with_name(f"{options.folder.name}{ENDED}{time.strftime('%Y%m%d-%H%M%S')}")
    options.folder.rename(place)
    return str(place)


def followers_of(options: ServerOptions) -> list[str]:
    """Returns the names of the followers to run; if their number has changed, the job's shards are cut anew (O15).

    Raises:
        ConfigurationError: Files of a follower that holds a shard are not here.
        StateError: Files of followers are damaged, or new ones cannot be written.
        StoreError: The chain cannot be read.
    """
    names = [f"{options.name}-{number}" for number in range(options.followers or 1)]
    chain, path = _chain(options), options.store_path
    if chain is None and options.in_etcd and not options.followers:  # it may not answer: who has files holds a shard
        return sorted(place.name for place in options.folder.glob(f"{options.name}-*") if place.is_dir()) or names
    if chain is None or not chain.cut or chain.ended is not None:
        return names
    here = [name for name in chain.cut if (options.folder / name).is_dir()]
    if path is None:
        if options.followers and (left := [name for name in here if name not in names]):
            raise ConfigurationError(
                f"--followers {options.followers}: the shards of job {options.job} are cut for {len(chain.cut)}, and "
                f"{', '.join(left)}, whose files are in {options.folder}, would not be started; with its chain in "
                f"etcd the cut stays: give --followers {len(chain.cut)}, or move that folder to where it is started"
            )
        return names if options.followers else here or names
    _clear_up(chain, options.folder)
    wanted = names if options.followers else [*chain.cut]
    if must_recut(chain, wanted):
        command = [
            sys.executable,
            "-m",
            "chaos_lightning.outer.commands.recut",
            str(path),
            options.job,
            str(options.folder),
        ]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            raise (ConfigurationError if done.returncode == EXIT_USAGE else StateError)(done.stderr.strip())
        _say(f"job {options.job}: {done.stdout.strip()}")
    return names if options.followers else here or names


def _chain(options: ServerOptions) -> OuterChain | None:
    """Returns the job's chain; None if there is none yet, or if etcd does not answer."""
    from chaos_lightning.outer.server.chain_store import load_chain
    from chaos_lightning.outer.server.standing import open_outer_store
    from chaos_lightning.service.sqlite_store import SqliteStore

    path = options.store_path
    if options.in_etcd:
        try:
            with open_outer_store(options.store, options.job) as store:
                return load_chain(store)
        except StoreError:
            return None
    if path is None or not path.exists():
        return None
    with SqliteStore(path, options.job) as store:
        return load_chain(store)


def _clear_up(chain: OuterChain, folder: Path) -> None:
    """Deletes the files of followers that have no shard any more, unless a durable version needs them."""
    for place in folder.iterdir():
        if place.is_dir():
            found = [(path, path.name[1:].partition("-")[0]) for path in place.glob("*/v*-*.safetensors")]
            files = {path: int(number) for path, number in found if number.isdecimal()}
            if needless(chain, place.name, max(files.values(), default=0)):
                for path in files:
                    path.unlink(missing_ok=True)


def _leader(options: ServerOptions) -> list[str]:
    """Returns the command that runs the leader. It never moves the chain of a job that has ended, since followers may
    still serve that job's last version.
    """
    given = {name: getattr(options, name) for name in declared(LeaderOptions)}
    path = options.store_path
    given |= {"store": options.store if path is None else str(path.absolute()), "keep_finished": True}
    return ["-m", "chaos_lightning.outer.commands.leader_main", *command_line(LeaderOptions(**given))]


def _follower(options: ServerOptions, name: str) -> list[str]:
    """Returns a follower's arguments: the server's settings, with a name, folder and address of its own."""
    host, port = split_endpoint(options.listen)
    given = {known: getattr(options, known) for known in declared(FollowerOptions) if known in declared(ServerOptions)}
    given |= {"server": join_endpoint("127.0.0.1" if host in WILDCARDS else host, port), "advertise": "", "name": name}
    given |= {"dir": str(options.folder / name), "bind": options.bind or join_endpoint(host, 0)}
    return command_line(FollowerOptions(**given))


def run(options: ServerOptions, *, outlives: bool = False) -> int:
    """Runs a server until its job has ended, nobody needs it or a signal comes; returns the exit code.

    Args:
        options: Options of the server.
        outlives: Whether a cluster has started the server, and may be asked to leave by the same signal.
    """
    from chaos_lightning.events.events import EventLog

    TerminalGuard().open()
    check_bind(split_endpoint(options.listen)[0], Credentials.load(options.keys_dir, options.token_file))
    with _held(options.folder):
        if place := put_away(options):
            _say(f"job {options.job} had ended; its folder is put away as {place}")
        for gone in clean_up(options.folder, time.time()):
            _say(f"removed {gone.path}: its job ended, and nothing was written there for 30 days")
        for ended in ended_folders(options.folder):
            _say(ended.words)
        options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        names = followers_of(options)
        _say(f"server of job {options.job} at {options.listen}: {', '.join(names)}, files in {options.folder}")
        with EventLog.in_directory(options.log_folder, options.job, role="server") as events:
            forget_logs(options.log_dir)
            followers = {name: _follower(options, name) for name in names}
            code = Supervisor(_leader(options), followers, events.emit, outlives=outlives).run()
    _say(f"server of job {options.job} ends")
    return EXIT_OK if code == EXIT_IDLE else code


def _say(text: str) -> None:
    print(printable(text), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the options of `ps up` and runs a server; returns the exit code."""
    known = declared(ServerOptions)
    parser = options_parser("ps up", HELP, known)
    parser.add_argument("--detach", default="", metavar="LOGFILE", help=argparse.SUPPRESS)  # in the background
    given = parser.parse_args(arguments)
    if given.detach:
        detach(Path(given.detach).absolute())
    return exit_code(lambda: run(absolute(ServerOptions(**read_options(given, known))), outlives=bool(given.detach)))


if __name__ == "__main__":
    sys.exit(main())
