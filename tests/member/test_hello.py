"""Tests the contents of a member's hello."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine import addresses
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.hello import Asks, hello, listening_address, reachable_at
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.limits import TEXT_NBYTES
from chaos_lightning.protocol.types import Hello, Saved
from chaos_lightning.settings import EngineConfig

PORT = 29500


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
@pytest.mark.parametrize("bind", ["0.0.0.0", ""])
def test_a_member_names_the_address_that_faces_its_scheduler(endpoint: str, bind: str) -> None:
    assert reachable_at(EngineConfig(endpoint=endpoint, bind=bind), PORT) == ("127.0.0.1", PORT)


def test_a_member_near_a_scheduler_of_ipv6_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "addresses", lambda host: ("2001:db8::1",))
    monkeypatch.setattr(addresses, "_source", lambda address, port: "2001:db8::7")
    for bind in ("", "::"):
        config = EngineConfig(endpoint="[2001:db8::1]:1", bind=bind)
        assert reachable_at(config, PORT) == ("2001:db8::7", PORT)
        assert listening_address(config) == (bind or "2001:db8::7")
    with pytest.raises(ConfigurationError, match=r"2001:db8::7 faces the scheduler at \[2001:db8::1\]:1.*or to ::"):
        reachable_at(EngineConfig(endpoint="[2001:db8::1]:1", bind="0.0.0.0"), PORT)


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        ("203.0.113.7", ("203.0.113.7", PORT)),
        ("203.0.113.7:400", ("203.0.113.7", 400)),
        ("gate.example", ("gate.example", PORT)),
        ("fd00::7", ("fd00::7", PORT)),
        ("[fd00::7]", ("fd00::7", PORT)),
        ("[fd00::7]:400", ("fd00::7", 400)),
    ],
)
def test_what_is_announced_goes_before_what_is_listened_on(announced: str, expected: tuple[str, int]) -> None:
    assert reachable_at(EngineConfig(bind="127.0.0.1", announce=announced), PORT) == expected


@pytest.mark.parametrize("announced", ["0.0.0.0", "::", "host:0", "host:99999", "[fd00::7", ":400"])
def test_what_nobody_can_call_is_no_announcement(announced: str) -> None:
    with pytest.raises(ConfigurationError, match="announce="):
        EngineConfig(announce=announced)


@pytest.mark.parametrize("port", ["0", "70000", "29599-29500", "29500-", "-5", "29500,29501", "x"])
def test_what_is_no_range_of_ports_is_refused(port: str) -> None:
    with pytest.raises(ConfigurationError, match=r"port='.*write for example 29500 or 29500-29599"):
        EngineConfig(port=port)


def said(**changes: Any) -> Hello:
    layout = Layout([Section("all", [("w", torch.nn.Parameter(torch.zeros(2)))])])
    config = EngineConfig(endpoint="127.0.0.1:1", name=changes.pop("name", "a"))
    given: dict[str, Any] = {"port": PORT, "quota": 1, "accumulate": 1, "fingerprint": {}, "layout": layout, **changes}
    return hello(config, **given)


def test_what_no_scheduler_would_listen_to_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot say who it is: NamedText\.value has 1048577 bytes"):
        said(fingerprint={"seed": "7" * (TEXT_NBYTES + 1)})
    with pytest.raises(ConfigurationError, match=r"cannot say who it is: Hello\.quota is 4294967296"):
        said(quota=1 << 32)
    monkeypatch.setenv("CHAOS_NODE", "\u00e9" * 33)
    with pytest.raises(
        ConfigurationError, match=r"cannot say who it is: Hello\.node has 66 bytes; expected 64 at most"
    ):
        said()


def test_a_long_reason_against_replay_is_cut_off() -> None:
    assert said(no_replay="why not? " * 10_000).replay.endswith("(cut off)")


def test_each_hello_says_what_is_asked_of_pipelines_and_the_newest_checkpoint() -> None:
    """Every hello contains the request for pipelines and the newest checkpoint, since a restarted scheduler knows
    neither.
    """
    engine = Engine(EngineConfig(endpoint="127.0.0.1:1", log_dir="none"))
    try:
        engine.prepare(sections=[Section("all", [("w", torch.nn.Parameter(torch.zeros(2)))])])
        engine._hello = said(asks=Asks(pipelines="{}"))
        assert engine._make_hello().saved is None
        engine.saved(3, "/run/step3.ckpt")
        for _ in range(2):
            made = engine._make_hello()
            assert (made.pipelines, made.saved) == ("{}", Saved(3, "/run/step3.ckpt"))
            assert decode(Hello, encode(made)) == made
    finally:
        engine.close()
    with pytest.raises(ConfigurationError, match=r"Hello\.pipelines has 1048577 bytes"):
        said(asks=Asks(pipelines="7" * (TEXT_NBYTES + 1)))
