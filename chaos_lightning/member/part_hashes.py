"""Compares parts of a pipeline's training state among the members that own them (protocol.md P12, 24).

Theory of operation. Every so many steps each member hashes the parts that it owns, before it runs units, and says the
hashes with the coming step. If that step's header names parts that have drifted, their members pull them at that header
as any part that they lack, and the others serve them (part_moves.py): no view changes. A part that drifts once may be
an accident, such as a bit that flipped in memory. One that drifts again at the same member has a cause that stays, and
is refused: it would be pulled again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.events.events import EventLog
from chaos_lightning.membership.parts import division, numbers
from chaos_lightning.protocol.types import Header, View
from chaos_lightning.replication.part_state import PartAccess, part_hashes, part_name

_log = logging.getLogger("chaos_lightning")


class PartHashes:
    """One member's side of the comparison of parts; in the training thread.

    Args:
        states: Returns the parts of these names that have tensors, as they are.
        events: This member's event log.
        every: Number of steps between two comparisons; 0: never.
    """

    def __init__(self, states: Callable[[Collection[str]], Sequence[PartAccess]], events: EventLog, every: int) -> None:
        self._states, self._events, self._every = states, events, every
        self._head = ""
        """Hash of the header at which these hashes of parts were taken."""
        self._found: dict[str, str] = {}
        self._drifted: set[int] = set()
        """Parts that have drifted here so far."""

    def at(self, header: Header, view: View, me: str) -> tuple[str, ...]:
        """Returns the hashes of the parts that this member owns in a view, in order; an empty tuple if no comparison is
        due.

        Each part is hashed once at a header.

        Args:
            header: Header that the state stands on.
            view: View of the attempt.
            me: Id of this member.
        """
        if not self._every or not header.step or header.step % self._every:
            return ()
        if self._head != header.hash:
            self._head, self._found = header.hash, {}
        parts = division(view)
        names = [parts.names[part] for part in numbers(parts.owned(me))]
        lacking = [name for name in names if name not in self._found]
        hashed = part_hashes(self._states(lacking))
        for name, value in hashed.items():
            head = part_name(header, name)
            self._events.emit("state_hash", seq=header.seq, step=header.step, head=head, hash=value)
        self._found |= dict.fromkeys(lacking, "") | hashed
        return tuple(self._found[name] for name in names)

    def settle(self, header: Header, view: View, me: str) -> None:
        """Warns of parts that have drifted, if a step's header names any.

        Args:
            header: The step's.
            view: The one in which it was closed.
            me: This member.

        Raises:
            UnsupportedError: A part has drifted here that had drifted before.
        """
        parts = division(view)
        for who in header.drifted:
            name = parts.names[who.part]
            odd = {d.member for d in header.drifted if d.part == who.part}
            same = [m for m in parts.owners[who.part] if m not in odd]
            if me == who.member:
                _log.warning(
                    "%s of the training state differs here from that of %s at step %d; this member gets theirs",
                    name, ", ".join(same), header.step,
                )  # fmt: skip
                if who.part in self._drifted:
                    raise UnsupportedError(
                        f"{name} of the training state of {me} differs again from the others' at step {header.step}, "
                        "although it had taken this over from them. Some code changes it in another way than on the "
                        "other members. Change parameters and buffers by values that all members have, and keep what "
                        "is a member's own in a plain attribute. If it is machines of different kinds that compute "
                        "other last digits, state_hash_every=0 ends the comparison"
                    )
                self._drifted.add(who.part)
            elif same[:1] == [me]:
                _log.warning(
                    "%s of the training state of %s differs at step %d; it gets that of the others",
                    name, who.member, header.step,
                )  # fmt: skip
