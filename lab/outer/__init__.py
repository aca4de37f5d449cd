"""Simulates outer jobs: the real machines of leader, followers and clusters, and a fault plan (docs/outer.md)."""
