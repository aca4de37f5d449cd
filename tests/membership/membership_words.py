"""Writes protocol messages in words, for scenario files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos_lightning.protocol.types import (
    WHOLE,
    Contribution,
    Decide,
    Differs,
    Entered,
    Fence,
    Finished,
    Header,
    Leave,
    LinkEvent,
    NextView,
    Notice,
    OpenLinks,
    Prepare,
    Probe,
    Ready,
    Refused,
    Released,
    Report,
    ServeLearners,
    Span,
    Verdict,
    View,
    Welcome,
)

if TYPE_CHECKING:
    from membership_script import Names


def message_words(names: Names, message: object) -> str:
    """Returns a protocol message in the words of scenario files."""
    match message:
        case Contribution():
            votes = f" {message.payload.decode()!r}" if message.payload else ""
            return f"contribution {message.seq} {message.kind} of {message.view}{votes}"
        case Header():
            return f"header {names.of_header(message)}"
        case Entered(view, seq, _, head, parts):
            return f"entered {view} at {seq} on {names.of_hash(head)}{_holds(parts)}"
        case Report():
            flags = _holds(message.parts) + ("" if message.raw else ", no raw bytes")
            flags += "" if message.owns in (WHOLE, ()) else f", owns {parts_words(message.owns)}"
            pending = f", pending {names.of_header(message.pending)}" if message.pending else ""
            held = f", holds {[s for s in message.held if s[0] < s[1]]}" if message.held else ""
            where = f"entered {message.entered} at {message.seq} on {names.of_hash(message.head)}"
            return f"report for {message.number}: {where}{flags}{pending}{held}"
        case Decide():
            how = "hand on" if message.hand_on else "redo after"
            sources = f" from {','.join(s.member for s in message.sources)}" if message.sources else ""
            return f"decide {view_words(message.view)}: {how} {names.of_header(message.base)}{sources}"
        case NextView(view):
            return f"next {view_words(view)}"
        case Welcome(who, _, role, reason):
            return f"welcome {who.id} as {role} ({reason})"
        case OpenLinks(peers, changes, gone):
            words = f"{'also ' if changes else ''}to {','.join(p.id for p in peers) or 'nobody'}"
            return f"open links {words}" + (f", no more to {','.join(gone)}" if gone else "")
        case Prepare(promised, reason):
            return f"prepare {promised} ({reason})"
        case Refused(reason, retry):
            return f"refused{', try again' if retry else ''}: {reason}"
        case Fence(reason, rejoin):
            return f"fence{', join again' if rejoin else ''}: {reason}"
        case LinkEvent(peer, up, evidence):
            return f"link to {peer} {'up' if up else 'down'} ({evidence})"
        case Verdict(suspect, alive, evidence):
            return f"verdict on {suspect}: {'alive' if alive else 'dead'} ({evidence})"
        case Released(reason, asked):
            return f"released{', as asked' if asked else ''}: {reason}"
        case Differs(member, reason, rejoin):
            return f"{member} differs{', join again' if rejoin else ''}: {reason}"
        case Leave(reason):
            return f"leave: {reason}"
        case Notice(text, waiting):
            return f"notice{', waiting' if waiting else ''}: {text}"
        case Finished(seq, step):
            return f"finished at {seq}, step {step}"
        case ServeLearners(ids, view):
            return f"learners: {' and '.join(ids) or 'nobody'}; members are those of {view_words(view)}"
        case Probe(suspect):
            return f"probe {suspect}"
        case Ready():
            return "ready"
        case _:
            return repr(message)


def parts_words(parts: tuple[Span, ...]) -> str:
    """Returns these parts of the state in the words of scenario files."""
    return "parts " + ",".join(f"{start}-{stop}" for start, stop in parts)


def _holds(parts: tuple[Span, ...]) -> str:
    return "" if parts == WHOLE else f", holds {parts_words(parts)}" if parts else ", not loaded"


def view_words(view: View) -> str:
    marks = [m + "*" if m in view.joiners else m for m in view.ids()]
    links = f" over {','.join(f'{link.a}-{link.b}' for link in view.links)}" if view.links else ""
    lets_go = f" without {','.join(m.id for m in view.leaving)}" if view.leaving else ""
    return f"view {view.id} after {view.predecessor} [{' '.join(marks)}]{links}{lets_go}"
