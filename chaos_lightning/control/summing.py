"""Shortens a job's chain: sums it up in one record that replaces all before it (protocol.md 7).

Theory of operation. A scheduler that starts reads its whole chain, and each view adds to it. So after every EVERY
records the scheduler appends one that says what they come to, and the store drops them in the same moment
(service/store.py). It has the last two views as they are, of those before what is still asked (membership/past.py), all
numbers that were given out, the wishes that hold, and the last step. What a scheduler reads from there on is what it
would have read from the uncut chain: `summed` makes the same of both.

The end of a job is never summed up, since nothing follows it. A chain without a view is not cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from chaos_lightning.membership.effects import Chain, LinkWish
from chaos_lightning.membership.past import LAST_VIEWS, Numbers, Past
from chaos_lightning.protocol.types import View, ViewId

EVERY = 128
"""Number of records after which one takes their place: a scheduler that starts reads as many, and that one."""


def summed(chain: Chain) -> Chain:
    """Returns a chain summed up; the result does not depend on earlier summaries."""
    past, last = chain.past.copy(), chain.views[-LAST_VIEWS:]
    for view in chain.views[:-LAST_VIEWS]:
        past.add(view, carried=view.id in chain.changes)
    return Chain(
        term=0,
        highest=chain.highest,
        views=last,
        wishes=tuple({frozenset((wish.a, wish.b)): wish for wish in chain.wishes}.values()),
        changes=tuple(view.id for view in last if view.id in chain.changes),
        id=chain.id,
        numbers=chain.numbers,
        step=chain.step,
        past=past,
    )


def as_document(chain: Chain) -> dict[str, Any]:
    """Returns a summed-up chain as JSON, without its views."""
    past = chain.past
    return {
        "chain": chain.id,
        "number": _flat([chain.highest]),
        "numbers": chain.numbers.runs,
        "wishes": [asdict(wish) for wish in chain.wishes],
        "changes": _flat(chain.changes),
        "step": chain.step,
        "views": past.views.runs,
        "let_go": past.let_go.runs,
        "members": {member: _flat(moves) for member, moves in past.members.items()},
        "forgotten": _flat([past.forgotten]),
        "rebuilt": _flat([past.rebuilt]),
        "incarnation": past.incarnation,
        "together": past.together,
        "hosts": past.hosts,
        "plan": past.plan_reason,
        "leaving": sorted(past.leaving),
    }


def from_document(said: dict[str, Any], views: Sequence[View]) -> Chain:
    """Parses a chain that `as_document` wrote.

    Raises:
        KeyError, TypeError, ValueError: It is something else.
    """
    members = {str(member): _ids(moves) for member, moves in dict(said["members"]).items()}
    past = Past(
        views=_runs(said["views"]),
        let_go=_runs(said["let_go"]),
        members=members,
        forgotten=_id(said.get("forgotten", (0, 0))),
        rebuilt=_id(said["rebuilt"]),
        incarnation=_number(said["incarnation"]),
        together=bool(said["together"]),
        hosts=tuple(map(str, said["hosts"])),
        plan_reason=str(said["plan"]),
        inside=frozenset(member for member, moves in members.items() if len(moves) % 2),
        leaving=frozenset(map(str, said.get("leaving", ()))),
    )
    return Chain(
        term=0,
        highest=_id(said["number"]),
        views=tuple(views),
        wishes=tuple(LinkWish(**wish) for wish in said["wishes"]),
        changes=_ids(said["changes"]),
        id=str(said["chain"]),
        numbers=_runs(said["numbers"]),
        step=_number(said["step"]),
        past=past,
    )


def _flat(numbers: Iterable[ViewId]) -> list[int]:
    return [part for number in numbers for part in (number.term, number.number)]


def _number(said: object) -> int:
    if type(said) is not int or said < 0:
        raise ValueError(f"{said!r} is no number")
    return said


def _ids(said: Iterable[object]) -> tuple[ViewId, ...]:
    parts = [_number(part) for part in said]
    return tuple(map(ViewId, parts[::2], parts[1::2]))


def _id(said: Iterable[object]) -> ViewId:
    (number,) = _ids(said)
    return number


def _runs(said: Iterable[Iterable[object]]) -> Numbers:
    runs = [(term, first, last) for term, first, last in (map(_number, run) for run in said)]
    return Numbers(runs)
