"""Helpers with a cluster's keys for tests, and calls to a scheduler with any credentials."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.events.events import EventLog
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import wrap_from_member
from chaos_lightning.security import keyfiles
from chaos_lightning.security.access import TOKEN_KEY
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import CHAIN, KEY, NODES, TOKEN, TRUSTED, KeyHolder
from chaos_lightning.security.roles import OBSERVER, OPERATOR

PATIENCE_S = 20.0


class Keys:
    """Keys of a cluster with members a and b, observer o and operator p."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        nodes = [KeyHolder("a"), KeyHolder("b"), KeyHolder("o", OBSERVER), KeyHolder("p", OPERATOR)]
        self.cluster = keyfiles.init(folder, nodes)

    def at(self, name: str) -> Path:
        return self.folder / NODES / name

    def of(self, name: str) -> Credentials:
        return Credentials(keys=KeyFolder(self.at(name)))

    def files(self, name: str) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.at(name).iterdir()}

    def issued(self, role: str, days: float) -> dict[str, str]:
        """Returns the key files for a holder named "odd"; negative days give an expired certificate."""
        return keyfiles.issue(self.cluster, KeyHolder("odd", role), days)

    def secrets(self) -> dict[str, str]:
        """Returns all secret texts, by description: tokens, and a line of every private key."""
        found = {f"token {n}": token for n, token in enumerate(keyfiles.load(self.folder).tokens)}
        for path in [*self.folder.rglob(KEY), self.folder / keyfiles.CLUSTER]:
            text = path.read_text()
            keys = json.loads(text)["authority"][1] if path.name == keyfiles.CLUSTER else text
            body = [line for line in keys.splitlines() if "-----" not in line]
            # PEM begins every P-256 key alike; the middle line is the key itself.
            found[f"key in {path.parent.name}"] = body[1]
        return found


def write_keys(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    return folder


@dataclass(frozen=True)
class Shown:
    """Credentials to send with a call; None: none of that kind.

    Attributes:
        files: A node's files: certificate and key, and whom the caller believes.
        token: Sent with the call.
    """

    files: dict[str, str] | None
    token: str | None = None


def call(endpoint: str, what: str, shown: Shown) -> str:
    """Makes one call to a scheduler; returns "ok" or the status code."""
    files = shown.files
    metadata = ((TOKEN_KEY, shown.token.encode()),) if shown.token is not None else ()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if files is None:
        channel = grpc.insecure_channel(endpoint, options=options)
    else:
        pair = (files[KEY].encode(), files[CHAIN].encode()) if KEY in files else (None, None)
        credentials = grpc.ssl_channel_credentials(files[TRUSTED].encode(), *pair)
        channel = grpc.secure_channel(endpoint, credentials, options=options)
    with channel:
        stub = SchedulerStub(channel)
        try:
            if what == "Attend":
                from served import hello

                said = iter([wrap_from_member(hello("caller"))])
                stream = stub.Attend(said, metadata=metadata, timeout=PATIENCE_S)
                next(stream)
                stream.cancel()
            elif what == "Claim":
                asked = stub.Claim(iter([chaos_pb2.ClaimRequest(job="default")]), metadata=metadata, timeout=PATIENCE_S)
                next(asked)
                asked.cancel()
            elif what == "Status":
                stub.Status(chaos_pb2.StatusRequest(), metadata=metadata, timeout=PATIENCE_S)
            elif what == "Drain":
                stub.Drain(chaos_pb2.DrainRequest(name="nobody"), metadata=metadata, timeout=PATIENCE_S)
            elif what == "Reset":
                stub.Reset(chaos_pb2.ResetRequest(), metadata=metadata, timeout=PATIENCE_S)
            else:
                assert what == "ChangeLink"
                request = chaos_pb2.LinkChangeRequest(a="a", b="b", add=True)
                stub.ChangeLink(request, metadata=metadata, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "ok"


class Refusals(EventLog):
    """Event log that records refused peers."""

    def __init__(self) -> None:
        super().__init__(None)
        self._seen: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def emit(self, name: str, /, **fields: Any) -> None:
        if name == "refused":
            with self._changed:
                self._seen.append((str(fields["peer"]), str(fields["reason"])))
                self._changed.notify_all()
        super().emit(name, **fields)

    def take(self, *, some: bool = False) -> list[tuple[str, str]]:
        """Returns the (peer, reason) pairs since the last call; with `some`, waits until there is one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._seen or not some, PATIENCE_S), "nobody was refused"
            found, self._seen = self._seen, []
        return found


__all__ = ["CHAIN", "KEY", "NODES", "TOKEN", "TRUSTED", "Keys", "Refusals", "Shown", "call", "write_keys"]
