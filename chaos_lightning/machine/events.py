"""Events of a machine's processes, whatever job they are in."""

from chaos_lightning.events.registry import Event

EVENTS = (
    Event(
        "notice_taken",
        "it leaves, since its machine will be taken away",
        {"source": "kind of source, as in the setting `notice`", "reason": "why, and in how many seconds"},
        {"left_s": "seconds until the machine is taken; negative: since it was to be"},
        note="leaves: {reason}",
    ),
)
