"""The handshake of a link, by either end, with somebody hostile at the other one.

Theory of operation. Inputs whose second byte is P prove what they say, so that changes of what is said get past the
proof, as those of a member gone bad would.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.lab.fuzz import mutate
from chaos_lightning.transport.handshake import VERSION, Greeting, accept, dial
from chaos_lightning.transport.sealing import Level, mixed

_PATIENCE_S = 5.0

_KEY = ("key 1", b"of this very pair")


class _Keys:
    """This pair shares one key; `find` and `known` as control/link_keys.py has them."""

    def level(self, *, local: bool) -> Level:
        return Level.CHECKSUM

    def known(self, peer: str) -> Sequence[tuple[str, bytes]]:
        return (_KEY,)

    def find(self, peer: str, names: Sequence[str]) -> tuple[str, bytes] | None:
        return _KEY if _KEY[0] in names else None


def _received(sock: socket.socket) -> bytes:
    (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(length, socket.MSG_WAITALL)


def _proofs(role: bytes, *parts: bytes) -> dict[str, str]:
    """By the name of the key: without keys, and with this pair's."""
    proofs = {}
    for name, key in (("", b""), _KEY):
        mac = hmac.new(mixed(b"", key), role, hashlib.sha256)
        for part in parts:
            mac.update(struct.pack("<I", len(part)) + part)
        proofs[name] = mac.hexdigest()
    return proofs


def _answer(sock: socket.socket, data: bytes, *, dialled: bool) -> None:
    """The hostile end. Inputs that begin with P prove what they say, as one who knows token and key can."""
    with contextlib.suppress(OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError):
        if data[:1] == b"P" and dialled:
            proofs = _proofs(b"dial", _received(sock), data[1:])
            said = {"hello": data[1:].decode("utf-8", "replace"), "proofs": {k: [v] for k, v in proofs.items()}}
            data = _lengthy(said)
        elif data[:1] == b"P":
            opening = {"nonce": "00", "version": VERSION}
            sock.sendall(_lengthy(opening))
            hello_said = str(json.loads(_received(sock))["hello"]).encode()
            fields = json.loads(data[1:])
            proof = _proofs(b"accept", json.dumps(opening).encode(), hello_said).get(fields.get("key"), "")
            data = _lengthy({"proof": proof} | fields)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def shaken(data: bytes) -> str:
    """Whether this input's speaker is let in: "" if so, or the words with which it is not.

    The first byte says which end it is (1: who listens), and whether this pair has a key (2).
    """
    first, said = data[0] if data else 0, data[1:]
    listens, keys = bool(first & 1), _Keys() if first & 2 else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_PATIENCE_S)
        port = listener.getsockname()[1]

        def hostile() -> None:
            with contextlib.suppress(OSError):
                if listens:
                    sock, _ = listener.accept()
                else:
                    sock = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
                with sock:
                    sock.settimeout(_PATIENCE_S)
                    _answer(sock, said, dialled=not listens)

        other = threading.Thread(target=hostile, daemon=True)
        other.start()
        try:
            if listens:
                greeting = Greeting("job", "a~1", "b~2", "link")
                dial("127.0.0.1", port, greeting, deadline_s=_PATIENCE_S, keys=keys).close()
            else:
                sock, _ = listener.accept()
                with sock:
                    accept(sock, job="job", me="b~2", deadline_s=_PATIENCE_S, keys=keys)
        except (RefusedError, WireError, OSError) as error:
            return str(error) or type(error).__name__
        finally:
            other.join(_PATIENCE_S)
    return ""


def feed_handshake(data: bytes) -> None:
    """Any exception that is not an announced refusal is a finding."""
    shaken(data)


def _lengthy(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return struct.pack("<I", len(body)) + body


def welcome_handshakes() -> list[bytes]:
    """Of those who know what they must, at either end, with a key and without."""
    found = []
    for flag, key in ((0, ""), (2, _KEY[0])):
        for level in Level if key else (Level.CHECKSUM,):
            said = {"job": "job", "me": "a~1", "peer": "b~2", "purpose": "link", "version": VERSION, "nonce": "00"}
            said |= {"level": str(level), "keys": [key]}
            found.append(bytes([flag]) + b"P" + json.dumps(said).encode())
        found.append(bytes([flag | 1]) + b"P" + json.dumps({"ok": True, "key": key}).encode())
    return found


def handshake_seeds() -> list[bytes]:
    """Valid ones, and some whose proofs are wrong."""
    said = welcome_handshakes()[0][2:].decode()
    opening = _lengthy({"nonce": "00", "version": VERSION})
    return [
        *welcome_handshakes(),
        b"\0" + _lengthy({"hello": said, "proofs": {"": ["00"]}}),
        b"\1" + opening + _lengthy({"ok": True, "key": "", "proof": "00"}),
        b"\1" + opening + _lengthy({"ok": False, "reason": "no"}),
    ]


def mutate_handshake(data: bytes, rng: Random) -> bytes:
    """A nearly valid one."""
    if data[1:2] == b"P" and rng.randint(0, 5):
        return data[:2] + mutate.json_of(data[2:], rng)
    parts, at = [], 1
    while at + 4 <= len(data):
        (length,) = struct.unpack("<I", data[at : at + 4])
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if not parts or rng.randint(0, 4) == 0:
        return data[:1] + mutate.bytes_of(data[1:], rng)
    which = rng.randint(0, len(parts) - 1)
    parts[which] = mutate.json_of(parts[which], rng)
    return data[:1] + b"".join(struct.pack("<I", len(p)) + p for p in parts)
