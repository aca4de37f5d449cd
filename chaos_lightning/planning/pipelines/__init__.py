"""Plans of pipelines: who computes what after a loss, what a step then costs, what has to move, what pays."""
