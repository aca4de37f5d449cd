"""Makes Fig. 9 and Table I of the Chaos paper: links that come and go, leaving members, and the costs for others.

Real processes are those of benchmarks/primitives, which defines what an exposed delay is; here they are run at
several cluster sizes with a small model. As many members as in the paper do not fit a small machine, so larger
clusters are simulated: the product's own member and scheduler machines in virtual time
(lab/simulate), where every message takes 0.2 ms, the work for a step 30 ms, and processors nothing.
Nothing is random there, so undisturbed steps all take equally long, and what a change adds to the critical path of
messages shows to the microsecond.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import median, percentile
from benchmarks.paper.figure import Claim, FigureResult, Scale, canvas, progress
from benchmarks.primitives import events as primitives
from benchmarks.primitives.crew import Pair, ring
from benchmarks.primitives.member import Work
from benchmarks.primitives.samples import Exposure, block_of, exposed, median_interval
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.topology import connected
from chaos_lightning.protocol.types import Kind, Settings
from lab.simulate.fabric import Endpoint
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.training import Program
from lab.simulate.world import World

WORK = Work(grad_mib=0.25, layers=2, device_s=0.025)
PAPER_S = 0.001
_STEP_S = 0.030
_CHANCE = 0.01
_WINDOW_S = _STEP_S / (0.4 + 1.2 * _CHANCE)
"""A step's mean work; lab/simulate/node.py has it take 0.4 to 1.6 times as long, by chance."""
_MESSAGE_S = 0.0002 + 0.0018 * _CHANCE
"""Seconds of a message; lab/simulate/fabric.py has it take 0.2 to 2 ms, by chance."""
_APART_S = 1.0
"""Virtual time between two changes."""
_WIDTH = 8


class _Least(random.Random):
    """Random numbers that never vary: every drawn duration is close to the least of its range."""

    def random(self) -> float:
        return _CHANCE


# ---------------------------------------------------------------------- in virtual time


def simulated(size: int, changes: int, seed: int) -> dict[str, list[Exposure]]:
    """Simulates `changes` connect-links and as many disconnect-links in a job, in turn.

    Args:
        size: Number of members, linked at first as in `grown`.
        changes: Number of changes of either kind.
        seed: Seed of the links and the moments.

    Returns:
        Exposed delays of each change, by kind.

    Raises:
        RuntimeError: The run did not end well, or a change was not carried out.
    """
    rng = random.Random(seed)
    base = grown(size, rng)
    faults, kinds = _changes(size, base, changes, rng)
    seconds = faults[-1].at + 2 * _APART_S
    names = [f"w{i}" for i in range(size)]
    plan = Plan(
        seed=seed,
        settings=Settings(job="sim", min_nodes=size),
        program=Program(epochs=1, length=size * int(seconds / _STEP_S), gather_every=0, work_s=_WINDOW_S),
        nodes=tuple(NodeSpec(name=n, host=f"h{i}", neighbours=_near(n, base)) for i, n in enumerate(names)),
        starts=tuple(0.001 * i for i in range(size)),
        faults=tuple(faults),
        measured=True,
        limit_s=4 * seconds + 60.0,
    )
    world = World(plan, validate=False)
    world.kernel.random = _Least(seed)
    commits: dict[str, dict[int, float]] = {n: {} for n in names}
    carried: dict[int, float] = {}

    def note(node: Endpoint, effect: fx.MemberEffect) -> None:
        if isinstance(effect, fx.Committed) and effect.header.kind is Kind.STEP:
            commits[node.name][effect.header.step] = world.kernel.now
            if effect.header.view_change is not None:
                carried.setdefault(effect.header.step, world.kernel.now)

    world.on_effect = note
    outcome = world.run()
    if outcome.violation:
        raise RuntimeError(f"the simulated job of {size} members, seed {seed}: {outcome.violation}")
    series = {n: {s: at - c[s - 1] for s, at in c.items() if s - 1 in c} for n, c in commits.items()}
    found: dict[str, list[Exposure]] = {kind: [] for kind in dict.fromkeys(kinds)}
    for fault, kind in zip(faults, kinds, strict=True):
        ruled = next((s for s, at in sorted(carried.items()) if at > fault.at), None)
        if ruled is None:
            raise RuntimeError(f"{fault.action} {fault.node} {fault.other} at {fault.at:.3f} s changed no view")
        requested = min(min(s for s, at in c.items() if at > fault.at) for c in commits.values())
        block = block_of(range(requested, ruled + 3), ruled, _WIDTH)
        found[kind].append(exposed(series, names, block))
    return found


def grown(size: int, rng: random.Random) -> frozenset[Pair]:
    """Returns the links of a cluster grown like the paper's: each newcomer connects to several random members.

    Several: 40 % of those that there were (benchmarks/paper/clusters.py), at least two; never every pair.
    """
    if size < 4:
        return ring(size)
    found = set()
    for i in range(1, size):
        for other in rng.sample(range(i), min(i, max(2, round(0.4 * i)))):
            found.add(frozenset((f"w{i}", f"w{other}")))
    return frozenset(found)


def _near(name: str, links: Collection[Pair]) -> tuple[str, ...]:
    return tuple(sorted(next(iter(p - {name})) for p in links if name in p))


def _changes(size: int, links: frozenset[Pair], changes: int, rng: random.Random) -> tuple[list[Fault], list[str]]:
    """Returns faults that add and remove links in turn, chosen so that all members stay connected."""
    names = [f"w{i}" for i in range(size)]
    faults: list[Fault] = []
    kinds: list[str] = []
    for index in range(2 * changes):
        add = index % 2 == 0
        pairs = [frozenset(p) for p in itertools.combinations(names, 2)]
        fitting = [p for p in pairs if (p not in links if add else p in links and connected(names, links - {p}))]
        pair = rng.choice(fitting)
        links = links | {pair} if add else links - {pair}
        one, other = sorted(pair)
        at = 1.0 + index * _APART_S + rng.uniform(0.0, 2 * _STEP_S)
        faults.append(Fault(action="add-link" if add else "remove-link", node=one, other=other, at=at))
        kinds.append("connect-link" if add else "disconnect-link")
    return faults, kinds


# ---------------------------------------------------------------------- Fig. 9


def fig9(scale: Scale) -> FigureResult:
    """Makes Fig. 9: the delay of connect-link by the number of members."""
    sizes, events = scale.pick((4,), (3, 4, 5, 6)), scale.pick(3, 14)
    real: dict[str, dict[str, Any]] = {}
    for size in sizes:
        progress("9", f"{events} connect-links among {size} real members")
        outcome = primitives.links(size, WORK, events, random.Random(scale.seed))["connect-link"]
        real[str(size)] = _facts(outcome)
    virtual: dict[str, dict[str, list[float]]] = {}
    kinds = ("connect-link", "disconnect-link")
    for size in scale.pick((6, 9), (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)):
        progress("9", f"links among {size} simulated members")
        found = simulated(size, scale.pick(2, 6), scale.seed)
        virtual[str(size)] = {kind: [e.total for e in found[kind]] for kind in kinds}
    claims = _claims(real, virtual, events)
    return FigureResult(
        number="9",
        title="Connect-link delay against cluster size",
        how=f"Real processes for {', '.join(real)} members on one machine (a model of {WORK.grad_mib:g} MiB of "
        f"gradients, {WORK.device_s * 1e3:g} ms of sleep in each step for an accelerator's time); larger clusters "
        "simulated in virtual time with the product's own state machines.",
        claims=claims,
        data={"real": real, "simulated": virtual, "paper_s": PAPER_S},
    )


def _claims(
    real: Mapping[str, Mapping[str, Any]], virtual: Mapping[str, Mapping[str, list[float]]], events: int
) -> list[Claim]:
    """Returns the paper's statements with our results by number of members: of `events` real events each, and of
    simulated ones.
    """
    kinds = ("connect-link", "disconnect-link")
    largest = {kind: [max(by_kind[kind]) for by_kind in virtual.values()] for kind in kinds}
    words = ", ".join(f"{f['beyond_p50_s'] * 1e3:.2f} ms ({n})" for n, f in real.items())
    why = (
        f"medians beyond an undisturbed control over {events} links that come; each member sleeps "
        f"{WORK.device_s * 1e3:g} ms in a step in place of an accelerator, all share one machine; 95 % intervals: "
        + ", ".join(f"{n}: {f['low_s'] * 1e3:.2f} to {f['high_s'] * 1e3:.2f} ms" for n, f in real.items())
        + _others(list(real.values()))
    )
    claims = [
        Claim(
            "connect-link stays under 1 ms (6 to 12 nodes)",
            f"{words} with as many real members",
            "scaled down",
            all(f["beyond_p50_s"] < PAPER_S for f in real.values()),
            why,
        ),
    ]
    if len(real) > 1:
        first, last = next(iter(real.values())), list(real.values())[-1]
        # Two sizes are taken for equal where each one's median is within the other's interval, or better.
        flat = last["beyond_p50_s"] <= first["high_s"] and first["beyond_p50_s"] >= last["low_s"]
        claims.append(
            Claim(
                "the delay does not grow with the cluster (6 to 12 nodes)",
                f"{first['beyond_p50_s'] * 1e3:.2f} ms with {next(iter(real))}, "
                f"{last['beyond_p50_s'] * 1e3:.2f} ms with {list(real)[-1]} members"
                + (", which this machine cannot tell apart" if flat else ""),
                "scaled down",
                flat,
                why,
            )
        )
    claims += [
        Claim(
            "the delay stays under 1 ms and does not grow with the cluster (6 to 12 nodes)",
            f"at most {max(largest['connect-link']) * 1e3:.2f} ms with {', '.join(virtual)} members "
            f"({max(largest['connect-link']) / _MESSAGE_S:.0f} messages' time)",
            "simulated",
            max(largest["connect-link"]) < PAPER_S,
            f"messages of {_MESSAGE_S * 1e3:.2f} ms, steps of {_STEP_S * 1e3:g} ms, processors that take no time: what "
            "is left is waiting for messages, at the member for which it is longest; by size "
            + ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in zip(virtual, largest["connect-link"], strict=True)),
        ),
        Claim(
            "the result also applies to disconnect-link",
            f"at most {max(largest['disconnect-link']) * 1e3:.2f} ms "
            f"({max(largest['disconnect-link']) / _MESSAGE_S:.0f} messages' time)",
            "simulated",
            max(largest["disconnect-link"]) < PAPER_S,
            "as above; where a detour takes the place of a link, headers come later by its further hops, once",
        ),
    ]
    return claims


def _facts(outcome: primitives.Outcome) -> dict[str, Any]:
    """Returns the measurements of one kind of event as plain numbers, in seconds."""
    beyond = outcome.of("beyond")
    low, high = median_interval(beyond)
    return {
        "count": len(beyond),
        "beyond_s": beyond,
        "event_s": outcome.of("event"),
        "control_s": outcome.of("control"),
        "beyond_p50_s": median(beyond),
        "beyond_p99_s": percentile(beyond, 99),
        "low_s": low,
        "high_s": high,
        "event_p50_s": median(outcome.of("event")),
        "control_p50_s": median(outcome.of("control")),
        "usual_step_s": median(outcome.of("event.usual_before")),
        "request_to_header_s": median([s.waited_s for s in outcome.samples]),
        "processors_busy": outcome.busy,
        "processors_busy_with_other_work": outcome.foreign,
    }


def _others(facts: list[dict[str, Any]]) -> str:
    """Describes other work on the machine during the measurements; empty if it was negligible."""
    most = max(f["processors_busy_with_other_work"] for f in facts)
    return f"; other work took up to {most:.0%} of the processors meanwhile" if most > primitives.FOREIGN else ""


def plot_fig9(result: FigureResult, path: Path) -> None:
    """Draws the delays of real members with their controls, and of simulated members."""
    real: Mapping[str, Mapping[str, Any]] = result.data["real"]
    virtual: Mapping[str, Mapping[str, list[float]]] = result.data["simulated"]
    with canvas(path, columns=2) as (_, (left, right)):
        places = range(len(real))
        for name, label, shift in (("event_s", "connect-link", -0.15), ("control_s", "control", 0.15)):
            values = [[1e3 * v for v in facts[name]] for facts in real.values()]
            boxes = left.boxplot(values, positions=[p + shift for p in places], widths=0.25, patch_artist=True)
            colour = "tab:blue" if shift < 0 else "lightgray"
            for box in boxes["boxes"]:
                box.set_facecolor(colour)
            left.plot([], [], color=colour, linewidth=6, label=label)
        left.set_xticks(list(places), list(real))
        left.set_title("real processes, one machine", fontsize=9)
        sizes = [int(n) for n in virtual]
        for kind, marker in (("connect-link", "o"), ("disconnect-link", "x")):
            worst = [1e3 * max(by_kind[kind]) for by_kind in virtual.values()]
            right.plot(sizes, worst, marker=marker, label=f"{kind}, largest")
        right.set_title("simulated, message by message", fontsize=9)
        for axes in (left, right):
            axes.axhline(1e3 * result.data["paper_s"], color="tab:red", linestyle="--", label="paper: under 1 ms")
            axes.set_xlabel("members")
            axes.set_ylabel("exposed delay, ms")
            axes.legend(fontsize=7)


# ---------------------------------------------------------------------- Table I

_AFFECTED = {
    "scale-out by replay": "the newcomer waits; members copy and serve their state while they train",
    "scale-out by a pause": "everybody: all wait until the newcomer holds the state",
    "scale-in": "all members change trees at one header; the one who leaves trains until then",
    "connect-link": "two members open a socket; all change trees at one header",
    "disconnect-link": "all change trees at one header; two members close a socket one step later",
}
_PAPER = {
    "scale-out by replay": "0.5-5 s",
    "scale-out by a pause": "0.5-5 s",
    "scale-in": "<1 ms",
    "connect-link": "<1 ms",
    "disconnect-link": "<1 ms",
}


def table1(scale: Scale) -> FigureResult:
    """Makes Table I: the four scaling primitives, the members affected, and the exposed delay of each."""
    size, events = scale.pick(3, 4), scale.pick(2, 12)
    progress("I", f"{events} links that come and go among {size} members")
    outcomes = primitives.links(max(size, 4), WORK, events, random.Random(scale.seed))
    rows: dict[str, dict[str, Any]] = {}
    for way, title in (("replay", "scale-out by replay"), ("pause", "scale-out by a pause")):
        progress("I", f"{events} departures and returns by {way} among {size} members")
        work = Work(grad_mib=WORK.grad_mib, layers=WORK.layers, device_s=WORK.device_s, join_by=way)
        left = primitives.leaves(size, work, events, random.Random(scale.seed))["scale-in"]
        outcomes.setdefault("scale-in", primitives.Outcome(busy=left.busy, foreign=left.foreign)).samples.extend(
            left.samples
        )
        ready, cost = zip(*left.entries, strict=True)
        rows[title] = {"delay_s": median(ready), "exposed_p50_s": median(cost), "count": len(ready)}
    for kind in ("scale-in", "connect-link", "disconnect-link"):
        rows[kind] = _facts(outcomes[kind])
    claims = [
        Claim(
            f"{title}: {_PAPER[title]}",
            f"{row['delay_s']:.2f} s until it contributes; others later by {row['exposed_p50_s'] * 1e3:.0f} ms",
            "scaled down",
            row["delay_s"] <= 5.0,
            f"a state of {3 * WORK.grad_mib:g} MiB over loopback among {size} members, where the paper moves 178 MiB "
            "and more over 100 to 1000 Mbps (Figs. 7 and 8); the newcomer's process and model are there already",
        )
        for title, row in rows.items()
        if "delay_s" in row
    ]
    claims += [
        Claim(
            f"{kind}: {_PAPER[kind]}",
            f"{rows[kind]['beyond_p50_s'] * 1e3:.2f} ms (p50 beyond control of {rows[kind]['count']}; "
            f"p99 {rows[kind]['beyond_p99_s'] * 1e3:.2f} ms)",
            "scaled down",
            rows[kind]["beyond_p50_s"] < PAPER_S,
            f"95 % interval of that median {rows[kind]['low_s'] * 1e3:.2f} to {rows[kind]['high_s'] * 1e3:.2f} ms; a "
            f"step takes {rows[kind]['usual_step_s'] * 1e3:.0f} ms; from the request to the header that carries the "
            f"change {rows[kind]['request_to_header_s'] * 1e3:.0f} ms, in which training goes on"
            + _others([rows[kind]]),
        )
        for kind in ("scale-in", "connect-link", "disconnect-link")
    ]
    return FigureResult(
        number="I",
        title="Scaling primitives: who is affected, and the exposed delay",
        how=f"Real processes on one machine, {size} and {max(size, 4)} members, {WORK.grad_mib:g} MiB of gradients, "
        f"{WORK.device_s * 1e3:g} ms of sleep in each step for an accelerator's time; {events} events of each kind.",
        claims=claims,
        data={"rows": rows, "affected": dict(_AFFECTED), "paper": dict(_PAPER)},
    )


def plot_table1(result: FigureResult, path: Path) -> None:
    """Draws Table I as a picture."""
    rows: Mapping[str, Mapping[str, Any]] = result.data["rows"]
    cells = [
        [
            title,
            result.data["affected"][title],
            result.data["paper"][title],
            f"{row['delay_s']:.2f} s, others {row['exposed_p50_s'] * 1e3:.0f} ms"
            if "delay_s" in row
            else f"{row['beyond_p50_s'] * 1e3:.2f} ms",
        ]
        for title, row in rows.items()
    ]
    with canvas(path, width_in=10.5, height_in=2.2) as (_, (axes,)):
        axes.axis("off")
        table = axes.table(
            cellText=cells,
            colLabels=["primitive", "who is affected", "paper", "here"],
            colWidths=[0.17, 0.55, 0.09, 0.19],
            cellLoc="left",
            loc="center",
        )
        table.auto_set_font_size(False)
        table.set_fontsize(8)
        table.scale(1.0, 1.5)
