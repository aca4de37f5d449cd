"""Makes links fail in a simulated job, and checks the rules about links.

Theory of operation. Links are named by their nodes. "cut" takes the network between two nodes away for a while,
"split" that between a group of nodes and all others; "mute" has their link swallow what is sent in both directions, or
("mute-one") from the first to the other, until its ends give it up; "flap" breaks it again and again; "remove-link" and
"add-link" are the operator's, "ask-remove" and "ask-add" a member's; "rate" changes what a link carries, and both ends
measure it. Three things must hold beside what the oracle checks: no decided view uses a link that has been cut for
longer than anybody takes to notice, none one whose removal an operator was granted, whatever became of the scheduler
since (14a), and every view's links connect its members. Members that are cut off from each other may be put out; how
long that excuses them is told by their `troubled_at`.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos_lightning.membership.effects import ChangeLink
from chaos_lightning.membership.topology import Pair, components, connected, links_of, pair
from chaos_lightning.planning.graph import parting_nodes
from chaos_lightning.planning.trees import misfit
from chaos_lightning.protocol.types import LinkRequest, View
from lab.simulate.fabric import Endpoint
from lab.simulate.job import Job
from lab.simulate.oracle import Violation
from lab.simulate.plan import Fault

LINK_FAULTS = (
    "cut", "split", "mute", "mute-one", "flap", "add-link", "remove-link", "ask-add", "ask-remove", "rate"
)  # fmt: skip
NOTICED_S = 2.8
"""Seconds after which both ends of a link that was cut have told the scheduler, whatever was wrong with their
streams.
"""
FLAP_S = 0.06
"""Seconds (virtual) between two breaks of a link that flaps."""
_LOOK_S = 0.02


class Edges:
    """Links of one simulated job: their faults, operators' requests for or against them, and the rules that views must
    follow.

    Args:
        world: The job.
    """

    def __init__(self, world: Job) -> None:
        self._world = world
        self._changes = 0
        self._asked: dict[int, tuple[Pair, bool]] = {}
        """Requests of the operator by number: (names, whether to add the link)."""
        self._last: dict[Pair, int] = {}
        """Number of the operator's last request about each pair; -1 once a member had a wish about it, too."""
        self._removed: set[Pair] = set()
        """Pairs that the operator may rely on to be without a link."""
        plan = world.plan
        named = any(spec.neighbours for spec in plan.nodes)
        if named or plan.unlinked or any(f.action in LINK_FAULTS for f in plan.faults):
            world.kernel.after(_LOOK_S, self._look)

    # ------------------------------------------------------------------ faults

    def strike(self, fault: Fault) -> None:
        world, one, other = self._world, fault.node, fault.other
        match fault.action:
            case "cut":
                world.fabric.cut(one, other, fault.lasts)
            case "split":
                group = set(one.split(","))
                for here in sorted(group):
                    for there in sorted(set(world.nodes) - group):
                        world.fabric.cut(here, there, fault.lasts)
                        world.struck(1, 1)
            case "mute" | "mute-one":
                world.fabric.mute(one, other, fault.lasts, both=fault.action == "mute")
            case "flap":
                world.struck(0, int(fault.lasts / FLAP_S))
                self._flap(one, other, world.kernel.now + fault.lasts)
            case "add-link" | "remove-link":
                self._changes += 1
                names, add = pair(one, other), fault.action == "add-link"
                self._asked[self._changes] = names, add
                self._last[names] = self._changes if self._last.get(names, 0) >= 0 else -1
                self._removed -= {names} if add else set()
                event = ChangeLink(self._changes, one, other, add)
                world.scheduler.deliver(lambda: world.scheduler.feed(event))
            case "ask-add" | "ask-remove":
                self._last[pair(one, other)] = -1
                self._removed.discard(pair(one, other))
                node = world.nodes[one]
                node.deliver(lambda: node.tell(LinkRequest(other, fault.action == "ask-add", "a whim")))
            case "rate":
                world.rates[pair(one, other)] = fault.rate_bps
                for here, there in ((one, other), (other, one)):
                    node, peer = world.nodes[here], world.nodes[there].machine.member_id
                    node.deliver(lambda n=node, p=peer: n.measure(p, "transfer"))  # type: ignore[misc]
        self.look()

    def _flap(self, one: str, other: str, until: float) -> None:
        world = self._world
        here, there = world.nodes[one].machine.member_id, world.nodes[other].machine.member_id
        world.fabric.snap(here, there)
        if world.kernel.now < until:
            world.kernel.after(FLAP_S, lambda: self._flap(one, other, until))

    def answered(self, token: int, granted: bool) -> None:
        """Handles the scheduler's answer to the operator's request with this number."""
        names, add = self._asked[token]
        if granted and not add and self._last[names] == token:
            self._removed.add(names)

    # ------------------------------------------------------------------ what must hold

    def check(self, chain: Sequence[View]) -> None:
        """Checks the links of the view that was just decided, which is the last one of the chain."""
        view = chain[-1]
        pairs = links_of(view)
        if not view.members:
            return  # all part (P13)
        if not connected(view.ids(), pairs):
            raise Violation(f"view {view.id} is in parts: {components(view.ids(), pairs)}")
        if wrong := misfit(view.plan, view.ids(), [(link.a, link.b) for link in view.links]):
            raise Violation(f"view {view.id} has a plan that does not fit it: {wrong}")
        self._check_spares()
        # A better plan for the same members over the same links decides nothing about links.
        replanned = len(chain) > 1 and chain[-2].ids() == view.ids() and links_of(chain[-2]) == pairs
        for one, other in sorted(map(sorted, pairs)):
            here, there = self._name(view, one), self._name(view, other)
            cut_s = self._world.fabric.cut_s(here, there)
            if pair(here, there) in self._removed and not replanned:
                raise Violation(f"view {view.id} uses the link of {one} and {other}, whose removal was granted (14a)")
            if cut_s > NOTICED_S:
                raise Violation(f"view {view.id} uses the link of {one} and {other}, which was cut {cut_s:.1f} s ago")

    def _check_spares(self) -> None:
        """Checks that the links which the scheduler assigns still connect the others if any one node is lost."""
        partners = self._world.scheduler.machine.topology.partners
        if not partners.sparse or partners.removed or any(n.spec.neighbours for n in self._world.nodes.values()):
            return
        alone = parting_nodes({m: m for m in partners}, ((a, b) for a in partners for b in partners.of(a)))
        if alone:
            raise Violation(f"without {', '.join(alone)} no link that is wanted leads between others")

    @staticmethod
    def _name(view: View, member: str) -> str:
        found = view.find(member)
        assert found is not None
        return found.name

    def _look(self) -> None:
        self.look()
        self._world.kernel.after(_LOOK_S, self._look)

    def look(self) -> None:
        """Notes which members may be put out for lack of links: those whose links leave them in separate groups, and
        joiners that reach no member.
        """
        world = self._world
        views = world.store.views
        members = {m.id: m.name for view in views[-2:] for m in view.members}
        living = [world.nodes[name] for m, name in members.items() if self._lives(name, m)]
        here = [n for n in living if n.training]
        names = [n.name for n in here]
        pairs = frozenset(pair(a.name, b.name) for a in here for b in here if a is not b and self.may_link(a, b))
        apart = here if not connected(names, pairs) else []
        loading = [n for n in living if here and not n.training and not any(self.may_link(n, a) for a in here)]
        for node in (*apart, *loading):
            node.troubled_at = world.kernel.now

    def _lives(self, name: str, member_id: str) -> bool:
        node = self._world.nodes.get(name)
        if node is None or not node.alive or node.frozen or node.machine.member_id != member_id:
            return False
        return not node.outcome

    def may_link(self, one: Endpoint, other: Endpoint) -> bool:
        """Returns whether these two nodes may have a link: the network is open, and no request or list of neighbours
        forbids it.
        """
        world = self._world
        if not world.fabric.open(one.name, other.name):
            return False
        partners, names = world.scheduler.machine.topology.partners, pair(one.name, other.name)
        if names in partners.removed:
            return False
        mine, theirs = one.spec.neighbours, other.spec.neighbours
        given = not partners.sparse or other.machine.member_id in partners.of(one.machine.member_id)
        return names in partners.added or other.name in mine or one.name in theirs or (not (mine or theirs) and given)
