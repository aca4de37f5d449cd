"""Checks the numbers of an offer against what its cluster was leased, and against what is possible.

Theory of operation. Clusters are let in by a secret, and one that is broken may still say anything. What does not fit
into a record ends its incarnation. All else that is wrong is an objection, for which a round rejects the push whole: so
it is answered, and its cluster goes on.
"""

from __future__ import annotations

from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, TICKS, Counters, Offer

MOST_SPANS = 1 << 14
"""Number of spans that an offer may name; more come of no loader, as leases are dealt in chunks."""
MOST_MANIFEST = 128
"""Largest number of characters of a manifest."""
MOST_TIMES = 1024
"""Largest possible number of steps per sample, and of usual batches per step."""
_COUNTED = 1 << 62
"""Bound of all counters, so that they stay within 64 bits."""


def oversize(offer: Offer) -> str:
    """Returns why an offer is too large for the chain; "" if it is not."""
    spans = sum(len(each.spans) for each in offer.covers)
    if spans > MOST_SPANS or len(offer.covers) > MOST_SPANS:
        return f"its push names {max(spans, len(offer.covers))} spans of positions; at most {MOST_SPANS} are possible"
    if len(offer.manifest) > MOST_MANIFEST:
        return f"its push has a manifest of {len(offer.manifest)} characters; at most {MOST_MANIFEST} are possible"
    return ""


def impossible(offer: Offer, counters: Counters, settings: OuterSettings, *, shared: bool) -> str:
    """Returns why no cluster can have trained what this offer claims; "" if it is possible.

    Args:
        offer: Offer to check.
        counters: Counters of the job before the offer.
        settings: Rules of the job.
        shared: Whether clusters share the data, so that leases bound the samples.
    """
    samples, steps = offer.samples, offer.steps
    if samples < 0 or steps < 0:
        return f"it names {samples} samples and {steps} steps; expected none below 0"
    if offer.base == NO_VERSION:
        return f"it names {samples} samples before there is a version" if samples or steps or offer.covers else ""
    if offer.covers and not shared:
        return "it names positions, and each cluster has its own data"
    if steps > MOST_TIMES * max(1, samples):
        return f"it names {steps} steps for {samples} samples; at most {MOST_TIMES} for each are possible"
    if not shared and samples > (most := MOST_TIMES * max(1, settings.batch) * max(1, steps)):
        return f"it names {samples} samples for {steps} steps; at most {most} are possible"
    if max(counters.samples + samples, counters.ticks + steps * TICKS) >= _COUNTED:
        return f"it names {samples} samples and {steps} steps, more than can be counted"
    return ""
