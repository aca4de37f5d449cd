"""Tests the scheduler's server, store and members' agents with the real state machines: founding, death, restart,
end.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from until_support import until

from chaos_lightning.control import summing
from chaos_lightning.control.agent import Agent
from chaos_lightning.control.job_chain import SUMMARY, JobChain
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.protocol.codec import decode_peer, encode_peer
from chaos_lightning.protocol.types import (
    SMALL_JOB,
    Contribution,
    FromMember,
    Heartbeat,
    Hello,
    Kind,
    LinkEvent,
    PlanSpec,
    Probe,
    Settings,
    ToMember,
    Verdict,
    ViewId,
)
from chaos_lightning.service.memory_store import MemoryStore, Shelf

sys.path.insert(0, str(Path(__file__).parent))
from served import PATIENCE_S, Facts, Served, hello, serving

SETTINGS = Settings(min_nodes=2, heartbeat_timeout_s=2.0, reconnect_grace_s=10.0, linger_timeout_s=1.0)


class Fabric:
    """Links between members of this process, and the one thread that handles all their events in order.

    A link stands for both ends at once as soon as either end wants it; messages go through the codec.
    """

    def __init__(self) -> None:
        self.members: dict[str, Node] = {}
        self._links: set[frozenset[str]] = set()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fabric", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            function()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def link(self) -> None:
        """Makes the links that both ends want; an end that has not been told of its peer refuses the link."""
        for me, node in list(self.members.items()):
            for peer in node.wanted & self.members.keys():
                pair = frozenset((me, peer))
                if pair not in self._links and me in self.members[peer].wanted:
                    self._links.add(pair)
                    self.members[peer].feed(fx.LinkChanged(me, True, "connected"))
                    node.feed(fx.LinkChanged(peer, True, "connected"))

    def deliver(self, sender: str, peer: str, message: Any) -> None:
        if frozenset((sender, peer)) in self._links and peer in self.members:
            self.members[peer].feed(fx.PeerIn(sender, decode_peer(encode_peer(message))))

    def remove(self, member: str) -> None:
        self.members.pop(member, None)
        for pair in [p for p in self._links if member in p]:
            self._links.discard(pair)
            for other in pair & self.members.keys():
                self.members[other].feed(fx.LinkChanged(member, False, "closed"))


class Node:
    """Member without tensors: its state machine, its Agent, and links made by the Fabric."""

    def __init__(self, fabric: Fabric, endpoint: str, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.machine = MemberMachine()
        self.effects: Facts[fx.MemberEffect] = Facts()
        self.states: Facts[str] = Facts()
        self.id = ""
        self.wanted: set[str] = set()
        self.dead = False
        self.agent = Agent(
            endpoints=(endpoint,),
            token=b"",
            hello_factory=self._hello,
            on_message=lambda message: fabric.call(lambda: self._control(message)),
            on_state=self.states.add,
            heartbeat=lambda: Heartbeat(ViewId(), self.machine.seq, self.machine.step),
        )
        self.agent.start()

    def _hello(self) -> Hello:
        return replace(hello(self.name), **self.machine.knowledge())

    def _control(self, message: ToMember) -> None:
        if isinstance(message, Probe):
            self.say(Verdict(message.suspect, message.suspect in self.fabric.members, "asked the fabric"))
            return
        self.feed(fx.ControlIn(message))

    def feed(self, event: fx.MemberEvent) -> None:
        if self.dead:
            return
        for effect in self.machine.on(time.monotonic(), event):
            self.apply(effect)
        if self.machine.member_id != self.id:
            self.id = self.machine.member_id
            self.fabric.members[self.id] = self
            self.fabric.call(self.fabric.link)

    def apply(self, effect: fx.MemberEffect) -> None:
        fabric = self.fabric
        match effect:
            case fx.ToScheduler(message):
                self.say(message)
            case fx.ToPeer(peer, message):
                fabric.call(lambda: fabric.deliver(self.id, peer, message))
            case fx.Connect(peers):
                self.wanted = {p.id for p in peers}
                fabric.call(fabric.link)
            case fx.OpenAttempt(view, seq):
                fabric.call(lambda: self.feed(fx.RangesDone(view.id, seq)))
            case fx.PullState(header, _):
                fabric.call(lambda: self.feed(fx.StateLoaded(header.hash)))
        self.effects.add(effect)

    def say(self, message: FromMember) -> None:
        if not self.dead:
            self.agent.send(message)

    def contribute(self, kind: Kind = Kind.GATHER) -> None:
        self.fabric.call(lambda: self._contribute(kind))

    def _contribute(self, kind: Kind) -> None:
        header = self.machine.header
        self.feed(
            fx.Contribute(
                Contribution(
                    member=self.id,
                    view=ViewId(),
                    seq=self.machine.seq + 1,
                    kind=kind,
                    step=self.machine.step,
                    prev_hash=header.hash if header.seq else "",
                    name="test",
                    payload=self.name.encode(),
                )
            )
        )

    def committed(self, seq: int) -> fx.Committed:
        found = self.effects.wait(lambda e: isinstance(e, fx.Committed) and e.header.seq == seq)
        assert isinstance(found, fx.Committed)
        return found

    def stands_in(self, count: int) -> None:
        """Waits until the member is in a view of `count` members."""
        self.effects.wait(lambda e: isinstance(e, fx.Viewed) and len(e.view.members) == count)

    def die(self) -> None:
        """Ends the member's control stream and all its links without a goodbye, as SIGKILL does."""
        self.dead = True
        talk = self.agent._client.talk
        self.agent._client._stopping = True
        assert talk is not None
        talk.end()
        self.agent.join(PATIENCE_S)
        self.fabric.call(lambda: self.fabric.remove(self.id))

    def close(self) -> None:
        self.agent.close()
        self.agent.join(PATIENCE_S)
        assert not self.agent.is_alive()


@contextmanager
def cluster(served: Served, *names: str) -> Iterator[list[Node]]:
    fabric = Fabric()
    nodes = [Node(fabric, served.endpoint, name) for name in names]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()
        fabric.stop()


@contextmanager
def real(shelf: Shelf | None = None, port: int = 0, **changes: Any) -> Iterator[Served]:
    store = shelf if shelf is not None else Shelf()
    with serving(
        machine=real_machine,
        open_store=lambda: MemoryStore("default", store),
        settings=replace(SETTINGS, **changes),
        port=port,
    ) as served:
        yield served


def gather(nodes: list[Node], seq: int) -> list[fx.Committed]:
    for node in nodes:
        node.contribute()
    return [node.committed(seq) for node in nodes]


def test_founding_collectives_and_the_end() -> None:
    with real() as served, cluster(served, "a", "b") as nodes:
        for node in nodes:
            node.stands_in(2)
        for seq in (1, 2, 3):
            first, second = gather(nodes, seq)
            assert first.header.hash == second.header.hash
            assert sorted(first.header.answers) == [b"a", b"b"]
        for node in nodes:
            node.contribute(Kind.CLOSING)
        for node in nodes:
            node.effects.wait(lambda e: isinstance(e, fx.Left))
        reason, failed = served.wait_ended()
        assert not failed
        assert reason


def is_told_of_a_tree(node: Node) -> bool:
    """Returns whether the member waits for a view whose plan has one reduction tree."""
    view = node.machine.waiting_view
    return view is not None and len(view.plan.trees) == 1


def joined_by(nodes: list[Node], served: Served, name: str) -> int:
    """Starts a newcomer, and commits boundaries until it is admitted; returns the number of the first slot that both
    commit.
    """
    nodes.append(Node(nodes[0].fabric, served.endpoint, name))
    nodes[0].effects.wait(lambda e: isinstance(e, fx.ToScheduler) and isinstance(e.message, LinkEvent))
    seq = 0
    while len(nodes[0].machine.view.members) == 1:  # type: ignore[union-attr]
        seq += 1
        nodes[0].contribute(Kind.BOUNDARY)
        nodes[0].committed(seq)
        assert seq < 2000
    nodes[1].effects.wait(lambda e: isinstance(e, fx.PullState))
    gather(nodes, seq + 1)
    return seq + 1


def test_a_death_is_survived_and_the_open_slot_is_redone() -> None:
    shelf = Shelf()
    with real(shelf, min_nodes=1, max_nodes=3) as served, cluster(served, "a") as nodes:
        nodes[0].stands_in(1)
        seq = joined_by(nodes, served, "b")
        nodes[0].contribute()
        nodes[1].die()
        committed = nodes[0].committed(seq + 1)
        assert committed.contributors == (nodes[0].id,)
        assert fetch_status(served.endpoint)["machine"]["phase"] == "running"
    with JobChain(MemoryStore(shelf=shelf)) as chain:
        kinds = [(e.kind, len(e.view.members) if e.view else 0) for e in chain.entries()]
    print([getattr(x, "message", x) for n in nodes for x in n.effects.seen if not isinstance(x, fx.Committed)][-30:])
    assert kinds == [("view", 1), ("view", 2), ("reserve", 0), ("view", 1)]


def test_a_scheduler_restarted_on_its_chain_finds_its_members_again() -> None:
    shelf = Shelf()
    with real(shelf) as served:
        port = served.server.port
        context = cluster(served, "a", "b")
        nodes = context.__enter__()
        for node in nodes:
            node.stands_in(2)
        gather(nodes, 1)
    try:
        for node in nodes:
            node.states.wait(lambda s: s.startswith("lost"))
        gather(nodes, 2)  # nobody needs a scheduler for that
        with real(shelf, port=port) as served:
            for node in nodes:
                node.states.wait(lambda s: s == "connected", count=2)
            gather(nodes, 3)
            assert fetch_status(served.endpoint)["term"] == 2
            assert not any(isinstance(e, fx.Ejected) for n in nodes for e in n.effects.seen)
    finally:
        context.__exit__(None, None, None)


def test_a_scheduler_restarted_on_a_chain_that_was_cut_finds_its_members_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "EVERY", 1)
    shelf = Shelf()

    def kinds() -> list[str]:
        with JobChain(MemoryStore(shelf=shelf)) as chain:
            return [entry.kind for entry in chain.entries()]

    with real(shelf, min_nodes=1, max_nodes=3) as served:
        port = served.server.port
        context = cluster(served, "a")
        nodes = context.__enter__()
        nodes[0].stands_in(1)
        seq = joined_by(nodes, served, "b")
        until(lambda: kinds() == [SUMMARY], "that the chain is cut")
    try:
        for node in nodes:
            node.states.wait(lambda s: s.startswith("lost"))
        with real(shelf, port, min_nodes=1, max_nodes=3) as served:
            for node in nodes:
                node.states.wait(lambda s: s == "connected", count=2)
            gather(nodes, seq + 1)
            nodes[0].contribute()
            nodes[1].die()
            assert nodes[0].committed(seq + 2).contributors == (nodes[0].id,)
            assert fetch_status(served.endpoint)["machine"]["phase"] == "running"
            until(lambda: kinds() == [SUMMARY], "that it is cut again")
            assert not any(isinstance(e, fx.Ejected) for e in nodes[0].effects.seen)
    finally:
        context.__exit__(None, None, None)


@pytest.mark.slow
def test_many_members_begin_with_a_quick_plan_and_get_the_configured_planners_from_another_process() -> None:
    names = [f"m{i}" for i in range(SMALL_JOB + 1)]
    settings = {"min_nodes": len(names), "max_nodes": len(names), "plan": PlanSpec("widest"), "link_degree": 0}
    with real(**settings) as served, cluster(served, *names) as nodes:
        for node in nodes:
            node.stands_in(len(names))
        assert {view.plan for node in nodes if (view := node.machine.view) is not None} == {PlanSpec()}
        gather(nodes, 1)
        until(lambda: all(is_told_of_a_tree(node) for node in nodes), "a plan from another process")
        for node in nodes:
            node.contribute(Kind.BOUNDARY)
        assert {len(node.committed(2).view.plan.trees) for node in nodes} == {1}, "a header brought it"
        gather(nodes, 3)


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_a_killed_process_is_known_dead_without_waiting_for_heartbeats(number: signal.Signals) -> None:
    """A member's death by a signal is noticed by its closed socket, long before the heartbeat timeout."""
    code = (
        "import sys, threading; sys.path[:0] = sys.argv[1], sys.argv[1] + '/..'\n"
        "from test_with_real_machines import *\n"
        "node = Node(Fabric(), sys.argv[2], 'x'); node.states.wait(lambda s: s == 'connected')\n"
        "print('up', flush=True); threading.Event().wait()"
    )
    with real(min_nodes=1, heartbeat_timeout_s=1000.0) as served:
        with subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent), served.endpoint],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            assert len(fetch_status(served.endpoint)["streams"]) == 1
            child.send_signal(number)
            child.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while fetch_status(served.endpoint)["streams"]:
            assert time.monotonic() < deadline
