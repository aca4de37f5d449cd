"""Lightning strategies: thin translations of Lightning's hooks to the engine."""

if __name__ != "chaos_lightning.strategies":
    raise ImportError(
        f"this folder was imported as {__name__!r}; write `import chaos_lightning.strategies` "
        "(the folder at the root of the repository is the same one, under a name that would load everything twice)"
    )

from chaos_lightning.settings import ChaosOptions
from chaos_lightning.strategies.schedules import BySamples
from chaos_lightning.strategies.strategy import ChaosStrategy

__all__ = ["BySamples", "ChaosOptions", "ChaosStrategy"]
