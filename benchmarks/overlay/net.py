"""The network of the overlay benchmark: six nodes on eight uneven links, for root also as network namespaces.

Each node is a namespace, each link a veth pair with an htb class and a bfifo of 256 KiB at both ends. A node has one
address of its own (10.77.0.R on an interface node0 that leads nowhere), which gloo announces; how a packet to another
one travels is set by static routes, so that gloo, which wants a connection between each pair, can be given the best
or the fewest-hops routes. Goodput is 0.956 of the rate that is set (headers).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path

from chaos_lightning.testing.edge.namespaces import run

NAMES = ("a", "b", "c", "d", "e", "f")

MBPS: dict[tuple[str, str], float] = {
    ("a", "b"): 500,
    ("b", "c"): 200,
    ("c", "d"): 400,
    ("d", "e"): 300,
    ("e", "f"): 500,
    ("a", "f"): 200,
    ("a", "d"): 150,
    ("b", "e"): 100,
}
"""Both ways."""

Routes = dict[tuple[str, str], str]
"""(from, to) -> the neighbour to go by."""


def rates(scale: float = 1.0) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Returns the rates of all links in the planners' form: (latency in seconds, bps there, bps back)."""
    return {pair: (1e-4, mbps * 1e6 * scale, mbps * 1e6 * scale) for pair, mbps in MBPS.items()}


def routes(mbps: Mapping[tuple[str, str], float], *, widest: bool) -> Routes:
    """Returns routes between all pairs of nodes: the ones with the most bandwidth (of these the shortest), or with the
    fewest hops.
    """
    width = {p: mbps.get(p) or mbps.get((p[1], p[0]), 0.0) for p in permutations(NAMES, 2)}
    found: Routes = {}
    for target in NAMES:
        best: dict[str, tuple[float, int]] = {target: (float("inf"), 0)}
        for _ in NAMES:  # Bellman-Ford towards the target
            for here in NAMES:
                for there in NAMES:
                    if here in (there, target) or there not in best or not width[here, there]:
                        continue
                    narrow, hops = best[there]
                    offer = (min(narrow, width[here, there]), hops + 1)
                    old = best.get(here)
                    wider = old is None or (-offer[0], offer[1]) < (-old[0], old[1])
                    shorter = old is None or (offer[1], -offer[0]) < (old[1], -old[0])
                    if wider if widest else shorter:
                        best[here] = offer
                        found[here, target] = there
    return found


def link_address(pair: tuple[str, str], end: str) -> str:
    """Returns the address of one end of a link."""
    return f"10.78.{list(MBPS).index(pair) + 1}.{1 if end == pair[0] else 2}"


def namespace(name: str) -> str:
    return f"chaosbench{os.getpid()}{name}"


def _remove_leftovers() -> None:
    """Removes the network namespaces that killed runs have left."""
    for path in Path("/run/netns").glob("chaosbench*"):
        pid = re.fullmatch(r"chaosbench(\d+)[a-z]", path.name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            run("ip", "netns", "del", path.name)


@contextlib.contextmanager
def namespaces(scale: float = 1.0) -> Iterator[None]:
    """Makes the network of namespaces for the block, and removes it afterwards.

    Raises:
        NetworkError: No root, or a kernel without what this needs.
    """
    try:
        _remove_leftovers()
        for rank, name in enumerate(NAMES):
            space = namespace(name)
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "add", "node0", "type", "veth", "peer", "name", "spare0")
            run("ip", "-n", space, "addr", "add", f"10.77.0.{rank + 1}/32", "dev", "node0")
            for device in ("node0", "spare0"):  # not every kernel has dummy interfaces
                run("ip", "-n", space, "link", "set", device, "up")
            run("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for k, (pair, mbps) in enumerate(MBPS.items()):
            for end, other in (pair, pair[::-1]):
                if end == pair[0]:
                    run(
                        "ip", "link", "add", f"to{other}", "netns", namespace(end), "type", "veth",
                        "peer", "name", f"to{end}", "netns", namespace(other),
                    )  # fmt: skip
            for end, other in (pair, pair[::-1]):
                space, device = namespace(end), f"to{other}"
                run("ip", "-n", space, "addr", "add", f"{link_address(pair, end)}/30", "dev", device)
                run("ip", "-n", space, "link", "set", device, "up")
                run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
                _shape(space, device, mbps * scale, "add")
                run("tc", "-n", space, "qdisc", "add", "dev", device, "parent", "1:1", "bfifo", "limit", "262144")
            assert k < 250
        yield
    finally:
        for name in NAMES:
            run("ip", "netns", "del", namespace(name), check=False)


def _shape(space: str, device: str, mbps: float, verb: str) -> None:
    run(
        "tc", "-n", space, "class", verb, "dev", device, "parent", "1:", "classid", "1:1",
        "htb", "rate", f"{int(mbps * 1e6)}", "burst", "128kb", "cburst", "128kb",
    )  # fmt: skip


def set_routes(chosen: Routes) -> None:
    """Sets the nodes' routing tables, so that packets between them take the chosen routes."""
    for (here, target), there in chosen.items():
        pair = (here, there) if (here, there) in MBPS else (there, here)
        run(
            "ip", "-n", namespace(here), "route", "replace", f"10.77.0.{NAMES.index(target) + 1}/32",
            "via", link_address(pair, there), "dev", f"to{there}", "src", f"10.77.0.{NAMES.index(here) + 1}",
        )  # fmt: skip
