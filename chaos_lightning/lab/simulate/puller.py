"""Bulk transfers in a simulated job: a joiner's state, and the raw result of a handed-on slot.

Theory of operation. Ranges are asked for one by one, each from a source chosen by chance; a source that is dead,
frozen or without these very bytes does not answer (or answers later), and the range is asked for elsewhere. Some
transfers are damaged on the way; a state is accepted only if its hash equals the donors' (protocol.md 19). Requests
reach whom any way over links that can be made leads to: transfers are relayed hop by hop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chaos_lightning.lab.simulate.training import State
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import Header, Source, View

if TYPE_CHECKING:
    from chaos_lightning.lab.simulate.node import Node


class Pull:
    """Asks sources until all ranges are here or it is stopped."""

    def __init__(self, node: Node, header: Header) -> None:
        self.node = node
        self.header = header
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def _ask(self, member: str, serve: Callable[[Node], None]) -> None:
        """Runs `serve` in the source's process; its answer travels by `_answer`."""
        fabric = self.node.world.fabric
        source = fabric.nodes.get(member)
        if source is None or not fabric.reaches(self.node.name, source.name):
            return
        if source.machine.member_id == member:
            kernel = self.node.kernel
            kernel.after(kernel.between(0.0003, 0.003), lambda: source.deliver(lambda: serve(source)))

    def _answer(self, action: Callable[[], None], slow_s: float = 0.0) -> None:
        kernel = self.node.kernel
        more = kernel.between(0.0, slow_s) if slow_s else 0.0

        def run() -> None:
            if not self.stopped:
                action()

        kernel.after(kernel.between(0.0003, 0.006) + more, lambda: self.node.deliver(run))


class StatePull(Pull):
    """A joiner's state at one header, from the members that hold it."""

    def __init__(self, node: Node, header: Header, view: View) -> None:
        super().__init__(node, header)
        self._donors = [m.id for m in view.members if m.id not in view.joiners]
        self._ranges: dict[int, int] = {}
        self._hash: int | None = None
        self._held: State | None = None
        self._moved = 0

    def start(self) -> None:
        observation = self.node.observation
        if observation is not None and not self.stopped:
            if not observation.followed(self.header):
                self.node.timer(0.003, self.start)
                return
            self._held = observation.state
        kept = self.node.world.hooks.kept_ranges(self.node, self.header)
        self._ranges.update(kept)
        if len(kept) > self.node.world.program.ranges:
            self._complete(self.node.world.oracle.lineage)
        else:
            self._round()

    def _round(self) -> None:
        if self.stopped:
            return
        node, kernel = self.node, self.node.kernel
        for index in range(node.world.program.ranges + 1):
            if index not in self._ranges:
                donor = kernel.random.choice(self._donors)
                self._ask(donor, lambda source, i=index: self._serve(source, i))  # type: ignore[misc]
        node.timer(0.03, self._round)

    def _serve(self, source: Node, index: int) -> None:
        state = source.serve_state(self.header)
        if state is None:
            return
        whole = hash(source.published[1]) if source.published is not None else 0
        value, lineage = state[index], source.lineage
        if self.node.kernel.random.random() < self.node.world.damage:
            value ^= 1
        self._answer(lambda: self._take(index, value, whole, lineage))

    def _take(self, index: int, value: int, whole: int, lineage: str) -> None:
        if index not in self._ranges:
            self._ranges[index] = value
            self._moved += self._held is None or self._held[index] != value  # what is equal is not sent (16)
        self._hash = whole
        if len(self._ranges) > self.node.world.program.ranges:
            self._complete(lineage)

    def _complete(self, lineage: str) -> None:
        state: State = tuple(self._ranges[i] for i in range(len(self._ranges)))
        if not self.node.world.hooks.accept_state(hash(state) == self._hash):
            self._ranges.clear()
            return
        self.stop()
        self.node.state_loaded(self.header, state, lineage, self._moved)


class ResultPull(Pull):
    """The raw reduced ranges of a slot that others committed, verbatim."""

    def __init__(self, node: Node, header: Header, sources: tuple[Source, ...]) -> None:
        super().__init__(node, header)
        self._sources = sources
        node.world.oracle.hand_ons += 1

    def start(self) -> None:
        if self.stopped:
            return
        for source in self._sources:
            self._ask(source.member, self._serve)
        self.node.timer(0.05, self.start)

    def _serve(self, source: Node) -> None:
        ranges = source.plane.serve(self.header.seq, self.header.hash, self.header.view)
        if ranges:
            self._answer(lambda: self._take(ranges))

    def _take(self, ranges: dict[int, frozenset[int]]) -> None:
        if self.node.plane.adopt(self.header.seq, self.header.view, ranges):
            self.stop()
            self.node.feed(fx.ResultPulled(self.header.seq))
