"""Tests a job's chain in each kind of store: which decision may follow which."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from chain_support import BASE, decide, finish, link, reserve, view
from large_views import sparse_view
from store_support import Open

from chaos_lightning.control.job_chain import (
    JobChain,
    Tip,
    advance,
    entry_bytes,
    entry_from,
    entry_of,
    told,
)
from chaos_lightning.errors import OversizeError, StoreError
from chaos_lightning.membership.effects import Persist
from chaos_lightning.membership.past import Numbers
from chaos_lightning.protocol.codec import encode
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import EMPTY, StoreRecord

Chains = Callable[[], JobChain]


@pytest.fixture
def chains(opened: Open) -> Chains:
    """Function that opens the same chain again at each call, as several schedulers would."""
    return lambda: JobChain(opened())


def test_an_empty_chain(chains: Chains) -> None:
    store = chains()
    assert store.take_term() == 1
    chain = store.load()
    assert (chain.term, chain.highest, chain.views, chain.finished) == (1, NO_VIEW, (), False)
    assert store.entries() == ()
    assert store.place


def test_what_was_appended_is_loaded_by_the_next_scheduler(chains: Chains) -> None:
    first = chains()
    first.take_term()
    one, two, three = ViewId(1, 1), ViewId(1, 2), ViewId(1, 3)
    assert first.append(decide(one)).ok
    assert first.append(reserve(two)).ok
    assert first.append(reserve(three)).ok
    assert first.append(decide(three, one, BASE)).ok
    second = chains()
    assert second.take_term() == 2
    chain = second.load()
    assert chain.term == 2
    assert chain.highest == three
    assert chain.views == (view(one), view(three, one))
    entries = second.entries()
    assert [e.kind for e in entries] == ["view", "reserve", "reserve", "view"]
    assert [e.revision for e in entries] == [1, 2, 3, 4]
    assert entries[3].base == entry_of(decide(three, one, BASE)).base
    assert entries[3].base.seq == BASE.seq
    assert entries[3].hand_on
    assert entries[0].base is None
    assert second.entries(after=3) == entries[3:]


def test_wishes_are_loaded_in_their_order_and_take_no_number(chains: Chains) -> None:
    first = chains()
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
    second = chains()
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


def test_a_reserved_number_is_never_reserved_again(chains: Chains) -> None:
    store = chains()
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


def test_a_view_follows_the_last_one_or_nothing(chains: Chains) -> None:
    store = chains()
    store.take_term()
    assert store.append(decide(ViewId(1, 1))).ok
    outcome = store.append(decide(ViewId(1, 2)))
    assert not outcome.ok
    assert "the chain ends with 1.1" in outcome.detail
    assert store.append(decide(ViewId(1, 3), ViewId(1, 1))).ok
    assert not store.append(decide(ViewId(1, 4), ViewId(1, 1))).ok
    assert [v.id for v in store.load().views] == [ViewId(1, 1), ViewId(1, 3)]


def test_a_view_may_take_the_reserved_number_but_none_below(chains: Chains) -> None:
    store = chains()
    store.take_term()
    store.append(decide(ViewId(1, 1)))
    store.append(reserve(ViewId(1, 7)))
    assert not store.append(decide(ViewId(1, 6), ViewId(1, 1))).ok
    assert store.append(decide(ViewId(1, 7), ViewId(1, 1))).ok


def test_a_number_of_another_term_is_refused(chains: Chains) -> None:
    store = chains()
    store.take_term()
    assert not store.append(reserve(ViewId(2, 1))).ok
    assert not store.append(decide(ViewId(0, 9))).ok


def test_an_older_scheduler_is_deposed_by_a_newer_one(chains: Chains) -> None:
    old, new = chains(), chains()
    old.take_term()
    old.append(decide(ViewId(1, 1)))
    new.take_term()
    for effect in (reserve(ViewId(1, 2)), decide(ViewId(1, 2), ViewId(1, 1)), finish(ViewId(1, 2))):
        outcome = old.append(effect)
        assert not outcome.ok
        assert "term 2" in outcome.detail
    assert new.append(decide(ViewId(2, 2), ViewId(1, 1))).ok
    assert new.load().highest == ViewId(2, 2)


def test_of_two_schedulers_that_build_on_the_same_view_one_wins(chains: Chains) -> None:
    stores = [chains(), chains()]
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


def test_a_repeated_write_succeeds_and_changes_nothing(chains: Chains) -> None:
    store = chains()
    store.take_term()
    store.append(reserve(ViewId(1, 1)))
    store.append(reserve(ViewId(1, 1)))
    for _ in range(3):
        assert store.append(decide(ViewId(1, 1), base=BASE, token=9)).ok
    assert [e.kind for e in store.entries()] == ["reserve", "view"]
    changed = Persist(1, "view", ViewId(1, 1), replace(view(ViewId(1, 1)), reason="another"), BASE, True)
    assert not store.append(changed).ok


def test_nothing_follows_the_end(chains: Chains) -> None:
    store = chains()
    store.take_term()
    store.append(decide(ViewId(1, 1)))
    assert store.append(finish(ViewId(1, 2))).ok
    assert store.append(finish(ViewId(1, 2))).ok
    assert store.load().finished
    outcome = store.append(decide(ViewId(1, 3), ViewId(1, 1)))
    assert not outcome.ok
    assert "finished" in outcome.detail


def test_a_chain_that_is_over_is_put_away_and_none_of_its_terms_outranks_the_next(chains: Chains) -> None:
    with chains() as store:
        for _ in range(3):
            term = store.take_term()
        assert store.append(Persist(1, "view", ViewId(term, 1), View(ViewId(term, 1), NO_VIEW, ()))).ok
        assert store.append(Persist(2, "finish", ViewId(term, 2))).ok
        words = store.begin_again()
        assert (store.tip().finished, store.load().views, store.entries()) == (False, (), ())
        assert store.take_term() > term
        assert store.append(Persist(3, "view", ViewId(store.term, 1), View(ViewId(store.term, 1), NO_VIEW, ()))).ok
        if words.startswith("archived as "):
            with JobChain(SqliteStore(words.removeprefix("archived as "), read_only=True)) as old:
                assert (old.tip().finished, [v.id for v in old.load().views]) == (True, [ViewId(term, 1)])
    with chains() as store:
        assert len(store.load().views) == 1


def test_a_store_that_took_no_term_cannot_write(chains: Chains) -> None:
    chains().take_term()
    reader = chains()
    assert not reader.append(reserve(ViewId(1, 1))).ok


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
def test_a_malformed_write_is_an_error(chains: Chains, effect: Persist, words: str) -> None:
    store = chains()
    store.take_term()
    with pytest.raises(StoreError, match=re.escape(words)):
        store.append(effect)


def test_the_tip_that_is_kept_is_the_tip_that_is_computed(chains: Chains) -> None:
    store = chains()
    store.take_term()
    expected, last = store.tip(), NO_VIEW
    for number in range(1, 6):
        effect = decide(ViewId(1, number), last) if number % 2 else reserve(ViewId(1, number))
        assert store.append(effect).ok
        expected = advance(expected, told(expected, entry_of(effect)), store.tip().end)
        last = effect.number if effect.view else last
        assert store.tip() == expected
        assert (expected.term, expected.end.position) == (1, number)


def test_a_chain_gets_an_id_with_its_first_term_and_keeps_it(chains: Chains) -> None:
    first = chains()
    assert first.tip().chain == ""
    first.take_term()
    drawn = first.tip().chain
    assert re.fullmatch("[0-9a-f]{16}", drawn)
    first.append(reserve(ViewId(1, 1)))
    first.append(decide(ViewId(1, 2)))
    second = chains()
    second.take_term()
    chain = second.load()
    assert chain.id == drawn
    assert chain.numbers == Numbers.of([ViewId(1, 1), ViewId(1, 2)])


def test_an_empty_store_takes_the_id_of_the_chain_that_is_rebuilt_in_it_and_one_that_holds_views_does_not(
    chains: Chains,
) -> None:
    store = chains()
    store.take_term()
    assert store.take_term(6, "0123456789abcdef") == 7
    assert store.tip().chain == "0123456789abcdef"
    store.append(decide(ViewId(7, 1)))
    assert store.take_term(7, "0123456789abcdef") == 8
    with pytest.raises(StoreError, match="chain 01234567 cannot become chain fedcba98"):
        store.take_term(8, "fedcba9876543210")
    assert store.tip().chain == "0123456789abcdef"


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    "effect", [decide(ViewId(1, 1), base=BASE), reserve(ViewId(2, 3)), finish(ViewId(1, 2)), link("a", "b")]
)
def test_an_entry_travels_as_bytes(effect: Persist) -> None:
    entry = entry_of(effect)
    found = entry_from(StoreRecord(7, entry.kind, 1, entry_bytes(entry)))
    assert found.revision == 7
    assert found.same(entry)


GOOD = entry_bytes(entry_of(decide(ViewId(1, 1))))
WISH = entry_bytes(entry_of(link("a", "b")))


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("view", b"", "is damaged"),
        ("view", GOOD[:-1], "bytes behind its first line"),
        ("view", GOOD + b"x", "bytes behind its first line"),
        ("view", GOOD.partition(b"\n")[0] + b"\n" + b"\xff" * len(GOOD.partition(b"\n")[2]), "no PackedView"),
        ("view", GOOD.replace(b"[1, 1]", b"[1, 2]"), "view 1.1 under the number 1.2"),
        ("reserve", GOOD, "'reserve' with a view"),
        ("reserve", b'{"number": [1, "x"], "nbytes": [null, null], "wish": null, "hand_on": 0}', "has version 1"),
        (
            "reserve",
            b'{"form": 2, "number": [1, "x"], "nbytes": [null, null], "wish": null, "hand_on": 0}',
            "is damaged",
        ),
        ("reserve", b"[" * 100_000, "is damaged"),
        ("link", WISH.replace(b'"why"', b'"how"'), "is damaged"),
        ("sum", GOOD, "of the unknown kind 'sum'; go on with the version that wrote it"),
    ],
)
def test_a_damaged_entry_is_an_error_not_a_shorter_chain(kind: str, body: bytes, words: str) -> None:
    with JobChain(MemoryStore("job", shelf := Shelf())) as chain:
        chain.take_term()
        assert chain.append(reserve(ViewId(1, 1))).ok
    with MemoryStore("job", shelf) as store:
        store.take_term()
        assert store.append(kind, body, store.end()).ok
    for read in (JobChain(MemoryStore("job", shelf)).load, JobChain(MemoryStore("job", shelf)).tip):
        with pytest.raises(StoreError, match="record 2 .*" + re.escape(words)):
            read()


def several(count: int, members: int = 60) -> list[Persist]:
    """Returns `count` decided views of a job with few links; each view has one member fewer than the one before."""
    views = [sparse_view(members, trees=2)]
    for number in range(1, count):
        before = views[-1]
        dead = before.members[7].id
        links = tuple(link for link in before.links if dead not in (link.a, link.b))
        left = tuple(m for m in before.members if m.id != dead)
        views.append(replace(before, id=ViewId(1, number + 1), predecessor=before.id, members=left, links=links))
    return [Persist(1, "view", v.id, v, BASE, True) for v in views]


def test_records_say_what_changed_and_are_read_as_whole_views(chains: Chains) -> None:
    first, second = chains(), chains()
    first.take_term()
    effects = several(35)
    for effect in effects:
        assert first.append(effect).ok
    views = [effect.view for effect in effects]
    entries = second.entries()
    assert [e.view for e in entries] == views
    assert [e.revision for e in entries if e.change is None] == [1]
    sizes = [len(record.body) for record in second.store.read()[1]]
    assert max(sizes[1:]) < sizes[0] / 4
    assert second.tip().view == views[-1]
    assert second.entries(after=5) == entries[5:]
    second.take_term()
    assert second.load().views == tuple(views)
    following = replace(views[-1], id=ViewId(2, 99), predecessor=views[-1].id, reason="the next one")
    assert second.append(Persist(1, "view", following.id, following)).ok
    assert chains().entries()[-1].change is not None, "the one that continues tells changes, too"


def test_each_death_among_1024_is_a_record_of_less_than_10_kb() -> None:
    with JobChain(MemoryStore("job", shelf := Shelf())) as chain:
        chain.take_term()
        for effect in several(20, members=1024):
            assert chain.append(effect).ok
    first, *deaths = (len(record.body) for record in shelf.records)
    assert max(deaths) < 10_000 < first


def test_a_record_of_changes_is_applied_to_the_view_that_it_names_and_no_other() -> None:
    shelf = Shelf()
    with JobChain(MemoryStore("job", shelf)) as chain:
        chain.take_term()
        effects = several(3)
        for effect in effects:
            assert chain.append(effect).ok
    records = shelf.records
    assert effects[0].view is not None
    first = advance(Tip(), entry_from(records[0]), EMPTY)
    others = (replace(first, digest="0" * 16), replace(first, view=replace(effects[0].view, id=ViewId(1, 9))))
    for before in (None, Tip(), *others):
        with pytest.raises(StoreError, match=r"record 2 is damaged: .*changes? (of )?view 1\.1"):
            entry_from(records[1], before)
    with pytest.raises(StoreError, match="record 3 is damaged: a change of view"):
        entry_from(records[2], first)
    assert entry_from(records[1], first).view == effects[1].view


def test_a_view_that_fits_into_no_record_is_refused_with_the_number_that_would(
    chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = chains()
    store.take_term()
    large, small = sparse_view(60), sparse_view(40)
    monkeypatch.setattr("chaos_lightning.control.job_chain.MAX_VIEW_NBYTES", len(encode(large)) - 1)
    with pytest.raises(OversizeError, match="59 members fit") as refused:
        store.append(Persist(1, "view", large.id, large))
    assert refused.value.fits == 59
    assert store.append(Persist(1, "view", small.id, small)).ok, "the chain goes on"


@pytest.mark.parametrize(("form", "version"), [(b"", "1"), (b'"form": 9, ', "9")])
def test_a_record_of_another_version_names_both(form: bytes, version: str) -> None:
    body = entry_bytes(entry_of(decide(ViewId(1, 1)))).replace(b'"form": 2, ', form)
    with pytest.raises(
        StoreError, match=f"version {version}, and this program reads 2: go on with the release that wrote"
    ):
        entry_from(StoreRecord(1, "view", 1, body))


def test_a_writer_whose_answer_got_lost_goes_on_after_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that got no answer, though its decision was stored, can repeat the decision or append the next one."""
    once = MemoryStore._append

    def lost(self: MemoryStore, record: StoreRecord, seen: object, *, cut: bool) -> object:
        once(self, record, seen, cut=cut)  # type: ignore[arg-type]
        raise StoreError("planted: the answer got lost")

    for again in (reserve(ViewId(1, 1)), reserve(ViewId(1, 2))):
        with JobChain(MemoryStore()) as chain:
            chain.take_term()
            monkeypatch.setattr(MemoryStore, "_append", lost)
            with pytest.raises(StoreError, match="planted"):
                chain.append(reserve(ViewId(1, 1)))
            monkeypatch.undo()
            assert chain.append(again).ok
            assert chain.load().highest == again.number


@pytest.mark.parametrize("kept", [1, 2])
def test_a_scheduler_writes_nothing_into_an_older_copy_that_took_its_stores_place(kept: int) -> None:
    """A scheduler refuses to write once an older copy has replaced its store: it would reuse view numbers of the newer
    one.
    """
    shelf = Shelf()
    with JobChain(MemoryStore("job", shelf)) as chain:
        chain.take_term()
        assert chain.append(reserve(ViewId(1, 1))).ok
        assert chain.append(decide(ViewId(1, 2))).ok
        assert chain.append(reserve(ViewId(1, 3))).ok
        del shelf.records[kept:]
        last = shelf.records[-1]
        shelf.end = replace(shelf.end, position=last.position, hash=last.hash)
        for effect in (reserve(ViewId(1, 4)), decide(ViewId(1, 4), ViewId(1, 2)), finish(ViewId(1, 4))):
            refused = chain.append(effect)
            assert not refused.ok
            assert f"went back from record 3 of term 1 to record {kept} of term 1: this is an older" in refused.detail
