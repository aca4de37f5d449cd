"""Serves a cluster's pushes from each rank, over connections that the rank has opened to the followers and keeps for
their requests.

Theory of operation. All ranks hold the same pushes and park connections under the incarnation's name, so a follower has
each of them send a part, and the others send what one that dies was asked for. Pushes are cut as the followers' shards
are, anew when there are others. While training goes on, traffic is spread: a push, and the version that comes of it,
takes a part of the time that there is until the next one, so that a far link carries no more than it must at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.exchange.fetching import drop_push, fetch_version, hold_push
from chaos_lightning.outer.exchange.lines import SERVING, ParkedLines
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.messages import Holder
from chaos_lightning.outer.rules.types import PushId, VersionId
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.security.credentials import Secret

FETCH_S = 600.0
"""Longest time, s, for one attempt at a version, however steadily bytes come."""
_PAUSES = 3
"""Number of last pauses between pushes that are remembered."""
_LEAST_S = 1e-3
_VERSION_NBYTES = 2
"""Least bytes of an element of a version, whatever pushes have."""
_TABLE_NBYTES = 88
"""Bytes, per tensor, of the table that a follower gets before those of a push."""


class PushServing:
    """Server of a cluster's pushes. Any thread may call `serve`, `drop`, `dial` and `fetch`; all other methods are for
    one thread at a time.

    Args:
        options: Options of the cluster.
        secret: Token or credentials.
        grid: Division into blocks of the model that is pushed.
        me: Returns the incarnation's name; the cluster's while it has none.
        note: Takes events about connections.

    Attributes:
        holders: Followers that hold the shards, in shard order.
        me: Returns the incarnation's name, as given.
    """

    def __init__(
        self, options: ClusterOptions, secret: Secret, grid: Grid, me: Callable[[], str], note: Callable[..., None]
    ) -> None:
        self.holders: tuple[Holder, ...] = ()
        self._grid, self.me = grid, me
        self._lock = threading.Lock()
        self._cuts: dict[PushId, tuple[Shard, ...]] = {}
        """Shards by whose boundaries each served push is cut."""
        self._spread = options.spread if options.overlap else 0.0
        self._frozen_at = 0.0
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self._server = StateServer(SERVING)
        self._lines = ParkedLines(
            self._server,
            job=options.job,
            me=me,
            secret=secret,
            note=note,
            links=options.links,
            rate_bps=options.rate_bps,
        )

    @property
    def _shards(self) -> tuple[Shard, ...]:
        """Shards into which the present followers cut the model; none while no follower is known."""
        return self._grid.cut(len(self.holders)) if self.holders else ()

    def reach(self, holders: tuple[Holder, ...]) -> None:
        """Keeps connections open at the followers that hold the shards from now on, so that these can fetch pushes."""
        self.holders = holders
        self._lines.follow(holders)

    def share(self, ranks: int) -> None:
        """Divides the cluster's sending rate by the number of ranks, which all serve the same pushes."""
        self._lines.share(ranks)

    def serve(self, pushes: Mapping[PushId, Part]) -> None:
        """Serves these pushes from now on, cut by the followers' present shards, if these are known; the bytes must not
        change.
        """
        for push, part in pushes.items():
            with self._lock:
                shards, cut = self._shards, self._cuts.get(push)  # in here, so that the newest holders win
                if not shards or cut == shards:
                    continue
                if cut is None and self._spread:
                    self._spread_over(part)
                self._cuts[push] = shards
            self._tidy(push, cut or ())
            hold_push(self._server, push, part, shards)  # hashes it; whoever drops it waits for no such thing
            self._tidy(push, shards)

    def _tidy(self, push: PushId, cut: tuple[Shard, ...]) -> None:
        """Stops serving the pieces of a push that were cut by earlier shards, except those that the present shards
        have, too.
        """
        with self._lock:
            now = self._cuts.get(push, ())
            drop_push(self._server, push, [shard for shard in cut if shard not in now])

    def _spread_over(self, part: Part) -> None:
        """Sets the sending rate so that a push takes a share of the usual pause between two pushes: the shortest of the
        last few pauses counts.
        """
        now, before = time.monotonic(), self._frozen_at
        self._frozen_at = now
        if before:
            self._pauses.append(now - before)
            nbytes = max(part.data.numel(), _VERSION_NBYTES * part.shard.elements)
            nbytes += _TABLE_NBYTES * sum(1 for _ in part.shard.runs())
            self._lines.spread(8 * nbytes / max(_LEAST_S, self._spread * min(self._pauses)))

    def drop(self, push: PushId) -> None:
        """Stops serving a push."""
        with self._lock:
            cut = self._cuts.pop(push, ())
        self._tidy(push, cut)

    def dial(self, endpoint: Endpoint) -> socket.socket:
        """Returns a connection to a follower, over which versions are fetched. Any thread."""
        return self._lines.dial(endpoint)

    def fetch(self, version: VersionId, part: Part, abandoned: Callable[[], bool], *, blank: bool) -> int:
        """Fills `part` with a version, fetched from all followers at once; returns its size in bytes.

        Arguments and errors are those of `fetch_version`.
        """
        holders = self.holders
        cut = self._grid.cut(len(holders))
        return fetch_version(
            version,
            cut,
            part.format,
            holders,
            part,
            self.dial,
            deadline_s=FETCH_S,
            abandoned=abandoned,
            blank=blank,
        )

    def close(self) -> None:
        """Closes all connections to followers, and the server of pushes."""
        self._lines.close()
        self._server.close()
