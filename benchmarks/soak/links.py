"""Cuts, stalls, slows down, removes and restores links during a soak.

Theory of operation. All members dial through one relay (`chaos_lightning.testing.edge.relay`), so that this process
decides what passes between them. Every few seconds a card is drawn from a shuffled deck, so that each kind has its
turn:

- *cut*: reset, and refused for a moment or for seconds. *stall*: a black hole, shorter or longer than the silence
  after which members give a link up. *slow*: a few Mbit/s and some latency. *remove*: what `chaos-lightning link
  remove` does; it is added again later.
- *blink*: all links of one member are cut, for less time than parts of a graph wait for each other.
- *split*: all links between one or two members and the rest are cut, for longer than that. *island*: these lose the
  scheduler as well. Both declare that the smaller side will be put out, and come in again.

All others must put nobody out: a link is hurt only if whole links go on to connect all steady members, and to lead to
everybody else. A link that was mended counts as whole when it has had time to be dialled.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.ways import Ways
from chaos_lightning.membership.topology import connected
from chaos_lightning.testing.edge.relay import Way

Pair = frozenset[str]

DECK = ("cut", "cut", "cut", "stall", "stall", "slow", "slow", "remove", "remove", "blink", "split", "island")
KINDS = tuple(dict.fromkeys(DECK))
PARTING = ("split", "island")
"""Kinds by which somebody must be put out."""
LONGEST_BLINK_S = 1.0
"""Parts of a graph wait three seconds for each other, of which dialling takes up to two."""
_GROUPS = ("blink", *PARTING)
SETTLED_S = 4.0
"""A link that was mended counts as whole so long after it: members dial again at least every two seconds."""
_FAST_BPS = 1e11
_AGAIN_S = 0.5


@dataclass(eq=False)
class Hurt:
    """A fault of one or more links, with its times (CLOCK_MONOTONIC, ns)."""

    kind: str
    pairs: set[Pair]
    part: tuple[str, ...]
    """The smaller side of what was cut in two; of single links empty."""
    seconds: float
    start: int
    stop: int = 0
    """0: not mended yet."""
    detail: Mapping[str, float] = field(default_factory=dict)


def seconds_of(kind: str, rng: random.Random) -> float:
    """Returns the random duration of a link's fault, in seconds."""
    short = rng.random() < 0.5
    if kind == "cut":
        return rng.uniform(0.1, 1.0) if short else rng.uniform(2.0, 7.0)
    if kind == "stall":
        return rng.uniform(0.3, 2.0) if short else rng.uniform(4.0, 8.0)
    low, high = {"slow": (3.0, 12.0), "remove": (4.0, 10.0), "blink": (0.3, 0.8), "split": (8.0, 11.0)}.get(
        kind, (5.0, 9.0)
    )
    return rng.uniform(low, high)


class Links:
    """Faults of links during a soak. All methods are called in the parent's loop.

    Args:
        relay: Relay through which all members dial.
        log: Event log of the harness.
        endpoint: Endpoint of the scheduler itself, without a relay.
        ways: Members' connections to the scheduler, by name; the parent's own mapping, which changes as members come
            and go.
        seed: Seed of the draws.
        every_s: Mean seconds between two events; 0: links are left alone.
        kept: Number of steady members that are never parted from the scheduler or from each other.
        deck: Cards that are drawn.
    """

    def __init__(
        self,
        relay: Any,
        log: Any,
        endpoint: str,
        ways: Mapping[str, Way | Ways],
        seed: int,
        every_s: float,
        kept: int = 2,
        deck: Sequence[str] = DECK,
    ) -> None:
        self.relay = relay
        self.hurts: list[Hurt] = []
        self.refused: list[str] = []
        """Wishes of the operator that the scheduler did not grant, in its words."""
        self._log, self._endpoint, self._ways = log, endpoint, ways
        self._every_s, self._kept = every_s, kept
        self._rng = random.Random(seed)
        self._cards, self._deck = deck, list[str]()
        self._next_at = time.monotonic() + every_s
        self._due: list[tuple[float, Hurt]] = []
        self._states: dict[Pair, str] = {}

    # ------------------------------------------------------------------ what is whole

    def _recent(self) -> list[Hurt]:
        """Returns the faults that are not repaired, or were until just now."""
        since = time.monotonic_ns() - int(SETTLED_S * 1e9)
        return [h for h in self.hurts if h.kind != "slow" and (not h.stop or h.stop > since)]

    def parted(self) -> set[str]:
        """Returns the members that are cut off from the others, or were until just now."""
        return {name for h in self._recent() for name in h.part}

    def holds(self, steady: Collection[str], present: Collection[str], less: Collection[Pair] = ()) -> bool:
        """Returns whether links without a fault suffice to connect the members.

        Args:
            steady: Members that train.
            present: These and all others that may not be put out, such as frozen ones.
            less: Pairs that would be broken, too.
        """
        bad = {p for h in self._recent() for p in h.pairs} | set(less)
        away = self.parted()
        core = set(steady) - away
        whole = {frozenset(p) for p in itertools.combinations(present, 2)} - bad
        leads = all(any(frozenset((p, m)) in whole for m in core) for p in set(present) - core - away)
        return len(core) >= max(self._kept, len(away) + 1) and connected(sorted(core), whole) and leads

    # ------------------------------------------------------------------ time

    def calm_now(self, present: Collection[str]) -> bool:
        """Returns whether no link between these members has a fault or had one until just now, other than being slow.

        A removed link whose end has left is never asked for again.
        """
        return not any(pair <= set(present) for hurt in self._recent() for pair in hurt.pairs)

    def turn(self, steady: Collection[str], present: Collection[str], *, strike: bool = True) -> None:
        """Repairs links that are due, and causes a fault when it is time.

        Args:
            steady: Members that train.
            present: These and all others that may not be put out.
            strike: Whether anything more may be hurt.
        """
        now = time.monotonic()
        for entry in [x for x in self._due if x[0] <= now]:
            self._due.remove(entry)
            self._mend(entry[1])
        if not strike or not self._every_s or now < self._next_at:
            return
        self._next_at = now + _AGAIN_S
        if not self._deck:
            self._deck = list(self._cards)
            self._rng.shuffle(self._deck)
        for kind in dict.fromkeys(self._deck):
            if self._strike(kind, sorted(steady), sorted(present)):
                self._deck.remove(kind)
                self._next_at = now + self._every_s * self._rng.uniform(0.5, 1.5)
                return

    def came(self, name: str) -> None:
        """Cuts a process that is about to start off from all members that are cut off."""
        for hurt in self.hurts:
            if hurt.part and not hurt.stop and name not in hurt.part:
                self._break(hurt, {frozenset((name, other)) for other in hurt.part})

    def calm(self) -> None:
        """Repairs all links but those that an operator removed; causes no more faults."""
        for _, hurt in self._due:
            self._mend(hurt, last=True)
        self._due, self._every_s = [], 0.0

    def counts(self) -> Counter[str]:
        return Counter(h.kind for h in self.hurts)

    # ------------------------------------------------------------------ hurting

    def _strike(self, kind: str, steady: list[str], present: list[str]) -> bool:
        if kind in _GROUPS:
            return self._part(kind, steady, present)
        taken = {p for h in self._recent() for p in h.pairs} if kind != "slow" else self._slow()
        names = steady if kind == "remove" else present
        pairs = [p for ends in itertools.combinations(names, 2) if (p := frozenset(ends)) not in taken]
        self._rng.shuffle(pairs)
        away = self.parted()
        for pair in pairs:
            if pair & away or (kind != "slow" and not self.holds(steady, present, [pair])):
                continue
            return self._hurt(kind, {pair})
        return False

    def _part(self, kind: str, steady: list[str], present: list[str]) -> bool:
        """Cuts one or two members off from the others."""
        if self.parted() or len(steady) < self._kept + 1:
            return False
        size = 2 if kind in PARTING and len(steady) >= 5 and self._rng.random() < 0.4 else 1
        part = tuple(self._rng.sample(steady, size))
        rest = [n for n in present if n not in part]
        if not self.holds([n for n in steady if n not in part], rest):
            return False
        if len([n for n in steady if n not in part]) <= size:
            return False
        return self._hurt(kind, {frozenset((a, b)) for a in part for b in rest}, part)

    def _hurt(self, kind: str, pairs: set[Pair], part: tuple[str, ...] = ()) -> bool:
        hurt = Hurt(kind, set(), part, round(seconds_of(kind, self._rng), 2), time.monotonic_ns())
        if kind == "remove" and not self._ask(min(pairs, key=sorted), add=False):
            return False
        if kind == "slow":
            rate_bps, latency_s = 10.0 ** self._rng.uniform(6.0, 7.3), round(self._rng.uniform(0.0, 0.03), 4)
            hurt.detail = {"rate_bps": round(rate_bps), "latency_s": latency_s}
        for name in part if kind == "island" else ():
            self._log.emit("fault_injected", kind="cut", node=name, peer="scheduler", seconds=hurt.seconds, part=kind)
        self.hurts.append(hurt)
        self._break(hurt, pairs)
        for name in part if kind == "island" else ():
            self._ways[name].cut()
        self._due.append((time.monotonic() + hurt.seconds, hurt))
        return True

    def _break(self, hurt: Hurt, pairs: set[Pair]) -> None:
        hurt.pairs |= pairs
        for one, other in sorted(map(sorted, pairs)):
            kind = "cut" if hurt.part else hurt.kind
            more = {"part": hurt.kind} if hurt.part else hurt.detail
            self._log.emit("fault_injected", kind=kind, node=one, peer=other, seconds=hurt.seconds, **more)
        for pair in pairs:
            if hurt.kind == "slow":
                self.relay.shape(*sorted(pair), **hurt.detail)
            self._carry_out(pair)

    def _mend(self, hurt: Hurt, *, last: bool = False) -> None:
        if hurt.kind == "remove" and (last or not self._ask(min(hurt.pairs, key=sorted), add=True)):
            # A link cannot be asked for while one of its ends is away; removals go by names and stay.
            self._due += [] if last else [(time.monotonic() + _AGAIN_S, hurt)]
            return
        hurt.stop = time.monotonic_ns()
        for name in hurt.part if hurt.kind == "island" else ():
            if name in self._ways:
                self._ways[name].restore()
        for pair in hurt.pairs:
            if hurt.kind == "slow" and pair not in self._slow():
                self.relay.shape(*sorted(pair), rate_bps=_FAST_BPS)
            self._carry_out(pair)
        for one, other in sorted(map(sorted, hurt.pairs)):
            word = {"slow": "rate", "remove": "add"}.get(hurt.kind, "restore")
            self._log.emit("fault_injected", kind=word, node=one, peer=other)

    def _slow(self) -> set[Pair]:
        return {p for h in self.hurts for p in h.pairs if h.kind == "slow" and not h.stop}

    def _carry_out(self, pair: Pair) -> None:
        """Sets the state of a pair's link at the relay; a pair may have several faults at once."""
        kinds = {h.kind for h in self.hurts if pair in h.pairs and not h.stop} - {"slow", "remove"}
        state = "cut" if kinds - {"stall"} else "stall" if kinds else "restore"
        if state != self._states.get(pair, "restore"):
            self._states[pair] = state
            getattr(self.relay, state)(*sorted(pair))

    def _ask(self, pair: Pair, *, add: bool) -> bool:
        """Asks the scheduler to add or remove a link, as `chaos-lightning link add|remove` does."""
        from chaos_lightning.control.requests import change_link
        from chaos_lightning.errors import ChaosError, RefusedError

        one, other = sorted(pair)
        try:
            change_link(self._endpoint, one, other, add=add)
        except RefusedError as error:
            self.refused.append(str(error))
            return False
        except ChaosError as error:
            self.refused.append(f"unanswered: {error}")
            return False
        return True
