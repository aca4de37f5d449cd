"""Real outer jobs for tests: a leader, followers and clusters as processes of the fork server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from forked_support import run
from torch import nn
from until_support import until

from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.listener import free_port
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.session import OuterSession, agreement_of
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import Agreement
from chaos_lightning.testing.harness import Harness

LEADER = "chaos_lightning.outer.commands.leader_main"
FOLLOWER = "chaos_lightning.outer.commands.follower_main"


class OuterJob:
    """Processes of one job's server, under a harness.

    Args:
        harness: Harness, whose directory (`folder`, unless that is changed) holds the chain and the followers' files.
        followers: Number of followers.
    """

    def __init__(self, harness: Harness, followers: int = 1) -> None:
        self.harness = harness
        self.folder = harness.directory
        self.followers = [f"f{number}" for number in range(followers)]
        self.more: list[str] = []
        """Options of each follower's command line."""
        self.leads: list[str] = []
        """Options of the leader's command line."""
        self.server = f"127.0.0.1:{free_port()}"

    def start(self) -> OuterJob:
        self.start_leader()
        for name in self.followers:
            self.start_follower(name)
        return self

    def start_leader(self) -> None:
        store = self.folder / "chain.sqlite"
        arguments = ["--listen", self.server, "--store", str(store), "--followers", str(len(self.followers))]
        self.harness.start_function("leader", run, LEADER, [*arguments, *self.leads, *self._logs()])

    def start_follower(self, name: str) -> None:
        self.harness.start_function(name, run, FOLLOWER, self.arguments_of(name))

    def arguments_of(self, name: str) -> list[str]:
        """Returns the command-line arguments of a follower."""
        folder = str(self.folder / name)
        return ["--server", self.server, "--name", name, "--dir", folder, *self.more, *self._logs()]

    def kill_server(self) -> None:
        """Kills all processes of the server by SIGKILL."""
        for name in ("leader", *self.followers):
            self.harness.declare(name)
            self.harness.kill(name)
        for name in ("leader", *self.followers):
            self.harness.wait_exit(name)

    def _logs(self) -> list[str]:
        return ["--log-dir", str(self.harness.logs)]


def small_model() -> nn.Module:
    """Returns a model that is the same in all processes."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 3))


def batch_of(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch of a cluster's own data, which depends only on the cluster's name and the step."""
    noise = torch.Generator().manual_seed(1000 * sum(map(ord, name)) + step)
    x = torch.randn(16, 8, generator=noise)
    return x, x[:, :3] * 2 - x[:, 3:6]


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, step: int) -> float:
    """Trains one step on the batch of this cluster and step; returns its loss."""
    x, y = batch_of(name, step)
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def cluster_parts(
    server: str,
    name: str,
    model: nn.Module,
    logs: str,
    settings: OuterSettings,
    *,
    length: int = 0,
    words: dict[str, str] | None = None,
    **options: object,
) -> tuple[Replica, Agreement, ClusterOptions, EventLog]:
    """Returns the arguments with which a cluster makes its session."""
    torch.set_num_threads(1)
    given = {"server": server, "name": name, "data": "local" if not length else "shared", "log_dir": logs, "block": 64}
    own = ClusterOptions.build({**given, "host_server": False, **options}, {})
    replica = Replica.of_module(model, reduced_buffers(model))
    agreement = agreement_of(replica, own, settings, length=length, words=words)
    return replica, agreement, own, EventLog.in_directory(logs, name, role="cluster")


def open_session(*given: Any, **named: Any) -> OuterSession:
    """Returns a cluster's session that is not started yet; arguments are those of `cluster_parts`."""
    return OuterSession(*cluster_parts(*given, **named))


def wait_for_file(path: Path, deadline_s: float = 60.0) -> None:
    """Waits until this file exists, which the test makes."""
    until(path.exists, f"the file {path}", deadline_s)
