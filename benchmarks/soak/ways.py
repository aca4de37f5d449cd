"""Joins a member's connections to all schedulers, so that they are cut and restored together."""

from __future__ import annotations

from collections.abc import Sequence

from chaos_lightning.testing.edge.relay import Way


class Ways:
    """One member's connections to all schedulers, which are cut and restored together.

    Args:
        ways: Connections to the schedulers, of which each knows the member by its process.
        name: Name of the member.
    """

    def __init__(self, ways: Sequence[Way], name: str) -> None:
        self._ways, self._name = ways, name
        self.endpoint = ",".join(way.endpoint for way in ways)

    def cut(self) -> None:
        for way in self._ways:
            way.cut(self._name)

    def restore(self) -> None:
        for way in self._ways:
            way.restore(self._name)

    def close(self) -> None:
        self.restore()
