"""Collects facts of a job for `ps status`, `top` and tests: a pure function of the leader's machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaos_lightning.outer.rules.attendance import ClusterState
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, PushAnswer


def snapshot(machine: LeaderMachine, now_s: float) -> dict[str, Any]:
    """Returns the facts of a job as plain values for JSON.

    Args:
        machine: State machine of the acting leader.
        now_s: Present time, s, by the clock that the machine is given.
    """
    chain = machine.chain
    return {
        "term": machine.term,
        "position": chain.position,
        "phase": phase(machine),
        "reason": _reason(machine),
        "policy": machine.settings.policy,
        "clusters": [
            _cluster(chain, who, state, now_s)
            for who, state in sorted(machine.clusters.items())
            if not chain.incarnations[who].over
        ],
        "away": [
            {"name": who.cluster, "incarnation": who.number, "place": known.place}
            for who, known in sorted(chain.incarnations.items())
            if not known.over and who not in machine.clusters
        ],
        "followers": _followers(machine),
        "wanted": machine.shards.wanted,
        "unheeded": machine.shards.unheeded,
        "versions": _versions(machine),
        "rounds": chain.rounds,
        "rollbacks": chain.rollbacks,
        **_answers(chain.tally),
        "leases": _leases(machine),
        "window": machine.rounds.waits,
    }


def phase(machine: LeaderMachine) -> str:
    """Returns the phase of a job in one word: "ended", "ending", "opening" (before a first version), "waiting" (a shard
    is away) or "training".
    """
    chain = machine.chain
    if chain.ended is not None:
        return "ended"
    if machine.ending:
        return "ending"
    if not chain.founded:
        return "opening"
    return "training" if not _missing(machine) else "waiting"


def untold(machine: LeaderMachine) -> bool:
    """Returns whether a cluster that was in the job at its end has no stream now, so that it cannot be told of the
    end.
    """
    clusters = machine.clusters
    return any(who not in clusters or clusters[who].conn is None for who in machine.chain.last_in)


def _missing(machine: LeaderMachine) -> list[str]:
    """Returns the names of followers that have a shard and are not connected."""
    here = {name for name, f in machine.followers.items() if f.conn is not None and f.obeys}
    return [name for name in machine.chain.cut if name not in here]


def _reason(machine: LeaderMachine) -> str:
    chain = machine.chain
    if chain.ended is not None:
        return chain.ended.reason
    if machine.ending:
        return machine.ending
    if chain.agreement is None:
        return "waits for a cluster to begin the job"
    if not chain.cut:
        return "waits for followers"
    if missing := _missing(machine):
        return (
            f"waits for {', '.join(missing)}: start {'each' if missing[1:] else 'it'} where its files are, or copy its "
            f"folder and start it there (`chaos-lightning ps follower --name {missing[0]} --dir FOLDER`)"
        )
    if troubles := [f"{name}: {f.trouble}" for name, f in sorted(machine.followers.items()) if f.trouble]:
        return "; ".join(troubles)
    if holders := machine.attendance.sole_holders():
        limit_s = machine.settings.last_holder_timeout_s
        return "; ".join(
            f"{who} was not heard for {silent_s:.1f} s, and alone holds a push that a follower may need: it is waited "
            f"for until {limit_s:g} s, or until its process is known to be dead"
            for who, silent_s in sorted(holders.items())
        )
    return "" if chain.founded else "waits for a cluster to found the job"


def _cluster(chain: OuterChain, who: IncarnationId, state: ClusterState, now_s: float) -> dict[str, Any]:
    return {
        "name": who.cluster,
        "incarnation": who.number,
        "place": chain.incarnations[who].place,
        "base": str(state.base),
        "staleness": chain.staleness(state.base) if state.base != NO_VERSION else 0,
        "rate": state.rate,
        "steps": state.steps,
        "left": state.left,
        "pending": state.pending,
        "offered": str(state.offer.push) if state.offer is not None else "",
        "refused": state.refused,
        "leaving": state.leaving,
        "connected": state.conn is not None,
        "silent_s": round(max(0.0, now_s - state.heard_s), 3),
        **_answers(chain.incarnations[who].tally),
    }


def _followers(machine: LeaderMachine) -> list[dict[str, Any]]:
    """Returns the facts of followers: of those that have a shard, connected or not, and of those that stand by."""
    chain, found = machine.chain, []
    for name in [*chain.cut, *sorted(machine.followers.keys() - set(chain.cut))]:
        state = machine.followers.get(name)
        found.append(
            {
                "name": name,
                "shard": chain.cut.index(name) if name in chain.cut else -1,
                "endpoint": state.endpoint if state is not None else "",
                "connected": state is not None and state.conn is not None,
                "obeys": state is not None and state.obeys,
                "version": str(state.version if state is not None else NO_VERSION),
                "saved": str(max(state.disk, default=NO_VERSION) if state is not None else NO_VERSION),
                "staged": len(state.staged) if state is not None else 0,
                "missing": len(state.missing) if state is not None else 0,
                "trouble": state.trouble if state is not None else "",
                "bits_differ": str(state.differs) if state is not None and state.differs != NO_VERSION else "",
            }
        )
    return found


def _versions(machine: LeaderMachine) -> dict[str, Any]:
    chain = machine.chain
    progress = chain.progress(chain.newest)
    return {
        "newest": str(chain.newest),
        "durable": [str(version) for version, _ in chain.durable],
        "served": str(machine.served),
        "ahead": chain.ahead,
        "samples": progress.samples,
        "steps": progress.steps,
        "epoch": progress.epoch,
    }


def _answers(tally: Mapping[PushAnswer, int]) -> dict[str, int]:
    """Returns how many pushes have each kind of answer."""
    return {answer.value: tally.get(answer, 0) for answer in PushAnswer}


def _leases(machine: LeaderMachine) -> dict[str, Any]:
    """Returns the facts about leased positions; none if each cluster has data of its own."""
    leases = machine.chain.leases
    if leases is None:
        return {}
    held = {str(who): leases.held(who) for who in sorted(leases.living)}
    return {"epoch": leases.epoch, "left": leases.left, "held": held, "aside": [str(each) for each in leases.aside]}
