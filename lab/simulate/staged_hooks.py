"""Chooses the classes of simulated jobs with pipelines."""

from __future__ import annotations

from lab.simulate.node import Node
from lab.simulate.oracle import Oracle
from lab.simulate.staged import StagedNode
from lab.simulate.staged_oracle import StagedOracle
from lab.simulate.world import Hooks


class StagedHooks(Hooks):
    """Hooks for jobs with pipelines: the classes of their processes, which planted bugs may replace."""

    node_class: type[Node] = StagedNode
    oracle_class: type[Oracle] = StagedOracle
