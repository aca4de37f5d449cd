"""Decides which pushes of a round are accepted, with one gate for each policy: a filter on the pushes' length and
direction.

Theory of operation. A gate sees the finite pushes of one round in the order of their names, and what it has seen of
earlier ones (`GateState`). It judges all of them by the state from before the round, and only then takes them into the
state, so that no judgement depends on a name. A gate stops accidents, not attackers.

`careful` (policy robust) knows two kinds of accidents:

- *Too long.* x = ln |D| - 1/2 ln h, so that pushes of unequal inner steps compare; it is lowered if the steps had fewer
  samples than usual, so that a cluster may shrink. z = (x - mean) / max(std, 0.1) must not be above the limit. Mean and
  variance are moving averages over accepted pushes only: a refused one would raise what is usual until it is let in.
  Until enough pushes were accepted nobody is refused for this. If everything is refused for a while, the estimate of
  what is usual is wrong (the learning rate was raised, say), and it is learned anew.
- *Turned round.* A norm cannot see that. The cosine of D with the sum of the round's other pushes can, and so can its
  side of the momentum. Each alone is wrong now and then: of 1330 good pushes 6 were against the others, some 30 against
  the momentum, and none against both; of 38 turned ones 37 were against both (docs/outer.md, Convergence). So a push is
  refused only if it is against both. A turned push lowers the others' cosines, so the worst one is refused first, and
  the rest is judged again without it. Of two pushes both cosines are equal, and the momentum tells them apart. Where
  nothing is known of it, the cosine decides in rounds of three and more. A push that is alone is not judged.

No cluster is shut out for good. If one is refused again and again while others pass (a newcomer whose inner optimizer
is cold, or a cluster whose samples are unlike the others'), its pushes are let in after some refusals in a row, of
either kind, until one passes as it is. They are shortened, so that they count and do little harm:

- A push that is too long is let in after `gate_patience` refusals, or after `gate_again` if it is far too long. It is
  shortened to the longest that passes, so it does no more harm than a good push. A cluster whose pushes grow from one
  to the next is not let in.
- A push that is turned round is let in after `gate_again` refusals. It is shortened to half its length at most, and so
  far that all turned pushes together are at most a tenth as long in the round's average as what passes. So even a
  cluster that is always turned takes no more than a tenth from what the others say. A cluster whose pushes are turned
  now and then has good ones in between.

Shortened pushes do not change what counts as usual: else a broken cluster would raise it.

An empty push (nothing was learned) has neither length nor direction: it passes, and does not change what counts as
usual.

`trusting` (sync, async) lets all in. `printed` (di_ps) is section 4.2 of the paper as it is printed: E = (G - mean) /
std is refused above beta max(recent E), and every push moves mean and std, refused or not. The paper is silent on what
the averages begin with: here with the first push's norm and 0, and while the deviation is 0 nobody has a score.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import GateState, Offer, PushId, RefusedRow

STD_FLOOR = 0.1
"""Least standard deviation of x: without it the gate is the narrower the better training goes."""
MEMORY = 50
"""Number of accepted pushes that have a say in what is usual."""
RECENT = 100
"""Number of scores that count as recent to `printed`."""
FAR = math.log(4.0)
"""Logarithm of the ratio to what is usual above which a push is far too long; one of a cold inner optimizer was 1.8
times as long.
"""
GROWN = math.log(1.5)
"""Logarithm of the ratio to the shortest push since it grew last, above which a push that is too long grows."""
LITTLE = 0.1
"""Largest length of turned pushes that are let in, in a round's average, as a part of what passes."""
HALF = 0.5
"""Largest part of its length that such a push keeps, however short it is."""
ROWS = 32
"""Number of clusters whose refusals are remembered: those that were refused last."""
_LONGEST2 = 1e150
"""Bound of a push's squared norm: no push of 32 bit floats exceeds it, and below it no sum here overflows."""

Products = Mapping[tuple[PushId, PushId], float]
"""Products <D, D'> of each two finite pushes of a round, under one of the two orders of their names."""


@dataclass(frozen=True, slots=True)
class MeasuredPush:
    """Staged push with the scalar products that followers measured, summed over all shards.

    Attributes:
        offer: Offer of the push, as its cluster made it.
        staleness: Number of versions by which the newest one is ahead of the push's base.
        finite: Whether none of its elements is a NaN or infinite.
        momentum: Scalar product <D, m> with the momentum m of the newest version.
        norm2: Squared norm <D, D>.
    """

    offer: Offer
    staleness: int
    finite: bool
    momentum: float
    norm2: float

    @property
    def name(self) -> PushId:
        return self.offer.push

    @property
    def norm(self) -> float:
        return math.sqrt(self.norm2)

    @property
    def lean(self) -> float:
        """Scalar product of the push with the momentum, divided by the push's norm; 0.0 for an empty push."""
        lean = self.momentum / self.norm if self.norm2 else 0.0
        return lean if math.isfinite(lean) else 0.0

    @property
    def usable(self) -> bool:
        """Whether the push is finite and not too long to compute with."""
        return self.finite and 0.0 <= self.norm2 < _LONGEST2


@dataclass(frozen=True, slots=True)
class Sifted:
    """A gate's decision on the pushes of a round.

    Attributes:
        rejected: Reason for each rejected push, by name.
        gate: Statistics of the gate, this round included.
        warning: Words to warn the user with; "" for none.
        parts: Fraction of its length to which a push that is let in is shortened, by name.
    """

    rejected: Mapping[PushId, str]
    gate: GateState
    warning: str = ""
    parts: Mapping[PushId, float] = field(default_factory=dict)


class Gate(Protocol):
    """Function that decides which of a round's finite pushes to accept; it gets them in the order of their names."""

    def __call__(
        self, pushes: Sequence[MeasuredPush], products: Products, gate: GateState, settings: OuterSettings
    ) -> Sifted: ...


def dot(ones: Sequence[MeasuredPush], others: Sequence[MeasuredPush], products: Products) -> float:
    """Returns the scalar product of the sum of `ones` with the sum of `others`."""
    return math.fsum(product(one, other, products) for one in ones for other in others)


def product(one: MeasuredPush, other: MeasuredPush, products: Products) -> float:
    """Returns the scalar product of two pushes; of a push with itself it is the square of its norm."""
    if one.name == other.name:
        return one.norm2
    found = products.get((one.name, other.name), products.get((other.name, one.name)))
    assert found is not None, f"nobody has told the product of {one.name} and {other.name}"
    return found


# ------------------------------------------------------------------------------------------------ robust


def careful(pushes: Sequence[MeasuredPush], products: Products, gate: GateState, settings: OuterSettings) -> Sifted:
    """Rejects pushes that are too long or point the wrong way; if a cluster's have been rejected for long, accepts them
    shortened.
    """
    over = _too_long(pushes, gate, settings)
    lengths = {
        push.name: math.exp(-over[push.name])
        for push in pushes
        if push.name in over and _has_waited(push, _patience(push, gate, settings), over, gate)
    }
    too_long = {push.name: _words(push, gate, settings) for push in pushes if push.name in over.keys() - lengths.keys()}
    rest = [_shortened(push, lengths.get(push.name, 1.0)) for push in pushes if push.name not in too_long]
    scaled = {(a, b): lengths.get(a, 1.0) * lengths.get(b, 1.0) * value for (a, b), value in products.items()}
    turned = _turned_round(rest, scaled, settings.gate_cosine)
    passing = [push for push in rest if push.name not in turned]
    enough = [push for push in rest if push.name in turned and _has_waited(push, settings.gate_again, over, gate)]
    little = _little(enough, passing, scaled, settings)
    rejected = too_long | {name: words for name, words in turned.items() if name not in little}
    parts = {push.name: lengths[push.name] for push in passing if push.name in lengths}
    parts |= {name: lengths.get(name, 1.0) * part for name, part in little.items()}
    warnings = [
        f"{name} is shortened to {part:.3f} of its length: {'turned round' if name in little else 'too long'}, as it "
        "was before"
        for name, part in parts.items()
    ]
    whole = [push for push in passing if push.name not in lengths]
    in_a_row = 0 if whole else gate.in_a_row + len(over)
    if in_a_row >= settings.gate_again:
        warnings.append(f"{in_a_row} pushes in a row were too long: the gate learns anew what is usual")
        return Sifted(rejected, GateState(), "; ".join(warnings), parts)
    rows = _rows(pushes, over, turned, gate)
    return Sifted(rejected, replace(_learned(gate, whole), in_a_row=in_a_row, rows=rows), "; ".join(warnings), parts)


def _has_waited(push: MeasuredPush, wait: int, over: Collection[PushId], gate: GateState) -> bool:
    """Returns whether to accept a push because enough pushes of its cluster in a row were rejected and they do not
    grow.
    """
    row = _row(push, gate)
    return row is not None and row.times >= wait and not _grows(push, row, over, gate)


def _grows(push: MeasuredPush, row: RefusedRow, over: Collection[PushId], gate: GateState) -> bool:
    return push.name in over and _size(push, gate) > row.size + GROWN


def _patience(push: MeasuredPush, gate: GateState, settings: OuterSettings) -> int:
    """Returns how many pushes of a cluster in a row must be rejected as too long before one is accepted, shortened."""
    return settings.gate_again if _size(push, gate) - gate.mean > FAR else settings.gate_patience


def _row(push: MeasuredPush, gate: GateState) -> RefusedRow | None:
    return next((row for row in gate.rows if row.cluster == push.name.incarnation.cluster), None)


def _rows(
    pushes: Sequence[MeasuredPush], over: Collection[PushId], turned: Collection[PushId], gate: GateState
) -> tuple[RefusedRow, ...]:
    """Returns the counts of rejections in a row by cluster, updated: counted on for pushes that did not pass as they
    are, dropped for those that did.
    """
    rows = {row.cluster: row for row in gate.rows}
    for push in pushes:
        if not push.norm2:
            continue
        cluster, size = push.name.incarnation.cluster, _size(push, gate)
        row = rows.pop(cluster, None)
        if push.name not in over and push.name not in turned:
            continue
        if row is None:
            rows[cluster] = RefusedRow(cluster, 1, size)
        elif _grows(push, row, over, gate):
            rows[cluster] = replace(row, size=size)
        else:
            rows[cluster] = RefusedRow(cluster, row.times + 1, min(row.size, size))
    return tuple(rows.values())[-ROWS:]


def share(push: MeasuredPush, settings: OuterSettings) -> float:
    """Returns the weight of a push before weights are scaled to a sum of 1 (T_j r_j in judging.py)."""
    discount = settings.discount_stale and settings.policy != "di_ps"
    return push.offer.samples * ((1 + push.staleness) ** -0.5 if discount else 1.0)


def _little(
    turned: Sequence[MeasuredPush], passing: Sequence[MeasuredPush], products: Products, settings: OuterSettings
) -> dict[PushId, float]:
    """Returns the factors by which to shorten these pushes that point the wrong way; none if the accepted pushes cancel
    out.
    """
    shares = [(push, share(push, settings)) for push in passing]
    said = math.sqrt(max(0.0, math.fsum(v * w * product(a, b, products) for a, v in shares for b, w in shares)))
    if not said:
        return {}
    most = LITTLE * said / max(1, len(turned))
    lengths = {push.name: share(push, settings) * push.norm for push in turned}
    return {name: most / max(length, most / HALF) for name, length in lengths.items()}


def _shortened(push: MeasuredPush, part: float) -> MeasuredPush:
    return replace(push, momentum=part * push.momentum, norm2=part * part * push.norm2) if part < 1.0 else push


def _size(push: MeasuredPush, gate: GateState) -> float:
    """Returns x: the logarithm of a push's norm, scaled to one inner step and to the usual number of samples in a step,
    if it had fewer.

    Steps of fewer samples are noisier: n goes by the root of H / B at most. So a cluster whose ranks have left is no
    outlier. One of more samples is not expected to be shorter, for an inner optimizer may make all steps of one length.
    """
    size = 0.5 * math.log(push.norm2) - 0.5 * math.log(max(1, push.offer.steps))
    return size + 0.5 * min(0.0, _batch(push) - gate.batch) if gate.count else size


def _batch(push: MeasuredPush) -> float:
    """Returns the logarithm of the number of samples in an inner step of the push."""
    return math.log(max(1, push.offer.samples) / max(1, push.offer.steps))


def _too_long(pushes: Sequence[MeasuredPush], gate: GateState, settings: OuterSettings) -> dict[PushId, float]:
    """Returns, for pushes that are too long, by how much their x (see `_size`) exceeds the limit."""
    if gate.count < settings.gate_warmup:
        return {}
    most = gate.mean + settings.gate_limit * _std(gate)
    sizes = {push.name: _size(push, gate) for push in pushes if push.norm2}
    return {name: size - most for name, size in sizes.items() if size > most}


def _std(gate: GateState) -> float:
    return max(math.sqrt(gate.variance), STD_FLOOR)


def _words(push: MeasuredPush, gate: GateState, settings: OuterSettings) -> str:
    """Returns the reason, in words, for which a push is rejected as too long."""
    z = (_size(push, gate) - gate.mean) / _std(gate)
    return (
        f"its norm {push.norm:.4g} over {push.offer.steps} steps is {z:.1f} standard deviations above what is usual "
        f"(at most {settings.gate_limit:g})"
    )


def _turned_round(pushes: Sequence[MeasuredPush], products: Products, least: float) -> dict[PushId, str]:
    rejected: dict[PushId, str] = {}
    standing = [push for push in pushes if push.norm2]
    while len(standing) > 1:
        cosines = {push.name: _with_the_others(push, standing, products) for push in standing}
        # A momentum of which nothing is known excuses nobody, but of two it cannot tell which one is wrong.
        against = [push for push in standing if push.lean < 0 or (push.lean == 0 and len(standing) > 2)]
        suspects = [push for push in against if cosines[push.name] < least]
        if not suspects:
            break
        # By name last, so that equal pushes are told apart in the same way by whoever leads.
        worst = min(suspects, key=lambda push: (cosines[push.name], push.lean, push.name))
        others = [push for push in standing if push.name != worst.name]
        if len(others) == 1 and worst.lean == others[0].lean:
            break  # nobody can tell which of the two is wrong
        rejected[worst.name] = (
            f"its cosine with the sum of the round's other pushes ({len(others)}) is {cosines[worst.name]:.3f} (at "
            f"least {least:g})" + (", and it is against the momentum" if worst.lean < 0 else "")
        )
        standing = others
    return rejected


def _with_the_others(push: MeasuredPush, standing: Sequence[MeasuredPush], products: Products) -> float:
    """Returns the cosine between a push and the sum of the others; 1.0 if that sum is 0."""
    others = [other for other in standing if other.name != push.name]
    square = dot(others, others, products)
    # Divided one by one, since the product of two very small norms would be 0; and a cosine is never below -1.
    return max(-1.0, dot([push], others, products) / push.norm / math.sqrt(square)) if square > 0 else 1.0


def _learned(gate: GateState, accepted: Sequence[MeasuredPush]) -> GateState:
    """Returns the gate's statistics after these accepted pushes: plain averages at first, moving ones later."""
    for push in accepted:
        if push.norm2:
            count = gate.count + 1
            weight = max(1 / count, 1 / MEMORY)
            ahead = _size(push, gate) - gate.mean
            gate = replace(
                gate,
                count=count,
                mean=gate.mean + weight * ahead,
                variance=(1 - weight) * (gate.variance + weight * ahead * ahead),
                batch=gate.batch + weight * (_batch(push) - gate.batch),
            )
    return gate


# ------------------------------------------------------------------------------------------------ the others


def trusting(pushes: Sequence[MeasuredPush], products: Products, gate: GateState, settings: OuterSettings) -> Sifted:
    """Rejects no push: the gate of policies without one."""
    return Sifted({}, gate)


def printed(pushes: Sequence[MeasuredPush], products: Products, gate: GateState, settings: OuterSettings) -> Sifted:
    """Rejects pushes by the Di-PS paper's penalty, literally, but with the norm over all shards instead of the sum of
    the shards' norms.
    """
    rejected: dict[PushId, str] = {}
    std, largest, scores = math.sqrt(gate.variance), max(gate.scores, default=math.inf), list(gate.scores)
    for push in pushes:
        if not std:
            continue
        score = (push.norm - gate.mean) / std
        if score > settings.di_ps_beta * largest:
            rejected[push.name] = (
                f"its score {score:.3g} (norm {push.norm:.4g}) is above {settings.di_ps_beta:g} times the largest "
                f"recent one, {largest:.3g}"
            )
        else:
            scores.append(score)
    count, mean, variance, alpha = gate.count, gate.mean, gate.variance, settings.di_ps_alpha
    for push in pushes:
        mean = alpha * push.norm + (1 - alpha) * mean if count else push.norm
        variance = (1 - alpha) * variance + alpha * (push.norm - mean) ** 2
        count += 1
    in_a_row = 0 if len(rejected) < len(pushes) else gate.in_a_row + len(rejected)
    return Sifted(rejected, GateState(count, mean, variance, in_a_row, tuple(scores[-RECENT:])))


GATES: Mapping[str, Gate] = {"robust": careful, "sync": trusting, "async": trusting, "di_ps": printed}
"""Gates by policy."""
