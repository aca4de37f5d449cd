"""Tests that files of finished jobs are deleted after a while, and that files in use stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from chain_support import finish

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import FINAL
from chaos_lightning.control.upkeep import CHAINS_LEFT, clean_up
from chaos_lightning.events.events import FORGOTTEN_S
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId
from chaos_lightning.service.sqlite_store import SqliteStore

NOW = time.time() + FORGOTTEN_S + 86400.0
"""All that a test writes within a day is old enough then."""


def chain(folder: Path, *, over: bool) -> Path:
    path = folder / "chain.sqlite"
    with JobChain(SqliteStore(path, "job")) as store:
        store.take_term()
        assert store.append(Persist(1, "view", ViewId(1, 1), View(ViewId(1, 1), NO_VIEW, ()))).ok
        if over:
            assert store.append(finish(ViewId(1, 2))).ok
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return chain(tmp_path / "own-1", over=False)


def test_folders_of_jobs_that_finished_long_ago_go(own: Path, tmp_path: Path) -> None:
    over = chain(tmp_path / "over-2", over=True).parent
    chain(tmp_path / "fresh-3", over=True)
    os.utime(tmp_path / "fresh-3" / "chain.sqlite", (NOW, NOW))
    assert clean_up(own, NOW, 600.0) == [over]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh-3", "own-1"]


def test_what_may_be_needed_stays(own: Path, tmp_path: Path) -> None:
    chain(tmp_path / "unfinished-2", over=False)
    (tmp_path / "of-somebody-else").mkdir()
    (tmp_path / "of-somebody-else" / "thesis.txt").write_text("x")
    (tmp_path / "a-file").write_text("x")
    damaged = chain(tmp_path / "damaged-4", over=True)
    damaged.write_bytes(b"no database")
    (tmp_path / "link-5").symlink_to(chain(tmp_path / "apart" / "over", over=True).parent)
    with JobChain(SqliteStore(chain(tmp_path / "served-6", over=True), "job", exclusive=True)) as served:
        served.take_term()
        before = sorted(tmp_path.iterdir())
        assert clean_up(own, NOW, 600.0) == []
        assert sorted(tmp_path.iterdir()) == before


def test_the_newest_archived_chains_stay(own: Path, tmp_path: Path) -> None:
    paths = [own.with_name(f"chain.finished-{number:02d}.sqlite") for number in range(CHAINS_LEFT + 3)]
    for age, path in enumerate(reversed(paths)):
        path.write_bytes(b"x")
        os.utime(path, (NOW - age, NOW - age))
    assert clean_up(own, NOW, 600.0) == paths[:3]
    assert sorted(own.parent.glob("chain.finished-*")) == paths[3:]


def test_final_states_go_when_newcomers_are_told_of_the_end_no_more(own: Path, tmp_path: Path) -> None:
    final = own.parent.parent / "other-1" / "kept" / FINAL
    final.mkdir(parents=True)
    (final / "kept.json").write_text("{}")
    assert clean_up(own, time.time(), 600.0) == []
    assert clean_up(own, time.time() + 700.0, 600.0) == [final]
    assert not final.exists()
