"""Hooks of jobs with pipelines: the behaviour of their processes."""

from __future__ import annotations

from lab.simulate.node import Node
from lab.simulate.oracle import Oracle
from lab.simulate.staged import StagedNode
from lab.simulate.staged_oracle import StagedOracle
from lab.simulate.world import Hooks


class StagedHooks(Hooks):
    """Hooks of jobs with pipelines; planted bugs replace some of it."""

    node_class: type[Node] = StagedNode
    oracle_class: type[Oracle] = StagedOracle
