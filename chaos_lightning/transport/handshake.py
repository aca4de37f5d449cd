"""Who is at the other end: an authenticated hello on every new connection between members.

Theory of operation. Both ends prove that they know the cluster token by an HMAC over the other's nonce and both
hellos; the token itself never travels. While tokens are rotated a member may know two, and proves both. Without a token
(allowed on loopback only, see runtime/access.py) the HMAC key is empty and the exchange still checks job, identity and
purpose. Messages are JSON of at most 4 KiB behind a 4-byte length, the whole handshake has one deadline, and nothing is
allocated for a stranger beyond that.

For tests and emulated networks, CHAOS_LINK_RELAY=HOST:PORT in the environment has this process dial a relay instead of
its peers, and tell it in one line of JSON who calls whom and where (testing/relay.py). The handshake with its proofs
passes through it from end to end.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chaos_lightning.errors import RefusedError, WireError

VERSION = 1
RELAY = "CHAOS_LINK_RELAY"
_LIMIT = 4096
BUFFER_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the dialling side says. `purpose` is "link" (frames, one per pair) or "bulk" (state ranges)."""

    job: str
    me: str
    peer: str
    purpose: str
    version: int = VERSION


def tune(sock: socket.socket, *, user_timeout_ms: int = 10_000) -> None:
    """No Nagle, large buffers, cubic (BBR halves loopback), and a dead path noticed by the sender."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_NBYTES)
    for name, value in (("TCP_CONGESTION", b"cubic"), ("TCP_USER_TIMEOUT", user_timeout_ms)):
        known: int | None = getattr(socket, name, None)
        if known is not None:
            # A kernel without the module or the option works, only slower or later.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, known, value)


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
    """An object whose texts can be written as UTF-8; anything else is a ValueError."""
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()  # a lone surrogate is valid JSON, and no text
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is a {type(fields).__name__}")
    return fields


def _same(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="backslashreplace"), expected.encode())


def _proof(token: bytes, role: bytes, *parts: bytes) -> str:
    mac = hmac.new(token, role, hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<I", len(part)) + part)
    return mac.hexdigest()


def _all(token: bytes | Sequence[bytes]) -> tuple[bytes, ...]:
    """The tokens to prove or to believe; "" is the key where there is none."""
    return (token,) if isinstance(token, bytes) else tuple(token) or (b"",)


def _connect(address: str, port: int, greeting: Greeting, deadline_s: float) -> socket.socket:
    relay = os.environ.get(RELAY, "")
    if not relay:
        return socket.create_connection((address, port), timeout=deadline_s)
    host, _, number = relay.rpartition(":")
    sock = socket.create_connection((host, int(number)), timeout=deadline_s)
    said = {"me": greeting.me, "peer": greeting.peer, "address": address, "port": port}
    try:
        sock.sendall(json.dumps(said).encode() + b"\n")
    except BaseException:
        sock.close()
        raise
    return sock


def dial(
    address: str, port: int, greeting: Greeting, *, token: bytes | Sequence[bytes] = b"", deadline_s: float = 5.0
) -> socket.socket:
    """Connects, proves the token (or one of them) both ways and returns a blocking, tuned socket.

    Raises:
        OSError: Nobody listens there.
        RefusedError: The other side does not accept this greeting or token, and says why.
        WireError: The other side does not speak this protocol.
    """
    deadline = time.monotonic() + deadline_s
    sock = _connect(address, port, greeting, deadline_s)
    try:
        tune(sock)
        challenge, _ = _receive(sock, deadline)
        server_nonce = str(challenge.get("nonce", "")).encode(errors="backslashreplace")
        nonce = os.urandom(16).hex()
        body = json.dumps({**asdict(greeting), "nonce": nonce}, sort_keys=True).encode()
        first, *older = (_proof(known, b"dial", server_nonce, body) for known in _all(token))
        _send(sock, {"hello": body.decode(), "proof": first, "older": older})
        answer, _ = _receive(sock, deadline)
        if not answer.get("ok"):
            raise RefusedError(f"{address}:{port} refused {greeting.me} ({greeting.purpose}): {answer.get('reason')}")
        given = str(answer.get("proof", ""))
        if not any(_same(given, _proof(t, b"accept", nonce.encode(), body)) for t in _all(token)):
            raise RefusedError(f"{address}:{port} does not know the cluster token; it is not a member of this job")
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def accept(
    sock: socket.socket, *, job: str, me: str, token: bytes | Sequence[bytes] = b"", deadline_s: float = 5.0
) -> Greeting:
    """The listening side's half. On refusal the reason is sent, the socket closed and RefusedError raised."""
    deadline = time.monotonic() + deadline_s
    try:
        tune(sock)
        nonce = os.urandom(16).hex()
        _send(sock, {"nonce": nonce})
        answer, _ = _receive(sock, deadline)
        body = str(answer.get("hello", "")).encode(errors="backslashreplace")
        reason = ""
        greeting = Greeting("", "", "", "")
        fields: dict[str, object] = {}
        older = answer.get("older")
        given = [str(answer.get("proof", "")), *(map(str, older[:1]) if isinstance(older, list) else ())]
        proved = next(
            (t for t in _all(token) for g in given if _same(g, _proof(t, b"dial", nonce.encode(), body))), None
        )
        if proved is None:
            reason = "wrong or missing cluster token"
        else:
            try:
                fields = _fields(body)
                job_given, peer_id, wanted, purpose, _ = (
                    str(fields[k]) for k in ("job", "me", "peer", "purpose", "nonce")
                )
                greeting = Greeting(job_given, peer_id, wanted, purpose, int(str(fields["version"])))
            except (ValueError, KeyError, TypeError):
                reason = "malformed hello"
            else:
                if greeting.version != VERSION:
                    reason = f"link protocol {greeting.version}, this member speaks {VERSION}"
                elif greeting.job != job:
                    reason = f"job {greeting.job!r}, this member belongs to {job!r}"
                elif greeting.peer != me:
                    reason = f"looks for {greeting.peer!r}, this is {me!r}"
                elif greeting.purpose not in ("link", "bulk"):
                    reason = f"purpose {greeting.purpose!r}, expected link or bulk"
        if reason:
            _send(sock, {"ok": False, "reason": reason})
            raise RefusedError(f"refused a connection: {reason}")
        _send(sock, {"ok": True, "proof": _proof(proved or b"", b"accept", str(fields["nonce"]).encode(), body)})
        sock.settimeout(None)
        return greeting
    except BaseException:
        sock.close()
        raise
