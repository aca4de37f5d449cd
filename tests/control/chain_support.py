"""Decisions and chains of made-up jobs, for tests of the chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.membership.effects import LinkWish, Persist
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Ledger, Member, Spent, View, ViewId
from chaos_lightning.service.etcd_client import EtcdClient
from chaos_lightning.service.etcd_store import EtcdStore, job_root

MEMBERS = (Member("a~1", "a", "host", "127.0.0.1", 4000), Member("b~2", "b", "host", "127.0.0.1", 4001, 7, 8, 9))
BASE = replace(GENESIS, seq=4, kind=Kind.STEP, ledger=Ledger((Spent("", 1, ((0, 4),)),)), presence=b"\x00\xff")


def view(number: ViewId, predecessor: ViewId = NO_VIEW) -> View:
    return View(number, predecessor, MEMBERS, ("b~2",), reason="because")


def decide(number: ViewId, predecessor: ViewId = NO_VIEW, base: Header | None = None, token: int = 1) -> Persist:
    return Persist(token, "view", number, view(number, predecessor), base, hand_on=base is not None)


def reserve(number: ViewId) -> Persist:
    return Persist(1, "reserve", number)


def finish(number: ViewId) -> Persist:
    return Persist(1, "finish", number)


def link(a: str, b: str, *, add: bool = False) -> Persist:
    return Persist(1, "link", NO_VIEW, wish=LinkWish(a, b, add, 'an operator asks: "why not?" (\u20ac)'))


def etcd_chain(client: EtcdClient, job: str, **options: Any) -> JobChain:
    """Opens a job's chain in the etcd that a client reaches."""
    return JobChain(EtcdStore(client, job_root(client.address.prefix, job), **options))
