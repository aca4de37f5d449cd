"""Measures elastic clusters behind a slow link: the link's bytes, the costs of ranks that die and join, and the waits
of training.

One cluster of 1, 2 and 4 ranks trains by itself (benchmarks/outer_ranks.py); the server has a leader and two followers.
Between the cluster and the server lie 100 Mbps each way for all ranks together, by the relay, which counts all bytes:
those of handshakes, questions and manifests, too. A pause in each step stands for heavier computing. It is chosen so
that a push takes half a round, and so does a version; how far it is from that, over the rounds, has a bound.

*Bytes per round* are compared with one push and one version as the cluster's own log tells their sizes. They are read
where nothing is under way in that direction: pushes when all followers have one, versions when one was fetched.

*A rank is killed in mid-push*, when two thirds of the push have passed, the first rank and another one in turn. Begun
anew, the push would cost these two thirds once more, and what is asked of the dead rank is less. The followers tell how
many bytes they verified for it in all attempts, and from whom. *A rank joins between push and adoption*: the link
stands still from the freezing until it is in; then all ranks' hashes are compared at the next proof.

*Training waits* is what the cluster's log tells with its adoptions (`waited_s`): all time in which the training thread
does something for outer sync, or waits for it, as part of all time. Steps that the pause alone would allow are given
beside those that were made. Without overlap it waits for each answer and version, which is given.

In the end all ranks leave, and the steps in pushes that count are compared with those that the inner job committed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, Options, Result, run
from benchmarks.outer_ranks import CLUSTER, FAR_BPS, FOLLOWERS, NestedScene, nested_scene
from benchmarks.workers import context, scratch
from chaos_lightning.events.events import Record
from chaos_lightning.observe.audit import violations
from chaos_lightning.observe.outer.audit import audit_folder

RANKS = (1, 2, 4)
STRUCK = (2, 4)
"""Ranks of the clusters at which the blows fall; the first one is all there is with --quick."""
KILLED_AT = 2 / 3
"""Share of a push's time after which a rank is killed."""
INNER_STEPS = 16
BOUND_TRAFFIC = 1.02
BOUND_WAITS = 0.01
BOUND_FROM_HALF = 0.15
"""A push takes from 0.35 to 0.65 of a round: else the run shows another case than the one it is about."""
REQUESTS_NBYTES = 4 * MIB
"""At most: pieces of 1 MiB of which each follower has two under way at a rank, which go with it."""


@dataclass
class Counted:
    """Bytes that have crossed the slow link so far, by direction, and the events at which they were read.

    Attributes:
        pushed, fetched: Bytes that have passed.
        push, version: The events at which these were read.
    """

    pushed: int
    fetched: int
    push: Record
    version: Record


def passed(scene: NestedScene) -> tuple[int, int]:
    """Returns the bytes that have crossed the slow link from the cluster and to it."""
    ways = scene.relay.passed()
    return tuple(sum(n for ends, n in ways.items() if ends[way] == CLUSTER) for way in (0, 1))  # type: ignore[return-value]


def count(scene: NestedScene) -> Counted:
    """Reads the byte counters after the next push, and again after the next version that follows it."""
    push = scene.next("push_frozen", time.monotonic_ns())
    staged = scene.staged(push["push"])
    pushed = passed(scene)[0]
    version = scene.next("version_fetched", int(1e9 * max(r.mono for r in staged)))
    return Counted(pushed, passed(scene)[1], push, version)


def between(scene: NestedScene, name: str, first: Record, last: Record) -> list[Record]:
    """Returns the events of this name after `first`, up to and including `last`."""
    return [r for r in scene.watch.records if r.name == name and first.mono < r.mono <= last.mono]


def pace_s(params_mib: float) -> float:
    """Returns the seconds of a step for which sending a push in bf16 takes half a round."""
    return 2 * (8 * params_mib * MIB / 2 / FAR_BPS) / INNER_STEPS


def steady(result: Result, scene: NestedScene, title: str, rounds: int, *, overlap: bool) -> None:
    """Adds the figures of some rounds in which no rank dies."""
    scene.rounds(2)
    before = count(scene)
    scene.rounds(rounds)
    after = count(scene)
    pushes = between(scene, "push_frozen", before.push, after.push)
    versions = between(scene, "version_fetched", before.version, after.version)
    adopted = between(scene, "version_adopted", before.version, after.version)
    moved = after.pushed - before.pushed + after.fetched - before.fetched
    each = pushes[0]["nbytes"] + versions[0]["nbytes"]
    wanted = sum(r["nbytes"] for r in (*pushes, *versions))
    result.add(f"{title}: rounds", len(pushes), "count")
    result.add(f"{title}: far link, of one push and one version ({each / MIB:.1f} MiB)", moved / wanted, "ratio",
               BOUND_TRAFFIC)  # fmt: skip
    seconds = adopted[-1].mono - adopted[0].mono
    waited = sum(r["waited_s"] for r in adopted[1:])
    result.add(f"{title}: training waits", waited / seconds, "ratio", BOUND_WAITS if overlap else None)
    steps = sum(r["steps"] for r in between(scene, "inner_steps", adopted[0], adopted[-1]))
    result.add(f"{title}: steps, of what the pause allows", steps * scene.told["pace_s"] / seconds, "ratio")
    part = push_part(scene, pushes, seconds / (len(adopted) - 1))
    result.add(f"{title}: a push takes, of a round", part, "ratio")
    if overlap:  # without it rounds are longer, for they contain the transfers
        result.add(f"{title}: from half a round", abs(part - 0.5), "ratio", BOUND_FROM_HALF)
    result.details[title] = {
        "waited_s": [r["waited_s"] for r in adopted],
        "sources": [r.get("sources") for r in scene.watch.records if r.name == "push_staged"],
    }


def push_part(scene: NestedScene, pushes: list[Record], round_s: float) -> float:
    """Returns the mean time from a push's freezing until all followers have it, as a share of a round."""
    ends = {r["push"]: r.mono for r in scene.watch.records if r.name == "push_staged"}
    took = [ends[r["push"]] - r.mono for r in pushes]
    return sum(took) / len(took) / round_s


def vain_bound(push_nbytes: int) -> float | None:
    """Returns the share of a push that may be sent in vain when a rank is killed; None if all bytes sent before may be
    lost.
    """
    bound = REQUESTS_NBYTES / push_nbytes + BOUND_TRAFFIC - 1
    return bound if bound < KILLED_AT else None


def kills(result: Result, scene: NestedScene, title: str, count_: int) -> None:
    """Kills a rank while a push is being sent, the first and the last rank in turn, and starts a replacement; adds
    figures.
    """
    again, lost, from_whom = [], [], []
    for turn in range(count_):
        heir = scene.prepare_rank()
        scene.rounds(1)
        victim = sorted(scene.clusters, key=lambda name: int(name[1:]))[0 if turn % 2 == 0 else -1]
        push = scene.next("push_frozen", time.monotonic_ns())
        before = passed(scene)[0]
        much = KILLED_AT * push["nbytes"]
        scene.until(lambda at=before, much=much: passed(scene)[0] - at > much, "two thirds of the push")
        scene.kill_rank(victim)
        staged = scene.staged(push["push"])
        moved = passed(scene)[0] - before
        again.append(sum(sum(r["sources"].values()) for r in staged) / push["nbytes"])
        lost.append((moved - push["nbytes"]) / push["nbytes"])
        from_whom.append([r.get("sources") for r in staged])
        answer = scene.next("push_answered", int(push.mono * 1e9), push=push["push"])
        assert answer["answer"] == "accepted", answer
        scene.begin_rank(heir)
        scene.next("joined", int(answer.mono * 1e9), node=heir)
    frozen = [r["push"] for r in scene.watch.records if r.name == "push_frozen"]
    key = f"{title}, a rank is killed in mid-push"
    result.add(f"{key}: pushes frozen twice, of {len(frozen)}", len(frozen) - len(set(frozen)), "count", 0)
    result.add(f"{key}: verified for the push, of its size, worst of {len(again)}", max(again), "ratio", 1.0)
    size = next(r["nbytes"] for r in scene.watch.records if r.name == "push_frozen")
    vain = f"{key}: passed the far link in vain, of its size, worst of {len(lost)}"
    result.add(vain, max(lost), "ratio", vain_bound(size))
    result.details[key] = {"verified": again, "in vain": lost, "sources": from_whom}


def joins(result: Result, scene: NestedScene, title: str, count_: int) -> None:
    """Starts a rank between a push and the adoption of its version, and makes it leave after that; adds figures."""
    different, between_ = 0, 0
    for _ in range(count_):
        newcomer = scene.prepare_rank()
        scene.rounds(1)
        push = scene.next("push_frozen", time.monotonic_ns())
        for follower in FOLLOWERS:
            scene.relay.stall(CLUSTER, follower)
        scene.begin_rank(newcomer)
        joined = scene.next("joined", int(push.mono * 1e9), node=newcomer)
        for follower in FOLLOWERS:
            scene.relay.restore(CLUSTER, follower)
        adopted = scene.next("version_adopted", int(push.mono * 1e9))
        between_ += adopted.mono > joined.mono
        proofs = proof(scene, joined), proof(scene, adopted)
        different += sum(len(hashes) != 1 for hashes in proofs)
        scene.leave_rank(newcomer)
    key = f"{title}, a rank joins between push and adoption"
    result.add(f"{key}: joins that were elsewhere, of {count_}", count_ - between_, "count", 0)
    result.add(f"{key}: proofs in which hashes differ, of {2 * count_}", different, "count", 0)


def proof(scene: NestedScene, since: Record) -> set[str]:
    """Returns the state hashes of all ranks at the first slot after an event that all of them report; one if they
    agree.
    """

    def found() -> set[str]:
        told: dict[int, list[str]] = {}
        for r in scene.watch.records:
            if r.name == "state_hash" and r.mono > since.mono:
                told.setdefault(r["seq"], []).append(r["hash"])
        whole = (set(hashes) for _, hashes in sorted(told.items()) if len(hashes) == len(scene.clusters))
        return next(whole, set())

    return set(scene.until(found, "a proof of all ranks"))


def close(result: Result, scene: NestedScene, title: str, events: Path) -> None:
    """Makes all ranks leave, compares the steps counted in pushes with those trained, and audits the logs."""
    for name in sorted(scene.clusters, key=lambda name: int(name[1:])):
        scene.leave_rank(name)
    committed = max(r["step"] for r in scene.watch.records if r.name == "committed")

    def counted() -> int:
        rounds = (r["body"] for r in scene.watch.records if r.name == "entry" and r["kind"] == "Round")
        return sum(each["offer"]["steps"] for body in rounds for each in body["accepted"])

    scene.until(lambda: any(r.name == "entry" and r["kind"] == "Removed" for r in scene.watch.records), "the end")
    committed = max(r["step"] for r in scene.watch.records if r.name == "committed")
    result.add(f"{title}: inner steps lost, of {committed}", committed - counted(), "count", 0)
    found = [line for judged in audit_folder(events) for line in violations(judged.findings)]
    for line in found[:10]:
        print(f"    audit: {line}")
    result.add(f"{title}: audit of the event logs, violations", len(found), "count", 0)


def measure(result: Result, folder: Path, ctx: Any, args: Any, ranks: int, *, overlap: bool) -> None:
    """Measures one cluster from its start to its end."""
    title = f"{ranks} rank{'s' if ranks > 1 else ''}{'' if overlap else ', without overlap'}"
    print(f" {title}", flush=True)
    told = {
        "params_mib": args.params_mib,
        "pace_s": pace_s(args.params_mib),
        "inner_steps": INNER_STEPS,
        "overlap": overlap,
    }
    place = folder / title.replace(",", "").replace(" ", "-")
    with nested_scene(place, ctx, ranks, **told) as scene:
        steady(result, scene, title, args.rounds, overlap=overlap)
        if ranks in STRUCK and overlap:
            kills(result, scene, title, args.kills)
            joins(result, scene, title, args.joins)
        close(result, scene, title, place / "events")


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_count("--rounds", 10, 5, "in which nobody dies, of each cluster")
    p.add_count("--kills", 5, 1, "of a rank in mid-push")
    p.add_count("--joins", 5, 1, "between push and adoption")
    p.add_argument("--params-mib", type=float, default=24.0, help="MiB of fp32 parameters")
    p.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help=f"with --quick: {STRUCK[0]} alone")
    p.add_argument("--keep", default="", help="folder that keeps event logs and files")
    args = p.parse_args()
    result = Result("outer_nested")
    ctx = context("benchmarks.outer_ranks", "lightning.pytorch", "chaos_lightning.strategies")
    with scratch() as scratched:
        folder = Path(args.keep or scratched)
        for ranks in STRUCK[:1] if args.quick else args.ranks:
            measure(result, folder, ctx, args, ranks, overlap=True)
        measure(result, folder, ctx, args, STRUCK[0], overlap=False)
    for figure in result.figures:
        if "far link, of" in figure.name or "training waits" in figure.name:
            result.headline.append(f"{figure.name.partition(' (')[0]} {figure.value:.4g}")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
