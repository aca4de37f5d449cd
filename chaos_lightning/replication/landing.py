"""Replaces a member's state by a donor's: allocates memory for the bytes first, and takes over the rest when all have
arrived.
"""

from __future__ import annotations

from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.manifest import decode_values, fitting
from chaos_lightning.replication.memory import region
from chaos_lightning.replication.table import StateTable, check_layout, make_attached, placeholder


class Landing:
    """Memory for all tensors of a donor's table: the replicated ones are received into the member's own tensors.

    Args:
        state: State of this member; its `prepare` is called at once.
        table: Table of the donor's state, which is to come.
        manifest: Donor's state that is not tensors, as text.
        max_attached_nbytes: Most bytes of tensors that only the manifest refers to; more are refused.

    Raises:
        WireError: The manifest is malformed.
        StateError: The state does not fit here.
    """

    def __init__(self, state: StateAccess, table: StateTable, manifest: bytes, max_attached_nbytes: int) -> None:
        self._state = state
        self._manifest = manifest
        # Tensors that are not there yet have a shape but no memory in the manifest.
        shapes = {e.name: placeholder(e) for e in table.entries}
        values = decode_values(manifest, {**shapes, **dict(state.tensors())})
        with fitting():
            state.prepare(values, table)
        tensors = state.tensors()
        check_layout(table, tensors)
        self.named = [*tensors, *make_attached(table, max_attached_nbytes).items()]
        self.regions = [region(name, tensor) for name, tensor in self.named]
        """Regions aligned with the table's entries, as `named` is."""

    def finish(self) -> None:
        """Takes over the part of the state that is not tensors, once all bytes have arrived."""
        for item in self.regions:
            item.finish()
        values = decode_values(self._manifest, dict(self.named))
        with fitting():
            self._state.adopt(values)
