"""Report, pictures, live board and commands show what the folds contain, and cope with odd logs."""

from __future__ import annotations

import base64
import io
import itertools
import re
import struct
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from observe_synthetic import Script, story, two_jobs
from outer_synthetic import outer_story
from rich.console import Console
from typer.testing import CliRunner

from chaos_lightning.errors import ConfigurationError, SchedulerUnreachableError
from chaos_lightning.events.events import read_events
from chaos_lightning.events.reader import log_files
from chaos_lightning.machine.units import amount, duration, time_unit
from chaos_lightning.observe import charts, commands, following, report
from chaos_lightning.observe.outer.report import write_reports
from chaos_lightning.observe.render import Dashboard, Row, draw, from_status, from_timeline, with_logs
from chaos_lightning.observe.status import _show
from chaos_lightning.observe.timeline import Timeline


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story().write(tmp_path_factory.mktemp("story"))


@pytest.fixture(scope="module")
def told(logs: Path) -> Timeline:
    return Timeline.of(read_events(logs))


def shape(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


class Page(HTMLParser):
    """Parser of a report's page that checks nesting and collects text, addresses and images."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [str(v) for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


# ------------------------------------------------------------------------------------------------ report


def test_report_is_one_page_that_needs_no_network(logs: Path, tmp_path: Path) -> None:
    written = write_reports(logs, tmp_path / "out", title="a <busy> afternoon")[0]
    page = Page(written.page.read_text())
    assert all(a.startswith("data:image/png;base64,") for a in page.addresses)
    assert len(page.addresses) == len(charts.DRAWERS)
    for address in page.addresses:
        width, height = shape(base64.b64decode(address.partition(",")[2]))
        assert width > 1000
        assert height > 100
    text = page.text
    assert "a <busy> afternoon" in text
    assert "122 steps, 2640 samples, 4 nodes" in text
    assert "violated" not in text
    assert text.count(" ok ") == 5
    for words in ("bravo~1", "sigkill in allreduce", "slot reduced again (43)", "alpha 24 MiB", "charlie~2 (again)"):
        assert words in text, words
    assert not re.search(r"https?://", written.page.read_text())
    assert written.picture is not None
    width, height = shape(written.picture.read_bytes())
    assert width > 1500
    assert height > 1000
    assert written.violations == ()
    assert sorted(p.name for p in log_files(logs)) == sorted(p.name for p in logs.glob("*.jsonl")), "logs untouched"


@pytest.mark.usefixtures("unpictured")
def test_report_of_a_broken_run_says_so_first(tmp_path: Path) -> None:
    run = story()
    lines = run.lines["member-bravo-1.jsonl"]
    next(x for x in lines if x["name"] == "state_hash")["hash"] = "feedfeedfeedfeed"
    written = write_reports(run.write(tmp_path))[0]
    assert written.violations
    text = Page(written.page.read_text()).text
    assert "violated" in text
    assert text.index("feedfeedfeedfeed") < text.index("Pictures")


@pytest.mark.parametrize("steps", [0, 1])
def test_report_of_almost_nothing(tmp_path: Path, steps: int) -> None:
    run = Script()
    if steps:
        run.found(["a"])
        run.steps(steps)
    run.write(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    written = write_reports(tmp_path)[0]
    assert "nobody joined" in Page(written.page.read_text()).text


def test_long_runs_are_drawn_as_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "BAND_FROM", 50)
    run = Script()
    run.found(["a", "b"])
    run.steps(120)
    sheet = charts.figure(10, 3)
    ax = sheet.subplots()
    charts.draw_steps(ax, Timeline.of(read_events(run.write(tmp_path))))
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["step, 5 % to 95 %", "step, median"]


def test_labels_do_not_overlap(told: Timeline) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for name, drawer in charts.DRAWERS.items():
        sheet = charts.figure(11, charts.heights(told)[name])
        ax = sheet.subplots()
        drawer(ax, told)
        canvas = FigureCanvasAgg(sheet)
        canvas.draw()
        title = ax.title.get_window_extent() if ax.title.get_text() else ax._left_title.get_window_extent()
        legend = ax.get_legend()
        if legend is not None:
            assert not title.overlaps(legend.get_window_extent()), name
        ticks = [t.get_window_extent() for t in ax.get_yticklabels() if t.get_text()]
        for one, two in itertools.pairwise(ticks):
            assert not one.overlaps(two), f"{name}: row labels"
        for text in ax.texts:
            box = text.get_window_extent()
            assert box.x1 <= sheet.bbox.x1, f"{name}: {text.get_text()!r} leaves the picture"


@pytest.mark.parametrize("outer", [False, True])
def test_without_matplotlib_the_page_says_how_to_get_pictures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, outer: bool
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    (outer_story() if outer else story()).write(tmp_path)
    done = CliRunner().invoke(app(), ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == str(tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert not list(tmp_path.glob("*.png"))
    for text in (done.stderr, page.text):
        assert 'matplotlib, which is not installed; run: pip install "chaos-lightning[report]"' in text
    assert "Contract" in page.text


# ------------------------------------------------------------------------------------------------ board


def lines_of(board: Dashboard, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(draw(board))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def at(logs: Path, seconds: float, width: int = 100) -> str:
    records = list(read_events(logs))
    start = records[0].t
    return lines_of(from_timeline(Timeline.of(r for r in records if r.t - start <= seconds), start + seconds), width)


def test_board_during_a_join(logs: Path) -> None:
    text = at(logs, 3.95)
    assert re.search(r"0\s+alpha~1\s+training\s+26", text)
    assert re.search(r"3\s+delta~1\s+pulling\s+-", text)
    pull = next(line for line in text.splitlines() if line.startswith("delta~1"))
    assert re.search(r"28.8 of 48 MiB\s+137.1 MiB/s\s+0.14 s left", pull)
    assert "from alpha 14.4 MiB, bravo 8.64 MiB, charlie 5.76 MiB" in text
    assert "view 1.2" in text


def test_board_after_a_death_and_a_freeze(logs: Path) -> None:
    text = at(logs, 8.4)
    assert re.search(r"-\s+bravo~1\s+killed\s+39", text)
    assert re.search(r"charlie~1\s+frozen", text)
    text = at(logs, 9.5)
    assert re.search(r"1\s+delta~1\s+training", text)
    assert re.search(r"-\s+charlie~1\s+died", text)


def test_board_fits_80_columns_and_forgets_the_dead(logs: Path, told: Timeline) -> None:
    text = lines_of(from_timeline(told, told.stop + 60), width=80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "killed" not in text.splitlines()[3:][0]


def test_board_on_40_columns_keeps_who_and_what_whole(logs: Path) -> None:
    text = at(logs, 8.4, width=40)
    assert max(len(line) for line in text.splitlines()) <= 40
    assert re.search(r"bravo~1 +killed +39", text)
    assert re.search(r"charlie~1 +frozen", text)


def test_board_of_a_job_that_stands_still(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(3)
    run.now += 1
    run.say("a~1", "notice", text="1 of at least 2 members: waiting", waiting=True)
    timeline = Timeline.of(read_events(run.write(tmp_path)))
    assert "standing still: 1 of at least 2 members" in lines_of(from_timeline(timeline, run.now + 1))


@pytest.mark.parametrize("told", ["a~1", "b~1"])
def test_samples_a_second_are_counted_and_not_weighed(tmp_path: Path, told: str) -> None:
    """The report counts samples a second from the positions that were used, not from a plain loop's weights, and for a
    member without a log, too.
    """
    run = Script()
    run.jitter = lambda: 0.0  # type: ignore[method-assign]
    run.found(["a", "b"])
    run.steps(5)
    for line in run.lines[run.sources[told]]:
        if line["name"] == "committed":
            line["contributors"] = [[member, 0.5] for member, _ in line["contributors"]]
    timeline = Timeline.of(read_events(run.write(tmp_path)))
    pace = f"{2 * run.quota / run.step_s:.3g}"
    assert ("samples/s", pace) in from_timeline(timeline, run.now).figures
    (tmp_path / run.sources[{"a~1": "b~1", "b~1": "a~1"}[told]]).unlink()
    timeline = Timeline.of(read_events(tmp_path))
    assert ("samples/s", pace) in from_timeline(timeline, run.now).figures


def shared_batch() -> Script:
    """Returns a run in which two members share a batch of fixed size, and get another split while they stay."""
    run = Script()
    for member in ("a~1", "b~1"):
        run.welcome(member, run.process(member[0]), "founder")
    for reason, split in (("founded", "8/2:2x2"), ("samples of a step by measured speed: a~1 8, b~1 0", "8/2:4,0")):
        run.view(["a~1", "b~1"], reason)
        for line in (line for lines in run.lines.values() for line in lines):
            if line["name"] == "view" and line["id"] == run.view_id:
                line["batch"] = split
        for _ in range(3):
            run.slot()
    return run


def test_a_shared_batch_is_shown_with_each_members_share_and_each_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unpictured: None
) -> None:
    run = shared_batch()
    logs = run.write(tmp_path)
    board = from_timeline(Timeline.of(read_events(logs)), run.now)
    assert ("batch", "fixed:8/2") in board.figures
    assert [row.remark for row in board.rows] == ["8 samples", "stands by"]
    page = write_reports(logs)[0].page.read_text()
    assert "batch: samples of each" in page
    for split, why in (("8/2: 4, 4", "founded"), ("8/2: 8, 0", "samples of a step by measured speed: a~1 8, b~1 0")):
        assert [r for r in page.split("<tr>") if f">{split}<" in r and f">{why}<" in r], split
    rows = [{"id": "a~1", "samples": 171}, {"id": "b~1", "samples": 85}]
    _show({"job": "j", "endpoint": "e", "term": 1, "min_nodes": 1, "max_nodes": 4,
           "machine": {"phase": "running", "members": rows, "batch": "fixed:256"}})  # fmt: skip
    said = capsys.readouterr().out
    assert "batch: fixed:256, whoever is there" in said
    assert re.search(r"a~1 +171 *\nb~1 +85 *\n", said)


def test_a_status_takes_what_logs_of_the_same_view_tell_more(told: Timeline) -> None:
    logged = from_timeline(told, told.stop)
    names = [row.name for row in logged.rows if row.rank is not None]
    members = [{"id": name, "host": "box", "step": 7, "loaded": True} for name in [*names, "elsewhere~9"]]
    facts = {"machine": {"phase": "running", "view": logged.view, "members": members}}
    board = with_logs(from_status(facts), logged)
    assert [row.wait_share is None for row in board.rows] == [False] * len(names) + [True]
    assert ("step", "7") in board.figures
    assert dict(logged.figures)["samples/s"] == dict(board.figures)["samples/s"]
    assert board.lines == logged.lines
    other = with_logs(from_status({"machine": {**facts["machine"], "view": "9.9"}}), logged)
    assert not other.lines
    assert "samples/s" not in dict(other.figures)


def test_a_job_that_nobody_holds_says_so() -> None:
    text = lines_of(from_status({"machine": {"phase": "lost", "reason": "all are gone", "view": "1.3"}}))
    assert "standing still: nobody holds the training state any more" in text
    assert "all are gone" in text


def test_board_from_a_scheduler_status() -> None:
    board = from_status(
        {
            "job": "digits",
            "endpoint": "127.0.0.1:29400",
            "term": 1,
            "machine": {
                "phase": "running",
                "view": "1.3",
                "reason": "c~1 joins",
                "members": [
                    {"id": "a~1", "host": "box", "connected": True, "step": 12, "loaded": True, "silent_s": 0.05},
                    {"id": "b~1", "host": "box", "connected": True, "step": 12, "loaded": True, "leaving": "Ctrl+C"},
                    {"id": "c~1", "host": "box", "connected": False, "step": 0, "loaded": False},
                ],
                "others": [{"id": "d~1", "host": "box", "standing": "ready", "progress": "1.0 of 2.0 MiB"}],
            },
        }
    )
    assert [(r.rank, r.state) for r in board.rows] == [(0, "training"), (1, "leaving"), (2, "joining"), (None, "ready")]
    text = lines_of(board)
    assert "job digits at 127.0.0.1:29400" in text
    assert "not connected" in text
    assert "1.0 of 2.0 MiB" in text
    assert lines_of(from_status({})).count("nobody is here yet") == 1


def test_the_status_of_the_real_scheduler_machine_has_a_board() -> None:
    from chaos_lightning.membership.desk import SchedulerPhase
    from chaos_lightning.membership.effects import Chain
    from chaos_lightning.membership.scheduler import SchedulerMachine
    from chaos_lightning.protocol.types import NO_VIEW, Settings

    machine = SchedulerMachine(Settings(), Chain(term=1, highest=NO_VIEW))
    board = from_status({"job": "x", "endpoint": "y", "machine": machine.snapshot()})
    assert ("members", "0") in board.figures
    machine.desk.lost = "all are gone"
    assert machine.snapshot()["phase"] == "lost"
    machine.desk.phase = SchedulerPhase.DEPOSED
    assert machine.snapshot()["phase"] == "deposed", "what came later counts"


def test_markup_in_names_is_only_text() -> None:
    board = Dashboard(
        "t", rows=[Row("[red]x[/red]", 0, "training", 1, 0.1, remark="[b]y")], lines=[(1, "[i]w", "[u]z")]
    )
    text = lines_of(board)
    for words in ("[red]x[/red]", "[b]y", "[i]w", "[u]z"):
        assert words in text


def test_follow_reads_on_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "KEPT_SLOTS", 20)
    board = commands.follow(tmp_path)
    assert board().rows == []
    run = Script()
    run.found(["a", "b"])
    run.steps(100)
    run.write(tmp_path)
    assert ("step", "100") in board().figures
    run.steps(3)
    run.write(tmp_path)
    assert ("step", "103") in board().figures
    kept = next(c.cell_contents for c in board.__closure__ or () if isinstance(c.cell_contents, following.Latest))
    assert len(kept.timeline.slots) <= 41


def test_follow_turns_to_the_next_job_in_the_same_folder(tmp_path: Path) -> None:
    board = commands.follow(tmp_path)
    first, second = two_jobs()
    first.write(tmp_path)
    assert ("step", "12") in board().figures
    second.write(tmp_path)
    shown = board()
    assert ("step", "5") in shown.figures
    assert {row.name for row in shown.rows if row.state == "training"} == {"a~1", "b~1"}


@pytest.mark.usefixtures("unpictured")
def test_report_is_about_the_latest_job_and_says_so(tmp_path: Path) -> None:
    for run in two_jobs():
        run.write(tmp_path)
    written = write_reports(tmp_path)[0]
    assert written.violations == ()
    assert written.summary.startswith("job 2 of 2 in these logs: 5 steps, ")
    assert written.summary in Page(written.page.read_text()).text
    assert write_reports(tmp_path, job=1)[0].summary.startswith("job 1 of 2 in these logs: 12 steps, ")
    with pytest.raises(ConfigurationError, match="expected 1 to 2"):
        write_reports(tmp_path, job=3)


def test_watch_prints_once_without_a_terminal(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands.watch(commands.follow(logs), interval_s=0.01, stop=threading.Event())
    assert "delta~1" in capsys.readouterr().out


def test_an_unreachable_scheduler_is_a_line_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:

    def unreachable(*_: object) -> dict[str, object]:
        raise SchedulerUnreachableError("no scheduler at 127.0.0.1:1")

    monkeypatch.setattr("chaos_lightning.control.requests.fetch_status", unreachable)
    assert "training needs none" in lines_of(commands.ask("127.0.0.1:1")(), width=140)


# ------------------------------------------------------------------------------------------------ commands


def app() -> typer.Typer:
    made = typer.Typer()
    made.command("report")(commands.report)
    made.command("audit")(commands.audit)
    made.command("top")(commands.top)
    return made


@pytest.mark.usefixtures("unpictured")
def test_commands(logs: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app(), ["report", str(logs), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "report.html" in done.output
    assert (tmp_path / "report.png").exists()
    done = runner.invoke(app(), ["audit", str(logs)])
    assert done.exit_code == 0
    assert "HELD: 5 points" in done.output
    done = runner.invoke(app(), ["top", "--logs", str(logs), "--once"])
    assert done.exit_code == 0
    assert "charlie~2" in done.output
    done = runner.invoke(app(), ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert "no event log at" in done.output


def test_audit_command_fails_with_the_contract(tmp_path: Path) -> None:
    run = story()
    del run.lines["member-bravo-1.jsonl"][-1]
    done = CliRunner().invoke(app(), ["audit", str(run.write(tmp_path))])
    assert done.exit_code == 1
    assert "VIOLATED" in done.output
    assert "bravo~1 died without a declared fault" in done.output
    done = CliRunner().invoke(app(), ["audit", str(tmp_path), "--expect", "bravo", "--expect", "charlie"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", ["audit", "report", "top"])
def test_a_folder_without_logs_is_an_error_that_names_it(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").touch()
    for where in (tmp_path, tmp_path / "nowhere"):
        arguments = ["top", "--once", "--logs", str(where)] if command == "top" else [command, str(where)]
        done = CliRunner().invoke(app(), arguments)
        if isinstance(done.exception, ConfigurationError):  # `cli.main` prints it and exits with 2
            assert str(where) in str(done.exception)
            continue
        assert done.exit_code == 2
        assert str(where) in done.output


def test_logs_that_show_nothing_are_no_pass(tmp_path: Path) -> None:
    (tmp_path / "member-a-1.jsonl").touch()
    done = CliRunner().invoke(app(), ["audit", str(tmp_path)])
    assert done.exit_code == 2
    assert "HELD" not in done.output


def test_top_once_fails_without_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:

    def unreachable(*_: object) -> dict[str, object]:
        raise SchedulerUnreachableError("no scheduler at 127.0.0.1:1")

    monkeypatch.setattr("chaos_lightning.control.requests.fetch_status", unreachable)
    done = CliRunner().invoke(app(), ["top", "--once", "--endpoint", "127.0.0.1:1"])
    assert isinstance(done.exception, SchedulerUnreachableError)  # `cli.main` prints it and exits with 1


def test_units() -> None:
    assert [duration(x) for x in (0.0042, 0.5, 119.0, 126.0, 8000.0)] == [
        "4.2 ms",
        "0.5 s",
        "119 s",
        "2.1 min",
        "2.22 h",
    ]
    assert [amount(x) for x in (10, 2048, 3.5 * (1 << 20), 5 << 30)] == ["10 B", "2 KiB", "3.5 MiB", "5 GiB"]
    assert [time_unit(x)[1] for x in (10, 1000, 20000)] == ["s", "min", "h"]


@pytest.mark.usefixtures("unpictured")
def test_long_tables_lose_their_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_ROWS", 10)
    run = Script()
    run.found(["a"])
    run.steps(2)
    for i in range(30):
        run.say("a~1", "notice", text=f"word{i}.")
    page = Page(write_reports(run.write(tmp_path))[0].page.read_text())
    assert "word0." in page.text
    assert "word29." in page.text
    assert "word15." not in page.text
    assert "... 20 more ..." in page.text


def test_names_and_reasons_do_not_command_the_terminal() -> None:
    evil = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\n"
    facts = {
        "job": evil,
        "endpoint": "h:1",
        "term": 1,
        "machine": {
            "phase": evil,
            "view": evil,
            "reason": evil,
            "members": [
                {"id": evil, "standing": evil, "connected": True, "loaded": True, "dead": evil, "leaving": evil}
            ],
            "others": [{"id": evil, "standing": "linking", "connected": True, "loaded": False, "progress": evil}],
        },
    }
    out = io.StringIO()
    Console(file=out, width=200).print(draw(from_status(facts)))
    lines = out.getvalue()
    assert "a\N{REPLACEMENT CHARACTER}]0;owned" in lines
    assert not set(lines) & set("\x1b\x07\x9b\u202e\r")


EVIL = "a<img src=x onerror=alert(1)>&$\\x$[red]\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
"""HTML, a formula that is none, markup, commands to a terminal, another direction of writing."""


@pytest.mark.parametrize("command", ["report", "audit"])
def test_names_and_reasons_do_not_command_who_reads_about_a_run(tmp_path: Path, command: str) -> None:
    run = Script()
    run.found([EVIL, "b"])
    run.steps(3)
    run.join(EVIL + "2")
    run.steps(3)
    run.kill(f"{EVIL}~1")
    run.say("b~1", "notice", text=EVIL)
    run.slot(hashes=True)
    run.say("b~1", "state_hash", seq=run.seq, step=run.step, head=run.head, hash=EVIL)
    logs = run.write(tmp_path)
    given = ["--out", str(tmp_path), "--title", EVIL] if command == "report" else []
    told = CliRunner().invoke(app(), [command, str(logs), *given], catch_exceptions=False)
    assert "\N{REPLACEMENT CHARACTER}[2J" in told.output  # of the violation that the last lines are
    pages = [told.output]
    if command == "report":
        pages.append((tmp_path / "report.html").read_text())
        assert "<img src=x" not in pages[1]
        assert "&lt;img src=x" in pages[1]
    for page in pages:
        assert not set(page) & set("\x1b\x07\x9b\u202e")
