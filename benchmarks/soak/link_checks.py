"""Checks that links return after a fault in a soak, by the members' logs of views and links.

Read are the lines of the event logs themselves: which view each member entered, over which links, and which of its
links it saw come and go. The views in their order give what views gave up and took in. A link *returned* when, after it
was mended, a view that has both its ends has the link, too, and both ends say that it stands. It has to within
`stand_s` of as many failures as it was hurt (docs/protocol.md: half a second, doubled each time, up to a minute), and
`SLACK_S` for dialling, measuring and the next header; unless an end leaves, freezes or is let in anew before, or the
link is hurt again.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.checks import Freeze, Line
from benchmarks.soak.links import PARTING, Hurt
from chaos_lightning.events.reader import read_events

Pair = frozenset[str]

SLACK_S = 15.0
FIRST_STAND_S, LONGEST_STAND_S = 0.5, 60.0


@dataclass(frozen=True)
class Seen:
    """One view, with the time at which its first member entered it."""

    ns: int
    """When the first of them did (CLOCK_MONOTONIC)."""
    members: tuple[str, ...]
    links: frozenset[Pair]


@dataclass
class LinkVerdict:
    """Counts of checked links and views, and the violations."""

    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Descriptions of links that stayed away, and of cut-off members that did not report what they wait for."""
    delays_s: list[float] = field(default_factory=list)
    """Seconds from a link's mending to its return, for each link that returned."""

    @property
    def median_delay_s(self) -> float:
        return statistics.median(self.delays_s) if self.delays_s else 0.0


def name_of(member: str) -> str:
    return member.rpartition("~")[0] or member


def read_lines(folder: Path) -> list[Line]:
    """Returns the events of all logs in the order of the monotonic clock."""
    found = [{**r.fields, "name": r.name, "mono": r.mono, "member": r.member} for r in read_events(folder)]
    return sorted(found, key=lambda line: float(line["mono"]))


def views_of(lines: Iterable[Line]) -> list[Seen]:
    """Returns all views that any member entered, in the order of their numbers."""
    found: dict[tuple[int, int], Seen] = {}
    for line in lines:
        if line["name"] != "view" or "links" not in line:
            continue  # the scheduler's word, which names no links
        term, _, number = str(line["id"]).partition(".")
        members = tuple(line["members"])
        pairs = line["links"] or itertools.combinations(members, 2)
        seen = Seen(int(line["mono"] * 1e9), members, frozenset(frozenset(p) for p in pairs))
        found.setdefault((int(term), int(number)), seen)
    return [found[number] for number in sorted(found)]


def changes_of(views: Sequence[Seen]) -> tuple[int, int]:
    """Returns (links that views removed, links that views added) between members of both the view and the one before
    it.
    """
    gone = come = 0
    for before, after in itertools.pairwise(views):
        both = set(before.members) & set(after.members)
        gone += len({p for p in before.links - after.links if p <= both})
        come += len({p for p in after.links - before.links if p <= both})
    return gone, come


def check_links(lines: Sequence[Line], hurts: Sequence[Hurt], freezes: Sequence[Freeze] = ()) -> LinkVerdict:
    """Checks for each link with a fault whether it returned.

    Args:
        lines: Events of all logs, as `read_lines` returns them.
        hurts: Faults of links that the parent caused.
        freezes: Processes that the parent stopped for a time.
    """
    verdict = LinkVerdict()
    views = views_of(lines)
    end_ns = max((int(x["mono"] * 1e9) for x in lines), default=0)
    verdict.counts["links that a view gave up"], verdict.counts["links that a view took in"] = changes_of(views)
    history = _History(views, lines, hurts, freezes, end_ns)
    results: dict[str, int] = {"returned": 0, "stayed away": 0, "undecided": 0}
    for hurt in hurts:
        for pair in hurt.pairs if hurt.stop and hurt.kind != "slow" else ():
            word, delay_s = history.became_of(pair, hurt)
            results[word] += 1
            if word == "returned":
                verdict.delays_s.append(delay_s)
            elif word == "stayed away":
                verdict.problems.append(f"{hurt.kind} of {'-'.join(sorted(pair))}: not back {delay_s:.1f} s after it")
    verdict.counts["mended links that returned"] = results["returned"]
    verdict.counts["mended links that were hurt again, or whose end left, before they had to"] = results["undecided"]
    verdict.counts["mended links that stayed away"] = results["stayed away"]
    _silent_parts(verdict, lines, hurts)
    return verdict


def _silent_parts(verdict: LinkVerdict, lines: Sequence[Line], hurts: Sequence[Hurt]) -> None:
    """Checks that members that are cut off report what they wait for, or report that they lost the scheduler, if they
    have not reported before that they lost it.
    """
    own = [x for x in lines if x.get("by", x.get("member")) == x.get("member")]
    schedulers = [x for x in own if x["name"] == "scheduler"]
    words = [*schedulers, *(x for x in own if x["name"] == "notice" and x.get("waiting"))]
    told = 0
    for hurt in (h for h in hurts if h.kind in PARTING and h.stop - h.start >= h.seconds * 0.95e9):
        sayers = {_sayer(x) for x in words if hurt.start < x["mono"] * 1e9 <= hurt.stop}
        last = {_sayer(x): str(x["state"]) for x in schedulers if x["mono"] * 1e9 <= hurt.start}  # lines are in order
        sayers |= {who for who, state in last.items() if state.startswith("lost")}
        told += len(sayers & set(hurt.part))
        for name in sorted(set(hurt.part) - sayers):
            verdict.problems.append(f"{name} was cut off ({hurt.kind}) and did not say what it waits for")
    verdict.counts["members cut off that said what they wait for"] = told


class _History:
    """Views and states of links over time."""

    def __init__(
        self,
        views: Sequence[Seen],
        lines: Iterable[Line],
        hurts: Sequence[Hurt],
        freezes: Sequence[Freeze],
        end_ns: int,
    ) -> None:
        self._views, self._hurts, self._freezes, self._end = views, hurts, freezes, end_ns
        # A view rules until a younger one does, whoever enters it first.
        self._times = list(itertools.accumulate((v.ns for v in views), max))
        self._words: dict[tuple[str, str], list[tuple[int, bool]]] = {}
        for line in lines:
            if line["name"] in ("link_up", "link_down"):
                key = (str(line.get("member", "")), str(line["peer"]))
                self._words.setdefault(key, []).append((int(line["mono"] * 1e9), line["name"] == "link_up"))

    def became_of(self, pair: Pair, hurt: Hurt) -> tuple[str, float]:
        """Returns what became of a link ("returned" | "stayed away" | "undecided"), and the seconds since its
        repair.
        """
        again = min((h.start for h in self._hurts if pair in h.pairs and h.start > hurt.start), default=self._end)
        frozen = min((f.start for f in self._freezes if f.name in pair and f.stop > hurt.stop), default=self._end)
        limit = min(again, self._end)
        for begin, end, ids in self._stretches(pair, hurt.stop, limit):
            back = self._back(frozenset(ids), begin, end)
            if back is not None:
                return "returned", (back - hurt.stop) / 1e9
            if min(end, frozen) - begin > self._allowed_s(pair, hurt.stop) * 1e9:
                return "stayed away", (end - hurt.stop) / 1e9
        return "undecided", 0.0

    def _allowed_s(self, pair: Pair, until: int) -> float:
        """Returns the seconds within which a link must return, by how often it or its ends had faults."""
        times = sum(h.start < until and pair in h.pairs and h.kind != "slow" for h in self._hurts)
        times += sum(f.start < until and f.name in pair for f in self._freezes)
        return min(LONGEST_STAND_S, FIRST_STAND_S * 2.0 ** max(0, times - 1)) + SLACK_S

    def _stretches(self, pair: Pair, start: int, stop: int) -> list[tuple[int, int, tuple[str, ...]]]:
        """Returns (from, to, ids) of the times in which views contained the same two members under these names."""
        found: list[tuple[int, int, tuple[str, ...]]] = []
        for view, begin, end in zip(self._views, self._times, [*self._times[1:], self._end], strict=True):
            ids = tuple(sorted(m for m in view.members if name_of(m) in pair))
            begin, end = max(begin, start), min(end, stop)
            if len(ids) != 2 or begin >= end:
                continue
            if found and found[-1][2] == ids and found[-1][1] >= begin:
                found[-1] = (found[-1][0], end, ids)
            else:
                found.append((begin, end, ids))
        return found

    def _back(self, ids: Pair, begin: int, end: int) -> int | None:
        """Returns the first time in an interval at which a view has the link and both ends report it open; None if
        never.
        """
        one, other = sorted(ids)
        words = (self._words.get((one, other), []), self._words.get((other, one), []))
        moments = {begin, *(t for w in words for t, _ in w), *self._times}
        for at in sorted(t for t in moments if begin <= t < end):
            place = bisect.bisect_right(self._times, at) - 1
            if place < 0 or ids not in self._views[place].links:
                continue
            last = [next((up for t, up in reversed(w) if t <= at), False) for w in words]
            if all(last):
                return at
        return None


def _sayer(line: Line) -> str:
    return name_of(str(line.get("member", "")))
