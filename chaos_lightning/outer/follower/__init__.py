"""Outer sync: the process that holds one shard of the outer state."""
