"""Tests two sites behind gateways of the kernel: a firewall that opens named ports, and NAT. Needs root.

Site a has the scheduler. The gateway lets nothing through but the scheduler's port and one range of ports at each
site. Over IPv4 site b is behind NAT: its members announce the gateway's address, which forwards their range. Over IPv6
both sites have addresses of their own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import apart_members
import pytest
from engine_job import PRELOAD, Job
from engine_members import UNTIL_ENOUGH
from forked_support import SCHEDULER

from chaos_lightning.testing.edge import namespaces
from chaos_lightning.testing.edge.namespaces import own_name, remove_leftovers
from chaos_lightning.testing.edge.namespaces import run as run_ip

_ABLE = namespaces.ability()
pytestmark = [
    pytest.mark.skipif(not _ABLE.works, reason=_ABLE.reason),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not found (install nftables)"),
]

PORT = 29400
RANGES = {"a": "29500-29504", "b": "29600-29604"}
RULES = f"""
table inet firewall {{
  chain forward {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    meta l4proto ipv6-icmp accept
    iifname "to-b" oifname "to-a" tcp dport {{ {PORT}, {RANGES["a"]} }} accept
    iifname "to-a" oifname "to-b" tcp dport {RANGES["b"]} accept
  }}
}}
table ip nat {{
  chain out {{ type nat hook postrouting priority 100; oifname "to-a" masquerade; }}
  chain in {{
    type nat hook prerouting priority -100;
    iifname "to-a" ip daddr 10.77.91.1 tcp dport {RANGES["b"]} dnat to 192.168.91.2
  }}
}}
"""
ADDRESSES = {4: {"a": "10.77.91", "b": "192.168.91"}, 6: {"a": "fd91::", "b": "fd92::"}}


@dataclass(frozen=True, slots=True)
class Sites:
    """Network namespaces of the two sites."""

    spaces: dict[str, str]

    def ip(self, site: str, *words: str) -> None:
        run_ip("ip", "-n", self.spaces[site], *words)


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    remove_leftovers()
    made = Sites({site: own_name(f"site-{site}") for site in ("a", "b", "gateway")})
    try:
        for space in made.spaces.values():
            run_ip("ip", "netns", "add", space)
        for site in "ab":
            pair = ("name", f"to-{site}", "type", "veth", "peer", "name", "out", "netns", made.spaces[site])
            made.ip("gateway", "link", "add", *pair)
            for where, device, number in ((site, "out", 2), ("gateway", f"to-{site}", 1)):
                made.ip(where, "link", "set", "lo", "up")
                made.ip(where, "link", "set", device, "up")
                made.ip(where, "addr", "add", f"{ADDRESSES[4][site]}.{number}/24", "dev", device)
                made.ip(where, "addr", "add", f"{ADDRESSES[6][site]}{number}/64", "dev", device, "nodad")
            made.ip(site, "-6", "route", "add", "default", "via", f"{ADDRESSES[6][site]}1")
        made.ip("b", "route", "add", "default", "via", f"{ADDRESSES[4]['b']}.1")
        inside = ("ip", "netns", "exec", made.spaces["gateway"])
        for switch in ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"):
            run_ip(*inside, "sysctl", "-qw", switch)
        subprocess.run([*inside, "nft", "-f", "-"], input=RULES, text=True, check=True, timeout=20)
        yield made
    finally:
        for space in made.spaces.values():
            run_ip("ip", "netns", "del", space, check=False)


class Apart:
    """Job whose members run at two sites."""

    def __init__(self, job: Job, sites: Sites, family: int) -> None:
        self.job = job
        self.sites = sites
        self.family = family
        first = "10.77.91.2" if family == 4 else "[fd91::2]"
        job.endpoint = f"{first}:{PORT}"
        self.token = job.folder / "token"
        self.token.write_text("0123456789abcdef" * 4)
        self.token.chmod(0o600)

    def serve(self, name: str, listen: str = "") -> None:
        """Starts a scheduler at site a, which continues the chain of the scheduler before it."""
        given = ["--listen", listen or self.job.endpoint, "--log-dir", str(self.job.harness.logs)]
        given += ["--store", str(self.job.folder / "chain.sqlite"), "--token-file", str(self.token)]
        space = self.sites.spaces["a"]
        env = {"CHAOS_HOST": "site-a"}
        self.job.harness.start_function(name, apart_members.run, space, SCHEDULER, given, env=env, preload=PRELOAD)
        pid = self.job.harness.children[name].pid
        self.job.harness.wait_for("scheduler_started", lambda r: f"-{pid}." in r.source)

    def start(self, name: str, **settings: Any) -> None:
        """Starts a member at the site with which its name begins."""
        site = name[0]
        given = {"port": RANGES[site], "token_file": str(self.token), "host_scheduler": False, **settings}
        if self.family == 4 and site == "b":
            given.setdefault("announce", "10.77.91.1")
        spec = {
            "name": name,
            "endpoint": self.job.endpoint,
            "report": str(self.job.folder / f"{name}.pt"),
            "enough": str(self.job.folder / "enough"),
            "epochs": UNTIL_ENOUGH,
            "step_s": 0.01,
            "settings": given,
        }
        env = {"CHAOS_HOST": f"site-{site}"}
        space = self.sites.spaces[site]
        self.job.harness.start_function(name, apart_members.train, space, spec, env=env, preload=PRELOAD)
        self.job.harness.wait_for("joined", node=name)  # whoever comes later dials

    def trains(self, count: int) -> None:
        """Waits until `count` members contribute to a step from now on."""
        last = self.job.harness.records[-1] if self.job.harness.records else None
        self.job.harness.wait_for("committed", lambda r: len(r["contributors"]) == count, after=last)

    def linked(self, one: str, other: str) -> None:
        self.job.harness.wait_for("link_up", lambda r: str(r["peer"]).startswith(f"{other}~"), node=one)


@pytest.mark.parametrize("family", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_joins_deaths_and_leaves_through_a_firewall(job: Job, sites: Sites, family: int) -> None:
    apart = Apart(job, sites, family)
    apart.serve("scheduler")
    apart.start("a1")
    apart.start("b1")
    apart.trains(2)
    apart.start("a2")  # dials b1 at the port that the gateway forwards, or lets through
    apart.linked("a2", "b1")
    apart.trains(3)
    job.harness.kill("b1")
    apart.trains(2)
    apart.start("b2")
    apart.trains(3)
    job.harness.terminate("a2")
    assert job.harness.wait_exit("a2") == 0
    job.harness.kill("scheduler")
    apart.trains(2)
    apart.serve("next")
    apart.start("a3")
    apart.linked("a3", "b2")
    apart.trains(3)
    job.finish("a1", "b2", "a3")


def test_what_is_announced_and_not_forwarded_is_told_to_both_ends(job: Job, sites: Sites) -> None:
    """A member announces an address that its gateway does not forward: a newcomer and it are told, and the newcomer
    joins over the third member.
    """
    apart = Apart(job, sites, 4)
    apart.serve("scheduler")
    apart.start("a1")
    apart.start("b1", announce="10.77.91.1:41000")
    apart.trains(2)
    apart.start("a2")
    told = job.harness.wait_for("notice", lambda r: "does not reach" in str(r["text"]), node="b1")
    assert "a2~" in str(told["text"])
    assert "announces 10.77.91.1, port 41000" in str(told["text"])
    job.harness.wait_for("notice", lambda r: "comes in without its links to b1~" in str(r["text"]), node="a2")
    apart.trains(3)
    assert "does not reach b1~" in job.harness.children["b1"].tail()
    job.finish("a1", "b1", "a2")


def test_members_of_ipv4_and_of_ipv6_meet_over_one_that_has_both(job: Job, sites: Sites) -> None:
    apart = Apart(job, sites, 6)
    apart.serve("scheduler", f"[::]:{PORT}")
    apart.start("a1", announce="10.77.91.2", bind="::")
    apart.start("b1", bind="fd92::2")
    apart.trains(2)
    job.endpoint = f"10.77.91.2:{PORT}"
    apart.start("a2", bind="10.77.91.2")
    apart.trains(3)
    job.finish("a1", "b1", "a2")


def test_the_firewall_lets_nothing_else_through(sites: Sites) -> None:
    """The firewall blocks a port that is not named; without this the other tests would prove nothing."""
    listens = "import socket,sys; s=socket.create_server(('10.77.91.2', 29700)); print('ready', flush=True); s.accept()"
    server = subprocess.Popen(
        ["ip", "netns", "exec", sites.spaces["a"], "python3", "-c", listens], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        dials = "import socket; socket.create_connection(('10.77.91.2', 29700), timeout=1)"
        dialled = subprocess.run(
            ["ip", "netns", "exec", sites.spaces["b"], "python3", "-c", dials], capture_output=True, text=True
        )
        assert "timed out" in dialled.stderr
    finally:
        server.kill()
        server.communicate()
