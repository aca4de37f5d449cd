"""Outer sync: the code that runs within a cluster's training process."""
