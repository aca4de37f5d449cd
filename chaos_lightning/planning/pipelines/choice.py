"""Chooses how a job goes on after a loss: by the candidate that trains most samples until the next loss.

Theory of operation. Losses come to n devices as a Poisson process. If each device is lost at rate r, and losses take g
devices at once on average, the next loss is at tau ~ Exp(n r / g). A candidate that first pauses for t seconds and then
trains T samples per second has trained

    T E[max(0, tau - t)] = T exp(-n r t / g) / (n r / g)

samples by then. With probability q that loss takes the last owner of some layer. Then the job restarts from a
checkpoint, which is worth R times as much as going on. A candidate that throws away v samples (a restart) has lost them
for certain. Divided by tau's mean, which is the same for all candidates, this is a candidate's *value*, in samples/s:

    value = T exp(-n r t / g) ((1 - q) + q R) - v n r / g

Where lost devices come back, at rate a in all, a plan lasts until the next loss or return, whichever is first: a place
that is filled again needs no other plan. Then n r / g + a stands for n r / g, and q counts only where a loss is first:
it is multiplied by (n r / g) / (n r / g + a).

The greatest value is chosen. What goes on without moving anything is left only for something that is better by more
than a threshold, so that a plan does not flutter when devices are slow now and then; or to seat newcomers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from chaos_lightning.planning.quantities import HOUR_S

KINDS = KEEP, FILL, MOVE, RESTART = "keep", "fill", "move", "restart"
"""Kinds of candidates: go on with what is there, seat newcomers, move layers, or go back to a checkpoint."""

THRESHOLD = 0.02
"""Fraction by which a change has to be better where nothing is lost, as when devices are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """Possible way for a job to go on, with its costs and the policy that proposes it."""

    policy: str
    """Policy that proposes it."""
    kind: str
    step_s: float
    samples: int
    """Samples of one step."""
    transition_s: float = 0.0
    """Seconds from the decision until work goes on."""
    redo_s: float = 0.0
    """Seconds of the open step that are done again: it is run again as a whole, so half of it on average."""
    risk: float = 0.0
    """Probability that the next loss takes the last owner of some layer."""
    devices: int = 0
    """Number of devices that compute."""
    lacks: str = ""
    """Reason why the candidate cannot run: what does not fit into memory, where and by how much, or which link is
    missing; "": it can run.
    """
    void_samples: float = 0.0
    """Committed samples that are trained again."""
    about: str = ""
    """Plan in words."""
    plan: Any = None
    """`PipelinePlan`, or a formation of equal devices."""
    value: float = math.nan
    """Value in samples/s (see the module); `choose` fills it in."""

    @property
    def throughput(self) -> float:
        """Samples per second while the candidate trains."""
        return self.samples / self.step_s

    @property
    def pause_s(self) -> float:
        """Seconds until training has caught up with the point at which the loss struck."""
        return self.transition_s + self.redo_s

    @property
    def fits(self) -> bool:
        return not self.lacks

    def __str__(self) -> str:
        fit = self.lacks or f"step {self.step_s:.3g} s, pause {self.pause_s:.3g} s, risk {self.risk:.2%}"
        return f"{self.policy}: {self.kind}, {self.about}: {fit}, value {self.value:.4g}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the candidate as JSON values."""
        return {
            "policy": self.policy,
            "kind": self.kind,
            "step_s": self.step_s,
            "transition_s": self.transition_s,
            "redo_s": self.redo_s,
            "risk": self.risk,
            "value": None if math.isnan(self.value) else self.value,
            "devices": self.devices,
            "lacks": self.lacks,
            "void_samples": self.void_samples,
            "about": self.about,
            "plan": None if self.plan is None else self.plan.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision: the candidates, the chosen one, and the reason in words."""

    candidates: tuple[PlanCandidate, ...]
    chosen: PlanCandidate | None
    """Chosen candidate; None: no plan fits."""
    reason: str
    failed: tuple[tuple[str, str], ...] = ()
    """Policies that raised an error, with its text."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the decision as JSON values."""
        return {
            "candidates": [c.to_dict() for c in self.candidates],
            "chosen": None if self.chosen is None else self.candidates.index(self.chosen),
            "reason": self.reason,
            "failed": [list(pair) for pair in self.failed],
        }

    def __str__(self) -> str:
        rows = [f"{'* ' if c is self.chosen else '  '}{c}" for c in self.candidates]
        return "\n".join([self.reason, *rows, *(f"  {who} raised: {what}" for who, what in self.failed)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Facts and rules by which candidates are compared: rates of losses and returns, the worth of a restart, a
    threshold.
    """

    rate: float = 0.0
    """Losses per second of the whole fleet: n r / g."""
    returns: float = 0.0
    """Devices that come back per second: a."""
    restart_worth: float = 0.0
    """Value of a restart as a fraction of the value of going on: R, 0 to 1."""
    with_risk: bool = True
    """Whether the chance counts that the next loss is fatal."""
    threshold: float = 0.0
    """Fraction by which another candidate has to be better than to keep the plan."""

    def value(self, c: PlanCandidate) -> float:
        """Returns a candidate's value: the expected samples that it trains until the next loss, per second."""
        changes = self.rate + self.returns
        risk = c.risk * self.rate / changes if self.with_risk and changes else 0.0
        safe = 1 - risk * (1 - self.restart_worth)
        return c.throughput * math.exp(-changes * c.pause_s) * safe - c.void_samples * changes


def restart_worth(rate: float, lost_s: float) -> float:
    """Returns the worth of a restart relative to going on (0 to 1): the share of the mean time between losses that is
    left after `lost_s` seconds of lost training.
    """
    return max(0.0, 1.0 - rate * lost_s)


def choose(candidates: Iterable[PlanCandidate], outlook: Outlook, failed: tuple[tuple[str, str], ...] = ()) -> Decision:
    """Returns the decision for the candidate of the greatest value; ties go to the one with most devices, then to the
    first.

    Args:
        candidates: Candidates in the order in which ties are broken.
        outlook: Rate of losses, and other facts that count.
        failed: Policies that raised an error, with its text.
    """
    # A way to go on is compared once, even if several policies propose it in other words.
    found: tuple[PlanCandidate, ...] = ()
    for c in candidates:
        valued = replace(c, value=outlook.value(c))
        if not any(replace(valued, policy=x.policy, about=x.about) == x for x in found):
            found += (valued,)
    fitting = [c for c in found if c.fits]
    if not fitting:
        least = "; ".join(f"{c.policy}: {c.lacks}" for c in found) or "no policy has one"
        return Decision(found, None, f"no plan fits: {least}", failed)
    kept = max((c for c in fitting if c.kind == KEEP), key=_order, default=None)
    best = max(fitting, key=_order)
    if kept is None or best is kept:
        return Decision(found, best, _why(best, fitting, outlook), failed)
    worth = [c for c in fitting if c.value > kept.value * (1 + outlook.threshold) or _seats_more(c, kept)]
    if worth:
        best = max(worth, key=_order)
        return Decision(found, best, _why(best, fitting, outlook), failed)
    reason = (
        f"{kept.kind} by {kept.policy}: to {best.kind} would bring {_more(best.value, kept.value)}, "
        f"which is within the threshold of {outlook.threshold:.1%}"
    )
    return Decision(found, kept, reason, failed)


def _order(c: PlanCandidate) -> tuple[float, int]:
    """Returns the sort key of a candidate: its value, then its number of devices."""
    return (c.value, c.devices)


def _seats_more(c: PlanCandidate, kept: PlanCandidate) -> bool:
    """Returns whether the candidate gives places to more devices without lowering the value of the plan that is
    kept.
    """
    return c.kind == FILL and c.devices > kept.devices and c.value >= kept.value


def _more(value: float, other: float) -> str:
    return f"{value / other - 1:.1%} more samples" if other > 0 else "samples at all"


def _long(seconds: float) -> str:
    return f"{seconds / HOUR_S:.3g} hours" if seconds >= HOUR_S else f"{seconds:.3g} s"


def _why(best: PlanCandidate, fitting: list[PlanCandidate], outlook: Outlook) -> str:
    changes, what = outlook.rate + outlook.returns, "loss or return" if outlook.returns else "loss"
    until = f"until the next {what}, in {_long(1 / changes)} on average" if changes else "while nothing is lost"
    others = [c for c in fitting if c is not best]
    if not others:
        return f"{best.kind} by {best.policy}: nothing else fits"
    # Another kind of way says more than a further plan of the same kind.
    second = max(others, key=lambda c: (c.kind != best.kind, c.value))
    more = _more(best.value, second.value)
    return f"{best.kind} by {best.policy}: {more} than to {second.kind} by {second.policy} {until}"
