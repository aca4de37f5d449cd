"""What this machine's process table says about another process on it.

A heartbeat that does not come may mean a stopped process or a busy machine. On one machine the kernel knows: a
neighbour on the same host reads the suspect's state instead of guessing from silence, so load never fences the living.
"""

from __future__ import annotations

import os
from pathlib import Path

from chaos_lightning.membership.types import Member


def host_identity() -> str:
    """Names the process table that pids of this process belong to: boot id and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown-{os.uname().nodename}"


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


def same_machine_verdict(member: Member | None) -> tuple[bool, str]:
    """(alive, evidence); evidence is empty if the member is unknown or not on this machine."""
    if member is None or not member.pid or member.host != host_identity():
        return False, ""
    stat = _stat(member.pid)
    if stat is None or (member.pid_start and stat[1] != member.pid_start):
        return False, "its process is gone"
    if stat[0] in "ZX":
        return False, "its process has died"
    if stat[0] in "Tt":
        return False, "its process is stopped"
    return True, f"its process runs (state {stat[0]})"
