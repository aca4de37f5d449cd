"""Carries out the effects of `ClusterMachine` on the cluster's model, its pushes and versions, and its log.

Theory of operation. One process (session.py) and a rank of an elastic cluster (elastic.py) do the same with each
effect, between two inner steps and in the order in which the machine gave them. They differ in who hears the leader,
and in when a push counts as frozen; so messages, encoding and the next life are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.outer.cluster.cluster_log import OuterLog
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.exchange import FollowerExchange
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.types import VersionId


@dataclass(frozen=True, slots=True)
class Boundary:
    """Outcome of a boundary, which is the moment between two inner steps.

    Attributes:
        adopted: Version that was taken over; None: none was.
        outright: Whether the version's parameters replace the model's: all that was prepared or accumulated must be
            dropped.
        reset_optimizer: Whether the inner optimizer's state is to be dropped, too.
        over: Reason for which this cluster's part is over; "" while it goes on.
        waited_s: Seconds for which the loop was kept waiting.
    """

    adopted: VersionId | None = None
    outright: bool = False
    reset_optimizer: bool = False
    over: str = ""
    waited_s: float = 0.0


class ClusterEffects:
    """Effects on one cluster's model, exchange and log. Only the training thread may call it.

    Args:
        model: Model of the cluster.
        exchange: Its pushes and versions.
        log: Its log.
        overlap: Whether it trains while a push is under way.
        waited_s: Returns the seconds for which training stood still for a version, and begins to count anew.
    """

    def __init__(
        self,
        model: ClusterModel,
        exchange: FollowerExchange,
        log: OuterLog,
        *,
        overlap: bool,
        waited_s: Callable[[], float],
    ) -> None:
        self._model, self._exchange, self._log = model, exchange, log
        self._overlap, self._waited_s = overlap, waited_s

    def carry_out(
        self, effect: cl.ClusterEffect, machine: cl.ClusterMachine, part: Part | None, found: Boundary
    ) -> Boundary:
        """Carries out one effect.

        Args:
            effect: The effect.
            machine: Machine that gave it.
            part: Version that it adopts, if it has been fetched.
            found: Outcome of the boundary so far.

        Returns:
            The outcome with that of the effect added.
        """
        match effect:
            case cl.Freeze(push):
                self._log.tell_steps()  # the log has the steps before the event that covers or discards them
                self._model.freeze(push)
            case cl.Settle(push, answer):
                self._model.settle(push, answer)
            case cl.Adopt(version, outright):
                reset = self._adopt(version, machine, part, outright=outright)
                return replace(
                    found,
                    adopted=version,
                    outright=found.outright or outright,
                    reset_optimizer=found.reset_optimizer or reset,
                )
            case cl.TakeLast(version, steps, samples):
                self._log.tell_steps()
                self._model.end_with(part)
                self._log.took_last(version, steps, samples)
                return replace(found, adopted=version, outright=True)
            case cl.Free(push):
                self._exchange.free(push)
            case cl.ReachHolders(holders):
                self._exchange.reach(holders)
            case cl.FetchVersion():
                self._exchange.look()
            case cl.Over(again=again) as over:
                self._log.ended(over)
                if again:  # a new incarnation has no base
                    self._model.forget()
                return replace(found, outright=True)
            case fx.OuterNote(name, fields):
                self._log.tell(name, **dict(fields))
        return found

    def _adopt(self, version: VersionId, machine: cl.ClusterMachine, part: Part | None, *, outright: bool) -> bool:
        """Adopts a version; returns whether the inner optimizer is to begin anew."""
        assert part is not None
        self._log.tell_steps()
        own = machine.since_base[1]
        # Without overlap nothing has been trained since, but after a void.
        self._model.adopt(part, outright=outright or not (self._overlap or own))
        self._log.adopted(version, own, machine.job, self._waited_s(), outright=outright)
        return outright and self._model.resets_optimizer


def renew(optimizers: Iterable[Optimizer], boundary: Boundary) -> None:
    """Clears the state of inner optimizers if the boundary asks for it, or if that state has NaN or infinite values
    after a version was adopted outright (O10).

    A rejection gives the parameters back, and not the optimizer's state. One that is not finite stays so for ever.
    """
    for optimizer in optimizers if boundary.outright else ():
        if boundary.reset_optimizer or not _finite(optimizer.state):
            optimizer.state.clear()


def _finite(state: Any) -> bool:
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(state.isfinite().all())
    if isinstance(state, Mapping):
        return all(map(_finite, state.values()))
    return (
        all(map(_finite, state))
        if isinstance(state, (list, tuple))
        else not isinstance(state, float) or isfinite(state)
    )
