"""What this machine's process table says about another process on it.

A heartbeat that does not come may mean a stopped process or a busy machine. On one machine the kernel knows: a
neighbour on the same host reads the suspect's state instead of guessing from silence, so load never fences the living.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from chaos_lightning.membership.types import Member

_UNKNOWN = "unknown-"
"""Begins the name of a machine that has no process table to look into."""


class Sight(NamedTuple):
    """What the process table says.

    Attributes:
        alive: The process runs.
        evidence: In words; "" if nothing can be said: unknown, not on this machine, or hidden.
        certain: It is gone or has died, and will never speak again (a stopped one may).
    """

    alive: bool
    evidence: str
    certain: bool = False


def host_identity() -> str:
    """Names the process table that pids of this process belong to: boot id and pid namespace.

    CHAOS_HOST in the environment makes one machine look like several, for emulated networks (testing/edge.py).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        emulated = os.environ.get("CHAOS_HOST", "")
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" + (f"@{emulated}" if emulated else "")
    except OSError:
        return f"{_UNKNOWN}{os.uname().nodename}"


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks) or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def start_time(pid: int) -> int:
    """Start time in clock ticks since boot; tells a process from a later one with the same pid. 0 if unknown."""
    stat = _stat(pid)
    return stat[1] if stat else 0


def _exists(pid: int) -> bool:
    """Whether there is such a process, even one that /proc hides from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def process_state(pid: int, pid_start: int) -> str:
    """Of a process of this machine: "gone", "stopped" or "runs"; "" if it is hidden from this user."""
    stat = _stat(pid)
    if stat is None:
        return "" if _exists(pid) else "gone"
    if pid_start and stat[1] != pid_start:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(stat[0], "runs")


def same_machine_verdict(member: Member | None) -> Sight:
    """What this machine's process table says about a member that was on it."""
    if member is None or not member.pid or member.host.startswith(_UNKNOWN) or member.host != host_identity():
        return Sight(False, "")
    stat = _stat(member.pid)
    if stat is None:
        return Sight(False, "") if _exists(member.pid) else Sight(False, "its process is gone", certain=True)
    if member.pid_start and stat[1] != member.pid_start:
        return Sight(False, "its process is gone", certain=True)
    if stat[0] in "ZX":
        return Sight(False, "its process has died", certain=True)
    if stat[0] in "Tt":
        return Sight(False, "its process is stopped")
    return Sight(True, f"its process runs (state {stat[0]})")
