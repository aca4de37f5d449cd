"""Looks up other processes in this machine's process table.

A heartbeat that does not come may mean a stopped process or a busy machine. On one machine the kernel knows: a
neighbour on the same host reads the suspect's state instead of guessing from silence, so load never fences the living.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine import watcher
from chaos_lightning.machine.addresses import is_local
from chaos_lightning.machine.watcher import process_state as process_state
from chaos_lightning.protocol.types import Member

_BOOT_ID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UNKNOWN = "unknown-"
"""Beginning of the name of a machine that has no process table to look into."""
_counts_as = ""


class Sight(NamedTuple):
    """State of a process as the process table shows it.

    Attributes:
        alive: The process runs.
        evidence: State of the process as text; "" if nothing is known: it is hidden, or on another machine.
        certain: The process has ended for good (a stopped one may continue).
    """

    alive: bool
    evidence: str
    certain: bool = False


SIGHTS = {
    "runs": Sight(True, "its process runs"),
    "stopped": Sight(False, "its process is stopped"),
    "gone": Sight(False, "its process is gone", certain=True),
    "": Sight(False, ""),
}
"""Verdict that follows from each state that `watcher.process_state` names."""


def rebooted(member: Member) -> str:
    """Returns a text if a member's machine seems to be this one before a reboot, judged by the member's address; else
    "".

    Then all its processes are gone. Another machine may have had that address, so this is no proof by itself.
    """
    boot, ours = member.host.partition("/")[0], host_identity().partition("/")[0]
    if not member.pid or not _BOOT_ID.fullmatch(boot) or not _BOOT_ID.fullmatch(ours) or boot == ours:
        return ""
    try:
        here = is_local(member.address)
    except ConfigurationError:
        return ""
    return f"the machine with its address, {member.address}, was started anew since" if here else ""


def host_identity() -> str:
    """Returns the identity of this process's process table: boot id, pid namespace, and the name from `count_as`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" + (f"@{_counts_as}" if _counts_as else "")
    except OSError:
        return f"{_UNKNOWN}{os.uname().nodename}"


def short_host(identity: str) -> str:
    """Returns a short form of a `host_identity`, by which people see which processes share a machine."""
    boot, slash, space = identity.partition("/")
    return f"{boot[:8]}/{space.rstrip(']')[-4:]}" if slash else boot[:13]


def count_as(machine: str) -> str:
    """Makes this process claim to be on another machine, for emulations ("": its real one); returns the former name.

    So one machine can be several for an emulated network (testing/emulation.py): none looks into another's process
    table.
    """
    global _counts_as
    before, _counts_as = _counts_as, machine
    return before


def start_time(pid: int) -> int:
    """Returns a process's start time (ticks since boot; 0: unknown), which tells it from a later one with the same
    pid.
    """
    stat = watcher.stat(pid)
    return stat[1] if stat else 0


def process_began() -> float:
    """Returns the Unix seconds at which this process started."""
    ticks = start_time(os.getpid())
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0
    return time.time() - age_s


def still_runs(pid: int, started: int) -> bool:
    """Returns whether the process with this pid and start time (ticks since boot) still runs; zombies do not."""
    return watcher.process_state(pid, started) in ("runs", "stopped")


def same_machine_verdict(member: Member | None) -> Sight:
    """Returns what this machine's process table shows about a member that is on this machine."""
    if member is None or not member.pid or member.host.startswith(_UNKNOWN) or member.host != host_identity():
        return Sight(False, "")
    return SIGHTS[watcher.process_state(member.pid, member.pid_start)]
