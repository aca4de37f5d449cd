"""Plans pipelines: which device computes which layers, what a step costs, and how to go on after a loss."""
