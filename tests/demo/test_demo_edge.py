"""Tests the proof of the edge demo on made-up events: it holds for a good run, and each line fails without its fact."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning.events.events import EventLog, Record
from chaos_lightning.testing.demo import edge
from chaos_lightning.testing.demo.proof import Check, Evidence
from chaos_lightning.testing.edge.topology import Condition, Topology
from chaos_lightning.testing.edge.topology_file import load_topology

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = tuple(f"edge-{i}-0~{i}" for i in range(1, 7))
BROKEN, SLOW, SILENT = ("edge-4", "edge-5"), ("edge-1", "edge-2"), ("edge-2", "edge-3")


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load_topology(edge.TOPOLOGY)


def member(node: str) -> str:
    return MEMBERS[int(node[-1]) - 1]


def record(t: float, name: str, **fields: Any) -> Record:
    return Record(t, t, "", str(name), {"node": "edge-1-0", **fields}, "member-x-1")


def view(
    topology: Topology, t: float, number: int, *, without: tuple[str, str] | None = None, via: float = 1.0
) -> Record:
    """Returns a view whose trees send the share `via` of the gradients over the link that becomes slow."""
    links = [(x.a, x.b) for x in topology.links if (x.a, x.b) != without]
    chain = [m for m in MEMBERS if m]
    parents = ["", *chain[:-1]]
    around = ["", member("edge-4"), *chain[1:-1]]  # a tree without edge-1 - edge-2
    trees = [(via, chain, parents), (1.0 - via, chain, around)]
    return record(
        t,
        "view",
        id=f"1.{number}",
        members=list(MEMBERS),
        joiners=[],
        reason=f"plan: number {number}",
        links=[(member(a), member(b)) for a, b in links],
        plan="trees",
        trees=[t for t in trees if t[0]],
    )


def everywhere() -> Record:
    """Returns a view in which all pairs of members have a link."""
    fields: dict[str, Any] = {"members": list(MEMBERS), "joiners": [], "reason": "", "links": [], "trees": []}
    return record(5.0, "view", id="1.9", plan="chain", **fields)


def fault(t: float, kind: str, pair: tuple[str, str], rate: float = 400e6) -> Record:
    return record(t, "fault_injected", kind=kind, node=pair[0], peer=pair[1], rate_bps=rate, latency_s=0.0)


def run(topology: Topology) -> list[Record]:
    """Returns the events of a flawless run."""
    probes = [
        record(
            0.5, "link_measured", node=f"{x.a}-0", peer=member(x.b), rate_bps=x.rate_bps, evidence="probe (link made)"
        )
        for x in topology.links
    ]
    return [
        view(topology, 0.0, 1),
        *probes,
        fault(10.0, "cut", BROKEN),
        view(topology, 10.2, 2, without=BROKEN),
        record(15.0, "committed", header="a", seq=1),
        fault(20.0, "restore", BROKEN),
        view(topology, 20.6, 3),
        fault(30.0, "rate", SLOW, 20e6),
        view(topology, 31.0, 4, via=0.2),
        fault(50.0, "stall", SILENT),
        view(topology, 53.0, 5, without=SILENT, via=0.1),
        record(55.0, "committed", header="b", seq=2),
        fault(58.0, "restore", SILENT),
        view(topology, 58.6, 6, via=0.2),
        fault(70.0, "rate", SLOW, 400e6),
    ]


def own_checks(topology: Topology, records: list[Record]) -> list[Check]:
    return edge.followed(edge.Links(topology, records))


def failed(checks: list[Check]) -> list[str]:
    return [check.what for check in checks if not check.ok]


def test_a_run_without_a_flaw_is_proved(topology: Topology) -> None:
    checks = own_checks(topology, run(topology))
    assert failed(checks) == []
    found = {check.what: check.found for check in checks}
    assert found["edge-4 - edge-5 is cut: the same members go on without it"].startswith(
        "new trees 0.2 s later; 1 step"
    )
    assert found["edge-2 - edge-3 is back: it is used again"] == "in a view again 0.6 s later"
    slower = found["edge-1 - edge-2 falls from 400 Mbps to 20 Mbps: the trees avoid it"]
    assert slower == "100% of the gradients passed it, 20% from 1 s on: number 4"
    assert (
        "8 measurements of 8 links; over the emulated rate: median 1.00"
        in found["members measure what their links carry"]
    )


Flaw = Callable[[Topology, list[Record]], list[Record]]


def less(keep: Callable[[Record], bool]) -> Flaw:
    return lambda topology, records: [r for r in records if keep(r)]


def more(made: Callable[[Topology], Record]) -> Flaw:
    return lambda topology, records: sorted([*records, made(topology)], key=lambda r: r.t)


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        (less(lambda r: r.get("id") not in ("1.2", "1.5")), "edge-4 - edge-5 is cut"),
        (less(lambda r: r.get("header") != "a"), "edge-4 - edge-5 is cut"),
        (less(lambda r: r.get("id") not in ("1.3", "1.4", "1.5", "1.6")), "edge-4 - edge-5 is back"),
        (less(lambda r: r.get("id") != "1.6"), "edge-2 - edge-3 is back"),
        (less(lambda r: r.get("id") not in ("1.4", "1.5", "1.6")), "the trees avoid it"),
        (less(lambda r: r.name != "link_measured"), "members measure"),
        (less(lambda r: r.name != "link_measured" or r.node != "edge-3-0"), "members measure"),
        (less(lambda r: r.name != "view" or r.get("id") == "1.1"), "trees change when links do"),
        (less(lambda r: r.name != "view"), "6 nodes train over the 8 links"),
        (more(lambda t: record(12.0, "fenced", reason="x")), "no link's failure puts a member out"),
        (more(lambda t: record(12.0, "death", evidence="x")), "no link's failure puts a member out"),
        (more(lambda t: everywhere()), "and no other"),
    ],
)  # fmt: skip
def test_what_the_logs_do_not_show_fails(topology: Topology, flaw: Flaw, words: str) -> None:
    records = flaw(topology, run(topology))
    assert any(words in what for what in failed(own_checks(topology, records)))


def test_logs_of_nothing_prove_nothing(topology: Topology, tmp_path: Path) -> None:
    EventLog.in_directory(tmp_path / "events", "lab", role="harness").close()
    checks = edge.prove(Evidence(tmp_path, {}), topology)
    assert not any(check.ok for check in checks if "puts a member out" not in check.what), [c for c in checks if c.ok]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_edge_demo_proves_its_story(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaos_lightning.cli", "demo-edge", "--dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALL 20 LINES HOLD" in done.stdout
    assert (tmp_path / "run" / "network.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run" / "out").exists()


def test_the_demos_topology_changes_fails_and_returns(topology: Topology) -> None:
    assert (len(topology.nodes), len(topology.links)) == (6, 8)
    assert {c.condition for c in topology.schedule} == {None, Condition.CUT, Condition.STALLED}
    assert all(c.for_s for c in topology.schedule if c.condition is not None)
    assert any(c.share is not None and c.share < 1 for c in topology.schedule)
