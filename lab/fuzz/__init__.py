"""Sends hostile bytes to all that reads bytes of others: `python -m lab.fuzz` (docs/fuzzing.md)."""
