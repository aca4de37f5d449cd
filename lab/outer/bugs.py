"""Lists planted bugs, each a broken rule of docs/outer.md; the simulator must find every one of them.

Theory of operation. A bug is a part of a machine, or of the shell around one, that breaks one rule (planted.py), and a
family of plans in which that shows. Where another rule's guard would mask it, the guard is off, too; then `control` has
the guard off alone, and must show nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.types import GateState
from lab.outer import planted as bad
from lab.outer.processes import Machines
from lab.outer.store import SAVING


def _with(**parts: type) -> Callable[[OuterChain, int, int], LeaderMachine]:
    """Returns a function that makes leaders in which some parts are replaced by broken classes."""

    def made(chain: OuterChain, term: int, followers: int) -> LeaderMachine:
        machine = LeaderMachine(chain, term, followers)
        for name, part in parts.items():
            getattr(machine, name).__class__ = part
        return machine

    return made


def _new_gate(chain: OuterChain, term: int, followers: int) -> LeaderMachine:
    """Planted bug: a new leader starts with an empty gate and ignores what earlier rounds taught it."""
    chain.gate = GateState()
    return LeaderMachine(chain, term, followers)


def _reported(before: str) -> tuple[str, ...]:
    """Returns the steps of saving a file with the report moved (too early) to before the given step."""
    steps = [step for step in SAVING if step != "report"]
    at = steps.index(before)
    return (*steps[:at], "report", *steps[at:])


@dataclass(frozen=True, slots=True)
class Bug:
    """Planted bug: a broken rule of docs/outer.md.

    Attributes:
        rule: Number of the rule in docs/outer.md.
        what: Broken behaviour in words.
        machines: Machines with the bug.
        family: Family of plans under which the simulator must find the bug.
        control: Machines without the bug and without the safeguard that would mask it; None: nothing masks the bug.
    """

    rule: str
    what: str
    machines: Machines
    family: str = "any"
    control: Machines | None = None


BUGS = {
    "O1-early": Bug("O1", "answers are told before they are stored", Machines(leader=bad.EarlyLeader)),
    "O1-waits": Bug("O1", "records wait for the disk as rounds do", Machines(leader=bad.WaitingLeader)),
    "O1a-forgotten": Bug(
        "O1a",
        "a summary forgets what a cluster has for its base",
        Machines(leader=_with(summaries=bad.ForgetfulSummaries)),
    ),
    "O2-one-shard": Bug(
        "O2", "a round takes a push that one shard has", Machines(leader=_with(pushes=bad.OneShardPushes)), "fragile"
    ),
    "O3-again": Bug(
        "O3",
        "a push that was answered is taken once more",
        Machines(leader=_with(pushes=bad.RepeatingPushes, rounds=bad.UncheckedRounds)),
        control=Machines(leader=_with(rounds=bad.UncheckedRounds)),
    ),
    "O3-leader": Bug(
        "O3",
        "another leader takes a push that was answered once more",
        Machines(leader=_with(pushes=bad.ForgetfulPushes)),
        "unheard",
    ),
    "O3-bytes": Bug(
        "O3",
        "other bytes are taken under a number",
        Machines(leader=_with(pushes=bad.ChangingPushes, shards=bad.LaxShards)),
        "fickle",
        Machines(leader=_with(shards=bad.LaxShards)),
    ),
    "O3-order": Bug(
        "O3",
        "pushes are offered, and taken, in any order, whatever their bases hold",
        Machines(leader=_with(pushes=bad.JumpingPushes, rounds=bad.UnbasedRounds), cluster=bad.UnorderedCluster),
        "rolled",
        Machines(leader=_with(pushes=bad.JumpingPushes, rounds=bad.UnbasedRounds)),
    ),
    "O3-base": Bug(
        "O3",
        "a push is taken whose base holds another one that a rollback took and a round then rejected",
        Machines(leader=_with(rounds=bad.RefusingUncheckedRounds)),
        "rolled",
        Machines(leader=_with(rounds=bad.RefusingUnleasedRounds)),
    ),
    "O3-unrecorded": Bug(
        "O3", "a void push is told so without a record", Machines(leader=_with(pushes=bad.UnrecordedPushes))
    ),
    "O3a-strangers": Bug(
        "O3a",
        "a cluster with another model comes in",
        Machines(leader=_with(attendance=bad.OpenAttendance)),
        "strange",
    ),
    "O4-newest": Bug("O4", "a push is a delta to the newest version", Machines(cluster=bad.NewestBaseCluster)),
    "O4-older": Bug(
        "O4", "a leader decides on an older copy of the store", Machines(leader=_with(desk=bad.TrustingDesk)), "older"
    ),
    "O8c-chase": Bug(
        "O8", "a fetch is begun anew with each newer version", Machines(cluster=bad.ChasingCluster), "far"
    ),
    "O5-freed": Bug(
        "O5", "pushes are freed when a round has them", Machines(leader=_with(pushes=bad.FreeingPushes)), "rolled"
    ),
    "O5-held": Bug(
        "O5", "a follower keeps what no round will ever take", Machines(follower=bad.HoardingFollower), "fragile"
    ),
    "O5-passed": Bug(
        "O5", "a mark passes a follower, which computes on", Machines(follower=bad.PassedFollower), "passed"
    ),
    "O5a-samples": Bug(
        "O5a",
        "a rollback gives back samples of pushes that are kept",
        Machines(leader=_with(rounds=bad.UncheckedRounds), chain=bad.chain_with(bad.GivingLeases)),
        "fragile",
        Machines(leader=_with(rounds=bad.UncheckedRounds)),
    ),
    "O5a-joins": Bug(
        "O5a", "a rollback takes joins and their leases back", Machines(chain=bad.ForgettingChain), "fragile"
    ),
    "O5a-no-version": Bug("O5a", "a rollback makes no version", Machines(chain=bad.SilentChain), "fragile"),
    "O6-unsynced": Bug("O6", "a file is reported before it is synced", Machines(saving=_reported("sync")), "passed"),
    "O6-unnamed": Bug("O6", "a file is reported before it is renamed", Machines(saving=_reported("rename")), "passed"),
    "O6-folder": Bug(
        "O6", "a file is reported before its folder is synced", Machines(saving=_reported("sync-folder")), "passed"
    ),
    "O6-found": Bug("O6", "a file is reported as it was found", Machines(syncs_first=False), "passed"),
    "O6-newest": Bug(
        "O6",
        "a follower starts from its own newest file",
        Machines(follower=bad.NumberedFollower),
        "rolled",
        Machines(follower=bad.NewestFileFollower),
    ),
    "O6-damaged": Bug("O6", "a file is loaded as it lies there", Machines(compares=False), "damaged"),
    "O7-unshown": Bug(
        "O7", "a follower obeys before its start is stored", Machines(leader=_with(shards=bad.UnshownShards)), "frozen"
    ),
    "O7-terms": Bug("O7", "the store does not compare terms", Machines(store=bad.OpenStore), "frozen"),
    "O9-merged": Bug("O9", "the base is the merged parameters", Machines(merges=False)),
    "O9a-boundless": Bug(
        "O9a", "a cluster trains on, however long a version takes", Machines(cluster=bad.BoundlessCluster), "far"
    ),
    "O10-kept": Bug(
        "O10", "what was trained before a rejection is pushed all the same", Machines(discards=False), "poisoned"
    ),
    "O10-sent": Bug("O10", "the residual changes when a push is sent", Machines(residual="sent")),
    "O10-nan": Bug("O10", "the residual of a rejected push stays", Machines(residual="kept"), "poisoned"),
    "O10a-given-up": Bug("O10a", "a push is given up when the stream breaks", Machines(cluster=bad.ForgetfulCluster)),
    "O11-again": Bug(
        "O11", "what is leased is leased again", Machines(chain=bad.chain_with(bad.GreedyLeases)), "newcomers"
    ),
    "O11-parts": Bug("O11", "parts of steps are leased", Machines(chain=bad.chain_with(bad.PartLeases)), "batches"),
    "O11-thawed": Bug(
        "O11",
        "a push is taken of a cluster that was removed, and wakes",
        Machines(leader=_with(pushes=bad.LatePushes, attendance=bad.LateAttendance, rounds=bad.LaxRounds)),
        "thawed",
        Machines(leader=_with(rounds=bad.LaxRounds)),
    ),
    "O12-rejected": Bug(
        "O12", "the gate learns from what it rejects", Machines(leader=_with(rounds=bad.LearningRounds)), "poisoned"
    ),
    "O12-lost": Bug("O12", "what the gate has seen is lost with its leader", Machines(leader=_new_gate), "frozen"),
    "O12-shut": Bug(
        "O12",
        "the gate forgets whom it has refused, and shuts out for good",
        Machines(leader=_with(rounds=bad.ShuttingRounds)),
        "turned",
    ),
    "O13-wound": Bug(
        "O13", "each arrival puts the deadline off", Machines(leader=_with(rounds=bad.WindingRounds)), "windows"
    ),
    "O13-newcomer": Bug(
        "O13",
        "all wait for a newcomer that fetches",
        Machines(leader=_with(attendance=bad.WaitingAttendance)),
        "newcomers",
    ),
    "O14-hasty": Bug(
        "O14",
        "after a takeover everybody is removed",
        Machines(leader=_with(attendance=bad.HastyAttendance)),
        "frozen",
    ),
    "O14-holder": Bug(
        "O14", "who alone holds a push is removed by its heartbeats", Machines(leader=bad.ImpatientLeader), "holders"
    ),
    "O15-staged": Bug(
        "O15",
        "bytes that were staged for the old shard are applied to the new one",
        Machines(spool="push"),
        "recut",
        Machines(spool="shard"),
    ),
    "O15-replaced": Bug(
        "O15", "files of new shards take the place of the old ones before the record", Machines(beside=False), "recut"
    ),
    "O15-removed": Bug("O15", "old files go before the record", Machines(recut=bad.hasty_steps), "recut"),
    "O15-early": Bug("O15", "the record comes before the new files", Machines(cutting=_reported("write")), "recut"),
    "O15-unsynced": Bug(
        "O15", "the record comes before the new files are synced", Machines(cutting=_reported("sync")), "recut"
    ),
    "O15-left": Bug(
        "O15", "files of the old shards are taken for those of the new ones", Machines(recut=bad.leaving_steps), "recut"
    ),
    "O16-home": Bug(
        "O16",
        "who comes in anew after the job's end goes home without its last version",
        Machines(cluster=bad.HomegoingCluster),
    ),
    "O16-early": Bug("O16", "the end does not wait for the disks", Machines(leader=_with(end=bad.EarlyEnding))),
}
"""Planted bugs of outer sync, by name."""
