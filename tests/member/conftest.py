"""Fixtures for tests of members: every test has its own chains, tokens and settings."""

from environment_support import own_environment

__all__ = ["own_environment"]
