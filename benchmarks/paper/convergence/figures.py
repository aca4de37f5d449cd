"""Makes Figures 11 to 14: how convergence reacts when a node brings its own data, or takes it away.

Theory of operation. Five nodes have data of their own (data.py), most of it of kinds that the others hardly have. For
every curve of a figure a job of real processes is trained by the product (training.py): four nodes all along, five all
along, and one in which the fifth comes (Figs. 11, 13) or goes (Figs. 12, 14) in mid-run. What the curves say is
reckoned in curves.py. A curve that two figures share is trained once in a process.

Figures 11 and 12 train three image classifiers. Figures 13 and 14 train LoRA adapters of a small GPT, whose frozen base
each node has already; how much a join moves is read from the newcomer's event log. That one is also done at the paper's
size: two nodes with GPT-2 small, 475 MiB of frozen weights, and a third one that joins them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.paper.convergence.claims import TITLES, curve_claims, knowledge_claim, lora_claims, transfer_words
from benchmarks.paper.convergence.curves import Change, Curve, Smoothness, gap, level, mean_curve, moved, smoothness
from benchmarks.paper.figure import FigureResult, Scale, canvas, progress

if TYPE_CHECKING:
    from benchmarks.paper.convergence.models import Problem
    from benchmarks.paper.convergence.training import Run

NETS = ("resnet", "alexnet", "vgg")
RATES = {"resnet": 0.01, "alexnet": 0.02, "vgg": 0.02}
"""Learning rates of SGD with momentum 0.9."""
OWN = {"resnet": 0.8, "alexnet": 0.8, "vgg": 0.8, "gpt": 0.95}
"""Which part of a node's samples is of its own kinds; 0.2 would be the same mixture on all nodes."""


# ---------------------------------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class Schedule:
    """Length of a training and times of its measurements, in passes of each node over its own data.

    Attributes:
        passes: of the whole training.
        change: the pass after which the fifth node comes or goes.
        per_pass: measurements per pass.
        after: passes that count as "just after" the change.
        last: passes at the end over which levels are taken.
    """

    passes: int
    change: int
    per_pass: int
    after: float
    last: float


def image_schedule(scale: Scale) -> Schedule:
    return scale.pick(Schedule(8, 4, 3, 2.0, 2.0), Schedule(16, 8, 2, 3.0, 4.0))


def text_schedule(scale: Scale) -> Schedule:
    """Returns the paper's schedule for text, in which a node comes or goes after epoch 3."""
    return Schedule(6, 3, scale.pick(4, 5), 1.0, 1.0)


def seeds(scale: Scale) -> list[int]:
    """Returns one seed for each repetition."""
    return [scale.seed + i for i in range(scale.pick(1, 2))]


@lru_cache(maxsize=16)
def problem_of(kind: str, scale: Scale, seed: int) -> Problem:
    """Returns the data and the recipe for the model `kind`: one of NETS, or "gpt"."""
    from benchmarks.paper.convergence import models

    if kind == "gpt":
        base, _ = pretrained(scale)
        return models.text_problem(
            base,
            models.GPT_SIZES,
            seed,
            per_node=scale.pick(80, 400),
            own=OWN[kind],
            lr=8e-3,
            batch=scale.pick(5, 8),
            tests=150,
            rank=8,
        )
    return models.image_problem(
        kind, seed, per_node=scale.pick(240, 480), own=OWN[kind], lr=RATES[kind], batch=16, tests=scale.pick(500, 1000)
    )


@lru_cache(maxsize=2)
def pretrained(scale: Scale) -> tuple[dict[str, Any], float]:
    """Returns the pre-trained GPT that all nodes start from, and its loss on the prose that it was trained on."""
    from benchmarks.paper.convergence.models import GPT_SIZES, pretrain

    return pretrain(GPT_SIZES, scale.pick(60, 400), scale.seed)


@lru_cache(maxsize=64)
def run_of(kind: str, scale: Scale, seed: int, nodes: int, change: Change) -> Run:
    """Returns the outcome of one training; it is run once in this process and then kept."""
    from benchmarks.paper.convergence.training import train

    problem = problem_of(kind, scale, seed)
    schedule = text_schedule(scale) if kind == "gpt" else image_schedule(scale)
    per_pass = problem.steps_per_pass
    with tempfile.TemporaryDirectory(prefix="chaos-convergence-") as folder:
        return train(
            problem,
            change,
            nodes=nodes,
            change_at=schedule.change * per_pass,
            last=schedule.passes * per_pass,
            every=per_pass // schedule.per_pass,
            folder=Path(folder),
        )


# ---------------------------------------------------------------------------------------------------- one comparison


@dataclass
class Comparison:
    """The three curves of one model: without a change with the nodes before it and after it, and with the change.

    Attributes:
        kind: one of NETS or "gpt".
        change: "out": the fifth node comes; "in": it goes.
        steps_per_pass: optimizer steps per pass over the nodes' own data.
        schedule: how it was trained.
        first: runs without a change, of the nodes that the job begins with.
        second: runs without a change, of those that it ends with.
        changing: runs in which the fifth node comes or goes.
    """

    kind: str
    change: Change
    steps_per_pass: int
    schedule: Schedule
    first: list[Run] = field(default_factory=list)
    second: list[Run] = field(default_factory=list)
    changing: list[Run] = field(default_factory=list)

    @property
    def better(self) -> int:
        return -1 if self.kind == "gpt" else 1

    @property
    def tail(self) -> float:
        """Optimizer step after which the final levels of curves are taken."""
        return (self.schedule.passes - self.schedule.last) * self.steps_per_pass

    def tracks(self) -> float:
        """Returns the largest difference from the curve without a change, before the change, in any repetition."""
        pairs = zip(self.changing, self.first, strict=True)
        return max(gap(c.curve, f.curve, c.changed - 1) for c, f in pairs)

    def identical(self) -> bool:
        """Returns whether, before the change, the learned values are bitwise equal to those of the run without a
        change.
        """
        return all(_same(c, f) for c, f in zip(self.changing, self.first, strict=True))

    def unexplained(self) -> bool:
        """Returns whether some repetition differs before the change, though the scheduler changed no reduction trees in
        it.
        """
        pairs = zip(self.changing, self.first, strict=True)
        return any(not _same(c, f) and not c.rewired and not f.rewired for c, f in pairs)

    def levels(self, newcomers: bool = False) -> tuple[float, float, float]:
        """Returns the final levels of the two curves without a change and of the changing one, as means over
        repetitions.
        """
        runs = (self.first, self.second, self.changing)
        return tuple(level(_mean(r, newcomers), self.tail) for r in runs)  # type: ignore[return-value]

    def moved(self, newcomers: bool = False) -> float:
        """Returns how far the changing curve has moved from the first curve's level (0) to the second's (1) at
        the end.
        """
        means = [_mean(runs, newcomers) for runs in (self.changing, self.first, self.second)]
        return moved(means[0], means[1], means[2], self.tail)

    def smoothness(self) -> Smoothness:
        """Compares the smoothness of runs just after a node comes or goes with that of runs without a change."""
        at = self.schedule.change * self.steps_per_pass
        return smoothness(
            [r.curve for r in self.changing],
            [r.curve for r in (*self.first, *self.second)],
            better=self.better,
            since=at,
            until=at + self.schedule.after * self.steps_per_pass,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the picture's data, and every number that a claim uses."""
        smooth = self.smoothness()
        first, second, changing = self.levels()
        return {
            "kind": self.kind,
            "steps_per_pass": self.steps_per_pass,
            "change_pass": sum(r.changed - 1 for r in self.changing) / len(self.changing) / self.steps_per_pass,
            "changed_at_steps": [r.changed for r in self.changing],
            "curves": {
                name: _drawn(runs)
                for name, runs in (("first", self.first), ("second", self.second), ("changing", self.changing))
            },
            "tracks": self.tracks(),
            "identical": self.identical(),
            "unexplained": self.unexplained(),
            "rewired": [reason for r in (*self.first, *self.changing) for reason in r.rewired],
            "levels": {"first": first, "second": second, "changing": changing},
            "newcomer_levels": dict(zip(("first", "second", "changing"), self.levels(newcomers=True), strict=True)),
            "moved": self.moved(),
            "newcomer_moved": self.moved(newcomers=True),
            "sharpest": smooth.sharpest,
            "usual_sharpest": smooth.usual_sharpest,
            "setback": smooth.setback,
            "usual_setback": smooth.usual_setback,
            "states_equal": all(r.equal for r in (*self.first, *self.second, *self.changing)),
            "transfers": [r.transfer for r in self.changing if r.transfer],
            "seconds": [round(r.seconds, 2) for r in (*self.first, *self.second, *self.changing)],
        }


def _same(changing: Run, first: Run) -> bool:
    before = [step for step in changing.states if step < changing.changed]
    return bool(before) and all(changing.states[s] == first.states.get(s) for s in before)


def _mean(runs: Sequence[Run], newcomers: bool = False) -> Curve:
    return mean_curve([r.newcomers if newcomers else r.curve for r in runs])


def _drawn(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Returns the mean, the least and the greatest value at each step over the repetitions."""
    rows = list(zip(*(r.curve.values for r in runs), strict=True))
    return {
        "steps": [float(s) for s in runs[0].curve.steps],
        "mean": [sum(row) / len(row) for row in rows],
        "low": [min(row) for row in rows],
        "high": [max(row) for row in rows],
        "newcomers": list(_mean(runs, newcomers=True).values),
    }


def compare(
    number: str, kinds: Sequence[str], change: Change, scale: Scale, began: float
) -> tuple[list[Comparison], int]:
    """Trains the runs of a figure: as many repetitions as fit its time budget, at least one.

    Args:
        number: of the figure, for progress.
        kinds: some of NETS, or "gpt".
        change: "out" or "in".
        scale: how large.
        began: when the figure was begun, by `time.monotonic()`.

    Returns:
        One comparison per kind, and the number of repetitions.
    """
    done, longest = 0, 0.0
    found: dict[str, Comparison] = {}
    for seed in seeds(scale):
        started = time.monotonic()
        if done and started - began + longest > scale.budget_s:
            break
        for kind in kinds:
            schedule = text_schedule(scale) if kind == "gpt" else image_schedule(scale)
            problem = problem_of(kind, scale, seed)
            one = found.setdefault(kind, Comparison(kind, change, problem.steps_per_pass, schedule))
            begins = 4 if change == "out" else 5
            for nodes, how, runs in (
                (begins, "", one.first),
                (9 - begins, "", one.second),
                (begins, change, one.changing),
            ):
                run = run_of(kind, scale, seed, nodes, how)
                runs.append(run)
                words = {"": "nobody comes or goes", "out": "a fifth comes", "in": "one goes"}[how]
                progress(
                    number,
                    f"{TITLES[kind]}, seed {seed}, {nodes} nodes, {words}: ends at {run.curve.values[-1]:.2f}"
                    f" ({run.seconds:.1f} s)",
                )
        done += 1
        longest = max(longest, time.monotonic() - started)
    return list(found.values()), done


# ---------------------------------------------------------------------------------------------------- GPT-2 small


def full_size_join(seed: int, *, bare: bool) -> dict[str, Any]:
    """Trains adapters of GPT-2 small on two nodes, lets a third one join, and returns the bytes that its join moved.

    Args:
        seed: of all weights.
        bare: the third node does not have the frozen weights.
    """
    from dataclasses import replace

    import numpy as np

    from benchmarks.paper.convergence import models
    from benchmarks.paper.convergence.data import source_texts, text_blocks
    from benchmarks.paper.convergence.training import train

    blocks = text_blocks(source_texts(), 4, seed, test=False)
    recipe = models.Recipe("gpt", 1e-4, 1, seed, models.GPT2_SMALL, rank=4, adapted=("qkv",), base_seed=seed)
    shares = tuple(blocks.take(np.arange(4) + 4 * n) for n in range(3))
    problem = models.Problem(recipe, shares, blocks, blocks.kinds == 0)
    with tempfile.TemporaryDirectory(prefix="chaos-convergence-") as folder:
        run = train(
            problem,
            "out",
            nodes=2,
            change_at=2,
            last=24,
            every=0,
            folder=Path(folder),
            joiner_recipe=replace(recipe, base_seed=seed + 1) if bare else None,
        )
    return run.transfer | {"equal": run.equal, "seconds": run.seconds, "changed": run.changed}


# ---------------------------------------------------------------------------------------------------- figures


def _how(found: Sequence[Comparison], repetitions: int, what: str, scale: Scale) -> str:
    c = found[0]
    short = "" if repetitions == len(seeds(scale)) else f" (of {len(seeds(scale))}, for lack of time)"
    return (
        f"{what} Real processes on one machine, each with its own data, trained by the product; {c.schedule.passes} "
        f"passes of {c.steps_per_pass} steps, the change after pass {c.schedule.change}; {repetitions} "
        f"seed{'s' if repetitions > 1 else ''}{short}. {OWN[c.kind]:.0%} of a node's samples are of its own kinds, "
        "a fifth of all; the test has all kinds alike."
    )


def _image_figure(number: str, change: Change, scale: Scale) -> FigureResult:
    began, kinds = time.monotonic(), scale.pick(("alexnet",), NETS)
    found, repetitions = compare(number, kinds, change, scale, began)
    rows = [c.as_json() for c in found]
    claims = curve_claims(rows, change)
    if change == "in":
        claims.append(knowledge_claim(rows))
    word = "scale-out" if change == "out" else "scale-in"
    what = "Small convolutional networks on a part of FashionMNIST, scaled down from ResNet101, AlexNet and VGG11."
    return FigureResult(
        number,
        f"The effects of {word} on the convergence of image classifiers",
        _how(found, repetitions, what, scale),
        claims,
        {"change": change, "models": rows},
    )


def _text_figure(
    number: str, change: Change, scale: Scale, began: float, full: dict[str, Any] | None = None
) -> FigureResult:
    progress(number, "pre-training the GPT on prose")
    _, prose = pretrained(scale)
    found, repetitions = compare(number, ["gpt"], change, scale, began)
    rows = [c.as_json() for c in found]
    claims = curve_claims(rows, change)
    if change == "in":
        claims.append(knowledge_claim(rows))
    else:
        claims += lora_claims(rows[0]["transfers"], full)
    word = "scale-out" if change == "out" else "scale-in"
    what = (
        f"LoRA adapters of a GPT of 250,000 parameters, pre-trained on English prose (to {prose:.2f} nats/byte), on "
        "source code; scaled down from GPT-2 small on DailyDialog."
    )
    return FigureResult(
        number,
        f"The effects of {word} on the convergence of GPT fine-tuning with LoRA",
        _how(found, repetitions, what, scale),
        claims,
        {"change": change, "models": rows, "full_size": full},
    )


def fig11(scale: Scale) -> FigureResult:
    """Makes Fig. 11: four nodes train image classifiers, a fifth one joins with its own data."""
    return _image_figure("11", "out", scale)


def fig12(scale: Scale) -> FigureResult:
    """Makes Fig. 12: five nodes train image classifiers, one leaves with its data."""
    return _image_figure("12", "in", scale)


def fig13(scale: Scale) -> FigureResult:
    """Makes Fig. 13: four nodes fine-tune a GPT with LoRA, a fifth one joins with its own data; also the bytes that its
    join moves.
    """
    began, full = time.monotonic(), None
    if not scale.quick:
        full = {}
        for name, bare in (("held", False), ("bare", True)):
            full[name] = full_size_join(scale.seed, bare=bare)
            progress("13", f"GPT-2 small, {name}: {transfer_words(full[name])} ({full[name]['seconds']:.1f} s)")
    return _text_figure("13", "out", scale, began, full)


def fig14(scale: Scale) -> FigureResult:
    """Makes Fig. 14: five nodes fine-tune a GPT with LoRA, one leaves with its data."""
    return _text_figure("14", "in", scale, time.monotonic())


# ---------------------------------------------------------------------------------------------------- pictures


def _plot(result: FigureResult, path: Path) -> None:
    models, out = result.data["models"], result.data["change"] == "out"
    names = {"first": "4 nodes", "second": "5 nodes", "changing": "a fifth comes"}
    if not out:
        names = {"first": "5 nodes", "second": "4 nodes", "changing": "one goes"}
    colours = {"4 nodes": "tab:blue", "5 nodes": "tab:orange"}
    with canvas(path, 1, len(models)) as (_, axes):
        for axis, model in zip(axes, models, strict=True):
            for key in ("first", "second", "changing"):
                curve, colour = model["curves"][key], colours.get(names[key], "tab:green")
                passes = [s / model["steps_per_pass"] for s in curve["steps"]]
                axis.plot(passes, curve["mean"], color=colour, label=names[key], linewidth=1.4)
                axis.fill_between(passes, curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
            axis.axvline(model["change_pass"], color="grey", linestyle="--", linewidth=0.8)
            axis.set_title(TITLES[model["kind"]])
            axis.set_xlabel("passes over the nodes' own data")
            axis.set_ylabel("validation loss, nats/byte" if model["kind"] == "gpt" else "test accuracy, %")
            axis.legend(fontsize="small")


plot_fig11 = plot_fig12 = plot_fig13 = plot_fig14 = _plot
