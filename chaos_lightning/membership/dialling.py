"""Decides which links a member dials and accepts, and when it retries.

Theory of operation. Of two members the one with the younger id dials (newcomers dial the others), the other accepts.
An attempt that fails is made again while its peer is wanted, with growing pauses; a link that broke is dialled again
soon. Who dials is let in if it is wanted here, or if a view that rules or is coming links it with this member: its end
may have been told first. The caller makes the attempts and says how they ended, so processes and simulated ones drive
the same object.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from chaos_lightning.membership.routing import Router
from chaos_lightning.protocol.types import Member

AGAIN_S = 0.05
"""Seconds from the end of a link to the next attempt."""
AFTER_GOODBYE_S = 0.5
"""Seconds to the next attempt if the peer closed the link: as a rule it is about to be forgotten here, too."""
LONGEST_S = 2.0
"""Longest pause between two attempts, in seconds."""
BYE = "bye"
"""Evidence of a link that its peer closed in good order."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Order to consider dialling this peer after a pause: `Dialling.due` says whether to dial it."""

    peer: str
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tell:
    """Order to tell the member's state machine that a link stands or has ended."""

    peer: str
    up: bool
    evidence: str


LinkStep = Dial | Tell


def youth(member_id: str) -> tuple[int, str]:
    """Returns a sort key for a member's id: later incarnations are younger, hence greater."""
    name, _, number = member_id.rpartition("~")
    return (int(number) if number.isdecimal() else 0, name)


class Dialling:
    """Links of one member: those that it wants, those that stand, and those that it is dialling.

    Args:
        up: Members to which a link stands; the caller's own, so that it is never out of date.

    Attributes:
        me: This member's id.
        wanted: Members to which a link is wanted.
    """

    def __init__(self, up: Container[str]) -> None:
        self.me = ""
        self.wanted: dict[str, Member] = {}
        self._up = up
        self._under_way: set[str] = set()
        self._failures: dict[str, int] = {}

    def want(self, peers: Iterable[Member]) -> None:
        """Sets the members to which links are wanted; `look` returns the orders to make them."""
        self.wanted.clear()
        self.wanted.update({m.id: m for m in peers if m.id != self.me})

    def look(self) -> list[LinkStep]:
        """Returns orders to dial wanted links that are missing, and to report once more the ones that stand."""
        return [Tell(peer, True, "connected") if peer in self._up else Dial(peer) for peer in self.wanted]

    def due(self, peer: str) -> bool:
        """Returns whether to dial this peer now; if so, `ended` or `failed` must be called with the outcome."""
        if peer in self._under_way or peer in self._up or peer not in self.wanted or youth(self.me) < youth(peer):
            return False
        self._under_way.add(peer)
        return True

    def ended(self, peer: str, me: str) -> bool:
        """Returns whether to keep the connection that an attempt has made. `me` is the id that this member had when the
        attempt began.

        If the connection is not kept, `due` may be asked again.
        """
        self._under_way.discard(peer)
        return me == self.me and peer in self.wanted

    def failed(self, peer: str, reason: str, chance: float) -> list[LinkStep]:
        """Returns the next steps after a failed attempt to dial a peer.

        Args:
            peer: Id of the member that was dialled.
            reason: Text that says why the attempt failed.
            chance: Random number from [0, 1), so that two members that dial together do not go on doing so.
        """
        self._under_way.discard(peer)
        if peer not in self.wanted:
            return []
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        pause_s = min(LONGEST_S, AGAIN_S * 2 ** min(failures, 6)) * (0.5 + chance / 2)
        told = failures in (1, 5) or failures % 50 == 0
        return [*([Tell(peer, False, f"refused ({reason})")] if told else []), Dial(peer, pause_s)]

    def made(self, peer: str) -> None:
        """Forgets the failed attempts to dial this peer, as the link is up now."""
        self._failures.pop(peer, None)

    def broken(self, peer: str, evidence: str) -> list[LinkStep]:
        """Returns the next steps after a link has ended that was not closed at this end."""
        again = [Dial(peer, AFTER_GOODBYE_S if evidence == BYE else AGAIN_S)] if peer in self.wanted else []
        return [Tell(peer, False, evidence), *again]

    def expected(self, router: Router) -> frozenset[str]:
        """Returns the members that may dial this one."""
        return router.neighbours.union(self.wanted)
