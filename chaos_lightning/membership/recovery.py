"""Decides after a failure, from the survivors' reports, from which header the job goes on, whether it is handed on or
redone, and who goes on.

Theory of operation (protocol.md 8, 9). Every reporter has promised to ignore what is older than the prepared number, so
the reports are a consistent cut: nothing can be committed while the ruling is made. The *base* is the report with the
highest entered view, then the highest slot. Three outcomes:

- a reporter has the next header, and the reporters together hold all of its reduced bytes: that header and those bytes
  are handed on verbatim;
- the base has committed a slot that others have not: the same, with the committed members as sources;
- otherwise the open slot is reduced again from the gradients that all members have kept.

Where the training state is in parts, each at some members only (P5), a header is the base only if each part is held
there by a reporter: it stands on that header and has the part, or the header can be handed on to it. If some part is
held by nobody, the header before is tried. Members that stand on the header that failed join again.

Redo is always safe where it is chosen: a slot that not all reporters committed is stable for nobody (rule 4), the dead
included, since its successor would have needed a contribution of every member (rule 1).

`Report.held` and the whole. The scheduler knows no byte counts, so a reporter that knows what the open slot reduces
adds the borders of that scope as empty spans: ((0, 4096), (0, 0), (8192, 8192)) says that of bytes [0, 8192) the first
4096 are here. Without borders nobody can tell whether ranges are missing, and the slot is reduced again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from chaos_lightning.membership.parts import division
from chaos_lightning.membership.past import Past
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Report, Source, Span, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """Outcome of a recovery, before a view is made of it."""

    base: Header | None
    """Header from which the job goes on; None: no reporter holds the training state."""
    hand_on: bool = False
    sources: tuple[Source, ...] = ()
    """Members that hold reduced bytes of the base; empty spans mean all of them."""
    members: tuple[str, ...] = ()
    """Members that go on, in rank order, joiners included."""
    joiners: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Newcomers of a view that no header carried: they hold nothing and get into a later view."""
    rejoin: tuple[tuple[str, str], ...] = ()
    """Members that cannot go on from the base, with the reason."""
    leaving: tuple[str, ...] = ()
    """Members that the latest view lets go, and that can serve their parts at the base (P9)."""
    bound: tuple[str, ...] = ()
    """Members of `leaving` that no header has let go."""
    held: tuple[tuple[str, tuple[Span, ...]], ...] | None = None
    """Parts that members and leavers hold at the base; None if it is GENESIS, where the oldest owners make them."""
    lost: tuple[Span, ...] = ()
    """Parts that nobody holds at a header that was tried; () if there is a base."""
    reason: str = ""


def needs_bytes(header: Header) -> bool:
    """Returns whether a member needs reduced bytes, besides this header, to commit the slot."""
    return header.kind is Kind.STEP and not header.error and not header.reduced


def with_scope(held: Iterable[Span], scope: Iterable[Span]) -> tuple[Span, ...]:
    """Returns the spans that a member reports: its reduced byte ranges, and the borders of all bytes that the slot
    reduces, as empty spans.
    """
    return (*held, *((border, border) for span in union(scope) for border in span))


def scope_of(reports: Iterable[Report]) -> tuple[Span, ...] | None:
    """Returns the byte spans that the slot reduces, from the borders in any report; None if no reporter knows them."""
    for report in reports:
        borders = sorted(start for start, stop in report.held if start == stop)
        if borders and len(borders) % 2 == 0:
            return tuple(zip(borders[::2], borders[1::2], strict=True))
    return None


def _covers(have: Sequence[Span], wanted: Sequence[Span]) -> bool:
    return all(any(a <= start and stop <= b for a, b in have) for start, stop in wanted)


def _pending(reports: Mapping[str, Report], best: Report) -> Header | None:
    """Returns a reported header of the slot after the best report's, if it follows that report's header (4a); else
    None.
    """
    for report in reports.values():
        header = report.pending
        if header is not None and header.prev_hash == best.head and header.seq == best.seq + 1:
            return header
    return None


def _holders(header: Header, reports: Mapping[str, Report]) -> dict[str, Report]:
    """Returns the reporters whose reduced bytes belong to the attempt in which this header was made."""
    return {
        member: report
        for member, report in reports.items()
        if report.head == header.prev_hash
        and (report.entered == header.view or (report.pending is not None and report.pending.hash == header.hash))
    }


def _sources(header: Header, reports: Mapping[str, Report]) -> tuple[Source, ...] | None:
    """Returns the reporters from which the header's reduced bytes can be fetched; None if nobody has some of the
    bytes.
    """
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


def _takes(header: Header, report: Report) -> bool:
    """Returns whether the header can be handed on to this reporter, as it is the next one that the reporter can
    commit.

    The reporter must have committed the slot before and, if nobody hands on bytes, have reduced its own in that very
    attempt.
    """
    before = report.head == header.prev_hash and report.seq == header.seq - 1
    return before and (not header.reduced or report.entered == header.view)


def _after(header: Header, report: Report) -> tuple[Span, ...]:
    """Returns the parts of the state that a reporter holds once it has committed this header."""
    return report.owns if header.kind is Kind.STEP and not header.error else report.parts


def _lacking(header: Header, reports: Iterable[Report], whole: tuple[Span, ...]) -> tuple[Span, ...]:
    """Returns the parts of the state that none of these reporters holds at this header (P5).

    At GENESIS none is lacking, as first owners make their parts (P14).
    """
    if header.hash == GENESIS.hash:
        return ()
    held: list[Span] = []
    for report in reports:
        if report.head == header.hash:
            held += report.parts
        elif _takes(header, report):
            held += _after(header, report)
    return subtract(whole, union(held))


def rule(latest: View, past: Past, reports: Mapping[str, Report], told: Sequence[Report] = ()) -> Ruling:
    """Decides, from the reports of the latest view's living members, who goes on and from which header.

    Args:
        latest: The last decided view; it names the possible members.
        past: All decided views.
        reports: Reports by member id; all answer the same Prepare.
        told: Last reports of members that have stored their parts as the job parted (P13), and are gone.

    Returns:
        The ruling with its reason in words. `base` is None if some part of the training state is held by nobody.
    """
    order = [m for m in (*latest.ids(), *(m.id for m in latest.leaving)) if m in reports]
    # A report counts only if its sender is in every decided view after the one that it entered (protocol.md 9).
    counting = frozenset(m for m in order if past.in_all_after(m, reports[m].entered))
    able = {m: reports[m] for m in order if m in counting and _is_able(latest, reports[m])}
    parts = division(latest)
    whole = parts.everything
    lost: list[Span] = []
    unusable: dict[str, str] = {}
    while able:
        best = max(able.values(), key=lambda r: (r.entered, r.seq))
        pending = _pending(able, best)
        if pending is not None and not _lacking(pending, able.values(), whole):
            sources = _sources(pending, able)
            if sources is not None:
                reason = f"header of slot {pending.seq} and all its bytes are held by the survivors: handed on"
                return _ruling(latest, counting, reports, pending, True, sources, unusable, reason)
        base = best.last
        assert base is not None, f"report without its last header: {best}"
        assert base.hash == best.head, f"report whose last header is not its head: {best}"
        missing = _lacking(base, (*able.values(), *told), whole)
        behind = [m for m, r in able.items() if _takes(base, r)]
        if not missing and not behind:
            reason = f"nobody holds all of slot {base.seq + 1}: reduced again from kept gradients"
            return _ruling(latest, counting, reports, base, False, (), unusable, reason)
        sources = None if missing else _sources(base, able)
        if sources is not None:
            reason = f"slot {base.seq} is committed at some, not at {', '.join(behind)}: handed on"
            return _ruling(latest, counting, reports, base, True, sources, unusable, reason)
        lost += missing
        # Else only joiners by pause hold this slot, without its raw bytes: they are no donors (rule 9).
        why = "without its reduced bytes and others lack it"
        if missing:
            why = f"and {parts.words(missing)} of the state at it are held by nobody who answers"
        for member in [m for m, r in able.items() if r.head == base.hash]:
            unusable[member] = f"holds slot {base.seq} {why}"
            del able[member]
    reason = f"no survivor holds {parts.words(union(lost))}" if lost else "no survivor holds the training state"
    return replace(_ruling(latest, counting, reports, None, False, (), unusable, reason), lost=union(lost) or whole)


def _is_able(latest: View, report: Report) -> bool:
    """Returns whether members may go on from this reporter's header: it has a part of the state, or will initialise one
    (P14).
    """
    makes = bool(latest.pipelines) and report.head == GENESIS.hash and report.entered != NO_VIEW
    return bool(report.parts) or makes


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
    """Sorts every reporter into member, joiner, waiting newcomer, leaver or one that must join again."""
    members: list[str] = []
    joiners: list[str] = []
    waiting: list[str] = []
    rejoin: list[tuple[str, str]] = []
    leaving: list[str] = []
    admitted = base.view_change.joiners if base is not None and base.view_change is not None else ()
    for member in (*latest.ids(), *(m.id for m in latest.leaving)):
        report = reports.get(member)
        if report is None:
            continue
        goes_on = base is not None and (report.head == base.hash or (hand_on and _takes(base, report)))
        if member in unusable:
            rejoin.append((member, unusable[member]))
        elif not _is_able(latest, report):
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
        elif base is not None and report.head == base.hash and _loads(latest, member, report):
            members.append(member)
            joiners.append(member)
        elif base is None or member not in counting:
            rejoin.append((member, f"it entered {report.entered} and a later view excluded it"))
        elif goes_on and not _loads(latest, member, report):
            (members if latest.find(member) is not None else leaving).append(member)
        else:
            rejoin.append((member, f"it stands on {report.head} at slot {report.seq}, the base is {base.hash}"))
    here = frozenset((*members, *leaving))
    held = None
    if base is not None and base.hash != GENESIS.hash:
        at = ((m, reports[m]) for m in (*members, *leaving))
        held = tuple((m, r.parts if r.head == base.hash else _after(base, r)) for m, r in at)
    return Ruling(
        base=base,
        hand_on=hand_on,
        sources=tuple(s for s in sources if s.member in here),
        members=tuple(members),
        joiners=tuple(joiners),
        waiting=tuple(waiting),
        rejoin=tuple(rejoin),
        leaving=tuple(leaving),
        held=held,
        bound=tuple(m for m in leaving if base is not None and _is_bound(m, base, reports[m])),
        reason=reason,
    )


def _loads(latest: View, member: str, report: Report) -> bool:
    """Returns whether this joiner lacks some of its parts of the state, and has to load them."""
    return bool(subtract(report.owns, report.parts)) and member in latest.joiners


def _is_bound(member: str, base: Header, report: Report) -> bool:
    """Returns whether this leaver still takes part, as no header has let it go and it has entered no view without
    it.
    """
    let_go = base.view_change is not None and base.view_change.find(member) is None
    return not let_go and base.next_view <= report.entered
