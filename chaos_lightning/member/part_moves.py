"""Moves parts of the training state between members: serves them, pulls them, and frees those given away (protocol.md
P8, P12, P14).

Theory of operation. Each member serves the parts that it holds whenever it begins to stand in a view, or a header names
parts that have drifted: somebody may lack them then. It does so until the next header is committed, before which the
puller's contribution is needed. Whoever lacks a part asks those first that owned it in the view that closed the header.
Others of the view, and those that it lets go, may have it as well and are asked along, but not waited for. At GENESIS
the oldest owner alone has it.

A member that writes the whole state to a file reads at a header what it does not hold (`PartReader`). All members serve
all of their parts then, until the next header is committed, at which the outcome is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from chaos_lightning.errors import DeadlineError, StateError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.parts import REST, Division, division, numbers
from chaos_lightning.protocol.types import GENESIS, Header, Member, Span, View, ViewId
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.part_state import (
    PartAccess,
    PartCopy,
    PartServer,
    PartState,
    RestState,
    part_manifest,
    pull_part,
)
from chaos_lightning.replication.session import PullReport
from chaos_lightning.replication.source import Endpoint

T = TypeVar("T")
RETRY_S = 0.2
"""Pause before a part is asked for again, where nobody could give it (s); a recovery is about to say who can."""


class HeldParts(Protocol):
    """Parts of the model that this process holds; the part `rest` is not among them."""

    def states(self, names: Collection[str]) -> Sequence[PartState]:
        """Returns access to those of these parts that have tensors of their own."""

    def room(self, names: Collection[str]) -> None:
        """Allocates memory for these parts, which are pulled next."""

    def forget(self, names: Collection[str]) -> None:
        """Frees the memory of these parts, which other members own from now on."""


class PartReader:
    """Reader of parts that other members hold, at one header and with a deadline.

    Args:
        moves: Part moves of this member.
        header: Header that this member stands on.
        deadline: Time by `time.monotonic()`, s.
    """

    def __init__(self, moves: PartMoves, header: Header, deadline: float) -> None:
        self._moves, self._header, self._deadline = moves, header, deadline

    def manifest(self, part: str) -> Mapping[str, Any]:
        """Returns a part's manifest, which is all of it except tensors."""
        return self._moves.read(self._header, part, None, self._deadline)

    def tensors(self, part: str) -> list[tuple[str, Tensor]]:
        """Returns the tensors of a part, by name, in host memory."""
        copy = PartCopy(part)
        self._moves.read(self._header, part, copy, self._deadline)
        return copy.tensors()


class PartMoves:
    """Moves of parts to and from one member; in the training thread.

    Args:
        held: The parts here.
        transfer: This member's transfers.
        mail: Mailbox that tells which parts to pull and to let go.
        tell: Tells the machine of parts that are here.
        holds: Returns the parts that the machine says this member holds.
        events: This member's event log.

    Attributes:
        rest: The rest of the training state, which each member has.
    """

    def __init__(
        self,
        held: HeldParts,
        transfer: Transfer,
        mail: Mailbox,
        tell: Callable[[fx.StateLoaded], None],
        holds: Callable[[], tuple[Span, ...]],
        events: EventLog,
    ) -> None:
        self._held, self._transfer, self._mail, self._tell, self._holds = held, transfer, mail, tell, holds
        self._events = events
        self._server = PartServer(transfer.server)
        self.rest: StateAccess | None = None
        self._served: tuple[ViewId, str] | None = None
        self._before: Division | None = None
        """Division of the view that closed the header on which this member stands."""

    def states(self, names: Collection[str]) -> list[PartAccess]:
        """Returns access to those of these parts that have tensors of their own, `rest` included."""
        found: list[PartAccess] = [*self._held.states([n for n in names if n != REST])]
        if REST in names:
            assert self.rest is not None, "no training state was given to join()"
            found.append(RestState(self.rest))
        return found

    def committed(self, view: View | None) -> None:
        """Stops serving parts, because a header was committed after which they may change; frees parts that others own
        now.
        """
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
        """Stops serving and forgets headers, because this member joins again."""
        self._server.drop()
        self._served = self._before = None

    def serve(self, header: Header, view: View) -> None:
        """Serves the parts that this member holds at the header, if another member of the view may lack them."""
        key = (view.id, header.hash)
        seen, self._served = self._served, key
        if seen is not None and seen[0] == view.id and not header.drifted:
            return
        parts, me = division(view), self._mail.who()
        first = header.hash == GENESIS.hash
        mine = frozenset(numbers(parts.made(me) if first else self._holds()))
        here = [name for part, name in enumerate(parts.names) if part in mine]
        # Newcomers ask all owners in this view, and would wait for one that gets the part itself.
        lacking = [] if first else [name for part, name in enumerate(parts.names) if part not in mine]
        self._server.hold(header, self.states(here), view.id if first else None, lacking=lacking)

    def serve_all(self, header: Header) -> None:
        """Serves all parts that this member holds at the header, for a member that reads the whole state."""
        names = division(self._view()).names
        self._server.hold(header, self.states([names[part] for part in numbers(self._holds())]))

    def read(self, header: Header, part: str, copy: PartCopy | None, deadline: float) -> Mapping[str, Any]:
        """Reads a part from its owners at the header or, if that fails, from any other member that has it.

        Args:
            header: Header that this member stands on.
            part: Name of the part.
            copy: Takes the part's tensors; None: only its manifest is wanted, which is returned.
            deadline: Time by `time.monotonic()`, s.

        Raises:
            StateError, DeadlineError: No member gives the part.
            ChaosError: This member is out of the job.
        """
        mail, dial = self._mail, self._transfer.dial
        tried = False

        def donors() -> tuple[list[Endpoint], frozenset[str]]:
            nonlocal tried
            view = self._view()  # after a death it is another one
            ways, others = self._donors(view, division(view).names.index(part), first=False)
            likely = [way for way in ways if way.member not in others]
            if tried or not likely:
                return ways, others
            tried = True
            return likely, frozenset()

        def ask(ways: list[Endpoint], others: frozenset[str], config: PullConfig) -> Mapping[str, Any]:
            if copy is None:
                return part_manifest(ways, dial, header, part, config=config, abandoned=lambda: mail.over)
            pull_part(ways, dial, header, copy, config=config, abandoned=lambda: mail.over, loading=others)
            return {}

        found = self._ask(donors, ask, lambda: mail.over, deadline)
        if found is None:
            with mail.changed:
                mail.check()
            raise StateError(f"{part} was not read at step {header.step}: this member is about to leave the job")
        return found

    def _view(self) -> View:
        """Returns the view that this member is in."""
        with self._mail.changed:
            opened, view = self._mail.attempt, self._mail.view
        found = opened[0] if opened is not None else view
        assert found is not None
        return found

    def pull(self, wanted: fx.PullParts, deadline: float) -> bool:
        """Pulls the parts and reports each to the state machine; returns False if the order was superseded before all
        had come.

        Raises:
            StateError, DeadlineError: Nobody gives a part until the deadline (by `time.monotonic()`).
        """
        names = division(wanted.view).names
        for part in numbers(wanted.parts):
            layers = [names[part]] if names[part] != REST else []
            self._held.room(layers)
            for state in self.states([names[part]]):
                if not self._pull(wanted, part, state, deadline):
                    self._held.forget(layers)  # who still lacks it makes room anew
                    return False
            self._tell(fx.StateLoaded(wanted.header.hash, ((part, part + 1),), wanted.view.id))
        with self._mail.changed:
            if self._mail.parts is wanted:
                self._mail.parts = None
        return True

    def _pull(self, wanted: fx.PullParts, part: int, state: PartAccess, deadline: float) -> bool:
        def over() -> bool:
            return self._mail.parts is not wanted or self._mail.over

        first = wanted.header.hash == GENESIS.hash

        def pull(donors: list[Endpoint], others: frozenset[str], config: PullConfig) -> PullReport:
            return pull_part(
                donors,
                self._transfer.dial,
                wanted.header,
                state,
                view=wanted.view.id if first else None,
                config=config,
                abandoned=over,
                loading=others,
            )

        report = self._ask(lambda: self._donors(wanted.view, part, first=first), pull, over, deadline)
        if report is None:
            return False
        self._events.emit(
            "part_pulled",
            seq=wanted.header.seq,
            part=state.part,
            number=part,
            nbytes=sum(report.by_source.values()),
            seconds=round(report.seconds, 4),
            by_source=report.by_source,
            hash=report.state_hash,
        )
        return True

    def _ask(
        self,
        donors: Callable[[], tuple[list[Endpoint], frozenset[str]]],
        ask: Callable[[list[Endpoint], frozenset[str], PullConfig], T],
        over: Callable[[], bool],
        deadline: float,
    ) -> T | None:
        """Asks members for a part repeatedly until the deadline; returns None if the part is not needed any more."""
        while True:
            try:
                return ask(*donors(), PullConfig(deadline_s=max(0.1, deadline - time.monotonic())))
            except (StateError, DeadlineError):
                if over():
                    return None
                if time.monotonic() + RETRY_S > deadline:
                    raise
                self._mail.pause(RETRY_S)

    def _donors(self, view: View, part: int, *, first: bool) -> tuple[list[Endpoint], frozenset[str]]:
        """Returns the addresses of members that may have the part, likely ones first, and the names of the unlikely
        ones.
        """
        me, there = self._mail.who(), {m.id: m for m in (*view.members, *view.leaving)}
        now = division(view).owners[part]
        if first:
            likely = now[:1]
        elif self._before is not None:
            likely = self._before.owners[part]
        else:  # a newcomer knows no view before
            likely = tuple(m for m in now if m not in view.joiners)
        found = [m for m in likely if m in there and m != me]
        others = [] if first else [m for m in there if m not in found and m != me]
        return self._ways([there[m] for m in (*found, *others)], view), frozenset(others)

    def _ways(self, members: Sequence[Member], view: View) -> list[Endpoint]:
        return [way for member in members for way in self._transfer.ways([member], view)]
