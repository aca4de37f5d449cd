"""`chaos-lightning demo`: real torchrun nodes train a real model and are killed; event logs prove what happened."""

LOSS = "loss"
"""Name of the event in which the demo's training script reports the loss of a validation."""
FINAL = "final_weights"
"""Name of the event in which a cluster of `demo-diloco` reports its last version and the hash of its weights."""
STEP_LOSS = "step_loss"
"""Name of the event in which the training script of `demo-pipeline` reports the loss of a step."""
