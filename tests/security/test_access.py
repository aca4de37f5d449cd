"""Tests cluster tokens, and the settings that give access to a scheduler."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from chaos_lightning.control.options import (
    SchedulerOptions,
    check_settings,
    default_store,
    settings_from_json,
    settings_to_json,
)
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import PlanSpec, Settings, TreeSpec
from chaos_lightning.security import access
from chaos_lightning.security.credentials import check_bind
from chaos_lightning.service.options import MEMORY


def token_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> str:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_token_comes_from_argument_file_or_environment(tmp_path: Path) -> None:
    path = token_file(tmp_path, b"  from the file\n")
    assert access.load_token(path, {"CHAOS_TOKEN": "from the environment"}) == b"from the file"
    assert access.load_token("", {"CHAOS_TOKEN_FILE": path, "CHAOS_TOKEN": "another"}) == b"from the file"
    assert access.load_token("", {"CHAOS_TOKEN": "from the environment"}) == b"from the environment"
    assert access.load_token("", {}) == b""


def test_odd_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read.*urandom"):
        access.load_token(str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="is empty"):
        access.load_token(token_file(tmp_path, b"\n"))
    with pytest.raises(ConfigurationError, match="has 3 bytes, at least 8"):
        access.load_token(token_file(tmp_path, b"abc"))
    with pytest.raises(ConfigurationError, match="has 3 bytes, at least 8"):
        access.load_token("", {"CHAOS_TOKEN": "abc"})


def test_a_token_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        access.load_token(token_file(tmp_path, b"long enough", 0o644))
    assert "chmod 600" in caplog.text
    caplog.clear()
    access.load_token(token_file(tmp_path, b"long enough", 0o600))
    assert caplog.text == ""


def test_binding_beyond_loopback_needs_a_token() -> None:
    check_bind("127.0.0.1", b"")
    check_bind("0.0.0.0", b"a token")
    with pytest.raises(ConfigurationError, match="CHAOS_TOKEN_FILE"):
        check_bind("0.0.0.0", b"")


# ------------------------------------------------------------------------------------------------ settings


def test_settings_travel_as_json() -> None:
    tree = TreeSpec(0, 8, ("a", "b"), ("", "a"))
    settings = Settings(job="j", min_nodes=2, hang_timeout_s=7.5, plan=PlanSpec("user", 4096, (tree,)))
    assert settings_from_json(settings_to_json(settings)) == settings
    assert settings_from_json("{}") == Settings()
    assert settings_from_json('{"plan": {"kind": "chain"}}').plan == PlanSpec("chain")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "no JSON"),
        ("[]", "JSON object"),
        ('{"heartbeat_timout_s": 1}', "unknown settings heartbeat_timout_s; known are.*heartbeat_timeout_s"),
        ('{"min_nodes": "two"}', "min_nodes='two': expected a whole number"),
        ('{"min_nodes": 1.5}', "min_nodes=1.5: expected a whole number"),
        ('{"hang_timeout_s": true}', "hang_timeout_s=True: expected a number"),
        ('{"hang_timeout_s": null}', "hang_timeout_s=None: expected a number"),
        ('{"plan": {"colour": 1}}', "plan: unknown keys"),
        ('{"plan": {"trees": [{}]}}', "plan: 'members'"),
        ('{"plan": 3}', "plan: expected an object"),
        ('{"min_nodes": 0}', "min_nodes=0"),
        ('{"min_nodes": 3, "max_nodes": 2}', "min_nodes=3, max_nodes=2"),
        ('{"job": ""}', "job='': expected 1 to 64 letters"),
        ('{"report_timeout_s": 0}', "report_timeout_s=0.0: expected a positive"),
        ('{"report_timeout_s": 1e400}', "report_timeout_s=inf"),
        ('{"hang_timeout_s": 20, "last_holder_timeout_s": 19}', "last_holder_timeout_s=19 with hang_timeout_s=20"),
        ('{"heartbeat_timeout_s": 0.1}', "at least twice the interval"),
    ],
)
def test_odd_settings_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings_from_json(text)


def test_no_grace_is_a_setting() -> None:
    check_settings(Settings(reconnect_grace_s=0.0))


def test_where_the_chain_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_store("a/b", 5) == tmp_path / "chaos-lightning" / "a_b-5" / "chain.sqlite"
    options = SchedulerOptions(listen="h:5", settings=Settings(job="a"))
    assert options.store_path == tmp_path / "chaos-lightning" / "a-5" / "chain.sqlite"
    assert replace(options, store="x").store_path == Path("x")
    assert replace(options, store=MEMORY).store_path is None
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(default_store("a", 5)) == "/home/somebody/.local/state/chaos-lightning/a-5/chain.sqlite"
    assert json.loads(settings_to_json(Settings()))["job"] == "default"
    assert os.environ["HOME"] == "/home/somebody"
