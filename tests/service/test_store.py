"""Conformance tests for all kinds of stores, used by a made-up service that counts votes; and tests of the SQLite
file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from store_support import Open

from chaos_lightning.errors import ConfigurationError, OversizeError, StoreError
from chaos_lightning.service.etcd_client import put
from chaos_lightning.service.etcd_store import EtcdStore
from chaos_lightning.service.sqlite_store import FileLock, SqliteStore, archive
from chaos_lightning.service.store import EMPTY, MAX_BODY_NBYTES, MAX_ENDED, Appended, End, ReadAnewError, Store


def test_records_are_bounded_at_the_same_size_in_all_stores(opened: Open) -> None:
    store = opened()
    store.take_term()
    dense = random.Random(1).randbytes(MAX_BODY_NBYTES + 1)  # no compressing helps
    with pytest.raises(OversizeError, match=f"of kind x has 7[0-9]+ bytes, and stores take {MAX_BODY_NBYTES}"):
        store.append("x", dense, store.end())
    assert store.append("x", dense[: MAX_BODY_NBYTES - 300], store.end()).ok
    assert store.append("x", b"much alike " * (MAX_BODY_NBYTES // 5), store.end()).ok
    assert [len(r.body) for r in store.read()[1]] == [MAX_BODY_NBYTES - 300, 11 * (MAX_BODY_NBYTES // 5)]


class Tally:
    """Service that counts votes: records of kind "vote" count one, records of kind "total" sum up."""

    def __init__(self, store: Store, *, leads: bool = True) -> None:
        self.store = store
        self.votes: Counter[str] = Counter()
        if leads:
            store.take_term()
        self.end = EMPTY
        self.follow()

    def follow(self) -> None:
        """Reads new records; all of them if some were cut away."""
        try:
            self.end, records = self.store.read(self.end.position)
        except ReadAnewError:
            self.end, records = self.store.read()
        for record in records:
            if record.kind == "total":
                self.votes = Counter(json.loads(record.body))
            else:
                self.votes[record.body.decode()] += 1

    def vote(self, name: str) -> Appended:
        return self._done(self.store.append("vote", name.encode(), self.end))

    def sum_up(self) -> Appended:
        return self._done(self.store.append("total", json.dumps(self.votes).encode(), self.end, cut=True))

    def _done(self, outcome: Appended) -> Appended:
        if outcome.ok:
            self.follow()
        return outcome


def positions(store: Store) -> list[int]:
    return [r.position for r in store.read()[1]]


# ------------------------------------------------------------------------------------------------ terms and ends


def test_an_empty_log(opened: Open) -> None:
    with opened() as store:
        assert store.end() == EMPTY
        assert store.read() == (EMPTY, ())
        end = store.take_term()
        assert (end.term, store.term, end.position, store.read()) == (1, 1, 0, (end, ()))
        assert store.place


def test_what_was_appended_is_read_by_the_next_writer(opened: Open) -> None:
    first = Tally(opened())
    for name in ("a", "b", "a"):
        assert first.vote(name).ok
    second = Tally(opened())
    assert second.store.term == 2
    assert second.votes == {"a": 2, "b": 1}
    _, records = second.store.read()
    assert [(r.position, r.kind, r.term, r.body) for r in records] == [
        (1, "vote", 1, b"a"),
        (2, "vote", 1, b"b"),
        (3, "vote", 1, b"a"),
    ]
    assert [r.before for r in records] == ["", records[0].hash, records[1].hash]
    assert second.store.read(2)[1] == records[2:]
    assert second.store.end() == second.end == replace(first.end, term=2)


def test_an_older_writer_is_outranked_by_a_newer_one(opened: Open) -> None:
    old = Tally(opened())
    assert old.vote("a").ok
    new = Tally(opened())
    for refused in (old.vote("b"), old.sum_up()):
        assert not refused.ok
        assert "term 1 is over, a writer with term 2" in refused.detail
    assert new.vote("b").ok
    assert new.votes == {"a": 1, "b": 1}


def test_a_writer_that_took_no_term_writes_nothing(opened: Open) -> None:
    Tally(opened())
    reader = Tally(opened(), leads=False)
    assert not reader.vote("a").ok
    assert not reader.sum_up().ok
    assert reader.store.read()[1] == ()


def test_who_has_not_seen_the_last_record_writes_none(opened: Open) -> None:
    """A write is refused if its writer has not seen the last record, even if that record is its own."""
    tally = Tally(opened())
    before = tally.end
    assert tally.vote("a").ok
    refused = tally.store.append("vote", b"b", before)
    assert (refused.ok, refused.detail) == (False, "record 1 is there, which its writer has not seen")
    assert refused.end == tally.end
    assert positions(tally.store) == [1]


@pytest.mark.parametrize("cut", [False, True])
def test_a_repeated_write_succeeds_and_changes_nothing(opened: Open, cut: bool) -> None:
    """Repeating a write, as after a lost answer, succeeds and adds no record."""
    tally = Tally(opened())
    assert tally.vote("a").ok
    before = tally.end
    outcomes = [tally.store.append("total", b'{"a": 1}', before, cut=cut) for _ in range(3)]
    assert [(o.ok, o.detail) for o in outcomes] == [
        (True, ""),
        (True, "was there already"),
        (True, "was there already"),
    ]
    assert {o.end for o in outcomes} == {tally.store.end()}
    assert positions(tally.store) == ([2] if cut else [1, 2])


def test_of_two_writers_that_follow_the_same_record_one_wins(opened: Open) -> None:
    tallies = [Tally(opened()), Tally(opened())]
    outcomes: dict[int, bool] = {}
    start = threading.Barrier(2)

    def race(index: int) -> None:
        start.wait()
        outcomes[index] = tallies[index].vote("a").ok

    threads = [threading.Thread(target=race, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {0: False, 1: True}
    assert positions(tallies[0].store) == [1]


def test_waiting_ends_when_somebody_appends(opened: Open) -> None:
    writer, watcher = Tally(opened()), opened()
    assert not watcher.wait(0, timeout_s=0.0)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(watcher.wait(0, timeout_s=30.0)))
    thread.start()
    writer.vote("a")
    thread.join(30.0)
    assert seen == [True]
    assert watcher.wait(0, timeout_s=0.0)
    assert not watcher.wait(1, timeout_s=0.01)
    writer.sum_up()
    assert watcher.wait(1, timeout_s=0.0), "who waits at a place that was cut away is woken, and told when it reads"


def test_a_closed_store_says_so(opened: Open) -> None:
    store = opened()
    end = store.take_term()
    store.close()
    store.close()
    for use in (store.take_term, store.end, store.read, lambda: store.append("vote", b"", end)):
        with pytest.raises(StoreError, match="closed"):
            use()


# ------------------------------------------------------------------------------------------------ cutting


def test_a_log_is_cut_behind_a_record_that_sums_up_what_went_before(opened: Open) -> None:
    tally = Tally(opened())
    for name in "abacab":
        assert tally.vote(name).ok
    votes = dict(tally.votes)
    assert tally.sum_up().ok
    assert tally.vote("c").ok
    assert positions(tally.store) == [7, 8]
    assert (tally.end.first, tally.end.position) == (7, 8)
    for other in (Tally(opened()), Tally(opened(), leads=False)):
        assert dict(other.votes) == {**votes, "c": 2}
    last = Tally(opened())
    assert last.sum_up().ok
    assert positions(last.store) == [9]
    assert last.vote("a").ok
    _, records = last.store.read()
    assert (records[1].position, records[1].before) == (10, records[0].hash)


def test_a_reader_that_stands_before_a_cut_is_told_what_to_do(opened: Open) -> None:
    tally, behind, level = Tally(opened()), opened(), opened()
    for name in "abc":
        tally.vote(name)
    tally.sum_up()
    tally.vote("d")
    for after in (1, 2):
        with pytest.raises(
            ReadAnewError, match=rf"followed record {after} was cut away, and record 4 sums it up; read"
        ):
            behind.read(after)
    assert [r.position for r in level.read(3)[1]] == [4, 5], "who stands right before it has missed nothing"
    assert [r.position for r in level.read(4)[1]] == [5]
    reader = Tally(opened(), leads=False)
    reader.end = End(position=1)
    reader.follow()
    assert reader.votes == tally.votes


def test_a_reader_of_a_log_that_was_put_away_is_told(opened: Open) -> None:
    tally = Tally(opened())
    for name in "abc":
        tally.vote(name)
    tally.store.begin_again()
    with pytest.raises(ReadAnewError, match="ends with record 0, before 3: it was begun again"):
        tally.store.read(3)


def test_a_cut_is_judged_as_every_write_is(opened: Open) -> None:
    old = Tally(opened())
    for name in "ab":
        old.vote(name)
    stale = old.end
    old.vote("c")
    refused = old.store.append("total", b"{}", stale, cut=True)
    assert (refused.ok, positions(old.store)) == (False, [1, 2, 3])
    new = Tally(opened())
    assert "term 2" in old.sum_up().detail
    assert positions(new.store) == [1, 2, 3]
    assert new.sum_up().ok
    assert "term 2" in old.vote("d").detail
    assert new.votes == {"a": 1, "b": 1, "c": 1}


def test_a_log_that_was_cut_is_begun_again_from_its_first_position(opened: Open) -> None:
    tally = Tally(opened())
    for name in "ab":
        tally.vote(name)
    tally.sum_up()
    tally.store.begin_again()
    again = Tally(opened())
    assert again.votes == {}
    assert again.vote("x").ok
    assert positions(again.store) == [1]


# ------------------------------------------------------------------------------------------------ ids


def test_a_log_gets_an_id_with_its_first_term_and_keeps_it(opened: Open) -> None:
    with opened() as first, opened() as second:
        drawn = first.take_term().id
        assert len(drawn) == 16
        assert second.take_term() == End(term=2, id=drawn)


def test_a_log_continues_another_one_only_for_who_has_its_last_term(opened: Open) -> None:
    with opened() as old, opened() as new:
        old.take_term()
        new.take_term()
        with pytest.raises(StoreError, match="cannot become log 01234567: a writer with term 2 has taken it"):
            old.take_term(5, "0123456789abcdef")
        assert new.take_term(6, "0123456789abcdef") == End(term=7, id="0123456789abcdef")


def test_the_last_logs_that_were_put_away_are_remembered(opened: Open) -> None:
    """A store remembers the ids of the last archived logs, so that members of one can be told that it is archived."""
    ended = []
    for _ in range(MAX_ENDED + 1):
        with opened() as store:
            ended.append(store.take_term().id)
            store.begin_again()
    with opened() as store:
        end = store.take_term()
        assert end.ended == tuple(ended[1:])
        assert end.id not in ended
        assert store.append("vote", b"a", end).end.ended == tuple(ended[1:])


def test_a_log_that_is_over_is_put_away_and_none_of_its_terms_outranks_the_next(opened: Open) -> None:
    with opened() as store:
        store.take_term()
        term = store.take_term(9).term
        store.begin_again()
        assert store.take_term().term > term


# ------------------------------------------------------------------------------------------------ the file


def test_a_copy_of_the_file_has_the_logs_id_and_another_file_has_not(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "one", "job") as store:
        one = store.take_term().id
    shutil.copy(tmp_path / "one", tmp_path / "copy")
    with SqliteStore(tmp_path / "copy", "job") as store, SqliteStore(tmp_path / "two", "job") as other:
        assert store.end().id == one != other.take_term().id


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_of_the_former_format_is_refused_and_left_alone(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "chain"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE job (only INTEGER, format INTEGER, name TEXT, term INTEGER, chain TEXT)")
        db.execute("CREATE TABLE entry (revision INTEGER, kind TEXT)")
        db.execute("INSERT INTO job VALUES (1, 3, 'job', 7, 'abc')")
    db.close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match="has format 3, this version reads 4; finish the job with the version that beg"
    ):
        SqliteStore(path, "job", read_only=read_only)
    assert path.read_bytes() == before


def test_an_older_copy_or_another_log_in_the_files_place_takes_nothing(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        tally = Tally(store)
        tally.vote("a")
        shutil.copy(tmp_path / "chain", tmp_path / "kept")
        tally.vote("b")
        with sqlite3.connect(tmp_path / "chain") as db:
            db.execute("DELETE FROM record WHERE position = 2")
        assert "went back from record 2 of term 1 to record 1 of term 1" in tally.vote("c").detail
        with sqlite3.connect(tmp_path / "chain") as db:
            db.execute("UPDATE job SET id = 'another-log'")
        assert f"log another- took the place of log {tally.end.id[:8]}" in tally.vote("c").detail


def test_sqlite_writes_are_synchronous_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chain.sqlite"
    with SqliteStore(path, "job") as store:
        assert store._connection().execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert path.parent.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == ["chain.sqlite"]


WRITER = """
import json, sys
from chaos_lightning.service.sqlite_store import SqliteStore
store = SqliteStore(sys.argv[1], "job")
end = store.take_term()
for number in range(1, 100000):
    cut = number % 3 == 0
    said = ("total", json.dumps({"a": number}).encode()) if cut else ("vote", b"a")
    outcome = store.append(*said, end, cut=cut)
    assert outcome.ok
    end = outcome.end
    print(number, flush=True)
"""


def test_what_was_acknowledged_survives_sigkill_in_mid_write_and_mid_cut(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    with SqliteStore(path, "job") as store:
        tally = Tally(store)
        # The last one may have been durable before it was acknowledged.
        assert tally.votes["a"] in (len(acknowledged), len(acknowledged) + 1)
        assert tally.end.position == tally.votes["a"]
        assert tally.end.first == tally.end.position // 3 * 3
        assert tally.end.term == 2


def test_a_file_of_another_job_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "chain", "one").close()
    with pytest.raises(ConfigurationError, match="job 'one', not of 'two'"):
        SqliteStore(tmp_path / "chain", "two")
    with SqliteStore(tmp_path / "chain") as store:
        assert store.name == "one"


def test_a_file_that_is_no_chain_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    path.write_bytes(b"precious results of another program, long enough to be looked at" * 20)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="move it away"):
        SqliteStore(path, "job")
    assert path.read_bytes() == before


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    SqliteStore(path, "job").close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE job SET format = 99")
    db.close()
    with pytest.raises(StoreError, match="format 99"):
        SqliteStore(path, "job")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("SET body = CAST('b' AS BLOB) WHERE position = 1", "record 1 is damaged: the next one follows another"),
        ("SET term = 7 WHERE position = 2", "record 2 is damaged: the next one follows another"),
        ("SET body = 'b' WHERE position = 3", "'b' where bytes is expected"),
        ("SET position = 9 WHERE position = 2", "record 2 is missing"),
    ],
)
def test_a_damaged_record_is_an_error_not_a_shorter_log(tmp_path: Path, change: str, words: str) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        tally = Tally(store)
        for _ in range(3):
            assert tally.vote("a").ok
        store._connection().execute(f"UPDATE record {change}")
        with pytest.raises(StoreError, match=words):
            store.read()


def test_a_full_disk_is_an_error_and_the_log_stays_whole(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        tally = Tally(store)
        assert tally.vote("a").ok
        db = store._connection()
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        for cut in (False, True):
            with pytest.raises(StoreError, match="full"):
                store.append("vote", b"x" * 100_000, tally.end, cut=cut)
            assert positions(store) == [1]
        db.execute("PRAGMA max_page_count = 100000")
        assert store.append("vote", b"x" * 100_000, tally.end).ok


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make the folder"):
        SqliteStore(tmp_path / "file" / "chain", "job")


def test_reading_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no chain file"):
        SqliteStore(tmp_path / "chain", "job", read_only=True)
    with SqliteStore(tmp_path / "chain", "job") as store:
        Tally(store).vote("a")
        with SqliteStore(tmp_path / "chain", "job", read_only=True) as reader:
            assert positions(reader) == [1]
            with pytest.raises(StoreError, match="readonly"):
                reader.take_term()


def test_one_scheduler_serves_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.service.sqlite_store._LOCK_PATIENCE_S", 0.05)
    path = tmp_path / "chain"
    with SqliteStore(path, "job", exclusive=True) as first, SqliteStore(path, "job", exclusive=True) as second:
        assert first.take_term().term == 1
        with pytest.raises(ConfigurationError, match="another scheduler serves"):
            second.take_term()
        first.close()
        assert second.take_term().term == 2


def test_the_lock_is_waited_for(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "chain"), FileLock(tmp_path / "chain")
    assert first.take()
    assert not second.take()
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(second.take(30.0)))
    thread.start()
    first.close()
    thread.join(30.0)
    assert taken == [True]
    second.close()


def test_archiving_moves_the_log_whole(tmp_path: Path) -> None:
    path = tmp_path / "chain.sqlite"
    assert archive(path) is None
    store = SqliteStore(path, "job")
    Tally(store).vote("a")
    # As a SIGKILLed scheduler leaves it: the last writes are in the WAL only.
    for name in ("chain.sqlite", "chain.sqlite-wal"):
        shutil.copy(tmp_path / name, tmp_path / f"killed-{name}")
    store.close()
    killed = tmp_path / "killed-chain.sqlite"
    first = archive(killed)
    assert first is not None
    assert not killed.exists()
    with SqliteStore(first, "job", read_only=True) as reader:
        assert positions(reader) == [1]
    shutil.copy(first, killed)
    os.utime(killed, (first.stat().st_mtime, first.stat().st_mtime))
    second = archive(killed)
    assert second is not None
    assert second != first
    assert not list(tmp_path.glob("*-wal"))


def test_a_leader_writes_nothing_into_an_older_snapshot_of_etcd(request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue("etcd").client("own")
    with EtcdStore(client, f"tests/snapshots/{os.urandom(4).hex()}/") as store:
        tally = Tally(store)
        assert tally.vote("a").ok
        older = client.get(store._key("tip"))
        assert tally.vote("b").ok
        client.transact([], [put(store._key("tip"), older.value)])
        assert "went back from record 2 of term 1 to record 1 of term 1" in tally.vote("c").detail
