"""Keeps the latest few keys that a process shares with each of its peers; handshakes wait for a key that is about to
come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
Key = tuple[str, bytes]
"""Name of a key, and the key."""


class PeerKeys:
    """Keys of each peer. Any thread.

    Args:
        kept: Most keys of a peer; the oldest is dropped.
        most: Most peers; the one added first is dropped. 0: no limit.
    """

    def __init__(self, kept: int, most: int = 0) -> None:
        self._kept, self._most = kept, most
        self._changed = threading.Condition()
        self._keys: dict[str, deque[Key]] = {}

    def learn(self, keys: Iterable[tuple[str, Key]], void: Iterable[str] = ()) -> None:
        """Forgets all keys of the peers in `void`, then adds these keys, given as (peer, key)."""
        with self._changed:
            for peer in void:
                self._keys.pop(peer, None)
            for peer, key in keys:
                kept = self._keys.setdefault(peer, deque(maxlen=self._kept))
                if key not in kept:
                    kept.appendleft(key)
            while self._most and len(self._keys) > self._most:
                del self._keys[next(iter(self._keys))]
            self._changed.notify_all()

    def clear(self) -> None:
        """Forgets all keys."""
        with self._changed:
            self._keys.clear()

    def of(self, peer: str, patience_s: float) -> tuple[Key, ...]:
        """Returns the keys of a peer, newest first; waits for one if there is none yet, and returns () if none
        comes.
        """
        return self._wait(lambda: tuple(self._keys.get(peer, ())), patience_s) or ()

    def find(self, peer: str, names: Iterable[str], patience_s: float) -> Key | None:
        """Returns the first of the named keys of a peer that is known; waits for one if none is yet, and returns None
        if none comes.
        """
        wanted = tuple(names)

        def first() -> Key | None:
            mine = dict(self._keys.get(peer, ()))
            return next(((name, mine[name]) for name in wanted if name in mine), None)

        return self._wait(first, patience_s)

    def _wait(self, look: Callable[[], T], patience_s: float) -> T:
        end = time.monotonic() + patience_s
        with self._changed:
            while not (found := look()) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return found
