"""Computes from step times what a change of a job costs its members; measures nothing itself.

All times are seconds, steps are numbered by the job, and a step's duration is the time between two commits of one
member. `exposed` is the definition of benchmarks/primitives; controls go through the same function.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Series = Mapping[str, Mapping[int, float]]
"""Durations in seconds by member and step."""


@dataclass(frozen=True)
class Block:
    """Steps that an event or a control may affect, and the undisturbed steps that they are compared with.

    Attributes:
        steps: Numbers of the steps that are charged, ascending.
        ruled: Steps up to this one are compared with the median before, later ones with the median after.
        before: Numbers of undisturbed steps before the first.
        after: Numbers of undisturbed steps after the last.
    """

    steps: tuple[int, ...]
    ruled: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.steps or not self.before or not self.after:
            raise ValueError(f"steps, before and after must name at least one step each; given {self}")
        if self.before[-1] >= self.steps[0] or self.after[0] <= self.steps[-1]:
            raise ValueError(f"before must end before the steps begin, after begin when they are over; given {self}")


@dataclass(frozen=True)
class Exposure:
    """Delays of the steps of one block, in seconds; each field but `middle` is the worst over the members.

    Attributes:
        total: The sum over all charged steps of duration - usual; a shorter step makes up for a longer one, as it does
            for training.
        middle: `total` of the median member: apart from `total` where some are affected more than others.
        longest: The largest duration - usual of a single charged step.
        against_before: `total` with the median before in place of the usual one throughout.
        against_after: `total` with the median after throughout.
        against_slower: `total` with the greater of both medians throughout.
        usual_before: Median step before the change, of the member with the largest one.
        usual_after: Median step after the change, of the member with the largest one.
        steps: Number of charged steps.
    """

    total: float
    middle: float
    longest: float
    against_before: float
    against_after: float
    against_slower: float
    usual_before: float
    usual_after: float
    steps: int


def exposed(series: Series, members: Collection[str], block: Block) -> Exposure:
    """Returns the delays of a block's steps for these members.

    Raises:
        KeyError: A step's duration is missing; names the member and the step.
    """
    found = []
    for member in members:
        durations = series[member]
        missing = [s for s in (*block.before, *block.steps, *block.after) if s not in durations]
        if missing:
            raise KeyError(f"{member} reported no duration of step {missing[0]}")
        before = statistics.median(durations[s] for s in block.before)
        after = statistics.median(durations[s] for s in block.after)
        spent = [durations[s] for s in block.steps]
        beyond = [d - (before if s <= block.ruled else after) for s, d in zip(block.steps, spent, strict=True)]
        whole, count = sum(spent), len(spent)
        found.append(
            Exposure(
                total=sum(beyond),
                middle=sum(beyond),
                longest=max(beyond),
                against_before=whole - count * before,
                against_after=whole - count * after,
                against_slower=whole - count * max(before, after),
                usual_before=before,
                usual_after=after,
                steps=count,
            )
        )
    names = ("total", "longest", "against_before", "against_after", "against_slower", "usual_before", "usual_after")
    worst = {name: max(getattr(e, name) for e in found) for name in names}
    return Exposure(**worst, middle=statistics.median(e.middle for e in found), steps=len(block.steps))


def block_of(steps: Collection[int], ruled: int, width: int) -> Block:
    """Returns the block of an event, to be compared with `width` steps before its first and after its last step."""
    ordered = tuple(sorted(steps))
    first, last = ordered[0], ordered[-1]
    return Block(ordered, ruled, tuple(range(first - width, first)), tuple(range(last + 1, last + 1 + width)))


def control_of(event: Block, stretch: tuple[int, int], width: int, rng: random.Random) -> Block:
    """Returns a control block with the same form as an event's, at a random place among undisturbed steps.

    As many steps as the event's, in a row, of which as many count as "up to the change"; the same width of medians.

    Args:
        event: Block of the event that the control is compared with.
        stretch: First and last undisturbed step.
        width: Number of steps of which each median is taken.
        rng: Random numbers that choose the place.

    Raises:
        ValueError: The stretch is too short.
    """
    count = len(event.steps)
    first, last = stretch[0] + width, stretch[1] - width - count + 1
    if last < first:
        raise ValueError(
            f"a control of {count} steps with {width} on either side needs {count + 2 * width} undisturbed ones; "
            f"steps {stretch[0]} to {stretch[1]} are {stretch[1] - stretch[0] + 1}"
        )
    start = rng.randint(first, last)
    split = sum(s <= event.ruled for s in event.steps)
    return block_of(range(start, start + count), start + split - 1, width)


def charged(requested: int, ruled: int, *, settled: int, stood: int = -1) -> tuple[int, ...]:
    """Returns the numbers of the steps that a change may affect.

    The step in which it was asked for, all up to the step whose header carried it and two more (the first one of the
    new view, and the next one, in which links are given up that only the old view had), and on until one step after the
    last trace of it. A new link stands for a while before a view takes it in: from one step after it stood (`stood`) to
    two before the header nothing happens, and these are not charged.

    Args:
        requested: The step under way when the change was asked for.
        ruled: The step whose header carried it.
        settled: The step in which its last trace was seen: a link was gone, a process had closed.
        stood: The step by whose end a new link stood at both ends; -1 where none is made.
    """
    last = max(ruled + 2, settled + 1)
    steps = set(range(requested, last + 1))
    if stood >= 0:
        steps -= set(range(max(requested, stood) + 2, ruled - 1))
    return tuple(sorted(steps))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns a confidence interval of the median from order statistics, without an assumption about the distribution.

    The k-th least and the k-th greatest value, with the largest k for which a fair coin, thrown once a value, shows
    fewer than k heads with a probability of at most (1 - confidence) / 2. Of too few values: the least and greatest.

    Raises:
        ValueError: No values.
    """
    if not values:
        raise ValueError("the interval of no values: expected at least one")
    ordered, count = sorted(values), len(values)
    below, k = 0.0, 0
    while k < count // 2:
        below += math.comb(count, k) / 2**count
        if below > (1 - confidence) / 2:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[count - k]
