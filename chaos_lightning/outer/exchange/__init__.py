"""Outer sync, used by leaders, followers and clusters alike: the encoding of messages, the arithmetic of a shard, and
the transfer of pushes and versions.
"""
