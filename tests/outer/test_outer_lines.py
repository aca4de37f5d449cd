"""Data connections over real sockets: kept open, used, cut and dialled again; pushes and versions are sent over
them.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from until_support import until

from chaos_lightning.errors import ConfigurationError, NoDonorError, RefusedError, StateError
from chaos_lightning.machine.listener import free_port
from chaos_lightning.outer.exchange import fetching, lines
from chaos_lightning.outer.exchange.codec import BF16, Part
from chaos_lightning.outer.exchange.fetching import (
    drop_push,
    drop_version,
    fetch,
    fetch_push,
    fetch_version,
    hold_push,
    hold_version,
    push_name,
    version_name,
)
from chaos_lightning.outer.exchange.lines import SERVING, DataListener, ParkedLines
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.messages import Holder
from chaos_lightning.outer.rules.types import IncarnationId, Offer, PushId, VersionId
from chaos_lightning.replication.bulk import Type
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.testing.edge.relay import LinkRelay
from chaos_lightning.testing.emulation import emulating
from chaos_lightning.transport.handshake import Greeting, dial

JOB, TOKEN = "job", b"a token of a test"
HOME = IncarnationId("home", 3)
PUSH = PushId(HOME, 7)
VERSION = VersionId(4, "0123456789abcdef0123456789abcdef")
GRID = Grid((1_000_000, 70_000, 5), block=1 << 12)
LIMIT_S = 20.0
PATIENCE_S = 10.0
SLOW_BPS = 8e6
TCP_REPAIR = 19


class Notes:
    """Recorder of events, on which threads can wait."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **fields: Any) -> None:
        self.all.append((name, fields))

    def reasons(self, name: str = "refused") -> list[str]:
        return [str(fields["reason"]) for found, fields in self.all if found == name]


class Follower:
    """Follower's data connections: a listener, and the server of its states."""

    def __init__(self, name: str, port: int = 0, secret: bytes = TOKEN) -> None:
        self.name, self.notes, self.server = name, Notes(), StateServer(SERVING)
        self.listener = DataListener(
            "127.0.0.1", port, job=JOB, me=name, secret=secret, server=self.server, note=self.notes
        )
        self.holder = Holder(name, self.listener.endpoint)

    @property
    def port(self) -> int:
        return int(self.listener.endpoint.rpartition(":")[2])

    def close(self) -> None:
        self.listener.close()
        self.server.close()


class Home:
    """Process of a cluster with its data connections."""

    def __init__(self, me: str = str(HOME), **options: Any) -> None:
        self.me, self.notes, self.server = me, Notes(), StateServer(SERVING)
        given = {"job": JOB, "secret": TOKEN} | options
        self.lines = ParkedLines(self.server, me=lambda: self.me, note=self.notes, **given)

    def close(self) -> None:
        self.lines.close()
        self.server.close()


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(("chaos-line", "chaos-fetch")))


@pytest.fixture
def stage() -> Iterator[Callable[[Any], Any]]:
    """Function that registers an object to be closed at the test's end; checks that no thread is left then."""
    with ExitStack() as stack:

        def entered(made: Any) -> Any:
            stack.callback(made.close)
            return made

        yield entered
    assert threads() == []


def random_part(seed: int = 0) -> Part:
    values = torch.randn(GRID.elements, generator=torch.Generator().manual_seed(seed))
    return Part.encoded(GRID.whole, BF16, values)


def blank_part(shard: Shard = GRID.whole) -> Part:
    """Returns memory for a part, filled with zeros: otherwise it may contain another test's content, which would not be
    fetched again.
    """
    part = Part.empty(shard, BF16)
    part.data.zero_()
    return part


def offered(home: Home, part: Part, shards: int) -> Offer:
    return Offer(PUSH, VERSION, hold_push(home.server, PUSH, part, GRID.cut(shards)), 64, 2)


def took(follower: Follower, offer: Offer, part: Part) -> None:
    fetch_push(offer, part, follower.listener.dial, deadline_s=LIMIT_S)


def standing(follower: Follower, peer: str = str(HOME)) -> int:
    return len(follower.listener._parked.get(peer, ()))


# ---------------------------------------------------------------------- pushes and versions


def test_a_push_is_fetched_by_each_follower_over_connections_that_its_cluster_parked(stage: Any) -> None:
    followers = [stage(Follower(name)) for name in ("f0", "f1", "f2")]
    home = stage(Home())
    home.lines.follow([f.holder for f in followers])
    whole = random_part()
    offer = offered(home, whole, 3)
    assert offer.manifest == whole.hash
    for follower, shard in zip(followers, GRID.cut(3), strict=True):
        part = blank_part(shard)
        took(follower, offer, part)
        assert torch.equal(part.data, whole.run(shard.first, shard.stop))
        until(lambda f=follower: standing(f) == 2, "another connection in the place of the one that was used")
    drop_push(home.server, PUSH, GRID.cut(3))
    with pytest.raises(NoDonorError, match="is not served here any more"):
        took(followers[0], offer, blank_part(GRID.cut(3)[0]))
    assert sorted(fields["peer"] for _, fields in home.notes.all) == ["f0", "f1", "f2"]


def test_a_version_is_fetched_from_all_followers_at_once(stage: Any) -> None:
    whole, shards = random_part(1), GRID.cut(3)
    followers = [stage(Follower(name)) for name in ("f0", "f1", "f2")]
    for follower, shard in zip(followers, shards, strict=True):
        hold_version(follower.server, VERSION, Part(shard, BF16, whole.run(shard.first, shard.stop)))
    home = stage(Home())
    holders = [f.holder for f in followers]
    mine = blank_part()
    mine.data.zero_()
    got = fetch_version(VERSION, shards, BF16, holders, mine, home.lines.dial, deadline_s=LIMIT_S)
    assert got == whole.data.numel()
    assert torch.equal(mine.data, whole.data)
    drop_version(followers[1].server, VERSION, Part(shards[1], BF16, whole.run(shards[1].first, shards[1].stop)))
    with pytest.raises(NoDonorError, match=r"f1.*is not served here any more"):
        fetch_version(VERSION, shards, BF16, holders, mine, home.lines.dial, deadline_s=LIMIT_S)
    hold_version(followers[1].server, VERSION, Part(shards[1], BF16, whole.run(shards[1].first, shards[1].stop)))
    holders[2] = Holder("f2", "")
    with pytest.raises(NoDonorError, match="follower f2 is away"):
        fetch_version(VERSION, shards, BF16, holders, mine, home.lines.dial, deadline_s=LIMIT_S)


def test_names_tell_pushes_versions_formats_and_shards_apart() -> None:
    shards = GRID.cut(2)
    names = [push_name(p, s) for p in (PUSH, PushId(HOME, 8)) for s in shards]
    names += [
        version_name(v, s, f) for v in (VERSION, VersionId(4, "f" * 32)) for s in shards for f in ("bf16", "fp32")
    ]
    assert len(set(names)) == len(names) == 12


# ---------------------------------------------------------------------- what breaks


class Breaks:
    """Progress callback for a fetch, which calls a function once the first bytes have arrived."""

    def __init__(self, what: Callable[[], None]) -> None:
        self.what, self.seen = what, list[int]()

    def __call__(self, progress: Any) -> None:
        self.seen.append(progress.done_nbytes)
        if len(self.seen) == 2:  # the first one says what was here before
            self.what()


def test_a_push_whose_connections_break_goes_on_with_what_is_missing(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home())
    home.lines.follow([follower.holder])
    whole = random_part()
    offer, part = offered(home, whole, 1), blank_part()
    part.data.zero_()
    until(lambda: standing(follower) == 2, "parked connections")
    breaks = Breaks(lambda: lines._cut(list(home.server._sockets)))
    fetch_push(offer, part, follower.listener.dial, deadline_s=LIMIT_S, progress=breaks)
    assert torch.equal(part.data, whole.data)
    assert breaks.seen == sorted(breaks.seen)


def test_a_cluster_that_dies_in_the_middle_ends_the_fetch_and_the_next_one_goes_on(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "TAKE_S", 0.1)
    follower, home = stage(Follower("f0")), stage(Home())
    home.lines.follow([follower.holder])
    whole = random_part()
    offer, part = offered(home, whole, 1), blank_part()
    part.data.zero_()
    until(lambda: standing(follower) == 2, "parked connections")
    with pytest.raises(NoDonorError, match=r"home~3 has parked no connection at f0 for 0\.1 s"):
        fetch_push(offer, part, follower.listener.dial, deadline_s=LIMIT_S, progress=Breaks(home.close))
    again = stage(Home())
    again.lines.follow([follower.holder])
    offered(again, whole, 1)
    seen = list[int]()
    until(lambda: standing(follower), "a parked connection")
    fetch_push(offer, part, follower.listener.dial, deadline_s=LIMIT_S, progress=lambda p: seen.append(p.done_nbytes))
    assert torch.equal(part.data, whole.data)
    assert seen[0] > 0, "what had come is not fetched again"


def sent_by(home: Home) -> int:
    return sum(home.server.served_nbytes.values())


def of_ranks(stage: Any, follower: Follower, count: int) -> list[Home]:
    """Returns processes of one incarnation, each with a connection open at the follower."""
    ranks = [stage(Home(count=1)) for _ in range(count)]
    for each in ranks:
        each.lines.follow([follower.holder])
    until(lambda: standing(follower) == count, "parked connections")
    return ranks


def test_all_processes_of_a_cluster_send_a_part_of_a_push(stage: Any) -> None:
    follower = stage(Follower("f0"))
    ranks = of_ranks(stage, follower, 2)
    donors = follower.listener.donors(str(HOME))
    assert len(donors) == 2
    assert {d.member.partition("/")[0] for d in donors} == {str(HOME)}
    whole, part = random_part(), blank_part()
    part.data.zero_()
    (offer,) = {offered(each, whole, 1) for each in ranks}
    barrier = threading.Barrier(2, timeout=LIMIT_S)  # of three pieces nobody is asked for more than two at once
    for each in ranks:
        hold_back(each, barrier)
    fetch_push(offer, part, follower.listener.dial, donors=donors, deadline_s=LIMIT_S)
    assert torch.equal(part.data, whole.data)
    # Sent bytes are counted only after they were sent.
    until(lambda: sum(map(sent_by, ranks)) >= whole.data.numel() and all(map(sent_by, ranks)), "a part of each")
    assert sum(map(sent_by, ranks)) == whole.data.numel(), "nothing comes twice"


def hold_back(home: Home, barrier: threading.Barrier) -> None:
    """Delays the first bytes of this process until all processes at the barrier are ready to send, too."""
    answer, first = home.server._answer, threading.Event()

    def held(channel: Any, request: Any, peer: str) -> None:
        if request.type is Type.GET_STATE and not first.is_set():
            first.set()
            barrier.wait()
        answer(channel, request, peer)

    home.server._answer = held


def test_what_a_process_that_dies_was_to_send_the_others_do(stage: Any) -> None:
    follower = stage(Follower("f0"))
    dying, other = of_ranks(stage, follower, 2)
    donors = follower.listener.donors(str(HOME))
    whole, part, seen = random_part(), blank_part(), list[int]()
    part.data.zero_()
    (offer,) = {offered(each, whole, 1) for each in (dying, other)}
    barrier = threading.Barrier(2, timeout=LIMIT_S)
    for each in (dying, other):
        hold_back(each, barrier)

    def progress(told: Any) -> None:
        seen.append(told.done_nbytes)
        if len(seen) == 2:
            dying.close()

    fetch_push(offer, part, follower.listener.dial, donors=donors, deadline_s=LIMIT_S, progress=progress)
    assert torch.equal(part.data, whole.data)
    assert seen == sorted(seen), "what had come stays"
    assert seen[-1] == whole.data.numel()


def test_a_process_that_is_frozen_holds_up_no_other(stage: Any) -> None:
    follower = stage(Follower("f0"))
    frozen, other = of_ranks(stage, follower, 2)
    thawed, answer = threading.Event(), frozen.server._answer

    answered: list[Any] = []

    def held(channel: Any, request: Any, peer: str) -> None:
        thawed.wait(LIMIT_S)
        answered.append(request)
        answer(channel, request, peer)

    frozen.server._answer = held
    whole, part = random_part(), blank_part()
    (offer,) = {offered(each, whole, 1) for each in (frozen, other)}
    donors = follower.listener.donors(str(HOME))
    fetch_push(offer, part, follower.listener.dial, donors=donors, deadline_s=LIMIT_S)
    assert not answered
    thawed.set()
    assert torch.equal(part.data, whole.data)


def test_processes_of_a_cluster_share_its_rate(stage: Any) -> None:
    followers = [stage(Follower(name)) for name in ("f0", "f1")]
    home = stage(Home(count=1, rate_bps=8e6))
    home.lines.follow([f.holder for f in followers])
    until(lambda: len(paced(home)) == 2, "connections")
    assert paced(home) == [500_000, 500_000]
    home.lines.share(4)
    assert paced(home) == [125_000, 125_000]
    followers[0].listener.take(str(HOME), LIMIT_S).close()
    until(lambda: standing(followers[0]) == 1 and len(paced(home)) == 2, "another connection")
    assert paced(home) == [125_000, 125_000]


def paced(home: Home) -> list[int]:
    """Returns the rates, in bytes a second, to which the kernel limits this process's connections."""
    lines_ = [line for each in home.lines._lines.values() for line in each]
    socks = [line._sock for line in lines_ if line._sock is not None]
    return [struct.unpack("=Q", s.getsockopt(socket.SOL_SOCKET, 47, 8))[0] for s in socks]


def test_a_process_with_other_bytes_under_a_pushs_name_is_passed_over(stage: Any) -> None:
    """One of two processes has other bytes than the offer says, as after a commit that was undone: the push is fetched
    from the other process.
    """
    follower = stage(Follower("f0"))
    strange, other = of_ranks(stage, follower, 2)
    offered(strange, random_part(1), 1)
    whole, part = random_part(), blank_part()
    offer = offered(other, whole, 1)
    donors = sorted(follower.listener.donors(str(HOME)), key=lambda d: strange.lines._mark not in d.member)
    fetch_push(offer, part, follower.listener.dial, donors=donors, deadline_s=LIMIT_S)
    assert torch.equal(part.data, whole.data)
    assert sent_by(strange) == 0


@pytest.mark.parametrize("end", ["all goes well", "connections break", "one dies", "all die", "it is not served"])
def test_the_memory_of_a_push_goes_with_the_push(
    stage: Any, monkeypatch: pytest.MonkeyPatch, uncollected: None, end: str
) -> None:
    monkeypatch.setattr(lines, "TAKE_S", 0.1)
    follower = stage(Follower("f0"))
    ranks = of_ranks(stage, follower, 1 if end == "all die" else 2)
    donors = follower.listener.donors(str(HOME))
    part = blank_part()
    part.data.zero_()
    memory = StorageWeakRef(part.data.untyped_storage())
    (offer,) = {offered(each, random_part(), 1) for each in ranks}
    strikes: dict[str, Callable[[], None]] = {
        "connections break": lambda: lines._cut([sock for each in ranks for sock in each.server._sockets]),
        "one dies": ranks[0].close,
        "all die": ranks[0].close,
    }
    if end == "it is not served":
        for each in ranks:
            drop_push(each.server, PUSH, GRID.cut(1))
    told = Breaks(strikes.get(end, lambda: None))
    failed = False
    try:
        fetch_push(offer, part, follower.listener.dial, donors=donors, deadline_s=LIMIT_S, progress=told)
    except NoDonorError:
        failed = True
    assert failed == (end in ("all die", "it is not served"))
    assert not memory.expired()
    del part
    until(memory.expired, "the end of the threads that fetched it")


@pytest.mark.parametrize("served", [True, False])
def test_the_memory_of_a_version_goes_with_the_version(stage: Any, uncollected: None, served: bool) -> None:
    follower, home = stage(Follower("f0")), stage(Home())
    part = blank_part()
    memory = StorageWeakRef(part.data.untyped_storage())
    hold_version(follower.server, VERSION, random_part(1))
    if not served:
        drop_version(follower.server, VERSION, random_part(1))
    failed = False
    try:
        fetch_version(VERSION, GRID.cut(1), BF16, [follower.holder], part, home.lines.dial, deadline_s=LIMIT_S)
    except NoDonorError:
        failed = True
    assert failed != served
    assert not memory.expired()
    del part
    until(memory.expired, "the end of the threads that fetched it")


def test_a_follower_that_dies_in_the_middle_of_a_version_ends_the_fetch_and_the_next_one_goes_on(stage: Any) -> None:
    whole, shards = random_part(1), GRID.cut(2)
    followers = [stage(Follower(name)) for name in ("f0", "f1")]
    hold_version(followers[0].server, VERSION, Part(shards[0], BF16, whole.run(shards[0].first, shards[0].stop)))
    home = stage(Home())
    mine = blank_part()
    mine.data.zero_()
    holders = [f.holder for f in followers]
    breaks = Breaks(followers[1].close)  # while it waits for the version
    with pytest.raises(NoDonorError, match="f1"):
        fetch_version(VERSION, shards, BF16, holders, mine, home.lines.dial, deadline_s=LIMIT_S, progress=breaks)
    again = stage(Follower("f1", port=followers[1].port))
    hold_version(again.server, VERSION, Part(shards[1], BF16, whole.run(shards[1].first, shards[1].stop)))
    before = followers[0].server.served_nbytes[str(HOME)]
    fetch_version(VERSION, shards, BF16, holders, mine, home.lines.dial, deadline_s=LIMIT_S)
    assert torch.equal(mine.data, whole.data)
    assert followers[0].server.served_nbytes[str(HOME)] <= whole.run(shards[0].first, shards[0].stop).numel()
    assert before > 0


def test_a_version_whose_link_is_cut_in_the_middle_goes_on_with_what_is_missing(stage: Any) -> None:
    follower, home, whole = stage(Follower("f0")), stage(Home()), random_part(1)
    hold_version(follower.server, VERSION, whole)
    mine = blank_part()
    mine.data.zero_()
    given = VERSION, GRID.cut(1), BF16, [follower.holder], mine, home.lines.dial
    with LinkRelay() as relay, emulating(relay=relay.address):
        relay.shape("home", "f0", rate_bps=SLOW_BPS)
        breaks = Breaks(lambda: relay.cut("home", "f0"))
        with pytest.raises(NoDonorError, match="f0"):
            fetch_version(*given, deadline_s=LIMIT_S, progress=breaks)
        relay.restore("home", "f0")
        came, seen = breaks.seen[-1], list[int]()
        fetch_version(*given, deadline_s=LIMIT_S, progress=lambda p: seen.append(p.done_nbytes))
    assert torch.equal(mine.data, whole.data)
    assert 0 < came < whole.data.numel()
    assert seen[0] >= came, "what had come is not fetched again"


def test_a_connection_that_swallows_everything_is_given_up_for_another_one(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection silently loses all bytes, as behind a NAT that has forgotten it: the push is fetched over another
    connection.
    """
    monkeypatch.setattr(fetching, "STALL_S", 0.3)
    follower, home = stage(Follower("f0")), stage(Home(count=1))
    whole = random_part()
    offer, part = offered(home, whole, 1), blank_part()
    with LinkRelay() as relay:
        with emulating(relay=relay.address):
            home.lines.follow([follower.holder])
            until(lambda: standing(follower) == 1, "a connection through the relay")
            relay.stall("home", "f0")
        other = stage(Home(count=1))
        offered(other, whole, 1)
        other.lines.follow([follower.holder])
        until(lambda: standing(follower) == 2, "another one")
        swallowed = follower.listener._parked[str(HOME)]
        swallowed.reverse()  # the newest is taken first
        took(follower, offer, part)
    assert torch.equal(part.data, whole.data)
    assert home.server.served_nbytes == {}


def forget(sock: socket.socket) -> None:
    """Closes a socket without telling the peer, as if the machine had lost power."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except OSError:
        pytest.skip("only root can end a connection without a word")
    sock.close()


def test_the_kernel_ends_a_parked_connection_that_is_forgotten_and_another_one_is_parked(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "IDLE_S", 1)
    follower, home = stage(Follower("f0")), stage(Home(count=1))
    home.lines.follow([follower.holder])
    taken = follower.listener.take(str(HOME), LIMIT_S)
    until(lambda: home.server._sockets, "the other end")
    for sock in home.server._sockets:  # an acknowledgement that is still to be sent would be answered with a reset
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    forget(taken)
    assert standing(follower) == 0
    until(lambda: standing(follower) == 1, "another connection")


def test_both_ends_have_the_kernel_ask_after_ten_seconds_and_give_up_three_later(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home(count=1))
    home.lines.follow([follower.holder])
    until(lambda: standing(follower) == 1 and home.server._sockets, "a parked connection")
    for sock in (*follower.listener._parked[str(HOME)], *home.server._sockets):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        asked = [sock.getsockopt(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
        assert asked == [10, 1]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 13_000, "it counts, not TCP_KEEPCNT"


# ---------------------------------------------------------------------- parking


class Recorded(threading.Event):
    """Event that does not wait but records the timeouts; it counts as set after `times` calls."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.waits = times, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return len(self.waits) >= self.times


def test_pauses_grow_up_to_a_second_while_nobody_answers(stage: Any) -> None:
    home = stage(Home())
    line = lines._Line(home.lines, "f0", f"127.0.0.1:{free_port()}", str(HOME), 0)
    line._over = recorded = Recorded(12)
    line.run()
    assert recorded.waits[:4] == [0.0, 0.01, 0.02, 0.04]
    assert recorded.waits[-2:] == [1.0, 1.0]
    assert [(name, fields["peer"], fields["up"]) for name, fields in home.notes.all] == [("data_line", "f0", False)]
    assert "refused" in home.notes.reasons("data_line")[0]


def test_a_follower_that_comes_back_is_found_again(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home())
    home.lines.follow([follower.holder])
    until(lambda: standing(follower) == 2, "parked connections")
    follower.close()
    until(lambda: len(home.notes.all) == 2, "a note that nobody answers")
    again = stage(Follower("f0", port=follower.port))
    until(lambda: standing(again) == 2, "parked connections")
    until(lambda: len(home.notes.all) == 3, "a note that it answers again")
    assert [fields["up"] for _, fields in home.notes.all] == [True, False, True]


def test_who_holds_nothing_any_more_is_hung_up_and_who_is_away_is_not(stage: Any) -> None:
    followers = [stage(Follower(name)) for name in ("f0", "f1", "f2")]
    home = stage(Home(count=1))
    home.lines.follow([f.holder for f in followers])
    until(lambda: all(standing(f) == 1 for f in followers), "parked connections")
    home.lines.follow([followers[0].holder, Holder("f1", "")])
    until(lambda: not served(home, followers[2]), "an end")

    def take_all() -> None:
        for _ in range(2):  # the end may still be on its way to the follower
            followers[2].listener.take(str(HOME), 0.0).close()

    with pytest.raises(TimeoutError, match="home~3 has parked no connection at f2 for 0 s"):
        take_all()
    assert [standing(f) for f in followers[:2]] == [1, 1]
    moved = stage(Follower("f1"))
    home.lines.follow([followers[0].holder, moved.holder])
    until(lambda: standing(moved) == 1, "a connection to the new place")


def served(home: Home, follower: Follower) -> bool:
    return any(sock.getpeername()[1] == follower.port for sock in list(home.server._sockets) if sock.fileno() >= 0)


def test_a_cluster_that_begins_anew_parks_under_its_new_name(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home())
    home.lines.follow([follower.holder])
    until(lambda: standing(follower) == 2, "parked connections")
    home.me = "home~4"
    home.lines.follow([follower.holder])
    until(lambda: standing(follower, "home~4") == 2, "connections under the new name")
    until(lambda: len(home.server._sockets) == 2, "ends of the old ones")
    until(lambda: standing(follower) == 0, "their ends at the follower")
    follower.listener.take(str(HOME), 0.0).close()  # it may hold what its earlier start pushed
    with pytest.raises(TimeoutError):
        follower.listener.take("far~1", 0.0)


def test_a_peer_has_a_limited_number_of_connections_parked(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MAX_PARKED", 2)
    follower = stage(Follower("f0"))
    with ExitStack() as stack:
        made = []
        for number in range(3):
            made.append(stack.enter_context(greeted(follower, "home~3", "park")))
            until(lambda n=number: standing(follower) == min(n + 1, 2), "it parked")
        made[0].settimeout(PATIENCE_S)
        until(lambda: made[0].recv(1) == b"", "the oldest one's end")


# ---------------------------------------------------------------------- strangers


def greeted(follower: Follower, me: str, purpose: str, job: str = JOB, token: bytes = TOKEN) -> socket.socket:
    return dial("127.0.0.1", follower.port, Greeting(job, me, follower.name, purpose), token=token)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": b"another token"}, "wrong or missing cluster token"),
        ({"job": "other"}, "job 'other', this member belongs to 'job'"),
        ({"purpose": "link"}, "a follower has no link connections"),
        ({"purpose": "watch"}, "a follower has no watch connections"),
        ({"purpose": "coffee"}, "purpose 'coffee'"),
    ],
)
def test_strangers_are_refused_and_noted(stage: Any, options: dict[str, Any], words: str) -> None:
    follower = stage(Follower("f0"))
    with pytest.raises(RefusedError, match=words):
        greeted(follower, "home~3", **({"purpose": "park"} | options))
    until(lambda: follower.notes.all, "a note")
    assert words in follower.notes.reasons()[0]
    assert "'home~3' from 127.0.0.1:" in follower.notes.reasons()[0]


def test_who_looks_for_another_follower_is_refused(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home(count=1))
    home.lines.follow([Holder("f1", follower.listener.endpoint)])
    until(lambda: home.notes.all and follower.notes.all, "notes at both ends")
    assert "looks for 'f1', this is 'f0'" in follower.notes.reasons()[0]
    assert home.notes.all[0][1]["up"] is False
    assert "looks for 'f1', this is 'f0'" in home.notes.reasons("data_line")[0]


def test_what_is_no_handshake_is_noted_and_a_silent_one_holds_up_no_end(stage: Any) -> None:
    follower = stage(Follower("f0"))
    with socket.create_connection(("127.0.0.1", follower.port)) as odd:
        odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: follower.notes.all, "a note")
    assert "handshake message announces" in follower.notes.reasons()[0]
    with socket.create_connection(("127.0.0.1", follower.port)):
        until(lambda: follower.listener._open, "a handshake under way")
        follower.close()


def test_nobody_listens_beyond_this_machine_without_a_secret() -> None:
    with pytest.raises(ConfigurationError, match=r"listening on 0\.0\.0\.0 would let everybody in"):
        DataListener("0.0.0.0", 0, job=JOB, me="f0", secret=b"", server=StateServer(), note=Notes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="free port"):
            DataListener("127.0.0.1", port, job=JOB, me="f0", secret=TOKEN, server=StateServer(), note=Notes())


# ---------------------------------------------------------------------- other bytes than were offered


def test_a_push_with_other_bytes_than_were_offered_is_refused_by_name(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home())
    home.lines.follow([follower.holder])
    one, other = random_part(), random_part(2)
    part = blank_part()
    offer = Offer(PUSH, VERSION, one.hash, 64, 2)
    offered(home, other, 1)
    with pytest.raises(StateError, match=rf"push home~3/7 was offered as {one.hash}, and what is served is"):
        took(follower, offer, part)
    assert home.server.served_nbytes == {}, "nothing is fetched of it"
    name = push_name(PUSH, GRID.whole)
    runs, told = [*GRID.whole.runs()], {"digests": b"".join(one.digests())}
    offered_hashes = [tuple(one.digests()[first:stop]) for first, stop in runs]

    def holds(data: Part, manifest: dict[str, Any], **more: Any) -> None:
        tensors = [(str(number), data.run(first, stop)) for number, (first, stop) in enumerate(runs)]
        home.server.hold(name, 0, tensors, manifest, **{"piece_nbytes": one.block_nbytes, **more})

    def refused(words: str) -> None:
        with pytest.raises(StateError, match=words):
            took(follower, offer, part)

    holds(other, told)
    refused(r"push home~3/7 is served with other digests of its blocks than those offered")
    holds(other, told, hashes=offered_hashes)
    refused("replies in a row arrived corrupted")
    holds(one, told, piece_nbytes=one.block_nbytes + 1)
    refused(rf"pieces of {one.block_nbytes + 1} bytes, expected {one.block_nbytes}")
    for odd in ({}, {"digests": "text"}, {"digests": b"short"}):
        holds(one, odd)
        refused("without one digest for each of")
    shorter = [(str(number), one.run(first, stop)[:-1]) for number, (first, stop) in enumerate(runs)]
    home.server.hold(name, 0, shorter, told, hashes=offered_hashes, piece_nbytes=one.block_nbytes)
    refused("is laid out differently here")
    offered(home, one, 1)
    took(follower, offer, part)
    assert torch.equal(part.data, one.data)


def test_a_part_is_fetched_by_its_name_with_its_manifest(stage: Any) -> None:
    follower, home = stage(Follower("f0")), stage(Home())
    follower.server.hold("anything", 0, [("0", torch.arange(9, dtype=torch.uint8))], {"a": [1, 2]})
    into, saw = torch.zeros(9, dtype=torch.uint8), list[Any]()
    where = Endpoint("f0", "127.0.0.1", follower.port)
    fetch("anything", [where], home.lines.dial, [into], deadline_s=LIMIT_S, check=lambda m, _: saw.append(m))
    assert into.tolist() == list(range(9))
    assert saw == [{"a": [1, 2]}]


def test_pushes_and_versions_are_paced(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending is limited to the setting or, if that is less, to the rate that suffices; the processes of a cluster
    share it.
    """
    paced: dict[str, list[float | None]] = {"lines": [], "server": []}
    monkeypatch.setattr(
        "chaos_lightning.outer.exchange.lines.pace", lambda _, rate_bps: paced["lines"].append(rate_bps)
    )
    monkeypatch.setattr("chaos_lightning.replication.server.pace", lambda _, rate_bps: paced["server"].append(rate_bps))
    followers = [stage(Follower(name)) for name in ("f0", "f1")]
    home = stage(Home(count=1, rate_bps=8e9))
    holders = [f.holder for f in followers]
    home.lines.follow(holders)
    until(lambda: len(home.notes.all) == len(followers), "a connection to each follower")
    assert paced["lines"] == [4e9, 4e9]
    home.lines.spread(16e9)
    home.lines.spread(4e9)
    home.lines.share(2)
    assert paced["lines"][2:] == [4e9] * 2 + [2e9] * 2 + [1e9] * 2
    version = random_part()
    for follower, shard in zip(followers, GRID.cut(2), strict=True):
        hold_version(follower.server, VERSION, Part(shard, BF16, version.run(shard.first, shard.stop)))
    got = blank_part()
    fetch_version(VERSION, GRID.cut(2), BF16, holders, got, home.lines.dial, deadline_s=LIMIT_S)
    assert torch.equal(got.data, version.data)
    assert set(paced["server"]) == {2e9}


def test_a_rate_that_is_set_while_a_connection_is_made_reaches_it(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paced = list[float | None]()
    monkeypatch.setattr("chaos_lightning.outer.exchange.lines.pace", lambda _, rate_bps: paced.append(rate_bps))
    follower, home = stage(Follower("f0")), stage(Home(count=1, rate_bps=8e9))
    connect = home.lines.park

    def park(*to: str) -> Any:
        sock = connect(*to)
        home.lines.spread(2e9)
        return sock

    monkeypatch.setattr(home.lines, "park", park)
    home.lines.follow([follower.holder])
    until(lambda: home.notes.all, "a connection to the follower")
    assert paced == [2e9]
