"""Orders samples by tapes: an elastic cluster's ranks divide the places on a tape, the sequence of positions that it
was leased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chaos_lightning.data.order import Orders
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.types import Span


class TapeOrders:
    """Orders of samples on tapes, with the interface of `Orders`: a tape's number stands for the epoch's, and nothing
    is dropped at a tape's end.

    Args:
        orders: Orders of the whole data.
        tape: Function that returns the present tape; None before there is one.
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
        """Whether the user's loader drops a short last batch (drop_last)."""
        return self._orders.drop_last

    def length(self, epoch: int) -> int:
        """Returns the number of places on this tape so far; without a tape, the number of positions in an epoch."""
        tape = self._tape()
        if tape is None:
            return self._orders.length(0)
        return tape.length if tape.number == epoch else 0

    @property
    def positions(self) -> int:
        """Number of positions in an epoch."""
        return self._orders.length(0)

    def keys(self, epoch: int, spans: Iterable[Span]) -> list[Any]:
        """Returns the units (samples, batches or items) at these places of the tape."""
        tape = self._tape()
        assert tape is not None
        assert tape.number == epoch, f"places of tape {epoch} are asked for, and tape {tape.number} is in"
        return self._orders.keys(tape.epoch, tape.positions(spans))

    @property
    def batch(self) -> int:
        """Number of samples in a micro-batch."""
        return self._orders.batch

    def samples(self, keys: Sequence[Any]) -> int:
        """Returns the number of samples in these units."""
        return self._orders.samples(keys)

    def order_hash(self, epoch: int) -> str:
        """Returns a hash of the order of the epoch to which the tape's places belong."""
        tape = self._tape()
        assert tape is not None
        return self._orders.order_hash(tape.epoch)

    def fingerprint(self) -> dict[str, str]:
        """Returns settings, by name, that must be equal at all ranks and in all clusters; the batch size is not among
        them.
        """
        return {name: word for name, word in self._orders.fingerprint().items() if name != "data.drop_last"}
