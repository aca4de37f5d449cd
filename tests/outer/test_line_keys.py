"""Keys of data connections: which process gets which key, and that only holders of a key can connect."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from keys_support import Keys
from until_support import until

from chaos_lightning.errors import ConfigurationError, RefusedError
from chaos_lightning.outer.exchange import line_keys
from chaos_lightning.outer.exchange.codec import BF16, Part
from chaos_lightning.outer.exchange.fetching import fetch, fetch_push, hold_push
from chaos_lightning.outer.exchange.line_keys import KEPT, LineKeyIssuer, LineKeyring
from chaos_lightning.outer.exchange.lines import SERVING, DataListener, ParkedLines
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.messages import (
    Dismissed,
    FollowerHello,
    Freed,
    Holder,
    Holders,
    LineKey,
    Obey,
    Stage,
    Welcomed,
)
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, JobProgress, Offer, PushId
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.security.keyfiles import KeyHolder
from chaos_lightning.security.roles import CLUSTER, FOLLOWER
from chaos_lightning.transport import locality
from chaos_lightning.transport.sealing import Level, session_of

HOME, AWAY = IncarnationId("home", 3), IncarnationId("away", 1)
TERM, LIMIT_S = 5, 20.0
HOLDERS = Holders(TERM, (Holder("f0", "127.0.0.1:1"), Holder("f1", "")))


def obey(shard: int = 0) -> Obey:
    return Obey(TERM, "n", shard, 2, None, (), NO_VERSION, ())


def hello(name: str) -> FollowerHello:
    return FollowerHello(name, "n", 0, (), NO_VERSION)


class Leader:
    """Leader's maker of keys, and the messages that it has sent on each stream."""

    def __init__(self) -> None:
        self.issuer = LineKeyIssuer("job", secret_channel=True)
        self.told: dict[int, list[Any]] = {}

    def send(self, conn: int, message: Any) -> list[int]:
        """Sends a message and the keys that go with it; returns the streams on which something was sent."""
        found = self.issuer.with_keys(conn, message)
        for to, said in found:
            self.told.setdefault(to, []).append(said)
        return [to for to, _ in found]

    def follower(self, conn: int, name: str, shard: int = 0) -> None:
        self.issuer.heard(conn, hello(name))
        self.send(conn, obey(shard))

    def cluster(self, conn: int, who: IncarnationId) -> None:
        self.send(conn, Welcomed(TERM, who, 1, NO_VERSION, False, JobProgress()))
        self.send(conn, HOLDERS)

    def line_keys(self, conn: int) -> list[tuple[str, str, bytes]]:
        return [(k.peer, k.name, k.key) for k in self.told.get(conn, []) if isinstance(k, LineKey)]

    def holders(self, conn: int) -> list[tuple[str, str, bytes]]:
        (said,) = [m for m in self.told[conn] if isinstance(m, Holders)][-1:]
        return [(h.name, h.key_name, h.key) for h in said.holders]


# ---------------------------------------------------------------------- the leader


def test_both_ends_are_told_one_key_for_each_pair() -> None:
    leader = Leader()
    leader.follower(1, "f0")
    leader.follower(2, "f1")
    leader.cluster(3, HOME)
    leader.cluster(4, AWAY)
    for conn, who in ((3, HOME), (4, AWAY)):
        for follower, (name, key_name, key) in zip((1, 2), leader.holders(conn), strict=True):
            assert (str(who), key_name, key) in leader.line_keys(follower), name
            assert len(key) == 32
    keys = [key for conn in (1, 2) for _, _, key in leader.line_keys(conn)]
    assert len(set(keys)) == 4
    assert [h.endpoint for h in leader.told[3][-1].holders] == ["127.0.0.1:1", ""]
    assert repr(keys[0]) not in repr(leader.told)


def test_a_key_is_told_to_the_holder_before_the_cluster_that_will_dial_it() -> None:
    leader = Leader()
    leader.follower(1, "f0")
    leader.send(3, Welcomed(TERM, HOME, 1, NO_VERSION, False, JobProgress()))
    assert leader.send(3, HOLDERS) == [1, 3]


def test_a_follower_that_starts_again_is_told_all_keys_once_it_may_obey() -> None:
    leader = Leader()
    leader.follower(1, "f0")
    leader.cluster(3, HOME)
    leader.cluster(4, AWAY)
    leader.issuer.closed(1)
    assert leader.send(3, HOLDERS) == [3]
    leader.issuer.heard(5, hello("f0"))
    assert leader.send(3, HOLDERS) == [3], "it was not shown its start yet"
    assert leader.send(5, obey()) == [5, 5, 5]
    assert isinstance(leader.told[5][0], Obey)
    assert leader.line_keys(5) == leader.line_keys(1)[:2]
    leader.send(4, Dismissed(TERM, "silent", again=True))
    leader.follower(6, "f1")
    assert [peer for peer, _, _ in leader.line_keys(6)] == [str(HOME)], "who is over is not told of any more"


def test_a_spare_that_holds_nothing_is_told_no_key() -> None:
    leader = Leader()
    leader.cluster(3, HOME)
    leader.follower(1, "spare", shard=-1)
    assert leader.line_keys(1) == []
    leader.send(1, obey(1))
    assert [peer for peer, _, _ in leader.line_keys(1)] == [str(HOME)]


def test_another_leader_has_other_keys() -> None:
    one, other = Leader(), Leader()
    for leader in (one, other):
        leader.cluster(3, HOME)
    assert {k for _, _, k in one.holders(3)}.isdisjoint(k for _, _, k in other.holders(3))


def test_nothing_is_told_where_others_could_read_it_and_other_messages_pass() -> None:
    open_issuer = LineKeyIssuer("job", secret_channel=False)
    open_issuer.heard(1, hello("f0"))
    for message in (Welcomed(TERM, HOME, 1, NO_VERSION, False, JobProgress()), HOLDERS):
        assert open_issuer.with_keys(3, message) == [(3, message)]
    offer = Offer(PushId(HOME, 1), NO_VERSION, "m", 1, 1)
    for message in (Stage(TERM, offer), Freed(TERM, ()), HOLDERS):
        assert LineKeyIssuer("job", secret_channel=True).with_keys(9, message) == [(9, message)]


def test_the_clusters_whose_keys_are_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_keys, "MOST_PEERS", 3)
    leader = Leader()
    for number in range(5):
        leader.cluster(10 + number, IncarnationId("home", number))
    leader.follower(1, "f0")
    assert [peer for peer, _, _ in leader.line_keys(1)] == ["home~2", "home~3", "home~4"]


# ---------------------------------------------------------------------- keyrings


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Folder of a cluster's keys, with keys for a follower f and an outer cluster c added."""
    made = Keys(tmp_path / "keys")
    keyfiles.add(made.folder, KeyHolder("f", FOLLOWER))
    keyfiles.add(made.folder, KeyHolder("c", CLUSTER))
    return made


def test_levels_follow_the_credentials_and_the_setting(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    def levels(secret: Credentials | bytes, links: str = "auto") -> tuple[Level, Level]:
        ring = LineKeyring(secret, links)
        return ring.level(local=False), ring.level(local=True)

    assert levels(keys.of("f")) == (Level.ENCRYPTED, Level.CHECKSUM)
    assert levels(keys.of("f"), "authenticated") == (Level.AUTHENTICATED, Level.AUTHENTICATED)
    assert levels(b"a bare token", "encrypted") == (Level.ENCRYPTED, Level.ENCRYPTED)
    assert levels(b"a bare token", "checksum") == (Level.CHECKSUM, Level.CHECKSUM)
    with caplog.at_level(logging.WARNING):
        ring = LineKeyring(b"a bare token")
        assert [ring.level(local=local) for local in (True, False, False)] == [Level.CHECKSUM] * 3
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "data connections to other machines have checksums only"
    ]
    with pytest.raises(ConfigurationError, match="links=encrypted needs a secret that both ends know"):
        LineKeyring(b"", "encrypted")
    with pytest.raises(ConfigurationError, match="links='secret': expected one of auto, checksum"):
        LineKeyring(b"a bare token", "secret")


def test_of_each_peer_the_last_few_keys_are_kept(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_keys, "PATIENCE_S", 0.0)
    ring = LineKeyring(keys.of("f"))
    for number in range(6):
        ring.hear(LineKey(TERM, str(HOME), f"k{number}", bytes([number])))
    ring.meet([Holder("f1", "", "k", b"key"), Holder("f2", "")])
    assert [name for name, _ in ring.known(str(HOME))] == ["k5", "k4", "k3", "k2"]
    assert len(ring.known(str(HOME))) == KEPT
    assert ring.find(str(HOME), ["k0", "k3"]) == ("k3", b"\3")
    assert ring.find(str(HOME), ["k0"]) is None
    assert ring.known("f1") == (("k", b"key"),)
    with pytest.raises(RefusedError, match="the leader has given no key for a connection with f2"):
        ring.known("f2")
    assert LineKeyring(b"a bare token").known("f2") == (("", b""),)
    assert LineKeyring(b"a bare token").find("f2", ["x"]) == ("", b"")


def test_a_key_that_is_on_its_way_is_waited_for(keys: Keys) -> None:
    ring = LineKeyring(keys.of("f"))
    teller = threading.Timer(0.0, ring.hear, [LineKey(TERM, str(HOME), "k", b"key")])
    teller.start()
    assert ring.find(str(HOME), ["k"]) == ("k", b"key")
    teller.join()


# ---------------------------------------------------------------------- connections


class Ends:
    """Follower and process of a cluster, with keys from one leader."""

    def __init__(self, keys: Keys, links: str = "auto") -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.ring = LineKeyring(keys.of("f"), links)
        self.served, self.held = StateServer(SERVING), StateServer(SERVING)
        options: dict[str, Any] = {"job": "job", "note": lambda name, **fields: self.notes.append((name, fields))}
        self.listener = DataListener(
            "127.0.0.1", 0, me="f0", secret=keys.of("f"), server=self.served, keys=self.ring, **options
        )
        self.lines = ParkedLines(self.held, me=lambda: str(HOME), secret=keys.of("c"), links=links, count=1, **options)
        self.leader = Leader()

    def tell(self, *, follower: bool = True) -> None:
        """Passes on the messages that the leader sends to follower and cluster when the cluster joins."""
        self.leader.follower(1, "f0")
        self.leader.send(3, Welcomed(TERM, HOME, 1, NO_VERSION, False, JobProgress()))
        self.leader.send(3, Holders(TERM, (Holder("f0", self.listener.endpoint),)))
        for message in self.leader.told[1] if follower else ():
            if isinstance(message, LineKey):
                self.ring.hear(message)
        self.lines.follow(self.leader.told[3][-1].holders)

    def close(self) -> None:
        for end in (self.lines, self.listener, self.held, self.served):
            end.close()


@pytest.fixture
def ends(keys: Keys, request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(keys, getattr(request, "param", "auto"))
    yield made
    made.close()


def travels(ends: Ends) -> None:
    """Sends a push from the cluster to the follower, and a version back, and compares the bytes."""
    grid = Grid((100_000,), block=1 << 12)
    whole = Part.encoded(grid.whole, BF16, torch.randn(grid.elements))
    offer = Offer(PushId(HOME, 1), NO_VERSION, hold_push(ends.held, PushId(HOME, 1), whole, [grid.whole]), 1, 1)
    part = Part.empty(grid.whole, BF16)
    fetch_push(offer, part, ends.listener.dial, deadline_s=LIMIT_S)
    assert torch.equal(part.data, whole.data)
    ends.served.hold("version", 0, [("0", whole.data)], {})
    part.data.zero_()
    host, _, port = ends.listener.endpoint.partition(":")
    fetch("version", [Endpoint("f0", host, int(port))], ends.lines.dial, [part.data], deadline_s=LIMIT_S)
    assert torch.equal(part.data, whole.data)


@pytest.mark.parametrize("ends", ["auto", "checksum", "authenticated", "encrypted"], indirect=True)
def test_pushes_and_versions_travel_by_the_leaders_keys(ends: Ends, request: pytest.FixtureRequest) -> None:
    links = request.node.callspec.params["ends"]
    ends.tell()
    sock = ends.listener.take(str(HOME), LIMIT_S)
    session = session_of(sock)
    assert (str(session.level) if session else "checksum") == links.replace("auto", "checksum")
    sock.close()
    travels(ends)


def test_between_machines_they_are_encrypted(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.transport import handshake

    assert handshake.on_this_machine is locality.on_this_machine
    monkeypatch.setattr(handshake, "on_this_machine", lambda sock: False)
    ends.tell()
    sock = ends.listener.take(str(HOME), LIMIT_S)
    session = session_of(sock)
    assert session is not None
    assert session.level is Level.ENCRYPTED
    sock.close()
    travels(ends)


def test_who_has_no_key_is_refused_whatever_token_it_knows(
    ends: Ends, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_keys, "PATIENCE_S", 0.05)
    ends.tell(follower=False)
    until(lambda: [f for name, f in ends.notes if name == "refused"], "a refusal")
    (fields, *_) = [f for name, f in ends.notes if name == "refused"]
    assert "no key of this link is known here that the dialler knows, too" in fields["reason"]
    token = keys.of("c").tokens()[0]
    stranger = ParkedLines(
        StateServer(SERVING), job="job", me=lambda: "x~1", secret=token, note=lambda name, **fields: None, count=1
    )
    host, _, port = ends.listener.endpoint.partition(":")
    with pytest.raises(RefusedError, match="no key of this link"):
        stranger.dial(Endpoint("f0", host, int(port)))
    with pytest.raises(TimeoutError):
        ends.listener.take(str(HOME), 0.0)


def test_a_key_of_another_pair_opens_nothing(ends: Ends, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_keys, "PATIENCE_S", 0.05)
    ends.tell()
    ends.leader.cluster(4, AWAY)
    other = ParkedLines(
        StateServer(SERVING),
        job="job",
        me=lambda: str(AWAY),
        secret=keys.of("c"),
        note=lambda name, **fields: None,
        count=0,
    )
    _, name, key = ends.leader.holders(3)[0]
    other.follow([Holder("f0", ends.listener.endpoint, name, key)])
    host, _, port = ends.listener.endpoint.partition(":")
    with pytest.raises(RefusedError, match="no key of this link"):
        other.dial(Endpoint("f0", host, int(port)))
    other.close()


def test_keys_of_another_leader_are_learned_while_connections_stand(ends: Ends) -> None:
    ends.tell()
    until(lambda: ends.held._sockets, "a parked connection")
    (sock,) = ends.held._sockets
    ends.leader = Leader()
    ends.tell()
    assert ends.held._sockets == {sock}
    travels(ends)
