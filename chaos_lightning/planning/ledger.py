"""Computes which positions of an epoch are spent, that is, trained or dropped (protocol.md 25, 27).

Theory of operation. An epoch of a sample stream is an order of positions [0, length); what a position means (a
sample, or a batch of a custom batch sampler) and which sample lies there is the business of `planning/orders.py`
and `data/`. A header's ledger says per stream which positions are *spent*: used in a committed step (or dropped
because the user asked for it). The ledger only grows within an epoch; the first entry of a later epoch replaces it.
Spans are kept normal (sorted, disjoint, neither empty nor touching), and since assigning takes the first unspent
positions, they are one prefix with a few holes: every operation here is linear in the number of holes, not of
positions.

Streams. "" is the order that all members share. With data="local" each member has a stream of its own, by its name,
and beside it the stream `length_stream(name)`, whose one span (0, n) announces that this epoch of the stream has n
positions (a data set tells at once, an iterable when it has run dry). So "every node's data are spent" is a
function of the ledger and the view (`local_over`), although no member knows the data of another.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaos_lightning.protocol.spans import count, in_words, normalise, subtract
from chaos_lightning.protocol.types import Ledger, Span, Spent, View

SHARED = ""
"""Name of the stream that all members share."""

_LENGTH = "/length"


def union(one: Ledger, other: Ledger) -> Ledger:
    """Returns the union of two ledgers of spent positions; for each stream, the later epoch replaces the
    earlier one.
    """
    mine = {entry.stream: entry for entry in one.streams}
    for entry in other.streams:
        have = mine.get(entry.stream)
        if have is None or have.epoch < entry.epoch:
            mine[entry.stream] = Spent(entry.stream, entry.epoch, normalise(entry.spans))
        elif have.epoch == entry.epoch and have.spans != entry.spans:
            spans = normalise((*have.spans, *subtract(normalise(entry.spans), have.spans)))
            mine[entry.stream] = Spent(entry.stream, entry.epoch, spans)
    return Ledger(tuple(mine[name] for name in sorted(mine)))


def merge(ledger: Ledger, spent: Iterable[Spent]) -> Ledger:
    """Returns the ledger after a slot whose contributions spent the positions `spent`.

    The result does not depend on the order of `spent` and is canonical (streams by name, spans normal), since it goes
    into the header's hash. A stream's later epoch replaces what was known of the earlier one.

    Args:
        ledger: the ledger of the previous header.
        spent: the entries of all contributions of the slot.

    Raises:
        ValueError: an entry belongs to an epoch that is over, two entries of one stream to different epochs, or
            a position would be spent twice. The message names stream, epoch and span. A commit root that sees this has
            members that disagree about the assignment.
    """
    fresh: dict[str, list[Spent]] = {}
    for entry in spent:
        fresh.setdefault(entry.stream, []).append(entry)
    if not fresh:
        return ledger
    merged = {entry.stream: entry for entry in ledger.streams}
    for stream, entries in fresh.items():
        epochs = {entry.epoch for entry in entries}
        if len(epochs) > 1:
            raise ValueError(
                f"stream {stream!r}: one slot spends positions of epochs {sorted(epochs)}; expected one epoch"
            )
        epoch = epochs.pop()
        old = merged.get(stream)
        if old is not None and epoch < old.epoch:
            raise ValueError(f"stream {stream!r}: epoch {epoch} is over, the ledger stands in epoch {old.epoch}")
        new = normalise((span for entry in entries for span in entry.spans), what=f"stream {stream!r} epoch {epoch}")
        if old is not None and old.epoch == epoch:
            if not new:
                continue
            new = _join(old.spans, new, stream, epoch)
        merged[stream] = Spent(stream, epoch, new)
    return Ledger(tuple(merged[name] for name in sorted(merged)))


def _join(old: tuple[Span, ...], new: tuple[Span, ...], stream: str, epoch: int) -> tuple[Span, ...]:
    """Returns the union of two sorted lists of disjoint spans, which must not overlap."""
    if old and old[-1][1] <= new[0][0]:  # the usual case: the prefix grows at its end
        if old[-1][1] == new[0][0]:
            return (*old[:-1], (old[-1][0], new[0][1]), *new[1:])
        return (*old, *new)
    left = count(subtract(new, old))
    if left != count(new):
        twice = subtract(new, subtract(new, old))
        words = ", ".join(in_words(span) for span in twice[:4])
        raise ValueError(
            f"stream {stream!r} epoch {epoch}: positions {words} are spent already; each is spent exactly once"
        )
    return normalise((*old, *new))


def epoch_of(ledger: Ledger, stream: str = SHARED) -> int | None:
    """Returns the epoch that the ledger has for a stream; None if the ledger has no entry for the stream."""
    return next((entry.epoch for entry in ledger.streams if entry.stream == stream), None)


def spent_spans(ledger: Ledger, stream: str, epoch: int) -> tuple[Span, ...]:
    """Returns the spans of positions of a stream's epoch that are spent.

    Raises:
        ValueError: the ledger stands in a later epoch already, so what was spent in this one is not known any more.
    """
    for entry in ledger.streams:
        if entry.stream == stream:
            if entry.epoch > epoch:
                raise ValueError(f"stream {stream!r}: epoch {epoch} is over, the ledger stands in epoch {entry.epoch}")
            return entry.spans if entry.epoch == epoch else ()
    return ()


def remaining(ledger: Ledger, stream: str, epoch: int, length: int) -> tuple[Span, ...]:
    """Returns the unspent positions of [0, length), as sorted spans."""
    if length <= 0:
        return ()
    return subtract(((0, length),), spent_spans(ledger, stream, epoch))


def is_spent(ledger: Ledger, stream: str, epoch: int, length: int) -> bool:
    """Returns whether every position of [0, length) is spent, so that the epoch is over."""
    return not remaining(ledger, stream, epoch, length)


def length_stream(name: str) -> str:
    """Returns the name of the stream in which member `name` announces the length of its own data."""
    return name + _LENGTH


def is_length_stream(stream: str) -> bool:
    """Returns whether a stream announces a length; its positions are no samples."""
    return stream.endswith(_LENGTH)


def announce_length(name: str, epoch: int, length: int) -> Spent:
    """Returns the ledger entry with which a member announces, once per epoch, the length of its own data."""
    return Spent(length_stream(name), epoch, ((0, length),) if length else ())


def announced_length(ledger: Ledger, name: str, epoch: int) -> int | None:
    """Returns how many positions member `name` has announced for this epoch of its own data; None before the
    announcement.
    """
    for entry in ledger.streams:
        if entry.stream == length_stream(name) and entry.epoch == epoch:
            return count(entry.spans)
    return None


def local_over(ledger: Ledger, view: View, epoch: int) -> bool:
    """Returns whether each member of the view has announced the length of its own data and trained on all of it
    (data="local").
    """
    for member in view.members:
        length = announced_length(ledger, member.name, epoch)
        if length is None or not is_spent(ledger, member.name, epoch, length):
            return False
    return True
