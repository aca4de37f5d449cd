"""Fault plans: who is struck, how and when; the same plan serves simulation, process tests, callbacks and demos.

Theory of operation. A plan is a list of `Fault`s, each a trigger, an action and a victim. It can be written as text,
as a dict (YAML) or with the `FaultInjector` builder, and all three say the same:

    at step 20: join edge-4
    after 3.5 s: leave edge-1
    at step 40 in allreduce: sigkill rank 1
    on joined edge-4: sigstop edge-2 for 3 s
    at step 60: cut edge-1 edge-3 for 2 s
    at step 80: stall edge-1 edge-2 for 5 s

`at step S` means: as soon as S optimizer steps are committed; with a phase, the first time that phase is passed from
then on. `on EVENT NODE` means: once that event of the rooms' `events.py` was written by that node (or by anybody). A
`Schedule` tells which faults are due and gives each out once; who carries them out (a callback inside the victim, a
harness outside, a simulator) is not the plan's business. Deaths are declared: `expected_deaths` is what a test may
see die, all else is a failure of the test.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.registry import known
from chaos_lightning.planning.documents import read_yaml


class Action(enum.StrEnum):
    """Kind of harm that a fault does to its victim."""

    JOIN = "join"
    """A process of this name is started."""
    LEAVE = "leave"
    """The process asks to leave, as with Ctrl+C."""
    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    """Frozen for `seconds`, then continued (0: until somebody continues it)."""
    SIGTERM = "sigterm"
    CUT = "cut"
    """The link between `node` and `peer` is reset, and cannot be made again for `seconds` (0: for good)."""
    STALL = "stall"
    """The link between `node` and `peer` is a black hole for `seconds` (0: for good): nothing passes, nor an end."""


LINK_ACTIONS = frozenset((Action.CUT, Action.STALL))
"""Actions against a link, not a process."""


class LoopPhase(enum.StrEnum):
    """Phase of the victim's training loop in which a fault strikes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALLREDUCE = "allreduce"
    """Phase after the backward pass, when its gradients are on their way."""
    OPTIMIZER = "optimizer"
    """Phase after the slot's commit, before the optimizer has written."""
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    TRAIN_END = "train_end"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: exactly one trigger (`step`, `after_s` or `event`), one action, one victim (`node` or `rank`).

    Attributes:
        action: Action against the victim.
        node: Name of the victim (constant over its incarnations).
        rank: The victim as its rank at the time, instead of a name.
        step: Trigger: so many optimizer steps are committed.
        phase: Phase of the victim's loop in which it strikes; only with a step.
        after_s: Trigger: seconds since the plan was started.
        event: Trigger: name of an event.
        event_node: Node that writes the event; empty: any node.
        seconds: Duration of a sigstop, cut or stall; 0: for good.
        peer: The other end of a link that is cut or stalled.
    """

    action: Action
    node: str = ""
    rank: int | None = None
    step: int | None = None
    phase: LoopPhase | None = None
    after_s: float | None = None
    event: str = ""
    event_node: str = ""
    seconds: float = 0.0
    peer: str = ""

    def __post_init__(self) -> None:
        def wrong(text: str) -> ConfigurationError:
            return ConfigurationError(f"fault {self._rough()}: {text}")

        triggers = [self.step is not None, self.after_s is not None, bool(self.event)]
        if sum(triggers) != 1:
            raise wrong("expected exactly one trigger: at step S, after S s, or on EVENT")
        if bool(self.node) == (self.rank is not None):
            raise wrong("expected exactly one victim: a node's name or a rank")
        if self.phase is not None and self.step is None:
            raise wrong("a phase needs a step: write 'at step S in PHASE'")
        if self.phase is not None and self.action in (Action.JOIN, *LINK_ACTIONS):
            raise wrong(f"a phase is a place in the victim's own loop, it cannot {self.action} there")
        if self.event and self.event not in known():
            raise wrong(f"no event is called {self.event!r}; the events.py of each room lists its own")
        if (self.step or 0) < 0 or (self.after_s or 0) < 0 or self.seconds < 0 or (self.rank or 0) < 0:
            raise wrong("steps, ranks and seconds cannot be negative")
        if (self.action in LINK_ACTIONS) != bool(self.peer):
            raise wrong("a cut or a stall needs two nodes, other faults one")
        if self.seconds and self.action not in (Action.SIGSTOP, *LINK_ACTIONS):
            raise wrong(f"{self.action} has no duration; 'for ... s' belongs to sigstop, cut and stall")
        if self.action is Action.JOIN and self.rank is not None:
            raise wrong("who joins has no rank yet; give it a name")

    def _rough(self) -> str:
        return " ".join(
            f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) not in ("", None)
        )

    @property
    def victim(self) -> str:
        """Name of the victim, or "rank N"."""
        return self.node or f"rank {self.rank}"

    @property
    def fatal(self) -> bool:
        """Whether the fault ends the victim's process against its will."""
        return self.action is Action.SIGKILL

    def __str__(self) -> str:
        if self.step is not None:
            when = f"at step {self.step}" + (f" in {self.phase}" if self.phase else "")
        elif self.after_s is not None:
            when = f"after {self.after_s:g} s"
        else:
            when = f"on {self.event}" + (f" {self.event_node}" if self.event_node else "")
        text = f"{when}: {self.action} {self.victim}" + (f" {self.peer}" if self.peer else "")
        return text + (f" for {self.seconds:g} s" if self.seconds else "")


_LINE = re.compile(
    r"^(?:at\s+step\s+(?P<step>\d+)(?:\s+in\s+(?P<phase>\w+))?"
    r"|after\s+(?P<after>[\d.]+)\s*s?"
    r"|on\s+(?P<event>\w+)(?:\s+(?P<event_node>[\w.-]+))?)"
    r"\s*:\s*(?P<action>\w+)\s+(?:rank\s+(?P<rank>\d+)|(?P<node>[\w.-]+))(?:\s+(?P<peer>(?!for\b)[\w.-]+))?"
    r"(?:\s+for\s+(?P<seconds>[\d.]+)\s*s?)?$"
)


def parse_line(line: str) -> Fault:
    """Parses one fault from a line of a plan's text.

    Raises:
        ConfigurationError: The line is no fault; the message shows what is expected.
    """
    found = _LINE.match(line.strip())
    if found is None:
        raise ConfigurationError(
            f"fault plan line {line.strip()!r} is not understood; expected 'TRIGGER: ACTION NODE [for S s]' such as "
            "'at step 40 in allreduce: sigkill edge-2', 'after 3 s: join edge-4' or "
            "'on joined edge-4: sigstop rank 1 for 2 s'"
        )
    parts = found.groupdict()
    return from_mapping(
        {
            "do": parts["action"],
            "node": parts["node"],
            "rank": parts["rank"],
            "at_step": parts["step"],
            "in": parts["phase"],
            "after_s": parts["after"],
            "on": parts["event"],
            "of": parts["event_node"],
            "for_s": parts["seconds"],
            "peer": parts["peer"],
        }
    )


_KEYS = {
    "do": "action",
    "node": "node",
    "rank": "rank",
    "at_step": "step",
    "in": "phase",
    "after_s": "after_s",
    "on": "event",
    "of": "event_node",
    "for_s": "seconds",
    "peer": "peer",
}
_TYPES: Mapping[str, Any] = {
    "action": Action,
    "rank": int,
    "step": int,
    "phase": LoopPhase,
    "after_s": float,
    "seconds": float,
}


_CHOICES = {"action": [a.value for a in Action], "phase": [p.value for p in LoopPhase]}


def from_mapping(entry: Mapping[Any, Any]) -> Fault:
    """Parses one fault from a dict with the keys do, node, rank, at_step, in, after_s, on, of, for_s, peer.

    Raises:
        ConfigurationError: An unknown key, action or phase, or no number where one belongs.
    """
    unknown = sorted(set(entry) - set(_KEYS) - {True})  # YAML 1.1 reads a bare `on:` as True
    if unknown:
        raise ConfigurationError(f"fault {dict(entry)}: unknown keys {unknown}; expected some of {sorted(_KEYS)}")
    values: dict[str, Any] = {}
    for key, value in entry.items():
        name = "event" if key is True else _KEYS[str(key)]
        if value is None or value == "":
            continue
        cast = _TYPES.get(name, str)
        try:
            values[name] = cast(value)
        except ValueError:
            choices = f"one of {_CHOICES[name]}" if name in _CHOICES else f"a number ({cast.__name__})"
            raise ConfigurationError(f"fault {dict(entry)}: {key} is {value!r}, expected {choices}") from None
    if "action" not in values:
        raise ConfigurationError(f"fault {dict(entry)}: nothing to do; expected do: {[a.value for a in Action]}")
    return Fault(**values)


@dataclass(frozen=True)
class FaultPlan:
    """An ordered list of faults, and further deaths that must not count as failures.

    Attributes:
        faults: Faults, in the order they were written.
        also_expected: Nodes that may die as well (a neighbour on the same machine, say).
    """

    faults: tuple[Fault, ...] = ()
    also_expected: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Parses a plan from text: one fault per line; `expect death of NODE` declares further deaths; empty lines and
        comments (`#`) are skipped.
        """
        faults: list[Fault] = []
        expected: list[str] = []
        for raw in text.splitlines():
            line = raw.partition("#")[0].strip()
            if not line:
                continue
            declared = re.match(r"^expect\s+deaths?\s+of\s+(.+)$", line)
            if declared:
                expected += re.split(r"[\s,]+", declared.group(1).strip())
            else:
                faults.append(parse_line(line))
        return cls(tuple(faults), tuple(expected))

    @classmethod
    def load(cls, source: FaultPlan | str | Path | Mapping[str, Any] | Sequence[Any] | None) -> FaultPlan:
        """Reads a plan in any form: a plan, its text, a file (.yaml, .yml or text), a dict or a list.

        A dict has `faults` (entries as dicts or lines) and optionally `expect_deaths`.
        """
        if source is None:
            return cls()
        if isinstance(source, FaultPlan):
            return source
        if isinstance(source, Path) or (
            isinstance(source, str) and "\n" not in source and ":" not in source and source
        ):
            path = Path(source)
            if not path.is_file():
                raise ConfigurationError(
                    f"fault plan file {str(path)!r} does not exist; expected a file or a plan's text"
                )
            text = path.read_text(encoding="utf-8")
            if path.suffix in (".yaml", ".yml"):
                return cls.load(read_yaml(text, f"fault plan file {str(path)!r}"))
            return cls.parse(text)
        if isinstance(source, str):
            return cls.parse(source)
        if isinstance(source, Mapping):
            odd = sorted(set(source) - {"faults", "expect_deaths"})
            if odd:
                raise ConfigurationError(f"fault plan: unknown keys {odd}; expected faults and expect_deaths")
            plan = cls.load(list(source.get("faults") or ()))
            return cls(plan.faults, tuple(str(n) for n in source.get("expect_deaths") or ()))
        return cls(tuple(parse_line(e) if isinstance(e, str) else from_mapping(e) for e in source))

    @classmethod
    def random(
        cls, seed: int, *, nodes: Sequence[str], spares: Sequence[str] = (), steps: int, count: int, keep: int = 1
    ) -> FaultPlan:
        """Returns a random plan that never strikes the first `keep` nodes; equal seeds give equal plans.

        Args:
            seed: Seed of the generator.
            nodes: Names that are there from the start.
            spares: Names that may join.
            steps: Number of committed steps over which the faults are spread.
            count: Number of faults.
            keep: Number of nodes, from the front, that are never hurt.
        """
        rng = random.Random(seed)
        there, waiting = list(nodes), list(spares)
        faults: list[Fault] = []
        for step in sorted(rng.sample(range(1, max(steps, count + 1)), count)):
            hurt = there[keep:]
            action = rng.choice([Action.JOIN] * 3 + [Action.SIGKILL] * 3 + [Action.SIGSTOP, Action.LEAVE])
            if (action is Action.JOIN or not hurt) and waiting:
                there.append(waiting.pop(0))
                faults.append(Fault(action=Action.JOIN, node=there[-1], step=step))
            elif hurt and action is not Action.JOIN:
                victim = rng.choice(hurt)
                if action is Action.SIGSTOP:
                    faults.append(Fault(action=action, node=victim, step=step, seconds=round(rng.uniform(0.2, 3.0), 2)))
                    continue
                there.remove(victim)
                if action is Action.SIGKILL:
                    waiting.append(victim)  # its name may come back
                    inside = (LoopPhase.FORWARD, LoopPhase.BACKWARD, LoopPhase.ALLREDUCE, LoopPhase.OPTIMIZER, None)
                    faults.append(Fault(action=action, node=victim, step=step, phase=rng.choice(inside)))
                else:
                    faults.append(Fault(action=action, node=victim, step=step))
        return cls(tuple(faults))

    @property
    def expected_deaths(self) -> frozenset[str]:
        """Victims ("edge-2" or "rank 1") whose deaths under this plan are no failures of the run."""
        return frozenset(f.victim for f in self.faults if f.fatal) | frozenset(self.also_expected)

    @property
    def joiners(self) -> tuple[str, ...]:
        """Names of the nodes that the plan starts, in order."""
        return tuple(f.node for f in self.faults if f.action is Action.JOIN)

    def inside(self, node: str) -> FaultPlan:
        """Returns the faults that a node's process can inject into itself; its rank is known only at run time."""
        own = (f for f in self.faults if f.action not in (Action.JOIN, *LINK_ACTIONS))
        return FaultPlan(tuple(f for f in own if f.rank is not None or f.node == node), self.also_expected)

    def outside(self) -> FaultPlan:
        """Returns the faults that another process must inject: all but those in a phase of the victim's training
        loop.
        """
        return FaultPlan(tuple(f for f in self.faults if f.phase is None), self.also_expected)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    def __str__(self) -> str:
        lines = [str(f) for f in self.faults]
        if self.also_expected:
            lines.append(f"expect death of {', '.join(self.also_expected)}")
        return "\n".join(lines)


@dataclass(slots=True)
class Schedule:
    """Progress of a fault plan: each fault comes due once."""

    plan: FaultPlan
    _open: list[Fault] = field(default_factory=list)
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._open = list(self.plan.faults)

    def saw(self, event: str, node: str) -> None:
        """Notes that an event of a node was seen, which may trigger faults."""
        self._seen |= {(event, node), (event, "")}

    def due(
        self,
        *,
        step: int = -1,
        elapsed_s: float = -1.0,
        phase: LoopPhase | None = None,
        victims: Collection[str] | None = None,
    ) -> list[Fault]:
        """Returns faults whose triggers have come, in the plan's order, each only once.

        Args:
            step: Optimizer steps committed so far.
            elapsed_s: Seconds since the start.
            phase: Phase in which the caller is; faults with a phase come due only there, faults without one anywhere.
            victims: Victims whose faults are returned ("edge-2", "rank 1"); None: all.
        """
        ready = [
            f
            for f in self._open
            if (victims is None or f.victim in victims)
            and (
                (f.step is not None and step >= f.step and f.phase in (None, phase))
                or (f.after_s is not None and elapsed_s >= f.after_s)
                or (bool(f.event) and (f.event, f.event_node) in self._seen)
            )
        ]
        self._open = [f for f in self._open if f not in ready]
        return ready

    @property
    def open(self) -> tuple[Fault, ...]:
        """Faults that have not come due yet."""
        return tuple(self._open)


class FaultInjector:
    """Builder of plans: `FaultInjector().fail_at(1, 20).join_at("edge-4", 30).plan()`.

    Victims are ranks (int) or names (str).
    """

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._expected: list[str] = []

    def _add(self, action: Action, victim: int | str, **more: Any) -> FaultInjector:
        who = {"rank": victim} if isinstance(victim, int) else {"node": victim}
        self._faults.append(Fault(action=action, **who, **more))
        return self

    def fail_at(self, victim: int | str, step: int, phase: LoopPhase | str | None = None) -> FaultInjector:
        """Adds a SIGKILL once `step` steps are committed; with `phase`, in that phase of the victim's loop."""
        return self._add(Action.SIGKILL, victim, step=step, phase=LoopPhase(phase) if phase else None)

    def freeze_at(self, victim: int | str, step: int, seconds: float) -> FaultInjector:
        """Adds a SIGSTOP once `step` steps are committed, and a SIGCONT `seconds` later."""
        return self._add(Action.SIGSTOP, victim, step=step, seconds=seconds)

    def leave_at(self, victim: int | str, step: int) -> FaultInjector:
        """Adds an orderly leave, as by Ctrl+C, once `step` steps are committed."""
        return self._add(Action.LEAVE, victim, step=step)

    def terminate_at(self, victim: int | str, step: int) -> FaultInjector:
        """Adds a SIGTERM once `step` steps are committed."""
        return self._add(Action.SIGTERM, victim, step=step)

    def join_at(self, name: str, step: int) -> FaultInjector:
        """Adds the start of a process named `name` once `step` steps are committed."""
        return self._add(Action.JOIN, name, step=step)

    def cut_at(self, one: str, other: str, step: int, seconds: float = 0.0) -> FaultInjector:
        """Adds a cut of the link between two nodes once `step` steps are committed (0 s: for good)."""
        return self._add(Action.CUT, one, step=step, peer=other, seconds=seconds)

    def stall_at(self, one: str, other: str, step: int, seconds: float = 0.0) -> FaultInjector:
        """Adds a stall of the link between two nodes, without an error at either, once `step` steps are committed (0 s:
        for good).
        """
        return self._add(Action.STALL, one, step=step, peer=other, seconds=seconds)

    def when(
        self, event: str, node: str, action: Action | str, victim: int | str, seconds: float = 0.0
    ) -> FaultInjector:
        """Adds an action that is triggered by an event of a node."""
        return self._add(Action(action), victim, event=str(event), event_node=node, seconds=seconds)

    def expect(self, *nodes: str) -> FaultInjector:
        """Declares further deaths that must not count as failures."""
        self._expected += nodes
        return self

    def plan(self) -> FaultPlan:
        """Returns the fault plan that was built."""
        return FaultPlan(tuple(self._faults), tuple(self._expected))
