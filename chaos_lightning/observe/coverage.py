"""Judges jobs whose layers are spread over members: which micro-batches each layer's sums contain, and who got which
parts of the state.

Theory of operation (protocol.md P2, P3, P8). Each member says at a commit which micro-batches the slot had, and which
of them its sums held, by layers. Over all members these are disjoint, and together all micro-batches in each layer. It
also says which parts it owns in each view, and each part that it has got. A member that contributes to a step holds all
that it owns: it owned a part in the step before, or has got it since. As in `history.py` no code of the engine is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from chaos_lightning.observe.history import Commit, JobRun, Problem
from chaos_lightning.observe.spans import Spans, merge, overlaps, size, subtract, words


def covered(run: JobRun) -> tuple[int, int]:
    """Returns how many slots of a run have logs of the micro-batches summed per layer, and the number of layers."""
    told = [c for c in run.commits if c.micro_batches]
    layers = max((end for c in told for _, end, _ in c.coverage), default=0)
    return len({c.header for c in told} & set(run.chain)), layers


def check_coverage(run: JobRun) -> Iterator[Problem]:
    """Checks that the gradient sums of each layer contain each micro-batch of a slot exactly once."""
    layers = covered(run)[1]
    own: dict[str, list[Commit]] = defaultdict(list)
    for commit in run.commits:
        if commit.micro_batches:
            own[commit.header].append(commit)
    for header in run.chain:
        if told := own[header]:
            whole = {c.member for c in told} >= set(run.headers[header].contributors)
            yield from _check_slot(told, layers, whole=whole)


def _check_slot(told: Sequence[Commit], layers: int, *, whole: bool) -> Iterator[Problem]:
    first = told[0]
    for other in told[1:]:
        if other.micro_batches != first.micro_batches:
            yield Problem(
                "coverage",
                f"slot {first.seq} has micro-batches {words(first.micro_batches)} by {first.member}, and "
                f"{words(other.micro_batches)} by {other.member}",
            )
    rows = [row for commit in told for row in commit.coverage]
    cuts = sorted({0, layers, *(cut for start, end, _ in rows for cut in (start, end))})
    for start, end in pairwise(cuts):
        spans = [span for a, b, each in rows if a <= start < b for span in each]
        where = f"slot {first.seq}, layer{f's {start} to {end - 1}' if end - start > 1 else f' {start}'}: micro-batches"
        if twice := overlaps(spans):
            yield Problem("coverage", f"{where} {words(twice)} are in two sums")
        if foreign := subtract(merge(spans), first.micro_batches):
            yield Problem("coverage", f"{where} {words(foreign)} are none of this slot's")
        if whole and (missing := subtract(first.micro_batches, merge(spans))):
            yield Problem("coverage", f"{where} {words(missing)} are in no sum")


@dataclass(slots=True)
class PartsTold:
    """Parts of the state that one member logged as owned, pulled from others or read from a file, in the order of its
    log.
    """

    member: str
    founder: bool = False
    """Whether the member founded the job, so that it may have made what it owns."""
    joined: bool = False
    """Whether the member came into the running job."""
    pulled: int = 0
    """Number of parts that the member got from others."""
    problems: list[Problem] = field(default_factory=list)
    _owned: dict[tuple[int, int], Spans] = field(default_factory=dict)
    _held: Spans | None = None

    def enters(self, view: tuple[int, int], owns: Spans) -> None:
        """Notes a view to which the member belongs, and the parts that it owns in that view."""
        self._owned[view] = owns

    def gets(self, part: int) -> None:
        """Notes a part that the member pulled from others."""
        self.pulled += 1
        self.reads(((part, part + 1),))

    def reads(self, parts: Spans) -> None:
        """Notes parts that the member read from a file."""
        self._held = merge([*(self._held or ()), *parts])

    def steps(self, view: tuple[int, int], seq: int) -> None:
        """Notes a committed step to which the member contributed; reports a problem if it lacked a part that it owned
        in that view.
        """
        owns = self._owned.get(view)
        if owns is None:
            return
        lacking = subtract(owns, self._held or ())
        if lacking and not self.founder:
            self.problems.append(
                Problem(
                    "parts",
                    f"{self.member} contributed to slot {seq} and owned {size(lacking)} parts, {words(lacking)}, that "
                    "it had neither owned before nor got",
                    self.member,
                )
            )
        self._held, self.founder = owns, False
