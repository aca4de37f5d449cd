"""Lets a leader whose chain is in etcd stand by for others, until it is elected.

Theory of operation. A leader with its chain in a file leads from its start; the file's lock and terms keep others out.
One with etcd listens at once, says to whoever comes who leads, and takes the chain when it is elected
(control/election.py). When it leads no more its process begins anew as a candidate (outer/commands/leader_main.py).
What is decided is guarded by the store, never by the election.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos_lightning.control import etcd_pb2 as pb
from chaos_lightning.control.election import Candidate, Election
from chaos_lightning.control.etcd_address import read_address
from chaos_lightning.control.etcd_client import open_client
from chaos_lightning.control.etcd_store import EtcdStore, service_root
from chaos_lightning.control.store import Store
from chaos_lightning.outer.server.chain_store import load_chain

SERVICES = "outer"
"""Folder of outer sync's services in etcd."""


def open_outer_store(address: str, job: str) -> Store:
    """Opens a job's chain in etcd for reading.

    Raises:
        ConfigurationError: The address is none, or a file of it cannot be read.
    """
    client = open_client(read_address(address))
    return EtcdStore(client, service_root(client.address.prefix, SERVICES, job))


class OuterCandidacy:
    """Candidacy of one leader in an election by etcd. Methods may be called from any thread.

    Args:
        address: Address of etcd (etcd://...).
        job: Name of the job whose leader is elected.
        keep_finished: Whether to serve the chain of a job that has ended, instead of beginning the job anew.

    Raises:
        ConfigurationError: The address is not valid, or a file that it names cannot be read.
    """

    def __init__(self, address: str, job: str, *, keep_finished: bool) -> None:
        self._client = open_client(read_address(address))
        self._root = service_root(self._client.address.prefix, SERVICES, job)
        self._keep_finished = keep_finished
        self._guard: tuple[pb.Compare, ...] = ()
        self._election: Election | None = None
        self._note: Callable[..., None] = lambda name, **fields: None

    def stand(
        self, endpoint: str, on_elected: Callable[[], None], on_lost: Callable[[str], None], note: Callable[..., None]
    ) -> None:
        """Takes part in the election; callbacks are called in its thread.

        Args:
            endpoint: HOST:PORT at which other processes reach this candidate.
            on_elected: Called when this candidate becomes the leader.
            on_lost: Called with the reason when this candidate leads no more.
            note: Takes (event name, fields) for the event log.
        """

        def elected(guard: tuple[pb.Compare, ...]) -> None:
            self._guard = guard
            on_elected()

        self._note = note
        self._election = Election(
            self._client, self._root, Candidate.here(endpoint), on_elected=elected, on_lost=on_lost, note=note
        )
        self._election.start()

    def open_store(self) -> Store:
        """Opens the chain for the elected leader; if its job has ended, empties it first, unless `keep_finished` is
        set.

        Whoever waited while another one led tells what that one has ended.
        """
        store = EtcdStore(self._client, self._root, guard=self._guard, owned=False)
        waited = self._election is not None and self._election.followed
        if not self._keep_finished and not waited and load_chain(store).ended is not None:
            store.begin_again()
            self._note("notice", text=f"the job had ended; it begins anew in {store.place}")
        return store

    def waits(self) -> tuple[str, str]:
        """Returns words that say why this process does not lead, and the endpoint of the leader; "" if nobody leads."""
        leader = self._election.leader if self._election is not None else None
        trouble = self._election.trouble if self._election is not None else ""
        place = leader.endpoint if leader is not None else ""
        return f"this leader waits to lead; now {place or 'nobody'} does. {trouble}".rstrip(". "), place

    def facts(self) -> dict[str, Any]:
        """Returns who leads, since when and why, who stands by, and what this candidate waits for."""
        return self._election.facts() if self._election is not None else {}

    def close(self) -> None:
        """Withdraws from the election, so that another candidate leads at once. Idempotent."""
        if self._election is not None:
            self._election.resign()
        self._client.close()
