"""Estimates, from the losses that a job has seen, how often losses come and how many devices each takes.

Theory of operation. While n devices train for s seconds, *losses* (of one or more devices at once) come as a Poisson
process of rate n e, where e is the rate per device. A Gamma prior of shape a and rate b (device-seconds) on e, updated
by k losses in x device-seconds, is a Gamma of shape a + k and rate b + x. So

    mean of e = (a + k) / (b + x)

A loss takes g devices, with unknown probabilities of g = 1, 2, ... A Dirichlet prior of weights w_g, updated by c_g
losses of g devices each, gives

    probability of g = (w_g + c_g) / (W + k),   W = sum of w_g

and each device is lost at rate r = e * (mean of g). A device that is missing (there were more once) comes back at rate

    (u + y) / (v + z)

after y have come in z missing-device-seconds, by a Gamma prior of shape u and rate v. All priors weigh as much as one
loss or less, so after a few losses the job's own history says it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import comb
from types import MappingProxyType

PRIOR_LOSSES = 0.5
"""Weight of the prior, in losses: a."""
PRIOR_RATE = 0.01 / 3600
"""Losses per device and second before there is any history, a / b: one in a hundred per hour."""
PRIOR_RETURNED, PRIOR_MISSING_S = 0.5, 3600.0
"""Prior of devices that come back (u and v): half of the missing devices are back within an hour or so."""
PRIOR_SIZES: Mapping[int, float] = MappingProxyType({1: 0.8, 2: 0.04, 3: 0.04, 4: 0.04, 5: 0.04, 6: 0.04})
"""Prior weights w of the number of devices in a loss: in published traces of spot devices groups are of up to six."""


@dataclass
class LossHistory:
    """Record of the losses that a job has seen, and the rates estimated from it."""

    prior_losses: float = PRIOR_LOSSES
    prior_rate: float = PRIOR_RATE
    """Losses per device and second before there is any history."""
    prior_sizes: Mapping[int, float] = field(default_factory=lambda: PRIOR_SIZES)
    device_s: float = 0.0
    """Device-seconds that were watched: x."""
    losses: int = 0
    """Number of losses: k."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Number of losses of each size: c."""
    most: int = 0
    """Most devices that were there at once."""
    missing_s: float = PRIOR_MISSING_S
    """Missing-device-seconds, with the prior's: v + z."""
    returned: float = PRIOR_RETURNED
    """Number of devices that came, with the prior's: u + y."""

    def watched(self, devices: int, seconds: float) -> None:
        """Records that this many devices were present for this many seconds."""
        self.device_s += devices * seconds
        self.most = max(self.most, devices)
        self.missing_s += (self.most - devices) * seconds

    def lost(self, devices: int) -> None:
        """Records one loss of this many devices at once."""
        self.losses += 1
        self.sizes[devices] = self.sizes.get(devices, 0) + 1

    def came(self, devices: int) -> None:
        """Records devices that have joined or come back."""
        self.returned += devices

    def return_rate(self, devices: int) -> float:
        """Returns the expected number of missing devices that come back per second, given how many are present."""
        missing = max(0, self.most - devices)
        return missing * self.returned / self.missing_s

    @property
    def rate(self) -> float:
        """Expected losses per device and second."""
        before_s = self.prior_losses / self.prior_rate if self.prior_rate > 0 else 0.0
        seen_s = before_s + self.device_s
        return (self.prior_losses + self.losses) / seen_s if seen_s else 0.0

    @property
    def size_shares(self) -> dict[int, float]:
        """Probability that a loss takes g devices, by g."""
        total = sum(self.prior_sizes.values()) + self.losses
        sizes = sorted({*self.prior_sizes, *self.sizes})
        return {g: (self.prior_sizes.get(g, 0.0) + self.sizes.get(g, 0)) / total for g in sizes}


def fatal_risk(owner_counts: Iterable[int], devices: int, size_shares: Mapping[int, float]) -> float:
    """Returns the probability that the next loss takes all owners of some layer.

    A loss of g of n devices, any of them alike, takes all c owners of one set with probability
    C(n - c, g - c) / C(n, g). Sets that differ are added up, which is exact for g = 1 and an upper bound beyond.

    Args:
        owner_counts: Number of devices in each set of owners; equal sets are given once.
        devices: Number of all devices that are there, idle ones too: n.
        size_shares: Probability of each g.
    """
    counts: dict[int, int] = {}
    for c in owner_counts:
        counts[c] = counts.get(c, 0) + 1
    risk = 0.0
    for size, share in size_shares.items():
        g = min(size, devices)
        ways = comb(devices, g)
        hits = sum(k * comb(devices - c, g - c) for c, k in counts.items() if c <= g)
        risk += share * min(1.0, hits / ways)
    return min(1.0, risk)
