"""Tests serving named states, in several versions, beside a member's own; and a donor that cannot be dialled."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest
import torch
from replication_support import LIMIT_S, Plain, dial, listen, numbered, start_donor
from until_support import until

from chaos_lightning.errors import ChaosError, StateError
from chaos_lightning.member.connection_pool import ConnectionPool
from chaos_lightning.replication import Endpoint, PullConfig, StateServer, StateServerConfig, pull_state, state_hash
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type, named_head

CONFIG = PullConfig(deadline_s=LIMIT_S, request_nbytes=1 << 16)


def pulled(endpoint: Endpoint, name: str, version: int) -> Plain:
    mine = numbered(3, 20_000, seed=99)
    pull_state([endpoint], dial, head=named_head(name), seq=version, state=mine, config=CONFIG)
    return mine


def test_several_versions_of_several_states_are_served_side_by_side() -> None:
    """Two named states, in two versions each, can be pulled until they are dropped, as slower clusters need from a
    parameter server.
    """
    states = {(name, v): numbered(3, 20_000, seed=10 * v + len(name)) for name in ("outer", "teacher") for v in (0, 1)}
    donor = start_donor("server", StateServerConfig(publish_timeout_s=0.3))
    with closing(donor):
        for (name, version), state in states.items():
            donor.server.hold(name, version, state.tensors(), state.manifest())
        for (name, version), state in states.items():
            assert state_hash(pulled(donor.endpoint, name, version).tensors()) == state_hash(state.tensors())
        donor.server.drop("outer", before=1)
        with pytest.raises(StateError, match=r"this member serves the state at header .* \(slot 1\)"):
            pulled(donor.endpoint, "outer", 0)
        pulled(donor.endpoint, "outer", 1)
        donor.server.drop("teacher")
        with pytest.raises(StateError, match=r"is not served here any more"):
            pulled(donor.endpoint, "teacher", 1)
        with pytest.raises(StateError, match=r"was not published within 0\.3 s"):
            pulled(donor.endpoint, "student", 1)
        name, version = "teacher", 1
        donor.server.hold(name, version, states[name, version].tensors(), {})
        pulled(donor.endpoint, name, version)


def test_it_is_known_when_a_version_was_asked_for_last() -> None:
    donor = start_donor("server")
    with closing(donor):
        donor.server.hold("outer", 1, numbered(3, 20_000, seed=1).tensors(), {})
        assert donor.server.asked_at("outer", 1) == donor.server.asked_at("outer", 2) == 0.0
        before = time.monotonic()
        pulled(donor.endpoint, "outer", 1)
        assert donor.server.asked_at("outer", 1) >= before


def test_who_is_being_sent_a_long_answer_is_still_asking() -> None:
    """A peer that is being sent a long answer over a slow link counts as asking until the answer is complete."""
    server, (near, far) = StateServer(), socket.socketpair()
    server.hold("outer", 0, [("w", torch.zeros(4_000_000))], {})
    serving = threading.Thread(target=server.serve, args=(near, "peer"))
    serving.start()
    with closing(server), far:
        channel = BulkSocket(far, stall_timeout_s=30.0)
        channel.send(BulkFrame(Type.GET_STATE, named_head("outer"), 0, 0, 16_000_000))
        for _ in range(2):
            begun = time.monotonic()
            until(lambda since=begun: server.asked_at("outer", 0) > since, "an answer under way")  # type: ignore[misc]
        channel.receive_header()
        channel.receive_into([memoryview(bytearray(16_000_000))])
        until(lambda: server.asked_at("outer", 0) == server.asked_at("outer", 0), "the end of the answer")
    serving.join()


def test_a_version_that_is_still_ahead_is_waited_for_and_may_be_overwritten_once_it_was_copied() -> None:
    donor = start_donor("server")
    with closing(donor):
        weights = torch.zeros(1000)
        donor.server.hold("outer", 0, [("w", weights)], {}, copies=["w"])
        weights += 1
        found: list[Plain] = []
        waiting = threading.Thread(target=lambda: found.append(pulled_weights(donor.endpoint, 1)))
        waiting.start()
        assert torch.equal(pulled_weights(donor.endpoint, 0).named[0][1], torch.zeros(1000))
        donor.server.hold("outer", 1, [("w", weights)], {})
        waiting.join(LIMIT_S)
        assert torch.equal(found[0].named[0][1], torch.ones(1000))


def pulled_weights(endpoint: Endpoint, version: int) -> Plain:
    mine = Plain([("w", torch.full((1000,), 7.0))])
    pull_state([endpoint], dial, head=named_head("outer"), seq=version, state=mine, config=CONFIG)
    return mine


def test_a_donor_that_cannot_be_dialled_serves_over_a_connection_that_it_made_itself() -> None:
    """A donor behind a firewall dials the puller, which keeps the connection and later pulls over it."""
    theirs, mine = numbered(3, 20_000), numbered(3, 20_000, seed=1)
    server, behind = StateServer(), Endpoint("donor", "192.0.2.1", 9)  # TEST-NET-1: nobody's
    server.hold("outer", 4, theirs.tensors(), theirs.manifest())

    def nobody(endpoint: Endpoint) -> socket.socket:
        raise ChaosError(f"{endpoint.address} cannot be dialled")

    pool = ConnectionPool(nobody)
    with listen() as listener:
        dialled = socket.create_connection(listener.getsockname())
        pool.put(behind, listener.accept()[0])
    serving = threading.Thread(target=server.serve, args=(dialled, "puller"))
    serving.start()
    pull_state(
        [behind],
        lambda endpoint: pool.take(endpoint) or nobody(endpoint),
        head=named_head("outer"),
        seq=4,
        state=mine,
        config=CONFIG,
    )
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    server.close()
    pool.close()
    serving.join(LIMIT_S)
    assert not serving.is_alive()
