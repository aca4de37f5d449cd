"""Lightning callbacks: leaving politely, checkpoints when members change, fault injection, a live view, useful time, a
profile of the model.
"""

if __name__ != "chaos_lightning.callbacks":
    raise ImportError(
        f"this folder was imported as {__name__!r}; write `import chaos_lightning.callbacks` "
        "(the folder at the root of the repository is the same one, under a name that would load everything twice)"
    )

from chaos_lightning.errors import needing

with needing("chaos_lightning.callbacks"):
    from chaos_lightning.callbacks.exits import ChaosExit
    from chaos_lightning.callbacks.faults import FaultInjectorCallback
    from chaos_lightning.callbacks.live import LiveView
    from chaos_lightning.callbacks.on_change import CheckpointOnChange
    from chaos_lightning.callbacks.profile import PipelineProfile
    from chaos_lightning.callbacks.useful_time import Goodput, UsefulTime

__all__ = [
    "ChaosExit",
    "CheckpointOnChange",
    "FaultInjectorCallback",
    "Goodput",
    "LiveView",
    "PipelineProfile",
    "UsefulTime",
]
