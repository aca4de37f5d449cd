"""Plans how many bytes of the state each neighbour sends to a newcomer, and predicts how long that takes.

Theory of operation. Neighbour u can begin `delay_s` after the start (its latency, and the time until it has finished
its all-reduce) and then needs `s_per_byte` for each byte. With n bytes it is done at delay_s + n * s_per_byte; a
transfer takes as long as the last neighbour. The newcomer's own access link may be a limit for all together
(`ingress_s_per_byte`, 0: none). Every planner returns a `SharePlan`: bytes by neighbour, predicted seconds, and the
reason in words.

    closed_form  byte ranges: all neighbours worth using end at once, at
                 T = (W + sum delay/s_per_byte) / sum 1/s_per_byte. No plan is faster (Chaos calls this problem NP-hard;
                 with byte ranges, or equal shards, it is not).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.errors import PlanError

POLICIES = ("adaptive", "shared")
"""Names of the transfer policies; replication/policies.py carries each of them out."""
COMPARED = ("greedy", "optimal", "even", "single", "multi_source", "stop_resume")
"""Names of policies that are there to be compared with: classes of benchmarks/transfer/policies.py."""


def wrong_policy(name: str) -> str:
    """Returns an error text for the name of a transfer policy that cannot be used, "" for any other; does not load
    MODULE:CLASS.
    """
    if name in POLICIES or ":" in name:
        return ""
    known = f"expected one of {', '.join(POLICIES)}, or MODULE:CLASS"
    if name not in COMPARED:
        return known
    moved = f"write transfer=benchmarks.transfer.policies:{name.title().replace('_', '')}"
    use = "run python -m benchmarks.transfer" if name == "stop_resume" else moved
    return f"not in the package, since it is only there to be compared with; {known}; in a copy of the repository {use}"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Neighbour that can send state to the newcomer over a direct link, with its speed."""

    member: str
    delay_s: float
    """Seconds until the source's first byte can arrive: propagation, and the work that the source has to finish before.
    """
    s_per_byte: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0):
            raise ValueError(f"neighbour {self.member}: delay_s must be finite and not negative, got {self.delay_s}")
        if not (math.isfinite(self.s_per_byte) and self.s_per_byte > 0):
            raise ValueError(f"neighbour {self.member}: s_per_byte must be finite and positive, got {self.s_per_byte}")

    def seconds(self, nbytes: float) -> float:
        """Returns the seconds until the source has sent this many bytes, if other sources do not slow it down."""
        return self.delay_s + nbytes * self.s_per_byte


@dataclass(frozen=True, kw_only=True)
class SharePlan:
    """Plan of a state transfer: the number of bytes that each source sends."""

    policy: str
    shares: Mapping[str, int]
    """Bytes by source; their sum is the state's size. A source that sends nothing is absent."""
    seconds: float
    """Predicted seconds from the start of the transfer to the last byte."""
    reason: str


def mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def words_of(shares: Mapping[str, int]) -> str:
    shown = [f"{member} {mib(nbytes)}" for member, nbytes in list(shares.items())[:8]]
    return ", ".join(shown) + (f" and {len(shares) - 8} more" if len(shares) > 8 else "")


def check(nbytes: int, neighbours: Sequence[Neighbour], ingress_s_per_byte: float) -> None:
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
    if not neighbours:
        raise PlanError("a state can only be planned to come from at least one neighbour, none was given")
    names = [n.member for n in neighbours]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise PlanError(f"neighbour {twice} is given twice: give each neighbour once")
    if not (math.isfinite(ingress_s_per_byte) and ingress_s_per_byte >= 0):
        raise ValueError(f"ingress_s_per_byte must be finite and not negative, got {ingress_s_per_byte}")


# --- byte ranges: the bound ------------------------------------------------------------------------------------------


def _fluid(nbytes: int, neighbours: Sequence[Neighbour], ingress_s_per_byte: float) -> tuple[float, list[float]]:
    """Returns the least seconds of a transfer, and fractional shares of the sources that reach it."""
    order = sorted(range(len(neighbours)), key=lambda i: (neighbours[i].delay_s, i))
    limit = 1 / ingress_s_per_byte if ingress_s_per_byte else math.inf
    shares = [0.0] * len(neighbours)
    left, total = float(nbytes), 0.0
    for position, index in enumerate(order):
        begin = neighbours[index].delay_s
        total += 1 / neighbours[index].s_per_byte
        rate = min(total, limit)
        last = position + 1 == len(order)
        rest = left / rate
        span = rest if last else min(rest, neighbours[order[position + 1]].delay_s - begin)
        for i in order[: position + 1]:  # a full access link is shared in proportion to the links behind it
            shares[i] += span * rate / total / neighbours[i].s_per_byte
        if span == rest:
            return begin + rest, shares
        left -= span * rate
    raise AssertionError("neighbours were checked not to be empty")


def bound_s(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> float:
    """Returns a lower bound of the transfer's seconds, which the best byte ranges reach."""
    check(nbytes, neighbours, ingress_s_per_byte)
    return _fluid(nbytes, neighbours, ingress_s_per_byte)[0] if nbytes else 0.0


def closed_form(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> SharePlan:
    """Returns the plan in which all neighbours worth using finish at the same time.

    Args:
        nbytes: Size of the state.
        neighbours: Neighbours that can send, each with its delay and cost.
        ingress_s_per_byte: Seconds per byte of the newcomer's own access link; 0: no limit of its own.
    """
    check(nbytes, neighbours, ingress_s_per_byte)
    if not nbytes:
        return SharePlan(policy="adaptive", shares={}, seconds=0.0, reason="nothing is missing")
    seconds, exact = _fluid(nbytes, neighbours, ingress_s_per_byte)
    shares = _whole(nbytes, exact, neighbours)
    capped = ingress_s_per_byte > 0 and sum(1 / n.s_per_byte for n in neighbours) > 1 / ingress_s_per_byte
    slow = f", held back by the newcomer's own {8e-6 / ingress_s_per_byte:.0f} Mbps" if capped else ""
    reason = (
        f"closed form: {mib(nbytes)} in {seconds:.3f} s from {len(shares)} of {len(neighbours)} neighbours{slow}: "
        f"{words_of(shares)}"
    )
    return SharePlan(policy="adaptive", shares=shares, seconds=seconds, reason=reason)


def _whole(nbytes: int, exact: Sequence[float], neighbours: Sequence[Neighbour]) -> dict[str, int]:
    """Returns the shares rounded to whole bytes with the same sum: remainders go to the largest fractions."""
    floors = [int(x) for x in exact]
    surplus = nbytes - sum(floors)
    order = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    index = 0
    while surplus:  # more than one round, or a negative surplus, only where floating point has lost the last bytes
        i = order[index % len(order)]
        step = max(1, surplus // len(order)) if surplus > 0 else -min(floors[i], -surplus)
        floors[i] += step
        surplus -= step
        index += 1
    return {n.member: floor for n, floor in zip(neighbours, floors, strict=True) if floor}


def predict_s(shares: Mapping[str, int], neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> float:
    """Returns the predicted seconds of a transfer with these shares; a full access link is shared fairly, as
    TCP does.
    """
    known = {n.member: n for n in neighbours}
    unknown = next((member for member in shares if member not in known), None)
    if unknown is not None:
        raise PlanError(f"a share is planned for {unknown}, who is none of the neighbours {', '.join(known)}")
    sending = {m: known[m] for m, nbytes in shares.items() if nbytes}
    if not ingress_s_per_byte:
        return max((n.seconds(shares[m]) for m, n in sending.items()), default=0.0)
    now, left = 0.0, {m: float(shares[m]) for m in sending}
    while left:
        active = [m for m in left if sending[m].delay_s <= now]
        later = min((sending[m].delay_s for m in left if sending[m].delay_s > now), default=math.inf)
        rates = _fair({m: 1 / sending[m].s_per_byte for m in active}, 1 / ingress_s_per_byte)
        first = min((left[m] / rates[m] for m in active), default=math.inf)
        step = min(first, later - now)
        done = [m for m in active if left[m] / rates[m] <= step]
        for m in active:
            left[m] -= rates[m] * step
        for m in done:
            del left[m]
        now = later if step == later - now else now + step
    return now


def _fair(caps: Mapping[str, float], limit: float) -> dict[str, float]:
    """Returns max-min fair rates of the sources under one common limit."""
    rates: dict[str, float] = {}
    for count, member in zip(range(len(caps), 0, -1), sorted(caps, key=lambda m: caps[m]), strict=True):
        rates[member] = min(caps[member], limit / count)
        limit -= rates[member]
    return rates
