"""Report, pictures and live board of an outer job show what its logs contain."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from observe_synthetic import Script
from outer_synthetic import NBYTES, T0, OuterScript, begun, one_round, outer_story
from rich.console import Console
from typer.testing import CliRunner

from chaos_lightning.cli import app
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.reader import Logs, read_events
from chaos_lightning.observe import commands
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.outer import charts as outer_charts
from chaos_lightning.observe.outer.board import OuterBoard
from chaos_lightning.observe.outer.fold import Adoption, ClusterLog, InnerSteps, OuterRun
from chaos_lightning.observe.outer.report import outer_summary, write_reports
from chaos_lightning.observe.outer.tables import OuterFacts, lost_in
from chaos_lightning.observe.render import draw
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.outer.rules.types import PushAnswer


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> OuterFacts:
    return facts_of(outer_story(), tmp_path_factory.mktemp("outer"))


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.getfixturevalue("unpictured")
    monkeypatch.setattr(outer_charts, "OUTER_DRAWERS", {})
    monkeypatch.setattr(outer_charts, "outer_overview", lambda facts: b"")


def facts_of(run: OuterScript, where: Path) -> OuterFacts:
    (job,) = fold_jobs(Logs(run.write(where)), Timeline, OuterRun).outer
    return OuterFacts.of(job)


def text_of(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.read_text()).split())


def screen(board: OuterBoard, now: float, width: int = 130) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(draw(board.draw(now, title="logs x")))
    return out.getvalue()


def boarded(run: OuterScript, where: Path) -> OuterBoard:
    board = OuterBoard()
    for record in read_events(run.write(where)):
        board.take(record)
    return board


# ------------------------------------------------------------------------------------------------ tables


def test_rounds_have_their_window_their_staleness_and_their_times(told: OuterFacts) -> None:
    rows = told.versions
    assert [row.kind for row in rows] == ["founding", "round", "round", "round", "rollback", "round", "round"]
    assert [[stale for _, _, stale in row.accepted] for row in rows] == [[0], [0, 0], [0, 0], [1], [], [], [1]]
    assert [row.stands for row in rows] == [True, True, True, False, True, True, True]
    first = rows[1]
    assert first.window_s == pytest.approx(1.05, abs=1e-4), "home's push was staged, then home trained on for a second"
    assert first.computed_s == pytest.approx(0.02, abs=1e-4)
    assert first.durable_s == pytest.approx(0.11, abs=1e-4)
    assert [row.durable_s is not None for row in rows] == [True, True, False, False, True, False, True]


def test_each_cluster_has_its_bytes_its_waits_and_what_became_of_its_pushes(told: OuterFacts) -> None:
    home, near, far = told.clusters
    assert (home.name, home.place, home.steps, home.samples, home.counted) == ("home~1", "home.example", 30, 300, 300)
    assert near.answers == {PushAnswer.ACCEPTED: 2, PushAnswer.REJECTED: 1, PushAnswer.VOID: 1}
    assert (near.pushed, near.fetched, near.waited_s) == (4 * NBYTES, 10 * NBYTES, 1.25)
    assert (far.ended, far.why, far.counted, far.leased, far.held) == (
        pytest.approx(T0 + 7.98),
        "it was silent",
        0,
        120,
        0,
    )
    assert home.progress == (400, 30)
    assert near.loss == pytest.approx(3.0 * 0.98**5)


def test_a_rollback_tells_its_cost(told: OuterFacts) -> None:
    (back,) = told.chain.rollbacks
    assert [str(version)[:2] for version in back.versions] == ["v4"]
    assert lost_in(back) == (40, 0)


def test_an_open_push_is_counted_as_such(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.train("near", 140, 150)
    run.freeze("near")
    assert [row.open for row in facts_of(run, tmp_path).clusters] == [0, 1]


def test_times_that_no_log_has_are_left_out(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.lines = {name: lines for name, lines in run.lines.items() if not name.startswith("follower-f1")}
    run.drop("push_staged")
    rows = facts_of(run, tmp_path).versions
    assert [(row.window_s, row.durable_s is None) for row in rows] == [(None, False), (None, True)]


# ------------------------------------------------------------------------------------------------ report


@pytest.mark.usefixtures("no_pictures")
def test_the_report_says_it_all(tmp_path: Path) -> None:
    (written,) = write_reports(outer_story().write(tmp_path / "logs"), tmp_path / "out", title="a <busy> day")
    assert written.violations == ()
    assert written.page == tmp_path / "out" / "report.html"
    text = text_of(written.page)
    for words in (
        "a &lt;busy&gt; day",
        "5 rounds of 6 pushes, 400 samples, 3 incarnations, 2 followers",
        "versions form one chain 26 entries, 7 versions, in 2 leaders&#x27; logs",
        "home~1 home.example 0.13 s",
        "300 of 300 4 accepted 4 MiB 10 MiB 1.25 s",
        "far~3/1 1.00, 1 stale",
        "(taken back)",
        "near~2/2 void - its base is 9 versions old",
        "near~2/4 rejected v6-",
        "far~3/1: no follower has all of it; it cost 40 samples",
        "epoch 0: 400 of 400 samples counted (whole)",
        "beta:29470 2 6.89 s 16",
        "f1 f1:4000 1 7 20 ms 4",
        "loaded v3-",
    ):
        assert words in text, words


def test_the_pictures_are_drawn(told: OuterFacts, tmp_path: Path) -> None:
    assert outer_charts.outer_overview(told, width=6).startswith(b"\x89PNG")
    nothing = facts_of(begun(), tmp_path)
    nothing.clusters.clear()
    nothing.versions.clear()
    nothing.run.clusters.clear()
    assert outer_charts.outer_picture("loss", nothing).startswith(b"\x89PNG")
    assert outer_charts.outer_overview(nothing, width=6).startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_pictures")
def test_a_violation_is_told_by_the_command(tmp_path: Path) -> None:
    run = outer_story()
    run.change("version_adopted", lambda line: line["version"].startswith("v2"), version="v2-123456")
    done = CliRunner().invoke(app, ["report", str(run.write(tmp_path))])
    assert done.exit_code == 0, done.output
    assert "VIOLATED  contract 10: home~1 adopted v2-123456" in done.output


@pytest.mark.usefixtures("no_pictures")
def test_an_elastic_cluster_gets_a_page_of_its_own(tmp_path: Path) -> None:
    run, inner = outer_story(), Script()
    inner.found(["a", "b"])
    inner.steps(12)
    inner.lines[inner.sources["a~1"]] += [x for x in run.lines.pop(run.member("home")) if x["name"] != "opened"]
    run.write(tmp_path)
    outer, members = write_reports(inner.write(tmp_path))
    assert members.page.name == "report-home.html"
    assert members.summary.startswith("12 steps")
    assert f'<a href="report-home.html">{members.summary}</a>' in outer.page.read_text()


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_without_an_outer_job_gets_the_page_that_it_always_got(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(5)
    (written,) = write_reports(run.write(tmp_path))
    assert written.summary.startswith("5 steps")


@pytest.mark.usefixtures("no_pictures")
def test_a_job_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no outer job 2; expected 1 to 1"):
        write_reports(outer_story().write(tmp_path), job=2)


def test_one_line_tells_of_a_job_without_trouble(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    assert outer_summary(facts_of(run, tmp_path)).startswith("1 rounds of 2 pushes, 100 samples, 2 incarnations")


# ------------------------------------------------------------------------------------------------ board


def test_the_board_shows_clusters_and_followers(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.train("near", 140, 150)
    run.freeze("near")
    run.say(run.file("f1"), "disk_trouble", reason="no space left")
    shown = screen(boarded(run, tmp_path), run.now + 2)
    assert "led from alpha:29470 in term 1" in shown
    assert re.search(r"version v2-\w+ +decided .* ago +durable v1-\w+ +samples 100 +clusters 2", shown)
    assert re.search(r"home~1 +training +8 .* v2-\w+, push 2 accepted, loss 2\.881", shown)
    assert re.search(r"near~2 +training +5 .* v2-\w+, 2 open for 2\.\d+ s", shown)
    assert re.search(r"f1 +waiting .* stands at v2-\w+; disk: no space left", shown)
    assert re.search(r"round +v2-\w+: everybody is in", shown)


def test_who_is_over_goes_from_the_board_after_a_while(tmp_path: Path) -> None:
    board = boarded(outer_story(), tmp_path)
    end = board.run.stop
    assert "far~3" in screen(board, end)
    assert "it was silent" in screen(board, end)
    assert "far~3" not in [row.name for row in board.draw(end + 40, title="logs x").rows]


def test_a_board_of_a_long_run_keeps_the_latest_and_the_totals(tmp_path: Path) -> None:
    board = boarded(outer_story(), tmp_path)
    board.run.prune(3)
    assert len(board.run.entries) == 3
    assert {len(told) for log in board.run.clusters.values() for told in log.told.values()} == {3}
    assert re.search(r"home~1 +left +30 ", screen(board, board.run.stop))


def test_ranks_of_an_elastic_cluster_tell_one_after_the_other() -> None:
    """Only the first rank of an elastic cluster writes the cluster's events, and ranks succeed each other: the events
    of all are added up.
    """
    log = ClusterLog("home~1", T0)
    for rank, t in (("a", 1.0), ("b", 3.0)):
        log.take(rank, InnerSteps(T0 + t, 8, 64, 1 / t))
        log.take(rank, Adoption(T0 + t + 1, f"v{t:g}", False, 8, 0.5, 64, 8))
    assert (log.steps, log.waited_s) == (16, 1.0)
    assert [one.version for one in log.adoptions] == ["v1", "v3"]
    assert [one.loss for one in log.inner] == [1.0, 1 / 3]


def test_another_job_begins_an_empty_board(tmp_path: Path) -> None:
    first, second = outer_story(), begun()
    second.pid = 2
    board = boarded(first, tmp_path / "1")
    for record in read_events(second.write(tmp_path / "2")):
        board.take(record)
    assert sorted(board.run.clusters) == ["home~1", "near~2"]
    assert board.run.entries[-1].position == len(second.entries)


def test_a_leader_that_fell_leaves_the_job_waiting(tmp_path: Path) -> None:
    run = begun()
    run.say(run.leader, "outer_leader_ended", reason="the store is gone", failed=True)
    assert "standing still: no leader: the store is gone" in screen(boarded(run, tmp_path), run.now)


def test_following_a_folder_shows_members_of_elastic_clusters_below(tmp_path: Path) -> None:
    run, inner = begun(), Script()
    inner.found(["a", "b"])
    inner.steps(3)
    inner.write(tmp_path)
    board = commands.follow(run.write(tmp_path))()
    assert [row.name for row in board.rows] == ["home~1", "near~2", "f0", "f1", "a~1", "b~1"]
    (tmp_path / "more.jsonl").write_text(
        json.dumps({"t": run.now, "mono": 1.0, "member": "", "name": "file_damaged", "version": "v1-0"}) + "\n"
    )
    assert commands.follow(tmp_path)().rows
