"""Simulates one rank of an elastic cluster: carries out the effects of the real `RanksMachine`.

Theory of operation. This is to the simulators what outer/cluster/elastic.py is to a process. What a rank says in a
commit, and what it does when one is known, is here; who commits what when, and the way to the leader, are its *home's*:
the ranks of a simulated outer job (lab/outer/ranks.py), or the members of a simulated inner one
(lab/simulate/outer_ranks.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.messages import Beat, ClusterHello
from chaos_lightning.outer.rules.ranks_machine import RankNews, RankSays, RanksEffect, RanksFacts, RanksMachine, Sealed
from chaos_lightning.outer.rules.types import NO_VERSION, PushAnswer, PushId, VersionId
from chaos_lightning.protocol.plain import read_text, text_of
from chaos_lightning.protocol.types import Span
from lab.outer.content import Content, Pushed
from lab.outer.oracle import Violation
from lab.outer.processes import Machines


@dataclass(slots=True)
class Held:
    """State that a newcomer gets from another rank."""

    state: RanksFacts
    content: Content


class RankHome(Protocol):
    """Process of a rank, as far as its `RankPart` uses it."""

    def dies(self) -> bool:
        """Returns whether the process is killed before the next effect."""
        ...

    def attend(self) -> None:
        """Lets the rank talk to the leader from now on."""
        ...

    def tell_leader(self, message: object) -> None:
        """Sends a message to the leader, if there is a stream."""
        ...

    def to_encode(self) -> None:
        """Calls `RankPart.encode` after a while, because a push was frozen."""
        ...

    def sealed(self, push: PushId, pushed: Pushed) -> None:
        """Notes that all ranks know the content of a push."""
        ...

    def adopts(self, version: VersionId, *, outright: bool) -> None:
        """Sets the parameters to a version; keeps the training since then on top unless the adoption is outright."""
        ...

    def again(self) -> None:
        """Begins a new incarnation after the previous one has ended."""
        ...


class RankPart:
    """Outer state of one simulated rank, with the machine that decides about it.

    Args:
        home: Process of this rank.
        state: State that all ranks hold alike.
        content: Outer state of this rank.
        machines: Machines, with what is broken on purpose.

    Attributes:
        attends: Whether this rank talks to the leader.
        fetched: Version that this rank has fetched.
        news: Events for all ranks' machines, which the rank that talks to the leader sends with the next commit.
        gone: Inner steps that the last commit threw away.
        given_up: Inner steps of pushes that ended with their incarnation.
    """

    def __init__(self, home: RankHome, state: RanksMachine, content: Content, machines: Machines) -> None:
        self.home, self.state, self.content, self._machines = home, state, content, machines
        self.hello: ClusterHello = state.machine.hello()
        self.attends = False
        self.fetched = NO_VERSION
        self.encoded: tuple[PushId, str] | None = None
        self.news: deque[RankNews] = deque()
        self.gone: list[int] = []
        self.given_up: list[int] = []
        self.beat: Beat | None = None
        self._sent = 0

    # ------------------------------------------------------------------ commits

    def says(self, samples: int, rates: tuple[float, float], over: str, *, leaves: bool = False) -> bytes:
        """Returns this rank's contribution to the next commit."""
        events = tuple(self.news) if self.attends else ()
        self._sent = len(events)
        return text_of(RankSays, RankSays(self.fetched, self.encoded, samples, rates, over, leaves, "", events))

    def commit(
        self, me: str, ranks: Sequence[str], answers: Sequence[bytes], step: int = 0, spent: Sequence[Span] = ()
    ) -> None:
        """Takes in a commit once this rank has learned of it.

        Args:
            me: Name of this rank.
            ranks: Ranks that contributed.
            answers: Message of each of these ranks; empty where no rank said anything.
            step: Number of the commit's inner step; 0: it has none.
            spent: Positions on the cluster's tape of leased samples that the step uses.
        """
        self.gone, self.given_up = [], []
        self.hello = self.state.machine.hello()
        self.tell_known()
        if not answers:
            return
        if ranks[0] == me and self.attends:
            for _ in range(self._sent):
                self.news.popleft()
        self._sent = 0
        if ranks[0] == me and not self.attends:
            self.attend()
        if step:
            self.content.live.append(step)
        said = [read_text(RankSays, answer) if answer else RankSays() for answer in answers]
        if not self._machines.together:
            said = [replace(each, holds=said[ranks.index(me)].holds) for each in said]
        for effect in self.state.commit(ranks, said, int(step > 0), spent):
            if self.home.dies():
                return
            self._carry_out(effect)

    def attend(self) -> None:
        """Makes this rank the first one, which talks to the leader."""
        self.attends = True
        self.news.clear()
        self.home.attend()

    def tell_known(self) -> None:
        """Sends the leader the messages that resulted from the previous commit, which all ranks know by now."""
        for message in self.state.known():
            self._tell(message)

    def _tell(self, message: object) -> None:
        self.beat = message if isinstance(message, Beat) else self.beat
        if not isinstance(message, ClusterHello):
            self.home.tell_leader(message)

    def _carry_out(self, effect: RanksEffect) -> None:
        match effect:
            case cl.Freeze(push, _):
                self.content.freeze(push)
                self.home.to_encode()
                if self._machines.early:
                    self._offer_early(push)
            case Sealed(push, manifest):
                self._seal(push, manifest)
            case cl.Settle(push, answer):
                self.gone += self.content.settle(push, PushAnswer(answer))
            case cl.Adopt(version, outright):
                self.home.adopts(version, outright=outright)
                self.gone += self.content.adopt(version, outright=outright)
                self.fetched = NO_VERSION
            case cl.TakeLast(version):
                self.home.adopts(version, outright=True)
            case cl.Free(push):
                self.content.pushes.pop(push, None)
            case cl.FetchVersion():
                self.fetched = NO_VERSION
            case cl.Over(_, again) if again:
                self._over()

    def encode(self) -> None:
        """Encodes the push that is being frozen."""
        push = self.state.machine.freezing
        if push is not None:
            self.encoded = (push, self.content.encoded().manifest)

    def _seal(self, push: PushId, manifest: str) -> None:
        pushed, self.encoded = self.content.encoded(), None
        if pushed.manifest != manifest:
            raise Violation(f"{push} is {pushed.manifest} at a rank, and {manifest} at the first one (O8)")
        self.content.pushes[push] = pushed
        self.home.sealed(push, pushed)

    def _offer_early(self, push: PushId) -> None:
        """Planted bug: offers a push at once, before a further commit has shown that all ranks know its content."""
        self._seal(push, self.content.encoded().manifest)
        for effect in self.state.machine.on(cl.Frozen(push, self.content.pushes[push].manifest)):
            if isinstance(effect, fx.Say):
                self._tell(effect.message)

    def _over(self) -> None:
        machine = self.state.machine
        self.gone += self.content.forget()
        for push in [push for push in self.content.pushes if push not in machine.kept]:
            self.given_up += self.content.pushes.pop(push).steps
        self.fetched, self.encoded = NO_VERSION, None
        self.hello = machine.anew().hello()
        if self.attends:
            self.news.clear()
            self.home.again()

    # ------------------------------------------------------------------ newcomers

    def facts(self) -> bytes:
        """Returns the state that all ranks share, as bytes for a newcomer."""
        return text_of(Held, Held(self.state.facts(), self.content))

    def restore(self, facts: bytes) -> None:
        """Takes over the state of another rank, without the part that a planted bug leaves out."""
        held, lacks = read_text(Held, facts), self._machines.joiner_lacks
        self.state.restore(held.state)
        self.content = held.content
        if lacks == "base":
            self.content.base = NO_VERSION
        elif lacks == "frozen":
            self.content.last = None
        elif lacks == "pushes":
            self.content.pushes = {}
        elif lacks == "residual":
            self.content.residual = []
        self.hello = self.state.machine.hello()
        self.home.to_encode()
