"""Tests that a joiner reports its copy's progress to the scheduler and to members that wait for the copy."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from replication_support import LIMIT_S, Acceptor, dial, donors, numbered

from chaos_lightning.member import transfer as transfers
from chaos_lightning.member.choice import TransferChoice
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Member, Progress, View, ViewId
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.replication.server import StateServerConfig
from chaos_lightning.replication.source import Endpoint

OFTEN = StateServerConfig(pending_interval_s=0.02)
WORDS = 500
"""Most words of a member that are waited for until one says that something came: ten seconds of them."""
FRESH_MS = 1000.0 * LIMIT_S


class Joiner(Transfer):
    """Member that fetches the state, and serves it to others through a socket of this process."""

    def __init__(self, told: list[Progress]) -> None:
        none: set[str] = set()
        links = SimpleNamespace(near=lambda: none, unmeasured=lambda: none, estimates=dict)
        events = SimpleNamespace(emit=lambda *_, **__: None)
        super().__init__(
            "job",
            "",
            Mailbox("m1"),
            cast(Any, events),
            TransferChoice(),
            cast(Any, links),
            cast(Any, None),
            told.append,
        )
        self.server.config = OFTEN
        self.acceptor = Acceptor(lambda sock: self.server.serve(sock, "m2"))

    def dial(self, donor: Endpoint) -> Any:
        return dial(donor)

    def close(self) -> None:
        super().close()
        self.acceptor.close()


def says_that_something_came(joiner: Joiner, header: Header) -> bool:
    """Returns whether the joiner, asked for a state that it still fetches, reports that it got some of it recently."""
    channel = BulkSocket(dial(joiner.acceptor.endpoint("m1")), stall_timeout_s=LIMIT_S)
    channel.send(BulkFrame(Type.GET_DIGEST, header.hash, header.seq))
    try:
        for _ in range(WORDS):
            frame = channel.receive_header(patience_s=LIMIT_S)
            assert frame is not None
            assert frame.type is Type.PENDING
            if frame.offset < FRESH_MS:
                return True
        return False
    finally:
        channel.sock.close()


def test_growth_of_a_copy_is_told_to_the_scheduler_and_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TOLD_EVERY_S", 0.0)
    told: list[Progress] = []
    joiner = Joiner(told)
    joiner._progress("pull")(Progress("pull", 100, 1000, 0.0))
    assert [(p.phase, p.done_nbytes) for p in told] == [("pull", 100)]
    assert says_that_something_came(joiner, GENESIS)
    joiner.close()


def test_growth_of_a_donors_own_copy_is_passed_on() -> None:
    """The joiner's donor still fetches the state itself; when the donor reports progress, the joiner reports progress
    to members that wait for it.
    """
    state, mine = numbered(2, 1000, seed=3), numbered(2, 1000, seed=9)
    joiner = Joiner([])
    with donors("m0", config=OFTEN) as (donor,):
        members = [Member(e.member, e.member, "host", e.address, e.port) for e in (donor.endpoint,)]
        members.append(Member("m1", "m1", "elsewhere", "127.0.0.1", 1))
        view = View(ViewId(1, 1), NO_VIEW, tuple(members), ("m1",))
        donor.server.grew()
        deadline = time.monotonic() + LIMIT_S
        got: list[bool] = []
        puller = threading.Thread(target=lambda: got.append(joiner.fetch(GENESIS, view, cast(Any, mine), deadline)))
        puller.start()
        try:
            assert says_that_something_came(joiner, GENESIS)
        finally:
            donor.server.publish(GENESIS.hash, GENESIS.seq, state.tensors(), state.manifest())
            puller.join(LIMIT_S)
            joiner.close()
    assert got == [True]
    assert torch.equal(mine.tensors()[0][1], state.tensors()[0][1])
