"""Behaviour of processes in jobs with pipelines."""

from __future__ import annotations

from chaos_lightning.lab.simulate.node import Node
from chaos_lightning.lab.simulate.oracle import Oracle
from chaos_lightning.lab.simulate.staged import StagedNode
from chaos_lightning.lab.simulate.staged_oracle import StagedOracle
from chaos_lightning.lab.simulate.world import Hooks


class StagedHooks(Hooks):
    """See the module; planted bugs replace some of it."""

    node_class: type[Node] = StagedNode
    oracle_class: type[Oracle] = StagedOracle
