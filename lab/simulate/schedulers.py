"""Simulates the schedulers of a job: the leading one, those on standby, and their faults.

Theory of operation. With one place (`Plan.candidates` 1) a scheduler that died is started again on its file after a
while. With several, each life of a scheduler is a candidate of its own on a remote store. When the leader dies, or is
stopped for longer than its lease, or loses its lease, another candidate is elected after a gap, takes a term and
continues the chain (service/election.py: at once on the same machine, after some two seconds elsewhere). One that was
merely stopped, or cut off from the store, goes on meanwhile in the belief that it leads: members that still have their
stream to it, or find it first, talk to it, until a write of it is refused or it notices that its lease has ended. The
others stand by, and name the leader to members that ask them (membership/leader_search.py).

A scheduler dies or stops at a time, or between two effects that its machine returned (`host.HostTrap`). What was
written is durable by then; what was not sent is not sent.
"""

from __future__ import annotations

from collections.abc import Callable

from chaos_lightning.control.job_chain import Tip
from chaos_lightning.errors import StoreError
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.leader_search import Conversation, hears_s
from chaos_lightning.service.election import WATCHED_S
from lab.simulate.fabric import Endpoint
from lab.simulate.host import AGAIN_S, Candidacy, HostTrap, SchedulerHost
from lab.simulate.job import Job
from lab.simulate.plan import Fault
from lab.simulate.store import Backup

SCHEDULER_FAULTS = (
    "sched-freeze",
    "sched-crash",
    "sched-cut",
    "store-down",
    "store-lost",
    "store-slow",
    "streams",
    "chain-lost",
    "backup",
    "restored",
    "exchanged",
    "leftover",
    "brought-back",
    "rebuild",
)
STOPPED_S = 0.3
"""Seconds after which a stopped leader is replaced by a candidate of its own machine."""
LEASE_S = (1.3, 2.2)
"""Seconds that are left of a lease when its holder stops prolonging it, with the time that etcd takes to notice."""
PATIENCE_S = 3.0
"""Seconds beyond its lease for which a leader that cannot reach etcd goes on."""
WAKE_S = 0.4
"""Seconds within which a leader that wakes up notices that its lease has ended."""


class Schedulers:
    """All schedulers of one simulated job, one after the other or side by side.

    Args:
        world: The job.
    """

    def __init__(self, world: Job) -> None:
        self._world = world
        self.crashes = 0
        self.newest: Backup | None = None
        """Store of the job itself, while another one is in its place."""
        self._backup = Backup(Tip())
        self._watched = False
        """Whether standbys have seen a leader live that found the chain where it is (service/election.py)."""
        self._led_since = 0.0
        self._hosts: list[SchedulerHost] = []
        self._dead: set[str] = set()
        """Places whose candidate was killed, and has not come back yet."""
        world.store.remote = world.plan.several
        self.leader = self._start()

    # ------------------------------------------------------------------ lives

    def _start(self, rebuild: bool = False) -> SchedulerHost:
        """Starts a scheduler, which takes over the chain.

        Raises:
            StoreError: The store does not answer.
        """
        world, plan = self._world, self._world.plan
        number = len(self._hosts) + 1
        place = plan.places[(number - 1) % plan.candidates]
        leader, world.store.leader = world.store.leader, number
        try:
            host = world.open_host(
                place, Candidacy(number, place, plan.orderly, self._hears_s(), rebuild, world.copies)
            )
        except StoreError:
            world.store.leader = leader
            raise
        self._led_since = world.kernel.now
        host.on_end = lambda: self._ended(host)
        self._hosts.append(host)
        self._dead.discard(place)
        self.leader = host
        return host

    def _hears_s(self) -> float:
        """Returns the seconds for which a new scheduler only listens: 0 if it is the first one, or followed the live
        chain on standby.
        """
        if self._watched or not self._hosts:
            return 0.0
        views = self._world.store.views
        return hears_s(len(views[-1].members) if views else 0, several=self._world.plan.several)

    def ask(self, place: str) -> SchedulerHost | Conversation:
        """Returns the scheduler that believes to lead at this address; if there is none, the answer that a member gets
        there.
        """
        host = next((h for h in reversed(self._hosts) if h.alive and h.candidacy.place == place), None)
        if host is not None or not self._world.plan.several or place in self._dead:
            return host or Conversation()
        leads = self._stands(self.leader) and self.leader.candidacy.place not in self._dead
        return Conversation(standby=True, leader=self.leader.candidacy.place if leads else "")

    def _stands(self, host: SchedulerHost) -> bool:
        """Returns whether this scheduler leads: it lives and, if there are several, has the lease."""
        return host.alive and (not self._world.plan.several or self._world.store.leader == host.candidacy.number)

    def _follow(self, gap: float) -> None:
        """Makes a standby candidate lead after some seconds, if no scheduler leads by then."""
        world = self._world
        world.expect(1)

        def try_it() -> None:
            if self._stands(self.leader):
                world.expect(-1)
                return
            try:
                self._start(self.leader.candidacy.rebuild)  # with the same words as before
            except StoreError:
                world.kernel.after(AGAIN_S, try_it)
                return
            world.expect(-1)
            world.say(f"a scheduler leads with term {self.leader.machine.book.term}")

        world.kernel.after(gap, try_it)

    def _gap_s(self) -> float:
        """Returns the seconds from the leading scheduler's death until another candidate leads."""
        kernel = self._world.kernel
        return kernel.between(0.02, 0.4) if kernel.random.random() < 0.5 else kernel.between(*LEASE_S)

    def _ended(self, host: SchedulerHost) -> None:
        """Handles the end of a scheduler that was deposed, or whose store failed for too long."""
        self._world.say(f"scheduler {host.machine.book.term} stands by: it leads no more")
        self._world.cut_streams += host.lost
        if host.machine.phase is not SchedulerPhase.FINISHED:
            self._release(host)
            self._follow(self._world.kernel.between(0.02, 0.4))

    def _release(self, host: SchedulerHost) -> None:
        if self._world.store.leader == host.candidacy.number:
            self._world.store.leader = 0
            led_s = self._world.kernel.now - self._led_since
            self._watched = self._watched or (self._world.plan.several and led_s > WATCHED_S)

    def crash(self, host: SchedulerHost, lasts: float) -> None:
        """Kills a scheduler, by SIGKILL or with its machine."""
        if not host.alive:
            return
        world = self._world
        world.say("the scheduler dies")
        self.crashes += 1
        self._dead.add(host.candidacy.place)
        host.crash()
        self._world.cut_streams += host.lost
        if not self._world.plan.several:
            self._follow(lasts)
        else:
            gap = self._gap_s()
            world.kernel.after(gap, lambda: self._release(host))
            self._follow(gap + 0.001)

    def freeze(self, host: SchedulerHost, lasts: float) -> None:
        """Freezes a scheduler by SIGSTOP, and lets it go on later by SIGCONT."""
        world, kernel = self._world, self._world.kernel
        world.say(f"the scheduler freezes for {lasts:g} s")
        since = kernel.now
        host.freeze()
        kernel.after(lasts, host.thaw)
        if not self._world.plan.several:
            return
        patience = STOPPED_S if kernel.random.random() < 0.5 else kernel.between(*LEASE_S)

        def lapse() -> None:
            if host.alive and host.frozen and host.frozen_since == since:
                self._lapse(host)
                kernel.after(lasts + since - kernel.now + kernel.between(0.0, WAKE_S), host.end)

        kernel.after(patience, lapse)

    def _lapse(self, host: SchedulerHost) -> None:
        """Takes the lease from a scheduler that still lives."""
        self._release(host)
        self._follow(self._world.kernel.between(0.005, 0.3))

    def _cut(self, host: SchedulerHost, lasts: float) -> None:
        """Cuts the leading scheduler off from the store, while members can still reach it."""
        world, kernel = self._world, self._world.kernel
        world.say(f"scheduler {host.machine.book.term} is cut off from its store for {lasts:g} s")
        host.cut_off = True

        def over() -> None:
            host.cut_off = False

        kernel.after(lasts, over)
        if not self._world.plan.several:
            return
        lease = kernel.between(*LEASE_S)

        def lapse() -> None:
            if host.alive and host.cut_off:
                self._lapse(host)
                noticed = min(PATIENCE_S, max(0.0, lasts - lease) + kernel.between(0.0, WAKE_S))
                kernel.after(noticed, lambda: host.deliver(host.end))

        kernel.after(lease, lapse)

    def _lose(self, host: SchedulerHost, lasts: float) -> None:
        """Destroys the leading scheduler's machine and the chain on it; another scheduler begins with an empty
        store.
        """
        self._world.say("the scheduler's machine is gone, and the chain with it")
        self._world.store.lose()
        self._watched, self._led_since = False, self._world.kernel.now
        self.crash(host, lasts)

    def _replace(self, host: SchedulerHost, lasts: float, backup: Backup, words: str) -> None:
        """Kills all schedulers and replaces the job's store by another one, on which new schedulers start."""
        store = self._world.store
        self._world.say(f"the scheduler dies, and {words} takes the place")
        self.newest = self.newest or store.backup()
        store.restore(backup)
        self._end_all(host, lasts)

    def _exchange(self, backup: Backup) -> None:
        """Replaces the store's content by an older copy while the leading scheduler lives, which notices it at its next
        write.
        """
        self._world.say("an older copy of the store takes its place, and the scheduler lives")
        self.newest = self.newest or self._world.store.backup()
        self._world.store.restore(backup)
        # Standbys see the store go back (`Election._look`).
        self._watched, self._led_since = False, self._world.kernel.now

    def _bring_back(self, host: SchedulerHost, lasts: float) -> None:
        """Puts the job's own store back in place, as an operator who has found it would."""
        if self.newest is None:
            return
        self._world.say("the operator brings the job's own store back")
        self._world.store.restore(self.newest)
        self.newest = None
        self._end_all(host, lasts)

    def _end_all(self, host: SchedulerHost, lasts: float) -> None:
        """Ends all schedulers, so that none of them writes to the replaced store."""
        for other in self._hosts:
            if other.alive and other is not host:
                other.crash()
        self._world.store.leader, self._watched = 0, False
        self.crash(host, lasts)

    def _rebuild(self) -> None:
        """Starts a scheduler that rebuilds the chain, as at an operator's request."""
        self._world.say("the operator starts a scheduler with --rebuild")
        if not self._world.store.views or self.newest is not None:
            self.newest = None
            self.leader.crash()
            self._start(rebuild=True)

    def can_spare(self, node: Endpoint) -> bool:
        """Returns whether a lost chain can still be rebuilt if this node is missing (protocol.md 14a).

        So it is if of the last view that somebody stands in, and of a later one that a header may carry, more than half
        of the members live and hold the state.
        """
        world = self._world
        living = [n for n in world.nodes.values() if n.alive]
        entered = [n.machine.view for n in living if n.machine.view is not None]
        if not entered:
            return False
        last = max(entered, key=lambda v: v.id)
        told = [n.machine.waiting_view for n in living if n.machine.waiting_view is not None]
        views = [last, *(v for v in (*told, *world.store.views[-1:]) if v.id > last.id)]
        holders = {n.machine.member_id for n in living if n is not node and n.machine.loaded}
        return all(2 * len(holders.intersection(v.ids())) > len(v.members) for v in views)

    # ------------------------------------------------------------------ faults

    def strike(self, fault: Fault) -> None:
        """Carries out one of SCHEDULER_FAULTS, immediately or, with a trap, just before an effect."""
        host, store = self.leader, self._world.store
        match fault.action:
            case "sched-crash":
                self._at_effect(host, fault, lambda: self.crash(host, fault.lasts))
            case "sched-freeze":
                self._at_effect(host, fault, lambda: self.freeze(host, fault.lasts))
            case "sched-cut":
                self._cut(host, fault.lasts)
            case "streams":
                self._world.say("all control streams break")
                for node in self._world.nodes.values():
                    if node.alive:
                        node.break_stream()
            case "chain-lost":
                self._lose(host, fault.lasts)
            case "backup":
                self._backup = store.backup()
            case "restored":
                self._replace(host, fault.lasts, self._backup, "an older copy of its store")
            case "exchanged":
                self._exchange(self._backup)
            case "leftover":
                self._replace(host, fault.lasts, self._backup.leftover(), "a store of the day before")
            case "brought-back":
                self._bring_back(host, fault.lasts)
            case "rebuild":
                self._rebuild()
            case "store-down":
                self._disturb(fault, lambda on: setattr(store, "down", on))
            case "store-lost":
                self._disturb(fault, lambda on: setattr(store, "loses_answers", on))
            case "store-slow":
                self._disturb(fault, lambda on: setattr(store, "slow_s", float(on)))

    def _at_effect(self, host: SchedulerHost, fault: Fault, spring: Callable[[], None]) -> None:
        if fault.trap is None:
            spring()
        else:
            host.traps.append(HostTrap(fault.trap[0], fault.trap[2], spring))

    def _disturb(self, fault: Fault, switch: Callable[[bool], None]) -> None:
        self._world.say(f"{fault.action} for {fault.lasts:g} s")
        switch(True)
        self._world.kernel.after(fault.lasts, lambda: switch(False))
