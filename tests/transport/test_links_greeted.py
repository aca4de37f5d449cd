"""Tests which connections a member accepts at its data port, and that strangers cannot fill its log."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time

import pytest
from links_support import DEADLINE_S, Node
from until_support import until

from chaos_lightning.errors import RefusedError
from chaos_lightning.machine.few_lines import FewLines
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId
from chaos_lightning.transport import links
from chaos_lightning.transport.handshake import Greeting, dial


def test_who_greeted_the_member_that_this_one_was_before_gets_no_link() -> None:
    """A member gets another id between the end of a handshake and the link's making; the connection is closed."""
    node = Node("b~2")
    go = threading.Event()

    def begin_anew() -> None:
        assert go.wait(DEADLINE_S)
        node.links.abandon()
        node.links.me = "b~7"

    try:
        node.expect("c~3")
        node.loop.call(begin_anew)
        greeting = Greeting("job", "c~3", "b~2", "link")
        with dial("127.0.0.1", node.links.port, greeting, token=b"token") as sock:
            go.set()
            sock.settimeout(DEADLINE_S)
            assert sock.recv(1) == b""
        node.do(lambda: None)
        assert node.changes == []
    finally:
        go.set()
        node.close()


def test_who_begins_anew_while_it_dials_dials_again_under_its_new_id() -> None:
    """A member gets another id while it dials; the connection made under the old id is dropped, and it dials again."""
    node, peer = Node("c~3"), Node("a~1")

    def dial_and_begin_anew() -> None:
        node.links.want((peer.member,))
        node.links.abandon()
        node.links.me = "c~5"
        node.links.want((peer.member,))

    try:
        peer.expect("c~3", "c~5")
        node.do(dial_and_begin_anew)
        node.wait_up("a~1")
        peer.wait_up("c~5")
    finally:
        node.close()
        peer.close()


def test_a_member_parks_no_connections() -> None:
    """A member refuses connections with the purpose "park", which only followers of outer sync accept."""
    node = Node("b~2")
    try:
        node.expect("c~3")
        with pytest.raises(RefusedError, match="a member parks no connections"):
            dial("127.0.0.1", node.links.port, Greeting("job", "c~3", "b~2", "park"), token=b"token")
        assert node.changes == []
    finally:
        node.close()


def greet(node: Node, me: str) -> socket.socket:
    """Dials a member as a peer that knows the token; returns the connection."""
    greeting = Greeting("job", me, node.id, "link")
    return dial("127.0.0.1", node.links.port, greeting, token=b"token", deadline_s=DEADLINE_S)


def test_who_does_not_know_yet_who_it_is_lets_others_wait_a_moment() -> None:
    """A newcomer that has no id yet makes diallers wait until it has one, instead of refusing them."""
    node = Node("")
    met: list[socket.socket] = []

    def meet() -> None:
        met.append(dial("127.0.0.1", node.links.port, Greeting("job", "c~3", "b~2", "link"), token=b"token"))

    dialler = threading.Thread(target=meet)
    try:
        node.expect("c~3")
        dialler.start()
        until(lambda: node.links._slots._value < links._MAX_HANDSHAKES, "somebody who greets")
        node.do(lambda: setattr(node.links, "me", "b~2"))
        node.wait_up("c~3")
        dialler.join(DEADLINE_S)
        assert len(met) == 1
        met[0].close()
        assert not node.refused
    finally:
        node.close()


def test_a_process_that_had_no_descriptor_left_takes_links_again() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = Node("b~2")
    try:
        node.expect("c~3")
        with socket.socket() as stranger:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
            try:
                stranger.connect(("127.0.0.1", node.links.port))
                node.wait(lambda: any("could not be taken" in line for line in node.refused))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with greet(node, "c~3"):
            node.wait_up("c~3")
    finally:
        node.close()


def test_more_neighbours_than_descriptors_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "allow_descriptors", lambda count: 131)
    node = Node("b~2")
    one, two, three = (Member(f"{name}~1", name, "host", "127.0.0.1", 1) for name in "acd")
    try:
        for wanted in ((one,), (one, two), (two,), (one, two, three)):
            node.do(lambda wanted=wanted: node.links.want(wanted))
        told = [line for line in node.refused if "open files" in line]
        assert [line[:59] for line in told] == [
            f"{count} neighbours need {needed} open files, and this process may have"
            for count, needed in ((2, 132), (3, 134))
        ]
    finally:
        node.close()


def lowest_free_descriptor() -> int:
    found = os.dup(0)
    os.close(found)
    return found


def test_who_is_not_expected_gets_no_link_though_it_knows_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that knows the token but is in no view, or was excluded, is refused."""
    monkeypatch.setattr(links, "EXPECT_S", 0.05)
    node, others = Node("b~2"), [Member(f"{n}~{i}", n, "host", "127.0.0.1", 1) for n, i in (("a", 1), ("d", 7))]
    try:
        node.rule(View(ViewId(1, 1), NO_VIEW, (node.member, *others)))
        with pytest.raises(RefusedError, match=r"no view has a link of it with b~2, and the scheduler has not told"):
            greet(node, "c~9")
        node.wait(lambda: node.refused)
        assert node.refused[0].startswith("refused a connection of 'c~9' from 127.0.0.1:")
        assert "no view has a link of it with b~2" in node.refused[0]
        with greet(node, "d~7"):  # in the view that rules
            node.wait_up("d~7")
        node.rule(View(ViewId(1, 2), ViewId(1, 1), (node.member, others[0])))
        with pytest.raises(RefusedError, match="no view has a link of it"):
            greet(node, "d~7")  # it was put out
        assert {peer for peer, up, _ in node.changes if up} == {"d~7"}
    finally:
        node.close()


@pytest.mark.parametrize("told", ["by a view that is coming", "by the scheduler"])
def test_a_link_that_comes_before_the_telling_is_waited_for(told: str) -> None:
    node = Node("b~2")
    newcomer = Member("c~9", "c", "host", "127.0.0.1", 1)
    try:
        done: list[socket.socket] = []
        other = threading.Thread(target=lambda: done.append(greet(node, newcomer.id)))
        other.start()
        until(lambda: node.links._slots._value < links._MAX_HANDSHAKES, "the greeting")
        assert node.do(lambda: node.links.up(newcomer.id)) is False
        if told == "by the scheduler":
            node.do(lambda: node.links.want((newcomer,)))
        else:
            node.do(lambda: node.links.foresee(View(ViewId(1, 2), ViewId(1, 1), (node.member, newcomer))))
        node.wait_up(newcomer.id)
        other.join(DEADLINE_S)
        assert node.refused == []
        done[0].close()
    finally:
        node.close()


def test_a_neighbour_of_others_is_none_of_this_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in the same view is refused if the view has no link between the two."""
    monkeypatch.setattr(links, "EXPECT_S", 0.05)
    node, a, c = Node("b~2"), *(Member(i, i[0], "host", "127.0.0.1", 1) for i in ("a~1", "c~9"))
    try:
        ways = (LinkSpec("a~1", "b~2"), LinkSpec("a~1", "c~9"))
        node.rule(View(ViewId(1, 1), NO_VIEW, (a, node.member, c), links=ways))
        with pytest.raises(RefusedError, match="no view has a link of it with b~2"):
            greet(node, "c~9")
    finally:
        node.close()


def test_who_is_expected_no_more_when_its_handshake_ends_gets_no_link() -> None:
    node = Node("b~2")
    go = threading.Event()

    def put_out() -> None:
        assert go.wait(DEADLINE_S)
        node.links.want(())

    try:
        node.expect("c~9")
        node.loop.call(put_out)
        with greet(node, "c~9") as sock:
            go.set()
            sock.settimeout(DEADLINE_S)
            assert sock.recv(1) == b""
        node.wait(lambda: node.refused)
        assert node.refused == ["closed a connection of 'c~9': it was expected a moment ago, and is no more"]
        assert node.changes == []
    finally:
        go.set()
        node.close()


def test_strangers_at_the_data_port_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused strangers cause at most five log lines a second, with their claimed names cut short."""
    now = [1000.0]
    monkeypatch.setattr("chaos_lightning.machine.few_lines.time.monotonic", lambda: now[0])
    few = FewLines()
    assert [few.take() for _ in range(8)] == [0] * 5 + [None] * 3
    now[0] += 1.1
    assert [few.take(), few.take()] == [3, 0]
    monkeypatch.undo()
    node = Node("b~2")
    node.links._few = few = FewLines()
    monkeypatch.setattr(few, "_since_s", time.monotonic() + 3600)  # this second does not end

    def knock(me: str) -> None:
        with pytest.raises(RefusedError, match="wrong or missing"):
            dial("127.0.0.1", node.links.port, Greeting("job", me, "b~2", "link"), token=b"guess")

    try:
        for n in range(5):
            knock(f"{n}" + "x" * 2000)
            node.wait(lambda n=n: len(node.refused) == n + 1)
        assert all(len(line) < 300 and "x" * 99 + "...'" in line for line in node.refused)
        for _ in range(3):
            knock("y")
        until(lambda: few._dropped == 3, "the lines that are left out")
        assert len(node.refused) == 5
    finally:
        node.close()
