"""Parts of the training state that change hands: served, pulled, and let go (protocol.md P8, P12, P14).

Theory of operation. Each member serves the parts that it holds whenever it begins to stand in a view, or a header names
parts that have drifted: somebody may lack them then. It does so until the next header is committed, before which the
puller's contribution is needed. Whoever lacks a part asks those first that owned it in the view that closed the header.
Others of the view, and those that it lets go, may have it as well and are asked along, but not waited for. At GENESIS
the oldest owner alone has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from chaos_lightning.errors import DeadlineError, StateError
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.protocol.types import GENESIS, Header, Member, Span, View, ViewId
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.part_state import PartServer, PartState, pull_part
from chaos_lightning.replication.source import Endpoint

RETRY_S = 0.2
"""Pause before a part is asked for again, where nobody could give it (s); a recovery is about to say who can."""


class HeldParts(Protocol):
    """The parts of the model in this process."""

    def states(self, names: Collection[str]) -> Sequence[PartState]:
        """Returns these parts as they are, without those that have no tensors of their own (the rest)."""

    def room(self, names: Collection[str]) -> None:
        """Makes memory for these parts, which are pulled next."""

    def forget(self, names: Collection[str]) -> None:
        """Lets go of these parts: others own them."""


class PartMoves:
    """See the module; in the training thread.

    Args:
        held: The parts here.
        transfer: This member's transfers.
        mail: Says what is to be pulled and let go.
        tell: Tells the machine of parts that are here.
        holds: Returns the parts that the machine says this member holds.
    """

    def __init__(
        self,
        held: HeldParts,
        transfer: Transfer,
        mail: Mailbox,
        tell: Callable[[fx.StateLoaded], None],
        holds: Callable[[], tuple[Span, ...]],
    ) -> None:
        self._held, self._transfer, self._mail, self._tell, self._holds = held, transfer, mail, tell, holds
        self._server = PartServer(transfer.server)
        self._served: tuple[ViewId, str] | None = None
        self._before: Division | None = None
        """Division of the view that closed the header on which this member stands."""

    def committed(self, view: View | None) -> None:
        """A header was committed that was closed under this view: what was served may be written to now."""
        self._server.drop()
        self._before = division(view) if view is not None else None
        with self._mail.changed:
            gone, self._mail.gone_parts = self._mail.gone_parts, ()
            now = self._mail.view
        if gone:
            assert now is not None
            names = (self._before or division(now)).names  # all views of a job number parts alike
            self._held.forget([names[part] for part in numbers(gone)])

    def restart(self) -> None:
        """This member joins again: nothing is served, and it knows no header."""
        self._server.drop()
        self._served = self._before = None

    def serve(self, header: Header, view: View) -> None:
        """Serves what is held at the header, if somebody in this view may lack it."""
        key = (view.id, header.hash)
        seen, self._served = self._served, key
        if seen is not None and seen[0] == view.id and not header.drifted:
            return
        parts, me = division(view), self._mail.who()
        mine = parts.made(me) if header.hash == GENESIS.hash else self._holds()
        states = self._held.states([parts.names[part] for part in numbers(mine)])
        self._server.hold(header, states, view.id if header.hash == GENESIS.hash else None)

    def pull(self, wanted: fx.PullParts, deadline: float) -> bool:
        """Pulls the parts, and tells of each; False if something else is wanted meanwhile.

        Raises:
            StateError, DeadlineError: Nobody gives a part until the deadline (by `time.monotonic()`).
        """
        names = division(wanted.view).names
        for part in numbers(wanted.parts):
            self._held.room([names[part]])
            for state in self._held.states([names[part]]):
                if not self._pull(wanted, part, state, deadline):
                    self._held.forget([names[part]])  # who still lacks it makes room anew
                    return False
            self._tell(fx.StateLoaded(wanted.header.hash, ((part, part + 1),), wanted.view.id))
        with self._mail.changed:
            if self._mail.parts is wanted:
                self._mail.parts = None
        return True

    def _pull(self, wanted: fx.PullParts, part: int, state: PartState, deadline: float) -> bool:
        def over() -> bool:
            return self._mail.parts is not wanted or self._mail.over

        first = wanted.header.hash == GENESIS.hash
        while True:
            donors, others = self._donors(wanted.view, part, first=first)
            config = PullConfig(deadline_s=max(0.1, deadline - time.monotonic()))
            try:
                pull_part(
                    donors,
                    self._transfer.dial,
                    wanted.header,
                    state,
                    view=wanted.view.id if first else None,
                    config=config,
                    abandoned=over,
                    loading=others,
                )
                return True
            except (StateError, DeadlineError):
                if over():
                    return False
                if time.monotonic() + RETRY_S > deadline:
                    raise
                self._mail.pause(RETRY_S)

    def _donors(self, view: View, part: int, *, first: bool) -> tuple[list[Endpoint], frozenset[str]]:
        """Returns the ways to those that may have the part, likely ones first, and the names of the others."""
        me, there = self._mail.who(), {m.id: m for m in (*view.members, *view.leaving)}
        now = division(view).owners[part]
        likely = now[:1] if first else self._before.owners[part] if self._before is not None else tuple(there)
        found = [m for m in likely if m in there and m != me]
        others = [] if first else [m for m in there if m not in found and m != me]
        return self._ways([there[m] for m in (*found, *others)], view), frozenset(others)

    def _ways(self, members: Sequence[Member], view: View) -> list[Endpoint]:
        return [way for member in members for way in self._transfer.ways([member], view)]
