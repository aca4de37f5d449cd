"""Tests two schedulers of one job name in etcd: whose settings count, and which keys each takes for its own."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from until_support import until

from chaos_lightning.control.etcd_rules import EtcdRules
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_client import put
from chaos_lightning.service.etcd_servers import EtcdServers

PATIENCE_S = 60.0


@pytest.fixture
def job() -> str:
    return f"job-{os.urandom(4).hex()}"


def candidacy_of(etcd: EtcdServers, job: str, **rules: int) -> tuple[EtcdRules, Settings]:
    address = read_address(f"{etcd.address}/seats")
    return EtcdRules(address, job), Settings(job=job, **rules)  # type: ignore[arg-type]


@contextlib.contextmanager
def leading(candidacy: EtcdRules, name: str) -> Iterator[None]:
    """Waits until a candidacy is elected, and closes it after the block."""
    elected = threading.Event()
    candidacy.candidacy.stand(f"{name}:1", elected.set, lambda reason: None, lambda *_, **__: None, set)
    try:
        assert elected.wait(PATIENCE_S)
        yield
    finally:
        candidacy.candidacy.close()


def test_who_follows_a_leader_goes_by_the_rules_of_the_job(etcd: EtcdServers, job: str) -> None:
    first, given = candidacy_of(etcd, job, min_nodes=2)
    second, other = candidacy_of(etcd, job, min_nodes=3, max_nodes=5)
    assert first.check(given) == ""
    with contextlib.ExitStack() as stack:
        stack.enter_context(leading(first, "a"))
        first.open_store().take_term()
        assert first.rules(given) == given
        words = second.check(other)
        assert f"job {job} is there already, and goes by the rules that it began with" in words
        assert "min_nodes=2 instead of 3" in words
        elected = threading.Event()
        second.candidacy.stand("b:1", elected.set, lambda reason: None, lambda *_, **__: None, set)
        stack.callback(second.candidacy.close)
        until(second.candidacy.waited, "the second one to follow")
        first.candidacy.close()
        assert elected.wait(PATIENCE_S)
        second.open_store().take_term()
        assert second.rules(other) == given


def test_who_comes_alone_brings_rules_of_its_own(etcd: EtcdServers, job: str) -> None:
    """A scheduler that an operator starts alone, after the earlier one, sets the job's settings anew."""
    for number, nodes in enumerate((2, 1)):
        candidacy, given = candidacy_of(etcd, job, min_nodes=nodes)
        with leading(candidacy, f"s{number}"):
            candidacy.open_store().take_term()
            assert candidacy.rules(given).min_nodes == nodes


def test_rules_that_cannot_be_read_are_refused_before_anything_starts(etcd: EtcdServers, job: str) -> None:
    candidacy, given = candidacy_of(etcd, job)
    with contextlib.closing(etcd.client()) as client:
        for value in (b"precious", b"[]", json.dumps({"settings": '{"from_the_future": 1}'}).encode()):
            client.transact([], [put(f"seats/jobs/{job}/rules", value)])
            with pytest.raises(ConfigurationError, match=r"rules of job .* cannot be read .* choose another job name"):
                candidacy.check(given)
    candidacy.candidacy.close()


def test_a_scheduler_ends_at_once_where_keys_are_not_its_own(etcd: EtcdServers, job: str, tmp_path: Path) -> None:
    from chaos_lightning.control.options import SchedulerOptions
    from chaos_lightning.control.scheduler_main import run

    def started(store: str) -> None:
        run(SchedulerOptions(listen="127.0.0.1:0", settings=Settings(job=job), store=store))

    with contextlib.closing(etcd.client()) as client:
        client.transact([], [put(f"chaos-lightning/jobs/{job}/tip", b"precious")])
        with pytest.raises(ConfigurationError, match="if the keys are another program's, choose another prefix"):
            started(etcd.address)
        (tmp_path / "password").write_text("ann's\n")
        with pytest.raises(ConfigurationError, match="it has no passwords"):
            started(f"etcd://ann@{etcd.servers[0].endpoint}/mine?password-file={tmp_path / 'password'}")


def test_a_candidate_at_a_wildcard_must_say_where_it_is_reached(job: str) -> None:
    from chaos_lightning.control.options import SchedulerOptions
    from chaos_lightning.control.scheduler_main import run

    options = SchedulerOptions(listen="0.0.0.0:29400", settings=Settings(job=job), store="etcd://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=r"--listen 0\.0\.0\.0:29400.*--advertise"):
        run(options)
