"""Certificates that expire during an outer job: the excluded process says what to do, others go on, and nothing
hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from keys_support import Refusals, write_keys
from outer_job_support import OuterJob, inner_step, open_session, small_model
from outer_served import PATIENCE_S, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from served import Facts
from until_support import until

from chaos_lightning.errors import ConfigurationError, DeadlineError, RefusedError
from chaos_lightning.outer.cluster.attendant import Attendant
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.commands import follower_main
from chaos_lightning.outer.exchange.control_client import ask_end, fetch_facts
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, Agreement, IncarnationId
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import KeyHolder
from chaos_lightning.security.roles import CLUSTER, FOLLOWER, OPERATOR
from chaos_lightning.testing.harness import Harness

DAY_S = 24 * 3600.0
LONG_S = 30 * DAY_S
OVER_S = -60.0
"""A certificate that counts for so long has ended."""
ENDED = r"the certificate of {} in .* does not count: it expired on 2\d{{3}}.*keys node {} --renew"
EACH = OuterSettings(policy="async", inner_steps=1, batch=16)


class KeysThatEnd:
    """Makes folders of keys that are valid for as long as a test wants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cluster = keyfiles.init(folder / "owner", [])

    def lasts(self, name: str, role: str, seconds: float) -> Path:
        """Writes keys for this name that expire in this number of seconds; returns their folder."""
        return write_keys(self._folder / name, keyfiles.issue(self._cluster, KeyHolder(name, role), seconds / DAY_S))

    def of(self, name: str, role: str, seconds: float = LONG_S) -> Credentials:
        return Credentials(keys=KeyFolder(self.lasts(name, role, seconds)))


@pytest.fixture
def keys(tmp_path: Path) -> KeysThatEnd:
    return KeysThatEnd(tmp_path)


@pytest.fixture
def meanwhile() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_who_is_in_is_put_out_when_its_certificate_ends_and_comes_back_with_the_next(keys: KeysThatEnd) -> None:
    refusals = Refusals()
    with outer_serving(secret=keys.of("server", FOLLOWER), log=refusals) as served:
        follower = ScriptedFollower(served.endpoint, secret=keys.of("f", FOLLOWER, 4.0))
        short = ScriptedCluster(served.endpoint, "short", secret=keys.of("short", CLUSTER, 4.0))
        other = ScriptedCluster(served.endpoint, "other", secret=keys.of("other", CLUSTER))
        with at_once(follower, short, other):
            short.served(1)
            other.served(1)
            out: dict[str, str] = {}
            while len(out) < 2:
                out |= {peer.split()[1]: why for peer, why in refusals.take(some=True)}
            assert set(out) == {"f", "short"}
            assert all("its certificate has expired on 2" in why for why in out.values())
            for ended, name in ((follower, "f"), (short, "short")):
                error = ended.troubles.wait_for(RefusedError)
                assert pytest.raises(RefusedError, match=ENDED.format(name, name)).matches(error)
            assert other.states.seen == ["connected"]
            keys.lasts("f", FOLLOWER, LONG_S)
            keys.lasts("short", CLUSTER, LONG_S)
            for back in (follower, short):
                back.states.wait(lambda state: state == "connected", 2)


def test_who_asks_with_a_certificate_that_has_ended_is_told_at_once(keys: KeysThatEnd) -> None:
    with outer_serving(secret=keys.of("server", FOLLOWER)) as served:
        operator = keys.of("op", OPERATOR)
        assert fetch_facts(served.endpoint, operator)["phase"] == "opening"
        keys.lasts("op", OPERATOR, OVER_S)
        with pytest.raises(RefusedError, match=ENDED.format("op", "op")):
            fetch_facts(served.endpoint, operator)
        with pytest.raises(RefusedError, match=ENDED.format("op", "op")):
            ask_end(served.endpoint, "enough", operator, PATIENCE_S)


def test_a_leader_whose_own_certificate_has_ended_is_named_by_all(
    keys: KeysThatEnd, caplog: pytest.LogCaptureFixture
) -> None:
    with outer_serving(secret=keys.of("server", FOLLOWER)) as served:
        keys.lasts("server", FOLLOWER, OVER_S)
        follower = ScriptedFollower(served.endpoint, secret=keys.of("f", FOLLOWER))
        with at_once(follower):
            said = str(follower.troubles.wait_for(RefusedError))
        assert f"the certificate of the parameter server at {served.endpoint} does not count" in said
        assert "it says to be server, follower; it expired on 2" in said
        assert "`chaos-lightning keys node server --renew`" in said
    assert "the certificate of server does not count: it expired on 2" in caplog.text


def test_nobody_begins_with_a_certificate_that_has_ended(
    keys: KeysThatEnd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = keys.lasts("f", FOLLOWER, OVER_S)
    arguments = ["--server=127.0.0.1:9", f"--dir={tmp_path / 'files'}", f"--keys-dir={folder}"]
    assert follower_main.main(arguments) == 2
    assert "it expired on 2" in capsys.readouterr().err
    home = str(keys.lasts("home", CLUSTER, OVER_S))
    with pytest.raises(ConfigurationError, match=r"certificate of home .* it expired on 2.*keys node home --renew"):
        open_session("127.0.0.1:9", "home", small_model(), str(tmp_path / "logs"), EACH, keys_dir=home)
    session = open_session(
        *("127.0.0.1:9", "home", small_model(), str(tmp_path / "logs"), EACH),
        keys_dir=str(keys.lasts("home", CLUSTER, LONG_S)),
    )
    keys.lasts("home", CLUSTER, OVER_S)
    try:
        with pytest.raises(RefusedError, match=ENDED.format("home", "home")):
            session.start(PATIENCE_S)
    finally:
        session.close()


def test_cluster_and_follower_of_a_leader_that_comes_back_after_their_certificates_have_ended(
    keys: KeysThatEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture, meanwhile: ExitStack
) -> None:
    """After a restart of the leader, cluster and follower have expired certificates: the cluster trains on and says so,
    can end, and both reconnect with new keys.
    """
    harness = meanwhile.enter_context(Harness(tmp_path / "job", deadline_s=90))
    job = OuterJob(harness)
    job.leads = [f"--keys-dir={keys.lasts('server', FOLLOWER, LONG_S)}"]
    job.more = [f"--keys-dir={keys.lasts('f0', FOLLOWER, LONG_S)}"]
    job.start()
    model, home = small_model(), str(keys.lasts("home", CLUSTER, LONG_S))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(job.server, "home", model, str(harness.logs), EACH, keys_dir=home)
    meanwhile.callback(session.close)
    session.start()
    keys.lasts("f0", FOLLOWER, OVER_S)
    keys.lasts("home", CLUSTER, OVER_S)
    harness.declare("leader")
    harness.kill("leader")
    harness.wait_exit("leader")
    job.start_leader()
    until(lambda: "cluster home trains on, and its parameter server does not let it in" in caplog.text, "a warning")
    assert "it expired on 2" in caplog.text
    for step in range(5):
        inner_step(model, optimizer, "home", step)
        session.boundary(16)
    output = tmp_path / "job" / "out" / "f0.0.log"
    until(lambda: "waits for the leader: the certificate of f0 in" in output.read_text(), "what the follower says")
    session.leave()
    with pytest.raises(DeadlineError, match=r"waited 0.2 s for the parameter server at .*it expired on 2.*--renew"):
        session.finish("enough", 0.2)
    keys.lasts("f0", FOLLOWER, LONG_S)
    keys.lasts("home", CLUSTER, LONG_S)
    session.finish("enough", PATIENCE_S)
    assert "asked to leave" in session.over
    assert [r.message for r in caplog.records if "trains on" in r.message][1:] == []


def test_a_rank_of_an_elastic_cluster_that_is_shut_out_says_so_and_ends_nothing(
    keys: KeysThatEnd, caplog: pytest.LogCaptureFixture
) -> None:
    options = ClusterOptions.build({"server": "127.0.0.1:9", "name": "home", "data": "local", "host_server": False}, {})
    hello = say.ClusterHello("home", "", "n", 1, IncarnationId("home", 1), NO_VERSION, NO_VERSION, Agreement(()))
    secret, refused = keys.of("home", CLUSTER), Facts[str]()
    keys.lasts("home", CLUSTER, OVER_S)
    heard: list[Any] = []
    rank = SimpleNamespace(was_in=True, job_id="", happened=heard.append, refused=lambda error: refused.add(str(error)))
    attendant = Attendant(options, secret, 60.0, rank, hello=lambda: hello)
    attendant.start()
    until(lambda: "does not let it in: the certificate of home" in caplog.text, "a warning")
    assert "it expired on 2" in attendant.trouble
    attendant.close()
    assert refused.seen == []
