"""One simulated outer job: from a seed to a verdict.

Theory of operation. A plan is drawn from the seed: how many followers and clusters, how fast they are, what goes wrong
when. The run ends when the job has ended and all clusters know. If that does not happen in time, the job is stuck,
which is a violation too, since every plan leaves a leader, all followers and one cluster in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from chaos_lightning.lab.outer.oracle import Oracle, Violation
from chaos_lightning.lab.outer.processes import ClusterProcess, ClusterSpec, FollowerProcess, LeaderProcess, Machines
from chaos_lightning.lab.outer.store import ChainStore, Disk
from chaos_lightning.lab.simulate.kernel import Kernel
from chaos_lightning.outer.chain import OuterChain
from chaos_lightning.outer.effects import EndAsked
from chaos_lightning.outer.settings import OuterSettings
from chaos_lightning.outer.types import (
    NO_VERSION,
    Cut,
    Durable,
    Entry,
    Joined,
    PushId,
    Removed,
    RolledBack,
    Round,
    Voided,
)

LEASE_S = 1.0
"""A leader that stands still for longer is replaced."""
CALM_S = 2.0
"""A fault is an excuse for so long after it is over."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a time (virtual s)."""

    at: float
    action: str
    """"leader", "follower", "cluster" (killed; a follower is started again), "leader-effect", "follower-effect",
    "cluster-effect" (killed between two effects), "again" (a cluster is killed and started again), "freeze-leader",
    "freeze-follower", "freeze-cluster", "stream" (a cluster's is cut), "store" (fails), "server" (leader and all
    followers are killed), "recut" (the same, and so many followers from then on), "full" (a disk), "damage" (the newest
    durable file; "damage-both": both), "leave", "end" (an operator asks for it)."""
    name: str = ""
    lasts: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        seed: Of all chance.
        settings: Of the job.
        followers: How many.
        clusters: Likewise.
        faults: What goes wrong.
        poison: This part of all pushes is not finite.
        length: Positions of an epoch; 0: each cluster has its own data.
        limit_s: By then it must be over.
    """

    seed: int
    settings: OuterSettings
    followers: int
    clusters: tuple[ClusterSpec, ...]
    faults: tuple[Fault, ...]
    poison: float = 0.0
    length: int = 320
    limit_s: float = 200.0

    @property
    def sums(self) -> tuple[int, int]:
        """Entries from one summary of the chain to the next, and how many versions one has (outer/summaries.py)."""
        return 20 + self.seed % 31, 2 + self.seed % 7


def any_plan(seed: int) -> Plan:
    """A plan of this seed."""
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
    return Plan(seed, settings, followers, clusters, faults, random.choice((0.0, 0.0, 0.1)))


_SERVER = (
    "leader", "leader-effect", "freeze-leader", "follower", "follower-effect", "freeze-follower", "stream", "store",
    "server", "full",
)  # fmt: skip
_CLUSTER = ("cluster", "cluster-effect", "freeze-cluster", "again", "leave")


def _fault(random: Random, action: str, clusters: Sequence[ClusterSpec], followers: int) -> Fault:
    # The first cluster stays: somebody must be there to the end.
    names = [spec.name for spec in clusters[1:] or clusters]
    on_follower = "follower" in action or action in ("full", "damage", "damage-both")
    name = f"f{random.randrange(followers)}" if on_follower else random.choice(names)
    return Fault(random.uniform(0.2, 8.0), action, name, random.uniform(0.2, 3.0))


def fragile_plan(seed: int) -> Plan:
    """Clusters die in the middle of pushes, and followers with them."""
    random = Random(seed)
    plan = any_plan(seed)
    clusters = tuple(ClusterSpec(f"c{i}", 0.0, random.uniform(0.02, 0.05)) for i in range(4))
    faults = [Fault(random.uniform(0.5, 3.0), random.choice(("cluster", "again")), spec.name) for spec in clusters[1:]]
    faults += [Fault(random.uniform(0.5, 3.0), "follower", f"f{random.randrange(3)}") for _ in range(2)]
    return replace(plan, followers=3, clusters=clusters, faults=tuple(faults))


def frozen_plan(seed: int) -> Plan:
    """Leaders stand still, others take over, and they wake; followers are started again meanwhile."""
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


def poisoned_plan(seed: int) -> Plan:
    """Many pushes are not finite."""
    return replace(any_plan(seed), poison=0.25)


def own_plan(seed: int) -> Plan:
    """Each cluster has its own data: the oldest one's verdict ends the job, or an operator does."""
    random, plan = Random(seed), any_plan(seed)
    clusters = tuple(replace(spec, loop=random.randint(60, 160)) for spec in plan.clusters)
    faults = plan.faults
    if random.random() < 0.3:
        faults = (*faults, Fault(random.uniform(1.0, 6.0), "end"))
    return replace(plan, clusters=clusters, length=0, faults=faults)


def strange_plan(seed: int) -> Plan:
    """Clusters of another job come by."""
    random, plan = Random(seed), any_plan(seed)
    starts = [random.choice((0.0, random.uniform(0.0, 6.0))) for _ in range(2)]  # one may be the first of all
    strangers = [ClusterSpec(f"x{i}", start, 0.05, strange=True) for i, start in enumerate(starts)]
    return replace(plan, clusters=(*plan.clusters, *strangers))


def damaged_plan(seed: int) -> Plan:
    """Disks fill, and files are damaged while followers are away."""
    random, plan = Random(seed), any_plan(seed)
    actions = ["full", "damage", "damage", "damage", "server"]
    faults = [_fault(random, random.choice(actions), plan.clusters, plan.followers) for _ in range(5)]
    if random.random() < 0.2:
        faults.append(_fault(random, "damage-both", plan.clusters, plan.followers))
    return replace(plan, faults=(*plan.faults, *faults))


def recut_plan(seed: int) -> Plan:
    """The server is stopped and started with another number of followers."""
    random, plan = Random(seed), any_plan(seed)
    faults = [Fault(random.uniform(0.5, 8.0), "recut", str(random.randint(1, 4))) for _ in range(3)]
    return replace(plan, faults=(*plan.faults, *faults))


FAMILIES: dict[str, Callable[[int], Plan]] = {
    "any": any_plan,
    "fragile": fragile_plan,
    "frozen": frozen_plan,
    "poisoned": poisoned_plan,
    "own": own_plan,
    "strange": strange_plan,
    "damaged": damaged_plan,
    "recut": recut_plan,
}


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    seed: int
    violation: str
    ended_s: float
    rounds: int = 0
    durable: int = 0
    rollbacks: int = 0
    voids: int = 0
    accepted: int = 0
    rejected: int = 0
    terms: int = 0
    log: list[str] = field(default_factory=list)


class World:
    """See the module."""

    def __init__(self, plan: Plan, machines: Machines | None = None) -> None:
        self.plan = plan
        self.machines = machines or Machines()
        self.kernel = Kernel(plan.seed)
        self.store = ChainStore()
        self.oracle = Oracle()
        self.chain = OuterChain(whole=True)
        """All that was stored, folded once more."""
        self.entries: list[Entry] = []
        self.settings = plan.settings
        self.length, self.shards, self.sums = plan.length, plan.followers, plan.sums
        self.disks = {f"f{i}": Disk() for i in range(plan.followers)}
        self.followers: dict[str, FollowerProcess] = {}
        self.clusters: dict[str, ClusterProcess] = {}
        self.leader: LeaderProcess | None = None
        self.finished = ""
        self.log: list[str] = []
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self._number = 0
        self._struck_at = self._lost_at = 0.0
        self._todo = len(plan.clusters) + len(plan.faults)
        self.kernel.at(0.0, self._lead)
        for name in self.disks:
            self.kernel.at(0.0, lambda n=name: self._follow(n))  # type: ignore[misc]
        for spec in plan.clusters:
            self.kernel.at(spec.start, lambda s=spec: self._cluster(s))  # type: ignore[misc]
        for fault in plan.faults:
            self.kernel.at(fault.at, lambda f=fault: self._strike(f))  # type: ignore[misc]

    def poisoned(self, push: PushId) -> bool:
        """Whether what this push holds is not finite: a function of its name, so all shards agree."""
        return push.number > 1 and Random(f"{self.plan.seed} {push}").random() < self.plan.poison

    def number(self) -> int:
        """One that nobody else got."""
        self._number += 1
        return self._number

    def say(self, words: str) -> None:
        self.log.append(f"{self.kernel.now:8.3f} {words}")

    def stored(self, entry: Entry) -> None:
        """An entry is durable."""
        self.chain.follow(entry)
        self.entries.append(entry)
        self.on_entry(entry)
        self.oracle.stored(self.chain, entry, self.disks)
        if isinstance(entry.body, Removed):
            self._check_removal(entry.body)
        if (
            isinstance(entry.body, Voided)
            and self.leader is not None
            and self.leader.chain.forgot(entry.body.offer.base)
        ):
            self._check_forgotten(entry.body)
        if isinstance(entry.body, Joined):
            who = entry.body.incarnation
            if self.clusters[who.cluster].machine.agreement != self.chain.agreement:
                raise Violation(f"{who} is in, and has another model")

    def _check_forgotten(self, body: Voided) -> None:
        """What a summary does not know is no base that its cluster has told of long ago (O1a)."""
        cluster = self.clusters[body.offer.push.incarnation.cluster]
        calm_s = self.kernel.now - max(cluster.thawed_at, cluster.cut_at, self._struck_at)
        if cluster.alive and not cluster.frozen and calm_s > CALM_S:
            raise Violation(f"{body.offer.push} is void, for a summary has forgotten {body.offer.base} (O1a)")

    def _check_removal(self, body: Removed) -> None:
        """Who lives and is heard is removed only if it asked, or must come in anew (O14)."""
        cluster = self.clusters.get(body.incarnation.cluster)
        silent = "heard" in body.reason or "come back" in body.reason
        if cluster is None or not silent or cluster.machine.incarnation != body.incarnation:
            return
        # That another leader took over is no excuse for it: everybody comes to that one within moments.
        struck_at = max(cluster.cut_at, self._struck_at) if "heard" in body.reason else 0.0
        calm_s = self.kernel.now - max(cluster.thawed_at, struck_at)
        if cluster.alive and not cluster.frozen and calm_s > CALM_S:
            raise Violation(f"{body.incarnation} lives, and is removed: {body.reason} (O14)")

    def led(self, leader: LeaderProcess, reason: str, *, finished: bool) -> None:
        """A leader decides nothing more; another one begins, unless the job is over."""
        self.say(f"leader {leader.term}: {reason}")
        if finished:
            self.finished = reason
            return
        if leader is self.leader:
            self.leader = None
            self.kernel.after(self.kernel.between(0.05, 1.0), self._lead)
        if leader.alive:
            leader.die()
            for stream in list(leader.streams.values()):
                stream.cut()

    def _lead(self) -> None:
        if self.leader is None:
            self.leader = LeaderProcess(self, "leader")
            self.say(f"leader {self.leader.term} leads")

    def _follow(self, name: str) -> None:
        before = self.followers.get(name)
        if before is not None and before.alive:
            return  # its folder is locked
        self.followers[name] = FollowerProcess(self, name)

    def _cluster(self, spec: ClusterSpec) -> None:
        self._todo -= 1
        if not self.finished:
            self.clusters[spec.name] = ClusterProcess(self, spec.name, spec)

    def follower_died(self, name: str) -> None:
        """It is started again after a while."""
        self.kernel.after(self.kernel.between(0.1, 1.5), lambda: self._follow(name))

    # ------------------------------------------------------------------ faults

    def _strike(self, fault: Fault) -> None:
        self._todo -= 1
        self._struck_at = self.kernel.now + fault.lasts
        self.say(f"{fault.action} {fault.name} {fault.lasts:.2f}")
        leader, after = self.leader, self.kernel.after
        match fault.action:
            case "leader" if leader is not None:
                leader.crash()
            case "leader-effect" if leader is not None:
                leader.die_at_effect = self.kernel.random.randrange(12)
            case "freeze-leader" if leader is not None:
                leader.freeze()
                after(fault.lasts, leader.thaw)
                if fault.lasts > LEASE_S:
                    after(LEASE_S, lambda: self._replace(leader))
                    after(fault.lasts + self.kernel.between(0.0, 0.4), lambda: self._notice(leader))
            case "end" if leader is not None:
                leader.deliver(lambda: leader.feed(EndAsked("an operator asked for it")))
            case "follower":
                self.followers[fault.name].kill()
            case "follower-effect":
                self.followers[fault.name].die_at_effect = self.kernel.random.randrange(12)
            case "full":
                self.disks[fault.name].full = True
                after(fault.lasts, lambda: self._empty(fault.name))
            case "damage" | "damage-both":
                self._damage(fault)
            case "freeze-follower":
                self.followers[fault.name].freeze()
                after(fault.lasts, self.followers[fault.name].thaw)
            case "server":
                if leader is not None:
                    leader.crash()
                for follower in list(self.followers.values()):
                    follower.kill()
            case "recut" if not self.store.down:
                if leader is not None:
                    leader.crash()
                for follower in list(self.followers.values()):
                    follower.kill()
                self._recut([f"f{number}" for number in range(int(fault.name))])
            case "store":
                self.store.down = True
                after(fault.lasts, self._store_is_back)
            case _ if fault.name in self.clusters:
                self._strike_cluster(fault, self.clusters[fault.name])

    def _strike_cluster(self, fault: Fault, cluster: ClusterProcess) -> None:
        match fault.action:
            case "cluster":
                cluster.kill()
            case "cluster-effect":
                cluster.die_at_effect = self.kernel.random.randrange(12)
            case "again" if cluster.alive:
                cluster.kill()
                self._todo += 1
                self.kernel.after(self.kernel.between(0.05, 2.0), lambda: self._cluster(cluster.spec))
            case "freeze-cluster":
                cluster.freeze()
                self.kernel.after(fault.lasts, cluster.thaw)
            case "stream" if cluster.stream is not None:
                cluster.stream.cut()
            case "leave":
                cluster.deliver(cluster.leave)

    def _replace(self, leader: LeaderProcess) -> None:
        if self.leader is leader and leader.frozen:
            self.leader = None
            self._lead()

    def _notice(self, leader: LeaderProcess) -> None:
        """It has woken, and sees that its lease has ended."""
        if self.leader is not leader:
            leader.crash()

    def _recut(self, names: Sequence[str]) -> None:
        """While the server stands its shards are cut anew, or somebody dies on the way (outer/recut.py)."""
        chain, disks = self.chain, self.disks
        if not chain.cut or chain.ended is not None or len(names) == len(chain.cut):
            return
        whole = [v for v, _ in chain.durable if all(v in disks[n].synced.keys() - disks[n].damaged for n in chain.cut)]
        if chain.durable and not whole:
            return
        newest = chain.durable[-1][0] if chain.durable else NO_VERSION
        for name in names:
            if name not in disks:
                disks[name] = Disk()
                self.kernel.after(0.1, lambda n=name: self._follow(n))  # type: ignore[misc]
        for disk in disks.values():
            for version in [version for version in disk.synced if version.number > newest.number]:
                disk.delete(version)
        lives = self.kernel.random.randrange(8)
        for version, name in ((version, name) for version in whole for name in names):
            if not lives:
                return
            lives -= 1
            disks[name].write(version, disks[chain.cut[0]].synced[version])  # all shards have one content here
        marks = tuple(Durable(v, tuple(disks[name].digests[v] for name in names)) for v in whole)
        entry = chain.entry(self.store.take_term(), Cut(tuple(names), marks))
        if not self.store.append(entry):
            self.stored(entry)

    def _damage(self, fault: Fault) -> None:
        """A follower's durable files, while nobody reads them; it is started again, and so it reads them."""
        durable = [version for version, _ in self.chain.durable]
        for version in durable if fault.action == "damage-both" else durable[-1:]:
            self.disks[fault.name].damage(version)
        self.followers[fault.name].kill()

    def _empty(self, name: str) -> None:
        self.disks[name].full = False

    def _store_is_back(self) -> None:
        self.store.down = False

    # ------------------------------------------------------------------ the run

    def _over(self) -> bool:
        """The job has ended and all know; or a shard is lost for good, and its follower has said so."""
        if self._todo > 0:
            return False
        if not any(f.machine.lost for f in self.followers.values() if f.alive):
            self._lost_at = self.kernel.now
        if self.kernel.now - self._lost_at > CALM_S:  # before that a mark may come that its disk has
            return True
        return bool(self.finished) and not any(cluster.alive for cluster in self.clusters.values())

    def _check_end(self) -> None:
        for name, follower in self.followers.items():
            if follower.alive and follower.machine.lost:
                if not {version for version, _ in self.chain.durable} <= self.disks[name].damaged:
                    raise Violation(f"{name} gives its shard up: {follower.machine.lost} (O6)")
                return
        for name, cluster in self.clusters.items():
            if cluster.left == self.finished and cluster.machine.base not in (NO_VERSION, self.chain.newest):
                raise Violation(f"{name} ends with {cluster.machine.base}, and the job with {self.chain.newest} (O16)")
            if cluster.machine.agreement != self.chain.agreement and "cannot join" not in cluster.left:
                raise Violation(f"{name} has another model and was not told")
            if missing := cluster.unaccounted() - self.oracle.counted:
                raise Violation(f"{name} trained inner step {min(missing)}, which is in no push (O9)")

    def run(self) -> Outcome:
        """Runs the plan to its end and returns the verdict."""
        violation = ""
        try:
            if not self.kernel.run(self.plan.limit_s, self._over):
                violation = f"stuck after {self.kernel.now:.1f} s: {self.describe()}"
            else:
                self._check_end()
        except (Violation, ValueError, AssertionError, KeyError) as found:
            violation = f"at {self.kernel.now:.3f} s: {type(found).__name__}: {found}"
        chain = self.chain
        bodies = [entry.body for entry in self.entries]
        rounds = [body for body in bodies if isinstance(body, Round)]
        return Outcome(
            self.plan.seed,
            violation,
            self.kernel.now,
            rounds=len(rounds),
            durable=sum(isinstance(b, Durable) for b in bodies),
            rollbacks=sum(isinstance(b, RolledBack) for b in bodies),
            voids=sum(isinstance(b, Voided) for b in bodies),
            accepted=sum(len(v.pushes) for v in chain.line()),
            rejected=sum(len(r.rejected) for r in rounds),
            terms=self.store.term,
            log=self.log,
        )

    def describe(self) -> str:
        """Where everybody stands."""
        chain = self.chain
        lines = [
            f"newest {chain.newest} durable {[str(v) for v, _ in chain.durable]} "
            f"epoch {chain.leases and (chain.leases.epoch, chain.leases.left)} "
            f"leader {self.leader and self.leader.machine.desk.persisting}"
        ]
        for name, follower in self.followers.items():
            machine = follower.machine
            lines.append(
                f"{name} {machine.version} alive={follower.alive} disk={[str(file.version) for file in machine.disk]}"
            )
        for name, cluster in self.clusters.items():
            c = cluster.machine
            lines.append(
                f"{name} {c.incarnation} alive={cluster.alive} {c.phase} base={c.base} open={c.open} "
                f"left={cluster.left!r} free={c.free_spans()} unpushed={c.unpushed} due={c._due} served={c._served}"
            )
        return "\n  ".join([*lines, *self.log])
