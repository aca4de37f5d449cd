"""Runs simulations in virtual time: an event queue, one seeded random generator, processes that can be frozen, thawed
and killed, and the pipes between them.

Theory of operation. Everything that happens is a callable in one heap, ordered by virtual time and then by the order of
scheduling, so that a run is a function of its seed. A `Process` receives whatever is meant for it through `deliver`:
while it is frozen (SIGSTOP) deliveries and its own timers queue up and run in order when it thaws; once it is dead they
vanish.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Action = Callable[[], None]


class Kernel:
    """Event queue that runs actions in the order of virtual time (seconds)."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, delay: float, action: Action) -> None:
        """Schedules `action` to run `delay` seconds from now in virtual time."""
        self.at(self.now + delay, action)

    def at(self, time: float, action: Action) -> None:
        """Schedules `action` to run at `time` in virtual time, or now if that time has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, action))

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Runs actions until `done()` holds (returns True), or until no action is left or the time limit is reached
        (returns False).
        """
        heap, pop = self._heap, heapq.heappop
        while heap:
            if heap[0][0] > until:
                return done()
            self.now, _, action = pop(heap)
            self.events += 1
            action()
            if done():
                return True
        return done()

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()


class Process:
    """Simulated process, which can be frozen, thawed and killed."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.alive = True
        self.frozen = False
        self.frozen_since = 0.0
        self.thawed_at = -1.0
        self._backlog: list[Action] = []

    def deliver(self, action: Action) -> None:
        """Runs `action` in this process: at once, or when a frozen process thaws; never in a dead one."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(action)
        else:
            action()

    def timer(self, delay: float, action: Action) -> None:
        """Runs `action` in this process after `delay` seconds, or once it thaws if it is frozen at that time."""
        self.kernel.after(delay, lambda: self.deliver(action))

    def freeze(self) -> None:
        if self.alive and not self.frozen:
            self.frozen, self.frozen_since = True, self.kernel.now

    def thaw(self) -> None:
        if not self.alive or not self.frozen:
            return
        self.frozen, self.thawed_at = False, self.kernel.now
        backlog, self._backlog = self._backlog, []
        for i, action in enumerate(backlog):
            if not self.alive or self.frozen:
                self._backlog = backlog[i:] + self._backlog
                return
            action()

    def die(self) -> None:
        self.alive = False
        self._backlog.clear()


@dataclass(slots=True)
class Pipe:
    """One direction of a connection: in order, and without loss until it is cut."""

    kernel: Kernel
    low: float
    high: float
    last: float = 0.0
    lag: float = 0.0
    """Seconds that are added to each latency."""
    open: bool = True
    cut_at: float = float("inf")

    def send(self, payload: object, take: Callable[[object], None]) -> None:
        if not self.open:
            return
        arrival = max(self.last, self.kernel.now + self.lag + self.kernel.between(self.low, self.high))
        self.last = arrival

        def arrive() -> None:
            if self.kernel.now <= self.cut_at:
                take(payload)

        self.kernel.at(arrival, arrive)

    def cut(self, at: float) -> None:
        """Cuts the pipe at time `at`: nothing arrives later, and nothing more is accepted."""
        self.open = False
        self.cut_at = min(self.cut_at, at)

    def end(self, told: Callable[[], None]) -> None:
        """Closes the pipe in good order: everything sent before still arrives, and then the receiver is told of the
        end.
        """
        if self.open:
            self.open = False
            self.last = max(self.last, self.kernel.now + self.kernel.between(self.low, self.high))
            self.kernel.at(self.last, told)
