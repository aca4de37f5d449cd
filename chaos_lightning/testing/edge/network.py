"""An emulated edge network: a topology, one of two backends, and the clock that applies its schedule.

    with Edge(topology) as edge:
        processes = [start(edge.command(n, command), env=edge.environment(n)) for n in topology.names]
        edge.start()                       # from now on the schedule runs

Theory of operation. `links_of` says what the links are at each time; a thread sleeps until that changes and tells the
backend what differs. Two backends carry it out. *relay* needs no privileges: members dial a relay in this process
(relay.py), which shapes each link and each node's shared access exactly, delays, cuts and stalls. *namespaces* needs
root: each node is a network namespace, each link a veth pair, rates are the kernel's (namespaces.py). The relay shapes
what goes through it (testing/emulation.py), so only links and state transfers of this package; namespaces shape
everything. In both, pairs without a link cannot reach each other for data, all nodes reach the scheduler, and members
of different nodes count as of different machines (CHAOS_HOST) that cannot read each other's memory
(CHAOS_BY_REFERENCE=0).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.edge import namespaces
from chaos_lightning.testing.edge.relay import LinkRelay
from chaos_lightning.testing.edge.topology import (
    Condition,
    LinkState,
    Pair,
    Topology,
    differences,
    links_of,
    next_change_s,
)

logger = logging.getLogger("chaos_lightning.testing")

BACKENDS = ("auto", "relay", "namespaces")
_KINDS = {Condition.CUT: "cut", Condition.STALLED: "stall", Condition.WHOLE: "restore"}
_LATE_S = 3600.0


class Backend(Protocol):
    """Backend of an emulated network, which gives links their rates, latencies and failures."""

    name: str
    endpoint: str
    """Endpoint of the job's scheduler; the first node's member hosts it."""
    notes: tuple[str, ...]
    """Lines on what it does not emulate."""

    def apply(self, pair: Pair, state: LinkState) -> None:
        """Puts a link into a state, which lasts until the next call."""
        ...

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs `command` on a node."""
        ...

    def environment(self, node: str) -> dict[str, str]:
        """Returns the environment variables that processes on a node need."""
        ...

    def close(self) -> None:
        """Ends the emulation, and removes everything that it made."""
        ...


class RelayBackend:
    """Backend that sends all links through a relay in this process.

    Attributes:
        relay: The relay, by which links can also be cut and stalled by hand.
    """

    name = "relay"
    notes: tuple[str, ...] = (
        "only links and state transfers of this package are shaped; TCP's own windows are not emulated",
    )

    def __init__(self, topology: Topology) -> None:
        self.relay = LinkRelay(node_of=topology.node_of, closed=True)
        self.endpoint = f"127.0.0.1:{free_port()}"
        for node, rate_bps in topology.access_bps.items():
            self.relay.access(node, rate_bps)

    def apply(self, pair: Pair, state: LinkState) -> None:
        one, other = pair
        self.relay.shape(one, other, rate_bps=state.rate_bps, latency_s=state.latency_s)
        if state.condition is Condition.CUT:
            self.relay.cut(one, other)
        elif state.condition is Condition.STALLED:
            self.relay.stall(one, other)
        else:
            self.relay.restore(one, other)

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def environment(self, node: str) -> dict[str, str]:
        return {**self.relay.environment(), "CHAOS_BIND": "127.0.0.1"}

    def close(self) -> None:
        self.relay.close()


@dataclass(frozen=True, slots=True)
class Choice:
    """Name of the chosen backend, and the reason for the choice."""

    backend: str
    reason: str


def choose_backend(topology: Topology, wanted: str = "auto") -> Choice:
    """Returns the name of the backend for a topology, with the reason.

    Raises:
        ConfigurationError: There is no such backend, or the one that was asked for cannot work here.
    """
    if wanted not in BACKENDS:
        raise ConfigurationError(f"backend {wanted!r}: expected one of {', '.join(BACKENDS)}")
    if wanted == "relay":
        return Choice("relay", "as asked for")
    able = namespaces.ability()
    if wanted == "namespaces":
        if not able.works:
            raise ConfigurationError(f"backend namespaces cannot work here: {able.reason}; use --backend relay")
        return Choice("namespaces", "as asked for")
    if not able.works:
        return Choice("relay", f"namespaces cannot work here: {able.reason}")
    if topology.delays and not able.delay:
        return Choice("relay", "the topology has latencies, and this kernel's namespaces cannot delay (no netem)")
    return Choice("namespaces", "root may make network namespaces here, and they shape all traffic")


class Edge:
    """Emulated network whose links change by the topology's schedule.

    Args:
        topology: Network to emulate.
        backend: "auto", "relay" or "namespaces".
        told: Called at each change of a link with the seconds since the start and words, in a thread of its own.
        events: Event log; each change is written there as a fault that was injected.

    Attributes:
        choice: The backend, with the reason.
        backend: The backend itself.
    """

    def __init__(
        self,
        topology: Topology,
        backend: str = "auto",
        *,
        told: Callable[[float, str], None] | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.topology = topology
        self.choice = choose_backend(topology, backend)
        self._told = told
        self._events = events
        self._states = links_of(topology, 0.0)
        self._begun: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="edge-schedule", daemon=True)
        self.backend: Backend = (
            RelayBackend(topology) if self.choice.backend == "relay" else namespaces.NamespaceBackend(topology)
        )
        try:
            for pair, state in self._states.items():
                self.backend.apply(pair, state)
        except BaseException:
            self.backend.close()
            raise

    # ------------------------------------------------------------------ for callers that start processes

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs `command` on a node."""
        return self.backend.command(node, command)

    def environment(self, node: str) -> dict[str, str]:
        """Returns the settings of chaos-lightning for processes on a node, as environment variables."""
        access_bps = self.topology.access_bps.get(node)
        return {
            **({"CHAOS_INGRESS_BPS": f"{access_bps:g}"} if access_bps else {}),
            "CHAOS_NODE": node,
            "CHAOS_HOST": node,
            "CHAOS_ENDPOINT": self.backend.endpoint,
            "CHAOS_NEIGHBOURS": ",".join(self.topology.neighbours(node)),
            "CHAOS_BY_REFERENCE": "0",
            **self.backend.environment(node),
        }

    # ------------------------------------------------------------------ time

    def start(self) -> None:
        """Starts the schedule; its time 0 is the moment of the call."""
        with self._changed:
            assert self._begun is None, "the schedule runs already"
            self._begun = time.monotonic()
        self._thread.start()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the schedule was started; 0 before that."""
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    def links(self) -> dict[Pair, LinkState]:
        """Returns the present state of all links."""
        with self._changed:
            return dict(self._states)

    def wait_until(self, t_s: float, deadline_s: float) -> bool:
        """Waits until the schedule has been applied up to time `t_s`; returns False if the deadline came first."""
        end = time.monotonic() + deadline_s
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or (self._begun is not None and self._done_s >= t_s), end - time.monotonic()
            )

    _done_s = -1.0

    def _run(self) -> None:
        assert self._begun is not None
        t_s: float | None = 0.0
        while t_s is not None:
            with self._changed:
                left = self._begun + t_s - time.monotonic()
                if self._changed.wait_for(lambda: self._closed, max(0.0, min(left, _LATE_S))):
                    return
            if left > _LATE_S:
                continue
            self._apply(t_s)
            t_s = next_change_s(self.topology, t_s)
        with self._changed:
            self._done_s = float("inf")
            self._changed.notify_all()

    def _apply(self, t_s: float) -> None:
        """Applies the link changes that are due at time `t_s`."""
        after = links_of(self.topology, t_s)
        for pair, state, text in differences(self._states, after):
            before = self._states[pair]
            kind = _KINDS[state.condition] if state.condition is not before.condition else "rate"
            try:
                self.backend.apply(pair, state)
            except (OSError, RuntimeError, ConfigurationError) as error:
                text = f"{text} FAILED: {error}"
                logger.error("link %s - %s: %s", *pair, text)
            if self._events is not None:
                self._events.emit(
                    "fault_injected",
                    kind=kind,
                    node=pair[0],
                    peer=pair[1],
                    rate_bps=state.rate_bps,
                    latency_s=state.latency_s,
                    text=text,
                )
            if self._told is not None:
                self._told(t_s, f"{pair[0]} - {pair[1]}: {text}")
        with self._changed:
            self._states, self._done_s = after, t_s
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the schedule and the backend, after the processes on the nodes have ended. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(30.0)
        self.backend.close()

    def __enter__(self) -> Edge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
