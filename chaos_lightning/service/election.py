"""Elects the leader of a service: the candidate whose key in etcd, on a lease, was written first (as in EDL and Elan).

Theory of operation. A candidate has a lease of etcd's, which it prolongs three times within its duration, and a key
that tells others where it listens. It leads from the transaction on in which it made the key `leader`, on its lease;
the others watch that key. If it is deleted, or ends with its lease, each of them tries to make it; one succeeds. What
the leader writes to the chain names that key's creation (`guard`), so that it fails once somebody else made it.

A lease ends about two seconds after its holder died (etcd grants no less); that decides where a machine or its network
falls silent. A candidate on the leader's own machine can see that its process is gone, or stopped, and one elsewhere
that its machine refuses connections to it (service/leader_line.py); they end the lease for it at once. A leader that
was merely stopped finds when it wakes that it leads no more.

A leader that fewer members reach than another candidate resigns (service/reach.py).

Safety does not rest on clocks: what a leader decides it writes by transactions that name its lease, so one that leads
no more can decide nothing, whatever it believes. So a leader that cannot reach etcd goes on for some seconds, in which
etcd may elect a leader of its own, which lets leases live on; after that it stands by, and members look for another.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from chaos_lightning.errors import StoreError
from chaos_lightning.machine.process_table import host_identity, process_state, start_time
from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service import reach
from chaos_lightning.service.etcd_client import CompactedError, EtcdClient, put, same_revision
from chaos_lightning.service.leader_line import LeaderLine

LEASE_S = 2
PATIENCE_S = 3.0
"""Seconds after the lease may have ended at which a leader that cannot prolong it stands by."""
WATCHED_S = 3.0
"""Seconds for which a leader must be seen on one lease to count as living: etcd renews all leases when it has been
restored from a snapshot, also that of a leader that is no more.
"""
_LOOK_S = 0.1
_FACTS_DEADLINE_S = 0.5
"""Deadline (s) of `status`, which must answer also where etcd does not."""
_ASK_S = 0.3
"""Deadline (s) for looking at the others' keys, which must not keep the leader from prolonging its lease."""
_STOPPED_S = 0.3
"""Seconds: a leader of this machine that is stopped for so long is replaced; a debugger's stop is shorter."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Process that stands for election."""

    id: str
    endpoint: str
    host: str
    pid: int
    pid_start: int
    lease: int = 0
    since: float = 0.0
    """Time at which the candidate came to lead, Unix time by its own clock; 0 if it does not lead."""
    because: str = ""
    """Reason for which the candidate was elected, in words."""

    @classmethod
    def here(cls, endpoint: str) -> Candidate:
        """Returns this process as a candidate."""
        pid = os.getpid()
        # A pid alone may come again: in another container, or on a machine that was started again.
        return cls(f"{endpoint}-{pid}-{os.urandom(4).hex()}", endpoint, host_identity(), pid, start_time(pid))

    @classmethod
    def read(cls, value: bytes) -> Candidate | None:
        """Parses a candidate from the value of its key in etcd; None if the value is something else."""
        try:
            document = json.loads(value)
            found = cls(**document)
        except (ValueError, TypeError, RecursionError):
            return None
        texts = all(isinstance(t, str) for t in (found.id, found.endpoint, found.host, found.because))
        numbers = all(type(n) is int for n in (found.pid, found.pid_start, found.lease))
        return found if texts and numbers and isinstance(found.since, int | float) else None

    def packed(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def process_state(self) -> str:
        """Returns "gone", "stopped" or "runs" for a candidate's process on this machine; "" for one elsewhere, or that
        cannot be seen.
        """
        here = self.host == host_identity()
        return process_state(self.pid, self.pid_start) if here else ""


class Election(threading.Thread):
    """Thread by which one candidate takes part in an election, until `resign`. It calls the callbacks.

    Args:
        client: Client of etcd; not closed here.
        root: Prefix of all keys in etcd of the service whose leader is elected (etcd_store.service_root).
        me: This candidate.
        on_elected: Called when this candidate leads, with the comparisons that its writes to the chain must make.
        on_lost: Called with the reason when this candidate has lost the lead; it takes part no longer.
        note: Takes (event name, fields) for the event log.
        present: Names of the members that are connected to this candidate; None if it cannot tell.
        lease_s: Duration of the lease; etcd may grant more.
    """

    def __init__(
        self,
        client: EtcdClient,
        root: str,
        me: Candidate,
        *,
        on_elected: Callable[[tuple[pb.Compare, ...]], None],
        on_lost: Callable[[str], None],
        note: Callable[..., None] = lambda name, **fields: None,
        present: Callable[[], Collection[str]] | None = None,
        lease_s: int = LEASE_S,
    ) -> None:
        super().__init__(name="chaos-election", daemon=True)
        self._client = client
        self._root = root
        self._me = me
        self._on_elected = on_elected
        self._on_lost = on_lost
        self._note = note
        self._present = present
        self._lease_s = lease_s
        self._granted_s = float(lease_s)
        self._until = 0.0
        """Time, by `now`, until which the lease stands at least."""
        self._over = threading.Event()
        self._stopped_since = 0.0
        self._line: LeaderLine | None = None
        self._because = "nobody led"
        """Reason why there is to be another leader."""
        self.trouble = ""
        """Reason why etcd could not be asked; "" if it answers."""
        self._asked = reach.Asked()
        self._told: tuple[str, ...] = ()
        """Names in this candidate's key of the processes that asked it."""
        self.leader: Candidate | None = None
        """Leader as seen last; None before anything was seen, and while nobody leads."""
        self._looked = False
        """Whether this candidate has seen who leads, or that nobody does, since it began or led itself."""
        self.leads = False
        self.followed = False
        """Whether another candidate led while this one waited."""
        self.watched = False
        """Whether this candidate waited for longer than the lease of a dead leader can stand, in one history of etcd:
        no older snapshot.
        """
        self._revision = 0
        """Highest revision that etcd has told."""
        self._following: tuple[str, float] = ("", 0.0)
        """Leader that this candidate has followed, and since when, all the while on its present lease."""

    # ------------------------------------------------------------------ any thread

    def resign(self, timeout_s: float = 2.0) -> None:
        """Ends the lease, so that another candidate leads at once. Idempotent."""
        self._over.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout_s)

    @property
    def me(self) -> Candidate:
        """This process, as a candidate."""
        return self._me

    def candidates(self, deadline_s: float | None = None) -> list[Candidate]:
        """Returns all candidates that have a key in etcd now."""
        found, _ = self._client.get_all(self._root + "candidates/", deadline_s=deadline_s)
        return [c for c in (Candidate.read(kv.value) for kv in found) if c is not None]

    @property
    def stands_by(self) -> bool:
        """Whether another candidate leads and this one, with a valid lease, would succeed it."""
        return self.leader is not None and not self.leads and now() < self._until

    def asked(self, name: str) -> None:
        """Notes that a member asked this candidate while looking for the leader."""
        self._asked.add(name, now())

    def waits_for(self) -> str:
        """Returns what this candidate waits for, as text; "" if it leads and may decide."""
        late_s = now() - self._until
        if self.leads:
            if not self.trouble:
                return ""
            ends = f"ended {late_s:.1f} s ago" if late_s > 0 else f"ends in {-late_s:.1f} s"
            return (
                f"etcd, to prolong its lease, which {ends}; it decides nothing meanwhile, and stands by "
                f"{PATIENCE_S:g} s after that end ({self.trouble})"
            )
        if self.trouble:
            return f"etcd; without it nobody can be elected ({self.trouble})"
        if (leader := self.leader) is not None:
            return f"the end of the lease of {leader.endpoint}, which leads"
        return "an election" if self._looked else "etcd's first word on who leads"

    def facts(self) -> dict[str, Any]:
        """Returns facts for `status`: who leads, since when and why, which candidates wait, and what this one waits
        for.
        """
        leader = self.leader
        facts: dict[str, Any] = {
            "leader": leader.endpoint if leader is not None else "",
            "led_since": leader.since if leader is not None else 0.0,
            "led_because": leader.because if leader is not None else "",
            "waits_for": self.waits_for(),
            "candidates": [],
        }
        try:
            facts["candidates"] = sorted({c.endpoint for c in self.candidates(_FACTS_DEADLINE_S)})
        except StoreError as error:
            facts["store_error"] = str(error)
        return facts

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self._take_lease()
                if self._campaign():
                    self._lead()
                    break
            except StoreError as error:
                self.trouble = str(error)
                self._note("error", where="election", text=str(error))
                self._over.wait(_LOOK_S)
        self._hang_up()
        if self._me.lease:
            try:
                self._client.revoke(self._me.lease)
            except StoreError as error:  # it ends by itself
                self._note("error", where="election", text=str(error))

    def _take_lease(self) -> None:
        asked = now()
        lease, granted_s = self._client.grant(self._lease_s)
        self._me = replace(self._me, lease=lease)
        self._granted_s = float(granted_s)
        self._until = asked + granted_s
        key = self._root + f"candidates/{self._me.id}"
        self._client.transact([], [put(key, self._me.packed(), lease)])
        self.trouble, self._told = "", ()
        self.watched, self._following, self._revision = False, ("", 0.0), 0

    def _look(self, key: str) -> pb.KeyValue | None:
        """Reads a key from a majority of etcd's servers; a revision lower than before shows that etcd was restored from
        a snapshot.
        """
        found, revision = self._client.get_all(key)
        if revision < self._revision:
            self._note("notice", text=f"etcd went back from revision {self._revision} to {revision}")
            self.watched, self._following = False, ("", 0.0)
        self._revision = revision
        held = next((kv for kv in found if kv.key.decode(errors="replace") == key), None)
        self._watch_over(held)
        return held

    def _watch_over(self, leader: pb.KeyValue | None) -> None:
        """Notes for how long the same leader has kept its lease; one that a restored snapshot of etcd shows would not
        prolong it.
        """
        if leader is None or leader.lease == self._me.lease:
            return
        who = f"{leader.lease:x}"
        if self._following[0] != who:
            self._following = (who, now())
        self.watched = self.watched or now() - self._following[1] > WATCHED_S

    def _prolong(self) -> bool:
        """Prolongs this candidate's lease once; returns False if it has expired."""
        asked = now()
        granted_s = self._client.keep_alive(self._me.lease, max(1.0, self._until - asked))
        if granted_s <= 0:
            return False
        self._until = asked + granted_s
        self.trouble = ""
        return True

    @property
    def _due(self) -> float:
        return self._until - self._granted_s * 2 / 3

    def _campaign(self) -> bool:
        """Waits until this candidate is elected (returns True), is stopped, or has lost its lease."""
        key = self._root + "leader"
        while not self._over.is_set():
            found = self._look(key)
            self._looked = True
            if found is None:
                self.leader = None
                me = replace(self._me, since=round(time.time(), 3), because=self._because)
                self._client.transact([same_revision(key, 0)], [put(key, me.packed(), me.lease)])
                mine = self._look(key)
                if mine is None or mine.lease != self._me.lease:
                    continue  # an answer that got lost is recognised by the lease
                return self._elected(key, mine)
            if found.lease == self._me.lease:
                return self._elected(key, found)
            if (holder := Candidate.read(found.value)) is not None and holder.id == self._me.id:
                # It was elected, did not hear of it, and took another lease since.
                self._client.revoke(found.lease)
                continue
            self.followed = True
            self._follow(Candidate.read(found.value), found)
            if not self._wait_for_change(key, found.mod_revision + 1):
                return False
        return False

    def _elected(self, key: str, mine: pb.KeyValue) -> bool:
        """Begins to lead, after the leader's key was found to hold this candidate's lease."""
        me = self._me
        self._hang_up()
        self.leads, self.leader = True, Candidate.read(mine.value) or me
        self._note("elected", candidate=me.id, endpoint=me.endpoint, lease_s=self._granted_s, reason=self._because)
        self._on_elected(
            (
                pb.Compare(target=pb.Compare.CREATE, key=key.encode(), create_revision=mine.create_revision),
                pb.Compare(target=pb.Compare.LEASE, key=key.encode(), lease=me.lease),
            )
        )
        return True

    def _follow(self, leader: Candidate | None, found: pb.KeyValue) -> None:
        if leader is not None:
            leader = replace(leader, lease=found.lease)
        if leader != self.leader:
            self.leader, self._stopped_since = leader, 0.0
            self._hang_up()
            if leader is not None:
                self._note("leader", candidate=leader.id, endpoint=leader.endpoint, reason=leader.because)
                if not leader.process_state():
                    self._line = LeaderLine(leader.endpoint)
                    self._line.start()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _wait_for_change(self, key: str, revision: int) -> bool:
        """Waits until the leader's key has changed; returns False if this candidate's lease expires before that."""
        try:
            for events in self._changes(key, revision):
                if self._over.is_set() or events:
                    self._because = f"the lease of {self._who_led()} had ended, or was given back"
                    return True
                if now() >= self._due:
                    if not self._prolong():
                        self._note(
                            "error", where="election", text="the lease of this candidate has ended; it takes another"
                        )
                        return False
                    found = self._look(key)  # the watch may be deaf; and prolonging needs no valid token
                    if found is None or found.mod_revision >= revision:
                        self._because = f"the lease of {self._who_led()} had ended, or was given back"
                        return True
                if self._replaces():
                    return True
                self._tell_who_asked()
        except CompactedError:
            return True
        return True

    def _changes(self, key: str, revision: int) -> Iterable[list[pb.Event]]:
        return self._client.watch(key, revision, self._over, every_s=_LOOK_S)

    def _replaces(self) -> bool:
        """Ends the leader's lease if its process on this machine is dead or stopped, or its machine refuses
        connections; returns whether.
        """
        leader = self.leader
        if leader is None:
            return False
        state, at = leader.process_state(), now()
        if state == "stopped":
            self._stopped_since = self._stopped_since or at
        else:
            self._stopped_since = 0.0
        if state == "gone" or (state == "stopped" and at - self._stopped_since >= _STOPPED_S):
            reason = f"its process {leader.pid} on this machine is {state}"
        elif self._line is not None and self._line.gone:
            reason = f"its machine refuses connections to {leader.endpoint}, which it took before"
        else:
            return False
        self._because = f"{self._who_led()} was deposed: {reason}"
        self._note("deposed", candidate=leader.id, reason=reason)
        self._client.revoke(leader.lease)
        return True

    def _tell_who_asked(self) -> None:
        names = self._asked.of_late(now())
        if names != self._told:
            key = self._root + f"asked/{self._me.id}"
            with contextlib.suppress(StoreError):  # prolonging the lease will tell
                self._client.transact([], [put(key, reach.packed(names), self._me.lease)])
                self._told = names

    def _outreached(self, view: reach.Reach) -> str:
        """Returns why another candidate should lead, namely that members reach it and not this one; "" if not."""
        if self._present is None or not view.due(now()):
            return ""
        try:
            found, _ = self._client.get_all(self._root + "asked/", deadline_s=_ASK_S)
        except StoreError:  # prolonging the lease will tell
            return ""
        elsewhere = {kv.key.decode(errors="replace").rpartition("/")[2]: reach.read(kv.value) for kv in found}
        elsewhere.pop(self._me.id, None)
        return view.judge(now(), self._present(), elsewhere)

    def _who_led(self) -> str:
        """Returns the endpoint of the former leader, or "another candidate" if it is not known."""
        return self.leader.endpoint if self.leader is not None else "another candidate"

    def _lead(self) -> None:
        """Leads, and prolongs the lease for as long as that works."""
        reason, view = "", reach.Reach(now())
        while not self._over.wait(min(_LOOK_S, self._granted_s / 10)):
            try:
                if now() >= self._due and not self._prolong():
                    reason = "its lease has ended"
                elif not self.trouble:
                    reason = self._outreached(view)
            except StoreError as error:
                self.trouble = str(error)
                self._note("error", where="election", text=str(error))
            lost_s = now() - self._until
            if lost_s >= PATIENCE_S:
                reason = reason or f"it could not prolong its lease for {self._granted_s + lost_s:.1f} s"
            if reason:
                break
        self._looked, self.leader, self.leads = False, None, False  # who leads now it has not seen
        if reason:
            self._note("deposed", candidate=self._me.id, reason=reason)
            self._on_lost(reason)


def now() -> float:
    """Returns seconds since boot, including the time in which the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


__all__ = ["Candidate", "Election", "now"]
