"""Tests the fuzzer: it finds no fault in any reader, it would find planted ones, and faults it once found are
mended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_lightning.control.options import settings_from_json
from chaos_lightning.errors import ConfigurationError, RefusedError, StoreError, WireError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.outer.exchange.vocabulary import FROM_FOLLOWER
from chaos_lightning.outer.rules.messages import Missing
from chaos_lightning.outer.rules.types import IncarnationId, PushId
from chaos_lightning.protocol.codec import FROM_MEMBER, TO_MEMBER
from chaos_lightning.protocol.types import (
    NO_VIEW,
    VERSION,
    Entered,
    LinkEvent,
    LinkReport,
    Ready,
    Settings,
    ViewId,
)
from chaos_lightning.service.etcd_store import EtcdStore
from chaos_lightning.transport.handshake import Greeting, accept, dial
from lab.fuzz import mutate
from lab.fuzz.drivers import TARGETS, atheris_missing, replay, with_hypothesis
from lab.fuzz.links import shaken, welcome_handshakes
from lab.fuzz.readers import hello
from lab.fuzz.target import FindingError, Target, guarded

EXAMPLES = {"agent": 10, "tls-proxy": 20, "server": 30, "state": 30, "scheduler": 30}
MINUTES = 5.0


@pytest.mark.parametrize("name", list(TARGETS))
def test_nothing_is_found_in_a_few_examples(name: str, tmp_path: Path) -> None:
    outcome = with_hypothesis(TARGETS[name], 0.0, tmp_path, examples=EXAMPLES.get(name, 120))
    assert outcome.findings == []
    assert outcome.runs >= EXAMPLES.get(name, 120)


@pytest.mark.parametrize("name", list(TARGETS))
def test_seeds_are_read_and_changed(name: str) -> None:
    from random import Random

    target, rng = TARGETS[name], Random(1)
    seeds = target.seeds()
    assert seeds
    changed = {target.mutate(seed, rng) for seed in seeds for _ in range(20)}
    assert len(changed - set(seeds)) >= 10


def _raises(data: bytes) -> None:
    if b"x" in data:
        raise KeyError("x")


def _allocates(data: bytes) -> None:
    bytearray(64 << 20)


def _loops(data: bytes) -> None:
    while True:
        pass


@pytest.mark.parametrize(("run", "words"), [(_raises, "KeyError"), (_allocates, "bytes of memory, the limit is")])
def test_a_broken_reader_is_found_made_small_and_replayed(
    run: Callable[[bytes], None], words: str, tmp_path: Path
) -> None:
    target = Target("broken", "", lambda: [b"ab"], run, lambda data, rng: data + bytes([rng.choice(b"abcdefx")]))
    outcome = with_hypothesis(target, 60.0, tmp_path)
    ((place, _, told),) = [line.partition(": ") for line in outcome.findings]
    assert words in told
    assert Path(place).read_bytes() in (b"abx", b"ab")
    with pytest.raises((KeyError, FindingError)):
        replay(Path(place), target)


def test_a_reader_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.fuzz.target.HANG_S", 0.2)
    with pytest.raises(FindingError, match="still busy"):
        guarded(Target("loops", "", lambda: [b""], _loops, lambda data, rng: data), b"")


def fuzz(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_the_command_says_what_is_wrong_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab.fuzz.__main__ import main

    def given(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
        return main()

    path = tmp_path / "input"
    path.write_bytes(b"\0")
    with pytest.raises(ConfigurationError, match="unknown targets: nothing; known: messages"):
        given("--target", "nothing")
    with pytest.raises(ConfigurationError, match="--replay needs one target"):
        given("--replay", str(path))
    with pytest.raises(ConfigurationError, match="No such file"):
        given("--target", "state", "--replay", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="must be positive"):
        given("--minutes", "0")
    assert given("--target", "state", "--replay", str(path)) == 0
    assert capsys.readouterr().out.strip() == f"{path}: nothing found"
    assert given("--list") == 0
    assert "handshake  the handshake of a link" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["hypothesis", "atheris"])
def test_all_targets_for_minutes(driver: str, tmp_path: Path) -> None:
    """Runs the fuzzer on all targets for five minutes; for longer: python -m lab.fuzz --minutes 60."""
    if driver == "atheris" and atheris_missing():
        pytest.skip(atheris_missing())
    minutes = float(os.environ.get("CHAOS_FUZZ_MINUTES", MINUTES))
    done = fuzz(
        *("--driver", driver, "--minutes", str(minutes / 2), "--corpus", str(tmp_path)), timeout_s=60 * minutes + 300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing found") == len(TARGETS)


# ------------------------------------------------------------------------------------------------ what it found


@pytest.mark.parametrize("said", [LinkEvent("a~1", True, "connected"), LinkReport("a~1", 0.001, 1e9, "probe")])
def test_who_speaks_of_a_link_to_itself_ends_no_scheduler(said: LinkEvent | LinkReport) -> None:
    machine = SchedulerMachine(Settings(min_nodes=1), fx.Chain(1, NO_VIEW))
    machine.on(1.0, fx.Opened(1), fx.MessageIn(1, hello("a", 1)), fx.MessageIn(1, Ready()), fx.MessageIn(1, said))
    machine.validate_state()
    machine.on(1.1, fx.Closed(1, False))
    assert machine.roster.peers == {}


def test_a_second_hello_on_one_stream_does_not_make_it_two_members() -> None:
    machine = SchedulerMachine(Settings(min_nodes=1), fx.Chain(1, NO_VIEW))
    machine.on(1.0, fx.Opened(1))
    machine.on(1.0, fx.MessageIn(1, hello("a", 1)))
    effects = machine.on(1.1, fx.MessageIn(1, replace(hello("b", 2))))
    machine.validate_state()
    assert [e.conn for e in effects if isinstance(e, fx.Close)] == [1]
    assert [p.member.name for p in machine.roster.peers.values()] == ["a"]


@pytest.mark.parametrize("count", [3, "3", "x", None, [1], 10**30])
def test_a_tip_whose_entry_is_missing_is_an_error_and_no_endless_loop(count: object) -> None:
    tip = {"format": 3, "term": 1, "id": "c", "position": count, "hash": "", "first": 1, "ended": []}
    value = SimpleNamespace(key=b"k", value=json.dumps(tip).encode(), mod_revision=1)
    keys = SimpleNamespace(address=SimpleNamespace(prefix="p"), get=lambda key: value, get_all=lambda prefix: ([], 1))
    with pytest.raises(StoreError, match=r"is missing|holds no tip"):
        EtcdStore(cast(Any, keys), "p/jobs/job/", owned=False).read()


@pytest.mark.parametrize("index", range(len(welcome_handshakes())))
def test_who_knows_token_and_key_is_let_in(index: int) -> None:
    """Former bug: the fuzzer's seeds used an older protocol, so that no mutation of them got past the reader's first
    check.
    """
    assert shaken(welcome_handshakes()[index]) == ""


def test_who_lacks_the_key_is_not_let_in() -> None:
    with_key = next(seed for seed in welcome_handshakes() if seed[0] == 2)
    assert "no key of this link" in shaken(with_key.replace(b"key 1", b"key 2"))


def test_what_the_texts_are_read_with_leaves_logging_as_it_was() -> None:
    logger = logging.getLogger("chaos_lightning")
    before = logger.level
    TARGETS["texts"].run(TARGETS["texts"].seeds()[0])
    assert logger.level == before


def test_a_member_that_tells_of_a_later_term_ends_the_fuzzed_scheduler_and_the_next_input_has_another() -> None:
    claims = Entered(ViewId(2, 3), 0, 1000, "")
    said = [FROM_MEMBER.encode(message) for message in (hello("x", 9), Ready(), claims)]
    for _ in range(2):
        TARGETS["server"].run(mutate.joined([(0, part) for part in said]))


HELLO = {
    **{"job": "job", "me": "a~1", "peer": "b~2", "purpose": "link", "version": VERSION, "nonce": "00"},
    **{"level": "checksum", "keys": [""]},
}


@pytest.mark.parametrize(
    "answer",
    [
        {"hello": "\ud800", "proofs": {"": ["00"]}, "proof": "00"},
        {"hello": json.dumps(HELLO), "proofs": {"": ["\u20ac"]}, "proof": "\u20ac"},
        {"hello": json.dumps(HELLO), "proofs": {"": ["\ud800"]}, "proof": "\ud800"},
        b"[" * 4000,
    ],
    ids=["surrogate", "proof that is no ASCII", "surrogate proof", "deep"],
)
@pytest.mark.parametrize("side", ["accept", "dial"])
def test_odd_texts_in_a_handshake_are_refused(side: str, answer: Any) -> None:
    body = answer if isinstance(answer, bytes) else json.dumps({**answer, "nonce": "00", "ok": True}).encode()
    message = struct.pack("<I", len(body)) + body
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def speak(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                sock.sendall(message * 2)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass

        if side == "accept":
            other = threading.Thread(target=lambda: speak(socket.create_connection(("127.0.0.1", port))))
        else:
            other = threading.Thread(target=lambda: speak(listener.accept()[0]))
        other.start()

        def answered() -> None:
            if side == "accept":
                accept(listener.accept()[0], job="job", me="b~2")
            else:
                dial("127.0.0.1", port, Greeting("job", "a~1", "b~2", "link"))

        try:
            with pytest.raises((RefusedError, WireError)):
                answered()
        finally:
            other.join(30)


def test_settings_that_are_nested_without_end() -> None:
    with pytest.raises(ConfigurationError, match="settings are no JSON"):
        settings_from_json("[" * 100_000)


@pytest.mark.parametrize("interval_s", [1e308, 1e-9, 0.0, -1.0])
def test_a_scheduler_that_asks_for_odd_heartbeats_is_no_scheduler(interval_s: float) -> None:
    """Former bug: a scheduler that asked for heartbeats at a senseless interval ended the member's thread, or made it
    send ceaselessly.
    """
    from chaos_lightning.protocol.types import Member, Welcome

    welcome = Welcome(Member("a~1", "a", "host", "127.0.0.1", 1), 1, "founder", "", interval_s, 0.5)
    TARGETS["agent"].run(mutate.joined([(0, TO_MEMBER.encode(welcome))]))


def test_a_follower_that_misses_a_push_that_there_never_was_ends_no_leader() -> None:
    target = TARGETS["outer-leader"]
    strange = FROM_FOLLOWER.encode(Missing("f0", PushId(IncarnationId("b", 1000), 1)))
    target.run(mutate.joined([*mutate.split(target.seeds()[0]), (0x12, strange), (0x40, b"")]))
