"""The user's data, assigned to whoever is there, every sample in exactly one committed step."""

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.source import AssignmentSource, MicroBatch, Stats

__all__ = ["AssignmentSource", "ElasticLoader", "MicroBatch", "Stats"]
