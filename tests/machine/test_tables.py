"""Tests tables on terminals of any width: columns are shown whole or left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chaos_lightning.machine.tables import Figures, FittingTable


def shown(what: object, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as got:
        console.print(what)
    return [line.rstrip() for line in got.get().splitlines()]


def members() -> FittingTable:
    table = FittingTable(["member~", "state", "step>", "host", "leaving"], ["host", "state"])
    table.add_row("edge-1~1000001", "training", "12", "box-1", "")
    table.add_row("[red]~2", "joining", "-", "box-22", "")
    return table


@pytest.mark.parametrize(
    ("width", "head", "row"),
    [
        (80, "member          state     step  host    leaving", "edge-1~1000001  training    12  box-1"),
        (40, "member          state     step  host", "edge-1~1000001  training    12  box-1"),
        (30, "member          state     step", "edge-1~1000001  training    12"),
        (28, "member        state     step", "edge-1~1000…  training    12"),
        (20, "member          step", "edge-1~1000001    12"),
    ],
)
def test_columns_go_one_after_the_other(width: int, head: str, row: str) -> None:
    lines = shown(members(), width)
    assert lines[:2] == [head, row]
    assert lines[2].startswith("[red]~2 ")


def test_figures_are_broken_between_two_of_them() -> None:
    figures = Figures([("step", "812"), ("step time", "0.185 s"), ("[goodput]", "97.7%")])
    assert shown(figures, 80) == ["step 812   step time 0.185 s   [goodput] 97.7%"]
    assert shown(figures, 40) == ["step 812   step time 0.185 s", "[goodput] 97.7%"]
    assert shown(Figures([]), 40) == []


@given(
    rows=st.lists(st.tuples(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30)), max_size=5),
    width=st.integers(16, 120),
)
def test_no_line_is_longer_than_the_terminal(rows: list[tuple[str, str, str]], width: int) -> None:
    table = FittingTable(["name~", "b>", "c~"], ["c", "b"])
    for row in rows:
        table.add_row(*(" ".join(cell.split()) for cell in row))
    console = Console(width=width, color_system=None)
    assert all(sum(s.cell_length for s in line) <= width for line in console.render_lines(table))
