"""Stand-ins for members in virtual time, which answer the scheduler's state machine as members do.

Theory of operation. A `Stage` has the product's `SchedulerMachine` with its meter (metered.py) and a `StandIn`
(fake.py) for each member, among their `Surroundings`. Whatever a stand-in says arrives after `REPLY_S`; what arrives
together is fed in batches, as the scheduler's process does. A link stands once both ends were told of each other; a
view that a header is to carry is carried after `STEP_S` by a header that the product makes (`close_slot`) from
contributions of all members. Heartbeats are counted apart.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from benchmarks.scale.fake import StandIn
from benchmarks.scale.metered import Metered
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.slots import close_slot
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Contribution,
    Fence,
    FromMember,
    Header,
    Kind,
    Leave,
    Refused,
    Released,
    Settings,
    Spent,
    ToMember,
    View,
)

REPLY_S = 0.001
STEP_S = 0.05
ARRIVAL_S = 0.0002
"""Between two hellos of members that start together."""
BATCH = 256
"""Most events that are fed at once, as in the scheduler's process (membership/batches.py)."""
PATIENCE_S = 120.0
"""Virtual seconds within which whatever is waited for must come."""
BEATS, OTHER = "heartbeats", "all else"
SAMPLES = 8
"""Number of samples that each member contributes to each step."""


def contribution(member: str, view: View, prev: Header, kind: Kind) -> Contribution:
    """Returns a member's contribution to the slot after `prev`, with the same settings as all other members."""
    place = view.ids().index(member)
    start = (prev.step * len(view.members) + place) * SAMPLES
    return Contribution(
        member,
        view.id,
        prev.seq + 1,
        kind,
        prev.step,
        prev.hash,
        weight=float(SAMPLES),
        coefficient=float(SAMPLES),
        spent=(Spent("", 0, ((start, start + SAMPLES),)),) if kind is Kind.STEP else (),
        layout_hash="0" * 16,
        hyper="opt0.lr=0.1;opt0.momentum=0.9",
    )


def next_header(view: View, prev: Header, kind: Kind, waiting: View | None = None) -> Header:
    """Returns the header that commits the slot after `prev`, made as the commit root makes it."""
    brought = {m: contribution(m, view, prev, kind) for m in view.ids()}
    return close_slot(view=view, prev=prev, contributions=brought, waiting=waiting)


def in_batches(events: Sequence[fx.SchedulerEvent], size: int = BATCH) -> Iterator[Sequence[fx.SchedulerEvent]]:
    """Yields events in batches of this size."""
    return (events[i : i + size] for i in range(0, len(events), size))


class Clock:
    """Virtual clock, which advances to the next instant at which an action is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls an action after `after_s` seconds."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action))

    def advance(self) -> None:
        """Calls all actions due at the next instant."""
        self.now = max(self.now, self._due[0][0])
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()


class Surroundings:
    """Environment of stand-ins (the `World` of fake.py): links, headers, and the way to the scheduler.

    Attributes:
        header: The last committed one.
        view: The last one that members were told of.
        members: Stand-ins that were welcomed, by id.
        put_out: Why members are in the job no more that did not leave it.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.header, self.view = GENESIS, View(NO_VIEW, NO_VIEW, ())
        self.members: dict[str, StandIn] = {}
        self.put_out: list[str] = []
        self._inbox: list[fx.SchedulerEvent] = []
        """Messages that have arrived at the scheduler."""
        self._flying = 0
        """Number of words on their way to it."""
        self._carrying = NO_VIEW
        self._near_of = NO_VIEW
        self._near: dict[str, set[str]] = {}
        self._cut: set[frozenset[str]] = set()

    def say(self, one: StandIn, message: FromMember) -> None:
        """Carries a member's message to the scheduler."""
        self._send(fx.MessageIn(one.number, message))

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Calls an action after `after_s` virtual seconds."""
        self.clock.after(after_s, action)

    def lives(self, member: str) -> bool:
        """Returns whether a member's process still runs."""
        return self.members[member].here

    def welcomed(self, one: StandIn) -> None:
        """Makes a stand-in known by its new member id."""
        self.members[one.id] = one

    def asked(self, one: StandIn) -> None:
        """Makes the links for which both ends were told of each other; newcomers with all their links report that they
        are ready.
        """
        for peer in one.named - one.up:
            other = self.members[peer]
            if other.here and one.id in other.named and frozenset((one.id, peer)) not in self._cut:
                one.linked(peer)
                other.linked(one.id)
                other.check_ready()
        one.check_ready()

    def foretold(self, one: StandIn, view: View) -> None:
        """Schedules the header that carries this view to all members, shortly after the first of them was told
        of it.
        """
        if view.id > self._carrying:
            self._carrying = view.id
            self.clock.after(STEP_S, lambda: self._carry(view))

    def entered(self, one: StandIn, view: View, *, decided: bool) -> None:
        """Tells a stand-in the links of its new view."""
        if decided:
            self.view, self.header = view, one.header
        one.named.update(self.near(view).get(one.id, ()))

    def out(self, one: StandIn, message: Fence | Refused | Released) -> None:
        """Ends a stand-in that the scheduler has removed, refused or released."""
        if isinstance(message, Fence):
            self.put_out.append(message.reason)
        self.gone(one, abrupt=False)

    def gone(self, one: StandIn, *, abrupt: bool) -> None:
        """Ends a stand-in's process, and its stream with it."""
        if one.here:
            one.here = False
            self._send(fx.Closed(one.number, abrupt))

    def near(self, view: View) -> dict[str, set[str]]:
        """Returns the neighbours of each member in a view that lists its links."""
        if self._near_of != view.id:
            self._near_of, self._near = view.id, defaultdict(set)
            for link in view.links:
                self._near[link.a].add(link.b)
                self._near[link.b].add(link.a)
        return self._near

    def _send(self, event: fx.SchedulerEvent, after_s: float = REPLY_S) -> None:
        def arrive() -> None:
            self._flying -= 1
            self._inbox.append(event)

        self._flying += 1
        self.clock.after(after_s, arrive)

    def _carry(self, view: View) -> None:
        """Delivers a view by a header to the members of the view before it and to its joiners."""
        before = [self.members[m] for m in self.view.ids()]
        if self.view.id != view.predecessor or not all(p.here and p.promised < view.id for p in before):
            return  # a recovery comes in between
        self.header = next_header(self.view, self.header, Kind.BOUNDARY, view)
        self.view = view
        for member in view.ids():
            self.members[member].carried(self.header, view)


class Stage(Surroundings):
    """The scheduler's state machine and its members, some of which join, leave and die.

    Args:
        settings: The job's rules.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.meter = settings, Metered(settings)
        self.machine = self.meter.machine
        self._streams: dict[int, StandIn] = {}
        self._numbers = itertools.count(1)
        self.clock.after(0.0, self._tick)
        self.clock.after(0.0, self._beat)

    # ------------------------------------------------------------------ what happens to members

    def start(self, count: int, every_s: float = ARRIVAL_S) -> None:
        """Starts `count` members' processes, one after the other."""
        for index in range(count):
            number = next(self._numbers)
            one = self._streams[number] = StandIn(self, f"n{number}", number)
            self.open(one, index * every_s)

    def open(self, one: StandIn, after_s: float) -> None:
        """Opens a stream to the scheduler for this member, and sends its hello."""
        self._send(fx.Opened(one.number), after_s)
        self._send(fx.MessageIn(one.number, one.hello()), after_s)

    def kill(self, one: StandIn) -> None:
        """Kills a member's process: its streams and links close, and their other ends report that."""
        self.gone(one, abrupt=True)
        for peer in one.up:
            other = self.members[peer]
            if other.here:
                other.lost(one.id)

    def vanish(self, one: StandIn) -> None:
        """Makes a member's machine fall silent: it sends nothing any more, and nobody reports it."""
        one.here = False

    def cut(self, one: StandIn, other: StandIn) -> None:
        """Blocks all traffic between two members; both report that."""
        self._cut.add(frozenset((one.id, other.id)))
        one.lost(other.id, "silent for 3.0 s")
        other.lost(one.id, "silent for 3.0 s")

    def leave(self, one: StandIn) -> None:
        """Makes a member ask for its release."""
        self.say(one, Leave("asked to leave"))

    # ------------------------------------------------------------------ waiting

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Advances time until a condition holds.

        Raises:
            RuntimeError: Not within PATIENCE_S of virtual time.
        """
        end = self.clock.now + PATIENCE_S
        while not ready():
            if self.clock.now > end:
                raise RuntimeError(f"waited {PATIENCE_S:g} virtual seconds in vain for {what}")
            self.clock.advance()
            inbox, self._inbox = self._inbox, []
            for part in in_batches(inbox):
                self.feed(part, OTHER)

    def settled(self, count: int) -> bool:
        """Returns whether `count` members are all in the last view, and the scheduler has heard that from each."""
        if self._flying or len(self.view.members) != count or self._carrying > self.view.id:
            return False
        there = [self.members[m] for m in self.view.ids()]
        return all(p.here and p.loaded and p.view == self.view.id for p in there)

    def calm(self) -> bool:
        """Returns whether all present members are in the last view, and the scheduler has heard that."""
        return self.settled(sum(p.here for p in self._streams.values()))

    # ------------------------------------------------------------------ the scheduler

    def feed(self, events: Sequence[fx.SchedulerEvent], label: str) -> None:
        """Feeds events to the scheduler, and delivers its messages to members."""
        for effect in self.meter.on(self.clock.now, events, label):
            one = self._streams[effect.conn]
            if isinstance(effect, fx.Send):
                self.tell(one, effect.message)
            else:
                self.gone(one, abrupt=False)

    def tell(self, one: StandIn, message: ToMember) -> None:
        """Delivers a scheduler's message to a member, if that member still runs."""
        if one.here:
            one.hear(message)

    def _tick(self) -> None:
        self._inbox.append(fx.SchedulerTick())
        self.clock.after(self.machine.tick_interval_s, self._tick)

    def _beat(self) -> None:
        """Sends a heartbeat of each member to the scheduler, again and again."""
        here = [p for p in self._streams.values() if p.here and p.id]
        for part in in_batches([fx.MessageIn(p.number, p.heartbeat()) for p in here]):
            self.feed(part, BEATS)
        self.clock.after(min((p.interval_s for p in here), default=0.1), self._beat)
