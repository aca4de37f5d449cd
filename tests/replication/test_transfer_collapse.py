"""Tests a link whose rate falls to a hundredth during a pull, over real sockets."""

from __future__ import annotations

import json
import socket

import pytest
from replication_support import HEAD, LIMIT_S, SEQ, numbered, publishing

from chaos_lightning.protocol.types import Progress
from chaos_lightning.replication import Endpoint, PullConfig, make_policy, pull_state, state_hash
from chaos_lightning.testing.edge.relay import LinkRelay

RATE_BPS = 200e6
NEW = "new"


@pytest.mark.parametrize("estimates", [{"a": (0.0, RATE_BPS), "b": (0.0, RATE_BPS)}, None], ids=["planned", "unknown"])
def test_a_link_that_falls_to_one_percent_is_relieved(estimates: dict[str, tuple[float, float]] | None) -> None:
    """Another source takes over the work of a link that falls to one percent of its rate; else the pull would take half
    a minute longer.
    """
    theirs, mine = numbered(40, 100_000), numbered(40, 100_000, seed=1)
    fell_at: list[int] = []
    with LinkRelay() as relay, publishing(theirs, "a", "b") as donors:
        for donor in donors:
            relay.shape(donor.member, NEW, rate_bps=RATE_BPS)

        def dial(donor: Endpoint) -> socket.socket:
            host, _, port = relay.address.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=LIMIT_S)
            said = {"me": NEW, "peer": donor.member, "address": donor.address, "port": donor.port}
            sock.sendall(json.dumps(said).encode() + b"\n")
            return sock

        def progress(now: Progress) -> None:
            here = next((s.nbytes for s in now.sources if s.member == "a"), 0)
            if here >= 1_000_000 and not fell_at:
                fell_at.append(here)
                relay.shape("a", NEW, rate_bps=RATE_BPS / 100)

        report = pull_state(
            [d.endpoint for d in donors],
            dial,
            head=HEAD,
            seq=SEQ,
            state=mine,
            config=PullConfig(deadline_s=LIMIT_S),
            policy=make_policy("adaptive", estimates),
            progress=progress,
        )
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors()) == report.state_hash
    assert report.failed == {}
    assert sum(report.by_source.values()) == 16_000_000
    assert fell_at[0] <= report.by_source["a"] < 6_000_000, report.by_source
