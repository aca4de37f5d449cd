"""Tests `chaos-lightning lab`: a command on each node, its environment and its end, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from until_support import until

from chaos_lightning import cli
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.testing.edge.runner import Lab, LabConfig, fill
from chaos_lightning.testing.edge.topology import Change, EdgeNode, Link, Topology
from chaos_lightning.testing.processes import MARK, Mark

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
NETWORK = """\
name: pair
nodes: [edge-1, {name: edge-2, access: 50 Mbps}]
links: [{between: [edge-1, edge-2], rate: 300 Mbps, latency: 2 ms}]
schedule:
  - {at: 100 ms, link: [edge-1, edge-2], rate: 10%}
  - {at: 200 ms, link: [edge-1, edge-2], state: cut, for: 1 h}
"""
PAIR = Topology((EdgeNode("edge-1"), EdgeNode("edge-2")), (Link("edge-1", "edge-2", 1e8),))
PYTHON = (sys.executable, "-c")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(NETWORK)
    return path


def lab(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["lab", *map(str, arguments)])


def drain(running: Lab) -> list[tuple[str, str]]:
    """Returns all that a lab's commands print until they have ended."""
    said: list[tuple[str, str]] = []
    until(lambda: said.extend(running.poll()) or not running.running, "the end of all commands")
    return said + running.poll()


def config(folder: Path, *command: str, topology: Topology = PAIR, **more: Any) -> LabConfig:
    return LabConfig(topology=topology, command=command, folder=folder, backend="relay", **more)


# ------------------------------------------------------------------------------------------------ the command line


def test_commands_run_once_a_node_and_their_lines_are_shown(network: Path, tmp_path: Path) -> None:
    code = "import os; print('I am {node}, number {index} of {nodes}, beside', os.environ['CHAOS_NEIGHBOURS'])"
    done = lab(network, "--backend", "relay", "--dir", tmp_path / "run", "--", *PYTHON, code)
    assert done.exit_code == 0, done.output
    assert "edge-1 | I am edge-1, number 0 of 2, beside edge-2\n" in done.output
    assert "edge-2 | I am edge-2, number 1 of 2, beside edge-1\n" in done.output
    assert "lab    | exit codes: edge-1 0, edge-2 0\n" in done.output
    assert "backend relay: as asked for" in done.output
    assert (tmp_path / "run" / "out" / "edge-1.log").read_text().startswith("I am edge-1")


def test_the_exit_code_is_that_of_the_commands(network: Path, tmp_path: Path) -> None:
    done = lab(network, "--backend", "relay", "--dir", tmp_path / "a", "--quiet", "--", *PYTHON, "exit({index} * 7)")
    assert done.exit_code == 7
    assert "exit codes: edge-1 0, edge-2 7" in done.output
    kill = "import os; print('unseen'); os.kill(os.getpid(), 9)"
    done = lab(network, "--backend", "relay", "--dir", tmp_path / "b", "--quiet", "--", *PYTHON, kill)
    assert done.exit_code == 128 + 9
    assert "| unseen" not in done.output


def test_a_dry_run_prints_the_plan_and_does_nothing(network: Path, tmp_path: Path) -> None:
    done = lab(network, "--backend", "relay", "--dry-run", "--dir", tmp_path / "run", "--", "train", "{node}")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "edge-2 edge-1 50 Mbps 0 ms train edge-2" in lines
    assert "edge-1 - edge-2 300 Mbps 2 ms" in lines
    assert "200 ms edge-1 - edge-2: cut" in lines or "0.2 s edge-1 - edge-2: cut" in lines
    assert not (tmp_path / "run").exists()


def test_a_topology_is_drawn(network: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "net.png"
    done = lab(network, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match=r"--plot .*net.zip"):
        raise lab(network, "--plot", tmp_path / "net.zip").exception


def test_mistakes_are_told_before_anything_starts(network: Path, tmp_path: Path) -> None:
    def wrong(*arguments: object) -> str:
        done = lab(*arguments)
        assert isinstance(done.exception, ConfigurationError), done.output
        return str(done.exception)

    assert "no command to run; write it after --" in wrong(network, "--dir", tmp_path / "new")
    assert "expected an empty or a new folder" in wrong(network, "--dir", tmp_path, "--", "true")
    assert "schedule at 'noon': expected start or joined" in wrong(
        network, "--dir", tmp_path / "new", "--schedule-at", "noon", "--", "true"
    )
    assert "expected one of auto" in wrong(network, "--dir", tmp_path / "new", "--backend", "x", "--", "true")
    for was, given, words in (
        ("300 Mbps", "0 Mbps", "pair.yaml:3: links[0].rate: 0 bps: expected a positive rate"),
        (
            "between: [edge-1, edge-2]",
            "between: [edge-1, edge-3]",
            "pair.yaml:3: links[0].between: unknown node 'edge-3'",
        ),
        ("between: [edge-1, edge-2]", "between: [edge-1, edge-1]", "links[0].between: a link from 'edge-1' to itself"),
        (
            "nodes: [edge-1,",
            "nodes: [edge-1, far,",
            "links: the graph is not connected, it has 2 parts: edge-1, edge-2 | far",
        ),
    ):
        network.write_text(NETWORK.replace(was, given))
        assert words in wrong(network, "--dir", tmp_path / "never", "--", "true")
    assert not (tmp_path / "never").exists()


# ------------------------------------------------------------------------------------------------ running


def test_the_schedule_is_told_and_logged(tmp_path: Path, network: Path) -> None:
    topology = Topology(PAIR.nodes, PAIR.links, (Change(at_s=0.05, share=0.5),))
    wait = "import time, os\nwhile not os.path.exists('{folder}/go'): time.sleep(0.02)"
    with Lab(config(tmp_path, *PYTHON, wait, topology=topology)) as running:
        running.start()
        said: list[tuple[str, str]] = []
        until(lambda: said.extend(running.poll()) or any("100 Mbps -> 50 Mbps" in t for _, t in said), "the change")
        (tmp_path / "go").touch()
        said += drain(running)
    assert running.exit_code() == 0
    assert any("the schedule begins" in text for node, text in said if not node)
    faults = [r for r in read_events(tmp_path / "events") if r.name == "fault_injected"]
    assert [(r.node, r.get("peer"), r.get("rate_bps")) for r in faults] == [("edge-1", "edge-2", 50e6)]


def test_a_schedule_can_wait_until_all_have_joined(tmp_path: Path) -> None:
    topology = Topology((*PAIR.nodes, EdgeNode("late", starts_s=1e6)), (*PAIR.links, Link("edge-2", "late", 1e6)))
    with Lab(config(tmp_path, *PYTHON, "input()", topology=topology, schedule_at="joined")) as running:
        running.start()
        for name in ("edge-1", "edge-2"):
            assert not any("begins" in t for _, t in running.poll())
            assert running.edge.elapsed_s == 0.0
            with EventLog.in_directory(running.events, f"{name}-0", role="member") as log:
                log.emit("joined", role="founder", view="1.1", seq=0, step=0, head="")
        running.poll()
        assert running.edge.elapsed_s > 0.0
        assert list(running.children) == ["edge-1", "edge-2"]
        assert running.running
        running.interrupt()
        drain(running)


def test_ctrl_c_is_passed_on_once_and_the_nodes_leave_politely(network: Path, tmp_path: Path) -> None:
    polite = "import signal, time; signal.signal(signal.SIGINT, lambda *_: exit(print('leaving') or 0)); "
    polite += "print('up', flush=True)\nwhile True: time.sleep(0.05)"
    command = [sys.executable, "-m", "chaos_lightning.cli", "lab", str(network), "--backend", "relay"]
    command += ["--dir", str(tmp_path / "run"), "--", *PYTHON, polite]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if sum(line.rstrip().endswith("| up") for line in seen) == 2:
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stdout.read()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    assert rest.count("| leaving") == 2
    assert "the nodes leave politely" in rest
    assert "exit codes: edge-1 0, edge-2 0" in rest


@pytest.mark.slow
def test_a_second_ctrl_c_ends_who_does_not_listen(network: Path, tmp_path: Path) -> None:
    deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; print('up', flush=True)\n"
    deaf += "while True: time.sleep(0.05)"
    command = [sys.executable, "-m", "chaos_lightning.cli", "lab", str(network), "--backend", "relay"]
    command += ["--dir", str(tmp_path / "run"), "--", *PYTHON, deaf]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ups = 0
            for line in process.stdout:
                ups += line.rstrip().endswith("| up")
                if ups == 2:
                    process.send_signal(signal.SIGINT)
                    ups += 1
                if "leave politely" in line:
                    process.send_signal(signal.SIGINT)
                    break
            process.stdout.read()
            assert process.wait(DEADLINE_S) == 130
        finally:
            process.kill()


def test_commands_end_with_a_lab_that_is_killed(network: Path, tmp_path: Path) -> None:
    tell = "import os, time; print('pid', os.getpid(), flush=True)\nwhile True: time.sleep(0.05)"
    command = [sys.executable, "-m", "chaos_lightning.cli", "lab", str(network), "--backend", "relay"]
    command += ["--dir", str(tmp_path / "run"), "--", *PYTHON, tell]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pids: list[int] = []
            for line in process.stdout:
                pids += [int(line.split()[-1])] if "| pid " in line else []
                if len(pids) == 2:
                    break
        finally:
            process.kill()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of both commands")


def test_what_commands_leave_running_is_ended(tmp_path: Path) -> None:
    """Processes that a lab's commands have left behind are ended with the lab, even if frozen or deaf to SIGTERM."""
    child = "import os, signal, sys, time; os.setsid(); signal.signal(15, signal.SIG_IGN)\n"
    child += "open(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.05)"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, '{{folder}}/{{node}}.pid'])"
    paths = [tmp_path / f"{name}.pid" for name in PAIR.names]
    with Lab(config(tmp_path, *PYTHON, leave)) as running:
        running.start()
        drain(running)
        until(lambda: all(p.exists() and p.read_text() for p in paths), "what was left running")
        pids = [int(p.read_text()) for p in paths]
        os.kill(pids[0], signal.SIGSTOP)
        assert set(pids) <= running._mark.alive()
        assert running.close(polite_s=0.2) == 2
    assert running._mark.alive() == set()
    running.edge.close()


@pytest.mark.parametrize("alike", [False, True], ids=["another value", "another name"])
def test_a_mark_ends_only_its_own(alike: bool) -> None:
    one = Mark()
    other = Mark(one.value, name="CHAOS_OTHER") if alike else Mark()
    sleep = [*PYTHON, "input()"]
    made = [
        subprocess.Popen(sleep, stdin=subprocess.PIPE, env={**os.environ, **mark.environment()})
        for mark in (one, other)
    ]
    try:
        until(lambda: one.alive() == {made[0].pid} and other.alive() == {made[1].pid}, "both processes")
        assert one.end() == 1
        assert made[0].wait(DEADLINE_S) == -signal.SIGTERM
        assert other.alive() == {made[1].pid}
    finally:
        for process in made:
            process.kill()
            process.communicate()


def test_commands_get_their_nodes_settings_and_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAOS_PLAN", "chain")
    monkeypatch.setenv("CHAOS_NODE", "not this one")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of an outer job")
    tell = "import json, os; json.dump(dict(os.environ), open('{folder}/{node}.json', 'w'))"
    with Lab(config(tmp_path, *PYTHON, tell)) as running:
        running.start()
        drain(running)
        endpoint = running.edge.backend.endpoint
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PAIR.names}
    for name, environment in found.items():
        assert environment["CHAOS_NODE"] == environment["CHAOS_HOST"] == name
        assert environment["CHAOS_ENDPOINT"] == endpoint
        assert environment["CHAOS_BY_REFERENCE"] == "0"
        assert environment["CHAOS_PLAN"] == "chain"
        assert environment["CHAOS_LOG_DIR"] == str(tmp_path / "events")
        assert environment["CHAOS_STORE"] == str(tmp_path / "chain.sqlite")
        assert "TORCHELASTIC_RUN_ID" not in environment
        assert environment[MARK] == running._mark.value
    assert found["edge-1"]["CHAOS_LINK_RELAY"] == found["edge-2"]["CHAOS_LINK_RELAY"]


def test_nodes_start_at_their_time(tmp_path: Path) -> None:
    topology = Topology((EdgeNode("a"), EdgeNode("b", starts_s=0.1)), (Link("a", "b", 1e6),))
    with Lab(config(tmp_path, *PYTHON, "pass", topology=topology)) as running:
        running.start()
        assert list(running.children) == ["a"]
        said = drain(running)
        assert list(running.children) == ["a", "b"]
    assert running.exit_codes() == {"a": 0, "b": 0}
    assert [text.split()[2:4] for node, text in said if not node] == [["a", "started:"], ["b", "started:"]]


def test_placeholders_leave_other_braces_alone() -> None:
    assert fill(["{node}", "a{node}b{index}", "{x}", "{", "{{node}}"], {"node": "n", "index": "3"}) == [
        "n", "anb3", "{x}", "{", "{n}",
    ]  # fmt: skip
