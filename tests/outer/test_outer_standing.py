"""Several leaders that stand by for each other, with their chain in a real etcd."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from etcd_for_tests import servers
from forked_support import run
from outer_job_support import LEADER
from outer_served import PATIENCE_S, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from until_support import until

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.events.events import read_events
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.observe.audit import VIOLATED
from chaos_lightning.observe.outer.audit import audit_folder
from chaos_lightning.outer.exchange.control_client import ask_end, fetch_facts
from chaos_lightning.outer.exchange.server_options import LeaderOptions
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.outer.server.standing import candidacy_of, open_outer_store, over
from chaos_lightning.service.etcd_client import put
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.testing.harness import Harness


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with servers(tmp_path_factory.mktemp("etcd"), 1) as started:
        yield started


@contextmanager
def leader(etcd: EtcdServers, job: str, *, keep_finished: bool = False) -> Iterator[str]:
    """Runs a leader in this process; yields its endpoint."""
    standing = candidacy_of(etcd.address, job)
    open_store = functools.partial(standing.open_store, lambda store: "" if keep_finished else over(store))
    with outer_serving(open_store, standing=standing, job=job) as served:
        yield served.endpoint


def role(endpoint: str) -> str:
    return str(fetch_facts(endpoint, b"", follow=False)["role"])


def test_the_second_leads_when_the_first_is_gone_and_the_job_goes_on(etcd: EtcdServers) -> None:
    with ExitStack() as stack:
        first_ends = stack.enter_context(ExitStack())
        first = first_ends.enter_context(leader(etcd, "goes-on"))
        until(lambda: role(first) == "leader", "its election")
        second = stack.enter_context(leader(etcd, "goes-on"))
        both = f"{first},{second}"
        follower, cluster = ScriptedFollower(both), ScriptedCluster(both)
        with at_once(follower, cluster):
            cluster.served(1)
            until(lambda: fetch_facts(second, b"", follow=False)["leader"] == first, "its look at the leader")
            facts = fetch_facts(second, b"", follow=False)
            assert facts["role"] == "standby"
            assert facts["candidates"] == sorted([first, second])
            first_ends.close()
            cluster.heard.wait_for(say.Welcomed, 2)
            cluster.push()
            cluster.served(2)
            facts = fetch_facts(both, b"")
            assert (facts["endpoint"], facts["term"], facts["accepted"]) == (second, 2, 2)
            ask_end(both, "enough", b"", PATIENCE_S)
    with leader(etcd, "goes-on", keep_finished=True) as third:
        until(lambda: role(third) == "leader", "its election")
        assert fetch_facts(third, b"")["phase"] == "ended"
    with leader(etcd, "goes-on") as fourth:
        until(lambda: role(fourth) == "leader", "its election")
        assert fetch_facts(fourth, b"")["phase"] == "opening"


@contextmanager
def process(etcd: EtcdServers, job: str, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "chaos_lightning.outer.commands.leader_main", f"--listen=127.0.0.1:{port}"]
    command += [f"--store={etcd.address}", f"--job={job}"]
    with (folder / f"{port}.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_frozen_leader_is_deposed_and_stands_by_again(etcd: EtcdServers, tmp_path: Path) -> None:
    ports = free_ports(2)
    first, second = (f"127.0.0.1:{port}" for port in ports)

    def is_now(endpoint: str, what: str) -> bool:
        try:
            return role(endpoint) == what
        except ChaosError:
            return False

    with process(etcd, "frozen", ports[0], tmp_path) as frozen:
        until(lambda: is_now(first, "leader"), "its election")
        with process(etcd, "frozen", ports[1], tmp_path) as other:
            until(lambda: is_now(second, "standby"), "its start")
            follower = ScriptedFollower(f"{first},{second}")
            with at_once(follower):
                follower.states.wait(lambda state: state == "connected")
                frozen.send_signal(signal.SIGSTOP)
                until(lambda: is_now(second, "leader"), "the other one's election")
                follower.states.wait(lambda state: state == "connected", 2)
                frozen.send_signal(signal.SIGCONT)
                until(lambda: is_now(first, "standby"), "its standing by again")
                until(lambda: fetch_facts(first, b"")["endpoint"] == second, "its look at the leader")
            other.terminate()
            assert other.wait(PATIENCE_S) == 128 + signal.SIGTERM
        until(lambda: is_now(first, "leader"), "its election again")
    assert "stands by again" in (tmp_path / f"{ports[0]}.log").read_text()


FROZEN_S = 10.0


@pytest.mark.slow
def test_a_leader_that_wakes_two_terms_later_stores_nothing_and_nobody_heeds_it(
    etcd: EtcdServers, tmp_path: Path
) -> None:
    job, names = "two-terms", "abc"
    places = dict(zip(names, (f"127.0.0.1:{port}" for port in free_ports(3)), strict=True))

    def is_now(name: str, what: str) -> bool:
        try:
            return role(places[name]) == what
        except ChaosError:
            return False

    with Harness(tmp_path, deadline_s=90) as harness:
        for name in names:
            arguments = ["--listen", places[name], "--store", etcd.address, "--job", job]
            harness.start_function(name, run, LEADER, [*arguments, "--log-dir", str(harness.logs)])
            harness.wait_until(lambda: is_now("a", "leader"), "the first one's election")
        late_log = next(harness.logs.glob(f"leader-{job}-{harness.children['a'].pid}*"))
        follower, cluster = (kind(",".join(places.values())) for kind in (ScriptedFollower, ScriptedCluster))

        def beating(done: bool) -> bool:
            if cluster.me is not None:
                cluster.beat()
            return done

        with at_once(follower, cluster):
            cluster.served(1)
            harness.stop("a")
            stopped_s = time.monotonic()
            cluster.push()  # it lies in the sleeper's socket, and is offered to the next ones again
            waiting, leads = ["b", "c"], ""  # either of them may be the next one
            for number in (2, 3):
                if leads:
                    harness.declare(leads)
                    harness.kill(leads)
                    waiting.remove(leads)
                harness.wait_until(lambda: beating(any(is_now(n, "leader") for n in waiting)), "the next election")
                leads = next(name for name in waiting if is_now(name, "leader"))
                cluster.heard.wait_for(say.Welcomed, number)
                until(lambda n=number: cluster.number == n, "the answer to the push before")
                cluster.push()
                cluster.served(number)
            harness.wait_until(lambda: beating(time.monotonic() - stopped_s > FROZEN_S), "the end of its sleep")
            heard = len(cluster.heard.seen), len(follower.heard.seen)
            harness.cont("a")
            harness.wait_until(lambda: beating(is_now("a", "standby")), "its standing by again")
            until(lambda: fetch_facts(places["a"], b"")["endpoint"] == places[leads], "its look at the leader")
            cluster.push()
            cluster.served(4)
            for each, known in zip((cluster, follower), heard, strict=True):
                assert {message.term for message in each.heard.seen[known:]} == {3}
                assert each.states.seen.count("connected") == 3
            ask_end(places[leads], "enough", b"", PATIENCE_S)
        harness.declare("a")
        harness.terminate("a")
        assert harness.wait_exit("a") == 128 + signal.SIGTERM
        harness.wait_all()
    with open_outer_store(etcd.address, job) as store:
        terms = [record.term for record in store.read()[1]]
        assert load_chain(store).ended is not None
    assert terms == sorted(terms)
    assert set(terms) == {1, 2, 3}
    stored = [record["ok"] for record in read_events(late_log) if record.name == "stored"]
    assert terms.count(1) - stored.count(True) in (0, 1), "one may have been on its way when it was stopped"
    (judged,) = audit_folder(harness.logs)
    assert [str(finding) for finding in judged.findings if finding.verdict == VIOLATED] == []


def test_a_candidate_must_say_where_it_is_reached() -> None:
    with pytest.raises(ConfigurationError, match="--advertise"):
        LeaderOptions(listen="0.0.0.0:1", store="etcd://127.0.0.1:1")


def test_a_chain_of_an_older_format_is_refused_with_both_formats_and_left_as_it_is(
    etcd: EtcdServers, tmp_path: Path
) -> None:
    job, (port,) = "older-format", free_ports(1)
    with leader(etcd, job) as led:
        follower, cluster = ScriptedFollower(led), ScriptedCluster(led)
        with at_once(follower, cluster):
            cluster.served(1)
    store: Any = open_outer_store(etcd.address, job)
    with store:
        key = store._key("tip")
        older = json.dumps({**json.loads(store._client.get(key).value), "format": 2}).encode()
        store._client.transact([], [put(key, older)])
        before = store._client.get_all(store._key(""))[0]
        with process(etcd, job, port, tmp_path) as started:
            assert started.wait(PATIENCE_S) != 0
        assert store._client.get_all(store._key(""))[0] == before
    said = (tmp_path / f"{port}.log").read_text()
    assert "has format 2, this version reads 3; finish the job with the version that began it" in said
