"""Reads scenarios: text files that describe one simulated run.

Theory of operation. A line says one thing; "#" starts a comment. What is not said is chance, from the seed.

    seed 3
    nodes n0 n1 n2:host=h1,quota=2,pace=2.5      # they say hello at once, a millisecond apart
    later j0 at 0.3                              # this one says hello later
    later j1:replay=yes at 0.3                   # and this one offers to come in by replay
    set min_nodes 2                              # any field of Settings with a number
    program epochs 1                             # any field of Program; batch 8/2: with --family batch
    nodes n3:fits=4,paces=0.5*3+1.2*1            # of such a batch: what it computes at once; slower by 3 from 0.5 s on
    slow n0 n1 0.03                              # messages between these two take up to 30 ms longer
    at 0.30 kill n1                              # kill, leave, drain, stream, stale: a node
    at 0.30 freeze n1 for 0.6                    # also lag NODE, sched-freeze, sched-crash
    at 0.20 link n0 n1                           # this link breaks; kill-too: both die
    nodes a:neighbours=b+c b c                   # a names its neighbours (also: later)
    unlinked n0 n2                               # these two can never make a link
    plan auto                                    # how gradients travel
    spread 1 2                                   # beyond 1 member headers go down a tree, to 2 from each
    at 0.20 cut n0 n1 for 2                      # no network between these two; split n0,n1 for 2: between groups
    at 0.20 mute n0 n1 for 5                     # their link swallows all; mute-one, flap: see edges.py
    at 0.20 remove-link n0 n1                    # by the operator; add-link; ask-remove, ask-add: the first node asks
    at 0.20 rate n0 n1 1e6                       # what this link carries, as both ends measure it
    when n0 header 5 1 kill n0                   # before the 2nd header it sends from slot 5 on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.membership.spreading import Spread
from chaos_lightning.planning.batch import read_rule
from chaos_lightning.protocol.types import PlanSpec, Settings
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.training import Program


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split("+"))


def _paces(words: str) -> tuple[tuple[float, float], ...]:
    pairs = (word.partition("*") for word in words.split("+"))
    return tuple((float(at), float(pace)) for at, _, pace in pairs)


_ALONE = ("sched-freeze", "sched-crash")
_PAIRS = ("link", "kill-too", "cut", "mute", "mute-one", "flap", "add-link", "remove-link", "ask-add", "ask-remove")
_ACTIONS = ("kill", "freeze", "busy", "leave", "drain", "stream", "lag", "stale", "split", *_ALONE, *_PAIRS)

_KINDS: dict[str, Callable[[str], object]] = {
    "host": str,
    "quota": int,
    "fits": int,
    "paces": _paces,
    "neighbours": _names,
    "replay": lambda value: value == "yes",
}
"""Readers of a node's values; all others are numbers."""


class Script:
    """Plan under construction, from the lines of a scenario."""

    def __init__(self) -> None:
        self.seed = 0
        self.settings = Settings(
            job="sim",
            heartbeat_interval_s=0.1,
            heartbeat_timeout_s=0.35,
            confirm_timeout_s=0.15,
            hang_timeout_s=8.0,
            last_holder_timeout_s=20.0,
            reconnect_grace_s=4.0,
        )
        self.program = Program()
        self.nodes: list[NodeSpec] = []
        self.starts: list[float] = []
        self.faults: list[Fault] = []
        self.slow: list[tuple[str, str, float]] = []
        self.unlinked: list[tuple[str, str]] = []
        self.measured = False
        self.spread = Spread()

    def plan(self) -> Plan:
        return Plan(
            seed=self.seed,
            settings=self.settings,
            program=self.program,
            nodes=tuple(self.nodes),
            starts=tuple(self.starts),
            faults=tuple(self.faults),
            slow_links=tuple(self.slow),
            unlinked=tuple(self.unlinked),
            measured=self.measured,
            spread=self.spread,
        )

    def line(self, words: list[str]) -> None:
        match words:
            case ["seed", number]:
                self.seed = int(number)
            case ["nodes", *names]:
                for name in names:
                    self._node(name, 0.001 * (len(self.nodes) + 1))
            case ["later", name, "at", time]:
                self._node(name, float(time))
            case ["set", name, value]:
                self.settings = replace(self.settings, **_number(Settings, name, value))  # type: ignore[arg-type]
            case ["program", name, value]:
                self.program = replace(self.program, **_number(Program, name, value))  # type: ignore[arg-type]
            case ["slow", one, other, seconds]:
                self.slow.append((self._known(one), self._known(other), float(seconds)))
            case ["unlinked", one, other]:
                self.unlinked.append((self._known(one), self._known(other)))
            case ["plan", kind]:
                self.settings = replace(self.settings, plan=PlanSpec(kind))
            case ["spread", direct, width]:
                self.spread = Spread(int(direct), int(width))
            case ["measured"]:
                self.measured = True
            case ["at", time, "rate", one, other, rate]:
                one, other, self.measured = self._known(one), self._known(other), True
                self.faults.append(Fault(action="rate", node=one, other=other, at=float(time), rate_bps=float(rate)))
            case ["at", time, *what]:
                self.faults.append(replace(self._fault(what), at=float(time)))
            case ["when", name, kind, seq, skip, *what]:
                self._known(name)
                fault = self._fault(what)
                self.faults.append(replace(fault, node=name, trap=(kind, int(seq), int(skip))))
            case _:
                raise ConfigurationError(f"no such line: {' '.join(words)!r}; see lab.simulate.script")

    def _node(self, words: str, start: float) -> None:
        name, _, rest = words.partition(":")
        values: dict[str, object] = {}
        for pair in rest.split(",") if rest else []:
            key, _, value = pair.partition("=")
            values[key] = _KINDS.get(key, float)(value)
        try:
            self.nodes.append(NodeSpec(name=name, **values))  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigurationError(
                f"node {words!r}: {error}; it may have host, quota and pace, neighbours and replay, fits and paces"
            ) from error
        self.starts.append(start)

    def _known(self, name: str) -> str:
        if name not in [n.name for n in self.nodes]:
            raise ConfigurationError(f"no node {name!r} so far; there are {[n.name for n in self.nodes]}")
        return name

    def _fault(self, words: list[str]) -> Fault:
        lasts = 0.0
        if len(words) > 2 and words[-2] == "for":
            lasts = float(words[-1])
            words = words[:-2]
        action, names = words[0], words[1:]
        expected = 0 if action in _ALONE else 2 if action in _PAIRS else 1
        if action not in _ACTIONS or len(names) != expected:
            raise ConfigurationError(f"no such fault: {' '.join(words)!r}; there are {', '.join(_ACTIONS)}")
        for name in names[0].split(",") if action == "split" else names:
            self._known(name)
        first, other = (*names, "", "")[:2]
        return Fault(action=action, node=first, other=other, lasts=lasts)


def _number(kind: type[Settings] | type[Program], name: str, value: str) -> dict[str, int | float | str]:
    default = {f.name: getattr(kind(), f.name) for f in fields(kind)}.get(name)
    if isinstance(default, int):
        return {name: int(value)}
    if isinstance(default, float):
        return {name: float(value)}
    if name == "batch":
        read_rule(value)
        return {name: value}
    raise ConfigurationError(f"{kind.__name__} has no number called {name!r}")


def parse(text: str) -> Plan:
    """Returns the plan that a scenario's text describes.

    Raises:
        ConfigurationError: a line makes no sense; the message names its number.
    """
    script = Script()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                script.line(words)
            except (ConfigurationError, ValueError) as error:
                raise ConfigurationError(f"line {number}: {error}") from error
    if not script.nodes:
        raise ConfigurationError("a scenario needs nodes: nodes n0 n1 n2")
    return script.plan()
