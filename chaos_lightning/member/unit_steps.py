"""Runs slots as units of micro-batches: the interface to such units, and the loop that runs them until a commit.

Theory of operation (protocol.md P4, P7). A unit waits for tensors of other members, so a recovery ends an attempt in
its middle, and the step runs again under the recovery's view. The I/O thread posts each attempt that it opens. It ends
the one under way when this member promises to leave its view; whatever waits in it then raises `AttemptOverError`. The
training thread first pulls parts that it lacks. Then it runs the units of an attempt, contributes once all that it owns
is reduced, and waits for the header or for another attempt. A round of evaluation (P17) is such a slot, too: a GATHER,
which reduces nothing. A loop that calls, and is not called, runs the units between two calls of `Attempts.next`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from chaos_lightning.collectives.layout import Layout
from chaos_lightning.errors import AttemptOverError, DeadlineError, DepartedError
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.membership.effects import Committed, PullParts
from chaos_lightning.membership.parts import division
from chaos_lightning.planning.trees import OwnedSpans
from chaos_lightning.protocol.types import Header, Kind, LayersCovered, Span, Spent, View, ViewId
from chaos_lightning.transport.link import Chunks


class StepTime(NamedTuple):
    """Seconds that a step takes at one member, as medians; 0 if unknown.

    Attributes:
        step_s: Seconds from the first unit of a step to that of the next step.
        between_s: Seconds from the last unit of a step to the first one of the next step.
    """

    step_s: float = 0.0
    between_s: float = 0.0


class UnitStep(Protocol):
    """Interface of a member's part of slots that run as units of micro-batches (pipeline/step.py)."""

    @property
    def borders(self) -> Chunks | None:
        """Receiver of frames with border tensors, called in the I/O loop's thread; None: there are no borders."""

    @property
    def speed(self) -> float:
        """Relative speed at which this member computes, as in `Heartbeat.speed`; any thread."""

    @property
    def sample_s(self) -> float:
        """Median seconds that this member computes for a sample, as in `Heartbeat.sample_s`; any thread."""

    def step_time(self, view: ViewId) -> StepTime:
        """Returns the median times of the latest steps under this view's plan; any thread."""

    def reduced(self, view: ViewId, seq: int) -> None:
        """Notes that all parts that this member owns are reduced; in the I/O loop's thread."""

    def end(self, view: ViewId) -> None:
        """Ends attempts in this view and older ones; in the I/O loop's thread."""

    def remember_base(self) -> None:
        """Notes that the model now has the state of the last committed header."""

    def drop(self) -> None:
        """Undoes what an attempt has changed at this member."""

    def commit(self, header: Header) -> None:
        """Writes the averages of a committed step into `.grad`."""

    def restart(self) -> None:
        """Forgets all attempts, because this member joins again, perhaps another chain; in the I/O loop's thread."""


@dataclass(frozen=True, kw_only=True)
class UnitsDone:
    """Results of an attempt at this member, all of whose own parts are reduced.

    Attributes:
        weight: Sum of the weights of micro-batches whose last layers ran here.
        presence: Bit of each parameter that has a gradient here.
        micro_batches: Numbers of the step's micro-batches that have samples.
        coverage: Micro-batches in this member's own sums, by layers.
        spent: Positions of micro-batches whose first layers ran here.
        payload: Bytes of this member that go with its gradients, with norms of parts.
    """

    weight: float
    presence: bytes
    micro_batches: tuple[Span, ...]
    coverage: tuple[LayersCovered, ...]
    spent: tuple[Spent, ...] = ()
    payload: bytes = b""


Attempt = Callable[[View, int], UnitsDone]
"""Function that runs the units of this member in a view, for a slot; raises `AttemptOverError` if the attempt ends
meanwhile.
"""


def owned_spans(layout: Layout, view: View) -> Sequence[OwnedSpans] | None:
    """Returns which members own which bytes of the layout in a view; None if the view has no pipelines and all own
    everything.
    """
    if not view.pipelines:
        return None
    parts = division(view)
    return layout.owned(dict(zip(parts.names, parts.owners, strict=True)))


class MovesParts(Protocol):
    """Interface of an object that moves parts of the state between members (member/part_moves.py)."""

    def serve(self, header: Header, view: View) -> None:
        """Serves the parts that this member holds at the header, if another member of the view may lack them."""

    def pull(self, wanted: PullParts, deadline: float) -> bool:
        """Pulls missing parts until the deadline (`time.monotonic()`); returns False if the order was superseded before
        all had come.
        """


class _MovesNothing:
    """Stands in for `MovesParts` where every member has the whole state."""

    def serve(self, header: Header, view: View) -> None:
        """Does nothing: a state is served by `Engine.publish`."""

    def pull(self, wanted: PullParts, deadline: float) -> bool:
        """Does nothing: nobody lacks a part."""
        return True


MOVES_NOTHING: MovesParts = _MovesNothing()


@dataclass(eq=False)
class Attempts:
    """Attempts at the slot that follows a header.

    Attributes:
        step: Runs units.
        moves: Gives and takes parts before the units run.
        mail: Mailbox in which the I/O thread says which attempt is open.
        header: Header that this member stands on.
        contribute: Contributes the results of an attempt.
        take: Takes the slot's commit; returns its header.
        deadline_s: Returns the time (`time.monotonic()`, s) until which an attempt or its header is waited for.
        kind: Kind of the slot.
        noticing: Returns a context in which this member waits.
    """

    step: UnitStep
    moves: MovesParts
    mail: Mailbox
    header: Header
    contribute: Callable[[View, UnitsDone], None]
    take: Callable[[Committed], Header]
    deadline_s: Callable[[], float]
    kind: Kind = Kind.STEP
    noticing: Callable[[], AbstractContextManager[None]] = nullcontext
    _tried: ViewId | None = field(default=None, init=False)
    """View of the latest attempt."""

    def __post_init__(self) -> None:
        self.step.remember_base()

    def next(self) -> View | Header:
        """Waits for the view of the next attempt, or for the slot's header; drops the attempt before if another one
        follows.

        Raises:
            FencedError, DisagreementError, DeadlineError: See `Mailbox.wait`; the last attempt was dropped.
            DepartedError: This member is let go (see `Mailbox.wait`), or a view lets all members go.
        """
        try:
            with self.noticing():
                found = self._next()
            return self.take(found) if isinstance(found, Committed) else found
        except BaseException:
            self.step.drop()
            raise

    def _next(self) -> View | Committed:
        step, moves, header = self.step, self.moves, self.header
        while True:
            what = "the commit of" if self._tried is not None else "an attempt at"
            words = f"{what} slot {header.seq + 1} ({self.kind})"
            found = _next(self.mail, header, self._tried, words, self.deadline_s)
            if isinstance(found, Committed):
                return found
            if self._tried is not None:  # what is served, pulled into and remembered is the state at the header
                step.drop()
            if isinstance(found, PullParts):
                moves.serve(header, found.view)
                try:
                    moves.pull(found, self.deadline_s())
                finally:  # parts that have come are held, whatever ends the pull of others
                    step.remember_base()
                continue
            self._tried = found.id
            moves.serve(header, found)
            if found.find(self.mail.who()) is not None:
                return found
            _depart(self.mail, found)

    def run(self, attempt: Attempt) -> Header:
        """Runs attempts by a function until the slot is committed; returns its header.

        Raises:
            Exception: Any error of `next`, or that a unit raised; the last attempt was dropped.
        """
        while isinstance(found := self.next(), View):
            try:
                self.contribute(found, attempt(found, self.header.seq + 1))
            except AttemptOverError:
                continue
            except BaseException:
                self.step.drop()
                raise
        return found


def await_commit(moves: MovesParts, mail: Mailbox, header: Header, what: str, deadline: float) -> Committed:
    """Waits for the commit of a slot that runs no units; moves parts meanwhile, as a step would.

    Args:
        moves: Gives and takes parts in each view that is entered.
        mail: Mailbox in which the I/O thread says which view is entered.
        header: Header that this member and its state stand on.
        what: Text that names what is waited for.
        deadline: Time by `time.monotonic()`, s.

    Raises:
        FencedError, DisagreementError, DeadlineError: See `Mailbox.wait`.
        DepartedError: This member is let go (see `Mailbox.wait`), or a view lets all members go.
        StateError: No member gives a part that this one needs.
    """
    entered: ViewId | None = None
    while True:
        found = _next(mail, header, entered, what, lambda: deadline)
        if isinstance(found, Committed):
            return found
        if isinstance(found, PullParts):
            moves.serve(header, found.view)
            moves.pull(found, deadline)
            continue
        entered = found.id
        moves.serve(header, found)
        if found.find(mail.who()) is None:
            _depart(mail, found)


def _next(
    mail: Mailbox, header: Header, entered: ViewId | None, what: str, deadline_s: Callable[[], float]
) -> Committed | PullParts | View:
    """Waits for the commit of the slot that follows a header, for an order to pull parts, or for a newer view.

    That view has this member run the slot anew, or lets it go. Then it serves its parts as long as a scheduler is there
    to release it, and may be taken back (P9).
    """

    def views() -> list[View]:
        opened = mail.attempt
        found = [opened[0] if opened is not None and opened[1] == header.seq + 1 else None, mail.let_go]
        return [view for view in found if view is not None and (entered is None or view.id > entered)]

    with mail.changed:
        while True:
            try:
                mail.wait(lambda: bool(mail.commits or mail.parts is not None or views()), what, deadline_s())
                break
            except DeadlineError:
                if mail.let_go is None or mail.lost:
                    raise
                mail.changed.wait(1.0)
        if mail.commits:
            return mail.commits.popleft()
        mail.check()  # the wait does not look where parts are wanted, and who is out gets none
        return mail.parts or max(views(), key=lambda view: view.id)


def _depart(mail: Mailbox, view: View) -> None:
    """Raises DepartedError if this view lets all members go, each of which then writes its parts to a file (P13)."""
    if not view.members:
        raise DepartedError(f"{mail.who()} was let go with all other members by view {view.id}: {view.reason}")
