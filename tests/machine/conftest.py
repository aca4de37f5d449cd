"""Fixture that keeps each test's chains, tokens and settings apart from those of others."""

from environment_support import own_environment

__all__ = ["own_environment"]
