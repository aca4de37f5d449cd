"""Simulates outer jobs: real state machines of leader, followers and clusters, and a plan of faults (docs/outer.md)."""
