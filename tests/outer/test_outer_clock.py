"""A wall clock that jumps by an hour again and again changes nothing in outer sync, since all decisions use a monotonic
clock.
"""

from __future__ import annotations

import ast
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest
import torch
from outer_job_support import inner_step, open_session, small_model
from outer_served import PATIENCE_S, outer_serving
from until_support import until

from chaos_lightning import outer
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.machine.listener import free_port
from chaos_lightning.outer.cluster.session import OuterSession
from chaos_lightning.outer.exchange.control_client import ask_end, control_client, fetch_facts
from chaos_lightning.outer.follower.follower_process import FollowerProcess
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import Durable, Removed, Round
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.sqlite_store import SqliteStore

HOUR_S = 3600.0
EACH = OuterSettings(policy="robust", inner_steps=2, batch=16)


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function that makes the wall clock jump: from its call on each reading is right, an hour early or an hour
    late.
    """
    right, off = time.time, cycle((HOUR_S, 0.0, -HOUR_S))

    def wrong() -> float:
        reader = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        return right() + (0.0 if reader == "grpc" else next(off))  # gRPC compares it with a clock that did not jump

    def begin() -> None:
        monkeypatch.setattr(time, "time", wrong)

    return begin


@pytest.fixture
def meanwhile() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def follow(place: str, folder: Path, note: Callable[..., None]) -> FollowerProcess:
    """Returns a follower that runs in this process."""
    made = FollowerProcess(
        *("f0", ShardFiles(folder, "default"), ("127.0.0.1", 0), b""),
        lambda **calls: control_client([place], b"", call="Follow", **calls),
        note,
    )
    made.start()
    return made


def train_until(session: OuterSession, model: torch.nn.Module, number: int) -> None:
    """Trains until the session has adopted version `number` or a later one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = iter(range(1_000_000))

    def adopted() -> bool:
        inner_step(model, optimizer, "home", next(steps))
        session.boundary(16)
        return session.base.number >= number

    until(adopted, f"version {number}", PATIENCE_S)


def test_neither_leader_nor_follower_nor_cluster_goes_by_wall_time(
    tmp_path: Path, jump: Callable[[], None], meanwhile: ExitStack
) -> None:
    port, store = free_port(), tmp_path / "chain.sqlite"
    place, log = f"127.0.0.1:{port}", EventLog(tmp_path / "events.jsonl", role="leader")
    meanwhile.callback(log.close)
    leads = meanwhile.enter_context(ExitStack())
    leads.enter_context(outer_serving(lambda: SqliteStore(store, "default", exclusive=True), port=port, log=log))
    meanwhile.callback(follow(place, tmp_path / "f0", log.emit).close)
    model = small_model()
    session = open_session(place, "home", model, str(tmp_path / "logs"), EACH)
    meanwhile.callback(session.close)
    session.start()
    train_until(session, model, 3)
    jump()
    train_until(session, model, 6)
    leads.close()  # and the one that comes waits for those whom it knows
    leads.enter_context(outer_serving(lambda: SqliteStore(store, "default", exclusive=True), port=port, log=log))
    train_until(session, model, 9)
    assert [cluster["name"] for cluster in fetch_facts(place, b"")["clusters"]] == ["home"]
    ask_end(place, "enough", b"", PATIENCE_S)
    session.finish("enough", PATIENCE_S)
    assert session.incarnation == "home~1"
    leads.close()
    with SqliteStore(store, read_only=True) as last:
        chain = load_chain(last)
    assert chain.ended is not None
    assert len(chain.durable) == 2
    entries = [record for record in read_events(tmp_path / "events.jsonl") if record.name == "entry"]
    kinds = [record["kind"] for record in entries]
    assert kinds.count(Removed.__name__) == 0
    assert kinds.count(Round.__name__) >= 8
    assert kinds.count(Durable.__name__) >= 3


WALL_CLOCK = {"time", "time_ns", "localtime", "gmtime", "strftime", "ctime"}
ON_WALL_TIME = {"server_main.py:put_away": 1, "server_main.py:run": 1, "ended_folders.py:words": 2}
"""Functions that name and age the folders of ended jobs, with how often each reads the clock: files have wall time."""


def test_nothing_of_outer_sync_reads_the_wall_clock() -> None:
    """No module of outer sync may read the wall clock, which would decide leases, windows and heartbeats; certificates
    and logs may.
    """
    found = []

    def walk(path: Path, within: str, node: ast.AST) -> None:
        for each in ast.iter_child_nodes(node):
            match each:
                case ast.Attribute(ast.Name("time"), name) if name in WALL_CLOCK:
                    found.append(f"{path.name}:{within or each.lineno}")
                case ast.Import(names) if any(alias.name == "datetime" for alias in names):
                    found.append(f"{path.name}:{each.lineno}")
                case ast.ImportFrom("datetime" | "time"):
                    found.append(f"{path.name}:{each.lineno}")
            walk(path, each.name if isinstance(each, ast.FunctionDef) else within, each)

    for path in sorted(Path(outer.__file__).parent.rglob("*.py")):
        walk(path, "", ast.parse(path.read_text()))
    assert Counter(found) == ON_WALL_TIME
