"""`chaos-lightning demo-edge`: six nodes train over links that change, fail and return; the event logs prove it.

Theory of operation. The network is a topology file beside this module; the nodes are processes of a lab
(edge/runner.py), their links go through its relay. The schedule begins when all nodes have joined. Nothing in here
reacts to it: the story is only told from the members' event logs. When the schedule is over and some steps have passed
in peace, the job is told that it is enough.

The lab wrote down what it did to which link, each member over which links and trees each of its views goes, and what it
committed. The proof puts the two beside each other: after a link failed there must be a view of the same members
without it, when it is back one with it, and when its rate fell one whose trees avoid it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated

import typer

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import duration
from chaos_lightning.observe.fields import number
from chaos_lightning.testing.demo import acts, proof
from chaos_lightning.testing.demo.nodes import NodeDied
from chaos_lightning.testing.demo.proof import Check, Evidence
from chaos_lightning.testing.demo.stage import NETWORK, Directory, Keep, Pace, Scenario, Stage, play
from chaos_lightning.testing.edge.plot import plot
from chaos_lightning.testing.edge.runner import Lab, LabConfig, prepare
from chaos_lightning.testing.edge.topology import Topology, next_change_s, rate_text
from chaos_lightning.testing.edge.topology_file import load_topology
from chaos_lightning.testing.processes import importable

TOPOLOGY = Path(__file__).with_name("edge_topology.json")
REST_S = 12.0
"""Seconds of training after the last change of a link."""
PACE = Pace(start_deadline_s=300.0, act_deadline_s=120.0)
ARGUMENTS = ("--layers=3", "--width=128", "--batch-size=2", "--text=60000", "--pause=0.02")

# ------------------------------------------------------------------ acts


class Machines:
    """The nodes of an emulated network (a `Lab`), with the interface that a demo's `Stage` expects.

    Attributes:
        ending: Whether commands may end now.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.ending = False

    @property
    def events(self) -> Path:
        return self.lab.events

    def poll(self) -> Iterable[str]:
        """Returns a line for each link that the emulation has changed since the last call."""
        said = [line for node, line in self.lab.poll() if not node and "started:" not in line]
        return [line.partition(" s  ")[2] for line in said]

    def check(self) -> None:
        """Checks that no node's command has failed, or has ended before the demo allowed it.

        Raises:
            NodeDied: A command has failed or ended too early; the message shows its last output.
        """
        for name, code in self.exit_codes().items():
            if code or (code == 0 and not self.ending):
                raise NodeDied(f"{name} ended with exit code {code}:\n{self.lab.children[name].tail(12)}")

    def exit_codes(self) -> dict[str, int | None]:
        return self.lab.exit_codes()


def all_join(stage: Stage[Machines]) -> None:
    lab = stage.nodes.lab
    stage.say("do", f"{len(lab.config.topology.names)} nodes start, each with links to its neighbours only")
    lab.start()
    stage.wait("all nodes to join", lambda: lab.edge.elapsed_s > 0, PACE.start_deadline_s)


def links_change(stage: Stage[Machines]) -> None:
    """Waits until the schedule of link changes is over, and `REST_S` seconds more."""
    lab = stage.nodes.lab
    last, coming = 0.0, next_change_s(lab.config.topology, 0.0)
    while coming is not None and coming < 3600.0:
        last, coming = coming, next_change_s(lab.config.topology, coming)
    over = last + REST_S
    stage.wait("the end of the schedule", lambda: lab.edge.elapsed_s > over, over + PACE.act_deadline_s)


def finish(stage: Stage[Machines]) -> None:
    nodes = stage.nodes
    stage.say("do", "enough: the job ends with this epoch")
    acts.enough(nodes.lab.config.folder)
    nodes.ending = True
    stage.wait("the end of the job", lambda: not nodes.lab.running)
    stage.look()


def told(record: Record) -> str:
    """Returns a line for the story about a member that joined or a view that was decided; "" for other events."""
    if record.name == "joined":
        return f"{record.node} is in as {record.get('role')}"
    if record.name == "view" and record.get("links") is None:
        return f"view {record.get('id')}: {str(record.get('reason'))[:230]}"
    return ""


# ------------------------------------------------------------------ what it proves

Edge = frozenset[str]


@dataclass(frozen=True, slots=True)
class Ruled:
    """A membership view with its links and reduction trees, as the first member that entered it reported it.

    Attributes:
        t: Time at which it was entered, wall clock, s.
        members: Ids of its members.
        links: Its links, as pairs of node names.
        trees: Reduction trees of the gradients, as (weight, edges); empty for plans without trees of their own.
        reason: Reason for which it was decided.
    """

    t: float
    members: tuple[str, ...]
    links: frozenset[Edge]
    trees: frozenset[tuple[float, frozenset[Edge]]]
    reason: str

    def share(self, edge: Edge) -> float:
        """Returns the share of the gradients that passes over a link."""
        whole = sum(weight for weight, _ in self.trees)
        return sum(weight for weight, edges in self.trees if edge in edges) / whole if whole else 0.0


def node(member: str) -> str:
    """Returns the name of a member's node; each node of the demo has one member."""
    return member.partition("~")[0].removesuffix("-0")


def views(records: Sequence[Record]) -> list[Ruled]:
    """Returns all views whose links were logged, in the order in which members entered them."""
    found: dict[str, Ruled] = {}
    for r in sorted(records, key=lambda r: r.t):
        links = r.get("links")
        if r.name != "view" or links is None:
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


def of_fault(fault: Record) -> Edge:
    """Returns the link, a pair of node names, that an injected fault changed."""
    return frozenset((fault.node, str(fault.get("peer"))))


CHANGES = ("cut", "stall", "restore", "rate")


class Links:
    """Events that concern the links of an emulated network.

    Args:
        topology: Topology that was emulated.
        records: All events, in order of time.
    """

    def __init__(self, topology: Topology, records: Sequence[Record]) -> None:
        self.topology = topology
        self.records = records
        self.faults = partial(proof.faults_of, records)
        self.views = views(records)

    def rate(self, edge: Edge, t: float) -> float:
        """Returns the emulated rate of this link at time `t`, bit/s; 0 if it was cut or stalled, or does not exist."""
        link = next((x for x in self.topology.links if {x.a, x.b} == edge), None)
        rate, whole = (link.rate_bps, True) if link is not None else (0.0, False)
        for r in sorted(self.faults(*CHANGES), key=lambda r: r.t):
            if r.t <= t and of_fault(r) == edge:
                rate = number(r.get("rate_bps"))
                whole = r.get("kind") in ("restore", "rate")
        return rate if whole else 0.0

    def next(self, t: float, good: Callable[[Ruled], bool]) -> Ruled | None:
        """Returns the first view after time `t` that satisfies `good`; None if there is none."""
        return next((v for v in self.views if v.t > t and good(v)), None)

    def steps(self, start: float, stop: float) -> int:
        """Returns the number of headers that were committed between `start` and `stop`."""
        return len({r.get("header") for r in self.records if r.name == "committed" and start < r.t < stop})


def founded(links: Links) -> Check:
    names = set(links.topology.names)
    wanted = frozenset(frozenset((x.a, x.b)) for x in links.topology.links)
    what = f"{len(names)} nodes train over the {len(wanted)} links of the topology, and no other"
    first = next((v for v in links.views if {node(m) for m in v.members} == names), None)
    if first is None:
        return Check(what, "no view has all of them", False)
    strange = {edge for v in links.views for edge in v.links if len(v.members) > 1} - wanted
    text = f"first together over {len(first.links)} links, {len(first.trees)} tree(s)"
    if strange:
        text += f"; views with links that are not there: {_names(strange)}"
    return Check(what, text, not strange and any(v.links == wanted for v in links.views))


def measured(links: Links) -> Check:
    """Checks that members measured all links; compares each measurement with the emulated rate at that time."""
    found: list[float] = []
    edges: set[Edge] = set()
    for r in links.records:
        if r.name == "link_measured" and "probe" in str(r.get("evidence")):
            edge = _edge(r.node, str(r.get("peer")))
            rate = links.rate(edge, r.t)
            if rate:
                found.append(number(r.get("rate_bps")) / rate)
                edges.add(edge)
    found.sort()
    what = "members measure what their links carry"
    if not found:
        return Check(what, "no measurement", False)
    text = f"{len(found)} measurements of {len(edges)} links; over the emulated rate: median "
    text += f"{found[len(found) // 2]:.2f}, {found[0]:.2f} to {found[-1]:.2f}"
    return Check(what, text, len(edges) == len(links.topology.links))


def failures(links: Links) -> list[Check]:
    """Checks for each cut or stall of a link that the same members train on without it, and use it again once
    restored.
    """
    checks = []
    for fault in links.faults("cut", "stall"):
        edge = of_fault(fault)
        name = _names([edge])
        word = "is cut" if fault.get("kind") == "cut" else "falls silent"
        without = links.next(fault.t, lambda v, e=edge: e not in v.links)  # type: ignore[misc]
        back = next((f for f in links.faults("restore") if f.t > fault.t and of_fault(f) == edge), None)
        what = f"{name} {word}: the same members go on without it"
        if without is None:
            checks.append(Check(what, "no view without it", False))
            continue
        steps = links.steps(without.t, back.t if back is not None else float("inf"))
        text = f"new trees {duration(without.t - fault.t)} later; {steps} steps until it was back"
        checks.append(Check(what, text, steps > 0 and len(without.members) == len(links.topology.names)))
        if back is not None:
            again = links.next(back.t, lambda v, e=edge: e in v.links)  # type: ignore[misc]
            text = "no view with it" if again is None else f"in a view again {duration(again.t - back.t)} later"
            checks.append(Check(f"{name} is back: it is used again", text, again is not None))
    return checks


def slower(links: Links) -> list[Check]:
    """Checks for each link that became slower that reduction trees avoid it: it carries less than half its former
    share.
    """
    checks = []
    for fault in links.faults("rate"):
        edge = of_fault(fault)
        before, now = links.rate(edge, fault.t - 1e-6), number(fault.get("rate_bps"))
        if now >= before:
            continue
        ruled = [v for v in links.views if v.t <= fault.t]
        used = ruled[-1].share(edge) if ruled else 0.0
        after = links.next(fault.t, lambda v, e=edge, u=used: bool(v.trees) and v.share(e) < u / 2)  # type: ignore[misc]
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


def trees(links: Links) -> Check:
    sets = [v.trees for v in links.views if v.trees]
    changes = sum(a != b for a, b in pairwise(sets))
    text = f"{len(set(sets))} different sets of trees in {len(links.views)} views; "
    text += f"{len(links.faults(*CHANGES))} changes of links"
    return Check("trees change when links do", text, changes >= 3)


def stayed(links: Links) -> Check:
    bad = [r for r in links.records if r.name in ("death", "fenced", "rejoin")]
    members = {m for v in links.views for m in v.members}
    text = f"{len(members)} member ids from the first view to the last" if not bad else f"{bad[0]}"
    return Check("no link's failure puts a member out", text, not bad and len(members) == len(links.topology.names))


def followed(links: Links) -> list[Check]:
    """Returns the checks that concern links and reduction trees."""
    return [founded(links), measured(links), *failures(links), *slower(links), trees(links), stayed(links)]


def prove(e: Evidence, topology: Topology) -> list[Check]:
    """Returns all checks of this demo."""
    names = topology.names
    deaths = any(r.name in ("death", "fenced") for r in e.records)
    return [
        *followed(Links(topology, e.records)),
        proof.finished(e, names, "the job finishes on all nodes"),
        *proof.training(e, names),
        # No member is to die here, so the audit's last point has nothing to show, unless one did.
        *(c for c in proof.audited(e) if c.ok or deaths or not c.what.startswith("audit 5")),
    ]


def _names(edges: Sequence[Edge] | set[Edge]) -> str:
    return ", ".join(sorted(" - ".join(sorted(edge)) for edge in edges))


def _short(reason: str, most: int = 160) -> str:
    text = reason.rpartition("plan: ")[2] or reason
    return text if len(text) <= most else text[: most - 3] + "..."


# ------------------------------------------------------------------ the command


def demo_edge(
    directory: Directory = None,
    topology: Annotated[
        Path,
        typer.Option(
            help="Another topology file; every check of the proof is about its schedule.",
            metavar="FILE",
            show_default="this demo's own",
        ),
    ] = TOPOLOGY,
    keep: Keep = False,
) -> None:
    """Train on an emulated network whose links change, fail and return; then prove that nothing was lost."""
    network = load_topology(topology)
    folder = prepare(directory, "demo")
    config = LabConfig(
        topology=network,
        command=(sys.executable, "-m", "chaos_lightning.testing.demo.train", "--folder", "{folder}", *ARGUMENTS),
        folder=folder,
        backend="relay",
        schedule_at="joined",
        environment={
            "PYTHONPATH": importable(),
            "CUDA_VISIBLE_DEVICES": "",
            "CHAOS_STATE_HASH_EVERY": "5",
        },
    )

    def prove_and_draw(e: Evidence) -> list[Check]:
        with contextlib.suppress(ConfigurationError):  # matplotlib is not there, and the report will say so
            plot(network, folder / NETWORK)
        return prove(e, network)

    lab = Lab(config)
    scenario = Scenario(
        name="demo-edge",
        nodes=Machines(lab),
        acts=(all_join, links_change, finish),
        prove=prove_and_draw,
        pace=PACE,
        tells=told,
        endings=(lab.close,),
    )
    play(scenario, folder, keep=keep)
