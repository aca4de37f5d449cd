"""Helpers for tests of replication: donors on loopback, and proxies that damage what they forward."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from chaos_lightning.replication import (
    Endpoint,
    ModuleState,
    PullConfig,
    PullReport,
    SourceStats,
    StateAccess,
    StateServer,
    StateServerConfig,
    TransferPolicy,
    pull_state,
)
from chaos_lightning.replication.table import StateTable

HEAD = "00112233445566aa"
OTHER = "ffeeddccbbaa9988"
SEQ = 7
LIMIT_S = 60.0
"""No wait of a test is longer; none is measured."""


class Plain:
    """State access to given tensors and a dict as the manifest."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], manifest: Mapping[str, object] | None = None) -> None:
        self.named = list(tensors)
        self.values: dict[str, object] = dict(manifest or {})
        self.adopted: Mapping[str, Any] | None = None

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self.named

    def manifest(self) -> dict[str, object]:
        return self.values

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        pass

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        self.adopted = manifest


def numbered(count: int, elements: int, *, seed: int = 0) -> Plain:
    """Returns a state of `count` float tensors of `elements` numbers that depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return Plain([(f"t{i}", torch.randn(elements, generator=generator)) for i in range(count)], {"step": seed})


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def dial(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.address, endpoint.port), timeout=LIMIT_S)


@dataclass
class Acceptor:
    """Listener that calls `handle` for each connection, in a thread of its own."""

    handle: Callable[[socket.socket], object]
    listener: socket.socket = field(default_factory=listen)
    threads: list[threading.Thread] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._main = threading.Thread(target=self._run, daemon=True)
        self._main.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.sockets.append(sock)
                self.threads.append(threading.Thread(target=self.handle, args=(sock,), daemon=True))
                self.threads[-1].start()

    def endpoint(self, member: str) -> Endpoint:
        return Endpoint(member, "127.0.0.1", self.listener.getsockname()[1])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._main.join(LIMIT_S)
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(LIMIT_S)
        for sock in self.sockets:
            sock.close()


@dataclass
class ThreadDonor:
    """Donor in this process: a StateServer behind a listening socket."""

    member: str
    server: StateServer
    acceptor: Acceptor
    endings: list[str]

    @property
    def endpoint(self) -> Endpoint:
        return self.acceptor.endpoint(self.member)

    def close(self) -> None:
        self.server.close()
        self.acceptor.close()


def start_donor(member: str, config: StateServerConfig | None = None) -> ThreadDonor:
    server = StateServer(config)
    endings: list[str] = []
    return ThreadDonor(member, server, Acceptor(lambda sock: endings.append(server.serve(sock, "joiner"))), endings)


@contextlib.contextmanager
def donors(*members: str, config: StateServerConfig | None = None) -> Iterator[list[ThreadDonor]]:
    """Yields running donors that have not published anything yet."""
    started = [start_donor(m, config) for m in members]
    try:
        yield started
    finally:
        for donor in started:
            donor.close()


@contextlib.contextmanager
def publishing(state: Any, *members: str, config: StateServerConfig | None = None) -> Iterator[list[ThreadDonor]]:
    """Yields running donors that all serve the given state at the header HEAD."""
    with donors(*members, config=config) as started:
        for donor in started:
            donor.server.publish(HEAD, SEQ, state.tensors(), state.manifest())
        yield started


Damage = Callable[[bytearray, int], None]


class Proxy:
    """Proxy in front of a donor; `damage(data, position)` may change the donor's bytes, or raise an error to cut the
    connection.
    """

    def __init__(self, target: Endpoint, damage: Damage) -> None:
        self._target = target
        self._damage = damage
        self._position = 0
        self.acceptor = Acceptor(self._handle)

    @property
    def endpoint(self) -> Endpoint:
        return self.acceptor.endpoint(self._target.member)

    def _handle(self, near: socket.socket) -> None:
        far = dial(self._target)
        back = threading.Thread(target=self._pump, args=(near, far, None), daemon=True)
        back.start()
        self._pump(far, near, self._damage)
        back.join(LIMIT_S)
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket, damage: Damage | None) -> None:
        with contextlib.suppress(OSError, _CutError):
            while data := bytearray(source.recv(1 << 16)):
                if damage is not None:
                    damage(data, self._position)
                    self._position += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.acceptor.close()


class _CutError(Exception):
    pass


def cut() -> None:
    """Raises the error that makes a proxy cut its connection; to be called within `damage`."""
    raise _CutError


class Network(nn.Module):
    """Model with two tied parameters, a batch norm and a buffer that is not persistent."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 8)
        self.tied = nn.Linear(8, width)
        self.tied.weight = self.first.weight
        self.register_buffer("scratch", torch.arange(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x)) + self.tied(x)))


def train(state: ModuleState, steps: int, *, seed: int = 0) -> None:
    """Makes some optimizer steps on random data, which depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        state.module(torch.randn(16, 8, generator=generator)).square().mean().backward()
        for optimizer in state.optimizers:
            optimizer.step()
        for extra in state.extra.values():
            if hasattr(extra, "step"):
                extra.step()


QUICK = PullConfig(deadline_s=LIMIT_S, stall_timeout_s=0.5, survey_grace_s=0.2, request_nbytes=1 << 18)
PATIENT = PullConfig(deadline_s=LIMIT_S, stall_timeout_s=LIMIT_S, request_nbytes=1 << 18)


class First(TransferPolicy):
    """Policy that gives all work to one donor as long as it lives, so that a planned failure is sure to hit it."""

    def __init__(self, member: str) -> None:
        self.member = member

    def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
        return source == self.member or self.member not in stats


def pull(
    endpoints: list[Endpoint], state: StateAccess, config: PullConfig = PATIENT, policy: TransferPolicy | None = None
) -> PullReport:
    return pull_state(endpoints, dial, head=HEAD, seq=SEQ, state=state, config=config, policy=policy)
