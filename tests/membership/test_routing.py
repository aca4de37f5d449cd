"""Tests the router's decision about each message: forward it, take it, keep it for a while, or drop it."""

from __future__ import annotations

from chaos_lightning.membership import routing
from chaos_lightning.membership.routing import Drop, Hand, RoutedMessage, Router, Take
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId

RING = "ab bc cd ad"
CHAIN = "ab bc cd"


def view(number: int, links: str, members: str = "abcd") -> View:
    made = tuple(Member(m, m, "h", "127.0.0.1", 1) for m in members)
    return View(ViewId(1, number), ViewId(1, number - 1), made, links=tuple(LinkSpec(*pair) for pair in links.split()))


def router(me: str, links: str, up: str, wanted: str = "") -> Router:
    made = Router(me, set(up), set(wanted))
    made.rule(view(1, links))
    return made


def routed(to: str, source: str, hops_left: int = 4, number: int = 1) -> RoutedMessage:
    return RoutedMessage(to, source, hops_left, b"x", ViewId(1, number) if number else NO_VIEW)


def test_a_neighbour_gets_the_payload_alone_and_others_get_it_by_way_of_one() -> None:
    b = router("b", CHAIN, "ac")
    (near,) = b.send("c", b"x", ViewId(1, 1))
    (far,) = b.send("d", b"x", ViewId(1, 1))
    assert near == Hand("c", routed("c", "b"), bare=True)
    assert far == Hand("c", routed("d", "b"), bare=False)


def test_what_is_for_this_member_is_taken_and_the_rest_goes_on_with_one_hop_less() -> None:
    b = router("b", CHAIN, "ac")
    assert b.arrived(routed("b", "d", 1), "c") == [Take(routed("b", "d", 1))]
    assert b.arrived(routed("d", "a"), "a") == [Hand("c", routed("d", "a", 3), bare=False)]


def test_the_last_hop_is_the_last() -> None:
    b = router("b", CHAIN, "ac")
    assert b.arrived(routed("d", "a", 2), "a") == [Hand("c", routed("d", "a", 1), bare=False)]
    (step,) = b.arrived(routed("d", "a", 1), "a")
    assert isinstance(step, Drop)
    assert "as many links as any way has" in step.reason


def test_no_message_goes_back_to_the_neighbour_it_came_from() -> None:
    """A message whose next hop is the neighbour that it came from is dropped; otherwise two members in different views
    would pass it back and forth.
    """
    (step,) = router("b", CHAIN, "ac").arrived(routed("d", "a"), "c")
    assert isinstance(step, Drop)
    assert step.reason == "c, where it came from, is the next hop"


def test_a_message_may_go_to_its_source_by_way_of_another_one() -> None:
    """A message may pass its source again when views have changed; only the neighbour that forwarded it is excluded."""
    (step,) = router("b", CHAIN, "ac").arrived(routed("d", "c"), "a")
    assert step == Hand("c", routed("d", "c", 3), bare=False)


def test_a_message_waits_for_the_link_that_it_needs() -> None:
    up: set[str] = set()
    b = Router("b", up, set())
    b.rule(view(1, CHAIN))
    assert b.send("d", b"x", ViewId(1, 1)) == []
    assert (b.waiting, b.again()) == (1, [])
    up.add("c")
    assert b.again() == [Hand("c", routed("d", "b"), bare=False)]
    assert b.waiting == 0


def test_a_message_of_a_view_to_come_waits_for_it() -> None:
    b = router("b", CHAIN, "acd")
    assert b.arrived(routed("d", "a", number=2), "a") == [], "whether that view has the link to d is not known yet"
    assert b.foresee(view(2, "ab bc cd ac")) == [Hand("c", routed("d", "a", 3, 2), bare=False)]


def test_a_link_that_the_view_lacks_takes_what_is_for_none_of_its_members() -> None:
    """A link that the view lacks, such as a learner's, carries messages to that learner but none to members, since its
    break starts no recovery.
    """
    a = router("a", CHAIN, "bcx")
    assert [step.peer for step in a.send("c", b"x", ViewId(1, 1)) if isinstance(step, Hand)] == ["b"]
    assert [step.peer for step in a.send("x", b"x", ViewId(1, 1)) if isinstance(step, Hand)] == ["x"]


def test_a_message_of_the_view_before_goes_by_the_ways_of_that_view() -> None:
    b = router("b", RING, "ac")
    b.rule(view(2, "ab bc cd"))
    assert b.hop("d", ViewId(1, 1)) == "a"
    assert b.hop("d", ViewId(1, 2)) == "c"
    b.rule(view(2, "ab bc cd"))
    assert b.hop("d", ViewId(1, 1)) == "a", "a view that rules already is told again"


def test_who_is_unknown_gets_nothing_but_who_is_wanted_is_waited_for() -> None:
    wanted: set[str] = set()
    b = Router("b", set("ac"), wanted)
    b.rule(view(1, CHAIN))
    (step,) = b.send("x", b"x", ViewId(1, 1))
    assert isinstance(step, Drop)
    assert step.reason == "no way to it is known"
    wanted.add("x")
    assert b.send("x", b"x", ViewId(1, 1)) == []
    assert b.waiting == 1


def test_no_more_wait_than_fit() -> None:
    b = router("b", CHAIN, "")
    for _ in range(routing.MIN_WAITING):
        assert b.send("d", b"x", ViewId(1, 1)) == []
    (step,) = b.send("d", b"x", ViewId(1, 1))
    assert isinstance(step, Drop)
    assert b.waiting == routing.MIN_WAITING


def test_in_a_large_view_two_messages_of_each_member_may_wait() -> None:
    ids = [f"m{i}" for i in range(5000)]
    b = Router(ids[0], set(), set())
    b.rule(View(ViewId(1, 1), NO_VIEW, tuple(Member(m, m, "h", "h", 1) for m in ids)))
    for _ in range(10_000):
        assert b.send("m1", b"x", ViewId(1, 1)) == []
    assert isinstance(b.send("m1", b"x", ViewId(1, 1))[0], Drop)


def test_what_a_link_gives_back_takes_another_way() -> None:
    up = set("ac")
    b = Router("b", up, set())
    b.rule(view(1, RING))
    (step,) = b.send("d", b"x", ViewId(1, 1))
    assert isinstance(step, Hand)
    up.discard(step.peer)
    b.rule(view(2, CHAIN))
    up.add("c")
    assert b.returned(routed("d", "b", number=2)) == [Hand("c", routed("d", "b", number=2), bare=False)]
