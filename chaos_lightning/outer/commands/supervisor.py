"""Keeps a leader and its followers running on one machine: restarts a process that dies, and ends all of them together.

Theory of operation. One thread waits for signals, for ends of children (SIGCHLD), and for what the warm spare says
(outer/commands/spare.py), which makes the followers. A child that ends is started again, at once for the first time,
then after pauses that grow while it keeps ending soon. One that is stopped (SIGSTOP) for a moment is killed: nobody may
wait for a follower that does nothing. Each child leads a session of its own, so that Ctrl+C in a terminal reaches the
supervisor alone. Each gets SIGKILL from the kernel when the supervisor is gone, so that another one finds ports and
files free.

The leader says by its exit code whether it is to be started again. When it is not, followers may serve the last version
for a while to those who fetch it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chaos_lightning.machine.process_table import process_state
from chaos_lightning.machine.restarts import RestartPolicy, Restarts
from chaos_lightning.machine.signals import END, STAY, ends
from chaos_lightning.outer.commands.leader_main import EXIT_IDLE
from chaos_lightning.service.main import EXIT_FAILED, EXIT_OK, EXIT_USAGE

LEADER = "leader"
SPARE = "spare"
_LOOK_S = 0.2
_STOPPED_LOOKS = 3
"""Number of looks in a row that find a child stopped, after which it is killed."""
_RESTARTS = RestartPolicy(0.2, 10.0, steady_s=10.0, at_once=1)
_ASKED_S = 10.0
"""Seconds after which a warm spare that has made no follower is asked again."""
_WELL_S = 2.0
"""Seconds within which the leader says that the job is over, after a follower ended well because of that."""
_POLITE_S = 10.0
"""Seconds between `END` and SIGKILL."""
_SERVED_S = 65.0
"""Seconds for which followers may serve the last version: a minute at most (follower_process.py), and some more."""
_PR_SET_CHILD_SUBREAPER = 36
_LAUNCH = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0); "
    "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGHUP)]; "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)
"""Program that binds itself to its parent (PR_SET_PDEATHSIG), unless that is gone already, and then runs a child's
command. The children go by the supervisor's word alone: a service manager sends SIGTERM to all processes of a unit.
"""


class _Child:
    """Process that the supervisor starts, and starts again when it dies."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        """Command of the leader or the spare; arguments of `main` for a follower."""
        self.pid = 0
        self.started_s = 0.0
        self.due_s = 0.0
        """Time (monotonic, s) at which the process is to be started (again)."""
        self.asked_s = 0.0
        """Time (monotonic, s) at which the spare was asked for the process; 0.0: it was not."""
        self.restarts = Restarts(_RESTARTS)
        self.stopped = 0


class Supervisor:
    """Supervisor of a leader, a warm spare and followers.

    Args:
        leader: Command of the leader, after the interpreter's path.
        followers: Arguments of `follower_main.main` for each follower, by name.
        emit: Takes (event name, fields) for the event log.
        outlives: Whether a cluster has started the supervisor: at a signal it stays for clusters that leave at the same
            moment.
    """

    def __init__(
        self,
        leader: Sequence[str],
        followers: Mapping[str, Sequence[str]],
        emit: Callable[..., None],
        *,
        outlives: bool = False,
    ) -> None:
        self._emit = emit
        self._leader = _Child(LEADER, leader)
        self._spare = _Child(SPARE, ("-m", "chaos_lightning.outer.commands.spare"))
        self._followers = {name: _Child(name, arguments) for name, arguments in followers.items()}
        self._line: socket.socket | None = None
        """Connection to the spare."""
        self._warm = False
        self._said = b""
        """Beginning of a line from the spare whose end has not come yet."""
        self._signals: list[int] = []
        self._outlives = outlives
        self._stays = False
        """Whether the leader was asked to end."""
        self._code: int | None = None
        """Exit code with which the supervisor is to end; None: it goes on."""

    # ------------------------------------------------------------------ the loop

    def run(self) -> int:
        """Runs the leader, spare and followers until the leader has ended for good or a signal comes; returns the exit
        code. For the main thread only.
        """
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ends():
            signal.signal(number, lambda number, _: self._signals.append(number))
        try:
            while self._code is None:
                self._start_what_is_due()
                self._wait(woken)
                self._reap()
                self._look_for_stopped()
                self._obey()
            return self._code
        finally:
            self._end_all(woken)
            signal.set_wakeup_fd(-1)

    def _obey(self) -> None:
        """Reacts to signals. At the first one, if a cluster started this process, the leader goes on until the clusters
        that leave are done; else all processes end.
        """
        if not self._signals:
            return
        if not self._outlives or not self._leader.pid or len(self._signals) > 1:
            self._code = 128 + self._signals[0]
        elif not self._stays:
            self._stays = True
            _send(self._leader.pid, STAY)

    def _wait(self, woken: socket.socket) -> None:
        lines = [woken] if self._line is None else [woken, self._line]
        readable, _, _ = select.select(lines, [], [], _LOOK_S)
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
        if self._line in readable:
            self._hear_spare()

    @property
    def _children(self) -> list[_Child]:
        return [self._leader, self._spare, *self._followers.values()]

    # ------------------------------------------------------------------ starting

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.pid or now < child.due_s:
                continue
            if child is self._leader:
                self._started(child, _spawn(child.arguments))
            elif child is self._spare:
                self._start_spare()
            elif self._warm and now - child.asked_s > _ASKED_S:
                self._ask_for(child, now)

    def _start_spare(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, its = socket.socketpair()
        self._warm, self._said = False, b""
        its.set_inheritable(True)
        with its:
            self._started(self._spare, _spawn((*self._spare.arguments, str(its.fileno()), str(os.getpid()))))

    def _ask_for(self, child: _Child, now: float) -> None:
        assert self._line is not None
        if child.asked_s:
            self._end_strangers()
        child.asked_s = now
        words = json.dumps({"name": child.name, "arguments": child.arguments}).encode()
        with contextlib.suppress(OSError):  # it is dying, and another one will be asked
            self._line.sendall(words + b"\n")

    def _hear_spare(self) -> None:
        assert self._line is not None
        try:
            data = self._line.recv(65536)
        except OSError:
            data = b""
        if not data:  # it is reaped in a moment
            self._line.close()
            self._line, self._warm = None, False
            return
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "name" not in said:
                self._warm = True
            else:
                self._started(self._followers[said["name"]], said["pid"])

    def _started(self, child: _Child, pid: int) -> None:
        child.pid, child.started_s, child.asked_s, child.stopped = pid, time.monotonic(), 0.0, 0
        self._emit("server_child", child=child.name, pid=pid, up=True, reason="")

    # ------------------------------------------------------------------ ending

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = found[0], os.waitstatus_to_exitcode(found[1])
                for child in self._children:
                    if child.pid == pid:
                        self._ended(child, code)

    def _ended(self, child: _Child, code: int) -> None:
        now = time.monotonic()
        ran_s, child.pid = now - child.started_s, 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._emit("server_child", child=child.name, pid=0, up=False, reason=how)
        if child is self._spare:
            self._warm = False
            self._end_strangers()
            for other in self._followers.values():
                other.asked_s = 0.0
        if self._code is not None:
            return
        first = child.restarts.failures == 0
        pause_s = child.restarts.failed(ran_s)
        leads = child is self._leader
        if leads and self._stays:
            self._code = 128 + self._signals[0]
            return
        if (leads and code in (EXIT_OK, EXIT_IDLE)) or (code == EXIT_USAGE and first and child.restarts.failures):
            self._code = code
            return
        child.due_s = now + (_WELL_S if code == EXIT_OK else pause_s)
        print(f"{child.name} ended with {how}; it is started again", flush=True)

    def _look_for_stopped(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            child.stopped = child.stopped + 1 if process_state(child.pid, 0) == "stopped" else 0
            if child.stopped >= _STOPPED_LOOKS:
                print(f"{child.name} is stopped; it is killed", flush=True)
                _send(child.pid, signal.SIGKILL)

    def _end_strangers(self) -> None:
        """Kills followers that the spare has made but not reported, since two followers of one name must not run."""
        ours = {child.pid for child in self._children}
        with contextlib.suppress(OSError):  # a kernel without that file
            for task in Path("/proc/self/task").iterdir():
                for pid in (task / "children").read_text().split():
                    if int(pid) not in ours:
                        _send(int(pid), signal.SIGKILL)

    def _end_all(self, woken: socket.socket) -> None:
        """Ends all children, first by request and then with SIGKILL; if the job has ended, waits before that while
        followers serve its last version.
        """
        if self._code == EXIT_OK:
            _send(self._spare.pid, END)
            self._wait_for([*self._followers.values()], woken, _SERVED_S)
        self._code = EXIT_FAILED if self._code is None else self._code
        for number in (END, signal.SIGKILL):
            for child in self._children:
                _send(child.pid, number)
            self._end_strangers()
            self._wait_for(self._children, woken, _POLITE_S)

    def _wait_for(self, children: Sequence[_Child], woken: socket.socket, timeout_s: float) -> None:
        """Waits until these children have ended, another signal has come, or the time is up."""
        deadline, signals = time.monotonic() + timeout_s, len(self._signals)
        while any(child.pid for child in children) and time.monotonic() < deadline and len(self._signals) == signals:
            self._wait(woken)
            self._reap()


def _spawn(arguments: Sequence[str]) -> int:
    """Starts a Python interpreter with these arguments, in a process session of its own; returns its process id."""
    command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), sys.executable, *arguments]
    return os.posix_spawn(sys.executable, command, os.environ, setsid=True)


def _send(pid: int, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
