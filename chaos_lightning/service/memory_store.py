"""Keeps a log in this process's memory, for tests, simulations and services that need not outlive their process.

Several `MemoryStore` objects over one `Shelf` behave like several writers over one store.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from chaos_lightning.errors import StoreError
from chaos_lightning.service.store import Appended, End, Store, StoreRecord, judge


@dataclass(slots=True)
class Shelf:
    """Records of a log that several memory stores share; `changed` guards them."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    end: End = field(default_factory=End)
    records: list[StoreRecord] = field(default_factory=list)


class MemoryStore(Store):
    """Log in this process's memory."""

    def __init__(self, name: str = "default", shelf: Shelf | None = None) -> None:
        super().__init__(name)
        self._shelf = shelf if shelf is not None else Shelf()
        self._closed = False

    @property
    def place(self) -> str:
        return "memory (lost with the scheduler's process)"

    def _open(self) -> Shelf:
        if self._closed:
            raise StoreError(f"the store of job {self.name} is closed")
        return self._shelf

    def take_term(self, above: int = 0, log_id: str = "") -> End:
        shelf = self._open()
        with shelf.changed:
            shelf.end = shelf.end.with_term(above, log_id, self.term)
            self.term = shelf.end.term
            return shelf.end

    def begin_again(self) -> str:
        shelf = self._open()
        with shelf.changed:
            shelf.end = shelf.end.begun_again()
            shelf.records.clear()
        return "forgotten, as it was in memory"

    def end(self) -> End:
        shelf = self._open()
        with shelf.changed:
            return shelf.end

    def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended:
        shelf = self._open()
        with shelf.changed:
            verdict = judge(shelf.end, record, seen, cut=cut)
            if verdict.ok and not verdict.detail:
                if cut:
                    shelf.records.clear()
                shelf.records.append(record)
                shelf.end = verdict.end
                shelf.changed.notify_all()
            return verdict

    def read(self, after: int = 0) -> tuple[End, tuple[StoreRecord, ...]]:
        shelf = self._open()
        with shelf.changed:
            return shelf.end, self._checked(shelf.end, shelf.records, after)

    def wait(self, after: int, timeout_s: float) -> bool:
        shelf = self._open()
        deadline = time.monotonic() + timeout_s
        with shelf.changed:
            while shelf.end.position <= after:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                shelf.changed.wait(left)
            return True

    def close(self) -> None:
        self._closed = True
