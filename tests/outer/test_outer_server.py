"""The leader's service with real gRPC, stores and state machine, and with scripted clusters and followers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from outer_served import AGREEMENT, OuterServed, Scripted, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from served import PATIENCE_S
from until_support import until

from chaos_lightning.errors import ConfigurationError, RefusedError, StoreError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.control_client import ask_end, fetch_facts
from chaos_lightning.outer.exchange.outer_pb2_grpc import ParameterServerStub
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.attendance import DEAD
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.effects import Heard
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Ended,
    IncarnationId,
    JobOpened,
    Joined,
    ProcessPlace,
    PushAnswer,
    PushId,
    Round,
    VersionId,
)
from chaos_lightning.outer.server import client_streams, leader_server
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import NODES, KeyHolder
from chaos_lightning.security.roles import CLUSTER, FOLLOWER, MEMBER, OBSERVER, OPERATOR
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import Store

TOKEN = b"a long enough token"


def finished(message: Any) -> bool:
    return isinstance(message, say.JobFinished)


def a_job(place: str, **more: Any) -> tuple[ScriptedFollower, ScriptedCluster]:
    return ScriptedFollower(place, **more), ScriptedCluster(place, **more)


def stores(kind: str, folder: Path) -> Callable[[], Store]:
    """Function that opens a store with the same chain at each call."""
    shelf = Shelf()
    if kind == "memory":
        return lambda: MemoryStore(shelf=shelf)
    return lambda: SqliteStore(folder / "chain.sqlite", "default", exclusive=True)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_job_is_founded_goes_on_under_a_second_leader_and_ends(kind: str, tmp_path: Path) -> None:
    opened = stores(kind, tmp_path)
    log = EventLog(tmp_path / "events.jsonl", role="leader")
    with outer_serving(opened, log=log) as first:
        follower, cluster = a_job(first.endpoint)
        with at_once(follower, cluster):
            founded = cluster.served(1)
            until(lambda: fetch_facts(first.endpoint, b"")["versions"]["durable"] == [str(founded)], "a durable mark")
            cluster.push()
            second = cluster.served(2)
            facts = fetch_facts(first.endpoint, b"")
    assert (facts["role"], facts["pid"], facts["phase"], facts["rounds"]) == ("leader", os.getpid(), "training", 1)
    assert (facts["accepted"], facts["rejected"], facts["void"]) == (2, 0, 0)
    (told,) = facts["clusters"]
    assert (told["name"], told["incarnation"], told["connected"], told["accepted"]) == ("home", 1, True, 2)
    (shard,) = facts["followers"]
    assert (shard["name"], shard["shard"], shard["version"]) == ("one", 0, str(second))

    with outer_serving(opened, log=log, port=first.server.port) as third:
        assert fetch_facts(third.endpoint, b"")["term"] == facts["term"] + 1
        follower, again = a_job(third.endpoint)
        follower.disk, follower.version, follower.term = (say.ShardFile(founded, "digest"),), second, facts["term"]
        again.me, again.base, again.newest, again.nonce = cluster.me, second, second, cluster.nonce
        with at_once(follower, again):
            assert again.heard.wait_for(say.Welcomed).first == 3
            words = ask_end(third.endpoint, "enough", b"", PATIENCE_S)
            assert "has ended" in words
            assert "enough" in words
            assert again.heard.wait(finished).version == second
        assert third.wait_ended() == ("the job has ended: enough", False)
    log.close()
    with opened() as store:
        chain = load_chain(store)
    assert chain.ended is not None
    seen = list(read_events(tmp_path / "events.jsonl"))
    names = [event.name for event in seen]
    assert names.count("outer_leader_started") == names.count("outer_leader_ended") == 2
    entries = [event for event in seen if event.name == "entry"]
    told = dict.fromkeys(entry["position"] for entry in entries)  # the last one is told again by the next leader
    assert list(told) == [*range(1, chain.position + 1)]
    assert entries[-1]["hash"] == chain.hash
    assert {JobOpened.__name__, Joined.__name__, Round.__name__, Ended.__name__} <= {e["kind"] for e in entries}
    assert {(e["of"], e["up"]) for e in seen if e.name == "cluster_stream"} == {("home", True), ("home", False)}
    assert {(e["of"], e["up"]) for e in seen if e.name == "follower_stream"} == {("one", True), ("one", False)}


class SlowFollower(ScriptedFollower):
    """Follower that stages no push but the first."""

    def answer(self, message: Any) -> None:
        if not (isinstance(message, say.Stage) and message.offer.push.number > 1):
            super().answer(message)


def test_the_end_voids_open_pushes_and_ends_incarnations_and_leases() -> None:
    shelf = Shelf()
    with outer_serving(lambda: MemoryStore(shelf=shelf)) as served:
        follower, cluster = SlowFollower(served.endpoint), ScriptedCluster(served.endpoint)
        with at_once(follower, cluster):
            cluster.served(1)
            cluster.push()
            until(lambda: fetch_facts(served.endpoint, b"")["clusters"][0]["offered"] != "", "the offer")
            ask_end(served.endpoint, "enough", b"", PATIENCE_S)
            answer = cluster.heard.wait(lambda m: isinstance(m, say.PushAnswered) and m.push.number == 2)
            assert (answer.answer, answer.reason) == (PushAnswer.VOID, "enough")
            cluster.heard.wait(finished)
            assert follower.heard.wait_for(say.DropPush).push == answer.push
            assert fetch_facts(served.endpoint, b"")["void"] == 1
    chain = load_chain(MemoryStore(shelf=shelf))
    assert chain.ended is not None
    assert [offer.push for offer in chain.ended.voided] == [answer.push]
    assert [known.over for known in chain.incarnations.values()] == ["the job has ended: enough"]


def test_who_comes_after_the_end_is_told(tmp_path: Path) -> None:
    with outer_serving() as served:
        follower, cluster = a_job(served.endpoint)
        with at_once(follower, cluster):
            cluster.served(1)
            ask_end(served.endpoint, "", b"", PATIENCE_S)
            late = ScriptedCluster(served.endpoint, "late")
            with at_once(late):
                assert "asked by" in late.heard.wait(finished).reason
            assert follower.heard.wait(finished).version == cluster.heard.wait(finished).version


def test_who_asked_for_an_end_in_vain_is_told_that_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: if no version became durable in time, the answer to `ps end` read like a failure, but the job ended
    later.
    """
    monkeypatch.setattr(leader_server, "_END_TIMEOUT_S", 0.05)

    class Slow(ScriptedFollower):
        def answer(self, message: Any) -> None:
            if not isinstance(message, say.Keep):
                super().answer(message)

    with outer_serving() as served:
        follower, cluster = Slow(served.endpoint), ScriptedCluster(served.endpoint)
        with at_once(follower, cluster):
            kept = follower.heard.wait_for(say.Keep)
            with pytest.raises(RefusedError, match=r"not become durable within 0.05 s; the job ends once it is: see"):
                ask_end(served.endpoint, "enough", b"", PATIENCE_S)
            follower.client.say(say.Written("one", kept.version, "digest"))
            assert "enough" in cluster.heard.wait(finished).reason


# ------------------------------------------------------------------------------------------------ who is let in


def test_a_wrong_token_is_refused_and_the_right_one_is_not() -> None:
    with outer_serving(secret=TOKEN) as served:
        wrong, right = ScriptedCluster(served.endpoint, secret=b"another token"), a_job(served.endpoint, secret=TOKEN)
        with at_once(wrong, *right):
            assert "wrong cluster token" in str(wrong.troubles.wait(lambda e: isinstance(e, RefusedError)))
            right[1].served(1)
            assert wrong.states.seen == []
        with pytest.raises(RefusedError, match="missing cluster token"):
            fetch_facts(served.endpoint, b"")
        assert fetch_facts(served.endpoint, TOKEN)["phase"] == "training"


def test_with_keys_each_role_may_do_its_part_and_data_connections_get_keys(tmp_path: Path) -> None:
    holders = [KeyHolder(role, role) for role in (FOLLOWER, CLUSTER, MEMBER, OBSERVER, OPERATOR)]
    keyfiles.init(tmp_path, holders)
    of = {holder.name: Credentials(keys=KeyFolder(tmp_path / NODES / holder.name)) for holder in holders}
    with outer_serving(secret=of[FOLLOWER]) as served:
        follower = ScriptedFollower(served.endpoint, secret=of[FOLLOWER])
        first, second = (ScriptedCluster(served.endpoint, role, secret=of[role]) for role in (CLUSTER, MEMBER))
        stranger = ScriptedFollower(served.endpoint, "two", secret=of[CLUSTER])
        with at_once(follower, first, second, stranger):
            assert "is for follower" in str(stranger.troubles.wait_for(RefusedError))
            first.served(1)
            second.served(1)
            for cluster in (first, second):
                (holder,) = cluster.heard.wait(lambda m: isinstance(m, say.Holders) and m.holders[0].key != b"").holders
                key = follower.heard.wait(lambda m, me=str(cluster.me): isinstance(m, say.LineKey) and m.peer == me)
                assert (key.name, key.key) == (holder.key_name, holder.key)
            for role in (CLUSTER, MEMBER, OBSERVER, OPERATOR):
                assert fetch_facts(served.endpoint, of[role])["phase"] == "training"
            for role in (CLUSTER, MEMBER, OBSERVER, FOLLOWER):
                with pytest.raises(RefusedError, match="End is for operator"):
                    ask_end(served.endpoint, "enough", of[role], PATIENCE_S)
            assert "enough" in ask_end(served.endpoint, "enough", of[OPERATOR], PATIENCE_S)


def test_nobody_listens_to_the_world_without_a_token() -> None:
    with pytest.raises(ConfigurationError, match="listening on"):
        OuterServed(host="0.0.0.0")


def speak(endpoint: str, *envelopes: Any) -> grpc.RpcError:
    """Sends these messages on a cluster's stream; returns the error with which the leader ends the stream."""
    with grpc.insecure_channel(endpoint) as channel:
        said = iter(envelopes)
        keep_open = threading.Event()

        def talk() -> Any:
            yield from said
            keep_open.wait(PATIENCE_S)

        call = ParameterServerStub(channel).Attend(talk())
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return error
        finally:
            keep_open.set()
    raise AssertionError("the leader closed the stream in good order")


def hello_of(name: str) -> Any:
    hello = say.ClusterHello(name, "here", "n", 0, None, NO_VERSION, NO_VERSION, AGREEMENT)
    return FROM_CLUSTER.wrap(hello)


def test_what_nobody_understands_ends_the_stream_and_only_that() -> None:
    with outer_serving() as served:
        follower, cluster = a_job(served.endpoint)
        with at_once(follower, cluster):
            cluster.served(1)
            unknown = outer_pb2.FromClusterEnvelope()
            unknown.MergeFromString(b"\xaa\x06\x02hi")  # a field of a later version
            assert cluster.me is not None
            beat = FROM_CLUSTER.wrap(say.Beat(cluster.me, 1.0, 1.0, NO_VERSION, 0, 0, leaving=True))
            for envelopes in ((hello_of("b"), unknown), (beat,), (hello_of("b"), beat), (hello_of("b"), hello_of("c"))):
                error = speak(served.endpoint, *envelopes)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            cluster.push()
            cluster.served(2)
            assert not next(c for c in fetch_facts(served.endpoint, b"")["clusters"] if c["name"] == "home")["leaving"]


def test_who_does_not_say_who_it_is_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with outer_serving() as served:
        served.server._streams._streams._hello_timeout_s = 0.05
        silent = Scripted(served.endpoint, "Follow")
        with at_once(silent):
            silent.states.wait(lambda state: state == "connected", 2)


def test_a_job_that_cannot_be_is_not_begun() -> None:
    with outer_serving() as served:
        odd = ScriptedCluster(served.endpoint, "odd")
        odd.agreement = replace(AGREEMENT, settings=(("no_such_setting", "1"),))
        follower, home = a_job(served.endpoint)
        with at_once(follower, odd):
            dismissed = odd.heard.wait_for(say.Dismissed)
            assert not dismissed.again
            assert "outer settings no_such_setting are unknown" in dismissed.reason
            with at_once(home):
                home.served(1)


def test_a_cluster_that_differs_is_told_in_what_and_from_whose() -> None:
    """A cluster whose agreement differs is refused, and told which value differs; each of these differences would train
    another model or order the data otherwise.
    """
    settings = OuterSettings(inner_steps=8).words
    tokenizer, seed = ("chaos_words.tokenizer", "1f"), ("data.seed", "0")
    compiled, layer = ("compiled", "nothing"), ("layer net", "Dropout(p=0.1)")
    usual = replace(AGREEMENT, settings=settings, words=(compiled, layer, tokenizer, seed))
    (weight,) = usual.tensors
    differing: dict[str, dict[str, Any]] = {
        "its tensor weight is float64[4], the job's is weight, float32[4]": {
            "tensors": (replace(weight, dtype="float64"),)
        },
        "its tensor weight is float32[5], the job's is weight, float32[4]": {"tensors": (replace(weight, shape=(5,)),)},
        "its model has 2 tensors, the job's has 1": {"tensors": (weight, replace(weight, name="more"))},
        "its chaos_words.tokenizer is 2e, the job's is 1f": {"words": (compiled, layer, (tokenizer[0], "2e"), seed)},
        "its data.seed is 1, the job's is 0": {"words": (compiled, layer, tokenizer, (seed[0], "1"))},
        "its inner_steps is 16, the job's is 8": {"settings": OuterSettings(inner_steps=16).words},
        "its layer net is Dropout(p=0.2), the job's is Dropout(p=0.1)": {
            "words": (compiled, ("layer net", "Dropout(p=0.2)"), tokenizer, seed)
        },
        "its script begins fit 2 of this job, the job is in fit 1, which may train on other samples, as folds do: give "
        "each fit a job name of its own": {"words": (*usual.words, ("fit", "2"))},
        "its codec is int8, the job's is bf16": {"codec": "int8"},
        "its length is 9, the job's is 0": {"length": 9},
    }
    with outer_serving() as served:
        follower, home = a_job(served.endpoint)
        home.agreement = usual
        with at_once(follower, home):
            home.served(1)
            for number, (words, change) in enumerate(differing.items()):
                odd = ScriptedCluster(served.endpoint, f"odd-{number}")
                odd.agreement = replace(usual, **change)
                with at_once(odd):
                    dismissed = odd.heard.wait_for(say.Dismissed)
                    assert not dismissed.again
                    said = f"odd-{number} cannot join this job, which home at a test began: {words}"
                    assert dismissed.reason == said
            same = ScriptedCluster(served.endpoint, "same")
            same.agreement = usual
            with at_once(same):
                same.served(1)


def test_a_job_of_an_older_release_compares_neither_layers_nor_hyperparameters() -> None:
    """The chain of an older release contains no layers or hyperparameters, so that only the other values are
    compared.
    """
    seed = ("data.seed", "0")
    old = replace(AGREEMENT, words=(seed,))
    new = replace(old, words=(("compiled", "nothing"), seed, ("hyperparameter lr", "1"), ("layer net", "ReLU()")))
    assert old.difference(new) == ""
    assert old.difference(replace(new, words=(("chaos_words.tokenizer", "1f"), *new.words))) != ""
    assert new.difference(old) != ""


@pytest.mark.parametrize(
    "stray",
    [
        say.Staged("f0", PushId(IncarnationId("a", 1), 1), "m", (), True),
        say.Applied("f0", NO_VERSION),
        say.Written("f0", NO_VERSION, "d"),
        say.Missing("f0", PushId(IncarnationId("a", 1), 1)),
        say.Trouble("f0", "its disk is full"),
    ],
)
def test_what_a_follower_says_before_its_hello_is_not_heeded(stray: Any) -> None:
    machine = LeaderMachine(OuterChain(), 1)
    assert machine.on(1.0, Heard(1, stray)) == []


def test_of_two_clusters_of_one_name_the_second_is_dismissed() -> None:
    with outer_serving() as served:
        follower, first = a_job(served.endpoint)
        second = ScriptedCluster(served.endpoint)
        with at_once(follower, first):
            first.served(1)
            with at_once(second):
                dismissed = second.heard.wait_for(say.Dismissed)
            assert not dismissed.again
            assert "a cluster called home is in already, at a test" in dismissed.reason
            first.push()
            first.served(2)


# ------------------------------------------------------------------------------------------------ of which job


@pytest.mark.parametrize("begun", [True, False])
def test_processes_of_another_job_are_sent_away_and_end_no_leader(begun: bool) -> None:
    with outer_serving() as served:
        follower, cluster = a_job(served.endpoint)
        old, f1 = ScriptedCluster(served.endpoint, "old"), ScriptedFollower(served.endpoint, "two")
        old.base = old.newest = f1.version = VersionId(57, "another's")
        old.job_id = f1.job_id = "0123456789abcdef"
        old.me, old.term, f1.term = IncarnationId("old", 3), 9, 9
        with at_once(follower):
            if begun:
                cluster.start()
                cluster.served(1)
            with at_once(old, f1):
                told = f1.heard.wait_for(say.Dismissed)
                assert (told.term, told.again) == (9, False)
                refused = old.troubles.wait(lambda error: isinstance(error, RefusedError))
                here = f"job {cluster.job_id[:8]}, which home at a test began" if begun else "no job yet"
                for name, words in (("two", told.reason), ("old", str(refused))):
                    assert f"{name} is of job 01234567, and this server has {here}" in words
            if not begun:
                cluster.start()
                cluster.served(1)
            cluster.push()
            cluster.served(2)
            cluster.close()


def test_who_knows_more_than_its_own_jobs_store_ends_the_leader_and_all_are_told_why() -> None:
    with outer_serving() as served:
        follower, cluster = a_job(served.endpoint)
        ahead = ScriptedCluster(served.endpoint, "ahead")
        with at_once(follower, cluster):
            cluster.served(1)
            ahead.job_id, ahead.base = cluster.job_id, VersionId(57, "of this job")
            with at_once(ahead):
                reason, failed = served.wait_ended()
                assert failed
                assert "ahead knows version v57" in reason
                for each in (cluster, ahead, follower):
                    why = each.states.wait(lambda state: "leads no more" in state)
                    assert reason in why


# ------------------------------------------------------------------------------------------------ who has gone


def test_a_dead_process_of_this_machine_is_proof(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        place = ProcessPlace(host_identity(), child.pid, start_time(child.pid))
        with outer_serving() as served:
            follower, lives, dies = *a_job(served.endpoint), ScriptedCluster(served.endpoint, "dies", place)
            with at_once(follower, lives):
                lives.served(1)
                with at_once(dies):
                    dies.served(1)
                    child.kill()
                    child.wait()

                def names() -> list[str]:
                    return [c["name"] for c in fetch_facts(served.endpoint, b"")["clusters"]]

                until(lambda: names() == ["home"], "the dead cluster's removal", 2.5)


@pytest.mark.parametrize("lives", [False, True])
def test_a_process_that_died_while_the_server_was_away_is_not_waited_for(tmp_path: Path, *, lives: bool) -> None:
    """Former bug: a push's process had died while the server was away, but clusters waited `last_holder_timeout_s` for
    it, though its pid was gone.
    """

    def store() -> SqliteStore:
        return SqliteStore(tmp_path / "chain.sqlite")

    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        place = ProcessPlace(host_identity(), child.pid, start_time(child.pid))
        with outer_serving(store) as served:
            follower, cluster = a_job(served.endpoint)
            cluster.process = place
            with at_once(follower, cluster):
                cluster.served(1)
                cluster.push()
                cluster.served(2)
        if not lives:
            child.kill()
            child.wait()
        with outer_serving(store) as served:
            assert served.server._machine is not None
            chain = served.server._machine.chain
            if not lives:
                until(lambda: [known.over for known in chain.incarnations.values()] == [DEAD], "its removal", 5.0)
            else:
                absent = served.server._machine.attendance.absent
                until(lambda: list(absent().values()) == [place], "that it is away", 5.0)
                assert not any(known.over for known in chain.incarnations.values())
        child.kill()


def test_a_stream_that_ends_is_no_proof_while_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_streams, "_PROOF_S", 0.01)
    with outer_serving() as served:
        follower, cluster = a_job(served.endpoint)
        with at_once(follower):
            with at_once(cluster):
                cluster.served(1)

            def connected() -> list[bool]:
                return [c["connected"] for c in fetch_facts(served.endpoint, b"")["clusters"]]

            until(lambda: connected() == [False], "the end of its stream")


# ------------------------------------------------------------------------------------------------ who leads


class PlainStanding:
    """Candidacy of a leader that is elected when the test says so."""

    def __init__(self) -> None:
        self.place = ""
        self.elect: Callable[[], None] = lambda: None
        self.lose: Callable[[str], None] = lambda reason: None

    def stand(self, endpoint: str, on_elected: Any, on_lost: Any, note: Any, present: Any) -> None:
        self.elect, self.lose = on_elected, on_lost

    def waits(self, what: str) -> tuple[str, str]:
        return f"this {what} waits to lead", self.place

    def facts(self) -> dict[str, Any]:
        return {"leader": self.place}

    def close(self) -> None:
        pass


def test_a_standby_sends_all_to_the_leader_and_a_deposed_leader_ends() -> None:
    standing = PlainStanding()
    with outer_serving() as leads, outer_serving(standing=standing) as waits:
        standing.place = leads.endpoint
        follower, cluster = a_job(waits.endpoint)
        with at_once(follower, cluster):
            cluster.served(1)
            assert fetch_facts(waits.endpoint, b"", follow=False)["role"] == "standby"
            assert fetch_facts(waits.endpoint, b"")["endpoint"] == leads.endpoint
            assert "has ended" in ask_end(waits.endpoint, "enough", b"", PATIENCE_S)
        standing.elect()
        standing.place = waits.endpoint
        until(lambda: fetch_facts(waits.endpoint, b"")["role"] == "leader", "its election")
        standing.lose("its lease has ended")
        assert waits.wait_ended() == ("it leads no more: its lease has ended", True)


def test_who_comes_to_a_leader_that_leads_no_more_is_told_so() -> None:
    """Former bug: a stream that was opened after a leader was deposed, and before its process ended, stayed open."""
    with outer_serving() as served:
        served.loop.call_soon_threadsafe(served.server._streams.end_all, "another one rules")
        follower = ScriptedFollower(served.endpoint)
        with at_once(follower):
            follower.states.wait(lambda state: "leads no more: another one rules" in state)


def test_a_leader_whose_store_another_one_took_ends() -> None:
    shelf = Shelf()
    with outer_serving(lambda: MemoryStore(shelf=shelf)) as late:
        MemoryStore(shelf=shelf).take_term()
        with at_once(ScriptedFollower(late.endpoint)):
            reason, failed = late.wait_ended()
        assert failed
        assert "another leader rules" in reason


def test_a_store_that_fails_for_good_ends_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.service.writer.PATIENCE_S", 0.3)

    class Broken(MemoryStore):
        def append(self, *_: Any, **__: Any) -> Any:
            raise StoreError("no space left")

    with outer_serving(Broken) as served, at_once(ScriptedFollower(served.endpoint)):
        assert served.wait_ended() == ("the store failed: no space left", True)


def test_one_that_no_cluster_needs_ends() -> None:
    with outer_serving(idle_timeout_s=0.2) as served:
        assert served.wait_ended()[0].startswith("no cluster for 0.2 s; the chain stays in memory")
