"""The scheduler's state machine with a meter of its processor time, records and messages.

Theory of operation. Processor time is taken around the machine, its records and its messages, each of which is encoded
once however many it goes to. The store is in memory: what a disk takes is measured elsewhere (benchmarks.stores).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from chaos_lightning.control.drawing import request
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.member_streams import ENCODING
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.store import Appended, End


class Records(MemoryStore):
    """Store that also notes the kind and the size of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[tuple[str, int]] = []

    def append(self, kind: str, body: bytes, after: End, *, cut: bool = False) -> Appended:
        self.nbytes.append((kind, len(body)))
        return super().append(kind, body, after, cut=cut)


class Metered:
    """The scheduler's state machine with a meter of its processor time, records and messages.

    Args:
        settings: The job's rules.

    Attributes:
        cpu_s: Processor time, by the label of the events that took it.
        records: Kind and bytes of each record that went to the store.
        said: Number of messages to members, by kind.
        sent_nbytes: Size of all different messages to members.
        wish: The last request for a better plan.
    """

    def __init__(self, settings: Settings) -> None:
        store = Records()
        self._chain = JobChain(store)
        self._chain.take_term()
        self.machine = SchedulerMachine(settings, self._chain.load())
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.records = store.nbytes
        self.said: Counter[str] = Counter()
        self.sent_nbytes = 0
        self.wish: fx.DrawPlan | None = None
        self._encoded: object = None

    def on(self, now: float, events: Sequence[fx.SchedulerEvent], label: str) -> Iterator[fx.Send | fx.Close]:
        """Feeds events to the scheduler's state machine, and the store's answers; yields the effects on streams.

        Args:
            now: Virtual time in seconds.
            events: A batch.
            label: Name under which the processor time is counted.
        """
        pending = [events]
        while pending:
            began = time.thread_time()
            effects = self.machine.on(now, *pending.pop(0))
            pending += self._carry_out(effects)
            self.cpu_s[label] += time.thread_time() - began
            for effect in effects:
                if isinstance(effect, fx.Send):
                    self.said[type(effect.message).__name__] += 1
                if isinstance(effect, fx.Send | fx.Close):
                    yield effect

    def _carry_out(self, effects: Sequence[fx.SchedulerEffect]) -> list[Sequence[fx.SchedulerEvent]]:
        """Stores records and encodes messages and requests, as the scheduler's process does; returns the store's
        answers.
        """
        stored: list[Sequence[fx.SchedulerEvent]] = []
        for effect in effects:
            if isinstance(effect, fx.Persist):
                outcome = self._chain.append(effect)
                stored.append([fx.Stored(effect.token, outcome.ok, outcome.detail)])
            elif isinstance(effect, fx.Send) and effect.message is not self._encoded:
                self._encoded = effect.message
                self.sent_nbytes += len(ENCODING.write(effect.message))
            elif isinstance(effect, fx.DrawPlan):
                self.wish = effect
                request(effect)
        return stored
