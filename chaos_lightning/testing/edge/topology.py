"""Emulated networks: their nodes, the links between them, and how the links change over time.

    topology = Topology(
        nodes=(EdgeNode("a"), EdgeNode("b"), EdgeNode("c", access_bps=200e6)),
        links=(Link("a", "b", rate_bps=300e6, latency_s=0.02), Link("b", "c", rate_bps=100e6)),
        schedule=(Change(at_s=30, links=(("a", "b"),), share=0.1), Change(at_s=60, condition=Condition.CUT, for_s=5)),
    )
    links_of(topology, 31.0)[("a", "b")].rate_bps      # 30e6

Theory of operation. A topology is a value, and `links_of(topology, t_s)` is all there is to know about time t: a pure
function, so an emulator, a simulator and a benchmark that ask it see the same network. Each `Change` overlays what the
links are when it begins; later ones overlay earlier ones, field by field; one with a duration (`for_s`) is afterwards
as if it had never been, and one that repeats (`every_s`) replaces its own last time. Random rates are drawn by a
generator that is keyed by seed, repetition and the link's ends, so no draw depends on which others were made.

Rates are those at which payload moves, each way, both ways at once. Files are read by `topology_file.py`.
"""

from __future__ import annotations

import enum
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.units import duration
from chaos_lightning.planning.graph import connected_parts, neighbours

NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,56}")
"""Pattern of a node's name (fullmatch); a member adds its rank on the node to it."""
MAX_NODES = 250
MIN_PERIOD_S = 0.01

Pair = tuple[str, str]
"""A link by its ends, in the order in which the topology has them."""


class Condition(enum.StrEnum):
    """Condition of a link: whole, cut or stalled."""

    WHOLE = "whole"
    CUT = "cut"
    """Connections are reset, and refused from now on."""
    STALLED = "stalled"
    """A black hole: nothing passes, and neither end is told."""


class SchemaError(ConfigurationError):
    """A topology cannot exist as described.

    Attributes:
        path: Place of the mistake, such as "links[2].rate".
        problem: Problem in words, without the place.
    """

    def __init__(self, path: str, problem: str, source: str = "topology") -> None:
        super().__init__(f"{source}: {path}: {problem}" if path else f"{source}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class EdgeNode:
    """A node of a topology: one machine.

    Attributes:
        name: Unique name; members on it are called NAME-RANK.
        access_bps: Rate that all its links share, each way, bits per second; None: they share none.
        starts_s: Seconds after the start of the lab at which it starts this node's command.
    """

    name: str
    access_bps: float | None = None
    starts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two nodes, with its rate and latency before the schedule changes them.

    Attributes:
        a, b: Nodes at its ends.
        rate_bps: Rate each way, bits per second.
        latency_s: Latency one way, s.
    """

    a: str
    b: str
    rate_bps: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkState:
    """State of a link at a moment: rate, latency and condition."""

    rate_bps: float
    latency_s: float = 0.0
    condition: Condition = Condition.WHOLE

    @property
    def usable(self) -> bool:
        """Whether bytes pass the link."""
        return self.condition is Condition.WHOLE

    def __str__(self) -> str:
        text = rate_text(self.rate_bps) + (f", {duration(self.latency_s)}" if self.latency_s else "")
        return text if self.usable else f"{self.condition} ({text})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry of a schedule, which changes the rate, latency or condition of links.

    Attributes:
        at_s: Time at which it begins, s.
        links: Links that it changes; empty: all.
        rate_bps: New rate between these two bounds, drawn at random if they differ.
        share: New rate as a part of the rate that the link has in the topology.
        latency_s: New latency, s.
        condition: New condition.
        every_s: Seconds after which it happens again; 0: it happens once.
        for_s: Seconds that it lasts; 0: until another change says otherwise.
        seed: Seed of random rates.
    """

    at_s: float = 0.0
    links: tuple[Pair, ...] = ()
    rate_bps: tuple[float, float] | None = None
    share: float | None = None
    latency_s: float | None = None
    condition: Condition | None = None
    every_s: float = 0.0
    for_s: float = 0.0
    seed: int = 0

    def times(self, t_s: float) -> int:
        """Returns how many times this schedule entry has begun by time `t_s`."""
        if t_s < self.at_s:
            return 0
        if not self.every_s:
            return 1
        count = math.floor((t_s - self.at_s) / self.every_s) + 1
        # Division rounds; a repetition has begun exactly when its own time, as computed everywhere, has come.
        while self.begin_s(count + 1) <= t_s:
            count += 1
        while self.begin_s(count) > t_s:
            count -= 1
        return count

    def begin_s(self, time: int) -> float:
        """Returns the time at which repetition number `time` (from 1) of this schedule entry begins, s."""
        return self.at_s + (time - 1) * self.every_s

    def rate_of(self, link: Link, time: int) -> float:
        """Returns the rate that this schedule entry gives a link at its repetition number `time` (from 1), bit/s."""
        if self.share is not None:
            return link.rate_bps * self.share
        assert self.rate_bps is not None
        low, high = self.rate_bps
        one, other = sorted((link.a, link.b))
        return low if low == high else random.Random(f"{self.seed}/{time}/{one}/{other}").uniform(low, high)

    def __str__(self) -> str:
        when = f"at {duration(self.at_s)}" if self.at_s or not self.every_s else ""
        when += f"{', then ' if when else ''}every {duration(self.every_s)}" if self.every_s else ""
        which = ", ".join(f"{a} - {b}" for a, b in self.links) or "all links"
        what = [str(self.condition)] if self.condition is not None else []
        if self.share is not None:
            what.append(f"rate {self.share:.4g} of its own")
        elif self.rate_bps is not None:
            low, high = map(rate_text, self.rate_bps)
            what.append(f"rate {low}" if low == high else f"random rate {low} to {high} (seed {self.seed})")
        if self.latency_s is not None:
            what.append(f"latency {duration(self.latency_s)}")
        return f"{when}: {which}: {', '.join(what)}" + (f" for {duration(self.for_s)}" if self.for_s else "")


@dataclass(frozen=True)
class Topology:
    """Nodes, links between them, and the schedule by which links change.

    Raises:
        SchemaError: The topology is impossible: an unknown node, a link to itself, a doubled one, a graph in parts,
            a rate of 0, ...
    """

    nodes: tuple[EdgeNode, ...]
    links: tuple[Link, ...]
    schedule: tuple[Change, ...] = ()
    name: str = "topology"

    def __post_init__(self) -> None:
        for path, problem in flaws(self):
            raise SchemaError(path, problem)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all nodes, in order."""
        return tuple(node.name for node in self.nodes)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def access_bps(self) -> dict[str, float]:
        """Rates that all links of a node share, by node, bit/s; only nodes that have such a limit."""
        return {n.name: n.access_bps for n in self.nodes if n.access_bps is not None}

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Returns the nodes that have a link to this node."""
        ends = [link.b if link.a == name else link.a for link in self.links if name in (link.a, link.b)]
        return tuple(n for n in self.names if n in ends)

    def node_of(self, member: str) -> str | None:
        """Returns the node of a member, by its name or id ("edge-1-0~3" runs on "edge-1"); None for a stranger."""
        name = member.partition("~")[0]
        if name in self._names:
            return name
        node, _, rank = name.rpartition("-")
        return node if rank.isdigit() and node in self._names else None

    @property
    def delays(self) -> bool:
        """Whether some link has a latency, now or later."""
        return any(link.latency_s for link in self.links) or any(c.latency_s for c in self.schedule)


def links_of(topology: Topology, t_s: float) -> dict[Pair, LinkState]:
    """Returns the states of all links `t_s` seconds after the start; keys are (a, b) in the topology's order."""
    states = {(x.a, x.b): LinkState(x.rate_bps, x.latency_s) for x in topology.links}
    known = {(x.a, x.b): x for x in topology.links}
    begun = [(c, times) for c in topology.schedule if (times := c.times(t_s))]
    for change, times in sorted(begun, key=lambda entry: entry[0].begin_s(entry[1])):
        if change.for_s and t_s >= change.begin_s(times) + change.for_s:
            continue
        for pair in _concerned(topology, change):
            new: LinkState = states[pair]
            if change.rate_bps is not None or change.share is not None:
                new = replace(new, rate_bps=change.rate_of(known[pair], times))
            if change.latency_s is not None:
                new = replace(new, latency_s=change.latency_s)
            if change.condition is not None:
                new = replace(new, condition=change.condition)
            states[pair] = new
    return states


def next_change_s(topology: Topology, t_s: float) -> float | None:
    """Returns the time of the schedule's next change after `t_s`; None if there is none."""
    coming: list[float] = []
    for change in topology.schedule:
        times = change.times(t_s)
        if not times or change.every_s:
            coming.append(change.begin_s(times + 1))
        if times and change.for_s:
            coming.append(change.begin_s(times) + change.for_s)
    return min((t for t in coming if t > t_s), default=None)


def story(topology: Topology, until_s: float) -> Iterator[tuple[float, str]]:
    """Yields the link changes that the schedule makes up to `until_s`, each as a time and a text."""
    t_s: float | None = 0.0
    before = {(x.a, x.b): LinkState(x.rate_bps, x.latency_s) for x in topology.links}
    while t_s is not None and t_s <= until_s:
        now = links_of(topology, t_s)
        for pair, _, text in differences(before, now):
            yield t_s, f"{pair[0]} - {pair[1]}: {text}"
        before, t_s = now, next_change_s(topology, t_s)


def differences(before: dict[Pair, LinkState], after: dict[Pair, LinkState]) -> list[tuple[Pair, LinkState, str]]:
    """Returns the links whose states differ, each with its new state and the difference as text."""
    found = []
    for pair, new in after.items():
        old = before[pair]
        words = []
        if new.condition is not old.condition:
            words.append("restored" if new.usable else str(new.condition))
        if new.rate_bps != old.rate_bps:
            words.append(f"{rate_text(old.rate_bps)} -> {rate_text(new.rate_bps)}")
        if new.latency_s != old.latency_s:
            words.append(f"latency {duration(old.latency_s)} -> {duration(new.latency_s)}")
        if words:
            found.append((pair, new, ", ".join(words)))
    return found


def rate_text(rate_bps: float) -> str:
    """Returns a rate in bit/s as text, such as "300 Mbps"."""
    for unit, size in (("Gbps", 1e9), ("Mbps", 1e6), ("kbps", 1e3)):
        if rate_bps >= size:
            return f"{rate_bps / size:.4g} {unit}"
    return f"{rate_bps:.4g} bps"


# --- what cannot be -----------------------------------------------------------------------------------------------


def flaws(topology: Topology) -> Iterator[tuple[str, str]]:
    """Yields each mistake in a topology: its place in the description, and what was given and expected."""
    yield from _bad_nodes(topology.nodes)
    yield from _bad_links(topology)
    names = topology.names
    found = connected_parts(names, neighbours(names, [(link.a, link.b) for link in topology.links]))
    if len(found) > 1:
        told = " | ".join(", ".join(part) for part in found)
        yield "links", f"the graph is not connected, it has {len(found)} parts: {told}; add links between them"
    for index, change in enumerate(topology.schedule):
        yield from _bad_change(f"schedule[{index}]", change, topology)


def _bad_nodes(nodes: Sequence[EdgeNode]) -> Iterator[tuple[str, str]]:
    if not nodes:
        yield "nodes", "there are none; expected at least one name"
    if len(nodes) > MAX_NODES:
        yield "nodes", f"there are {len(nodes)}; expected at most {MAX_NODES}"
    seen: set[str] = set()
    for index, node in enumerate(nodes):
        path = f"nodes[{index}]"
        if not NODE_NAME.fullmatch(node.name):
            yield path, f"name {node.name!r}: expected up to 56 letters, digits, dots, dashes and underscores"
        if node.name in seen:
            yield path, f"node {node.name!r} is named twice"
        seen.add(node.name)
        if node.access_bps is not None and not _positive(node.access_bps):
            yield f"{path}.access", f"{node.access_bps:g} bps: expected a positive rate; for no limit leave it out"
        if not 0 <= node.starts_s < math.inf:
            yield f"{path}.starts", f"{node.starts_s:g} s: expected a time of 0 or later"
    for index, node in enumerate(nodes):
        stem, _, rank = node.name.rpartition("-")
        if rank.isdigit() and stem in seen:
            yield (
                f"nodes[{index}]",
                f"node {node.name!r} is also what rank {rank} of node {stem!r} is called; rename one",
            )


def _bad_links(topology: Topology) -> Iterator[tuple[str, str]]:
    names, seen = topology.names, dict[frozenset[str], int]()
    for index, link in enumerate(topology.links):
        path = f"links[{index}]"
        for end in (link.a, link.b):
            if end not in names:
                yield f"{path}.between", f"unknown node {end!r}; expected some of {', '.join(names)}"
        if link.a == link.b:
            yield f"{path}.between", f"a link from {link.a!r} to itself; expected two different nodes"
        first = seen.setdefault(frozenset((link.a, link.b)), index)
        if first != index:
            yield f"{path}.between", f"{link.a} and {link.b} have a link already (links[{first}]); expected one a pair"
        if not _positive(link.rate_bps):
            yield f"{path}.rate", f"{link.rate_bps:g} bps: expected a positive rate; to have no link, leave it out"
        if not 0 <= link.latency_s < math.inf:
            yield f"{path}.latency", f"{link.latency_s:g} s: expected 0 or more"


def _bad_change(path: str, change: Change, topology: Topology) -> Iterator[tuple[str, str]]:
    known = {frozenset((link.a, link.b)) for link in topology.links}
    for pair in change.links:
        strangers = [n for n in pair if n not in topology.names]
        if strangers:
            yield f"{path}.link", f"unknown node {strangers[0]!r}; expected some of {', '.join(topology.names)}"
        elif frozenset(pair) not in known:
            there = ", ".join(f"{link.a} - {link.b}" for link in topology.links)
            yield f"{path}.link", f"{pair[0]} and {pair[1]} have no link; there are {there}"
    if change.rate_bps is None and change.share is None and change.latency_s is None and change.condition is None:
        yield path, "it changes nothing; expected rate, latency or state"
    if change.rate_bps is not None and change.share is not None:
        yield f"{path}.rate", "both bits per second and a part of the link's own; expected one of them"
    if change.rate_bps is not None and not (_positive(change.rate_bps[0]) and _positive(change.rate_bps[1])):
        yield f"{path}.rate", f"{change.rate_bps[0]:g} to {change.rate_bps[1]:g} bps: {_NOT_ZERO}"
    elif change.rate_bps is not None and change.rate_bps[0] > change.rate_bps[1]:
        yield f"{path}.rate", f"from {change.rate_bps[0]:g} to {change.rate_bps[1]:g} bps: expected the lower one first"
    if change.share is not None and not _positive(change.share):
        yield f"{path}.rate", f"{change.share * 100:g} %: {_NOT_ZERO}"
    if change.latency_s is not None and not 0 <= change.latency_s < math.inf:
        yield f"{path}.latency", f"{change.latency_s:g} s: expected 0 or more"
    if not 0 <= change.at_s < math.inf:
        yield f"{path}.at", f"{change.at_s:g} s: expected a time of 0 or later"
    if change.every_s and not MIN_PERIOD_S <= change.every_s < math.inf:
        yield f"{path}.every", f"{change.every_s:g} s: expected {MIN_PERIOD_S:g} s or more"
    if not 0 <= change.for_s < math.inf:
        yield f"{path}.for", f"{change.for_s:g} s: expected a positive duration"
    if change.every_s and change.for_s >= change.every_s:
        yield f"{path}.for", f"{change.for_s:g} s, every {change.every_s:g} s: expected an end before the next time"


_NOT_ZERO = "expected a positive rate; for a link that carries nothing write state: cut or state: stalled"


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _concerned(topology: Topology, change: Change) -> list[Pair]:
    """Returns the links that a schedule entry changes, each as (a, b) in the topology's order."""
    wanted = [frozenset(pair) for pair in change.links]
    return [(x.a, x.b) for x in topology.links if not wanted or frozenset((x.a, x.b)) in wanted]
