"""Outer sync: what runs within a cluster's training process."""
