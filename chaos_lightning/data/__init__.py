"""Divides the user's data among the present members, so that each sample is used in exactly one committed step."""

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.source import AssignmentSource, MicroBatch, Stats

__all__ = ["AssignmentSource", "ElasticLoader", "MicroBatch", "Stats"]
