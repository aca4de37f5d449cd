"""Measures the costs of the protocol for members at each step: real `MemberMachine`s of one view, with encoded
messages.

Theory of operation. All members stand in one view; in each step each brings its contribution and has its reduced bytes,
and messages go to whom the machines send them, encoded once where one message goes to several, and decoded at the other
end. Processor time is counted by member: the machine's and the codec's. What the links and relays in between do with
the bytes is no part of it (benchmarks/links_secure has that).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import replace

from benchmarks.common import Result, median
from benchmarks.scale.standins import contribution
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.slots import close_slot
from chaos_lightning.protocol.codec import decode_peer, encode_peer
from chaos_lightning.protocol.types import GENESIS, Decide, Header, Kind, Spent, View, Welcome

STEPS = 3
ROOT_MS, OTHERS_MS, HEADER_KB = 25.0, 5.0, 3.0
POSITIONS = 100_000
"""Number of samples that each node has used of its own, with data="local"."""


def largest_headers(view: View) -> dict[str, bytes]:
    """Returns the headers that grow with the number of members, encoded, by the cause of their growth."""
    brought = [contribution(m, view, GENESIS, Kind.STEP) for m in view.ids()]
    differ = [replace(c, weight=float(rank), coefficient=float(rank)) for rank, c in enumerate(brought, 1)]
    spent = [(Spent(member.name, 0, ((0, POSITIONS),)),) for member in view.members]
    local = [replace(c, spent=s) for c, s in zip(brought, spent, strict=True)]
    return {
        words: encode_peer(close_slot(view=view, prev=GENESIS, contributions={c.member: c for c in found}))
        for words, found in (("where all weights differ", differ), ("data='local'", local))
    }


def read(data: bytes) -> str:
    """Decodes a header as each member does; returns its hash."""
    header = decode_peer(data)
    assert isinstance(header, Header)
    return header.hash


class Members:
    """The state machines of all members of a view, at the founding of the job.

    Args:
        view: View whose first member has the state.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.machines = {m.id: MemberMachine() for m in view.members}
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.header_nbytes: list[int] = []
        self._queue: deque[tuple[str, str, bytes]] = deque()
        """(to, from, message)."""
        decision = Decide(view, GENESIS)
        for member in view.members:
            self._feed(member.id, fx.ControlIn(Welcome(member, 1, "founder", "", 0.1, 0.3, chain=view.chain)))
            self._feed(member.id, fx.ControlIn(decision))
            if member.id in view.joiners:
                self._feed(member.id, fx.StateLoaded(GENESIS.hash))

    def step(self) -> None:
        """Runs one optimizer step of all members.

        Raises:
            RuntimeError: A member did not commit the step.
        """
        root = self.machines[self.view.root]
        prev = root.header
        for member in self.view.ids():
            brought = contribution(member, self.view, prev, Kind.STEP)
            self._feed(member, fx.Contribute(brought))
            self._feed(member, fx.RangesDone(self.view.id, prev.seq + 1))
        while self._queue:
            to, source, payload = self._queue.popleft()
            began = time.thread_time()
            message = decode_peer(payload)
            self.cpu_s[to] += time.thread_time() - began
            self._feed(to, fx.PeerIn(source, message))
        behind = [m for m, machine in self.machines.items() if machine.header.hash != root.header.hash]
        if behind or root.seq != prev.seq + 1:
            raise RuntimeError(f"slot {prev.seq + 1} is not committed at {', '.join(behind) or 'any member'}")
        self.header_nbytes.append(len(encode_peer(root.header)))

    def _feed(self, member: str, event: fx.MemberEvent) -> None:
        began = time.thread_time()
        said: tuple[object, bytes] = (None, b"")
        for effect in self.machines[member].on(0.0, event):
            if isinstance(effect, fx.ToPeer):
                if said[0] is not effect.message:
                    said = effect.message, encode_peer(effect.message)
                self._queue.append((effect.peer, member, said[1]))
        self.cpu_s[member] += time.thread_time() - began


def measure(result: Result, view: View, title: str, *, bounded: bool) -> None:
    """Adds the costs of steps in this view."""
    members = Members(view)
    roots: list[float] = []
    others: list[float] = []
    means: list[float] = []
    for _ in range(STEPS):
        members.cpu_s.clear()
        members.step()
        rest = [s for m, s in members.cpu_s.items() if m != view.root]
        roots.append(members.cpu_s[view.root])
        others.append(max(rest))
        means.append(sum(rest) / len(rest))
    result.add(f"control per step, root, {title}", 1e3 * median(roots), "ms of CPU", ROOT_MS if bounded else None)
    result.add(
        f"control per step, dearest other, {title}", 1e3 * median(others), "ms of CPU", OTHERS_MS if bounded else None
    )
    result.add(f"control per step, others' mean, {title}", 1e3 * median(means), "ms of CPU")
    largest = max(members.header_nbytes) / 1e3
    result.add(f"header, where weights are equal, {title}", largest, "kB", HEADER_KB if bounded else None)
    for words, data in largest_headers(view).items():
        result.add(f"header, {words}, {title}", len(data) / 1e3, "kB")
        began = time.thread_time()
        read(data)
        result.add(f"reading a header, {words}, {title}", 1e3 * (time.thread_time() - began), "ms of CPU")
