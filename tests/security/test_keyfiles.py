"""Tests `chaos-lightning keys`: the files that it makes, what it refuses, and the files after a rotation."""

from __future__ import annotations

import json
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from keys_support import CHAIN, KEY, NODES, TOKEN, TRUSTED, Keys
from typer.testing import CliRunner

from chaos_lightning.cli import app
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.security import certificates, keyfiles
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import CLUSTER, KeyHolder
from chaos_lightning.security.roles import CLUSTER as CLUSTER_ROLE
from chaos_lightning.security.roles import FOLLOWER, MEMBER, OBSERVER, OPERATOR


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["keys", *words], env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def made(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    run("init", "--dir", str(folder), "--node", "a=10.0.0.5,node-a.example", "--node", "b")
    return folder


def modes(folder: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [folder, *folder.rglob("*")]}


# ------------------------------------------------------------------------------------------------ making


def test_init_makes_a_folder_for_each_node_and_an_operator(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert {p.name for p in (folder / NODES).iterdir()} == {"a", "b", "operator"}
    assert {p.name for p in (folder / NODES / "a").iterdir()} == {TRUSTED, CHAIN, KEY, TOKEN}
    assert {p.name for p in (folder / NODES / "operator").iterdir()} == {TRUSTED, CHAIN, KEY}
    assert modes(folder) == {(True, 0o700), (False, 0o600)}
    a, b, operator = keyfiles.show(folder)
    assert (a.name, a.role, a.hosts[:2]) == ("a", MEMBER, ("node-a.example", "localhost"))
    assert set(a.hosts) == {"node-a.example", "10.0.0.5", *certificates.LOOPBACK}
    assert (b.name, b.role, set(b.hosts)) == ("b", MEMBER, set(certificates.LOOPBACK))
    assert (operator.name, operator.role, operator.hosts) == ("operator", OPERATOR, ())
    assert abs(a.until - datetime.now(UTC) - timedelta(days=365)) < timedelta(minutes=5)
    assert a.trouble == ""


def test_tokens_and_keys_differ_from_cluster_to_cluster_and_node_to_node(tmp_path: Path) -> None:
    one, other = Keys(tmp_path / "one"), Keys(tmp_path / "other")
    assert len(set(one.secrets().values()) | set(other.secrets().values())) == 2 * len(one.secrets()) == 12


def test_only_members_certificates_are_good_for_a_server(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    for name, serves in (("a", True), ("o", False), ("p", False)):
        certificate = x509.load_pem_x509_certificate(keys.files(name)[CHAIN].encode())
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in purposes) == serves
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize(("role", "called"), [(CLUSTER_ROLE, False), (FOLLOWER, True)])
def test_roles_of_outer_sync_prove_the_token_and_only_followers_are_called(
    tmp_path: Path, role: str, called: bool
) -> None:
    folder = made(tmp_path)
    host = "f=10.0.0.9" if called else "f"
    assert f"{folder / NODES / 'f'}: {role}" in run("node", host, "--role", role, "--dir", str(folder))
    there = folder / NODES / "f"
    assert {p.name for p in there.iterdir()} == {TRUSTED, CHAIN, KEY, TOKEN}
    credentials = Credentials(keys=KeyFolder(there))
    assert credentials.tokens() == tuple(token.encode() for token in keyfiles.load(folder).tokens)
    assert (meet(there, folder / NODES / "a") == "") is called
    assert meet(folder / NODES / "a", there) == ""
    if not called:
        with pytest.raises(ConfigurationError, match="g is cluster and serves nothing"):
            run("node", "g=10.0.0.9", "--role", role, "--dir", str(folder))
    run("rotate", "--dir", str(folder))
    assert len(credentials.tokens()) == 2
    run("rotate", "--finish", "--dir", str(folder))
    assert credentials.tokens() == tuple(token.encode() for token in keyfiles.load(folder).tokens)
    (there / TOKEN).unlink()
    with pytest.raises(ConfigurationError, match="token cannot be read"):
        KeyFolder(there)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["init"], "name the nodes, for example --node a=10.0.0.5"),
        (["init", "--node", "a", "--node", "a=h"], "node a is given twice"),
        (["init", "--node", "a/b"], "node 'a/b' may have up to 64 letters"),
        (["init", "--node", ".."], "names a folder"),
        (["init", "--node", "a="], "expected NAME=HOST,ADDRESS"),
        (["init", "--node", "a=10.0.0.5:29400"], "'10.0.0.5:29400' is neither an IP address nor a host name"),
        (["init", "--node", "a=10.0.0"], "'10.0.0' is neither"),
        (["init", "--node", "a", "--cluster", "a b"], "cluster 'a b'"),
        (["init", "--node", "a", "--days", "0"], "--days 0: expected more than 0"),
        (["init", "--node", "a", "--finish"], "--finish means nothing here; it takes --cluster, --node"),
        (["node"], "say whom the keys are for"),
        (["node", "c"], "cannot be read .*`chaos-lightning keys init --dir`"),
        (["rotate"], "cannot be read"),
        (["show"], "cannot be read"),
    ],
)
def test_odd_wishes_are_refused(tmp_path: Path, words: list[str], expected: str) -> None:
    folder = tmp_path / "keys"
    with pytest.raises(ConfigurationError, match=expected):
        run(*words, "--dir", str(folder))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["init", "--node", "c"], "exists and is not empty; nothing is overwritten"),
        (["node", "a"], r"a has keys \(as member\) and nothing is overwritten"),
        (["node", "a", "--renew", "--role", "observer"], "a is member; a observer needs another name"),
        (["node", "c", "--renew"], "no node is called 'c'; there are a, b, operator"),
        (["node", "o=10.0.0.7", "--role", "observer"], "o is observer and serves nothing: leave out =10.0.0.7"),
        (["rotate", "--finish"], "no rotation is under way"),
        (["rotate", "--without", "z"], "no node is called z"),
    ],
)
def test_nothing_is_overwritten(tmp_path: Path, words: list[str], expected: str) -> None:
    folder = made(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=expected):
        run(*words, "--dir", str(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_node_more_and_a_certificate_renewed(tmp_path: Path) -> None:
    folder = made(tmp_path)
    run("node", "c=10.0.0.7", "--dir", str(folder))
    run("node", "ann", "--role", "observer", "--dir", str(folder), "--days", "1")
    before = (folder / NODES / "a" / KEY).read_text()
    run("node", "a", "--renew", "--dir", str(folder), "--days", "30")
    run("node", "b=10.0.0.6", "--renew", "--dir", str(folder))
    shown = {facts.name: facts for facts in keyfiles.show(folder)}
    assert {name: facts.role for name, facts in shown.items()} == {
        **dict.fromkeys("abc", MEMBER),
        "operator": OPERATOR,
        "ann": OBSERVER,
    }
    assert "10.0.0.5" in shown["a"].hosts  # what it was made for is remembered
    assert "10.0.0.6" in shown["b"].hosts
    assert shown["a"].until - datetime.now(UTC) < timedelta(days=31)
    assert (folder / NODES / "a" / KEY).read_text() != before
    assert modes(folder) == {(True, 0o700), (False, 0o600)}


def test_show_says_who_until_when_and_nothing_secret(tmp_path: Path) -> None:
    folder = made(tmp_path)
    keyfiles.add(folder, KeyHolder("gone", OBSERVER), days=1)
    old = keyfiles.issue(keyfiles.load(folder), KeyHolder("gone", OBSERVER), -0.001)
    (folder / NODES / "gone" / CHAIN).write_text(old[CHAIN])
    output = run("show", "--dir", str(folder))
    for word in ("a ", "member", "operator", "node-a.example", "UTC", "it expired on"):
        assert word in output
    text = run("show", "--dir", str(folder), "--json")
    facts = json.loads(text)
    assert facts["rotating"] is False
    assert [n["name"] for n in facts["nodes"]] == ["a", "b", "operator", "gone"]
    assert "it expired on" in facts["nodes"][3]["trouble"]
    one = run("show", "--dir", str(folder / NODES / "b"))
    assert "member" in one
    assert "operator" not in one
    cluster = keyfiles.load(folder)
    for secret in (*cluster.tokens, *cluster.authority[1].splitlines()[1:-1]):
        assert secret not in output + text + one + repr(cluster)


def test_a_damaged_cluster_file_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path)
    text = (folder / CLUSTER).read_text()
    for broken, expected in (
        (text[:-20], "is damaged"),
        ("{}", "is damaged: KeyError"),
        (text.replace('"format": 1', '"format": 2'), "has format 2, this version knows 1"),
        (text.replace('"role": "member"', '"role": "owner"'), "role 'owner'"),
    ):
        (folder / CLUSTER).write_text(broken)
        with pytest.raises(ConfigurationError, match=expected):
            run("show", "--dir", str(folder))


# ------------------------------------------------------------------------------------------------ rotating


def meet(server: Path, client: Path) -> str:
    """Does a TLS handshake in memory between two nodes with their key files; returns "" or why it failed."""

    def context(side: int, folder: Path) -> ssl.SSLContext:
        made = ssl.SSLContext(side)
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        made.load_cert_chain(folder / CHAIN, folder / KEY)
        made.load_verify_locations(folder / TRUSTED)
        return made

    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        context(ssl.PROTOCOL_TLS_CLIENT, client).wrap_bio(back, there),
        context(ssl.PROTOCOL_TLS_SERVER, server).wrap_bio(there, back, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return str(error)
    return ""


def tokens(folder: Path) -> set[str]:
    return set((folder / TOKEN).read_text().split())


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_while_keys_are_rotated_folders_arrive_in_any_order(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    old = {name: copy(keys.at(name), tmp_path / f"old-{name}") for name in "ab"}
    run("rotate", "--dir", str(keys.folder))
    between = {name: copy(keys.at(name), tmp_path / f"between-{name}") for name in "ab"}
    assert "a rotation is under way" in run("show", "--dir", str(keys.folder))
    with pytest.raises(ConfigurationError, match="a rotation is under way"):
        run("rotate", "--dir", str(keys.folder))
    assert "done" in run("rotate", "--finish", "--dir", str(keys.folder))
    new = {name: copy(keys.at(name), tmp_path / f"new-{name}") for name in "ab"}
    assert "under way" not in run("show", "--dir", str(keys.folder))
    for one, other in ((old, between), (between, between), (between, new), (new, new)):
        for server, client in ((one, other), (other, one)):
            assert meet(server["a"], client["b"]) == "", (server, client)
        assert tokens(one["a"]) & tokens(other["b"])
    for server, client in ((old, new), (new, old)):
        assert "verify failed" in meet(server["a"], client["b"])
    assert not tokens(old["a"]) & tokens(new["b"])
    assert modes(keys.folder) == {(True, 0o700), (False, 0o600)}


def test_who_is_added_in_the_middle_meets_everybody(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    old = copy(keys.at("a"), tmp_path / "old")
    keyfiles.rotate(keys.folder)
    keyfiles.add(keys.folder, KeyHolder("c"))
    assert meet(old, keys.at("c")) == meet(keys.at("c"), old) == ""
    early = copy(keys.at("c"), tmp_path / "early")
    keyfiles.finish(keys.folder)
    assert meet(early, keys.at("a")) == meet(keys.at("a"), early) == meet(keys.at("c"), keys.at("b")) == ""


def test_who_is_left_out_is_out_after_the_second_half(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    stolen = copy(keys.at("b"), tmp_path / "stolen")
    run("rotate", "--dir", str(keys.folder), "--without", "b")
    assert not keys.at("b").exists()
    assert meet(keys.at("a"), stolen) == ""
    keyfiles.finish(keys.folder)
    assert "verify failed" in meet(keys.at("a"), stolen)
    assert "b" not in {facts.name for facts in keyfiles.show(keys.folder)}


def test_the_old_authoritys_key_is_gone(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    old = keys.cluster.authority[1].splitlines()[1]
    keyfiles.rotate(keys.folder)
    assert not any(old in path.read_text() for path in keys.folder.rglob("*") if path.is_file())


def test_a_rotation_that_was_cut_short_is_finished_by_renewing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(tmp_path / "keys")
    with monkeypatch.context() as patch:
        patch.setattr(keyfiles, "_hand_out", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            keyfiles.rotate(keys.folder)
    # Nothing that was handed out has changed, and what is known is one of the two states, whole.
    assert meet(keys.at("a"), keys.at("b")) == ""
    assert keyfiles.load(keys.folder).rotating
    with pytest.raises(ConfigurationError, match="a's certificate is of the old authority; write it again"):
        keyfiles.finish(keys.folder)
    for node in keyfiles.load(keys.folder).nodes:
        keyfiles.add(keys.folder, node, renew=True)
    keyfiles.finish(keys.folder)
    assert meet(keys.at("a"), keys.at("b")) == ""
