"""How fast a newcomer gets the state over uneven links, against what no transfer can beat.

Donors are processes of their own, bytes go over real sockets, and each link has a rate (benchmarks/transfer_net.py):
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

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, Result, median, parser, run
from benchmarks.transfer_net import HEAD, Ingress, Network, Newcomer, calibrate, layout_of, network
from benchmarks.workers import scratch

NEW = "new"
RATES_BPS = {"a": 100e6, "b": 300e6, "c": 600e6}
BEHIND_BPS = {("b", "d"): 400e6, ("c", "e"): 500e6, ("e", "f"): 200e6}
INGRESS_BPS = 500e6
BOUNDS = {"exact": 1.05, "half wrong": 1.10, "collapse": 1.15, "killed": 1.20}
STATES_MIB = [1.7, 50.0, 178.0, 500.0]
LATENCY_S = 0.0001
WRONG = (1.5, 0.5, 1.5)


@dataclass
class Case:
    """One pull."""

    over_bound: float
    seconds: float
    bound_s: float
    moving_over_bound: float
    report: dict[str, Any]


class Bench:
    """One network and one state at a time."""

    def __init__(self, net: Network, folder: Path, seed: int) -> None:
        self.net = net
        self.rates: dict[str, float] = {}
        """Bits per second of the links to neighbours: nominal, or as measured if that is more."""
        self.carried: dict[str, float] = {}
        self._folder = folder
        self._seed = seed
        self._seq = 0
        self._kept: list[Path] = []
        self.newcomer: Newcomer

    def load(self, state_mib: float) -> None:
        """Have all donors publish a state of this size."""
        import torch

        self._seq += 1
        layout = layout_of(state_mib)
        path = self._folder / f"chaos-transfer-{os.getpid()}-{self._seq}"
        flat = torch.from_file(str(path), shared=True, size=sum(layout), dtype=torch.uint8)
        step = 16 * MIB
        generator = torch.Generator().manual_seed(self._seed)
        for at in range(0, flat.numel(), step):
            flat[at : at + step].random_(generator=generator)
        self.net.publish(path, layout, self._seq)
        self.close()
        self._kept = [path]  # a donor that is started again reads it
        self.newcomer = Newcomer(layout)
        if not self.rates:
            for name in self.net.near:
                nbytes = min(flat.numel(), int(self.net.rate(name) / 8))
                self.carried[name] = calibrate(self.net, name, self._seq, nbytes)
            self.rates = {name: max(rate, self.net.rate(name)) for name, rate in self.carried.items()}
        self.newcomer._flat.copy_(flat)
        self.fixed_s = self.pull("adaptive", empty=False).seconds  # everybody hashes once; nothing is missing

    def close(self) -> None:
        """Forget the state's file."""
        for path in self._kept:
            path.unlink(missing_ok=True)

    def pull(
        self, policy: str, *, estimates: Any = None, empty: bool = True, progress: Any = None, **options: Any
    ) -> Any:
        from chaos_lightning.replication import PolicyOptions, PullConfig, make_policy, pull_state

        if empty:
            self.newcomer.empty()
        made = make_policy(policy, estimates, PolicyOptions(**options))
        return pull_state(
            self.net.endpoints(),
            self.net.dial,
            head=HEAD,
            seq=self._seq,
            state=self.newcomer,
            config=PullConfig(deadline_s=300.0),
            policy=made,
            progress=progress,
        )

    def exact(self) -> dict[str, tuple[float, float]]:
        return {name: (LATENCY_S, rate) for name, rate in self.rates.items()}

    def bound(self, nbytes: int | None = None, ingress_bps: float = 0.0, without: str = "") -> float:
        from chaos_lightning.planning.shards import Neighbour, bound_s

        near = [Neighbour(n, 0.0, 8 / r) for n, r in self.rates.items() if n != without]
        ingress = 8 / ingress_bps if ingress_bps else 0.0
        return bound_s(self.newcomer.nbytes if nbytes is None else nbytes, near, ingress_s_per_byte=ingress)

    # --- cases ----------------------------------------------------------------------------------------------------

    def plain(self, policy: str, estimates: Any, *, ingress_bps: float = 0.0) -> Case:
        """A pull by this policy; `greedy` searches the shard size between the layers, as the paper does."""
        options: dict[str, Any] = {}
        if policy == "greedy":
            options["layer_nbytes"] = tuple(t.nbytes for _, t in self.newcomer.tensors())
        if policy == "multi_source":
            options |= {"newcomer": NEW, "links": {p: (LATENCY_S, 8 / r) for p, r in self.net.links.items()}}
        if policy == "stop_resume":
            options["folder"] = str(self.net.folder)
            options["disk_bps"] = self.net._disk_bps
        if ingress_bps:
            options["ingress_bps"] = ingress_bps
            self.net.ingress = Ingress(ingress_bps)
        try:
            report = self.pull(policy, estimates=estimates, **options)
        finally:
            self.net.ingress = None
        return self._case(report, self.bound(ingress_bps=ingress_bps))

    def collapse(self) -> Case:
        """The fastest link falls to a tenth when half of the state is here."""
        fastest = max(self.rates, key=lambda n: self.rates[n])
        at: list[float] = []
        began = time.monotonic()

        def watch(p: Any) -> None:
            if not at and p.done_nbytes >= p.total_nbytes / 2:
                at.append(time.monotonic() - began)
                self.net.workers[fastest].pipe.send(("rate", NEW, self.net.rate(fastest) / 10))

        report = self.pull("adaptive", estimates=self.exact(), progress=watch)
        self.net.workers[fastest].receive()
        self.net.restore()
        before = sum(self.rates.values()) / 8
        after = before - 0.9 * self.rates[fastest] / 8
        return self._case(report, at[0] + max(0.0, self.newcomer.nbytes - before * at[0]) / after)

    def killed(self) -> Case:
        """The fastest donor is killed when half of the state is here."""
        fastest = max(self.rates, key=lambda n: self.rates[n])
        seen: list[tuple[float, int]] = []

        def watch(p: Any) -> None:
            if not seen and p.done_nbytes >= p.total_nbytes / 2:
                seen.append((time.monotonic(), p.total_nbytes - p.done_nbytes))
                self.net.workers[fastest].process.kill()

        report = self.pull("adaptive", estimates=self.exact(), progress=watch)
        seconds = time.monotonic() - seen[0][0]
        self.net.workers[fastest].kill()
        self.net.start(fastest)
        bound_s = self.bound(seen[0][1], without=fastest)
        tail = seconds - (report.seconds - report.moving_s)  # the hashes before and after are no part of what remained
        return Case(seconds / bound_s, seconds, bound_s, tail / bound_s, asdict(report))

    def _case(self, report: Any, bound_s: float) -> Case:
        seconds, moving_s = report.seconds, report.moving_s
        return Case(seconds / bound_s, seconds, bound_s, moving_s / bound_s, asdict(report))


def measure(result: Result, name: str, cases: Sequence[Case], bound: float | None) -> None:
    """Figures of one case, repeated."""
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


def restart_s() -> float:
    """What starting a training process again costs at least."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return time.monotonic() - began


def table(result: Result, rows: dict[str, dict[str, float]]) -> None:
    """All policies at all sizes."""
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
    p = parser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--states-mib", type=float, nargs="*", default=[], help=f"default {STATES_MIB}, quick: 1.7 and 200")
    p.add_argument("--runs", type=int, default=0, help="repetitions, of which the median counts; 0: 3, quick: 1")
    p.add_argument("--disk-mbps", type=float, default=1600.0, help="of stop_resume's disk, each way, in Mbps")
    p.add_argument("--seed", type=int, default=1, help="of the state's bytes")
    args = p.parse_args()
    sizes = args.states_mib or ([1.7, 200.0] if args.quick else STATES_MIB)
    repeats = args.runs or (1 if args.quick else 3)
    result = Result("transfer")
    result.details["restart_s"] = restart_s()
    print(f"  a fresh interpreter that imports torch: {result.details['restart_s']:.2f} s (stop_resume pays that, too)")
    links = {(name, NEW): rate for name, rate in RATES_BPS.items()} | BEHIND_BPS
    rows: dict[str, dict[str, float]] = {}
    shared = Path("/dev/shm")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        net = stack.enter_context(network(links, NEW, disk_bps=args.disk_mbps * 1e6, folder=folder))
        bench = stack.enter_context(contextlib.closing(Bench(net, shared if shared.is_dir() else folder, args.seed)))
        bench.load(max(sizes))
        for name, rate in bench.carried.items():
            result.add(f"link {name}: carried over nominal", rate / net.rate(name), "ratio")
        for state_mib in sorted(sizes, reverse=True):
            size = f"{state_mib:g} MiB"
            if bench.newcomer.nbytes != sum(layout_of(state_mib)):
                bench.load(state_mib)
            print(
                f" {size}: bound {bench.bound():.3f} s; a pull in which nothing is missing takes {bench.fixed_s:.3f} s"
            )
            result.details[f"nothing missing, {size}, s"] = bench.fixed_s
            policies(bench, result, size, repeats, rows)
            if state_mib == max(sizes):
                cases_of(bench, result, size, repeats)
    table(result, rows)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
