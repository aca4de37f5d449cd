"""Tests that one summary record can replace a job's chain: its content, and that writers and readers go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from chain_support import BASE, MEMBERS, decide, finish, link, reserve, view
from large_views import sparse_view
from store_support import Open

from chaos_lightning.control import summing
from chaos_lightning.control.chain_writer import ChainWriter
from chaos_lightning.control.job_chain import SUMMARY, JobChain, Tip, entry_bytes, entry_from, summary_of
from chaos_lightning.control.summing import as_document, from_document, summed
from chaos_lightning.errors import OversizeError, StoreError
from chaos_lightning.membership.effects import Chain, Persist
from chaos_lightning.membership.past import MOST_GONE, Past
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.store import End, StoreRecord

FEW = 8
Chains = Callable[[], JobChain]


@pytest.fixture(autouse=True)
def cut_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(summing, "EVERY", FEW)
    return None


@pytest.fixture
def chains(opened: Open) -> Chains:
    """Function that opens the same chain again at each call, as several schedulers would."""
    return lambda: JobChain(opened())


def decisions(term: int, after: View | None, count: int) -> Iterator[Persist]:
    """Yields a scheduler's typical decisions: reserved numbers, views with and without a base header, links added and
    removed.
    """
    last = after
    for n in range(count):
        number = ViewId(term, (last.id.number if last is not None else 0) + 2)
        members = sparse_view(6, trees=0).members
        gone = () if last is None else (last.members[0].id,)
        view = replace(
            sparse_view(6, trees=0, number=number, predecessor=last.id if last is not None else NO_VIEW),
            members=tuple(
                replace(m, id=f"{m.name}~{number.number}") if m.id in gone or last is None else m
                for m in (last.members if last is not None else members)
            ),
            links=(),
            reason=f"change {n}",
        )
        base = replace(BASE, step=n, next_view=number) if n % 3 else None
        yield reserve(ViewId(term, number.number - 1))
        yield Persist(1, "view", number, view, base, hand_on=base is not None)
        yield link("a", "bcd"[n % 3], add=n % 2 == 1)
        last = view


@pytest.mark.parametrize("most_gone", [3, MOST_GONE])
def test_a_cut_chain_says_what_the_whole_one_says(
    chains: Chains, monkeypatch: pytest.MonkeyPatch, most_gone: int
) -> None:
    monkeypatch.setattr("chaos_lightning.membership.past.MOST_GONE", most_gone)
    first, whole = chains(), JobChain(MemoryStore("whole", Shelf()))
    first.take_term()
    whole.store.take_term(0, first.tip().chain)
    cuts = 0
    for effect in decisions(1, None, 30):
        assert first.append(effect).ok
        assert whole.append(effect).ok
        cuts += bool(first.cut())
        assert summed(first.load()) == summed(whole.load())
    assert cuts >= 9
    assert len(first.entries()) <= FEW + 2
    assert len(whole.entries()) == 90
    second = chains()
    assert second.take_term() == 2
    loaded, unabridged = second.load(), whole.load()
    assert loaded.views == unabridged.views[-len(loaded.views) :]
    assert loaded.numbers == unabridged.numbers
    assert (loaded.highest, loaded.step) == (unabridged.highest, unabridged.step)
    assert len(loaded.past.views) + len(loaded.views) == 30
    assert len(loaded.past.members) - len(loaded.past.inside) <= most_gone
    assert {(w.b, w.add) for w in summed(loaded).wishes} == {("b", True), ("c", False), ("d", True)}
    for effect in decisions(2, loaded.views[-1], 5):
        assert second.append(effect).ok
        second.cut()
    assert not first.append(reserve(ViewId(1, 99))).ok, "the first one is deposed by a cut chain, too"


def test_it_is_seen_that_a_chain_was_cut(chains: Chains) -> None:
    chain = filled(chains())
    assert chain.cut() == FEW + 1
    assert [e.kind for e in chains().entries()] == [SUMMARY]
    assert chain.cut() == 0


def filled(chain: JobChain, count: int = FEW + 1, first: int = 1) -> JobChain:
    """Appends `count` views to the chain, enough for it to be cut by default; returns the chain."""
    if not chain.term:
        chain.take_term()
    last = NO_VIEW if first == 1 else ViewId(1, first - 1)
    for number in range(first, first + count):
        assert chain.append(decide(ViewId(1, number), last, BASE)).ok
        last = ViewId(1, number)
    return chain


def test_numbers_that_were_given_out_are_not_reissued_after_a_cut(chains: Chains) -> None:
    chain = filled(chains(), FEW)
    assert chain.append(reserve(ViewId(1, 50))).ok
    assert chain.cut() == FEW + 1
    for effect in (reserve(ViewId(1, 50)), decide(ViewId(1, 49), ViewId(1, FEW)), decide(ViewId(1, 51), ViewId(1, 3))):
        assert not chain.append(effect).ok
    assert ViewId(1, 50) in chains().load().numbers
    assert ViewId(1, 49) not in chains().load().numbers
    assert chain.append(decide(ViewId(1, 50), ViewId(1, FEW))).ok


def test_what_follows_a_cut_is_told_by_changes_of_its_last_view() -> None:
    shelf = Shelf()
    with JobChain(MemoryStore("job", shelf)) as chain:
        chain.take_term()
        for number in range(FEW):
            assert chain.append(reserve(ViewId(1, number + 1))).ok
        large = sparse_view(60, trees=0, number=ViewId(1, FEW))
        fewer = replace(large, id=ViewId(1, FEW + 1), predecessor=large.id, members=large.members[:-1])
        last = large.members[-1].id
        fewer = replace(fewer, links=tuple(link for link in large.links if last not in (link.a, link.b)))
        for view, cut in ((large, FEW + 1), (fewer, 0)):
            assert chain.append(Persist(1, "view", view.id, view)).ok
            assert chain.cut() == cut
        assert chain.entries()[-1].change is not None
        assert chain.entries()[-1].view == fewer


def test_a_short_chain_a_finished_one_and_one_without_a_view_are_not_cut() -> None:
    with JobChain(MemoryStore("job", Shelf())) as chain:
        assert filled(chain, FEW).cut() == 0
        assert chain.append(finish(ViewId(1, FEW + 1))).ok
        assert chain.cut() == 0
    with JobChain(MemoryStore("job", Shelf())) as chain:
        chain.take_term()
        for number in range(3 * FEW):
            assert chain.append(reserve(ViewId(1, number + 1))).ok
            assert chain.cut() == 0


# ------------------------------------------------------------------------------------------------ who writes it


def test_a_scheduler_that_another_one_has_outranked_cuts_nothing(chains: Chains) -> None:
    first, second = filled(chains()), chains()
    second.take_term()
    assert first.cut() == 0
    assert len(second.entries()) == FEW + 1


def test_a_scheduler_whose_store_went_back_cuts_nothing() -> None:
    shelf = Shelf()
    with JobChain(MemoryStore("job", shelf)) as chain:
        filled(chain, FEW + 2)
        del shelf.records[FEW + 1 :]
        last = shelf.records[-1]
        shelf.end = replace(shelf.end, position=last.position, hash=last.hash)
        assert chain.cut() == 0
        assert len(shelf.records) == FEW + 1


@pytest.mark.parametrize("written", [False, True])
def test_a_cut_whose_answer_got_lost_is_as_good_as_any(*, written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answer to a cut is lost, the next reader finds either the old records or the summary, and the writer goes
    on.
    """
    once, shelf = MemoryStore._append, Shelf()

    def lost(self: MemoryStore, record: StoreRecord, seen: End, *, cut: bool) -> object:
        if written:
            once(self, record, seen, cut=cut)
        raise StoreError("planted: the answer got lost")

    with JobChain(MemoryStore("job", shelf)) as chain:
        filled(chain)
        before = summed(chain.load())
        monkeypatch.setattr(MemoryStore, "_append", lost)
        with pytest.raises(StoreError, match="planted"):
            chain.cut()
        monkeypatch.undo()
        with JobChain(MemoryStore("job", shelf)) as other:
            assert len(other.entries()) == (1 if written else FEW + 1)
            assert summed(other.load()) == before
        assert chain.append(decide(ViewId(1, FEW + 2), ViewId(1, FEW + 1))).ok


def test_a_chain_whose_sum_fits_into_no_record_stays_whole_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, object]] = []
    writer = ChainWriter(lambda: MemoryStore("job", shelf), lambda name, **fields: said.append((name, fields)))
    shelf = Shelf()
    writer.take(lambda: None)
    filled(writer.chain)
    for place in ("service.store", "control.job_chain"):
        monkeypatch.setattr(f"chaos_lightning.{place}.MAX_BODY_NBYTES", 300)
    with pytest.raises(OversizeError, match=r"stores take 300 of a record: it names 2 members .* and [01] would fit"):
        writer.chain.cut()
    assert writer.chain.cut() == 0, "it is not tried again at once"
    monkeypatch.undo()
    monkeypatch.setattr(summing, "EVERY", FEW)
    for first in (FEW + 2, 2 * FEW + 2):
        filled(writer.chain, FEW, first)
        for place in ("service.store", "control.job_chain"):
            monkeypatch.setattr(f"chaos_lightning.{place}.MAX_BODY_NBYTES", 300)
        writer._cut()
        monkeypatch.setattr("chaos_lightning.service.store.MAX_BODY_NBYTES", 1 << 20)
    assert [name for name, _ in said] == ["error"]
    assert len(shelf.records) == 3 * FEW + 1
    filled(writer.chain, 5 * FEW, 3 * FEW + 2)
    writer._cut()
    assert [name for name, _ in said] == ["error", "stored"]
    assert len(shelf.records) == 1


# ------------------------------------------------------------------------------------------------ what it is


def a_summary() -> tuple[Tip, bytes]:
    """Returns the tip of a chain of three views, and the bytes of the record that sums it up."""
    with JobChain(MemoryStore("job", Shelf())) as chain:
        filled(chain, 3)
        return chain.tip(), entry_bytes(summary_of(chain.tip(), chain.entries()))


def test_a_summary_travels_as_bytes() -> None:
    with JobChain(MemoryStore("job", Shelf())) as chain:
        for effect in (chain.take_term(), *decisions(1, None, 5))[1:]:
            assert chain.append(effect).ok
        entry = summary_of(chain.tip(), chain.entries())
    found = entry_from(StoreRecord(7, SUMMARY, 1, entry_bytes(entry)))
    assert found.same(entry)
    assert found.digest == entry.digest


def with_head(body: bytes, **changes: object) -> bytes:
    line, _, rest = body.partition(b"\n")
    return json.dumps({**json.loads(line), **changes}).encode() + b"\n" + rest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"form": 3}, "version 3, and this program reads 2"),
        ({"chain": "0123456789abcdef"}, "it sums up chain 01234567, and this is chain"),
        ({"views": [[1, 1]]}, "not enough values"),
        ({"numbers": [[1, 1, -1]]}, "-1 is no number"),
        ({"members": {"a~1": [1, "x"]}}, "'x' is no number"),
        ({"members": 3}, "is damaged"),
        ({"step": None}, "None is no number"),
        ({"wishes": [{"a": "x"}]}, "is damaged"),
    ],
)
def test_a_damaged_summary_is_an_error_not_a_shorter_chain(changes: dict[str, object], words: str) -> None:
    tip, body = a_summary()
    with pytest.raises(StoreError, match=f"record 4 is damaged: .*{words}|record 4 (has )?{words}"):
        entry_from(StoreRecord(4, SUMMARY, 1, with_head(body, **changes)), Tip(tip.end))


def test_a_summary_from_before_members_were_forgotten_is_read() -> None:
    tip, body = a_summary()
    line, _, rest = body.partition(b"\n")
    head = json.loads(line)
    assert head.pop("forgotten") == [0, 0]
    found = entry_from(StoreRecord(4, SUMMARY, 1, json.dumps(head).encode() + b"\n" + rest), Tip(tip.end))
    assert found.summed is not None
    assert found.summed.past.forgotten == NO_VIEW


def test_an_empty_summary_is_refused() -> None:
    tip, body = a_summary()
    line = with_head(body.partition(b"\n")[0] + b"\n", nbytes=[])
    with pytest.raises(StoreError, match="record 4 is damaged: it sums up a chain without a view"):
        entry_from(StoreRecord(4, SUMMARY, 1, line), Tip(tip.end))


def test_a_summary_behind_other_records_is_refused() -> None:
    shelf = Shelf()
    with JobChain(MemoryStore("job", shelf)) as chain:
        filled(chain, 3)
        body = entry_bytes(summary_of(chain.tip(), chain.entries()))
        assert chain.store.append(SUMMARY, body, chain.tip().end).ok
        with pytest.raises(StoreError, match="record 4 is damaged: it sums up what is there, up to record 3"):
            chain.load()


def test_an_older_summary_in_place_of_a_newer_one_is_refused() -> None:
    shelf = Shelf()
    with JobChain(MemoryStore("job", shelf)) as chain:
        filled(chain)
        assert chain.cut()
        older = shelf.records[0]
        filled(chain, FEW, FEW + 2)
        assert chain.cut()
        filled(chain, 1, 2 * FEW + 2)
        newer = shelf.records[0]
        shelf.records[0] = replace(older, position=newer.position)
        with pytest.raises(StoreError, match=f"record {newer.position} is damaged: the next one follows another"):
            chain.load()


def test_the_last_views_of_a_chain_that_was_cut_are_what_they_were(chains: Chains) -> None:
    chain = filled(chains())
    assert chain.cut()
    last = ViewId(1, FEW), ViewId(1, FEW + 1)
    assert chains().load().views == (view(last[0], ViewId(1, FEW - 1)), view(last[1], last[0]))


def test_a_record_tells_whom_the_last_view_that_it_sums_up_lets_go() -> None:
    """A summary keeps which members its last view releases: one that rejoins with the next view counts as present
    throughout.
    """
    first, second = view(ViewId(1, 1)), view(ViewId(1, 2), ViewId(1, 1))
    past = Past.of([first, replace(second, members=MEMBERS[:1], joiners=(), leaving=MEMBERS[1:])])
    chain = Chain(0, second.id, past=past)
    read = from_document(json.loads(json.dumps(as_document(chain))), ())
    assert read.past == past
    for one in (past, read.past):
        one.add(view(ViewId(1, 3), second.id))
        assert one.in_all_after("b~2", ViewId(1, 1))
