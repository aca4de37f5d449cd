"""Implements one member of a job, in parts that the engine puts together."""
