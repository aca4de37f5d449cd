"""A node joins: how soon it contributes, and what the others feel."""
