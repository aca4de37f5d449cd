"""Measures a follower's peak memory in a running job, in bytes per parameter of its shard.

A server as a user starts it (one leader, two followers, a warm spare) and three clusters that train until so many
versions are durable. Every few milliseconds the kernel is asked what a follower holds in anonymous memory; what it held
before a cluster came is no part of it, and is given. A follower holds its state (12 bytes per parameter), a copy of it
while that is written (12), two served versions in bf16 (4), and each push that it keeps until the second newest
durable version holds it (2). How many these were at most, of all and of one start of a cluster, is in its event log;
the latter has a bound of its own. The bound of the memory holds for all the rest. What is left without 8 MiB, for what
its interpreter, its connections and its heap gather as they work, however large the model (measured: 5), is given, too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, Result
from benchmarks.outer_clusters import FOLLOWERS, outer_scene
from benchmarks.workers import context, scratch
from chaos_lightning.events.events import Record

STATE, SNAPSHOT, VERSIONS, PUSH = 12, 12, 4, 2
WORKING_NBYTES = 8 * MIB
LEAST_MIB = 128
"""With less, what it gathers is as much as a push: there is no bound."""
MOST_PUSHES_OF_A_CLUSTER = 7
MOST_NBYTES = STATE + SNAPSHOT + VERSIONS
INNER_STEPS = 32
PACE_S = 0.02
LOOK_S = 0.01


def held_nbytes(pid: int) -> int:
    """Returns the anonymous memory of a process in bytes, without mapped programs and files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


class Peaks(threading.Thread):
    """Thread that reads the memory of processes again and again; `most` has each one's peak, in bytes."""

    def __init__(self, pids: dict[str, int]) -> None:
        super().__init__(name="chaos-benchmark-memory", daemon=True)
        self._pids, self._over = pids, threading.Event()
        self.most = {name: held_nbytes(pid) for name, pid in pids.items()}

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            for name, pid in self._pids.items():
                self.most[name] = max(self.most[name], held_nbytes(pid))

    def end(self) -> dict[str, int]:
        """Ends the thread; returns each process's peak, in bytes.

        Raises:
            RuntimeError: The thread ended early, since a watched process was gone.
        """
        if not self.is_alive():
            raise RuntimeError(f"memory of {', '.join(self._pids)} was not watched to the end: one of them is gone")
        self._over.set()
        self.join()
        return self.most


def memory(result: Result, params_mib: int, durable: int) -> None:
    """Adds the peak memory of each follower; the bound is 28 bytes per parameter, plus 2 for each push that it kept at
    once.

    Args:
        result: Takes the figures.
        params_mib: MiB of fp32 parameters of the model; followers share them.
        durable: Durable versions to wait for.
    """
    told: dict[str, Any] = {"params_mib": params_mib, "pace_s": PACE_S, "inner_steps": INNER_STEPS}
    ctx = context("chaos_lightning.diloco")
    with scratch() as folder, outer_scene("memory", folder, ctx, train=False, **told) as scene:
        pids = {}
        for name in (f"follower-{number}" for number in range(FOLLOWERS)):
            scene.wait_first(0, lambda r, name=name: r.name == "follower_started" and r.node == name, name)
            pids[name] = scene.child(name)
        peaks = Peaks(pids)
        usual = dict(peaks.most)
        peaks.start()
        scene.all_train()

        def enough() -> bool:
            return sum(r.name == "entry" and r["kind"] == "Durable" for r in scene.watch.records) >= durable

        scene.until(enough, f"{durable} durable versions")
        most = peaks.end()
        staged = [r for r in scene.watch.records if r.name == "push_staged"]
    parameters = params_mib * MIB / 4 / FOLLOWERS
    worst = 0.0
    for name in pids:
        mine = [r for r in staged if r.node == name]
        worst = max(worst, peak(result, f"{params_mib} MiB, {name}", most[name] - usual[name], parameters, mine))
        result.add(f"{params_mib} MiB, {name}: what it held before", usual[name] / MIB, "MiB")
    result.headline.append(f"a follower's peak: {worst:.1f} bytes per parameter and {PUSH} for each push")


def peak(result: Result, key: str, nbytes: int, parameters: float, staged: Sequence[Record]) -> float:
    """Adds the figures of one follower; returns its peak without the pushes that it kept, in bytes per parameter.

    Args:
        result: Takes the figures.
        key: First part of the figures' titles: size of the job, and name of the follower.
        nbytes: Peak of the follower's memory beyond what it held at its start, in bytes.
        parameters: Number of parameters of the follower's shard.
        staged: The follower's events `push_staged`, one for each push.
    """
    held = max(r["held"] for r in staged)
    result.add(f"{key}: pushes that it held at most", held, "count")
    of_one = max(r["held_of_one"] for r in staged)
    result.add(f"{key}: pushes of one cluster that it held at most", of_one, "count", MOST_PUSHES_OF_A_CLUSTER)
    whole = nbytes / parameters
    beside = whole - PUSH * held
    bound = MOST_NBYTES if parameters * FOLLOWERS >= LEAST_MIB * MIB / 4 else None
    result.add(f"{key}: peak memory ({whole:.1f}) beside pushes", beside, "B/param", bound)
    result.add(f"{key}: the same without 8 MiB", beside - WORKING_NBYTES / parameters, "B/param")
    return beside
