"""Outer sync: the leader's process, with its service, its store and its streams."""
