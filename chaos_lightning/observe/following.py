"""Follows the job that is running, for `top` and `metrics`: its event logs, and its scheduler's answers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.events.reader import Record
from chaos_lightning.machine.addresses import split_endpoint, split_endpoints
from chaos_lightning.observe.jobs import Live
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.service.options import log_folder, state_folder
from chaos_lightning.settings import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from chaos_lightning.security.credentials import Secret

T = TypeVar("T")


def outer_job(endpoint: str, secret: Secret, timeout_s: float) -> dict[str, Any] | None:
    """Returns the status of this machine's outer job from its leader; None if the user named a scheduler or no leader
    answers.

    Args:
        endpoint: Endpoint at which no scheduler answered.
        secret: Cluster token, or credentials.
        timeout_s: Seconds to wait for the answer.
    """
    from chaos_lightning.outer.exchange.control_client import fetch_facts
    from chaos_lightning.outer.exchange.server_options import DEFAULT_SERVER, VARIABLE

    if endpoint == DEFAULT_ENDPOINT:
        with contextlib.suppress(ChaosError):
            return fetch_facts(os.environ.get(VARIABLE) or DEFAULT_SERVER, secret, timeout_s)
    return None


FRESH_S = 600.0
"""Seconds without a new line after which a log counts as another run's; of this run's log only what is new is read."""
KEPT_SLOTS = 1000
"""Least number of latest slots that are kept: a run may go on for days, and looking at it must stay cheap."""


@dataclass(slots=True)
class Latest:
    """Timeline of the latest of the jobs that log into one folder; takes events in order.

    Attributes:
        forgets: Function that is called with the timeline before old slots, or those of the job before, are dropped.
    """

    forgets: Callable[[Timeline], None] = lambda _: None
    timeline: Timeline = field(default_factory=Timeline)
    _jobs: Live = field(default_factory=Live)

    def take(self, r: Record) -> bool:
        """Takes in one more event; returns whether it begins another job."""
        begins = self._jobs.begins(r)
        if begins:
            self.forgets(self.timeline)
            self.timeline = self.timeline.next_job()  # the same ids and views, told anew
        elif len(self.timeline.slots) > 2 * KEPT_SLOTS:
            self.forgets(self.timeline)
            self.timeline.prune(KEPT_SLOTS)
        self.timeline.take(r)
        return begins


@dataclass(slots=True)
class AskedJob(Generic[T]):
    """Status of a job from its scheduler, and from the logs that its members on this machine write to the default
    folder.

    Attributes:
        follow: Function of that folder, and of the time (s) since when something was written, that returns a function;
            the latter returns the facts as of now.
        logged: Function that returns the facts as of now, once the scheduler has said which job it is; None also for a
            user without a home.
    """

    endpoint: str
    secret: Secret
    timeout_s: float
    follow: Callable[[Path, float], Callable[[], T]]
    logged: Callable[[], T] | None = None
    _outer: Callable[[], T] | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the scheduler's answer; raises the errors of `fetch_status`."""
        from chaos_lightning.control.requests import fetch_status

        facts = fetch_status(self.endpoint, self.secret, self.timeout_s)
        if self.logged is None:
            port = split_endpoint(split_endpoints(self.endpoint)[0])[1]
            with contextlib.suppress(ConfigurationError):  # without a home nobody logs there
                self.logged = self.follow(state_folder(str(facts.get("job")), port) / "events", time.time() - FRESH_S)
        return facts

    def outer(self) -> T | None:
        """Returns the facts logged by this machine's outer job, for when no scheduler answers; None if there is no such
        job.
        """
        facts = outer_job(self.endpoint, self.secret, self.timeout_s)
        if facts is None:
            return None
        if self._outer is None:
            port = split_endpoint(str(facts["endpoint"]))[1]
            folder = log_folder("auto", f"outer-{facts['job']}", port, beside=True)
            self._outer = None if folder is None else self.follow(folder, time.time() - FRESH_S)
        return None if self._outer is None else self._outer()
