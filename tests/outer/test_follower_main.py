"""Followers in processes of their own, with a leader and a cluster's pushes, are killed and started again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from forked_support import run
from outer_served import HERE, OuterServed, ScriptedCluster, outer_serving
from torch import Tensor
from until_support import until

from chaos_lightning.declared import declared, read_options
from chaos_lightning.errors import ConfigurationError, NoDonorError
from chaos_lightning.events.events import read_events
from chaos_lightning.events.registry import problems
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.outer.commands import follower_main, server_main
from chaos_lightning.outer.exchange.codec import BF16, Part
from chaos_lightning.outer.exchange.fetching import fetch_version, hold_push
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate
from chaos_lightning.outer.exchange.lines import SERVING, ParkedLines
from chaos_lightning.outer.exchange.server_options import ServerOptions
from chaos_lightning.outer.follower.follower_options import FollowerOptions
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Founded,
    Offer,
    PushId,
    Round,
    TensorSpec,
    VersionId,
)
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.replication.server import StateServer
from chaos_lightning.service.main import options_parser
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.testing.processes import Child, start_function

AGREEMENT = Agreement(
    (TensorSpec("w", "float32", (300, 10)), TensorSpec("mean", "float32", (90,))), averaged=1, block=64
)
GRID = Grid((3000, 90), 64)
NAMES = ("one", "two")


def content(number: int) -> Tensor:
    scale = 1.0 if number == 1 else 0.1
    return torch.randn(GRID.elements, generator=torch.Generator().manual_seed(number)) * scale


class PushingCluster(ScriptedCluster):
    """Scripted cluster whose pushes have real bytes, which it serves to the followers that the leader names."""

    def __init__(self, endpoints: str) -> None:
        super().__init__(endpoints)
        self.server = StateServer(SERVING)
        self.lines = ParkedLines(
            self.server, job="default", me=lambda: str(self.me), secret=b"", note=lambda *args, **fields: None
        )
        self.holders: tuple[say.Holder, ...] = ()
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat_on)

    def start(self) -> None:
        super().start()
        self._beats.start()

    def _beat_on(self) -> None:
        """Sends heartbeats in the background, since a follower may take longer to start than a leader waits for a
        silent cluster.
        """
        while not self._over.wait(0.2):
            if self.me is not None:
                self.beat()

    def hello(self) -> None:
        self.client.say(
            say.ClusterHello(self.name, "", self.nonce, self.term, self.me, self.base, self.newest, AGREEMENT, HERE)
        )

    def answer(self, message: object) -> None:
        if isinstance(message, say.Holders):
            self.holders = message.holders
            self.lines.follow(message.holders)
        super().answer(message)

    def push(self) -> None:
        assert self.me is not None
        push = PushId(self.me, self.number)
        whole = Part.encoded(GRID.whole, BF16, content(self.number))
        manifest = hold_push(self.server, push, whole, GRID.cut(len(NAMES)))
        trained = (0, 0) if self.base == NO_VERSION else (64, 2)
        self.client.say(say.Offered(Offer(push, self.base, manifest, *trained)))

    def fetch(self, version: VersionId) -> Tensor:
        part = Part.empty(GRID.whole, BF16)
        shards = GRID.cut(len(NAMES))

        def done() -> bool:
            try:
                fetch_version(version, shards, BF16, self.holders, part, self.lines.dial, deadline_s=20.0)
            except NoDonorError:
                return False  # a follower is on its way back
            return True

        until(done, f"version {version}")
        return part.data

    def close(self) -> None:
        self._over.set()
        self._beats.join()
        super().close()
        self.lines.close()
        self.server.close()


@contextmanager
def following(endpoint: str, name: str, folder: Path) -> Iterator[Child]:
    options = [f"--server={endpoint}", f"--name={name}", f"--dir={folder / name}", f"--log-dir={folder / 'events'}"]
    child = start_function(name, run, (follower_main.__name__, options), folder / f"{name}.log", env={})
    try:
        yield child
    finally:
        child.send(signal.SIGKILL)
        until(lambda: not child.running, f"the end of {name}")
        child.release()


@pytest.mark.parametrize("listen", ["127.0.0.1:5", "[::1]:5"])
def test_a_server_tells_its_followers_all_that_they_have_settings_for(tmp_path: Path, listen: str) -> None:
    both = declared(FollowerOptions).keys() & declared(ServerOptions).keys() - {"name", "dir", "bind", "advertise"}
    given = {name: "checksum" if name == "links" else f"a-{name}" for name in both}
    words = server_main._follower(ServerOptions(listen=listen, dir=str(tmp_path), **given), "f-0")
    known = declared(FollowerOptions)
    told = FollowerOptions(**read_options(options_parser("", "", known).parse_args(words), known))
    assert {name: getattr(told, name) for name in both} == given
    assert (told.server, told.name, told.folder) == (listen, "f-0", tmp_path / "f-0")
    assert told.place == (split_endpoint(listen)[0], 0)


def replayed(shelf: Shelf) -> Tensor:
    """Returns the newest version of a chain, computed from the cluster's pushes without a follower."""
    chain = load_chain(MemoryStore(shelf=shelf))
    state = OuterState(GRID.whole, torch.zeros(GRID.elements))
    for version in sorted(chain.versions):
        body = chain.versions[version].entry.body
        if isinstance(body, Founded):
            state = OuterState(GRID.whole, Part.encoded(GRID.whole, BF16, content(body.offer.push.number)).decoded())
        elif isinstance(body, Round):
            parts = [Part.encoded(GRID.whole, BF16, content(w.offer.push.number)) for w in body.accepted]
            pushes = [(w.factor, part) for w, part in zip(body.accepted, parts, strict=True)]
            RoundUpdate(state, pushes, body.factors, None, GRID.whole.since(1)).run()
    return Part.encoded(GRID.whole, BF16, state.theta).data


def test_followers_that_are_killed_are_there_again_with_the_same_versions(tmp_path: Path) -> None:
    shelf = Shelf()
    with ExitStack() as stack:
        served: OuterServed = stack.enter_context(outer_serving(lambda: MemoryStore(shelf=shelf), followers=2))
        children = [stack.enter_context(following(served.endpoint, name, tmp_path)) for name in NAMES]
        cluster = PushingCluster(served.endpoint)
        cluster.start()
        stack.callback(cluster.close)
        versions = [cluster.served(1)]
        for number in range(2, 8):
            if number in (4, 6):  # one of them, and then both
                for child in children[: number // 2 - 1]:
                    child.send(signal.SIGKILL)
                    until(lambda child=child: not child.running, "its end")
                for place in range(number // 2 - 1):
                    children[place] = stack.enter_context(following(served.endpoint, NAMES[place], tmp_path))
            until(lambda number=number: cluster.number == number, f"the answer to push {number - 1}")
            cluster.push()
            versions.append(cluster.served(number))
        newest = versions[-1]
        assert newest.number == 7
        assert torch.equal(cluster.fetch(newest), replayed(shelf))
        for child in children:
            child.send(signal.SIGTERM)
            until(lambda child=child: not child.running, "its end")
            assert child.poll() == 128 + signal.SIGTERM
    written = [record for path in (tmp_path / "events").glob("*.jsonl") for record in read_events(path)]
    assert [line for record in written for line in problems(record.name, record.fields)] == []
    assert {"follower_started", "version_computed", "version_saved", "version_loaded", "push_staged"} <= {
        record.name for record in written
    }


def test_what_cannot_work_is_said_and_ends_with_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert follower_main.main(["--server=nowhere:0", f"--dir={tmp_path}"]) == 2
    assert follower_main.main(["--bind=0.0.0.0", f"--dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "name the port" in said
    assert "keys" in said


def test_where_a_follower_is_reached() -> None:
    assert FollowerOptions(bind="127.0.0.1").place == ("127.0.0.1", 0)
    assert FollowerOptions(bind="[::1]:70").place == ("::1", 70)
    assert FollowerOptions(bind="0.0.0.0:70").advertised == "127.0.0.1"  # where it faces a leader on this machine
    assert FollowerOptions(advertise="far:80").advertised == "far:80"
    assert FollowerOptions().advertised == ""
    with pytest.raises(ConfigurationError, match="nobody can call that"):
        FollowerOptions(advertise="0.0.0.0:80")
