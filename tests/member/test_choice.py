"""Transfer policies get the facts from which they plan."""

from __future__ import annotations

import pytest

from chaos_lightning.member.choice import USUAL_LINK, Situation, TransferChoice, overlay
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId
from chaos_lightning.replication.baselines import MultiSource
from chaos_lightning.replication.policy import Job


def situation(members: str, near: str, *links: str, **rates_bps: float) -> Situation:
    """Returns a situation with member j as the newcomer; links as pairs of letters; rates of its own links by
    member.
    """
    sources = [Member(m, m, "host", f"{m}.example", 7000) for m in members]
    view = View(ViewId(1, 1), NO_VIEW, tuple(sources), links=tuple(LinkSpec(*pair) for pair in links))
    return Situation("j", sources, view, set(near), {m: (0.01, r) for m, r in rates_bps.items()}, (1000, 2_000_000))


@pytest.mark.parametrize(("ingress_bps", "held"), [(0.0, False), (1e8, True), (1e10, False)])
def test_adaptive_plans_by_the_newcomers_own_access(ingress_bps: float, held: bool) -> None:
    policy, instead = TransferChoice("adaptive", ingress_bps).make(situation("ab", "ab", a=1e8, b=3e8))
    plan = policy.assign([Job(at, at + 100_000) for at in range(0, 2_000_000, 100_000)], ["a", "b"])
    assert ("held back by the newcomer's own 100 Mbps" in plan.reason) == held, plan.reason
    assert instead == ""


def test_greedy_knows_the_sizes_of_layers() -> None:
    policy, _ = TransferChoice("greedy").make(situation("ab", "ab", a=1e8, b=3e8))
    plan = policy.assign([Job(at, at + 100_000) for at in range(0, 2_000_000, 100_000)], ["a", "b"])
    assert "sizes from 1000 to 2000000 bytes searched" in plan.reason


def test_overlay_of_a_complete_graph_is_this_members_own_links() -> None:
    assert overlay(situation("ab", "", a=8e6)) == {("j", "a"): (0.01, 1e-6), ("j", "b"): (0.01, 1e-6)}
    assert overlay(situation("ab", "")) == {("j", "a"): USUAL_LINK, ("j", "b"): USUAL_LINK}


def test_overlay_of_a_sparse_graph_leads_on_and_leaves_out_where_no_link_leads() -> None:
    """Members e and f are joined to each other only."""
    links = overlay(situation("abcef", "c", "ab", "bc", "ef", c=8e6))
    assert set(links) == {("j", "c"), ("a", "b"), ("b", "c")}
    policy, instead = TransferChoice("multi_source").make(situation("abcef", "c", "ab", "bc", "ef", c=8e6))
    assert isinstance(policy, MultiSource)
    assert instead == ""


def test_without_a_link_to_a_source_multi_source_is_not_honoured_and_says_so() -> None:
    policy, instead = TransferChoice("multi_source").make(situation("ab", "x", "ab"))
    assert policy.name == "adaptive"
    assert "multi_source is not possible: j has no link to a member with the state" in instead


def test_checkpoints_are_written_only_where_a_folder_is_named() -> None:
    assert TransferChoice().writer() is None
    writer = TransferChoice(folder="/tmp").writer()
    assert writer is not None
    assert str(writer.folder) == "/tmp"
