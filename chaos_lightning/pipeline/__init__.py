"""Pipelines: what one member runs of a model whose layers are spread over several."""
