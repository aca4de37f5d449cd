"""A chain in this process's memory: for tests and simulations, and for jobs that need not outlive their scheduler.

Several `MemoryStore` objects over one `Shelf` behave like several schedulers over one store.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from chaos_lightning.control.store import Appended, Entry, Store, Tip, advance, entry_of, judge, with_term
from chaos_lightning.errors import StoreError
from chaos_lightning.membership.effects import Persist


@dataclass(slots=True)
class Shelf:
    """What several stores share. `changed` guards it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    tip: Tip = field(default_factory=Tip)
    entries: list[Entry] = field(default_factory=list)


class MemoryStore(Store):
    """See the module."""

    def __init__(self, job: str = "default", shelf: Shelf | None = None) -> None:
        super().__init__(job)
        self._shelf = shelf if shelf is not None else Shelf()
        self._closed = False

    @property
    def place(self) -> str:
        return "memory (lost with the scheduler's process)"

    def _open(self) -> Shelf:
        if self._closed:
            raise StoreError(f"the store of job {self.job} is closed")
        return self._shelf

    def take_term(self, above: int = 0, chain: str = "") -> int:
        shelf = self._open()
        with shelf.changed:
            self._seen = shelf.tip = with_term(shelf.tip, above, chain)
            self.term = shelf.tip.term
            return self.term

    def begin_again(self) -> str:
        shelf = self._open()
        with shelf.changed:
            shelf.tip = shelf.tip.begun_again()
            shelf.entries.clear()
        return "forgotten, as it was in memory"

    def tip(self) -> Tip:
        shelf = self._open()
        with shelf.changed:
            return shelf.tip

    def append(self, effect: Persist) -> Appended:
        shelf = self._open()
        entry = entry_of(effect)
        with shelf.changed:
            verdict = judge(shelf.tip, self.term, entry, self._seen)
            if verdict.ok and not verdict.detail:
                entry = replace(entry, revision=len(shelf.entries) + 1)
                shelf.entries.append(entry)
                shelf.tip = advance(shelf.tip, entry)
                shelf.changed.notify_all()
            self._seen = shelf.tip if verdict.ok else self._seen
            return verdict

    def entries(self, after: int = 0) -> tuple[Entry, ...]:
        shelf = self._open()
        with shelf.changed:
            return tuple(shelf.entries[after:])

    def wait(self, after: int, timeout_s: float) -> bool:
        shelf = self._open()
        deadline = time.monotonic() + timeout_s
        with shelf.changed:
            while len(shelf.entries) <= after:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                shelf.changed.wait(left)
            return True

    def close(self) -> None:
        self._closed = True
