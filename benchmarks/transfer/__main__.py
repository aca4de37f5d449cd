"""Measures how fast a newcomer gets the state over uneven links, compared with a lower bound for any transfer.

Donors are processes of their own, bytes go over real sockets, and each link has a rate (benchmarks/transfer/net.py):
100, 300 and 600 Mbps to three neighbours, further nodes behind them for `multi_source`. What a link carries alone is
measured first; estimates and bounds are made from that or from the nominal rate, whichever is higher.

The bound is the closed form: all links busy from the first moment to the last (planning/shards.py). Time is that of
the whole pull: the vote on the state, the hashes of what is here, the transfer, and the proof at its end; `moving` is
the transfer alone.

  exact       estimates are what was measured
  half wrong  each estimate is wrong by half, in turns upwards and downwards
  collapse    in mid-transfer the fastest link falls to 10%; the bound knows that beforehand
  killed      in mid-transfer the fastest donor is killed with SIGKILL; time and bound of what was missing then
  ingress     all links together end in the newcomer's own access link of 500 Mbps

`stop_resume` writes to and reads from a folder on this machine's disk, held to --disk-mbps each way; starting all
processes again comes on top, and is measured once, as a fresh interpreter that imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from benchmarks.common import MIB, Options, Result, median, run
from benchmarks.transfer.net import LATENCY_S, Network, layout_of
from benchmarks.transfer.pulls import NEW, Bench, Case
from benchmarks.workers import restart_s, scratch

RATES_BPS = {"a": 100e6, "b": 300e6, "c": 600e6}
BEHIND_BPS = {("b", "d"): 400e6, ("c", "e"): 500e6, ("e", "f"): 200e6}
INGRESS_BPS = 500e6
BOUNDS = {"exact": 1.05, "half wrong": 1.10, "collapse": 1.15, "killed": 1.20}
STATES_MIB = [1.7, 50.0, 178.0, 500.0]
WRONG = (1.5, 0.5, 1.5)


def measure(result: Result, name: str, cases: Sequence[Case], bound: float | None) -> None:
    """Returns the figures of one case, which is repeated."""
    result.add(f"{name}: time over the bound", median([c.over_bound for c in cases]), "ratio", bound)
    moving = median([c.moving_over_bound for c in cases])
    if bound is not None:
        result.add(f"{name}: transfer alone over the bound", moving, "ratio")
    reports = [c.report for c in cases]
    result.details[name] = {
        "runs": [c.over_bound for c in cases],
        "moving over the bound": [c.moving_over_bound for c in cases],
        "seconds": [c.seconds for c in cases],
        "bound_s": [c.bound_s for c in cases],
        "reports": reports,
    }
    r = reports[-1]
    sent = ", ".join(f"{member} {nbytes / MIB:.1f}" for member, nbytes in r["by_source"].items())
    print(
        f"      moving {moving:.3f}; {r['steals']} steals, {r['retries']} retries, "
        f"{r['duplicated'] / max(1, r['nbytes']):.2%} twice; MiB from {sent}"
    )


def table(result: Result, rows: dict[str, dict[str, float]]) -> None:
    """Prints by policy and state size how many times the lower bound its transfers take."""
    sizes = list(next(iter(rows.values())))
    print("  time over the bound" + "".join(f"{size:>12}" for size in sizes))
    for policy, row in rows.items():
        print(f"  {policy:19}" + "".join(f"{row.get(size, float('nan')):12.3f}" for size in sizes))
    result.details["time over the bound, by policy"] = rows


def policies(bench: Bench, result: Result, size: str, repeats: int, rows: dict[str, dict[str, float]]) -> None:
    for policy in ("adaptive", "shared", "greedy", "optimal", "even", "single", "multi_source", "stop_resume"):
        estimates = None if policy == "shared" else bench.exact()
        cases = [bench.plain(policy, estimates) for _ in range(repeats)]
        bound = BOUNDS["exact"] if policy == "adaptive" and bench.newcomer.nbytes >= 100 * MIB else None
        measure(result, f"{policy}, {size}", cases, bound)
        rows.setdefault(policy, {})[size] = median([c.over_bound for c in cases])
    cases = [bench.plain("adaptive", None) for _ in range(repeats)]
    measure(result, f"adaptive without estimates, {size}", cases, None)
    rows.setdefault("adaptive, no estim.", {})[size] = median([c.over_bound for c in cases])


def cases_of(bench: Bench, result: Result, size: str, repeats: int) -> None:
    wrong = {n: (LATENCY_S, r * w) for (n, r), w in zip(bench.rates.items(), WRONG, strict=True)}
    measure(
        result, f"half wrong, {size}", [bench.plain("adaptive", wrong) for _ in range(repeats)], BOUNDS["half wrong"]
    )
    measure(result, f"collapse, {size}", [bench.collapse() for _ in range(repeats)], BOUNDS["collapse"])
    measure(result, f"killed, {size}", [bench.killed() for _ in range(repeats)], BOUNDS["killed"])
    rows: dict[str, dict[str, float]] = {}
    for policy in ("adaptive", "greedy", "even", "single"):
        cases = [bench.plain(policy, bench.exact(), ingress_bps=INGRESS_BPS) for _ in range(repeats)]
        measure(result, f"ingress, {policy}, {size}", cases, None)
        rows[policy] = {f"ingress {size}": median([c.over_bound for c in cases])}


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_argument("--states-mib", type=float, nargs="*", default=[], help=f"default {STATES_MIB}, quick: 1.7 and 200")
    p.add_count("--runs", 3, 1, "repetitions, of which the median counts")
    p.add_argument("--disk-mbps", type=float, default=1600.0, help="of stop_resume's disk, each way, in Mbps")
    p.add_seed("of the state's bytes")
    args = p.parse_args()
    sizes = args.states_mib or ([1.7, 200.0] if args.quick else STATES_MIB)
    result = Result("transfer")
    result.details["restart_s"] = restart_s()
    print(f"  a fresh interpreter that imports torch: {result.details['restart_s']:.2f} s (stop_resume pays that, too)")
    links = {(name, NEW): rate for name, rate in RATES_BPS.items()} | BEHIND_BPS
    rows: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        net = stack.enter_context(Network(links, NEW, disk_bps=args.disk_mbps * 1e6, folder=folder))
        bench = stack.enter_context(contextlib.closing(Bench(net, folder, args.seed)))
        bench.load(layout_of(max(sizes)))
        for name, rate in bench.carried.items():
            result.add(f"link {name}: carried over nominal", rate / net.rate(name), "ratio")
        for state_mib in sorted(sizes, reverse=True):
            size = f"{state_mib:g} MiB"
            if bench.newcomer.nbytes != sum(layout_of(state_mib)):
                bench.load(layout_of(state_mib))
            print(
                f" {size}: bound {bench.bound():.3f} s; a pull in which nothing is missing takes {bench.fixed_s:.3f} s"
            )
            result.details[f"nothing missing, {size}, s"] = bench.fixed_s
            policies(bench, result, size, args.runs, rows)
            if state_mib == max(sizes):
                cases_of(bench, result, size, args.runs)
    table(result, rows)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
