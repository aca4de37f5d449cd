"""Tests members of a job with pipelines under a scheduler that decides at random: no part of the state is lost, and the
job goes on.

Messages between two processes keep their order; all else happens in any order. Views move layers at random, by headers
and by decisions; members join, leave, die and drift, each where another member still has what they hold.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from membership_script import contribution, member, pipelines_of

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.membership.member_parts import MemberParts
from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    WHOLE,
    Contribution,
    Decide,
    Finished,
    Header,
    Kept,
    Kind,
    NextView,
    Prepare,
    Released,
    Report,
    View,
    ViewId,
    Welcome,
)

LAYERS = 3
SHARED = "wte:0.2"


def divided(chance: random.Random, members: list[str]) -> str:
    """Returns, as text, random pipelines of some of these members, cut at random layers."""
    left, rows = list(members), []
    chance.shuffle(left)
    while left and (not rows or chance.random() < 0.8):
        count = chance.randint(1, min(LAYERS, len(left)))
        cuts = [0, *sorted(chance.sample(range(1, LAYERS), count - 1)), LAYERS]
        rows.append("+".join(f"{left.pop()}:{b - a}" for a, b in pairwise(cuts)))
    return pipelines_of(",".join(rows), SHARED)


@dataclass(eq=False)
class Node:
    """Process of a member: its state machine, and the parts of the state in its memory."""

    id: str
    machine: MemberMachine = field(default_factory=MemberMachine)
    memory: dict[int, str] = field(default_factory=dict)
    """Hash of the header whose state the part belongs to, by part."""
    drifted: set[int] = field(default_factory=set)
    wants: fx.PullParts | fx.PullState | None = None
    reduced: set[tuple[ViewId, int]] = field(default_factory=set)
    dead: bool = False


class World:
    """All processes of a random job, and its scheduler."""

    def __init__(self, seed: int, count: int = 4) -> None:
        self.chance = random.Random(seed)
        self.nodes: dict[str, Node] = {}
        self.queues: dict[tuple[str, str], deque[tuple[str, object]]] = defaultdict(deque)
        """Messages under way from one process to another; threads of a process count as others."""
        self.headers = {GENESIS.hash: GENESIS}
        self.views: dict[ViewId, View] = {}
        self.reports: dict[str, Report] | None = None
        self.number = ViewId(1, 0)
        self.settled = False
        self.counts: dict[str, int] = defaultdict(int)
        ids = [self.newcomer() for _ in range(count)]
        view = self.view(ids, joiners=ids[1:])
        for who in ids:
            self.send("scheduler", who, fx.ControlIn(Decide(view, GENESIS)))

    # ------------------------------------------------------------------ what goes on

    def newcomer(self) -> str:
        who = f"m{len(self.nodes)}~{len(self.nodes)}"
        self.nodes[who] = Node(who)
        self.feed(self.nodes[who], fx.ControlIn(Welcome(member(who), 1, "joiner", "hello", 0.1, 0.35)))
        return who

    def view(self, members: list[str], joiners: list[str] = [], leaving: list[str] = []) -> View:  # noqa: B006
        """Returns the next view, with layers assigned at random."""
        last = self.number
        self.number = ViewId(1, last.number + 1)
        view = View(
            id=self.number,
            predecessor=self.latest.id if self.views else NO_VIEW,
            members=tuple(map(member, members)),
            joiners=tuple(joiners),
            pipelines=divided(self.chance, members),
            leaving=tuple(map(member, leaving)),
        )
        self.views[view.id], self.latest, self.settled = view, view, False
        return view

    def send(self, source: str, to: str, what: object, kind: str = "event") -> None:
        self.queues[source, to].append((kind, what))

    def alive(self) -> list[Node]:
        return [n for n in self.nodes.values() if not n.dead and n.machine.phase is not MemberPhase.GONE]

    def step(self) -> bool:
        """Delivers a random message; returns False if none is under way."""
        ready = [key for key, queue in self.queues.items() if queue and key[1] in self.nodes]
        if not ready:
            return False
        key = self.chance.choice(ready)
        kind, what = self.queues[key].popleft()
        node = self.nodes[key[1]]
        if node.dead or node.machine.phase is MemberPhase.GONE:
            return True
        if kind == "units":
            self.run_units(node, *what)  # type: ignore[misc]
        elif kind == "pull":
            self.pull(node, what)
        else:
            if isinstance(what, fx.RangesDone):
                node.reduced.add((what.view, what.seq))
            self.feed(node, what)  # type: ignore[arg-type]
        return True

    def feed(self, node: Node, event: fx.MemberEvent) -> None:
        for effect in node.machine.on(0.0, event):
            self.effect(node, effect)
        node.machine.validate_state()
        if node.machine.phase is not MemberPhase.GONE:
            self.check_claims(node)

    def effect(self, node: Node, effect: fx.MemberEffect) -> None:
        match effect:
            case fx.ToPeer(peer, message):
                if isinstance(message, Contribution) and message.kind is Kind.STEP:
                    assert message.reduced
                    assert (message.view, message.seq) in node.reduced, "contributed before all was reduced (P4)"
                if isinstance(message, Header):
                    self.headers[message.hash] = message
                self.send(node.id, peer, fx.PeerIn(node.id, message))
            case fx.ToScheduler(Report() as report):
                if self.reports is not None and report.number == self.number:
                    self.reports[node.id] = report
            case fx.OpenAttempt(view, seq) | fx.Rerun(view, seq):
                self.send("thread", node.id, (view, seq), "units")
                if isinstance(effect, fx.Rerun):
                    self.counts["rerun"] += 1
                else:
                    self.send("wire", node.id, fx.RangesDone(view.id, seq))
            case fx.Committed(header):
                self.commit(node, header)
            case fx.DropParts(parts):
                self.counts["drop"] += 1
                for part in numbers(parts):
                    del node.memory[part]
            case fx.Viewed(view) if node.machine.seq == 0 and view.find(node.id) is not None:
                made = division(view).made(node.id)
                node.memory = {part: self.label(GENESIS.hash, view) for part in numbers(made)}
            case fx.PullParts(_, view) | fx.PullState(_, view):
                self.counts[type(effect).__name__] += 1
                node.wants = effect
                self.send("pull", node.id, effect, "pull")

    # ------------------------------------------------------------------ training

    def label(self, head: str, view: View) -> str:
        return f"{head}/{view.id}" if head == GENESIS.hash else head

    def run_units(self, node: Node, view: View, seq: int) -> None:
        """Contributes to a slot as a training thread would that has run its units, unless the slot is over."""
        machine = node.machine
        if machine.phase is not MemberPhase.ACTIVE or machine.seq + 1 != seq or machine.contribution is not None:
            return
        if view == machine.view:
            owners = division(view).owners
            node.drifted = {p for p in node.drifted if owners[p][0] != node.id}  # its own is the right one now
        kind = "boundary" if machine.header.boundary else "gather" if seq % 5 == 4 else "step"
        said = contribution(view, machine.header, kind, node.id)
        if kind == "step":
            if seq % 2:
                said = replace(said, state_hashes=tuple(f"of {p}" for p in numbers(division(view).owned(node.id))))
                said = replace(said, state_hashes=self.drift(node, view, said.state_hashes))
            said = replace(said, reduced=False)
        else:
            said = replace(said, view=NO_VIEW)
        self.feed(node, fx.Contribute(said))

    def drift(self, node: Node, view: View, hashes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the state hashes that this member reports; now and then lets one of its parts drift."""
        owners, mine = division(view).owners, numbers(division(view).owned(node.id))
        alive = {n.id: n for n in self.alive() if n is not node}
        others = {p for n in alive.values() for p in n.drifted}
        eldest = {p: alive.get(owners[p][0]) for p in mine if p in node.memory}
        younger = [p for p, n in eldest.items() if n is not None and n.memory.get(p) == node.memory[p]]
        found = [p for p in younger if p not in others] if view == node.machine.view else []
        if found and self.chance.random() < 0.1:
            node.drifted.add(self.chance.choice(found))
        return tuple("odd" if p in node.drifted else said for p, said in zip(mine, hashes, strict=True))

    def commit(self, node: Node, header: Header) -> None:
        self.headers[header.hash] = header
        self.counts[header.kind] += 1
        assert not header.error, header.error
        closed_under = self.views[header.view]
        before = self.label(header.prev_hash, closed_under)
        owned = numbers(division(closed_under).owned(node.id))
        assert all(node.memory.get(p) == before for p in owned), "an owner lacks a part (P4)"
        stays = [p for p, state in node.memory.items() if state == before and (header.kind != "step" or p in owned)]
        node.memory |= dict.fromkeys(stays, header.hash)
        for drifted in header.drifted:
            if drifted.member == node.id:
                assert drifted.part in node.drifted
                self.counts["drift"] += 1
                del node.memory[drifted.part]
        node.drifted &= set(node.memory)

    def check_claims(self, node: Node) -> None:
        """Checks that a member holds the parts that it claims, at the header that it claims."""
        machine = node.machine
        if machine.view is None or (machine.phase is MemberPhase.LOADING and not machine.parts.held):
            return
        state = self.label(machine.header.hash, machine.view)
        assert all(node.memory.get(p) == state for p in numbers(machine.parts.held)), (node, machine.parts.held, state)

    def pull(self, node: Node, what: object) -> None:
        """Fetches a random choice of the missing parts from members that hold them, and asks again later for the
        others.
        """
        wants = node.wants
        if what is not wants or wants is None or node.machine.header.hash != wants.header.hash:
            return
        state = self.label(wants.header.hash, wants.view)
        donors = [self.nodes[m.id] for m in (*wants.view.members, *wants.view.leaving) if m.id != node.id]
        there = {
            p for n in donors if n in self.alive() for p, s in n.memory.items() if s == state and p not in n.drifted
        }
        found = [p for p in numbers(node.machine.parts.missing) if p in there]
        if found:
            came = self.chance.sample(found, self.chance.randint(1, len(found)))
            node.memory |= dict.fromkeys(came, state)
            node.drifted -= set(came)
            spans = tuple(sorted((p, p + 1) for p in came))
            self.feed(node, fx.StateLoaded(wants.header.hash, spans, wants.view.id))
        if node.machine.parts.missing and node.wants is wants:
            self.send("pull", node.id, wants, "pull")

    # ------------------------------------------------------------------ the scheduler

    def inside(self) -> list[Node]:
        return [self.nodes[m] for m in self.latest.ids() if not self.nodes[m].dead]

    def look(self) -> None:
        """Releases leavers once the latest view is settled (P8, P9), and decides a recovery once all have reported."""
        latest = self.latest
        here = [n.machine for n in self.inside()]
        if not self.settled and all(m.view == latest and not m.parts.missing and m.loaded for m in here):
            self.settled = True
            for leaver in latest.leaving:
                self.send("scheduler", leaver.id, fx.ControlIn(Released("settled", asked=True)))
        asked = [self.nodes[m.id] for m in (*latest.members, *latest.leaving)]
        if self.reports is not None and all(n.id in self.reports or n not in self.alive() for n in asked):
            self.decide({m: r for m, r in self.reports.items() if self.nodes[m] in self.alive()})

    def announce(self) -> None:
        """Announces a view that a header is to carry."""
        if self.reports is not None or not self.settled:
            return
        ids = [n.id for n in self.inside()]
        joiners = [self.newcomer()] if len(ids) < 6 and self.chance.random() < 0.3 else []
        leaving = [] if joiners or len(ids) < 3 or self.chance.random() < 0.6 else [self.chance.choice(ids)]
        view = self.view([m for m in [*ids, *joiners] if m not in leaving], joiners, leaving)
        self.counts["leave"] += len(leaving)
        for who in ids:
            self.send("scheduler", who, fx.ControlIn(NextView(view)))

    def recover(self, dies: bool) -> None:
        if self.reports is not None:
            return
        if dies:
            self.kill()
        self.number = ViewId(1, self.number.number + 1)
        self.reports = {}
        for who in (*self.latest.members, *self.latest.leaving):
            self.send("scheduler", who.id, fx.ControlIn(Prepare(self.number, "a test")))

    def kill(self) -> None:
        """Kills a random member, perhaps while others fetch parts from it, unless that would lose a part."""
        members = self.inside()
        dying = self.chance.choice(members)
        others = [n for n in members if n is not dying]
        alike = all(n.machine.view == self.latest and n.machine.header == dying.machine.header for n in others)
        held = {p for n in others for p in numbers(n.machine.parts.held) if p not in n.drifted}
        if not self.settled or not alike or len(others) < 2 or held != set(range(len(self.parts.names))):
            return
        dying.dead = True
        self.counts["death"] += 1
        for (source, _), queue in self.queues.items():
            if source == dying.id and self.chance.random() < 0.5:
                queue.clear()

    @property
    def parts(self) -> Division:
        return division(self.latest)

    def decide(self, reports: dict[str, Report]) -> None:
        """Decides a recovery by rule P5, and assigns layers to other members."""
        best = max((r for r in reports.values() if r.parts), key=lambda r: (r.entered, r.seq))
        candidates = [self.headers[best.head]]
        if best.seq:
            candidates.append(self.headers[candidates[0].prev_hash])
        base = next((c for c in candidates if self.counts_as_base(c, reports)), None)
        assert base is not None, f"parts are lost: {reports}"
        self.reports = None
        stay, joiners, leaving, behind = [], [], [], False
        gone = {m.id for m in self.latest.leaving}
        for who in (*self.latest.ids(), *gone):
            if (report := reports.get(who)) is None:
                continue
            later = self.handed_on(base, report)
            admitted = base.view_change is not None and who in base.view_change.joiners
            if who in gone and report.head in (base.hash, base.prev_hash):
                leaving.append(who)  # no header has to have let it go, or it may be a member again
            elif not (report.parts and self.nodes[who].machine.loaded) and (
                report.head == base.hash if report.entered != NO_VIEW else admitted
            ):
                joiners.append(who)
            elif report.parts and (report.head == base.hash or later) and who not in gone:
                stay.append(who)
            else:
                assert who in gone or not report.parts or report.entered < base.view, (who, report, base)
                self.nodes[who].dead = True
            behind = behind or (later and report.head != base.hash)
        assert stay
        if len(stay) > 2 and self.chance.random() < 0.2:
            leaving.append(stay.pop(self.chance.randrange(len(stay))))
            self.counts["leave"] += 1
        self.number = ViewId(1, self.number.number - 1)  # that of the Prepare
        view = self.view([m for m in self.latest.ids() if m in (*stay, *joiners)], joiners, leaving)
        self.counts["hand on"] += behind
        for who in (*view.ids(), *leaving):
            self.send("scheduler", who, fx.ControlIn(Decide(view, base, behind)))

    def handed_on(self, base: Header, report: Report) -> bool:
        return base.seq > 0 and report.head == base.prev_hash and report.entered == base.view

    def counts_as_base(self, base: Header, reports: dict[str, Report]) -> bool:
        held: set[int] = set()
        for report in reports.values():
            if report.head == base.hash:
                held.update(numbers(report.parts))
            elif self.handed_on(base, report):
                held.update(numbers(report.owns if base.kind is Kind.STEP else report.parts))
        return base == GENESIS or held == set(range(len(self.parts.names)))


def stir(world: World, events: int) -> None:
    for _ in range(events):
        world.step()
        world.look()
        draw = world.chance.random()
        if draw < 0.01:
            world.announce()
        elif draw < 0.02:
            world.recover(dies=world.chance.random() < 0.3)


def go_on(world: World) -> None:
    """Runs without further faults until all members of the latest view have committed five more slots in it."""
    start = max(n.machine.seq for n in world.alive())
    for _ in range(20_000):
        moving = world.step()
        world.look()
        inside = [n.machine for n in world.inside()]
        done = all(m.seq >= start + 5 and m.view == world.latest for m in inside)
        if done and world.reports is None and world.settled:
            return
        if not moving:
            break
    stands = [
        (n.id, n.machine.phase, n.machine.seq, n.machine.parts.missing, n.memory, n.drifted) for n in world.alive()
    ]
    raise AssertionError(f"nothing goes on in {world.latest}: {stands}; asks: {world.reports}")


@pytest.mark.parametrize("seed", range(16))
def test_no_part_is_lost_and_the_job_goes_on(seed: int) -> None:
    world = World(seed)
    for _ in range(3):
        stir(world, 800)
        go_on(world)


def test_the_world_has_all_that_it_is_made_for() -> None:
    counts: dict[str, int] = defaultdict(int)
    for seed in range(12):
        world = World(seed)
        stir(world, 2000)
        go_on(world)
        for what, count in world.counts.items():
            counts[what] += count
    expected = {"step", "gather", "boundary", "drop", "rerun", "PullParts", "PullState", "drift", "leave", "death"}
    assert expected | {"hand on"} <= {what for what, count in counts.items() if count}, dict(counts)


def test_a_founder_holds_what_lies_in_its_file() -> None:
    """A founder holds the parts in its file only if the job is founded on that file's header, and has pipelines (14c,
    P13).
    """
    text = pipelines_of("a~1:2+b~2:2")
    view = View(ViewId(2, 1), NO_VIEW, (member("a~1"), member("b~2")), pipelines=text)
    base = replace(GENESIS, seq=4)
    parts = MemberParts()
    parts.kept = Kept(base, "a~1", parts=((0, 1), (4, 5)))
    parts.found(GENESIS, view)
    assert parts.held == ()
    parts.found(GENESIS, replace(view, pipelines=""))
    assert parts.held == WHOLE
    parts.found(base, view)
    parts.stand_in("a~1", view, base.seq)
    assert (parts.held, parts.missing) == (((0, 1), (4, 5)), ((1, 2),))
    assert parts.pull(base, view) == [fx.PullParts(base, view, ((1, 2),))]


def alone_at(base: Header, view: View) -> MemberMachine:
    """Returns a member at this header, in a view that has no other member."""
    machine = MemberMachine()
    machine.on(0.0, fx.ControlIn(Welcome(member("a~1"), 1, "founder", "hello", 0.1, 0.35)))
    machine.parts.kept = Kept(base, "a~1", parts=division(view).everything)
    machine.on(0.0, fx.ControlIn(Decide(view, base)))
    return machine


@pytest.mark.parametrize("kind", [Kind.CLOSING, Kind.BOUNDARY])
@pytest.mark.parametrize("behind", [False, True])
def test_a_decision_that_lets_a_member_go_is_told_and_after_the_closing_header_it_has_finished(
    kind: Kind, behind: bool
) -> None:
    """A recovery hands a header on and lets the only member go: if that is the closing header, the member reports that
    it has finished.
    """
    first = View(ViewId(2, 1), NO_VIEW, (member("a~1"),), pipelines=pipelines_of("a~1:4"))
    after = replace(first, id=ViewId(2, 2), predecessor=first.id, members=(), leaving=first.members)
    stood = replace(GENESIS, seq=4, view=ViewId(1, 9))
    base = Header(5, kind, 4, first.id, stood.hash, first.id)
    machine = alone_at(stood, first)
    if not behind:
        machine.on(0.0, fx.ControlIn(Decide(replace(first, id=ViewId(2, 2)), base, hand_on=True)))
        after = replace(after, id=ViewId(2, 3))
    effects = machine.on(0.0, fx.ControlIn(Decide(after, base, hand_on=True)))
    assert fx.Viewed(after) in effects
    assert (fx.ToScheduler(Finished(5, 4)) in effects) == (kind is Kind.CLOSING)
    assert machine.phase is (MemberPhase.CLOSED if kind is Kind.CLOSING else MemberPhase.LEAVING)
