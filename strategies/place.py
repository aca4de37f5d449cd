"""Gives a process a rank while it sets up, before it is in the job: the true one if known, else one that does no harm.

Theory of operation. A member learns its rank when it enters the job, at its first batch. But `setup`, `on_fit_start`,
loggers and the making of loaders come sooner, and ask. So before them this process looks who is there. Where members
are in, it will be the next one: rank W of W + 1, and never the writer. Where nobody is in, it is a founder, or comes
right after one. These have numbers (control/claims.py): the first is rank 0 of the members that the job starts with,
the next one rank 1, and so on. Alone with `min_nodes=1` that is the truth. Numbers are those of one machine, the
scheduler's; of several schedulers, that of the last one named counts, whoever leads: all name the same one. Processes
elsewhere ask it for theirs. Where it does not answer them and several founders are wanted, or somebody is waiting
already, they are no rank 0: the process that becomes the writer makes up at its first batch for what Lightning writes
as rank 0. With `min_nodes=1` those of each other machine number themselves then.

A process that validates, tests or predicts before fit takes such a place, too, so that one of the processes writes, and
keeps it until fit: else one that comes when another is through would write as well. All Trainers of a process share it.

The founders' order in the job is the order in which they come, so a founder may get another rank at its first batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from chaos_lightning.control.claims import Claim, ask, lock_lowest
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import ChaosError
from chaos_lightning.machine.addresses import is_local, split_endpoint
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.hosting import listens
from chaos_lightning.settings import EngineConfig

_LOOK_TIMEOUT_S = 5.0


class Place:
    """Provisional rank and world size of one process, until it enters the job or the object is no longer needed.

    Attributes:
        rank: Rank of this process.
        world_size: World size of the job, with this process in it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.leave: Callable[[], object] = lambda: None
        """Gives the place up: the job says from here on which rank this process has. Idempotent."""
        status = _status(config)
        members = _members(status)
        if members:
            self.rank, self.world_size = members, members + 1
            return
        least = max(1, config.min_nodes)
        claim = _claim(config, alone=least == 1 and not status.get("streams"))
        if claim is None:
            self.rank, self.world_size = 1, max(2, least)
            return
        self.leave = weakref.finalize(self, claim.release)
        self.rank = claim.number
        self.world_size = max(least, self.rank + 1)


_evaluating: weakref.WeakValueDictionary[tuple[str, str], Place] = weakref.WeakValueDictionary()


def place_to_evaluate(config: EngineConfig) -> Place:
    """Returns this process's provisional rank for validate, test and predict before fit; all its Trainers share it."""
    key = (config.job, config.endpoint)
    place = _evaluating.get(key)
    if place is None:
        place = _evaluating[key] = Place(config)
    return place


def end_evaluating(config: EngineConfig) -> None:
    """Gives up the provisional rank of `place_to_evaluate`, as this process is about to take one for fit."""
    place = _evaluating.pop((config.job, config.endpoint), None)
    if place is not None:
        place.leave()


def _claim(config: EngineConfig, *, alone: bool) -> Claim | None:
    """Claims a number among the processes that set up now, which is this one's rank; returns None if the number cannot
    be known.

    Args:
        config: Configuration of the engine.
        alone: Whether no other founder is known of or wanted.
    """
    last = config.endpoints[-1]
    host, port = split_endpoint(last)
    if not is_local(host):
        with contextlib.suppress(ChaosError):
            if listens(last):
                return ask(last, Credentials.load(config.keys_dir, config.token_file), config.job, _LOOK_TIMEOUT_S)
        if not alone:
            return None
    return lock_lowest(config.job, port)


def _status(config: EngineConfig) -> dict[str, Any]:
    """Returns the scheduler's status; empty if there is no scheduler, or it fails: its errors are reported when this
    process joins.
    """
    if not any(listens(endpoint) for endpoint in config.endpoints):
        return {}
    with contextlib.suppress(ChaosError):
        credentials = Credentials.load(config.keys_dir, config.token_file)
        status = fetch_status(config.endpoint, credentials, timeout_s=_LOOK_TIMEOUT_S)
        if status.get("job") == config.job and not status.get("finished"):
            return status
    return {}


def _members(status: dict[str, Any]) -> int:
    """Returns the number of live members in the scheduler's status."""
    return int((status.get("machine") or {}).get("counts", {}).get("living", 0))
