"""Performs the authenticated handshake on every new connection between members.

Theory of operation. Both ends prove by an HMAC over everything that was said, both nonces included, that they know what
the two of them share: the cluster token and, where the scheduler hands out keys (control/link_keys.py), one of this
very pair's keys; neither travels. Who dials proves every key that it knows, newest first, and who accepts takes the
first that it knows, too: one of them may have heard of a newer key a moment earlier. While tokens are rotated a member
may know two, and proves each key with both. Without token and keys (allowed
on loopback only, see security/access.py) the HMAC key is empty and the exchange still checks job, identity and purpose.

Who dials also says how this connection is to be protected (transport/sealing.py), and who accepts refuses what is less
than it wants itself. The traffic keys are derived from the shared key and all that was said.

Messages are JSON of at most 4 KiB behind a 4-byte length, the whole handshake has one deadline, and nothing is
allocated for a stranger beyond that.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.protocol.types import VERSION, other_version
from chaos_lightning.transport.locality import on_this_machine
from chaos_lightning.transport.medium import installed
from chaos_lightning.transport.sealing import Level, ProtectedSocket, SealedSession, mixed

PURPOSES = ("link", "bulk", "watch", "park")
"""Purposes of connections: frames, one connection per pair; ranges of state, which the dialling end asks for; beside a
link between machines the word of each other's process table (machine/watcher.py); and ranges of state that the dialling
end will be asked for, since nobody can dial it (outer/exchange/lines.py).
"""
_LIMIT = 4096
_MAX_NAME = 100
"""Number of characters of a stranger's words that are repeated."""
BUFFER_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Greeting:
    """Facts that the dialling side states about a connection; `purpose` is one of PURPOSES."""

    job: str
    me: str
    peer: str
    purpose: str
    version: int = VERSION
    session: SealedSession | None = field(default=None, compare=False, repr=False)
    """Protection of the connection, once it is accepted."""


class LinkKeyring(Protocol):
    """Keys of this member's links; methods may be called by any thread, and may wait for a moment."""

    def level(self, *, local: bool) -> Level:
        """Returns the least protection required of a connection, within this machine (`local`) or to another one."""

    def known(self, peer: str) -> Sequence[tuple[str, bytes]]:
        """Returns (name, key) of all keys shared with this peer, newest first; a pair of empty values if links have no
        keys.

        Raises:
            RefusedError: There should be a key, and there is none.
        """

    def find(self, peer: str, names: Sequence[str]) -> tuple[str, bytes] | None:
        """Returns the first of the named keys that this member has, as (name, key); None if it has none of them."""


def tune(sock: socket.socket, *, user_timeout_ms: int = 10_000) -> None:
    """Sets a socket's options: no Nagle delay, large buffers, congestion control cubic (BBR halves loopback's rate),
    and a timeout for unacknowledged bytes.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_NBYTES)
    for name, value in (("TCP_CONGESTION", b"cubic"), ("TCP_USER_TIMEOUT", user_timeout_ms)):
        known: int | None = getattr(socket, name, None)
        if known is not None:
            # A kernel without the module or the option works, only slower or later.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, known, value)


def keep_alive(sock: socket.socket, *, idle_s: int, patience_s: int) -> None:
    """Enables TCP keep-alive: the kernel probes a peer that was silent for `idle_s`, and ends the connection after
    `patience_s` without an answer.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"KEEPIDLE": idle_s, "KEEPINTVL": 1, "KEEPCNT": patience_s, "USER_TIMEOUT": 1000 * (idle_s + patience_s)}
    for name, value in wanted.items():
        known: int | None = getattr(socket, f"TCP_{name}", None)
        if known is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, known, value)


def stands(sock: socket.socket) -> bool:
    """Returns whether an idle connection is still usable: the peer has neither closed it nor sent anything."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _send(sock: socket.socket, fields: dict[str, object]) -> bytes:
    body = json.dumps(fields, sort_keys=True).encode()
    sock.sendall(struct.pack("<I", len(body)) + body)
    return body


def _exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireError("handshake took longer than its deadline")
        sock.settimeout(left)
        try:
            part = sock.recv(nbytes - len(data))
        except TimeoutError as error:
            raise WireError("handshake took longer than its deadline") from error
        if not part:
            raise WireError("connection closed in the middle of the handshake")
        data += part
    return data


def _receive(sock: socket.socket, deadline: float) -> tuple[dict[str, object], bytes]:
    (length,) = struct.unpack("<I", _exactly(sock, 4, deadline))
    if length > _LIMIT:
        raise WireError(f"handshake message announces {length} bytes, the limit is {_LIMIT}")
    body = _exactly(sock, length, deadline)
    try:
        return _fields(body), body
    except ValueError as error:
        raise WireError(f"handshake message is no JSON object of texts and numbers: {error}") from error


def _fields(body: bytes) -> dict[str, object]:
    """Decodes a handshake message to a dict; raises ValueError for anything else, and for text that is not valid
    UTF-8.
    """
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()  # a lone surrogate is valid JSON, and no text
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is a {type(fields).__name__}")
    return fields


def _all(token: bytes | Sequence[bytes]) -> tuple[bytes, ...]:
    """Returns the tokens as a tuple; a single empty one if there is no token."""
    return (token,) if isinstance(token, bytes) else tuple(token) or (b"",)


def _same(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="backslashreplace"), expected.encode())


def _proof(token: bytes, role: bytes, *parts: bytes) -> str:
    mac = hmac.new(token, role, hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<I", len(part)) + part)
    return mac.hexdigest()


def dial(
    address: str,
    port: int,
    greeting: Greeting,
    *,
    token: bytes | Sequence[bytes] = b"",
    deadline_s: float = 5.0,
    keys: LinkKeyring | None = None,
) -> socket.socket:
    """Connects to a member, authenticates both sides, and returns a blocking socket, protected as `keys` requires.

    Raises:
        OSError: There is no way to the address, or nothing listens there.
        RefusedError: The other side does not accept this greeting, token or key, and says why.
        WireError: The other side does not speak this protocol.
    """
    deadline = time.monotonic() + deadline_s
    shared = keys.known(greeting.peer) if keys is not None else (("", b""),)
    sock = installed().connect(address, port, me=greeting.me, peer=greeting.peer, timeout_s=deadline_s)
    try:
        tune(sock)
        level = keys.level(local=on_this_machine(sock)) if keys is not None else Level.CHECKSUM
        _, opening = _receive(sock, deadline)
        fields = {name: getattr(greeting, name) for name in ("job", "me", "peer", "purpose", "version")}
        fields |= {"nonce": os.urandom(16).hex(), "level": str(level), "keys": [name for name, _ in shared]}
        body = json.dumps(fields, sort_keys=True).encode()
        secrets = {name: [mixed(known, key) for known in _all(token)] for name, key in shared}
        proofs = {name: [_proof(s, b"dial", opening, body) for s in several] for name, several in secrets.items()}
        _send(sock, {"hello": body.decode(), "proofs": proofs})
        answer, _ = _receive(sock, deadline)
        if not answer.get("ok"):
            raise RefusedError(f"{address}:{port} refused {greeting.me} ({greeting.purpose}): {answer.get('reason')}")
        named, proof = secrets.get(str(answer.get("key", "")), []), answer.get("proof", "")
        secret = next((s for s in named if _same(proof, _proof(s, b"accept", opening, body))), None)
        if secret is None:
            raise RefusedError(
                f"{address}:{port} does not know {'the key of this link' if shared[0][0] else 'the cluster token'}; it "
                "is not a member of this job"
            )
        sock.settimeout(None)
        if level is Level.CHECKSUM:
            return sock
        return ProtectedSocket.around(sock, SealedSession(level, secret, opening + body, dialled=True))
    except BaseException:
        sock.close()
        raise


@dataclass(slots=True)
class _Claim:
    """Claims of a dialler that has not proved anything yet."""

    greeting: Greeting
    level: Level
    names: tuple[str, ...]


def _claim(body: bytes) -> _Claim | None:
    try:
        fields = _fields(body)
        job, me, peer, purpose = (str(fields[name]) for name in ("job", "me", "peer", "purpose"))
        names = fields["keys"]
        if type(names) is not list or not all(type(name) is str for name in names) or not fields["nonce"]:
            return None
        greeting = Greeting(job, me, peer, purpose, int(str(fields["version"])))
        return _Claim(greeting, Level(str(fields["level"])), tuple(names))
    except (ValueError, KeyError, TypeError):
        return None


def accept(
    sock: socket.socket,
    *,
    job: str,
    me: str,
    token: bytes | Sequence[bytes] = b"",
    deadline_s: float = 5.0,
    keys: LinkKeyring | None = None,
    objection: Callable[[Greeting], str] = lambda greeting: "",
) -> Greeting:
    """Performs the listening side of the handshake. On refusal sends the reason, closes the socket and raises
    RefusedError.

    Args:
        sock: Connected socket; tuned here.
        job: Name of this member's job.
        me: Id of this member.
        token: Token of the cluster, or those that count while it is rotated.
        deadline_s: Seconds for the whole handshake.
        keys: Keyring of this member; None: links have no keys of their own.
        objection: Function that returns why this member does not want somebody who has proved all that it must; "" if
            it does. It may wait for a moment.

    Returns:
        Greeting of the member that dialled; its `session`, if there is one, is to be put around the socket
        (sealing.ProtectedSocket).
    """
    deadline = time.monotonic() + deadline_s
    try:
        tune(sock)
        opening = _send(sock, {"nonce": os.urandom(16).hex(), "version": VERSION})
        answer, _ = _receive(sock, deadline)
        body = str(answer.get("hello", "")).encode(errors="replace")
        claim = _claim(body)
        reason, name = "", ""
        secret: bytes | None = None
        if claim is None:
            reason = "malformed hello, or of another version of the link protocol"
        else:
            found = keys.find(claim.greeting.me, claim.names) if keys is not None else ("", b"")
            if found is not None:
                name, given = found[0], _given(answer, found[0])
                secrets = (mixed(known, found[1]) for known in _all(token))
                secret = next((s for s in secrets for g in given if _same(g, _proof(s, b"dial", opening, body))), None)
            if found is None:
                reason = "no key of this link is known here that the dialler knows, too"
            elif secret is None:
                reason = "wrong or missing key" if name else "wrong or missing cluster token"
            else:
                reason = _mismatch(claim, sock, job, me, keys) or objection(claim.greeting)
        if claim is None or secret is None or reason:
            _send(sock, {"ok": False, "reason": reason})
            who = f"{_cut(claim.greeting.me)} " if claim is not None else ""
            raise RefusedError(f"refused a connection of {who}from {_whence(sock)}: {reason}")
        _send(sock, {"ok": True, "key": name, "proof": _proof(secret, b"accept", opening, body)})
        sock.settimeout(None)
        if claim.level is Level.CHECKSUM:
            return claim.greeting
        return replace(claim.greeting, session=SealedSession(claim.level, secret, opening + body, dialled=False))
    except BaseException:
        sock.close()
        raise


def _given(answer: dict[str, object], name: str) -> list[object]:
    """Returns the dialler's proofs for the key of this name; two while the cluster token is rotated."""
    proofs = answer.get("proofs")
    given = proofs.get(name) if isinstance(proofs, dict) else None
    return given[:2] if isinstance(given, list) else []


def _mismatch(claim: _Claim, sock: socket.socket, job: str, me: str, keys: LinkKeyring | None) -> str:
    """Returns the reason why an authenticated peer is refused (version, job, id, purpose, protection); "" if it is
    not.
    """
    greeting = claim.greeting
    if words := other_version(greeting.version):
        return f"the dialler {words}"
    if greeting.job != job:
        return f"job {_cut(greeting.job)}, this member belongs to {job!r}"
    if greeting.peer != me:
        return f"looks for {_cut(greeting.peer)}, this is {me!r}"
    if greeting.purpose not in PURPOSES:
        return f"purpose {_cut(greeting.purpose)}, expected one of {', '.join(PURPOSES)}"
    wanted = keys.level(local=on_this_machine(sock)) if keys is not None else Level.CHECKSUM
    if claim.level.strength < wanted.strength:
        return f"the dialler wants the link {claim.level}, here it must be {wanted}"
    if claim.level is not Level.CHECKSUM and keys is None:
        return f"the dialler wants the link {claim.level}, this member has no keys"
    return ""


def _cut(name: str) -> str:
    """Returns a name that a stranger claims, quoted and shortened for logs."""
    return repr(name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + "...")


def _whence(sock: socket.socket) -> str:
    try:
        where = sock.getpeername()
        return f"{where[0]}:{where[1]}"
    except (OSError, IndexError, TypeError):
        return "an unknown address"
