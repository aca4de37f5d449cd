"""Executes the pull of a newcomer's state: donors in processes of their own, real sockets, links with limited rates.

Theory of operation. `benchmarks.transfer.net` starts a process for each running node, with the package's own server,
handshake and relays; this process is the newcomer and pulls with the package's own policies. Two factors bring the
paper's sizes onto one small machine. States are `smaller` times smaller, tensor by tensor, and links `slower` times
slower, so that the processors do not become the links. Bytes then move in slower/smaller of their time, and what is
told is at the paper's size: seconds while bytes move times smaller/slower; of the rest, hashing all bytes before and
after (measured for each state) times `smaller`, the vote on the state and the connections as they are. Rates change in
mid-pull as the topology has it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.clusters import Join
from benchmarks.transfer.net import Joiner, Network
from chaos_lightning.testing.edge.topology import Pair


@dataclass(frozen=True)
class Factors:
    """Factors by which states, links and disks of the paper are reduced for this machine."""

    smaller: float = 1.0
    """States are so many times smaller than the paper's."""
    slower: float = 1.0
    """Links and disks are so many times slower."""

    @property
    def moving(self) -> float:
        """Seconds at the paper's size for each second in which bytes move on this machine."""
        return self.smaller / self.slower

    def paper_s(self, seconds: float, moving_s: float, hashing_s: float) -> float:
        """Converts the seconds of a pull on this machine to seconds at the paper's size.

        Args:
            seconds: Seconds of the whole pull on this machine.
            moving_s: Part of these seconds in which bytes moved.
            hashing_s: Part of the other seconds that hashing takes, before and after the bytes move.
        """
        rest_s = max(0.0, seconds - moving_s)
        hashing_s = min(rest_s, hashing_s)
        return self.moving * moving_s + self.smaller * hashing_s + rest_s - hashing_s

    def words(self) -> str:
        return f"states 1/{self.smaller:g}, rates 1/{self.slower:g}"


@dataclass(frozen=True)
class Moved:
    """Measurements of an executed pull; seconds and bytes at the paper's size."""

    seconds: float
    moving_s: float
    served_s: Mapping[str, float]
    """Seconds in which requests to the source were under way, by source."""
    nbytes: Mapping[str, float]
    """Bytes that came from the source, by source."""
    changed: bool
    """Whether rates of links changed during the pull."""
    wall_s: float
    """Seconds that it really took here."""


class Cluster:
    """The running nodes of a join, each in a process of its own, and the newcomer, which is this process.

    Args:
        join: Join with the cluster's nodes and links.
        factors: Factors by which sizes and rates are reduced.
        net: Network of the running nodes.
        folder: Folder for the donors' common state.
    """

    def __init__(self, join: Join, factors: Factors, net: Network, folder: Path) -> None:
        self.join, self.factors, self.net = join, factors, net
        self.joiner = Joiner(net, folder, seed=1)
        self._hashing_s = 0.0
        """Hashing the newcomer's state once, here."""

    def load(self, layout: Sequence[int]) -> None:
        """Makes all donors publish a state of random bytes, with tensors of these sizes in bytes (as reduced for this
        machine).
        """
        from chaos_lightning.replication.table import build_table

        self.joiner.load(layout)
        self.joiner.pull("adaptive", self.estimates(), empty=False)  # everybody hashes once; nothing is missing
        began = time.monotonic()
        build_table(self.joiner.newcomer.tensors())
        self._hashing_s = time.monotonic() - began

    def pull(self, policy: str, watch: Callable[[float, int], None] | None = None) -> Moved:
        """Pulls the whole state into an empty newcomer by the named policy.

        Args:
            policy: A name as `benchmarks.transfer.policies.policy_of` takes it.
            watch: Told now and then how many seconds have passed here and how many bytes are verified here.
        """
        began = time.monotonic()
        changes = _Changes(self, began)

        def progress(now: Any) -> None:
            changes()
            if watch is not None:
                watch(time.monotonic() - began, now.done_nbytes)

        report = self.joiner.pull(policy, self.estimates(), progress=progress)
        wall_s = time.monotonic() - began
        changes.undo()
        return Moved(
            seconds=self.factors.paper_s(report.seconds, report.moving_s, 2 * self._hashing_s),
            moving_s=self.factors.moving * report.moving_s,
            served_s={name: self.factors.moving * s.busy_s for name, s in report.sources.items()},
            nbytes={name: self.factors.smaller * n for name, n in report.by_source.items()},
            changed=changes.made,
            wall_s=wall_s,
        )

    def estimates(self) -> dict[str, tuple[float, float]]:
        """Returns (latency in s, bits per second) of the newcomer's emulated links, as a probe would measure them."""
        return {n: (latency, rate / self.factors.slower) for n, (latency, rate) in self.join.estimates().items()}


class _Changes:
    """Changes the rates of links by the topology's schedule while a pull runs; called whenever bytes have arrived."""

    def __init__(self, cluster: Cluster, began: float) -> None:
        self.cluster, self._began = cluster, began
        self._next_s = cluster.join.changes_after_s(0.0)
        self.made = False
        self._open: list[str] = []
        """Nodes that have yet to confirm an order."""

    def __call__(self) -> None:
        after_s = (time.monotonic() - self._began) * self.cluster.factors.moving
        if after_s >= self._next_s:
            self.made = True
            self._set(self.cluster.join.rates(self._next_s))
            self._next_s = self.cluster.join.changes_after_s(self._next_s)

    def _set(self, rates: Mapping[Pair, float]) -> None:
        workers = self.cluster.net.workers
        for (a, b), rate in rates.items():
            for me, peer in ((a, b), (b, a)):
                if me in workers:
                    workers[me].pipe.send(("rate", peer, rate / self.cluster.factors.slower))
                    self._open.append(me)

    def undo(self) -> None:
        """Sets all links back to the rates that they had when the newcomer came."""
        if self.made:
            self._set(self.cluster.join.rates())
        for name in self._open:
            self.cluster.net.workers[name].receive()


@contextlib.contextmanager
def cluster(join: Join, factors: Factors, folder: Path, disk_bps: float) -> Iterator[Cluster]:
    """Yields the emulated cluster of this join; its processes end with the block.

    Args:
        join: Join with the cluster's nodes and links.
        factors: Factors by which sizes and rates are reduced.
        folder: Folder for checkpoints, on a disk.
        disk_bps: Rate of that disk in the paper's cluster, bits per second.
    """
    links = {pair: rate / factors.slower for pair, rate in join.rates().items()}
    with Network(links, join.newcomer, disk_bps=disk_bps / factors.slower, folder=folder) as net:
        made = Cluster(join, factors, net, folder)
        with contextlib.closing(made.joiner):
            yield made
