"""All-reduce over an uneven overlay: six nodes, eight links of 100 to 500 Mbps, and what the planner makes of them.

Six processes with the product's reducer, loop, links and handshake all-reduce one buffer; the plans are those that
`planning/overlay.py` draws from the links' rates. Each time is from a common instant, at which all gradients are
ready, to the moment when the last node holds the whole sum, which each node checks. It is compared with what the links
allow: the buffer over the narrowest link of the widest spanning tree for plans of one tree, the Tutte/Nash-Williams
bound for plans of several (`planning/packing.py`); neither counts latencies, headers or processors.

The links are emulated in two ways. *Paced*: loopback sockets with SO_MAX_PACING_RATE at both ends, exact to a few
percent. *Namespaces* (needs root): a network namespace per node, a veth pair per link, rates by htb; of what is set,
0.956 is goodput, which the figures are not corrected for. Only there gloo can run as it is: it wants a connection
between each pair, which the kernel forwards over routes of fewest hops, or over the best ones (widest narrowest link).
Ours runs there, too, on the same network in the same minutes.

Then a link drops to a tenth in the middle of training; see benchmarks/overlay_replan.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import overlay_net, overlay_node, overlay_replan
from benchmarks.common import MIB, Result, median, parser, run
from benchmarks.overlay_net import MBPS, NAMES
from benchmarks.workers import Worker, context, scratch
from chaos_lightning.planning import overlay
from chaos_lightning.planning.trees import fewest_hops
from chaos_lightning.protocol.types import NO_VIEW, Member, PlanSpec, View, ViewId

BOUND_ONE = 1.10
BOUND_SEVERAL = 1.15
MEMBERS = tuple(Member(name, name, f"host-{name}", "127.0.0.1", 1) for name in NAMES)
REPLAN_STATE_MIB = 24
_HEAD_START_S = 0.05


class Case(NamedTuple):
    name: str
    plan: PlanSpec
    bound_s: float
    limit: float | None


def cases(nbytes: int, scale: float = 1.0) -> list[Case]:
    """What is run, with the bound that each is held against."""
    rates = overlay_net.rates(scale)
    bound = overlay.bound(MEMBERS, rates, nbytes)
    found = []
    for policy, limit in (("widest", BOUND_ONE), ("packed", BOUND_SEVERAL), ("auto", None), ("fapt", None)):
        planned = overlay.plan(MEMBERS, rates, policy=policy, nbytes=nbytes)
        trees = len(planned.spec.trees)
        print(f"  {policy}: {planned.reason}; predicted {planned.seconds:.4g} s", flush=True)
        bound_s = bound.one_tree_s if trees == 1 else bound.several_trees_s
        found.append(Case(f"{policy} ({trees} tree{'s' if trees > 1 else ''})", planned.spec, bound_s, limit))
    found.append(Case("tree of fewest hops", fewest_hops(NAMES, list(MBPS)), bound.one_tree_s, None))
    return found


@contextlib.contextmanager
def nodes(nbytes: int, *, spaces: bool, scale: float = 1.0) -> Iterator[list[Worker]]:
    """Six connected nodes; paced on loopback, or one in each namespace."""
    ctx = context(
        "benchmarks.overlay_node", "chaos_lightning.collectives.gradients", "chaos_lightning.collectives.reducer"
    )
    address = "0.0.0.0" if spaces else "127.0.0.1"
    workers = [
        Worker(
            ctx,
            overlay_node.ours,
            name,
            rank,
            len(NAMES),
            nbytes,
            overlay_net.namespace(name) if spaces else "",
            address,
        )
        for rank, name in enumerate(NAMES)
    ]
    try:
        ports = dict(zip(NAMES, [w.receive() for w in workers], strict=True))
        for name, worker in zip(NAMES, workers, strict=True):
            mine = [pair for pair in MBPS if name in pair]
            dial = {
                b: (overlay_net.link_address((a, b), b) if spaces else "127.0.0.1", ports[b])
                for a, b in mine
                if a == name
            }
            worker.pipe.send(("connect", dial, [a for a, b in mine if b == name]))
        for worker in workers:
            worker.receive()
        if not spaces:
            for name, worker in zip(NAMES, workers, strict=True):
                rates = {(b if a == name else a): mbps * 1e6 * scale for (a, b), mbps in MBPS.items() if name in (a, b)}
                worker.pipe.send(("pace", rates))
                worker.receive()
        yield workers
        for worker in workers:
            worker.pipe.send(("end",))
            worker.process.join(5)
    finally:
        for worker in workers:
            worker.kill()


def all_reduce(workers: list[Worker], *words: Any) -> tuple[float, float]:
    """Seconds from the common start until the last node has the sum, and CPU seconds of all nodes."""
    begin_at = time.monotonic() + _HEAD_START_S
    for worker in workers:
        worker.pipe.send(("reduce", *words, begin_at))
    answers = [worker.receive(180) for worker in workers]
    if not all(right for _, _, right in answers):
        raise RuntimeError("a node holds a wrong sum")
    return max(done_at for done_at, _, _ in answers) - begin_at, sum(cpu for _, cpu, _ in answers)


def measure_ours(
    result: Result, found: list[Case], nbytes: int, rounds: int, *, spaces: bool, scale: float = 1.0
) -> None:
    """All plans in turn, round by round, in the same processes."""
    where = "namespaces" if spaces else "paced"
    times: dict[str, list[float]] = {case.name: [] for case in found}
    cpu: dict[str, list[float]] = {case.name: [] for case in found}
    with nodes(nbytes, spaces=spaces, scale=scale) as workers:
        seq = 0
        for turn in range(rounds + 1):
            for number, case in enumerate(found):
                seq += 1
                view = View(ViewId(1, turn * len(found) + number + 1), NO_VIEW, MEMBERS, plan=case.plan)
                seconds, spent = all_reduce(workers, view, seq)
                if turn:  # the first round opens the windows of TCP
                    times[case.name].append(seconds)
                    cpu[case.name].append(spent)
    for case in found:
        name = f"{case.name}, {where}"
        result.add(f"all-reduce, {name}", median(times[case.name]), "s")
        ratios = [t / case.bound_s for t in times[case.name]]
        limit = case.limit if not spaces else None
        result.add(f"over the bound of {case.bound_s:.4g} s, {name}", median(ratios), "ratio", limit)
        result.add(f"CPU of all nodes, {name}", median(cpu[case.name]), "s")
        result.details[f"ratios, {name}"] = ratios


def measure_gloo(result: Result, nbytes: int, rounds: int, folder: Path, scale: float = 1.0) -> None:
    """gloo in the namespaces, over both kinds of routes in turn."""
    ctx = context("benchmarks.overlay_node")
    kinds = {"best": True, "fewest-hops": False}
    routes = {kind: overlay_net.routes(MBPS, widest=widest) for kind, widest in kinds.items()}
    overlay_net.set_routes(routes["best"])
    store = str(folder / "gloo-store")
    workers = [
        Worker(ctx, overlay_node.gloo, rank, len(NAMES), nbytes, overlay_net.namespace(name), store)
        for rank, name in enumerate(NAMES)
    ]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    try:
        for worker in workers:
            worker.receive()
        for turn in range(rounds + 1):
            for kind in kinds:
                overlay_net.set_routes(routes[kind])
                seconds, _ = all_reduce(workers)
                if turn:
                    times[kind].append(seconds)
        for worker in workers:
            worker.pipe.send(("end",))
            worker.process.join(5)
    finally:
        for worker in workers:
            worker.kill()
    bound_s = overlay.bound(MEMBERS, overlay_net.rates(scale), nbytes).several_trees_s
    for kind, values in times.items():
        result.add(f"gloo over {kind} routes, namespaces", median(values), "s")
        result.add(f"gloo over the bound of {bound_s:.4g} s, {kind} routes", median(values) / bound_s, "ratio")
        result.details[f"gloo, {kind} routes, s"] = values


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--mib", type=float, default=32, help="size of the buffer, MiB")
    p.add_argument("--rounds", type=int, default=0, help="all-reduces per case; 0: 9, or 3 with --quick")
    p.add_argument("--scale", type=float, default=1.0, help="of all rates; below 1 on a machine too busy for these")
    p.add_argument("--only", nargs="*", default=["paced", "namespaces", "replan"], help="which parts to run")
    args = p.parse_args()
    rounds = args.rounds or (3 if args.quick else 9)
    nbytes = int(args.mib * MIB) // 64 * 64
    result = Result("overlay")
    found = cases(nbytes, args.scale) if {"paced", "namespaces"} & set(args.only) else []
    if "paced" in args.only:
        measure_ours(result, found, nbytes, rounds, spaces=False, scale=args.scale)
    if "namespaces" in args.only:
        try:
            with overlay_net.namespaces(args.scale), scratch() as folder:
                measure_ours(result, found[:2], nbytes, rounds, spaces=True, scale=args.scale)
                measure_gloo(result, nbytes, max(2, rounds // 3), folder, args.scale)
        except OSError as error:
            result.notes.append(f"no namespaces here, so no gloo: {error}")
            print(f"  {result.notes[-1]}", flush=True)
    if "replan" in args.only:
        overlay_replan.measure(result, REPLAN_STATE_MIB, args.scale)
    result.details["links, Mbps"] = {f"{a}-{b}": mbps * args.scale for (a, b), mbps in MBPS.items()}
    return result.finish(args)


if __name__ == "__main__":
    run(main)
