"""Events of services: their servers, stores and elections."""

from chaos_lightning.events.registry import Event

EVENTS = (
    Event(
        "service_started",
        "a service's server leads",
        {"endpoint": "HOST:PORT", "service": "name", "term": "its term", "records": "count", "store": "place"},
    ),
    Event("service_ended", "a service's server has no reason to go on", {"reason": "why", "failed": "bool"}),
    Event("stored", "the store has answered", {"kind": "of entry", "ok": "bool", "detail": "words", "seconds": "s"}),
    Event("elected", "this candidate leads", {"candidate": "id", "endpoint": "HOST:PORT", "reason": "why"}),
    Event("leader", "another candidate leads", {"candidate": "id", "endpoint": "HOST:PORT", "reason": "why"}),
    Event("deposed", "a leader leads no more", {"candidate": "id", "reason": "why"}),
)
