"""etcd servers of one's own, on this machine: for development, demonstrations and tests. Not for production.

Theory of operation. Each server is Debian's `etcd` with a folder of its own and ports of its own on loopback. A cluster
is given all its members' addresses when it begins, and remembers them, so ports are chosen before anything is started,
and kept. Elections take half of etcd's default times, as suits one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.runtime.etcd_client import EtcdAddress, EtcdClient, open_client
from chaos_lightning.runtime.options import ETCD

HEARTBEAT_MS, ELECTION_MS = 50, 500
_POLITE_S = 1.0
"""The leader of servers that all end looks for a successor for some seconds; what it answered is on the disk."""
ADVICE = (
    "install etcd (Debian: apt-get install etcd-server), or name the servers that you have: --store etcd://HOST:PORT"
)


@dataclass(slots=True)
class EtcdServer:
    """One server process."""

    name: str
    folder: Path
    client_port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def pid(self) -> int:
        if self.process is None:
            raise StoreError(f"{self.name} was not started")
        return self.process.pid

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_tail(self, lines: int = 5) -> str:
        try:
            return " | ".join((self.folder / "etcd.log").read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"its log cannot be read: {error}"


@dataclass
class EtcdServers:
    """A cluster of one, three or five; end it with `close` or as a context.

    Attributes:
        folder: Data and logs; what lies there is continued.
        count: How many servers.
        options: Further arguments of etcd.
    """

    folder: Path
    count: int = 1
    options: Sequence[str] = ()
    servers: list[EtcdServer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.count not in (1, 3, 5):
            raise ConfigurationError(
                f"{self.count} etcd servers: expected 1, 3 or 5 (a majority must be able to go on)"
            )
        self.binary = find_etcd()
        ports = self._ports()
        for number in range(self.count):
            name = f"etcd-{number + 1}"
            self.servers.append(EtcdServer(name, self.folder / name, ports[2 * number], ports[2 * number + 1]))

    def _ports(self) -> list[int]:
        """Those of the last time, since a cluster remembers where its servers are; else free ones."""
        kept = self.folder / "ports.json"
        try:
            ports = json.loads(kept.read_text())
            if isinstance(ports, list) and len(ports) == 2 * self.count and all(type(p) is int for p in ports):
                return ports
            raise ConfigurationError(f"{self.folder} holds a cluster of another size; choose another folder")
        except FileNotFoundError:
            ports = free_ports(2 * self.count)
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            kept.write_text(json.dumps(ports))
            return ports
        except ValueError as error:
            raise ConfigurationError(f"{kept} is damaged ({error}); choose another folder") from error

    @property
    def address(self) -> str:
        """For `--store`."""
        return f"{ETCD}{','.join(server.endpoint for server in self.servers)}"

    def client(self, kind: str = "own") -> EtcdClient:
        return open_client(EtcdAddress(servers=tuple(server.endpoint for server in self.servers), client=kind))

    def start(self, timeout_s: float = 30.0) -> Self:
        """All of them; returns when they answer.

        Raises:
            StoreError: One ended, or they did not answer in time; quotes the log.
        """
        for server in self.servers:
            self.run(server)
        self.wait_ready(timeout_s)
        return self

    def run(self, server: EtcdServer) -> None:
        """Starts this one, also again, on its own data."""
        server.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        cluster = ",".join(f"{s.name}={s.peer_url}" for s in self.servers)
        command = [
            self.binary,
            *("--name", server.name),
            *("--data-dir", str(server.folder / "data")),
            *("--listen-client-urls", f"http://{server.endpoint}"),
            *("--advertise-client-urls", f"http://{server.endpoint}"),
            *("--listen-peer-urls", server.peer_url),
            *("--initial-advertise-peer-urls", server.peer_url),
            *("--initial-cluster", cluster),
            *("--initial-cluster-state", "new"),
            *("--heartbeat-interval", str(HEARTBEAT_MS)),
            *("--election-timeout", str(ELECTION_MS)),
            *self.options,
        ]
        # etcd also reads ETCD_* from the environment, which a user may have set for another one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (server.folder / "etcd.log").open("ab") as log:
            server.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_ready(self, timeout_s: float) -> None:
        """All that were started answer.

        Raises:
            StoreError: One ended, or they did not answer in time; quotes the log.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(self.client()) as client:
            while True:
                for server in self.servers:
                    if not server.running():
                        raise StoreError(f"{server.name} ended at once: {server.log_tail()}")
                with contextlib.suppress(StoreError):
                    if client.get("ready") is None and client.status().leader:
                        return
                if time.monotonic() > deadline:
                    raise StoreError(f"etcd did not answer within {timeout_s:g} s: {self.servers[0].log_tail()}")

    def leader(self) -> EtcdServer:
        """The one that leads now."""
        for server in self.servers:
            if server.running():
                with contextlib.closing(EtcdClient(EtcdAddress(servers=(server.endpoint,)), deadline_s=1.0)) as client:
                    status = client.status()
                    if status.leader and status.leader == status.header.member_id:
                        return server
        raise StoreError("no etcd server says that it leads")

    def kill(self, server: EtcdServer) -> None:
        """SIGKILL."""
        if server.process is not None:
            server.process.kill()
            server.process.wait()

    def close(self) -> None:
        """Ends all of them. Idempotent."""
        for server in self.servers:
            if server.running() and server.process is not None:
                server.process.send_signal(signal.SIGCONT)
                server.process.terminate()
        for server in self.servers:
            if server.process is not None:
                try:
                    server.process.wait(_POLITE_S)
                except subprocess.TimeoutExpired:
                    self.kill(server)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def find_etcd() -> str:
    """The program; Debian puts it where a user's PATH leads.

    Raises:
        ConfigurationError: It is not installed; says how to.
    """
    found = shutil.which(
        "etcd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/bin", "/usr/local/bin", "/usr/sbin"))
    )
    if found is None:
        raise ConfigurationError(f"the program etcd is not installed: {ADVICE}")
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    with contextlib.ExitStack() as stack:
        return list(_bound(stack, count))


def _bound(stack: contextlib.ExitStack, count: int) -> Iterator[int]:
    for _ in range(count):
        probe = stack.enter_context(socket.socket())
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]
