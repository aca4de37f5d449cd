"""A cluster far from its server: the link is cut, or silently drops all bytes, while a push or a version is being
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from outer_cluster_support import Cluster, Clusters
from torch import nn
from until_support import until

from chaos_lightning.events.events import Record
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.testing.edge.relay import LinkRelay, Way
from chaos_lightning.testing.emulation import emulating

# Why a stream broke is asked with TLS, too; Python's ssl leaves a socket open that was reset before its handshake.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)
RULES = OuterSettings(policy="async", inner_steps=1, batch=16, heartbeat_s=20.0)
"""Rules by which no cluster is removed for the silence of a busy machine."""
WIDTH = 16_384
FAR_BPS = 1.6e6
"""A push, and a version, of the model takes two seconds."""


@pytest.fixture
def relay() -> Iterator[LinkRelay]:
    """Relay through which all data connections of this process are made."""
    with LinkRelay() as relay, emulating(relay=relay.address):
        yield relay


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


class FarLink:
    """Link between a cluster and its server: the control stream, and data connections to one follower."""

    def __init__(self, clusters: Clusters, relay: LinkRelay, control: Way, home: Cluster) -> None:
        self.harness, self.relay, self.control, self.home = clusters.harness, relay, control, home
        self.lost: Record | None = None
        relay.shape("home", "f0", rate_bps=FAR_BPS)

    def passes(self, start: str, end: str) -> Callable[[], bool]:
        """Returns a function that tells whether, from now on, a third of a push or version has been sent."""
        before, third = self.relay.passed()[start, end], 2 * sum(p.numel() for p in self.home.model.parameters()) / 3
        return lambda: self.relay.passed()[start, end] - before > third

    def cut(self) -> None:
        """Cuts the link, and waits until the leader has noticed."""
        self.relay.cut("home", "f0")
        self.control.cut()
        self.lost = self.harness.wait_for("cluster_stream", lambda r: not r["up"], after=self.lost)

    def restore(self) -> None:
        self.relay.restore("home", "f0")
        self.control.restore()


def accepted(clusters: Clusters) -> list[str]:
    """Returns the numbers of the accepted pushes in the order of the rounds."""
    rounds = [r["body"] for r in clusters.harness.records if r.name == "entry" and r["kind"] == "Round"]
    return [str(each["offer"]["push"]["number"]) for body in rounds for each in body["accepted"]]


def entries(clusters: Clusters, kind: str) -> int:
    return sum(r.name == "entry" and r["kind"] == kind for r in clusters.harness.records)


@pytest.mark.slow
def test_a_link_that_is_cut_in_mid_push_and_in_mid_version_costs_neither(clusters: Clusters, relay: LinkRelay) -> None:
    with closing(Way(clusters.job.server)) as control:
        home = clusters.come_in("home", wide_model(), RULES, server=control.endpoint)
        home.settle()
        machine, link = home.session._life.machine, FarLink(clusters, relay, control, home)
        who = machine.incarnation
        third = link.passes("home", "f0")
        home.step()
        home.session.boundary(16)
        until(third, "a third of the push")
        assert machine.open is not None
        push = machine.open.push
        link.cut()
        home.step()
        home.session.boundary(16)
        assert machine.open is not None, "it trains on, and keeps its push"
        assert machine.open.push == push
        third = link.passes("f0", "home")
        link.restore()
        home.hear()
        until(third, "a third of the version")
        assert machine.base < machine.newest
        link.cut()
        link.restore()
        home.settle()
        assert (machine.incarnation, home.session.over) == (who, "")
        home.train()
    assert [n for n in accepted(clusters) if n == str(push.number)] == [str(push.number)]
    assert len(accepted(clusters)) == len(set(accepted(clusters)))
    assert (entries(clusters, "Joined"), entries(clusters, "Removed")) == (1, 0)


def test_a_stream_that_swallows_everything_is_given_up_and_its_push_is_answered_on_another_one(
    clusters: Clusters,
) -> None:
    """A stream silently loses all messages, as behind a NAT that has forgotten it, and new streams work: the push is
    answered on a new one.
    """
    with closing(Way(clusters.job.server)) as one, closing(Way(clusters.job.server)) as another:
        places = f"{one.endpoint},{another.endpoint}"
        home = clusters.come_in("home", rules=RULES, server=places)
        home.settle()
        machine = home.session._life.machine
        who = machine.incarnation
        ways = [one, another]
        until(lambda: sum(bool(way._relay._connections) for way in ways) == 1, "one stream alone")
        forgotten, other = ways if one._relay._connections else reversed(ways)
        forgotten.stall()
        home.train()
        home.settle()
        assert other._relay._connections
        assert (machine.incarnation, home.session.over) == (who, "")
    assert accepted(clusters) == ["2"]
    assert (entries(clusters, "Joined"), entries(clusters, "Removed")) == (1, 0)
