"""Provides the torchrun rendezvous backend "chaos": workers come and go without a restart of the others.

torchrun finds `factory` through the entry-point group `torchrun.handlers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandlerCreator


def factory() -> RendezvousHandlerCreator:
    """Returns the function that makes rendezvous handlers for torchrun."""
    from chaos_lightning.rendezvous.handler import create_handler

    return create_handler


__all__ = ["factory"]
