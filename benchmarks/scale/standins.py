"""Stand-ins for members in virtual time: they answer the scheduler's machine as members do, and cost it nothing.

Theory of operation. A `Stage` has the product's `SchedulerMachine` and a `StandIn` (fake.py) for each member. Whatever
a stand-in says arrives after `REPLY_S`; what arrives together is fed in batches, as the scheduler's process does. A
link stands once both ends were told of each other; a view that a header is to carry is carried after `STEP_S` by a
header that the product makes (`close_slot`) from contributions of all members. Processor time is taken around the
machine, its records and its messages, each of which is encoded once however many it goes to; heartbeats are counted
apart. The store is in memory: what a disk takes is measured elsewhere (benchmarks.stores).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from benchmarks.scale.fake import StandIn
from chaos_lightning.control.chain import JobChain
from chaos_lightning.control.drawing import request
from chaos_lightning.control.memory_store import MemoryStore
from chaos_lightning.control.store import Appended, End
from chaos_lightning.control.streams import Parcel
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import SchedulerMachine
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
    PlanSpec,
    Refused,
    Released,
    Settings,
    Spent,
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
"""What each member contributes to each step."""


def contribution(member: str, view: View, prev: Header, kind: Kind, weight: float = SAMPLES) -> Contribution:
    """What a member with settings as all others' brings to the slot after `prev`."""
    place = view.ids().index(member)
    start = (prev.step * len(view.members) + place) * SAMPLES
    return Contribution(
        member,
        view.id,
        prev.seq + 1,
        kind,
        prev.step,
        prev.hash,
        weight=float(weight),
        coefficient=float(weight),
        spent=(Spent("", 0, ((start, start + SAMPLES),)),) if kind is Kind.STEP else (),
        layout_hash="0" * 16,
        hyper="opt0.lr=0.1;opt0.momentum=0.9",
    )


def next_header(view: View, prev: Header, kind: Kind, waiting: View | None = None) -> Header:
    """The header that commits the slot after `prev`, made as the commit root makes it."""
    brought = {m: contribution(m, view, prev, kind) for m in view.ids()}
    return close_slot(view=view, prev=prev, contributions=brought, waiting=waiting)


class Records(MemoryStore):
    """A store that notes how large each record is, with its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[tuple[str, int]] = []

    def append(self, kind: str, body: bytes, after: End, *, cut: bool = False) -> Appended:
        self.nbytes.append((kind, len(body)))
        return super().append(kind, body, after, cut=cut)


class Stage:
    """See the module.

    Args:
        settings: The job's rules.

    Attributes:
        cpu_s: Of the scheduler, for `BEATS` and for `OTHER`.
        records: Bytes of each record that went to the store, with its kind.
        header: The last committed one.
        view: The last one that members were told of.
    """

    def __init__(self, settings: Settings) -> None:
        self._store = Records()
        self._chain = JobChain(self._store)
        self._chain.take_term()
        self.machine = SchedulerMachine(settings, self._chain.load())
        self.settings = settings
        self.now = 0.0
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.records = self._store.nbytes
        self.sent_nbytes = 0
        """Size of all different messages to members."""
        self.said: Counter[str] = Counter()
        """Messages of the scheduler, by kind."""
        self.put_out: list[str] = []
        """Why members are in the job no more that did not leave it."""
        self.header, self.view = GENESIS, View(NO_VIEW, NO_VIEW, ())
        self.wish: fx.DrawPlan | None = None
        """The last request for a better plan."""
        self.members: dict[str, StandIn] = {}
        """By id."""
        self._streams: dict[int, StandIn] = {}
        self._numbers = itertools.count(1)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._inbox: list[fx.SchedulerEvent] = []
        self._flying = 0
        """Words on their way to the scheduler."""
        self._carrying = NO_VIEW
        self._links_of = NO_VIEW
        self._links: dict[str, set[str]] = {}
        self._cut: set[frozenset[str]] = set()
        self._encoded: object = None
        self._at(0.0, self._tick)
        self._at(0.0, self._beat)

    # ------------------------------------------------------------------ what happens to members

    def start(self, count: int, every_s: float = ARRIVAL_S) -> list[StandIn]:
        """So many processes start, one after the other."""
        made = []
        for index in range(count):
            number = next(self._numbers)
            one = StandIn(self, f"n{number}", number)
            self._streams[number] = one
            self._hello(one, index * every_s)
            made.append(one)
        return made

    def kill(self, one: StandIn) -> None:
        """Its process is gone: streams and links are closed, and the other ends say so."""
        self._gone(one, abrupt=True)
        for peer in one.up:
            other = self.members[peer]
            if other.here:
                other.lost(one.id)

    def vanish(self, one: StandIn) -> None:
        """Its machine is gone: nothing comes from there any more, and nothing says so."""
        one.here = False

    def cut(self, one: StandIn, other: StandIn) -> None:
        """Nothing gets from one to the other any more; both say so."""
        self._cut.add(frozenset((one.id, other.id)))
        one.lost(other.id, "silent for 3.0 s")
        other.lost(one.id, "silent for 3.0 s")

    def leave(self, one: StandIn) -> None:
        """It asks to be let go."""
        self.say(one, Leave("asked to leave"))

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Goes on until it is so.

        Raises:
            RuntimeError: Not within PATIENCE_S of virtual time.
        """
        end = self.now + PATIENCE_S
        while not ready():
            if self.now > end:
                raise RuntimeError(f"waited {PATIENCE_S:g} virtual seconds in vain for {what}")
            self._turn()

    def settled(self, count: int) -> bool:
        """Whether the job has so many members, and the scheduler heard from each that it stands in the last view."""
        if self._flying or len(self.view.members) != count or self._carrying > self.view.id:
            return False
        there = [self.members[m] for m in self.view.ids()]
        return all(p.here and p.loaded and p.view == self.view.id for p in there)

    def calm(self) -> bool:
        """Whether all who are here, however many, stand in the last view, and the scheduler heard so."""
        return self.settled(sum(p.here for p in self._streams.values()))

    def beat_all(self, batch: int) -> float:
        """Feeds one heartbeat of each member, so many at a time; returns CPU seconds."""
        before = self.cpu_s[BEATS]
        beats = [self._heartbeat(self.members[m]) for m in self.view.ids()]
        for part in (beats[i : i + batch] for i in range(0, len(beats), batch)):
            self.now += REPLY_S / 10
            self._feed(part, BEATS)
        return self.cpu_s[BEATS] - before

    def tick(self) -> float:
        """Feeds a tick by itself; returns CPU seconds."""
        before = self.cpu_s[BEATS]
        self.now += REPLY_S / 10
        self._feed([fx.SchedulerTick()], BEATS)
        return self.cpu_s[BEATS] - before

    def answer(self, plan: PlanSpec) -> float:
        """Answers the last request with this plan; returns CPU seconds until the view with it is announced."""
        assert self.wish is not None
        before = self.cpu_s[OTHER]
        self._feed([fx.PlanDrawn(self.wish.token, plan, "drawn")], OTHER)
        return self.cpu_s[OTHER] - before

    @property
    def interval_s(self) -> float:
        """Between two heartbeats, as members were told."""
        return min(self.members[m].interval_s for m in self.view.ids())

    # ------------------------------------------------------------------ time

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), action))

    def _turn(self) -> None:
        """All that happens at the next instant at which anything does."""
        self.now = max(self.now, self._due[0][0])
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()
        inbox, self._inbox = self._inbox, []
        for part in (inbox[i : i + BATCH] for i in range(0, len(inbox), BATCH)):
            self._feed(part, OTHER)

    def _tick(self) -> None:
        self._inbox.append(fx.SchedulerTick())
        self._at(self.now + self.machine.tick_interval_s, self._tick)

    def _beat(self) -> None:
        """All members that are due say that they live."""
        here = [p for p in self._streams.values() if p.here and p.id]
        beats = [self._heartbeat(p) for p in here]
        for part in (beats[i : i + BATCH] for i in range(0, len(beats), BATCH)):
            self._feed(part, BEATS)
        self._at(self.now + min((p.interval_s for p in here), default=0.1), self._beat)

    def _heartbeat(self, one: StandIn) -> fx.MessageIn:
        return fx.MessageIn(one.number, one.heartbeat())

    # ------------------------------------------------------------------ the scheduler

    def _feed(self, events: Sequence[fx.SchedulerEvent], label: str) -> None:
        pending: list[Sequence[fx.SchedulerEvent]] = [events]
        while pending:
            began = time.thread_time()
            effects = self.machine.on(self.now, *pending.pop(0))
            pending += self._carry_out(effects)
            self.cpu_s[label] += time.thread_time() - began
            for effect in effects:
                match effect:
                    case fx.Send(number, message):
                        self.said[type(message).__name__] += 1
                        if self._streams[number].here:
                            self._streams[number].hear(message)
                    case fx.Close(number, _):
                        self._gone(self._streams[number], abrupt=False)

    def _carry_out(self, effects: Sequence[fx.SchedulerEffect]) -> list[Sequence[fx.SchedulerEvent]]:
        """The process's own part of it: records, messages and requests become bytes."""
        stored: list[Sequence[fx.SchedulerEvent]] = []
        for effect in effects:
            if isinstance(effect, fx.Persist):
                outcome = self._chain.append(effect)
                stored.append([fx.Stored(effect.token, outcome.ok, outcome.detail)])
            elif isinstance(effect, fx.Send) and effect.message is not self._encoded:
                self._encoded = effect.message
                self.sent_nbytes += len(Parcel(effect.message).data)
            elif isinstance(effect, fx.DrawPlan):
                self.wish = effect
                request(effect)
        return stored

    # ------------------------------------------------------------------ what surrounds members

    def say(self, one: StandIn, message: FromMember) -> None:
        """A word of this member, on its way to the scheduler."""
        self._send(fx.MessageIn(one.number, message), REPLY_S)

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Does something after so many virtual seconds."""
        self._at(self.now + after_s, action)

    def lives(self, member: str) -> bool:
        """Returns whether its process runs."""
        return self.members[member].here

    def welcomed(self, one: StandIn) -> None:
        """It has an id from now on."""
        self.members[one.id] = one

    def asked(self, one: StandIn) -> None:
        """Links to members that were told of this one, too, stand; a newcomer with all of its links is ready."""
        for peer in one.named - one.up:
            other = self.members[peer]
            if other.here and one.id in other.named and frozenset((one.id, peer)) not in self._cut:
                one.linked(peer)
                other.linked(one.id)
                other.check_ready()
        one.check_ready()

    def foretold(self, one: StandIn, view: View) -> None:
        """A header carries this view to all, a moment after the first of them was told of it."""
        if view.id > self._carrying:
            self._carrying = view.id
            self._at(self.now + STEP_S, lambda: self._carry(view))

    def entered(self, one: StandIn, view: View, *, decided: bool) -> None:
        """It has the links of its view from now on."""
        if decided:
            self.view, self.header = view, one.header
        one.named.update(self._near(view).get(one.id, ()))

    def out(self, one: StandIn, message: Fence | Refused | Released) -> None:
        """It closes its stream."""
        if isinstance(message, Fence):
            self.put_out.append(message.reason)
        self._gone(one, abrupt=False)

    def _send(self, event: fx.SchedulerEvent, after_s: float) -> None:
        def arrive() -> None:
            self._flying -= 1
            self._inbox.append(event)

        self._flying += 1
        self._at(self.now + after_s, arrive)

    def _hello(self, one: StandIn, after_s: float) -> None:
        self._send(fx.Opened(one.number), after_s)
        self._send(fx.MessageIn(one.number, one.hello()), after_s)

    def _gone(self, one: StandIn, *, abrupt: bool) -> None:
        if one.here:
            one.here = False
            self._send(fx.Closed(one.number, abrupt), REPLY_S)

    def _carry(self, view: View) -> None:
        """A header brings this view to all who stand in the one before, and to its joiners."""
        before = [self.members[m] for m in self.view.ids()]
        if self.view.id != view.predecessor or not all(p.here and p.promised < view.id for p in before):
            return  # a recovery comes in between
        self.header = next_header(self.view, self.header, Kind.BOUNDARY, view)
        self.view = view
        for member in view.ids():
            self.members[member].carried(self.header, view)

    def _near(self, view: View) -> dict[str, set[str]]:
        """Neighbours by member, of a view that has links of its own."""
        if self._links_of != view.id:
            self._links_of, self._links = view.id, defaultdict(set)
            for link in view.links:
                self._links[link.a].add(link.b)
                self._links[link.b].add(link.a)
        return self._links
