"""What the edge demo proves, from its event logs: links changed, trees followed, and nothing was lost.

Theory of operation. The lab wrote down what it did to which link, each member over which links and trees each of its
views goes, and what it committed. The checks here put the two beside each other: after a link failed there must be a
view of the same members without it, when it is back one with it, and when its rate fell one whose trees avoid it. What
holds for every run (steps, samples, hashes, the audit) is asked of the demo's general proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from chaos_lightning.events.events import Event, Record, read_events
from chaos_lightning.lab.demo.proof import Check, Expected, _Proof, audited
from chaos_lightning.lab.edge.topology import Topology, rate_text
from chaos_lightning.observe.fields import number
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.observe.units import duration

Edge = frozenset[str]


@dataclass(frozen=True, slots=True)
class Ruled:
    """A view, as the first member that entered it told.

    Attributes:
        t: When, wall time, s.
        members: Their ids.
        links: Pairs of node names.
        trees: What gradients travel over, as (weight, edges); empty for plans without trees of their own.
        reason: Why it was decided.
    """

    t: float
    members: tuple[str, ...]
    links: frozenset[Edge]
    trees: frozenset[tuple[float, frozenset[Edge]]]
    reason: str

    def share(self, edge: Edge) -> float:
        """What part of the gradients passes this link."""
        whole = sum(weight for weight, _ in self.trees)
        return sum(weight for weight, edges in self.trees if edge in edges) / whole if whole else 0.0


def node(member: str) -> str:
    """The node of a member id; the demo has one member a node."""
    return member.partition("~")[0].removesuffix("-0")


def views(records: Sequence[Record]) -> list[Ruled]:
    """All views with links, in the order in which they were entered."""
    found: dict[str, Ruled] = {}
    for r in sorted(records, key=lambda r: r.t):
        links = r.get("links")
        if r.name != Event.VIEW or links is None:
            continue
        members = tuple(r.get("members") or ())
        pairs = links or list(combinations(members, 2))
        trees = frozenset(
            (float(weight), frozenset(_edge(m, p) for m, p in zip(ids, parents, strict=True) if p))
            for weight, ids, parents in r.get("trees") or ()
        )
        found.setdefault(
            str(r.get("id")), Ruled(r.t, members, frozenset(_edge(a, b) for a, b in pairs), trees, str(r.get("reason")))
        )
    return list(found.values())


def _edge(a: str, b: str) -> Edge:
    return frozenset((node(a), node(b)))


def prove(folder: Path, topology: Topology, exit_codes: Mapping[str, int | None]) -> list[Check]:
    """Everything that must be true of the edge demo in this folder."""
    records = list(read_events(folder / "events"))
    one = _EdgeProof(topology, records, views(records))
    *founders, last = topology.names
    # The general proof tells stories of joins and deaths, too; here nobody joins late and nobody dies.
    expected = Expected(
        founders=tuple(founders), joins=last, killed="", frozen="", leaves="", exit_codes=dict(exit_codes)
    )
    deaths = any(r.name in (Event.DEATH, Event.FENCED) for r in records)
    general = _Proof(folder, Timeline.of(records), records, expected)
    return [
        one.founded(),
        one.measured(),
        *one.failures(),
        *one.slower(),
        one.trees(),
        one.stayed(),
        one.finished(general.timeline, exit_codes),
        general.steps(),
        general.samples(),
        general.chain(),
        general.hashes(),
        general.weights(),
        general.learned(),
        # Nobody is to die here, so the audit's last point has nothing to show, unless somebody did.
        *(c for c in audited(folder / "events") if c.ok or deaths or not c.what.startswith("audit 5")),
    ]


@dataclass(slots=True)
class _EdgeProof:
    topology: Topology
    records: Sequence[Record]
    views: Sequence[Ruled]

    def founded(self) -> Check:
        names = set(self.topology.names)
        wanted = frozenset(frozenset((x.a, x.b)) for x in self.topology.links)
        what = f"{len(names)} nodes train over the {len(wanted)} links of the topology, and no other"
        first = next((v for v in self.views if {node(m) for m in v.members} == names), None)
        if first is None:
            return Check(what, "no view has all of them", False)
        strange = {edge for v in self.views for edge in v.links if len(v.members) > 1} - wanted
        text = f"first together over {len(first.links)} links, {len(first.trees)} tree(s)"
        if strange:
            text += f"; views with links that are not there: {_names(strange)}"
        return Check(what, text, not strange and any(v.links == wanted for v in self.views))

    def measured(self) -> Check:
        """Measurements between two changes of a link, over the rate that it then had."""
        found: list[float] = []
        links: set[Edge] = set()
        for r in self.records:
            if r.name == "link_measured" and "probe" in str(r.get("evidence")):
                edge = _edge(r.node, str(r.get("peer")))
                rate = self._rate(edge, r.t)
                if rate:
                    found.append(number(r.get("rate_bps")) / rate)
                    links.add(edge)
        found.sort()
        what = "members measure what their links carry"
        if not found:
            return Check(what, "no measurement", False)
        text = f"{len(found)} measurements of {len(links)} links; over the emulated rate: median "
        text += f"{found[len(found) // 2]:.2f}, {found[0]:.2f} to {found[-1]:.2f}"
        return Check(what, text, len(links) == len(self.topology.links))

    def failures(self) -> list[Check]:
        """Each cut or stall, and its end."""
        checks = []
        for fault in self._faults("cut", "stall"):
            edge = frozenset((fault.node, str(fault.get("peer"))))
            name = _names([edge])
            word = "is cut" if fault.get("kind") == "cut" else "falls silent"
            without = self._next(fault.t, edge, lambda v, e: e not in v.links)
            back = next((f for f in self._faults("restore") if f.t > fault.t and _edge_of(f) == edge), None)
            what = f"{name} {word}: the same members go on without it"
            if without is None:
                checks.append(Check(what, "no view without it", False))
                continue
            until = back.t if back is not None else float("inf")
            steps = self._steps(without.t, until)
            text = f"new trees {duration(without.t - fault.t)} later; {steps} steps until it was back"
            checks.append(Check(what, text, steps > 0 and len(without.members) == len(self.topology.names)))
            if back is not None:
                again = self._next(back.t, edge, lambda v, e: e in v.links)
                text = "no view with it" if again is None else f"in a view again {duration(again.t - back.t)} later"
                checks.append(Check(f"{name} is back: it is used again", text, again is not None))
        return checks

    def slower(self) -> list[Check]:
        """Each rate that fell: the trees leave the link."""
        checks = []
        for fault in self._faults("rate"):
            edge = frozenset((fault.node, str(fault.get("peer"))))
            before = self._rate(edge, fault.t - 1e-6)
            now = number(fault.get("rate_bps"))
            if now >= before:
                continue
            ruled = [v for v in self.views if v.t <= fault.t]
            used = ruled[-1].share(edge) if ruled else 0.0

            def avoids(view: Ruled, link: Edge, most: float = used / 2) -> bool:
                return bool(view.trees) and view.share(link) < most

            after = self._next(fault.t, edge, avoids)
            what = f"{_names([edge])} falls from {rate_text(before)} to {rate_text(now)}: the trees avoid it"
            if not used:
                checks.append(Check(what, "the trees did not use it anyway", False))
            elif after is None:
                checks.append(Check(what, "they went on using it", False))
            else:
                text = f"{used:.0%} of the gradients passed it, {after.share(edge):.0%} from "
                text += f"{duration(after.t - fault.t)} on"
                checks.append(Check(what, f"{text}: {_short(after.reason)}", True))
        return checks

    def trees(self) -> Check:
        sets = [v.trees for v in self.views if v.trees]
        changes = sum(a != b for a, b in pairwise(sets))
        faults = len(self._faults("cut", "stall", "restore", "rate"))
        text = f"{len(set(sets))} different sets of trees in {len(self.views)} views; {faults} changes of links"
        return Check("trees change when links do", text, changes >= 3)

    def stayed(self) -> Check:
        names = (Event.DEATH, Event.FENCED, Event.REJOIN)
        bad = [r for r in self.records if r.name in names]
        members = {m for v in self.views for m in v.members}
        text = f"{len(members)} member ids from the first view to the last" if not bad else f"{bad[0]}"
        return Check("no link's failure puts a member out", text, not bad and len(members) == len(self.topology.names))

    def finished(self, timeline: Timeline, exit_codes: Mapping[str, int | None]) -> Check:
        closing = [s for s in timeline.chain() if s.kind == "closing"]
        who = {node(m) for m in closing[-1].commits} if closing else set()
        codes = [exit_codes.get(name) for name in self.topology.names]
        text = f"closing slot committed by {', '.join(sorted(who)) or 'nobody'}; exit codes {codes}"
        return Check("the job finishes on all nodes", text, who == set(self.topology.names) and codes == [0] * len(who))

    # ------------------------------------------------------------------------------------------------ helpers

    def _faults(self, *kinds: str) -> list[Record]:
        return [r for r in self.records if r.name == Event.FAULT_INJECTED and r.get("kind") in kinds]

    def _rate(self, edge: Edge, t: float) -> float:
        """What this link carried then, bits per second; 0 if it did not, or does not exist."""
        link = next((x for x in self.topology.links if {x.a, x.b} == edge), None)
        rate, whole = (link.rate_bps, True) if link is not None else (0.0, False)
        for r in sorted(self._faults("cut", "stall", "restore", "rate"), key=lambda r: r.t):
            if r.t <= t and _edge_of(r) == edge:
                rate = number(r.get("rate_bps"))
                whole = r.get("kind") in ("restore", "rate")
        return rate if whole else 0.0

    def _next(self, t: float, edge: Edge, good: Callable[[Ruled, Edge], bool]) -> Ruled | None:
        return next((v for v in self.views if v.t > t and good(v, edge)), None)

    def _steps(self, start: float, stop: float) -> int:
        steps = {r.get("header") for r in self.records if r.name == Event.COMMITTED and start < r.t < stop}
        return len(steps)


def _edge_of(fault: Record) -> Edge:
    return frozenset((fault.node, str(fault.get("peer"))))


def _names(edges: Sequence[Edge] | set[Edge]) -> str:
    return ", ".join(sorted(" - ".join(sorted(edge)) for edge in edges))


def _short(reason: str, most: int = 160) -> str:
    text = reason.rpartition("plan: ")[2] or reason
    return text if len(text) <= most else text[: most - 3] + "..."
