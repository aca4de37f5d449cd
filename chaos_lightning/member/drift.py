"""Compares members' replicated states, and names the tensors in which one of them has drifted (protocol.md 24).

Theory of operation. Every so many steps each member hashes its state at a safe point, and says the hash with the coming
step. If that step's header names members that have drifted, all members make a collective. The drifted ones and the
oldest of the others bring a digest of each tensor, so that both sides can say in which tensors they differ. The drifted
member joins again and pulls the state. A tensor that differs once may be an accident, such as a bit that flipped in
memory. One that differs again has a cause that stays, and is refused: it would be pulled again and again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from chaos_lightning.errors import DepartedError, FencedError, UnsupportedError
from chaos_lightning.member.engine import Engine
from chaos_lightning.protocol.types import Header
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.table import StateTable, build_table

_SHOWN = 3
_NBYTES = 8
_HEARD = 4
"""Number of drifted members that bring digests, so that these fit into one header with a million tensors each."""

_log = logging.getLogger(__name__)


class StateComparison:
    """This process's side of the comparison of members' states, made every so many steps.

    Args:
        engine: Engine of this member.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table: StateTable | None = None
        self._drifted: set[str] = set()
        """Names of tensors in which this process has drifted so far."""

    @property
    def hash(self) -> str:
        """Hash of the state, to be sent with the coming step's contribution; "" if no comparison is due."""
        return "" if self._table is None else self._table.state_hash

    def take(self, state: StateAccess) -> None:
        """Hashes the state if a comparison is due. To be called at a safe point, before a forward pass changes buffers.

        Args:
            state: State that is equal at all members.
        """
        engine, self._table = self._engine, None
        every, header = engine.config.state_hash_every, engine.header
        if not every or not header.step or header.step % every:
            return
        self._table = build_table(state.tensors())
        engine.events.emit("state_hash", seq=header.seq, step=header.step, head=header.hash, hash=self.hash)

    def settle(self, header: Header) -> None:
        """Makes drifted members join again, if this step's header names any. All members call it with each step's
        header.

        Raises:
            FencedError: This member has drifted, or was put out meanwhile.
            UnsupportedError: This member has drifted in a tensor in which it had drifted before.
        """
        table, self._table = self._table, None
        if not header.drifted:
            return
        engine, me = self._engine, self._engine.member_id
        drifted = tuple(dict.fromkeys(who.member for who in header.drifted))
        answers: dict[str, bytes] = {}
        present = engine.ruling_view.ids() if engine.ruling_view is not None else ()
        oldest = next((m for m in present if m not in drifted), "")
        if oldest and not engine.out:
            brings = table is not None and me in (oldest, *drifted[:_HEARD])
            with contextlib.suppress(DepartedError):  # the next slot meets it again
                answers = dict(engine.gather("digests of states that differ", _digests(table) if brings else b""))
        if me in drifted:
            self._refuse_or_rejoin(header, _differing(table, answers.get(oldest, b"")))
        elif me == oldest:
            for member in drifted:
                found = _differing(table, answers.get(member, b""))
                _log.warning("the state of %s differs at step %d%s; it joins again", member, header.step, _words(found))

    def _refuse_or_rejoin(self, header: Header, found: Sequence[str]) -> None:
        me = self._engine.member_id
        again = [name for name in found if name in self._drifted]
        self._drifted.update(found)
        if again:
            raise UnsupportedError(
                f"the state of {me} differs again from the others' at step {header.step}{_words(again)}, although it "
                "had taken this over from them. Some code changes it in another way than on the other members. Change "
                "parameters and buffers by values that all members have, such as gathered or reduced ones, and where "
                "all members run the code (on_train_batch_end); keep what is a member's own in a plain attribute. If "
                "it is machines of different kinds that compute other last digits, state_hash_every=0 ends the "
                "comparison"
            )
        raise FencedError(f"the state of {me} differs from the others' at step {header.step}{_words(found)}")


def _digests(table: StateTable | None) -> bytes:
    """Returns 8 bytes of each replicated tensor's digest, in order."""
    return b"" if table is None else b"".join(table.digests(_NBYTES).values())


def _differing(table: StateTable | None, others: bytes) -> list[str]:
    """Returns the names of tensors whose digests are not among the other member's; none if that member sent none."""
    if table is None or not others:
        return []
    known = {others[at : at + _NBYTES] for at in range(0, len(others), _NBYTES)}
    return [name for name, digest in table.digests(_NBYTES).items() if digest not in known]


def _words(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f", in {', '.join(repr(name) for name in names[:_SHOWN])}{more}" if names else ""
