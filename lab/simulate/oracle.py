"""Checks, with knowledge of all processes, the rules that must hold while a simulated job runs and when it ends.

Theory of operation. The oracle sees everything: every contribution made, every header committed by anyone with the
state it led to, every slot that somebody treated as stable, every ejection and every join. Headers form a tree (a
slot that a dead member committed may be committed differently by the survivors); the externalised ones must form a
path of it. Each check names the rule of protocol.md or the contract of docs/architecture.md that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from chaos_lightning.planning.ledger import remaining
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Span, View, ViewId
from lab.simulate.dataplane import Result
from lab.simulate.training import Program, State


class Violation(Exception):
    """Error: the protocol broke a rule; the message says how, where and when."""


@dataclass(frozen=True, slots=True)
class Made:
    """Contribution to a STEP, as the contributing member computed it."""

    member: str
    seq: int
    base: str
    """Hash of the header on whose state it was computed."""
    state: State
    epoch: int
    spans: tuple[Span, ...]
    view: ViewId = NO_VIEW
    """View of the attempt in which alone it counts; `NO_VIEW`: in any."""
    gradients: tuple[int, ...] = ()
    """Gradients of the units that it sums, if these are told apart."""


@dataclass(slots=True)
class Oracle:
    """Checker of a simulated job that sees the state of all processes."""

    program: Program
    views: Callable[[], Sequence[View]] = tuple
    """Function that returns the stored chain as it is."""
    ever: Mapping[ViewId, View] = field(default_factory=dict)
    """Views that were ever stored, by number."""
    made: dict[int, Made] = field(default_factory=dict)
    votes: dict[tuple[str, int], set[bytes]] = field(default_factory=dict)
    headers: dict[tuple[str, str], Header] = field(default_factory=dict)
    contributors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Members that brought a header's shares, in rank order, by its hash."""
    states: dict[tuple[str, str], State] = field(default_factory=dict)
    lineage: str = ""
    """Number of the last founding view."""
    external: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """Header hash of each slot that left the job, and the member that said so first, by (lineage, slot)."""
    strayed: set[tuple[str, int]] = field(default_factory=set)
    """Pairs (member, slot): the member leaves and brought nothing."""
    parted: set[tuple[str, int]] = field(default_factory=set)
    """Pairs (member, slot): the member's hyperparameters are not the job's."""
    on_slot: Callable[[], None] = lambda: None
    """Function that is called when a slot is committed that no member had committed before."""
    furthest: dict[str, int] = field(default_factory=dict)
    """Last slot that any member committed, by lineage."""
    commits: int = 0
    hand_ons: int = 0
    joins: int = 0
    replays: int = 0
    """Number of joins of newcomers that had caught up by replay."""
    moved: int = 0
    """Number of ranges that such newcomers were sent all the same when they were let in."""
    ejections: int = 0

    # ------------------------------------------------------------------ while the job runs

    def view(self, number: ViewId) -> View:
        """Returns the view that was stored with this number."""
        if number not in self.ever:
            raise Violation(f"view {number} rules, and was never stored (7)")
        return self.ever[number]

    def gradients(self, result: Result) -> Collection[int]:
        """Returns what the sum of these contributions consists of: equal sums lead to equal states."""
        return result

    def contributed(self, uid: int, made: Made) -> None:
        self.made[uid] = made

    def voted(self, member: str, seq: int, payload: bytes) -> None:
        self.votes.setdefault((member, seq), set()).add(payload)

    def founded(self, lineage: str, state: State, holders: Sequence[str]) -> None:
        """Checks that a job is founded, or founded again, only if none of the `holders` still has the state of an
        earlier founding.
        """
        if holders and lineage != self.lineage:
            words = f"view {lineage} founds the job again although {holders[0]} holds its state"
            raise Violation(f"{words} (contract 5, protocol.md 12a)")
        self.lineage = lineage
        key = (lineage, GENESIS.hash)
        if self.states.setdefault(key, state) != state:
            raise Violation(f"two members founded view {lineage} with different states (protocol.md 14)")
        self.headers[key] = GENESIS

    def loaded(self, who: str, lineage: str, header: Header, state: State) -> None:
        """Checks a joiner's state that is reported to be complete (contract 4, protocol.md 15, 19)."""
        self.joins += 1
        expected = self.states.get((lineage, header.hash))
        if expected != state:
            raise Violation(
                f"{who} joined at slot {header.seq} ({header.hash}) with a state that no donor has: {state} instead of "
                f"{expected}"
            )

    def replayed(self, who: str, header: Header, moved: int, calm: bool) -> None:
        """Counts a learner that was let in; checks that if nothing went wrong, it had to pull no range (`moved`) again
        (16, 18).
        """
        self.replays += 1
        self.moved += moved
        if calm and moved:
            raise Violation(
                f"{who} had caught up and nothing went wrong, yet {moved} ranges moved when it was let in at slot "
                f"{header.seq}: all waited for what the log should have spared them (18)"
            )

    def committed(
        self,
        who: str,
        lineage: str,
        before: Header,
        header: Header,
        contributors: tuple[str, ...],
        state: State,
        results: Sequence[Result] | None,
    ) -> None:
        """Checks that member `who` committed `header` with the right state and results."""
        self.commits += 1
        if header.prev_hash != before.hash:
            raise Violation(f"{who} stands on {before.hash}, yet applied a header that is on {header.prev_hash} (4a)")
        key = (lineage, header.hash)
        known = self.states.get(key)
        if known is not None:
            if known != state:
                raise Violation(f"{who} applied slot {header.seq} ({header.hash}) and its state differs (contract 1)")
            return
        self.states[key] = state
        self.headers[key] = header
        self.contributors[header.hash] = contributors
        if header.seq > self.furthest.get(lineage, 0):
            self.furthest[lineage] = header.seq
            self.on_slot()
        if header.error:
            return
        if header.contributors != len(contributors):
            raise Violation(f"slot {header.seq} has shares of {header.contributors}, its view is {contributors} (1)")
        if header.kind is Kind.STEP:
            self._check_sum(who, lineage, before, header, results or ())
        if header.kind is Kind.GATHER:
            self._check_votes(header)

    def _check_sum(self, who: str, lineage: str, before: Header, header: Header, results: Sequence[Result]) -> None:
        if len(results) != self.program.ranges or len(set(results)) != 1:
            raise Violation(f"{who}: slot {header.seq} has different contributors in its ranges: {results} (1, 2)")
        used: list[Span] = []
        epoch = self.program.epoch(before.ledger)
        for uid in results[0]:
            made = self.made.get(uid)
            if made is None or made.seq != header.seq or made.base != header.prev_hash:
                raise Violation(f"{who}: slot {header.seq} sums a contribution that was made for another: {made} (1)")
            if made.view not in (NO_VIEW, header.view):
                raise Violation(
                    f"{who}: slot {header.seq} of view {header.view} sums what was made in {made.view} (B3)"
                )
            if made.state != self.states[(lineage, before.hash)]:
                raise Violation(f"{who}: slot {header.seq} sums a gradient of {made.member} on another state (4a)")
            used += made.spans
        contributors = self.contributors[header.hash]
        weights = {m for m, weight in zip(contributors, header.weights(), strict=True) if weight}
        summed = {self.made[uid].member for uid in results[0]}
        if weights != summed:
            raise Violation(f"slot {header.seq}: header names {sorted(weights)}, the sum has {sorted(summed)} (1, 2)")
        parted = {m for m in summed if (m, header.seq) in self.parted}
        if parted and parted != summed:
            raise Violation(f"slot {header.seq} sums {sorted(parted)}, who differ from the others in it (6b)")
        self._check_progress(lineage, before, header)
        before_left = set(positions_in(remaining(before.ledger, "", epoch, self.program.length)))
        after_left = set(positions_in(remaining(header.ledger, "", epoch, self.program.length)))
        positions = positions_in(used)
        if len(positions) != len(set(positions)) or before_left - after_left != set(positions):
            raise Violation(
                f"slot {header.seq}: its ledger spends {sorted(before_left - after_left)}, its members used "
                f"{sorted(positions)} (contract 3, protocol.md 25)"
            )

    def _check_progress(self, lineage: str, before: Header, header: Header) -> None:
        """Checks that no step is empty while samples are left for every member of the view that assigns them
        (protocol.md 10).
        """
        named = str(before.next_view) if before.seq else lineage
        view = next((v for v in self.views() if str(v.id) == named), None)
        if view is None or header.total_weight:
            return
        left = len(positions_in(self.program.unspent(before.ledger, self.program.epoch(before.ledger))))
        there = [m for m in self.contributors[header.hash] if (m, header.seq) not in self.strayed]
        assigned = [m for m in there if view.find(m) is not None]
        if assigned and left >= sum(m.quota for m in view.members):
            raise Violation(
                f"slot {header.seq} is empty: {left} samples are left and view {named} assigns to {assigned} (10)"
            )

    def _check_votes(self, header: Header) -> None:
        if len(header.answers) != header.contributors:
            counts = f"{len(header.answers)} answers of {header.contributors} voters"
            raise Violation(f"slot {header.seq}: {counts} (28)")
        for member, answer in zip(self.contributors[header.hash], header.answers, strict=True):
            if (member, header.seq) in self.strayed and not answer:
                continue
            if answer not in self.votes.get((member, header.seq), set()):
                raise Violation(f"slot {header.seq}: {member} never voted {answer!r} (28)")

    def externalised(self, who: str, lineage: str, header: Header) -> None:
        """Checks a slot that `who` makes visible outside the job, as in a checkpoint: all members must show the same
        (contract 2, protocol.md 4).
        """
        key = (lineage, header.seq)
        first, witness = self.external.setdefault(key, (header.hash, who))
        if first != header.hash:
            raise Violation(
                f"slot {header.seq} left the job twice: {first} from {witness}, {header.hash} from {who} (contract 2)"
            )

    def lost(self) -> bool:
        """Returns whether the job can never go on: no living member has the state that it needs, and the members were
        told so.
        """
        return False

    # ------------------------------------------------------------------ at the end

    def finished(self, lineage: str, last: Header) -> None:
        """Checks that the finished job's chain contains every externalised slot, and every sample exactly once
        (contract 3).
        """
        chain: dict[int, Header] = {}
        header = last
        while header.seq > 0:
            chain[header.seq] = header
            header = self.headers[(lineage, header.prev_hash)]
        for (of, seq), (found, witness) in self.external.items():
            if of == lineage and seq > 0 and (seq not in chain or chain[seq].hash != found):
                raise Violation(f"stable slot {seq} ({found}, from {witness}) is not in the finished chain (4)")
        if any(h.error for h in chain.values()):
            return
        used: dict[int, list[int]] = {}
        for seq in sorted(chain):
            if chain[seq].kind is Kind.STEP:
                before = self.headers[(lineage, chain[seq].prev_hash)].ledger
                for epoch in range(self.program.epochs):
                    if any(s.epoch == epoch for s in chain[seq].ledger.streams):
                        left = set(positions_in(self.program.unspent(before, epoch)))
                        now = set(positions_in(self.program.unspent(chain[seq].ledger, epoch)))
                        used.setdefault(epoch, []).extend(left - now)
        for epoch in range(self.program.epochs):
            if sorted(used.get(epoch, [])) != list(range(self.program.length)):
                raise Violation(f"epoch {epoch} used samples {sorted(used.get(epoch, []))} (contract 3)")


def check_chain(views: Sequence[View]) -> None:
    """Checks the order of numbers and views in the stored chain (protocol.md 7)."""
    for before, view in pairwise(views):
        if view.predecessor != before.id or not view.id > before.id or view.id.number <= before.id.number:
            raise Violation(f"view {view.id} with predecessor {view.predecessor} follows {before.id} (7)")
        named = [m.id for m in (*view.members, *view.leaving)]
        if not named or len(set(named)) != len(named):
            raise Violation(f"view {view.id} has members {view.ids()}, and lets go {named[len(view.members) :]}")
        if view.members and set(view.joiners) == set(view.ids()):
            raise Violation(f"view {view.id} has only joiners")
    seen: dict[str, bool] = {}
    for view in views:
        for member in view.ids():
            again = seen.get(member) is False and member not in view.joiners
            if again and not view.reason.startswith("founded"):  # who never held the state may found the job anew
                raise Violation(f"{member} was excluded and is a member of view {view.id} again (14b)")
        named = [*view.ids(), *(m.id for m in view.leaving)]
        seen = {**dict.fromkeys(seen, False), **dict.fromkeys(named, True)}


def positions_in(spans: Iterable[Span]) -> list[int]:
    """Returns the positions in these spans, one by one."""
    return [p for start, stop in spans for p in range(start, stop)]
