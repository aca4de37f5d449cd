"""Tests that the documented command founds a job on an emulated network in which not all pairs have a link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_lightning.events.events import read_events
from chaos_lightning.observe.audit import audit, violations
from chaos_lightning.testing.edge.topology_file import load_topology

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_S = 150.0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((EXAMPLES / "topologies").glob("*.yaml")), ids=lambda p: p.stem)
def test_all_nodes_found_the_job_together_over_the_links_that_there_are(path: Path, tmp_path: Path) -> None:
    """All nodes found the job together, although each knows its neighbours only, and exactly the network's links are
    used.
    """
    file = tmp_path / path.name
    file.write_text(path.read_text().replace("starts: 60 s", "starts: 1 s"))
    network = load_topology(file)
    own = {"CHAOS_MIN_NODES": str(len(network.nodes)), "CHAOS_STATE_HASH_EVERY": "5", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "chaos_lightning.cli", "lab", str(file), "--backend", "relay"]
    command += ["--dir", str(tmp_path / "run"), "--", sys.executable, str(EXAMPLES / "plain_loop.py")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    records = list(read_events(tmp_path / "run" / "events"))
    founding = next(r for r in records if r.name == "view" and r.get("members"))
    assert {network.node_of(m) for m in founding["members"]} == set(network.names)
    neighbours = {frozenset((link.a, link.b)) for link in network.links}
    made = [(r.node, str(r["peer"])) for r in records if r.name == "link_up"]
    assert {frozenset((network.node_of(one), network.node_of(other))) for one, other in made} == neighbours
    hashed = [r for r in records if r.name == "state_hash"]
    assert len({r.node for r in hashed}) == len(network.names)
    assert not violations(audit(tmp_path / "run" / "events"))
