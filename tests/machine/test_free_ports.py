"""Tests the search for ports for servers that are started a moment later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos_lightning.machine.listener import free_port, free_ports


def test_processes_that_look_at_once_find_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that search at the same time find different ports, all below those that the kernel gives to
    connections.
    """
    found: list[int] = []
    for pid in range(os.getpid(), os.getpid() + 6):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        found += [*free_ports(30), *(free_port() for _ in range(30))]
    assert len(set(found)) == len(found)
    (lowest, *_) = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert 1024 < min(found) < max(found) < int(lowest)
