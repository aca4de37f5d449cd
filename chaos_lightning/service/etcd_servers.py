"""Runs etcd servers on this machine for development, demonstrations and tests. Not for production.

Theory of operation. Each server is Debian's `etcd` with a folder of its own and ports of its own on loopback. A cluster
is given all its members' addresses when it begins, and remembers them, so ports are chosen before anything is started,
and kept. Elections take half of etcd's default times, as suits one machine. One that ends is started again, as often as
it likes if it ran well before; one that ends at once, time after time, will not do better, and is given up.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.machine.restarts import RestartPolicy, Restarts
from chaos_lightning.service.etcd_address import EtcdAddress
from chaos_lightning.service.etcd_client import EtcdClient, open_client
from chaos_lightning.service.options import ETCD

HEARTBEAT_MS, ELECTION_MS = 50, 500
_POLITE_S = 1.0
"""Seconds that servers get to end by themselves. The leader of servers that all end looks for a successor for some
seconds; what it answered is on the disk.
"""
_LOOK_S = 0.05
"""Seconds between two rounds of asking servers whether they are ready."""
QUICK_S, MOST_QUICK = 10.0, 3
"""Seconds, and number of times in a row: a server that ends within this time, so many times, is not started again."""
_RESTARTS = RestartPolicy(0.0, 0.0, most=MOST_QUICK)
_FATAL = re.compile(r"^[-0-9: .]+ C \| (?:\S+: )?(?P<plain>.+)$|^panic: (?P<panic>.+)$")
"""Pattern of lines by which etcd says why it ends, in its old format; in the newer one lines are JSON."""
ADVICE = (
    "install etcd (Debian: apt-get install etcd-server), or name the servers that you have: --store etcd://HOST:PORT"
)


@dataclass(slots=True)
class EtcdServer:
    """Process of one etcd server."""

    name: str
    folder: Path
    client_port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    """Time at which the server was started last, by time.monotonic()."""
    restarts: Restarts = field(default_factory=lambda: Restarts(_RESTARTS))
    """Times in a row that the server has ended soon."""
    _log_at: int = 0
    """Position (bytes) at which its log of the last start begins."""

    @property
    def log(self) -> Path:
        """Path of the etcd server's log."""
        return self.folder / "etcd.log"

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

    def last_words(self, lines: int = 3) -> str:
        """Returns the etcd server's fatal error since its last start; if it logged none, its last lines."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_at)
                said = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        fatal = [words for line in said if (words := _fatal_words(line))]
        return fatal[-1] if fatal else " | ".join(said[-lines:]) or "nothing"


@dataclass
class EtcdServers:
    """Local etcd cluster of one, three or five servers; end it with `close`, or use it as a context manager.

    Attributes:
        folder: Folder of data and logs; a cluster whose data are there is continued.
        count: Number of servers.
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
        """Returns the ports that the cluster used before, since it remembers them; free ones if it is new."""
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
        """Address of the etcd cluster, for `--store`."""
        return f"{ETCD}{','.join(server.endpoint for server in self.servers)}"

    def client(self, kind: str = "own") -> EtcdClient:
        return open_client(EtcdAddress(servers=tuple(server.endpoint for server in self.servers), client=kind))

    def start(self, timeout_s: float = 30.0) -> Self:
        """Starts all etcd servers; returns once they answer.

        Raises:
            StoreError: A server ended, or did not answer in time; quotes the log.
        """
        for server in self.servers:
            self.run(server)
        self.wait_ready(timeout_s)
        return self

    def run(self, server: EtcdServer) -> None:
        """Starts an etcd server, or restarts it with its data."""
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
        with server.log.open("ab") as log:
            server.began, server._log_at = time.monotonic(), log.tell()
            server.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until each etcd server answers reads that need a majority, which may need a server that is just
        starting.

        Raises:
            StoreError: One ended, or they did not answer in time; quotes the log.
        """
        deadline = time.monotonic() + timeout_s
        waited_for = list(self.servers)
        while True:
            for server in self.servers:
                if not server.running():
                    raise StoreError(f"{server.name} ended at once: {server.last_words()} ({server.log})")
            waited_for = [server for server in waited_for if not _answers(server)]
            if not waited_for:
                return
            if time.monotonic() > deadline:
                silent = ", ".join(server.name for server in waited_for)
                raise StoreError(f"{silent} did not answer within {timeout_s:g} s: {waited_for[0].last_words()}")
            time.sleep(_LOOK_S)

    def tend(self, quick_s: float = QUICK_S) -> list[str]:
        """Restarts etcd servers that have ended; returns a line on each. Call it every second or so.

        Args:
            quick_s: Seconds; a server that ran for less counts as ended at once.

        Raises:
            StoreError: A server ended at once several times in a row; quotes its last words. The others run on.
        """
        told = []
        for server in self.servers:
            if server.process is None or (code := server.process.poll()) is None:
                continue
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            ran_s, words = time.monotonic() - server.began, server.last_words()
            server.restarts.failed(0.0 if ran_s < quick_s else math.inf)
            if server.restarts.exhausted:
                raise StoreError(
                    f"{server.name} at {server.endpoint} has ended {server.restarts.failures} times in a row within "
                    f"{quick_s:g} s of its start, the last time {how}, and is not started again. "
                    f"Its last words: {words}. "
                    f"Everything that it said is in {server.log}, its data in {server.folder / 'data'}; if the port is "
                    "taken, end who has it, and if the data are damaged, choose another folder"
                )
            told.append(f"{server.name} has ended {how} after {ran_s:.0f} s, and is started again: {words}")
            self.run(server)
        return told

    def leader(self) -> EtcdServer:
        """Returns the etcd server that leads now."""
        for server in self.servers:
            if server.running():
                with contextlib.closing(EtcdClient(EtcdAddress(servers=(server.endpoint,)), deadline_s=1.0)) as client:
                    status = client.status()
                    if status.leader and status.leader == status.header.member_id:
                        return server
        raise StoreError("no etcd server says that it leads")

    def kill(self, server: EtcdServer) -> None:
        """Kills an etcd server with SIGKILL."""
        if server.process is not None:
            server.process.kill()
            server.process.wait()

    def close(self) -> None:
        """Ends all etcd servers. Idempotent."""
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


def _answers(server: EtcdServer) -> bool:
    """Returns whether an etcd server answers reads that need a majority."""
    client = EtcdClient(EtcdAddress(servers=(server.endpoint,)), deadline_s=1.0)
    with contextlib.closing(client), contextlib.suppress(StoreError):
        client.get("ready")
        return True
    return False


def _fatal_words(line: str) -> str:
    """Returns the fatal error that a line of etcd's log reports; "" if it reports none."""
    if (found := _FATAL.match(line)) is not None:
        return found["plain"] or f"panic: {found['panic']}"
    with contextlib.suppress(ValueError, AttributeError):
        entry = json.loads(line)
        if entry.get("level") in ("fatal", "panic"):
            return ": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key))
    return ""


def find_etcd() -> str:
    """Returns the path of the program etcd, searched in PATH and in Debian's folders.

    Raises:
        ConfigurationError: etcd is not installed; the message says how to install it.
    """
    found = shutil.which(
        "etcd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/bin", "/usr/local/bin", "/usr/sbin"))
    )
    if found is None:
        raise ConfigurationError(f"the program etcd is not installed: {ADVICE}")
    return found
