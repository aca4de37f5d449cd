"""Keeps the control stream from a cluster to the leader, and the beat by which the cluster stays in the job.

Theory of operation. In a cluster of one process the machine hears at once what the leader says, and says hello and
beats itself. All ranks of an elastic cluster hold the same `ClusterMachine`, which hears what the leader says only when
a commit of the inner job carries it. A commit may take its time: a step is long, or ranks are being replaced. So what
keeps an incarnation alive is said here without it: the hello on each new stream, and the last heartbeat again and
again. Both are of a commit that all ranks know. The first rank has the stream, and the next rank opens another once the
first is gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from chaos_lightning.errors import ChaosError, RefusedError
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.leaving import tell_refusal
from chaos_lightning.outer.cluster.server_start import host_for_cluster
from chaos_lightning.outer.exchange.control_client import control_client
from chaos_lightning.outer.rules.effects import Connected, Disconnected, TimePassed, Told
from chaos_lightning.outer.rules.messages import Beat, ClusterHello
from chaos_lightning.outer.rules.ranks_machine import RankNews
from chaos_lightning.security.credentials import Secret

_log = logging.getLogger("chaos_lightning")


class Attended(Protocol):
    """Interface of a cluster that has a stream. Any thread may call it."""

    def happened(self, event: RankNews) -> None:
        """Takes news for the machine."""

    def refused(self, error: ChaosError) -> None:
        """Takes why the server will not let this cluster in, or cannot be had, before it was in."""

    @property
    def was_in(self) -> bool:
        """Whether the cluster has taken part in the job, in its present incarnation or in one that was dismissed."""

    @property
    def job_id(self) -> str:
        """Hash that names the job; "" until the leader has let this cluster in."""


class Attendant:
    """Control stream of one incarnation of a cluster. Methods may be called from any thread.

    Args:
        options: Options of the cluster.
        secret: Token or credentials.
        heartbeat_s: Seconds between two heartbeats.
        cluster: The cluster.
        hello: Returns the present first message of a stream; None: the machine says it, and the heartbeats.
        hosts: Whether a server is to be started first, where none is.
    """

    def __init__(
        self,
        options: ClusterOptions,
        secret: Secret,
        heartbeat_s: float,
        cluster: Attended,
        *,
        hello: Callable[[], ClusterHello] | None = None,
        hosts: bool = True,
    ) -> None:
        self.trouble = ""
        """Reason for which there is no stream; "" while there is one."""
        self._options, self._heartbeat_s, self._cluster = options, heartbeat_s, cluster
        self._hello, self._hosts = hello, hosts
        self._beat: Beat | None = None
        self._closing = threading.Event()
        self._client = control_client(
            options.endpoints,
            secret,
            call="Attend",
            on_connected=self._connected,
            on_message=lambda message: cluster.happened(Told(message)),
            on_disconnected=self._disconnected,
            on_trouble=self._note_trouble,
            revive=lambda: self._host(again=True),
        )
        self._thread = threading.Thread(target=self._run, name="chaos-outer-beat", daemon=True)

    def start(self) -> None:
        """Opens the stream, in a thread of its own."""
        self._thread.start()

    def say(self, message: Any) -> None:
        """Sends a message to the leader, but no hello that `hello` says anyway."""
        if self._hello is not None and isinstance(message, Beat):
            self._beat = message
        if self._hello is None or not isinstance(message, ClusterHello):
            self._client.say(message)

    def close(self) -> None:
        """Ends the stream once all queued messages are sent."""
        self._closing.set()
        self._client.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # ------------------------------------------------------------------ threads of its own

    def _run(self) -> None:
        try:
            if self._hosts:
                self._host(again=self._cluster.was_in)
        except ChaosError as error:
            self.trouble = str(error)
            if not self._cluster.was_in:
                self._cluster.refused(error)
                return
            # An outage ends no cluster: the stream's thread has the server started again and again.
            _log.warning("cluster %s waits for its parameter server: %s", self._options.name, error)
        if self._closing.is_set():
            return
        self._client.start()
        while not self._closing.wait(self._heartbeat_s):
            if self._beat is not None:
                self._client.say(self._beat)
            self._cluster.happened(TimePassed())

    def _host(self, *, again: bool) -> None:
        host_for_cluster(self._options, again=again, job_id=self._cluster.job_id, given_up=self._closing.is_set)

    def _connected(self) -> None:
        self.trouble = ""
        if self._hello is not None:
            self._client.say(self._hello())
        self._cluster.happened(Connected())

    def _disconnected(self, reason: str) -> None:
        self.trouble = reason
        self._cluster.happened(Disconnected())

    def _note_trouble(self, error: ChaosError) -> None:
        self.trouble = str(error)
        if isinstance(error, RefusedError) and not self._cluster.was_in:
            self._cluster.refused(error)
        elif isinstance(error, RefusedError):
            tell_refusal(self._options.name, error)
