"""Tests the command `python -m lab.simulate`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chaos_lightning.errors import ConfigurationError
from lab.simulate.__main__ import main
from lab.simulate.plans.families import FAMILIES
from lab.simulate.plans.schedulers import FAILING, lost_plan
from lab.simulate.script import parse


def test_seeds_end_with_a_line_of_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "20"]) == 0
    out, err = capsys.readouterr()
    assert re.match(
        r"20 seeds \([1-9]\d* in which a scheduler or its store failed\), 0 violations, ", out.splitlines()[-1]
    )
    assert "20/20 seeds" in err


@pytest.mark.slow
def test_several_processes_do_the_same_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    def counts(*arguments: str) -> str:
        assert main(["--seeds", "40", *arguments]) == 0
        return capsys.readouterr().out.splitlines()[-1].rpartition(", ")[0]

    assert counts("--jobs", "2") == counts()


def test_planted_bug_is_found_and_that_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "50", "--bug", "2-no-ranges"]) == 0
    out = capsys.readouterr().out
    assert "its state differs" in out
    assert out.splitlines()[-1].endswith("; bug 2-no-ranges")


def test_planted_bug_that_does_not_show_is_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0", "--bug", "9-careless"]) == 1
    assert "0 seeds (0 in which a scheduler or its store failed), 0 violations" in capsys.readouterr().out


def test_bugs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-bugs"]) == 0
    assert "protocol.md 4a" in capsys.readouterr().out


def test_scenario_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text("seed 1\nnodes n0 n1\nat 0.2 kill n0\n")
    assert main(["--scenario", str(path)]) == 0
    out = capsys.readouterr().out
    assert "kill n0" in out
    assert out.splitlines()[-1].endswith("all is well")


def test_scenario_of_a_fixed_batch_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text(
        "program batch 12/2\nprogram work_s 0.06\nprogram length 480\nprogram epochs 1\n"
        "nodes n0 n1:fits=4,paces=0.0*3+2.0*1\nat 0.5 freeze n1 for 0.1\n"
    )
    assert main(["--family", "batch", "--scenario", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"samples of a step by measured speed: n\d~1 \d+, n\d~2 \d+", out)
    assert out.splitlines()[-1].endswith("all is well")


def test_seed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tell", "3"]) == 0
    assert "commits 1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes n0\nat 0.2 explode n0", "line 2: no such fault"),
        ("nodes n0\nat 0.2 kill n9", "no node 'n9'"),
        ("nodes n0:colour=3", "host, quota and pace"),
        ("nodes n0\nset colour 3", "no number called 'colour'"),
        ("program batch 12/5\nnodes n0", "line 1: batch '12/5' is no rule"),
        ("seed x\nnodes n0", "line 1"),
        ("fly", "no such line"),
        ("seed 1", "needs nodes"),
    ],
)
def test_senseless_scenario_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse(text)


def test_senseless_scenario_file_gives_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text("fly\n")
    assert main(["--scenario", str(path)]) == 2
    assert main(["--scenario", str(tmp_path / "none.txt")]) == 2
    assert "line 1" in capsys.readouterr().err


def test_a_family_of_plans_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = {name: FAMILIES[name](11) for name in FAMILIES}
    assert drawn["failing"] == FAILING[11 % len(FAILING)](11) != drawn["random"]
    assert lost_plan in FAILING
    assert drawn["lost"] == lost_plan(11)
    assert main(["--seeds", "3", "--family", "failing"]) == 0
    assert main(["--seeds", "2", "--family", "lost"]) == 0
    lost = capsys.readouterr().out.splitlines()[-1]
    assert lost.startswith("2 seeds (2 in which a scheduler or its store failed), 0 violations, ")
    assert main(["--seeds", "0", "--family", "random"]) == 0
    with pytest.raises(SystemExit):
        main(["--family", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
