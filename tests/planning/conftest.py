"""Isolates tests by fixtures: each has its own folders for chains and tokens, and its own settings."""

from environment_support import own_environment

__all__ = ["own_environment"]
