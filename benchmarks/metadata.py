"""Serves the metadata of a cloud machine over HTTP, as AWS (IMDSv2) and Google do, for tests and benchmarks of notices.

Written after the vendors' documentation: tokens by PUT and 401 without one, 404 until there is a notice, JSON as it is
shown there; `Metadata-Flavor: Google`, ETag, `wait_for_change`, `last_etag` and `timeout_sec`. Faults are what a broken
or foreign server does.
"""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
HTML = "<html>Please log in to this network</html>"


class MetadataServer:
    """Metadata server of one machine; a context manager.

    Attributes:
        base: Address, as http://HOST:PORT.
        asked: Method and path of each request so far.
        documents: AWS's documents by path; JSON, or text as it is.
        fault: "" for none; "hangs": accepts requests and says nothing; "foreign": another server, which knows no
            token and answers all by a page; "fails": answers 503.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.documents: dict[str, Any] = {}
        self.fault = ""
        self.tokens: set[str] = set()
        self._preempted, self._version = "FALSE", 1
        self._changed, self._closed = threading.Condition(), False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            do_PUT = do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def set(self, *, preempted: str | None = None, fault: str | None = None, **documents: Any) -> None:
        """Changes what the server says, and wakes requests that wait for that.

        Args:
            preempted: Google's word, TRUE or FALSE.
            fault: Fault of the server; see `fault`.
            documents: AWS's documents `spot` and `rebalance`; None: there is none.
        """
        with self._changed:
            if preempted is not None:
                self._preempted, self._version = preempted, self._version + 1
            self.fault = self.fault if fault is None else fault
            for name, document in documents.items():
                self.documents[{"spot": SPOT, "rebalance": REBALANCE}[name]] = document
            self._changed.notify_all()

    def wait_asked(self, path: str, count: int = 1, timeout_s: float = 30.0) -> None:
        """Waits until there were so many requests whose path begins like this."""

        def asked() -> bool:
            return sum(place.startswith(path) for _, place in self.asked) >= count

        with self._changed:
            if not self._changed.wait_for(asked, timeout_s):
                raise TimeoutError(f"{count} requests for {path} did not come within {timeout_s:g} s: {self.asked}")

    # ------------------------------------------------------------------ answers

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._changed:
            self.asked.append((request.command, request.path))
            self._changed.notify_all()
            while self.fault == "hangs" and not self._closed:
                self._changed.wait()
            if self._closed:
                return
            fault = self.fault
        if fault == "fails":
            self._say(request, 503, "Service Unavailable")
        elif fault == "foreign":
            self._say(request, 200, HTML)
        elif request.path.startswith("/latest/"):
            self._say(request, *self._aws(request))
        else:
            self._google(request)

    def _aws(self, request: BaseHTTPRequestHandler) -> tuple[int, str]:
        if request.path == "/latest/api/token":
            ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.command != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return 400, ""
            self.tokens.add(token := f"AQAE-token-{len(self.asked)}==")
            return 200, token
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, ""
        document = self.documents.get(request.path)
        if document is None:
            return 404, "<?xml ...><title>404 - Not Found</title>"
        return 200, document if isinstance(document, str) else json.dumps(document)

    def _google(self, request: BaseHTTPRequestHandler) -> None:
        where = urlsplit(request.path)
        if request.headers.get("Metadata-Flavor") != "Google":
            self._say(request, 403, "Forbidden")
        elif where.path != PREEMPTED:
            self._say(request, 404, "")
        else:
            query = {name: values[0] for name, values in parse_qs(where.query).items()}
            with self._changed:
                if query.get("wait_for_change") == "true":
                    seen = query.get("last_etag", f"{self._version:x}")
                    self._changed.wait_for(
                        lambda: self._closed or f"{self._version:x}" != seen, float(query.get("timeout_sec", "inf"))
                    )
                word, etag = self._preempted, f"{self._version:x}"
            self._say(request, 200, word, {"Metadata-Flavor": "Google", "ETag": etag})

    @staticmethod
    def _say(request: BaseHTTPRequestHandler, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        data = body.encode()
        request.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        with contextlib.suppress(OSError):  # the client has given up meanwhile
            request.end_headers()
            request.wfile.write(data)

    # ------------------------------------------------------------------ its life

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
