"""Tests whole jobs that are killed, stopped at their end, or led from wrong stores: the final weights count each sample
once.

The rig's size is set by environment variables: CHAOS_RIG_KILLS, CHAOS_RIG_STOPS and CHAOS_RIG_FOLDERS are how many jobs
of each kind there are, CHAOS_RIG_SEED where chance begins.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.harness import Harness

EPOCHS, SAMPLES = 2, 240
SEED = int(os.environ.get("CHAOS_RIG_SEED", "0"))
pytestmark = pytest.mark.slow


def times(kind: str, few: int) -> range:
    """Returns the seeds with which a test of this name is run."""
    return range(SEED, SEED + int(os.environ.get(f"CHAOS_RIG_{kind}", few)))


class Rig:
    """One job, its processes, and the final weights of its members."""

    def __init__(self, harness: Harness, folder: Path, seed: int) -> None:
        self.harness, self.folder = harness, folder
        self.chance = random.Random(seed)
        self.port = free_port()
        self.steps = EPOCHS * SAMPLES // 8
        """Steps of one member alone."""

    @property
    def state(self) -> Path:
        """Folder in which the scheduler and members save the files that outlive them."""
        return self.folder / "state" / "chaos-lightning" / f"default-{self.port}"

    def start(self, *names: str, **settings: Any) -> None:
        from counting_members import member

        for name in names:
            spec = {
                "name": name, "port": self.port, "out": str(self.folder), "samples": SAMPLES, "batch": 8,
                "epochs": EPOCHS, "saves_every": 7, "pace_s": 0.02, "settings": {"min_nodes": 1, **settings},
            }  # fmt: skip
            self.harness.start_function(name, member, spec)

    def goes_on(self, steps: int) -> None:
        """Waits until some member has committed `steps` further steps, or has ended."""
        children, begun = self.harness.children, len(self.harness.records)

        def there() -> bool:
            made = [r.node for r in self.harness.records[begun:] if r.name == "committed" and r.get("kind") == "step"]
            return max(map(made.count, children), default=0) >= steps or not all(c.running for c in children.values())

        self.harness.wait_until(there, f"{steps} steps")

    def ends(self, *names: str) -> None:
        """Checks that these members end with exit code 0, and that all final weights count each sample once."""
        for name in names:
            assert self.harness.wait_exit(name) == 0, name
        finals = {p.name: torch.load(p, weights_only=True) for p in sorted(self.folder.glob("final.*.pt"))}
        assert {p.split(".")[1] for p in finals} >= set(names), "who ends well has the final weights"
        for name, theta in finals.items():
            wrong = int((theta != 1).sum())
            assert not wrong, f"{name}: {int((theta == 0).sum())} samples lost, {int((theta > 1).sum())} more than once"


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Harness(tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "state")}, deadline_s=120.0) as harness:
        made = Rig(harness, tmp_path, request.getfixturevalue("seed"))
        try:
            yield made
        finally:
            end_scheduler(made)


def scheduler_of(rig: Rig) -> int:
    """Returns the process id of the scheduler that a member started, by the name of its event log; 0 if there
    is none.
    """
    logs = sorted(rig.harness.logs.glob("scheduler-default-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return next((pid for pid in reversed([int(p.stem.rpartition("-")[2]) for p in logs]) if serves(pid)), 0)


def serves(pid: int) -> bool:
    try:
        return "scheduler_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def end_scheduler(rig: Rig, number: int = 9) -> None:
    if pid := scheduler_of(rig):
        os.kill(pid, number)
        rig.harness.wait_until(lambda: not serves(pid), "the end of the scheduler")


@pytest.mark.parametrize("seed", times("KILLS", 2))
def test_whole_jobs_are_killed(rig: Rig, seed: int) -> None:
    """All processes of a job are killed at random steps, up to its end, with or without the scheduler; after restarts
    each sample counts once.
    """
    names = ["a", "b", "c"][: rig.chance.randint(2, 3)]
    rig.start(*names)
    for _ in range(rig.chance.randint(1, 3)):
        rig.goes_on(rig.chance.randint(3, 28))
        if rig.chance.random() < 0.5:
            end_scheduler(rig)
        for name in names:
            if rig.harness.children[name].running:
                rig.harness.kill(name)
        rig.start(*names)
    rig.ends(*names)


@pytest.mark.parametrize("seed", times("STOPS", 2))
def test_members_are_stopped_over_the_end(rig: Rig, seed: int) -> None:
    """A member is stopped while the others end the job, and a newcomer comes afterwards: all end with final weights
    that count each sample once.
    """
    rig.start("a", "b", "c")
    rig.harness.wait_for("view", lambda r: len(r.get("members", ())) == 3)
    rig.goes_on(rig.chance.randint(3, 14))
    stopped = rig.chance.choice(["a", "b", "c"])
    rig.harness.declare(stopped)
    rig.harness.stop(stopped)
    others = [n for n in "abc" if n != stopped]
    rig.ends(*others)
    rig.harness.cont(stopped)
    rig.ends(stopped)
    rig.start("d")
    rig.ends("d")


@pytest.mark.parametrize("seed", times("FOLDERS", 3))
def test_a_scheduler_begins_on_a_wrong_folder(rig: Rig, seed: int) -> None:
    """The scheduler restarts on a folder that is empty, an older copy, or another job's: members train on until the
    right one is back.
    """
    rig.start("a", "b")
    rig.harness.wait_for("view", lambda r: len(r.get("members", ())) == 2)
    rig.goes_on(4)
    older = rig.folder / "older"
    shutil.copytree(rig.state, older)
    rig.goes_on(4)
    end_scheduler(rig)
    right = rig.folder / "right"
    rig.state.rename(right)
    if seed % 3 == 0:
        rig.state.mkdir()
    elif seed % 3 == 1:
        shutil.copytree(older, rig.state)
    else:
        rig.state.mkdir()
        other_chain(rig)
    rig.start("c")
    rig.goes_on(4)
    end_scheduler(rig)
    shutil.rmtree(rig.state)
    right.rename(rig.state)
    rig.ends("a", "b", "c")


def other_chain(rig: Rig) -> None:
    """Writes a chain under the same job's name in which none of this job's members ever was."""
    from chaos_lightning.control.job_chain import JobChain
    from chaos_lightning.membership.effects import Persist
    from chaos_lightning.protocol.types import NO_VIEW, Member, View, ViewId
    from chaos_lightning.service.sqlite_store import SqliteStore

    stranger = Member("x~1", "x", "elsewhere", "127.0.0.1", 1)
    with JobChain(SqliteStore(rig.state / "chain.sqlite", "default")) as chain:
        term = chain.take_term()
        number = ViewId(term, 1)
        assert chain.append(Persist(1, "view", number, View(number, NO_VIEW, (stranger,), chain=chain.tip().chain))).ok
