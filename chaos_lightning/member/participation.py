"""Keeps track of a member's footing in its job (in, out, fenced, left), and changes it.

Theory of operation. A loop, Lightning's or the user's own, hosts a `Participation`, and takes its slots within `slot`.
The engine raises an exception if this member was put out, or if it may go. `slot` catches it, changes the footing, and
calls the host to act on that. At a safe point, when the optimizer has stepped, the host lets others in.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chaos_lightning.errors import DepartedError, FencedError
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.keeping import SavedCheckpoints
from chaos_lightning.replication.access import StateAccess

_log = logging.getLogger("chaos_lightning")


class Footing(enum.Enum):
    """Relation of a member to its job."""

    ALONE = "not in yet, or the loop is over, or runs hooks of its own: collectives give a member its own value"
    IN = "in the job"
    VOID = "fenced: the state means nothing before the loop's next safe point, where it goes on as a newcomer"
    GONE = "has left, and others go on"
    LAST = "has left, and nobody else has its state"


class Participation:
    """Footing of one member in its job, and the actions that change it.

    Args:
        put_out: Function that is called when this member was fenced: it gets the loop to its next safe point without
            the other members, or joins again at once.
        left: Function that is called when this member has left: it keeps the state if need be. Its argument is whether
            the last header is that of a step that the optimizer has yet to apply.
        made: Engine of this member; None if it is made when the member comes in.

    Attributes:
        footing: Present footing.
        stepped: Number and header hash of the last committed optimizer step.
        checkpoints: Saved checkpoints that the present state goes on from.
    """

    def __init__(self, put_out: Callable[[], None], left: Callable[[bool], None], made: Engine | None = None) -> None:
        self._put_out, self._left, self.made = put_out, left, made
        self.footing = Footing.ALONE
        self.stepped = (0, "")
        self.checkpoints = SavedCheckpoints()

    @property
    def engine(self) -> Engine:
        assert self.made is not None, "the member has not entered the job yet"
        return self.made

    @property
    def in_job(self) -> bool:
        """Whether this member's collectives include the other members."""
        return self.footing is Footing.IN

    @property
    def departed(self) -> bool:
        return self.footing in (Footing.GONE, Footing.LAST)

    @property
    def out(self) -> bool:
        """Whether this member was excluded, or has left."""
        return self.departed or self.footing is Footing.VOID

    @property
    def is_last(self) -> bool:
        """Whether this member is the only one in its view."""
        engine = self.engine
        return bool(engine.role) and engine.view is not None and engine.view.ids() == (engine.member_id,)

    def may_go(self) -> bool:
        """Returns whether this member may end: a header let it go, or it leaves as the only member and no newcomer is
        coming.
        """
        engine = self.engine
        return engine.out or (engine.leaving and engine.world_size == 1 and engine.may_go())

    def go(self, footing: Footing) -> None:
        """Sets the footing; one that is GONE or LAST must not be changed."""
        assert not self.departed, f"{footing.name} after {self.footing.name}"
        self.footing = footing

    def come_in(self, enter: Callable[[], object]) -> DepartedError | None:
        """Enters the job, or joins it again; if this member was asked to leave before it was in a view, marks it as
        departed and returns the error.
        """
        try:
            enter()
        except DepartedError as error:
            if not self.engine.leaving:
                raise
            self.depart()
            return error
        return None

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Context manager for a block that takes slots; skips the rest of the block if this member is fenced or let go
        in it.
        """
        try:
            yield
        except FencedError as error:
            self.fenced(error)
        except DepartedError:
            self.depart()

    def fenced(self, error: FencedError) -> None:
        """Marks this member's state as void, unless it already is, and has the host act on that."""
        if self.footing is not Footing.VOID:
            _log.warning("%s; this process joins again by itself", error)
            self.go(Footing.VOID)
            self._put_out()

    def depart(self, *, stepped: bool = False) -> None:
        """Marks this member as one that has left, and has the host act on that. It may not even have seen the header
        that let it go.
        """
        if not self.departed:
            self.go(Footing.LAST if self.is_last else Footing.GONE)
            self._left(stepped)

    def let_others_in(self, state: StateAccess) -> bool:
        """Serves newcomers at a safe point, and takes part in a boundary if the last header asks for one; returns
        whether it did.
        """
        with self.slot():
            self.engine.serve(state)
            if self.engine.header.boundary and not self.engine.out:  # headers ask until it is done
                self.engine.boundary(state)
                return True
        return False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager in whose block collectives return this member's own values only."""
        kept = self.footing
        self.end()
        try:
            yield
        finally:
            self.footing = kept

    def end(self) -> None:
        """Takes a member out of the job's collectives, because its loop is over or may not call the other members any
        more.
        """
        if self.in_job:
            self.go(Footing.ALONE)

    def keep(self, state: StateAccess, *, counted: int, stuck: bool = False) -> None:
        """Keeps the state in a file if this was the last member, or no member can continue."""
        self.engine.keep(state, self.checkpoints.at(self.stepped[1]), counted=counted, stuck=stuck)

    def saved(self) -> None:
        """Notes that a checkpoint of the present state was saved."""
        self.checkpoints.heads = self.checkpoints.at(self.stepped[1])
