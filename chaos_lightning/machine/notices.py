"""Reads notices that a machine will be taken away, and decides when its members leave. Does no I/O.

Theory of operation. A notice comes from a *source*: a metadata server, Slurm, a file, a signal, a deadline. Each source
is asked again and again, and each answer is told to a `Listener`, which keeps the present notice of that source and
says when to leave: `lead_s` before the machine is taken, or three steps before, if steps are long; at once if nobody
knows when. A notice may move or be withdrawn until then. If a source does not answer, its last notice counts on.

The setting `notice` names the sources, joined by +, as in `aws+deadline:8h+lead:5m`; `NoticePlan` reads it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.machine.units import duration

LEAD_S = 120.0
"""Seconds before its machine is taken at which a member leaves; all of the time that AWS and Google give."""
LEAD_STEPS = 3
"""Steps before its machine is taken at which a member leaves, if they take longer than the lead: the present one, one
in which the leave is decided, and one whose header lets the member go."""
GOOGLES_GRACE_S = 30.0
"""Seconds from Google's notice of a preemption to the end of the machine."""
LONGEST_PAUSE_S = 60.0
"""Longest pause before a source that does not answer is asked again, s."""
MOVED_S = 1.0
"""Change of the time of a notice, s, from which on it is told."""
REQUEUE_S = 20.0
"""Seconds before the end of a Slurm job at which it is requeued, if other members may still be leaving."""
_LATEST = 1e11
_SHOWN = 80
"""Characters of a wrong answer that an error shows."""
_UNIT_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_BETWEEN = re.compile(r"[\s,]+|\+(?=[a-z])")
"""Separators of sources. The + of a time zone (+02:00) is none."""
_A_DURATION = "a duration such as 90s, 30m or 1h30m"
_A_TIME = "a time such as 2030-01-31T18:00:00Z or @1893456000 (Unix seconds)"


class NoAnswerError(ChaosError):
    """Error that a source gave no answer, or one that means nothing."""


@dataclass(frozen=True, slots=True)
class MachineNotice:
    """News that this machine will be taken away.

    Attributes:
        source: Kind of the source, as in the setting.
        why: Name of the event in words.
        taken_at: Time at which the machine is taken, Unix seconds; 0: unknown.
    """

    source: str
    why: str
    taken_at: float = 0.0

    def words(self, now: float) -> str:
        """Returns what is going to happen, and in how many seconds."""
        left_s = self.taken_at - now
        if not self.taken_at:
            return self.why
        return f"{self.why}, in {duration(left_s)}" if left_s >= 0 else f"{self.why}, {duration(-left_s)} ago"


# ------------------------------------------------------------------------------------------------ the setting


@dataclass(frozen=True, kw_only=True)
class NoticePlan:
    """Value of the setting `notice`.

    Attributes:
        sources: Value of each source by its kind, in order.
        lead_s: Seconds before the machine is taken at which its members leave.
    """

    sources: Mapping[str, str]
    lead_s: float = LEAD_S

    @classmethod
    def read(cls, text: str) -> NoticePlan:
        """Reads the setting.

        Raises:
            ConfigurationError: A source is unknown or given twice, or its value is wrong.
        """
        sources: dict[str, str] = {}
        for item in filter(None, _BETWEEN.split(text)):
            kind, _, value = item.partition(":")
            if kind not in _KINDS:
                raise ConfigurationError(
                    f"{item!r} is no source of notices; expected some of {', '.join(_KINDS)}, joined by +, as in "
                    "aws+deadline:8h (docs/notices.md)"
                )
            if kind in sources:
                raise ConfigurationError(f"{kind} is given twice; expected it once")
            expected, check = _KINDS[kind]
            try:
                check(value)
            except ValueError as error:
                raise ConfigurationError(f"{item!r}: expected {expected}") from error
            sources[kind] = value
        lead = sources.pop("lead", "")
        return cls(sources=sources, lead_s=read_duration(lead) if lead else LEAD_S)

    @property
    def grace_s(self) -> float:
        """Seconds from SIGTERM to the end of the machine; 0: unknown, so SIGTERM is no notice."""
        return read_duration(self.sources["sigterm"]) if "sigterm" in self.sources else 0.0

    def on_signal(self, signal_name: str, now: float) -> MachineNotice | None:
        """Returns the notice that a signal is; None if it is none, and asks to leave at once."""
        if signal_name != "SIGTERM" or not self.grace_s:
            return None
        return MachineNotice("sigterm", "end of the grace time of SIGTERM", now + self.grace_s)

    def waits_s(self, signal_name: str) -> float:
        """Returns the seconds for which training goes on after a signal; 0: the member leaves at once."""
        return max(0.0, self.grace_s - self.lead_s) if signal_name == "SIGTERM" else 0.0

    def absolute(self, began: float, folder: str) -> str:
        """Returns the setting as text for processes that start later, or in another folder.

        Args:
            began: Time from which a duration until the deadline counts, Unix seconds.
            folder: Folder from which relative paths go.
        """
        fixed = dict(self.sources)
        if "deadline" in fixed:
            fixed["deadline"] = f"@{read_deadline(fixed['deadline'], began):.3f}"
        if "file" in fixed:
            fixed["file"] = str(PurePath(folder, fixed["file"]))
        if self.lead_s != LEAD_S:
            fixed["lead"] = f"{self.lead_s:f}s"
        return "+".join(f"{kind}:{value}" if value else kind for kind, value in fixed.items())


def read_duration(text: str) -> float:
    """Returns the seconds in a text such as 1h30m; raises ValueError if it is no duration, or 0."""
    parts = re.findall(r"([\d.]+)([dhms])", text) if _DURATION.fullmatch(text) else []
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    if not 0 < seconds < _LATEST:
        raise ValueError(f"{text!r}: expected {_A_DURATION}")
    return seconds


def read_time(text: str) -> float:
    """Returns the Unix seconds of a time in ISO format, or of @ and a number; raises ValueError if the text is neither.

    A time without a zone is this machine's.
    """
    try:
        found = float(text[1:]) if text.startswith("@") else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        found = 0.0
    if not 0 < found < _LATEST:
        raise ValueError(f"{text!r}: expected {_A_TIME}")
    return found


def read_deadline(text: str, began: float) -> float:
    """Returns the Unix seconds of a time, or of a duration from `began` on; raises ValueError for any other text."""
    return began + read_duration(text) if _DURATION.fullmatch(text) else read_time(text)


def read_base(text: str) -> tuple[str, int]:
    """Returns host and port of a server's base address; raises ValueError if it is not http://HOST:PORT."""
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"{text!r}: expected http://HOST:PORT")
    return parts.hostname, parts.port or 80


def _check(text: str, *, right: bool) -> None:
    if not right:
        raise ValueError(text)


_KINDS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    **{
        kind: (f"{kind} or {kind}:http://HOST:PORT", lambda text: text and read_base(text))
        for kind in ("aws", "aws-rebalance", "gcp")
    },
    "slurm": ("slurm or slurm:requeue", lambda text: _check(text, right=text in ("", "requeue"))),
    "sigterm": (f"sigterm:TIME, {_A_DURATION}", read_duration),
    "file": ("file:PATH", lambda text: _check(text, right=bool(text))),
    "deadline": (f"deadline:TIME, {_A_DURATION}, or {_A_TIME}", lambda text: read_deadline(text, 0.0)),
    "lead": (f"lead:TIME, {_A_DURATION}", read_duration),
}
"""Form of each source in words, and the function that raises ValueError for a wrong value."""


# ------------------------------------------------------------------------------------------------ answers


def spot_notice(body: str) -> MachineNotice:
    """Reads AWS's `spot/instance-action`; raises NoAnswerError if it is no such document."""
    found = _json_object(body, "action", '{"action": "terminate", "time": "2030-01-31T18:00:00Z"}')
    taken_at = 0.0  # the action is certain even if its time is not: so it may be now
    with contextlib.suppress(ValueError):
        taken_at = read_time(str(found.get("time")))
    return MachineNotice("aws", f"spot notice of AWS ({found['action'][:_SHOWN]})", taken_at)


def rebalance_notice(body: str) -> MachineNotice:
    """Reads AWS's `events/recommendations/rebalance`, which names no end; raises NoAnswerError if it is no such
    document.
    """
    _json_object(body, "noticeTime", '{"noticeTime": "2030-01-31T18:00:00Z"}')
    return MachineNotice("aws-rebalance", "rebalance recommendation of AWS")


def preempted(body: str) -> bool:
    """Reads Google's `instance/preempted`; raises NoAnswerError if it is neither TRUE nor FALSE."""
    if (word := body.strip()) not in ("TRUE", "FALSE"):
        raise NoAnswerError(f"it answered {word[:_SHOWN]!r}; expected TRUE or FALSE")
    return word == "TRUE"


def slurm_end(text: str, job: str) -> MachineNotice | None:
    """Reads the end of a job as `squeue --format=%e` prints it; None: it has none; raises NoAnswerError if it is no
    time.
    """
    if (word := text.strip()) in ("N/A", "NONE", "Unknown", "UNLIMITED"):
        return None
    try:
        return MachineNotice("slurm", f"end of Slurm job {job}", read_time(word))
    except ValueError as error:
        raise NoAnswerError(f"squeue printed {word[:_SHOWN]!r}; expected a time or N/A") from error


def file_notice(path: str, text: str) -> MachineNotice:
    """Reads a file that is a notice by being there; it may hold the time at which the machine is taken."""
    taken_at = 0.0
    with contextlib.suppress(ValueError):
        taken_at = read_time(text.strip())
    return MachineNotice("file", f"file {path}", taken_at)


def _json_object(body: str, field: str, expected: str) -> dict[str, Any]:
    """Returns a JSON object that has a text in this field; raises NoAnswerError otherwise."""
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(body)
    if not isinstance(found, dict) or not isinstance(found.get(field), str):
        raise NoAnswerError(f"it answered {body.strip()[:_SHOWN]!r}; expected {expected}")
    return found


# ------------------------------------------------------------------------------------------------ decisions


@dataclass(frozen=True, slots=True)
class NoticeVerdict:
    """Decision of a `Listener`.

    Attributes:
        leave: Reason for which the member leaves now; "" if it stays.
        wait_s: Seconds until the source is to be asked again.
        news: Lines for people.
    """

    leave: str = ""
    wait_s: float = 0.0
    news: tuple[str, ...] = ()


class Listener:
    """Present notice of one source, and the decision when to leave because of it.

    Args:
        source: Source as in the setting.
        every_s: Seconds between two questions.
        lead_s: Seconds before the machine is taken at which to leave.
    """

    def __init__(self, source: str, every_s: float, lead_s: float) -> None:
        self._source, self._every_s, self._lead_s = source, every_s, lead_s
        self.notice: MachineNotice | None = None
        self._pause_s, self._answers = every_s, True

    def answered(self, notice: MachineNotice | None, now: float, step_s: float = 0.0) -> NoticeVerdict:
        """Takes the source's answer.

        Args:
            notice: Its notice; None: there is none, or it was withdrawn.
            now: Unix seconds.
            step_s: Seconds that a step takes; 0: unknown.
        """
        news = [] if self._answers else [f"notice={self._source} is heard again"]
        before, self.notice = self.notice, notice
        self._answers, self._pause_s = True, self._every_s
        if notice is None and before is not None:
            news.append(f"the notice is withdrawn ({before.why}); this member stays")
        verdict = self._verdict(now, step_s, news)
        if notice is None or verdict.leave or (before and abs(before.taken_at - notice.taken_at) <= MOVED_S):
            return verdict
        lead = duration(notice.taken_at - self._leaves_at(notice, step_s))
        return replace(verdict, news=(*news, f"notice: {notice.words(now)}; this member leaves {lead} before"))

    def failed(self, why: str, now: float, step_s: float = 0.0) -> NoticeVerdict:
        """Takes that the source gave no answer (`why`): its last notice counts on, and it is asked less often."""
        news = []
        if self._answers:
            counts = "its last notice counts on" if self.notice else "meanwhile no notice of it can come"
            news.append(f"notice={self._source} is not heard: {why}. It is asked again; {counts}")
        self._answers = False
        verdict = self._verdict(now, step_s, news)
        self._pause_s = min(2.0 * self._pause_s, LONGEST_PAUSE_S)
        return verdict

    def _leaves_at(self, notice: MachineNotice, step_s: float) -> float:
        """Returns the time to leave, Unix seconds; 0 is at once."""
        return notice.taken_at - max(self._lead_s, LEAD_STEPS * step_s) if notice.taken_at else 0.0

    def _verdict(self, now: float, step_s: float, news: list[str]) -> NoticeVerdict:
        left_s = self._leaves_at(self.notice, step_s) - now if self.notice is not None else LONGEST_PAUSE_S
        if self.notice is not None and left_s <= 0:
            return NoticeVerdict(leave=self.notice.words(now), news=tuple(news))
        return NoticeVerdict(wait_s=min(self._pause_s, left_s), news=tuple(news))


def requeues_in_s(
    plan: NoticePlan, taken: MachineNotice | None, now: float, environ: Mapping[str, str], *, last: bool
) -> float | None:
    """Decides when this process, which has left, has its Slurm job queued again; None: it does not.

    Requeueing ends all tasks of the job, and others may still be writing their state: so the last member of all does it
    at once, else task 0, shortly before the job's end (`taken`: the notice because of which this process has left).
    """
    if taken is None or taken.source != "slurm" or plan.sources.get("slurm") != "requeue":
        return None
    if last:
        return 0.0
    if environ.get("SLURM_PROCID", "0") != "0" or environ.get("LOCAL_RANK", "0") != "0":
        return None
    return max(0.0, taken.taken_at - REQUEUE_S - now)
