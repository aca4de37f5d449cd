"""Pipelines: runs one member's part of a model whose layers are spread over several members."""
