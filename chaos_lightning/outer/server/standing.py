"""Outer sync's chains in etcd, where several leaders stand by for each other."""

from __future__ import annotations

from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_client import open_client
from chaos_lightning.service.etcd_store import EtcdStore, service_root
from chaos_lightning.service.store import Store

SERVICES = "outer"
"""Folder of outer sync's services in etcd."""


def open_outer_store(address: str, job: str) -> Store:
    """Opens a job's chain in etcd for reading.

    Raises:
        ConfigurationError: The address is none, or a file of it cannot be read.
    """
    client = open_client(read_address(address))
    return EtcdStore(client, service_root(client.address.prefix, SERVICES, job))


def candidacy_of(address: str, job: str) -> Candidacy:
    """Returns the candidacy of a leader in the election for a job.

    Raises:
        ConfigurationError: The address is not valid, or a file that it names cannot be read.
    """
    etcd = read_address(address)
    return Candidacy(etcd, service_root(etcd.prefix, SERVICES, job))


def over(store: Store) -> str:
    """Returns words if the job in the store has ended; "" if it goes on."""
    return "the job had ended" if load_chain(store).ended is not None else ""
