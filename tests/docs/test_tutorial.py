"""Tests the tutorial's commands, with a process for each of its terminals, from an installed wheel."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from blocks_support import block
from installed_support import Installed

from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.harness import Harness

DEADLINE_S = 120.0
MACHINES = {"a": "10.0.0.5", "b": "10.0.0.6", "c": "10.0.0.7"}
RSYNC = """#!/bin/bash
# rsync -a FROM HOST:TO, where a host is a folder; a slash at the end of FROM stands for what is in it
to="${3%%:*}/${3#*:}"; mkdir -p "$to"; cp -a "${2/%\\//\\/.}" "$to"
"""


def here(text: str, port: int) -> str:
    """Returns the text with loopback addresses and a free port in place of the page's."""
    return text.replace("10.0.0.", "127.0.0.").replace(":29400", f":{port}")


class Terminals:
    """Terminals of a reader of the tutorial: a folder with train.py, and a process for each terminal."""

    def __init__(self, installed: Installed, folder: Path) -> None:
        self.installed, self.folder = installed, folder
        (folder / "train.py").write_text(block("docs/tutorial.md", "import lightning"))
        env = installed.environment(folder) | {"PYTHONPATH": ""}
        self.harness = Harness(folder / "seen", env=env, deadline_s=DEADLINE_S)

    def type(self, name: str, script: str, folder: Path | None = None, *, node: str = "") -> None:
        """Starts a command in a terminal, and waits until its member has joined the job."""
        named = f"CHAOS_NODE={name}" if node else f"CHAOS_NAME={name}"
        command = f"cd {folder or self.folder}; exec env {named} {script}"
        self.harness.start(name, ["bash", "-euo", "pipefail", "-c", command])
        self.harness.wait_for("joined", node=node or name)

    def goes_on(self, name: str) -> None:
        """Waits until this member has committed a further step."""
        step = max((int(r["step"]) for r in self.harness.records if r.name == "committed"), default=0)
        self.harness.wait_step(step + 1, node=name)

    def end_schedulers(self) -> None:
        """Kills schedulers that members have started, which would otherwise wait for minutes."""
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if "scheduler_main" in words and str(self.folder) in words:
                process.kill()

    def interrupt(self, name: str) -> str:
        """Sends Ctrl+C to a terminal's process; returns its output, and checks the exit code (docs/ends.md)."""
        self.harness.declare(name)
        self.harness.terminate(name, number=signal.SIGINT)
        assert self.harness.wait_exit(name) == 128 + signal.SIGINT
        return self.harness.children[name].log.read_text()


@pytest.fixture
def terminals(installed: Installed, tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(installed, tmp_path)
    with made.harness:
        yield made
        for child in made.harness.children.values():
            if child.running:
                made.harness.kill(child.name)
        made.end_schedulers()


@pytest.mark.slow
def test_a_second_terminal_joins_and_one_is_killed(terminals: Terminals) -> None:
    command = block("docs/tutorial.md", "python train.py")
    terminals.type("one", command)
    terminals.type("two", command)
    said = terminals.installed.run(block("docs/tutorial.md", "chaos-lightning status\n"), terminals.folder)
    assert [word for word in ("one~1", "two~2", "replay") if word not in said] == []
    assert block("docs/tutorial.md", "kill -9 PID") == f"kill -{signal.SIGKILL.value} PID\n"
    terminals.harness.kill("two")
    terminals.goes_on("one")
    # Members log where the harness follows them; that is made the folder of the job here.
    port = terminals.installed.environment(terminals.folder)["CHAOS_ENDPOINT"].partition(":")[2]
    events = terminals.folder / "home" / "chaos-lightning" / f"default-{port}" / "events"
    events.symlink_to(terminals.harness.logs)
    said = terminals.installed.run(block("docs/tutorial.md", "chaos-lightning audit\n"), terminals.folder)
    assert "HELD: " in said
    # The page is written, though install.md does not install what draws its pictures; it says which extra does.
    assert f"{terminals.folder}/home" in said.rpartition("nodes in ")[2]
    assert "report.html" in said
    assert 'pip install "chaos-lightning[report]"' in said


@pytest.mark.slow
def test_all_leave_and_come_back(terminals: Terminals) -> None:
    command = block("docs/tutorial.md", "python train.py")
    terminals.type("one", command)
    terminals.type("two", command)
    assert "leaving the job after the present step" in terminals.interrupt("one")
    terminals.goes_on("two")
    terminals.interrupt("two")
    kept = terminals.harness.wait_for("kept", node="two")
    terminals.type("again", command)
    said = terminals.harness.children["again"].log.read_text()
    assert f"job default goes on from step {kept['step']}" in said
    terminals.goes_on("again")


@pytest.mark.slow
def test_three_machines_with_keys_and_the_proof(terminals: Terminals) -> None:
    """Three machines, here loopback addresses and folders, train with keys that were copied to them, and the audit
    holds.
    """
    folder, run = terminals.folder, terminals.installed.run
    port = free_port()
    tools = folder / "tools"
    tools.mkdir()
    (tools / "rsync").write_text(RSYNC)
    (tools / "rsync").chmod(0o755)
    path = {"PATH": f"{tools}:{terminals.installed.environment(folder)['PATH']}"}
    assert "operator" in run(here(block("docs/tutorial.md", "chaos-lightning keys init"), port), folder)
    run(here(block("docs/tutorial.md", "rsync -a keys/nodes/a/"), port), folder, **path)
    command = here(block("docs/tutorial.md", "CHAOS_ENDPOINT="), port)
    for name, machine in MACHINES.items():
        assert command.startswith("CHAOS_ENDPOINT=127.0.0.5:")
        terminals.type(name, command, folder / here(machine, port))
    terminals.goes_on("c")
    look = here(block("docs/tutorial.md", "chaos-lightning status --endpoint"), port)
    said = run(look, folder)
    assert [word for word in ("a~1", "b~2", "c~3") if said.count(word) < 2] == []

    # All that would be collected from the machines lies in one folder here.
    (folder / "logs").symlink_to(terminals.harness.logs)
    for name in MACHINES:
        terminals.interrupt(name)
    said = run("chaos-lightning audit logs", folder)
    assert "HELD: " in said
    assert "VIOLATED" not in said


@pytest.mark.slow
def test_ports_in_a_range(terminals: Terminals) -> None:
    command = block("docs/ports.md", "CHAOS_PORT=29500-29599 python train.py")
    terminals.type("one", command)
    terminals.type("two", command)
    terminals.goes_on("two")
