"""Recomputes what a round's entry says: the weights of its pushes, the clock, and the factors that followers use.

Theory of operation. All of it follows from the offers, the job's rules, the counters before the round, and K, the
number of clusters that trained. K is not written down as a number. The clock tells it: of the possible ones the right K
is one with which the clock moves as the round says. Norms are in no log, so a clip is taken as told, if the rules allow
one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from chaos_lightning.outer.rules import types as ot
from chaos_lightning.outer.rules.settings import OuterSettings

NEAR = 1e-9
"""Relative difference of two factors that are the same but for rounding."""


def amiss(
    body: ot.Round, before: ot.Counters, settings: OuterSettings, most: int, opened: Collection[ot.PushId]
) -> Iterator[str]:
    """Yields, in words, what in a round's entry does not follow from its pushes, the counters before it and the
    settings.

    Args:
        body: The round.
        before: Counters of the version before.
        settings: The job's rules.
        most: Number of incarnations that may have trained.
        opened: Pushes that a rollback made unanswered: they count as fresh.
    """
    yield from _weights(body, settings, opened)
    steps = sum(each.offer.steps for each in body.accepted)
    least = max(1, len({each.offer.push.incarnation for each in body.accepted}))
    possible = range(least, max(least, most) + 1)
    clocks = {k: before.ticks + steps * ot.TICKS // k for k in possible}
    fitting = [k for k, ticks in clocks.items() if ticks == body.counters.ticks]
    if not fitting:
        yield (
            f"its clock goes from {before.ticks} to {body.counters.ticks}: {steps} steps of {least} to {possible[-1]} "
            f"clusters make {min(clocks.values())} to {max(clocks.values())}"
        )
        return
    found = [_factors(body, before, settings, k) for k in fitting]
    if "" not in found:
        yield found[0]


def _weights(body: ot.Round, settings: OuterSettings, opened: Collection[ot.PushId]) -> Iterator[str]:
    stale = settings.discount_stale and settings.policy != "di_ps"
    shares = [each.offer.samples * ((1 + each.staleness) ** -0.5 if stale else 1.0) for each in body.accepted]
    whole = math.fsum(shares)
    for each, share in zip(body.accepted, shares, strict=True):
        age = max(0, body.before.number - each.offer.base.number)
        if each.staleness != age and not (each.offer.push in opened and not each.staleness):
            yield f"{each.offer.push} is said to be {each.staleness} versions old, its base is {age} versions old"
        if not 0.0 < each.part <= 1.0:
            yield f"{each.offer.push} is shortened to {each.part:g} of its length; expected more than 0, and at most 1"
        weight = each.part * share / whole if whole else 0.0
        if not _near(each.factor, weight):
            yield f"{each.offer.push} weighs {each.factor:g}: by its samples and those of the others {weight:g}"


def _factors(body: ot.Round, before: ot.Counters, settings: OuterSettings, clusters: int) -> str:
    """Returns what is wrong with a round's factors and counters if `clusters` clusters trained; "" if nothing is."""
    said, covered = body.factors, sum(each.offer.samples for each in body.accepted)
    eta, mu, kind = settings.outer_lr, settings.outer_momentum, settings.optimizer_used
    full = settings.round_samples * clusters
    if not covered:
        part, moves, pending = 0.0, False, before.pending
    elif kind == "nesterov":
        part, moves, pending = 1.0, True, 0
    else:
        part = min(covered, full) / full
        counted = before.pending + min(covered, full)
        moves = kind == "delayed_nesterov" and counted >= full
        pending = before.pending if kind == "sgd" else 0 if moves else counted
    clip = said.rate / (eta * part) if part and eta else 1.0
    if not (_near(clip, 1.0) or (settings.clip_used and 0.0 < clip < 1.0)):
        return f"its rate is {said.rate:g}, expected {eta * part:g} (K = {clusters})"
    clip = min(clip, 1.0)
    outer = 0.0 if not moves else 1.0 if kind == "nesterov" else full / (before.pending + min(covered, full))
    plain = kind == "sgd" and covered > 0
    expected = {
        "buffer": 0.0 if plain else part * clip,
        "momentum": 0.0 if plain else mu,
        "outer": outer,
        "step": eta * mu if moves else 0.0,
    }
    for name, value in expected.items():
        if not _near(getattr(said, name), value):
            return f"its factor {name} is {getattr(said, name):g}, expected {value:g} (K = {clusters})"
    if body.counters.pending != pending:
        return f"{body.counters.pending} samples wait for the momentum, expected {pending} (K = {clusters})"
    return ""


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEAR, abs_tol=1e-300)
