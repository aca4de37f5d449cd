"""Draws plans of simulated outer jobs from seeds: processes, their speeds, and the faults that strike them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.planning.batches import Batches
from lab.outer.processes import TURNED, ClusterSpec

AWAY_S = 600.0
AWAY_LIMIT_S = 2000.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault that strikes at a given time (virtual s)."""

    at: float
    action: str
    """Kind of fault: "leader", "follower", "cluster" (killed; a follower is started again), "leader-effect",
    "follower-effect", "cluster-effect" (killed between two effects), "again" (a cluster is killed and started again),
    "freeze-leader", "freeze-follower", "freeze-cluster", "stream" (a cluster's is cut), "store" (fails), "doubt" (it
    stores, and its answers are lost), "older" (an older copy takes its place), "server" (leader and all followers are
    killed), "away" (the same, and none of them is started again for so long), "recut" (the same, and a start with other
    followers: "f3" asks for three, "" for nothing), "full" (a disk), "damage" (the newest durable file; "damage-both":
    both), "leave", "end" (an operator asks for it); of an elastic cluster: "rank" (killed), "rank-effect",
    "freeze-rank", "rank-join", "take-back" (a commit goes back).
    """
    name: str = ""
    lasts: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one simulated outer job.

    Attributes:
        seed: Seed of all chance.
        settings: Settings of the job.
        followers: Number of followers.
        clusters: Clusters of the job.
        faults: Faults that strike.
        poison: Fraction of all pushes that are not finite.
        length: Positions of an epoch; 0: each cluster has its own data.
        codec: Codec of pushes; int8 leaves a residual.
        answer_s: Seconds within which each push is answered; 0.0: nothing is promised.
        refused: Most pushes of one cluster that are rejected in a row; 0: nothing is promised.
        adopt_s: Seconds within which a cluster that wants a newer version has one; 0.0: nothing is promised.
        limit_s: Virtual time by which the job must be over.
    """

    seed: int
    settings: OuterSettings
    followers: int
    clusters: tuple[ClusterSpec, ...]
    faults: tuple[Fault, ...]
    poison: float = 0.0
    length: int = 320
    codec: str = "bf16"
    answer_s: float = 0.0
    refused: int = 0
    adopt_s: float = 0.0
    limit_s: float = 200.0

    @property
    def sums(self) -> tuple[int, int]:
        """Number of chain entries from one summary to the next, and number of versions in a summary
        (outer/rules/summaries.py).
        """
        return 20 + self.seed % 31, 2 + self.seed % 7


def any_plan(seed: int) -> Plan:
    """Plans a job with random settings and random faults."""
    random = Random(seed)
    settings = OuterSettings(
        policy=random.choice(("robust", "robust", "sync", "async", "di_ps")),
        inner_steps=4,
        batch=4,
        heartbeat_s=0.4,
        last_holder_timeout_s=8.0,
        reconnect_s=2.0,
        lease_ahead_s=random.choice((1.0, 4.0)),
        staleness_cap=random.choice((0, 2, 16)),
        epochs=random.choice((1, 2)),
    )
    followers = random.randint(1, 3)
    overlap = random.random() < 0.8
    clusters = tuple(
        ClusterSpec(f"c{i}", random.choice((0.0, 0.0, random.uniform(0.0, 4.0))), random.uniform(0.02, 0.1), overlap)
        for i in range(random.randint(1, 4))
    )
    actions = [*_SERVER, *_CLUSTER] if len(clusters) > 1 else _SERVER
    faults = tuple(_fault(random, random.choice(actions), clusters, followers) for _ in range(random.randint(0, 6)))
    poison = random.choice((0.0, 0.0, 0.1))
    return Plan(seed, settings, followers, clusters, faults, poison, codec=random.choice(("bf16", "int8")))


_SERVER = (
    "leader", "leader-effect", "freeze-leader", "follower", "follower-effect", "freeze-follower", "stream", "store",
    "doubt", "server", "full",
)  # fmt: skip
_CLUSTER = ("cluster", "cluster-effect", "freeze-cluster", "again", "leave")


def _fault(random: Random, action: str, clusters: Sequence[ClusterSpec], followers: int) -> Fault:
    # The first cluster stays: somebody must be there to the end.
    names = [spec.name for spec in clusters[1:] or clusters]
    on_follower = "follower" in action or action in ("full", "damage", "damage-both")
    name = f"f{random.randrange(followers)}" if on_follower else random.choice(names)
    return Fault(random.uniform(0.2, 8.0), action, name, random.uniform(0.2, 3.0))


def fragile_plan(seed: int) -> Plan:
    """Plans a job in which clusters die in the middle of pushes, and followers die too."""
    random = Random(seed)
    plan = any_plan(seed)
    clusters = tuple(ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.05)) for i in range(4))
    faults = [Fault(random.uniform(0.5, 3.0), random.choice(("cluster", "again")), spec.name) for spec in clusters[1:]]
    faults += [Fault(random.uniform(0.5, 3.0), "follower", f"f{random.randrange(3)}") for _ in range(2)]
    return replace(plan, followers=3, clusters=clusters, faults=tuple(faults))


def rolled_plan(seed: int) -> Plan:
    """Plans a job in which clusters die together with a follower, and other followers die during the rollback."""
    random, plan = Random(seed), fragile_plan(seed)
    faults = []
    for spec in plan.clusters[1:]:
        at = random.uniform(0.8, 5.0)
        faults += [Fault(at, random.choice(("cluster", "again")), spec.name), Fault(at + 0.05, "follower", "f0")]
        faults += [Fault(at + random.uniform(0.3, 1.3), "follower", f"f{number}") for number in (1, 2)]
    return replace(plan, faults=tuple(faults))


def frozen_plan(seed: int) -> Plan:
    """Plans a job in which leaders freeze, others take over, and the frozen ones wake; followers restart in between."""
    random = Random(seed)
    at, faults = 0.5, []
    for _ in range(3):
        lasts = random.uniform(1.2, 2.5)
        faults.append(Fault(at, "freeze-leader", lasts=lasts))
        faults.append(Fault(at + random.uniform(0.5, lasts), "follower", f"f{random.randrange(2)}"))
        at += random.uniform(1.0, 3.0)
    plan = any_plan(seed)
    clusters = (ClusterSpec("c0", 0.0, 0.04), ClusterSpec("c1", 0.0, 0.05))
    return replace(plan, followers=2, clusters=clusters, faults=tuple(faults))


def unheard_plan(seed: int) -> Plan:
    """Plans a job whose leaders die again and again between storing an answer and sending it."""
    random, plan = Random(seed), any_plan(seed)
    clusters = tuple(ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.04)) for i in range(2))
    faults = tuple(Fault(0.5 + 0.7 * turn + random.uniform(0.0, 0.5), "leader-effect") for turn in range(12))
    return replace(plan, clusters=clusters, faults=faults)


def batches_plan(seed: int) -> Plan:
    """Plans a job whose clusters differ in batch size and least batch, with epochs that are no multiple of them."""
    random, plan = Random(seed), any_plan(seed)
    clusters = []
    for spec in plan.clusters:
        size = random.choice((2, 4, 4, 6, 9))
        batches = Batches(size * random.choice((1, 1, 2)), size, random.choice((1, 2, 2, size)))
        clusters.append(replace(spec, batches=batches))
    return replace(plan, clusters=tuple(clusters), length=random.randint(200, 330))


def poisoned_plan(seed: int) -> Plan:
    """Plans a job in which a quarter of the pushes contain non-finite values."""
    return replace(any_plan(seed), poison=0.25)


def own_plan(seed: int) -> Plan:
    """Plans a job whose clusters have data of their own; it ends when the oldest cluster, or an operator, says so."""
    random, plan = Random(seed), any_plan(seed)
    clusters = tuple(replace(spec, loop=random.randint(60, 160)) for spec in plan.clusters)
    faults = plan.faults
    if random.random() < 0.3:
        faults = (*faults, Fault(random.uniform(1.0, 6.0), "end"))
    return replace(plan, clusters=clusters, length=0, faults=faults)


def strange_plan(seed: int) -> Plan:
    """Plans a job that clusters with another model try to join."""
    random, plan = Random(seed), any_plan(seed)
    starts = [random.choice((0.0, random.uniform(0.0, 6.0))) for _ in range(2)]  # one may be the first of all
    strangers = [ClusterSpec(f"x{i}", start, 0.05, strange=True) for i, start in enumerate(starts)]
    return replace(plan, clusters=(*plan.clusters, *strangers))


def damaged_plan(seed: int) -> Plan:
    """Plans a job in which disks fill up, and files are damaged while their followers are down."""
    random, plan = Random(seed), any_plan(seed)
    actions = ["full", "damage", "damage", "damage", "server"]
    faults = [_fault(random, random.choice(actions), plan.clusters, plan.followers) for _ in range(5)]
    if random.random() < 0.2:
        faults.append(_fault(random, "damage-both", plan.clusters, plan.followers))
    return replace(plan, faults=(*plan.faults, *faults))


def recut_plan(seed: int) -> Plan:
    """Plans a job whose server is restarted with other followers; a start may be killed, disks fill up, files get
    damaged.
    """
    random, plan = Random(seed), any_plan(seed)
    faults = [
        Fault(random.uniform(0.5, 8.0), "recut", random.choice(("f1", "f2", "f3", "f4", "f1", "f2", "f3", "g2", "")))
        for _ in range(random.randint(2, 5))
    ]
    at = random.choice(faults).at
    if random.random() < 0.5:  # while nobody is there to read it
        faults.append(Fault(at + random.uniform(0.0, 0.02), "damage", f"f{random.randrange(3)}"))
    if random.random() < 0.2:
        faults.append(_fault(random, "full", plan.clusters, plan.followers))
    for spec in plan.clusters[1:] if random.random() < 0.5 else ():
        faults.append(Fault(at + random.uniform(-0.2, 0.2), random.choice(("cluster", "again")), spec.name))
    return replace(plan, faults=(*plan.faults, *faults))


def passed_plan(seed: int) -> Plan:
    """Plans a job whose followers die again and again, also between writing a file and reporting it."""
    random, plan = Random(seed), any_plan(seed)
    faults = []
    for _ in range(10):
        action = random.choice(("follower", "follower-effect"))
        faults.append(Fault(random.uniform(0.3, 8.0), action, f"f{random.randrange(2)}"))
    return replace(plan, followers=2, faults=tuple(faults))


def thawed_plan(seed: int) -> Plan:
    """Plans a job whose clusters freeze long enough to be removed, and wake later."""
    random, plan = Random(seed), any_plan(seed)
    clusters = tuple(ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.06)) for i in range(3))
    faults = [
        Fault(random.uniform(0.5, 6.0), "freeze-cluster", spec.name, random.uniform(1.3, 3.0))
        for spec in clusters[1:]
        for _ in range(2)
    ]
    return replace(plan, clusters=clusters, faults=tuple(faults))


def holders_plan(seed: int) -> Plan:
    """Plans a job in which clusters freeze while followers lose their copies of these clusters' pushes."""
    random, plan = Random(seed), any_plan(seed)
    clusters = tuple(ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.06)) for i in range(2))
    faults = []
    for _ in range(3):
        at = random.uniform(0.5, 6.0)
        faults.append(Fault(at, "freeze-cluster", random.choice(clusters).name, random.uniform(2.0, 5.0)))
        faults.append(Fault(at + random.uniform(0.0, 0.1), "follower", f"f{random.randrange(2)}"))
    return replace(plan, followers=2, clusters=clusters, faults=tuple(faults))


def fickle_plan(seed: int) -> Plan:
    """Plans a job whose clusters sometimes offer other bytes under a push number already used."""
    plan = any_plan(seed)
    return replace(plan, clusters=tuple(replace(spec, fickle=True) for spec in plan.clusters))


def older_plan(seed: int) -> Plan:
    """Plans a job in which an older copy of the leader's store replaces the store."""
    random, plan = Random(seed), any_plan(seed)
    return replace(plan, faults=(Fault(random.uniform(2.0, 5.0), "older"),))


def away_plan(seed: int) -> Plan:
    """Plans a job whose whole server is down for ten minutes, while a cluster may die, restart, freeze or leave."""
    random, plan = Random(seed), any_plan(seed)
    at, shared = random.uniform(6.0, 12.0), random.random() < 0.5
    loop = 0 if shared else random.randint(900, 1300)
    clusters = tuple(
        ClusterSpec(f"c{i}", 0.0, random.uniform(0.4, 0.8), loop=loop) for i in range(random.randint(2, 3))
    )
    faults = [Fault(at, "away", lasts=AWAY_S)]
    if random.random() < 0.5:
        action = random.choice(("cluster", "again", "freeze-cluster", "leave"))
        faults.append(Fault(random.uniform(at, at + AWAY_S), action, clusters[-1].name, random.uniform(0.2, 3.0)))
    return replace(plan, clusters=clusters, faults=tuple(faults), length=480 * (not loop), limit_s=AWAY_LIMIT_S)


def elastic_plan(seed: int) -> Plan:
    """Plans a job with an elastic cluster whose ranks die, freeze and join, and whose commits are taken back."""
    random, plan = Random(seed), any_plan(seed)
    clusters = (
        ClusterSpec("c0", 0.0, random.uniform(0.02, 0.06)),
        ClusterSpec("e0", 0.0, random.uniform(0.02, 0.06), random.random() < 0.8, ranks=random.randint(1, 3)),
    )
    actions = ("rank", "rank-effect", "rank-join", "rank-join", "take-back", "take-back", "freeze-rank", "stream")
    faults = [
        Fault(random.uniform(0.3, 8.0), random.choice(actions), "e0", random.uniform(0.2, 2.0))
        for _ in range(random.randint(3, 9))
    ]
    faults += [fault for fault in plan.faults if fault.action in _SERVER and fault.action != "stream"]
    length, loop = (0, 120) if random.random() < 0.3 else (320, 0)
    clusters = (replace(clusters[0], loop=loop), replace(clusters[1], loop=loop))
    return replace(plan, clusters=clusters, faults=tuple(faults), length=length)


def newcomers_plan(seed: int) -> Plan:
    """Plans a job without faults under policy `sync`, whose newcomers take seconds to fetch their first version."""
    random = Random(seed)
    settings = replace(any_plan(seed).settings, policy="sync", staleness_cap=0)
    old = [ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.06)) for i in range(2)]
    new = [ClusterSpec(f"n{i}", random.uniform(0.5, 1.5), 0.05, first_s=random.uniform(4.0, 6.0)) for i in range(2)]
    return Plan(seed, settings, 1, (*old, *new), (), length=1280, answer_s=3.0)


def far_plan(seed: int) -> Plan:
    """Plans a job without faults in which some clusters need several rounds of the others to fetch one version."""
    random = Random(seed)
    fast = [ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.06)) for i in range(2)]
    far = [ClusterSpec(f"n{i}", random.uniform(0.0, 1.0), 0.05, fetch_s=random.uniform(1.0, 2.0)) for i in range(2)]
    elastic = random.randrange(3)
    far[0] = replace(far[0], ranks=elastic)
    settings = replace(any_plan(seed).settings, policy=random.choice(("robust", "async")))
    longest_s = 5 * max(spec.fetch_s for spec in far)
    return Plan(seed, settings, 2, (*fast, *far), (), length=960, adopt_s=longest_s)


def slow_plan(seed: int) -> Plan:
    """Plans a job with a cluster so slow (a hundredfold) that summaries drop its base while it trains one push."""
    random = Random(seed)
    fast = [ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.03)) for i in range(2)]
    slow = ClusterSpec("s0", random.uniform(0.0, 0.5), random.uniform(2.0, 3.0), random.random() < 0.8)
    settings = replace(
        any_plan(seed).settings,
        policy=random.choice(("robust", "async")),
        staleness_cap=random.choice((0, 2, 16)),
    )
    return Plan(seed, settings, random.randint(1, 2), (*fast, slow), (), length=480, limit_s=600.0)


def windows_plan(seed: int) -> Plan:
    """Plans a job with five clusters of unequal speed, whose pushes arrive one after the other."""
    random = Random(seed)
    settings = replace(any_plan(seed).settings, policy=random.choice(("robust", "di_ps")))
    clusters = tuple(ClusterSpec(f"c{i}", 0.0, random.choice((0.02, 0.04, 0.08))) for i in range(5))
    return Plan(seed, settings, 1, clusters, (), length=480)


def turned_plan(seed: int) -> Plan:
    """Plans a job in which one cluster's pushes always oppose all others and the momentum, while leaders take over."""
    random = Random(seed)
    settings = replace(any_plan(seed).settings, policy="robust", gate_again=random.choice((2, 4)), gate_limit=99.0)
    names = ("c0", "c1", "c2", TURNED)
    clusters = tuple(ClusterSpec(name, 0.0, random.uniform(0.03, 0.05), loop=160) for name in names)
    faults = tuple(Fault(random.uniform(1.0, 5.0), "leader") for _ in range(2))
    return Plan(seed, settings, 1, clusters, faults, length=0, refused=settings.gate_again)


def all_plan(seed: int) -> Plan:
    """Plans a job from one of the families of plans, which take turns by seed."""
    names = [name for name in FAMILIES if name != "all"]
    return FAMILIES[names[seed % len(names)]](seed)


FAMILIES: dict[str, Callable[[int], Plan]] = {
    "all": all_plan,
    "any": any_plan,
    "fragile": fragile_plan,
    "rolled": rolled_plan,
    "frozen": frozen_plan,
    "unheard": unheard_plan,
    "batches": batches_plan,
    "poisoned": poisoned_plan,
    "own": own_plan,
    "strange": strange_plan,
    "damaged": damaged_plan,
    "recut": recut_plan,
    "passed": passed_plan,
    "thawed": thawed_plan,
    "holders": holders_plan,
    "fickle": fickle_plan,
    "older": older_plan,
    "away": away_plan,
    "elastic": elastic_plan,
    "newcomers": newcomers_plan,
    "far": far_plan,
    "slow": slow_plan,
    "windows": windows_plan,
    "turned": turned_plan,
}
"""Families of plans, by name."""
