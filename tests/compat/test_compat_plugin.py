"""Tests the plugin and the runner for Lightning's own tests with chaos, on small tests written in this file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compat_plugin  # noqa: F401 (inner runs import it as well, and forget what they import first)
import compat_run
import pytest

pytest_plugins = ["pytester"]

TESTS = """
    import os

    import pytest
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    QUIET = dict(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False, accelerator="cpu", limit_val_batches=0)

    def test_passes(tmp_path):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
        trainer.fit(BoringModel())
        assert trainer.global_step == 1

    def test_builds_none(tmp_path):
        Trainer(default_root_dir=tmp_path, strategy="ddp", **QUIET)

    def test_is_refused(tmp_path):
        model = BoringModel()
        model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())
        Trainer(default_root_dir=tmp_path, **QUIET).fit(model)

    def test_fails_by_itself(tmp_path):
        Trainer(default_root_dir=tmp_path, **QUIET)
        assert "this" == "that"

    @pytest.mark.parametrize("number", [1, 2])
    def test_looks_at_the_strategy(tmp_path, number):
        assert type(Trainer(default_root_dir=tmp_path, **QUIET).strategy).__name__ == "SingleDeviceStrategy"

    def test_skips_itself(tmp_path):
        Trainer(default_root_dir=tmp_path, **QUIET)
        pytest.skip("no device")
"""


@pytest.mark.slow
def test_what_a_test_leaves_running_holds_nothing_up(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest ends in time although a test has left a process running for minutes, for which Python would wait at
    exit.
    """
    pytester.makepyfile(
        test_tiny="""
        import multiprocessing
        import time

        def test_leaves_a_process():
            multiprocessing.Process(target=time.sleep, args=(600.0,)).start()
        """
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[2]}")
    assert pytester.runpytest_subprocess("-p", "compat_plugin", "-p", "no:cacheprovider", timeout=200.0).ret == 0


def test_tests_train_with_chaos_and_say_how_it_ended(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_tiny=TESTS)
    out = tmp_path / "out"
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pytester.inline_run("-p", "compat_plugin", f"--compat-out={out}", "-p", "no:cacheprovider", "-W", "ignore")
    lines = {line["test"].partition("::")[2]: line for line in map(json.loads, out.read_text().splitlines())}
    assert {name: (line["outcome"], line["built"]) for name, line in lines.items()} == {
        "test_passes": ("passed", 1),
        "test_builds_none": ("passed", 0),
        "test_is_refused": ("failed", 1),
        "test_fails_by_itself": ("failed", 1),
        "test_looks_at_the_strategy[1]": ("failed", 1),
        "test_looks_at_the_strategy[2]": ("failed", 1),
        "test_skips_itself": ("skipped", 1),
    }
    assert "LBFGS" in compat_run.refusal_of(lines["test_is_refused"])
    assert compat_run.refusal_of(lines["test_fails_by_itself"]) == ""


def test_plain_runs_leave_trainers_as_they_are(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_tiny=TESTS)
    only, out = tmp_path / "only", tmp_path / "out"
    only.write_text("test_tiny.py::test_looks_at_the_strategy[2]\ntest_tiny.py::test_fails_by_itself\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    arguments = ("-p", "compat_plugin", "--compat-plain", f"--compat-only={only}", f"--compat-out={out}")
    pytester.inline_run(*arguments, "-p", "no:cacheprovider", "-W", "ignore")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ended = {line["test"].partition("::")[2]: line["outcome"] for line in lines}
    assert ended == {"test_fails_by_itself": "failed", "test_looks_at_the_strategy[2]": "passed"}


# ------------------------------------------------------------------------------------------------ judging


def line(test: str, error: str, *ours: str) -> dict[str, Any]:
    return {**compat_run.failed(test), "ours": list(ours), "errors": [error]}


REASON = compat_run.Reason(kind="different", tests=("a.py::test_known",), error="seven", why="it is seven here")


def test_each_failure_is_refused_plain_explained_or_unexplained() -> None:
    refused = line("a.py::test_refused", "chaos_lightning.errors.UnsupportedError: x:\n- what: why", "UnsupportedError")
    plain = line("a.py::test_plain", "AssertionError: no")
    known = line("a.py::test_known[1]", "AssertionError: seven")
    other = line("a.py::test_known[2]", "AssertionError: eight")
    passed = {**line("a.py::test_fine", ""), "outcome": "passed"}
    again = {plain["test"]: {"outcome": "failed"}, known["test"]: {"outcome": "passed"}}
    verdicts = compat_run.judge([refused, plain, known, other, passed], again, [REASON])
    assert verdicts.refused == {"what: why": [refused]}
    assert verdicts.plain == [plain]
    assert verdicts.explained == {REASON: [known]}
    assert verdicts.unexplained == [other], "an explanation holds for its own error only"
    assert (verdicts.passed, verdicts.built) == (1, 5)


def test_the_document_lists_every_failure(tmp_path: Path) -> None:
    lines = [line("tests_pytorch/a.py::test_known[1]", "seven"), line("tests_pytorch/a.py::test_known[2]", "seven")]
    odd = line("tests_pytorch/b.py::test_odd", "AssertionError: a | b")
    page = tmp_path / "page.md"
    begin, end = compat_run.BEGIN.format("tests", "make compat"), compat_run.END.format("tests")
    page.write_text(f"above\n{begin}\nold\n{end}\nbelow\n")
    text = compat_run.described(compat_run.judge([*lines, odd], {}, [REASON]), ["c.py"], 9)
    compat_run.put(text, "tests", "make compat", page)
    written = page.read_text()
    assert "| it is seven here | `a.py::test_known` (2) |" in written
    assert "| AssertionError: a \\| b | `b.py::test_odd` |" in written
    assert "`c.py`" in written
    assert "old" not in written
    assert written.startswith("above")
    assert written.endswith("below\n")


def test_the_reasons_can_be_read_and_name_each_test_once() -> None:
    reasons = compat_run.read_reasons(compat_run.HERE / "reasons.toml")
    assert reasons
    named = [(test, reason.error) for reason in reasons for test in reason.tests]
    assert len(named) == len(set(named))


@pytest.mark.slow
def test_the_runner_survives_a_test_that_ends_its_process(tmp_path: Path) -> None:
    tests = tmp_path / "lightning" / "tests_pytorch"
    tests.mkdir(parents=True)
    text = "\n".join(row.removeprefix("    ") for row in TESTS.splitlines())
    ends = "def test_ends_the_process(tmp_path):\n    Trainer(default_root_dir=tmp_path, **QUIET)\n    os._exit(7)\n"
    (tests / "test_tiny.py").write_text(f"{text}\n{ends}")
    page, results, reasons = tmp_path / "page.md", tmp_path / "results", tmp_path / "reasons.toml"
    page.write_text(f"{compat_run.BEGIN.format('tests', 'make compat')}\n{compat_run.END.format('tests')}\n")
    reasons.write_text(
        '[[reason]]\nkind = "inapplicable"\nwhy = "asks for a strategy"\nerror = "ChaosStrategy"\n'
        'tests = ["test_tiny.py::test_looks_at_the_strategy[1]"]\n'
    )
    done = subprocess.run(
        [
            *(sys.executable, str(compat_run.HERE / "compat_run.py"), str(tests.parent), "--jobs=1"),
            *(f"--reasons={reasons}", f"--document={page}", f"--results={results}"),
        ],
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 1, "one failure is unexplained"
    written = page.read_text()
    for row in (
        "| passed | 1 |", "| refused by name | 1 |", "| does not apply | 1 |", "| differs, unexplained | 1 |",
        "| fails with Lightning's own strategy as well, here | 2 |", "the process ended with 7",
    ):  # fmt: skip
        assert row in written, (row, written, done.stderr)
    assert len(results.read_text().splitlines()) == 7
