"""Events of outer sync: of leaders, followers and clusters."""

from chaos_lightning.events.registry import Event

EVENTS = (
    # --- the leader
    Event(
        "entry",
        "an entry of the chain is durable",
        {"position": "in the chain", "kind": "of entry", "version": "that it makes"},
    ),
    Event("push_refused", "a push is not taken", {"push": "its name", "reason": "why"}),
    # --- a follower
    Event("file_damaged", "a shard's file is not what the chain says", {"version": "of the file"}),
    Event("late_leader", "a leader speaks whose time is over", {"term": "its", "known": "the highest so far"}),
)
