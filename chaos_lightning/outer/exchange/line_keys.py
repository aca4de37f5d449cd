"""Distributes keys for the data connections between clusters and followers: the leader makes one key for each pair of
processes, and sends it to both.

Theory of operation. As for links (control/link_keys.py), with another way to learn who is who.
`LineKeyIssuer.with_keys` looks at each message that is about to be sent: a cluster that is told of the holders gets its
keys with them, each holder the same key just before; a follower that may obey gets those of all clusters just behind.
Of each peer the last few keys are kept, whoever made them.

Keys travel over secret channels only (a folder of keys at both ends). Then who has none is refused, and connections to
other machines are encrypted. Where there is a token alone, or nothing, connections have checksums, or are protected by
the token if the user asks for that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from chaos_lightning.errors import ConfigurationError, RefusedError
from chaos_lightning.outer.rules.messages import (
    ClusterHello,
    Dismissed,
    FollowerHello,
    FromCluster,
    FromFollower,
    Holder,
    Holders,
    LineKey,
    Obey,
    ToCluster,
    ToFollower,
    Welcomed,
)
from chaos_lightning.security.credentials import Credentials, Secret
from chaos_lightning.service.keys import KeyMaker, levels
from chaos_lightning.transport.peer_keys import PeerKeys
from chaos_lightning.transport.sealing import RULES, Level, require_library

PATIENCE_S = 2.0
"""Seconds to wait for a key that the other end knows: the leader tells both ends, one a moment earlier."""
KEPT = 4
"""Number of keys that are kept per peer."""
MOST_PEERS = 1024
"""Number of starts of clusters whose keys are remembered."""
_log = logging.getLogger("chaos_lightning")

Outgoing = list[tuple[int, ToCluster | ToFollower]]
"""Messages to send: (number of a stream, message)."""


def incarnation_of(peer: str) -> str:
    """Returns the incarnation in a peer's name, without the suffix that tells the incarnation's processes apart
    (lines.py).
    """
    cluster, tilde, rest = peer.rpartition("~")
    return f"{cluster}{tilde}{rest.partition('/')[0]}" if tilde else peer


class LineKeyIssuer:
    """Leader's maker of keys for data connections. For one thread.

    Args:
        job: Name of the job.
        secret_channel: Whether nobody else can read what is told (credentials.Credentials); if not, no keys are made.
    """

    def __init__(self, job: str, *, secret_channel: bool) -> None:
        self._job, self._keyed = job, secret_channel
        self._maker = KeyMaker()
        self._clusters: dict[int, str] = {}
        """Name of the process at each stream."""
        self._followers: dict[int, str] = {}
        self._obeying: dict[str, int] = {}
        """Streams of followers that were shown their start, by name."""
        self._living: dict[str, None] = {}
        """Processes of clusters that have keys, in the order of their welcome."""

    def heard(self, conn: int, message: FromCluster | FromFollower) -> None:
        """Notes, from its hello, who speaks on a stream; must be called with each message before the leader's machine
        handles it.
        """
        match message:
            case FollowerHello(follower=name):
                self._followers[conn] = name
            case ClusterHello(cluster=name):  # of one that comes after the job's end, and is not welcomed
                self._clusters.setdefault(conn, name)

    def closed(self, conn: int) -> None:
        """Forgets a stream that has ended."""
        self._clusters.pop(conn, None)
        name = self._followers.pop(conn, "")
        if self._obeying.get(name) == conn:
            del self._obeying[name]

    def with_keys(self, conn: int, message: ToCluster | ToFollower) -> Outgoing:
        """Returns the messages to send in place of this one: itself, and the keys of the connections that it makes
        possible.
        """
        if not self._keyed:
            return [(conn, message)]
        match message:
            case Welcomed():
                self._clusters[conn] = me = str(message.incarnation)
                self._living.pop(me, None)
                self._living[me] = None
                for old in list(self._living)[:-MOST_PEERS]:
                    del self._living[old]
            case Holders(term, holders) if conn in self._clusters:
                me = self._clusters[conn]
                ends = [
                    (self._obeying[h.name], self._line_key(term, me, h.name))
                    for h in holders
                    if h.name in self._obeying
                ]
                return [*ends, (conn, replace(message, holders=tuple(self._filled(me, h) for h in holders)))]
            case Obey() if conn in self._followers and message.shard >= 0:
                name = self._followers[conn]
                self._obeying[name] = conn
                return [(conn, message), *((conn, self._line_key(message.term, me, name)) for me in self._living)]
            case Dismissed():
                self._living.pop(self._clusters.pop(conn, ""), None)
        return [(conn, message)]

    def _filled(self, me: str, holder: Holder) -> Holder:
        name, key = self._key(me, holder.name)
        return replace(holder, key_name=name, key=key)

    def _line_key(self, term: int, me: str, follower: str) -> LineKey:
        return LineKey(term, me, *self._key(me, follower))

    def _key(self, me: str, follower: str) -> tuple[str, bytes]:
        return self._maker.key(self._job, me, follower)


class LineKeyring:
    """Keys that a cluster's process shares with followers, or a follower with clusters' processes; implements
    `transport.handshake.LinkKeyring`.

    Args:
        secret: Token or credentials: with a folder of keys, nobody connects without a key from the leader.
        links: Rule for the protection of connections, one of `transport.sealing.RULES`.

    Raises:
        ConfigurationError: There is no such rule, or nothing to protect connections with.
    """

    def __init__(self, secret: Secret, links: str = "auto") -> None:
        credentials = Credentials.of(secret)
        if links not in RULES:
            raise ConfigurationError(f"links={links!r}: expected one of {', '.join(RULES)}")
        self._keyed = credentials.secret_channel
        self._remote, self._local = levels(links, secret_channel=self._keyed)
        if {self._remote, self._local} != {Level.CHECKSUM}:
            if not credentials:
                raise ConfigurationError(f"links={links} needs a secret that both ends know: give a folder of keys")
            require_library()
        self._quiet = links != "auto"
        self._keys = PeerKeys(KEPT, MOST_PEERS)

    def hear(self, message: LineKey) -> None:
        """Learns the key in a message of the leader; for followers."""
        self._keys.learn([(message.peer, (message.name, message.key))])

    def meet(self, holders: Sequence[Holder]) -> None:
        """Learns the keys that the leader has put into the list of followers; for clusters."""
        self._keys.learn([(h.name, (h.key_name, h.key)) for h in holders if h.key_name])

    def level(self, *, local: bool) -> Level:
        """Returns the least protection that a connection must have: within this machine (`local`), or to another
        one.
        """
        if local:
            return self._local
        if self._remote is Level.CHECKSUM and not self._quiet:
            self._quiet = True
            _log.warning(
                "data connections to other machines have checksums only: whoever sits on the way can read and change "
                "pushes and versions. With a folder of keys everywhere (keys_dir, docs/access.md) they are encrypted"
            )
        return self._remote

    def known(self, peer: str) -> Sequence[tuple[str, bytes]]:
        """Returns (name, key) of the keys that this process shares with a peer, newest first; (("", b""),) if
        connections have no keys.

        Raises:
            RefusedError: There is none.
        """
        if not self._keyed:
            return (("", b""),)
        if kept := self._keys.of(peer, PATIENCE_S):
            return kept
        raise RefusedError(f"the leader has given no key for a connection with {peer}")

    def find(self, peer: str, names: Sequence[str]) -> tuple[str, bytes] | None:
        """Returns name and key of the first of these names that this process knows; None if it knows none."""
        return self._keys.find(incarnation_of(peer), names, PATIENCE_S) if self._keyed else ("", b"")
