"""Tests which role may make which call, each pair once, with a real scheduler, real certificates and real calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from keys_support import CHAIN, KEY, TRUSTED, Keys, Refusals, Shown, call, write_keys
from served import PATIENCE_S, Served, attending, serving

from chaos_lightning.control import scheduler_calls
from chaos_lightning.control.claims import ask
from chaos_lightning.control.requests import SERVICE, change_link, drain, fetch_status
from chaos_lightning.control.service_pb2_grpc import SchedulerServicer
from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.machine import few_lines
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import Welcome
from chaos_lightning.security import certificates, keyfiles, roles
from chaos_lightning.security.access import TOKEN_KEY
from chaos_lightning.security.keyfiles import KeyHolder
from chaos_lightning.security.roles import ANYBODY, MEMBER, OBSERVER, OPERATOR, TOKEN, Right, Rights
from chaos_lightning.service.auth_interceptor import Service

CALLS = ("Attend", "Status", "Drain", "ChangeLink", "Reset", "Claim")
OK, ROLE, NO_TOKEN, TLS = "ok", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE"

TABLE: dict[str, tuple[str, str, str, str, str, str]] = {
    # who                              Attend Status Drain ChangeLink Reset Claim
    "a member": (OK, OK, ROLE, ROLE, ROLE, OK),
    "an observer": (ROLE, OK, ROLE, ROLE, ROLE, ROLE),
    "an operator": (ROLE, OK, OK, OK, OK, ROLE),
    "a member without the token": (NO_TOKEN, OK, ROLE, ROLE, ROLE, NO_TOKEN),
    "a member with a wrong token": (NO_TOKEN, NO_TOKEN, ROLE, ROLE, ROLE, NO_TOKEN),
    "an observer with the token": (ROLE, OK, ROLE, ROLE, ROLE, ROLE),
    "an operator with a wrong token": (ROLE, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, ROLE),
    "the token without certificate": (TLS, TLS, TLS, TLS, TLS, TLS),
    "the token without TLS": (TLS, TLS, TLS, TLS, TLS, TLS),
    "another authority's member with the token": (TLS, TLS, TLS, TLS, TLS, TLS),
    "another authority's operator": (TLS, TLS, TLS, TLS, TLS, TLS),
    "an expired member with the token": (TLS, TLS, TLS, TLS, TLS, TLS),
    "an expired observer": (TLS, TLS, TLS, TLS, TLS, TLS),
    "an expired operator": (TLS, TLS, TLS, TLS, TLS, TLS),
    "a role that nobody knows": (TLS, TLS, TLS, TLS, TLS, TLS),
    "nobody": (TLS, TLS, TLS, TLS, TLS, TLS),
}
REASONS = {
    "a member": "a is member, and",
    "an observer": "o is observer, and",
    "an operator": "p is operator, and",
    "a member without the token": "missing cluster token|a is member, and",
    "a member with a wrong token": "wrong cluster token|a is member, and",
    "an observer with the token": "o is observer, and",
    "an operator with a wrong token": "wrong cluster token|p is operator, and",
    "the token without certificate": "it showed no certificate",
    "the token without TLS": "it speaks no TLS",
    "another authority's member with the token": "its certificate does not count: unable to get local issuer",
    "another authority's operator": "its certificate does not count: unable to get local issuer",
    "an expired member with the token": "its certificate does not count: certificate has expired",
    "an expired observer": "its certificate does not count: certificate has expired",
    "an expired operator": "its certificate does not count: certificate has expired",
    "a role that nobody knows": "expected one of the roles member, observer, operator",
    "nobody": "it speaks no TLS",
}
"""Words in the log about them (either of the two)."""


def answer(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
    return [fx.Answer(event.token, True, "done")] if isinstance(event, fx.ChangeLink | fx.Reset) else None


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("mine") / "keys")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("others") / "keys")


@pytest.fixture(scope="module")
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture(scope="module")
def scheduler(keys: Keys, refusals: Refusals) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_lines, "_MAX_LINES_PER_S", 1000)
        with serving(answer, token=keys.of("a"), log=refusals) as served:
            yield served


def shown_by(who: str, keys: Keys, others: Keys) -> Shown:
    token = keys.cluster.tokens[0]
    believing = {"ca.crt": keys.files("a")["ca.crt"]}

    def stranger(name: str) -> dict[str, str]:
        return {**others.files(name), **believing}

    cases = {
        "a member": Shown(keys.files("a"), token),
        "an observer": Shown(keys.files("o")),
        "an operator": Shown(keys.files("p")),
        "a member without the token": Shown(keys.files("a")),
        "a member with a wrong token": Shown(keys.files("a"), others.cluster.tokens[0]),
        "an observer with the token": Shown(keys.files("o"), token),
        "an operator with a wrong token": Shown(keys.files("p"), others.cluster.tokens[0]),
        "the token without certificate": Shown(believing, token),
        "the token without TLS": Shown(None, token),
        "another authority's member with the token": Shown(stranger("a"), token),
        "another authority's operator": Shown(stranger("p")),
        "an expired member with the token": Shown(keys.issued(MEMBER, -0.001), token),
        "an expired observer": Shown(keys.issued(OBSERVER, -0.001)),
        "an expired operator": Shown(keys.issued(OPERATOR, -0.001)),
        "nobody": Shown(None),
    }
    if who == "a role that nobody knows":
        chain, key = certificates.certify(keys.cluster.authority, "cluster", "odd", "owner")
        return Shown({**believing, CHAIN: chain, KEY: key}, token)
    return cases[who]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("who", TABLE)
def test_each_cell_of_the_table(
    who: str, what: str, keys: Keys, others: Keys, scheduler: Served, refusals: Refusals
) -> None:
    refusals.take()
    assert call(scheduler.endpoint, what, shown_by(who, keys, others)) == TABLE[who][CALLS.index(what)]
    logged = refusals.take(some=TABLE[who][CALLS.index(what)] != OK)
    if TABLE[who][CALLS.index(what)] == OK:
        assert logged == []
        return
    for peer, reason in logged:
        assert peer.startswith("ipv4:127.0.0.1:")
        assert any(part in reason for part in REASONS[who].split("|")), reason
    if TABLE[who][CALLS.index(what)] != TLS:  # it is known by then who it is
        name = {"a member": "a (member)", "an observer": "o (observer)", "an operator": "p (operator)"}
        peer, reason = logged[0]
        assert name[" ".join(who.split()[:2])] in peer
        assert f"({what})" in reason


@pytest.mark.parametrize("what", CALLS)
def test_the_port_behind_the_proxy_is_nobodys(what: str, keys: Keys, scheduler: Served, refusals: Refusals) -> None:
    """The gRPC port behind the TLS proxy refuses every direct call, even from this machine and with the token."""
    refusals.take()
    inner = scheduler.server._frame.auth.inner_port
    assert inner != scheduler.server.port
    shown = Shown(None, keys.cluster.tokens[0])
    assert call(f"127.0.0.1:{inner}", what, shown) == NO_TOKEN
    assert ["inner port" in reason for _, reason in refusals.take(some=True)] == [True]


@pytest.mark.parametrize(
    ("token", "expected"), [("the right token", OK), ("another token", NO_TOKEN), (None, NO_TOKEN)], ids=str
)
@pytest.mark.parametrize("what", CALLS)
def test_with_a_token_alone_whoever_knows_it_may_everything(what: str, token: str | None, expected: str) -> None:
    with serving(answer, token=b"the right token") as served:
        assert call(served.endpoint, what, Shown(None, token)) == expected


@pytest.mark.parametrize("what", CALLS)
def test_without_credentials_everybody_on_this_machine_may_everything(what: str) -> None:
    with serving(answer) as served:
        assert call(served.endpoint, what, Shown(None)) == OK


def rights() -> Rights:
    made = Rights()
    made.register(SERVICE, scheduler_calls.RIGHTS)
    return made


def path(call: str) -> str:
    return f"/{SERVICE}/{call}"


def test_the_table_names_every_call_there_is_and_no_other() -> None:
    methods = {name for name in vars(SchedulerServicer) if not name.startswith("_")}
    assert set(scheduler_calls.RIGHTS) == methods == set(CALLS)
    known = rights()
    assert not any(known.may(role, path("Shutdown")) for role in (*roles.certified(), TOKEN, ANYBODY))
    assert not known.may("owner", path("Status"))
    for role, who in ((MEMBER, "a member"), (OBSERVER, "an observer"), (OPERATOR, "an operator")):
        assert tuple(OK if known.may(role, path(c)) else ROLE for c in CALLS) == TABLE[who]


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    rows = {
        cells[0].strip(): [c.strip() for c in cells[1:]]
        for line in text.splitlines()
        if line.startswith("|") and len(cells := line.strip("|").split("|")) == 7
    }
    assert rows["role"] == list(CALLS)
    known = rights()
    for role in (MEMBER, OBSERVER, OPERATOR, TOKEN, ANYBODY):
        expected = ["yes" if known.may(role, path(c)) else "no" for c in CALLS]
        assert [cell.split(",")[0] for cell in rows[role]] == expected, role
        for cell, c in zip(rows[role], CALLS, strict=True):
            demanded = role in roles.certified() and known.must_show_token(role, path(c))
            assert ("with the token" in cell) == demanded, (role, c)


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://example.org"],
        ["chaos-lightning://c/member/a", "chaos-lightning://c/operator/a"],
        ["chaos-lightning://c/owner/a"],
        ["chaos-lightning://c/member/"],
        ["chaos-lightning://c/member"],
        ["chaos-lightning://c/member/a/b"],
    ],
)
def test_certificates_with_odd_roles(uris: list[str]) -> None:
    with pytest.raises(WireError, match="its certificate"):
        roles.read_uris(uris)


def test_uris_of_others_do_not_matter() -> None:
    assert roles.read_uris(["spiffe://x", roles.uri("c", OBSERVER, "ann")]) == (OBSERVER, "ann")


# ------------------------------------------------------------------------------------------------ our own clients


def test_clients_of_ours_show_what_is_needed(keys: Keys, scheduler: Served) -> None:
    with attending(scheduler.endpoint, token=keys.of("b")) as client:
        client.messages.wait_for(Welcome)
        streams = fetch_status(scheduler.endpoint, keys.of("o"))["streams"]
        assert any(s["peer"].endswith(" b (member)") and s["name"] == "a" for s in streams)
        assert drain(scheduler.endpoint, "a", keys.of("p")) == ("a",)
        assert change_link(scheduler.endpoint, "a", "b", add=True, token=keys.of("p")) == "done"
        ask(scheduler.endpoint, keys.of("b"), "default", PATIENCE_S).release()
        with pytest.raises(RefusedError, match=r"o is observer, and Claim is for member"):
            ask(scheduler.endpoint, keys.of("o"), "default", PATIENCE_S)
        with pytest.raises(RefusedError, match=r"o is observer, and Drain is for operator; use a folder of keys"):
            drain(scheduler.endpoint, "a", keys.of("o"))
    with attending(scheduler.endpoint, token=keys.of("o")) as client:
        assert "o is observer, and Attend is for member" in client.states.wait(lambda s: s.startswith("failed"))


def test_ones_own_expired_certificate_is_named_before_anything_is_sent(
    keys: Keys, scheduler: Served, refusals: Refusals, tmp_path: Path
) -> None:
    from chaos_lightning.security.credentials import Credentials, KeyFolder

    folder = write_keys(tmp_path / "odd", keys.issued(MEMBER, 1))
    credentials = Credentials(keys=KeyFolder(folder))
    assert fetch_status(scheduler.endpoint, credentials)["role"] == "leader"
    refusals.take()
    write_keys(folder, keys.issued(MEMBER, -0.001))  # as if a day had passed
    with pytest.raises(
        RefusedError, match=r"certificate of odd .* it expired on 2\d{3}-\d\d-\d\d \d\d:\d\d UTC; renew"
    ):
        fetch_status(scheduler.endpoint, credentials)
    with attending(scheduler.endpoint, token=credentials) as client:
        assert "it expired on" in client.states.wait(lambda s: s.startswith("failed"))
    assert refusals.take() == []


# ------------------------------------------------------------------------------------------------ another service

BELL = "tests.Bell"


class Bell(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Extra gRPC service in the scheduler's server: Ring returns how often it was called, Listen sends that three
    times.
    """

    def __init__(self) -> None:
        self.rung = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == f"/{BELL}/Listen":
            return grpc.unary_stream_rpc_method_handler(self.listen)
        ours = details.method in (f"/{BELL}/Ring", f"/{BELL}/Forgotten")
        return grpc.unary_unary_rpc_method_handler(self.ring) if ours else None

    async def ring(self, _request: bytes, _context: Any) -> bytes:
        self.rung += 1
        return str(self.rung).encode()

    async def listen(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield str(self.rung).encode()


@pytest.fixture
def ringer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Role named "ringer" that is registered during the test."""
    monkeypatch.setattr(roles, "_SERVES", dict(roles._SERVES))
    return roles.register_role("ringer")


def ring(endpoint: str, what: str, files: dict[str, str], token: str | None = None) -> list[str]:
    """Returns the answers to one call of the service `Bell`, or the status with which the call failed."""
    credentials = grpc.ssl_channel_credentials(*(files[name].encode() for name in (TRUSTED, KEY, CHAIN)))
    metadata = ((TOKEN_KEY, token.encode()),) if token is not None else ()
    with grpc.secure_channel(endpoint, credentials) as channel:
        make = channel.unary_stream if what == "Listen" else channel.unary_unary
        try:
            found = make(f"/{BELL}/{what}")(b"", metadata=metadata, timeout=PATIENCE_S)
            return [part.decode() for part in found] if what == "Listen" else [found.decode()]
        except grpc.RpcError as error:
            return [f"{error.code().name}: {error.details()}"]


def test_a_service_that_is_added_says_who_may_call_it(tmp_path: Path, ringer: str, refusals: Refusals) -> None:
    """An added service says which roles may call it, even a role of its own, which may make none of the scheduler's
    calls.
    """
    keys, bell = Keys(tmp_path / "keys"), Bell()
    keyfiles.add(keys.folder, KeyHolder("r", ringer))
    rights = {"Ring": Right((ringer, MEMBER), with_token=(MEMBER,)), "Listen": Right((OBSERVER,))}
    added = Service(BELL, rights, lambda server: server.add_generic_rpc_handlers((bell,)))
    with serving(answer, token=keys.of("a"), log=refusals, services=[added]) as served:
        at, token = served.endpoint, keys.cluster.tokens[0]
        assert ring(at, "Ring", keys.files("r")) == ["1"]
        assert ring(at, "Ring", keys.files("b"), token) == ["2"]
        assert "missing cluster token" in ring(at, "Ring", keys.files("b"))[0]
        assert ring(at, "Listen", keys.files("o")) == ["2", "2", "2"]
        refusals.take()
        assert "r is ringer, and Listen is for observer" in ring(at, "Listen", keys.files("r"))[0]
        assert refusals.take(some=True)[0][0].endswith(" r (ringer)")
        assert "o is observer, and Ring is for member or ringer" in ring(at, "Ring", keys.files("o"))[0]
        assert "a is member, and Forgotten is for nobody" in ring(at, "Forgotten", keys.files("a"), token)[0]
        assert ring(at, "Nothing", keys.files("a"), token)[0].startswith("UNIMPLEMENTED")
        assert bell.rung == 2
        assert call(at, "Status", Shown(keys.files("r"))) == ROLE
        assert call(at, "Status", Shown(keys.files("o"))) == OK
    with serving(answer, token=b"the right token", services=[added]) as served:
        assert call(served.endpoint, "Status", Shown(None, "the right token")) == OK


@pytest.mark.parametrize("name", ["", "Ringer", "a/b", "two words", "token", "anybody", "bl\u00e4ser"])
def test_roles_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match="expected a plain word in lower case"):
        roles.register_role(name)


def test_what_is_registered_twice_or_for_nobody_is_an_error(ringer: str) -> None:
    assert roles.register_role(ringer) == ringer
    with pytest.raises(ValueError, match="registered as one that does not serve"):
        roles.register_role(ringer, serves=True)
    known = rights()
    with pytest.raises(ValueError, match="Attend is registered already"):
        known.register(SERVICE, scheduler_calls.RIGHTS)
    with pytest.raises(ValueError, match="no role owner is registered"):
        known.register(BELL, {"Ring": Right(("owner",))})
