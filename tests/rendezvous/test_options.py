"""Tests options of --rdzv-conf: how they are read and refused, and which variables workers inherit."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning.control.hosting import options_for_engine
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.process_table import process_began
from chaos_lightning.protocol.types import Settings
from chaos_lightning.rendezvous.options import RendezvousOptions, candidates, read_options
from chaos_lightning.service.options import MEMORY
from chaos_lightning.settings import EngineConfig

ROOT = Path(__file__).resolve().parents[2]


def read(
    conf: dict[str, str] | None = None, environ: dict[str, str] | None = None, **changes: Any
) -> RendezvousOptions:
    values: dict[str, Any] = {"endpoint": "127.0.0.1:29500", "run_id": "j", "nodes": (1, 4), **changes}
    return read_options(given={"timeout": 900, **(conf or {})}, environ=environ or {}, **values)


def worker_config(options: RendezvousOptions, local_rank: int = 0, **more: str) -> EngineConfig:
    """Returns the configuration that a worker of an agent with these options uses."""
    return EngineConfig.build({}, {**options.environment(), "LOCAL_RANK": str(local_rank), **more})


def test_defaults_reach_the_worker() -> None:
    options = read()
    config = worker_config(options)
    assert (config.endpoint, config.job, config.min_nodes, config.max_nodes) == ("127.0.0.1:29500", "j", 1, 4)
    assert config.name == f"{options.node}-0"
    assert config.bind == "127.0.0.1"
    assert config.join_timeout_s == 900.0
    default = EngineConfig()
    same = {"keys_dir", "token_file", "plan", "chunk_nbytes", "log_dir", "step_timeout_s", "overlap", "by_reference"}
    for name in same:
        assert getattr(config, name) == getattr(default, name), name
    assert options.scheduler.settings == Settings(job="j", min_nodes=1, max_nodes=4)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("", "127.0.0.1:29400"), ("localhost", "localhost:29400"), ("127.0.0.1:5", "127.0.0.1:5"), ("[::1]:5", "[::1]:5")],
)
def test_endpoints(endpoint: str, expected: str) -> None:
    assert read(endpoint=endpoint).config.endpoint == expected


def test_workers_get_notices_whose_times_and_paths_do_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline counts from the start of the agent, and not again from each restart of a worker."""
    monkeypatch.chdir(tmp_path)
    options = read({"notice": "deadline:8h+file:leave+aws:http://127.0.0.1:8"})
    told = options.environment()["CHAOS_NOTICE"]
    at = worker_config(options).notice_plan.sources["deadline"]
    assert told == f"deadline:{at}+file:{tmp_path / 'leave'}+aws:http://127.0.0.1:8"
    assert float(at.removeprefix("@")) == pytest.approx(process_began() + 28800.0, abs=0.5)
    with pytest.raises(ConfigurationError, match="--rdzv-conf notice='azure': 'azure' is no source of notices"):
        read({"notice": "azure"})


@pytest.mark.parametrize(("run_id", "job"), [("none", "default"), ("", "default"), ("my-job.1", "my-job.1")])
def test_the_run_id_is_the_jobs_name(run_id: str, job: str) -> None:
    assert read(run_id=run_id).config.job == job


def test_nodes_are_counted_not_workers() -> None:
    options = read(nodes=(2, 5))
    assert (options.config.min_nodes, options.config.max_nodes) == (2, 5)
    assert (options.scheduler.settings.min_nodes, options.scheduler.settings.max_nodes) == (2, 5)


def test_what_was_given_arrives_with_a_worker_in_another_folder() -> None:
    paths = {"keys_dir": "keys", "token_file": "token", "log_dir": "logs", "on_last_exit": "kept"}
    given = {"overlap": "no", "ingress_bps": "2e8", "neighbours": "a+b", "links": "authenticated", "node": "edge.1"}
    options = read({**paths, **given, "store": "etcd://a+b", "advertise": "gate", "load_timeout_s": "14"})
    config = worker_config(options, local_rank=1)
    assert config.name == "edge.1-1"
    assert {name: getattr(config, name) for name in paths} == {k: os.path.abspath(v) for k, v in paths.items()}
    assert (config.overlap, config.ingress_bps, config.neighbour_names) == (False, 2e8, ("a", "b"))
    assert (config.links, options.scheduler.settings.links) == ("authenticated", "authenticated")
    assert (config.join_timeout_s, options.scheduler.settings.join_timeout_s) == (900.0, 14.0)
    assert (options.scheduler.store, options.scheduler.advertise) == ("etcd://a+b", "gate:29400")
    assert read({"store": "chain"}).scheduler.store == os.path.abspath("chain")
    assert read({"store": MEMORY}).scheduler.store == MEMORY


def test_a_worker_would_revive_the_very_same_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    options = read({"hang_timeout_s": "11", "plan": "tree", "store": "/x/chain", "idle_timeout_s": "9"})
    for name, value in options.environment().items():
        monkeypatch.setenv(name, value)
    ours = options_for_engine(options.config)
    theirs = options_for_engine(EngineConfig.build({}))
    assert ours == theirs
    assert theirs.settings.hang_timeout_s == 11.0
    assert theirs.settings.plan.kind == "tree"
    assert (theirs.store, theirs.idle_timeout_s) == ("/x/chain", 9.0)


def test_the_users_environment_stands_in_for_what_was_not_given() -> None:
    environ = {"CHAOS_PLAN": "chain", "CHAOS_LOG_DIR": "logs", "CHAOS_NODE": "n", "CHAOS_BIND": "127.0.0.3"}
    options = read(environ=environ)
    assert (options.config.plan, options.node, options.config.bind) == ("chain", "n", "127.0.0.3")
    assert options.config.log_dir == os.path.abspath("logs")
    options = read({"plan": "tree", "node": "m", "bind": "127.0.0.4"}, environ)
    assert (options.config.plan, options.node, options.config.bind) == ("tree", "m", "127.0.0.4")


def test_settings_from_the_environment_are_kept() -> None:
    assert read(environ={"CHAOS_SETTINGS": '{"hang_timeout_s": 3}'}).scheduler.settings.hang_timeout_s == 3.0


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"heartbeat_timout_s": "1"}, "unknown heartbeat_timout_s; known are.*heartbeat_timeout_s"),
        ({"nde": "x", "blan": "y"}, "unknown blan, nde"),
        ({"plan": "ring"}, "plan 'ring' is unknown"),
        ({"chunk_nbytes": "many"}, "chunk_nbytes='many': expected a whole number"),
        ({"overlap": "maybe"}, "overlap='maybe': expected 0 or 1"),
        ({"idle_timeout_s": "-1"}, "idle_timeout_s=-1.0: expected a positive"),
        ({"heartbeat_timeout_s": "soon"}, "heartbeat_timeout_s='soon'"),
        ({"hang_timeout_s": "soon"}, "hang_timeout_s='soon': expected a number"),
        ({"node": "a b"}, "node='a b'"),
        ({"timeout": "x"}, "timeout='x': expected a number"),
        ({"advertise": "a:1"}, "advertise=a:1: only candidates with their chain in etcd are named"),
        ({"advertise": "a:b", "store": "etcd://a"}, "advertise=a:b: expected HOST:PORT"),
        ({"advertise": "0.0.0.0:1", "store": "etcd://a"}, "advertise=0.0.0.0:1: nobody can call that"),
        ({"advertise": "a:1+b:1", "store": "etcd://a"}, r"advertise=a:1\+b:1: expected HOST:PORT"),
        ({"advertise": "a+b", "store": "etcd://a"}, r"advertise=a\+b: nobody can call that"),
        ({"advertise": "a:0", "store": "etcd://a"}, "advertise=a:0: nobody can call that"),
    ],
)
def test_mistakes_are_named(conf: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(conf)


def test_a_port_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="endpoint"):
        read(endpoint="localhost:0")


def test_options_of_torchs_own_backends_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read({"last_call_timeout": "1", "is_host": "true"})
    assert "is_host, last_call_timeout: not used" in caplog.text
    caplog.clear()
    read()
    assert caplog.text == ""


def test_the_address_that_faces_the_endpoint() -> None:
    assert read(endpoint="localhost:1").config.bind == "127.0.0.1"
    assert read(local_addr="127.0.0.9").config.bind == "127.0.0.9"


def test_no_route_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute:
        def __init__(self, *args: object) -> None: ...

        def __enter__(self) -> NoRoute:
            raise OSError("Network is unreachable")

        def __exit__(self, *args: object) -> None: ...

    monkeypatch.setattr(socket, "socket", NoRoute)
    with pytest.raises(ConfigurationError, match=r"no route to the endpoint 192\.0\.2\.1:29500.*bind=ADDRESS"):
        read(endpoint="192.0.2.1:29500")


def test_an_option_that_equals_the_default_goes_before_the_environment() -> None:
    """An option given in --rdzv-conf overrides the environment even if it equals the default, for the agent and for
    its workers, which inherit the environment.
    """
    environ = {"CHAOS_PLAN": "chain", "CHAOS_OVERLAP": "0", "CHAOS_IDLE_TIMEOUT_S": "5"}
    options = read({"plan": "auto", "overlap": "1", "idle_timeout_s": "0"}, environ)
    assert (options.config.plan, options.config.overlap, options.scheduler.idle_timeout_s) == ("auto", True, 0.0)
    variables = {**environ, **options.environment()}
    assert EngineConfig.build({}, variables).plan == "auto"
    assert EngineConfig.build({}, variables).overlap
    assert variables["CHAOS_IDLE_TIMEOUT_S"] == "0.0"


def test_torchruns_own_timeout_comes_after_the_environment() -> None:
    assert read(environ={"CHAOS_JOIN_TIMEOUT_S": "7"}).config.join_timeout_s == 7.0
    assert read({"join_timeout_s": "8"}, {"CHAOS_JOIN_TIMEOUT_S": "7"}).config.join_timeout_s == 8.0


def test_an_agents_candidate_is_told_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a chain in etcd, the address at which others reach this agent's scheduler is passed on to workers, which
    may start it again.
    """
    options = read({"store": "etcd://127.0.0.1+127.0.0.2", "advertise": "gate.example:4000"})
    assert options.scheduler.advertise == "gate.example:4000"
    monkeypatch.delenv("CHAOS_ADVERTISE", raising=False)
    assert options_for_engine(options.config).advertise == ""
    for name, value in options.environment().items():
        monkeypatch.setenv(name, value)
    found = options_for_engine(options.config)
    assert (found.advertise, found.store) == ("gate.example:4000", "etcd://127.0.0.1+127.0.0.2")
    assert found.listen == options.config.endpoints[0] != found.advertise
    assert read({"store": "etcd://a"}, environ={"CHAOS_ADVERTISE": "g:1"}).scheduler.advertise == "g:1"
    monkeypatch.setenv("CHAOS_STORE", "")
    with pytest.raises(ConfigurationError, match=r"CHAOS_ADVERTISE=gate\.example:4000: only candidates"):
        options_for_engine(options.config)


def test_agents_that_listen_everywhere_are_candidates_where_they_can_be_called() -> None:
    store = "etcd://127.0.0.1"
    assert candidates("127.0.0.1:1234", "0.0.0.0", store) == "127.0.0.1:1234"
    assert candidates("127.0.0.1:1234,127.0.0.9:1", "127.0.0.5", store) == "127.0.0.5:1234,127.0.0.1:1234,127.0.0.9:1"
    assert candidates("127.0.0.1:1234", "127.0.0.5", "") == "127.0.0.1:1234"
