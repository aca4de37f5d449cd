"""Messages to members without a direct link in a simulated job: hop by hop, as membership/routing.py finds the way.

Theory of operation. A letter goes the ways of the view that its message names, at every hop, so that it cannot run in
circles while a view changes: who has yet to enter that view keeps the letter until it has, and who has left it for the
next one still knows its ways, whose links stay until the next slot commits (membership/neighbours.py). A
message to a newcomer goes directly or not at all: its neighbours send it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.routing import next_hops
from chaos_lightning.protocol.types import PeerMessage, View, ViewId

if TYPE_CHECKING:
    from chaos_lightning.lab.simulate.node import Node

_KEPT_VIEWS = 3


@dataclass(frozen=True, slots=True)
class Letter:
    """A message on its way from member to member."""

    source: str
    to: str
    message: PeerMessage


class Routing:
    """One member's letters.

    Args:
        node: Whose they are.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ways: dict[ViewId, tuple[View, dict[str, str]]] = {}
        self._held: list[Letter] = []

    def entered(self, view: View) -> None:
        """The member stands in this view; letters that waited for it go on."""
        if view.id in self._ways:
            return
        me = self._node.machine.member_id
        self._ways[view.id] = (view, next_hops(me, view.ids(), view.links))
        for old in sorted(self._ways)[:-_KEPT_VIEWS]:
            del self._ways[old]
        held, self._held = self._held, []
        for letter in held:
            self.forward(letter, "")

    def send(self, peer: str, message: PeerMessage) -> None:
        """An own message."""
        me = self._node.machine.member_id
        known = self._ways.get(message.view)
        if known is None or known[1].get(peer, peer) == peer:
            self._hand(peer, message)
        else:
            self._hand(known[1][peer], Letter(me, peer, message))

    def forward(self, letter: Letter, came_from: str) -> None:
        """A letter arrived from this neighbour: it is ours, or goes on."""
        node, view = self._node, letter.message.view
        if letter.to == node.machine.member_id:
            node.feed(fx.PeerIn(letter.source, letter.message))
            return
        known = self._ways.get(view)
        if known is not None:
            self._hand_on(known[1].get(letter.to, ""), letter, came_from)
        elif not self._ways or view > max(self._ways):
            self._held.append(letter)

    def _hand_on(self, hop: str, letter: Letter, came_from: str) -> None:
        if hop:
            self._hand(hop, letter)

    def _hand(self, hop: str, payload: PeerMessage | Letter) -> None:
        """To a neighbour, now or when the link stands."""
        node = self._node
        if not node.world.fabric.send(node.machine.member_id, hop, payload) and hop in node.wanted:
            node.unsent.setdefault(hop, []).append(payload)
