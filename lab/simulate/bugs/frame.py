"""Defines what a planted bug consists of, helpers that replace classes by broken ones, and two broken classes that
several bugs share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.effects import Persist
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.scheduler import SchedulerMachine
from lab.simulate.dataplane import DataPlane
from lab.simulate.node import Node
from lab.simulate.observing import Keeper, Observation
from lab.simulate.plan import Plan
from lab.simulate.store import Store
from lab.simulate.world import Hooks

Machine = TypeVar("Machine", MemberMachine, SchedulerMachine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """Planted bug: a rule of protocol.md or outer.md, broken on purpose.

    Attributes:
        rule: Number in protocol.md, or with an O in outer.md.
        what: Broken behaviour in words.
        hooks: Function that makes the broken behaviour.
        plan: Plans of the runs in which it must show.
        control: Hooks with only the masking guard off, which must run clean; None if nothing masks the rule.
    """

    rule: str
    what: str
    hooks: Callable[[], Hooks]
    plan: Callable[[int], Plan]
    control: Callable[[], Hooks] | None = None


def hooks_of(
    *,
    machine: type[MemberMachine] = MemberMachine,
    plane: type[DataPlane] = DataPlane,
    node: type[Node] = Node,
    scheduler: type[SchedulerMachine] = SchedulerMachine,
    store: type[Store] = Store,
    keeper: type[Keeper] = Keeper,
    observation: type[Observation] = Observation,
) -> Callable[[], Hooks]:
    """Returns a class of simulation hooks in which the given classes replace the right ones."""
    parts = {
        "machine_class": machine, "plane_class": plane, "keeper_class": keeper, "observation_class": observation
    }  # fmt: skip
    node_with = type(node.__name__, (node,), parts)
    return type("BugHooks", (Hooks,), {"node_class": node_with, "scheduler_class": scheduler, "store_class": store})


def with_parts(**parts: type[Any]) -> type[SchedulerMachine]:
    """Returns a scheduler class some of whose components are replaced by broken ones. See `planted`."""
    return planted(SchedulerMachine, **parts)


def planted(base: type[Machine], **parts: type[Any]) -> type[Machine]:
    """Returns a subclass of a state machine some of whose components are replaced by broken ones.

    Args:
        base: Class of machines whose other parts are kept.
        parts: Class of each part by the machine's attribute: derived from the part's own, without state of its own.
    """

    class Planted(base):  # type: ignore[valid-type, misc]
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            for name, kind in parts.items():
                part = getattr(self, name)
                new = {m for m in vars(kind) if not m.startswith("__")} - set(dir(type(part)))
                if new:
                    raise TypeError(f"{kind.__name__} breaks no rule with {sorted(new)}: {name} has no such method")
                part.__class__ = kind

    return Planted


class TrustingNode(Node):
    """Planted bug: a process accepts a joiner's state without comparing hashes."""

    def accept_state(self, equal: bool) -> bool:
        return True


class HastyBook(Book):
    """Planted bug: the scheduler announces a view before the store has it, and goes on."""

    def persist(self, entry: Persist, then: Callable[[], None]) -> None:
        super().persist(entry, (lambda: None) if entry.kind == "view" else then)
        if entry.kind == "view":
            then()
