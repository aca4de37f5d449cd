"""Costs of a job of a thousand members for its scheduler, and for its members at each step."""
