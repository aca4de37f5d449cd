"""Tests schedulers started in the background: by racing starters, continued after SIGKILL, archived when finished."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from served import PATIENCE_S, Client, attending, first_words, hello, scheduler_process, serving
from until_support import until

from chaos_lightning.control import hosting
from chaos_lightning.control.hosting import ensure_scheduler, look
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.control.scheduler_main import main, open_store
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.errors import ConfigurationError, RefusedError, SchedulerUnreachableError, StoreError
from chaos_lightning.machine.listener import free_port, free_ports
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, Member, OpenLinks, Ready, Refused, Settings, View, ViewId
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.hosting import HostedProcess
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.options import MEMORY
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.settings import EngineConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def started() -> Iterator[list[HostedProcess]]:
    """List to which tests add schedulers; each is ended after the test."""
    found: list[HostedProcess] = []
    yield found
    for scheduler in found:
        assert scheduler.stop()


def options(endpoint: str, **settings: object) -> SchedulerOptions:
    values = {"job": "job", "reconnect_grace_s": 0.5, **settings}
    return SchedulerOptions(listen=endpoint, settings=Settings(**values), idle_timeout_s=60.0)  # type: ignore[arg-type]


def keep(started: list[HostedProcess], scheduler: HostedProcess | None) -> HostedProcess:
    assert scheduler is not None
    started.append(scheduler)
    return scheduler


def kill(scheduler: HostedProcess) -> None:
    handle = os.pidfd_open(scheduler.pid)
    with contextlib.closing(os.fdopen(handle, "rb", closefd=True)):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        import select

        assert select.select([handle], [], [], PATIENCE_S)[0]


def test_two_candidates_of_one_machine_have_logs_of_their_own_and_are_named_as_they_are_told(
    etcd: EtcdServers, started: list[HostedProcess], tmp_path: Path
) -> None:
    job, found = f"job-{os.urandom(4).hex()}", []
    with socket.socket() as gate:  # a relay: it only needs an address
        gate.bind(("127.0.0.1", 0))
        gate.listen()
        place = f"127.0.0.1:{gate.getsockname()[1]}"
        for port, advertise in zip(free_ports(2), (place, ""), strict=True):
            own = replace(
                options(f"127.0.0.1:{port}", job=job), store=etcd.address, log_dir=str(tmp_path), advertise=advertise
            )
            found.append(keep(started, ensure_scheduler(own)))
            until(lambda: fetch_status(found[0].endpoint)["role"] == "leader", "the first one's lead")
        first, second = found
        until(lambda: fetch_status(second.endpoint, follow=False).get("leader") == place, "a standby that names it")
        assert fetch_status(first.endpoint)["endpoint"] == place
    names = {f"scheduler-127.0.0.1_{s.endpoint.rpartition(':')[2]}.log" for s in found}
    assert {s.log.name for s in found} == names
    for one in found:
        assert one.log.parent == tmp_path
        assert one.log.read_text().count(f"(pid {one.pid},") == 1
        assert one.log.read_text().startswith("scheduler of job")


def founder(endpoint: str, name: str = "a", job: str = "job") -> Client:
    """Returns a member that is ready as soon as it is told its links."""
    client = Client(endpoint, name, job=job)
    client.answer = lambda message: [Ready()] if isinstance(message, OpenLinks) else []
    return client


def test_a_free_local_endpoint_is_served_and_a_second_look_finds_it(
    endpoint: str, started: list[HostedProcess], tmp_path: Path
) -> None:
    assert look(endpoint, "job", b"") == "free"
    scheduler = keep(started, ensure_scheduler(options(endpoint, min_nodes=2)))
    assert scheduler.alive()
    assert ensure_scheduler(options(endpoint)) is None
    facts = fetch_status(endpoint)
    assert (facts["job"], facts["min_nodes"], facts["pid"], facts["term"]) == ("job", 2, scheduler.pid, 1)
    assert (
        scheduler.store
        == tmp_path / "state" / "chaos-lightning" / f"job-{endpoint.rpartition(':')[2]}" / "chain.sqlite"
    )
    assert scheduler.log.read_text().startswith("scheduler of job job at 127.0.0.1:")
    process = psutil.Process(scheduler.pid)
    assert os.getsid(scheduler.pid) == scheduler.pid
    assert process.ppid() != os.getpid()
    assert process.cwd() == "/"
    assert scheduler.stop()
    assert not scheduler.alive()
    assert scheduler.stop()
    assert "ends: stopped by SIGTERM" in scheduler.log.read_text()


def test_the_token_is_handed_over_but_not_on_the_command_line(endpoint: str, started: list[HostedProcess]) -> None:
    token = b"a token of its own"
    scheduler = keep(started, ensure_scheduler(options(endpoint), token))
    assert not any("token of its own" in word for word in psutil.Process(scheduler.pid).cmdline())
    with pytest.raises(RefusedError, match="cluster token"):
        ensure_scheduler(options(endpoint), b"not the token")
    assert look(endpoint, "job", token) == "serves"


def test_another_machines_endpoint_is_its_own_affair() -> None:
    assert ensure_scheduler(options("192.0.2.1:29400")) is None


def test_another_jobs_scheduler_is_named(endpoint: str, started: list[HostedProcess]) -> None:
    keep(started, ensure_scheduler(options(endpoint)))
    with pytest.raises(ConfigurationError, match="of job 'job', not of 'other'"):
        ensure_scheduler(options(endpoint, job="other"))


def test_something_else_at_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.service.hosting.ODD_LISTENER_PATIENCE_S", 0.0)
    stop = threading.Event()

    def hang_up(server: socket.socket) -> None:
        server.settimeout(0.1)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=hang_up, args=(server,))
        thread.start()
        try:
            with pytest.raises(RefusedError, match="is no scheduler"):
                ensure_scheduler(options(f"127.0.0.1:{server.getsockname()[1]}"))
        finally:
            stop.set()
            thread.join()


def test_beyond_loopback_nothing_is_started_without_a_token() -> None:
    with pytest.raises(ConfigurationError, match="cluster token"):
        ensure_scheduler(options("0.0.0.0:29400"))


def test_of_racing_starters_one_wins_and_all_find_it(endpoint: str, started: list[HostedProcess]) -> None:
    results: list[HostedProcess | Exception | None] = []
    gate = threading.Barrier(3)

    def race() -> None:
        gate.wait()
        try:
            results.append(ensure_scheduler(options(endpoint)))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [r for r in results if isinstance(r, HostedProcess)]
    started.extend(winners)
    assert not [r for r in results if isinstance(r, Exception)]
    assert [w.pid for w in winners] == [fetch_status(endpoint)["pid"]]
    assert fetch_status(endpoint)["term"] == 1


def test_a_scheduler_that_cannot_start_is_quoted(endpoint: str, tmp_path: Path) -> None:
    store = tmp_path / "chain"
    store.write_bytes(b"no chain at all, but something precious" * 50)
    odd = SchedulerOptions(listen=endpoint, settings=Settings(job="job"), store=str(store))
    with pytest.raises(SchedulerUnreachableError, match="move it away"):
        ensure_scheduler(odd)


def test_after_sigkill_the_chain_is_continued(endpoint: str, started: list[HostedProcess]) -> None:
    first = keep(started, ensure_scheduler(options(endpoint)))
    client = founder(endpoint)
    try:
        client.messages.wait(lambda m: type(m).__name__ == "Decide")
        kill(first)
        client.states.wait(lambda s: s.startswith("lost"))
        second = keep(started, ensure_scheduler(options(endpoint), continue_only=True))
        assert second.pid != first.pid
        client.states.wait(lambda s: s == "connected", count=2)
        facts = fetch_status(endpoint)
        assert facts["term"] == 2
        assert second.store is not None
        with JobChain(SqliteStore(second.store, "job", read_only=True)) as store:
            views = [e.view for e in store.entries() if e.view]
        assert views[0].ids() == ("a~1",)
    finally:
        client.close()


def test_an_agent_revives_its_scheduler(endpoint: str, started: list[HostedProcess]) -> None:
    first = keep(started, ensure_scheduler(options(endpoint)))

    revived = threading.Event()

    def revive() -> None:
        scheduler = ensure_scheduler(options(endpoint), continue_only=True)
        if scheduler is not None:
            started.append(scheduler)
            revived.set()

    with attending(endpoint, job="job", revive=revive, resumes=False) as client:
        client.states.wait(lambda s: s == "connected")
        kill(first)
        client.states.wait(lambda s: s == "connected", count=2)
        assert revived.wait(PATIENCE_S), "whoever connected again was served by somebody else"


def test_nobody_hosts_a_scheduler_that_lacks_the_jobs_chain(endpoint: str, started: list[HostedProcess]) -> None:
    chosen = options(endpoint)
    assert chosen.store_path is not None
    with pytest.raises(StoreError, match=r"goes by chain 0123456.* holds none\. Start one there on the store"):
        ensure_scheduler(chosen, continue_only=True, chain="0123456789abcdef")
    assert look(endpoint, "job", b"") == "free"
    with JobChain(SqliteStore(chosen.store_path, "job")) as store:
        store.take_term()
        chain = store.tip().chain
    with pytest.raises(StoreError, match=f"holds chain {chain[:4]}"):
        ensure_scheduler(chosen, continue_only=True, chain="0123456789abcdef")
    keep(started, ensure_scheduler(chosen, continue_only=True, chain=chain))


def test_a_hosted_scheduler_that_lacks_the_chain_gives_the_endpoint_up() -> None:
    """A scheduler that a member started ends if members know a chain that its store lacks; one of an operator's, or
    with members of its own, stays.
    """
    stands = {"resume": "a~1", "view": ViewId(1, 7), "term": 1, "chain": "0123456789abcdef"}
    for gives_way, founds in ((True, False), (False, False), (True, True)):
        with serving(machine=real_machine, gives_way=gives_way) as served:
            own = founder(served.endpoint, "b", job="default") if founds else None
            try:
                if own is not None:
                    own.messages.wait(lambda m: type(m).__name__ == "Decide")
                with attending(served.endpoint, "a", hello_factory=lambda: hello("a", **stands)) as member:
                    if gives_way and not founds:
                        reason, failed = served.wait_ended()
                        assert failed
                        assert "gives the endpoint up" in reason
                    else:
                        member.messages.wait(lambda m: isinstance(m, Refused), count=2)
                        assert served.outcome is None
            finally:
                if own is not None:
                    own.close()


@pytest.mark.parametrize("seen", [True, False])
def test_who_started_a_scheduler_that_gave_the_endpoint_up_waits_as_others_do(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """`ensure_scheduler` returns None if the scheduler that it started gave up the endpoint, whether or not it was seen
    serving.
    """
    spawn, spawned = hosting._spawn, list[HostedProcess]()

    def spawned_and_gone(*given: Any) -> HostedProcess:
        spawned.append(spawn(*given))
        return spawned[-1]

    def look_when_it_is_gone(*given: Any) -> str:
        if not spawned:
            return look(*given)
        until(lambda: not spawned[-1].alive(), "the end of the scheduler")
        if seen:  # and it ended when it had been found alive
            monkeypatch.setattr(HostedProcess, "alive", lambda self: True)
        return "serves" if seen else look(*given)

    monkeypatch.setattr(hosting, "_spawn", spawned_and_gone)
    monkeypatch.setattr(hosting, "look", look_when_it_is_gone)
    stands = {"resume": "a~1", "view": ViewId(1, 7), "term": 1, "chain": "0123456789abcdef", "job": "job"}
    with attending(endpoint, "a", hello_factory=lambda: hello("a", **stands)):
        assert ensure_scheduler(options(endpoint)) is None
    assert len(spawned) == 1


def test_nobody_takes_the_port_of_the_scheduler_that_a_hosted_one_gave_way_to(
    endpoint: str, started: list[HostedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while after a scheduler gave up the endpoint none is started there, since the right one may be about to
    start.
    """
    monkeypatch.setattr(hosting, "GAVE_WAY_PAUSE_S", 600.0)  # a busy machine may take longer than the usual pause
    stands = {"resume": "a~1", "view": ViewId(1, 7), "term": 1, "chain": "0123456789abcdef", "job": "job"}
    with attending(endpoint, "a", hello_factory=lambda: hello("a", **stands)):
        first = ensure_scheduler(options(endpoint))
        if first is not None:
            until(lambda: not first.alive(), "the end of the scheduler")
    for continue_only in (True, False):
        assert ensure_scheduler(options(endpoint), continue_only=continue_only) is None
        assert look(endpoint, "job", b"") == "free"
    monkeypatch.setattr(hosting, "GAVE_WAY_PAUSE_S", 0.0)
    keep(started, ensure_scheduler(options(endpoint), continue_only=True))


def leftover(chain: str) -> MemoryStore:
    """Returns a store whose chain has one view, of a member that is gone."""
    store = MemoryStore()
    job = JobChain(store)
    view = View(ViewId(job.take_term(0, chain), 1), NO_VIEW, (Member("z~1", "z", "elsewhere", "10.0.0.9", 1),))
    assert job.append(Persist(1, "view", view.id, view)).ok
    return store


@pytest.mark.parametrize("chain", ["fedcba9876543210", "0123456789abcdef"])
def test_a_hosted_scheduler_on_a_leftover_or_an_older_copy_gives_the_endpoint_up(chain: str) -> None:
    """A scheduler on a leftover chain gives up the endpoint, once that chain's own members have had time to come
    back.
    """
    stands = hello("a", resume="a~1", view=ViewId(1, 7), term=1, chain="0123456789abcdef")
    rules = Settings(reconnect_grace_s=0.2)
    made = lambda: leftover(chain)  # noqa: E731
    with serving(machine=real_machine, gives_way=True, open_store=made, settings=rules) as served:
        with attending(served.endpoint, "a", hello_factory=lambda: stands):
            reason, failed = served.wait_ended()
        assert failed
        assert "gives the endpoint up" in reason


def test_a_hosted_scheduler_whose_own_members_are_here_stays() -> None:
    stands = hello("a", resume="a~1", view=ViewId(1, 7), term=1, chain="0123456789abcdef")
    rules = Settings(reconnect_grace_s=0.2)
    with serving(machine=real_machine, gives_way=True, settings=rules) as served:
        own = founder(served.endpoint, "b", job="default")
        try:
            own.messages.wait(lambda m: type(m).__name__ == "Decide")
            with attending(served.endpoint, "a", hello_factory=lambda: stands) as member:
                member.messages.wait(lambda m: isinstance(m, Refused), count=3)
            assert served.outcome is None
        finally:
            own.close()


def finished_chain(path: Path) -> None:
    with JobChain(SqliteStore(path, "job")) as store:
        store.take_term()
        view = View(ViewId(1, 1), NO_VIEW, ())
        assert store.append(Persist(1, "view", view.id, view)).ok
        assert store.append(Persist(2, "finish", ViewId(1, 2))).ok


def test_a_finished_chain_is_archived_and_a_new_one_begins(
    endpoint: str, started: list[HostedProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "chaos_lightning.control")
    chosen = options(endpoint)
    assert chosen.store_path is not None
    finished_chain(chosen.store_path)
    scheduler = keep(started, ensure_scheduler(chosen))
    assert fetch_status(endpoint)["machine"]["phase"] == "founding"
    archived = list(chosen.store_path.parent.glob("chain.finished-*.sqlite"))
    assert len(archived) == 1
    assert str(archived[0]) in scheduler.log.read_text()
    (told,) = [r.getMessage() for r in caplog.records if r.name == "chaos_lightning.control"]
    assert f"job 'job' was finished; a new job by that name begins at {endpoint}" in told


def test_a_restarted_worker_does_not_begin_a_finished_job_again(endpoint: str) -> None:
    chosen = options(endpoint)
    assert chosen.store_path is not None
    finished_chain(chosen.store_path)
    with pytest.raises(RefusedError, match="job 'job' is finished"):
        ensure_scheduler(chosen, continue_only=True)
    assert look(endpoint, "job", b"") == "free"
    in_memory = SchedulerOptions(listen=endpoint, settings=Settings(job="job"), store=MEMORY)
    assert ensure_scheduler(in_memory, continue_only=True) is None


def test_a_worker_that_torchrun_restarted_begins_no_job_itself(
    endpoint: str, tmp_path: Path, started: list[HostedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that torchrun restarted begins no new job if its job has finished; one started for the first time
    does.
    """
    chain = tmp_path / "chain.sqlite"
    finished_chain(chain)
    monkeypatch.setenv("CHAOS_STORE", str(chain))
    config = EngineConfig.build({"endpoint": endpoint, "job": "job"})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RefusedError, match="job 'job' is finished"):
        hosting.host_for_engine(config)
    assert look(endpoint, "job", b"") == "free"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    keep(started, hosting.host_for_engine(config))


def test_a_finished_chain_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    finished_chain(path)
    chosen = SchedulerOptions(listen="h:1", settings=Settings(job="job"), store=str(path), keep_finished=True)
    with JobChain(open_store(chosen)) as store:
        assert store.tip().finished


def test_a_lingering_scheduler_of_the_finished_job_is_waited_out(
    endpoint: str, started: list[HostedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(endpoint.rpartition(":")[2])
    with serving(port=port, settings=Settings(job="job")) as served, attending(endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        served.server._done_reason = "finished"  # its members have not gone yet
        with pytest.raises(RefusedError, match="is finished"):
            ensure_scheduler(options(endpoint), continue_only=True)
        with pytest.raises(SchedulerUnreachableError, match="the finished job's scheduler does not end"):
            ensure_scheduler(options(endpoint), timeout_s=0.2)
        looks = []
        original = hosting.look

        def looking(*args: str, **kwargs: bytes) -> str:
            looks.append(original(*args, **kwargs))  # type: ignore[arg-type]
            if len(looks) == 2:
                served.stop()
            return looks[-1]

        monkeypatch.setattr(hosting, "look", looking)
        keep(started, ensure_scheduler(options(endpoint)))
    assert looks[0] == "finished"
    assert looks[-1] == "serves"


def test_options_come_from_the_members_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(job="j", min_nodes=2, max_nodes=5, plan="chain", heartbeat_timeout_s=0.14, log_dir="logs")
    found = hosting.options_for_engine(config)
    assert found.listen == "127.0.0.1:29400"
    assert found.log_dir == "logs"
    settings = found.settings
    assert (settings.job, settings.min_nodes, settings.max_nodes, settings.plan.kind) == ("j", 2, 5, "chain")
    assert settings.heartbeat_timeout_s == 0.14
    assert settings.heartbeat_interval_s == pytest.approx(0.14 / 3)
    monkeypatch.setenv("CHAOS_SETTINGS", '{"hang_timeout_s": 3.5, "job": "ignored"}')
    monkeypatch.setenv("CHAOS_STORE", "/x/chain")
    found = hosting.options_for_engine(config)
    assert (found.settings.hang_timeout_s, found.settings.job, found.store) == (3.5, "j", "/x/chain")
    assert found.idle_timeout_s == 0.0  # the default of ensure_scheduler
    monkeypatch.setenv("CHAOS_IDLE_TIMEOUT_S", "7.5")
    assert hosting.options_for_engine(config).idle_timeout_s == 7.5
    monkeypatch.setenv("CHAOS_IDLE_TIMEOUT_S", "long")
    with pytest.raises(ConfigurationError, match="CHAOS_IDLE_TIMEOUT_S='long'"):
        hosting.options_for_engine(config)


def test_the_member_hosts_by_its_configuration(endpoint: str, started: list[HostedProcess]) -> None:
    config = EngineConfig(endpoint=endpoint, job="job", min_nodes=2)
    keep(started, hosting.host_for_engine(config))
    assert fetch_status(endpoint)["min_nodes"] == 2


# ------------------------------------------------------------------------------------------------ the process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_and_leaves_the_chain(endpoint: str, number: signal.Signals, tmp_path: Path) -> None:
    with scheduler_process("--listen", endpoint, "--store", str(tmp_path / "chain")) as process:
        assert first_words(process).startswith("scheduler of job default at 127.0.0.1:")
        client = founder(endpoint, job="default")
        client.messages.wait(lambda m: type(m).__name__ == "Decide")
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        assert number.name in process.stdout.read()
        client.close()
    assert not (tmp_path / "chain-wal").exists()
    with JobChain(SqliteStore(tmp_path / "chain", read_only=True)) as store:
        assert [v.id for v in store.load().views] == [ViewId(1, 1)]


def test_an_idle_process_ends_by_itself_and_logs_its_life(endpoint: str, tmp_path: Path) -> None:
    from chaos_lightning.events.events import read_events

    arguments = ["--listen", endpoint, "--store", MEMORY, "--idle-timeout", "0.2", "--log-dir", str(tmp_path)]
    assert main(arguments) == 0
    names = [e.name for e in read_events(tmp_path)]
    assert names == ["opened", "scheduler_started", "scheduler_ended", "closed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "nowhere"], "cannot be resolved|port is taken"),
        (["--listen", "127.0.0.1:0", "--settings", '{"min_nodes": 0}'], "min_nodes=0"),
        (["--listen", "0.0.0.0:0"], "cluster token"),
        (["--listen", "127.0.0.1:0", "--token-file", "/nonexistent/token"], "cannot be read"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    if "nowhere" in arguments:

        def fail(*args: object, **kwargs: object) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr("chaos_lightning.machine.addresses.socket.getaddrinfo", fail)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(words, error)


def test_a_store_that_fails_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chain").write_bytes(b"no chain" * 500)
    assert main(["--listen", "127.0.0.1:0", "--store", str(tmp_path / "chain")]) == 1
    assert "move it away" in capsys.readouterr().err


def test_two_schedulers_on_one_chain_are_refused_before_they_touch_it(tmp_path: Path, endpoint: str) -> None:
    store = str(tmp_path / "chain")
    with scheduler_process("--listen", endpoint, "--store", store) as first:
        first_words(first)
        with scheduler_process("--store", store) as second:
            output, _ = second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 2
        assert "another scheduler serves" in output
        with sqlite3.connect(store) as db:
            assert db.execute("SELECT term FROM job").fetchone() == (1,)
        db.close()


def test_a_hosted_scheduler_survives_the_process_group_that_started_it(
    endpoint: str, started: list[HostedProcess]
) -> None:
    code = (
        "import os; from chaos_lightning.protocol.types import Settings\n"
        "from chaos_lightning.control.hosting import *\n"
        f"o = SchedulerOptions(listen={endpoint!r}, settings=Settings(job='job'), idle_timeout_s=60.0)\n"
        "s = ensure_scheduler(o)\n"
        "print(s.pid, s.pid_start, flush=True); os.killpg(0, 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, start_new_session=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, pid_start = map(int, done.stdout.split())
    started.append(HostedProcess(endpoint, pid, pid_start, Path("log"), None))
    assert look(endpoint, "job", b"") == "serves"
    assert started[0].alive()
