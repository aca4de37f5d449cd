"""Pipelines of the views that the scheduler makes, and who else must come into a view so that some fit (P1, P9, P10).

Theory of operation. A `ViewPipeliner` turns the pipelines of the view before and the members of the next one into the
next one's, in no more time than a decision has. The scheduler asks it for each view that it makes. It knows nothing of
reports: a member that is to own a part that it lacks pulls it (P8), so any text that it gives may rule.

After a death too few members may be left for any plan. Then leavers that no header has let go stay on as members, and
newcomers that are ready come in with the Decide, as joiners on its base: the job waits for them all the same, and no
boundary can come before. Where even that is not enough, the survivors hold and are told what a plan lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.parts import Division, division
from chaos_lightning.membership.peers import listed
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.topology import Pair, connected
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.spans import subtract
from chaos_lightning.protocol.types import Member, Span, View

LEAVES_TOGETHER_S = 1.0
"""A leave that moves parts waits so long for the leaves of others, which may make another move of it (P13)."""


Held = tuple[tuple[str, tuple[Span, ...]], ...] | None
"""Parts that each member holds; None: nobody has told."""
_Question = tuple[str, tuple[Member, ...], tuple[Member, ...], Held, frozenset[Pair]]


def _of(text: str, members: Sequence[Member]) -> Division:
    """Returns the division of the state in a view of these members with this text."""
    return Division(tuple(m.id for m in members), ViewPipelines.from_json(text))


class ViewPipeliner(Protocol):
    """Makes the pipelines of a view."""

    def reroute(
        self,
        before: str,
        members: Sequence[Member],
        *,
        leaving: Sequence[Member],
        held: Mapping[str, tuple[Span, ...]] | None,
        links: Collection[Pair],
    ) -> tuple[str, str]:
        """Returns the text of the pipelines of a view, "" if no plan fits its members, and the reason in words.

        Args:
            before: The text of the view before; "" if there is none.
            members: Of the new view, in rank order.
            leaving: Members that it lets go, and that serve what they hold until others have it.
            held: Parts that each of them holds, as normal spans of part numbers (parts.py); None: what they own in the
                view before.
            links: Pairs of members that have a link.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """Members of a view after a failure, with the pipelines that fit them.

    Attributes:
        pipelines: As text.
        members: In rank order; none if the job parts.
        joiners: Those of them that must get the state.
        leaving: Members that are let go and serve their parts meanwhile.
        reason: In words, if the pipelines are others than before.
    """

    pipelines: str = ""
    members: tuple[Member, ...] = ()
    joiners: tuple[str, ...] = ()
    leaving: tuple[Member, ...] = ()
    reason: str = ""


class Pipelining:
    """See the module.

    Args:
        desk: What all parts share.
        book: The chain.
        roster: Everybody.
        graph: Which links a view may use.
        pipeliner: None: all members of each view own the whole state.
    """

    def __init__(self, desk: Desk, book: Book, roster: Roster, graph: Graph, pipeliner: ViewPipeliner | None) -> None:
        self._desk = desk
        self._book = book
        self._roster = roster
        self._graph = graph
        self._pipeliner = pipeliner
        self._known: dict[_Question, tuple[str, str]] = {}
        """Last answers: a decision that waits asks again and again."""

    @property
    def wanted(self) -> bool:
        """Whether views have pipelines."""
        return self._pipeliner is not None

    def goes_on_from(self, view: View) -> None:
        """Refuses to go on from a view that has pipelines if none are made here, or the other way round.

        Members of one view would own the whole training state, and those of the next one parts of it.

        Raises:
            ConfigurationError: So it is; says what to do.
        """
        if bool(view.pipelines) is self.wanted:
            return
        has, makes = ("pipelines", "none") if view.pipelines else ("no pipelines", "some for each view")
        raise ConfigurationError(
            f"view {view.id}, from which the job is to go on, has {has}, and this scheduler makes {makes}; start it "
            "as the one before it was started, or end that job (`chaos-lightning reset`)"
        )

    def of(
        self,
        members: Sequence[Member],
        pairs: frozenset[Pair],
        leaving: Sequence[Member] = (),
        held: Held = None,
    ) -> tuple[str | None, str]:
        """Returns the pipelines of a view, None if no plan fits; and the reason in words. See `ViewPipeliner`."""
        if self._pipeliner is None:
            return "", ""
        if not members:
            return None, "nobody is left who runs anything"
        before = self._book.latest.pipelines if self._book.latest is not None else ""
        key = (before, tuple(members), tuple(leaving), held, pairs)
        if key not in self._known:
            told = None if held is None else dict(held)
            self._known = dict(list(self._known.items())[-7:])
            text, why = self._pipeliner.reroute(before, members, leaving=leaving, held=told, links=pairs)
            apart = _of(text, members).apart((a, b) for a, b in pairs) if text else ""
            self._known[key] = ("", apart) if apart else (text, why)
        text, why = self._known[key]
        return (text or None), ("" if text == before else why)

    def moves(self, before: View, text: str, members: Sequence[Member]) -> bool:
        """Whether these members get parts under these pipelines that they do not own in the view before."""
        old = division(before)
        new = _of(text, members)
        return any(subtract(new.owned(m.id), old.owned(m.id)) for m in members)

    # ------------------------------------------------------------------ after a failure

    def lineup(self, latest: View, ruling: Ruling) -> Lineup | str:
        """Returns who goes on after a failure by which pipelines; or in words what any plan lacks."""
        known = {m.id: m for m in (*latest.members, *latest.leaving)}
        members = [known[m] for m in ruling.members]
        leaving = tuple(known[m] for m in ruling.leaving)
        if self._pipeliner is None:
            return Lineup(members=tuple(members), joiners=ruling.joiners)
        if self._parts(latest, members, leaving):
            return Lineup(pipelines=latest.pipelines, leaving=(*members, *leaving))
        bound = [known[m] for m in ruling.bound]
        coming = [p.member for p in self._graph.reachable(ruling.members)] if members else []
        lacks = ""
        for stay, join in (([], []), (bound, []), ([], coming), (bound, coming)):
            chosen = [*members, *stay, *join]
            pairs = self._graph.pairs([m.id for m in chosen])
            if not connected([m.id for m in chosen], pairs):
                continue
            going = tuple(m for m in leaving if m not in stay)
            text, why = self.of(chosen, pairs, going, ruling.held)
            if text is not None:
                words = [f"{listed(m.id for m in stay)} stay"] if stay else []
                words += [f"{listed(m.id for m in join)} join at once"] if join else []
                return Lineup(
                    pipelines=text,
                    members=tuple(chosen),
                    joiners=(*ruling.joiners, *(m.id for m in join)),
                    leaving=going,
                    reason="; ".join([*words, *([f"pipelines: {why}"] if why else [])]),
                )
            lacks = lacks or why
        return lacks or "nobody is left who runs anything"

    def _parts(self, latest: View, members: Sequence[Member], leaving: Sequence[Member]) -> bool:
        """Whether the job parts: a view has let all go, or all that are left want to go (P13)."""
        here = [self._roster.peers[m.id] for m in (*members, *leaving)]
        return bool(here) and (not latest.members or (all(p.leaving for p in here) and not self._graph.ready()))
