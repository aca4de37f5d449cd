"""What a person sees while the demo runs: the story line by line, and on a terminal the live board below it.

Theory of operation. Story lines are final: they are printed once, in both worlds. A terminal has the board of
`chaos-lightning top` under them, redrawn a few times a second; a pipe gets a line of progress every few seconds.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from chaos_lightning.observe.render import draw, from_timeline
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.observe.units import duration

_REDRAW_S = 0.33
_PLAIN_S = 5.0
_STYLES = {"do": "bold", "seen": "", "good": "green", "bad": "bold red"}
_SIGNS = {"do": ">", "seen": " ", "good": "+", "bad": "!"}


class Screen:
    """A context manager around the whole story.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._drawn = 0.0

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, kind: str, text: str) -> None:
        """A line of the story: what is done ("do"), seen, good or bad."""
        line = Text(f"{time.monotonic() - self.began:6.1f} s  ", style="dim")
        line.append(f"{_SIGNS[kind]} {text}", style=_STYLES[kind])
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def refresh(self, timeline: Timeline) -> None:
        """The present state of the job, if it is time to show it."""
        now = time.monotonic()
        if now - self._drawn < (_PLAIN_S if self._live is None else _REDRAW_S):
            return
        self._drawn = now
        if self._live is not None:
            board = from_timeline(timeline, time.time(), title="chaos-lightning demo", lines=4)
            self._live.update(draw(board), refresh=True)
        elif timeline.slots:
            self.console.print(f"{now - self.began:6.1f} s    {escape(progress(timeline))}", soft_wrap=True)


def progress(timeline: Timeline) -> str:
    """The job in one line: step, epoch, who, pace."""
    recent = [slot for slot in timeline.recent(40) if slot.kind == "step"]
    if not recent:
        return "no step yet"
    last = recent[-1]
    words = [f"step {last.step}", f"epoch {max((e for _, e in last.ledger), default=0)}"]
    words.append(f"{len(last.contributors)} members")
    if len(recent) > 1:
        words.append(f"{duration((last.first - recent[0].first) / (len(recent) - 1))} a step")
    return ", ".join(words)
