"""Outer sync: the leader's service, its store and its streams."""
