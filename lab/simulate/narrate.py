"""Describes a run line by line: what the scheduler decided, what the members committed, and which faults occurred when.

The lines are a function of the plan alone, so tests compare them with what they were when somebody last read them.
"""

from __future__ import annotations

from collections.abc import Callable

from chaos_lightning.membership import effects as fx
from lab.simulate.fabric import Endpoint
from lab.simulate.plan import Outcome, Plan
from lab.simulate.world import Hooks, World

_TOLD = (
    "view", "prepare", "decide", "death", "suspect", "fenced", "left", "finished", "refused", "notice", "leave",
    "caught_up",
)  # fmt: skip


def narrate(plan: Plan, hooks: Callable[[], Hooks] = Hooks, given: World | None = None) -> tuple[list[str], Outcome]:
    """Runs a plan, in the `given` world if there is one; returns one line for each important event, times in
    milliseconds.
    """
    lines: list[str] = []

    def tell(words: str) -> None:
        lines.append(f"{world.kernel.now * 1000:9.1f}  {words}")

    def on_note(note: fx.Note) -> None:
        if note.name in _TOLD or (note.name == "way_in" and ("way", "replay") in note.fields):
            told = " ".join(f"{k}={_plain(v)}" for k, v in note.fields if k != "joiners" or v)
            tell(f"scheduler {note.name} {told}")

    def on_effect(node: Endpoint, effect: fx.MemberEffect) -> None:
        me = node.machine.member_id
        match effect:
            case fx.Committed(header, view, contributors):
                who = ",".join(contributors)
                change = f", then view {view.id}" if header.view_change is not None else ""
                tell(f"{me} commits {header.seq} {header.kind} {header.hash[:6]} of view {header.view} [{who}]{change}")
            case fx.Viewed(view):
                tell(f"{me} stands in view {view.id}")
            case fx.PullResult(header, sources):
                tell(f"{me} fetches the bytes of slot {header.seq} from {','.join(s.member for s in sources)}")
            case fx.Observe(header, _):
                tell(f"{me} observes from slot {header.seq} on")
            case fx.PullState(header, _):
                tell(f"{me} fetches the state at slot {header.seq}")
            case fx.Ejected(reason, rejoin):
                tell(f"{me} is out ({'joins again' if rejoin else 'for good'}): {reason}")
            case fx.Left(reason):
                tell(f"{me} goes: {reason}")
            case _:
                pass

    world = given or World(plan, hooks())
    world.on_effect = on_effect
    world.on_note = on_note
    world.on_fault = tell
    outcome = world.run()
    lines.append(f"{world.kernel.now * 1000:9.1f}  {outcome.violation or 'all is well'}")
    return lines, outcome


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
