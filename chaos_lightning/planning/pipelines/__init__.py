"""Who computes what after a loss: pipelines of unequal length, what a step then costs, what has to move, what pays."""
