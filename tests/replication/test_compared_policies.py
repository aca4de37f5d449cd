"""Tests the policies of benchmarks/transfer: each carries out its plan over real connections."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replication_support import HEAD, SEQ, Proxy, ThreadDonor, cut, dial, donors, numbered, publishing, pull

from benchmarks.transfer.policies import USUAL_LINK, Greedy, MultiSource, overlay, policy_of
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.planning.shards import COMPARED, wrong_policy
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId
from chaos_lightning.replication import Endpoint, PolicyOptions, make_policy, state_hash
from chaos_lightning.replication.forward import Forwarder
from chaos_lightning.replication.kept import write_bytes
from chaos_lightning.replication.memory import region
from chaos_lightning.replication.policy import Job, TransferPolicy
from chaos_lightning.replication.published import lay_out

NEW = "new"
LINKS = {("a", NEW): (0.0, 8e-8), ("b", NEW): (0.0, 4e-8), ("b", "c"): (0.0, 1e-8), ("c", "d"): (0.0, 1e-8)}
ESTIMATES = {"a": (0.001, 100e6), "b": (0.001, 300e6)}
Save = Callable[[str], Path]


@contextlib.contextmanager
def overlaid(state: Any) -> Iterator[dict[str, ThreadDonor]]:
    """Yields donors in an overlay: a and b are the newcomer's neighbours, c is reached through b, and d through c."""
    with publishing(state, "a", "b", "c", "d") as started:
        by_name = {d.member: d for d in started}
        for donor in started:
            donor.server.forwarder = Forwarder(donor.member, lambda member: dial(by_name[member].endpoint))
        yield by_name


def made(name: str, save: Save | None = None) -> TransferPolicy:
    given = {"multi_source": {"links": LINKS}, "stop_resume": {"save": save}}.get(name, {})
    return policy_of(name, ESTIMATES, PolicyOptions(newcomer=NEW), **given)


def saving(state: Any, folder: Path) -> Save:
    return lambda member: write_bytes(folder, lay_out(HEAD, SEQ, [region(n, t) for n, t in state.tensors()]))


def shares(name: str, policy: TransferPolicy | None = None, save: Save | None = None) -> dict[str, int]:
    theirs, mine = numbered(80, 25_000), numbered(80, 25_000, seed=1)
    with overlaid(theirs) as by_name:
        near = [by_name["a"].endpoint, by_name["b"].endpoint]
        report = pull(near, mine, policy=policy or made(name, save))
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors()) == report.state_hash
    assert report.policy == name
    assert report.reason
    assert report.failed == {}
    assert report.duplicated == report.steals == 0
    return dict(report.by_source)


def test_fixed_shares_are_what_was_planned(tmp_path: Path) -> None:
    assert shares("even") == {"a": 4_000_000, "b": 4_000_000}
    assert shares("single") == {"b": 8_000_000}
    assert shares("stop_resume", save=saving(numbered(80, 25_000), tmp_path)) == {"a": 8_000_000}
    for name in ("greedy", "optimal"):
        found = shares(name, policy_of(name, ESTIMATES, shard_nbytes=200_000))
        assert found["a"] == pytest.approx(2_000_000, abs=200_000)


def test_multi_source_has_everybody_send_the_same_over_its_route() -> None:
    theirs, mine = numbered(80, 25_000), numbered(80, 25_000, seed=1)
    with overlaid(theirs) as by_name:
        near = [by_name["a"].endpoint, by_name["b"].endpoint]
        policy = made("multi_source")
        assert [(e.member, e.route) for e in policy.sources(near)] == [
            ("a", ()),
            ("b", ()),
            ("c", ("b", "c")),
            ("d", ("b", "c", "d")),
        ]
        report = pull(near, mine, policy=policy)
        relayed = {name: d.server.forwarder.relayed_nbytes for name, d in by_name.items() if d.server.forwarder}
        served = {name: sum(d.server.served_nbytes.values()) for name, d in by_name.items()}
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    assert report.by_source == served == dict.fromkeys("abcd", 2_000_000)
    assert relayed["a"] == relayed["d"] == 0
    assert relayed["b"] > 4_000_000  # what c and d sent, and their answers
    assert relayed["c"] > 2_000_000


def test_a_relay_that_dies_costs_its_sources_only() -> None:
    theirs, mine = numbered(80, 25_000), numbered(80, 25_000, seed=1)
    with overlaid(theirs) as by_name:

        def die(data: bytearray, position: int) -> None:
            if position > 300_000:
                proxy.acceptor.listener.close()
                cut()

        proxy = Proxy(by_name["b"].endpoint, die)
        report = pull([by_name["a"].endpoint, proxy.endpoint], mine, policy=made("multi_source"))
        proxy.close()
    assert set(report.failed) == {"b", "c", "d"}
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_an_overlay_behind_a_member_that_is_no_donor_is_refused() -> None:
    with (
        donors("a") as started,
        pytest.raises(ConfigurationError, match="b, c, d lie behind members that are no donors; donors are a"),
    ):
        pull([started[0].endpoint], numbered(1, 1), policy=made("multi_source"))


def test_a_checkpoint_that_the_disk_damaged_is_not_believed(tmp_path: Path) -> None:
    theirs, mine = numbered(4, 100_000), numbered(4, 100_000, seed=1)
    save = saving(theirs, tmp_path)

    def damaged(member: str) -> Path:
        path = save(member)
        with path.open("r+b") as file:
            file.seek(500_000)
            file.write(os.urandom(8))
        return path

    with (
        publishing(theirs, "a") as started,
        pytest.raises(StateError, match=r"3 replies in a row arrived corrupted"),
    ):
        pull([started[0].endpoint], mine, policy=made("stop_resume", damaged))
    assert mine.adopted is None


# --- policies of a job, by the setting --------------------------------------------------------------------------------


def situation(members: str, near: str, *links: str) -> PolicyOptions:
    """Returns the facts for a policy, with `j` as the newcomer, one-letter members, and links as pairs of letters."""
    sources = [Member(m, m, "host", f"{m}.example", 7000) for m in members]
    view = View(ViewId(1, 1), NO_VIEW, tuple(sources), links=tuple(LinkSpec(*pair) for pair in links))
    return PolicyOptions(
        newcomer="j", sources=sources, view=view, near=set(near), layer_nbytes=(1000, 2_000_000), ingress_bps=1e9
    )


@pytest.mark.parametrize("name", COMPARED)
def test_the_words_about_an_old_name_lead_to_its_class(name: str) -> None:
    words = wrong_policy(name)
    assert "expected one of adaptive, shared, or MODULE:CLASS" in words
    if name == "stop_resume":
        assert words.endswith("in a copy of the repository run python -m benchmarks.transfer")
    else:
        made = make_policy(words.rpartition("transfer=")[2], {"a": (0.01, 1e8)}, situation("ab", "ab"))
        assert made.name == name


def test_greedy_knows_the_sizes_of_layers() -> None:
    policy = Greedy({"a": (0.01, 1e8), "b": (0.01, 3e8)}, situation("ab", "ab"))
    plan = policy.assign([Job(at, at + 100_000) for at in range(0, 2_000_000, 100_000)], ["a", "b"])
    assert "sizes from 1000 to 2000000 bytes searched" in plan.reason


def test_overlay_of_a_complete_graph_is_this_members_own_links() -> None:
    known = {"a": (0.01, 8e6)}
    assert overlay(known, situation("ab", "")) == {("j", "a"): (0.01, 1e-6), ("j", "b"): (0.01, 1e-6)}
    assert overlay({}, situation("ab", "")) == {("j", "a"): USUAL_LINK, ("j", "b"): USUAL_LINK}


def test_overlay_of_a_sparse_graph_leads_on_and_leaves_out_where_no_link_leads() -> None:
    """No links connect members e and f to the newcomer, so the overlay leaves them out; a and b are reached through
    c.
    """
    job = situation("abcef", "c", "ab", "bc", "ef")
    assert set(overlay({"c": (0.01, 8e6)}, job)) == {("j", "c"), ("a", "b"), ("b", "c")}
    near = [Endpoint("c", "127.0.0.1", 1)]
    assert [e.member for e in MultiSource({}, job).sources(near)] == ["c", "a", "b"]


def test_without_a_link_to_a_source_there_is_no_overlay() -> None:
    with pytest.raises(ConfigurationError, match="needs an overlay in which the newcomer has a link to a source"):
        MultiSource({}, situation("ab", "x", "ab"))
