"""Every test keeps its chains, tokens and settings to itself."""

from __future__ import annotations

from environment_support import own_environment

__all__ = ["own_environment"]
