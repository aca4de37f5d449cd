"""Decides which micro-batch a member trains on next, and keeps track of those that no header has committed yet.

Theory of operation. An *accumulation* is what one optimizer step uses: `view.accumulate` micro-batches. Its assignment
is fixed when its first micro-batch is asked for, from the last committed header (protocol.md 10), and stays whatever
happens to the view until a step commits. Three cases at each micro-batch:

- `header.step` has grown: the step committed. A new accumulation begins on the new header. (Also if the accumulation
was not handed out in full: Lightning steps early at a limited epoch's end. What was not handed out is unspent and
assigned again.) - It has not, and the accumulation has micro-batches left: the next of them. - It has not, and the
accumulation is through: the training loop accumulates over several accumulations (manual optimisation). The next
accumulation is the assignment `ahead=1, 2, ...` of the *same* header, so that all members go on agreeing.

What was handed out since that header and is not in the ledger is what the next contribution spends (`pending`). An
uncommitted accumulation is never "given back": it is absent from the next header's ledger, and so assigned again by
itself.

A ledger from a checkpoint (`resumed`) counts as if the header named it, too: a resumed job begins at the genesis
header, whose ledger is empty. Both are united; it is idempotent, since a joiner gets a ledger by both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from chaos_lightning.data.source import AssignmentSource, MicroBatch
from chaos_lightning.planning import assignment, ledger
from chaos_lightning.protocol.spans import count, normalise, subtract
from chaos_lightning.protocol.types import NO_VIEW, Header, Ledger, Member, Span, Spent, View

UNKNOWN_LENGTH = 1 << 62
"""Number of positions of a stream that has not run dry yet."""

Part = tuple[Span, ...]
"""Positions that are assigned to one member for one micro-batch."""


@dataclass(frozen=True, slots=True)
class _Base:
    """Facts at the header from which an accumulation's positions are assigned."""

    step: int
    member: str
    ruling: View | None
    ledger: Ledger


class _Stretch(TypedDict):
    """Arguments of the functions in `planning.assignment` that describe one epoch's positions."""

    epoch: int
    length: int
    stream: str
    drop_last: bool


class Accumulations:
    """Accumulations of one member in one pass over the data.

    Attributes:
        length: positions in this epoch of the stream; UNKNOWN_LENGTH until an iterable has run dry.
        whole: with drop_last a rest that makes no micro-batch ends the epoch, and no step has idle micro-batches alone.
    """

    def __init__(
        self,
        source: AssignmentSource,
        *,
        stream: str,
        epoch: int,
        length: int,
        drop_last: bool,
        least: int,
        resumed: Resumed,
        quota: int,
    ) -> None:
        self.epoch = epoch
        self.stream = stream
        self.length = length
        self.whole = False
        self._source = source
        self._drop_last = drop_last
        self._least = least
        self._resumed = resumed
        self._quota = quota
        self._base: _Base | None = None
        self._ahead = 0
        self._index = 0
        self._number = -1
        self._handed = 0
        self._open = False
        self._size = 1
        self._assignment: assignment.Assignment | None = None
        self._taken: list[Span] = []
        self._forecast: tuple[View | None, Part] | None = None
        self.as_forecast = False
        """Whether the present accumulation is what the one before it foresaw, so that what is drawn ahead stays
        right."""

    # --- the present accumulation ------------------------------------------------------------------------------------

    def advance(self) -> MicroBatch | None:
        """Returns the next micro-batch, whose `samples` are its number of positions, or None when the epoch is over."""
        header, me = self._source.header, self._source.member_id
        if self._base is None or header.step != self._base.step or me != self._base.member:
            ruling = self._ruling()
            self._base = _Base(header.step, me, ruling, self._resumed.united(header))
            self._taken.clear()
            self._open = False
            self._handed = 0
            if not self._begin(0):
                return None
        elif self._index == self._size and not self._begin(self._ahead + 1):
            return None
        index = self._index
        self._index += 1
        self._handed += 1
        last = self._index == self._size
        spans = self._assignment.micro_batches[index] if self._assignment is not None else ()
        self._taken.extend(spans)
        if last and self._assignment is not None:
            self._taken.extend(self._assignment.dropped)
        return MicroBatch(self.epoch, self.stream, self._number, index, index == 0, last, spans, count(spans))

    def failed(self, spans: Part) -> None:
        """Marks positions that could not be fetched as unspent, so that a later accumulation assigns them again."""
        self._taken = [span for span in self._taken if span not in spans]
        self._forecast = None

    def ran_dry(self, length: int) -> None:
        """Sets the stream's length once its end is known; positions handed out beyond it do not count."""
        self.length = length
        self._taken = [(a, min(b, length)) for a, b in self._taken if a < length]
        self._forecast = None

    def pending(self) -> tuple[Spent, ...]:
        """Returns the positions that a contribution made now would spend: those handed out but in no committed
        ledger.
        """
        now = self.ledger
        if self._base is None or self._base.member != self._source.member_id:
            return ()
        if (stood := ledger.epoch_of(now, self.stream)) is not None and stood > self.epoch:
            return ()
        gone = ledger.spent_spans(now, self.stream, self.epoch)
        spans = subtract(normalise(self._taken, what=f"stream {self.stream!r} handed out"), gone)
        return (Spent(self.stream, self.epoch, spans),) if spans else ()

    @property
    def ledger(self) -> Ledger:
        """Spent positions, according to the last header and the checkpoint from which the job resumed."""
        return self._resumed.united(self._source.header)

    @property
    def at_safe_point(self) -> bool:
        """Whether all that was handed out is committed, so that a joiner may enter now."""
        return self._fresh or not self._open

    @property
    def uncommitted(self) -> int:
        """Number of micro-batches that were handed out but are not committed yet."""
        return 0 if self._fresh else self._handed

    @property
    def _fresh(self) -> bool:
        """Whether a step was committed since the present accumulation was assigned, so that the next micro-batch begins
        a new one.
        """
        base = self._base
        return base is None or self._source.header.step != base.step or self._source.member_id != base.member

    def over(self) -> bool:
        """Returns whether all of the epoch is spent, according to the last header."""
        return self._over(self.ledger, self._ruling(), 0)

    def left(self) -> int:
        """Returns the number of micro-batches still to come in this epoch if every step commits and the view stays as
        it is.
        """
        if self._fresh:
            base = _Base(0, "", self._ruling(), self.ledger)
            return self._steps(base, 0) * self._accumulate(base.ruling)
        assert self._base is not None
        return self._size - self._index + self._steps(self._base, self._ahead + 1) * self._accumulate(self._base.ruling)

    def future(self) -> Iterator[tuple[int, Part]]:
        """Yields this member's coming micro-batches with samples, from the one that `advance` gave last, if every step
        commits.

        Ends where the epoch would.
        """
        index, epoch = max(0, self._index - 1), self.epoch
        for parts in self.upcoming():
            for part in parts[index:]:
                if part:
                    yield epoch, part
            index = 0

    def upcoming(self) -> Iterator[tuple[Part, ...]]:
        """Yields this member's micro-batches of the present accumulation and of each later one in the epoch, if every
        step commits.
        """
        return self._upcoming(self._base, self._ahead)

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self, ahead: int) -> bool:
        """Assigns the accumulation that is number `ahead` after the last header; returns False if no samples are left
        for any member.
        """
        base = self._base
        assert base is not None
        self._ahead = ahead
        if self._over(base.ledger, base.ruling, ahead):
            self._index = self._size
            return False
        view = base.ruling
        self._assignment = self._mine(base, view, ahead) if view is not None else None
        self._size = self._accumulate(view)
        self._index = 0
        self._number += 1
        self._open = True
        rest = self._rest(base, view, ahead) if view is not None else ()
        before = self._rest(base, view, ahead - 1) if view is not None else ()
        self.as_forecast = self._forecast == (view, before)
        self._forecast = (view, rest)
        return True

    def _upcoming(self, base: _Base | None, ahead: int) -> Iterator[tuple[Part, ...]]:
        view = base.ruling if base is not None else None
        while base is not None and view is not None:
            mine = self._mine(base, view, ahead)
            if mine is None or not self._rest(base, view, ahead - 1):
                return
            yield mine.micro_batches
            ahead += 1

    def _ruling(self) -> View | None:
        header, view = self._source.header, self._source.ruling_view
        # A member let in by a recovery may only know a view that this header does not name. To assign by it would give
        # out what others were given by the header's own.
        view = assignment.ruling_view(header, (view,)) if view is not None else None
        return view or self._resumed.ruling(header)

    def _accumulate(self, view: View | None) -> int:
        known = view or self._source.view
        return known.accumulate if known is not None else 1

    def _mine(self, base: _Base, view: View, ahead: int) -> assignment.Assignment | None:
        assigned = assignment.assign_step(view, base.ledger, ahead=ahead, least=self._least, **self._stretch)
        return assigned.get(self._source.member_id)

    def _rest(self, base: _Base, view: View, ahead: int) -> Part:
        return assignment.after_step(view, base.ledger, ahead=ahead, **self._stretch)

    @property
    def _stretch(self) -> _Stretch:
        """Arguments that describe this epoch's positions to `planning.assignment`."""
        return {"epoch": self.epoch, "length": self.length, "stream": self.stream, "drop_last": self._drop_last}

    def _steps(self, base: _Base, done: int) -> int:
        """Returns the number of steps still to come in the epoch, without the `done` ones that are under way."""
        view = base.ruling or self._source.view or self._alone()
        if self.stream == ledger.SHARED:
            if self._is_too_little(base.ledger, view):
                return 0
            return max(0, assignment.steps_left(view, base.ledger, **self._stretch) - done)
        others = assignment.local_steps_left(view, base.ledger, self.epoch)
        own = 1 + done  # an iterable says nothing about its end; there is always one more accumulation to try
        if self.length != UNKNOWN_LENGTH:
            own = assignment.steps_left(view, base.ledger, **self._stretch)
        if others is None:
            return max(own - done, 1)  # somebody has not said how much there is: never call an epoch over too early
        return max(own - done, others - done, 0)

    def _alone(self) -> View:
        """Returns a view with only this member, to be used before there is a real one."""
        member = Member(self._source.member_id, self._source.name, "", "", 0, quota=self._quota)
        return View(NO_VIEW, NO_VIEW, (member,))

    def _over(self, spent: Ledger, ruling: View | None, ahead: int) -> bool:
        if self.stream == ledger.SHARED:
            if ahead == 0:
                spent_all = ledger.is_spent(spent, self.stream, self.epoch, self.length)
                return spent_all or self._is_too_little(spent, ruling)
            view = ruling or self._source.view
            return view is None or ahead >= assignment.steps_left(view, spent, **self._stretch)
        view = ruling or self._source.view
        if view is None:
            return False
        if ahead == 0:
            return ledger.local_over(spent, view, self.epoch)
        steps = assignment.local_steps_left(view, spent, self.epoch)
        return steps is not None and ahead >= steps

    def _is_too_little(self, spent: Ledger, ruling: View | None) -> bool:
        """Returns whether the epoch ends here because the remaining samples do not fill a micro-batch."""
        if not (self.whole and self._drop_last) or ruling is None:
            return False
        left = ledger.remaining(spent, self.stream, self.epoch, self.length)
        return count(left) < min(member.quota for member in ruling.members)


class Resumed:
    """Ledger from a checkpoint or a donor, with the view that ruled when it was saved."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._ruling: tuple[str, View] | None = None
        self._united: tuple[Header, Ledger] | None = None

    def load(self, spent: Ledger, head: str, ruling: View | None) -> None:
        self.ledger = spent
        self._ruling = (head, ruling) if ruling is not None else None
        self._united = None

    def united(self, header: Header) -> Ledger:
        if self._united is None or self._united[0] is not header:
            self._united = (header, ledger.union(self.ledger, header.ledger))
        return self._united[1]

    def ruling(self, header: Header) -> View | None:
        """Returns the view that rules after this header if the loaded state names one for it; else None."""
        if self._ruling is not None and self._ruling[0] == header.hash:
            return self._ruling[1]
        return None
