"""Keeps a job's rules in etcd, so that no change of leaders changes the job, and opens its chain there.

Theory of operation. A job's rules (min_nodes and the rest of Settings) are those of the scheduler that began to lead
it: they lie in etcd under `rules`, and whoever follows goes by them, whatever it was started with. A scheduler brings
its own where the job begins (again), or where it is elected and nobody else stands by: then an operator has started it
anew.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import settings_from_json, settings_to_json
from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.election import LEASE_S
from chaos_lightning.service.etcd_address import EtcdAddress
from chaos_lightning.service.etcd_client import UnansweredError, put
from chaos_lightning.service.etcd_store import job_root
from chaos_lightning.service.store import Store

RULES = "rules"


class EtcdRules:
    """Rules and chain of a job whose schedulers stand by for each other. Methods may be called from any thread.

    Args:
        address: Address of etcd.
        job: Name of the job.
        keep_finished: Serve a finished chain instead of beginning the job anew.
        followed: This process was a candidate before: what it began with is not what the job is now, so it begins no
            finished job anew and brings no rules.
        finished_s: Seconds after a job's end for which newcomers are told that it has finished.
        lease_s: Duration of leases.

    Raises:
        ConfigurationError: A file of the address cannot be read.
    """

    def __init__(
        self,
        address: EtcdAddress,
        job: str,
        *,
        keep_finished: bool = False,
        followed: bool = False,
        finished_s: float = 0.0,
        lease_s: int = LEASE_S,
    ) -> None:
        self.candidacy = Candidacy(address, job_root(address.prefix, job), followed=followed, lease_s=lease_s)
        """Candidacy of this scheduler."""
        self._job = job
        self._keep_finished = keep_finished
        self._finished_s = finished_s

    def open_store(self) -> Store:
        """Opens the chain for the elected leader; empties that of a finished job, unless it is to be kept or still
        announced.
        """
        return self.candidacy.open_store(self._over)

    def _over(self, store: Store) -> str:
        tip = JobChain(store).tip()
        told = tip.tells_s(self._finished_s, time.time())
        return f"job {self._job} was finished" if tip.finished and not told and not self._keep_finished else ""

    def check(self, given: Settings) -> str:
        """Checks etcd before the scheduler starts; returns a notice for the user, or "".

        Args:
            given: The rules that this scheduler would bring.

        Raises:
            ConfigurationError: etcd refuses this scheduler, or what lies under the job's name is no chain that this
                version can read.
        """
        try:
            with JobChain(self.candidacy.look()) as found:
                chain = found.load()
            stored = self._stored()
        except UnansweredError as error:
            return f"{error} It goes on trying."
        except StoreError as error:
            raise ConfigurationError(str(error)) from error
        return self._differing(given, stored) if stored is not None and not chain.finished else ""

    def rules(self, given: Settings) -> Settings:
        """Returns the settings that the job follows: those in etcd if the job goes on, else `given`. Call `open_store`
        first.

        Raises:
            StoreError: etcd does not answer, or this scheduler leads no more.
        """
        stored, candidacy = self._stored(), self.candidacy
        if stored == given:
            return given
        if stored is not None:
            if not candidacy.begun_again and (candidacy.waited() or candidacy.others()):
                candidacy.note("notice", text=self._differing(given, stored))
                return stored
            candidacy.note("notice", text=f"job {self._job} goes by other rules now: {_changes(stored, given)}")
        document = json.dumps({"format": 1, "settings": settings_to_json(given)}).encode()
        if not candidacy.client.transact(candidacy.guard, [put(candidacy.root + RULES, document)])[0]:
            raise StoreError("this scheduler does not lead any more, and cannot say by which rules the job goes")
        return given

    def _stored(self) -> Settings | None:
        found = self.candidacy.client.get(self.candidacy.root + RULES)
        if found is None:
            return None
        try:
            return settings_from_json(json.loads(found.value)["settings"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreError(
                f"{self.candidacy.client.address}: the rules of job {self._job} cannot be read ({error}); finish it "
                "with the version that began it, or choose another job name or prefix"
            ) from error

    def _differing(self, given: Settings, stored: Settings) -> str:
        changes = _changes(given, stored)
        return changes and (
            f"job {self._job} is there already, and goes by the rules that it began with ({changes}); start every "
            "scheduler of a job with the same ones, or give another job another name"
        )


def _changes(given: Settings, stored: Settings) -> str:
    """Returns the settings that differ as text: "name=stored instead of given"."""
    ours, theirs = asdict(given), asdict(stored)
    return ", ".join(f"{name}={theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name])
