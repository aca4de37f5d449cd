"""Tests that members join, leave and die, as real processes: all that are in at the end have the same bits."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any

import pytest
import strategy_models as models
import torch
from strategy_job import Job


def same(reports: list[dict[str, Any]], lines: int = 0) -> None:
    """Checks that all members end with the same bits, counters and metrics, and with equal traces since the last one
    joined.

    Args:
        reports: Reports of `strategy_members.member`.
        lines: Compare only so many last lines of the traces (one that came twice has a gap); 0: all.
    """
    first = reports[0]
    for other in reports[1:]:
        assert torch.equal(first["weights"], other["weights"])
        assert all(torch.equal(a, b) for a, b in zip(first["buffers"], other["buffers"], strict=True))
        assert first["scale"] == other["scale"]
        assert (first["step"], first["epoch"]) == (other["step"], other["epoch"])
        own = [line for line in other["trace"] if "starts" not in line]
        theirs = [line for line in first["trace"] if "starts" not in line]
        own = own[-lines:]
        assert own == theirs[-len(own) :]
        assert set(first["metrics"]) == set(other["metrics"])
        for key, value in first["metrics"].items():
            if key.startswith("loss") and not first["synced"]:
                continue
            assert torch.equal(value, other["metrics"][key]), key


@pytest.mark.parametrize("step", [2, 6, 21])
def test_newcomer_has_the_same_counters(job: Job, step: int) -> None:
    """A newcomer joins in the first epoch, at its end, or in the fourth: its counters and callbacks' states are
    those of the founder.
    """
    job.start(
        "a", epochs=6, gates={step: job.gate("a")}, callbacks=("checkpoint", "stopping"), model_args={"sync": True}
    )
    job.harness.wait_step(step)
    job.start("b", epochs=6, callbacks=("checkpoint", "stopping"), model_args={"sync": True})
    job.wait_admitted("b")
    job.open("a")
    a, b = job.finish("a", "b")
    same([a, b])
    assert len(b["trace"]) < len(a["trace"])
    assert a["callbacks"]["EarlyStopping"] == b["callbacks"]["EarlyStopping"]
    assert a["callbacks"]["ModelCheckpoint"] == b["callbacks"]["ModelCheckpoint"]


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("Regression", {"model_args": {"norm": True, "sync": True}, "trainer": {"accumulate_grad_batches": 2}}),
        ("Regression", {"trainer": {"val_check_interval": 0.5, "precision": "bf16-mixed"}, "samples": 48}),
        ("Regression", {"trainer": {"limit_train_batches": 3}, "options": {"overlap": False}, "callbacks": ("ema",)}),
        ("Scheduled", {"model_args": {"kind": "onecycle"}, "trainer": {"gradient_clip_val": 0.1}}),
        ("Scheduled", {"model_args": {"kind": "lambda"}}),
        ("Scheduled", {"model_args": {"kind": "plateau", "sync": True}}),
        ("Regression", {"scaler": True, "trainer": {"gradient_clip_val": 1.0}}),
        ("WithMetrics", {}),
        ("Gan", {}),
        ("AssignsBuffer", {"model_args": {"averaged": ["centre"]}, "trainer": {"accumulate_grad_batches": 2}}),
    ],
    ids=str,
)
def test_three_members_with_uneven_samples(job: Job, model: str, extra: dict[str, Any]) -> None:
    """Three members join one after the other and train 26 samples in batches of 4: the last batches are uneven, some
    members have none, and all end equal.
    """
    spec = {"epochs": 4, "samples": 26, "model": model, **extra}
    start_three(job, spec, first=6)
    reports = job.finish("a", "b", "c")
    same(reports)
    if model == "WithMetrics":
        totals = {epoch: (count, total) for epoch, count, total in reports[0]["epochs"]}
        assert all(line in reports[0]["epochs"] for r in reports[1:] for line in r["epochs"][1:])
        assert totals[3][0] == 26
        assert reports[0]["metrics"]["samples"] == 26


def test_death_of_the_writer(job: Job) -> None:
    """The writer dies: the second member logs and saves from there on, and no committed step is lost."""
    spec = {"epochs": 4, "callbacks": ("steps", "log")}
    job.start("a", gates={2: job.gate("a")}, worlds={2: job.gate("end")}, log_as="one", **spec)
    job.harness.wait_step(2)
    job.start("b", log_as="two", **spec)
    job.wait_admitted("b")
    job.open("a")
    last = job.harness.wait_for("committed", lambda r: r["kind"] == "step", node="b").get("step")
    job.harness.kill("a")
    (b,) = job.finish("b")
    assert b["rank"] == 0
    saved = sorted(int(p.stem.removeprefix("step=")) for p in (job.out / "ckpt").iterdir())
    assert saved == list(range(5, b["step"] + 1, 5))
    logged = logged_steps(job, "one") + logged_steps(job, "two")
    # The dead writer's last steps may be missing in its file: it writes a step once that is stable.
    assert logged == sorted(logged)
    assert len(set(logged)) == len(logged)
    assert set(range(b["step"])) - set(logged) <= {last - 2, last - 1}


@pytest.mark.parametrize(("who", "number"), [("a", signal.SIGTERM), ("b", signal.SIGINT)])
def test_leaving_ends_fit_with_code_zero(job: Job, who: str, number: int) -> None:
    spec = {"epochs": 4, "callbacks": ("checkpoint", "stopping", "log"), "model_args": {"sync": True}}
    job.start("a", gates={2: job.gate("start")}, worlds={2: job.gate("a")}, log_as="a", **spec)
    job.harness.wait_step(2)
    job.start("b", worlds={2: job.gate("b")}, log_as="b", **spec)
    job.wait_admitted("b")
    job.open("start")
    for node in "ab":
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2 and r["kind"] == "step", node=node)
    job.harness.terminate(who, number=number)
    job.harness.wait_for("leave", node=who)
    job.open("a")
    job.open("b")
    a, b = job.finish("a", "b")
    gone, stayed = (a, b) if who == "a" else (b, a)
    assert gone["step"] < stayed["step"]
    assert stayed["epoch"] == 4
    assert stayed["rank"] == 0
    logged = logged_steps(job, "a")
    if who == "a":
        # The step whose header lets the writer go is the next writer's to log.
        assert logged == list(range(gone["step"] - 1))
        assert logged_steps(job, "b") == list(range(gone["step"] - 1, stayed["step"]))
    else:
        assert logged == list(range(stayed["step"]))
        assert not list((job.out / "csv" / "b").rglob("*.csv"))


def logged_steps(job: Job, who: str) -> list[int]:
    """Returns the steps for which this member logged a loss, in order."""
    (file,) = (job.out / "csv" / who).rglob("metrics.csv")
    return [int(line["step"]) for line in csv.DictReader(file.read_text().splitlines()) if line["loss_step"]]


def test_fenced_member_joins_again_in_the_same_fit(job: Job) -> None:
    """A member is frozen until the others go on without it: when it wakes, it drops its state and joins again."""
    spec = {"epochs": 12, "samples": 48, "callbacks": ("stopping",), "patience": 40, "model_args": {"sync": True}}
    job.start("a", gates={2: job.gate("a"), 60: job.gate("a2")}, **spec)
    job.harness.wait_step(2)
    job.start("b", gates={20: job.gate("b")}, **spec)
    job.wait_admitted("b")
    job.open("a")
    job.harness.wait_step(20, node="b")
    job.harness.stop("b")
    job.harness.wait_step(60, node="a")
    job.harness.cont("b")
    job.open("b")
    job.harness.wait_for("rejoin", node="b")
    job.harness.wait_for("view", lambda r: "b~3" in (r.get("joiners") or ()), node="default")
    job.open("a2")
    same(job.finish("a", "b"), lines=36)


def test_whole_job_resumes_with_another_number_of_members(job: Job) -> None:
    """A job of one member is resumed by two in the middle of an epoch: it continues at the same position, and each
    sample counts once.
    """
    one = {"epochs": 2, "samples": 26, "callbacks": ("steps",)}
    job.start("a", **one)
    (a,) = job.finish("a", audit=False)
    assert a["step"] == 14
    job.again(min_nodes=2)
    two = {"epochs": 4, "samples": 26, "ckpt": str(job.out / "ckpt" / "step=10.ckpt")}
    job.start("b", gates={11: job.gate("b")}, **two)
    job.start("c", **two)
    job.harness.wait_step(1, node="b")
    job.open("b")
    reports = job.finish("b", "c", audit=False)
    same(reports)
    rest = torch.cat([x for r in reports for x in r["seen"]])
    second_epoch = torch.cat(a["seen"])[26:]
    assert rest.shape[0] == 26 - 12 + 2 * 26
    assert as_set(second_epoch[12:]) <= as_set(rest)
    assert reports[0]["epoch"] == 4


def as_set(samples: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in samples.tolist()}


@pytest.mark.parametrize("stream", [False, True], ids=["map", "iterable"])
def test_each_with_data_of_its_own(job: Job, stream: bool) -> None:
    """Members have data of their own, of different sizes: an epoch ends when all are used, and a member that
    finishes sooner has no samples until then.
    """
    spec = {"epochs": 3, "data": "local", "stream": stream, "model_args": {"sync": True}, "callbacks": ("stopping",)}
    job.start("a", samples=20, data_seed=1, gates={2: job.gate("a")}, **spec)
    job.harness.wait_step(2)
    job.start("b", samples=34, data_seed=2, **spec)
    job.wait_admitted("b")
    job.open("a")
    a, b = job.finish("a", "b")
    same([a, b])
    seen = [sum(len(x) for x in r["seen"]) for r in (a, b)]
    assert seen == [3 * 20, 3 * 34]


def expected_validation(report: dict[str, Any], samples: int) -> None:
    _, y = models.data(samples).tensors
    metrics = report["metrics"]
    assert metrics["val_count"] == samples
    assert metrics["val_max_epoch"] == y.max()
    assert metrics["val_loss"] == pytest.approx(report["val_loss"], rel=1e-5)


@pytest.mark.parametrize("loaders", [1, 2])
def test_validation_is_divided(job: Job, loaders: int) -> None:
    """Members divide 22 validation samples in batches of 4: each is evaluated once, and every member has the values
    over all.
    """
    spec = {"epochs": 2, "samples": 48, "model": "Counting", "val_samples": 22, "val_loaders": loaders}
    start_three(job, spec)
    reports = job.finish("a", "b", "c")
    if loaders == 1:
        same(reports)
        for report in reports:
            expected_validation(report, 22)
    else:
        for report in reports:
            assert report["metrics"]["val_count/dataloader_idx_0"] == 22
            assert report["metrics"]["val_count/dataloader_idx_1"] == 22
    assert sum(r["validated"] for r in reports) == 6 * loaders * 2


def start_two(job: Job, spec: dict[str, Any], first: int, of_a: dict[str, Any], of_b: dict[str, Any]) -> None:
    """Starts member a, which waits after step `first` until b is admitted; `of_a` and `of_b` are settings of one
    member only.
    """
    job.start("a", gates={first: job.gate("first")}, **of_a, **spec)
    job.harness.wait_step(first)
    job.start("b", **of_b, **spec)
    job.wait_admitted("b")
    job.open("first")


def start_three(
    job: Job, spec: dict[str, Any], first: int = 1, of_b: dict[str, Any] | None = None, **of_a: Any
) -> None:
    """Starts member a, then b after step `first`, then c; `of_a` and `of_b` are settings of one member only."""
    start_two(job, spec, first, {"worlds": {2: job.gate("two")}, **of_a}, of_b or {})
    job.harness.wait_for("joined", node="b")
    job.start("c", **spec)
    job.wait_admitted("c")
    job.open("two")


def start_validating(job: Job, spec: dict[str, Any]) -> int:
    """Starts members a and b; b waits at gate "b" within its first validation. Returns the step before that
    validation.
    """
    start_two(job, spec, 1, {}, {"val_gate": job.gate("b")})
    begun = job.harness.wait_for("committed", lambda r: "validation_step" in str(r.get("call")), node="b")
    return int(begun["step"])


def test_death_during_validation(job: Job) -> None:
    """A member dies during validation: the others evaluate all its batches again."""
    spec = {"epochs": 2, "samples": 48, "model": "Counting", "val_samples": 22}
    start_validating(job, spec)
    job.harness.kill("b")
    (a,) = job.finish("a")
    expected_validation(a, 22)
    assert a["validated"] == 3 + 3 + 6


@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_first_value_is_logged_while_a_member_has_no_samples(job: Job, manual: bool, accumulate: int) -> None:
    """A value is first logged in a batch in which the other of two members has no samples: both end with the same
    logged values.
    """
    spec = {
        "epochs": 4, "samples": 9, "val_samples": 20, "model": "LogsOnce", "model_args": {"manual": manual},
        "trainer": {"accumulate_grad_batches": accumulate},
    }  # fmt: skip
    start_two(job, spec, 1, {}, {})
    a, b = job.finish("a", "b")
    same([a, b])
    assert a["logged"]
    assert a["logged"][-len(b["logged"]) :] == b["logged"]


def test_validation_comes_when_the_writers_clock_says_so(job: Job) -> None:
    """With a time as validation interval the writer's clock decides for all: the other member's clock would validate
    after every step.
    """
    settings = {"val_check_interval": {"hours": 1}, "check_val_every_n_epoch": None}
    start_two(job, {"epochs": 4, "model": "OwnClocks", "trainer": settings}, 1, {}, {})
    reports = job.finish("a", "b")
    same(reports)
    for report in reports:
        steps = [line.split(":")[0] for line in report["trace"] if line.startswith("validation")]
        assert steps == ["validation at step 3", "validation at step 7"]


def test_one_of_several_processes_writes_what_it_evaluates_before_fit(job: Job) -> None:
    """Three processes run one script that validates, tests and predicts before it trains, one of them late: each
    evaluates all data, and only one logs.
    """
    job.fresh(min_nodes=2)
    spec = {
        "samples": 48, "model": "Evaluated", "val_samples": 22, "evaluates": True, "min_nodes": 2,
        "callbacks": ("log",),
    }  # fmt: skip
    job.start("a", gates={2: job.gate("a")}, log_as="a", **spec)
    job.harness.wait_for("notice", lambda r: "min_nodes=2" in str(r.get("text")), node="a")
    job.start("b", log_as="b", **spec)
    job.harness.wait_step(2, node="a")
    job.start("c", log_as="c", **spec)
    job.wait_admitted("c")
    job.open("a")
    reports = job.finish("a", "b", "c")
    assert [r["evaluated"]["who"] for r in reports] == [(0, 2, True), (1, 2, False), (2, 3, False)]
    for report in reports:
        evaluated = report["evaluated"]
        assert evaluated["validate"]["val_count"] == evaluated["test"]["test_count"] == evaluated["predicted"] == 22
    assert [(job.out / "csv" / name).exists() for name in "abc"] == [True, False, False]


def folders(job: Job, *reports: dict[str, Any]) -> set[str]:
    """Returns the names of the members whose folder `trainer.log_dir` was in training steps; fails if members
    disagree at a step.
    """
    told: dict[int, set[str]] = {}
    for report in reports:
        for step, folder in report["logged"]:
            told.setdefault(step, set()).add(str(Path(folder).relative_to(job.out / "csv")).partition("/")[0])
    assert {len(names) for names in told.values()} == {1}, told
    return set.union(*told.values())


def test_founders_are_told_where_the_writer_logs(job: Job) -> None:
    job.fresh(min_nodes=2)
    for name in "ab":
        job.start(name, log_as=name, model="AsksForItsFolder", callbacks=("log",), min_nodes=2)
    a, b = job.finish("a", "b")
    assert folders(job, a, b) == {"a" if a["rank"] == 0 else "b"}


@pytest.mark.slow
@pytest.mark.parametrize("join_by", ["pause", pytest.param("replay", marks=pytest.mark.slow)])
def test_newcomers_and_heirs_are_told_where_the_writer_logs(job: Job, join_by: str) -> None:
    """Each member logs to its own folder; members b and c join, then the writer dies: all members see the present
    writer's folder.
    """
    spec = {"epochs": 40, "samples": 48, "model": "AsksForItsFolder", "callbacks": ("log",)}
    job.start("a", log_as="a", gates={2: job.gate("start")}, worlds={2: job.gate("two"), 3: job.gate("a")}, **spec)
    job.harness.wait_step(2)
    job.start("b", log_as="b", **spec)
    job.wait_admitted("b")
    job.open("start")
    admitted = job.harness.wait_for("joined", node="b")
    job.start("c", log_as="c", options={"join_by": join_by}, **spec)
    job.harness.wait_for("way_in", lambda r: r.member.startswith("c~"), after=admitted)
    job.open("two")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3 and r["kind"] == "step", node="c")
    job.harness.kill("a")
    b, c = job.finish("b", "c")
    assert folders(job, b, c) == {"a", "b"}


def test_no_thread_outlives_fit(job: Job) -> None:
    """After fit no thread is left, even if the thread that accepts links is slow to end."""
    job.start("a", epochs=1, slow_acceptor=True)
    (a,) = job.finish("a")
    assert a["threads"] == []


@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside the scheduler", "elsewhere"])
def test_founders_have_one_rank_zero_and_judge_all_data(job: Job, elsewhere: bool) -> None:
    """Two founders shard validation by rank before the first batch: one is rank 0 of 2, the other rank 1, and
    together they evaluate all data. A third member joins later.
    """
    job.fresh(min_nodes=2)
    spec = {
        "epochs": 3, "samples": 48, "model": "Counting", "val_samples": 22, "by_rank": True, "min_nodes": 2,
        "elsewhere": elsewhere,
    }  # fmt: skip
    job.start("a", gates={2: job.gate("a")}, **spec)
    job.start("b", **spec)
    job.harness.wait_step(2, node="a")
    job.start("c", **spec)
    job.wait_admitted("c")
    job.open("a")
    a, b, c = job.finish("a", "b", "c")
    assert {r for report in (a, b) for r in report["setup_ranks"]} == {(0, 2), (1, 2)}
    assert sorted([a["zero"], b["zero"]]) == [[], ["setup", "on_fit_start", "on_train_start"]]
    assert (c["setup_ranks"], c["zero"]) == ({(2, 3)}, [])
    for report in (a, b, c):
        expected_validation(report, 22)
