"""Lets a scheduler stand for election by way of etcd: it waits until it is elected, and then opens the chain as leader.

Theory of operation. A scheduler without one (embedded store) leads from its start; its store's lock and terms keep
others out. With one it listens at once, says to whoever comes who leads, and takes the chain when it is elected.
When it leads no more its process begins anew as a candidate (control/scheduler_main.py).

A job's rules (min_nodes and the rest of Settings) are those of the scheduler that began to lead it: they lie in etcd
under `rules`, and whoever follows goes by them, whatever it was started with, so that no change of leaders changes the
job. A scheduler brings its own where the job begins (again), or where it is elected and nobody else stands by: then an
operator has started it anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from chaos_lightning.control import etcd_pb2 as pb
from chaos_lightning.control.chain import JobChain
from chaos_lightning.control.election import LEASE_S, Candidate, Election
from chaos_lightning.control.etcd_address import EtcdAddress
from chaos_lightning.control.etcd_client import UnansweredError, open_client, put
from chaos_lightning.control.etcd_store import EtcdStore, job_root
from chaos_lightning.control.options import settings_from_json, settings_to_json
from chaos_lightning.control.store import Store
from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.protocol.types import Settings

RULES = "rules"


class EtcdCandidacy:
    """Candidacy of one scheduler in an election by way of etcd. Methods may be called from any thread.

    Args:
        address: Address of etcd.
        job: Name of the job whose leader is elected.
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
        self._finished_s = finished_s
        self._client = open_client(address)
        self._job = job
        self._root = job_root(address.prefix, job)
        self._keep_finished = keep_finished
        self._followed = followed
        self._lease_s = lease_s
        self._guard: tuple[pb.Compare, ...] = ()
        self._election: Election | None = None
        self._begun_again = False
        self._note: Callable[..., None] = lambda name, **fields: None

    def stand(
        self,
        endpoint: str,
        on_elected: Callable[[], None],
        on_lost: Callable[[str], None],
        note: Callable[..., None],
        present: Callable[[], Collection[str]],
    ) -> None:
        """Takes part in the election, and calls back from its thread.

        Args:
            endpoint: HOST:PORT at which members reach this candidate.
            on_elected: Called when this candidate has been elected.
            on_lost: Called with the reason when this candidate has lost the lead.
            note: Takes (event name, fields) for the event log.
            present: Names of the members that are connected to it.
        """

        def elected(guard: tuple[pb.Compare, ...]) -> None:
            self._guard = guard
            on_elected()

        self._note = note
        self._election = Election(
            self._client,
            self._root,
            Candidate.here(endpoint),
            on_elected=elected,
            on_lost=on_lost,
            note=note,
            present=present,
            lease_s=self._lease_s,
        )
        self._election.start()

    def asked(self, name: str) -> None:
        """Notes that a member called `name` ("": unnamed) asked this candidate while looking for the leader."""
        if name and self._election is not None:
            self._election.asked(name)

    def open_store(self) -> Store:
        """Opens the chain for the elected leader; empties that of a finished job, unless it is to be kept or still
        announced.
        """
        store = EtcdStore(self._client, self._root, guard=self._guard, owned=False)
        tip = JobChain(store).tip()
        told = tip.tells_s(self._finished_s, time.time())
        if tip.finished and not told and not self._keep_finished and not self.waited():
            store.begin_again()
            self._begun_again = True
            self._note("notice", text=f"job {self._job} was finished; it begins anew in {store.place}")
        return store

    def check(self, given: Settings) -> str:
        """Checks etcd before the scheduler starts; returns a notice for the user, or "".

        Args:
            given: The rules that this scheduler would bring.

        Raises:
            ConfigurationError: etcd refuses this scheduler, or what lies under the job's name is no chain that this
                version can read.
        """
        try:
            with JobChain(EtcdStore(self._client, self._root, owned=False)) as found:
                chain = found.load()
            stored = self._stored_rules()
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
        stored = self._stored_rules()
        if stored == given:
            return given
        if stored is not None:
            if not self._begun_again and (self.waited() or self._others()):
                self._note("notice", text=self._differing(given, stored))
                return stored
            self._note("notice", text=f"job {self._job} goes by other rules now: {_changes(stored, given)}")
        document = json.dumps({"format": 1, "settings": settings_to_json(given)}).encode()
        if not self._client.transact(self._guard, [put(self._root + RULES, document)])[0]:
            raise StoreError("this scheduler does not lead any more, and cannot say by which rules the job goes")
        return given

    def _stored_rules(self) -> Settings | None:
        found = self._client.get(self._root + RULES)
        if found is None:
            return None
        try:
            return settings_from_json(json.loads(found.value)["settings"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreError(
                f"{self._client.address}: the rules of job {self._job} cannot be read ({error}); finish it with the "
                "version that began it, or choose another job name or prefix"
            ) from error

    def _differing(self, given: Settings, stored: Settings) -> str:
        changes = _changes(given, stored)
        return changes and (
            f"job {self._job} is there already, and goes by the rules that it began with ({changes}); start every "
            "scheduler of a job with the same ones, or give another job another name"
        )

    def _others(self) -> bool:
        """Returns whether other candidates are waiting in etcd."""
        election = self._election
        return election is not None and any(c.id != election.me.id for c in election.candidates())

    def waited(self) -> bool:
        """Returns whether this process, or another scheduler before it, was a candidate or leader already: a finished
        chain then ended during that time.
        """
        return self._followed or (self._election is not None and self._election.followed)

    def watched(self) -> bool:
        """Returns whether this candidate saw another one lead by the same chain until its own election."""
        return self._election is not None and self._election.watched

    def stands_by(self) -> bool:
        """Returns whether another candidate leads and this one would succeed it, so that it must go on without
        members.
        """
        return self._election is not None and self._election.stands_by

    def leader(self) -> str:
        """Returns the endpoint of the leader that was seen last; "" if nobody leads."""
        leader = self._election.leader if self._election is not None else None
        return leader.endpoint if leader is not None else ""

    def trouble(self) -> str:
        """Returns why nobody can be elected at the moment, if that is known; else ""."""
        return self._election.trouble if self._election is not None else ""

    def facts(self) -> dict[str, Any]:
        """Returns facts for `status`: who leads, since when and why, which candidates wait, and what this one waits
        for.
        """
        return self._election.facts() if self._election is not None else {}

    def close(self) -> None:
        """Gives the candidacy up; if this candidate leads, another can lead at once. Idempotent."""
        if self._election is not None:
            self._election.resign()
        self._client.close()


def _changes(given: Settings, stored: Settings) -> str:
    """Returns the settings that differ as text: "name=stored instead of given"."""
    ours, theirs = asdict(given), asdict(stored)
    return ", ".join(f"{name}={theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name])
