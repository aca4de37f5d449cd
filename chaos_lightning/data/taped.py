"""Orders of a tape: the ranks of an elastic cluster share out places, and each stands for a position of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chaos_lightning.data.order import Orders
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.types import Span


class TapeOrders:
    """Orders of tapes, as `Orders` has them, whose numbers stand where epochs do. Nothing is dropped: a tape's end is
    no epoch's.

    Args:
        orders: Of the whole data.
        tape: The present one; None before there is one.
    """

    drop_last = False

    def __init__(self, orders: Orders, tape: Callable[[], Tape | None]) -> None:
        self._orders, self._tape = orders, tape
        orders.warn_where_shared()
        self.unit, self.quota = orders.unit, orders.quota
        if orders.length(0) != orders.length(1):
            raise ConfigurationError(
                f"the training loader's sampler yields {orders.length(0)} units in the first epoch and "
                f"{orders.length(1)} in the second; clusters that share data need epochs of one length"
            )

    @property
    def drops(self) -> bool:
        """Whether the user's loader drops its last batch if that is short."""
        return self._orders.drop_last

    def length(self, epoch: int) -> int:
        """Returns the places on this tape so far; before there is one, positions of an epoch."""
        tape = self._tape()
        if tape is None:
            return self._orders.length(0)
        return tape.length if tape.number == epoch else 0

    @property
    def positions(self) -> int:
        """Number of positions of an epoch."""
        return self._orders.length(0)

    def keys(self, epoch: int, spans: Iterable[Span]) -> list[Any]:
        """Returns the units at these places."""
        tape = self._tape()
        assert tape is not None
        assert tape.number == epoch, f"places of tape {epoch} are asked for, and tape {tape.number} is in"
        return self._orders.keys(tape.epoch, tape.positions(spans))

    @property
    def batch(self) -> int:
        """Number of samples of a micro-batch."""
        return self._orders.batch

    def samples(self, keys: Sequence[Any]) -> int:
        """Returns how many samples these units are."""
        return self._orders.samples(keys)

    def order_hash(self, epoch: int) -> str:
        """Returns a hash that is equal if and only if the orders are that this tape's places are taken of."""
        tape = self._tape()
        assert tape is not None
        return self._orders.order_hash(tape.epoch)

    def fingerprint(self) -> dict[str, str]:
        """Returns words that must be equal at all ranks, and in all clusters, by name. The batch size need not be."""
        return {name: word for name, word in self._orders.fingerprint().items() if name != "data.drop_last"}
