"""Tests a process's folder of keys: read again when it changes, errors that name the file, no secret shown."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import pytest
from keys_support import CHAIN, KEY, TOKEN, TRUSTED, Keys, write_keys

from chaos_lightning.control.options import SchedulerServerConfig
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials, KeyFolder, check_bind, known
from chaos_lightning.security.roles import MEMBER, OBSERVER
from chaos_lightning.settings import EngineConfig


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def test_where_credentials_come_from(keys: Keys, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from a file")
    token.chmod(0o600)
    of_keys = (keys.cluster.tokens[0].encode(),)
    folder = str(keys.at("a"))
    assert Credentials.load("", "", {}).tokens() == ()
    assert Credentials.load(folder, "", {"CHAOS_TOKEN": "from the environment"}).tokens() == of_keys
    assert Credentials.load("", "", {"CHAOS_KEYS_DIR": folder, "CHAOS_TOKEN": "an old one"}).tokens() == of_keys
    assert Credentials.load("", str(token), {"CHAOS_KEYS_DIR": folder}).tokens() == (b"from a file",)
    assert Credentials.load("", "", {"CHAOS_TOKEN": "from the environment"}).tokens() == (b"from the environment",)
    with pytest.raises(ConfigurationError, match=r"keys_dir=.* and token_file=.*: give one of them"):
        Credentials.load(folder, str(token), {})


def test_what_they_are_good_for(keys: Keys) -> None:
    with_keys, bare, none = keys.of("a"), Credentials(b"a bare token"), Credentials()
    assert (with_keys.secret_channel, bare.secret_channel, none.secret_channel) == (True, False, False)
    assert (bool(with_keys), bool(bare), bool(none)) == (True, True, False)
    for credentials in (with_keys, bare, keys.of("o")):
        check_bind("0.0.0.0", credentials)
    with pytest.raises(ConfigurationError, match=r"`chaos-lightning keys init`.*CHAOS_KEYS_DIR"):
        check_bind("0.0.0.0", none)
    assert keys.of("o").tokens() == ()  # an observer is not given it


def test_nothing_secret_is_in_what_is_printed(keys: Keys) -> None:
    credentials = keys.of("a")
    assert credentials.keys is not None
    shown = repr((credentials, credentials.keys, credentials.keys.current(), SchedulerServerConfig(token=credentials)))
    shown += repr((SchedulerServerConfig(token=b"a bare token"), Credentials(b"a bare token"), keys.cluster))
    assert "a bare token" not in shown
    for secret in keys.secrets().values():
        assert secret not in shown


@pytest.mark.parametrize("name", [TRUSTED, CHAIN, KEY, TOKEN])
def test_a_missing_file_is_named(keys: Keys, name: str) -> None:
    (keys.at("a") / name).unlink()
    with pytest.raises(ConfigurationError, match=rf"{name} cannot be read .*DIR/nodes/NAME"):
        KeyFolder(keys.at("a"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (CHAIN, "no certificate", r"node\.crt holds no certificate"),
        (KEY, "no key", "do not fit together"),
        (TRUSTED, "no certificate", "do not fit together"),
        (TOKEN, "", "expected a token of 8 bytes or more"),
        (TOKEN, "short\n", "expected a token of 8 bytes or more"),
    ],
)
def test_odd_files_are_named(keys: Keys, name: str, text: str, expected: str) -> None:
    (keys.at("a") / name).write_text(text)
    with pytest.raises(ConfigurationError, match=expected):
        KeyFolder(keys.at("a"))


def test_another_nodes_key_does_not_fit(keys: Keys) -> None:
    shutil.copy(keys.at("b") / KEY, keys.at("a") / KEY)
    with pytest.raises(ConfigurationError, match=r"node\.crt, node\.key and ca\.crt in .* do not fit together"):
        KeyFolder(keys.at("a"))


def test_the_owners_folder_is_no_nodes_folder(keys: Keys) -> None:
    with pytest.raises(ConfigurationError, match="DIR/nodes/NAME"):
        KeyFolder(keys.folder)


def test_an_expired_certificate_is_refused_with_its_date(keys: Keys, tmp_path: Path) -> None:
    folder = write_keys(tmp_path / "odd", keys.issued(MEMBER, -0.001))
    with pytest.raises(
        ConfigurationError, match=r"certificate of odd in .*: it expired on 2\d{3}-\d\d-\d\d .*keys node odd --renew"
    ):
        KeyFolder(folder)


def test_one_that_will_expire_soon_and_one_that_others_can_read_are_warned_of(
    keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_keys(tmp_path / "odd", keys.issued(MEMBER, 3))
    (folder / KEY).chmod(0o640)
    with caplog.at_level(logging.WARNING):
        KeyFolder(folder)
    assert "the certificate of odd ends in 3.0 days" in caplog.text
    assert "node.key can be read by others (mode 640); chmod 600 it" in caplog.text
    caplog.clear()
    KeyFolder(keys.at("a"))
    assert caplog.text == ""


def test_who_runs_on_with_a_certificate_that_has_ended_says_so_once(
    keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Former bug: a server whose own certificate had expired refused everybody, and logged nothing; it now warns
    once.
    """
    folder = KeyFolder(write_keys(tmp_path / "odd", keys.issued(MEMBER, 30)))
    assert caplog.text == ""
    write_keys(tmp_path / "odd", keys.issued(MEMBER, -0.001))
    for _ in range(3):
        assert folder.current().facts.trouble
    (said,) = [record.message for record in caplog.records]
    assert "the certificate of odd does not count: it expired on 2" in said
    assert said.endswith("renew it: chaos-lightning keys node odd --renew")
    write_keys(tmp_path / "odd", keys.issued(MEMBER, 3))
    folder.current()
    assert "ends in 3.0 days" in caplog.text


# ------------------------------------------------------------------------------------------------ read anew


def test_files_that_change_are_read_again(keys: Keys) -> None:
    folder = KeyFolder(keys.at("a"))
    first = folder.current()
    assert folder.current() is first
    keyfiles.rotate(keys.folder)
    second = folder.current()
    assert len(second.tokens) == 2
    assert second.tokens[1:] == first.tokens
    assert second.server is not first.server
    keyfiles.finish(keys.folder)
    assert folder.current().tokens == second.tokens[:1]


def test_files_that_do_not_fit_together_leave_the_last_ones_in_use(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    folder = KeyFolder(keys.at("a"))
    first = folder.current()
    text = (keys.at("a") / KEY).read_text()
    (keys.at("a") / KEY).write_text((keys.at("b") / KEY).read_text())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert folder.current() is first
    assert caplog.text.count("have changed and cannot be used") == 1
    (keys.at("a") / KEY).write_text(text)
    assert folder.current().key == first.key
    (keys.at("a") / CHAIN).unlink()
    assert folder.current().key == first.key


def test_a_folder_that_is_being_replaced_is_waited_for(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts while its key files are being replaced one by one waits until they fit together."""
    folder = keys.at("a")
    right = (folder / KEY).read_text()
    (folder / KEY).write_text((keys.at("b") / KEY).read_text())
    read, failures = KeyFolder._read, []

    def then_the_copying_ends(self: KeyFolder) -> object:
        try:
            return read(self)
        except ConfigurationError as error:
            failures.append(str(error))
            (folder / ".next").write_text(right)
            (folder / ".next").replace(folder / KEY)
            raise

    monkeypatch.setattr(KeyFolder, "_read", then_the_copying_ends)
    assert KeyFolder(folder).current().key.decode() == right
    assert len(failures) == 1
    assert "do not fit together" in failures[0]


def test_who_waits_for_files_that_never_fit_is_told(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.security.credentials._PATIENCE_S", 0.2)
    count = iter(range(10_000))
    monkeypatch.setattr(KeyFolder, "_signature", lambda self: (next(count),))
    with pytest.raises(ConfigurationError, match="are being replaced"):
        KeyFolder(keys.at("a"))


def test_a_role_may_change_with_the_folder(keys: Keys) -> None:
    folder = KeyFolder(keys.at("a"))
    write_keys(keys.at("a"), keys.issued(OBSERVER, 1))
    assert (folder.current().facts.role, folder.current().tokens) == (OBSERVER, ())


def test_one_of_the_tokens_must_be_right() -> None:
    assert known([b"new", b"old"], [b"old"])
    assert known([b"old"], [b"new", b"old"])
    assert not known([b"older"], [b"new", b"old"])
    assert not known([], [b"new"])
    assert not known([b"new"], [])


def test_keys_dir_is_a_setting_like_any_other(keys: Keys) -> None:
    assert EngineConfig.build({}, {"CHAOS_KEYS_DIR": "/somewhere"}).keys_dir == "/somewhere"
    assert EngineConfig.build({"keys_dir": "/here"}, {"CHAOS_KEYS_DIR": "/somewhere"}).keys_dir == "/here"


def test_unfit_keys_are_read_once_and_again_when_they_change(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = KeyFolder(keys.at("a"))
    first, right = folder.current(), (keys.at("a") / KEY).read_text()
    read, reads = KeyFolder._read, []

    def counted(self: KeyFolder) -> object:
        reads.append(1)
        return read(self)

    monkeypatch.setattr(KeyFolder, "_read", counted)
    (keys.at("a") / KEY).write_text((keys.at("b") / KEY).read_text())
    for _ in range(3):
        assert folder.current() is first
    assert len(reads) == 1
    (keys.at("a") / KEY).write_text(right)
    assert folder.current() is not first
    assert len(reads) == 2


def test_a_process_that_runs_on_warns_of_the_end_once_a_day(
    keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(keys.at("a"), keys.issued("member", 3))
    folder = KeyFolder(keys.at("a"))
    folder.current()
    assert caplog.text.count("the certificate of odd ends in") == 1
    now = time.monotonic()
    monkeypatch.setattr("chaos_lightning.security.credentials.time.monotonic", lambda: now + 86500)
    for _ in range(3):
        folder.current()
    assert caplog.text.count("the certificate of odd ends in") == 2
