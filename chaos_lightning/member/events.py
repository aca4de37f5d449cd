"""Events of one member: its slots and views, its state on the way in and out, its links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chaos_lightning.events.registry import Event
from chaos_lightning.protocol.types import Contribution, Header, Spent

EVENTS = (
    Event(
        "joined",
        "it holds the state and contributes from the next slot on",
        {"role": '"founder" or "joiner"', "seq": "slot it stands on", "step": "of its state"},
        {
            "rank": "in the view",
            "world_size": "members",
            "seconds": "since it came",
            "by_source": "bytes by donor",
            "job": "its name",
            "endpoint": "where this member reaches the scheduler, HOST:PORT",
        },
    ),
    Event(
        "came_late",
        "it came when the job was finished",
        {"reason": "words", "step": "of the final state, which it has loaded; -1: it has not"},
    ),
    Event("rejoin", "it joins again, as a newcomer", {"old_id": "who it was"}, {"reason": "why"}),
    Event("scheduler", "its control stream has changed", {"state": "words"}),
    Event("epoch", "an epoch of its data begins", {"stream": "name", "epoch": "which", "length": "samples in it"}),
    # --- views and slots
    Event("next_view", "a view is announced that a header is to carry", {"id": '"term.number"'}),
    Event(
        "committed",
        "it has committed a slot",
        {
            "seq": "slot",
            "kind": "of slot",
            "step": "optimizer steps, this slot's included",
            "view": "the slot's",
            "header": "hash",
            "prev": "hash of the header before",
            "contributors": "[id, weight] in rank order",
            "spent": "what this member used: {stream, epoch, spans}",
            "ledger": "what all have used of the epoch, as the header says",
            "next_view": "the next slot's",
        },
        {
            "duration_s": "since its commit before",
            "wait_s": "part of that in which it waited in the engine",
            "state_hash": "of the state after the slot",
            "call": "name of the collective",
            "error": "the header's",
            "micro_batches": "of the slot, as [start, stop), where layers lie at several members",
            "coverage": "[first, end, micro-batches] of runs of layers: whose gradients this member's sums held",
        },
    ),
    Event(
        "train_loss",
        "the mean loss of what it used in a step; once in a second or in 10 steps",
        {"step": "optimizer steps, this one included", "loss": "of its own samples", "weight": "of these in the step"},
    ),
    Event("hand_on", "the open slot is handed on", {"view": "decided", "base": "slot", "reason": "why"}),
    Event("redo", "the open slot is reduced again", {"view": "decided", "base": "last slot", "reason": "why"}),
    Event("boundary", "a safe point is committed", {"seq": "slot"}),
    Event(
        "state_hash",
        "it took a hash of its replicated state",
        {"seq": "slot", "step": "step", "head": "header hash", "hash": "of the state"},
    ),
    # --- state on its way
    Event("snapshot", "the state at a header is copied for learners", {"seq": "slot", "head": "header hash"}),
    Event("released", "the snapshot is let go", {"seq": "slot", "left_out": "slots not copied in time"}),
    Event("observing", "a newcomer observes", {"seq": "slot", "head": "header hash", "sources": "ids of donors"}),
    Event("replayed", "a learner has applied the log", {"seq": "up to", "step": "up to", "steps": "count"}),
    Event("published", "its state at a header can be pulled", {"seq": "slot", "head": "header hash"}),
    Event("pull_started", "it pulls the state", {"seq": "slot", "head": "header hash", "sources": "ids of donors"}),
    Event("pull_source", "one donor's part", {"source": "id", "nbytes": "received, bytes", "seconds": "s"}),
    Event(
        "pull_progress",
        "how far a pull is",
        {"nbytes": "so far, bytes", "total": "bytes"},
        {"rate_bps": "bits per second of late", "remaining_s": "1e9: unknown", "sources": "bytes by donor"},
    ),
    Event(
        "pull_done",
        "a pull is over",
        {"nbytes": "received, bytes", "skipped": "held already, bytes", "seconds": "s", "hash": "of the state"},
        {"observed": "bool: to be replayed upon", "seq": "slot", "step": "step"},
    ),
    Event(
        "part_pulled",
        "a part of the state is here, of a model whose layers lie at several members",
        {
            "seq": "slot of its header",
            "part": "its name",
            "number": "its number",
            "nbytes": "received, bytes",
            "seconds": "s",
            "by_source": "bytes by donor",
            "hash": "of the part, which was proved",
        },
    ),
    Event(
        "units_dropped",
        "units of an attempt are undone here, and run again if the job goes on",
        {"seq": "slot", "micro_batches": "half-open intervals of their numbers"},
    ),
    Event(
        "resumed_kept",
        "the job goes on from a state that its last member kept",
        {"step": "step", "seq": "slot", "keeper": "id", "path": "file"},
        {"parts": "of a model whose layers lie at several members: numbers of those in the file, half-open intervals"},
    ),
    # --- links
    Event("link_up", "a link to a peer stands", {"peer": "id"}, {"evidence": "words"}),
    Event("link_down", "a link to a peer is gone", {"peer": "id", "evidence": "words"}),
    Event(
        "link_measured",
        "a probe has measured a link",
        {"peer": "id", "latency_s": "half a round trip", "rate_bps": "bits per second to the peer", "evidence": "why"},
    ),
    Event(
        "links",
        "what its links carry, every few seconds",
        {
            "links": "{peer, sent_bps, received_bps, ...} each: bits per second since the last such event",
            "relayed": "routed messages of others that passed here",
            "waiting": "routed messages of others that wait",
        },
    ),
)


def committed_fields(
    header: Header,
    contributors: Sequence[str],
    *,
    duration_s: float,
    wait_s: float = 0.0,
    spent: Iterable[Spent] = (),
    mine: Contribution | None = None,
) -> dict[str, Any]:
    """Returns the fields of a `committed` event, from the header that committed the slot.

    Args:
        header: The slot's header.
        contributors: Ids of the members that contributed to the slot, in rank order.
        duration_s: Seconds since this member's previous commit.
        wait_s: Seconds of `duration_s` for which the training thread was blocked in the engine.
        spent: Sample ranges that this member itself used in the slot (its contribution's).
        mine: The member's contribution to the slot: where layers lie at several members, it names what its sums hold.
    """
    fields: dict[str, Any] = {
        "seq": header.seq,
        "kind": header.kind.value,
        "step": header.step,
        "view": str(header.view),
        "header": header.hash,
        "prev": header.prev_hash,
        "contributors": list(map(list, zip(contributors, header.weights(), strict=True))),
        "spent": list(spent),
        "ledger": list(header.ledger.streams),
        "next_view": str(header.next_view),
        "duration_s": round(duration_s, 6),
        "wait_s": round(wait_s, 6),
    }
    if mine is not None and mine.micro_batches and mine.view == header.view:
        fields["micro_batches"] = list(mine.micro_batches)
        fields["coverage"] = [[c.first, c.end, list(c.micro_batches)] for c in mine.coverage]
    if header.name:
        fields["call"] = header.name
    if header.error:
        fields["error"] = header.error
    return fields
