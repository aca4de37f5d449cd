"""Checks which member committed what in a job: training must not fork, regress, repeat or drop samples.

Theory of operation. A *history* is what the members claim to have committed, nothing else: no view of the engine's
inner state, no code shared with it. Headers name their predecessor's hash, so the claims form a tree; the longest
branch of one run is its *chain*. Each function checks one family of rules on plain values and returns what is wrong,
in words; an empty list means that the history given shows nothing wrong, so feed it all there is. The audit of real
logs and the simulator use the same functions.

A header that only its dying committer knew may be replaced by another one for the same slot (its contributors'
gradients are reduced again): that is no fork, provided that none who committed it did anything more in that life.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.observe.spans import Span, Spans, intersect, merge, overlaps, size, subtract, words

Stream = tuple[str, int]
"""Order of samples in one pass over it: (stream, epoch)."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Log entry of one member that it committed a slot; lists of commits keep the order of each member's log."""

    member: str
    seq: int
    step: int
    kind: str
    header: str
    prev: str
    view: tuple[int, int] = (0, 0)
    contributors: tuple[str, ...] = ()
    used: Mapping[Stream, Spans] = field(default_factory=dict)
    """Samples that this member itself used in the slot."""
    ledger: Mapping[Stream, Spans] = field(default_factory=dict)
    """Positions that all members have used so far, as the header says."""
    t: float = 0.0
    micro_batches: Spans = ()
    """Micro-batches of the slot, where layers lie at several members."""
    coverage: tuple[tuple[int, int, Spans], ...] = ()
    """Micro-batches that this member's sums held in runs of layers, as (first, end, micro-batches)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Contradiction between log entries of members, or violation of a rule; `rule` is a word to group problems by."""

    rule: str
    text: str
    member: str = ""
    """Member whose log shows the problem, or lacks what it should say."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(slots=True)
class JobRun:
    """One run of a job: the tree of headers that grew from one first slot, and its longest branch (the chain)."""

    headers: dict[str, Commit]
    """One of the claims about each header, by hash."""
    commits: list[Commit]
    chain: list[str]
    """Hashes of the longest branch, oldest first."""

    began: float = field(init=False)
    ended: float = field(init=False)
    """Times of the first and of the last commit, wall clock, s."""

    def __post_init__(self) -> None:
        self.began, self.ended = min(c.t for c in self.commits), max(c.t for c in self.commits)

    @property
    def lost_branches(self) -> list[str]:
        """Hashes of the headers that are not on the chain."""
        kept = set(self.chain)
        return [h for h in self.headers if h not in kept]

    @property
    def last_slots(self) -> dict[str, int]:
        """Last slot of the chain that each member contributed to."""
        return {member: self.headers[h].seq for h in self.chain for member in self.headers[h].contributors}


def runs(commits: Sequence[Commit]) -> list[JobRun]:
    """Divides commits into runs, oldest first.

    A run starts at a header whose predecessor nobody committed. First headers that overlap in time belong to one run
    (they are rivals for its first slot), later ones to a job that went on from a checkpoint.
    """
    headers: dict[str, Commit] = {}
    for commit in commits:
        headers.setdefault(commit.header, commit)
    root_of: dict[str, str] = {}

    def root(header: str) -> str:
        path: list[str] = []
        at = header
        while (
            at not in root_of and headers[at].prev in headers and headers[at].prev != at and len(path) <= len(headers)
        ):
            path.append(at)
            at = headers[at].prev
        found = root_of.setdefault(at, at)
        for passed in path:
            root_of[passed] = found
        return found

    groups: dict[str, list[Commit]] = defaultdict(list)
    for commit in commits:
        groups[root(commit.header)].append(commit)
    ordered = sorted(groups.values(), key=lambda g: min(c.t for c in g))
    merged: list[list[Commit]] = []
    latest = float("-inf")
    for group in ordered:
        begin, end = min(c.t for c in group), max(c.t for c in group)
        if merged and begin <= latest:
            merged[-1].extend(group)
        else:
            merged.append(list(group))
        latest = max(latest, end)
    return [_run(group) for group in merged]


def _run(commits: list[Commit]) -> JobRun:
    headers: dict[str, Commit] = {}
    newest: dict[str, float] = {}
    for commit in commits:
        headers.setdefault(commit.header, commit)
        newest[commit.header] = max(newest.get(commit.header, commit.t), commit.t)
    # Rivals for the last slot: the redone one has the newer view.
    head = max(headers, key=lambda h: (headers[h].seq, headers[h].view, newest[h]))
    chain: list[str] = []
    at: str | None = head
    while at is not None and at in headers and at not in chain[-1:]:
        chain.append(at)
        if len(chain) > len(headers):
            break  # hashes in a circle: check_chain reports it
        at = headers[at].prev
    return JobRun(headers, commits, chain[::-1])


# ------------------------------------------------------------------------------------------------ order and forks


def check_chain(run: JobRun, *, genesis: str = "") -> Iterator[Problem]:
    """Checks that the chain has no gap: slots count up by one, steps by one per step slot, views never fall.

    Args:
        run: The run.
        genesis: Hash that the first header must name as predecessor; empty: any.
    """
    first = run.headers[run.chain[0]]
    if first.seq != 1 or (genesis and first.prev != genesis):
        yield Problem(
            "gap", f"the chain begins at slot {first.seq} whose predecessor {first.prev or '(none)'} is in no log"
        )
    if len(set(run.chain)) != len(run.chain):
        yield Problem("order", "headers name each other as predecessors in a circle")
        return
    for before, after in zip(run.chain, run.chain[1:], strict=False):
        a, b = run.headers[before], run.headers[after]
        grown = 1 if b.kind == "step" else 0
        if b.seq != a.seq + 1:
            yield Problem("order", f"slot {b.seq} ({after}) follows slot {a.seq} ({before})")
        if b.step != a.step + grown:
            yield Problem("order", f"slot {b.seq} is step {b.step} after step {a.step}, kind {b.kind}")
        if b.view < a.view:
            yield Problem("order", f"slot {b.seq} has view {_v(b.view)} after view {_v(a.view)}")


def check_forks(run: JobRun) -> Iterator[Problem]:
    """Checks that a member that committed a header beside the chain committed nothing after it."""
    by_member: dict[str, list[Commit]] = defaultdict(list)
    for commit in run.commits:
        by_member[commit.member].append(commit)
    parents = {c.prev for c in run.headers.values()}
    last = run.last_slots
    for header in run.lost_branches:
        lost = run.headers[header]
        if header in parents:
            yield Problem("fork", f"slot {lost.seq} has a second header {header} that others were built on")
            continue
        rival = next((h for h in run.chain if run.headers[h].seq == lost.seq), "")
        if not rival:
            # The headers between the chain and it may be in a log that is not here.
            rule = "fork" if lost.prev in run.headers else "gap"
            yield Problem(rule, f"slot {lost.seq} header {header} stands on {lost.prev}, beside the chain")
            continue
        for member, own in by_member.items():
            claimed = [i for i, c in enumerate(own) if c.header == header]
            if not claimed:
                continue
            if claimed[-1] != len(own) - 1:
                after = own[claimed[-1] + 1]
                yield Problem(
                    "fork",
                    f"{member} committed slot {lost.seq} as {header}, the others as {rival}, and went on to "
                    f"slot {after.seq}",
                )
            elif last.get(member, -1) >= lost.seq:
                yield Problem(
                    "fork",
                    f"{member} committed slot {lost.seq} as {header} but is counted as contributor of {rival} and "
                    f"later ones up to slot {last[member]}",
                )


def check_members(run: JobRun, entries: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """Checks that each member's own commits are consecutive, without gap or repetition.

    Args:
        run: The run.
        entries: Hash of the header at which each member entered (a joiner's state); its first commit must stand on
            that.
    """
    last: dict[str, Commit] = {}
    for commit in run.commits:
        before = last.get(commit.member)
        last[commit.member] = commit
        if before is None:
            entered = (entries or {}).get(commit.member, "")
            if entered and commit.prev != entered and commit.header != entered:
                yield Problem(
                    "entry",
                    f"{commit.member} took over the state at {entered}, but its first slot {commit.seq} "
                    f"stands on {commit.prev}",
                    commit.member,
                )
        elif commit.header == before.header:
            yield Problem("repeat", f"{commit.member} committed slot {commit.seq} ({commit.header}) twice")
        elif commit.seq <= before.seq:
            yield Problem("regress", f"{commit.member} committed slot {commit.seq} after slot {before.seq}")
        elif commit.prev != before.header:
            yield Problem(
                "order",
                f"{commit.member} committed slot {commit.seq} on {commit.prev}, but its own last header was "
                f"{before.header} (slot {before.seq})",
                commit.member,
            )


def check_contributors(run: JobRun, views: Mapping[tuple[int, int], Collection[str]]) -> Iterator[Problem]:
    """Checks that a slot's contributors are exactly the members of its view, the same in all logs, and that nobody else
    commits it (protocol.md 1).

    Args:
        run: The run.
        views: Member ids by view number; views that are not given are not checked.
    """
    for header in run.chain:
        slot = run.headers[header]
        kept = slot.kind == "boundary" and not slot.contributors and slot.seq > 1
        expected = None if kept else views.get(slot.view)  # a job founded from a state in a file stands on such a slot
        if expected is not None and set(expected) != set(slot.contributors):
            yield Problem(
                "contributors",
                f"slot {slot.seq} under view {_v(slot.view)} was built by "
                f"{', '.join(slot.contributors) or 'nobody'}; the view's members are {', '.join(expected)}",
            )
        if len(set(slot.contributors)) != len(slot.contributors):
            yield Problem("contributors", f"slot {slot.seq} counts a contributor twice: {slot.contributors}")
    insiders: dict[int, frozenset[str]] = {}
    """Sets of contributors that were made, by the identity of the tuple."""
    for commit in run.commits:
        claims = run.headers[commit.header]
        if (commit.seq, commit.prev, commit.contributors) != (claims.seq, claims.prev, claims.contributors):
            yield Problem("fork", f"{commit.member} and {claims.member} tell header {commit.header} differently")
        if id(commit.contributors) not in insiders:
            insiders[id(commit.contributors)] = frozenset(commit.contributors)
        if commit.contributors and commit.member not in insiders[id(commit.contributors)]:
            yield Problem("outsider", f"{commit.member} committed slot {commit.seq} without being a member of its view")


def check_commits_of_all(run: JobRun, gone: Collection[str]) -> Iterator[Problem]:
    """Checks that each contributor to a slot also committed it, unless the member ended at that slot.

    A member cannot contribute to slot s+1 without having committed s, so its end excuses one slot: its last.

    Args:
        run: The run.
        gone: Members that died, were frozen or fenced at some time.
    """
    claims: dict[str, set[str]] = defaultdict(set)
    for commit in run.commits:
        claims[commit.header].add(commit.member)
    last = run.last_slots
    for header in run.chain[:-1]:  # the last slot may still be on its way
        slot = run.headers[header]
        for member in slot.contributors:
            if member in claims[header]:
                continue
            if last[member] > slot.seq:
                yield Problem("skip", f"{member} went on past slot {slot.seq} without committing it", member)
            elif member not in gone:
                text = f"{member} contributed to slot {slot.seq}, never committed it, and did not die"
                yield Problem("missing", text, member)


# ------------------------------------------------------------------------------------------------ samples


@dataclass(slots=True)
class Usage:
    """Samples that a run used of one stream in one epoch."""

    start: Spans = ()
    """Positions used before this run, which went on from a checkpoint."""
    used: Spans = ()
    """Positions used by this run, merged."""
    count: int = 0

    def add(self, said: Spans | list[Span], grown: Spans | None, silent: bool) -> Iterator[tuple[str, str]]:
        """Takes in one more slot; yields its problems as (rule, text).

        Args:
            said: Positions that its members say they used.
            grown: Positions that its ledger has beyond that of the slot before; None: it has no ledger.
            silent: Whether some member did not say what it used.
        """
        if twice := overlaps(said):
            yield "twice", f"positions {words(twice)} were used by two members"
        fresh = merge(said)
        again = intersect(fresh, merge([*self.start, *self.used]))
        if again:
            yield "twice", f"positions {words(again)} had been used before"
        if grown is not None:
            if (stray := subtract(fresh, grown)) and not again:
                yield "ledger", f"positions {words(stray)} were used but not entered as spent"
            if (dropped := subtract(grown, fresh)) and not silent:
                yield "ledger", f"positions {words(dropped)} are spent but nobody used them"
            fresh = merge([*fresh, *grown])
        self.count += size(fresh)
        self.used = merge([*self.used, *fresh])


def check_samples(
    run: JobRun, *, start: Mapping[Stream, Spans] | None = None
) -> tuple[dict[Stream, Usage], list[Problem]]:
    """Checks that every position was used at most once per epoch, and that the headers' ledger lists exactly the used
    positions (protocol.md 25).

    Args:
        run: The run.
        start: Ledger the run began with; None: taken from the first header (its ledger without its own slot's use).

    Returns:
        Use per (stream, epoch), and the problems.
    """
    found: list[Problem] = []
    own: dict[str, list[Commit]] = defaultdict(list)
    for commit in run.commits:
        own[commit.header].append(commit)
    usage: dict[Stream, Usage] = {}
    before: dict[Stream, Spans] = dict(start or {})
    for index, header in enumerate(run.chain):
        slot = run.headers[header]
        said: dict[Stream, list[Span]] = defaultdict(list)
        speakers = set()
        for commit in own[header]:
            speakers.add(commit.member)
            for key, spans in commit.used.items():
                said[key].extend(spans)
        silent = [m for m in slot.contributors if m not in speakers]
        if index == 0 and start is None:
            before = {k: subtract(v, merge(said.get(k, ()))) if not silent else () for k, v in slot.ledger.items()}
        # Headers of a job that goes on from a checkpoint do not repeat what was spent before.
        ledger = {k: merge([*v, *(start or {}).get(k, ())]) for k, v in slot.ledger.items()}
        for key in set(said) | set(ledger):
            use = usage.setdefault(key, Usage(start=merge(before.get(key, ()))))
            label = f"slot {slot.seq}, epoch {key[1]}" + (f", stream {key[0]!r}" if key[0] else "")
            grown = subtract(ledger.get(key, ()), merge(before.get(key, ()))) if ledger else None
            found += [Problem(rule, f"{label}: {text}") for rule, text in use.add(said[key], grown, bool(silent))]
        for key, spans in before.items():
            if key in ledger and subtract(merge(spans), ledger[key]):
                found.append(Problem("ledger", f"slot {slot.seq}: the ledger of epoch {key[1]} lost positions"))
        if ledger:
            before = dict(ledger)
    return usage, found


def check_complete(usage: Mapping[Stream, Usage], lengths: Mapping[Stream, int]) -> Iterator[Problem]:
    """Checks that each epoch that has a successor in its stream has no holes and the announced length."""
    for (stream, epoch), use in usage.items():
        if not any(s == stream and e > epoch for s, e in usage):
            continue
        whole = merge([*use.start, *use.used])
        length = lengths.get((stream, epoch), whole[-1][1] if whole else 0)
        holes = subtract(((0, length),), whole) if length else ()
        if holes:
            yield Problem(
                "dropped", f"epoch {epoch} of stream {stream!r} ended without positions {words(holes)} of {length}"
            )


# ------------------------------------------------------------------------------------------------ state


def check_hashes(claims: Iterable[tuple[str, str, str]]) -> tuple[int, list[Problem]]:
    """Checks that all members had the same state after the same header.

    Args:
        claims: Claims as (header, member, state hash).

    Returns:
        Number of headers at which at least two members could be compared, and the problems.
    """
    by_header: dict[str, dict[str, str]] = defaultdict(dict)
    found: list[Problem] = []
    for header, member, value in claims:
        known = by_header[header].setdefault(member, value)
        if known != value:
            found.append(Problem("state", f"{member} tells two hashes of its state at {header}: {known} and {value}"))
    compared = {header.partition("/")[0] for header, hashes in by_header.items() if len(hashes) > 1}  # "HEADER/PART"
    for header, hashes in by_header.items():
        if len(set(hashes.values())) > 1:
            rows = ", ".join(f"{m}={h}" for m, h in sorted(hashes.items()))
            found.append(Problem("state", f"states differ at header {header}: {rows}"))
    return len(compared), found


def check_stable(run: JobRun, left: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Checks that nothing written for the outside (such as a checkpoint) holds a slot that was redone (protocol.md 4).

    Args:
        run: The run.
        left: Everything that was written for the outside, as (what, header hash).
    """
    lost = set(run.lost_branches)
    for what, header in left:
        if header in lost:
            yield Problem("unstable", f"{what} holds slot {run.headers[header].seq} ({header}), which was redone")


def _v(view: tuple[int, int]) -> str:
    return f"{view[0]}.{view[1]}"
