"""Starts processes of tests, labs and demos, each in a group of its own with output in a file; finds and ends them.

Theory of operation. Two ways to start one, one handle for both. A *command* is a fresh program (`Popen`). A *function*
runs in a child of multiprocessing's fork server, which has torch, Lightning and this package imported already:
importing them costs ten seconds on a small machine, a child of the fork server has them after some milliseconds. Either
way the child leads its own session, so a signal for its group (a torchrun agent and its workers) never reaches the
test, its output goes to one file, and it dies with the test runner (PR_SET_PDEATHSIG), so that a test that is killed
leaves no load behind. Exits are noticed through the child's sentinel (pidfd or pipe), which a wait can select on;
nobody polls for them.

What children start in turn (agents, workers, a scheduler that detaches itself) is found by a `Mark`, an environment
variable that all of them inherit with a value of this lab's own. A process is signalled through a pidfd that was opened
before its mark was read, so a number that was given out anew is never hit. Relays that stand in front of one server for
several clients tell them apart by `owner_of`: whose connection this is (Linux; IPv4 and IPv6).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from chaos_lightning.testing.emulation import carried, enter

PRELOAD = (
    "torch",
    "lightning.pytorch",
    "torchmetrics",
    "chaos_lightning.strategies",
    "chaos_lightning.callbacks",
    "chaos_lightning.trainer",
    "chaos_lightning.control.agent",
)
STACKS = signal.SIGVTALRM
"""Signal that a child that runs a function answers with the stacks of all its threads, in its output. Nothing else
uses it.
"""
_PR_SET_PDEATHSIG = 1
_TURN_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


def importable() -> str:
    """Returns a PYTHONPATH with which a command can import all that this process can."""
    return os.pathsep.join(p for p in sys.path if p)


def die_with_parent() -> None:
    """Makes the Linux kernel kill this process when the thread that started it ends; does nothing on other systems."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hold_the_lock(seconds: float) -> None:
    """Holds the GIL during one long C call, so that no other thread runs Python, as in a long garbage collection."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_LAUNCH = (
    "import ctypes, os, signal, sys; "
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL, 0, 0, 0) if sys.platform == 'linux' else None; "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python program that binds itself to its parent, then becomes the command; a preexec_fn would run Python between
fork and exec of a threaded test.
"""


@dataclass(slots=True)
class Child:
    """A started process; if `expected`, its death does not fail the test."""

    name: str
    pid: int
    log: Path
    started: float
    """Time of its start, monotonic clock, s."""
    sentinel: int
    """File descriptor that becomes readable when the process has ended."""
    poll: Callable[[], int | None]
    """Returns the exit code, negative for a signal; None while the process runs."""
    own_sentinel: bool = False
    """Whether the descriptor is ours to close."""
    expected: bool = False
    frozen: bool = False
    killed: bool = False
    """Whether SIGKILL was sent, so that its end is a matter of time."""
    tells_stacks: bool = False
    """Whether it answers to `STACKS`."""

    @property
    def running(self) -> bool:
        """Whether the process still runs."""
        return self.poll() is None

    def send(self, number: int, *, group: bool = False) -> bool:
        """Sends a signal to the process (or its whole group); returns False if it has ended already."""
        if not self.running:
            return False
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
            return True
        return False

    def end_group(self) -> None:
        """Sends SIGKILL to all that is left of the process's group, frozen or not.

        A group that still has members keeps its leader's number from being given out again; so if the leader is gone
        and a process of that number exists, the group is empty and the process is a stranger's.
        """
        if not self.running and _exists(self.pid):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Closes the process's file descriptor; the process must have ended."""
        if self.own_sentinel:
            self.own_sentinel = False
            os.close(self.sentinel)

    def tail(self, lines: int = 40) -> str:
        """Returns the last lines that the process printed."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(no output: {error})"
        return "\n".join(text.splitlines()[-lines:]) or "(it printed nothing)"

    def stacks(self, patience_s: float = 2.0) -> str:
        """Makes the process print the stacks of its threads; returns what it printed.

        Returns:
            Stacks; "" if the child cannot print them: it has ended, is frozen, has only just started, or is a program.
        """
        if self.frozen or not self.tells_stacks or not self.running or not self.log.exists():
            return ""
        before, told, end = self.log.stat().st_size, "", time.monotonic() + patience_s
        self.send(STACKS)
        while time.monotonic() < end:
            time.sleep(_TURN_S)
            grown = self.log.read_bytes()[before:].decode(errors="replace")
            if grown and grown == told:
                break
            told = grown
        return told

    def words(self) -> str:
        """Returns the state of the process as text, for messages."""
        code = self.poll()
        if code is None:
            return f"{self.name} (pid {self.pid}) is {'frozen' if self.frozen else 'running'}"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.name} (pid {self.pid}) ended with {how}"


def start_command(
    name: str, command: Sequence[str], log: Path, *, env: Mapping[str, str], cwd: Path | None = None
) -> Child:
    """Starts a program in a session of its own; its output goes to the file `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=carried(env),
            cwd=cwd,
            start_new_session=True,
        )
    pidfd = os.pidfd_open(process.pid)
    return Child(name, process.pid, log, time.monotonic(), pidfd, process.poll, own_sentinel=True)


@functools.cache
def forkserver(preload: tuple[str, ...] = PRELOAD) -> ForkServerContext:
    """Returns the multiprocessing context of a fork server that has these modules imported; its first child waits for
    the import.

    The preload list is that of the first call in a process: there is one fork server.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def start_function(
    name: str,
    target: Callable[..., object],
    args: Sequence[Any],
    log: Path,
    *,
    env: Mapping[str, str],
    preload: Sequence[str] = PRELOAD,
) -> Child:
    """Runs `target(*args)` in a child of the fork server; both must be picklable (the target: a module-level
    function).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    context = forkserver(tuple(preload))
    process: BaseProcess = context.Process(
        target=_in_child, args=(name, str(log), dict(env), target, tuple(args)), name=name, daemon=False
    )
    process.start()
    assert process.pid is not None
    poll = functools.partial(_exit_code, process)
    return Child(name, process.pid, log, time.monotonic(), process.sentinel, poll, tells_stacks=True)


def _exit_code(process: BaseProcess) -> int | None:
    return process.exitcode


def _in_child(name: str, log: str, env: Mapping[str, str], target: Callable[..., object], args: Sequence[Any]) -> None:
    os.setsid()
    die_with_parent()
    faulthandler.register(STACKS, file=2)
    gc.freeze()  # else the first collections walk all that was preloaded: three times 0.3 s of a job's first steps
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    enter(env)
    # A SIGINT default handler is missing in children of a shell's background job: polite exits need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target(*args)


MARK = "CHAOS_LAB"
POLITE_S = 4.0
"""Seconds between SIGTERM and SIGKILL."""


class Mark:
    """Environment variable by which all processes of a lab are found, since they inherit it.

    Args:
        value: Unique value; by default a new one.
        name: Name of the environment variable.
    """

    def __init__(self, value: str = "", name: str = MARK) -> None:
        self.value = value or uuid.uuid4().hex
        self.name = name
        self._words = f"{name}={self.value}".encode()

    def environment(self) -> dict[str, str]:
        """Returns the environment variable that processes of this lab must be started with."""
        return {self.name: self.value}

    def alive(self) -> set[int]:
        """Returns the ids of all running processes with the mark, except this process."""
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return {pid for pid in pids if pid != os.getpid() and self._bears(pid)}

    def end(self, polite_s: float = POLITE_S) -> int:
        """Ends all processes with the mark, frozen ones too: SIGTERM, later SIGKILL; returns how many there were."""
        ended: set[int] = set()
        for number, patience_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, 10.0)):
            signalled: set[int] = set()
            deadline = time.monotonic() + patience_s
            while (alive := self.alive()) and time.monotonic() < deadline:
                for pid in alive - signalled:
                    self.send(pid, signal.SIGCONT, number)  # a frozen one would sleep through SIGTERM
                    signalled.add(pid)
                ended |= alive
                time.sleep(_TURN_S)
        return len(ended)

    def send(self, pid: int, *numbers: int) -> bool:
        """Sends signals to a process, in order; returns False if it has ended, or does not bear the mark."""
        with self._open(pid) as handle:
            if handle < 0:
                return False
            try:
                for number in numbers:
                    signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return False
            return True

    @contextlib.contextmanager
    def _open(self, pid: int) -> Iterator[int]:
        """Yields a pidfd of a process if it bears the mark, else -1."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            yield -1
            return
        try:
            yield handle if self._bears(pid) else -1
        finally:
            os.close(handle)

    def _bears(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in "ZX" and self._words in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            return False


_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""Tables of TCP connections; both, since gRPC dials IPv4 addresses by sockets of IPv6."""


def owner_of(near: socket.socket, pids: Mapping[int, str]) -> str:
    """Returns the name of the process that dialled this connection, if it is one of `pids`; else "".

    Args:
        near: Accepted end of the connection.
        pids: Names by process id.
    """
    # By both ports: a dialler's port alone may also be used for connections to other places.
    dialled, wanted, inodes = near.getsockname()[1], near.getpeername()[1], set()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(f":{wanted:04X}") and fields[2].endswith(f":{dialled:04X}"):
                    inodes.add(f"socket:[{fields[9]}]")
    for pid, name in pids.items():
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{entry}") in inodes:
                        return name
    return ""
