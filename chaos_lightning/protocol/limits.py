"""Defines limits on received messages: of texts in bytes of UTF-8, of lists in items, and ranges of numbers.

Theory of operation. The codec looks at each field as it makes a dataclass of a message (protocol/codec.py). So whatever
is beyond its limit is refused by name before any machine sees it, on control streams, on links and at the leader of
outer sync. A member encodes and decodes its own hello before it says it (member/hello.py): what a user sets meets the
same limits at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chaos_lightning.protocol.types import MAX_MEMBERS, MAX_PARTS, MOST_SPEED

NAME_NBYTES = 64
"""Limit, bytes, of names of jobs and nodes, as in `types.NAME`."""
ID_NBYTES = 128
"""Limit, bytes, of ids of members (a name, "~" and a number), and of hashes."""
PROCESS_NBYTES = 100
"""Limit, bytes, of names of an outer job's clusters and followers: an id or place that is made of a name fits into its
own limit.
"""
PLACE_NBYTES = 255
"""Limit, bytes, of hosts, addresses, versions of the package, kinds of plans, and places of an outer job's
processes.
"""
REASON_NBYTES = 16 << 10
"""Limit, bytes, of reasons that a member gives, and names of collectives and parameters. `bounded` cuts reasons to a
quarter of it.
"""
TEXT_NBYTES = 1 << 20
"""Limit, bytes, of all other texts: hyperparameters, values of a fingerprint, requests for pipelines, and words for
people about many members.
"""
MESSAGE_NBYTES = 64 << 20
"""Limit, bytes, of texts that are as long as a message: names of all members of a view, its pipelines, summaries of a
chain.
"""

_NAMES = ("job", "node", "neighbours", "role", "phase", "rule", "remote", "local", "Member.name", "Hello.name")
_IDS = ("id", "member", "members", "parents", "joiners", "a", "b", "peer", "suspect", "resume", "ids", "gone", "void")
_HASHES = ("chain", "head", "prev_hash", "layout_hash", "state_hashes", "before", "hash", "job_id", "nonce", "manifest")
_PROCESSES = ("cluster", "follower", "followers")
_PLACES = ("host", "address", "package", "place", "endpoint", "stream", "kind")
_REASONS = ("by", "name", "evidence", "line", "order", "replay", "key_name", "digest", "digests")
_OF_MEMBERS = (
    "Leave.reason",
    "CatchUp.reason",
    "LinkRequest.reason",
    "Differs.reason",
    "PackedView.reason",
    "Saved.path",
)
TEXTS: Mapping[str, int] = {
    **dict.fromkeys(_NAMES, NAME_NBYTES),
    **dict.fromkeys((*_IDS, *_HASHES, "pending_hash", "learners", "PackedView.words"), ID_NBYTES),
    **dict.fromkeys(_PROCESSES, PROCESS_NBYTES),
    **dict.fromkeys(_PLACES, PLACE_NBYTES),
    **dict.fromkeys((*_REASONS, *_OF_MEMBERS), REASON_NBYTES),
    **dict.fromkeys(
        ("PackedMembers.texts", "PackedView.pipelines", "PackedView.batch", "Summary.state"), MESSAGE_NBYTES
    ),
}
"""Most bytes of these texts, by field or by message and field; of all others TEXT_NBYTES."""
LISTS: Mapping[str, int] = {
    **dict.fromkeys(("neighbours", "learners", "ids", "gone", "void", "sources", "peers"), MAX_MEMBERS),
    **dict.fromkeys(("parts", "owns", "state_hashes", "drifted", "coverage", "micro_batches"), MAX_PARTS),
}
"""Most items of these lists; all others have what fits into a message."""
_COUNT = (0, 1 << 53)
NUMBERS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("term", "number", "seq", "step", "attempt", "pid", "pid_start"), _COUNT),
    **dict.fromkeys(("quota", "accumulate"), (0, 1 << 31)),
    "workers": (0, MAX_MEMBERS),
    **dict.fromkeys(("LayersCovered.first", "LayersCovered.end"), (0, MAX_PARTS)),
    "DriftedPart.part": (0, MAX_PARTS - 1),
    "port": (0, (1 << 16) - 1),
    "latency_s": (0.0, 1e6),
    "rate_bps": (0.0, 1e18),
    "Heartbeat.speed": (0.0, MOST_SPEED),
    **dict.fromkeys(("Heartbeat.step_time_s", "Heartbeat.between_s", "Heartbeat.sample_s"), (0.0, 1e6)),
}
"""Least and greatest value of these numbers, by field or by message and field."""


def nbytes(text: str) -> int:
    """Returns the size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def most_nbytes(message: str, field: str) -> int:
    """Returns the largest size in bytes that a text field of a message may have."""
    return TEXTS.get(f"{message}.{field}") or TEXTS.get(field, TEXT_NBYTES)


def range_of(message: str, field: str) -> tuple[float, float] | None:
    """Returns the least and the greatest value that a number field of a message may have; None if it has no limit."""
    return NUMBERS.get(f"{message}.{field}") or NUMBERS.get(field)


def bounded(reason: str) -> str:
    """Returns a reason's text, cut off if it is too long for a record or message."""
    most = REASON_NBYTES // 4
    cut = reason.encode()[:most].decode(errors="ignore")
    return reason if nbytes(reason) <= most else f"{cut} ... (cut off)"


def at_most(most: int) -> Callable[[str], str]:
    """Returns a check for a setting, by which its text may have at most this many bytes."""
    return lambda text: "" if (size := nbytes(text)) <= most else f"it has {size} bytes; expected {most} at most"
