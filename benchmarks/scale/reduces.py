"""Compares all-reduces over the default graph with those over a link between every pair, as predicted and in processes.

The graph is the one that the scheduler's own machine gives so many newcomers (standins.py). All members have network
cards alike, and links that carry as much as these. What is predicted is what the planner draws for either graph
(planning/overlay.py), and beside it the trees that a view carries until that plan is there. What is measured are the
same plans in turn, in the same processes with the product's data plane (benchmarks/overlay): on this machine's
loopback, where processors limit, and, as root, in a network namespace per member, whose card is shaped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from benchmarks.common import MIB, Options, Result, median
from benchmarks.overlay.reduce import all_reduce, ours
from benchmarks.scale.machine import GRAPHS, Case
from benchmarks.workers import Worker, context, several
from chaos_lightning.planning import overlay
from chaos_lightning.planning.network import Network
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import chunk_of
from chaos_lightning.protocol.types import NO_VIEW, Member, PlanSpec, View, ViewId
from chaos_lightning.testing.edge.namespaces import NetworkError, ability
from chaos_lightning.testing.edge.namespaces import run as ip

PREDICTED_AT = (24, 64, 128)
BOUND = 1.15
LATENCY_S = 0.0002
DENSER = (12, 16, 24)
"""Values of `link_degree` that are tried where the default one does not do."""
PLANS = ("sparse", "full")
CHUNKS = (64 << 10, 128 << 10, 512 << 10)
"""Sizes of chunks that are tried on loopback."""
LOOPBACK = "loopback"
CARD_BPS = 1e9
Links = dict[tuple[str, str], tuple[float, float, float]]


def links_of(view: View, bps: float, *, full: bool, uneven: bool = False) -> Links:
    """Returns the links of a view as the planner takes them; with `full`, one link between every pair of members.

    Args:
        view: A view.
        bps: Rate of a card, and of each link both ways.
        full: Take all pairs.
        uneven: Each pair has a rate of its own instead, from a tenth of the card's on.
    """
    ids = view.ids()
    pairs = combinations(ids, 2) if full or not view.links else ((link.a, link.b) for link in view.links)
    if not uneven:
        return dict.fromkeys(pairs, (LATENCY_S, bps, bps))
    rates = {pair: random.Random(" ".join(pair)).uniform(0.1 * bps, bps) for pair in pairs}
    return {pair: (LATENCY_S, rate, rate) for pair, rate in rates.items()}


def plans(view: View, bps: float, nbytes: int, *, uneven: bool = False) -> dict[str, overlay.Planned]:
    """Returns the scheduler's plans for the default and the full graph, with their predicted seconds for network cards
    of `bps`.
    """
    found = {}
    for name in PLANS:
        links = links_of(view, bps, full=name == "full", uneven=uneven)
        planned = overlay.plan(view.members, links, nbytes=nbytes)
        found[name] = planned._replace(seconds=seconds_of(view, planned.spec, links, bps, nbytes))
    return found


def seconds_of(view: View, plan: PlanSpec, links: Links, bps: float, nbytes: int) -> float:
    """Returns the predicted seconds of an all-reduce in which each member has a network card of `bps`."""
    return Network(view.members, links, dict.fromkeys(view.ids(), (bps, bps))).seconds(plan, nbytes)


def founded(size: int, seed: int, degree: int = GRAPHS["default"]) -> View:
    """Returns the first view of a job that `size` members start."""
    case = Case(size, degree, seed)
    case.found()
    return case.stage.view


def predict(result: Result, size: int, nbytes: int, seed: int) -> None:
    """Adds the predicted times of all-reduces of `size` members, over equal and over uneven links."""
    view = founded(size, seed)
    for uneven in (False, True):
        where = f"{size} members{', uneven links' if uneven else ''}"
        found = plans(view, CARD_BPS, nbytes, uneven=uneven)
        for name, planned in found.items():
            print(f"    {name}: {planned.reason}", flush=True)
            result.add(f"all-reduce, predicted, {name} graph, {where}", planned.seconds, "s")
        full_s = found["full"].seconds
        ratio = result.add(
            f"all-reduce, predicted, sparse over full, {where}", found["sparse"].seconds / full_s, "ratio", BOUND
        )
        if ratio.ok is False and not uneven:
            remark_denser(result, size, nbytes, seed, full_s)
        links = links_of(view, CARD_BPS, full=False, uneven=uneven)
        first_s = seconds_of(view, quick(view.members, links)[0], links, CARD_BPS, nbytes)
        result.add(f"all-reduce, predicted, a view's first trees over full, {where}", first_s / full_s, "ratio")


def remark_denser(result: Result, size: int, nbytes: int, seed: int, full_s: float) -> None:
    """Prints the least `link_degree` with which the predicted time would be within the bound."""
    for degree in DENSER:
        view = founded(size, seed, degree)
        seconds = plans(view, CARD_BPS, nbytes)["sparse"].seconds
        if seconds <= BOUND * full_s:
            result.remark(f"{size} members: link_degree={degree} would be {seconds / full_s:.3f}")
            return
    result.remark(f"{size} members: no link_degree up to {DENSER[-1]} would be within {BOUND:g}")


# ------------------------------------------------------------------------------------------------ measured


def space(index: int) -> str:
    """Returns the network namespace of a member; index -1 means the hub."""
    return f"chaosbench{os.getpid()}m{index}"


def address(index: int) -> str:
    return f"10.79.0.{index + 1}"


def _shape(name: str, device: str, bps: float) -> None:
    """Limits the rate at which traffic leaves through a network device."""
    ip("tc", "-n", name, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
    rate = ["rate", f"{int(bps)}", "burst", "64kb", "cburst", "64kb"]
    ip("tc", "-n", name, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb", *rate)
    ip("tc", "-n", name, "qdisc", "add", "dev", device, "parent", "1:1", "bfifo", "limit", "262144")


@contextlib.contextmanager
def cards(count: int, bps: float) -> Iterator[None]:
    """Creates a network namespace for each member while the block runs, each with one card on a common bridge.

    Raises:
        NetworkError: No root, or a kernel without what this needs.
    """
    if not ability().works:
        raise NetworkError(ability().reason)
    hub = space(-1)
    try:
        ip("ip", "netns", "add", hub)
        ip("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        ip("ip", "-n", hub, "link", "set", "hub", "up")
        for index in range(count):
            name, port = space(index), f"to{index}"
            ip("ip", "netns", "add", name)
            ip("ip", "-n", name, "link", "set", "lo", "up")
            ip("ip", "link", "add", "card", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            ip("ip", "-n", hub, "link", "set", port, "master", "hub", "up")
            ip("ip", "-n", name, "addr", "add", f"{address(index)}/24", "dev", "card")
            ip("ip", "-n", name, "link", "set", "card", "up")
            _shape(name, "card", bps)
            _shape(hub, port, bps)
        yield
    finally:
        for index in range(-1, count):
            ip("ip", "netns", "del", space(index), check=False)


@contextlib.contextmanager
def nodes(members: Sequence[Member], nbytes: int, *, spaces: bool) -> Iterator[list[Worker]]:
    """Yields a process for each member, with links between all of them."""
    ctx = context("benchmarks.overlay.reduce", "chaos_lightning.collectives.reducer")
    ids, size = [m.id for m in members], len(members)
    where = [address(rank) if spaces else "127.0.0.1" for rank in range(size)]
    arguments = [(m, rank, size, nbytes, space(rank) if spaces else "", where[rank]) for rank, m in enumerate(ids)]
    with several(ctx, ours, arguments) as workers:
        ports = [worker.receive() for worker in workers]
        for rank, worker in enumerate(workers):
            dial = {ids[i]: (where[i], ports[i]) for i in range(rank)}
            worker.pipe.send(("connect", dial, ids[rank + 1 :]))
        for worker in workers:
            worker.receive()
        yield workers
        for worker in workers:
            worker.pipe.send(("end",))


def measure_in(result: Result, view: View, found: dict[str, PlanSpec], args: argparse.Namespace, where: str) -> None:
    """Adds the times of all-reduces by these plans, in turn; if "sparse" misses the bound, lists the plans' ratios."""
    size, nbytes = len(view.members), int(args.mib * MIB) // 64 * 64
    times: dict[str, list[float]] = {name: [] for name in found}
    cpu: dict[str, list[float]] = {name: [] for name in found}
    with nodes(view.members, nbytes, spaces=where != LOOPBACK) as workers:
        seq = 0
        for turn in range(args.reduces + 1):
            for name, plan in found.items():
                seq += 1
                seconds, spent = all_reduce(workers, View(ViewId(1, seq), NO_VIEW, view.members, plan=plan), seq)
                if turn:  # the first round opens the windows of TCP
                    times[name].append(seconds)
                    cpu[name].append(spent)
    for name, values in times.items():
        result.add(f"all-reduce, {where}, {name} graph, {size} members", median(values), "s")
        result.add(f"all-reduce, {where}, {name} graph, {size} members, CPU of all", median(cpu[name]), "s")
    over = {name: median([a / b for a, b in zip(values, times["full"], strict=True)]) for name, values in times.items()}
    result.ratio(f"all-reduce, {where}, sparse over full, {size} members", times["sparse"], times["full"], BOUND)
    if over["sparse"] > BOUND:
        rest = ", ".join(f"{name} {ratio:.2f}" for name, ratio in over.items() if name not in PLANS)
        result.remark(f"{where}: sparse over full is more than {BOUND:g}; others over full: {rest or 'none'}")


def others(view: View, sparse: PlanSpec, bps: float, args: argparse.Namespace) -> dict[str, PlanSpec]:
    """Returns plans that may be faster where processors limit: the same trees with larger chunks, and a denser
    graph.
    """
    nbytes, ids = int(args.mib * MIB), view.ids()
    found = {
        f"sparse in chunks of {chunk >> 10} KiB": replace(sparse, chunk_nbytes=chunk)
        for chunk in CHUNKS
        if chunk != chunk_of(sparse, nbytes)
    }
    denser = founded(len(ids), args.seed, DENSER[1])
    links = links_of(denser, bps, full=False)
    found[f"link_degree={DENSER[1]}"] = overlay.plan(view.members, links, nbytes=nbytes).spec
    return found


def measure(result: Result, args: argparse.Namespace) -> None:
    """Adds the predicted and the measured times of all-reduces."""
    for size in PREDICTED_AT[:1] if args.quick else PREDICTED_AT:
        predict(result, size, overlay.TYPICAL_NBYTES, args.seed)
    view = founded(args.members, args.seed)
    bps = args.card_mbps * 1e6
    found = {name: planned.spec for name, planned in plans(view, bps, int(args.mib * MIB)).items()}
    try:
        measure_in(result, view, found | others(view, found["sparse"], bps, args), args, LOOPBACK)
    except (RuntimeError, TimeoutError) as error:  # a process that stood still lost its links
        result.leave_out("all-reduces on loopback", str(error))
    try:
        with cards(args.members, bps):
            measure_in(result, view, found, args, f"cards of {args.card_mbps:g} Mbps")
    except (NetworkError, RuntimeError, TimeoutError) as error:
        result.leave_out("all-reduces in namespaces", str(error))


def options(p: Options) -> None:
    """Adds the command-line options of this part of the benchmark."""
    p.add_argument("--mib", type=float, default=16, help="size of the buffer in measured all-reduces, MiB")
    p.add_argument("--card-mbps", type=float, default=100, help="of each member's emulated network card")
    p.add_count("--reduces", 7, 2, "all-reduces by each plan")
