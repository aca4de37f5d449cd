"""Lets a server whose store is in etcd stand for election: it waits until it is elected, and then opens the store.

Theory of operation. A server with a store of its own leads from its start; the store's lock and terms keep others out.
One with etcd listens at once, says to whoever comes who leads, and takes the store when it is elected (election.py).
When it leads no more its process begins anew as a candidate (server.py, `keep_standing`). What is decided is guarded by
the store, never by the election.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service.election import LEASE_S, Candidate, Election
from chaos_lightning.service.etcd_address import EtcdAddress
from chaos_lightning.service.etcd_client import open_client
from chaos_lightning.service.etcd_store import EtcdStore
from chaos_lightning.service.store import Store


class Candidacy:
    """Candidacy of one server. Methods may be called from any thread.

    Args:
        address: Address of etcd.
        root: Prefix of the service's keys in etcd (etcd_store.service_root).
        followed: This process was a candidate before.
        lease_s: Duration of leases.

    Raises:
        ConfigurationError: A file of the address cannot be read.
    """

    def __init__(self, address: EtcdAddress, root: str, *, followed: bool = False, lease_s: int = LEASE_S) -> None:
        self.client = open_client(address)
        self.root = root
        self.note: Callable[..., None] = lambda name, **fields: None
        """Takes (event name, fields) for the event log."""
        self.begun_again = False
        """Whether this process has begun the log anew."""
        self._followed = followed
        self._lease_s = lease_s
        self.guard: tuple[pb.Compare, ...] = ()
        """Comparisons that writes of the elected leader must make."""
        self._election: Election | None = None

    def stand(
        self,
        endpoint: str,
        on_elected: Callable[[], None],
        on_lost: Callable[[str], None],
        note: Callable[..., None],
        present: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """Takes part in the election, and calls back from its thread.

        Args:
            endpoint: HOST:PORT at which clients reach this candidate.
            on_elected: Called when this candidate has been elected.
            on_lost: Called with the reason when this candidate has lost the lead.
            note: Takes (event name, fields) for the event log.
            present: Names of the clients that are connected to it; None if it cannot tell.
        """

        def elected(guard: tuple[pb.Compare, ...]) -> None:
            self.guard = guard
            on_elected()

        self.note = note
        self._election = Election(
            self.client,
            self.root,
            Candidate.here(endpoint),
            on_elected=elected,
            on_lost=on_lost,
            note=note,
            present=present,
            lease_s=self._lease_s,
        )
        self._election.start()

    def asked(self, name: str) -> None:
        """Notes that a client called `name` ("": unnamed) asked this candidate while looking for the leader."""
        if name and self._election is not None:
            self._election.asked(name)

    def look(self) -> Store:
        """Opens the store for reading."""
        return EtcdStore(self.client, self.root, owned=False)

    def open_store(self, over: Callable[[Store], str]) -> Store:
        """Opens the store for the elected leader; empties it first if its job is over.

        Whoever waited while another one led tells what that one has ended.

        Args:
            over: Returns words if what is in the store is over; "" if it goes on.
        """
        store = EtcdStore(self.client, self.root, guard=self.guard, owned=False)
        if not self.waited() and (words := over(store)):
            store.begin_again()
            self.begun_again = True
            self.note("notice", text=f"{words}; it begins anew in {store.place}")
        return store

    def others(self) -> bool:
        """Returns whether other candidates are waiting in etcd."""
        election = self._election
        return election is not None and any(c.id != election.me.id for c in election.candidates())

    def waited(self) -> bool:
        """Returns whether this process, or another one before it, was a candidate or leader already: what is over then
        ended during that time.
        """
        return self._followed or (self._election is not None and self._election.followed)

    def watched(self) -> bool:
        """Returns whether this candidate saw another one lead by the same log until its own election."""
        return self._election is not None and self._election.watched

    def stands_by(self) -> bool:
        """Returns whether another candidate leads and this one would succeed it, so that it must go on without
        clients.
        """
        return self._election is not None and self._election.stands_by

    def waits(self, what: str) -> tuple[str, str]:
        """Returns words that say why this `what` does not lead, and the endpoint of the leader; "" if nobody leads."""
        leader = self._election.leader if self._election is not None else None
        trouble = self._election.trouble if self._election is not None else ""
        place = leader.endpoint if leader is not None else ""
        return f"this {what} waits to lead; now {place or 'nobody'} does. {trouble}".rstrip(". "), place

    def facts(self) -> dict[str, Any]:
        """Returns facts for `status`: who leads, since when and why, which candidates wait, and what this one waits
        for.
        """
        return self._election.facts() if self._election is not None else {}

    def close(self) -> None:
        """Gives the candidacy up; if this candidate leads, another can lead at once. Idempotent."""
        if self._election is not None:
            self._election.resign()
        self.client.close()
