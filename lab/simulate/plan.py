"""Describes one run of a simulated job in data classes: its processes, its faults, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.membership.spreading import Spread
from chaos_lightning.protocol.types import Settings
from lab.simulate.training import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """Properties of one simulated process."""

    name: str
    host: str = "h0"
    quota: int = 1
    pace: float = 1.0
    """Factor by which its work takes longer than the program's mean duration."""
    replay: bool = False
    """Whether the process offers to come in by replay."""
    memory: bool = True
    """Whether the process has room for a copy of the state."""
    neighbours: tuple[str, ...] = ()
    """Names in its Hello; empty: all that it can reach."""
    script: str = "same"
    """Script that it runs; members must run the same."""
    after: str = ""
    """Name of the process in whose place it is started once that has ended; it offers the file that that one kept."""
    fits: int = 64
    """Samples that it computes at once, of a batch of fixed size."""
    paces: tuple[tuple[float, float], ...] = ()
    """Pairs (moment in virtual s, factor): from then on it computes its share of a batch of fixed size by this factor
    slower than usual.
    """
    parts_at: int = 0
    """Slot from which on its hyperparameters are others than the job's; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaying:
    """Conditions under which newcomers of a simulated job join by replay.

    Attributes:
        log_entries: Slots that each member's log holds.
        copy_s: Longest duration of copying one range of the state.
        log_s: Longest duration of copying a slot into the log.
        pull_s: Longest duration of one range's transfer, beyond the network's latency.
        apply_s: Mean duration of applying an entry.
        impure: Fraction of applied entries after which the state differs from the members', because a user vouched for
            a step that is no pure function.
        calm: Whether nothing goes wrong here: a newcomer that caught up must have nothing left to move when it is let
            in.
    """

    log_entries: int = 64
    copy_s: float = 0.008
    log_s: float = 0.0005
    pull_s: float = 0.0
    apply_s: float = 0.001
    impure: float = 0.0
    calm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault that happens at a given time or just before a given effect.

    Attributes:
        action: "kill", "kill-too" (and `other` with it), "kill-spared" (see schedulers.py),
            "freeze", "leave", "drain", "link", "stream", "lag", "stale", "sched-crash-write" (see
            `world.World._crash_in_write`); to schedulers and their store (schedulers.py):
            "chain-lost", "backup", "restored" (to that one), "exchanged" (for that one, while the scheduler lives),
            "leftover" (of the day before), "brought-back" (the job's own store), "rebuild", "sched-freeze",
            "sched-crash", "sched-cut", "store-down", "store-lost", "store-slow", "streams"; to links (edges.py):
            "cut", "split", "add-link", "remove-link", "ask-add", "ask-remove", "rate".
        node: Name of the node, "root" for the commit root at that moment, "" for the scheduler; "a,b" for "split".
        at: Virtual time in seconds; ignored with `trap`.
        other: Name of the other end of a link.
        lasts: Duration in seconds of what ends by itself.
        trap: "kind seq skip": before the skip+1-th effect of that kind from slot seq on (see node.Trap); of a scheduler
            (host.HostTrap) from the time `at` on.
    """

    action: str
    node: str = ""
    at: float = 0.0
    other: str = ""
    lasts: float = 0.0
    trap: tuple[str, int, int] | None = None
    rate_bps: float = 0.0
    """Rate of the link from now on, for "rate", bit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterScript:
    """Script of a cluster in outer sync whose ranks are the job's members: how it trains, and how its leader behaves
    (outer_leader.py).

    Attributes:
        inner_steps: Inner steps from one push to the next.
        overlap: Whether it trains while a push is under way.
        lossy: Whether the codec leaves something out.
        answer_s: Shortest and longest time until a push is answered, s.
        rejects: Fraction of pushes that are rejected.
        voids: Fraction of pushes that are void.
        versions: Moments at which other clusters' pushes make a version.
        cuts: Moments at which all streams are cut, and another leader takes over.
        removals: Moments at which the cluster is removed.
        rollbacks: Moments at which accepted pushes become unanswered again.
    """

    inner_steps: int = 4
    overlap: bool = True
    lossy: bool = False
    answer_s: tuple[float, float] = (0.01, 0.1)
    rejects: float = 0.0
    voids: float = 0.0
    versions: tuple[float, ...] = ()
    cuts: tuple[float, ...] = ()
    removals: tuple[float, ...] = ()
    rollbacks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one simulated job."""

    seed: int
    settings: Settings
    program: Program
    nodes: tuple[NodeSpec, ...] = ()
    starts: tuple[float, ...] = ()
    """Seconds at which each node says hello."""
    faults: tuple[Fault, ...] = ()
    slow_links: tuple[tuple[str, str, float], ...] = ()
    """Triples (node, node, extra seconds): messages between these two take up to so much longer."""
    measured: bool = False
    """Whether members measure their links."""
    rates: tuple[tuple[str, str, float], ...] = ()
    """Triples (node, node, bits per second) of links that are not usual."""
    unlinked: tuple[tuple[str, str], ...] = ()
    """Pairs of nodes that can never make a link."""
    replaying: Replaying = field(default_factory=Replaying)
    patience_s: float = 0.0
    """Seconds, if given, after which processes that were ready, since the last fault was over, must be in, and those
    that asked to leave, out.
    """
    unfailing: bool = False
    """Whether no member dies and no link fails: a recovery is a violation then."""
    damage: float = 0.0
    """Fraction of pulled state ranges that are damaged on the way."""
    drift: float = 0.0
    """Fraction of comparisons of state hashes at a member in which one of its parts has drifted; 0: none compare."""
    store_s: float = 0.004
    watched: bool = False
    """Whether machines tell others what their process tables say."""
    candidates: int = 1
    """Number of schedulers on as many machines, with the chain in a store beyond them; 1: one, restarted on its
    file.
    """
    orderly: bool = False
    """Whether the scheduler does nothing while it writes (host.Candidacy)."""
    doubled: float = 0.0
    """Fraction of control messages that arrive twice."""
    spread: Spread = field(default_factory=Spread)
    """Spread of headers to all members."""
    limit_s: float = 90.0
    outer: OuterScript | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """Machines on which candidates for the scheduler's role run."""
        return tuple(f"h{index}" for index in range(self.candidates))

    @property
    def several(self) -> bool:
        """Whether there are several candidates for the scheduler's role."""
        return self.candidates > 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one simulated job."""

    seed: int
    violation: str
    seconds: float
    """Virtual seconds that the run took."""
    events: int
    commits: int
    hand_ons: int
    joins: int
    ejections: int
    views: int
    errors: int = 0
    replays: int = 0
    moved: int = 0
    crashes: int = 0
    """Number of crashes of schedulers."""
    terms: int = 0
    store_errors: int = 0
    cut_streams: int = 0
    """Number of control streams that broke."""
    adoptions: int = 0
    """Number of versions that ranks adopted."""
    passed: int = 0
    """Number of versions that newcomers that replay passed over."""
