"""Writes and reads the event log, and registers its names."""
