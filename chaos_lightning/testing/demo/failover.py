"""`chaos-lightning demo-failover`: schedulers and etcd servers are killed while nodes train, join and die.

Theory of operation. Three etcd servers; four nodes, each a real torchrun, the first three with a candidate of their own
(`--rdzv-conf store=etcd://...`). Then, each as soon as the one before has been got over: the leading scheduler gets
SIGKILL while a node joins; etcd's leader gets SIGKILL while another one joins, and comes back; both get SIGKILL at
once, and with them a node. What became of it is judged from the event logs alone. Exit codes are those of `demo`.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from functools import partial

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import duration
from chaos_lightning.observe.fields import integer
from chaos_lightning.service.etcd_servers import EtcdServer, EtcdServers
from chaos_lightning.testing.demo import acts, proof
from chaos_lightning.testing.demo.members import FULL, QUICK
from chaos_lightning.testing.demo.nodes import Cast, places_for
from chaos_lightning.testing.demo.proof import Check, Evidence
from chaos_lightning.testing.demo.stage import Accelerator, Directory, Keep, Quick, Scenario, Stage, play
from chaos_lightning.testing.edge.runner import prepare

FOUNDERS = ("edge-1", "edge-2", "edge-3")
JOINS, JOINS_TOO, KILLED = "edge-4", "edge-5", "edge-2"
WAITS_S = 1.0
"""Seconds by which a step that waits for something exceeds the median: a lease of etcd's takes 2 s to end."""
LEASES_S = 3.0
"""Seconds after which an election among etcd's servers is over, and a lease that was not prolonged has ended."""
RECOVERED_S = 6.0
"""Longest recovery from a death at the instant of a scheduler's and of etcd's leader's, s: 3 on an idle machine."""
JOINS_WORK_S = 10.0
"""Longest time, s, from a kill until joins work again: two elections, one of etcd's own and one of a scheduler, and
members that ask their endpoints in turn.
"""
JOINED_S = 20.0
"""Longest time, s, from a kill until a member that had just started has joined: beside these elections it says hello,
links to all members and pulls the state.
"""


# ------------------------------------------------------------------ acts


def leaders_are_told(stage: Stage[Cast], servers: EtcdServers) -> None:
    place = _status(stage)["endpoint"]
    leading = next((f"the candidate of {n}" for n, p in stage.nodes.places.items() if p == place), str(place))
    stage.say("good", f"{leading} leads; etcd's leader is {servers.leader().name}")


def scheduler_dies_while_one_joins(stage: Stage[Cast]) -> None:
    stage.say("do", f"{JOINS} starts; as it knocks, kill -9 for the leading scheduler")
    _knocks(stage, JOINS)
    at, term = _kill_scheduler(stage, _status(stage))
    _elected(stage, at, term)
    _is_in(stage, JOINS, at)
    stage.rest()


def etcds_leader_dies_while_one_joins(stage: Stage[Cast], servers: EtcdServers) -> None:
    stage.say("do", f"{JOINS_TOO} starts; as it knocks, kill -9 for etcd's leader")
    _knocks(stage, JOINS_TOO)
    at, dead = time.time(), _kill_etcds_leader(stage, servers)
    over = time.monotonic() + LEASES_S
    _is_in(stage, JOINS_TOO, at)
    stage.rest()
    stage.wait("the time in which all leases would end", lambda: time.monotonic() > over)
    servers.run(dead)
    servers.wait_ready(60.0)
    stage.say("good", f"steps went on; {servers.leader().name} leads etcd now, {dead.name} is back")


def both_die_and_a_node(stage: Stage[Cast], servers: EtcdServers) -> None:
    worker, member = stage.worker(KILLED)
    stage.say("do", f"kill -9 for etcd's leader, for the leading scheduler, and for {KILLED}, all at once")
    leading = _status(stage)
    _kill_etcds_leader(stage, servers)
    at, term = _kill_scheduler(stage, leading)
    stage.nodes.kill(KILLED, worker)
    _elected(stage, at, term)
    slot = stage.step_without(member, at)
    stage.say("good", f"step {slot.step} was committed by the others {duration(slot.first - at)} after the kill")
    stage.rest()


def _knocks(stage: Stage[Cast], name: str) -> None:
    """Starts a node, and waits until its member has started and so is about to ask for a slot in the job."""
    stage.nodes.start(name)
    stage.event("opened", name, stage.pace.start_deadline_s)


def _is_in(stage: Stage[Cast], name: str, at: float) -> None:
    joined = stage.joined(name)
    stage.say("good", f"{name} joined at step {joined.get('step')}, {duration(joined.t - at)} after the kill")


def _kill_etcds_leader(stage: Stage[Cast], servers: EtcdServers) -> EtcdServer:
    dead = servers.leader()
    stage.nodes.note("etcd_sigkill", dead.name)
    servers.kill(dead)
    return dead


def _status(stage: Stage[Cast]) -> dict[str, object]:
    return fetch_status(stage.nodes.endpoint, timeout_s=20.0)


def _kill_scheduler(stage: Stage[Cast], facts: dict[str, object]) -> tuple[float, int]:
    if facts["role"] != "leader":
        raise ChaosError(f"no scheduler leads: {facts}")
    stage.nodes.strike(signal.SIGKILL, "scheduler", integer(facts["pid"]), "scheduler_sigkill")
    return time.time(), integer(facts["term"])


def _elected(stage: Stage[Cast], at: float, term: int) -> None:
    started = stage.first("scheduler_started", lambda r: r["term"] > term, what="another scheduler's lead")
    stage.say("good", f"another one leads, term {started['term']}, {duration(started.t - at)} after the kill")


# ------------------------------------------------------------------ what it proves


def led(e: Evidence) -> Check:
    """Checks that each killed scheduler is succeeded by another one with a higher term."""
    times, kills = [], e.faults("scheduler_sigkill")
    for kill in kills:
        lead = e.first("scheduler_started", kill.t)
        times.append(f"term {lead['term']} after {duration(lead.t - kill.t)}" if lead else "nobody after")
    terms = [r["term"] for r in e.leads()]
    good = len(kills) == 2 and len(set(terms)) == len(terms) >= 3 and "nobody after" not in times
    return Check(
        "two leading schedulers get SIGKILL, each time another one leads", "; ".join(times) or "none was", good
    )


def joins_work(e: Evidence) -> Check:
    """Checks that soon after each kill of a scheduler all members are connected to its successor, which admits
    newcomers.
    """
    found = []
    for kill in e.faults("scheduler_sigkill"):
        lead = e.first("scheduler_started", kill.t)
        crew = next((s.who for s in e.steps if s.first > lead.t + 1.0), ()) if lead is not None else ()
        back = [_connected(e, member.partition("~")[0], lead.t) for member in crew if lead is not None]
        met = [r.t for r in back if r is not None]
        found.append(max(met) - kill.t if met and len(met) == len(back) else None)
    text = "; ".join(duration(x) if x is not None else "never" for x in found)
    return Check(
        "joins work again soon after each kill of a scheduler",
        f"after {text}" if found else "nobody was killed",
        len(found) == 2 and all(x is not None and x < JOINS_WORK_S for x in found),
    )


def _connected(e: Evidence, node: str, after: float) -> Record | None:
    """Returns the first event after time `after` by which a node's member reports a connection to a scheduler; else
    None.
    """
    return e.first("scheduler", after, lambda r: r.node == node and r.get("state") == "connected")


def joined(e: Evidence, node: str, struck: str, whose: str) -> Check:
    """Checks that a node joins soon after the first fault of kind `struck`, by a view written to the chain after it."""
    what, kill = f"{whose} dies as {node} knocks, and joins work again", e.fault(struck)
    joined = e.first("joined", wanted=lambda r: r.node == f"{node}-0" and r.source.startswith("member"))
    if joined is None or kill is None:
        return Check(what, "it did not join", False)
    written = e.first("stored", kill.t, lambda r: bool(r["ok"]))
    if written is None or written.t >= joined.t:
        return Check(what, "nothing was written to the chain between the kill and the join", False)
    after = joined.t - kill.t
    text = f"the chain was written to after {duration(written.t - kill.t)}, {node} was in after {duration(after)}"
    return Check(what, f"{text}, at step {joined['step']}", after < JOINED_S)


def leads_on(e: Evidence) -> Check:
    """Checks that the same scheduler leads from the death of etcd's leader until that scheduler is killed itself."""
    what = "while etcd elects a leader of its own, the scheduler goes on leading"
    etcd_kills, kills = e.faults("etcd_sigkill"), e.faults("scheduler_sigkill")
    if len(etcd_kills) != 2 or len(kills) != 2:
        return Check(what, f"{len(etcd_kills)} of etcd's leaders were killed", False)
    since, until = etcd_kills[0].t, kills[1].t
    changed = [r for r in e.leads() if since < r.t < until]
    return Check(what, f"for {duration(until - since)}" if not changed else "another one took over", not changed)


def undisturbed(e: Evidence) -> Check:
    """Checks that no training step waited for a scheduler or for etcd in the first two acts, in which no member
    dies.
    """
    what = "training waits neither for a scheduler nor for etcd"
    etcd_kills, kills = e.faults("etcd_sigkill"), e.faults("scheduler_sigkill")
    if len(kills) != 2 or len(etcd_kills) != 2:
        return Check(what, "not all were killed", False)
    steps = list(itertools.pairwise(slot.first for slot in e.steps))

    def longest(since: float, until: float) -> float:
        """Returns the longest time between consecutive steps from `since` to `until`, s."""
        return max((min(b, until) - a for a, b in steps if b > since and a < until), default=0.0)

    ends = [kills[0].t, etcd_kills[0].t, min(kills[1].t, etcd_kills[1].t)]
    waits = [longest(a, b) for a, b in itertools.pairwise(ends)]
    usual = statistics.median([b - a for a, b in steps] or [0.0])
    text = (
        f"from step to step at most {duration(waits[0])} after the scheduler's kill, {duration(waits[1])} "
        f"after that of etcd's leader, each time as a node joins; median {duration(usual)}"
    )
    return Check(what, text, all(0 < x < usual + WAITS_S for x in waits))


def death(e: Evidence) -> Check:
    what = f"{KILLED} dies with the scheduler and etcd's leader, and the others go on"
    died = [r for r in e.faults("sigkill") if r.node == f"{KILLED}-0"]
    later = [s for s in e.steps if died and s.first > died[0].t]
    without = next((s for s in later if not any(m.startswith(f"{KILLED}-0~") for m in s.who)), None)
    if without is None:
        return Check(what, "they did not", False)
    seconds = without.first - died[0].t
    return Check(what, f"step {without.step} after {duration(seconds)}", seconds < RECOVERED_S)


def prove(e: Evidence) -> list[Check]:
    """Returns all checks of this demo."""
    return [
        led(e),
        joins_work(e),
        joined(e, JOINS, "scheduler_sigkill", "the leading scheduler"),
        joined(e, JOINS_TOO, "etcd_sigkill", "etcd's leader"),
        leads_on(e),
        proof.no_step_lost(e),
        undisturbed(e),
        death(e),
        proof.ended(e, KILLED),
        *proof.audited(e),
    ]


# ------------------------------------------------------------------ the command


def demo_failover(
    directory: Directory = None, quick: Quick = False, keep: Keep = False, accelerator: Accelerator = "cpu"
) -> None:
    """Kill schedulers and etcd servers while nodes train, join and die; then prove that nothing was lost."""
    size = QUICK if quick else FULL
    folder = prepare(directory, "demo")
    servers = EtcdServers(folder / "etcd", 3)
    arguments = (*size.arguments, f"--accelerator={accelerator}")
    cast = Cast(folder, arguments, places=places_for(*FOUNDERS), store=servers.address)
    scenario = Scenario(
        name="demo-failover",
        nodes=cast,
        acts=(
            partial(acts.founders_start, founders=FOUNDERS),
            partial(leaders_are_told, servers=servers),
            scheduler_dies_while_one_joins,
            partial(etcds_leader_dies_while_one_joins, servers=servers),
            partial(both_die_and_a_node, servers=servers),
            acts.finish,
        ),
        prove=prove,
        pace=size.pace,
        begin=servers.start,
        endings=(cast.close, servers.close),
    )
    play(scenario, folder, keep=keep)
