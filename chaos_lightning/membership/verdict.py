"""Answers the scheduler's question whether another member lives (protocol.md 12).

Theory of operation. Only a process table knows of a death, so this machine's own comes first. Of a process elsewhere
the silence on the link counts, unless this process was stopped itself and could hear nobody. Before a silence is called
a death, the word of the other machine is taken, if there is one.
"""

from __future__ import annotations

from chaos_lightning.protocol.types import Verdict

Sight = tuple[bool, str, bool]
"""Word of a process table: whether the process lives; in which words, "" if it cannot tell; whether it will never
speak again.
"""
UNSEEN: Sight = (False, "", False)


def verdict(
    suspect: str, here: Sight, there: Sight = UNSEEN, *, silence_s: float, limit_s: float, excused: bool
) -> Verdict:
    """Returns this member's answer on whether the suspect lives, with the evidence.

    Args:
        suspect: Id of the member that the scheduler asks about.
        here: Evidence of this machine's process table.
        there: Evidence of the process table on the suspect's machine, as last heard.
        silence_s: Seconds since the suspect was last heard on the link to it; infinite without a link.
        limit_s: Seconds; a shorter silence shows nothing.
        excused: Whether there is a link, and the silence is this process's own.
    """
    if here[1]:
        return Verdict(suspect, *here, seen=True)
    alive = silence_s < limit_s or excused
    if there[1] and not alive:
        return Verdict(suspect, *there, seen=True)
    words = "no link" if silence_s == float("inf") else f"last heard {silence_s * 1000:.0f} ms ago"
    return Verdict(suspect, alive, words)
