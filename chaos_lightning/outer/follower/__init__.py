"""Outer sync: the follower, a process that holds one shard of the outer state."""
