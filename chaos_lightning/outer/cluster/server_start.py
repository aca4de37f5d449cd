"""Starts a parameter server at an endpoint of this machine if none serves there yet.

Theory of operation. As for all services (service/hosting.py). A whole server is started
(outer/commands/server_main.py); a lock keeps a second one off its files. Who had a job before and finds its server away
starts it on its files (`again`), if these are that job's: nothing begins anew, and the server of no other job takes the
place of one that was started on another folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from chaos_lightning.declared import absolute, command_line
from chaos_lightning.errors import ChaosError, ConfigurationError, SchedulerUnreachableError, StoreError
from chaos_lightning.machine.addresses import is_local, split_endpoint
from chaos_lightning.machine.process_table import start_time
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.commands.server_main import gives_way
from chaos_lightning.outer.exchange.control_client import WHAT, fetch_facts
from chaos_lightning.outer.exchange.server_options import ServerOptions
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.security.credentials import Credentials, Secret, check_bind
from chaos_lightning.service.hosting import (
    IDLE_TIMEOUT_S,
    HostedProcess,
    ServiceStart,
    ensure,
    facts_at,
    last_words,
    listens,
    start_detached,
)
from chaos_lightning.service.sqlite_store import SqliteStore

logger = logging.getLogger("chaos_lightning.outer")

_ANSWER_S = 2.0
"""Longest time, s, in which a server may answer with its facts."""


def look(endpoint: str, job: str, secret: Secret) -> str:
    """Returns what an endpoint's port shows: FREE, SILENT or ODD (service/hosting.py), "serves" (this job's server) or
    "ended" (this job's server, after the job's end).

    Raises:
        ConfigurationError: The server of another job is there.
        RefusedError: The server at the endpoint does not accept the credentials, or is no parameter server.
    """
    facts = facts_at(endpoint, lambda: fetch_facts(endpoint, secret, _ANSWER_S, follow=False))
    if isinstance(facts, str):
        return facts
    if facts.get("job") != job:
        raise ConfigurationError(
            f"at {endpoint} runs the {WHAT} of job {facts.get('job')!r}, not of {job!r}: use another port, or the same "
            "job name"
        )
    return "ended" if facts.get("phase") == "ended" else "serves"


def ensure_server(
    options: ServerOptions,
    secret: Secret = b"",
    *,
    again: bool = False,
    job_id: str = "",
    timeout_s: float = 30.0,
    given_up: Callable[[], bool] = lambda: False,
) -> HostedProcess | None:
    """Starts a server at `options.listen` if that address is on this machine and free; returns the server, or None if
    none was started.

    Args:
        options: Options of the server to run; `token_file`, `keys_dir` and `keep_finished` are not used.
        secret: Cluster token, which is handed over in the child's environment; or credentials, whose folder is named.
        again: Whether the caller was already in a job: a server without that job's files is of no use, and one whose
            job has ended is accepted, since it says so to whoever comes.
        job_id: With `again`: id of the job that the caller had; "": it does not know.
        timeout_s: Seconds to wait for an answer. After some seconds the wait and its reason are logged.
        given_up: Asked now and then; returns true if the caller waits no more; then None is returned.

    Raises:
        ConfigurationError, RefusedError: What is there cannot serve this job; the message says why.
        StoreError: `again`, and the job's files are not there, or another job's are.
        SchedulerUnreachableError: Started, but it ended or did not answer; the message quotes its log.
    """
    host, _ = split_endpoint(options.listen)
    if not is_local(host):
        return None
    check_bind(host, secret)

    def looked() -> str:
        found = look(options.listen, options.job, secret)
        if found == "serves" and not spawned and not again and options.followers:
            _compare(options, secret)
        return found

    def start() -> HostedProcess:
        spawned.append(_spawn(options, Credentials.of(secret), again=again, job_id=job_id))
        return spawned[-1]

    def ended(started: HostedProcess) -> bool:
        if not _gave_way(started):
            raise SchedulerUnreachableError(f"the {WHAT} ended at once; {last_words(started.log)}")
        return True

    spawned: list[HostedProcess] = []
    service = ServiceStart(
        what=WHAT,
        listen=options.listen,
        job=options.job,
        look=looked,
        good=("serves", "ended") if again else ("serves",),
        over="ended",
        start=start,
        ended=ended,
        supervises=True,
        own=lambda started: fetch_facts(started.endpoint, secret, follow=False).get("parent_pid") == started.pid,
        lost=lambda started: "another process of this machine starts it" if _gave_way(started) else "",
    )
    return ensure(service, timeout_s, given_up)


def _gave_way(started: HostedProcess) -> bool:
    """Returns whether the server that this process started has ended because another server uses its folder.

    Servers of one folder write to one log, so these words need not be its last ones.
    """
    try:
        return not started.alive() and gives_way(started.pid) in started.log.read_text(errors="replace")
    except OSError:
        return False


def _compare(options: ServerOptions, secret: Secret) -> None:
    """Warns if the server that runs already has another number of followers than `options` asks for."""
    try:
        facts = fetch_facts(options.listen, secret, _ANSWER_S, follow=False)
    except SchedulerUnreachableError:
        return
    held, wanted = sum(follower["shard"] >= 0 for follower in facts["followers"]), facts["wanted"]
    if options.followers not in (wanted, held):
        logger.warning(
            "job %s has a %s at %s already, with %d followers and not %d as asked for here; that stays. Stop it, and "
            "start it with `chaos-lightning ps up --followers %d` on the machine that has its files",
            options.job, WHAT, options.listen, held or wanted, options.followers, options.followers,
        )  # fmt: skip


def host_for_cluster(
    options: ClusterOptions, *, again: bool = False, job_id: str = "", given_up: Callable[[], bool] = lambda: False
) -> HostedProcess | None:
    """Starts a server for a cluster by `ensure_server`: when the cluster starts, and (`again`) when its job's server is
    gone.

    Nothing is started where several leaders stand by for each other: each on a chain of its own would lead a job of its
    own.
    """
    if not options.host_server or len(options.endpoints) != 1:
        return None
    server = ServerOptions(
        listen=options.endpoints[0], job=options.job, followers=options.followers, log_dir=options.log_dir
    )
    secret = Credentials.load(options.keys_dir, options.token_file)
    return ensure_server(server, secret, again=again, job_id=job_id, given_up=given_up)


def others_in(options: ClusterOptions) -> bool:
    """Returns whether other clusters are in this job, so that this one is not the oldest; False if the server does not
    answer at once.
    """
    if not any(listens(endpoint) for endpoint in options.endpoints):
        return False
    try:
        secret = Credentials.load(options.keys_dir, options.token_file)
        facts = fetch_facts(",".join(options.endpoints), secret, _ANSWER_S)
    except ChaosError:  # the start that follows says it
        return False
    there = {each["name"] for each in facts.get("clusters", ())}
    return (facts.get("job"), facts.get("phase") == "ended") == (options.job, False) and bool(there - {options.name})


def _check_chain(options: ServerOptions, job_id: str) -> None:
    """Checks that this job's chain is in the file where a server would look for it; `job_id` "" accepts any job's
    chain.

    Raises:
        StoreError: The file has no chain of this job, or cannot be read.
        ConfigurationError: The file has the chain of a job with another name.
    """
    path, other = options.store_path, ""
    if path is None:
        return
    if path.exists():
        with SqliteStore(path, options.job, read_only=True) as store:
            found = load_chain(store).job_id
        if job_id in ("", found):
            return
        other = f", but another's ({found[:8] or 'not begun yet'} and not {job_id[:8]})"
    raise StoreError(
        f"no {WHAT} is started at {options.listen}: job {options.job} has begun, and its chain is not at {path}"
        f"{other}. Start one there on the folder that holds it: `chaos-lightning ps up --dir DIR`"
    )


def _spawn(options: ServerOptions, secret: Credentials, *, again: bool, job_id: str) -> HostedProcess:
    path, folder = options.store_path, options.folder.absolute()
    if again:
        _check_chain(options, job_id)
    log = folder.with_name(f"{folder.name}.log")
    arguments = command_line(
        replace(
            absolute(options),
            dir=str(folder),
            store=str(path.absolute()) if path is not None else options.store,
            idle_timeout_s=options.idle_timeout_s or IDLE_TIMEOUT_S,
            keep_finished=again,
            keys_dir=secret.keys_dir,
            token_file="",
        )
    )
    pid = start_detached("chaos_lightning.outer.commands.server_main", arguments, log, secret, f"a {WHAT}")
    return HostedProcess(options.listen, pid, start_time(pid), log, path)
