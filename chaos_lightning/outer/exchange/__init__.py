"""Outer sync, shared by all its processes: the codec of messages, the arithmetic of a shard, pushes and versions."""
