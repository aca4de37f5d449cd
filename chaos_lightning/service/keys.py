"""Keys that a service makes for connections between two of its clients, and how far those are protected.

Theory of operation. A key is derived from what names the connection and from a random secret of this process, which is
kept nowhere else: not in the store, an event or a status. Both ends are told it on their streams. Another leader has
another secret; connections that stand need none, and one that breaks is made again by a key that both ends have,
whoever made it.
"""

from __future__ import annotations

import hmac
import json
import os

from chaos_lightning.transport.sealing import KEY_NBYTES, Level


def levels(rule: str, *, secret_channel: bool) -> tuple[Level, Level]:
    """Returns the least protection of links between machines and of links within one, as the setting `links`
    demands.
    """
    if rule != "auto":
        return Level(rule), Level(rule)
    return (Level.ENCRYPTED if secret_channel else Level.CHECKSUM), Level.CHECKSUM


class KeyMaker:
    """Maker of keys, with a secret of its own."""

    def __init__(self) -> None:
        self._secret = os.urandom(KEY_NBYTES)

    def key(self, *connection: str) -> tuple[str, bytes]:
        """Returns (name, key) of a connection; the name tells nothing about the key.

        Args:
            connection: Texts that name it: the job, both ends, and what else the key is to depend on.
        """
        key = hmac.digest(self._secret, json.dumps(connection).encode(), "sha256")
        return hmac.digest(key, b"name", "sha256")[:8].hex(), key
