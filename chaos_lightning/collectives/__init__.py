"""All-reduce over a plan of trees, chunk by chunk while backward runs, into a second buffer."""
