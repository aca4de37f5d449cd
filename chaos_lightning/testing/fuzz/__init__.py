"""Hostile bytes for all that reads bytes of others: `python -m chaos_lightning.testing.fuzz` (docs/fuzzing.md)."""
