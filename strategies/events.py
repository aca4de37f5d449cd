"""Declares a training loop's log events: validations, checkpoints, and resumed states."""

from chaos_lightning.events.registry import Event

EVENTS = (
    Event("validation", "a validation is over", {"seconds": "s"}),
    Event("checkpoint", "a checkpoint was written", {"path": "file", "step": "of its state", "head": "header hash"}),
    Event("resumed", "the whole job goes on from a checkpoint", {"step": "of its state", "ledger": "spent samples"}),
)
