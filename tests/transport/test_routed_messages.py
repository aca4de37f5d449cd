"""Tests messages between members that have no link: relays, receivers, and messages that cannot be delivered."""

from __future__ import annotations

import socket

import pytest
from links_support import DEADLINE_S, Build, Node, a_view, connect

from chaos_lightning.membership.routing import RoutedMessage
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId
from chaos_lightning.transport.frames import FrameType, pack, payload_checksum
from chaos_lightning.transport.handshake import Greeting, dial


def settled(*nodes: Node) -> None:
    """Waits until these members' loops have done all calls queued so far."""
    for node in nodes:
        node.do(lambda: None)


def test_a_message_goes_over_as_many_links_as_it_must(build: Build) -> None:
    nodes = build("abcde")
    connect(nodes, "ab bc cd de")
    view = a_view(1, nodes.values(), "ab bc cd de")
    for node in nodes.values():
        node.rule(view)
    a, e = nodes["a"], nodes["e"]
    for i in range(20):
        a.say(e.id, b"to e %d" % i)
        e.say(a.id, b"to a %d" % i)
    e.wait(lambda: len(e.messages) == 20)
    a.wait(lambda: len(a.messages) == 20)
    assert e.messages == [(a.id, b"to e %d" % i) for i in range(20)], "in order, and from whom it is"
    assert a.messages == [(e.id, b"to a %d" % i) for i in range(20)]
    assert [nodes[n].links.relayed for n in "abcde"] == [0, 40, 40, 40, 0]
    assert not any(node.undone for node in nodes.values())


def test_a_large_message_passes_a_relay_whole(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab bc")
    view = a_view(1, nodes.values(), "ab bc")
    for node in nodes.values():
        node.rule(view)
    payload = bytes(range(256)) * (32 << 10)
    nodes["a"].say(nodes["c"].id, payload)
    nodes["c"].wait(lambda: nodes["c"].messages)
    assert nodes["c"].messages == [(nodes["a"].id, payload)]


def test_a_direct_link_that_the_view_lacks_is_not_used(build: Build) -> None:
    """A link that is not in the view is not used for messages: its break would cause no recovery, so they would be
    lost.
    """
    nodes = build("abc")
    connect(nodes, "ab bc ac")
    view = a_view(1, nodes.values(), "ab bc")
    for node in nodes.values():
        node.rule(view)
    nodes["a"].say(nodes["c"].id, b"x")
    nodes["c"].wait(lambda: nodes["c"].messages)
    assert nodes["b"].links.relayed == 1


def test_where_every_pair_has_a_link_nobody_relays_and_messages_wait_for_theirs(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab bc")
    view = a_view(1, nodes.values(), "")
    a, b, c = nodes.values()
    a.rule(view)
    a.say(c.id, b"early")
    settled(a, b, c)
    assert not c.messages
    assert a.do(a.links.facts)["waiting"] == 1
    connect(nodes, "ab bc ac")
    c.wait(lambda: c.messages)
    assert c.messages == [(a.id, b"early")]
    assert b.links.relayed == 0


def test_without_any_way_a_message_is_dropped_and_told(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab")
    a, b, c = nodes.values()
    a.say(c.id, b"x")
    a.wait(lambda: a.undone)
    assert a.undone == [(c.id, a.id, "no way to it is known")]
    a.rule(a_view(1, (a, b, c), "ab bc"))
    a.say(c.id, b"y")  # b is in no view and knows no way
    b.wait(lambda: b.undone)
    assert b.undone == [(c.id, a.id, "no way to it is known")]


def test_members_of_different_views_do_not_send_a_routed_message_to_and_fro(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab")
    a, b, c = nodes.values()
    a.rule(a_view(1, (a, b, c), "ab bc"))
    b.rule(a_view(2, (a, b, c), "ab ac"))
    a.say(c.id, b"x")
    b.wait(lambda: b.undone)
    assert b.undone == [(c.id, a.id, f"{a.id}, where it came from, is the next hop")]
    settled(a)
    assert not a.undone
    assert a.links.relayed == 0


def test_routed_messages_in_a_ring_of_contradictory_views_come_to_an_end(build: Build) -> None:
    """Three members' views route a message in a ring; it is dropped after a bounded number of hops."""
    nodes = build("abcd")
    connect(nodes, "ab bc ac")
    a, b, c, d = nodes.values()
    a.rule(a_view(1, (a, b, c, d), "ab bd"))
    b.rule(a_view(2, (a, b, c, d), "bc cd"))
    c.rule(a_view(3, (a, b, c, d), "ac ad"))
    a.say(d.id, b"x")
    for node in (a, b, c):
        node.do(lambda: None)
    ended = [node for node in (a, b, c) if node.undone]
    while not ended:
        settled(a, b, c)
        ended = [node for node in (a, b, c) if node.undone]
    assert ended[0].undone == [(d.id, a.id, "it has come over as many links as any way has")]
    assert sum(node.links.relayed for node in (a, b, c)) < 8


def test_when_the_next_hop_is_gone_routed_messages_take_the_way_of_the_next_view(build: Build) -> None:
    nodes = build("abcd")
    connect(nodes, "ab bd ac cd")
    a, b, c, d = nodes.values()
    view = a_view(1, (a, b, c, d), "ab bd ac cd")
    for node in (a, b, c, d):
        node.rule(view)
    b.close()
    a.wait(lambda: not a.is_up(b.id))
    a.say(d.id, b"late")
    settled(a, c, d)
    assert not d.messages, "its way is by b, and nobody has said yet that b is dead"
    survivors = a_view(2, (a, c, d), "ac cd")
    for node in (a, c, d):
        node.rule(survivors)
    d.wait(lambda: d.messages)
    assert d.messages == [(a.id, b"late")]
    assert c.links.relayed == 1


class Stuck:
    """Neighbour of `node` that completes the handshake and then reads nothing."""

    def __init__(self, node: Node, name: str) -> None:
        self.id = f"{name}~9"
        node.expect(self.id)
        greeting = Greeting("job", self.id, node.id, "link")
        self.sock = dial("127.0.0.1", node.links.port, greeting, token=b"token", deadline_s=DEADLINE_S)
        node.wait_up(self.id)

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def test_routed_messages_queued_to_a_dead_relay_are_taken_over_by_another(build: Build) -> None:
    """Messages queued to a relay that dies are sent through another relay, the half-sent one included."""
    nodes = build("acd")
    connect(nodes, "ac cd")
    a, c, d = nodes.values()
    stuck = Stuck(a, "b")
    members = (*(node.member for node in nodes.values()), Member(stuck.id, "b", "host", "127.0.0.1", 1))
    links = (LinkSpec(a.id, stuck.id), LinkSpec(stuck.id, d.id))
    a.rule(View(ViewId(1, 1), ViewId(1, 0), members, links=links))
    payloads = [bytes([i]) * (8 << 20) for i in range(6)]  # more than the kernel takes
    for payload in payloads:
        a.say(d.id, payload)
    assert a.do(lambda: a.links._links[stuck.id].queued_nbytes) > 8 << 20
    kept = a.do(lambda: len(a.links._links[stuck.id].routed()))
    assert 0 < kept < 6
    survivors = a_view(2, (a, c, d), "ac cd")
    for node in (c, d):
        node.rule(survivors)
    stuck.sock.close()
    a.wait(lambda: not a.is_up(stuck.id))
    a.rule(survivors)
    d.wait(lambda: len(d.messages) == kept)
    assert [m for _, m in d.messages] == payloads[-kept:], "what the kernel had taken is lost, as with any link"
    assert {source for source, _ in d.messages} == {a.id}


def test_a_newcomer_is_reached_through_its_neighbour(build: Build) -> None:
    """The commit root reaches a joiner without a direct link, through the member that has one in the coming view."""
    nodes = build("abj")
    connect(nodes, "ab bj")
    a, b, j = nodes.values()
    for node in (a, b):
        node.rule(a_view(1, (a, b), "ab"))
    a.do(lambda: a.links.foresee(a_view(2, (a, b, j), "ab bj")))
    a.say(j.id, b"header")
    j.wait(lambda: j.messages)
    assert j.messages == [(a.id, b"header")]
    assert not b.undone


def test_routed_messages_of_a_member_that_is_out_are_dropped_with_the_view(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab bc")
    a, b, c = nodes.values()
    a.rule(a_view(1, (a, b, c), "ab ac"))
    a.say(c.id, b"x")
    assert a.do(a.links.facts)["waiting"] == 1
    a.rule(a_view(2, (a, b), ""))
    assert a.undone == [(c.id, a.id, "no way to it is known")]
    assert a.do(a.links.facts)["waiting"] == 0


def test_too_many_waiting_messages_are_dropped_and_told(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.membership.routing.MIN_WAITING", 2)
    nodes = build("ab")
    a, b = nodes.values()
    a.rule(a_view(1, (a, b), ""))
    for i in range(5):
        a.say(b.id, b"%d" % i)
    assert a.undone == [(b.id, a.id, "4 messages wait already")]
    connect(nodes, "ab")
    b.wait(lambda: len(b.messages) == 4)
    assert b.messages == [(a.id, b"%d" % i) for i in range(4)], "two of each member of the view"


def test_a_message_that_fits_no_frame_with_its_address_is_dropped_and_told(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos_lightning.transport.links.MAX_PAYLOAD_NBYTES", 100)
    nodes = build("abc")
    connect(nodes, "ab")
    a, b, c = nodes.values()
    a.rule(a_view(1, (a, b, c), "ab bc"))
    a.say(c.id, bytes(100))
    assert a.undone == [(c.id, a.id, "132 bytes are too many for one frame")]


def test_what_is_handed_on_at_once_goes_in_one_frame(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab bc")
    a, b, c = nodes.values()
    view = a_view(1, nodes.values(), "ab bc")
    for node in nodes.values():
        node.rule(view)
    before = a.do(lambda: a.links._links[b.id].traffic)
    a.do(lambda: [a.links.message(c.id, b"%d" % i, view.id) for i in range(20)])
    c.wait(lambda: len(c.messages) == 20)
    assert c.messages == [(a.id, b"%d" % i) for i in range(20)]
    assert a.do(lambda: a.links._links[b.id].traffic) == before + 1
    assert b.links.relayed == 20


def test_what_is_handed_on_as_its_link_breaks_takes_another_way(build: Build) -> None:
    nodes = build("abcd")
    connect(nodes, "ab bd ac cd")
    a, b, c, d = nodes.values()
    for node in (a, c, d):
        node.rule(a_view(1, (a, b, c, d), "ab bd ac cd"))

    def broken() -> None:
        a.links.message(d.id, b"x", ViewId(1, 1))
        link = a.links._links[b.id]
        link.close()
        a.links.broken(b.id, link, "closed")

    a.do(broken)
    for node in (a, c, d):
        node.rule(a_view(2, (a, c, d), "ac cd"))
    d.wait(lambda: d.messages)
    assert d.messages == [(a.id, b"x")]


@pytest.mark.parametrize("data", [b"", b"\x01\x09\x00\x09\x00abc", b"\xff" * 40])
def test_a_damaged_routed_message_breaks_the_link_that_it_came_over(build: Build, data: bytes) -> None:
    (a,) = build("a").values()
    with Stuck(a, "x") as stranger:
        checksum = payload_checksum((memoryview(data),))
        stranger.sock.sendall(pack(FrameType.ROUTED, NO_VIEW, 0, 0, len(data), checksum, summed=bool(data)) + data)
        a.wait(lambda: not a.is_up(stranger.id))
    assert a.changes[-1][2].startswith("damaged (a routed message"), a.changes


def test_a_routed_message_without_hops_left_goes_no_further(build: Build) -> None:
    nodes = build("abc")
    connect(nodes, "ab bc")
    a, b, c = nodes.values()
    b.rule(a_view(1, (a, b, c), "ab bc"))
    routed = RoutedMessage(c.id, a.id, 1, b"x").packed()
    a.do(lambda: a.links._links[b.id].send(FrameType.ROUTED, payload=(memoryview(routed),)))
    b.wait(lambda: b.undone)
    assert b.undone == [(c.id, a.id, "it has come over as many links as any way has")]


def test_sockets_are_closed_when_everybody_begins_anew(build: Build) -> None:
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    a.rule(a_view(1, (a, b), ""))
    a.do(a.links.abandon)
    b.wait(lambda: not b.is_up(a.id))
    assert a.do(lambda: (len(a.links._links), len(a.links._finishing))) == (0, 0)
    assert isinstance(a.links._listener, socket.socket), "others can still dial"
    a.say(b.id, b"x")
    assert a.undone == [(b.id, a.id, "no way to it is known")]
