"""Tests a member's shell: what it does when the scheduler gives it an id, and what it logs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.shell import Shell
from chaos_lightning.member.unit_steps import StepTime
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.codec import encode_peer
from chaos_lightning.protocol.types import GENESIS, Heartbeat, Member, ViewId, Welcome


def test_a_newcomer_that_gets_another_id_closes_the_links_of_the_one_it_was() -> None:
    """A newcomer that gets another id closes all links, whose other ends know it by the old id."""
    called: list[str] = []
    links = SimpleNamespace(
        me="",
        chunk=None,
        generation=None,
        want=lambda peers: None,
        reports=list,
        abandon=lambda: called.append(links.me),
    )
    transfer = SimpleNamespace(server=SimpleNamespace(forwarder=None), arrived=lambda: None)
    nobody = cast(Any, SimpleNamespace(grid=()))
    shell = Shell(
        nobody, Mailbox("c"), EventLog(None), cast(Any, links), cast(Any, transfer), nobody, lambda said: None, nobody
    )
    for name in ("c~3", "c~3", "c~1000001"):
        shell.control(Welcome(Member(id=name, name="c", host="h", address="h", port=1), 1, "joiner", "", 0.1, 0.3))
    assert called == ["c~3", "c~1000001"]


@pytest.mark.parametrize(("step_s", "told"), [(0.0, 20), (0.5, 8), (2.0, 2)])
def test_what_links_carry_is_a_small_part_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, told: int
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    links = SimpleNamespace(
        ping=lambda: None,
        facts=lambda: {"links": [{"peer": "b~2"}], "relayed": 0, "waiting": 0},
        generation=None,
        chunk=None,
    )
    server = SimpleNamespace(forwarder=None, pace=SimpleNamespace(usual_s=step_s))
    loop = SimpleNamespace(later=lambda *_: None, grid=())
    with EventLog(tmp_path / "x.jsonl") as log:
        shell = Shell(*cast(Any, (loop, Mailbox("a"), log, links, SimpleNamespace(server=server), loop, print, loop)))
        monkeypatch.setattr(shell, "feed", lambda _: None)
        for _ in range(80):
            shell.beat()
            now += 0.5
    assert sum(r.name == "links" for r in read_events(tmp_path)) == told


def test_a_heartbeat_tells_steps_of_the_view_that_it_names() -> None:
    nobody = SimpleNamespace(grid=())
    server = SimpleNamespace(server=SimpleNamespace(forwarder=None, pace=SimpleNamespace(usual_s=0.3)))
    links = SimpleNamespace(chunk=None, generation=None)
    shell = Shell(*cast(Any, (nobody, Mailbox("b"), EventLog(None), links, server, nobody, print, nobody)))
    shell.machine = cast(Any, SimpleNamespace(heartbeat=lambda: Heartbeat(ViewId(1, 7), 3, 2), view=None))
    assert shell.heartbeat() == Heartbeat(ViewId(1, 7), 3, 2, 0.3)
    steps = {ViewId(1, 7): StepTime(0.4, 0.1)}
    shell.units = cast(Any, SimpleNamespace(speed=0.9, sample_s=0.02, step_time=steps.__getitem__))
    assert shell.heartbeat() == Heartbeat(ViewId(1, 7), 3, 2, 0.4, speed=0.9, between_s=0.1, sample_s=0.02)


def test_a_header_is_handed_on_as_the_bytes_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, bytes]] = []
    links = SimpleNamespace(chunk=None, generation=None, message=lambda peer, data, view: sent.append((peer, data)))
    nobody = SimpleNamespace(grid=())
    transfer = SimpleNamespace(server=nobody)
    shell = Shell(*cast(Any, (nobody, Mailbox("b"), EventLog(None), links, transfer, nobody, print, nobody)))
    shell.machine = cast(Any, SimpleNamespace(on=lambda _, e: [fx.ToPeer(p, e.message) for p in ("c~3", "d~4")]))
    data = encode_peer(GENESIS) + encode_peer(GENESIS)  # said twice, which protobuf reads as said once
    monkeypatch.setattr("chaos_lightning.member.shell.encode_peer", lambda _: pytest.fail("encoded anew"))
    shell.message("a~1", memoryview(data))
    assert sent == [("c~3", data), ("d~4", data)]
