"""Hostile bytes for all that reads bytes of others: `python -m lab.fuzz` (docs/fuzzing.md)."""
