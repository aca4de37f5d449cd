"""Tests that a newcomer to a real job pulls the state by the transfer policy that it was told to use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_job import Job

from chaos_lightning.events.events import Record
from chaos_lightning.testing.emulation import RATES

WIDTH = 4000
NEWCOMER = "d"
COMPARED = "benchmarks.transfer.policies"
IN_WORDS = {
    "adaptive": "",  # see below
    "shared": "whoever has room",
    f"{COMPARED}:Greedy": "shards of",
    f"{COMPARED}:Optimal": "shards of",
    f"{COMPARED}:Even": "the same from each of 3 neighbours",
    f"{COMPARED}:Single": "the fastest of 3 neighbours",
}


USUAL = ((f"{COMPARED}:Greedy", "replay"), (f"{COMPARED}:Single", "pause"))
"""The others take their time."""
EMULATED = {RATES: json.dumps(dict.fromkeys("abcd", 4e8))}
"""Links with a rate are measured when they are made, so that a newcomer's plan can go by it."""


def came_in(job: Job, members: dict[str, str], newcomer: dict[str, Any], neighbours: str = "") -> list[Record]:
    """Runs members with these neighbours and a newcomer, checks that their states are equal, and ends all; returns the
    newcomer's events.
    """
    for name, named in members.items():
        settings = {"neighbours": named, "state_hash_every": 10, "by_reference": False, "min_nodes": len(members)}
        job.start(name, settings=settings, env=EMULATED, **SPEC)
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == len(members))
    settings = {"neighbours": neighbours, "state_hash_every": 10, "by_reference": False, **newcomer}
    job.start(NEWCOMER, seed=2, settings=settings, env=EMULATED, **SPEC)
    joined = job.harness.wait_for("joined", node=NEWCOMER)
    hashed = job.harness.wait_for("state_hash", node=NEWCOMER, after=joined)
    for name in members:
        alike = job.harness.wait_for("state_hash", lambda r: r["head"] == hashed["head"], node=name)
        assert alike["hash"] == hashed["hash"], name
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death")]
    job.leave(*members, NEWCOMER)
    return [r for r in job.harness.records if r.node == NEWCOMER]


SPEC = {"epochs": 1000, "width": WIDTH, "step_s": 0.01}


def first_pull(records: list[Record]) -> tuple[str, dict[str, int]]:
    """Returns the newcomer's description of its first pull, and the bytes by source."""
    by_source: dict[str, int] = {}
    for record in records:
        if record.name == "pull_source" and record["nbytes"]:
            by_source[str(record["source"]).partition("~")[0]] = int(record["nbytes"])
        elif record.name == "pull_done":
            return str(record["policy"]), by_source
    raise AssertionError("nothing was pulled")


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        pytest.param(policy, way, marks=[] if (policy, way) in USUAL else [pytest.mark.slow])
        for policy in IN_WORDS
        for way in ("pause", "replay")
    ],
)
def test_named_policy_is_what_the_pull_went_by(job: Job, policy: str, way: str) -> None:
    settings = {"transfer": policy, "join_by": way}
    words, by_source = first_pull(came_in(job, dict.fromkeys("abc", ""), settings))
    assert IN_WORDS[policy] in words, words
    if policy == "adaptive":  # it waits for no measurement
        assert words.startswith(("closed form: ", "no estimates: whoever has room")), words
    else:
        assert "no estimate of" not in words, words
    assert sum(by_source.values()) > WIDTH * 100
    assert len(by_source) == 1 or not policy.endswith(":Single")


@pytest.mark.slow
def test_greedy_searches_its_shard_size_between_the_layers_of_the_state(job: Job) -> None:
    words, _ = first_pull(
        came_in(job, dict.fromkeys("abc", ""), {"transfer": f"{COMPARED}:Greedy", "join_by": "pause"})
    )
    assert "bytes searched" in words, words


@pytest.mark.parametrize("way", [pytest.param("pause", marks=pytest.mark.slow), "replay"])
def test_multi_source_asks_also_those_behind_its_neighbours(job: Job, way: str) -> None:
    """Links form a line a - b - c - d: newcomer d pulls a third of the state from each member, from a by way of c and
    b.
    """
    named = {"a": "b", "b": "a,c", "c": "b"}
    settings = {"transfer": f"{COMPARED}:MultiSource", "join_by": way}
    words, by_source = first_pull(came_in(job, named, settings, neighbours="c"))
    assert "the same from each of 3 nodes" in words, words
    assert set(by_source) == {"a", "b", "c"}
    assert all(nbytes > WIDTH * 10 for nbytes in by_source.values()), by_source
