"""Records what the scheduler knows of each process, and finds differences that show that a process belongs to another
job.

Theory of operation. A `Peer` is one incarnation of a training process, from its welcome until a decided view excluded
it or it was released. Newcomers are STANDBY (beyond max_nodes), LINKING, READY, or OBSERVING (membership/learners.py);
a MEMBER is in the latest decided view; a LEAVER was let go by a decided view and waits until all others have entered
it; a REPORTER tells what it knows of a lost chain (membership/rebuilding.py).
Ids are `name~number` and never reused: the numbers of a term start at (term - 1) * 1,000,000, so that a restarted
scheduler, whose term is higher, reissues none of those that its predecessor gave to newcomers in no stored view.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chaos_lightning.planning.batch import FIXED, MEMBER
from chaos_lightning.planning.pipelines.request import read_request
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Entered,
    Hello,
    Kept,
    Member,
    Progress,
    Report,
    Settings,
    Span,
    View,
    ViewId,
    is_name,
)

INCARNATIONS_PER_TERM = 1_000_000
NAMED_DIFFERENCES = 3
"""Largest number of differences that a refusal names."""
_MISSING = "(missing)"
_HASH = re.compile("[0-9a-f]{16,}")

FIT = "fit"
"""Name in the fingerprint of the number of the job's fit in the member's script, from 1 on."""

UNKNOWN_LEARNERS = (-1, ("?",))
"""List of learners that a member has from a scheduler that is gone."""


class Standing(enum.StrEnum):
    STANDBY = "standby"
    LINKING = "linking"
    READY = "ready"
    OBSERVING = "observing"
    MEMBER = "member"
    LEAVER = "leaver"
    REPORTER = "reporter"


NEWCOMER = (Standing.LINKING, Standing.READY, Standing.OBSERVING)


@dataclass(frozen=True, slots=True)
class Tempo:
    """Speed of a member as its heartbeats report it; 0: unknown.

    Attributes:
        step_s: Median of its latest steps.
        speed: Speed at which it computes, beside what its request for pipelines foresees.
        view: View that it stood in then.
        between_s: Median time from the last unit of one of these steps to the first unit of the next.
        sample_s: Median time that it computes for one sample of a batch of fixed size.
    """

    step_s: float = 0.0
    speed: float = 0.0
    view: ViewId = NO_VIEW
    between_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True)
class Peer:
    """Record of what the scheduler knows of one incarnation of a member."""

    member: Member
    standing: Standing
    conn: int | None = None
    heard: float = 0.0
    closed_at: float = 0.0
    """Time at which the member's control stream closed; meaningful while `conn` is None."""
    known: bool = False
    """Whether the member told its position to this scheduler (False only after a scheduler's restart)."""
    entered: ViewId = NO_VIEW
    chain: str = ""
    """Chain of a reporter."""
    workers: int = 1
    """Number of workers of the member's node."""
    seq: int = 0
    step: int = 0
    tempo: Tempo = Tempo()
    """Speed of the member, as it says."""
    head: str = ""
    parts: tuple[Span, ...] = ()
    """Parts of the training state that the member holds, as it said last."""
    leaving: str = ""
    finished: bool = False
    dead: str = ""
    """Reason why the member is taken for dead; a word from it clears this until a view excludes it."""
    proven: bool = False
    """Whether the member is dead beyond doubt, or was waited for long enough: its state counts no more (protocol.md
    12a).
    """
    condemned: str = ""
    """Reason why the member must go although it may live; nothing clears this."""
    report: Report | None = None
    said: JobTerms | None = None
    """Terms that the member said of itself as a newcomer."""
    differs: str = ""
    """Words on how this newcomer's program differs from the job, none of whose members answers: it waits for these to
    be found.
    """
    down: dict[str, str] = field(default_factory=dict)
    """Peers to which the member says its link is closed, with the evidence."""
    silent: dict[str, str] = field(default_factory=dict)
    """Peers whose link the member gave up because nothing came any more, with the evidence: no sign of the peer's
    death.
    """
    up: set[str] = field(default_factory=set)
    linked: tuple[str, ...] | None = None
    """Ids in the OpenLinks last sent on this stream; None: none was sent."""
    neighbours: tuple[str, ...] = ()
    asked: dict[str, float] = field(default_factory=dict)
    """Times (s) since which this newcomer has been asked for a link to each of these."""
    misses: set[str] = field(default_factory=set)
    """Peers that were told that this newcomer does not reach them."""
    stranded: bool = False
    """Whether no link leads to this newcomer: it takes no place until one does, and there is one."""
    no_replay: str = ""
    """Reason why the newcomer cannot come in by replay."""
    way: str = ""
    """Way by which the newcomer comes in, "replay" or "pause", once chosen."""
    caught_up: bool = False
    observes_since: float = 0.0
    learners: tuple[int, tuple[str, ...]] = (-1, ())
    """List of learners that the member was told last, and on which stream."""
    progress: Progress | None = None
    """Progress of the newcomer's transfer, as it told last."""
    kept: Kept | None = None
    """Newest state of the job that lies on the member's machine, as it said in its hello."""
    told_of_kept: bool = False
    keeps_since: float | None = None
    """Time (s) at which the member was let go as one of the last: it may be writing the state down."""
    told: tuple[int, str] = (-1, "")
    """Stream and text by which the peer was told last for what it waits."""

    @property
    def id(self) -> str:
        return self.member.id

    @property
    def alive(self) -> bool:
        return not self.dead and not self.condemned

    @property
    def loaded(self) -> bool:
        """Whether this member holds any part of the training state."""
        return bool(self.parts)

    def stands(self, position: Entered) -> None:
        """Copies the position in the training run that the member reports."""
        self.known = True
        self.entered, self.seq, self.step = position.view, position.seq, position.step
        self.head, self.parts = position.head, position.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """Properties of the job's first member that every member must share."""

    name: str
    package: str
    accumulate: int
    fingerprint: tuple[tuple[str, str], ...]
    pipelines: str = ""
    """Pipelines as the hello asks for them; members must agree in the terms of that."""
    batch: str = ""
    """Batch of a step, as in the hello."""

    @classmethod
    def of(cls, hello: Hello) -> JobTerms:
        return cls(
            name=hello.name,
            package=hello.package,
            accumulate=hello.accumulate,
            fingerprint=hello.fingerprint,
            pipelines=hello.pipelines,
            batch=hello.batch,
        )

    @property
    def digest(self) -> str:
        """Hash of the job's terms: equal for members that run the same program in the same fit."""
        terms = read_request(self.pipelines).terms if self.pipelines else ()
        words = repr((self.package, self.accumulate, sorted(self.fingerprint), *terms, *filter(None, (self.batch,))))
        return hashlib.sha256(words.encode()).hexdigest()


def refusal(hello: Hello, settings: Settings) -> str:
    """Returns in words why this process can never be in this job, even with the same program; "" if it can be."""
    if hello.job != settings.job:
        return f"this scheduler serves job {settings.job!r}, {hello.name} asks for {hello.job!r}: check the job's name"
    if wrong := is_name(hello.name):
        return f"a member called {hello.name!r}: {wrong}; set another name, or leave the default (host name and rank)"
    return ""


def difference(hello: Hello | JobTerms, reference: JobTerms | None) -> str:
    """Returns in words, with both values, how this process's terms differ from the job's; "" if they do not."""
    if reference is None:
        return ""
    pairs: list[tuple[str, str, str]] = [
        ("package version", hello.package, reference.package),
        ("accumulate", str(hello.accumulate), str(reference.accumulate)),
        ("batch", _rule_in_words(hello.batch), _rule_in_words(reference.batch)),
    ]
    mine, theirs = dict(hello.fingerprint), dict(reference.fingerprint)
    pairs += [(k, mine.get(k, _MISSING), theirs.get(k, _MISSING)) for k in sorted({*mine, *theirs})]
    pairs += _of_pipelines(hello.pipelines, reference.pipelines)
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if not differing:
        return ""
    if mine.get(FIT, "1") != theirs.get(FIT, "1"):  # all else that differs may follow from it
        return (
            f"{hello.name} begins fit {mine.get(FIT, 1)} of this job in its script, the job (from {reference.name}) is "
            f"in fit {theirs.get(FIT, 1)}: fits of different numbers may train on different samples, as folds do. Give "
            "each fit a job name of its own (job=...), and skip those that are over; a member that is restarted then "
            "joins the fit that runs"
        )
    # A hash says that something differs; what it is, other entries tell.
    named = [pair for pair in differing if not any(_HASH.fullmatch(value) for value in pair[1:])] or differing
    named.sort(key=lambda pair: _MISSING in pair)  # another optimizer has other settings, but has another name first
    (first, given, expected), *others = named[:NAMED_DIFFERENCES]
    words = [f"{first} of {hello.name} is {given}, the job's (from {reference.name}) is {expected}"]
    words += [f"{name} is {its} instead of {the_jobs}" for name, its, the_jobs in others]
    if len(named) > NAMED_DIFFERENCES:
        words.append(f"{len(named) - NAMED_DIFFERENCES} more differ")
    return f"{'; '.join(words)}: start all members with the same script, package and settings"


def _rule_in_words(batch: str) -> str:
    """Returns a batch as it stands in the setting."""
    return f"{FIXED}:{batch}" if batch else MEMBER


def _of_pipelines(given: str, expected: str) -> list[tuple[str, str, str]]:
    """Returns (name, value, the job's value) of each pipeline property in which members must agree; none if the
    requests are equal.
    """
    if given == expected:
        return []
    mine, theirs = (read_request(text) if text else None for text in (given, expected))
    if mine is None or theirs is None:
        return [("pipelines", str(mine or "none"), str(theirs or "none"))]
    return [(name, a, b) for (name, a), (_, b) in zip(mine.terms, theirs.terms, strict=True)]


def is_named(view: View, member: str) -> bool:
    """Returns whether the member is in this view, or is let go by it while its parts of the state are still needed
    (P9).
    """
    return view.find(member) is not None or any(m.id == member for m in view.leaving)


def short(chain: str) -> str:
    """Returns a chain's id, shortened for display."""
    return chain[:8]


_LISTED, _OF_MORE = 16, 8


def listed(words: Iterable[str], between: str = ", ") -> str:
    """Joins these words to a list for people; of more than 16, names the first 8 and the number of the others."""
    found = list(words)
    if len(found) > _LISTED:
        found[_OF_MORE:] = [f"... and {len(found) - _OF_MORE} more"]
    return between.join(found)


Process = tuple[str, int, int]
"""Host, process id and start time, in ticks: what stays the same when a process joins again under another id."""


def process_of(said: Member | Hello) -> Process:
    """Returns the identity (host, pid, start) of a member's process, or of the process that sent a hello."""
    return said.host, said.pid, said.pid_start


def same_process(member: Member, hello: Hello) -> bool:
    """Returns whether this hello comes from the very process that this member is."""
    return bool(hello.pid) and process_of(member) == process_of(hello)


def first_incarnation(term: int, used: int) -> int:
    """Returns the lowest incarnation number that no id of this job has; `used`: the highest that is known to be
    taken.
    """
    return max(max(0, term - 1) * INCARNATIONS_PER_TERM, used) + 1


def placed(peers: Iterable[Peer]) -> list[Member]:
    """Returns those of these peers that count towards max_nodes; a newcomer that reaches no member does not."""
    inside = (*NEWCOMER, Standing.MEMBER)
    return [p.member for p in peers if p.alive and not p.leaving and not p.stranded and p.standing in inside]


def has_place(member: Member, peers: Mapping[str, Peer], settings: Settings) -> bool:
    """Returns whether the job can take this newcomer without exceeding max_nodes."""
    return bool(nodes.within([member], placed(peers.values()), settings.max_nodes))
