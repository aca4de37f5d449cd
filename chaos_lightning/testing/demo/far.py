"""The clusters of `demo-diloco`: their names, speeds and roles in the story."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FarCluster:
    """A cluster of `demo-diloco`: its name, speed and nodes.

    Attributes:
        name: Name of the cluster.
        pause_s: Seconds added to each of its steps.
        nodes: Nodes of an elastic cluster: the first two found it, the second one is killed, the third one joins. Empty
            for a plain cluster.
    """

    name: str
    pause_s: float
    nodes: tuple[str, ...] = ()


FAST, BENDS, DIES, LATE = (
    FarCluster(name="home", pause_s=0.05),
    FarCluster(name="edge", pause_s=0.09, nodes=("edge-1", "edge-2", "edge-3")),
    FarCluster(name="van", pause_s=0.26),
    FarCluster(name="lab", pause_s=0.14),
)
CLUSTERS = (FAST, BENDS, DIES, LATE)
