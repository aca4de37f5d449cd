"""Tests that a message to many members is encoded once, keys are made once per link, and heartbeats grow rarer in large
jobs.
"""

from __future__ import annotations

import asyncio
import hmac

import pytest

from chaos_lightning.control import member_streams
from chaos_lightning.control.link_keys import KeyIssuer
from chaos_lightning.control.member_streams import ENCODING, MemberStreams
from chaos_lightning.membership.leader_search import PULSE_S, PULSE_TIMEOUT_S, pulse_s, pulse_timeout_s
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import unwrap_to_member
from chaos_lightning.protocol.types import (
    GENESIS,
    Decide,
    LinkKeys,
    LinkSpec,
    Member,
    NextView,
    Notice,
    Pulse,
    Settings,
    ToMember,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.service import keys
from chaos_lightning.service.streams import Encoding, Stream

COUNT = 64
MEMBERS = tuple(Member(f"m{i}~{i}", f"m{i}", "host", "127.0.0.1", 1) for i in range(1, COUNT + 1))
RING = tuple(LinkSpec(MEMBERS[i].id, MEMBERS[(i + 1) % COUNT].id) for i in range(COUNT))


def a_view(number: int) -> View:
    return View(ViewId(1, number), ViewId(1, number - 1), MEMBERS, links=RING)


class Receiver:
    """Stands for a gRPC stream, and collects the bytes that are written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    @property
    def messages(self) -> list[ToMember]:
        return [unwrap_to_member(chaos_pb2.ToMemberEnvelope.FromString(data)) for data in self.written]


class Crowd:
    """Control streams of COUNT members that have said hello."""

    def __init__(self, rule: str) -> None:
        self.streams = MemberStreams(print, print, print, hello_timeout_s=1.0, pulses=False)
        self.streams.keys = KeyIssuer(Settings(links=rule), secret_channel=rule != "checksum")
        self.receivers = {n: Receiver() for n in range(1, COUNT + 1)}
        for number, member in enumerate(MEMBERS, 1):
            self.streams.standing[number] = Stream(number, member.name, "Attend", member_streams.ENCODING)
            self.streams.send(number, Welcome(member, 1, "founder", "", 0.1, 0.3))

    def send_to_all(self, message: ToMember) -> None:
        for number in self.receivers:
            self.streams.send(number, message)

    def write(self) -> None:
        """Writes all queued messages to the receivers."""

        async def write_all() -> None:
            self.streams.close_all()
            tasks = [self.streams._streams._write(self.streams.standing[n], r) for n, r in self.receivers.items()]
            await asyncio.gather(*tasks)

        asyncio.run(write_all())


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[ToMember]:
    """List of all messages that the streams have encoded."""
    seen: list[ToMember] = []

    def counted(message: ToMember) -> bytes:
        seen.append(message)
        return ENCODING.write(message)

    monkeypatch.setattr(member_streams, "ENCODING", Encoding(ENCODING.read, counted))
    return seen


def test_a_message_to_many_is_encoded_once(encoded: list[ToMember]) -> None:
    crowd = Crowd("checksum")
    decide, notice, again = Decide(a_view(1), GENESIS), Notice("x"), NextView(a_view(2))
    for message in (decide, notice, again):
        crowd.send_to_all(message)
    crowd.write()
    for message in (decide, notice, again):
        assert [m for m in encoded if m is message] == [message]
    for receiver in crowd.receivers.values():
        assert receiver.messages[-3:] == [decide, notice, again]
    assert len({id(receiver.written[-3]) for receiver in crowd.receivers.values()}) == 1


def test_the_key_of_a_link_is_made_once_per_view_and_each_member_gets_its_own_at_once(
    encoded: list[ToMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[bytes] = []

    def digest(key: bytes, what: bytes, kind: str) -> bytes:
        digests.append(what)
        return hmac.new(key, what, kind).digest()

    monkeypatch.setattr(keys.hmac, "digest", digest)
    crowd = Crowd("encrypted")
    for number in (1, 2):
        crowd.send_to_all(Decide(a_view(number), GENESIS))
        assert len(digests) == 2 * len(RING) * number, "the key and its name"
    crowd.write()
    for receiver in crowd.receivers.values():
        _, _, *rest = receiver.messages  # the welcome, with no key yet
        assert [type(m) for m in rest] == [LinkKeys, Decide] * 2
        assert [len(m.keys) for m in rest if isinstance(m, LinkKeys)] == [2, 2]
    assert len([m for m in encoded if isinstance(m, Decide)]) == 2


def test_a_pulse_to_many_is_encoded_once_and_tells_how_long_to_wait_for_the_next(encoded: list[ToMember]) -> None:
    crowd = Crowd("checksum")
    crowd.write()
    assert crowd.streams.pulse() == pulse_s(COUNT)
    crowd.write()
    assert encoded[-1] == Pulse(pulse_timeout_s(COUNT))
    assert len([m for m in encoded if isinstance(m, Pulse)]) == 1
    assert all(isinstance(receiver.messages[-1], Pulse) for receiver in crowd.receivers.values())


@pytest.mark.parametrize("count", [0, 1, 16, 64])
def test_small_jobs_pulse_as_often_as_ever(count: int) -> None:
    assert (pulse_s(count), pulse_timeout_s(count)) == (PULSE_S, PULSE_TIMEOUT_S)


@pytest.mark.parametrize("count", [256, 512, 1024, 10_000])
def test_large_ones_more_seldom_but_often_enough_to_leave_before_a_lease_ends(count: int) -> None:
    assert PULSE_S < pulse_s(count) <= 0.5
    assert 3 * pulse_s(count) < pulse_timeout_s(count) < 2.0


def test_a_stream_that_ended_gets_no_keys(encoded: list[ToMember]) -> None:
    crowd = Crowd("encrypted")
    del crowd.streams.standing[1], crowd.receivers[1]
    assert crowd.streams.keys is not None
    crowd.streams.keys.closed(1)
    crowd.send_to_all(Decide(a_view(1), GENESIS))
    crowd.write()
    assert len([m for m in encoded if isinstance(m, LinkKeys) and m.keys]) == COUNT - 1
