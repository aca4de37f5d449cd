"""Assigns the user's data to the members that are in, every sample in exactly one committed step."""

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.source import AssignmentSource, MicroBatch, Stats

__all__ = ["AssignmentSource", "ElasticLoader", "MicroBatch", "Stats"]
