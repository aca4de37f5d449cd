"""Starts a service at an endpoint of this machine, unless one already serves it.

Theory of operation. Whoever needs a service looks at the endpoint. If it is on another machine, nothing is done. If the
service of this job answers there, fine. If nobody listens, a process is started, detached, so that it outlives its
starter, and the endpoint is looked at until it answers. Two starters may race: only one process gets the port or the
files, the other one ends before it has touched them, and both starters find the winner. What stands in the way is the
service's own affair: its `ServiceStart` says what is there, and what that means.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_lightning.errors import RefusedError, SchedulerUnreachableError
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.listener import is_another_kind, who_listens
from chaos_lightning.machine.process_table import still_runs
from chaos_lightning.security.credentials import Credentials

IDLE_TIMEOUT_S = 300.0
"""Seconds without clients after which a hosted service ends; its store stays."""
TELL_S = 5.0
"""Seconds between two lines of a process that waits for a service."""
FREE, SILENT, ODD = "free", "silent", "odd"
"""Looks of a port: nobody listens; whoever has it says nothing, since it begins, is frozen, or has no descriptor
left; it hangs up, or is no gRPC server.
"""
_LOOK_INTERVAL_S = 0.05
ODD_LISTENER_PATIENCE_S = 6.0
RACE_S = 2.0
"""Seconds after which a starter that lost a race tries again, as the winner may have died."""
_log = logging.getLogger("chaos_lightning")


@dataclass(frozen=True)
class HostedProcess:
    """Service process that this process started and that outlives it."""

    endpoint: str
    pid: int
    pid_start: int
    log: Path
    store: Path | None

    def alive(self) -> bool:
        """Returns whether the process still runs."""
        return self.pid_start != 0 and still_runs(self.pid, self.pid_start)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the process with SIGTERM; clients go on without it. Returns True once it has ended."""
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


def named(endpoint: str) -> str:
    """Returns a text about the process that listens at an endpoint's port; "" if it cannot be seen."""
    who = who_listens(split_endpoint(endpoint)[1])
    return f": {who}" if who else ""


def facts_at(endpoint: str, fetch: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    """Returns the facts of the service at an endpoint; else FREE, SILENT or ODD.

    Args:
        endpoint: HOST:PORT.
        fetch: Asks the service there for its facts.

    Raises:
        RefusedError: The server there does not accept the credentials, or is of another kind.
    """
    if not listens(endpoint):
        return FREE
    try:
        return fetch()
    except SchedulerUnreachableError:
        return ODD if is_another_kind(*split_endpoint(endpoint)) else SILENT


@dataclass(frozen=True, kw_only=True)
class ServiceStart:
    """A service to be started at an endpoint, and what must be known of it.

    Attributes:
        what: Text that names it, for messages.
        listen: HOST:PORT at which it is to listen.
        job: Name of its job.
        look: Returns what is at the endpoint: FREE, SILENT, ODD or a word of its own; raises what cannot serve this
            job.
        good: Words of `look` that say that what is there will do.
        over: Word of `look` for one whose job has ended, and that is still about.
        start: Starts it; returns None if that must not be, and waiting is in vain.
        ended: Takes a process that was started and has ended; returns whether another one is to be waited for, or
            raises why it failed.
        own: Returns whether it is this process that answers.
        supervises: Whether the process that is started watches the one that listens, and lives while that one does not.
        lost: Returns words if this process has ended because another one was first.
    """

    what: str
    listen: str
    job: str
    look: Callable[[], str]
    good: Collection[str]
    over: str
    start: Callable[[], HostedProcess | None]
    ended: Callable[[HostedProcess], bool]
    own: Callable[[HostedProcess], bool]
    supervises: bool = False
    lost: Callable[[HostedProcess], str] = lambda started: ""


def ensure(service: ServiceStart, timeout_s: float, given_up: Callable[[], bool]) -> HostedProcess | None:
    """Starts a service if its port is free; returns it once it answers, or None if none was started.

    Args:
        service: The service.
        timeout_s: Seconds to wait for an answer. A wait of more than some seconds is logged, with what is waited for.
        given_up: Asked now and then: true if the caller waits no more; then None is returned.

    Raises:
        ConfigurationError, RefusedError: What is there cannot serve this job; the message says why.
        SchedulerUnreachableError: The service was started, but ended or did not answer; the message quotes its log.
    """
    started: HostedProcess | None = None
    begun = told = time.monotonic()
    odd_since: float | None = None
    start_at = 0.0
    what, listen = service.what, service.listen
    while not given_up():
        found, now = service.look(), time.monotonic()
        odd_since = (odd_since or now) if found == ODD else None
        lives = started is not None and started.alive()
        if found in service.good:
            return started if started is not None and lives and _answers(service, started) else None
        if found == FREE and not lives:
            if started is not None and not service.ended(started):
                return None
            if now > start_at:
                start_at = now + RACE_S
                if (started := service.start()) is None:
                    return None
        elif odd_since is not None and now - odd_since > ODD_LISTENER_PATIENCE_S and (service.supervises or not lives):
            raise RefusedError(f"at {listen} something listens that is no {what}{named(listen)}; choose another port")
        left = begun + timeout_s - now
        if left <= 0 or now - told > TELL_S:
            told = now
            words = f"the finished job's {what} does not end" if found == service.over else "no answer"
            words += f" at {listen}{named(listen)}"
            if started is not None:
                words += f"; {service.lost(started) or last_words(started.log)}"
            if left <= 0:
                raise SchedulerUnreachableError(f"{words}; waited for {timeout_s:g} s")
            _log.warning("job %s waits for its %s: %s; gives up in %.0f s", service.job, what, words, left)
        time.sleep(_LOOK_INTERVAL_S)
    return None


def _answers(service: ServiceStart, started: HostedProcess) -> bool:
    try:
        return service.own(started)
    except SchedulerUnreachableError:
        return False  # it has ended since it was seen


def start_detached(module: str, arguments: Sequence[str], log: Path, secret: Credentials, what: str) -> int:
    """Starts one of our programs so that it outlives this process and its session; returns its process id.

    Args:
        module: Module of the program; its `main` takes `--detach=LOG` (main.detach).
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
