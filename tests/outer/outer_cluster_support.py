"""Clusters whose sessions run in a test's own process, with a leader and a follower in real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from outer_job_support import OuterJob, cluster_parts, inner_step, open_session, small_model
from torch import nn
from until_support import until

from chaos_lightning.outer.cluster.elastic import ElasticCluster
from chaos_lightning.outer.cluster.session import OuterSession
from chaos_lightning.outer.exchange.lines import SERVING
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.testing.harness import Harness

EACH = OuterSettings(policy="async", inner_steps=1, batch=16)
"""Each push is a version."""


class Cluster:
    """Cluster with a session of its own, whose every step a test makes."""

    def __init__(self, name: str, model: nn.Module, session: OuterSession) -> None:
        self.name, self.model, self.session = name, model, session
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.steps = 0

    def step(self) -> None:
        """Makes an inner step without reporting it to the session."""
        self.steps += 1
        inner_step(self.model, self.optimizer, self.name, self.steps)

    def train(self) -> None:
        """Makes an inner step and waits until its push is answered; the push's version is not adopted."""
        self.step()
        self.session.boundary(16)
        self.hear()

    def hear(self) -> None:
        """Waits until the cluster's push is answered."""
        machine = self.session._life.machine
        until(lambda: machine.freezing is None and machine.open is None, "the answer to its push")

    def settle(self) -> None:
        """Waits until the cluster has adopted the newest version."""
        machine = self.session._life.machine

        def newest() -> bool:
            self.session.boundary(0, steps=0)
            return machine.base == machine.newest

        until(newest, "the newest version")


class OneRank:
    """Stand-in for the inner job of an elastic cluster that has one rank left."""

    def __init__(self) -> None:
        self.server = StateServer(SERVING)

    def ways(self, members: Sequence[str]) -> list[Endpoint]:
        assert not members
        return []

    def dial(self, donor: Endpoint) -> Any:
        raise AssertionError(f"there is no {donor}")


class Elastic:
    """Elastic cluster of one rank, whose every step a test makes."""

    def __init__(self, name: str, model: nn.Module, cluster: ElasticCluster) -> None:
        self.name, self.model, self.cluster = name, model, cluster
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.steps = 0
        cluster.found("nonce", alone=True)
        cluster.begin(name, first=True)

    def meet(self, done: Callable[[], object], what: str) -> None:
        """Makes commits without a step at the only rank until `done` returns true."""

        def met() -> object:
            self.cluster.alone()
            return done()

        until(met, what)

    def train(self) -> None:
        """Makes an inner step and commits it."""
        self.steps += 1
        inner_step(self.model, self.optimizer, self.name, self.steps)
        self.cluster.used(16)
        self.cluster.commit([self.name], [self.cluster.answer()], steps=1)


class Clusters:
    """Clusters of one job."""

    def __init__(self, harness: Harness, meanwhile: ExitStack) -> None:
        self.harness, self._meanwhile = harness, meanwhile
        self.job = OuterJob(harness).start()

    def come_in(
        self, name: str, model: nn.Module | None = None, rules: OuterSettings = EACH, *, server: str = "", **told: Any
    ) -> Cluster:
        """Starts another cluster; `server` is the endpoint at which it looks for the leader, by default the leader's
        own.
        """
        model = model or small_model()
        session = open_session(server or self.job.server, name, model, str(self.harness.logs), rules, **told)
        self._meanwhile.callback(session.close)
        session.start()
        return Cluster(name, model, session)

    def elastic(self, name: str, rules: OuterSettings = EACH, **told: Any) -> Elastic:
        """Starts another, elastic cluster and waits until it has joined."""
        made = small_model()
        parts = cluster_parts(self.job.server, name, made, str(self.harness.logs), rules, **told)
        inner = OneRank()
        cluster = ElasticCluster(parts[0], parts[1], parts[2], inner, parts[3])
        self._meanwhile.callback(inner.server.close)
        self._meanwhile.callback(cluster.close)
        elastic = Elastic(name, made, cluster)
        elastic.meet(lambda: cluster.base != NO_VERSION, "its first base")
        return elastic
