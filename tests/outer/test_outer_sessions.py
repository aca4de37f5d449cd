"""A cluster's session in this process, with a real leader and follower, where what happens when is the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from outer_job_support import OuterJob, cluster_parts, inner_step, open_session, small_model
from torch import nn
from until_support import until

from chaos_lightning.lab.harness import Harness
from chaos_lightning.outer import push_serving
from chaos_lightning.outer.content import OuterContent
from chaos_lightning.outer.elastic import ElasticCluster
from chaos_lightning.outer.lines import SERVING
from chaos_lightning.outer.session import OuterSession
from chaos_lightning.outer.settings import OuterSettings
from chaos_lightning.outer.types import NO_VERSION, PushAnswer, PushId
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint

EACH = OuterSettings(policy="async", inner_steps=1, batch=16)
"""Each push is a version."""


class Cluster:
    """One with a session of its own, which does what it is told."""

    def __init__(self, name: str, model: nn.Module, session: OuterSession) -> None:
        self.name, self.model, self.session = name, model, session
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.steps = 0

    def train(self) -> None:
        """A step, whose push is answered when this returns; nothing is adopted for it."""
        self.steps += 1
        inner_step(self.model, self.optimizer, self.name, self.steps)
        self.session.boundary(16)
        machine = self.session._life.machine
        until(lambda: machine.freezing is None and machine.open is None, "the answer to its push")

    def settle(self) -> None:
        """Until its base is the newest version."""
        machine = self.session._life.machine

        def newest() -> bool:
            self.session.boundary(0, steps=0)
            return machine.base == machine.newest

        until(newest, "the newest version")


class OneRank:
    """The inner job of an elastic cluster whose other ranks are gone."""

    def __init__(self) -> None:
        self.server = StateServer(SERVING)

    def ways(self, members: Sequence[str]) -> list[Endpoint]:
        assert not members
        return []

    def dial(self, donor: Endpoint) -> Any:
        raise AssertionError(f"there is no {donor}")


class Elastic:
    """An elastic cluster of one rank."""

    def __init__(self, name: str, model: nn.Module, cluster: ElasticCluster) -> None:
        self.name, self.model, self.cluster = name, model, cluster
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.steps = 0
        cluster.found("nonce")
        cluster.begin(name, first=True)

    def meet(self, done: Callable[[], object], what: str) -> None:
        """Its rank meets nobody else until this is so."""

        def met() -> object:
            self.cluster.alone()
            return done()

        until(met, what)

    def train(self) -> None:
        """A step, of which its rank has told."""
        self.steps += 1
        inner_step(self.model, self.optimizer, self.name, self.steps)
        self.cluster.used(16)
        self.cluster.commit([self.name], [self.cluster.answer()], steps=1)


class Clusters:
    """Of one job."""

    def __init__(self, harness: Harness, meanwhile: ExitStack) -> None:
        self.harness, self._meanwhile = harness, meanwhile
        self.job = OuterJob(harness).start()

    def come_in(self, name: str, model: nn.Module | None = None, rules: OuterSettings = EACH, **told: Any) -> Cluster:
        """Another one, started."""
        model = model or small_model()
        session = open_session(self.job.server, name, model, str(self.harness.logs), rules, **told)
        self._meanwhile.callback(session.close)
        session.start()
        return Cluster(name, model, session)

    def elastic(self, name: str, rules: OuterSettings = EACH, **told: Any) -> Elastic:
        """Another one, elastic, in."""
        made = small_model()
        parts = cluster_parts(self.job.server, name, made, str(self.harness.logs), rules, **told)
        inner = OneRank()
        cluster = ElasticCluster(parts[0], parts[1], parts[2], inner, parts[3])
        self._meanwhile.callback(inner.server.close)
        self._meanwhile.callback(cluster.close)
        elastic = Elastic(name, made, cluster)
        elastic.meet(lambda: cluster.base != NO_VERSION, "its first base")
        return elastic


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    with Harness(tmp_path, deadline_s=90) as harness, ExitStack() as meanwhile:
        yield Clusters(harness, meanwhile)


def test_a_version_that_comes_while_the_one_before_is_about_to_be_adopted(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the other one's place, and training ended with an AssertionError."""
    fast, slow = clusters.come_in("fast", codec="int8"), clusters.come_in("slow", codec="int8")
    machine = slow.session._life.machine
    hold, settles = Event(), Event()
    fetch, settle = push_serving.fetch_version, OuterContent.settle

    def fetch_later(*given: Any, **named: Any) -> int:
        if hold.is_set():
            assert settles.wait(30)
        return fetch(*given, **named)

    def settle_long(content: OuterContent, push: PushId, answer: PushAnswer) -> None:
        if content is slow.session._content:
            settles.set()
            until(lambda: machine.fetching == NO_VERSION, "the version that is being fetched")
        settle(content, push, answer)

    monkeypatch.setattr(push_serving, "fetch_version", fetch_later)
    monkeypatch.setattr(OuterContent, "settle", settle_long)
    slow.train()
    own = machine.newest
    until(lambda: machine._here == own, "the version of its push")
    hold.set()
    fast.train()
    until(lambda: machine.fetching > own, "the next version to be fetched")
    assert slow.session.boundary(0, steps=0).adopted == own
    slow.settle()
    assert machine.base == machine.newest > own
