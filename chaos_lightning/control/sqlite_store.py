"""A chain in one SQLite file on the scheduler's host: durable, one authority (PROTOCOL.md 14a).

Theory of operation. Every write is one transaction that is on the disk when it returns (`synchronous=FULL`; in WAL mode
that is one fsync, and the WAL is folded into the file when the last connection closes). Compare-and-set happens inside
a `BEGIN IMMEDIATE` transaction, so two schedulers on one file cannot both win. Views and headers are kept as the same
protobuf bytes that travel, wishes about links as JSON. A lock file beside the chain, held by the running scheduler,
tells a second one at once that it is not needed; safety does not rest on it but on the terms.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from chaos_lightning.control.store import Appended, Entry, Store, Tip, advance, entry_of, former_id, judge, with_term
from chaos_lightning.errors import ConfigurationError, StoreError, WireError
from chaos_lightning.membership.effects import LinkWish, Persist
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.types import Header, View, ViewId

FORMAT = 3
"""1 had no wishes about links, 2 no id of the chain."""
_FORMER = 2
"""Read, and brought up to date by the first scheduler that opens it (store.former_id)."""
_WATCH_INTERVAL_S = 0.05
_BUSY_TIMEOUT_S = 5.0
_LOCK_PATIENCE_S = 3.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    only INTEGER PRIMARY KEY CHECK (only = 1), format INTEGER NOT NULL, name TEXT NOT NULL, term INTEGER NOT NULL,
    chain TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS entry (
    revision INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, term INTEGER NOT NULL, number INTEGER NOT NULL,
    view BLOB, base BLOB, hand_on INTEGER NOT NULL, wish TEXT, wall REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS ended (chain TEXT NOT NULL);
"""


class SqliteStore(Store):
    """See the module.

    Args:
        path: The file; it and its folder are made if they do not exist (folder mode 0700).
        job: The job's name; a file of another job is refused.
        read_only: Only look; the file must exist.
        exclusive: Hold the lock file from `take_term` on, so that only one scheduler serves this chain.
    """

    def __init__(
        self, path: str | os.PathLike[str], job: str = "", *, read_only: bool = False, exclusive: bool = False
    ) -> None:
        super().__init__(job)
        self.path = Path(path)
        self._exclusive = exclusive
        self._file_lock: FileLock | None = None
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        if read_only:
            if not self.path.exists():
                raise ConfigurationError(f"there is no chain file {self.path}")
        else:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise StoreError(f"cannot make the folder of {self.path}: {error}") from error
        try:
            self._open(read_only)
        except sqlite3.Error as error:
            self.close()
            raise StoreError(
                f"{self.path} cannot be used as a chain file ({error}); if it is none, move it away "
                "or choose another store"
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, read_only: bool) -> None:
        db = self._db = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_BUSY_TIMEOUT_S,
        )
        if not read_only:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            with self._transaction() as db:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                if db.execute("SELECT COUNT(*) FROM job").fetchone()[0] == 0:
                    db.execute("INSERT INTO job VALUES (1, ?, ?, 0, '')", (FORMAT, self.job))
                if db.execute("SELECT format FROM job").fetchone()[0] == _FORMER:
                    db.execute("ALTER TABLE job ADD COLUMN chain TEXT NOT NULL DEFAULT ''")
                    db.execute("UPDATE job SET format = ?, chain = ?", (FORMAT, self._former_id()))
        row = db.execute("SELECT format, name FROM job").fetchone()
        if row is None or row[0] not in ((FORMAT, _FORMER) if read_only else (FORMAT,)):
            raise StoreError(
                f"{self.path} has format {row and row[0]}, this version reads {FORMAT}; finish the job with "
                "the version that began it, or choose another store"
            )
        if self.job and row[1] != self.job:
            raise ConfigurationError(
                f"{self.path} holds the chain of job {row[1]!r}, not of {self.job!r}; choose another store or job name"
            )
        self.job = row[1]
        self._has_id = row[0] == FORMAT

    def _former_id(self) -> str:
        (name,) = self._connection().execute("SELECT name FROM job").fetchone()
        return former_id(name, (e.view for e in self._rows("WHERE kind='view' ORDER BY revision LIMIT 1") if e.view))

    @property
    def place(self) -> str:
        return str(self.path)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"the store {self.path} is closed")
        return self._db

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One durable transaction; rolled back if the block raises."""
        with self._lock:
            db = self._connection()
            try:
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    # SQLite may have rolled back by itself (disk full); the first error is the one to tell.
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error

    # ------------------------------------------------------------------ reading

    def _rows(self, where: str, *values: int) -> tuple[Entry, ...]:
        query = f"SELECT revision, kind, term, number, view, base, hand_on, wish FROM entry {where}"
        with self._lock:
            try:
                rows = self._connection().execute(query, values).fetchall()
                return tuple(
                    Entry(
                        revision=revision,
                        kind=kind,
                        number=ViewId(term, number),
                        view=decode(View, view) if view is not None else None,
                        base=decode(Header, base) if base is not None else None,
                        hand_on=bool(hand_on),
                        wish=LinkWish(**json.loads(wish)) if wish is not None else None,
                    )
                    for revision, kind, term, number, view, base, hand_on, wish in rows
                )
            except (sqlite3.Error, WireError, TypeError, ValueError) as error:
                raise StoreError(f"{self.path}: {error}") from error

    def _tip(self) -> Tip:
        db = self._connection()
        last = self._rows("ORDER BY revision DESC LIMIT 1")
        highest = db.execute("SELECT term, number FROM entry ORDER BY term DESC, number DESC LIMIT 1").fetchone()
        view = db.execute("SELECT term, number FROM entry WHERE kind='view' ORDER BY revision DESC LIMIT 1").fetchone()
        return Tip(
            term=db.execute("SELECT term FROM job").fetchone()[0],
            highest=ViewId(*highest) if highest else ViewId(),
            last_view=ViewId(*view) if view else ViewId(),
            finished=db.execute("SELECT COUNT(*) FROM entry WHERE kind='finish'").fetchone()[0] > 0,
            last=last[0] if last else None,
            chain=db.execute("SELECT chain FROM job").fetchone()[0] if self._has_id else self._former_id(),
            ended=self._ended(db),
        )

    def _ended(self, db: sqlite3.Connection) -> tuple[str, ...]:
        """None in a file of before, which is only read."""
        if not db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name='ended'").fetchone()[0]:
            return ()
        return tuple(chain for (chain,) in db.execute("SELECT chain FROM ended ORDER BY rowid"))

    def tip(self) -> Tip:
        with self._lock:
            try:
                return self._tip()
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error

    def entries(self, after: int = 0) -> tuple[Entry, ...]:
        return self._rows("WHERE revision > ? ORDER BY revision", after)

    def wait(self, after: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._rows("WHERE revision > ? LIMIT 1", after):
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _WATCH_INTERVAL_S))

    # ------------------------------------------------------------------ writing

    def take_term(self, above: int = 0, chain: str = "") -> int:
        if self._exclusive and self._file_lock is None:
            self._file_lock = FileLock(self.path)
            if not self._file_lock.take(_LOCK_PATIENCE_S):
                raise ConfigurationError(
                    f"another scheduler serves the chain file {self.path} (it holds {self._file_lock.path.name}); "
                    "use that one, or choose another store"
                )
        with self._transaction() as db:
            written: int = db.execute("SELECT COALESCE(MAX(term), 0) FROM entry").fetchone()[0]
            tip = with_term(self._tip(), max(written, above), chain)
            db.execute("UPDATE job SET term = ?, chain = ?", (tip.term, tip.chain))
        self.term, self._seen = tip.term, tip
        return self.term

    def append(self, effect: Persist) -> Appended:
        entry = entry_of(effect)
        with self._transaction() as db:
            tip = self._tip()
            verdict = judge(tip, self.term, entry, self._seen)
            if verdict.ok and not verdict.detail:
                db.execute(
                    "INSERT INTO entry (kind, term, number, view, base, hand_on, wish, wall) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        entry.kind,
                        entry.number.term,
                        entry.number.number,
                        encode(entry.view) if entry.view is not None else None,
                        encode(entry.base) if entry.base is not None else None,
                        int(entry.hand_on),
                        json.dumps(asdict(entry.wish)) if entry.wish is not None else None,
                        time.time(),
                    ),
                )
        if verdict.ok:
            self._seen = advance(tip, entry)
        return verdict

    def begin_again(self) -> str:
        with self._lock:
            tip = self.tip().begun_again()
            self._connection().close()
            self._db = None
            archived = archive(self.path)
            try:
                self._open(read_only=False)
                with self._transaction() as db:
                    db.execute("UPDATE job SET term = ?", (tip.term,))
                    db.executemany("INSERT INTO ended VALUES (?)", [(chain,) for chain in tip.ended])
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error
        return f"archived as {archived}"

    def leave_wal(self) -> None:
        """One plain file, from now on also while it is open."""
        with self._lock:
            try:
                self._connection().execute("PRAGMA journal_mode=DELETE")
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            if self._file_lock is not None:
                self._file_lock.close()
                self._file_lock = None


def archive(path: Path) -> Path | None:
    """Renames a finished chain so that a new one can begin at `path`; returns its new place, None if there is none."""
    if not path.exists():
        return None
    # Folds a WAL that a killed scheduler left behind into the file, which is one for good.
    with SqliteStore(path) as store:
        store.leave_wal()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(path.stat().st_mtime))
    for count in range(1000):
        target = path.with_name(f"{path.stem}.finished-{stamp}{f'-{count}' if count else ''}{path.suffix}")
        if not target.exists():
            path.rename(target)
            return target
    raise StoreError(f"{path.parent} holds a thousand archived chains of {stamp}; clear it up")


class FileLock:
    """An advisory lock on `<path>.lock`: held by the chain's scheduler, freed by the kernel at its death."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, patience_s: float = 0.0) -> bool:
        """True if it is ours now; False if another process still holds it after `patience_s` (it may be ending)."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
