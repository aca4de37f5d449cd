"""Protects a connection between members by checksums only, by an authentication tag for each record, or by encryption.

Theory of operation. After the handshake (transport/handshake.py) both ends hold two traffic keys, one per direction,
derived from the link's key and both ends' nonces, so that no connection ever shares a key with another one. Each
direction is a sequence of *records* of bounded length, sealed by AES-256-GCM (NIST SP 800-38D): with encryption
the payload becomes ciphertext, else it is sent as it is, straight from where it lies, and only authenticated (GMAC).
The nonce of a record is its length and its number in that direction. So what is altered, replayed, reordered, left out
or cut short does not open, and nothing that has not opened is believed, the lengths in headers included.

Buffers are made once per connection and used again. GMAC is what authenticates because it is the fastest sound choice:
on one core about 22 GB/s at 256 KiB, where Poly1305 does 7.4, HMAC-SHA256 1.1 and BLAKE2b 0.6.

The package `cryptography` is imported when the first connection is protected, and not before.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from chaos_lightning.errors import ConfigurationError, WireError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEGMENT_NBYTES = 256 << 10
"""Largest record, bytes: its plaintext and ciphertext fit into a core's cache when the kernel copies the latter."""
CLEAR_SEGMENT_NBYTES = 1 << 20
"""Largest record, bytes, of frames that are only authenticated, which need no second buffer: each record costs two
system calls and about 10 microseconds of Python, much beside the 43 that the tag of 1 MiB takes (docs/links.md).
"""
TAG_NBYTES = 16
KEY_NBYTES = 32
MAX_RECORDS = 1 << 40
"""Largest number of records of one key; a connection that has sent so many is cut, and the next one has another key."""
_NONCE = struct.Struct(">IQ")
_LENGTH = struct.Struct("<I")
_HEADS_NBYTES = 1024
"""Room, bytes, for headers of frames, which are shorter."""


class Level(enum.StrEnum):
    """Protection of a connection, from weakest to strongest."""

    CHECKSUM = "checksum"
    AUTHENTICATED = "authenticated"
    ENCRYPTED = "encrypted"

    @property
    def strength(self) -> int:
        return list(Level).index(self)


RULES = ("auto", *(str(level) for level in Level))
"""Values of the setting `links`."""


def segment_nbytes(level: Level) -> int:
    """Returns the largest number of a frame's payload bytes that go into one record."""
    return CLEAR_SEGMENT_NBYTES if level is Level.AUTHENTICATED else SEGMENT_NBYTES


def require_library() -> None:
    """Raises ConfigurationError if the package `cryptography`, which protects connections, is not installed."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"protected links need the package cryptography ({error}): pip install 'cryptography>=48', or set "
            "links=checksum on a network that you trust"
        ) from error


def mixed(token: bytes, key: bytes) -> bytes:
    """Combines the cluster token and the link's key, if there is one, to the secret that both ends must know."""
    return hmac.digest(token, key, "sha256") if key else token


def _nonce(nbytes: int, count: int) -> bytes:
    if count >= MAX_RECORDS:
        raise WireError(f"the key of this connection has sealed {count} records; it must be made anew")
    return _NONCE.pack(nbytes, count)


class Sealer:
    """Sending end of one direction of a connection: encrypts or tags records, which must be sent in that order.

    Args:
        level: AUTHENTICATED or ENCRYPTED.
        key: Traffic key of this direction.
    """

    def __init__(self, level: Level, key: bytes) -> None:
        self._aead = _aead(key)
        self._clear = level is Level.AUTHENTICATED
        self._segment_nbytes = segment_nbytes(level)
        self._count = 0
        self._out = memoryview(bytearray(0))
        self._joined = memoryview(bytearray(0))

    def frame(self, parts: list[memoryview], *, begins: bool) -> list[memoryview]:
        """Seals the next one or two records of a frame, removed from `parts`, and returns the bytes to send before
        anything else is sealed.

        Args:
            parts: Parts of the frame that are still to be sealed.
            begins: The first part is the header, which is a record of its own: its reader needs the length that it
                tells before anything else.
        """
        self._make_room()
        sealed: list[memoryview] = []
        used = self._seal(parts.pop(0), sealed, 0) if begins else 0
        if parts:
            self._seal(self._segment(parts, self._segment_nbytes), sealed, used)
        return sealed

    def record(self, parts: list[memoryview]) -> tuple[int, list[memoryview]]:
        """Seals the next record of a stream, removed from `parts`; returns its length before sealing, and the bytes to
        send.
        """
        self._make_room()
        sealed: list[memoryview] = []
        segment = self._segment(parts, SEGMENT_NBYTES)
        self._seal(segment, sealed, 0)
        return segment.nbytes, sealed

    def kept(self, sealed: list[memoryview]) -> list[memoryview]:
        """Copies sealed bytes whose memory is about to be overwritten, since their tag is computed already."""
        return [memoryview(bytes(part)) for part in sealed] if self._clear else sealed

    def _make_room(self) -> None:
        if not self._clear and not self._out:
            self._out = memoryview(bytearray(_HEADS_NBYTES + SEGMENT_NBYTES + 2 * TAG_NBYTES))

    def _segment(self, parts: list[memoryview], most: int) -> memoryview:
        """Removes up to `most` bytes from the front of `parts` and returns them; copies only if they lie in several
        pieces.
        """
        first = parts[0]
        if first.nbytes >= most or len(parts) == 1:
            taken = first[:most]
            if first.nbytes > most:
                parts[0] = first[most:]
            else:
                parts.pop(0)
            return taken
        if not self._joined:
            self._joined = memoryview(bytearray(self._segment_nbytes))
        at = 0
        while parts and at < most:
            taken = parts[0][: most - at]
            self._joined[at : at + taken.nbytes] = taken
            at += taken.nbytes
            if taken.nbytes < parts[0].nbytes:
                parts[0] = parts[0][taken.nbytes :]
            else:
                parts.pop(0)
        return self._joined[:at]

    def _seal(self, data: memoryview, sealed: list[memoryview], at: int) -> int:
        """Seals one record and appends its bytes; returns the next free position in the buffer of ciphertext."""
        nonce = _nonce(data.nbytes, self._count)
        self._count += 1
        if self._clear:
            sealed += (data, memoryview(self._aead.encrypt(nonce, b"", data)))
            return 0
        end = at + data.nbytes + TAG_NBYTES
        self._aead.encrypt_into(nonce, data, None, self._out[at:end])
        sealed.append(self._out[at:end])
        return end


class Opener:
    """Receiving end of one direction of a connection: verifies or decrypts records, each into the memory that `expect`
    names.

    What is only authenticated is received at its place, so it lies there before it is believed.

    Args:
        level: AUTHENTICATED or ENCRYPTED.
        key: Traffic key of this direction.

    Attributes:
        nbytes: Size of the record that is expected, or was opened last.
    """

    def __init__(self, level: Level, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag

        self._aead = _aead(key)
        self._not_genuine = InvalidTag
        self._clear = level is Level.AUTHENTICATED
        self._segment_nbytes = segment_nbytes(level)
        self._count = 0
        self.nbytes = self._got = 0
        self._into: memoryview | None = None
        self._body = memoryview(bytearray(0))
        self._tag = memoryview(bytearray(TAG_NBYTES))
        self._ahead = memoryview(bytearray(_HEADS_NBYTES))
        self._ahead_nbytes = self._ahead_got = 0
        self._sealed = memoryview(bytearray(0))
        self._spare = memoryview(bytearray(0))

    def expect(self, into: memoryview | None, nbytes: int, *, ahead_nbytes: int = 0) -> None:
        """Sets size and destination of the next record, after the one before was opened.

        Args:
            into: Memory for the record's bytes; None throws them away.
            nbytes: Bytes that are left of the frame: the record has so many, or as many as one holds (`self.nbytes`).
            ahead_nbytes: The record after the last one of the frame, its successor's header, has so many: what has come
                of it is received by the same call.
        """
        ends = nbytes <= self._segment_nbytes
        self.nbytes = nbytes = min(nbytes, self._segment_nbytes)
        self._into, self._got = None if into is None else into[:nbytes], 0
        if self._clear:
            self._body = self._bin()[:nbytes] if self._into is None else self._into
        else:
            if not self._sealed:
                self._sealed = memoryview(bytearray(SEGMENT_NBYTES + TAG_NBYTES))
            self._body = self._sealed[: nbytes + TAG_NBYTES]
        came, self._ahead_got = self._ahead_got, 0
        if came:  # with the record before; never more than this one has
            body = min(came, self._body.nbytes)
            self._body[:body] = self._ahead[:body]
            self._tag[: came - body] = self._ahead[body:came]
            self._got = came
        self._ahead_nbytes = ahead_nbytes + TAG_NBYTES if ahead_nbytes and ends else 0

    def divert(self) -> None:
        """Redirects the record under way, with the bytes that have come, to a spare buffer, because its destination is
        needed otherwise.
        """
        if self._into is None:
            return
        if self._clear:
            got = min(self._got, self.nbytes)
            kept = self._bin()[: self.nbytes]
            kept[:got] = self._body[:got]
            self._body = kept
        self._into = None

    def room(self) -> list[memoryview]:
        """Returns the buffers into which to receive the rest of the record, and the next header if its size is
        known.
        """
        got = self._got
        if not self._clear:
            rooms = [self._body[got:]]
        elif got < self.nbytes:
            rooms = [self._body[got:], self._tag]
        else:
            rooms = [self._tag[got - self.nbytes :]]
        if self._ahead_nbytes:
            rooms.append(self._ahead[: self._ahead_nbytes])
        return rooms

    def took(self, count: int) -> bool:
        """Counts bytes that were received into `room` (0: only those that came early); returns True once the record is
        complete and verified.

        Raises:
            WireError: The record is not what the peer has sent in this place.
        """
        self._got += count
        self._ahead_got = self._got - self.nbytes - TAG_NBYTES
        if self._ahead_got < 0:
            self._ahead_got = 0
            return False
        nonce = _nonce(self.nbytes, self._count)
        try:
            if self._clear:
                self._aead.decrypt(nonce, self._tag, self._body)
            else:
                into = self._bin()[: self.nbytes] if self._into is None else self._into
                self._aead.decrypt_into(nonce, self._body, None, into)
        except self._not_genuine:
            raise WireError(
                f"record {self._count} of {self.nbytes} bytes is not what the peer sent in this place: bytes were "
                "altered, replayed, reordered or left out on the way"
            ) from None
        self._count += 1
        return True

    def _bin(self) -> memoryview:
        if not self._spare:
            self._spare = memoryview(bytearray(self._segment_nbytes))
        return self._spare


class SealedStream:
    """Plain byte stream over a protected connection, in records that each begin with their length (4 bytes).

    One thread may send while another one receives.
    """

    def __init__(self, sealer: Sealer, opener: Opener) -> None:
        self._sealer = sealer
        self._opener = opener
        self._length = memoryview(bytearray(_LENGTH.size))
        self._length_got = 0
        self._opened = memoryview(bytearray(0))
        self._left = memoryview(b"")
        """Opened bytes of a record that have not been taken yet."""

    def records(self, parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
        """Yields the sealed records for these bytes; each must be sent before the next one is taken."""
        left = [part for part in parts if part.nbytes]
        while left:
            nbytes, sealed = self._sealer.record(left)
            yield [memoryview(_LENGTH.pack(nbytes)), *sealed]

    def fill(
        self,
        receive: Callable[[list[memoryview]], int],
        parts: Sequence[memoryview],
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Copies opened bytes into the beginning of `parts`, none of which is empty; receives one record if there are
        none.

        Args:
            receive: Function that receives into these buffers, and returns the number of bytes; 0 at the end of the
                stream.
            parts: Buffers for opened bytes.
            progress: Function that is told how many bytes of a record have come, before it has opened.

        Returns:
            Bytes placed; 0 at the end of the stream.

        Raises:
            WireError: A record does not open, is too long, or the stream ends within one.
        """
        if not self._left:
            nbytes = self._next_length(receive)
            if not nbytes:
                return 0
            straight = parts[0].nbytes >= nbytes
            if not straight and not self._opened:
                self._opened = memoryview(bytearray(SEGMENT_NBYTES))
            into = parts[0][:nbytes] if straight else self._opened[:nbytes]
            self._receive(receive, into, progress)
            if straight:
                return nbytes
            self._left = into
        placed = 0
        for part in parts:
            taken = self._left[: part.nbytes]
            part[: taken.nbytes] = taken
            self._left = self._left[taken.nbytes :]
            placed += taken.nbytes
            if not self._left:
                break
        return placed

    def _next_length(self, receive: Callable[[list[memoryview]], int]) -> int:
        """Receives the length of the next record; returns 0 if the stream ended before it. May be called again after a
        timeout.
        """
        while self._length_got < _LENGTH.size:
            count = receive([self._length[self._length_got :]])
            if not count:
                if self._length_got:
                    raise WireError("the stream ended within the length of a record")
                return 0
            self._length_got += count
        self._length_got = 0
        nbytes = int(_LENGTH.unpack(self._length)[0])
        if not 0 < nbytes <= SEGMENT_NBYTES:
            raise WireError(f"a record announces {nbytes} bytes, expected 1 to {SEGMENT_NBYTES}")
        return nbytes

    def _receive(
        self,
        receive: Callable[[list[memoryview]], int],
        into: memoryview,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._opener.expect(into, into.nbytes)
        came, whole = 0, False
        while not whole:
            count = receive(self._opener.room())
            if not count:
                raise WireError(f"the stream ended within a record, after {came} of its bytes")
            body = min(came + count, into.nbytes) - min(came, into.nbytes)
            came += count
            if progress is not None and body:
                progress(body)
            whole = self._opener.took(count)


class SealedSession:
    """Keys and state of one protected connection, as both ends agreed on them.

    Args:
        level: AUTHENTICATED or ENCRYPTED.
        secret: The link's key (and the token), which both have proved to know.
        transcript: Everything that was said in the handshake, both nonces included.
        dialled: Whether this end dialled.
    """

    def __init__(self, level: Level, secret: bytes, transcript: bytes, *, dialled: bool) -> None:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        salt = hashlib.sha256(transcript).digest()

        def traffic_key(who: str) -> bytes:
            info = f"chaos-lightning link {level} {who}".encode()
            return HKDF(SHA256(), KEY_NBYTES, salt, info).derive(secret)

        mine, its = ("dialler", "accepter") if dialled else ("accepter", "dialler")
        self.level = level
        self.sealer = Sealer(level, traffic_key(mine))
        self.opener = Opener(level, traffic_key(its))
        self.stream = SealedStream(self.sealer, self.opener)
        self.watch_key = traffic_key("watch")
        """Key for a connection that is handed over to a watcher, which seals nothing (machine/watcher.py)."""


class ProtectedSocket(socket.socket):
    """Socket of a protected connection; code that sends or receives on it must use its session."""

    session: SealedSession | None = None

    @classmethod
    def around(cls, sock: socket.socket, session: SealedSession | None) -> socket.socket:
        """Returns a socket of the same connection with this session, and detaches `sock`; returns `sock` itself if
        there is no session.
        """
        if session is None:
            return sock
        timeout = sock.gettimeout()
        made = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        made.settimeout(timeout)
        made.session = session
        return made

    def dup(self) -> ProtectedSocket:
        """Returns another descriptor of the same connection, with the same session."""
        made = super().dup()
        assert isinstance(made, ProtectedSocket)
        made.session = self.session
        return made


def session_of(sock: socket.socket) -> SealedSession | None:
    """Returns the session that protects this connection; None if it has checksums only."""
    return sock.session if isinstance(sock, ProtectedSocket) else None


def _aead(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
