"""Lightning callbacks: leaving politely, fault injection, a live view, goodput, a profile of the model."""

if __name__ != "chaos_lightning.callbacks":
    raise ImportError(
        f"this folder was imported as {__name__!r}; write `import chaos_lightning.callbacks` "
        "(the folder at the root of the repository is the same one, under a name that would load everything twice)"
    )

from chaos_lightning.errors import needing

with needing("chaos_lightning.callbacks"):
    from chaos_lightning.callbacks.exits import ChaosExit
    from chaos_lightning.callbacks.faults import FaultInjectorCallback
    from chaos_lightning.callbacks.goodput import Goodput
    from chaos_lightning.callbacks.live import LiveView
    from chaos_lightning.callbacks.profile import PipelineProfile

__all__ = ["ChaosExit", "FaultInjectorCallback", "Goodput", "LiveView", "PipelineProfile"]
