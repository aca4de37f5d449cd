"""`chaos-lightning plan`: the picture at several widths, the command as users run it, and its errors."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from chaos_lightning.cli import plan_picture as picture
from chaos_lightning.cli.plan_command import lost_devices
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.files import job_of, read_job, to_dict
from chaos_lightning.planning.pipelines.job import JobError, TrainingJob
from chaos_lightning.planning.pipelines.moves import move_list
from chaos_lightning.planning.pipelines.places import SharedFate
from chaos_lightning.planning.pipelines.plan import VACANT, Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import Planner
from chaos_lightning.planning.pipelines.rerouting import reroute

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "examples" / "plans"


def drawn(what: RenderableType, width: int, encoding: str = "utf-8") -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(width=width, file=out, color_system=None, legacy_windows=False).print(what)
    out.seek(0)
    return out.read().splitlines()


def two_by_two(**more: Any) -> tuple[TrainingJob, PipelinePlan, StepEstimate]:
    """Returns a plan of two pipelines with two stages each and 3 and 5 micro-batches: a layer takes 1 s forward and 2 s
    backward, the all-reduce 4 s.
    """
    job = job_of(
        {
            "micro_batches": 8,
            "layers": [{"name": "x", "repeat": 2, "forward_s": 1, "backward_s": 2, "parameter_nbytes": 30,
                        "gradient_nbytes": 40, "optimizer_s": 1}],
            "devices": [{"name": "d", "count": 5, "memory_nbytes": 100}],
            "between_hosts": {"rate_bps": 80},
            "memory": {"flat_buffers": 0},
        }
    )  # fmt: skip
    rows = [Pipeline((PlanStage(f"d{2 * q}", 0, 1), PlanStage(f"d{2 * q + 1}", 1, 2)), m) for q, m in enumerate((5, 3))]
    plan = PipelinePlan(2, tuple(rows), idle=("d4",), **more)
    return job, plan, estimate(job, plan)


def test_boxes_say_device_layers_and_memory() -> None:
    lines = drawn(picture.draw_plan(*two_by_two()), 100)
    assert lines == [
        "pipelines 0, 1 (x 2): 3 to 5 micro-batches each",
        "╭ d0, d2 ────────────────╮  ╭ d1, d3 ────────────────╮",
        "│layer 0                 │ →│layer 1                 │",
        "│█████████████░░░░░░  70%│  │█████████████░░░░░░  70%│",
        "╰────────────────────────╯  ╰────────────────────────╯",
        "idle: d4",
    ]


def test_a_step_on_a_time_line() -> None:
    """In the drawing of a step each character is one second: the 1F1B schedule, then the all-reduce of each layer, then
    the optimizer.
    """
    job, plan, known = two_by_two()
    assert known.step_s == pytest.approx(23)
    lines = drawn(picture.draw_step(job, plan, known), 3 + 23)
    assert lines[:2] == [
        "d0 FF  BBFBBFBBFBB BB====+".replace("F", "▒").replace("B", "█"),
        "d1  FBBFBBFBBFBBFBB====  +".replace("F", "▒").replace("B", "█"),
    ]
    assert lines[2].endswith("0                  23 s")


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("name", ["llama7b", "edge", "llama33b-tp8"])
def test_pictures_keep_to_their_width(width: int, name: str) -> None:
    job = read_job(PLANS / f"{name}.yaml")
    found = Planner(job).first()
    for drawing in (
        picture.draw_plan(job, found.plan, found.estimate),
        picture.draw_step(job, found.plan, found.estimate),
        picture.stage_table(job, found.plan),
        picture.memory_table(job, found.plan, found.estimate),
    ):
        lines = drawn(drawing, width)
        assert max(map(cell_len, lines)) <= width
        named = {name for name in found.plan.stages if any(name in line for line in lines)}
        assert {s.device for kind in picture.kinds(job, found.plan) for s in kind.pipeline.stages} <= named
    for table in (picture.layer_table(job), picture.reduce_table(job, found.estimate)):
        assert max([cell_len(line.rstrip()) for line in drawn(table, width)], default=0) <= width


def test_terminals_without_unicode_get_letters() -> None:
    job, plan, known = two_by_two()
    text = "\n".join(
        [
            *drawn(picture.draw_plan(job, plan, known), 80, "ascii"),
            *drawn(picture.draw_step(job, plan, known), 80, "ascii"),
        ]
    )
    assert text.isascii()
    assert "#####" in text
    assert "BB" in text


def test_large_fleets_show_what_is_alike_once() -> None:
    job = job_of({"micro_batches": 600, "devices": [{"name": "d", "count": 402, "memory_nbytes": 10**6}],
                  "layers": [{"name": "x", "repeat": 30, "forward_s": 1, "backward_s": 2}]})  # fmt: skip
    rows = [
        Pipeline(tuple(PlanStage(f"d{q * 20 + k}", k, k + 1 if k < 19 else 30) for k in range(20)), 30)
        for q in range(20)
    ]
    plan = PipelinePlan(30, tuple(rows), idle=("d400", "d401"))
    known = estimate(job, plan)
    lines = drawn(picture.draw_plan(job, plan, known), 100)
    assert lines[0] == "pipelines 0 to 19 (x 20): 30 micro-batches each"
    assert "╭ d0 +19 ───────╮" in lines[1]
    assert len(lines) < 30
    step = drawn(picture.draw_step(job, plan, known), 100)
    assert "… 4 more stages" in step
    assert len(step) == 16 + 3


def test_a_lost_place_is_seen_and_who_fills_it() -> None:
    job, plan, known = two_by_two()
    vacant = PipelinePlan(
        2,
        (plan.pipelines[0], Pipeline((PlanStage(VACANT, 0, 1), PlanStage("d3", 1, 2)), 3)),
        detours=tuple(Detour(j, 0, 1, "d0") for j in (5, 6, 7)),
    )
    lines = drawn(picture.draw_plan(job, vacant, known), 100)
    assert "╭ lost ──" in "\n".join(lines)
    assert lines[-1] == "d0 also runs layer 0 of 3 rerouted micro-batches"


def test_a_pipeline_that_is_lost_as_a_whole_is_a_blank_row() -> None:
    job, plan, _ = two_by_two()
    left = job.without(["d2", "d3"])
    rerouted = reroute(left, plan, ["d2", "d3"])
    lines = drawn(picture.draw_step(left, rerouted, estimate(left, rerouted)), 60)
    assert [line.split(" ")[0] for line in lines if not line.startswith((" ", "pipeline"))] == [
        "d0",
        "d1",
        "lost",
        "lost",
    ]
    assert "lost" in [line.rstrip() for line in lines]


def test_moves_name_the_busiest_links_and_their_layers() -> None:
    job, plan, _ = two_by_two()
    moves = move_list(job, plan, PipelinePlan(2, (plan.pipelines[0], Pipeline((PlanStage("d4", 0, 2),), 3))))
    lines = drawn(picture.moves_table(moves), 100)
    assert lines[0] == "moves 60 B in 6 s; the busiest source, d0, sends 30 B"
    assert lines[1:] == ["  d0 → d4  30 B, 3 s: layer 0", "  d1 → d4  30 B, 3 s: layer 1"]


def test_layers_that_would_be_lost_with_a_host_are_named() -> None:
    shared = [SharedFate(0, 3, "anna", 0.5), SharedFate(3, 4, "b\x1b", math.inf)]
    assert list(picture.fates(shared)) == [
        "layers 0-2 would be lost with anna; other places help, for 0.5 s a step",
        "layer 3 would be lost with b�; no exchange of two devices helps",
    ]
    assert list(picture.fates([SharedFate(0, 3, "anna", 0.5)] * 10))[-1].startswith("and 2 more groups")


def test_names_from_files_command_no_terminal() -> None:
    job = job_of({"micro_batches": 1, "layers": [{"name": "a\x1b[2J", "forward_s": 1, "backward_s": 1}],
                  "devices": [{"name": "d\x1b[2J", "memory_nbytes": 9}]})  # fmt: skip
    found = Planner(job).first()
    tables = [picture.draw_plan(job, found.plan, found.estimate), picture.layer_table(job)]
    assert not any("\x1b" in line for table in tables for line in drawn(table, 80))


# ------------------------------------------------------------------------------------------------ what is lost


def lost_of(text: str) -> tuple[str, ...]:
    devices = [
        *({"name": f"a{i}", "host": "east", "unit": "pair", "memory_nbytes": 9} for i in range(2)),
        {"name": "b", "count": 3, "per_host": 2, "memory_nbytes": 9},
    ]
    job = job_of({"micro_batches": 5, "layers": [{"name": "x", "forward_s": 1, "backward_s": 1}], "devices": devices})
    return lost_devices(job, Planner(job).first().plan, text)


def test_what_dies_together_is_lost_together() -> None:
    assert lost_of("b1") == ("b1",)
    assert lost_of("a0") == ("a0", "a1")
    assert lost_of("host0, b2") == ("b0", "b1", "b2")
    assert lost_of("1") == ("b2",)
    assert lost_of("3") == ("b0", "b1", "b2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b9", "--lost: 'b9' is no device and no host; expected some of a0, a1, b0, b1, b2, east, host0"),
        ("4", "--lost is 4; expected 1 to 3 of 4 that die by themselves"),
        ("0", "--lost is 0; expected 1 to 3"),
        (",", "--lost is ','; expected names of devices or hosts with commas between, or how many"),
        ("east,host0,host1", "--lost is east,host0,host1: all 5 devices; expected one to be left"),
    ],
)
def test_losses_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(JobError) as refused:
        lost_of(text)
    assert str(refused.value).startswith(words)


# ------------------------------------------------------------------------------------------------ the command


def command(*words: str, code: int = 0, columns: int = 100) -> str:
    """Returns what `chaos-lightning plan` prints when run as a process whose output is a pipe; if it fails, what it
    prints on stderr.
    """
    done = subprocess.run(
        [sys.executable, "-m", "chaos_lightning", "plan", *words], capture_output=True, text=True, timeout=120,
        cwd=ROOT, env=os.environ | {"COLUMNS": str(columns)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_a_plan_and_a_loss_in_text() -> None:
    text = command("examples/plans/llama7b.yaml", "--lost", "npu3", "--explain")
    assert "\x1b" not in text
    for words in (
        "llama7b: 34 layers, 8 devices of 64 GiB, 32 micro-batches a step",
        "lost: npu3",
        "memory at the peak",
    ):
        assert words in text
    assert re.search(r"^\* +(move|keep|fill) ", text, re.MULTILINE)
    after = text[text.index("lost: npu3") :]
    assert "npu4" in after
    assert "╭ npu3" not in after


def test_a_slow_device_is_planned_around() -> None:
    text = command("examples/plans/llama7b.yaml", "--slow", "npu3=0.4")
    assert "slow: npu3 at speed 0.4" in text
    assert "lost:" not in text
    after = text[text.index("slow: npu3") :]
    assert re.search(r"^\* +(move|fill) ", after, re.MULTILINE)
    assert "idle: npu3" in after


def test_a_plan_and_a_loss_for_programs() -> None:
    facts = json.loads(
        command("--model", "gpt:4,256", "--devices", "6", "--lost", "2", "--micro-batches", "9", "--json")
    )
    assert facts["micro_batches"] == 9
    assert facts["exact"] == (facts["gap"] == 0)
    assert 0 <= facts["gap"] < 1
    assert PipelinePlan.from_dict(facts["plan"]).micro_batches == 9
    # Two of those that work: one is idle.
    assert facts["lost"] == ["d3", "d4"]
    # 4 devices at 0.01 per hour, of which 1.6 are lost at once on average.
    assert f"in {1.6 / (4 * 0.01):.3g} hours on average" in facts["decision"]["reason"]
    candidates = facts["decision"]["candidates"]
    assert candidates[facts["decision"]["chosen"]]["value"] == max(c["value"] for c in candidates)
    for candidate in candidates:
        assert not {"d3", "d4"} & set(PipelinePlan.from_dict(candidate["plan"]).devices)
        assert candidate["moves"]["nbytes"] == sum(m[2] - m[1] for m in candidate["moves"]["list"])


def test_what_a_host_takes_along_and_how_good_a_plan_is_are_said_once() -> None:
    text = command("--model", "gpt:6,512", "--devices", "9", "--first")
    facts = json.loads(command("--model", "gpt:6,512", "--devices", "9", "--first", "--json"))
    fields = {"first", "end", "host", "cost_s"}
    assert [set(fate) for fate in facts["shared_fate"]] == [fields] * text.count(" would be lost with ")
    assert text.count("the best") == 1


def test_rates_and_what_they_rest_on_are_told() -> None:
    text = command("examples/plans/llama7b.yaml", columns=200)
    assert re.search(r"samples/s, [\d,]+ tokens/s, MFU \d+%", text)
    assert "assumed: 40% of 313 TFLOP/s reached on a card of speed 1" in text
    facts = json.loads(command("examples/plans/llama7b.yaml", "--json"))
    assert 0 < facts["mfu"] < 0.4
    assert facts["tokens_per_s"] == pytest.approx(4096 * facts["samples_per_s"])


def test_a_second_owner_of_each_layer_is_taken_where_it_is_cheap_and_else_its_price_is_told(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "micro_batches: 60\n"
        "layers: [{name: l, repeat: 12, forward_s: 1, backward_s: 2, gradient_nbytes: 1 GB}]\n"
        "devices: [{name: a100, count: 4, memory_nbytes: 1 TB}]\nbetween_hosts: {rate_bps: 80 Mbps}\n"
    )
    told = json.loads(command(str(job), "--json"))
    assert len(told["plan"]["pipelines"]) == 1
    assert re.match(r"every layer has one owner: any loss loses state; --survive device gives owners", told["price"])
    assert told["plan"]["pipelines"][0]["stages"][0][0].startswith("a100-")
    safe = json.loads(command(str(job), "--survive", "device", "--json"))
    assert len(safe["plan"]["pipelines"]) >= 2
    assert re.match(r"each layer has owners on 2 devices, for [\d.]+% of a step", safe["price"])
    assert json.loads(command(str(job), "--copies", "3", "--json"))["plan"]["pipelines"][2]
    assert json.loads(command(str(job), "--survive", "none", "--json"))["price"] == ""


def test_plans_of_ones_own_are_priced(tmp_path: Path) -> None:
    words = ("--model", "gpt:4,256", "--devices", "4")
    told = json.loads(command(*words, "--json"))
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"plan": told["plan"]}))
    again = json.loads(command(*words, "--plan", str(own), "--json"))
    assert again["step_s"] == told["step_s"]
    assert again["why"] == "the plan of own.json; as given"
    assert "d9" in command(*words, "--plan", str(_with(told["plan"], own, "d0", "d9")), code=2)
    own.write_text("[]")
    assert "is no plan" in command(*words, "--plan", str(own), code=2)
    assert "cannot be read" not in command(*words, "--plan", str(own), code=2)
    assert "--plan" in command(*words, "--plan", str(tmp_path / "none"), code=2)


def _with(plan: dict[str, Any], path: Path, old: str, new: str) -> Path:
    path.write_text(json.dumps(plan).replace(f'"{old}"', f'"{new}"'))
    return path


def test_a_head_that_is_the_embedding_costs_an_exchange() -> None:
    sizes = {"layers": 4, "width": 512, "vocabulary": 50000}
    job = {
        "micro_batches": 8,
        "devices": [{"name": "d", "count": 4, "memory_nbytes": "80 GiB"}],
        "between_hosts": {"rate_bps": "1 Gbps"},
    }
    own, tied = (job_of(job | {"decoder": sizes | {"tied": x}}) for x in (False, True))
    assert job_of(to_dict(tied)) == tied != own
    stages = tuple(PlanStage(f"d{i}", a, b) for i, (a, b) in enumerate([(0, 1), (1, 3), (3, 4), (4, 6)]))
    plan = PipelinePlan(6, (Pipeline(stages, 8),))
    exchange_s = 2 * (1 / 2) * 8 * 512 * 50000 * 4 / 1e9
    longer = estimate(tied, plan).step_s - estimate(own, plan).step_s
    assert longer == pytest.approx(exchange_s, rel=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected the file of a job, or --model gpt:LAYERS,WIDTH"),
        (("a.yaml", "--model", "gpt:1,64"), "expected the file of a job, or --model gpt:LAYERS,WIDTH"),
        (("none.yaml",), "none.yaml: cannot be read"),
        (("--model", "gpt"), "the model is 'gpt'; expected gpt:LAYERS,WIDTH"),
        (("--model", "gpt:2,64", "--devices", "0"), "--devices is 0; expected a finite number at least 1"),
        (("--model", "gpt:2,64", "--micro-batches", "0"), "--micro-batches is 0; expected a finite number at least 1"),
        (("--model", "gpt:2,64", "--rate", "-1"), "--rate is -1.0; expected a finite number at least 0"),
        (("--model", "gpt:2,64", "--transition", "nan"), "--transition is nan; expected a finite number at least 0"),
        (("--model", "gpt:2,64", "--transition", "-5"), "--transition is -5.0; expected a finite number at least 0"),
        (("--model", "gpt:2,64", "--estimator", "paper"), "--estimator is 'paper', an option that was removed"),
        (("--model", "gpt:2,64", "--policy", "x"), "policy 'x' is unknown; expected one of adaptive, reroute"),
        (("examples/plans/llama7b.yaml", "--devices", "1"), "examples/plans/llama7b.yaml: no plan fits 1 devices"),
        (
            ("--model", "gpt:2,64", "--slow", "x=1"),
            "--slow: 'x' is no device that is left; expected NAME=SPEED for some",
        ),
        (("--model", "gpt:2,64", "--lost", "d0", "--slow", "d0=1"), "--slow: 'd0' is no device that is left"),
        (("--model", "gpt:2,64", "--slow", "d0"), "--slow: the speed of d0 is ''; expected a number above 0"),
        (
            ("--model", "gpt:2,64", "--slow", "d0=nan"),
            "--slow: the speed of d0 is nan; expected a finite number above 0",
        ),
        (("--model", "gpt:2,64", "--survive", "x"), "--survive is 'x'; expected one of none, device, host"),
        (("--model", "gpt:2,64", "--copies", "0"), "--copies is 0; expected a finite number at least 1"),
        (("--model", "gpt:2,64", "--lost", "x"), "--lost: 'x' is no device and no host"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    text = command(*words, code=2)
    assert text.startswith(f"error: {said}")
    assert text.count("\n") == 1


def test_the_schema_is_printed() -> None:
    assert json.loads(command("--schema"))["required"] == ["micro_batches", "devices"]


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom chaos_lightning.cli import app\n"
        "app(['plan', 'examples/plans/llama7b.yaml', '--lost', '1', '--json'], standalone_mode=False)\n"
        "heavy = [m for m in ('torch', 'numpy', 'grpc', 'lightning', 'matplotlib', 'scipy') if m in sys.modules]\n"
        "assert heavy == [], heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
