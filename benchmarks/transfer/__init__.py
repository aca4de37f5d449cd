"""Measures how fast a newcomer gets the state over uneven links."""
