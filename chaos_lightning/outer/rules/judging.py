"""Decides the answers to the pushes of a round, and the factors with which followers compute its version.

Theory of operation. `judge` is a function of its arguments, all of which are metadata: the norms and products of the
pushes D_j say all that is needed of them. It goes by the pushes' names and never by the order in which they came. First
what is not finite is rejected, then what is too stale is void, then the policy's gate has its say (gates.py). From the
accepted pushes S, each covering T_j samples and h_j inner steps:

    w_j = q_j T_j r_j / sum T_k r_k   r_j = 1, or (1 + staleness_j)^-1/2;   q_j = 1, less where the gate shortens D_j
    delta = sum w_j D_j               |delta|^2 = sum w_j w_k <D_j, D_k>;   c = min(1, clip / |delta|)
    N = H B K                         samples of a full round; K clusters train
    s = min(sum T_j, N),  p = s / N   the round's part of it; in integers, since ten times 0.1 is less than 1
    clock += sum h_j / K              the step number of a synchronous job of the same data, in TICKS

With generalised Delayed Nesterov a follower then computes, for each element and in this order:

    1. delta <- sum w_j D_j                     `Weighed.factor`, in the order of the names
    2. b <- b + p c delta                       `Factors.buffer`
    3. m <- mu m + (N / a) b, then b <- 0       only if a + s >= N: `Factors.outer` is not 0.0 then; mu is
                                                `Factors.momentum`, a counts the samples since m moved last, s included
    4. theta <- theta - eta p c delta           `Factors.rate`
    5. theta <- theta - eta mu m                `Factors.step`, with the m of 3; not 0.0 only if m moved

So the momentum moves first, and theta goes along the new one. If each round has p = 1, this is Nesterov's momentum as
torch.optim.SGD has it; if each has p = 1/K, it is Delayed Nesterov. `nesterov` takes every round for a full one, p = 1
and N / a = 1. `sgd` leaves out 2, 3 and 5. A round that accepts nothing makes a version with the same content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chaos_lightning.outer.rules.gates import GATES, MeasuredPush, Products, product, share
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import TICKS, Counters, Factors, GateState, Offer, Rejection, Weighed


@dataclass(frozen=True, slots=True)
class Judgement:
    """Decision on the pushes that were collected for a round, as a round that lacks only its number and predecessor.
    Pushes are in the order of their names.

    Attributes:
        accepted: Accepted pushes with their factors, which add up to 1 where the gate has shortened none.
        rejected: Rejected pushes with reasons.
        void: Void pushes with reasons; no round holds them, they are records of their own (O10a).
        factors: Factors with which followers compute the version.
        counters: Counters after the round.
        gate: Statistics of the gate after the round.
        reason: Description, for people: why the window closed, and how the pushes were judged, warnings included.
    """

    accepted: tuple[Weighed, ...]
    rejected: tuple[Rejection, ...]
    void: tuple[tuple[Offer, str], ...]
    factors: Factors
    counters: Counters
    gate: GateState
    reason: str

    @property
    def is_round(self) -> bool:
        """Whether a push was accepted or rejected; void pushes alone make no round."""
        return bool(self.accepted or self.rejected)


def judge(
    candidates: Iterable[MeasuredPush],
    products: Products,
    usual: int,
    counters: Counters,
    gate: GateState,
    settings: OuterSettings,
    window_reason: str,
) -> Judgement:
    """Decides on all pushes that were collected for a round.

    Args:
        candidates: Measured pushes, at most one of each incarnation, in any order.
        products: Scalar product of each two pushes that are finite.
        usual: Number of clusters that train (K, rule O13). If more have pushed in this window, these count.
        counters: Counters after the round before.
        gate: Statistics of the gate after the round before.
        settings: Rules of the job.
        window_reason: Reason for which the window closed.
    """
    rejected: dict[Offer, str] = {}
    void: dict[Offer, str] = {}
    sound: list[MeasuredPush] = []
    pushes = sorted(candidates, key=lambda push: push.name)
    for push in pushes:
        if not push.usable:  # before its age: a void push would come again, within the next one
            rejected[push.offer] = "not all of it is finite"
        elif 0 < settings.staleness_cap < push.staleness:
            void[push.offer] = f"its base is {push.staleness} versions old (at most {settings.staleness_cap})"
        else:
            sound.append(push)
    sifted = GATES[settings.policy](sound, products, gate, settings)
    accepted = [push for push in sound if push.name not in sifted.rejected]
    parts = [sifted.parts.get(push.name, 1.0) for push in accepted]
    rejected |= {push.offer: sifted.rejected[push.name] for push in sound if push.name in sifted.rejected}

    clusters = max(usual, len({push.name.incarnation for push in pushes if push.offer not in void}), 1)
    weights = [w * part for w, part in zip(_weights(accepted, settings), parts, strict=True)]
    clip, clipped = _clip(accepted, weights, products, settings)
    factors, after, said = _factors(accepted, clusters, clip, counters, settings)
    words = [window_reason, f"{len(accepted)} of {len(pushes)} pushes accepted", said, clipped, sifted.warning]
    return Judgement(
        tuple(
            Weighed(push.offer, w, push.staleness, part) for push, w, part in zip(accepted, weights, parts, strict=True)
        ),
        tuple(Rejection(offer, rejected[offer]) for offer in sorted(rejected, key=lambda offer: offer.push)),
        tuple(void.items()),
        factors,
        after,
        sifted.gate,
        "; ".join(word for word in words if word),
    )


def _weights(accepted: Sequence[MeasuredPush], settings: OuterSettings) -> list[float]:
    """Returns the weight w_j of each push; all are 0.0 if no push covers a sample."""
    shares = [share(push, settings) for push in accepted]
    whole = math.fsum(shares)
    return [each / whole if whole else 0.0 for each in shares]


def _clip(
    accepted: Sequence[MeasuredPush], weights: Sequence[float], products: Products, settings: OuterSettings
) -> tuple[float, str]:
    """Returns the factor that shortens the average to the bound `clip`, with words about it; (1.0, "") if it is short
    enough.
    """
    if not settings.clip_used:
        return 1.0, ""
    weighed = list(zip(accepted, weights, strict=True))
    square = math.fsum(v * w * product(one, other, products) for one, v in weighed for other, w in weighed)
    norm = math.sqrt(max(0.0, square))  # of pushes that cancel out, rounding may leave less than nothing
    if norm <= settings.clip_used:
        return 1.0, ""
    clip = settings.clip_used / norm
    return clip, f"their average of norm {norm:.4g} was clipped to {settings.clip_used:g} (factor {clip:.4g})"


def _factors(
    accepted: Sequence[MeasuredPush], clusters: int, clip: float, counters: Counters, settings: OuterSettings
) -> tuple[Factors, Counters, str]:
    """Returns the factors and counters of a round, and in words which part of a full round it is."""
    eta, mu = settings.outer_lr, settings.outer_momentum
    full = settings.round_samples * clusters
    covered = sum(push.offer.samples for push in accepted)
    ticks = sum(push.offer.steps for push in accepted) * TICKS // clusters
    moved = Counters(counters.pending, counters.samples + covered, counters.ticks + ticks)
    if not covered:  # also where momentum would move by itself: no sample asked for it
        return Factors(0.0, 0.0, mu), moved, "nothing moves"
    counted = min(covered, full)
    part = f"p = {counted} / {full} samples (K = {clusters})"
    if settings.optimizer_used == "sgd":
        return Factors(eta * (counted / full) * clip, 0.0, 0.0), moved, part
    if settings.optimizer_used == "nesterov":
        said = f"{covered} samples taken for a full round (K = {clusters})"
        return Factors(eta * clip, clip, mu, 1.0, eta * mu), Counters(0, moved.samples, moved.ticks), said
    p, pending = counted / full, counters.pending + counted
    if pending < full:
        waiting = f"{part}, the momentum waits with {pending} samples"
        return Factors(eta * p * clip, p * clip, mu), Counters(pending, moved.samples, moved.ticks), waiting
    factors = Factors(eta * p * clip, p * clip, mu, full / pending, eta * mu)
    moves = f"{part}, the momentum moves with {pending} samples"
    return factors, Counters(0, moved.samples, moved.ticks), moves
