"""What to do after a failure: from the survivors' reports to base header, hand-on or redo, and who goes on.

Theory of operation (protocol.md 8, 9). Every reporter has promised to ignore what is older than the prepared number, so
the reports are a consistent cut: nothing can be committed behind the ruling's back. The *base* is the report with the
highest entered view, then the highest slot. Three outcomes:

- somebody has the next header and the reporters together hold all of its reduced bytes: that header and those bytes
  are handed on verbatim;
- the base has committed a slot that others have not: the same, with the committed members as sources;
- otherwise the open slot is reduced again from the gradients that everybody kept.

Redo is always safe where it is chosen: a slot that not all reporters committed is stable for nobody (rule 4), the dead
included, since its successor would have needed a contribution of every member (rule 1).

`Report.held` and the whole. The scheduler knows no byte counts, so a reporter that knows what the open slot reduces
adds the borders of that scope as empty spans: ((0, 4096), (0, 0), (8192, 8192)) says that of bytes [0, 8192) the first
4096 are here. Without borders nobody can tell whether ranges are missing, and the slot is reduced again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.membership.past import Past
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import NO_VIEW, Header, Kind, Report, Source, Span, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The outcome of a recovery, before a view is made of it."""

    base: Header | None
    """None: no reporter holds the training state."""
    hand_on: bool = False
    sources: tuple[Source, ...] = ()
    """Who holds reduced bytes of the base; empty spans mean all of them."""
    members: tuple[str, ...] = ()
    """In rank order, joiners included."""
    joiners: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Newcomers of a view that no header carried: they hold nothing and get into a later view."""
    rejoin: tuple[tuple[str, str], ...] = ()
    """Who cannot go on from the base, with the reason."""
    reason: str = ""


def needs_bytes(header: Header) -> bool:
    """Whether committing this header takes reduced bytes beside it."""
    return header.kind is Kind.STEP and not header.error


def with_scope(held: Iterable[Span], scope: Iterable[Span]) -> tuple[Span, ...]:
    """What a shell reports: the reduced ranges, and the borders of what the slot reduces as empty spans."""
    return (*held, *((border, border) for span in union(scope) for border in span))


def scope_of(reports: Iterable[Report]) -> tuple[Span, ...] | None:
    """What the slot reduces, from the borders in any report; None if no reporter knows it."""
    for report in reports:
        borders = sorted(start for start, stop in report.held if start == stop)
        if borders and len(borders) % 2 == 0:
            return tuple(zip(borders[::2], borders[1::2], strict=True))
    return None


def _covers(have: Sequence[Span], wanted: Sequence[Span]) -> bool:
    return all(any(a <= start and stop <= b for a, b in have) for start, stop in wanted)


def _pending(reports: Mapping[str, Report], best: Report) -> Header | None:
    """A header of the slot after the best report's, as long as it stands on the same header (4a)."""
    for report in reports.values():
        header = report.pending
        if header is not None and header.prev_hash == best.head and header.seq == best.seq + 1:
            return header
    return None


def _holders(header: Header, reports: Mapping[str, Report]) -> dict[str, Report]:
    """Reporters whose `held` spans belong to this very header's attempt."""
    return {
        member: report
        for member, report in reports.items()
        if report.head == header.prev_hash
        and (report.entered == header.view or (report.pending is not None and report.pending.hash == header.hash))
    }


def _sources(header: Header, reports: Mapping[str, Report]) -> tuple[Source, ...] | None:
    """Who can hand on the header's bytes; None if some byte is nowhere."""
    if not needs_bytes(header):
        return ()
    whole = [Source(m, ()) for m, r in reports.items() if r.head == header.hash and r.raw and r.loaded]
    if whole:
        return tuple(whole)
    holders = _holders(header, reports)
    scope = scope_of(holders.values())
    if scope is None or not _covers(union(s for r in holders.values() for s in r.held), scope):
        return None
    parts = [Source(m, union(r.held)) for m, r in holders.items()]
    return tuple(p for p in parts if p.spans)


def rule(latest: View, past: Past, reports: Mapping[str, Report]) -> Ruling:
    """Decide from the reports of the latest view's living members.

    Args:
        latest: The last decided view; it names the possible members.
        past: All decided views.
        reports: By member id; all answers to the same Prepare.

    Returns:
        The ruling with its reason in words. `base` is None if nobody holds the state.
    """
    order = [m for m in latest.ids() if m in reports]
    # A report counts only if its sender is in every decided view after the one that it entered (protocol.md 9).
    counting = frozenset(m for m in order if past.in_all_after(m, reports[m].entered))
    able = {m: reports[m] for m in order if reports[m].loaded and m in counting}
    unusable: dict[str, str] = {}
    while able:
        best = max(able.values(), key=lambda r: (r.entered, r.seq))
        pending = _pending(able, best)
        if pending is not None:
            sources = _sources(pending, able)
            if sources is not None:
                reason = f"header of slot {pending.seq} and all its bytes are held by the survivors: handed on"
                return _ruling(latest, counting, reports, pending, True, sources, unusable, reason)
        base = best.last
        assert base is not None, f"report without its last header: {best}"
        assert base.hash == best.head, f"report whose last header is not its head: {best}"
        behind = [m for m, r in able.items() if r.head == base.prev_hash and r.seq == base.seq - 1]
        if not behind:
            reason = f"nobody holds all of slot {base.seq + 1}: reduced again from kept gradients"
            return _ruling(latest, counting, reports, base, False, (), unusable, reason)
        sources = _sources(base, able)
        if sources is not None:
            reason = f"slot {base.seq} is committed at some, not at {', '.join(behind)}: handed on"
            return _ruling(latest, counting, reports, base, True, sources, unusable, reason)
        # Only joiners by pause hold this slot, without its raw bytes: they are no donors (rule 9).
        for member in [m for m, r in able.items() if r.head == base.hash]:
            unusable[member] = f"holds slot {base.seq} without its reduced bytes and others lack it"
            del able[member]
    return _ruling(latest, counting, reports, None, False, (), unusable, "no survivor holds the training state")


def _ruling(
    latest: View,
    counting: Collection[str],
    reports: Mapping[str, Report],
    base: Header | None,
    hand_on: bool,
    sources: tuple[Source, ...],
    unusable: Mapping[str, str],
    reason: str,
) -> Ruling:
    """Sort every reporter into member, joiner, waiting newcomer or one that must join again."""
    members: list[str] = []
    joiners: list[str] = []
    waiting: list[str] = []
    rejoin: list[tuple[str, str]] = []
    admitted = base.view_change.joiners if base is not None and base.view_change is not None else ()
    for member in latest.ids():
        report = reports.get(member)
        if report is None:
            continue
        if member in unusable:
            rejoin.append((member, unusable[member]))
        elif not report.loaded:
            # Before slot 1 the assignment is the founding view's function: who has heard of that one goes on loading.
            at_base = base is not None and (
                report.head == base.hash if report.entered != NO_VIEW else member in admitted
            )
            if at_base:
                members.append(member)
                joiners.append(member)
            elif report.entered == NO_VIEW:
                waiting.append(member)
            else:
                rejoin.append((member, f"it was loading slot {report.seq}, which did not become the base"))
        elif base is None or member not in counting:
            rejoin.append((member, f"it entered {report.entered} and a later view excluded it"))
        elif report.head == base.hash or (hand_on and report.head == base.prev_hash):
            members.append(member)
        else:
            rejoin.append((member, f"it stands on {report.head} at slot {report.seq}, the base is {base.hash}"))
    here = frozenset(members)
    return Ruling(
        base=base,
        hand_on=hand_on,
        sources=tuple(s for s in sources if s.member in here),
        members=tuple(members),
        joiners=tuple(joiners),
        waiting=tuple(waiting),
        rejoin=tuple(rejoin),
        reason=reason,
    )
