"""Tests a service that is given as a machine and its vocabulary: real processes that are killed, etcd, strangers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from etcd_for_tests import servers
from until_support import until

from chaos_lightning.machine.listener import free_port
from chaos_lightning.service.ready import connect, talk

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "counter.py"
PATIENCE_S = 60.0


def example() -> Any:
    if "counter_example" not in sys.modules:
        spec = importlib.util.spec_from_file_location("counter_example", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["counter_example"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["counter_example"]


@contextmanager
def serving(port: int, store: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the counter as a user does; kills it at the end, if it still runs."""
    command = [sys.executable, str(EXAMPLE), "serve", "--listen", f"127.0.0.1:{port}", "--store", store]
    command += ["--log-dir", "none"]
    with (
        log.open("ab") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment}) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def adding(adder: Any, endpoints: list[str]) -> Iterator[threading.Thread]:
    """Has a client add its numbers in a thread; waits at the end until it has added all."""
    thread = threading.Thread(target=talk, args=(example().COUNTER, adder, endpoints, b"", PATIENCE_S), daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE_S)
    assert adder.done


def test_a_counter_survives_kill_9_of_its_host_and_counts_each_request_once(tmp_path: Path) -> None:
    port, store = free_port(), str(tmp_path / "records.sqlite")
    amounts = [*range(1, 1001)]
    adders = [example().Adder(name, amounts) for name in ("a", "b")]
    with adding(adders[0], [f"127.0.0.1:{port}"]), adding(adders[1], [f"127.0.0.1:{port}"]):
        for count in (100, 300, 500):
            with serving(port, store, tmp_path / "log") as process:
                until(lambda c=count: all(len(one.sums) >= c for one in adders), "requests that are answered")
                process.send_signal(signal.SIGKILL)
                assert process.wait(PATIENCE_S) == -signal.SIGKILL
        with serving(port, store, tmp_path / "log"):
            until(lambda: all(one.done for one in adders), "the last request")
    sums = sorted(adders[0].sums + adders[1].sums)
    assert sums[-1] == 2 * sum(amounts)
    assert len(set(sums)) == len(sums), "each answer is another sum: no request was counted twice, and none was lost"


@pytest.mark.slow
def test_another_server_leads_when_the_first_is_killed(tmp_path: Path) -> None:
    with servers(tmp_path / "etcd", 1) as etcd:
        ports = [free_port(), free_port()]
        places = [f"127.0.0.1:{port}" for port in ports]
        adder = example().Adder("a", [*range(1, 201)])
        with (
            serving(ports[0], etcd.address, tmp_path / "log-0") as first,
            serving(ports[1], etcd.address, tmp_path / "log-1"),
            adding(adder, places),
        ):
            until(lambda: len(adder.sums) >= 50, "requests that are answered")
            first.send_signal(signal.SIGKILL)
            until(lambda: adder.done, "the last request")
        assert adder.sums[-1] == sum(range(1, 201))


def test_who_does_not_say_its_name_first_is_refused(tmp_path: Path) -> None:
    port = free_port()
    with serving(port, ":memory:", tmp_path / "log"), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/chaos_lightning.service.counter/Attend", None, None)
        spec = example().COUNTER
        for said in (spec.write_said(example().Add(1, 2)), b"{}", b"\xff"):
            stream = call(iter([said]), timeout=PATIENCE_S, wait_for_ready=True)
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_server_with_a_token_lets_nobody_in_without_it(tmp_path: Path) -> None:
    port, troubles = free_port(), list[str]()
    with serving(port, ":memory:", tmp_path / "log", CHAOS_TOKEN="a secret"):
        client = connect(
            example().COUNTER,
            "a",
            [f"127.0.0.1:{port}"],
            on_connected=lambda: None,
            on_message=lambda message: None,
            on_trouble=lambda error: troubles.append(str(error)),
        )
        client.start()
        until(lambda: any("missing cluster token" in each for each in troubles), "a refusal")
        client.close()
        adder = example().Adder("a", [5])
        assert talk(example().COUNTER, adder, [f"127.0.0.1:{port}"], b"a secret", PATIENCE_S)
        assert adder.sums == [5]


def test_what_could_not_be_read_back_is_not_written() -> None:
    """A record that the next leader cannot read would end the service for good."""
    spec, module = example().COUNTER, example()
    assert spec.read_record(spec.write_record(module.Added("a", 1, 2))) == module.Added("a", 1, 2)
    for wrong in (module.Added("a", 1, 2.5), module.Added("a", 1, 1 << 63), module.Added(b"a", 1, 2), module.Sum(1, 2)):
        with pytest.raises(TypeError, match=r"Added|Sum"):
            spec.write_record(wrong)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 150


def test_bad_options_are_named(tmp_path: Path) -> None:
    for given, words in (
        (["--listen", "127.0.0.1:0"], "others must know the port"),
        (["--listen", "0.0.0.0:1", "--store", "etcd://127.0.0.1:1"], "--advertise"),
        (["--listen", "0.0.0.0:29999", "--store", ":memory:"], "token"),
    ):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), "serve", *given], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert words in done.stderr
