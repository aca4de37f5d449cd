"""Tests the demo of clusters far apart with real processes; its proof must notice altered logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from log_support import whole_lines

from chaos_lightning.events.events import EventLog, Record
from chaos_lightning.observe.outer.fold import Adoption, ClusterLog, FrozenPush, HeardAnswer, InnerSteps
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, Offer, PushAnswer, PushId
from chaos_lightning.testing.demo.apart import MOST_S
from chaos_lightning.testing.demo.far import BENDS, CLUSTERS, DIES
from chaos_lightning.testing.demo.far_proof import Plot, in_time, inner_steps, prove, was_warm
from chaos_lightning.testing.demo.proof import Check, Evidence

ROOT = Path(__file__).resolve().parents[2]
ALONE = [cluster for cluster in CLUSTERS if cluster is not BENDS]
CODES: dict[str, int | None] = {
    **{cluster.name: -9 if cluster is DIES else 0 for cluster in ALONE},
    **{node: -9 if number == 1 else 0 for number, node in enumerate(BENDS.nodes)},
}
Lines = list[dict[str, Any]]


def proved(folder: Path) -> list[Check]:
    return prove(Evidence(folder, CODES), Plot(1))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs the demo on SQLite once; returns its folder, and the ended process with its output."""
    folder = tmp_path_factory.mktemp("apart")
    command = [sys.executable, "-m", "chaos_lightning.cli", "demo-diloco", "--quick", "--sqlite", "--keep"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--dir", str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    return folder, done


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_it_proves_its_story_and_leaves_a_report_and_no_process(
    told: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = told
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ONE leader, with its chain in SQLite" in done.stdout
    assert "LINES HOLD" in done.stdout
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [check for check in proved(folder) if not check.ok] == []
    words = str(folder).encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            assert words not in Path("/proc", entry, "cmdline").read_bytes()
        except OSError:
            continue


def nobody_led(lines: Lines) -> None:
    """Removes from the logs that leaders led after the kill of the whole server."""
    kill = next(x["t"] for x in lines if x.get("kind") == "server_sigkill")
    for line in [x for x in lines if x["name"] == "outer_leader_started" and x["t"] > kill]:
        lines.remove(line)


def none_in_its_place(lines: Lines) -> None:
    """Removes from the logs all that the killed follower's replacement computed."""
    kill = next(x for x in lines if x.get("kind") == "follower_sigkill")
    victim = next(x["child"] for x in lines if x["name"] == "server_child" and x["pid"] == kill["pid"])
    stands = ("version_loaded", "version_computed")
    for line in [x for x in lines if x["name"] in stands and x["t"] > kill["t"] and x.get("node") == victim]:
        lines.remove(line)


def another_child_started(lines: Lines) -> None:
    """Renames the child that was started after a follower's kill, as if nothing had replaced the follower."""
    kill = next(x for x in lines if x.get("kind") == "follower_sigkill")
    child = next(x for x in lines if x["name"] == "server_child" and x["t"] > kill["t"] and x.get("up"))
    child["child"] = "spare"


def the_founders_were_one(lines: Lines) -> None:
    """Removes from the logs that the rank which is later killed had joined."""
    lines.remove(next(x for x in lines if x["name"] == "joined" and x.get("node") == f"{BENDS.nodes[1]}-0"))


def removed_after_half_a_minute(lines: Lines) -> None:
    line = removal_of(lines, DIES.name)
    line |= {"t": line["t"] + 30.0, "mono": line["mono"] + 30.0}


def another_was_removed(lines: Lines) -> None:
    removal_of(lines, DIES.name)["body"]["incarnation"]["cluster"] = CLUSTERS[0].name


def removal_of(lines: Lines, cluster: str) -> dict[str, Any]:
    removals = (x for x in lines if x["name"] == "entry" and x["kind"] == "Removed")
    return next(x for x in removals if x["body"]["incarnation"]["cluster"] == cluster)


def none_led_after_the_leader(lines: Lines) -> None:
    """Removes from the logs that a leader led between the leader's kill and the kill of the whole server."""
    kill = next(x["t"] for x in lines if x.get("kind") == "leader_sigkill")
    lines.remove(next(x for x in lines if x["name"] == "outer_leader_started" and x["t"] > kill))


def one_counts_again(lines: Lines) -> None:
    """Changes the logs so that the last round accepts the pushes of the round before once more."""
    rounds = [x for x in lines if x["name"] == "entry" and x["kind"] == "Round" and x["body"]["accepted"]]
    rounds[-1]["body"]["accepted"] = rounds[-2]["body"]["accepted"]


def killed_too_late(lines: Lines) -> None:
    """Moves a rank's kill to a time when all followers already had its whole push."""
    kill = next(x for x in lines if x.get("kind") == "sigkill" and x["node"] == f"{BENDS.nodes[1]}-0")
    frozen = [x for x in lines if x["name"] == "push_frozen" and x.get("node") == BENDS.name and x["t"] < kill["t"]]
    staged = [x for x in lines if x["name"] == "push_staged" and x["push"] == frozen[-1]["push"]]
    kill["t"], kill["mono"] = max((x["t"], x["mono"]) for x in staged)


def one_is_far_too_fast(lines: Lines) -> None:
    for line in [x for x in lines if x["name"] == "inner_steps" and x.get("node") == CLUSTERS[0].name]:
        line["steps"] *= 10


def another_digest(lines: Lines) -> None:
    next(x for x in reversed(lines) if x["name"] == "version_saved")["digest"] = "0" * 32


def other_weights(lines: Lines) -> None:
    next(x for x in lines if x["name"] == "final_weights")["hash"] = "0" * 64


def steps_in_no_push(lines: Lines) -> None:
    next(x for x in lines if x["name"] == "inner_steps" and x.get("node") == CLUSTERS[0].name)["steps"] += 3


def worse(lines: Lines) -> None:
    next(x for x in reversed(lines) if x["name"] == "loss")["epoch"] += 1000
    next(x for x in reversed(lines) if x["name"] == "loss")["loss"] = 99.0


def last_mark(lines: Lines) -> None:
    lines.remove(next(x for x in reversed(lines) if x.get("kind") == "Durable"))


def half_an_epoch(lines: Lines) -> None:
    lines.remove(next(x for x in lines if x.get("kind") == "Leased"))
    lines.remove(next(x for x in reversed(lines) if x.get("kind") == "Round"))


def never_came(lines: Lines) -> None:
    for line in [x for x in lines if x["name"] == "push_answered" and x.get("node") == "lab"]:
        lines.remove(line)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (nobody_led, "all processes of the server get kill -9 at once: started again, it goes on where it was"),
        (none_in_its_place, "a follower gets kill -9: the warm spare makes another, which computes on"),
        (another_child_started, "a follower gets kill -9: the warm spare makes another, which computes on"),
        (
            killed_too_late,
            "a rank of edge dies in mid-push, and another joins: the push counts, and the cluster stays",
        ),
        (the_founders_were_one, 'edge is inner="chaos" with 2 ranks at first, 3 in all'),
        (removed_after_half_a_minute, "van dies, is removed, and the others go on with its samples"),
        (another_was_removed, "living clusters removed: 0"),
        (none_led_after_the_leader, "the leading leader gets kill -9: it is started again and leads"),
        (one_counts_again, "pushes counted twice: 0"),
        (one_is_far_too_fast, "4 clusters of speeds 1 to 3 train one model"),
        (another_digest, "states are equal"),
        (other_weights, "states are equal"),
        (steps_in_no_push, "inner steps lost: 0"),
        (worse, "loss falls"),
        (last_mark, "versions lost: 0"),
        (half_an_epoch, "each sample counts exactly once per epoch"),
        (never_came, "lab comes late, fetches the newest version while the others train, and its pushes count"),
    ],
)
def test_its_proof_notices_what_the_logs_do_not_show(
    told: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    tamper: Callable[[Lines], None],
    noticed: str,
) -> None:
    events = tmp_path / "demo" / "events"
    shutil.copytree(told[0] / "events", events)
    files = {path: whole_lines(path) for path in events.glob("*.jsonl")}
    merged = sorted((line for lines in files.values() for line in lines), key=lambda line: line["t"])
    kept = list(merged)
    tamper(kept)
    remaining = {id(line) for line in kept}
    for path, lines in files.items():
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if id(line) in remaining))
    assert noticed in {check.what for check in proved(tmp_path / "demo") if not check.ok}


def test_a_rejected_push_excuses_its_own_steps_and_those_beside_it_alone() -> None:
    who = IncarnationId("home", 1)
    offers = [Offer(PushId(who, number), NO_VERSION, "", 8, 4) for number in (1, 2)]
    answers = (PushAnswer.ACCEPTED, PushAnswer.REJECTED)
    standing = {o.push: SimpleNamespace(offer=o, answer=a) for o, a in zip(offers, answers, strict=True)}
    log = ClusterLog(str(who), 0.0)
    for one in (
        InnerSteps(1.0, 4, 8, None), FrozenPush(2.0, "home~1/1", "-", 4, 8, 1, 0.0),
        InnerSteps(3.0, 4, 8, None), FrozenPush(4.0, "home~1/2", "-", 4, 8, 1, 0.0),
        InnerSteps(5.0, 2, 4, None), HeardAnswer(6.0, "home~1/2", "rejected", "v3", ""),
        InnerSteps(7.0, 1, 2, None), Adoption(8.0, "v3", True, 3, 0.0, 0, 0),
    ):  # fmt: skip
        log.take("home.jsonl", one)

    def judged(steps: int) -> Check:
        row = SimpleNamespace(name=str(who), steps=steps)
        facts = SimpleNamespace(run=SimpleNamespace(clusters={str(who): log}))
        f: Any = SimpleNamespace(rows={"home": [row]}, facts=facts)
        f.chain = SimpleNamespace(standing=standing)
        return inner_steps(f)

    assert judged(11).ok
    assert "home 7 of 11 (7 of 1 rejected pushes and beside them)" in judged(11).found
    assert not judged(12).ok
    assert not judged(10).ok


def test_a_log_that_tells_of_nothing_proves_nothing(tmp_path: Path) -> None:
    with EventLog.in_directory(tmp_path / "events", "nobody"):
        pass
    assert [check.what for check in prove(Evidence(tmp_path, {}), Plot(3, MOST_S)) if check.ok] == []


@pytest.mark.parametrize(("seconds", "over", "good"), [(299.0, True, True), (301.0, True, False), (9.0, False, False)])
def test_a_story_that_takes_too_long_or_does_not_end_is_none(seconds: float, over: bool, good: bool) -> None:
    events = [SimpleNamespace(t=at) for at in (100.0, 100.0 + seconds)]
    chain = SimpleNamespace(ended=object() if over else None)
    f: Any = SimpleNamespace(e=SimpleNamespace(records=events), chain=chain, plot=Plot(3, MOST_S))
    assert in_time(f).ok == good


def test_a_spare_that_made_none_before_was_not_warm() -> None:
    """A spare counts as warm only if it had started a process before the kill, and was not restarted since."""

    def child(t: float, name: str, *, up: bool = True) -> Record:
        return Record(t, t, "", "server_child", {"child": name, "up": up})

    started = [child(1.0, "leader"), child(1.0, "spare"), child(4.0, "follower-0"), child(4.0, "follower-1")]
    assert was_warm(started, kill=9.0, up=9.1)
    assert not was_warm([*started, child(8.0, "spare", up=False)], kill=9.0, up=9.1)
    assert not was_warm([*started, child(8.0, "spare", up=False), child(8.1, "spare")], kill=9.0, up=12.0)
    assert not was_warm([*started, child(9.0, "spare", up=False), child(9.1, "spare")], kill=9.0, up=12.0)
    assert not was_warm(started[:2], kill=3.0, up=4.0)
