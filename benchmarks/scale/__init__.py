"""Measures what a job of a thousand members costs its scheduler and its members at each step."""
