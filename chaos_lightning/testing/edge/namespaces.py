"""Emulates links in the Linux kernel: a network namespace per node, a veth pair per link, rates by htb. Needs root.

Theory of operation. A node's namespace has its address (10.77.x.y) on `lo`, and a host route to each neighbour's
through the veth of their link; other nodes' addresses have no route, so data between them cannot start. Each end of a
veth sends through one htb class with a byte queue of at least 256 KiB below it (shorter ones starve segmentation
offload). Rates count payload, as with the relay: the class gets what headers take on top. A node whose links share an
access stands behind a router namespace, with one shaped veth between the two. Every node has a second interface to a
bridge in the lab's hub namespace: there the scheduler is reached, at the first node's address.

A *cut* link drops everything, its ends' routes say "unreachable", and open connections are killed where the kernel can
do that; a *stalled* one only drops. Latency needs the netem queue; where the kernel has none, it is not emulated and
the notes say so.

Nothing is made in the machine's own namespace. Names tell the lab's process (pid and start time), so what a killed lab
left is recognised, and removed with its processes, by the next one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.errors import ChaosError
from chaos_lightning.machine.process_table import start_time, still_runs
from chaos_lightning.testing.edge.topology import Condition, LinkState, Pair, Topology

PREFIX = "chaoslab"
PORT = 29400
OVERHEAD = 1514 / 1448
"""Bytes sent for each byte of a TCP payload, with frames of 1500 bytes."""
QUEUE_NBYTES = 256 << 10
_QUEUE_S = 0.01
"""Seconds of its rate that a queue holds, if that is more than `QUEUE_NBYTES`."""
_TIMEOUT_S = 20.0
_serials = itertools.count(1)
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-[\w.]+")


class NetworkError(ChaosError):
    """A command of `ip` or `tc` failed."""


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether this machine can run network namespaces (else the reason), and whether they can delay packets."""

    works: bool
    reason: str = ""
    delay: bool = False


def run(*command: str, check: bool = True) -> str:
    """Runs a program of iproute2 (`ip`, `tc` or `ss`); returns its output.

    Raises:
        NetworkError: The program failed; shows the command and its error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if check and done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def own_name(part: str) -> str:
    """Returns the full name for a namespace of this process."""
    return f"{PREFIX}-{os.getpid()}-{start_time(os.getpid())}-{part}"


@functools.cache
def ability() -> Ability:
    """Returns whether this machine can run network namespaces; tries it once per process, in a namespace made for
    that.
    """
    if os.geteuid():
        return Ability(False, "it needs root")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return Ability(False, f"{' and '.join(missing)} not found (install iproute2)")
    name = own_name("probe")
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
            _shaper(name, "one", 9e6)
            with contextlib.suppress(NetworkError):
                _queue(name, "one", "30:", "netem", "delay", "1ms")
                return Ability(True, delay=True)
            return Ability(True)
        finally:
            run("ip", "netns", "del", name)
    except NetworkError as error:
        return Ability(False, str(error))


def remove_leftovers() -> list[str]:
    """Removes the namespaces of ended labs, and the processes in them; returns the names of the namespaces."""
    removed = []
    for line in run("ip", "netns", "list", check=False).splitlines():
        name = line.split()[0] if line.split() else ""
        found = _NAME.fullmatch(name)
        if found and not still_runs(int(found[1]), int(found[2])):
            _remove(name)
            removed.append(name)
    return removed


def _remove(name: str) -> None:
    """Removes a namespace, and kills the processes in it."""
    for word in run("ip", "netns", "pids", name, check=False).split():
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(word))
            try:
                inside = os.stat(f"/proc/{word}/ns/net").st_ino == os.stat(f"/run/netns/{name}").st_ino
                if inside:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
    run("ip", "netns", "del", name, check=False)


class NamespaceBackend:
    """Backend that runs each node in a network namespace of its own.

    Raises:
        NetworkError: The kernel or iproute2 refused something; what was made until then is removed.
    """

    name = "namespaces"

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._index = {name: i for i, name in enumerate(topology.names, 1)}
        self._delay = ability().delay
        self._serial = next(_serials)
        self._made: list[str] = []
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-"))
        self._token = self._folder / "token"
        self.endpoint = f"{self._control(topology.names[0])}:{PORT}"
        self.notes: tuple[str, ...] = ("nodes reach nothing but each other",)
        if topology.delays and not self._delay:
            self.notes += ("latencies are not emulated: this kernel has no netem (the relay can)",)
        try:
            remove_leftovers()
            fd = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(32))
            self._make()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ names and addresses

    def _space(self, node: str) -> str:
        return own_name(f"{self._serial}.{self._index[node]}")

    def _router(self, node: str) -> str:
        return own_name(f"{self._serial}.{self._index[node]}r")

    def _edge(self, node: str) -> str:
        """Returns the namespace in which a node's links end: its router's, or else its own."""
        return self._router(node) if node in self._topology.access_bps else self._space(node)

    def address(self, node: str) -> str:
        """Returns the address at which a node accepts connections over its links."""
        return f"10.77.0.{self._index[node]}"

    def _control(self, node: str) -> str:
        return f"10.78.0.{self._index[node]}"

    def _gateway(self, node: str) -> list[str]:
        """Returns the arguments of `ip route` that name a node's router as gateway; empty if it has none."""
        return ["via", f"10.79.0.{self._index[node]}"] if node in self._topology.access_bps else []

    # ------------------------------------------------------------------ making

    def _make(self) -> None:
        hub = own_name(f"{self._serial}.hub")
        self._add(hub)
        run("ip", "-n", hub, "link", "add", "name", "bridge0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "dev", "bridge0", "up")
        for node, i in self._index.items():
            space = self._space(node)
            self._add(space)
            run("ip", "-n", space, "address", "add", f"{self.address(node)}/32", "dev", "lo")
            self._pair(space, "ctl", hub, f"c{i}")
            run("ip", "-n", hub, "link", "set", "dev", f"c{i}", "master", "bridge0")
            run("ip", "-n", space, "address", "add", f"{self._control(node)}/24", "dev", "ctl")
            if node in self._topology.access_bps:
                self._make_router(node)
        for link in self._topology.links:
            one, other = link.a, link.b
            self._pair(self._edge(one), self._end(other), self._edge(other), self._end(one))
            for here, there in ((one, other), (other, one)):
                _shaper(self._edge(here), self._end(there), link.rate_bps)
                device = ["dev", self._end(there), *self._onlink(there)]
                source = ["src", self.address(here)] if self._edge(here) == self._space(here) else []
                run("ip", "-n", self._edge(here), "route", "add", self.address(there), *device, *source)
                self._route(here, there)

    def _make_router(self, node: str) -> None:
        """Makes the router through which a node reaches its links at the rate of its shared access."""
        space, router, rate_bps = self._space(node), self._router(node), self._topology.access_bps[node]
        self._add(router)
        run("ip", "-n", router, "address", "add", f"10.79.0.{self._index[node]}/32", "dev", "lo")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run("ip", "netns", "exec", router, "sh", "-c", forward)
        self._pair(space, "access", router, "node")
        run("ip", "-n", router, "route", "add", self.address(node), "dev", "node")
        _shaper(space, "access", rate_bps)
        _shaper(router, "node", rate_bps)

    def _add(self, space: str) -> None:
        run("ip", "netns", "add", space)
        self._made.append(space)
        run("ip", "-n", space, "link", "set", "dev", "lo", "up")

    @staticmethod
    def _pair(space: str, device: str, other_space: str, other: str) -> None:
        peer = ("peer", "name", other, "netns", other_space)
        run("ip", "-n", space, "link", "add", "name", device, "type", "veth", *peer)
        run("ip", "-n", space, "link", "set", "dev", device, "up")
        run("ip", "-n", other_space, "link", "set", "dev", other, "up")

    def _end(self, node: str) -> str:
        """Returns the name of the network device that leads to a node."""
        return f"to{self._index[node]}"

    def _onlink(self, node: str) -> list[str]:
        via = self._gateway(node)
        return [*via, "onlink"] if via else []

    def _route(self, here: str, there: str) -> None:
        """Sets the route from a node to a neighbour: through the node's router if it has one, else directly over the
        link.
        """
        if self._edge(here) == self._space(here):
            way = ["dev", self._end(there), *self._onlink(there)]
        else:
            way = ["dev", "access", "via", f"10.79.0.{self._index[here]}", "onlink"]
        run("ip", "-n", self._space(here), "route", "replace", self.address(there), *way, "src", self.address(here))

    # ------------------------------------------------------------------ shaping

    def apply(self, pair: Pair, state: LinkState) -> None:
        for here, there in (pair, pair[::-1]):
            space, device = self._edge(here), self._end(there)
            _rate(space, device, state.rate_bps)
            if not state.usable:
                _queue(space, device, "40:", "pfifo", "limit", "0")
            elif self._delay and state.latency_s:
                packets = int(state.rate_bps / 8 * (state.latency_s + _QUEUE_S) / 1000) + 1000
                delay = f"{state.latency_s * 1e6:.0f}us"
                _queue(space, device, "30:", "netem", "delay", delay, "limit", str(packets))
            else:
                _queue(space, device, "20:", "bfifo", "limit", str(_limit(state.rate_bps)))
            if state.condition is Condition.CUT:
                to = self.address(there)
                run("ip", "-n", self._space(here), "route", "replace", "unreachable", to)
                run("ip", "netns", "exec", self._space(here), "ss", "-K", "dst", to, check=False)
            else:
                run("ip", "-n", self._space(here), "route", "del", "unreachable", self.address(there), check=False)
                self._route(here, there)

    # ------------------------------------------------------------------ for the lab

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._space(node), *command]

    def environment(self, node: str) -> dict[str, str]:
        return {"CHAOS_BIND": self.address(node), "CHAOS_TOKEN_FILE": str(self._token)}

    def close(self) -> None:
        while self._made:
            _remove(self._made.pop())
        shutil.rmtree(self._folder, ignore_errors=True)


def _shaper(space: str, device: str, rate_bps: float) -> None:
    run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "10")
    _rate(space, device, rate_bps)
    _queue(space, device, "20:", "bfifo", "limit", str(_limit(rate_bps)))


def _rate(space: str, device: str, rate_bps: float) -> None:
    rate = f"{max(8.0, rate_bps * OVERHEAD):.0f}bit"
    run(
        *("tc", "-n", space, "class", "replace", "dev", device, "parent", "1:", "classid", "1:10"),
        *("htb", "rate", rate, "ceil", rate, "quantum", "60000"),
    )


def _queue(space: str, device: str, handle: str, *what: str) -> None:
    run("tc", "-n", space, "qdisc", "replace", "dev", device, "parent", "1:10", "handle", handle, *what)


def _limit(rate_bps: float) -> int:
    return max(QUEUE_NBYTES, int(rate_bps / 8 * _QUEUE_S))
