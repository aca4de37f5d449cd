"""Tests jobs of real processes with keys: secrets stay secret, keys are rotated during training, another scheduler
takes over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job
from etcd_for_tests import servers

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import RefusedError
from chaos_lightning.events.events import Record
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.observe.commands import report
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import KEY, NODES, KeyHolder
from chaos_lightning.security.roles import OBSERVER, OPERATOR

SPEC: dict[str, Any] = {"epochs": 1000, "step_s": 0.01}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    nodes = [KeyHolder(name) for name in ("scheduler", "s0", "s1", "a", "b", "c")]
    keyfiles.init(folder, [*nodes, KeyHolder("ann", OBSERVER), KeyHolder("olga", OPERATOR)])
    return folder


def of(keys: Path, name: str) -> Credentials:
    return Credentials(keys=KeyFolder(keys / NODES / name))


def secrets(keys: Path) -> list[str]:
    """Returns all tokens, and from each private key the line that differs between keys."""
    cluster = keyfiles.load(keys)
    pems = [cluster.authority[1], *(path.read_text() for path in keys.rglob(KEY))]
    return [*cluster.tokens, *(pem.splitlines()[2] for pem in pems)]


def serve(job: Job, keys: Path) -> None:
    """Starts a scheduler process with keys; members start none themselves."""
    command = [sys.executable, "-m", "chaos_lightning.control.scheduler_main", "--listen", job.endpoint]
    command += ["--store", str(job.folder / "chain.sqlite"), "--log-dir", str(job.harness.logs)]
    job.harness.start("scheduler", [*command, "--keys-dir", str(keys / NODES / "scheduler")])
    job.harness.wait_for("scheduler_started")


def train(job: Job, keys: Path, *names: str, folder: str = "", **settings: Any) -> Record:
    for name in names:
        given = {"keys_dir": str(keys / NODES / (folder or name)), "state_hash_every": 10, **settings}
        job.start(name, settings=given, **SPEC)
        job.harness.wait_for("joined", node=name)
    return job.harness.wait_for("committed", lambda r: len(r["contributors"]) >= len(names), node=names[0])


def seen_in(text: str, words: list[str]) -> list[str]:
    return [word for word in words if word in text]


def test_no_secret_is_in_a_log_an_answer_a_report_or_on_a_command_line(job: Job, keys: Path, tmp_path: Path) -> None:
    """No key or token occurs in logs, answers, reports or command lines of a job that the first member serves and a
    stranger calls.
    """
    train(job, keys, "a", "b")
    status = fetch_status(job.endpoint, of(keys, "ann"))
    with pytest.raises(RefusedError, match="demands a certificate"):
        fetch_status(job.endpoint, b"an old token")
    assert {row["peer"].split(" ", 1)[1] for row in status["streams"]} == {"a (member)", "b (member)"}
    lines = ""
    ours = {str(status["pid"]), *(str(p.pid) for p in job.harness.children.values())}
    for pid in ours:
        process = Path("/proc") / pid
        lines += process.joinpath("cmdline").read_text() + process.joinpath("environ").read_text()
    assert "--keys-dir" in lines
    refused = job.harness.wait_for("refused", lambda r: r["reason"] == "it speaks no TLS")
    job.leave(*"ab")
    report(job.harness.logs, tmp_path / "page", title="", job=0)
    wanted = secrets(keys)
    assert len(wanted) == 10
    written = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_relative_to(keys)]
    kinds = {p.suffix for p in written}
    assert {".jsonl", ".log", ".html", ".pt", ".sqlite"} <= kinds, kinds
    for path in written:
        assert seen_in(path.read_text(errors="replace"), wanted) == [], path
    assert seen_in(lines + json.dumps(status) + str(refused), wanted) == []


@pytest.mark.slow
def test_keys_are_rotated_while_two_members_train(job: Job, keys: Path) -> None:
    serve(job, keys)
    first = train(job, keys, "a", "b", host_scheduler=False)
    stolen = job.folder / "stolen"
    stolen.mkdir(mode=0o700)
    for path in (keys / NODES / "c").iterdir():
        (stolen / path.name).write_bytes(path.read_bytes())
        (stolen / path.name).chmod(0o600)
    thief = Credentials(keys=KeyFolder(stolen))
    assert fetch_status(job.endpoint, thief)["machine"]["members"]
    keyfiles.rotate(keys)
    assert fetch_status(job.endpoint, thief)["machine"]["members"]  # not yet
    train(job, keys, "c", host_scheduler=False)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a", after=first)
    done = job.harness.records[-1]
    keyfiles.finish(keys)
    for name in "ab":  # their connections were made with the old keys
        again = job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node=name, after=done)
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node=name, after=again)
    with pytest.raises(RefusedError, match="certificate"):
        fetch_status(job.endpoint, thief)
    job.harness.declare("thief")
    job.start("thief", settings={"keys_dir": str(stolen), "host_scheduler": False}, **SPEC)
    said = job.harness.wait_for("scheduler", lambda r: str(r["state"]).startswith("failed"), node="thief")
    assert "does not count" in said["state"]
    before = job.harness.wait_for("committed", node="a", after=said)
    train(job, keys, "d", folder="b", host_scheduler=False)
    after = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4, node="a", after=before)
    hashed = job.harness.wait_for("state_hash", node="a", after=after)
    for name in "bcd":
        alike = job.harness.wait_for("state_hash", lambda r: r["head"] == hashed["head"], node=name)
        assert alike["hash"] == hashed["hash"]
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death", "prepare")]
    job.leave(*"abcd")


@pytest.mark.slow
def test_another_scheduler_leads_and_members_find_it_with_tls(job: Job, keys: Path, tmp_path: Path) -> None:
    with servers(tmp_path / "etcd", 1) as etcd:
        places = {f"s{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(2))}
        for name, place in places.items():
            command = [sys.executable, "-m", "chaos_lightning.control.scheduler_main", "--listen", place]
            command += ["--store", etcd.address, "--log-dir", str(job.harness.logs)]
            job.harness.start(name, [*command, "--keys-dir", str(keys / NODES / name)])
        job.endpoint = ",".join(places.values())
        job.harness.wait_for("elected")
        before = train(job, keys, "a", "b", host_scheduler=False)
        found = job.harness.wait_for("scheduler_started")["endpoint"]
        first = next(name for name, place in places.items() if place == found)
        other = next(place for place in places.values() if place != found)
        # A member that waits to lead names the one that does, and whoever asks goes there with its certificate.
        job.harness.wait_until(
            lambda: fetch_status(other, of(keys, "ann"))["endpoint"] == found, "a standby that knows who leads"
        )
        job.harness.kill(first)
        second = job.harness.wait_for("scheduler_started", lambda r: r["term"] == 2, after=before)
        for name in "ab":
            job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node=name, after=second)
        train(job, keys, "c", host_scheduler=False)
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a", after=second)
        assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death", "prepare")]
        job.leave(*"abc")
