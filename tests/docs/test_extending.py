"""Runs the code of docs/extending.md: a service, a store, a transfer policy, a planner and a gate of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blocks_support import ROOT, block

from chaos_lightning.errors import StoreError
from chaos_lightning.machine.listener import free_port
from chaos_lightning.outer.rules.gates import GATES, MeasuredPush
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, GateState, IncarnationId, Offer, PushId
from chaos_lightning.planning import overlay
from chaos_lightning.protocol.types import Member
from chaos_lightning.replication import make_policy
from chaos_lightning.service.store import Appended, End, StoreRecord
from chaos_lightning.testing.service_world import simulate
from chaos_lightning.testing.store_contract import check_store

PAGE = "docs/extending.md"


def run(code: str, **given: Any) -> dict[str, Any]:
    """Runs code as a module of its own; returns what it defines."""
    module = type(sys)("extending")
    sys.modules["extending"] = module  # dataclasses look up their module
    vars(module).update(given)
    exec(compile(code, PAGE, "exec"), vars(module))
    return vars(module)


def test_the_poll_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    service, simulation = block(PAGE, "from dataclasses"), block(PAGE, "from chaos_lightning.testing.service_world")
    made = run(f"{service}\n{simulation}")
    assert made["bad"] == []
    assert "200 jobs, 0 with a problem" in capsys.readouterr().out
    hasty = service.replace("return [PutRecord(Voted(name, choice))]", "return [TellClient(conn, Votes(1))]")
    assert hasty != service
    wrong = run(f"{hasty}\n{simulation.rpartition('bad =')[0]}")
    assert simulate(wrong["POLL"], wrong["voters"], wrong["check"], 1).problem, "a check that finds a planted bug"


def test_the_counter_is_served(tmp_path: Path) -> None:
    text = block(PAGE, "python examples/counter.py serve")
    serve, add, _ = (line.replace("29480", str(port)) for port in [free_port()] for line in text.splitlines())
    command = [sys.executable, *serve.split()[1:], "--store", str(tmp_path / "records"), "--log-dir", "none"]
    with subprocess.Popen(command, cwd=ROOT) as server:
        try:
            done = subprocess.run(
                [sys.executable, *add.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
            )
        finally:
            server.terminate()
    assert done.stdout.split() == ["3", "7", "12"]


def test_the_store_keeps_all_promises(tmp_path: Path) -> None:
    made = run(block(PAGE, "import contextlib, fcntl"))
    run(block(PAGE, "from chaos_lightning.testing.store_contract"), **{**made, "path": tmp_path / "log.json"})


def test_a_store_that_does_not_compare_is_found_out(tmp_path: Path) -> None:
    store = run(block(PAGE, "import contextlib, fcntl"))["JsonStore"]

    class Careless(store):  # type: ignore[misc, valid-type]
        def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended:
            end, records = self._load()
            self._save(end.then(record, cut=cut), [*records, record])
            return Appended(True, "", end.then(record, cut=cut))

    with pytest.raises((AssertionError, StoreError), match=r"is there once|damaged|missing"):
        check_store(lambda: Careless(tmp_path / "log.json"))


def test_the_transfer_policy_is_one() -> None:
    made = run(block(PAGE, "from chaos_lightning.replication import TransferPolicy"))
    policy = make_policy("extending:Newest", {})
    assert policy.name == "newest"
    assert [policy.may_take(source, dict.fromkeys("ab")) for source in "ab"] == [False, True]
    assert type(policy) is made["Newest"]


def test_the_planner_draws_a_chain() -> None:
    run(block(PAGE, "def line("))
    members = [Member(f"{name}~1", name, name, "127.0.0.1", 1) for name in "abc"]
    links = {(f"{a}~1", f"{b}~1"): (0.001, 1e9, 1e9) for a, b in ("ab", "bc")}
    planned = overlay.plan(members, links, policy="extending:line")
    assert planned.reason == "a chain by age"
    assert planned.spec.trees[0].parents == ("", "a~1", "b~1")


def test_the_gate_is_one() -> None:
    gate = run(block(PAGE, "from chaos_lightning.outer.rules.gates"))["shortest"]
    assert {type(each) for each in GATES.values()} == {type(gate)}
    pushes = [
        MeasuredPush(Offer(PushId(IncarnationId(name, 1), 1), NO_VERSION, "", 8, 1), 0, True, 0.0, norm2)
        for name, norm2 in (("a", 2.0), ("b", 1.0), ("c", 3.0))
    ]
    sifted = gate(pushes, {}, GateState(), OuterSettings())
    assert [str(name) for name in sifted.rejected] == [str(pushes[0].name), str(pushes[2].name)]
    assert gate([], {}, GateState(), OuterSettings()).rejected == {}
