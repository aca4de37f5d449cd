"""Declares the interface of a whole simulated job for its parts.

Theory of operation. `world.World` makes all parts and is a `Job`. The parts know only this file, so none of them needs
the world to be read, checked or imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from chaos_lightning.membership.effects import MemberEffect
from chaos_lightning.membership.leader_search import Conversation
from chaos_lightning.planning.fleet.kernel import Kernel
from chaos_lightning.protocol.types import Report, Settings, View
from lab.simulate.fabric import Endpoint, Fabric
from lab.simulate.host import Candidacy, SchedulerHost
from lab.simulate.oracle import Oracle
from lab.simulate.outer_leader import ScriptedLeader
from lab.simulate.plan import Plan
from lab.simulate.store import Store
from lab.simulate.training import Program


class Job(Protocol):
    """Simulated job, as its parts see it; `world.World` documents the attributes."""

    plan: Plan
    settings: Settings
    program: Program
    kernel: Kernel
    fabric: Fabric
    rates: dict[frozenset[str], float]
    store: Store
    oracle: Oracle
    validate: bool
    cut_streams: int
    outer: ScriptedLeader | None
    on_effect: Callable[[Endpoint, MemberEffect], None]

    @property
    def nodes(self) -> Mapping[str, Endpoint]: ...

    @property
    def scheduler(self) -> SchedulerHost: ...

    def ask(self, place: str) -> SchedulerHost | Conversation: ...

    def open_host(self, place: str, candidacy: Candidacy) -> SchedulerHost: ...

    def copies(self, message: object) -> int: ...

    def reported(self, member: str, report: Report) -> None: ...

    def next_number(self) -> int: ...

    def next_uid(self) -> int: ...

    def founds(self, founder: Endpoint) -> None: ...

    def founding_of(self, view: View) -> str: ...

    def look(self) -> None: ...

    def expect(self, more: int) -> None: ...

    def struck(self, troubles: int = 1, causes: int = 1) -> None: ...

    def say(self, words: str) -> None: ...
