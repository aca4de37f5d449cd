"""Generates random histories of fleets: losses of single devices, groups and hosts, repairs, spot arrivals, slow
devices.

Theory of operation. All runs on the simulator's kernel: the next loss comes after an exponential time, whose rate is
that of all devices that are there. It takes as many devices as a group has, or a host. A lost device is back after its
repair. Everything is drawn from one seed, and nothing depends on what a job does, so that policies meet equal losses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.fleet.kernel import Action, Kernel
from chaos_lightning.planning.fleet.traces import FleetChange, Trace, TraceError
from chaos_lightning.planning.pipelines.job import MOST_DEVICES, check_number
from chaos_lightning.planning.quantities import HOUR_S

SHARED = 0.77
"""Share of the removals in published traces of spot devices that share a time stamp with others."""
MOST_EVENTS = 300_000
"""Most events in one history; more take longer to simulate than anybody waits."""


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Probabilities of the events in a fleet's random history."""

    devices: int
    """Devices at the start."""
    hours: float = 9.0
    rate: float = 0.1
    """Losses per device and hour."""
    group: int = 1
    """Most devices that are lost at once."""
    per_host: int = 1
    """Devices of one host."""
    host_rate: float = 0.0
    """Losses of a whole host, per host and hour."""
    repair_hours: float = 0.0
    """Average hours until a lost device is back; 0: never."""
    arrivals: float = 0.0
    """New devices per hour."""
    most: int = 0
    """Most devices that are there at a time; 0: no limit."""
    slow_rate: float = 0.0
    """Number of times that a device becomes slow, per device and hour."""
    slow_hours: float = 0.5
    """Average hours that a device stays slow."""
    slow_speed: float = 0.6
    hosts: tuple[str, ...] = ()
    """Name of each device's host, where a file names them; (): `per_host` devices on each host."""

    def host(self, device: int) -> int | str:
        return self.hosts[device] if self.hosts else device // self.per_host

    def __post_init__(self) -> None:
        check_number("--devices", self.devices, least=1)
        if self.devices > MOST_DEVICES:
            raise ConfigurationError(f"--devices is {self.devices}; expected at most {MOST_DEVICES}")
        check_number("--hours", self.hours)
        check_number("--group", self.group, least=1)
        check_number("--per-host", self.per_host, least=1)
        check_number("--slow-speed", self.slow_speed)
        check_number("--slow-hours", self.slow_hours)
        for name in ("rate", "host_rate", "repair_hours", "arrivals", "slow_rate"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), least=0)
        if self.slow_speed >= 1:
            raise ConfigurationError(f"--slow-speed is {self.slow_speed:g}; expected less than 1, the usual speed")


def group_sizes(most: int) -> dict[int, float]:
    """Returns the probability of each number of devices that one loss can take at once, from 1 to `most`.

    Of all lost devices, 1 - `SHARED` are lost alone; the others are equally often in groups of 2 to `most`.
    """
    if most == 1:
        return {1: 1.0}
    found = {1: 1 - SHARED} | {g: SHARED / (most - 1) / g for g in range(2, most + 1)}
    total = sum(found.values())
    return {g: x / total for g, x in found.items()}


class _Drawing:
    def __init__(self, chance: Chance, seed: int) -> None:
        self.chance, self.kernel = chance, Kernel(seed)
        self.random = self.kernel.random
        self.there = list(range(chance.devices))
        self.at = {d: d for d in self.there}
        self.hosts = Counter(map(chance.host, self.there))
        self.slow: set[int] = set()
        self.following = chance.devices
        self.changes: list[FleetChange] = []
        self.sizes = group_sizes(chance.group)
        mean = sum(g * p for g, p in self.sizes.items())
        self.loss_rate = chance.rate / mean / HOUR_S
        self._epoch = 0

    def draw(self) -> Trace:
        c, first = self.chance, tuple(self.there)
        self._next_loss()
        if c.arrivals:
            self.kernel.after(self.random.expovariate(c.arrivals / HOUR_S), self._arrive)
        about = f"--devices {c.devices} --rate {c.rate:g} --hours {c.hours:g}"
        if self.kernel.run(c.hours * HOUR_S, lambda: self.kernel.events >= MOST_EVENTS):
            raise TraceError(
                f"{about}: more than {MOST_EVENTS:,} events by hour {self.kernel.now / HOUR_S:.3g}; expected lower "
                "rates, a longer --repair-hours, or --hours below that"
            )
        return Trace(first, tuple(self.changes), c.hours * HOUR_S, about).check()

    def _say(self, kind: str, devices: list[int], speed: float = 1.0) -> None:
        self.changes.append(FleetChange(self.kernel.now, kind, tuple(devices), speed))

    # The times to the next loss of each kind are drawn anew whenever the number of devices changes: an exponential time
    # has no memory.
    def _next_loss(self) -> None:
        self._epoch += 1
        n, c = len(self.there), self.chance
        for rate, action in (
            (n * self.loss_rate, self._lose_group),
            (len(self.hosts) * c.host_rate / HOUR_S, self._lose_host),
            (n * c.slow_rate / HOUR_S, self._slow_down),
        ):
            if rate:
                self.kernel.after(self.random.expovariate(rate), self._unless_changed(action))

    def _unless_changed(self, action: Action) -> Action:
        epoch = self._epoch

        def act() -> None:
            if epoch == self._epoch:
                action()

        return act

    def _lose_group(self) -> None:
        (size,) = self.random.choices(list(self.sizes), list(self.sizes.values()))
        self._lose(self.random.sample(self.there, min(size, len(self.there))))

    def _lose_host(self) -> None:
        host = self.random.choice(list(self.hosts))
        self._lose([d for d in self.there if self.chance.host(d) == host])

    def _lose(self, devices: list[int]) -> None:
        self._say("remove", sorted(devices))
        for d in devices:
            self._take(d)
        if self.chance.repair_hours:
            for d in devices:
                self.kernel.after(self.random.expovariate(1 / (self.chance.repair_hours * HOUR_S)), self._back(d))
        self._next_loss()

    def _take(self, device: int) -> None:
        i, last = self.at.pop(device), self.there.pop()
        if last != device:
            self.there[i], self.at[last] = last, i
        self.slow.discard(device)
        host = self.chance.host(device)
        self.hosts[host] -= 1
        if not self.hosts[host]:
            del self.hosts[host]

    def _back(self, device: int) -> Action:
        return lambda: self._add(device)

    def _arrive(self) -> None:
        self._add(self.following)
        self.following += 1
        self.kernel.after(self.random.expovariate(self.chance.arrivals / HOUR_S), self._arrive)

    def _add(self, device: int) -> None:
        if self.chance.most and len(self.there) >= self.chance.most:
            return
        self.at[device] = len(self.there)
        self.there.append(device)
        self.hosts[self.chance.host(device)] += 1
        self._say("add", [device])
        self._next_loss()

    def _slow_down(self) -> None:
        device = self.random.choice(self.there)
        if device not in self.slow:
            self.slow.add(device)
            self._say("slow", [device], self.chance.slow_speed)
            self.kernel.after(
                self.random.expovariate(1 / (self.chance.slow_hours * HOUR_S)), lambda: self._well(device)
            )
        self._next_loss()

    def _well(self, device: int) -> None:
        if device in self.slow:
            self.slow.remove(device)
            self._say("well", [device])


def generate(chance: Chance, seed: int) -> Trace:
    """Generates a random history of a fleet; equal seeds give equal histories.

    Raises:
        TraceError: No device is there for an hour.
    """
    return _Drawing(chance, seed).draw()
