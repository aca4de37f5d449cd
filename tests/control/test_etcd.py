"""Tests the chain in a real etcd, beyond what test_store.py asks of all stores."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chain_support import decide, etcd_chain, reserve, view
from etcd_for_tests import servers

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.service.etcd_address import CLIENTS, EtcdAddress, read_address
from chaos_lightning.service.etcd_client import (
    CompactedError,
    EtcdClient,
    open_client,
    put,
)
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.etcd_store import job_root
from chaos_lightning.service.store import Appended

pytestmark = pytest.mark.usefixtures("each_client")


@pytest.fixture
def job() -> str:
    return f"job-{os.urandom(4).hex()}"


@contextlib.contextmanager
def store(servers: EtcdServers, job: str) -> Iterator[JobChain]:
    with etcd_chain(servers.client(), job) as opened:
        yield opened


def grow(chain: JobChain, count: int, last: ViewId = NO_VIEW) -> ViewId:
    for number in range(last.number + 1, last.number + 1 + count):
        decided = decide(ViewId(chain.term, number), last)
        assert chain.append(decided).ok
        last = decided.number
    return last


# ------------------------------------------------------------------------------------------------ addresses


def test_addresses() -> None:
    assert read_address("etcd://a:1,b,[::1]:3").servers == ("a:1", "b:2379", "[::1]:3")
    assert read_address("etcd://a+b/jobs/of/mine").prefix == "jobs/of/mine"
    found = read_address("etcd://ann@a?ca=/ca&cert=/c&key=/k&password-file=/p")
    assert (found.user, found.ca_file, found.cert_file, found.key_file) == ("ann", "/ca", "/c", "/k")
    assert (found.password_file, found.prefix) == ("/p", "chaos-lightning")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("etcd://", "expected etcd://"),
        ("etcd://a:b", "'a:b' is no HOST:PORT"),
        ("etcd://a:0", "'a:0' is no HOST:PORT"),
        ("etcd://a:²", "is no HOST:PORT"),
        ("etcd://ann:secret@a", "put it into a file"),
        ("etcd://ann@a", "needs a password"),
        ("etcd://a?cert=x", "cert and key go together"),
        ("etcd://a?tls=yes", "unknown tls"),
    ],
)
def test_addresses_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_address(text)
    assert "secret" not in str(caught.value)


def test_nobody_there_is_told_within_the_deadline() -> None:
    client = EtcdClient(EtcdAddress(servers=("127.0.0.1:1", "127.0.0.1:2")), deadline_s=0.5)
    started = time.monotonic()
    with contextlib.closing(client), pytest.raises(StoreError, match="is a majority of its servers up"):
        client.get("key")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("client", CLIENTS)
def test_the_deadline_that_is_named_is_the_calls_own(client: str) -> None:
    """A deadline given with a call replaces the client's default one."""
    address = EtcdAddress(servers=("127.0.0.1:1",), client=client)
    with contextlib.closing(open_client(address, deadline_s=30.0)) as made:
        for call in (lambda: made.get_all("key", deadline_s=0.2), lambda: made.keep_alive(7, 0.2)):
            started = time.monotonic()
            with pytest.raises(StoreError, match=r"did not answer within 0\.2 s \(127\.0\.0\.1:1: nobody listens"):
                call()
            assert time.monotonic() - started < 5


# ------------------------------------------------------------------------------------------------ what lies there


def test_keys_of_another_program_or_version_are_refused(etcd: EtcdServers, job: str) -> None:
    with store(etcd, job) as chain:
        root = job_root(chain.store._client.address.prefix, job)
        for value, words in (
            (b"precious", "another program's"),
            (b"[]", "another program's"),
            (json.dumps({"format": 99}).encode(), "has format 99, this version reads 3"),
            (json.dumps({"format": 3, "position": 0}).encode(), "holds no tip"),
        ):
            chain.store._client.transact([], [put(root + "tip", value)])
            with pytest.raises(StoreError, match=words):
                chain.take_term()
            found = chain.store._client.get(root + "tip")
            assert found is not None
            assert found.value == value


def test_a_chain_of_the_former_format_is_refused_and_left_alone(etcd: EtcdServers, job: str) -> None:
    tip = {"format": 2, "term": 7, "highest": [7, 9], "last_view": [7, 9], "finished": False, "count": 4, "chain": "a"}
    with store(etcd, job) as chain:
        key = job_root(chain.store._client.address.prefix, job) + "tip"
        chain.store._client.transact([], [put(key, json.dumps(tip).encode())])
        for use in (chain.take_term, chain.load, lambda: chain.append(reserve(ViewId(7, 10))), chain.begin_again):
            with pytest.raises(StoreError, match=r"has format 2, this version reads 3; finish the job"):
                use()
        assert json.loads(chain.store._client.get(key).value) == tip


def test_a_job_that_begins_again_begins_another_chain(etcd: EtcdServers, job: str) -> None:
    with store(etcd, job) as chain:
        chain.take_term()
        before = chain.tip().chain
        chain.begin_again()
        assert chain.tip().chain not in ("", before)


@pytest.mark.parametrize(
    "damaged", [b"\xff\xff", b"{}", b'{"format": 3}', b'{"format":3,"kind":"view","body":"///","term":1,"before":""}']
)
def test_a_damaged_entry_is_an_error_not_a_shorter_chain(etcd: EtcdServers, job: str, damaged: bytes) -> None:
    with store(etcd, job) as chain:
        chain.take_term()
        grow(chain, 2)
        key = job_root(chain.store._client.address.prefix, job) + f"record/{1:016d}"
        chain.store._client.transact([], [put(key, damaged)])
        with pytest.raises(StoreError, match=r"damaged|another program's"):
            chain.load()


def test_a_missing_entry_is_an_error(etcd: EtcdServers, job: str) -> None:
    from chaos_lightning.service.etcd_client import delete

    with store(etcd, job) as chain:
        chain.take_term()
        grow(chain, 3)
        chain.store._client.transact(
            [], [delete(job_root(chain.store._client.address.prefix, job) + f"record/{2:016d}")]
        )
        with pytest.raises(StoreError, match="record 2 is missing"):
            chain.load()


def test_an_entry_that_etcd_would_not_take_is_refused_before(etcd: EtcdServers, job: str) -> None:
    import random
    from dataclasses import replace

    with store(etcd, job) as chain:
        chain.take_term()
        huge = replace(view(ViewId(1, 1)), reason=random.Random(1).randbytes(1 << 20).hex())  # no compressing helps
        with pytest.raises(
            StoreError, match=r"a view of 2 members and 0 links takes 2[0-9]{6} bytes, .* 716800: 1 members fit"
        ):
            chain.append(Persist(2, "view", huge.id, huge))
        grow(chain, 1)


def test_long_chains_are_read_in_pages(etcd: EtcdServers, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.service.etcd_client.PAGE", 7)
    with store(etcd, job) as chain:
        chain.take_term()
        grow(chain, 30)
        assert [e.revision for e in chain.entries(after=12)] == list(range(13, 31))


def test_a_finished_job_begins_again_above_all_older_terms(etcd: EtcdServers, job: str) -> None:
    with store(etcd, job) as old, store(etcd, job) as new:
        old.take_term()
        grow(old, 2)
        assert old.append(Persist(1, "finish", ViewId(1, 2))).ok
        new.begin_again()
        assert new.take_term() == 3
        assert new.load().views == ()
        assert "term 3" in old.append(reserve(ViewId(1, 9))).detail
        grow(new, 1)


# ------------------------------------------------------------------------------------------------ revisions


def test_a_watch_whose_revision_was_compacted_says_so_and_waiting_goes_on(etcd: EtcdServers, job: str) -> None:
    with store(etcd, job) as chain:
        chain.take_term()
        grow(chain, 3)
        _, revision = chain.store._client.get_all("nothing/")
        chain.store._client.compact(revision)
        with pytest.raises(CompactedError, match="forgotten"):
            for _ in chain.store._client.watch("nothing/", 1, threading.Event()):
                pass
        assert not chain.store.wait(3, 0.1)
        grown = threading.Thread(target=lambda: grow(chain, 1, ViewId(1, 3)))
        grown.start()
        assert chain.store.wait(3, 30.0)
        grown.join()


# ------------------------------------------------------------------------------------------------ servers die


def test_a_server_that_is_restarted_forgets_nothing_and_watches_go_on(tmp_path: Path, job: str) -> None:
    with servers(tmp_path / "etcd", 1) as one, store(one, job) as chain, store(one, job) as other:
        chain.take_term()
        last = grow(chain, 3)
        seen: list[bool] = []
        watcher = threading.Thread(target=lambda: seen.append(other.store.wait(3, 60.0)))
        watcher.start()
        one.kill(one.servers[0])
        restarted = threading.Thread(target=one.run, args=(one.servers[0],))
        restarted.start()
        outcome = append_patiently(chain, decide(ViewId(1, 4), last))
        assert outcome.ok
        restarted.join()
        watcher.join(60)
        assert seen == [True]
        assert [v.id.number for v in other.load().views] == [1, 2, 3, 4]


def killed_thrice(one: EtcdServers, over: threading.Event) -> threading.Thread:
    """Starts a thread that kills and restarts an etcd server three times, and then sets `over`."""

    def kill_and_start() -> None:
        for _ in range(3):
            over.wait(0.2)
            one.kill(one.servers[0])
            one.run(one.servers[0])
            one.wait_ready(30.0)
        over.set()

    killer = threading.Thread(target=kill_and_start)
    killer.start()
    return killer


def test_servers_killed_again_and_again_in_mid_write_lose_nothing_that_was_acknowledged(
    tmp_path: Path, job: str
) -> None:
    with servers(tmp_path / "etcd", 1) as one, store(one, job) as chain:
        chain.take_term()
        over, last, count = threading.Event(), NO_VIEW, 0

        killer = killed_thrice(one, over)
        while not over.is_set() or count <= 30:
            effect = decide(ViewId(1, count + 1), last)
            assert append_patiently(chain, effect).ok
            last, count = effect.number, count + 1
        killer.join(60)
        with store(one, job) as other:
            assert [v.id.number for v in other.load().views] == list(range(1, count + 1))


def test_a_log_that_is_cut_while_servers_are_killed_is_whole_at_any_moment(tmp_path: Path, job: str) -> None:
    """A reader always finds the whole log while its writer cuts it every third record and the etcd server is killed
    repeatedly.
    """
    with servers(tmp_path / "etcd", 1) as one, store(one, job) as chain, store(one, job) as other:
        writer, reader, over = chain.store, other.store, threading.Event()
        end, seen = writer.take_term(), 0

        killer = killed_thrice(one, over)
        while not over.is_set() or min(end.position, seen) <= 30:
            number = end.position + 1
            with contextlib.suppress(StoreError):
                outcome = writer.append("count", str(number).encode(), end, cut=number % 3 == 0)
                assert outcome.ok, outcome.detail
                end = outcome.end
            with contextlib.suppress(StoreError):
                found, records = reader.read()
                assert [int(r.body) for r in records] == list(range(found.first, found.position + 1))
                assert found.position in (end.position, end.position + 1)
                assert found.first == max(1, found.position // 3 * 3)
                seen += 1
        killer.join(60)


def finished(chain: JobChain) -> None:
    chain.take_term()
    last = grow(chain, 2)
    assert chain.append(Persist(7, "finish", last)).ok
    assert chain.tip().finished


def test_a_job_begins_again_though_the_answer_got_lost(
    etcd: EtcdServers, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished job begins again even if the answer of etcd got lost, and the repeated request meets its own first
    one.
    """
    with store(etcd, job) as chain:
        finished(chain)
        once = chain.store._client.transact

        def twice(compare: Any, writes: Any) -> tuple[bool, int]:
            once(compare, writes)
            return once(compare, writes)

        monkeypatch.setattr(chain.store._client, "transact", twice)
        chain.begin_again()
        monkeypatch.undo()
        assert (chain.tip().finished, chain.load().views) == (False, ())
        chain.take_term()
        assert chain.term == 3
        grow(chain, 1)


def test_a_job_that_another_one_has_begun_again_is_left_to_it(
    etcd: EtcdServers, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(etcd, job) as chain, store(etcd, job) as other:
        finished(chain)
        once = chain.store._client.transact

        def late(compare: Any, writes: Any) -> tuple[bool, int]:
            other.begin_again()
            other.take_term()
            grow(other, 1)
            return once(compare, writes)

        monkeypatch.setattr(chain.store._client, "transact", late)
        with pytest.raises(StoreError, match="another scheduler has begun this job again"):
            chain.begin_again()
        monkeypatch.undo()
        assert len(chain.load().views) == 1


def append_patiently(chain: JobChain, effect: Persist) -> Appended:
    """Appends a decision as the scheduler does: retries for some seconds."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return chain.append(effect)
        except StoreError:
            if time.monotonic() > deadline:
                raise


def test_the_leader_of_three_dies_and_writing_goes_on(etcd_of_three: EtcdServers, job: str) -> None:
    with store(etcd_of_three, job) as chain:
        chain.take_term()
        last = grow(chain, 3)
        etcd_of_three.kill(etcd_of_three.leader())
        assert append_patiently(chain, decide(ViewId(1, 4), last)).ok
        last = grow(chain, 3, ViewId(1, 4))
        assert [v.id.number for v in chain.load().views] == list(range(1, 8))


@pytest.mark.slow
def test_without_a_majority_nothing_is_written_and_nothing_pretended(etcd_of_three: EtcdServers, job: str) -> None:
    three = etcd_of_three.servers
    client = EtcdClient(EtcdAddress(servers=tuple(s.endpoint for s in three)), deadline_s=3.0)
    with etcd_chain(client, job) as chain:
        chain.take_term()
        last = grow(chain, 1)
        for server in three[:2]:
            etcd_of_three.kill(server)
        with pytest.raises(StoreError, match="is a majority of its servers up"):
            chain.append(decide(ViewId(1, 2), last))
        with pytest.raises(StoreError):
            chain.tip()  # the one that lives must not answer from what it has
        etcd_of_three.run(three[0])
        assert append_patiently(chain, decide(ViewId(1, 2), last)).ok
        assert [v.id.number for v in chain.load().views] == [1, 2]
