"""Puts members on an emulated network: which relay they dial, how fast they send to each peer, which machine they claim
to be on.

Theory of operation. The product knows three things that may be put in place of the network and the machine as they are:
`transport.medium.install` (how connections are made, and a pacer that bounds what is sent on them) and
`machine.process_table.count_as`. The product reads nothing from the environment for that. The lab does, because it
starts ordinary commands of a user (`python train.py`, torchrun and its workers, a scheduler that a member starts), and
all of these inherit the environment:

- CHAOS_LINK_RELAY=HOST:PORT: members dial a relay instead of their peers, and tell it in one line of JSON who calls
  whom and where (relay.py). The handshake with its proofs passes through it from end to end.
- CHAOS_EMULATE={"node-1": 3e8}: bits per second that this process may send to a peer, by its id, name or node.
- CHAOS_HOST=NAME: this process counts as on a machine of its own.

`carried` adds to such an environment a folder on PYTHONPATH that holds nothing but a `sitecustomize.py`. Python's own
start-up imports that in every interpreter, workers of workers included, and it calls `install_from`. So a process that
no lab has started has no hook at all. Functions that run in a child of multiprocessing call `enter` themselves
(processes.py): their interpreter has started before.

Connections to one peer, such as a link and the state transfers beside it, share one rate (`Shares`): each connection
that has bytes waiting gets an equal part, the others keep a small part to begin with, and the parts are set anew
several times a second. Their sum never exceeds the rate; a connection that begins to send has its small part until they
are set again. A network with delay, or an access that several links share, needs the relay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine import process_table
from chaos_lightning.transport import medium
from chaos_lightning.transport.pacing import pace

RELAY = "CHAOS_LINK_RELAY"
RATES = "CHAOS_EMULATE"
HOST = "CHAOS_HOST"
_HOOK = str(Path(__file__).with_name("injected"))
"""Folder that holds the sitecustomize.py, and nothing else."""

IDLE_PART = 1 / 16
"""Share of the rate for a connection with nothing to send; many such connections have a quarter in all."""
_LINGER_S = 0.15
"""Seconds for which a connection counts as busy after the last look that found bytes waiting on it."""


# ------------------------------------------------------------------ the environment


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns a program's environment, extended so that a Python program puts itself on the emulated network it
    names.
    """
    found = dict(environment)
    if any(found.get(name) for name in (RELAY, RATES, HOST)):
        paths = [p for p in found.get("PYTHONPATH", "").split(os.pathsep) if p and p != _HOOK]
        found["PYTHONPATH"] = os.pathsep.join([_HOOK, *paths])
    return found


def install_from(environment: Mapping[str, str]) -> None:
    """Puts this process on the emulated network that an environment describes, if it describes one.

    Raises:
        ConfigurationError: The relay or the rates cannot be read.
    """
    relay, rates = environment.get(RELAY, ""), rates_from(environment.get(RATES, ""))
    if relay or rates:
        medium.install(Emulated(relay, rates))
    if environment.get(HOST):
        process_table.count_as(environment[HOST])


def enter(environment: Mapping[str, str]) -> None:
    """Adds variables to this process's environment, which its children inherit, and joins the emulated network they
    describe.
    """
    os.environ.update(environment)
    os.environ.update(carried(os.environ))
    install_from(os.environ)


@contextlib.contextmanager
def emulating(*, relay: str = "", rates: Mapping[str, float] | None = None, host: str = "") -> Iterator[Emulated]:
    """Puts this process on an emulated network and an emulated machine within the block, and restores the former ones
    after.
    """
    emulated = Emulated(relay, rates or {})
    before, was = medium.install(emulated), process_table.count_as(host)
    try:
        yield emulated
    finally:
        medium.install(before)
        process_table.count_as(was)


# ------------------------------------------------------------------ the medium


class Emulated:
    """Emulated network as one process sees it: the relay that its members dial, and the rates at which they send.

    Args:
        relay: HOST:PORT through which members are dialled; "": they are dialled directly.
        rates_bps: Most that is sent to each peer, bits per second, by id, name or node.
    """

    def __init__(self, relay: str, rates_bps: Mapping[str, float]) -> None:
        host, _, port = relay.rpartition(":")
        if relay and not (host and port.isdigit()):
            raise ConfigurationError(f"{RELAY}={relay!r}: expected HOST:PORT")
        self._relay = (host, int(port)) if relay else None
        self._rates_bps = dict(rates_bps)
        self._pacers: list[RatePacer] = []

    def connect(self, address: str, port: int, *, me: str, peer: str, timeout_s: float) -> socket.socket:
        if self._relay is None:
            return socket.create_connection((address, port), timeout=timeout_s)
        sock = socket.create_connection(self._relay, timeout=timeout_s)
        said = {"me": me, "peer": peer, "address": address, "port": port}
        try:
            sock.sendall(json.dumps(said).encode() + b"\n")
        except BaseException:
            sock.close()
            raise
        return sock

    def pacer(self) -> RatePacer:
        self._pacers.append(RatePacer(self._rates_bps, relayed=self._relay is not None))
        return self._pacers[-1]

    def change(self, rates_bps: Mapping[str, float]) -> None:
        """Changes the rates for all members of this process; must be called in the thread of their connections."""
        self._rates_bps = dict(rates_bps)
        for pacer in self._pacers:
            pacer.change(rates_bps)


class RatePacer:
    """Limits the rate at which one member sends to each peer; a `transport.medium.Pacer`.

    Args:
        rates_bps: Bits per second, by id, name or node of the peer.
        relayed: Whether all links go through a relay.
    """

    def __init__(self, rates_bps: Mapping[str, float], *, relayed: bool = False) -> None:
        self._rates_bps = checked(rates_bps)
        self._relayed = relayed
        self._shares: dict[str, Shares] = {}

    def emulates(self, peer: str) -> bool:
        return self._relayed or rate_to(self._rates_bps, peer) is not None

    def change(self, rates_bps: Mapping[str, float]) -> None:
        """Sets the limits, bit/s, on what is sent to each peer from now on; peers without one are not limited.

        Raises:
            ConfigurationError: A rate is not positive.
        """
        self._rates_bps = checked(rates_bps)
        now = time.monotonic()
        for peer, shares in self._shares.items():
            shares.rate_bps = rate_to(self._rates_bps, peer)
            shares.settle(now)

    def begin(self, peer: str, sock: socket.socket) -> None:
        rate = rate_to(self._rates_bps, peer)
        if rate is not None:
            pace(sock, rate * IDLE_PART)  # until the loop's thread gives it its share

    def join(self, peer: str, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        if peer not in self._shares:
            self._shares[peer] = Shares(rate_to(self._rates_bps, peer))
        self._shares[peer].join(sock, bound, now)

    def leave(self, peer: str, sock: socket.socket, now: float) -> None:
        shares = self._shares.get(peer)
        if shares is not None:
            shares.leave(sock, now)
            if not shares:
                del self._shares[peer]

    def settle(self, now: float, waiting: Callable[[str], Collection[socket.socket]]) -> None:
        for peer, shares in self._shares.items():
            if shares.rate_bps is not None and len(shares) > 1:
                shares.settle(now, waiting(peer))


@dataclass(slots=True)
class _Connection:
    bound: Callable[[float | None], None]
    busy_at: float
    rate_bps: float | None = None


def _level(rate_bps: float | None) -> float:
    return math.inf if rate_bps is None else rate_bps


class Shares:
    """One rate limit shared by all connections on which a member sends to one peer. All methods belong to one thread.

    Args:
        rate_bps: Bits per second; None: no bound.
    """

    def __init__(self, rate_bps: float | None) -> None:
        self.rate_bps = rate_bps
        self._connections: dict[socket.socket, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def join(self, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        """Adds a connection; it counts as busy at first, since a new connection usually has something to send.

        Args:
            sock: Socket of the connection, which names it.
            bound: Sets its own bound in bits per second; None takes it away.
            now: Monotonic seconds.
        """
        # A new connection counts as unbounded before: the others make room for it first.
        self._connections[sock] = _Connection(bound, now, 0.0 if self.rate_bps is not None else None)
        self.settle(now)

    def leave(self, sock: socket.socket, now: float) -> None:
        """Removes a connection; unknown ones are ignored."""
        if self._connections.pop(sock, None) is not None:
            self.settle(now)

    def settle(self, now: float, waiting: Collection[socket.socket] = ()) -> None:
        """Divides the rate among the connections, the busy ones first, and sets each one's limit.

        Args:
            now: Monotonic seconds.
            waiting: Connections that have bytes to send now.
        """
        for sock in waiting:
            if sock in self._connections:
                self._connections[sock].busy_at = now
        changes = [(self._connections[s], part) for s, part in self._parts(now).items()]
        changes = [(connection, part) for connection, part in changes if part != connection.rate_bps]
        # Those that get less come first, so that the sum is never too large.
        for connection, part in sorted(changes, key=lambda change: _level(change[1]) - _level(change[0].rate_bps)):
            connection.rate_bps = part
            connection.bound(part)

    def _parts(self, now: float) -> dict[socket.socket, float | None]:
        rate = self.rate_bps
        if rate is None:
            return dict.fromkeys(self._connections)
        # If none has anything to send, the first one counts as busy: it is the link, where the next bytes usually come.
        busy = [s for s, c in self._connections.items() if now - c.busy_at <= _LINGER_S]
        busy = busy or list(self._connections)[:1]
        others = len(self._connections) - len(busy)
        small = rate * min(IDLE_PART, 0.25 / others) if others else 0.0
        large = (rate - others * small) / max(1, len(busy))
        return {s: large if s in busy else small for s in self._connections}


# ------------------------------------------------------------------ tables of rates


def rates_from(text: str, what: str = RATES) -> dict[str, float]:
    """Parses rates by peer from JSON text; "" means none.

    Raises:
        ConfigurationError: Names the entry that cannot be a rate.
    """
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{what} is no JSON ({error}): {text[:200]}") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f'{what} must be an object such as {{"node-1": 3e8}}, got {text[:200]}')
    return checked({str(name): rate for name, rate in given.items()}, what)


def checked(rates: Mapping[str, object], what: str = "emulate") -> dict[str, float]:
    """Returns the rates by peer as floats, after checking that each is a positive number of bit/s.

    Raises:
        ConfigurationError: Names the entry.
    """
    table: dict[str, float] = {}
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise ConfigurationError(f"{what}: {name!r} has the rate {rate!r}; expected positive bits per second")
        table[name] = float(rate)
    return table


def rate_to(table: Mapping[str, float], member_id: str) -> float | None:
    """Returns the rate to a member, found by its id, name or node (names are NODE-RANK); None if there is none."""
    name = member_id.rpartition("~")[0] or member_id
    for key in (member_id, name, name.rpartition("-")[0]):
        if key in table:
            return table[key]
    return None
