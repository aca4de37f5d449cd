"""Computes the costs of rerouting by the paper's formulas, and by schedules that fill bubbles within the memory limit.

Pipelines have equal stages; a backward unit takes as long as two forward units. A device of the first or of the last
stage dies, and its micro-batches go to the owners of the same layers: spread evenly as in the paper, and as a search
chooses. The first figures bound the search by what a plain greedy schedule reaches with 0, 1, 2 and 4 micro-batches in
flight beyond 1F1B's: room for them shortens steps without an early stage, and does not help where a last one is lost.
Then one to four devices die in one stage, in one pipeline, or each in a stage of its own: where Eq. 12 and 13 of the
paper are too kind (they say less than the schedule takes) or too harsh. Last, backward passes are split as in
zero-bubble schedules and ReCycle: rerouted weight halves fill bubbles. ReCycle's staggered optimizer is left out: it
applies a step before it is validated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.common import Options, Result, run
from benchmarks.paper_equations import eq12, eq13
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.lists import coupled, run_coupled
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.rerouting import reroute
from chaos_lightning.planning.pipelines.schedules import Instruction
from chaos_lightning.planning.pipelines.timing import PipelineTimes, pipeline_timeline

FORWARD_S, BACKWARD_S = 1.0, 2.0
EXTRAS = (0, 1, 2, 4)
SLOWER = 1.03
"""Greatest ratio of the search's step time to that of a plain greedy schedule."""


class Case(NamedTuple):
    """A job's numbers of pipelines, stages, and micro-batches of each pipeline."""

    pipelines: int
    stages: int
    micro_batches: int

    def __str__(self) -> str:
        return f"DP {self.pipelines} PP {self.stages} m {self.micro_batches}"

    @property
    def whole_s(self) -> float:
        """Seconds of a step without a loss by Eq. 9, which is exact for these cases."""
        return (self.stages + self.micro_batches - 1) * (FORWARD_S + BACKWARD_S)


GREEDY = {
    Case(3, 2, 6): ((1.57, 1.48, 1.43, 1.43), 1.43),
    Case(2, 4, 8): ((2.18, 2.18, 1.88, 1.58), 1.73),
    Case(4, 4, 8): ((1.61, 1.33, 1.30, 1.27), 1.27),
    Case(8, 4, 8): ((1.36, 1.21, 1.15, 1.06), 1.18),
}
"""Slowdown of a plain greedy schedule: first stage dead, by what is in flight beyond 1F1B's; last stage dead."""


def by_eq12(case: Case) -> float:
    """Returns the slowdown after one loss by the paper's Eq. 12."""
    return eq12(case.stages, case.micro_batches, case.pipelines, FORWARD_S, BACKWARD_S) / case.whole_s


def by_eq13(case: Case, lost: Sequence[tuple[int, int]]) -> float:
    """Returns the slowdown after several losses, given as (pipeline, stage), by the paper's Eq. 13."""
    gone = [sum(k == stage for _, k in lost) for stage in range(case.stages)]
    return eq13(case.stages, case.micro_batches, case.pipelines, gone, FORWARD_S, BACKWARD_S) / case.whole_s


def build(case: Case) -> tuple[TrainingJob, PipelinePlan]:
    """Returns a job of equal stages with ample memory, and its plan."""
    layers = tuple(
        Layer(name=str(k), forward_s=FORWARD_S, backward_s=BACKWARD_S, activation_nbytes=1) for k in range(case.stages)
    )
    rows = [[_name(q, k) for k in range(case.stages)] for q in range(case.pipelines)]
    job = TrainingJob(
        layers=layers,
        devices=tuple(Device(name=name, memory_nbytes=1 << 30) for row in rows for name in row),
        micro_batches=case.pipelines * case.micro_batches,
        memory=PLAIN_MEMORY,
    )
    pipelines = (
        Pipeline(tuple(PlanStage(name, k, k + 1) for k, name in enumerate(row)), case.micro_batches) for row in rows
    )
    return job, PipelinePlan(case.stages, tuple(pipelines))


def _name(pipeline: int, stage: int) -> str:
    return f"p{pipeline}s{stage}"


def rerouted(
    case: Case, lost: Sequence[tuple[int, int]], extra: int, *, search: bool = True, split: bool = False
) -> float:
    """Returns the slowdown of the computed schedule, with up to `extra` micro-batches in flight beyond those of
    1F1B.
    """
    job, plan = build(case)
    caps = [e for e in EXTRAS if e <= extra]
    left = reroute(job, plan, [_name(*x) for x in lost], search=search, caps=caps)
    _, ran = run_coupled(job, left, coupled(left), caps=caps, split=split)
    return ran.end_s / case.whole_s


def against_greedy(result: Result) -> None:
    """Compares the searched with the greedy schedule after one loss, in the first and in the last stage."""
    for case, (first, last) in GREEDY.items():
        rows = [(0, e, bound) for e, bound in zip(EXTRAS, first, strict=True)] + [(case.stages - 1, 0, last)]
        for stage, extra, bound in rows:
            lost = [(0, stage)]
            even, found = (rerouted(case, lost, extra, search=search) for search in (False, True))
            where = f"{case}, stage {stage} dead, {extra} beyond 1F1B"
            result.details[where] = {"search": found, "even": even, "greedy": bound, "Eq. 12": by_eq12(case)}
            result.add(f"{where}: {found:.3f} / greedy {bound}", found / bound, "ratio", SLOWER)
            result.add(f"{where}: search / even {even:.3f}", found / even, "ratio", 1.0 + 1e-9)
            result.add(f"{where}: schedule / Eq. 12 ({by_eq12(case):.3f})", found / by_eq12(case), "ratio")


def patterns(case: Case) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yields patterns of one to four losses, without those that are fatal."""
    for count in range(1, 5):
        if count < case.pipelines:
            yield "in the first stage", [(q, 0) for q in range(count)]
            yield "in the last stage", [(q, case.stages - 1) for q in range(count)]
        if 1 < count <= case.stages:
            yield "in one pipeline", [(0, k) for k in range(count)]
        if 1 < count <= min(case.pipelines, case.stages):
            yield "in stages and pipelines of their own", [(k, k) for k in range(count)]


def several(result: Result) -> list[tuple[Case, str, int, int, float, float]]:
    """Compares schedules with Eq. 13, with the least and the most micro-batches in flight; adds the worst and the best
    ratio.
    """
    rows = []
    for case in GREEDY:
        for (where, lost), extra in itertools.product(patterns(case), (EXTRAS[0], EXTRAS[-1])):
            found, formula = rerouted(case, lost, extra), by_eq13(case, lost)
            rows.append((case, where, len(lost), extra, found, formula))
            result.details[f"{case}, {len(lost)} lost {where}, {extra} beyond 1F1B"] = [found, formula]
    for extra in (EXTRAS[0], EXTRAS[-1]):
        mine = [row for row in rows if row[3] == extra]
        for what, pick in (("too kind", max), ("too harsh", min)):
            case, where, count, _, found, formula = pick(mine, key=lambda row: row[4] / row[5])
            about = f"{case}, {count} lost {where}: {found:.3f} / {formula:.3f}"
            result.add(f"Eq. 13 most {what} with {extra} beyond 1F1B ({about})", found / formula, "ratio")
        kind = sum(found > formula * SLOWER for *_, found, formula in mine)
        harsh = sum(found * SLOWER < formula for *_, found, formula in mine)
        result.remark(
            f"{extra} beyond 1F1B: Eq. 13 is too kind in {kind} and too harsh in {harsh} of {len(mine)} cases"
        )
    return rows


def zero_bubble_h1(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """Returns the unit lists of ZB-H1 (arXiv 2401.10241, section 2.2), in which weight halves of backward passes fill
    bubbles.

    A stage keeps no more micro-batches in flight than the first stage of 1F1B does, counting one until its weight half
    is done, so memory is that of 1F1B at the first stage.
    """
    lists = []
    for k in range(stages):
        warm = min(stages - k, micro_batches)
        row = [Instruction(k, "F", j) for j in range(warm)]
        forward, weight = warm, 0
        for j in range(micro_batches):
            row.append(Instruction(k, "I", j))
            if j >= k:
                row.append(Instruction(k, "W", weight))
                weight += 1
            if forward < micro_batches:
                row.append(Instruction(k, "F", forward))
                forward += 1
        row.extend(Instruction(k, "W", j) for j in range(weight, micro_batches))
        lists.append(row)
    return lists


def zero_bubble(result: Result) -> None:
    """Adds figures of a zero-bubble schedule, whose backward passes are split in two, with and without a loss of a
    device.
    """
    for case in GREEDY:
        p, m = case.stages, case.micro_batches
        times = PipelineTimes((FORWARD_S,) * p, (BACKWARD_S,) * p, (0.0,) * (p - 1))
        stock = pipeline_timeline(zero_bubble_h1(p, m), times, m).end_s / case.whole_s
        job, plan = build(case)
        ours = run_coupled(job, plan, range(case.pipelines), caps=(0,), split=True)[1].end_s / case.whole_s
        result.add(f"{case}: split, no loss, ours / ZB-H1 {stock:.3f}", ours / stock, "ratio", 1.0 + 1e-9)
        for stage, extra in itertools.product((0, p - 1), (0, 4)):
            whole, split = (rerouted(case, [(0, stage)], extra, split=s) for s in (False, True))
            where = f"{case}, stage {stage} dead, {extra} beyond 1F1B"
            result.details[f"{where}, split"] = {"1F1B": whole, "split": split, "ZB-H1 without loss": stock}
            result.add(f"{where}: split {split:.3f} / whole {whole:.3f} backward passes", split / whole, "ratio")
            result.add(f"{where}: split, against ZB-H1 without a loss", split / stock, "ratio")


def draw(path: str, rows: Sequence[tuple[Case, str, int, int, float, float]]) -> None:
    """Draws the slowdown by the lost stage in the upper row, and by the number of losses, with Eq. 13, in the lower
    one.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(GREEDY), figsize=(16, 8), layout="constrained")
    for case, above, below in zip(GREEDY, *axes, strict=True):
        stages = range(case.stages)
        for extra in EXTRAS:
            found = [rerouted(case, [(0, k)], extra) for k in stages]
            above.plot(stages, found, marker="o", label=f"schedule, {extra} beyond 1F1B")
        above.axhline(by_eq12(case), color="black", linestyle="--", label="Eq. 12")
        above.set(title=str(case), xlabel="stage that is lost", xticks=list(stages), ylabel="step / step without loss")
        _several(below, [row for row in rows if row[0] == case])
    axes[0][0].legend(fontsize=8)
    figure.legend(*axes[1][-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def _several(axis: Any, rows: Sequence[tuple[Case, str, int, int, float, float]]) -> None:
    lines = itertools.groupby(sorted(rows, key=lambda row: (row[1], row[3], row[2])), key=lambda row: (row[1], row[3]))
    colours: dict[str, str] = {}
    for (where, extra), line in lines:
        points = [(count, found / formula) for _, _, count, _, found, formula in line]
        colour = colours.setdefault(where, f"C{len(colours)}")
        style = {"linestyle": "-" if extra == EXTRAS[0] else ":", "color": colour, "marker": "o"}
        axis.plot(*zip(*points, strict=True), label=f"{where}, {extra} beyond", **style)
    axis.axhline(1.0, color="black", linestyle="--")
    axis.set(xlabel="losses", xticks=range(1, 5), ylabel="schedule / Eq. 13: above 1 it is too kind")


def main() -> int:
    parser = Options(__doc__)
    parser.add_argument("--plot", default="", help="draw slowdowns into this file")
    args = parser.parse_args()
    result = Result("reroute_model")
    against_greedy(result)
    rows = several(result)
    zero_bubble(result)
    if args.plot:
        draw(args.plot, rows)
    worst = max(f.value for f in result.figures if "/ greedy" in f.name)
    result.headline.append(f"at most {worst:.3f} of a plain greedy schedule")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
