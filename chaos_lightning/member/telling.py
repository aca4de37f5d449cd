"""Composes a member's console lines about its job: who joins, dies and leaves, its rank, and a newcomer's progress.

`lines` compares two views; `Teller` (machine/console.py) says what it gives.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping

from chaos_lightning.machine.units import amount, duration, part
from chaos_lightning.planning.batch import read_split
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import Progress, View

PROGRESS_EVERY_S = 5.0
_SHARES_TOLD = 8
"""Number of members whose shares one line names."""
_batches_told = False
"""Whether this process has said what becomes of the global batch; it says so once."""


def lines(before: View | None, after: View, me: str, *, carried: bool, replays: Collection[str] = ()) -> list[str]:
    """Returns console lines about a change of views; none if the same members are in it, in the same order.

    Args:
        before: The view that this member stood in; None: it has just come in.
        after: The one that it stands in now.
        me: This member's id.
        carried: A header carried the change: who is missing was let go. Else a recovery made it.
        replays: Newcomers that came in by replay; the others came in by a pause.
    """
    new = after.ids()
    if not new:
        return ["all members leave"]
    old = before.ids() if before is not None else tuple(m for m in new if m != me or me not in after.joiners)
    size = f"{len(new)} member{'s' if len(new) != 1 else ''}"
    if (batch := global_batch(after)) != (global_batch(before) if before is not None else 0):
        size += f", {_samples(batch)} a step"
    said = [f"{m} {'left' if carried else _lost(m, after.reason)}: {size}" for m in old if m not in new]
    for m in new:
        if m not in old:
            who = "I join" if m == me else f"{m} joins"
            said.append(f"{who} by {'replay' if m in replays else 'pause'}: {size}")
    place = (new.index(me), len(new)) if me in new else None
    if place and (before is None or me not in old or place != (old.index(me), len(old))):
        said.append(f"I am rank {place[0]} of {place[1]}")
    return [*said, *_split_lines(before, after)]


def _split_lines(before: View | None, after: View) -> list[str]:
    """Returns a line on who does how much of a batch of fixed size, if the members' shares differ from those before."""
    split = read_split(after.batch, len(after.members))
    if split is None or (before is not None and before.batch == after.batch and before.ids() == after.ids()):
        return []
    samples, rule = split.samples(), split.rule
    idle = sum(not share for share in samples)
    most = ", ".join(map(str, samples[:_SHARES_TOLD])) + (", ..." if len(samples) > _SHARES_TOLD else "")
    line = f"a step takes {_samples(rule.samples)}, whoever is there; by rank: {most}"
    if idle:
        units = (
            f"{rule.units} micro-batch{'' if rule.units == 1 else 'es'}" if rule.micro_batch else _samples(rule.units)
        )
        few = rule.units < len(samples)
        why = f"a step has {units} to divide" if few else "a share would hold up the others"
        line += f"; idle: {idle} of {len(samples)} members, since {why}"
    return [line]


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


def global_batch(view: View) -> int:
    """Returns the number of samples in a full step of all members of a view.

    With pipelines a step has a number of micro-batches of its own, and a batch of fixed size is what it is, whoever the
    members are.
    """
    if (split := read_split(view.batch, len(view.members))) is not None:
        return split.rule.samples
    if view.pipelines:
        plan = ViewPipelines.from_json(view.pipelines).plan
        return max((m.quota for m in view.members), default=0) * plan.micro_batches
    return sum(m.quota for m in view.members) * view.accumulate


def batch_line(before: View | None, after: View) -> str:
    """Returns a line on the batch, and on what changes its rule, if this change of views changes the global batch; else
    "".

    Each member takes batches of the size that its loader has (protocol.md 10, 25), so that a step has all of theirs.
    """
    if after.pipelines or after.batch:
        return ""
    now = global_batch(after)
    old = before.members if before is not None else [m for m in after.members if m.id not in after.joiners]
    then = sum(m.quota for m in old) * after.accumulate
    if now == then:
        return ""
    return (
        f"batch=member: a step takes {now} samples now, {then} before; batch=fixed keeps the batch, lr_scaling scales "
        "the rate"
    )


def _lost(member: str, reason: str) -> str:
    """Describes what became of a member that a recovery left out, as the view's reason states it."""
    told = re.search(rf"(?:^|; ){re.escape(member)}(?:: | is put out: )([^;]*)", reason)
    return f"is out ({told[1]})" if told else "is out"


def progress_line(now: Progress) -> str:
    """Returns the line about a newcomer's progress in fetching or replaying the state."""
    if now.phase == "replay":
        return f"replaying what the others train: {now.lag} step{'s' if now.lag != 1 else ''} behind"
    sources = ", ".join(s.member for s in now.sources)
    rate = f" at {amount(now.rate_bps / 8)}/s" if now.rate_bps > 0 else ""
    left = f", about {now.remaining_s:.0f} s left" if math.isfinite(now.remaining_s) else ""
    done = part(now.done_nbytes, now.total_nbytes)
    return f"fetching the training state: {done}{' from ' + sources if sources else ''}{rate}{left}"


def fetched_line(by_source: Mapping[str, int], skipped: int, seconds: float) -> str:
    """Returns the line about a state that a newcomer has fetched."""
    here = f", {amount(skipped)} were here" if skipped else ""
    sources = ", ".join(source for source, nbytes in by_source.items() if nbytes)
    came = f"{amount(sum(by_source.values()))}{' from ' + sources if sources else ''}"
    return f"the training state is here: {came} in {duration(seconds)}{here}"


def batch_once(before: View | None, after: View) -> list[str]:
    """Returns `batch_line` for the first change of the batch in this process, and nothing for later ones."""
    global _batches_told
    if _batches_told or not (line := batch_line(before, after)):
        return []
    _batches_told = True
    return [line]


class ProgressLines:
    """Lines about a newcomer's progress, at most one every few seconds."""

    def __init__(self) -> None:
        self._told_at = 0.0

    def due(self, now: Progress) -> list[str]:
        """Returns the line about this progress, or nothing if the last one was too recent."""
        if time.monotonic() - self._told_at < PROGRESS_EVERY_S:
            return []
        self._told_at = time.monotonic()
        return [progress_line(now)]
