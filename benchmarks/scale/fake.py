"""A stand-in for one member: it answers the scheduler as a member does, and has no state to train.

Theory of operation. `hear` takes a message of the scheduler and follows the member's rules as far as the scheduler can
see (membership/member.py): a promise is kept, a report says on which header the stand-in stands, and a decision is
entered only from the header that it goes on from. A `World` carries its words away and says what surrounds it: whether
others live, whom it can have links with, and when a header brings a view. This module imports nothing but the product,
and of the product only names that older versions have as well (crowd.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    WHOLE,
    Decide,
    Entered,
    Fence,
    FromMember,
    Header,
    Heartbeat,
    Hello,
    Kind,
    LinkEvent,
    NextView,
    OpenLinks,
    Prepare,
    Probe,
    Ready,
    Refused,
    Released,
    Report,
    Span,
    ToMember,
    Verdict,
    View,
    ViewId,
    Welcome,
)

LOADS_S = 0.002
"""Seconds that a joiner takes to load the state."""
CONNECTED, CLOSED = "connected", "closed (end of stream)"


class World(Protocol):
    """Environment of stand-ins, which carries their messages and delivers links and headers."""

    def say(self, one: StandIn, message: FromMember) -> None:
        """Carries a stand-in's message to the scheduler."""

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Calls an action after `after_s` seconds."""

    def lives(self, member: str) -> bool:
        """Returns whether neighbours would report this member alive."""

    def welcomed(self, one: StandIn) -> None:
        """Notes that a stand-in was welcomed on the stream that it has now."""

    def asked(self, one: StandIn) -> None:
        """Makes links with the members that the scheduler asked a stand-in to connect to (`StandIn.named`)."""

    def foretold(self, one: StandIn, view: View) -> None:
        """Notes that a stand-in was told of a view that a later header will carry."""

    def entered(self, one: StandIn, view: View, *, decided: bool) -> None:
        """Notes that a stand-in entered a view, by a Decide or by a header."""

    def out(self, one: StandIn, message: Fence | Refused | Released) -> None:
        """Ends the stream of a stand-in that is no longer in the job."""


@dataclass(eq=False, slots=True)
class StandIn:
    """Stand-in for one member, as the scheduler sees it.

    Attributes:
        name: Node of the stand-in.
        number: Number that stands for the stand-in's process id; in virtual time also for its stream.
        id: Member id, once it was welcomed.
        view: Id of the view in which the stand-in is.
        promised: Id of a view; the stand-in ignores all older ones.
        known: Highest id of a view that the stand-in was told of.
        header: Last header that the stand-in has committed.
        named: Members with which the stand-in was asked to have links.
        links: Whether the link to a member is open, by member.
        here: Whether the stand-in's process lives.
    """

    world: World
    name: str
    number: int
    id: str = ""
    chain: str = ""
    term: int = 0
    interval_s: float = 0.1
    view: ViewId = NO_VIEW
    promised: ViewId = NO_VIEW
    known: ViewId = NO_VIEW
    header: Header = GENESIS
    loaded: bool = False
    ready: bool = False
    here: bool = True
    named: set[str] = field(default_factory=set)
    links: dict[str, bool] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Span, ...]:
        """Names of the parts of the training state that the stand-in has."""
        return WHOLE if self.loaded else ()

    @property
    def up(self) -> set[str]:
        """Members to which the stand-in has a link."""
        return {peer for peer, stands in self.links.items() if stands}

    # ------------------------------------------------------------------ what it says

    def hello(self) -> Hello:
        """Returns the stand-in's first message on a stream."""
        said = Hello("default", self.name, f"host-{self.name}", "10.0.0.1", 1, self.number, 1, 1, 1, "0", ())
        if not self.id:
            return said
        return replace(said, resume=self.id, view=self.view, term=self.term, chain=self.chain, known=self.known)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.view, self.header.seq, self.header.step, chain=self.chain, known=self.known)

    def position(self) -> Entered:
        """Returns the last header and the view of the stand-in, as a member reports them."""
        header = self.header
        if self.view == NO_VIEW:
            return Entered(NO_VIEW, 0, 0, "", (), self.chain)
        return Entered(self.view, header.seq, header.step, header.hash, self.parts, self.chain)

    def linked(self, peer: str) -> None:
        """Notes that the link to a member is open, and reports it."""
        if not self.links.get(peer):
            self.links[peer] = True
            self.world.say(self, LinkEvent(peer, True, CONNECTED))

    def lost(self, peer: str, evidence: str = CLOSED) -> None:
        """Notes that the link to a member is closed, and reports it; by default the other end has closed it."""
        if self.links.get(peer):
            self.links[peer] = False
            self.world.say(self, LinkEvent(peer, False, evidence))

    def check_ready(self) -> None:
        """Reports that the stand-in is ready once all possible links are open."""
        if not self.ready and not any(self.world.lives(m) for m in self.named - self.up):
            self.ready = True
            self.world.say(self, Ready())

    # ------------------------------------------------------------------ what it is told

    def hear(self, message: ToMember) -> None:
        """Handles a message of the scheduler."""
        # A Welcome and a HeartbeatPace say so; older versions know only the former.
        self.interval_s = getattr(message, "heartbeat_interval_s", self.interval_s)
        match message:
            case Welcome():
                self._welcome(message)
            case OpenLinks(peers):
                before = self.named if getattr(message, "changes", False) else self.up
                self.named = before.difference(getattr(message, "gone", ())).union(p.id for p in peers)
                self.world.asked(self)
            case Prepare(number):
                if number >= self.promised and number > self.view:
                    self.promised, self.known = number, max(self.known, number)
                    last = self.header
                    told = None if getattr(message, "brief", False) else last
                    report = Report(number, self.view, last.seq, last.hash, self.parts, self.loaded, last=told)
                    self.world.say(self, report)
            case Decide():
                self._decided(message)
            case NextView(view):
                if view.id >= self.promised and view.id > self.view:
                    self.known = max(self.known, view.id)
                    self.world.foretold(self, view)
            case Probe(suspect):
                lives = self.world.lives(suspect)
                self.world.say(self, Verdict(suspect, lives, "last heard 1 ms ago" if lives else "no link"))
            case Fence() | Refused() | Released():
                self.world.out(self, message)

    def _welcome(self, message: Welcome) -> None:
        again = self.id == message.member.id
        self.id, self.chain = message.member.id, message.chain
        self.term = max(self.term, message.term)
        self.world.welcomed(self)
        if not again:
            self.ready, self.named, self.links = False, set(), {}
            return
        for peer, stands in self.links.items():  # whatever was under way on the stream before is said again
            self.world.say(self, LinkEvent(peer, stands, CONNECTED if stands else CLOSED))
        self.world.say(self, self.position())
        if self.ready and self.view == NO_VIEW:
            self.world.say(self, Ready())

    def _decided(self, message: Decide) -> None:
        view, base = message.view, message.base
        if view.id < self.promised or view.id <= self.view:
            if view.id == self.view:
                self.world.say(self, self.position())
            return
        if view.find(self.id) is None:
            self.world.out(self, Fence(f"view {view.id} was decided without it"))
        elif self.loaded and self.header.hash not in ((base.hash, base.prev_hash) if message.hand_on else (base.hash,)):
            here = f"{self.id} stands on slot {self.header.seq} ({self.header.hash})"
            self.world.out(self, Fence(f"view {view.id} goes on from slot {base.seq} ({base.hash}), {here}"))
        else:
            self._enter(view, base, loaded=self.loaded or self.id not in view.joiners, decided=True)

    def carried(self, header: Header, view: View) -> None:
        """Takes this imitated member into the view that a header carries, unless it promised to ignore older views."""
        if not self.here or view.id < self.promised or view.id <= self.view:
            return  # a promise was given: a recovery brings whatever comes of it
        if self.loaded and self.header.hash == header.prev_hash and view.find(self.id) is not None:
            self._enter(view, header, loaded=True, decided=False)
        elif self.view == NO_VIEW and self.id in view.joiners:
            self._enter(view, header, loaded=False, decided=False)

    def _enter(self, view: View, header: Header, *, loaded: bool, decided: bool) -> None:
        self.view = self.promised = view.id
        self.known = max(self.known, view.id)
        self.header, self.loaded = header, loaded
        self.world.entered(self, view, decided=decided)
        self.world.say(self, self.position())
        if not loaded:
            self.world.later(LOADS_S, lambda: self._load(view.id))

    def _load(self, view: ViewId) -> None:
        if not self.loaded and self.view == view and self.here:
            self.loaded = True
            self.world.say(self, self.position())


def carrier(prev: Header, view: View) -> Header:
    """Returns the header after `prev` that carries this view by number only, without its members."""
    return Header(
        seq=prev.seq + 1,
        kind=Kind.BOUNDARY,
        step=prev.step,
        view=view.predecessor,
        prev_hash=prev.hash,
        next_view=view.id,
    )
