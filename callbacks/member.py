"""Gives callbacks access to the member behind a Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from chaos_lightning.member.engine import Engine


def engine_of(trainer: Trainer) -> Engine | None:
    """Returns the engine of a chaos strategy once its member is in the job; None before, and under any other
    strategy.
    """
    strategy: Any = trainer.strategy
    engine = getattr(strategy, "engine", None)
    if engine is None:
        session = getattr(strategy, "session", None)
        if session is None or not getattr(session, "entered", False):
            return None
        engine = session.engine
    return engine if getattr(engine, "view", None) is not None else None
