"""Measures what connect-link, disconnect-link and scale-in cost the members that train."""
