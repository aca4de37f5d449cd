"""Runs one member's part of a model whose layers are divided over several members."""
