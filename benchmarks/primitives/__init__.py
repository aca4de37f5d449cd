"""Costs of connect-link, disconnect-link and scale-in for members that train."""
