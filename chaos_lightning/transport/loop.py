"""Runs one epoll loop in one thread: link sockets, a listener, timers, and calls from other threads.

Theory of operation. Everything that must not race runs here: the member machine, the reducer, the links. Other threads
hand work in by `call(fn)`; an eventfd wakes the loop at most once per batch of calls. The waking write keeps the GIL:
`os.eventfd_write` gives it away, the loop takes it at once, and the caller, which has the next layer's gradients to see
to, waits until the loop is done (1 ms and more, three times a step). An exception in a callback is
fatal for the loop: it is kept, `on_crash` is told, and the training thread raises it.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast


def _waker() -> Callable[[int, int], object]:
    """Returns a function that wakes the loop by writing to its eventfd without releasing the GIL (if the C library has
    one).
    """
    write = getattr(ctypes.PyDLL(None), "eventfd_write", None)
    if write is None:
        return os.eventfd_write
    write.argtypes = (ctypes.c_int, ctypes.c_uint64)
    return cast(Callable[[int, int], object], write)


_wake_up = _waker()


class IoLoop:
    """Epoll loop in a daemon thread of its own, between `start()` and `stop()`."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._awake = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._on_crash = on_crash
        self._running = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def inside(self) -> bool:
        """Returns whether the caller is the loop's own thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], None]) -> None:
        """Has the loop's thread run `function` soon; callable from any thread."""
        self._calls.append(function)
        if not self._awake:
            self._awake = True
            try:
                _wake_up(self._wake, 1)
            except (OSError, ValueError):  # the loop has ended (its descriptor is -1); nobody waits for this call
                self._awake = False

    def call_and_wait(self, function: Callable[[], None], timeout_s: float) -> bool:
        """Has the loop's thread run `function`, and waits; returns whether it was done within the timeout. Not for the
        loop's own thread.
        """
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self.call(run)
        return done.wait(timeout_s)

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Has the loop run `function` once, after `delay_s`; only callable from the loop's thread."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._ids), function))

    def register(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        if fd in self._handlers:
            self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def stop(self, timeout_s: float = 5.0) -> None:
        def end() -> None:
            self._running = False

        self.call(end)
        if self._thread.is_alive() and not self.inside():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._running:
                self._turn()
        except BaseException as error:
            self._on_crash(error)
        finally:
            self._epoll.close()
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _turn(self) -> None:
        timeout = 1.0
        if self._timers:
            timeout = max(0.0, min(timeout, self._timers[0][0] - time.monotonic()))
        if self._calls:
            timeout = 0.0
        for fd, events in self._epoll.poll(timeout):
            if fd == self._wake:
                # In this order: whoever finds the flag set after it was read relies on the calls being run below.
                os.eventfd_read(self._wake)
                self._awake = False
                continue
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
