"""Runs a TLS proxy in front of a scheduler that has keys: mutual TLS outside, plain gRPC on loopback inside.

Theory of operation. gRPC for Python can demand certificates, but says nothing about those whom it turns away, and the
log must name them. So the TLS proxy does the TLS handshake with Python's own ssl, of version 1.3 and with the keys as
they lie in the folder at that moment, and passes the bytes of whom it lets in on to gRPC's port, which listens on
loopback. The inner connection's own port number says whose it is: the TLS proxy writes it down before it passes the
first byte on, and forgets it before it lets the port go. Who comes to the inner port directly is in nobody's name and
is refused.

A handshake has a deadline, few are under way at a time, and each side is read no faster than the other one takes it.
When either connection ends, the other one does.

Who was let in is looked at again. A connection ends with the certificate that it was made with; and when an authority
has left the folder of keys, those end whose certificate none of the others has signed, one after the other. Members
come in again by themselves, with the keys that lie in their folders by then; they train on meanwhile, and one that
comes back before the next one goes leaves no room for taking it for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from chaos_lightning.errors import WireError
from chaos_lightning.machine.addresses import addresses
from chaos_lightning.security.certificates import each_of, signed_by, when
from chaos_lightning.security.credentials import KeyFolder
from chaos_lightning.security.roles import Caller, read_uris

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 64
LOOK_S = 1.0
"""Seconds between two looks at the certificates of callers that are in."""
TURN_S = 0.2
"""Seconds between the ends of two connections, when an authority is believed no longer."""
_PIECE_NBYTES = 1 << 16
_BACKLOG = 128
_FULL_PAUSE_S = 0.2
"""Seconds before the next attempt where this process has too many files open."""
_INSIDE = "127.0.0.1"


@dataclass(eq=False, slots=True)
class _Inside:
    """Caller whose certificate was accepted, while its connection is open.

    Attributes:
        who: Name and role of the caller, by its certificate.
        certificate: Certificate of the caller, PEM.
        until: Time at which the certificate expires (seconds since 1970).
        trusted: Authorities (PEM) that were trusted when the certificate was last checked.
        over: Event that ends the connection.
    """

    who: Caller
    certificate: str
    until: float
    trusted: bytes
    over: asyncio.Event = field(default_factory=asyncio.Event)


class TlsProxy:
    """Proxy that lets only callers with certificates reach a gRPC server. Methods belong to one asyncio loop.

    Args:
        keys: Key folder: authorities to trust, and the certificate to show.
        refused: Told (peer, why) about everybody who is not let in.
        ended: Told (peer, why) about everybody who was in and is put out; never more lines than had been let in.
        handshake_timeout_s: Seconds that a TLS handshake may take; HANDSHAKE_TIMEOUT_S if None.
    """

    def __init__(
        self,
        keys: KeyFolder,
        refused: Callable[[str, str], None],
        ended: Callable[[str, str], None],
        *,
        handshake_timeout_s: float | None = None,
    ) -> None:
        self._keys = keys
        self._refused = refused
        self._ended = ended
        self._handshake_timeout_s = handshake_timeout_s
        self._callers: dict[str, Caller] = {}
        self._listening: list[asyncio.Task[None]] = []
        self._visits: set[asyncio.Task[None]] = set()
        self._inside: set[_Inside] = set()
        self._greeting = 0

    async def open(self, host: str, port: int, inner: int) -> int:
        """Listens on a port, which is returned; passes accepted connections on to the port `inner` of loopback.

        Raises:
            OSError: The port is taken, or the address is not this machine's.
        """
        listeners: list[socket.socket] = []
        try:
            for address in addresses(host):
                listeners.append(_listen(address, port))
                port = port or int(listeners[0].getsockname()[1])
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._listening = [asyncio.create_task(self._accept(listener, inner)) for listener in listeners]
        self._listening.append(asyncio.create_task(self._look_again()))
        return port

    @property
    def visits(self) -> int:
        """Number of connections that are open or being made."""
        return len(self._visits)

    def caller(self, peer: str) -> Caller | None:
        """Returns the caller behind a connection that gRPC sees as `peer`; None if it did not come through the TLS
        proxy.
        """
        return self._callers.get(peer)

    async def close(self) -> None:
        """Stops listening and closes all connections. Idempotent."""
        for tasks in (self._listening, list(self._visits)):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket, inner: int) -> None:
        """Accepts connections until cancelled. (asyncio's own server loses one that comes while it is being closed.)"""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self._refused("?", f"a connection could not be taken: {error.strerror}")
                    await asyncio.sleep(_FULL_PAUSE_S)
                    continue
                visit = asyncio.create_task(self._visited(sock, inner))
                self._visits.add(visit)
                visit.add_done_callback(partial(self._gone, sock))
        finally:
            listener.close()

    def _gone(self, sock: socket.socket, visit: asyncio.Task[None]) -> None:
        """Forgets a connection that has ended, even one that was cancelled before it began."""
        self._visits.discard(visit)
        sock.close()

    # ------------------------------------------------------------------ who is in

    async def _look_again(self) -> None:
        told = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except (ValueError, OSError) as error:  # an odd file of keys is no reason to look no more
                if str(error) != told:
                    told = str(error)
                    self._refused("?", f"certificates of those who are in cannot be compared with the keys: {error}")

    async def _look(self) -> None:
        for inside in [g for g in self._inside if g.until < time.time()]:
            ended = when(datetime.fromtimestamp(inside.until, UTC))
            self._put_out(inside, f"its certificate has expired on {ended}; the connection that it was shown for ends")
        trusted = self._keys.current().trusted
        for inside in [g for g in self._inside if g.trusted != trusted]:
            if inside in self._inside and not _still_believed(inside, trusted):
                self._put_out(
                    inside, "its certificate's authority is believed no longer; it comes in again with new keys"
                )
                await asyncio.sleep(TURN_S)
            inside.trusted = trusted

    def _put_out(self, inside: _Inside, why: str) -> None:
        self._inside.discard(inside)
        self._ended(str(inside.who), why)
        inside.over.set()

    # ------------------------------------------------------------------ one visitor

    async def _visited(self, sock: socket.socket, inner: int) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=_PIECE_NBYTES)
        try:
            if self._greeting >= MAX_HANDSHAKES:  # before the keys are looked at, which is work for the disk
                self._refused(_peer(writer), f"more than {MAX_HANDSHAKES} handshakes at once; closed unheard")
                return
            await self._visit(_Outside(reader, writer, self._keys), inner)
        finally:
            writer.transport.abort()
            # The transport lets the socket go in the loop's next round.
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _visit(self, outside: _Outside, inner: int) -> None:
        self._greeting += 1
        limit_s = HANDSHAKE_TIMEOUT_S if self._handshake_timeout_s is None else self._handshake_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                inside = await outside.greet()
        except TimeoutError:
            self._refused(outside.peer, f"no TLS handshake within {limit_s:g} s")
            return
        except (ssl.SSLError, WireError, ValueError) as error:
            self._refused(outside.peer, outside.why(error))
            return
        except OSError:
            return  # gone before it said who it is
        finally:
            self._greeting -= 1
        if inside is not None:
            await self._pass_on(outside, inside, inner)

    async def _pass_on(self, outside: _Outside, inside: _Inside, inner: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(_INSIDE, inner, limit=_PIECE_NBYTES)
        except OSError:
            return  # the scheduler is ending
        name = f"ipv4:{_INSIDE}:{writer.get_extra_info('sockname')[1]}"
        self._callers[name] = inside.who
        self._inside.add(inside)
        works = (outside.send_all(reader), outside.receive_all(writer), inside.over.wait())
        ways: list[asyncio.Task[Any]] = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A second cancellation may end any wait here: what must be given back is given back before.
            self._inside.discard(inside)
            del self._callers[name]
            writer.close()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


class _Outside:
    """TLS side of one connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: KeyFolder) -> None:
        self._reader = reader
        self._writer = writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        now = keys.current()
        self._trusted = now.trusted
        self._tls = now.server.wrap_bio(self._in, self._out, server_side=True)
        self.peer = _peer(writer)

    async def greet(self) -> _Inside | None:
        """Does the TLS handshake; returns the caller, or None if it sent nothing, as one that only tests whether the
        port is open.
        """
        heard = False
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._reader.read(_PIECE_NBYTES)
                if not data:
                    if not heard:
                        return None
                    raise WireError(
                        "it broke the TLS handshake off (does it believe this cluster's authority?)"
                    ) from None
                heard = True
                self._in.write(data)
            except ssl.SSLError:
                # A peer that is refused is told why, if it listens.
                with contextlib.suppress(OSError):
                    await self._flush()
                raise
        await self._flush()
        if self._tls.selected_alpn_protocol() != "h2":
            raise WireError("it speaks TLS, but is no gRPC client")
        found: dict[str, Any] = self._tls.getpeercert() or {}
        uris = [str(value) for kind, value in found.get("subjectAltName", ()) if kind == "URI"]
        role, name = read_uris(uris)
        certificate = ssl.DER_cert_to_PEM_cert(self._tls.getpeercert(True) or b"")
        until = ssl.cert_time_to_seconds(found["notAfter"])
        return _Inside(Caller(name, role, self.peer), certificate, until, self._trusted)

    def why(self, error: Exception) -> str:
        """Returns why a caller was refused. It cannot name whose certificate failed, since ssl does not report that."""
        if not isinstance(error, ssl.SSLError):
            return str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate does not count: {error.verify_message}"
        known = {
            "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
            "HTTP_REQUEST": "it speaks no TLS",
            "WRONG_VERSION_NUMBER": "it speaks no TLS",
            "UNSUPPORTED_PROTOCOL": "it speaks no TLS 1.3",
        }
        reason = error.reason or str(error)
        return known.get(reason, f"TLS: {reason.replace('_', ' ').lower()}")

    async def receive_all(self, inside: asyncio.StreamWriter) -> None:
        """Copies bytes from the caller to gRPC, until the caller ends."""
        while True:
            try:
                data = self._tls.read(_PIECE_NBYTES)
                if not data:
                    return
                inside.write(data)
                await inside.drain()
            except ssl.SSLWantReadError:
                await self._flush()
                piece = await self._reader.read(_PIECE_NBYTES)
                if not piece:
                    return
                self._in.write(piece)
            except (ssl.SSLError, OSError):
                return

    async def send_all(self, inside: asyncio.StreamReader) -> None:
        """Copies bytes from gRPC to the caller, until gRPC ends."""
        try:
            while data := await inside.read(_PIECE_NBYTES):
                self._tls.write(data)
                await self._flush()
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            await self._flush()
            self._writer.close()
            await self._writer.wait_closed()
        except (ssl.SSLError, OSError):
            return

    async def _flush(self) -> None:
        if self._out.pending:
            self._writer.write(self._out.read())
            await self._writer.drain()


def _still_believed(inside: _Inside, trusted: bytes) -> bool:
    """Returns whether a caller's certificate is still trusted by these authorities (PEM), of which some may have been
    removed.
    """
    believed = each_of(trusted)
    return set(each_of(inside.trusted)) <= set(believed) or any(signed_by(inside.certificate, one) for one in believed)


def _peer(writer: asyncio.StreamWriter) -> str:
    host, port, *_ = writer.get_extra_info("peername") or ("?", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _listen(address: str, port: int) -> socket.socket:
    """Returns a listening socket; it listens at once, so that a second one on the same port fails."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in address:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
