"""Events of faults that are injected, and of the demo's training script."""

from chaos_lightning.events.registry import Event

EVENTS = (
    Event(
        "fault_injected",
        "a fault is about to strike; written before it happens",
        {"kind": "a word of testing/faults.py"},
        {"node": "victim", "peer": "other end", "phase": "where in a step", "step": "when", "seconds": "how long"},
        note="fault injected: {kind} {phase}",
    ),
    Event("loss", "a validation of the demo is over", {"epoch": "which", "loss": "mean"}),
    Event("step_loss", "a step of the demo is committed", {"step": "which", "loss": "mean over its samples"}),
    Event(
        "final_weights",
        "a cluster of the demo has ended",
        {"version": "that it adopted last", "hash": "of its parameters and buffers", "reason": "why it ended"},
    ),
)
