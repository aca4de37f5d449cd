"""Keeps the control stream from a cluster of several ranks to the leader: the first rank opens it, and the next rank
opens another once the first is gone.

Theory of operation. All ranks hold the same `ClusterMachine`, which hears what the leader says only when a commit of
the inner job carries it. A commit may take its time: a step is long, or ranks are being replaced. So what keeps an
incarnation alive is said here without it: the hello on each new stream, and the last heartbeat again and again. Both
are of a commit that all ranks know.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from chaos_lightning.errors import ChaosError, RefusedError
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.leaving import tell_refusal
from chaos_lightning.outer.cluster.server_start import host_for_cluster
from chaos_lightning.outer.exchange.control_client import control_client
from chaos_lightning.outer.rules.effects import Connected, Disconnected, TimePassed, Told
from chaos_lightning.outer.rules.messages import Beat, ClusterHello, FromCluster
from chaos_lightning.outer.rules.ranks_machine import RankNews
from chaos_lightning.outer.rules.types import NO_VERSION
from chaos_lightning.security.credentials import Secret

_log = logging.getLogger("chaos_lightning")


class Attendant:
    """Control stream from one rank of a cluster to the leader. Methods may be called from any thread.

    Args:
        options: Options of the cluster.
        secret: Token or credentials.
        heartbeat_s: Seconds between two heartbeats.
        hello: Returns the present first message of a stream.
        happened: Takes the news that the machines are to be told.
        refused: Takes why the server will not let this cluster in, or cannot be had.
    """

    def __init__(
        self,
        options: ClusterOptions,
        secret: Secret,
        heartbeat_s: float,
        *,
        hello: Callable[[], ClusterHello],
        happened: Callable[[RankNews], None],
        refused: Callable[[str], None],
    ) -> None:
        self.trouble = ""
        """Reason for which there is no stream; "" while there is one."""
        self._options, self._heartbeat_s = options, heartbeat_s
        self._hello, self._happened, self._refused = hello, happened, refused
        self._beat: Beat | None = None
        self._closing = threading.Event()
        self._client = control_client(
            options.endpoints,
            secret,
            call="Attend",
            on_connected=self._connected,
            on_message=lambda message: happened(Told(message)),
            on_disconnected=self._disconnected,
            on_trouble=self._note_trouble,
            revive=lambda: self._host(again=True),
        )
        self._thread = threading.Thread(target=self._run, name="chaos-outer-beat", daemon=True)
        self._thread.start()

    def say(self, message: FromCluster) -> None:
        """Sends a message to the leader, but no hello: each new stream begins with one anyway."""
        if isinstance(message, Beat):
            self._beat = message
        if not isinstance(message, ClusterHello):
            self._client.say(message)

    def close(self) -> None:
        """Ends the stream once all queued messages are sent."""
        self._closing.set()
        self._client.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # ------------------------------------------------------------------ threads of its own

    def _run(self) -> None:
        try:
            self._host(again=self._was_in)
        except ChaosError as error:
            self.trouble = str(error)
            if not self._was_in:
                self._refused(str(error))
                return
            # An outage ends no cluster: the stream's thread has the server started again and again.
            _log.warning("cluster %s waits for its parameter server: %s", self._options.name, error)
        if self._closing.is_set():
            return
        self._client.start()
        while not self._closing.wait(self._heartbeat_s):
            if self._beat is not None:
                self._client.say(self._beat)
            self._happened(TimePassed())

    def _host(self, *, again: bool) -> None:
        host_for_cluster(self._options, again=again, job_id=self._hello().job_id, given_up=self._closing.is_set)

    @property
    def _was_in(self) -> bool:
        """Whether the cluster has taken part in the job, in its present incarnation or in one that was dismissed."""
        hello = self._hello()
        return hello.resume is not None or hello.newest != NO_VERSION

    def _connected(self) -> None:
        self.trouble = ""
        self._client.say(self._hello())
        self._happened(Connected())

    def _disconnected(self, reason: str) -> None:
        self.trouble = reason
        self._happened(Disconnected())

    def _note_trouble(self, error: ChaosError) -> None:
        self.trouble = str(error)
        if isinstance(error, RefusedError) and not self._was_in:
            self._refused(str(error))
        elif isinstance(error, RefusedError):
            tell_refusal(self._options.name, error)
