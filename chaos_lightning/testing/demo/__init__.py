"""`chaos-lightning demo`: real torchrun nodes train a real model, are hurt, and the event logs prove what happened."""

LOSS = "loss"
"""Name of the event by which the demo's training script tells a validation's loss."""
FINAL = "final_weights"
"""Name of the event by which a cluster of `demo-diloco` tells with what it ended."""
STEP_LOSS = "step_loss"
"""Name of the event by which the training script of `demo-pipeline` tells the loss of a step."""
