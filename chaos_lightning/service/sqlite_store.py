"""Keeps a log in one SQLite file on its writer's machine: durable, with a single writer (protocol.md 14a).

Theory of operation. Every write is one transaction that is on the disk when it returns (`synchronous=FULL`; in WAL mode
that is one fsync, and the WAL is folded into the file when the last connection closes). Compare-and-set happens inside
a `BEGIN IMMEDIATE` transaction, so two writers on one file cannot both win, and a cut is in the file whole or not at
all. A lock file beside it, held by the running scheduler, tells a second one at once that it is not needed; safety does
not rest on it but on the terms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service.store import Appended, End, Store, StoreRecord, judge

FORMAT = 4
"""Version of the file. Up to 3 there were entries of a job's chain, with columns of their own."""
_WATCH_INTERVAL_S = 0.05
_BUSY_TIMEOUT_S = 5.0
_LOCK_PATIENCE_S = 3.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    only INTEGER PRIMARY KEY CHECK (only = 1), format INTEGER NOT NULL, name TEXT NOT NULL, term INTEGER NOT NULL,
    id TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS record (
    position INTEGER PRIMARY KEY, kind TEXT NOT NULL, term INTEGER NOT NULL, body BLOB NOT NULL, before TEXT NOT NULL,
    wall REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS ended (id TEXT NOT NULL);
"""
"""Tables of the file. `job` is the log's own row: versions before this one look there for the format, and refuse it."""
_COLUMNS = "position, kind, term, body, before"


class SqliteStore(Store):
    """Log of a service, such as a job's chain, in one SQLite file.

    Args:
        path: The file; it and its folder are made if they do not exist (folder mode 0700).
        name: The job's name; a file of another job is refused. "": whichever is there.
        read_only: Only look; the file must exist.
        exclusive: Hold the lock file from `take_term` on, so that only one scheduler serves this log.
    """

    def __init__(
        self, path: str | os.PathLike[str], name: str = "", *, read_only: bool = False, exclusive: bool = False
    ) -> None:
        super().__init__(name)
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
        begun = db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'job'").fetchone()[0]
        if begun:
            self._check_format(db)  # what another version wrote is left as it is
        if not read_only:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            with self._transaction() as db:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                if db.execute("SELECT COUNT(*) FROM job").fetchone()[0] == 0:
                    db.execute("INSERT INTO job VALUES (1, ?, ?, 0, '')", (FORMAT, self.name))
        found = self._check_format(db)
        if self.name and found != self.name:
            raise ConfigurationError(
                f"{self.path} holds the chain of job {found!r}, not of {self.name!r}; choose another store or job name"
            )
        self.name = found

    def _check_format(self, db: sqlite3.Connection) -> str:
        """Checks the version of the file's format; returns the name of the log."""
        row = db.execute("SELECT format, name FROM job").fetchone()
        if row is not None and row[0] != FORMAT:
            raise StoreError(
                f"{self.path} has format {row[0]}, this version reads {FORMAT}; finish the job with the version that "
                "began it and move the file away, or choose another store"
            )
        return str(row[1]) if row is not None else ""

    @property
    def place(self) -> str:
        return str(self.path)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"the store {self.path} is closed")
        return self._db

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs the block in one durable transaction, which is rolled back if the block raises."""
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

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        """Lets the block read one consistent snapshot of the file, whatever others write."""
        with self._lock:
            db = self._connection()
            try:
                db.execute("BEGIN")
                try:
                    yield db
                finally:
                    db.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error

    def _end(self, db: sqlite3.Connection) -> End:
        term, log_id = db.execute("SELECT term, id FROM job").fetchone()
        last = db.execute(f"SELECT {_COLUMNS} FROM record ORDER BY position DESC LIMIT 1").fetchone()
        first = db.execute("SELECT COALESCE(MIN(position), 1) FROM record").fetchone()[0]
        ended = tuple(ended for (ended,) in db.execute("SELECT id FROM ended ORDER BY rowid"))
        end = End(term=term, id=log_id, first=first, ended=ended)
        return replace(end, position=last[0], hash=_record(last).hash) if last else end

    def end(self) -> End:
        with self._snapshot() as db:
            return self._end(db)

    def read(self, after: int = 0) -> tuple[End, tuple[StoreRecord, ...]]:
        with self._snapshot() as db:
            end = self._end(db)
            rows = db.execute(f"SELECT {_COLUMNS} FROM record ORDER BY position").fetchall()
            return end, self._checked(end, [_record(row) for row in rows], after)

    def wait(self, after: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.end().position <= after:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _WATCH_INTERVAL_S))
        return True

    # ------------------------------------------------------------------ writing

    def take_term(self, above: int = 0, log_id: str = "") -> End:
        if self._exclusive and self._file_lock is None:
            self._file_lock = FileLock(self.path)
            if not self._file_lock.take(_LOCK_PATIENCE_S):
                raise ConfigurationError(
                    f"another scheduler serves the chain file {self.path} (it holds {self._file_lock.path.name}); "
                    "use that one, or choose another store"
                )
        with self._transaction() as db:
            end = self._end(db).with_term(above, log_id, self.term)
            db.execute("UPDATE job SET term = ?, id = ?", (end.term, end.id))
        self.term = end.term
        return end

    def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended:
        with self._transaction() as db:
            verdict = judge(self._end(db), record, seen, cut=cut)
            if verdict.ok and not verdict.detail:
                row = (record.position, record.kind, record.term, record.body, record.before, time.time())
                db.execute(f"INSERT INTO record ({_COLUMNS}, wall) VALUES (?, ?, ?, ?, ?, ?)", row)
                if cut:
                    db.execute("DELETE FROM record WHERE position < ?", (record.position,))
        return verdict

    def begin_again(self) -> str:
        with self._lock:
            end = self.end().begun_again()
            self._connection().close()
            self._db = None
            archived = archive(self.path)
            try:
                self._open(read_only=False)
                with self._transaction() as db:
                    db.execute("UPDATE job SET term = ?", (end.term,))
                    db.executemany("INSERT INTO ended VALUES (?)", [(one,) for one in end.ended])
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error
        return f"archived as {archived}"

    def leave_wal(self) -> None:
        """Makes the store a single file, without a write-ahead log beside it."""
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


def _record(row: tuple[int, str, int, bytes, str]) -> StoreRecord:
    """Returns the record in a database row, after checking types, which SQLite does not."""
    for value, kind in zip(row, (int, str, int, bytes, str), strict=True):
        if type(value) is not kind:
            raise StoreError(f"record {row[0]!r} is damaged: {value!r} where {kind.__name__} is expected")
    return StoreRecord(*row)


def archive(path: Path) -> Path | None:
    """Renames the file of a finished log, so that a new one can begin; returns its new path, None if there was no
    file.
    """
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
    """Advisory lock on `<path>.lock`, held by the scheduler of the chain; the kernel frees it when the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, patience_s: float = 0.0) -> bool:
        """Takes the lock; returns False if another process, which may be ending, still holds it after `patience_s`."""
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
