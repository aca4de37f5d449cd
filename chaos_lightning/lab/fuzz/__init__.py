"""Hostile bytes for all that reads bytes of others: `python -m chaos_lightning.lab.fuzz` (docs/fuzzing.md)."""
