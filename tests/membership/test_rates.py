"""Tests the estimate of links between machines, for plans of pipelines, from members' reports."""

from __future__ import annotations

from dataclasses import replace

from membership_script import member

from chaos_lightning.membership.rates import MeasuredLink, change
from chaos_lightning.membership.topology import Topology
from chaos_lightning.planning.pipelines.job import LinkRate
from chaos_lightning.protocol.types import LinkReport, Member


def at(name: str, host: str) -> Member:
    return replace(member(f"{name}~1"), host=host)


def look(rows: dict[str, float], hosts: str = "abc") -> LinkRate | None:
    """Returns the estimated usual link, where `rows` gives, for "ab", the rate from a to b in Mbps."""
    topology = Topology(())
    members = [at(name, host) for name, host in zip("abc", hosts, strict=True)]
    for (a, b), rate in rows.items():
        topology.report(f"{a}~1", LinkReport(f"{b}~1", 0.001, 1e6 * rate, "probe"))
    found = MeasuredLink(topology)
    found.look(members)
    return found.usual


def test_the_median_counts_and_of_a_pair_its_slower_direction() -> None:
    assert look({}) is None
    assert look({"ab": 100, "ba": 40, "bc": 900, "ac": 70}) == LinkRate(rate_bps=70e6, latency_s=0.001)


def test_links_within_a_machine_and_links_that_carry_nothing_do_not_count() -> None:
    assert look({"ab": 5}, hosts="hhc") is None
    assert look({"ab": 5, "ac": 0, "ca": 80}, hosts="hhc") == LinkRate(rate_bps=80e6, latency_s=0.001)
    assert look({"ab": 0}) is None


def test_it_stays_until_it_is_off_by_more_than_a_quarter() -> None:
    topology, members = Topology(()), [at("a", "a"), at("b", "b")]
    found = MeasuredLink(topology)
    kept = []
    for rate, latency in ((100, 1), (120, 1.4), (81, 1.1), (70, 1), (70, 1.4), (70, 2)):
        topology.report("a~1", LinkReport("b~1", latency / 1e3, 1e6 * rate, "probe"))
        found.look(members)
        assert found.usual is not None
        kept.append((found.usual.rate_bps / 1e6, 1e3 * found.usual.latency_s))
    assert kept == [(100, 1), (100, 1), (100, 1), (70, 1), (70, 1), (70, 2)]


def test_a_change_is_told_in_words() -> None:
    assert change(None, None) == ""
    assert change(None, LinkRate(rate_bps=1e8, latency_s=0.001)) == "", (
        "a scheduler that has just begun knows no plan's"
    )
    assert change(LinkRate(), LinkRate(rate_bps=1e8)) == "links between machines carry 100 Mbps after 0 ms"
    assert change(LinkRate(rate_bps=1e8, latency_s=0.001), LinkRate(rate_bps=1e8, latency_s=0.001)) == ""
    text = "links between machines carry 10 Mbps after 2 ms where 100 Mbps after 1 ms were foreseen"
    assert change(LinkRate(rate_bps=1e8, latency_s=0.001), LinkRate(rate_bps=1e7, latency_s=0.002)) == text
