"""Outer sync: main programs of the parameter server, and what operators run beside it."""
