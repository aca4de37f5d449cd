"""Simulates bulk transfers, such as that of a slot's raw result that a recovery hands on (transfers of the state:
observing.py).

Theory of operation. Ranges are asked for one by one, each from a source chosen by chance; a source that is dead,
frozen or without these very bytes does not answer (or answers later), and the range is asked for elsewhere. Some
transfers are damaged on the way; a state is accepted only if its hash equals the donors' (protocol.md 19). Requests
reach whom any way over links that can be made leads to: transfers are relayed hop by hop.
"""

from __future__ import annotations

from collections.abc import Callable

from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import Header, Source
from lab.simulate.fabric import Endpoint
from lab.simulate.job import Job


class Pull:
    """Transfer that asks sources until all ranges have arrived or it is stopped."""

    def __init__(self, job: Job, node: Endpoint, header: Header) -> None:
        self.job = job
        self.node = node
        self.header = header
        self.stopped = False

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopped = True

    def _ask(self, member: str, serve: Callable[[Endpoint], None]) -> None:
        """Runs `serve` in the source's process, whose answer comes back by `_answer`."""
        fabric = self.job.fabric
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


class ResultPull(Pull):
    """Transfer of the raw reduced ranges of a slot that others have committed, unchanged."""

    def __init__(self, job: Job, node: Endpoint, header: Header, sources: tuple[Source, ...]) -> None:
        super().__init__(job, node, header)
        self._sources = sources
        job.oracle.hand_ons += 1

    def start(self) -> None:
        if self.stopped:
            return
        for source in self._sources:
            self._ask(source.member, self._serve)
        self.node.timer(0.05, self.start)

    def _serve(self, source: Endpoint) -> None:
        ranges = source.plane.serve(self.header.seq, self.header.hash, self.header.view)
        if ranges:
            self._answer(lambda: self._take(ranges))

    def _take(self, ranges: dict[int, frozenset[int]]) -> None:
        if self.node.plane.adopt(self.header.seq, self.header.view, ranges):
            self.stop()
            self.node.feed(fx.ResultPulled(self.header.seq))
