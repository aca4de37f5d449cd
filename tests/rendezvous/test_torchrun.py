"""Tests real torchrun agents with the backend "chaos", and workers that report events."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import forked_support
import pytest
from forked_support import TORCHRUN
from served import first_words, scheduler_process

from chaos_lightning import cli
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import settings_to_json
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import RefusedError, SchedulerUnreachableError
from chaos_lightning.machine.process_table import start_time
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, Settings, View, ViewId
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.security.keyfiles import NODES, KeyHolder, init
from chaos_lightning.security.roles import OBSERVER
from chaos_lightning.service.hosting import HostedProcess
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.testing.harness import Harness, Record
from chaos_lightning.testing.processes import start_function

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE_S = 60.0
TOKEN = "a token for the tests"
RUN = ("chaos_lightning.cli", "run")

Line = dict[str, Any]


class Torchrun:
    """One torchrun agent; `lines` has its workers' reports, `noise` all other output."""

    def __init__(
        self,
        endpoint: str,
        output: Path,
        *arguments: str,
        conf: str = "",
        nodes: str = "1:2",
        script: str = "stay",
        worker: str = "worker.py",
        program: Sequence[str] = (TORCHRUN,),
    ) -> None:
        command = [*program[1:], "--rdzv-backend=chaos", f"--rdzv-endpoint={endpoint}"]
        command += ["--rdzv-id=job", f"--nnodes={nodes}", *arguments]
        command += ["--rdzv-conf", ",".join(filter(None, ("reconnect_grace_s=1,idle_timeout_s=30", conf)))]
        command += [str(HERE / worker), script]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHAOS_TOKEN": TOKEN}
        os.mkfifo(output)
        self.process = start_function("agent", forked_support.run, (program[0], command, environment), output, env={})
        self.lines: list[Line] = []
        self.noise: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    def _read(self, output: Path) -> None:
        with output.open() as said:
            for text in said:
                with self._changed:
                    if text.startswith('{"what"'):
                        self.lines.append(json.loads(text))
                    else:
                        self.noise.append(text)
                    self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, what: str, test: Callable[[Line], bool] = lambda line: True, count: int = 1) -> Line:
        """Waits for the `count`th report of this kind for which `test` is true; returns it."""

        def found() -> list[Line]:
            return [line for line in self.lines if line["what"] == what and test(line)]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= count or self._closed, PATIENCE_S)
            assert len(found()) >= count, (
                f"no {count} x {what}; lines: {self.lines}; noise: {''.join(self.noise)[-3000:]}"
            )
            return found()[count - 1]

    def hears(self, words: str) -> None:
        """Waits until these words are in the output beside the reports."""
        with self._changed:
            self._changed.wait_for(lambda: words in "".join(self.noise) or self._closed, PATIENCE_S)
            assert words in "".join(self.noise)

    def wait_ended(self) -> int | None:
        assert ended(self.process.sentinel)
        self._reader.join(PATIENCE_S)
        return self.process.poll()

    def workers(self) -> list[int]:
        return sorted({line["pid"] for line in self.lines})


def hosted(endpoint: str) -> HostedProcess | None:
    """Returns the scheduler that answers at this endpoint; None if there is none."""
    try:
        pid = fetch_status(endpoint, Credentials.load() or TOKEN.encode())["pid"]
    except SchedulerUnreachableError:
        return None
    return HostedProcess(endpoint, pid, start_time(pid), Path("unknown"), None)


@pytest.fixture
def torchrun(endpoint: str, tmp_path: Path) -> Iterator[Callable[..., Torchrun]]:
    """Function that starts agents. At the end of the test they, their workers and the scheduler are ended."""
    started: list[Torchrun] = []
    with ExitStack() as stack:
        stack.callback(lambda: (scheduler := hosted(endpoint)) is None or scheduler.stop())

        def start(*arguments: str, **options: Any) -> Torchrun:
            agent = Torchrun(endpoint, tmp_path / f"agent-{len(started)}", *arguments, **options)
            started.append(agent)
            stack.callback(end, agent)
            return agent

        yield start


def end(agent: Torchrun) -> None:
    agent.process.send(signal.SIGKILL)
    assert ended(agent.process.sentinel)
    for pid in agent.workers():
        with suppress(OSError):
            if start_time(pid) and b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    agent._reader.join(PATIENCE_S)


@contextmanager
def watching(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], PATIENCE_S)[0])


# ------------------------------------------------------------------------------------------------ the tests


def test_torchrun_finds_the_backend_by_its_entry_point() -> None:
    (found,) = [e for e in entry_points(group="torchrun.handlers") if e.name == "chaos"]
    assert callable(found.load()())


def test_agents_join_a_running_job_and_nobody_is_restarted(torchrun: Callable[..., Torchrun], endpoint: str) -> None:
    first = torchrun("--nproc-per-node=2", conf="node=one", nodes="1:2")
    start = first.wait("start", lambda line: line["LOCAL_RANK"] == "1")
    assert start["name"] == "one-1"
    assert (start["min_nodes"], start["max_nodes"], start["endpoint"]) == (1, 2, endpoint)
    assert (start["RANK"], start["WORLD_SIZE"]) == ("1", "2")
    first.wait("view")
    # Both come at once: these workers link to nobody, and who cannot for a while holds no place.
    second, third = (torchrun("--nproc-per-node=1", conf=f"node={name}", nodes="1:2") for name in ("two", "three"))
    roles = {agent.wait("welcome")["role"]: agent for agent in (second, third)}
    assert set(roles) == {"joiner", "standby"}, "two nodes with three workers are all that may be in"
    facts = fetch_status(endpoint, TOKEN.encode())
    assert (facts["job"], facts["min_nodes"], facts["max_nodes"]) == ("job", 1, 2)
    with pytest.raises(RefusedError):
        fetch_status(endpoint, b"another token")
    leaves_politely(roles["standby"], endpoint, left=3)
    assert {line["restarts"] for line in (*first.lines, *second.lines)} == {0}
    assert len(first.workers()) == 2


def leaves_politely(standby: Torchrun, endpoint: str, left: int) -> None:
    """Sends SIGTERM to a waiting agent, and checks that its worker is asked to leave and ends with success, while
    the scheduler serves the others.
    """
    standby.process.send(signal.SIGTERM)
    for word in ("term", "released", "end"):
        standby.wait(word)
    assert standby.wait_ended() == 0
    assert len(fetch_status(endpoint, TOKEN.encode())["streams"]) == left


def test_agents_with_keys_meet_over_tls(
    torchrun: Callable[..., Torchrun], endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents with key files meet over TLS; the token in their environment is not used, and gives no access."""
    keys = tmp_path / "keys"
    init(keys, [KeyHolder("one"), KeyHolder("two"), KeyHolder("ann", OBSERVER)])
    first = torchrun(conf=f"node=one,keys_dir={keys / NODES / 'one'}", nodes="1:2")
    first.wait("view")
    second = torchrun(conf=f"node=two,keys_dir={os.path.relpath(keys / NODES / 'two')}", nodes="1:2")
    assert second.wait("welcome")["role"] == "joiner"
    first.wait("next_view")
    monkeypatch.setenv("CHAOS_KEYS_DIR", str(keys / NODES / "ann"))  # also for the one who ends the scheduler
    facts = fetch_status(endpoint, Credentials.load())
    assert sorted(row["peer"].split(" ", 1)[1] for row in facts["streams"]) == ["one (member)", "two (member)"]
    with pytest.raises(RefusedError, match="demands a certificate: give keys_dir"):
        fetch_status(endpoint, TOKEN.encode())


def test_a_killed_agent_takes_its_worker_along(torchrun: Callable[..., Torchrun], endpoint: str) -> None:
    agent = torchrun(conf="node=one")
    worker = agent.wait("view")["pid"]
    with watching(worker) as handle:
        agent.process.send(signal.SIGKILL)
        assert ended(handle)
    agent.wait_ended()
    agent.wait("term")
    assert hosted(endpoint) is not None


def test_a_restarted_worker_is_a_newcomer(torchrun: Callable[..., Torchrun]) -> None:
    agent = torchrun("--max-restarts=1", conf="node=one", script="once")
    agent.wait("fail")
    second = agent.wait("welcome", lambda line: line["restarts"] == 1)
    assert second["name"] == "one-0"
    earlier = [line["id"] for line in agent.lines if line["what"] == "welcome" and line["restarts"] == 0]
    assert second["id"] not in earlier
    assert agent.wait("view", lambda line: line["restarts"] == 1)["members"] == [second["id"]]


def test_the_agent_starts_a_killed_scheduler_again(torchrun: Callable[..., Torchrun], endpoint: str) -> None:
    agent = torchrun(conf="node=one")
    agent.wait("view")
    scheduler = hosted(endpoint)
    assert scheduler is not None
    with watching(scheduler.pid) as handle:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        assert ended(handle)
    agent.wait("state", lambda line: line["state"].startswith("lost"))
    agent.wait("state", lambda line: line["state"] == "connected", count=2)
    facts = fetch_status(endpoint, TOKEN.encode())
    assert (facts["term"], facts["job"]) == (2, "job")
    assert agent.wait("welcome", count=2)["id"] == agent.wait("welcome")["id"]


def test_a_typo_ends_torchrun_with_its_name(torchrun: Callable[..., Torchrun]) -> None:
    agent = torchrun(conf="nde=one")
    assert agent.wait_ended() != 0
    assert "ConfigurationError: --rdzv-conf: unknown nde" in "".join(agent.noise)
    assert agent.lines == []


# ------------------------------------------------------------------------------------------------ with training


class Training:
    """Agents whose workers train; `harness` follows the events of all of them."""

    def __init__(self, harness: Harness, torchrun: Callable[..., Torchrun]) -> None:
        self.harness = harness
        self._torchrun = torchrun

    def start(self, node: str, *arguments: str, program: Sequence[str] = (TORCHRUN,), **spec: Any) -> Torchrun:
        """Starts one agent with one worker; see training_worker.py."""
        script = json.dumps(spec)
        return self._torchrun(
            *arguments, conf=f"node={node}", script=script, worker="training_worker.py", program=program
        )

    def gate(self, name: str) -> str:
        path = self.harness.directory / f"gate-{name}"
        os.mkfifo(path)
        return str(path)

    def open(self, name: str) -> None:
        """Waits until a worker is at this gate, then lets it continue."""
        with open(self.harness.directory / f"gate-{name}", "w"):
            pass

    def admitted(self, name: str, but: Record | None = None) -> Record:
        """Returns the scheduler's view that admits this worker, but not the one of the record `but`."""
        return self.harness.wait_for(
            "view",
            lambda r: (
                any(j.startswith(f"{name}~") for j in r.get("joiners") or ())
                and (but is None or r["joiners"] != but["joiners"])
            ),
        )


@pytest.fixture
def finished(endpoint: str, tmp_path: Path) -> Iterator[None]:
    """A scheduler that no agent has started, which answers for a finished job."""
    chain = tmp_path / "chain.sqlite"
    with JobChain(SqliteStore(chain, "job")) as store:
        store.take_term()
        assert store.append(Persist(1, "view", ViewId(1, 1), View(ViewId(1, 1), NO_VIEW, ()))).ok
        assert store.append(Persist(2, "finish", ViewId(1, 2))).ok
    options = ("--settings", settings_to_json(Settings(job="job")), "--store", str(chain), "--keep-finished")
    with scheduler_process("--listen", endpoint, *options, env={**os.environ, "CHAOS_TOKEN": TOKEN}) as scheduler:
        assert "scheduler of job job" in first_words(scheduler)
        yield


@pytest.mark.parametrize("program", [(TORCHRUN,), RUN])
@pytest.mark.usefixtures("finished")
def test_a_node_that_comes_after_the_end_hears_so_and_starts_no_worker(
    torchrun: Callable[..., Torchrun], endpoint: str, program: Sequence[str]
) -> None:
    """A node comes after the job has finished: it prints so, starts no worker, and ends with an error."""
    late = torchrun("--max-restarts=3", conf="node=late,host_scheduler=0", program=program)
    assert late.wait_ended() == 1
    assert f"job 'job' at {endpoint} is finished; no worker is started on node late" in "".join(late.noise)
    assert late.lines == []


@pytest.fixture
def training(tmp_path: Path, torchrun: Callable[..., Torchrun], monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    with Harness(tmp_path, deadline_s=PATIENCE_S) as harness:
        monkeypatch.setenv("CHAOS_LOG_DIR", str(harness.logs))
        # Workers are held at gates until somebody is admitted, which a replay would never be.
        monkeypatch.setenv("CHAOS_JOIN_BY", "pause")
        yield Training(harness, torchrun)


@pytest.mark.slow
def test_a_crashed_worker_is_restarted_and_trains_on(training: Training) -> None:
    """A worker crashes: its agent starts it again, no other worker is touched, and both end with the same state."""
    one = training.start("one", gates={2: training.gate("start")}, alone=training.gate("alone"))
    training.harness.wait_step(2)
    training.harness.declare("two-0")
    two = training.start("two", "--max-restarts=1", crash_in=0)
    first = training.admitted("two-0")
    training.open("start")
    crash = two.wait("crash")
    training.admitted("two-0", but=first)
    training.open("alone")
    ends = [one.wait("done"), two.wait("done")]
    assert [end["restarts"] for end in ends] == [0, 1]
    assert ends[1]["pid"] != crash["pid"]
    assert ends[1]["company"] > 0
    assert ends[0]["step"] == ends[1]["step"] > crash["step"]
    assert ends[0]["hash"] == ends[1]["hash"]
    assert [one.wait_ended(), two.wait_ended()] == [0, 0]
    assert len(one.workers()) == 1
    training.harness.audit()


@pytest.mark.slow
def test_a_worker_restarted_as_its_job_ends_goes_on_with_the_final_state(training: Training) -> None:
    """The job finishes while a crashed worker is being restarted: the worker is told so, and trains nothing."""
    one = training.start("one", gates={2: training.gate("start")}, alone=training.gate("alone"))
    training.harness.wait_step(2)
    training.harness.declare("two-0")
    two = training.start("two", "--max-restarts=1", crash_in=0, late=training.gate("late"))
    training.admitted("two-0")
    training.open("start")
    two.wait("start", lambda line: line["restarts"] == 1)
    training.open("alone")
    done = one.wait("done")
    assert done["step"] > 0
    assert one.wait_ended() == 0
    training.harness.wait_for("scheduler_ended")
    training.open("late")
    assert two.wait_ended() == 0
    late = two.wait("done")
    assert (late["step"], late["hash"]) == (done["step"], done["hash"])
    assert late["restarts"] == 1
    assert "came when the job was finished" in "".join(two.noise)


@pytest.mark.slow
def test_a_worker_whose_donors_all_die_is_restarted_and_begins_anew(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members die while a newcomer replays their steps, so that its state is incomplete: it ends with an error,
    and its restart founds the job anew.
    """
    one = training.start("one", epochs=1000)
    training.harness.wait_step(2)
    monkeypatch.setenv("CHAOS_JOIN_BY", "replay")
    two = training.start("two", "--max-restarts=1", epochs=1000, apply=training.gate("apply"))
    two.wait("observing")
    training.harness.declare("one-0")
    os.kill(one.workers()[0], signal.SIGKILL)
    assert one.wait_ended() != 0
    death = training.harness.wait_for("death", lambda r: r.member.startswith("one-0~"))
    training.open("apply")
    founded = training.harness.wait_for("joined", node="two-0", after=death)
    assert (founded["role"], founded["step"]) == ("founder", 0)
    training.harness.wait_for("committed", node="two-0", after=founded)
    two.process.send(signal.SIGTERM)
    assert two.wait("done")["restarts"] == 1
    assert two.wait_ended() == 0
    assert "its state is a mixture" in "".join(two.noise)
    training.harness.audit()


@pytest.mark.slow
@pytest.mark.parametrize("program", [(TORCHRUN,), RUN])
def test_workers_of_a_machine_that_will_be_taken_leave_and_the_agent_ends_well(
    training: Training, torchrun: Callable[..., Torchrun], program: Sequence[str]
) -> None:
    """A notice comes for a node with two workers: both leave and say why, the last one keeps the state, none is started
    again, and the agent ends with success.
    """
    flag = training.harness.directory / "taken"
    conf, script = f"node=one,notice=file:{flag}", json.dumps({"epochs": 1000})
    one = torchrun(
        "--nproc-per-node=2", "--max-restarts=3", conf=conf, script=script, worker="training_worker.py", program=program
    )
    training.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2)
    flag.touch()
    ends = [one.wait("done", count=count) for count in (1, 2)]
    assert one.wait_ended() == 0
    assert {end["restarts"] for end in ends} == {0}
    for node in ("one-0", "one-1"):
        assert training.harness.wait_for("notice_taken", node=node)["reason"] == f"file {flag}"
    assert training.harness.wait_for("kept")["step"] == max(end["step"] for end in ends)
    assert f"leaves the job after the present step: file {flag}" in "".join(one.noise)
    training.harness.audit()


@pytest.mark.slow
def test_a_standby_agent_trains_once_a_place_is_free(training: Training) -> None:
    """Three agents share two places: the third one's worker waits until the second one leaves, then trains to the
    end with the first.
    """
    one = training.start(
        "one", gates={2: training.gate("start")}, third=training.gate("third"), alone=training.gate("alone")
    )
    training.harness.wait_step(2)
    two = training.start("two")
    training.admitted("two-0")
    three = training.start("three")
    training.harness.wait_for("welcomed", lambda r: r.get("role") == "standby")
    training.open("start")
    training.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="two-0")
    two.process.send(signal.SIGTERM)
    training.open("third")
    left = two.wait("done")
    two.wait_ended()
    training.admitted("three-0")
    training.open("alone")
    ends = [one.wait("done"), three.wait("done")]
    assert left["out"]
    assert left["step"] < ends[0]["step"] == ends[1]["step"]
    assert ends[0]["hash"] == ends[1]["hash"]
    assert ends[1]["company"] > 0
    assert [one.wait_ended(), three.wait_ended()] == [0, 0]
    training.harness.audit()


@pytest.mark.slow
@pytest.mark.parametrize("program", [(TORCHRUN,), RUN])
def test_a_spare_that_waits_when_the_job_ends_is_a_success(training: Training, program: Sequence[str]) -> None:
    """A standby still waits when the job ends: it exits with success, prints no traceback, is not restarted, and
    runs no code after its training.
    """
    one = training.start("one", "--nnodes=1:1", program=program, gates={2: training.gate("start")}, epochs=1)
    training.harness.wait_step(2)
    spare = training.start("spare", "--nnodes=1:1", "--max-restarts=3", program=program, epochs=1)
    training.harness.wait_for("welcomed", lambda r: r.get("role") == "standby")
    training.open("start")
    one.wait("done")
    assert [one.wait_ended(), spare.wait_ended()] == [0, 0]
    said = "".join(spare.noise)
    assert "came when the job was finished" in said
    assert "Traceback" not in said
    assert "RendezvousClosedError" not in said
    assert [line["what"] for line in spare.lines] == ["start"]
    training.harness.audit()


@pytest.mark.slow
def test_a_node_founds_its_job_with_all_of_its_workers(training: Training) -> None:
    """A node starts a job with two workers: no step is made before both have joined."""
    one = training.start("one", "--nproc-per-node=2", program=RUN, epochs=2)
    ends = [one.wait("done", count=count) for count in (1, 2)]
    assert one.wait_ended() == 0
    assert [line["step"] for line in one.lines if line["what"] == "in"] == [0, 0]
    # 240 samples in batches of 4 for two workers, twice; each step was in company.
    assert [(end["step"], end["company"]) for end in ends] == [(60, 60)] * 2
    assert ends[0]["hash"] == ends[1]["hash"]
    training.harness.audit()


@pytest.mark.slow
def test_the_last_worker_keeps_the_state_and_the_next_start_goes_on_from_it(training: Training, tmp_path: Path) -> None:
    """SIGTERM ends the only agent, whose worker saves the state; the next agent resumes from it, and prints so."""
    conf = {"epochs": 1000}
    one = training.start("one", **conf)
    training.harness.wait_step(3)
    one.process.send(signal.SIGTERM)
    done = one.wait("done")
    one.wait_ended()
    kept = training.harness.wait_for("kept", node="one-0")
    assert kept["step"] == done["step"] > 0
    assert f"at step {done['step']} is kept in" in "".join(one.noise)
    two = training.start("two", **conf)
    came = two.wait("in")
    assert (came["step"], came["hash"], came["role"]) == (done["step"], done["hash"], "founder")
    assert f"goes on from step {done['step']}: one-0~1 kept its training state" in "".join(two.noise)
    training.harness.wait_step(done["step"] + 2)
    two.process.send(signal.SIGTERM)
    assert two.wait("done")["step"] > done["step"]
    two.wait_ended()
    training.harness.audit()


@pytest.mark.slow
def test_one_dead_worker_of_a_node_with_two_loses_nothing_under_stock_torchrun(training: Training) -> None:
    """A worker dies under plain torchrun, which then also stops the node's other worker: that one saves the state,
    and both restart from it.
    """
    one = training.start("one", "--nproc-per-node=2", "--max-restarts=2", epochs=1000)
    training.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="one-0")
    victim = one.wait("in", lambda line: line["role"] == "founder")
    training.harness.declare("one-0", "one-1")
    os.kill(victim["pid"], signal.SIGKILL)
    kept = training.harness.wait_for("kept")
    again = training.harness.wait_for("joined", lambda r: r["role"] == "founder", after=kept)
    assert again["step"] == kept["step"] > 0
    training.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="one-0", after=again)
    assert "goes on from step" in "".join(one.noise)
    one.process.send(signal.SIGTERM)
    one.wait_ended()
    training.harness.audit()


# ------------------------------------------------------------------------------------------------ chaos-lightning run


@pytest.mark.slow
def test_a_dead_worker_takes_no_sibling_along_and_comes_back(
    training: Training, torchrun: Callable[..., Torchrun]
) -> None:
    """One of two workers of `chaos-lightning run` is killed: the other one trains on, and the first joins it again.
    Killed once more, it is given up, and the node ends with its exit code.
    """
    one = torchrun(
        "--nproc-per-node=2",
        "--max-restarts=1",
        conf="node=one",
        script=json.dumps({"epochs": 1000}),
        worker="training_worker.py",
        program=RUN,
    )
    harness = training.harness

    def commits(members: int, after: Record | None) -> Record:
        return harness.wait_for("committed", lambda r: len(r["contributors"]) == members, node="one-0", after=after)

    def killed(life: int, after: Record) -> Record:
        """Kills the worker in this life; returns a commit that the other worker made alone afterwards."""
        victim = one.wait("start", lambda line: line["local_rank"] == 1 and line["restarts"] == life)
        os.kill(victim["pid"], signal.SIGKILL)
        return commits(1, after)

    harness.declare("one-1")
    alone = killed(0, commits(2, None))
    again = harness.wait_for("joined", node="one-1", after=alone)
    assert again["role"] == "joiner"
    assert one.wait("start", lambda line: line["restarts"] == 1)["local_rank"] == 1
    killed(1, commits(2, again))
    one.hears("worker 1 failed after 1 restarts; the others train on (signal SIGKILL)")
    commits(1, harness.records[-1])
    assert len([line for line in one.lines if line["what"] == "start" and line["local_rank"] == 0]) == 1
    one.process.send(signal.SIGTERM)
    assert one.wait("done")["local_rank"] == 0
    assert one.wait_ended() == 128 + signal.SIGKILL
    one.hears("worker 1 ended (signal SIGKILL); it is started again in 1 s (restart 1 of 1); 1 other(s)")
    one.hears("asking 1 worker(s) to leave the job")
    harness.audit()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rdzv-backend=c10d"], "this command is for chaos only"),
        (["--standalone"], "leave it out"),
        (["--rdzv-conf", "nde=x"], "unknown nde"),
        (["--nproc-per-node=many"], "many"),
    ],
)
def test_run_refuses_by_name(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos-lightning", "run", *arguments, "train.py"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
