"""The user's data, dealt to whoever is there, every sample in exactly one committed step."""

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.source import DealSource, MicroBatch, Stats

__all__ = ["DealSource", "ElasticLoader", "MicroBatch", "Stats"]
