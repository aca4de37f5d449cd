"""Tests the ports of links: members listen at given ports, over IPv6 too, and announce other addresses to others."""

from __future__ import annotations

import socket
from pathlib import Path

from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.machine.listener import free_port, free_ports


def listening(ports: list[int]) -> set[int]:
    """Returns which of these ports some process listens at, by the kernel's tables."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A":
                found.add(int(cells[1].rpartition(":")[2], 16))
    return found.intersection(ports)


def span() -> list[int]:
    """Returns three consecutive free ports."""
    for _ in range(100):
        first = free_port()
        ports = [first, first + 1, first + 2]
        try:
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return ports
    raise AssertionError("no three ports in a row are free")


def test_members_share_a_range_of_ports_and_one_too_many_says_who_has_them(job: Job) -> None:
    ports = span()
    given = {"port": f"{ports[0]}-{ports[1]}"}
    for name in "ab":
        job.start(name, settings={"min_nodes": 2, **given}, epochs=UNTIL_ENOUGH)
    job.harness.wait_step(2)
    assert listening(ports) == {*ports[:2]}
    job.harness.declare("c")
    job.start("c", settings=given, epochs=UNTIL_ENOUGH)
    assert job.harness.wait_exit("c") == 1
    said = job.harness.children["c"].tail()
    assert f"cannot listen at 127.0.0.1:{ports[0]}: port {ports[0]}-{ports[1]} is taken ({ports[0]}: pid " in said
    job.unharmed("a", "b")


def test_members_meet_over_ipv6(job: Job) -> None:
    job.endpoint = f"[::1]:{free_port()}"
    ports = free_ports(2)
    for name, port in zip("ab", ports, strict=True):
        job.start(name, settings={"min_nodes": 2, "bind": "::1", "port": str(port)}, epochs=UNTIL_ENOUGH)
    job.harness.wait_step(2)
    assert listening(ports) == {*ports}
    job.unharmed("a", "b")


def test_who_listens_on_everything_meets_members_of_either_family(job: Job) -> None:
    token = job.folder / "token"
    token.write_text("a cluster token of a test")
    token.chmod(0o600)
    rules = {"min_nodes": 3, "token_file": str(token)}
    for name, bind in {"a": "::", "b": "127.0.0.1", "c": "::"}.items():
        job.start(name, settings={**rules, "bind": bind}, epochs=UNTIL_ENOUGH)
    job.harness.wait_step(2)
    job.unharmed("a", "b", "c")
