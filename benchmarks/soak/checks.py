"""Checks a soak's journals for points 1 to 5 of docs/architecture.md, by code that shares nothing with the engine.

The journals (member.py) hold what each process saw from outside: which samples its data set handed out, which
header it then stood on, and a SHA-256 of its state. From the headers' hashes the chain is rebuilt; epochs are found by
counting samples, not by any ledger; states are compared at every header that two members told of.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]

WAKING_S = 5.0
"""A member that learns this long after its thaw, at most, that it is out was put out for having slept."""


@dataclass(frozen=True)
class Freeze:
    """A process that was stopped and continued; times by CLOCK_MONOTONIC, ns."""

    name: str
    pid: int
    start: int
    stop: int


@dataclass(frozen=True)
class Parting:
    """A cut of some members from all others that lasted long enough for the others to go on without them."""

    kind: str
    names: tuple[str, ...]
    start: int
    """CLOCK_MONOTONIC, ns, as is `stop`."""
    stop: int
    undecided: bool = False
    """These may have been put out, and need not have been: the run ended meanwhile, or a blink lasted for too long."""
    vouched_for: bool = False
    """A scheduler took over that never heard these. The others see their processes run on this machine, and wait for
    them for up to `hang_timeout_s`, which is longer than this lasts."""


@dataclass
class Verdict:
    """Violations by point of the contract, and how much was examined."""

    problems: dict[int, list[str]] = field(default_factory=lambda: {point: [] for point in range(1, 6)})
    looked_at: dict[str, int] = field(default_factory=dict)
    chain: list[str] = field(default_factory=list)
    headers: dict[str, Line] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """Samples used up to and including each header of the chain."""


def lines_of(path: Path) -> Iterator[Line]:
    """Yields the lines of a journal, without a last one that a kill cut short."""
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(text)


def read(folder: Path) -> dict[str, list[Line]]:
    """Returns the lines of each process's journal, by process ("name-pid")."""
    return {path.stem: list(lines_of(path)) for path in sorted(folder.glob("*.jsonl"))}


def check(
    journals: Mapping[str, Sequence[Line]],
    length: int,
    freezes: Sequence[Freeze] = (),
    killed: Collection[str] = (),
    partings: Sequence[Parting] = (),
) -> Verdict:
    """Checks one run's journals against all points of the contract.

    Args:
        journals: Lines of each process's journal, as `read` returns them.
        length: Number of samples in an epoch.
        freezes: Processes that the parent stopped for a time.
        killed: Processes ("name-pid") that were killed.
        partings: Cuts of members from all others by the parent.
    """
    verdict = Verdict()
    _chain(journals, verdict)
    _states(journals, verdict)
    _samples(journals, verdict, length)
    _fences(journals, verdict, freezes, killed, partings)
    _partings(verdict, partings)
    return verdict


def _told(journals: Mapping[str, Sequence[Line]]) -> list[tuple[str, Line]]:
    return [(source, x) for source, lines in journals.items() for x in lines if x["what"] in ("commit", "entered")]


def _chain(journals: Mapping[str, Sequence[Line]], verdict: Verdict) -> None:
    """Checks that headers form one chain (point 2) and that no committed step is lost (point 5)."""
    bad = verdict.problems[2]
    # Those who committed a header know whose samples are in it; newcomers may not.
    for source, line in sorted(_told(journals), key=lambda told: told[1]["what"] != "commit"):
        known = verdict.headers.setdefault(line["head"], line)
        fields = ("seq", "step", "prev", "who") if line["what"] == "commit" else ("seq", "step", "prev")
        if any(known[k] != line[k] for k in fields):
            bad.append(f"{source} tells header {line['head']} differently from others")
    if not verdict.headers:
        bad.append("nobody committed anything")
        return
    at: str | None = max(verdict.headers, key=lambda h: (verdict.headers[h]["seq"], -verdict.headers[h]["ns"]))
    while at in verdict.headers and len(verdict.chain) <= len(verdict.headers):
        verdict.chain.append(at)
        at = verdict.headers[at]["prev"]
    verdict.chain.reverse()
    first = verdict.headers[verdict.chain[0]]
    if first["seq"] > 1:
        bad.append(f"slot {first['seq']} stands on header {first['prev']}, which nobody wrote down")
    for one, other in itertools.pairwise(verdict.chain):
        a, b = verdict.headers[one], verdict.headers[other]
        grown = b["kind"] == "step"
        if (b["seq"], b["step"]) != (a["seq"] + 1, a["step"] + grown):
            bad.append(f"slot {a['seq']} (step {a['step']}) is followed by slot {b['seq']} (step {b['step']})")
    on_chain = set(verdict.chain)
    lost: set[str] = set()
    for source, lines in journals.items():
        mine = [x for x in lines if x["what"] in ("commit", "entered", "fenced")]
        for index, line in enumerate(mine):
            after = mine[index + 1]["what"] if index + 1 < len(mine) else "nothing"
            if line["what"] == "commit" and line["head"] not in on_chain and after == "commit":
                # Only a member whose life ended there may hold a header that the job does not know. One that slept
                # may have drawn its next samples before it hears that it is out.
                verdict.problems[5].append(f"{source} committed slot {line['seq']} as {line['head']}: the job lost it")
                lost.add(line["head"])
        for a, b in itertools.pairwise(x for x in mine if x["what"] in ("commit", "entered")):
            if b["what"] == "commit" and b["prev"] != a["head"]:
                bad.append(f"{source} went from slot {a['seq']} to slot {b['seq']} without what is between")
    verdict.looked_at["steps"] = sum(verdict.headers[h]["kind"] == "step" for h in verdict.chain)
    verdict.looked_at["steps lost"] = len(lost)
    verdict.looked_at["headers known to nobody but their dead"] = len(verdict.headers) - len(on_chain)


def _states(journals: Mapping[str, Sequence[Line]], verdict: Verdict) -> None:
    """Checks that all members have equal states (point 1), and that joiners got their donors' state (point 4)."""
    said: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"commit": set(), "entered": set()})
    tellers: dict[str, int] = defaultdict(int)
    for _, line in _told(journals):
        said[line["head"]][line["what"]].add(line["sha"])
        tellers[line["head"]] += 1
    compared = joins = 0
    for head, hashes in said.items():
        seq = verdict.headers[head]["seq"]
        compared += tellers[head] > 1
        if len(hashes["commit"]) > 1:
            verdict.problems[1].append(f"{len(hashes['commit'])} different states after slot {seq}")
        if hashes["entered"] and hashes["commit"]:
            joins += 1
            if hashes["entered"] != hashes["commit"]:
                verdict.problems[4].append(f"a joiner's state at slot {seq} is not its donors'")
    verdict.looked_at["headers with several states compared"] = compared
    verdict.looked_at["joins compared with donors"] = joins


def _samples(journals: Mapping[str, Sequence[Line]], verdict: Verdict, length: int) -> None:
    """Checks point 3: each epoch's committed steps use no sample twice, by the samples that data sets handed out."""
    bad = verdict.problems[3]
    drawn: dict[tuple[str, str], list[int]] = {}
    for lines in journals.values():
        for line in lines:
            if line["what"] == "draw":
                drawn[line["member"], line["prev"]] = line["indices"]
    seen: set[int] = set()
    total = 0
    for head in verdict.chain:
        header = verdict.headers[head]
        if header["kind"] == "step":
            fresh: list[int] = []
            for who, weight in header["who"] or ():
                indices = drawn.get((who, header["prev"]))
                if weight and indices is None:
                    bad.append(f"slot {header['seq']}: {who} contributed samples that it never drew")
                fresh += indices if weight and indices else []
            if len(seen) == length:
                seen = set()
            again = len(fresh) - len(set(fresh) - seen)
            if again:
                bad.append(f"slot {header['seq']}: {again} samples were used twice in one epoch")
            seen |= set(fresh)
            total += len(fresh)
        verdict.used[head] = total
    if len(seen) != length and verdict.chain:
        bad.append(f"training ended with {len(seen)} of {length} samples of the last epoch used")
    verdict.looked_at["samples"] = total


def _fences(
    journals: Mapping[str, Sequence[Line]],
    verdict: Verdict,
    freezes: Sequence[Freeze],
    killed: Collection[str],
    partings: Sequence[Parting],
) -> None:
    """Checks point 5: only members that were frozen or cut off were removed from the job, and each of them came
    back.
    """
    bad = verdict.problems[5]
    count = 0
    for source, lines in journals.items():
        name = source.rpartition("-")[0]
        hurt = [(f.start, f.stop) for f in freezes if f"{f.name}-{f.pid}" == source]
        hurt += [(p.start, p.stop) for p in partings if name in p.names]
        for index, line in enumerate(lines):
            if line["what"] != "fenced":
                continue
            count += 1
            # The member was put out between these two moments; the later one is its re-entry, which others may delay.
            earlier = [stop for start, stop in hurt if start <= line["ns"]]
            if not earlier or line["since"] - max(earlier) > WAKING_S * 1e9:
                bad.append(f"{source} was put out though nobody had frozen it or cut it off")
            back = any(x["what"] in ("entered", "refused") for x in lines[index + 1 :])
            if not back and source not in killed:
                bad.append(f"{source} was put out and did not come back")
    verdict.looked_at["members put out that came back"] = count


def _partings(verdict: Verdict, partings: Sequence[Parting]) -> None:
    """Checks point 5: while members are cut off, the others commit steps without them."""
    steps = [h for head in verdict.chain if (h := verdict.headers[head])["kind"] == "step"]
    went_on = excused = 0
    for one in (p for p in partings if not p.undecided):
        during = [h for h in steps if one.start < h["ns"] <= one.stop]
        without = [h for h in during if not {who.rpartition("~")[0] for who, _ in h["who"] or ()} & set(one.names)]
        went_on += bool(without)
        excused += not without and one.vouched_for
        words = f"{', '.join(one.names)} ({one.kind}, {(one.stop - one.start) / 1e9:.1f} s)"
        if without and during[-1] not in without:
            verdict.problems[5].append(f"a step with {words} was committed though it was cut off")
        elif not without and not one.vouched_for:
            verdict.problems[5].append(f"no step was committed without {words} while it was cut off")
    verdict.looked_at["graphs cut in two of which one side went on"] = went_on
    verdict.looked_at["members cut off from all that a new scheduler waited for"] = excused
