"""Starts a scheduler at an endpoint of this machine, unless one already serves it.

Theory of operation. As for all services (service/hosting.py). A scheduler is detached from the member, the torchrun
agent and their process groups. The chain's file decides what the job is: an unfinished one is continued, a finished one
is archived and a new one begins - or, with `continue_only`, nothing is started, for a worker that restarts must not
repeat its job.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos_lightning.control.job_chain import Tip, open_chain
from chaos_lightning.control.options import (
    GAVE_WAY,
    HOSTED,
    SchedulerOptions,
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
from chaos_lightning.machine.process_table import start_time
from chaos_lightning.membership.peers import short
from chaos_lightning.protocol.types import PlanSpec
from chaos_lightning.security.credentials import Credentials, Secret, check_bind
from chaos_lightning.service.hosting import (
    IDLE_TIMEOUT_S,
    HostedProcess,
    ServiceStart,
    ensure,
    facts_at,
    last_words,
    start_detached,
)
from chaos_lightning.service.options import MEMORY, check_advertise
from chaos_lightning.settings import EngineConfig, from_environment

logger = logging.getLogger("chaos_lightning.control")

GAVE_WAY_PAUSE_S = 15.0
"""Seconds for which no scheduler is hosted where a hosted one gave the endpoint up: the one that it gave way to needs
the port, and may still be starting.
"""


def look(endpoint: str, job: str, token: Secret) -> str:
    """Returns what an endpoint's port shows: FREE, SILENT or ODD (service/hosting.py), "serves" (this job), "tells"
    (newcomers that this job has finished), "finished" (still lingering) or "past" (lingering, of another job).

    Raises:
        ConfigurationError: A scheduler of another job is there.
        RefusedError: The server there does not accept the credentials, or is no scheduler.
    """
    from chaos_lightning.control.requests import fetch_status

    status = facts_at(endpoint, lambda: fetch_status(endpoint, token, timeout_s=2.0, follow=False))
    if isinstance(status, str):
        return status
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
    from chaos_lightning.control.requests import fetch_status

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
) -> HostedProcess | None:
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
    from chaos_lightning.control.requests import WHAT, fetch_status

    host, _ = split_endpoint(options.listen)
    if not is_local(host) or (continue_only and options.store == MEMORY):
        return None
    check_bind(host, token)
    check_settings(options.settings)
    job, secret = options.settings.job, Credentials.of(token)
    finished = RefusedError(f"job {job!r} is finished; nothing is left to do")

    def looked() -> str:
        found = look(options.listen, job, token)
        if found == "past" and not continue_only:
            _end_past(options.listen, job, token)
        if found == "finished" and continue_only:
            raise finished
        return found

    def start() -> HostedProcess | None:
        if _gave_way(options):
            return None
        if continue_only and (_finished(options) or (not serves_end and _stored(options).finished)):
            raise finished
        if chain and (held := _stored(options).chain) != chain:
            raise StoreError(
                f"no scheduler is started at {options.listen}: job {job} goes by chain {short(chain)}, and "
                f"{options.store or options.store_path} holds {f'chain {short(held)}' if held else 'none'}. "
                "Start one there on the store that holds it"
            )
        again, started = _begins_again(options), _spawn(options, secret)
        if again:
            where = "etcd holds no old chains" if options.in_etcd else f"the old one is beside {options.store_path}"
            logger.info(
                "job %r was finished; a new job by that name begins at %s, from the state that its members start with "
                "(%s)",
                job,
                options.listen,
                where,
            )
        return started

    def ended(started: HostedProcess) -> bool:
        words = last_words(started.log)
        if GAVE_WAY not in words:
            raise SchedulerUnreachableError(f"the scheduler ended at once; {words}")
        logger.warning("job %s waits for the scheduler that its members know: %s", job, words)
        return False

    def own(started: HostedProcess) -> bool:
        return fetch_status(started.endpoint, token, follow=False).get("pid") == started.pid

    service = ServiceStart(
        what=WHAT,
        listen=options.listen,
        job=job,
        look=looked,
        good=("serves", "tells"),
        over="finished",
        start=start,
        ended=ended,
        own=own,
    )
    return ensure(service, timeout_s, given_up)


def chain_at(endpoint: str, token: Secret) -> str:
    """Returns the id of the chain that the scheduler at `endpoint` leads with members connected; "" if there is
    none.
    """
    from chaos_lightning.control.requests import fetch_status

    machine = fetch_status(endpoint, token, timeout_s=2.0).get("machine", {})
    return str(machine.get("chain", "")) if machine.get("counts", {}).get("connected") else ""


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
    from chaos_lightning.control.requests import fetch_status

    status = fetch_status(endpoint, secret, timeout_s=2.0, follow=False)
    if status.get("job") != job and status.get("finished") and status.get("hosted"):
        pid = int(status["pid"])
        HostedProcess(endpoint, pid, start_time(pid), Path(), None).stop()


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


def _spawn(options: SchedulerOptions, secret: Credentials) -> HostedProcess:
    path, log = options.store_path, _log_of(options)
    arguments = replace(
        absolute(options),
        store=str(path.absolute()) if path is not None else options.store,
        idle_timeout_s=options.idle_timeout_s or IDLE_TIMEOUT_S,
        keys_dir=secret.keys_dir,
        token_file="",
    ).arguments()
    pid = start_detached("chaos_lightning.control.scheduler_main", arguments, log, secret, "a scheduler")
    return HostedProcess(options.listen, pid, start_time(pid), log, path)


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
) -> HostedProcess | None:
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
