"""Costs of the protection of links."""
