"""Draws a plan of pipelines for the terminal: stages as boxes with layers and memory, a step's time line, and tables.

Theory of operation. Everything here is a function of values (job, plan, estimate) to renderables, which learn the width
from the console that prints them. Pipelines that are alike are shown once. Boxes wrap to as many lines as they need. A
column of the time line shows what a stage does for most of that column's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.text import Text

from chaos_lightning.machine.tables import FittingTable
from chaos_lightning.machine.terminal import printable
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.planning.pipelines.choice import Decision
from chaos_lightning.planning.pipelines.estimate import StepEstimate, timelines
from chaos_lightning.planning.pipelines.job import Layer, TrainingJob
from chaos_lightning.planning.pipelines.lists import coupled, run_coupled
from chaos_lightning.planning.pipelines.moves import Moves
from chaos_lightning.planning.pipelines.places import SharedFate
from chaos_lightning.planning.pipelines.plan import VACANT, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.timing import Span

LEAST_BOX, MOST_BOX = 12, 24
"""Least and most cells within a stage's box."""
KINDS_SHOWN = 6
"""Number of kinds of pipelines that are shown: those with most micro-batches."""
STAGES_SHOWN = 16
"""Number of stages that are shown on the time line; of longer pipelines the first and the last ones."""
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of which a picture is made."""

    corners: str
    across: str
    down: str
    arrow: str
    full: str
    empty: str
    forward: str
    backward: str
    dots: str


LINES = Glyphs("╭╮╰╯", "─", "│", "→", "█", "░", "▒", "█", "…")
ASCII = Glyphs("++++", "-", "|", ">", "#", ".", "f", "B", "~")
"""Characters for terminals without Unicode."""
REDUCE, OPTIMIZER = "=", "+"
_STYLES = {REDUCE: "magenta", OPTIMIZER: "yellow"}


@dataclass(frozen=True, slots=True)
class AlikePipelines:
    """Pipelines that have the same cut into stages, and the same kinds of devices."""

    numbers: tuple[int, ...]
    pipeline: Pipeline
    """Pipeline of these with most micro-batches."""
    least: int
    """Micro-batches of the pipeline with fewest."""

    @property
    def words(self) -> str:
        """Returns a text of the pipelines' numbers and of how many micro-batches each runs."""
        most = self.pipeline.micro_batches
        each = f"{most} micro-batch{'es' if most != 1 else ''}"
        if len(self.numbers) == 1:
            return f"pipeline {self.numbers[0]}: {each}"
        between = f"{self.least} to " if self.least < most else ""
        return f"pipelines {runs(self.numbers)} (x {len(self.numbers)}): {between}{each} each"


def kinds(job: TrainingJob, plan: PipelinePlan) -> list[AlikePipelines]:
    """Groups the plan's pipelines by their cut into stages and their kinds of devices."""
    found: dict[object, list[int]] = {}
    for q, p in enumerate(plan.pipelines):
        what = tuple(job.by_name[s.device].kind if s.device != VACANT else VACANT for s in p.stages)
        found.setdefault((p.cut, what), []).append(q)
    alike = []
    for numbers in found.values():
        pipelines = [plan.pipelines[q] for q in numbers]
        most = max(pipelines, key=lambda p: p.micro_batches)
        alike.append(AlikePipelines(tuple(numbers), most, min(p.micro_batches for p in pipelines)))
    return alike


def runs(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as text, with runs joined: "0 to 3, 7"."""
    words: list[str] = []
    at = 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        joint = " to " if end > at + 1 else ", "
        words.append(f"{numbers[at]}{joint}{numbers[end]}" if end > at else str(numbers[at]))
        at = end + 1
    return ", ".join(words)


def names(given: Iterable[str], most: int = NAMES_SHOWN) -> str:
    """Returns names as text; of many, the first ones and the number of the others."""
    known = [printable(x) for x in given]
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def layers_of(first: int, end: int) -> str:
    """Returns the range of layers [first, end) as text."""
    return f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Lines for `Console.print`, made anew for the console's width and character set."""

    lines: Callable[[int, Glyphs], Iterable[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.lines(max(20, options.max_width), ASCII if options.ascii_only else LINES):
            line.no_wrap, line.overflow = True, "ellipsis"
            line.rstrip()
            line.truncate(options.max_width)
            yield line


# ------------------------------------------------------------------------------------------------ boxes


def draw_plan(job: TrainingJob, plan: PipelinePlan, estimate: StepEstimate) -> Drawn:
    """Draws pipelines as rows of boxes, one for each stage with its device, layers and memory."""

    def lines(width: int, glyphs: Glyphs) -> Iterator[Text]:
        found = sorted(kinds(job, plan), key=lambda k: -k.pipeline.micro_batches * len(k.numbers))
        for kind in sorted(found[:KINDS_SHOWN], key=lambda k: k.numbers):
            yield Text(kind.words)
            alike = [plan.pipelines[q].stages for q in kind.numbers]
            boxes = [_box(job, estimate, places) for places in zip(*alike, strict=True)]
            yield from _rows(boxes, width, glyphs)
        if len(found) > KINDS_SHOWN:
            rest = sum(len(k.numbers) for k in found[KINDS_SHOWN:])
            yield Text(f"and {rest} pipelines of {len(found) - KINDS_SHOWN} further kinds", style="dim")
        if plan.idle:
            yield Text(f"idle: {names(plan.idle)}", style="yellow")
        for words in _beside(plan):
            yield Text(words, style="cyan")

    return Drawn(lines)


def _beside(plan: PipelinePlan) -> Iterator[str]:
    """Yields a line for each device that also runs micro-batches of another pipeline."""
    guests: dict[tuple[str, int, int], int] = {}
    for d in plan.detours:
        key = (d.device, d.first, d.end)
        guests[key] = guests.get(key, 0) + 1
    for (device, first, end), count in sorted(guests.items())[:NAMES_SHOWN]:
        yield f"{printable(device)} also runs {layers_of(first, end)} of {count} rerouted micro-batches"
    if len(guests) > NAMES_SHOWN:
        yield f"and {len(guests) - NAMES_SHOWN} more devices run rerouted micro-batches"


def fates(shared: Sequence[SharedFate]) -> Iterator[str]:
    """Yields a line for each group of layers that would be lost with one host, and the cost of preventing it."""
    for f in shared[:NAMES_SHOWN]:
        other = f"other places help, for {duration(f.cost_s)} a step"
        mend = "no exchange of two devices helps" if math.isinf(f.cost_s) else other
        yield f"{layers_of(f.first, f.end)} would be lost with {printable(f.host)}; {mend}"
    if len(shared) > NAMES_SHOWN:
        yield f"and {len(shared) - NAMES_SHOWN} more groups of layers would be lost with a host"


@dataclass(frozen=True, slots=True)
class _Box:
    names: tuple[str, ...]
    """Devices that have this place in pipelines that are alike."""
    layers: str
    share: float | None
    """Fraction of its memory that the fullest of these devices needs at its peak."""

    def title(self, width: int) -> str:
        """Returns all names if they fit into `width`, else the first one and the number of the others."""
        all_names = ", ".join(self.names)
        if cell_len(all_names) <= width or len(self.names) == 1:
            return all_names
        return f"{self.names[0]} +{len(self.names) - 1}"


def _box(job: TrainingJob, estimate: StepEstimate, places: Sequence[PlanStage]) -> _Box:
    layers = layers_of(places[0].first, places[0].end)
    if places[0].device == VACANT:
        return _Box(("lost",), layers, None)
    used = [(estimate.memory[s.device].nbytes, s.device) for s in places if s.device in estimate.memory]
    share = max((nbytes / job.by_name[name].memory_nbytes for nbytes, name in used), default=None)
    return _Box(tuple(printable(s.device) for s in places), layers, share)


def _rows(boxes: Sequence[_Box], width: int, glyphs: Glyphs) -> Iterator[Text]:
    """Yields lines with boxes side by side, about equally many in each row."""
    most = max(1, (width - 1) // (LEAST_BOX + 4))
    count = -(-len(boxes) // most)
    across = -(-len(boxes) // count)
    inner = min(MOST_BOX, (width - 1) // across - 4)
    for at in range(0, len(boxes), across):
        row = boxes[at : at + across]
        lines = [Text() for _ in range(4)]
        for i, box in enumerate(row):
            joint = f" {glyphs.arrow}" if at + i + 1 < len(boxes) else "  "
            for line, part, between in zip(lines, _lines(box, inner, glyphs), ("  ", joint, "  ", "  "), strict=True):
                line.append_text(part).append(between)
        yield from lines


def _lines(box: _Box, inner: int, g: Glyphs) -> tuple[Text, Text, Text, Text]:
    frame = "red" if box.share is None or box.share > 1 else "dim"
    title = _cut(box.title(inner - 2), inner - 2, g)
    top = Text(f"{g.corners[0]} ", frame).append(title, "bold")
    top.append(f" {g.across * (inner - cell_len(title) - 2)}{g.corners[1]}", frame)
    side = Text(g.down, frame)
    layers = side + Text(set_cell_size(_cut(box.layers, inner, g), inner)) + side
    bar = side + (Text(" " * inner) if box.share is None else memory_bar(box.share, inner, g)) + side
    return top, layers, bar, Text(f"{g.corners[2]}{g.across * inner}{g.corners[3]}", frame)


def memory_bar(share: float, width: int, g: Glyphs) -> Text:
    """Returns a bar of a device's memory use, which is full at 100% or more."""
    words = f"{min(share * 100, 999):4.0f}%"
    cells = max(0, width - len(words))
    full = min(cells, round(share * cells))
    style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    return Text(g.full * full, style).append(g.empty * (cells - full), "dim").append(words, style)


def _cut(text: str, width: int, g: Glyphs) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + g.dots


# ------------------------------------------------------------------------------------------------ time line


def draw_step(job: TrainingJob, plan: PipelinePlan, estimate: StepEstimate) -> Drawn:
    """Draws a step's time line: a row for each stage, with its work from left to right."""

    def lines(width: int, glyphs: Glyphs) -> Iterator[Text]:
        found = kinds(job, plan)[:KINDS_SHOWN]
        ran = _ran(job, plan, found)
        label = min(max(cell_len(_name(s)) for k in found for s in k.pipeline.stages), 12, width // 4)
        cells = width - label - 1
        for kind in found:
            if len(found) > 1:
                yield Text(kind.words, "dim")
            stages = kind.pipeline.stages
            half = STAGES_SHOWN // 2
            for k, s in enumerate(stages):
                if len(stages) > STAGES_SHOWN and half <= k < len(stages) - half:
                    if k == half:
                        yield Text(f"{glyphs.dots} {len(stages) - 2 * half} more stages", "dim")
                    continue
                parts = [*ran[s.device], *_after(job, estimate, s)]
                row = _columns(parts, estimate.step_s, cells)
                yield Text(set_cell_size(_cut(_name(s), label, glyphs), label + 1)) + _glyphs(row, glyphs)
        end = duration(estimate.step_s)
        yield Text(" " * (label + 1) + f"0{end:>{cells - 1}}", "dim")
        legend = f"{glyphs.forward} forward  {glyphs.backward} backward  {REDUCE} all-reduce  {OPTIMIZER} optimizer"
        yield Text(" " * (label + 1) + legend, "dim")

    return Drawn(lines)


def _name(s: PlanStage) -> str:
    return printable(s.device) if s.device != VACANT else "lost"


def _ran(job: TrainingJob, plan: PipelinePlan, shown: Sequence[AlikePipelines]) -> dict[str, list[Part]]:
    """Returns each device's work over time; pipelines that run micro-batches of each other are simulated together."""
    together = coupled(plan)
    rows: dict[str, Sequence[Span]] = {VACANT: ()}
    if together:
        fleet, ran = run_coupled(job, plan, together)
        rows.update(zip(fleet.names, ran.timeline.rows, strict=True))
    alone = tuple(k.pipeline for k in shown if not any(s.device in rows for s in k.pipeline.stages))
    lines = timelines(job, replace(plan, pipelines=alone, detours=(), idle=()))
    for p, line in zip(alone, lines, strict=True):
        rows.update(zip((s.device for s in p.stages), line.rows, strict=True))
    return {name: [(x.start_s, x.end_s, x.instruction.kind) for x in row] for name, row in rows.items()}


Part = tuple[float, float, str]
"""Start and end (s) of something that a stage does, and its kind."""


def _after(job: TrainingJob, estimate: StepEstimate, s: PlanStage) -> Iterator[Part]:
    """Yields a stage's work after its last micro-batch: all-reduces and the optimizer."""
    if s.device == VACANT:
        return
    for r in estimate.reduces:
        if s.first <= r.first and r.end <= s.end and r.owners > 1:
            yield r.start_s, r.end_s, REDUCE
    c = job.costs
    took = (c.optimizer_s[s.end] - c.optimizer_s[s.first]) / job.by_name[s.device].speed
    begin = estimate.step_s - estimate.optimizer_s
    yield begin, begin + took, OPTIMIZER


def _columns(parts: Iterable[Part], whole_s: float, cells: int) -> list[str]:
    """Returns the kind of work to show in each cell of a time line: what fills at least half of it, else " "."""
    busy: list[dict[str, float]] = [{} for _ in range(cells)]
    width_s = whole_s / cells
    for start, end, what in parts:
        for i in range(max(0, int(start / width_s)), min(cells, int(end / width_s) + 1)):
            took = min(end, (i + 1) * width_s) - max(start, i * width_s)
            if took > 0:
                busy[i][what] = busy[i].get(what, 0.0) + took
    found = []
    for column in busy:
        units = {k: v for k, v in column.items() if k in "FBIW"}
        shown = units if sum(units.values()) >= 0.5 * width_s else column
        what = max(shown, key=lambda k: shown[k], default=" ")
        found.append(what if sum(column.values()) >= 0.5 * width_s else " ")
    return found


def _glyphs(row: Sequence[str], g: Glyphs) -> Text:
    text = Text()
    for what in row:
        if what == "F":
            text.append(g.forward, "cyan")
        elif what in "BIW":
            text.append(g.backward, "blue")
        else:
            text.append(what, _STYLES.get(what, ""))
    return text


# ------------------------------------------------------------------------------------------------ numbers


def layer_table(job: TrainingJob) -> FittingTable:
    """Returns a table of each layer's costs per micro-batch; equal neighbours share a row."""
    table = FittingTable(
        [
            "layers~",
            "forward>",
            "backward>",
            "parameters>",
            "gradients>",
            "optimizer>",
            "kept>",
            "workspace>",
            "output>",
        ],
        gives_way=["workspace", "optimizer", "gradients", "output", "kept", "parameters"],
    )
    at = 0
    while at < len(job.layers):
        one, end = job.layers[at], at + 1
        while end < len(job.layers) and _alike(one, job.layers[end]):
            end += 1
        last = f" to {printable(job.layers[end - 1].name)}" if end > at + 1 else ""
        sizes = (
            one.parameter_nbytes, one.gradient_nbytes, one.optimizer_nbytes, one.activation_nbytes,
            one.workspace_nbytes, one.output_nbytes,
        )  # fmt: skip
        times = (duration(one.forward_s), duration(one.backward_s))
        table.add_row(f"{printable(one.name)}{last}", *times, *(amount(x) if x else "" for x in sizes))
        at = end
    return table


def _alike(a: Layer, b: Layer) -> bool:
    return replace(a, name="") == replace(b, name="")


def stage_table(job: TrainingJob, plan: PipelinePlan) -> FittingTable:
    """Returns a table of each stage's times; pipelines that are alike are shown once."""
    c = job.costs
    table = FittingTable(
        ["stage", "device", "layers>", "forward>", "backward>", "hop>", "optimizer>"],
        gives_way=["optimizer", "hop", "stage"],
    )
    for kind in kinds(job, plan):
        stages = kind.pipeline.stages
        for k, s in enumerate(stages):
            if s.device == VACANT:
                table.add_row(f"{kind.numbers[0]}.{k}", "lost", f"{s.first}-{s.end - 1}", "", "", "", "")
                continue
            v, following = job.by_name[s.device].speed, stages[k + 1].device if k + 1 < len(stages) else VACANT
            hop = job.link(s.device, following).time_s(c.boundary_out(s.end)) if following != VACANT else 0.0
            table.add_row(
                f"{kind.numbers[0]}.{k}", printable(s.device), f"{s.first}-{s.end - 1}",
                duration((c.forward[s.end] - c.forward[s.first]) / v),
                duration((c.backward[s.end] - c.backward[s.first]) / v),
                duration(hop) if hop else "", duration((c.optimizer_s[s.end] - c.optimizer_s[s.first]) / v),
            )  # fmt: skip
    return table


def memory_table(job: TrainingJob, plan: PipelinePlan, estimate: StepEstimate) -> FittingTable:
    """Returns a table of each device's peak memory by purpose; pipelines that are alike are shown once."""
    table = FittingTable(
        ["device", "needs>", "of>", "state>", "activations>", "workspace>", "boundaries>", "buffers>"],
        gives_way=["buffers", "boundaries", "workspace", "activations", "state"],
    )
    for kind in kinds(job, plan):
        for s in kind.pipeline.stages:
            use = estimate.memory.get(s.device)
            if use is None:
                continue
            parts = (use.state, use.activations, use.workspace, use.boundaries, use.buffers)
            whole = amount(job.by_name[s.device].memory_nbytes)
            table.add_row(printable(s.device), amount(use.nbytes), whole, *(amount(x) if x else "" for x in parts))
    return table


def reduce_table(job: TrainingJob, estimate: StepEstimate) -> FittingTable:
    """Returns a table of the gradients' all-reduces, one row for each group of layers with several owners."""
    gradients = job.costs.gradients
    table = FittingTable(
        ["layers>", "owners>", "gradients>", "ready>", "begins>", "ends>"], gives_way=["ready", "begins", "gradients"]
    )
    for r in sorted(estimate.reduces, key=lambda r: r.first):
        if r.owners > 1:
            nbytes = amount(gradients[r.end] - gradients[r.first])
            times = (duration(r.ready_s), duration(r.start_s), duration(r.end_s))
            table.add_row(f"{r.first}-{r.end - 1}", str(r.owners), nbytes, *times)
    return table


# ------------------------------------------------------------------------------------------------ after a loss


def candidate_table(decision: Decision, moves: Sequence[Moves | None]) -> FittingTable:
    """Returns a table of the ways to go on after a loss, with the chosen one marked.

    Args:
        decision: Decision with its candidates.
        moves: Moves of each candidate; None: all state comes from a checkpoint.
    """
    table = FittingTable(
        ["", "way", "step>", "samples/s>", "moves>", "pause>", "fatal next>", "worth>", "lacks~"],
        gives_way=["lacks", "samples/s", "pause", "fatal next", "moves"],
    )
    for c, move in zip(decision.candidates, moves, strict=True):
        mark, style = ("*", "bold") if c is decision.chosen else ("", "")
        cells = (
            mark, c.kind, duration(c.step_s), f"{c.throughput:.3g}", "all" if move is None else amount(move.nbytes),
            duration(c.pause_s), f"{c.risk:.1%}", f"{c.value:.3g}", printable(c.lacks),
        )  # fmt: skip
        table.add_row(*(Text(cell, style) for cell in cells))
    return table


MOVES_SHOWN = 12


def moves_table(moves: Moves) -> Drawn:
    """Returns lines about the bytes that move between devices, the busiest links first, and the total time."""
    layers: dict[tuple[str, str], set[int]] = {}
    for m in moves.moves:
        layers.setdefault((m.source, m.target), set()).add(m.layer)

    def lines(width: int, glyphs: Glyphs) -> Iterator[Text]:
        yield Text(
            f"moves {amount(moves.nbytes)} in {duration(moves.seconds)}; the busiest source, "
            f"{printable(moves.busiest_source)}, sends {amount(moves.busiest_source_nbytes)}"
        )
        links = sorted(moves.links, key=lambda x: (-x.nbytes, x.source, x.target))
        for x in links[:MOVES_SHOWN]:
            ends = f"{printable(x.source)} {glyphs.arrow} {printable(x.target)}"
            which = sorted(layers[x.source, x.target])
            words = f"layers {runs(which)}" if len(which) > 1 else f"layer {which[0]}"
            yield Text(f"  {ends}  {amount(x.nbytes)}, {duration(x.seconds)}: {words}", "dim")
        if len(links) > MOVES_SHOWN:
            yield Text(f"  and {len(links) - MOVES_SHOWN} more links", "dim")

    return Drawn(lines)
