"""A member's shell: what it does when the scheduler says who it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from chaos_lightning.events.events import EventLog
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.shell import Shell
from chaos_lightning.protocol.types import Member, Welcome


def test_a_newcomer_that_gets_another_id_closes_the_links_of_the_one_it_was() -> None:
    """Their other ends know it by the id before; once dialled again, they know it by this one."""
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
