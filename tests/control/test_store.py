"""One conformance suite for all stores, and what is special about the file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_for_tests import need_client

from chaos_lightning.control.etcd_client import put
from chaos_lightning.control.etcd_store import EtcdStore
from chaos_lightning.control.memory_store import MemoryStore, Shelf
from chaos_lightning.control.sqlite_store import FileLock, SqliteStore, archive
from chaos_lightning.control.store import MAX_ENDED, Entry, Store, Tip, advance
from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.membership.effects import LinkWish, Persist
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Ledger, Member, Spent, View, ViewId

Open = Callable[[], Store]
MEMBERS = (Member("a~1", "a", "host", "127.0.0.1", 4000), Member("b~2", "b", "host", "127.0.0.1", 4001, 7, 8, 9))
BASE = replace(GENESIS, seq=4, kind=Kind.STEP, ledger=Ledger((Spent("", 1, ((0, 4),)),)), presence=b"\x00\xff")


def view(number: ViewId, predecessor: ViewId = NO_VIEW) -> View:
    return View(number, predecessor, MEMBERS, ("b~2",), reason="because")


def decide(number: ViewId, predecessor: ViewId = NO_VIEW, base: Header | None = None, token: int = 1) -> Persist:
    return Persist(token, "view", number, view(number, predecessor), base, hand_on=base is not None)


def reserve(number: ViewId) -> Persist:
    return Persist(1, "reserve", number)


def finish(number: ViewId) -> Persist:
    return Persist(1, "finish", number)


def link(a: str, b: str, *, add: bool = False) -> Persist:
    return Persist(1, "link", NO_VIEW, wish=LinkWish(a, b, add, 'an operator asks: "why not?" (\u20ac)'))


@pytest.fixture(params=["memory", "sqlite", "etcd", "etcd3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same chain as often as wanted, as several schedulers would."""
    shelf, job = Shelf(), f"job-{os.urandom(4).hex()}"
    with ExitStack() as stack:

        def another() -> Store:
            store: Store
            if request.param == "memory":
                store = MemoryStore("job", shelf)
            elif request.param == "sqlite":
                store = SqliteStore(tmp_path / "chain", "job")
            else:
                kind = "own" if request.param == "etcd" else need_client(request.param)
                store = EtcdStore(request.getfixturevalue("etcd").client(kind), job)
            return stack.enter_context(store)

        yield another


# ------------------------------------------------------------------------------------------------ conformance


def test_an_empty_chain(opened: Open) -> None:
    store = opened()
    assert store.take_term() == 1
    chain = store.load()
    assert (chain.term, chain.highest, chain.views, chain.finished) == (1, NO_VIEW, (), False)
    assert store.entries() == ()
    assert store.place


def test_what_was_appended_is_loaded_by_the_next_scheduler(opened: Open) -> None:
    first = opened()
    first.take_term()
    one, two, three = ViewId(1, 1), ViewId(1, 2), ViewId(1, 3)
    assert first.append(decide(one)).ok
    assert first.append(reserve(two)).ok
    assert first.append(reserve(three)).ok
    assert first.append(decide(three, one, BASE)).ok
    second = opened()
    assert second.take_term() == 2
    chain = second.load()
    assert chain.term == 2
    assert chain.highest == three
    assert chain.views == (view(one), view(three, one))
    entries = second.entries()
    assert [e.kind for e in entries] == ["view", "reserve", "reserve", "view"]
    assert [e.revision for e in entries] == [1, 2, 3, 4]
    assert entries[3].base == BASE
    assert entries[3].hand_on
    assert entries[0].base is None
    assert second.entries(after=3) == entries[3:]


def test_wishes_are_loaded_in_their_order_and_take_no_number(opened: Open) -> None:
    first = opened()
    first.take_term()
    wished = [link("a", "b"), link("a", "b", add=True), link("b", "a"), link("b", "c")]
    assert first.append(wished[0]).ok
    assert first.tip().highest == NO_VIEW
    assert first.append(decide(ViewId(1, 1))).ok
    for effect in wished[1:]:
        assert first.append(effect).ok
    assert first.tip().highest == first.tip().last_view == ViewId(1, 1)
    assert first.append(wished[3]).detail == "was there already", "a writer may repeat what it is not sure of"
    assert first.append(decide(ViewId(1, 2), ViewId(1, 1))).ok
    second = opened()
    second.take_term()
    chain = second.load()
    assert chain.wishes == tuple(effect.wish for effect in wished)
    assert [v.id for v in chain.views] == [ViewId(1, 1), ViewId(1, 2)]
    assert [e.kind for e in second.entries()] == ["link", "view", "link", "link", "link", "view"]
    outcome = first.append(link("c", "d"))
    assert not outcome.ok
    assert "term 2" in outcome.detail
    assert second.append(finish(ViewId(2, 3))).ok
    assert not second.append(link("c", "d")).ok


def test_a_reserved_number_is_never_reserved_again(opened: Open) -> None:
    store = opened()
    store.take_term()
    assert store.append(reserve(ViewId(1, 5))).ok
    assert store.append(reserve(ViewId(1, 6))).ok
    for number in (ViewId(1, 5), ViewId(1, 4)):
        outcome = store.append(reserve(number))
        assert not outcome.ok
        assert "1.6" in outcome.detail
    assert store.tip().highest == ViewId(1, 6)
    assert store.append(decide(ViewId(1, 6))).ok
    assert not store.append(reserve(ViewId(1, 6))).ok


def test_a_view_follows_the_last_one_or_nothing(opened: Open) -> None:
    store = opened()
    store.take_term()
    assert store.append(decide(ViewId(1, 1))).ok
    outcome = store.append(decide(ViewId(1, 2)))
    assert not outcome.ok
    assert "the chain ends with 1.1" in outcome.detail
    assert store.append(decide(ViewId(1, 3), ViewId(1, 1))).ok
    assert not store.append(decide(ViewId(1, 4), ViewId(1, 1))).ok
    assert [v.id for v in store.load().views] == [ViewId(1, 1), ViewId(1, 3)]


def test_a_view_may_take_the_reserved_number_but_none_below(opened: Open) -> None:
    store = opened()
    store.take_term()
    store.append(decide(ViewId(1, 1)))
    store.append(reserve(ViewId(1, 7)))
    assert not store.append(decide(ViewId(1, 6), ViewId(1, 1))).ok
    assert store.append(decide(ViewId(1, 7), ViewId(1, 1))).ok


def test_a_number_of_another_term_is_refused(opened: Open) -> None:
    store = opened()
    store.take_term()
    assert not store.append(reserve(ViewId(2, 1))).ok
    assert not store.append(decide(ViewId(0, 9))).ok


def test_an_older_scheduler_is_deposed_by_a_newer_one(opened: Open) -> None:
    old, new = opened(), opened()
    old.take_term()
    old.append(decide(ViewId(1, 1)))
    assert old.holds_term()
    new.take_term()
    assert not old.holds_term()
    assert new.holds_term()
    for effect in (reserve(ViewId(1, 2)), decide(ViewId(1, 2), ViewId(1, 1)), finish(ViewId(1, 2))):
        outcome = old.append(effect)
        assert not outcome.ok
        assert "term 2" in outcome.detail
    assert new.append(decide(ViewId(2, 2), ViewId(1, 1))).ok
    assert new.load().highest == ViewId(2, 2)


def test_of_two_schedulers_that_build_on_the_same_view_one_wins(opened: Open) -> None:
    stores = [opened(), opened()]
    for store in stores:
        store.take_term()
    outcomes: dict[int, bool] = {}
    start = threading.Barrier(2)

    def race(index: int) -> None:
        start.wait()
        outcomes[index] = stores[index].append(decide(ViewId(stores[index].term, 1))).ok

    threads = [threading.Thread(target=race, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {0: False, 1: True}
    assert len(stores[0].entries()) == 1


def test_a_repeated_write_succeeds_and_changes_nothing(opened: Open) -> None:
    store = opened()
    store.take_term()
    store.append(reserve(ViewId(1, 1)))
    store.append(reserve(ViewId(1, 1)))
    for _ in range(3):
        assert store.append(decide(ViewId(1, 1), base=BASE, token=9)).ok
    assert [e.kind for e in store.entries()] == ["reserve", "view"]
    changed = Persist(1, "view", ViewId(1, 1), replace(view(ViewId(1, 1)), reason="another"), BASE, True)
    assert not store.append(changed).ok


def test_nothing_follows_the_end(opened: Open) -> None:
    store = opened()
    store.take_term()
    store.append(decide(ViewId(1, 1)))
    assert store.append(finish(ViewId(1, 2))).ok
    assert store.append(finish(ViewId(1, 2))).ok
    assert store.load().finished
    outcome = store.append(decide(ViewId(1, 3), ViewId(1, 1)))
    assert not outcome.ok
    assert "finished" in outcome.detail


def test_a_chain_that_is_over_is_put_away_and_none_of_its_terms_outranks_the_next(opened: Open) -> None:
    with opened() as store:
        for _ in range(3):
            term = store.take_term()
        assert store.append(Persist(1, "view", ViewId(term, 1), View(ViewId(term, 1), NO_VIEW, ()))).ok
        assert store.append(Persist(2, "finish", ViewId(term, 2))).ok
        words = store.begin_again()
        assert (store.tip().finished, store.load().views, store.entries()) == (False, (), ())
        assert store.take_term() > term
        assert store.append(Persist(3, "view", ViewId(store.term, 1), View(ViewId(store.term, 1), NO_VIEW, ()))).ok
        if isinstance(store, SqliteStore):
            with SqliteStore(Path(words.removeprefix("archived as ")), store.job, read_only=True) as old:
                assert (old.tip().finished, [v.id for v in old.load().views]) == (True, [ViewId(term, 1)])
    with opened() as store:
        assert len(store.load().views) == 1


def test_the_last_chains_that_were_put_away_are_remembered(opened: Open) -> None:
    """Members of them may still come; the next scheduler tells them so."""
    ended = []
    for _ in range(MAX_ENDED + 1):
        with opened() as store:
            term = store.take_term()
            ended.append(store.tip().chain)
            assert store.append(Persist(1, "finish", ViewId(term, 1))).ok
            store.begin_again()
    with opened() as store:
        store.take_term()
        assert store.load().ended == tuple(ended[1:])
        assert store.load().id not in ended
        assert store.append(Persist(1, "reserve", ViewId(store.term, 1))).ok
        assert store.load().ended == tuple(ended[1:])


def test_a_store_that_took_no_term_cannot_write(opened: Open) -> None:
    opened().take_term()
    reader = opened()
    assert not reader.append(reserve(ViewId(1, 1))).ok
    assert not reader.holds_term()


def test_waiting_ends_when_somebody_appends(opened: Open) -> None:
    writer, watcher = opened(), opened()
    writer.take_term()
    assert not watcher.wait(0, timeout_s=0.0)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(watcher.wait(0, timeout_s=30.0)))
    thread.start()
    writer.append(reserve(ViewId(1, 1)))
    thread.join(30.0)
    assert seen == [True]
    assert watcher.wait(0, timeout_s=0.0)
    assert not watcher.wait(1, timeout_s=0.01)


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (Persist(1, "invent", ViewId(1, 1)), "unknown kind 'invent'"),
        (Persist(1, "view", ViewId(1, 1)), "without a view"),
        (Persist(1, "reserve", ViewId(1, 1), view(ViewId(1, 1))), "'reserve' with a view"),
        (Persist(1, "view", ViewId(1, 2), view(ViewId(1, 1))), "view 1.1 under the number 1.2"),
        (Persist(1, "link", NO_VIEW), "'link' without a wish"),
        (replace(link("a", "b"), kind="reserve", number=ViewId(1, 1)), "'reserve' with a wish"),
    ],
)
def test_a_malformed_write_is_an_error(opened: Open, effect: Persist, words: str) -> None:
    store = opened()
    store.take_term()
    with pytest.raises(StoreError, match=re.escape(words)):
        store.append(effect)


def test_a_closed_store_says_so(opened: Open) -> None:
    store = opened()
    store.take_term()
    store.close()
    store.close()
    for use in (store.take_term, store.tip, store.entries, lambda: store.append(reserve(ViewId(1, 1)))):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_the_tip_that_is_kept_is_the_tip_that_is_computed(opened: Open) -> None:
    store = opened()
    store.take_term()
    expected = Tip(term=1, chain=store.tip().chain)
    last = NO_VIEW
    for number in range(1, 6):
        effect = decide(ViewId(1, number), last) if number % 2 else reserve(ViewId(1, number))
        assert store.append(effect).ok
        expected = advance(expected, Entry(number, effect.kind, effect.number, effect.view))  # type: ignore[arg-type]
        last = effect.number if effect.view else last
        assert store.tip() == expected


def test_a_chain_gets_an_id_with_its_first_term_and_keeps_it(opened: Open) -> None:
    first = opened()
    assert first.tip().chain == ""
    first.take_term()
    drawn = first.tip().chain
    assert re.fullmatch("[0-9a-f]{16}", drawn)
    first.append(reserve(ViewId(1, 1)))
    first.append(decide(ViewId(1, 2)))
    second = opened()
    second.take_term()
    chain = second.load()
    assert chain.id == drawn
    assert chain.numbers == (ViewId(1, 1), ViewId(1, 2))


def test_an_empty_store_takes_the_id_of_the_chain_that_is_rebuilt_in_it_and_one_that_holds_views_does_not(
    opened: Open,
) -> None:
    store = opened()
    store.take_term()
    assert store.take_term(6, "0123456789abcdef") == 7
    assert store.tip().chain == "0123456789abcdef"
    store.append(decide(ViewId(7, 1)))
    assert store.take_term(7, "0123456789abcdef") == 8
    with pytest.raises(StoreError, match="chain 01234567 cannot become chain fedcba98"):
        store.take_term(8, "fedcba9876543210")
    assert store.tip().chain == "0123456789abcdef"


# ------------------------------------------------------------------------------------------------ the file


def test_a_copy_of_the_file_has_the_chains_id_and_another_file_has_not(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "one", "job") as store:
        store.take_term()
        one = store.tip().chain
    shutil.copy(tmp_path / "one", tmp_path / "copy")
    with SqliteStore(tmp_path / "copy", "job") as store, SqliteStore(tmp_path / "two", "job") as other:
        other.take_term()
        assert store.tip().chain == one != other.tip().chain


def former(path: Path) -> None:
    """A file as it was written before chains had ids, with two views."""
    with SqliteStore(path, "job") as store:
        store.take_term()
        store.append(decide(ViewId(1, 1)))
        store.append(decide(ViewId(1, 2), ViewId(1, 1)))
        store.leave_wal()
        store._connection().execute("ALTER TABLE job DROP COLUMN chain")
        store._connection().execute("UPDATE job SET format = 2")


def test_a_file_of_the_former_format_is_read_and_every_copy_of_it_gets_the_same_id(tmp_path: Path) -> None:
    former(tmp_path / "one")
    shutil.copy(tmp_path / "one", tmp_path / "copy")
    with SqliteStore(tmp_path / "one", read_only=True) as store:
        looked = store.tip().chain
        assert len(store.load().views) == 2
    for name in ("one", "copy"):
        with SqliteStore(tmp_path / name, "job") as store:
            assert store.tip().chain == looked
            assert store.take_term() == 2
            assert store.load().id == looked
    assert re.fullmatch("[0-9a-f]{16}", looked)


def test_sqlite_writes_are_synchronous_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chain.sqlite"
    with SqliteStore(path, "job") as store:
        assert store._connection().execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert path.parent.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == ["chain.sqlite"]


WRITER = """
import sys
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId
from chaos_lightning.control.sqlite_store import SqliteStore
store = SqliteStore(sys.argv[1], "job")
store.take_term()
last = NO_VIEW
for number in range(1, 100000):
    view = View(ViewId(1, number), last, ())
    assert store.append(Persist(1, "view", view.id, view)).ok
    last = view.id
    print(number, flush=True)
"""


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    with SqliteStore(path, "job") as store:
        numbers = [v.id.number for v in store.load().views]
        # The last one may have been durable before it was acknowledged.
        assert numbers in (acknowledged, [*acknowledged, acknowledged[-1] + 1])
        assert [v.predecessor.number for v in store.load().views] == [0, *numbers[:-1]]
        assert store.take_term() == 2


def test_a_file_of_another_job_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "chain", "one").close()
    with pytest.raises(ConfigurationError, match="job 'one', not of 'two'"):
        SqliteStore(tmp_path / "chain", "two")
    with SqliteStore(tmp_path / "chain") as store:
        assert store.job == "one"


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


def test_a_damaged_view_is_an_error_not_a_shorter_chain(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    with SqliteStore(path, "job") as store:
        store.take_term()
        store.append(decide(ViewId(1, 1)))
        store._connection().execute("UPDATE entry SET view = ?", (b"\xff\xff",))
        with pytest.raises(StoreError, match="no View"):
            store.load()


def test_a_damaged_wish_is_an_error_not_a_link_that_comes_back(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        store.take_term()
        store.append(link("a", "b"))
        for damaged in ('{"a": "a", "b"', '{"a": "a", "b": "b"}'):
            store._connection().execute("UPDATE entry SET wish = ?", (damaged,))
            with pytest.raises(StoreError, match="chain: "):
                store.load()


def test_a_full_disk_is_an_error_and_the_chain_stays_whole(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        store.take_term()
        store.append(decide(ViewId(1, 1)))
        db = store._connection()
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        huge = replace(view(ViewId(1, 2), ViewId(1, 1)), reason="x" * 100_000)
        with pytest.raises(StoreError, match="full"):
            store.append(Persist(2, "view", huge.id, huge))
        assert [v.id for v in store.load().views] == [ViewId(1, 1)]
        db.execute("PRAGMA max_page_count = 100000")
        assert store.append(Persist(2, "view", huge.id, huge)).ok


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make the folder"):
        SqliteStore(tmp_path / "file" / "chain", "job")


def test_reading_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no chain file"):
        SqliteStore(tmp_path / "chain", "job", read_only=True)
    with SqliteStore(tmp_path / "chain", "job") as store:
        store.take_term()
        store.append(decide(ViewId(1, 1)))
        with SqliteStore(tmp_path / "chain", "job", read_only=True) as reader:
            assert len(reader.entries()) == 1
            with pytest.raises(StoreError, match="readonly"):
                reader.take_term()


def test_one_scheduler_serves_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.control.sqlite_store._LOCK_PATIENCE_S", 0.05)
    path = tmp_path / "chain"
    with SqliteStore(path, "job", exclusive=True) as first, SqliteStore(path, "job", exclusive=True) as second:
        assert first.take_term() == 1
        with pytest.raises(ConfigurationError, match="another scheduler serves"):
            second.take_term()
        assert first.holds_term()
        first.close()
        assert second.take_term() == 2


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


def test_archiving_moves_the_chain_whole(tmp_path: Path) -> None:
    path = tmp_path / "chain.sqlite"
    assert archive(path) is None
    store = SqliteStore(path, "job")
    store.take_term()
    store.append(decide(ViewId(1, 1)))
    # As a SIGKILLed scheduler leaves it: the last writes are in the WAL only.
    for name in ("chain.sqlite", "chain.sqlite-wal"):
        shutil.copy(tmp_path / name, tmp_path / f"killed-{name}")
    store.close()
    killed = tmp_path / "killed-chain.sqlite"
    first = archive(killed)
    assert first is not None
    assert not killed.exists()
    with SqliteStore(first, "job", read_only=True) as reader:
        assert len(reader.entries()) == 1
    shutil.copy(first, killed)
    os.utime(killed, (first.stat().st_mtime, first.stat().st_mtime))
    second = archive(killed)
    assert second is not None
    assert second != first
    assert not list(tmp_path.glob("*-wal"))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_scheduler_writes_nothing_into_an_older_copy_that_took_its_stores_place(tmp_path: Path, kept: int) -> None:
    """Members would promise the number, and the job's own store would lack it when it is back."""
    with SqliteStore(tmp_path / "chain", "job") as store:
        store.take_term()
        assert store.append(reserve(ViewId(1, 1))).ok
        assert store.append(decide(ViewId(1, 2))).ok
        assert store.append(reserve(ViewId(1, 3))).ok
        with sqlite3.connect(tmp_path / "chain") as db:
            db.execute("DELETE FROM entry WHERE revision > ?", (kept,))
        for entry in (reserve(ViewId(1, 4)), decide(ViewId(1, 4), ViewId(1, 2)), finish(ViewId(1, 4))):
            refused = store.append(entry)
            assert not refused.ok
            assert refused.detail == f"the store went back from 1.3 to 1.{kept}: this is an older copy"


def test_a_writer_whose_answer_got_lost_has_seen_what_it_writes_again(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        store.take_term()
        before = store._seen
        assert before is not None
        assert before.term == 1
        assert store.append(reserve(ViewId(1, 1))).ok
        store._seen = before  # the answer got lost
        assert store.append(reserve(ViewId(1, 1))).detail == "was there already"
        with sqlite3.connect(tmp_path / "chain") as db:
            db.execute("DELETE FROM entry")
        assert not store.append(reserve(ViewId(1, 2))).ok


def test_a_scheduler_writes_nothing_into_another_chain_that_took_its_stores_place(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "chain", "job") as store:
        store.take_term()
        chain = store.load().id
        with sqlite3.connect(tmp_path / "chain") as db:
            db.execute("UPDATE job SET chain = 'another-chain'")
        refused = store.append(finish(ViewId(1, 1)))
        assert (refused.ok, refused.detail) == (
            False,
            f"chain another- took the place of chain {chain[:8]} in the store",
        )


def test_a_leader_writes_nothing_into_an_older_snapshot_of_etcd(request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue("etcd").client("own")
    with EtcdStore(client, f"job-{os.urandom(4).hex()}") as store:
        store.take_term()
        assert store.append(reserve(ViewId(1, 1))).ok
        older = client.get(store._key("tip"))
        assert store.append(decide(ViewId(1, 2))).ok
        client.transact([], [put(store._key("tip"), older.value)])
        refused = store.append(reserve(ViewId(1, 3)))
        assert (refused.ok, refused.detail) == (False, "the store went back from 1.2 to 1.1: this is an older copy")
