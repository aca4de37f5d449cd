"""`chaos-lightning demo`: real torchrun nodes train a real model, are hurt, and the event logs prove what happened."""

LOSS = "loss"
"""Name of the event by which the demo's training script tells a validation's loss."""
