"""Clusters that are disconnected when their job ends: they get its last version later, or fail (O16)."""

from __future__ import annotations

import pytest
import torch
from outer_cluster_support import Cluster, Clusters

from chaos_lightning.errors import StateError
from chaos_lightning.outer.exchange.control_client import ask_end
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.messages import Dismissed


def weights(cluster: Cluster) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in cluster.model.parameters()])


def ended_without(clusters: Clusters) -> tuple[Cluster, Cluster]:
    """Returns two clusters of a job that an operator has ended (`ps end`); the first one had lost its stream before."""
    away, other = clusters.come_in("away"), clusters.come_in("other")
    away.train()
    other.train()
    attendant = away.session._life.attendant
    assert attendant is not None
    attendant.close()
    away.step()
    ask_end(clusters.job.server, "enough", b"", 60.0)
    other.session.finish("it is through")
    assert other.session.over == "enough"
    return away, other


def test_who_was_removed_and_comes_in_after_the_end_has_the_last_version(clusters: Clusters) -> None:
    away, other = ended_without(clusters)
    away.session._feed(away.session._life, fx.Told(Dismissed(1, "nothing was heard of it", again=True)))
    away.session.finish("it is through", 60.0)
    assert away.session.over == "enough"
    assert torch.equal(weights(away), weights(other))


def test_who_is_put_out_for_good_fails(clusters: Clusters) -> None:
    home = clusters.come_in("home")
    home.train()
    home.session._feed(home.session._life, fx.Told(Dismissed(1, "its name is taken", again=False)))
    with pytest.raises(StateError, match="its model is not the job's last version: its name is taken"):
        home.session.finish("it is through", 60.0)


def test_an_elastic_cluster_that_is_put_out_for_good_fails_at_all_ranks(clusters: Clusters) -> None:
    ranks = clusters.elastic("ranks")
    with ranks.cluster._changed:
        ranks.cluster._news.append(fx.Told(Dismissed(1, "its name is taken", again=False)))
    with pytest.raises(StateError, match="its model is not the job's last version: its name is taken"):
        ranks.cluster.alone()
