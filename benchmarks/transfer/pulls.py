"""Measures a newcomer's pulls on the emulated edge, with a lower bound for any transfer; __main__.py defines
the cases.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.transfer.net import LATENCY_S, Ingress, Joiner, Layout, Network, calibrate

NEW = "new"


@dataclass
class Case:
    """Measurements of one pull."""

    over_bound: float
    seconds: float
    bound_s: float
    moving_over_bound: float
    report: dict[str, Any]


class Bench(Joiner):
    """Measurements of pulls on one network, one state at a time."""

    def __init__(self, net: Network, folder: Path, seed: int) -> None:
        super().__init__(net, folder, seed)
        self.rates: dict[str, float] = {}
        """Bits per second of the links to neighbours: nominal, or as measured if that is more."""
        self.carried: dict[str, float] = {}
        self.fixed_s = 0.0
        """Seconds of a pull in which nothing is missing."""

    def load(self, layout: Layout) -> None:
        super().load(layout)
        if not self.rates:
            for name in self.net.near:
                nbytes = min(self.newcomer.nbytes, int(self.net.rate(name) / 8))
                self.carried[name] = calibrate(self.net, name, self.seq, nbytes)
            self.rates = {name: max(rate, self.net.rate(name)) for name, rate in self.carried.items()}
        self.fixed_s = self.pull("adaptive", empty=False).seconds  # everybody hashes once

    def exact(self) -> dict[str, tuple[float, float]]:
        return {name: (LATENCY_S, rate) for name, rate in self.rates.items()}

    def bound(self, nbytes: int | None = None, ingress_bps: float = 0.0, without: str = "") -> float:
        from chaos_lightning.planning.shards import Neighbour, bound_s

        near = [Neighbour(n, 0.0, 8 / r) for n, r in self.rates.items() if n != without]
        ingress = 8 / ingress_bps if ingress_bps else 0.0
        return bound_s(self.newcomer.nbytes if nbytes is None else nbytes, near, ingress_s_per_byte=ingress)

    # --- cases ----------------------------------------------------------------------------------------------------

    def plain(self, policy: str, estimates: Any, *, ingress_bps: float = 0.0) -> Case:
        """Measures a pull by this policy."""
        options = {"ingress_bps": ingress_bps} if ingress_bps else {}
        self.net.ingress = Ingress(ingress_bps) if ingress_bps else None
        try:
            report = self.pull(policy, estimates, **options)
        finally:
            self.net.ingress = None
        return self._case(report, self.bound(ingress_bps=ingress_bps))

    def collapse(self) -> Case:
        """Measures a pull in which the fastest link drops to a tenth of its rate when half of the state has arrived."""
        fastest = max(self.rates, key=lambda n: self.rates[n])
        at: list[float] = []
        began = time.monotonic()

        def watch(p: Any) -> None:
            if not at and p.done_nbytes >= p.total_nbytes / 2:
                at.append(time.monotonic() - began)
                self.net.workers[fastest].pipe.send(("rate", NEW, self.net.rate(fastest) / 10))

        report = self.pull("adaptive", self.exact(), progress=watch)
        self.net.workers[fastest].receive()
        self.net.restore()
        before = sum(self.rates.values()) / 8
        after = before - 0.9 * self.rates[fastest] / 8
        return self._case(report, at[0] + max(0.0, self.newcomer.nbytes - before * at[0]) / after)

    def killed(self) -> Case:
        """Measures a pull whose fastest donor is killed when half of the state has arrived."""
        fastest = max(self.rates, key=lambda n: self.rates[n])
        seen: list[tuple[float, int]] = []

        def watch(p: Any) -> None:
            if not seen and p.done_nbytes >= p.total_nbytes / 2:
                seen.append((time.monotonic(), p.total_nbytes - p.done_nbytes))
                self.net.workers[fastest].process.kill()

        report = self.pull("adaptive", self.exact(), progress=watch)
        seconds = time.monotonic() - seen[0][0]
        self.net.workers[fastest].kill()
        self.net.start(fastest)
        bound_s = self.bound(seen[0][1], without=fastest)
        tail = seconds - (report.seconds - report.moving_s)  # the hashes before and after are no part of what remained
        return Case(seconds / bound_s, seconds, bound_s, tail / bound_s, asdict(report))

    def _case(self, report: Any, bound_s: float) -> Case:
        seconds, moving_s = report.seconds, report.moving_s
        return Case(seconds / bound_s, seconds, bound_s, moving_s / bound_s, asdict(report))
