"""Leaders that stand by for each other, with their chain in a real etcd."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from etcd_for_tests import servers
from outer_served import PATIENCE_S, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from until_support import until

from chaos_lightning.control.etcd_servers import EtcdServers
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.outer import messages as say
from chaos_lightning.outer.control_client import ask_end, fetch_facts
from chaos_lightning.outer.options import LeaderOptions
from chaos_lightning.outer.standing import OuterCandidacy


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with servers(tmp_path_factory.mktemp("etcd"), 1) as started:
        yield started


@contextmanager
def leader(etcd: EtcdServers, job: str, *, keep_finished: bool = False) -> Iterator[str]:
    """One in this process; its endpoint."""
    standing = OuterCandidacy(etcd.address, job, keep_finished=keep_finished)
    with outer_serving(standing.open_store, standing=standing, job=job) as served:
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
    command = [sys.executable, "-m", "chaos_lightning.outer.leader_main", f"--listen=127.0.0.1:{port}"]
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


def test_a_candidate_must_say_where_it_is_reached() -> None:
    with pytest.raises(ConfigurationError, match="--advertise"):
        LeaderOptions(listen="0.0.0.0:1", store="etcd://127.0.0.1:1")
