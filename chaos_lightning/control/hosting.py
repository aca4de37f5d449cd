"""Starts a scheduler at an endpoint of this machine, unless one already serves it.

Theory of operation. Whoever needs a scheduler looks at the endpoint. If it is another machine's, that is that machine's
affair. If somebody serves this job there, fine. If nobody listens, a scheduler process is started, detached, so that it
outlives the member, the torchrun agent and their process groups; then the endpoint is looked at until it answers. Two
starters may race: only one scheduler gets the port, the other one ends before it has touched the chain, and both
starters find the winner. The chain's file decides what the job is: an unfinished one is continued, a finished one is
archived and a new one begins - or, with `continue_only`, nothing is started, for a worker that restarts must not repeat
its job.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chaos_lightning.control.chain import Tip, open_chain
from chaos_lightning.control.options import (
    GAVE_WAY,
    HOSTED,
    MEMORY,
    SchedulerOptions,
    check_advertise,
    check_settings,
    rules_of,
    settings_from_json,
)
from chaos_lightning.declared import absolute
from chaos_lightning.errors import (
    ChaosError,
    ConfigurationError,
    RefusedError,
    SchedulerUnreachableError,
    StoreError,
)
from chaos_lightning.machine.addresses import is_local, split_endpoint
from chaos_lightning.machine.listener import is_another_kind, who_listens
from chaos_lightning.machine.process_table import start_time, still_runs
from chaos_lightning.membership.peers import short
from chaos_lightning.protocol.types import PlanSpec
from chaos_lightning.security.credentials import Credentials, Secret, check_bind
from chaos_lightning.settings import EngineConfig, from_environment

logger = logging.getLogger("chaos_lightning.control")

IDLE_TIMEOUT_S = 300.0
"""Seconds without members after which a hosted scheduler ends; its chain stays."""
_LOOK_INTERVAL_S = 0.05
_ODD_LISTENER_PATIENCE_S = 6.0
TELL_S = 5.0
"""Seconds between two lines of a process that waits for a scheduler."""
GAVE_WAY_PAUSE_S = 15.0
"""Seconds for which no scheduler is hosted where a hosted one gave the endpoint up: the one that it gave way to needs
the port, and may still be starting.
"""


@dataclass(frozen=True)
class HostedScheduler:
    """Scheduler process that this process started and that outlives it."""

    endpoint: str
    pid: int
    pid_start: int
    log: Path
    store: Path | None

    def alive(self) -> bool:
        """Returns whether the scheduler's process still runs."""
        return self.pid_start != 0 and still_runs(self.pid, self.pid_start)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the scheduler with SIGTERM; members train on without one. Returns True once it has ended."""
        if not self.alive():
            return True
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return not self.alive()
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            return bool(select.select([handle], [], [], timeout_s)[0])
        except ProcessLookupError:
            return True
        finally:
            os.close(handle)


def listens(endpoint: str) -> bool:
    """Returns whether some process accepts connections at an endpoint."""
    host, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except TimeoutError:
        return True  # so many wait for whoever has the port that the kernel takes no more
    except OSError:
        return False


def look(endpoint: str, job: str, token: Secret) -> str:
    """Returns what an endpoint's port shows: "free", "serves" (this job), "tells" (newcomers that this job has
    finished), "finished" (still lingering), "past" (lingering, of another job), "silent" or "odd".

    Whoever has the port is silent if it says nothing: it begins, is frozen, or has no descriptor left; and odd if it
    hangs up, or is no gRPC server.

    Raises:
        ConfigurationError: A scheduler of another job is there.
        RefusedError: The server there does not accept the credentials, or is no scheduler.
    """
    from chaos_lightning.control.channel import fetch_status

    if not listens(endpoint):
        return "free"
    try:
        status = fetch_status(endpoint, token, timeout_s=2.0, follow=False)
    except SchedulerUnreachableError:
        return "odd" if is_another_kind(*split_endpoint(endpoint)) else "silent"
    if status.get("job") != job and status.get("finished") and status.get("hosted"):
        return "past"
    _check_job(endpoint, job, status)
    if not status.get("finished"):
        return "serves"
    return "tells" if status.get("machine", {}).get("tells") else "finished"


def _check_job(endpoint: str, job: str, status: dict[str, Any]) -> None:
    if status.get("job") != job:
        raise ConfigurationError(
            f"at {endpoint} runs the scheduler of job {status.get('job')!r}, not of {job!r}: "
            "use another port, or the same job name (torchrun: --rdzv-id)"
        )


def is_over(config: EngineConfig, options: SchedulerOptions, secret: Secret, *, continue_only: bool) -> bool:
    """Returns whether the job has finished, and its scheduler, which others started, no longer tells newcomers so.

    Where none answers, a chain in etcd says it to those that had a job (`continue_only`). To others it says nothing:
    the next job of that name may be about to begin.

    Raises:
        ConfigurationError: A scheduler of another job is there.
        RefusedError: The server there does not accept the credentials, or is no scheduler.
    """
    from chaos_lightning.control.channel import fetch_status

    try:
        status = fetch_status(config.endpoint, secret, timeout_s=2.0)
    except SchedulerUnreachableError:
        try:
            return continue_only and options.in_etcd and _finished(options)
        except ChaosError:
            return False  # the workers wait for both, and say so
    _check_job(config.endpoint, config.job, status)
    machine = status.get("machine", {})
    return (bool(status.get("finished")) or machine.get("phase") == "finished") and not machine.get("tells")


def ensure_scheduler(
    options: SchedulerOptions,
    token: Secret = b"",
    *,
    continue_only: bool = False,
    serves_end: bool = True,
    timeout_s: float = 30.0,
    given_up: Callable[[], bool] = lambda: False,
    chain: str = "",
) -> HostedScheduler | None:
    """Starts a scheduler at `options.listen` if that is a free port of this machine; returns it, or None if none was
    started.

    Args:
        options: Options of the scheduler to start; `token_file` and `keys_dir` are not used.
        token: Cluster token, which is handed over in the child's environment; or credentials, whose folder is named.
        continue_only: Do not begin a new job where one is finished; that is a RefusedError then, unless newcomers are
            told of the end, and `serves_end`.
        serves_end: Whether a newcomer is about to come, which would be told of the end.
        timeout_s: Seconds to wait for an answer. A wait of more than some seconds is logged, with what is waited for.
        given_up: Asked now and then: true if the caller waits no more; then None is returned.
        chain: Id of the job's chain, as the caller knows it: no scheduler is started on a store that lacks it.

    Raises:
        ConfigurationError, RefusedError: What is there cannot serve this job; the message says why.
        SchedulerUnreachableError: The scheduler was started, but ended or did not answer; the message quotes its log.
    """
    host, _ = split_endpoint(options.listen)
    job = options.settings.job
    if not is_local(host) or (continue_only and options.store == MEMORY):
        return None
    check_bind(host, token)
    check_settings(options.settings)
    started: HostedScheduler | None = None
    begun = told = time.monotonic()
    odd_since: float | None = None
    while not given_up():
        found = look(options.listen, job, token)
        now = time.monotonic()
        odd_since = (odd_since or now) if found == "odd" else None
        if found in ("serves", "tells"):
            return started if started is not None and _serves_itself(started, token) else None
        if found == "past" and not continue_only:
            _end_past(options.listen, job, token)
        if found == "finished" and continue_only:
            raise RefusedError(f"job {job!r} is finished; nothing is left to do")
        if found == "free":
            if not _lives(started):
                if started is not None:
                    words = last_words(started.log)
                    if GAVE_WAY in words:
                        logger.warning("job %s waits for the scheduler that its members know: %s", job, words)
                        return None
                    raise SchedulerUnreachableError(f"the scheduler ended at once; {words}")
                if _gave_way(options):
                    return None
                if continue_only and (_finished(options) or (not serves_end and _stored(options).finished)):
                    raise RefusedError(f"job {job!r} is finished; nothing is left to do")
                if chain and (held := _stored(options).chain) != chain:
                    raise StoreError(
                        f"no scheduler is started at {options.listen}: job {job} goes by chain {short(chain)}, and "
                        f"{options.store or options.store_path} holds {f'chain {short(held)}' if held else 'none'}. "
                        "Start one there on the store that holds it"
                    )
                again = _begins_again(options)
                started = _spawn(options, Credentials.of(token))
                if again:
                    logger.info(
                        "job %r was finished; a new job by that name begins at %s, from the state that its members "
                        "start with (%s)",
                        job,
                        options.listen,
                        "etcd holds no old chains"
                        if options.in_etcd
                        else f"the old one is beside {options.store_path}",
                    )
        elif odd_since is not None and now - odd_since > _ODD_LISTENER_PATIENCE_S and not _lives(started):
            what = f"something listens that is no scheduler{named(options.listen)}"
            raise RefusedError(f"at {options.listen} {what}; choose another port")
        left = begun + timeout_s - now
        if left <= 0 or now - told > TELL_S:
            told = now
            what = "the finished job's scheduler does not end" if found == "finished" else "no answer"
            words = f"{what} at {options.listen}{named(options.listen)}"
            words += f"; {last_words(started.log)}" if started is not None else ""
            if left <= 0:
                raise SchedulerUnreachableError(f"{words}; waited for {timeout_s:g} s")
            logger.warning("job %s waits for its scheduler: %s; gives up in %.0f s", job, words, left)
        time.sleep(_LOOK_INTERVAL_S)
    return None


def chain_at(endpoint: str, token: Secret) -> str:
    """Returns the id of the chain that the scheduler at `endpoint` leads with members connected; "" if there is
    none.
    """
    from chaos_lightning.control.channel import fetch_status

    machine = fetch_status(endpoint, token, timeout_s=2.0).get("machine", {})
    return str(machine.get("chain", "")) if machine.get("counts", {}).get("connected") else ""


def _lives(started: HostedScheduler | None) -> bool:
    return started is not None and started.alive()


def named(endpoint: str) -> str:
    """Returns a text about the process that listens at an endpoint's port; "" if it cannot be seen."""
    who = who_listens(split_endpoint(endpoint)[1])
    return f": {who}" if who else ""


def _serves_itself(started: HostedScheduler, token: Secret) -> bool:
    """Returns whether the scheduler that this process started is the one that answers; another may have taken the port
    first.
    """
    from chaos_lightning.control.channel import fetch_status

    try:
        return started.alive() and fetch_status(started.endpoint, token, follow=False).get("pid") == started.pid
    except SchedulerUnreachableError:
        return False  # it has ended since it was seen, as one does that gives the endpoint up


def _stored(options: SchedulerOptions) -> Tip:
    """Returns the tip of the chain in the store, read only; an empty tip if there is no chain."""
    chain = open_chain(options, read_only=True)
    if chain is None:
        return Tip()
    with chain:
        return chain.tip()


def _finished(options: SchedulerOptions) -> bool:
    """Returns whether the stored job has finished and newcomers are no longer told so; the next scheduler would begin
    it anew.
    """
    tip = _stored(options)
    return tip.finished and not tip.tells_s(options.settings.finished_s, time.time())


def _end_past(endpoint: str, job: str, secret: Secret) -> None:
    """Ends another job's finished scheduler, which lingers on this endpoint only to answer newcomers."""
    from chaos_lightning.control.channel import fetch_status

    status = fetch_status(endpoint, secret, timeout_s=2.0, follow=False)
    if status.get("job") != job and status.get("finished") and status.get("hosted"):
        pid = int(status["pid"])
        HostedScheduler(endpoint, pid, start_time(pid), Path(), None).stop()


def _begins_again(options: SchedulerOptions) -> bool:
    """Returns whether the scheduler about to start will archive a finished chain and begin the job anew."""
    if options.keep_finished:
        return False
    try:
        return _finished(options)
    except ChaosError:
        return False  # the scheduler itself says what is wrong with its file


def _log_of(options: SchedulerOptions) -> Path:
    """Returns the path of a started scheduler's log; it contains the port, since two schedulers on a machine may share
    a folder.
    """
    path = options.store_path
    folder = path.parent if path is not None else options.log_folder or Path(".")
    return (folder / f"scheduler-{re.sub(r'[^0-9A-Za-z.]', '_', options.listen)}.log").absolute()


def _gave_way(options: SchedulerOptions) -> bool:
    """Returns whether the last scheduler started at this endpoint has just given it up, because members knew more than
    its store.
    """
    log = _log_of(options)
    try:
        ended_s = time.time() - log.stat().st_mtime
    except OSError:
        return False
    return ended_s < GAVE_WAY_PAUSE_S and GAVE_WAY in last_words(log)


def _spawn(options: SchedulerOptions, secret: Credentials) -> HostedScheduler:
    path, log = options.store_path, _log_of(options)
    arguments = replace(
        absolute(options),
        store=str(path.absolute()) if path is not None else options.store,
        idle_timeout_s=options.idle_timeout_s or IDLE_TIMEOUT_S,
        keys_dir=secret.keys_dir,
        token_file="",
    ).arguments()
    pid = start_detached("chaos_lightning.control.scheduler_main", arguments, log, secret)
    return HostedScheduler(options.listen, pid, start_time(pid), log, path)


def start_detached(
    module: str, arguments: Sequence[str], log: Path, secret: Credentials, what: str = "a scheduler"
) -> int:
    """Starts one of our programs so that it outlives this process and its session; returns its process id.

    Args:
        module: Module of the program; its `main` takes `--detach=LOG` (scheduler_main.detach).
        arguments: Arguments of the program's command line.
        log: File that its output goes to.
        secret: A bare token is handed over in its environment; a folder of keys stands in its arguments.
        what: Text that names the program, for errors.

    Raises:
        SchedulerUnreachableError: The program could not be started.
    """
    command = [sys.executable, "-m", module, *arguments, f"--detach={log}"]
    ours = ("CHAOS_TOKEN", "CHAOS_TOKEN_FILE", "CHAOS_KEYS_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    if secret.bare_token:
        environment["CHAOS_TOKEN"] = os.fsdecode(secret.bare_token)
    # Found also from a source tree that is not installed, and by a worker that changed its directory.
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        start_new_session=True,
        check=False,
        timeout=30.0,
    )
    if done.returncode != 0 or not done.stdout.strip().isdigit():
        raise SchedulerUnreachableError(
            f"{what} could not be started ({' '.join(command[:3])} exited with {done.returncode}): "
            f"{done.stderr.decode(errors='replace').strip()[-500:]}"
        )
    return int(done.stdout)


def last_words(log: Path) -> str:
    """Returns the last lines of a detached process's log as text."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return f"its log {log} cannot be read: {error}"
    return f"its log {log} ends with: " + (" | ".join(lines[-3:]) or "nothing")


def options_for_engine(config: EngineConfig) -> SchedulerOptions:
    """Returns scheduler options that follow from a member's own configuration."""
    # The rendezvous backend leaves its whole settings here, so that a worker may revive the very same scheduler.
    base = settings_from_json(os.environ.get("CHAOS_SETTINGS") or "{}")
    plan = config.plan_spec
    if plan.chunk_nbytes == PlanSpec().chunk_nbytes:
        plan = replace(plan, chunk_nbytes=config.chunk_nbytes or base.plan.chunk_nbytes)
    settings = replace(
        rules_of(config, base),
        heartbeat_interval_s=min(base.heartbeat_interval_s, config.heartbeat_timeout_s / 3),
        plan=plan,
    )
    given = from_environment(HOSTED, os.environ)
    given["advertise"] = check_advertise(
        given.get("advertise", ""), "environment variable CHAOS_ADVERTISE=", given.get("store", "")
    )
    return SchedulerOptions(listen=config.endpoints[0], settings=settings, log_dir=config.log_dir, **given)


def may_host(config: EngineConfig, options: SchedulerOptions) -> bool:
    """Returns whether a member with this configuration may start a scheduler.

    Where several are named, each on a chain of its own would lead a job of its own; only with the chain in etcd one of
    them leads.
    """
    return config.host_scheduler and (options.in_etcd or len(config.endpoints) == 1)


def host_for_engine(
    config: EngineConfig,
    *,
    continue_only: bool = False,
    given_up: Callable[[], bool] = lambda: False,
    chain: str = "",
) -> HostedScheduler | None:
    """Starts a scheduler for a member by `ensure_scheduler`: at its start, and (`continue_only`) when its scheduler was
    lost.

    At its start it waits for as long as it would for admission, unless it has `given_up`. A worker that torchrun has
    started again had a job: if that finished since the agent looked, no new one begins.
    """
    timeout_s = 30.0 if continue_only else config.join_timeout_s
    continue_only |= os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    options = options_for_engine(config)
    if not may_host(config, options):
        return None
    secret = Credentials.load(config.keys_dir, config.token_file)
    return ensure_scheduler(
        options, secret, continue_only=continue_only, timeout_s=timeout_s, given_up=given_up, chain=chain
    )
