"""Divides a batch of fixed size among the members: the rule that the user chose, and who does how much of a step.

Theory of operation. Under `fixed:N` a step takes the same N samples whoever is there; under `fixed:N/B` these are cut
into N / B numbered micro-batches of exactly B. What is divided are *units*, numbered within the step: micro-batches of
B, or single samples where B is not given. A view has one share of the units for each member, in rank order, and member
i has the units that follow those of the members before it. So the positions of a step follow from the header before it,
and only who computes them follows from the view (docs/protocol.md, B1, B2).

Shares make all members end a step at the same time, as far as their measured time per sample tells: with s units at v
units a second a member takes s / v, and the largest of these is as small as whole units allow.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.errors import ConfigurationError, PlanError
from chaos_lightning.protocol.types import Span

MEMBER = "member"
"""Rule by which each member adds its own batch to every step."""
FIXED = "fixed"
UNSCALED = "none"
"""Value of the setting `lr_scaling` by which learning rates stay what the script sets."""
WORTH = 0.1
"""Share of a step's time that another split has to save before the members get it."""
MOST_SAMPLES = 1 << 31
LEAST_S = 1e-12
"""Least time, s, that a sample is taken to need, so that no speed is infinite."""
_RULE = re.compile(r"(\d{1,10})(?:/(\d{1,10}))?")
_LINEAR = re.compile(r"linear:([1-9]\d{0,5})")
_SPLIT = re.compile(r"([^:]*):(.*)")
_RUN = re.compile(r"(\d{1,10})(?:x(\d{1,10}))?")
"""Share of one member, or of several that follow each other."""
_EXPECTED = (
    "expected member (each member adds its own batch), fixed (the loader's batch size, whoever is there), fixed:N (N "
    "samples a step) or fixed:N/B (N samples in micro-batches of B)"
)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Batch of `samples` that every step takes, whoever is there.

    Attributes:
        samples: Samples of a step.
        micro_batch: Samples of each micro-batch; 0: each member cuts its share as its memory allows.
    """

    samples: int
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.samples}/{self.micro_batch}" if self.micro_batch else str(self.samples)

    @property
    def unit(self) -> int:
        """Samples of a unit, the least that is given to a member."""
        return self.micro_batch or 1

    @property
    def units(self) -> int:
        """Units of a step, if it is not the last one of an epoch."""
        return self.samples // self.unit

    def present(self, samples: int) -> int:
        """Returns the number of units of a step that has only so many samples left, of which the last may be short."""
        return -(-samples // self.unit)


def check_rule(text: str) -> str:
    """Returns in words what is wrong with a setting `batch`; "" if nothing is."""
    try:
        read_setting(text, 1)
    except ConfigurationError as error:
        return str(error)
    return ""


def check_scaling(text: str) -> str:
    """Returns in words what is wrong with a setting `lr_scaling`; "" if nothing is."""
    good = text == UNSCALED or _LINEAR.fullmatch(text)
    return (
        "" if good else f"expected {UNSCALED}, or linear:M0 with M0 the samples of a step that the rate was chosen for"
    )


def samples_of_rate(text: str) -> int:
    """Returns the samples of a step, M0, for which the learning rate was chosen, as a valid `lr_scaling` says; 0: rates
    are not scaled.
    """
    found = _LINEAR.fullmatch(text)
    return int(found[1]) if found is not None else 0


def read_setting(text: str, loader_batch: int) -> BatchRule | None:
    """Returns the rule that a setting `batch` names; None for `member`.

    Args:
        text: The setting.
        loader_batch: Batch size of the training loader, which `fixed` alone means.

    Raises:
        ConfigurationError: It is no such setting, N is 0, or N is no multiple of B. The text does not name the setting.
    """
    if text == MEMBER:
        return None
    kind, _, numbers = text.partition(":")
    found = _RULE.fullmatch(numbers or str(loader_batch))
    if kind != FIXED or found is None or (":" in text and not numbers):
        raise ConfigurationError(_EXPECTED)
    rule = BatchRule(int(found[1]), int(found[2] or 0))
    if not 1 <= rule.samples <= MOST_SAMPLES or found[2] == "0":
        raise ConfigurationError(f"expected N and B of 1 or more, N {MOST_SAMPLES} at most")
    if rule.micro_batch and rule.samples % rule.micro_batch:
        below = rule.samples // rule.micro_batch * rule.micro_batch
        near = [str(n) for n in (below, below + rule.micro_batch) if n]
        raise ConfigurationError(
            f"{rule.samples} samples are no whole number of micro-batches of {rule.micro_batch}; take N = "
            f"{' or '.join(near)}, or another B"
        )
    return rule


def read_rule(text: str) -> BatchRule | None:
    """Returns the rule that a hello or a view names; None for "", which is `member`.

    Raises:
        PlanError: The text names no rule.
    """
    if not text:
        return None
    found = _RULE.fullmatch(text)
    rule = BatchRule(int(found[1]), int(found[2] or 0)) if found is not None else None
    if rule is None or not 1 <= rule.samples <= MOST_SAMPLES or rule.samples % rule.unit or str(rule) != text:
        raise PlanError(f"batch {text[:99]!r} is no rule; expected N or N/B")
    return rule


@dataclass(frozen=True, slots=True)
class Split:
    """Division of a step's units among the members of a view.

    Attributes:
        rule: Batch of a step.
        shares: Units of each member, in rank order.
    """

    rule: BatchRule
    shares: tuple[int, ...]

    def __str__(self) -> str:
        runs = ((share, len(list(run))) for share, run in itertools.groupby(self.shares))
        return f"{self.rule}:{','.join(f'{share}x{count}' if count > 1 else str(share) for share, count in runs)}"

    def units(self, rank: int, present: int) -> Span:
        """Returns the numbers of a member's units in a step.

        Args:
            rank: The member's place in the view.
            present: Units that the step has; at an epoch's end fewer than the rule's, which are divided alike.
        """
        before = sum(self.shares[:rank])
        total = self.rule.units
        return before * present // total, (before + self.shares[rank]) * present // total

    def samples(self) -> tuple[int, ...]:
        """Returns the samples of each member in a whole step, in rank order."""
        return tuple(share * self.rule.unit for share in self.shares)


def read_split(text: str, members: int) -> Split | None:
    """Returns the split that a view names; None for "", where each member adds its own batch.

    Raises:
        PlanError: The text is no split of a batch among so many members.
    """
    if not text:
        return None
    found = _SPLIT.fullmatch(text)
    rule = read_rule(found[1]) if found is not None else None
    shares: list[int] = []
    for run in found[2].split(",") if found is not None and found[2] else ():
        read = _RUN.fullmatch(run)
        if read is None or len(shares) > members:
            raise PlanError(f"split {text[:99]!r} is none")
        shares += [int(read[1])] * min(int(read[2] or 1), members + 1)
    split = Split(rule, tuple(shares)) if rule is not None else None
    if split is None or len(shares) != members or sum(shares) != split.rule.units or str(split) != text:
        raise PlanError(f"split {text[:99]!r} does not divide a batch among {members} members")
    return split


def divided(units: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Divides units so that the member that takes longest ends as early as whole units allow.

    Args:
        units: Number of units.
        speeds: Units a second of each member, above 0.

    Returns:
        Units of each member; 0 for one that would hold up the others with a single one.
    """
    total = math.fsum(speeds)
    shares = [int(units * speed / total) for speed in speeds]
    # Units that rounding left over go, one by one, to the member that would end its next one first.
    queue = [((share + 1) / speed, rank) for rank, (share, speed) in enumerate(zip(shares, speeds, strict=True))]
    heapq.heapify(queue)
    for _ in range(units - sum(shares)):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def speeds_of(members: Iterable[str], seconds: Mapping[str, float]) -> list[float]:
    """Returns the speed of each member, in samples a second; of one that has told nothing the median of the others'.

    Args:
        members: Their ids.
        seconds: Measured seconds for a sample, by member; 0: not known.
    """
    told = {m: 1 / max(s, LEAST_S) for m, s in seconds.items() if s > 0}
    usual = statistics.median_high(told.values()) if told else 1.0
    return [told.get(m, usual) for m in members]


def span_of(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Returns the time after which all members have done their shares, in seconds for units a second."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def better(before: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Returns other shares of as many units if they shorten the step by `WORTH` or more; None if these stay."""
    shares = divided(sum(before), speeds)
    return shares if span_of(shares, speeds) <= (1 - WORTH) * span_of(before, speeds) else None
