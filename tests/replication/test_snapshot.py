"""Tests copies of the state that are made while training continues, and are served at their header."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from replication_support import HEAD, LIMIT_S, OTHER, SEQ, dial, donors, numbered

from chaos_lightning.errors import StateError
from chaos_lightning.replication import server, snapshot
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.pull import PullReport, pull_state
from chaos_lightning.replication.server import StateServerConfig
from chaos_lightning.replication.snapshot import Snapshot
from chaos_lightning.replication.source import Endpoint


def test_what_is_copied_stays_as_it_was() -> None:
    tensors = [("a", torch.arange(10.0)), ("b", torch.arange(6).reshape(2, 3).t()), ("c", torch.tensor(3.0))]
    before = [t.clone() for _, t in tensors]
    copy = Snapshot(tensors, volatile={"c"})
    tensors[2][1].fill_(9)  # a forward pass writes this one before anything was settled
    copy.settle(LIMIT_S)
    for _, tensor in tensors:
        tensor.fill_(-1)
    assert [name for name, _ in copy.tensors] == ["a", "b", "c"]
    for (_, mine), theirs in zip(copy.tensors, before, strict=True):
        assert torch.equal(mine, theirs)


def test_training_waits_for_a_copy_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, order = threading.Event(), []

    def slow(name: str, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        assert gate.wait(LIMIT_S)
        copy.copy_(tensor)
        order.append("copied")

    monkeypatch.setattr(Snapshot, "_copy", staticmethod(slow))
    weight = torch.ones(4)
    copy = Snapshot([("w", weight)])
    assert not copy.complete
    threading.Timer(0.05, gate.set).start()
    copy.settle(LIMIT_S)
    order.append("written")
    weight.zero_()
    assert order == ["copied", "written"]
    assert torch.equal(copy.tensors[0][1], torch.ones(4))


def test_a_state_over_the_cap_is_refused_in_words() -> None:
    with pytest.raises(StateError, match="4000 bytes is over the limit of 3999"):
        Snapshot([("w", torch.zeros(1000))], cap_nbytes=3999)


def test_the_cap_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "available_nbytes", lambda: 2000)
    with pytest.raises(StateError, match="over the limit of 1000"):
        Snapshot([("w", torch.zeros(251))])


def pull(endpoints: Sequence[Endpoint], state: Any, head: str = HEAD, seq: int = SEQ) -> PullReport:
    config = PullConfig(deadline_s=LIMIT_S)
    return pull_state(endpoints, dial, head=head, seq=seq, state=state, config=config)


def test_a_snapshot_is_served_while_the_live_state_changes() -> None:
    state, mine = numbered(3, 5000, seed=1), numbered(3, 5000, seed=2)
    before = [t.clone() for _, t in state.tensors()]
    with donors("a", "b") as started:
        for donor in started:
            donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest()).settle(LIMIT_S)
        for _, tensor in state.tensors():
            tensor.zero_()
        report = pull([d.endpoint for d in started], mine)
    assert sum(report.by_source.values()) == 3 * 5000 * 4
    for (_, tensor), expected in zip(mine.tensors(), before, strict=True):
        assert torch.equal(tensor, expected)


def test_a_later_state_is_served_beside_the_snapshot() -> None:
    state, early, late = numbered(2, 100, seed=1), numbered(2, 100, seed=2), numbered(2, 100, seed=3)
    with donors("a") as (donor,):
        donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest()).settle(LIMIT_S)
        for _, tensor in state.tensors():
            tensor.add_(1)
        donor.server.publish(OTHER, SEQ + 3, state.tensors(), state.manifest())
        pull([donor.endpoint], late, OTHER, SEQ + 3)
        pull([donor.endpoint], early)
    for (_, a), (_, b) in zip(early.tensors(), late.tensors(), strict=True):
        assert torch.equal(a + 1, b)


def test_who_asks_before_the_copy_is_whole_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    copy = Snapshot._copy

    def slow(*args: Any) -> None:
        assert gate.wait(LIMIT_S)
        copy(*args)

    monkeypatch.setattr(Snapshot, "_copy", staticmethod(slow))
    state, mine = numbered(1, 100, seed=1), numbered(1, 100, seed=2)
    with donors("a", config=StateServerConfig(pending_interval_s=0.01)) as (donor,):
        donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest())
        threading.Timer(0.1, gate.set).start()
        pull([donor.endpoint], mine)
    assert torch.equal(mine.tensors()[0][1], state.tensors()[0][1])


@pytest.mark.parametrize("how", ["released", "lease over"])
def test_what_nobody_observes_any_more_is_gone(how: str) -> None:
    state = numbered(1, 100)
    with donors("a", config=StateServerConfig(lease_s=0.001)) as (donor,):
        donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest()).settle(LIMIT_S)
        pull([donor.endpoint], numbered(1, 100, seed=2))  # it is there
        if how == "released":
            donor.server.release()
        else:
            assert donor.server.expire(time.monotonic() + 1)
        with pytest.raises(StateError, match="withdrew its last state"):
            pull([donor.endpoint], numbered(1, 100, seed=3))


def test_a_donor_without_memory_says_so_to_whoever_asks() -> None:
    state = numbered(1, 1000)
    with donors("poor", "rich", config=StateServerConfig(snapshot_cap_nbytes=3000)) as (poor, rich):
        with pytest.raises(StateError, match="over the limit"):
            poor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest())
        rich.server.config = StateServerConfig()
        rich.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest()).settle(LIMIT_S)
        report = pull([poor.endpoint, rich.endpoint], numbered(1, 1000, seed=2))
    assert set(report.by_source) == {"rich"}
    assert "over the limit" in report.failed["poor"]


def test_members_of_one_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "available_nbytes", lambda: 8000)
    state = numbered(1, 500)  # 2000 bytes: a half for one member, and too much for three
    with donors("a") as (donor,):
        donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest(), sharers=2).settle(LIMIT_S)
        with pytest.raises(StateError, match="2000 bytes is over the limit of 1333"):
            donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest(), sharers=3)


def test_limits_of_containers_count(tmp_path: Path) -> None:
    """The memory left to a process follows its control group's limits, and counts file pages, which the group can give
    back.
    """
    group = tmp_path / "pods" / "mine"
    group.mkdir(parents=True)
    for folder, most in ((group, "4000"), (group.parent, "max"), (tmp_path, "9000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("3000\n")
        (folder / "memory.stat").write_text("anon 2500\ninactive_file 500\n")
    assert sorted(snapshot.left_in_groups("1:name=systemd:/\n0::/pods/mine\n", tmp_path)) == [1500, 6500]
    assert snapshot.left_in_groups("9:memory:/pods/mine\n", tmp_path) == []
    assert snapshot.available_nbytes() > 0


@pytest.mark.parametrize("place", ["/batch/job7", "/host/folder/that/is/not/mounted"])
def test_limits_of_control_groups_of_version_1_count(tmp_path: Path, place: str) -> None:
    """The memory left follows limits of control groups of version 1, even if a container sees only its own group, as
    the root.
    """
    root = tmp_path / "memory"
    group = root / "batch" / "job7"
    group.mkdir(parents=True)
    for folder, most in ((group, 4000), (group.parent, 0x7FFFFFFFFFFFF000), (root, 9000)):
        (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
        (folder / "memory.usage_in_bytes").write_text("3000\n")
        (folder / "memory.stat").write_text("inactive_file 100\ntotal_inactive_file 500\n")
    membership = f"12:cpuset:/\n9:cpu,memory:{place}\n1:name=systemd:/\n0::/\n"
    found = [n for n in snapshot.left_in_groups(membership, tmp_path) if n < 1 << 62]
    assert sorted(found) == ([1500, 6500] if place == "/batch/job7" else [6500])
