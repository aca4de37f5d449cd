"""Measures how soon a newcomer contributes, and what its join costs the members that train."""
