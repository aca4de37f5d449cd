"""Fixtures for tests of the protocol: every test has its own chains, tokens and settings."""

from environment_support import own_environment

__all__ = ["own_environment"]
