"""Tests that the stream of a member that reads nothing is cut, whatever kind of message piles up on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from served import attending, serving

from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import Hello, Leave, Member, NextView, Notice, Settings, View, ViewId, Welcome
from chaos_lightning.service.streams import Stream, Streams


def says_leave(event: fx.SchedulerEvent) -> bool:
    return isinstance(event, fx.MessageIn) and isinstance(event.message, Leave)


def closed(event: fx.SchedulerEvent) -> bool:
    return isinstance(event, fx.Closed)


def test_a_member_that_never_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.control.member_streams.MOST_WAITING", 8)
    flood: list[fx.SchedulerEffect] = [fx.Send(1, Notice("x" * 1000)) for _ in range(50)]
    with serving(lambda e: flood if says_leave(e) else None) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        assert served.events.wait(closed).conn == 1  # type: ignore[union-attr]


def test_keys_that_come_with_messages_to_others_count_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that does not read is cut off even if it is sent only keys, which accompany messages to others."""
    monkeypatch.setattr("chaos_lightning.control.member_streams.MOST_WAITING", 8)
    write = Streams._write

    async def stuck(streams: Streams, stream: Stream, context: Any) -> None:
        if stream.number == 1:
            await asyncio.Event().wait()
        await write(streams, stream, context)

    monkeypatch.setattr(Streams, "_write", stuck)
    members = tuple(Member(i, i[0], "host", "127.0.0.1", 1) for i in ("a~1", "b~2"))

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if isinstance(event, fx.MessageIn) and isinstance(event.message, Leave):
            number = int(event.message.reason)
            return [fx.Send(2, NextView(View(ViewId(1, number), ViewId(1, number - 1), members)))]
        return None

    with (
        serving(rule, settings=Settings(links="authenticated")) as served,
        attending(served.endpoint, "a"),
    ):
        served.events.wait(lambda e: isinstance(e, fx.MessageIn) and isinstance(e.message, Hello))
        with attending(served.endpoint, "b") as b:
            b.messages.wait_for(Welcome)
            for number in range(1, 12):
                b.agent.send(Leave(str(number)))
                assert b.messages.wait_for(NextView, number).view.id == ViewId(1, number)
                standing = served.server._streams.standing
                assert standing.get(1) is None or standing[1].outbox.qsize() <= 8
            assert served.events.wait(closed).conn == 1  # type: ignore[union-attr]
            assert "b" in served.server._streams.names()
