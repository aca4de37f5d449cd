"""Runs one simulated outer job, from a seed to a verdict.

Theory of operation. A plan is drawn from the seed: how many followers and clusters, how fast they are, what goes wrong
when. The run ends when the job has ended and all clusters know. If that does not happen in time, the job is stuck,
which is a violation too, since every plan leaves a leader, all followers and one cluster in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.effects import EndAsked
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Durable,
    Ended,
    Entry,
    IncarnationId,
    Joined,
    Leased,
    PushId,
    Removed,
    RolledBack,
    Round,
    VersionId,
    Voided,
)
from chaos_lightning.planning.fleet.kernel import Kernel
from lab.outer.oracle import Oracle, Violation
from lab.outer.plans import Fault, Plan
from lab.outer.processes import ClusterProcess, ClusterSpec, FollowerProcess, LeaderProcess, Machines
from lab.outer.ranks import RanksJob
from lab.outer.starting import ServerStart
from lab.outer.store import Disk

LEASE_S = 1.0
"""Seconds of standing still after which a leader is replaced."""
CALM_S = 2.0
"""Seconds for which a fault is an excuse after it is over."""
HEARD_S = 0.5
"""Seconds on a stream after which a peer counts as heard."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one simulated outer job."""

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
    """Simulated outer job with all its processes."""

    def __init__(self, plan: Plan, machines: Machines | None = None) -> None:
        self.plan = plan
        self.machines = machines or Machines()
        self.kernel = Kernel(plan.seed)
        self.store = self.machines.store()
        self.oracle = Oracle()
        self.chain = OuterChain(whole=True)
        """Chain of all entries that were stored, folded once more."""
        self.entries: list[Entry] = []
        self.settings = plan.settings
        self.length, self.codec, self.shards = plan.length, plan.codec, plan.followers
        self.residual = plan.codec == "int8" and not plan.settings.pushes_parameters
        self.sums = plan.sums
        self.disks = {f"f{i}": Disk(synced_first=self.machines.syncs_first) for i in range(plan.followers)}
        self.names = [*self.disks]
        """Names of the followers that are kept running."""
        self.start: ServerStart | None = None
        """Start of the whole server; while it goes on nothing else of the server runs."""
        self.followers: dict[str, FollowerProcess] = {}
        self.clusters: dict[str, ClusterProcess | RanksJob] = {}
        self.leader: LeaderProcess | None = None
        self.finished = ""
        self.went_back = False
        """Whether an older copy of the store took its place."""
        self.log: list[str] = []
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self._number = 0
        self._removed_at: dict[IncarnationId, float] = {}
        self._struck_at = self._lost_at = 0.0
        self._away_until = 0.0
        """Time before which no process of the server is started."""
        self._todo = len(plan.clusters) + len(plan.faults)
        self.kernel.at(0.0, self._lead)
        for name in self.disks:
            self.kernel.at(0.0, lambda n=name: self._follow(n))  # type: ignore[misc]
        for spec in plan.clusters:
            self.kernel.at(spec.start, lambda s=spec: self._cluster(s))  # type: ignore[misc]
        for fault in plan.faults:
            self.kernel.at(fault.at, lambda f=fault: self._strike(f))  # type: ignore[misc]

    def poisoned(self, push: PushId) -> bool:
        """Returns whether a push contains non-finite values; depends on its name only, so that all shards agree."""
        return push.number > 1 and Random(f"{self.plan.seed} {push}").random() < self.plan.poison

    @property
    def host(self) -> LeaderProcess | None:
        """Leader that rules now; None if none does."""
        return self.leader

    def number(self) -> int:
        """Returns a number that no earlier call returned."""
        self._number += 1
        return self._number

    def say(self, words: str) -> None:
        self.log.append(f"{self.kernel.now:8.3f} {words}")

    def stored(self, entry: Entry) -> None:
        """Takes in an entry that the store has made durable, and checks the rules about it."""
        if entry.term != self.store.term:
            raise Violation(f"entry {entry.position} of term {entry.term} is written in term {self.store.term} (O7)")
        gate, reopened = self.chain.gate, {*self.chain.reopened}
        self.oracle.ordered(self.chain, entry)
        self.chain.follow(entry)
        self.entries.append(entry)
        self.on_entry(entry)
        self.oracle.stored(self.chain, entry, self.disks)
        if isinstance(entry.body, Leased):
            known = {spec.name: spec.batches for spec in self.plan.clusters}
            self.oracle.leased(self.chain, entry.body, known)
        body = entry.body
        if isinstance(body, Round):
            self.oracle.judged(gate, body, self.settings)
            if self.plan.refused:
                self.oracle.refused(body, self.plan.refused)
            self._check_copy()
            self._check_waits()
            self._check_adoptions()
        if isinstance(body, Ended):
            self.oracle.ends(body, reopened)
        if isinstance(body, Removed):
            self._removed_at[body.incarnation] = self.kernel.now
            self._check_removal(body)
        if isinstance(body, Voided) and self.leader is not None and self.leader.chain.forgot(body.offer.base):
            self._check_forgotten(body)
        if isinstance(body, Joined) and self.clusters[body.incarnation.cluster].machine.agreement != (
            self.chain.agreement
        ):
            raise Violation(f"{body.incarnation} is in, and has another model")

    def _check_copy(self) -> None:
        """Checks that a leader with an older copy of the store decides nothing once a cluster has told it of a newer
        version (O4).
        """
        if not self.went_back:
            return
        for name, cluster in self.clusters.items():
            stream, known = cluster.stream, (cluster.machine.base, cluster.machine.newest)
            heard = stream is not None and stream.host is self.leader and self.kernel.now - stream.since > HEARD_S
            if cluster.alive and heard and any(v != NO_VERSION and v not in self.chain.versions for v in known):
                raise Violation(f"a round is decided on an older copy of the store, and {name} knows {known} (O4)")

    def _check_waits(self) -> None:
        """Checks that each push is answered within the time that the plan promises, if it does (O13)."""
        for name, cluster in self.clusters.items():
            offer = cluster.machine.open
            if self.plan.answer_s and offer is not None:
                waited_s = self.kernel.now - self.oracle.frozen_at[offer.push]
                if waited_s > self.plan.answer_s:
                    raise Violation(f"{name} has waited {waited_s:.1f} s for an answer to {offer.push} (O13)")

    def _check_adoptions(self) -> None:
        """Checks that a cluster that wants a newer version adopts one within the time that the plan promises, if it
        does (O8c).
        """
        for name, cluster in self.clusters.items():
            waited_s = self.kernel.now - cluster.seeks_since if isinstance(cluster, ClusterProcess) else 0.0
            if self.plan.adopt_s and waited_s > self.plan.adopt_s:
                raise Violation(f"{name} has wanted a newer version for {waited_s:.1f} s (O8c)")

    def _check_forgotten(self, body: Voided) -> None:
        """Checks that no push is void because a summary dropped its base, if the push's cluster had contact with the
        leader (O1a).
        """
        cluster = self.clusters[body.offer.push.incarnation.cluster]
        calm_s = self.kernel.now - max(cluster.thawed_at, cluster.cut_at, self._struck_at)
        if cluster.alive and not cluster.frozen and calm_s > CALM_S:
            raise Violation(f"{body.offer.push} is void, for a summary has forgotten {body.offer.base} (O1a)")

    def _check_removal(self, body: Removed) -> None:
        """Checks that a cluster that is alive and connected is not removed for silence (O14)."""
        who = body.incarnation
        cluster = self.clusters.get(who.cluster)
        silent = "heard" in body.reason or "come back" in body.reason
        if cluster is None or not silent or cluster.machine.incarnation != who or not cluster.alive:
            return
        if cluster.frozen and self.kernel.now - cluster.frozen_since < self.settings.last_holder_timeout_s:
            self._check_holder(cluster, who)
        # That another leader took over is no excuse for it: everybody comes to that one within moments.
        struck_at = max(cluster.cut_at, self._struck_at) if "heard" in body.reason else 0.0
        calm_s = self.kernel.now - max(cluster.thawed_at, struck_at)
        if not cluster.frozen and calm_s > CALM_S:
            raise Violation(f"{who} lives, and is removed: {body.reason} (O14)")

    def _check_holder(self, cluster: ClusterProcess | RanksJob, who: IncarnationId) -> None:
        """Checks that a silent cluster that alone holds a push some shard lacks is not removed before
        `last_holder_timeout_s` (O14).
        """
        for push in sorted(self.chain.needed()):
            if push.incarnation != who or push not in cluster.bytes:
                continue
            for name in self.chain.cut:
                follower = self.followers.get(name)
                lacks = follower is not None and follower.alive and push not in follower.parts
                if lacks and follower is not None and self.kernel.now - follower.born > HEARD_S:
                    raise Violation(f"{who} is removed, and {name} lacks {push}, which nobody else holds (O14)")

    def led(self, leader: LeaderProcess, reason: str, *, finished: bool) -> None:
        """Handles a leader's end; another leader begins unless the job is over."""
        self.say(f"leader {leader.term}: {reason}")
        if finished or (self.went_back and "an older copy" in reason):
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
        if self.kernel.now < self._away_until:
            self.kernel.at(self._away_until, self._lead)
        elif self.leader is None and self.start is None:
            self.leader = LeaderProcess(self, "leader")
            self.say(f"leader {self.leader.term} leads")

    def _follow(self, name: str) -> None:
        if self.kernel.now < self._away_until:
            self.kernel.at(self._away_until, lambda: self._follow(name))
            return
        before = self.followers.get(name)
        if self.start is not None or name not in self.names or (before is not None and before.alive):
            return
        self.followers[name] = FollowerProcess(self, name)

    def _cluster(self, spec: ClusterSpec) -> None:
        self._todo -= 1
        if not self.finished:
            self.clusters[spec.name] = (RanksJob if spec.ranks else ClusterProcess)(self, spec.name, spec)

    def follower_died(self, name: str) -> None:
        """Starts a dead follower again after a while."""
        self.kernel.after(self.kernel.between(0.1, 1.5), lambda: self._follow(name))

    # ------------------------------------------------------------------ faults

    def _strike(self, fault: Fault) -> None:
        self._todo -= 1
        self._struck_at = self.kernel.now + fault.lasts
        self.say(f"{fault.action} {fault.name} {fault.lasts:.2f}")
        leader, after = self.leader, self.kernel.after
        match fault.action:
            case "leader" if leader is not None:
                leader.kill()
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
            case "server" | "recut" | "away":
                if fault.action == "away":
                    self._away_until = self.kernel.now + fault.lasts
                self._stop_server()
                before = self.start
                if fault.action == "recut":
                    self._start_server(fault.name)
                if before is not None:
                    before.kill()
            case "store" | "doubt":
                self.store.down, self.store.doubtful = fault.action == "store", True
                after(fault.lasts, self._store_is_back)
            case "older":
                self._go_back()
            case _ if fault.name in self.clusters:
                self._strike_cluster(fault, self.clusters[fault.name])

    def _strike_cluster(self, fault: Fault, cluster: ClusterProcess | RanksJob) -> None:
        if isinstance(cluster, RanksJob) and fault.action not in ("cluster", "again", "leave"):
            cluster.strike(fault.action, fault.lasts)
            return
        match fault.action:
            case "cluster":
                cluster.kill()
            case "cluster-effect" if isinstance(cluster, ClusterProcess):
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
        """Ends a leader that wakes from a freeze after its lease has ended."""
        if self.leader is not leader:
            leader.kill()

    def _stop_server(self) -> None:
        """Kills all processes of the server."""
        if self.leader is not None:
            self.leader.kill()
        for follower in list(self.followers.values()):
            follower.kill()

    def _start_server(self, called: str) -> None:
        """Starts the whole server; a start that is still under way is abandoned, as a lock would enforce."""
        start = ServerStart(self, called, lambda trouble: self._started(start, called, trouble))
        self.start = start

    def _started(self, start: ServerStart, called: str, trouble: str) -> None:
        """Handles the end of a server start; a failed one is repeated, perhaps with another number of followers."""
        self.say(f"a start with {called or 'what there is'}: {trouble or start.names}")
        if self.start is not start:
            return
        between, random = self.kernel.between, self.kernel.random
        if trouble:
            others = (called, called, "", f"f{max(1, len(self.chain.cut))}", f"f{random.randint(1, 4)}")
            self.kernel.after(between(0.05, 0.5), lambda: self._again(start, random.choice(others)))
            return
        self.start, self.names, self.shards = None, start.names, len(start.names)
        for name in start.names:
            self.disks.setdefault(name, Disk(synced_first=self.machines.syncs_first))
            self.kernel.after(between(0.0, 0.2), lambda n=name: self._follow(n))  # type: ignore[misc]
        self.kernel.after(between(0.0, 0.3), self._lead)

    def _again(self, start: ServerStart, called: str) -> None:
        if self.start is start:
            self._start_server(called)

    def check_safe(self) -> None:
        """Checks that the durable versions, cut at the current shard boundaries, would survive a power loss (O15)."""
        for version, digests in self.chain.durable:
            for name, digest in zip(self.chain.cut, digests, strict=True):
                if not self.disks[name].safe(version, digest):
                    raise Violation(f"{version} is durable, and is not on the disk of {name} any more (O15)")

    def _damage(self, fault: Fault) -> None:
        """Damages a follower's durable files, and restarts the follower so that it reads them."""
        marks = self._marks_of(fault.name)
        for mark in marks if fault.action == "damage-both" else marks[-1:]:
            self.disks[fault.name].damage(*mark)
        if fault.name in self.followers:
            self.followers[fault.name].kill()

    def _marks_of(self, name: str) -> list[tuple[VersionId, str]]:
        """Returns (version, digest) of a follower's shard for each durable version."""
        cut = self.chain.cut
        return [(version, digests[cut.index(name)]) for version, digests in self.chain.durable if name in cut]

    def _empty(self, name: str) -> None:
        self.disks[name].full = False

    def _store_is_back(self) -> None:
        self.store.down = self.store.doubtful = False

    def _go_back(self) -> None:
        """Replaces the store by an older copy, and makes a new leader read it."""
        self.entries = self.entries[: self.kernel.random.randrange(1 + len(self.entries))]
        self.went_back = True
        self.store.go_back(self.entries)
        self.chain = OuterChain(whole=True)
        for entry in self.entries:
            self.chain.follow(entry)
        if self.leader is not None:
            self.leader.kill()

    # ------------------------------------------------------------------ the run

    def _over(self) -> bool:
        """Returns whether the job has ended and all clusters know, or a shard is lost for good and its follower has
        said so.
        """
        if self._todo > 0:
            return False
        if not any(f.machine.lost for f in self.followers.values() if f.alive):
            self._lost_at = self.kernel.now
        if self.kernel.now - self._lost_at > CALM_S:  # before that a mark may come that its disk has
            return True
        alive = any(cluster.alive for cluster in self.clusters.values())
        if self.went_back:  # to before the job was opened: then all of it are another job's, and wait for their own
            of_here = any(c.alive and c.machine.job_id in ("", self.chain.job_id) for c in self.clusters.values())
            return bool(self.finished) or not of_here
        return bool(self.finished) and not alive

    def _check_end(self) -> None:
        if self.went_back:  # what was decided since is gone, and nobody promises more than to say so
            return
        for name, follower in self.followers.items():
            if follower.alive and follower.machine.lost:
                if not self.disks[name].damaged(self._marks_of(name)):
                    raise Violation(f"{name} gives its shard up: {follower.machine.lost} (O6)")
                return
        for name, cluster in self.clusters.items():
            if cluster.left == self.finished and cluster.machine.base != self.chain.newest:
                raise Violation(f"{name} ends with {cluster.machine.base}, and the job with {self.chain.newest} (O16)")
            if cluster.machine.agreement != self.chain.agreement and "cannot join" not in cluster.left:
                raise Violation(f"{name} has another model and was not told")
            if missing := cluster.unaccounted() - self.oracle.counted - self.oracle.lost:
                raise Violation(f"{name} trained inner step {min(missing)}, which is in no push (O9)")

    def _check_held(self) -> None:
        """Checks that followers drop pushes of ended incarnations, which no round will ever take (O5)."""
        needed, now = self.chain.needed(), self.kernel.now
        for name, follower in self.followers.items():
            stream = follower.stream
            told = follower.alive and stream is not None and stream.since + CALM_S < now and stream.host is self.leader
            for push in follower.parts if told and follower.machine._obeys else ():
                gone_s = now - self._removed_at.get(push.incarnation, now)
                if gone_s > CALM_S and push not in needed:
                    raise Violation(f"{name} holds {push}, whose incarnation is over for {gone_s:.1f} s (O5)")

    def run(self) -> Outcome:
        """Runs the plan to its end and returns the outcome."""
        violation = ""
        try:
            if not self.kernel.run(self.plan.limit_s, self._over):
                violation = f"stuck after {self.kernel.now:.1f} s: {self.describe()}"
            else:
                self._check_end()
                self._check_held()
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
        """Returns the state of every process in words."""
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
