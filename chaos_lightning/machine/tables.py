"""Lays out tables for terminals of any width: less important columns are left out if they do not fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_LEAST = 12
"""Number of cells that are left of a column that is cut."""
_ENDLESS = 10_000
"""Number of cells of a line in a pipe or file."""


def console_of_stdout() -> Console:
    """Returns a console for tables and plain text; in a pipe or file it never cuts lines, unless COLUMNS is set."""
    wide = _ENDLESS if not sys.stdout.isatty() and not os.environ.get("COLUMNS") else None
    return Console(width=wide, markup=False, highlight=False)


class FittingTable:
    """Borderless table for `Console.print`, which leaves out columns that do not fit.

    Args:
        columns: Names. One of numbers, written as "step>", is flush right. One of words, written as "member~", is cut
            where nothing else can give way.
        gives_way: Names of columns in the order in which they go where the terminal is too narrow; one that has nothing
            to say goes before them.
        gap: Blank cells between two columns.
    """

    def __init__(
        self, columns: Sequence[str], gives_way: Sequence[str] = (), *, gap: int = 2, head: bool = True
    ) -> None:
        self._names = [name.rstrip(">~") for name in columns]
        self._right = [name.endswith(">") for name in columns]
        self._cut = [name.endswith("~") for name in columns]
        self._gives_way = gives_way
        self._gap = gap
        self._head = head
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row with a cell for each column; a plain str is text, not markup."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown = self._shown(options.max_width)
        table = Table(
            box=None, show_header=self._head, pad_edge=False, header_style="dim", padding=(0, self._gap, 0, 0)
        )
        for i in shown:
            justify = "right" if self._right[i] else "left"
            table.add_column(self._names[i], justify=justify, no_wrap=not self._cut[i])  # type: ignore[arg-type]
        for row in self._rows:
            for i in shown:
                row[i].no_wrap, row[i].overflow = True, "ellipsis"
            table.add_row(*(row[i] for i in shown))
        yield table

    def _shown(self, width: int) -> list[int]:
        """Returns the indices of the columns that fit into this width."""
        columns = range(len(self._names))
        longest = [max((row[i].cell_len for row in self._rows), default=0) for i in columns]
        if self._head:
            longest = [max(most, cell_len(name)) for most, name in zip(longest, self._names, strict=True)]
        least = [min(_LEAST, most) if cut else most for most, cut in zip(longest, self._cut, strict=True)]
        silent = [i for i in columns if all(row[i].plain in ("", "-") for row in self._rows)]
        shown = list(columns)
        for i in [*silent, *(self._names.index(name) for name in self._gives_way)]:
            if sum(least[j] + self._gap for j in shown) - self._gap <= width:
                break
            if i in shown:
                shown.remove(i)
        return shown


class Figures:
    """Row of (name, value) pairs for `Console.print`, wrapped only between pairs."""

    def __init__(self, figures: Sequence[tuple[str, str]]) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text()
        for what, value in self._figures:
            figure = Text(f"{what} ", style="dim").append(value, style="bold not dim")
            if line and line.cell_len + 3 + figure.cell_len > options.max_width:
                yield line
                line = Text()
            line = line.append("   ").append(figure) if line else figure
        if line:
            yield line
