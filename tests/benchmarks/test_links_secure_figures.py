"""Tests the benchmark of protected links: a measured connection, and the explanation of the ratio to plain links."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from benchmarks.common import Result
from benchmarks.links_secure import cost as links_secure
from benchmarks.links_secure.cost import best_ratio
from benchmarks.links_secure.ends import LINKS, WARM_UP_NBYTES, _over_link, _over_socket, _warm_up


@pytest.mark.parametrize("kind", [*LINKS, "socket"])
def test_both_ends_measure_the_frames_after_the_warm_up(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socks = {True: socket.create_connection(listener.getsockname()), False: listener.accept()[0]}
    measured: dict[bool, tuple[float, float]] = {}

    def end(*, sends: bool) -> None:
        case = (kind, 1 << 20, 32)
        with socks[sends]:
            if kind == "socket":
                measured[sends] = _over_socket(socks[sends], case, "", sends=sends)
            else:
                measured[sends] = _over_link(socks[sends], case, sends=sends)

    began = time.perf_counter()
    threads = [threading.Thread(target=end, kwargs={"sends": sends}) for sends in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    whole = time.perf_counter() - began
    assert set(measured) == {True, False}
    assert all(0 < seconds < whole and cpu > 0 for seconds, cpu in measured.values())


@pytest.mark.parametrize(("nbytes", "every"), [(64 << 10, 64), (1 << 20, 4), (3 << 20, 4), (4 << 20, 1)])
def test_a_warm_up_ends_where_the_receiver_says_so(nbytes: int, every: int) -> None:
    frames = _warm_up(nbytes, every)
    assert frames % every == 0
    assert WARM_UP_NBYTES <= frames * nbytes < WARM_UP_NBYTES + every * nbytes


@pytest.mark.parametrize(("tag_us", "reachable"), [(40.0, True), (120.0, False)])
def test_the_reason_for_the_ratio_is_told(monkeypatch: pytest.MonkeyPatch, tag_us: float, reachable: bool) -> None:
    """The explanation names the parts of the cost, and says that a bound is out of reach if the tag alone
    exceeds it.
    """
    plain = (110.0, 100.0)
    frames = {"plain": plain, "checksum": (140.0, 130.0), "encrypted": (300.0, 310.0)}
    frames["authenticated"] = (plain[0] + tag_us + 10, plain[1] + tag_us + 25)
    monkeypatch.setattr(links_secure, "frame_costs", lambda: frames)
    library = {"checksum": 22.0, "authenticated": tag_us, "encrypted": 97.0}
    monkeypatch.setattr(links_secure, "library_costs", lambda: library)
    result = Result("links_secure")
    links_secure.costs(result, 180.0, 0.66)
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["authenticated, calls, Python and cold bytes at the receiver"] == 25.0
    (reason,) = result.notes
    assert f"the tag alone takes one core {tag_us:.0f} us" in reason
    assert f"{best_ratio(180.0, tag_us):.2f}" in reason
    assert ("no code around the tag" in reason) is not reachable
