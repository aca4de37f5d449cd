"""Measures all-reduces over six nodes with eight links of 100 to 500 Mbps, and how fast the planner's trees are.

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

Then a link drops to a tenth in the middle of training; see benchmarks/overlay/replan.py.
"""

from __future__ import annotations

from benchmarks.common import MIB, Options, Result, run
from benchmarks.overlay import net, replan
from benchmarks.overlay.net import MBPS
from benchmarks.overlay.reduce import cases, measure_gloo, measure_ours
from benchmarks.workers import scratch
from chaos_lightning.testing.edge.namespaces import NetworkError

REPLAN_STATE_MIB = 24


def main() -> int:
    p = Options(__doc__)
    p.add_argument("--mib", type=float, default=32, help="size of the buffer, MiB")
    p.add_count("--rounds", 9, 3, "all-reduces per case")
    p.add_argument("--scale", type=float, default=1.0, help="of all rates; below 1 on a machine too busy for these")
    p.add_argument("--only", nargs="*", default=["paced", "namespaces", "replan"], help="which parts to run")
    args = p.parse_args()
    nbytes = int(args.mib * MIB) // 64 * 64
    result = Result("overlay")
    found = cases(nbytes, args.scale) if {"paced", "namespaces"} & set(args.only) else []
    if "paced" in args.only:
        measure_ours(result, found, nbytes, args.rounds, spaces=False, scale=args.scale)
    if "namespaces" in args.only:
        try:
            with net.namespaces(args.scale), scratch() as folder:
                measure_ours(result, found[:2], nbytes, args.rounds, spaces=True, scale=args.scale)
                measure_gloo(result, nbytes, max(2, args.rounds // 3), folder, args.scale)
        except NetworkError as error:
            result.remark(f"no namespaces here, so no gloo: {error}")
    if "replan" in args.only:
        replan.measure(result, REPLAN_STATE_MIB, args.scale)
    result.details["links, Mbps"] = {f"{a}-{b}": mbps * args.scale for (a, b), mbps in MBPS.items()}
    return result.finish(args)


if __name__ == "__main__":
    run(main)
