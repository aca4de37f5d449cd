"""Fuzzes everything that reads bytes from other processes: `python -m lab.fuzz` (docs/fuzzing.md)."""
