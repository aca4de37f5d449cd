"""Fixtures: every test keeps its chains, tokens and settings to itself."""

from environment_support import own_environment

__all__ = ["own_environment"]
