"""Tests emulated networks from a process's view: who joins one, which rate applies, and how connections share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.process_table import host_identity
from chaos_lightning.testing.emulation import (
    HOST,
    IDLE_PART,
    RATES,
    RELAY,
    Emulated,
    Shares,
    carried,
    checked,
    emulating,
    install_from,
    rate_to,
    rates_from,
)
from chaos_lightning.transport.medium import Direct, Unpaced, installed

TELL = """
import json
from chaos_lightning.machine.process_table import host_identity
from chaos_lightning.transport.medium import installed
pacer = installed().pacer()
print(json.dumps([type(installed()).__name__, pacer.emulates("b~1"), pacer.emulates("c~1"), host_identity()]))
"""


def told(environment: dict[str, str], tell: str = TELL) -> list[object]:
    """Runs a small Python program with this environment; returns the facts that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", tell], env=environment, capture_output=True, text=True, check=False, timeout=60.0
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return list(json.loads(done.stdout))


def base(*paths: str) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k not in (RELAY, RATES, HOST, "PYTHONPATH")}
    return {**own, "PYTHONPATH": os.pathsep.join([*paths, *(p for p in sys.path if p)])}


def test_programs_are_on_the_network_that_their_environment_names_and_so_are_those_that_they_start() -> None:
    nested = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {TELL!r}], text=True))"
    environment = carried({**base(), RATES: '{"b": 3e8}', HOST: "edge-1"})
    expected = ["Emulated", True, False, f"{host_identity()}@edge-1"]
    assert told(environment) == told(environment, nested) == expected
    assert told(carried({**base(), RELAY: "127.0.0.1:1"}))[:3] == ["Emulated", True, True]


def test_programs_that_no_lab_has_started_have_the_network_as_it_is() -> None:
    plain = carried(base())
    assert plain == base()
    assert told(plain) == told({**base(), RELAY: "127.0.0.1:1", HOST: "x"}) == ["Direct", False, False, host_identity()]


def test_the_start_up_of_a_machine_that_has_one_of_its_own_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.own = 'here'")
    environment = carried({**base(str(tmp_path)), HOST: "edge-1"})
    told_own = (
        "import json; from chaos_lightning.machine import process_table as p; print(json.dumps([own, p._counts_as]))"
    )
    assert told(environment, told_own) == ["here", "edge-1"]


@pytest.mark.parametrize(("name", "value"), [(RATES, '{"b": -1}'), (RELAY, "nowhere")])
def test_a_program_whose_network_cannot_be_ends_at_once(name: str, value: str) -> None:
    environment = carried({**base(), name: value})
    done = subprocess.run([sys.executable, "-c", "print('ran')"], env=environment, capture_output=True, timeout=60.0)
    assert done.returncode
    assert not done.stdout
    assert f"error: {name}".encode() in done.stderr


def test_a_network_is_there_for_a_while() -> None:
    assert isinstance(installed(), Direct)
    with emulating(rates={"b": 1e6}) as emulated:
        assert installed() is emulated
        pacer = emulated.pacer()
        assert pacer.emulates("b~1")
        emulated.change({"c": 1e6})
        assert (pacer.emulates("b~1"), pacer.emulates("c~1")) == (False, True)
        assert emulated.pacer().emulates("c~1")
    assert isinstance(installed(), Direct)
    assert isinstance(installed().pacer(), Unpaced)
    install_from({})
    assert isinstance(installed(), Direct)
    with pytest.raises(ConfigurationError, match="CHAOS_LINK_RELAY='x:y': expected HOST:PORT"):
        Emulated("x:y", {})


# ---------------------------------------------------------------------- whose a rate is


def test_a_rate_is_found_by_id_name_or_node_in_this_order() -> None:
    table = {"n1": 1.0, "n1-0": 2.0, "n1-0~7": 3.0}
    assert rate_to(table, "n1-0~7") == 3.0
    assert rate_to(table, "n1-0~8") == 2.0
    assert rate_to(table, "n1-1~9") == 1.0
    assert rate_to(table, "n2-0~1") is None
    assert rate_to({"n1": 1.0}, "n1") == 1.0
    assert rate_to({"b": 5.0}, "b~2") == 5.0


def test_a_table_comes_as_json() -> None:
    assert rates_from(' {"b": 3e8, "c": 100} ') == {"b": 3e8, "c": 100.0}
    assert rates_from("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b=3", "is no JSON"),
        ("[3]", "must be an object"),
        ('{"b": 0}', "'b' has the rate 0; expected positive bits per second"),
        ('{"b": -1}', "'b' has the rate -1"),
        ('{"b": true}', "'b' has the rate True"),
        ('{"b": "300 Mbps"}', "'b' has the rate '300 Mbps'"),
        ('{"b": NaN}', "'b' has the rate nan"),
        ('{"b": Infinity}', "'b' has the rate inf"),
    ],
)
def test_a_table_that_cannot_work_is_refused_by_its_entry(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match="CHAOS_EMULATE") as error:
        rates_from(text)
    assert words in str(error.value)


def test_a_table_of_the_program_is_refused_as_well() -> None:
    with pytest.raises(ConfigurationError, match=r"emulate: 'b' has the rate None"):
        checked({"b": None})


# ---------------------------------------------------------------------- one rate for several connections


class Wires:
    """A member's connections to one peer, with their rate limits, and the limits' sum after each change."""

    def __init__(self, rate_bps: float | None) -> None:
        self.shares = Shares(rate_bps)
        self.bounds: dict[object, float | None] = {}
        self.sums: list[float] = []

    def join(self, name: object, now: float) -> None:
        def bound(rate_bps: float | None) -> None:
            self.bounds[name] = rate_bps
            self.sums.append(sum(r for r in self.bounds.values() if r is not None))

        self.shares.join(name, bound, now)  # type: ignore[arg-type]

    def leave(self, name: object, now: float) -> None:
        self.bounds.pop(name, None)
        self.shares.leave(name, now)  # type: ignore[arg-type]

    def settle(self, now: float, *waiting: object) -> None:
        self.shares.settle(now, waiting)  # type: ignore[arg-type]


def test_a_connection_alone_has_the_whole_rate() -> None:
    wires = Wires(80e6)
    wires.join("link", 0.0)
    assert wires.bounds == {"link": 80e6}
    wires.settle(100.0)
    assert wires.sums == [80e6], "what does not change is not set again"


def test_who_has_bytes_to_send_gets_what_others_do_not_need() -> None:
    wires = Wires(80e6)
    wires.join("link", 0.0)
    wires.join("bulk", 1.0)
    assert wires.bounds == {"link": 80e6 * IDLE_PART, "bulk": 80e6 * (1 - IDLE_PART)}, "a new one is about to begin"
    wires.settle(1.1, "link", "bulk")
    assert wires.bounds == {"link": 40e6, "bulk": 40e6}
    wires.settle(1.2, "link")
    assert wires.bounds == {"link": 40e6, "bulk": 40e6}, "between two requests"
    wires.settle(1.4, "link")
    assert wires.bounds == {"link": 80e6 * (1 - IDLE_PART), "bulk": 80e6 * IDLE_PART}
    wires.settle(9.0)
    assert wires.bounds["link"] == 80e6 * (1 - IDLE_PART), "of idle ones the link comes first"
    wires.leave("bulk", 9.0)
    wires.leave("nobody", 9.0)
    assert wires.bounds == {"link": 80e6}


def test_many_idle_connections_leave_most_of_the_rate() -> None:
    wires = Wires(80e6)
    for number in range(10):
        wires.join(number, 0.0)
    wires.settle(1.0, 3)
    assert wires.bounds[3] == pytest.approx(60e6)
    assert [wires.bounds[n] for n in range(10) if n != 3] == pytest.approx([20e6 / 9] * 9)


def test_a_rate_comes_and_goes() -> None:
    wires = Wires(None)
    wires.join("link", 0.0)
    wires.join("bulk", 0.0)
    assert wires.bounds == {}
    wires.shares.rate_bps = 10e6
    wires.settle(0.0)
    assert wires.bounds == {"link": 5e6, "bulk": 5e6}
    wires.shares.rate_bps = None
    wires.settle(0.0)
    assert wires.bounds == {"link": None, "bulk": None}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["join", "leave", "waits"]), st.floats(0, 0.3))))
def test_the_sum_never_exceeds_the_rate_and_nobody_is_shut_out(moves: list[tuple[int, str, float]]) -> None:
    wires, now = Wires(80e6), 0.0
    for name, move, seconds in moves:
        now += seconds
        if move == "join" and name not in wires.bounds:
            wires.join(name, now)
        elif move == "leave":
            wires.leave(name, now)
        else:
            wires.settle(now, name)
        total = sum(rate for rate in wires.bounds.values() if rate is not None)
        assert not wires.bounds or total == pytest.approx(80e6), "nor is any of it lost"
        assert all(rate for rate in wires.bounds.values())
    assert max(wires.sums, default=0.0) <= 80e6 * (1 + 1e-9)
