"""Events of schedulers: their processes, and what operators ask."""

from chaos_lightning.events.registry import Event

EVENTS = (
    Event(
        "scheduler_started",
        "a scheduler leads",
        {"endpoint": "HOST:PORT", "job": "name", "term": "its term", "chain": "id", "views": "count", "store": "place"},
    ),
    Event("scheduler_ended", "a scheduler has no reason to go on", {"reason": "why", "failed": "bool"}),
    Event("stream_closed", "a control stream is closed", {"peer": "address", "of": "name", "reason": "why"}),
    Event("drain", "an operator wants a node out", {"of": "its name", "by": "who asks"}),
    Event("reset_asked", "an operator wants the job ended", {"by": "who asks", "force": "bool"}),
)
