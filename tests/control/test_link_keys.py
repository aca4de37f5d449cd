"""Tests the keys of links: who gets which, what a new scheduler changes, and how two ends agree on one."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import attending, serving

from chaos_lightning.control.link_keys import KeyIssuer, levels
from chaos_lightning.control.options import check_settings, settings_from_json, settings_to_json
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import ConfigurationError, RefusedError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member import keyring
from chaos_lightning.member.keyring import KEPT, Keyring
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Fence,
    LinkKey,
    LinkKeys,
    LinkSpec,
    Member,
    NextView,
    Notice,
    OpenLinks,
    Ready,
    Settings,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.settings import EngineConfig
from chaos_lightning.transport.handshake import Greeting, accept, dial
from chaos_lightning.transport.sealing import Level, session_of

NUMBERS = {"a~1": 1, "b~2": 2, "c~3": 3, "d~4": 4}


def member(member_id: str) -> Member:
    return Member(member_id, member_id[0], "host", "127.0.0.1", 1000)


def a_view(number: int, *ids: str, links: tuple[LinkSpec, ...] = ()) -> View:
    return View(ViewId(1, number), ViewId(1, number - 1), tuple(member(i) for i in ids), links=links)


class Told:
    """Key issuer of a scheduler, with the messages that it sent to each member."""

    def __init__(self, rule: str = "encrypted", *, secret: bool = True) -> None:
        self.issuer = KeyIssuer(Settings(links=rule), secret_channel=secret)
        self.messages: dict[int, list[Any]] = {number: [] for number in NUMBERS.values()}

    def send(self, to: str, message: Any) -> None:
        for number, what in self.issuer.with_keys(NUMBERS[to], message):
            self.messages[number].append(what)

    def welcome(self, *ids: str) -> None:
        for i in ids:
            self.send(i, Welcome(member(i), 1, "founder", "", 0.1, 0.3))

    def keys(self, of: str, peer: str) -> list[LinkKey]:
        """Returns the keys for a peer that a member was sent, in order."""
        messages = [m for m in self.messages[NUMBERS[of]] if isinstance(m, LinkKeys)]
        return [key for keys_message in messages for key in keys_message.keys if key.peer == peer]


def test_both_ends_of_a_link_get_the_same_key_and_nobody_else_does() -> None:
    told = Told()
    told.welcome("a~1", "b~2", "c~3")
    told.send("b~2", OpenLinks((member("a~1"),)))
    (mine,), (its,) = told.keys("b~2", "a~1"), told.keys("a~1", "b~2")
    assert (mine.key, mine.name) == (its.key, its.name)
    assert len(mine.key) == 32
    assert [m for m in told.messages[3] if isinstance(m, LinkKeys) and m.keys] == []
    assert isinstance(told.messages[2][-1], OpenLinks), "the keys come before the message that names their links"


def test_each_view_has_new_keys_for_its_links_and_tells_them_before_itself() -> None:
    told = Told()
    told.welcome("a~1", "b~2", "c~3")
    for number in (1, 2):
        view = a_view(number, "a~1", "b~2", "c~3", links=(LinkSpec("a~1", "b~2"), LinkSpec("b~2", "c~3")))
        for i in view.ids():
            told.send(i, Decide(view, GENESIS) if number == 1 else NextView(view))
            assert isinstance(told.messages[NUMBERS[i]][-2], LinkKeys)
    assert len({key.key for key in (*told.keys("a~1", "b~2"), *told.keys("b~2", "c~3"))}) == 4
    assert told.keys("a~1", "c~3") == [], "no link of this view"
    assert [k.key for k in told.keys("a~1", "b~2")] == [k.key for k in told.keys("b~2", "a~1")]


def test_who_is_welcomed_again_hears_all_keys_of_its_links() -> None:
    told = Told()
    told.welcome("a~1", "b~2")
    told.issuer.closed(1)
    told.send("b~2", OpenLinks((member("a~1"),)))
    assert told.keys("a~1", "b~2") == []
    told.welcome("a~1")
    assert [k.key for k in told.keys("a~1", "b~2")] == [k.key for k in told.keys("b~2", "a~1")]


def test_keys_of_members_that_are_gone_are_void() -> None:
    told = Told()
    told.welcome("a~1", "b~2", "c~3")
    told.send("a~1", Decide(a_view(1, "a~1", "b~2", "c~3"), GENESIS))
    told.issuer.closed(3)
    told.send("a~1", Decide(a_view(2, "a~1", "b~2"), GENESIS))
    assert [m.void for m in told.messages[1] if isinstance(m, LinkKeys) and m.void] == [("c~3",)]
    told.send("b~2", Fence("it answered too late"))
    assert [m.void for m in told.messages[1] if isinstance(m, LinkKeys) and m.void] == [("c~3",), ("b~2",)]


def test_keys_of_members_that_another_scheduler_let_in_are_void_too() -> None:
    """A new scheduler declares void also the keys of members that only its predecessor had let in."""
    told = Told()
    chain = ("a~1", "b~2", "c~3", "x~0")
    told.issuer = KeyIssuer(Settings(links="encrypted"), secret_channel=True, members=chain)
    told.welcome("a~1")
    told.send("a~1", Decide(a_view(2, "a~1", "b~2"), GENESIS))
    told.send("a~1", Decide(a_view(3, "a~1", "b~2"), GENESIS))
    assert [m.void for m in told.messages[1] if isinstance(m, LinkKeys) and m.void] == [("c~3", "x~0")]
    told.welcome("b~2")  # its stream came back later
    (its,) = [m for m in told.messages[2] if isinstance(m, LinkKeys)]
    assert its.void == ("c~3", "x~0")
    assert {key.peer for key in its.keys} == {"a~1"}
    told.welcome("d~4")
    told.send("d~4", Fence("it is of another job"))
    voids = {n: [m.void for m in told.messages[n] if isinstance(m, LinkKeys) and m.void][-1] for n in (1, 2)}
    assert voids == {1: ("d~4",), 2: ("d~4",)}, "though no link with it was named"


def test_another_scheduler_has_other_keys_and_a_repr_shows_none() -> None:
    one, other = Told(), Told()
    for told in (one, other):
        told.welcome("a~1", "b~2")
        told.send("a~1", NextView(a_view(1, "a~1", "b~2")))
    (mine,), (its,) = one.keys("a~1", "b~2"), other.keys("a~1", "b~2")
    assert mine.key != its.key
    assert mine.name != its.name
    assert repr(mine.key) not in repr(mine)
    assert mine.key.hex() not in mine.name


def test_rules_become_levels() -> None:
    assert levels("auto", secret_channel=True) == (Level.ENCRYPTED, Level.CHECKSUM)
    assert levels("auto", secret_channel=False) == (Level.CHECKSUM, Level.CHECKSUM)
    assert levels("authenticated", secret_channel=False) == (Level.AUTHENTICATED, Level.AUTHENTICATED)
    told = Told("auto", secret=False)
    told.welcome("a~1", "b~2")
    told.send("a~1", OpenLinks((member("b~2"),)))
    assert told.keys("a~1", "b~2") == [], "keys would travel where anybody listens"
    told.send("a~1", Notice("x"))
    assert told.messages[1][-1] == Notice("x")


def test_the_setting_is_checked_and_travels() -> None:
    assert settings_from_json(settings_to_json(Settings(links="encrypted"))).links == "encrypted"
    with pytest.raises(ConfigurationError, match=r"links='tls': expected one of auto, checksum, authenticated"):
        check_settings(Settings(links="tls"))


# ------------------------------------------------------------------------------------------------ members


def a_ring(setting: str = "auto") -> tuple[Keyring, Mailbox]:
    mail = Mailbox("a")
    return Keyring(setting, EventLog.in_directory(None, "a"), mail), mail


def keys_message(*keys: LinkKey, rule: str = "encrypted", void: tuple[str, ...] = ()) -> LinkKeys:
    level = rule if rule != "auto" else "checksum"
    return LinkKeys(rule, level, level, rule != "auto", keys, void)


def a_key(number: int, peer: str = "b~2") -> LinkKey:
    return LinkKey(peer, f"key {number}", bytes([number]) * 32)


def test_a_ring_keeps_the_last_keys_of_each_peer_until_they_are_void() -> None:
    ring, _ = a_ring()
    for number in range(KEPT + 2):
        ring.hear(keys_message(a_key(number)))
    assert [name for name, _ in ring.known("b~2")] == [f"key {n}" for n in range(KEPT + 1, 1, -1)]
    assert ring.find("b~2", ["key 99", "key 3", "key 5"]) == ("key 3", bytes([3]) * 32)
    ring.hear(keys_message(void=("b~2",)))
    ring.hear(keys_message(a_key(7, "c~3")))
    assert [name for name, _ in ring.known("c~3")] == ["key 7"]


def test_without_a_key_or_a_word_of_the_scheduler_nothing_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "PATIENCE_S", 0.01)
    ring, _ = a_ring()
    with pytest.raises(RefusedError, match="has not said how links are protected"):
        ring.level(local=True)
    ring.hear(keys_message())
    with pytest.raises(RefusedError, match="no key for a link with b~2"):
        ring.known("b~2")
    assert ring.find("b~2", ["key 1"]) is None
    ring.reset()
    with pytest.raises(RefusedError, match="has not said"):
        ring.known("b~2")


def test_a_key_that_comes_a_moment_later_is_waited_for() -> None:
    ring, _ = a_ring()
    ring.hear(keys_message())
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ring.find("b~2", ["key 1"])))
    thread.start()
    ring.hear(keys_message(a_key(1)))
    thread.join(20)
    assert found == [("key 1", bytes([1]) * 32)]


def test_links_with_checksums_to_other_machines_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ring, _ = a_ring()
    ring.hear(keys_message(rule="auto"))
    assert ring.level(local=True) is Level.CHECKSUM
    assert not caplog.records
    for _ in range(2):
        assert ring.level(local=False) is Level.CHECKSUM
    (record,) = [r for r in caplog.records if "checksums only" in r.message]
    assert record.levelname == "WARNING"
    assert "With a folder of keys on all nodes (keys_dir, docs/access.md) they are encrypted" in record.message
    assert "with a token alone they are not" in record.message
    (described,) = re.findall(r"links: How data links.*?or auto\.", EngineConfig.__doc__ or "", re.DOTALL)
    assert "if the nodes have folders of keys (keys_dir; a token alone is not enough)" in " ".join(described.split())


def test_a_member_that_insists_on_another_rule_is_put_out() -> None:
    ring, mail = a_ring("authenticated")
    ring.hear(keys_message())
    assert mail.ejected is not None
    assert "links=authenticated was set here, but the job goes by links=encrypted" in mail.ejected[0]


def test_protection_is_never_lessened_while_a_member_is_in() -> None:
    auto = LinkKeys("auto", "encrypted", "checksum", True, (), ())
    weaker = (
        replace(auto, remote="checksum"),
        replace(auto, remote="authenticated"),
        replace(auto, keyed=False),
        LinkKeys("checksum", "checksum", "checksum", True, (), ()),
    )
    for message in weaker:
        ring, mail = a_ring()
        ring.hear(auto)
        ring.hear(message)
        assert ring.level(local=False) is Level.ENCRYPTED
        assert mail.ejected is not None
        assert "links were encrypted between machines and checksum within one, with keys when this" in mail.ejected[0]
        ring.reset()  # in another incarnation another rule may be the first
        ring.hear(message)
        assert ring.level(local=False) is Level(message.remote)
    ring, mail = a_ring()
    ring.hear(replace(auto, remote="checksum", keyed=False))
    ring.hear(auto)
    assert mail.ejected is None
    assert ring.level(local=False) is Level.ENCRYPTED


@pytest.mark.parametrize("told", [("checksum", "encrypted"), ("encrypted", "checksum"), ("authenticated", "encrypted")])
@pytest.mark.parametrize("setting", ["auto", "encrypted"])
def test_a_rule_that_comes_with_weaker_levels_than_it_says_is_objected_to(told: tuple[str, str], setting: str) -> None:
    ring, mail = a_ring(setting)
    ring.hear(LinkKeys("encrypted", *told, True, (a_key(1),), ()))
    assert mail.ejected is not None
    words = f"links=encrypted, and asks for less: {told[0]} between machines, {told[1]} within one"
    assert words in mail.ejected[0]


# ------------------------------------------------------------------------------------------------ handshakes


def meet(
    ours: Keyring | None, theirs: Keyring | None, *, token: bytes = b""
) -> tuple[socket.socket | None, Greeting | None, str]:
    """Lets member a dial member b with their keyrings; returns a's socket, b's greeting, and why the link was
    refused.
    """
    outcome: dict[str, Any] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            sock, _ = server.accept()
            try:
                outcome["greeting"] = accept(sock, job="j", me="b~2", token=token, keys=theirs)
                outcome["sock"] = sock
            except RefusedError as error:
                outcome["words"] = str(error)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            greeting = Greeting("j", "a~1", "b~2", "link")
            mine = dial("127.0.0.1", server.getsockname()[1], greeting, token=token, keys=ours)
        except RefusedError as error:
            mine, outcome["refused"] = None, str(error)
        thread.join(20)
    if "sock" in outcome:
        outcome["sock"].close()
    return mine, outcome.get("greeting"), outcome.get("words", "") + outcome.get("refused", "")


def rings(ours: list[int], theirs: list[int], rule: str = "encrypted") -> tuple[Keyring, Keyring]:
    one, other = a_ring()[0], a_ring()[0]
    one.hear(keys_message(*(a_key(n) for n in ours), rule=rule))
    other.hear(keys_message(*(a_key(n, "a~1") for n in theirs), rule=rule))
    return one, other


@pytest.mark.parametrize(("ours", "theirs"), [([1], [1]), ([1, 2], [1]), ([1], [1, 2]), ([1, 2], [2, 3])])
@pytest.mark.parametrize("rule", ["authenticated", "encrypted"])
def test_ends_that_share_a_key_meet_whatever_else_they_know(ours: list[int], theirs: list[int], rule: str) -> None:
    """Two ends with a common key make a protected link, even if one of them knows keys of newer views."""
    mine, greeting, words = meet(*rings(ours, theirs, rule), token=b"token")
    assert mine is not None, words
    with mine:
        session = session_of(mine)
        assert greeting is not None
        assert greeting.session is not None
        assert session is not None
        assert session.level is greeting.session.level is Level(rule)
        data = memoryview(b"the traffic keys fit")
        sealed = session.sealer.frame([data], begins=False)
        into = memoryview(bytearray(20))
        greeting.session.opener.expect(into, 20)
        record = b"".join(bytes(part) for part in sealed)
        at = 0
        for room in greeting.session.opener.room():
            room[:] = record[at : at + room.nbytes]
            at += room.nbytes
        assert greeting.session.opener.took(at)
        assert bytes(into) == bytes(data)


def test_each_connection_has_traffic_keys_of_its_own() -> None:
    one, other = rings([1], [1])
    sent = []
    for _ in range(2):
        mine, _, words = meet(one, other)
        assert mine is not None, words
        with mine:
            session = session_of(mine)
            assert session is not None
            sent.append(b"".join(bytes(p) for p in session.sealer.frame([memoryview(bytes(64))], begins=False)))
    assert sent[0] != sent[1]


def test_strangers_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "PATIENCE_S", 0.05)
    mine, _, words = meet(*rings([1], [2]))
    assert mine is None
    assert "'a~1' from 127.0.0.1:" in words
    assert "no key of this link is known here" in words
    one, other = rings([1], [])
    other.hear(keys_message(LinkKey("a~1", "key 1", bytes([9]) * 32)))  # another key under the same name
    mine, _, words = meet(one, other)
    assert mine is None
    assert "wrong or missing key" in words
    mine, _, words = meet(None, rings([], [1])[1])
    assert mine is None
    assert "no key of this link" in words


def test_nobody_talks_a_member_into_less_protection() -> None:
    """A dialler that asks for less protection than its peer demands is refused; if it asks for more, both use the
    stronger level.
    """
    one, _ = rings([1], [1], "authenticated")
    _, other = rings([1], [1], "encrypted")
    mine, _, words = meet(one, other)
    assert mine is None
    assert "the dialler wants the link authenticated, here it must be encrypted" in words
    mine, greeting, words = meet(rings([1], [1], "encrypted")[0], rings([1], [1], "authenticated")[1])
    assert mine is not None, words
    mine.close()
    assert greeting is not None
    assert greeting.session is not None
    assert greeting.session.level is Level.ENCRYPTED


# ------------------------------------------------------------------------------------------------ the scheduler


def test_keys_reach_both_ends_over_the_control_streams_and_are_written_nowhere(tmp_path: Path) -> None:
    """Keys reach both ends of a link by the control streams, and appear in neither event log nor store nor `status`."""
    chain = tmp_path / "chain.sqlite"
    log = EventLog.in_directory(tmp_path / "logs", "scheduler")

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if isinstance(event, fx.MessageIn) and isinstance(event.message, Ready):
            view = a_view(1, *(f"{name}~{number}" for name, number in (("a", 1), ("b", 2))))
            view = replace(view, predecessor=NO_VIEW)
            persist = fx.Persist(1, "view", view.id, view, GENESIS)
            return [persist, *(fx.Send(number, NextView(view)) for number in (1, 2))]
        return None

    with (
        serving(
            rule, settings=Settings(links="encrypted"), open_store=lambda: SqliteStore(chain, "default"), log=log
        ) as served,
        attending(served.endpoint, "a") as a,
    ):
        a.messages.wait_for(Welcome)
        with attending(served.endpoint, "b") as b:
            b.messages.wait_for(Welcome)
            b.agent.send(Ready())
            for client in (a, b):
                client.messages.wait_for(NextView)
            mine = [key for keys_message in a.keys.seen for key in keys_message.keys if key.peer == "b~2"]
            its = [key for keys_message in b.keys.seen for key in keys_message.keys if key.peer == "a~1"]
            status = json.dumps(fetch_status(served.endpoint))
    log.close()
    assert [k.key for k in mine] == [k.key for k in its]
    assert len(mine) == 1
    written = status.encode() + b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert b"default" in written
    key = mine[0].key
    assert not [w for w in (key, key.hex().encode(), base64.b64encode(key), repr(key).encode()) if w in written]


class Follower:
    """Candidacy of a scheduler that continues a job with the settings `stored` by its predecessor."""

    def __init__(self, stored: Settings) -> None:
        self._stored = stored

    def stand(self, endpoint: str, elected: Any, lost: Any, note: Any, present: Any) -> None:
        elected()

    def rules(self, given: Settings) -> Settings:
        return self._stored

    def watched(self) -> bool:
        return False

    def waited(self) -> bool:
        return False

    def stands_by(self) -> bool:
        return False

    def asked(self, name: str) -> None:
        """Ignores a name that asked while no scheduler led."""

    def waits(self, what: str) -> tuple[str, str]:
        return "", ""

    def close(self) -> None:
        """Does nothing: nothing is open."""


def test_a_scheduler_that_follows_another_one_protects_links_by_the_rules_of_the_job() -> None:
    """A scheduler that takes over a job protects links by the job's stored setting, not by the one it was started
    with.
    """
    candidacy = Follower(Settings(links="encrypted"))
    with (
        serving(settings=Settings(links="checksum"), candidacy=candidacy, rules_of_job=candidacy.rules) as served,
        attending(served.endpoint, "a") as a,
    ):
        a.messages.wait_for(Welcome)
        told = a.keys.wait_for(LinkKeys)
    assert (told.rule, told.remote, told.local, told.keyed) == ("encrypted", "encrypted", "encrypted", True)
