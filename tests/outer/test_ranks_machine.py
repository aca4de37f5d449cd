"""What all ranks of an elastic cluster hold alike, where the simulator needs luck to come by."""

from __future__ import annotations

from chaos_lightning.lab.outer.processes import agreement
from chaos_lightning.outer import cluster as cl
from chaos_lightning.outer import effects as fx
from chaos_lightning.outer.cluster import ClusterMachine
from chaos_lightning.outer.messages import Welcomed
from chaos_lightning.outer.ranks_machine import RankSays, RanksMachine
from chaos_lightning.outer.settings import OuterSettings
from chaos_lightning.outer.types import IncarnationId, JobProgress, VersionId

HERE = VersionId(1, "a" * 32)


def test_a_version_that_all_ranks_still_have_is_not_dropped_to_be_fetched_again() -> None:
    state = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 0)))
    welcome = fx.Told(Welcomed(1, IncarnationId("e", 1), 1, HERE, True, JobProgress()))
    events = (fx.Connected(), welcome)
    said = [RankSays(holds=HERE, events=events), RankSays(holds=HERE)]
    effects = list(state.commit(["a", "b"], said, 0, ()))
    assert [type(effect) for effect in effects] == [fx.Told, cl.Adopt]
    assert state.machine.base == HERE


def test_a_cluster_leaves_when_its_first_rank_says_so_or_all_are_held() -> None:
    def leaves(*said: RankSays) -> bool:
        state = RanksMachine(ClusterMachine("e", "here", "n", agreement(OuterSettings(), 0)))
        list(state.commit(["a", "b"], said, 0, ()))
        return state.machine.leaving

    stays, held, asks = RankSays(), RankSays(held=True), RankSays(leaves=True)
    assert [leaves(stays, stays), leaves(stays, asks), leaves(held, stays), leaves(stays, held)] == [False] * 4
    assert [leaves(asks, stays), leaves(held, held)] == [True] * 2
