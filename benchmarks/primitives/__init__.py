"""Costs of connect-link, disconnect-link and scale-in for those who train."""
