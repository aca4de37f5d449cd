"""Asks the sources of notices: metadata servers, Slurm's commands, files and the clock.

Theory of operation. Each source has a function that returns its present notice, or None. It may block for as long as a
server hangs, so each source has a thread of its own (notice_watch.py). A metadata server is asked directly, never
through a proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from email.message import Message
from functools import partial
from pathlib import Path

from chaos_lightning.machine import notices
from chaos_lightning.machine.notices import MachineNotice, NoAnswerError, NoticePlan
from chaos_lightning.machine.process_table import process_began

METADATA = "http://169.254.169.254"
"""Base address of the metadata server of AWS and of Google; a number, for a name may take long to resolve."""
ANSWER_S = 3.0
"""Seconds for which a metadata server may be silent."""
HANGS_S = 30.0
"""Seconds for which Google's server is asked to hold the answer back while nothing changes."""
COMMAND_S = 10.0
"""Seconds that a command of Slurm may take: while its controller is away it retries for long."""
TOKEN_S = 21600
"""Seconds for which a token of AWS's metadata server is asked to be valid."""
MOST_NBYTES = 1 << 16
EVERY_S = {"aws": 5.0, "aws-rebalance": 5.0, "gcp": 1.0, "slurm": 30.0, "file": 1.0, "deadline": 10.0}
"""Seconds between two looks, by kind of source. Google's server holds its answers back."""
_log = logging.getLogger("chaos_lightning")


Look = Callable[[], MachineNotice | None]
"""Returns a source's present notice; raises NoAnswerError or OSError if there is no answer that means anything."""


def looks_of(plan: NoticePlan, environ: Mapping[str, str] = os.environ) -> dict[str, Look]:
    """Returns a function that asks each source of a plan, by kind; signals come by themselves."""
    found: dict[str, Look] = {}
    for kind, value in plan.sources.items():
        if kind in ("aws", "aws-rebalance"):
            found[kind] = Aws(value or METADATA, rebalances=kind == "aws-rebalance").look
        elif kind == "gcp":
            found[kind] = Gcp(value or METADATA).look
        elif kind == "file":
            found[kind] = partial(_look_for_file, value)
        elif kind == "deadline":
            deadline = MachineNotice("deadline", "deadline", notices.read_deadline(value, process_began()))
            found[kind] = partial(as_it_is, deadline)
        elif kind == "slurm" and (job := environ.get("SLURM_JOB_ID")):
            found[kind] = SlurmEnd(job, environ.get("SLURM_JOB_END_TIME", "")).look
        elif kind == "slurm":
            _log.warning("notice=slurm is not honoured: this process is in no Slurm job (SLURM_JOB_ID is not set)")
    return found


def as_it_is(notice: MachineNotice) -> MachineNotice:
    """Returns a notice that does not change; a `Look` of it is made by `partial`."""
    return notice


def _look_for_file(path: str) -> MachineNotice | None:
    with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:
        return notices.file_notice(path, file.read(64).decode("utf-8", "replace"))
    return None


# ------------------------------------------------------------------------------------------------ metadata servers


class Aws:
    """Spot notices of AWS, and recommendations to rebalance if `rebalances` (instance metadata, version 2)."""

    def __init__(self, base: str, *, rebalances: bool) -> None:
        self._base, self._rebalances, self._token = base, rebalances, ""

    def look(self) -> MachineNotice | None:
        if (spot := self._get("spot/instance-action")) is not None:
            return notices.spot_notice(spot)
        advice = self._get("events/recommendations/rebalance") if self._rebalances else None
        return notices.rebalance_notice(advice) if advice is not None else None

    def _get(self, path: str) -> str | None:
        """Returns a document of the instance; None if there is none at present."""
        for _ in range(2):
            self._token = self._token or self._new_token()
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, _, body = ask(self._base, "GET", f"/latest/meta-data/{path}", headers, ANSWER_S)
            if status != 401:
                break
            self._token = ""  # it has expired
        if status not in (200, 404):
            raise NoAnswerError(f"GET {path} was answered by {status}; expected 200 or 404")
        return body if status == 200 else None

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        status, _, body = ask(self._base, "PUT", "/latest/api/token", headers, ANSWER_S)
        if status != 200 or not body.isascii() or len(body.split()) != 1:
            raise NoAnswerError(f"PUT /latest/api/token was answered by {status} and no token; is this AWS's server?")
        return body.strip()


class Gcp:
    """Preemptions by Google Cloud; after the first answer the server answers when something has changed."""

    def __init__(self, base: str) -> None:
        self._base, self._etag, self._seen_at = base, "", 0.0

    def look(self) -> MachineNotice | None:
        path, limit_s = "/computeMetadata/v1/instance/preempted", ANSWER_S
        if self._etag and not self._seen_at:
            path += f"?wait_for_change=true&timeout_sec={HANGS_S:.0f}&last_etag={self._etag}"
            limit_s += HANGS_S
        self._etag = ""
        status, headers, body = ask(self._base, "GET", path, {"Metadata-Flavor": "Google"}, limit_s)
        if status != 200 or headers.get("Metadata-Flavor") != "Google":
            raise NoAnswerError(f"GET {path} was answered by {status}; expected 200 of Google's server")
        self._seen_at = (self._seen_at or time.time()) if notices.preempted(body) else 0.0
        self._etag = headers.get("ETag", "")
        taken_at = self._seen_at + notices.GOOGLES_GRACE_S
        return MachineNotice("gcp", "preemption by Google Cloud", taken_at) if self._seen_at else None


def ask(base: str, method: str, path: str, headers: Mapping[str, str], silent_s: float) -> tuple[int, Message, str]:
    """Returns status, headers and body of an HTTP server's answer; raises NoAnswerError if there is none.

    Args:
        base: Address of the server, as http://HOST:PORT.
        method: Method of HTTP.
        path: Path and query.
        headers: Headers of the request.
        silent_s: Seconds for which the server may be silent.
    """
    connection = http.client.HTTPConnection(*notices.read_base(base), timeout=silent_s)
    try:
        connection.request(method, path, headers={**headers, "Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read(MOST_NBYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswerError(f"{base} does not answer as it should ({error or type(error).__name__})") from error
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------ Slurm


class SlurmEnd:
    """End of this process's Slurm job, which `scontrol update` and preemption may move.

    Args:
        job: Id of the job.
        end: Its end as its environment tells, Unix seconds; "" if it does not. Counts until squeue answers.
    """

    def __init__(self, job: str, end: str) -> None:
        self._job, self._end = job, end

    def look(self) -> MachineNotice | None:
        try:
            said = slurm("squeue", "--noheader", f"--jobs={self._job}", "--format=%e")
        except NoAnswerError:
            if not self._end:
                raise
            return notices.slurm_end(f"@{self._end}", self._job)
        self._end = ""
        return notices.slurm_end(said, self._job)


def slurm(*command: str) -> str:
    """Returns the output of a command of Slurm; raises NoAnswerError if it fails or takes too long."""
    try:
        environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoAnswerError(f"{command[0]} failed ({error})") from error
    if done.returncode:
        raise NoAnswerError(f"{command[0]} failed ({done.stderr.strip() or f'exit code {done.returncode}'})")
    return done.stdout
